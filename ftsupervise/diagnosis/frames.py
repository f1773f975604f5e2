"""The frame of a stack that a person looks at first: the innermost one that is not a library's."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache

from ftsupervise.printable import printable

_LIBRARY = re.compile(r"/(?:site|dist)-packages/|/lib/python3|<frozen ")
_TEXT = 200  # characters
Frame = tuple[str, str, str]  # path, line, function


def first_to_look_at(frames: Iterable[Frame]) -> str:
    """Return it as "train.py:42 step", of ``frames`` innermost first; the innermost one where all are a library's, "" where
    there is none."""
    first = None
    for one in frames:
        first = first or one
        if not _is_library(one[0]):
            return _words(one)
    return _words(first) if first is not None else ""


@lru_cache(maxsize=4096)
def _is_library(path: str) -> bool:
    return _LIBRARY.search(path) is not None


@lru_cache(maxsize=4096)
def _words(frame: Frame) -> str:
    path, line, name = frame
    return printable(f"{path.rpartition('/')[2]}:{line} {name}".rstrip(), _TEXT)
