"""What a test needs that not every environment has."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: make test-torch")
# looked for and not imported: every worker would load it to learn which tests there are
sklearn = pytest.mark.skipif(
    find_spec("sklearn") is None, reason="scikit-learn is not installed: pip install -e '.[demo]'"
)
