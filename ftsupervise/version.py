"""The version of this package, as pyproject.toml has it. It is a word of its own: no room imports the package around it."""

from __future__ import annotations

VERSION = "0.1.0"
