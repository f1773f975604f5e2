"""The one place through which all words of a command go out: nothing but printable text, line feeds, tabs and our colours.

Texts of others are made harmless where they enter (``reading.as_text``); this catches what came in by another way, such as a
file's name in an error of the operating system.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO, cast

from ftsupervise.printable import printable_lines

_COLOUR = re.compile(r"(\x1b\[[0-9;]{0,12}m)")  # what click.style makes


class Rim:
    """A text stream that cleans what is written to it. All else is the stream's own."""

    def __init__(self, stream: TextIO, colours: bool) -> None:
        self._stream, self._colours = stream, colours

    def write(self, text: str) -> int:
        if not (text.isascii() and text.isprintable()):
            coloured = _COLOUR.split(text) if self._colours else [text]
            text = "".join(part if index % 2 else printable_lines(part) for index, part in enumerate(coloured))
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def rim(*, colours: bool) -> Iterator[None]:
    """Both streams of this process, for as long as a command runs. A stream that was closed is left alone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and cast("TextIO", Rim(stream, colours)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
