"""Import the framework that an integration is for, or say in one sentence that it is not installed."""

from __future__ import annotations

import sys
from importlib import import_module
from typing import Any


def needed(*names: str, package: str) -> Any:
    """Return the first of the modules ``names`` that the program has loaded, or else the first that is installed.

    Raises ImportError when none is: ``package`` is the name that pip installs.
    """
    for name in sorted(names, key=lambda one: one not in sys.modules):
        try:
            return import_module(name)
        except ModuleNotFoundError as error:
            if error.name not in (name, name.partition(".")[0]):  # it is there, and lacks something itself
                raise
    raise ImportError(
        f"this integration of ftsupervise needs {package}, which is not installed here: pip install {package}"
    )
