"""The page of an attempt in whose output no step was found: the follower of its log writes it, and takes it away again.

It is a file of its own because the follower is a process of its own. Standard library only: ``status`` reads it.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.records import as_whole, read_json, write_json

_PAGE = "unread.json"
ADVICE = "launch.heartbeat says which number it is"


class LinesWithoutStep(NamedTuple):
    """An output without a step. ``asked``: a person's own regular expression was looked for."""

    lines: int
    asked: bool = False

    def words(self) -> str:
        """Return it as half a sentence, with what helps."""
        lines = f"{self.lines:,} line{'s' if self.lines != 1 else ''}"
        if self.asked:
            return f"no step found in {lines}: none fits launch.heartbeat.log"
        return f"no step found in {lines}: {ADVICE}"


def write_unread(folder: Path, found: LinesWithoutStep) -> None:
    """Write the page of the attempt in ``folder``. Raises OSError."""
    write_json(folder / _PAGE, {"lines": found.lines, "asked": found.asked}, sync=False)


def forget_unread(folder: Path) -> None:
    """Remove the page: a step was found. Raises OSError."""
    (folder / _PAGE).unlink(missing_ok=True)


def read_unread(folder: Path) -> LinesWithoutStep | None:
    """Return the page; None where there is none, or it cannot be read."""
    if not os.path.lexists(folder / _PAGE):
        return None
    try:
        page = read_json(folder / _PAGE) or {}
        lines = as_whole(page.get("lines"))
    except (OSError, ValueError):
        return None
    return None if lines is None else LinesWithoutStep(lines, page.get("asked") is True)
