"""Copies a loaded state into the loop's arrays by several threads at once.

The arrays of a state lie in the memory of this process, or in a file of which each block is compared as it is read
(``compared_file.py``). A framework copies them one after the other, with as many threads as the loop lets it have: one, under
torchrun. New memory takes several times as long, for each of its pages is made at the first write.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable, Sequence

from ftsupervise.checkpoints.compared_file import ComparedFile, FilePart
from ftsupervise.checkpoints.digest import in_parallel

LARGE = 1 << 20  # bytes: a smaller array is copied by its framework
_PIECE = 8 << 20  # bytes that are copied at once

Range = tuple[int, int]  # an address, and how many bytes


class Copies:
    """Copies that are still to be made. ``run`` makes them; until then the targets hold what they held. ``files``: where the
    sources lie, if not in memory that is right already."""

    def __init__(self, files: Sequence[ComparedFile] = ()) -> None:
        self._files = files
        self._pieces: list[FilePart] = []
        self._later: list[tuple[Range, Callable[[], object]]] = []
        self._arrays: list[object] = []

    def add(self, target: int, source: int, size: int, *arrays: object) -> None:
        """Copy ``size`` bytes, from one address to another. ``arrays``: those that they belong to, held until ``run``."""
        self._arrays += arrays
        self._pieces.append(FilePart(target, source, size))

    def later(self, source: int, size: int, copy: Callable[[], object]) -> None:
        """Let ``copy`` take the bytes at ``source`` itself, in its turn."""
        self._later.append(((source, size), copy))

    def hold(self, sources: Iterable[Range]) -> None:
        """Make small arrays usable where they lie, now. Raises as ``run`` does."""
        for file, found in self._by_file(sources):
            file.hold(found)

    def use(self, sources: Iterable[Range]) -> None:
        """Make large arrays usable where they lie, now. Raises as ``run`` does."""
        for file, found in self._by_file(sources):
            file.compare(found)

    def run(self) -> None:
        """Raises what reading the files raises (``ComparedFile``), and what the copies of ``later`` raise."""
        pieces, self._pieces = self._pieces, []
        later, self._later = self._later, []
        self.use(source for source, _ in later)
        left = pieces
        for file in self._files:
            mine = [one for one in left if file.owns(one.at)]
            left = [one for one in left if not file.owns(one.at)]
            file.copy(one._replace(at=one.at - file.address) for one in mine)
        parts = [
            (target + at, source + at, min(_PIECE, size - at))
            for target, source, size in left
            for at in range(0, size, _PIECE)
        ]
        for _ in in_parallel(lambda one: ctypes.memmove(*one), parts):  # lets go of the interpreter's lock
            pass
        for _, copy in later:
            copy()
        self._arrays.clear()

    def _by_file(self, sources: Iterable[Range]) -> Iterable[tuple[ComparedFile, list[Range]]]:
        wanted = list(sources) if self._files else []
        for file in self._files:
            yield (
                file,
                [(at - file.address, at - file.address + size) for at, size in wanted if size and file.owns(at)],
            )
