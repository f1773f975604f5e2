"""The frame of a stack that a person looks at first: the innermost one that is not a library's."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ftsupervise.printable import printable

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|<frozen ")
_TEXT = 200  # characters
Frame = tuple[str, str, str]  # path, line, function


def first_to_look_at(frames: Iterable[Frame]) -> str:
    """Return it as "train.py:42 step", of ``frames`` innermost first; the innermost one where all are a library's, "" where
    there is none."""
    every = list(frames)
    for path, line, name in [one for one in every if not _LIBRARY.search(one[0])] or every:
        return printable(f"{path.rpartition('/')[2]}:{line} {name}".rstrip(), _TEXT)
    return ""
