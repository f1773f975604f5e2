"""A real Python 3.9, where this machine has one: on the path, or where pyenv and uv keep theirs."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

_ASK = "import sys; print(*sys.version_info[:2])"


def python39() -> str:
    """Return its path. Skips the test where there is none."""
    for python in _candidates():
        try:
            done = subprocess.run([python, "-Ic", _ASK], capture_output=True, text=True, timeout=60)
        except OSError:
            continue
        if done.stdout.split() == ["3", "9"]:
            return python
    pytest.skip("no Python 3.9 on this machine: $FTSUPERVISE_TEST_PYTHON39 names one")


def pythons_before_39() -> list[str]:
    """Return those that pyenv has of 3.6, 3.7 and 3.8."""
    return sorted(map(str, _home().glob(".pyenv/versions/3.[678].*/bin/python")))


def _home() -> Path:
    return Path(pwd.getpwuid(os.geteuid()).pw_dir)  # $HOME is a test's own


def _candidates() -> Iterator[str]:
    yield from filter(None, (os.environ.get("FTSUPERVISE_TEST_PYTHON39"), shutil.which("python3.9")))
    home = _home()
    for pattern in (".pyenv/versions/3.9*/bin/python3.9", ".local/share/uv/python/cpython-3.9*/bin/python3.9"):
        yield from map(str, sorted(home.glob(pattern)))
