"""What a test needs that not every environment has."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

torchft = pytest.mark.skipif(find_spec("torchft") is None, reason="torchft is not installed: make test-torch")
