"""Copies a loaded state into the loop's arrays by several threads at once.

The arrays of a state lie in the memory of this process, and so does what they are loaded from. A framework copies them one
after the other, with as many threads as the loop lets it have: one, under torchrun. New memory takes several times as long,
for each of its pages is made at the first write.
"""

from __future__ import annotations

from ftsupervise.checkpoints.digest import in_parallel

LARGE = 1 << 20  # bytes: a smaller array is copied by its framework
_PIECE = 8 << 20  # bytes that are copied at once


class Copies:
    """Copies that are still to be made. ``run`` makes them; until then the targets hold what they held."""

    def __init__(self) -> None:
        self._pieces: list[tuple[int, int, int]] = []
        self._arrays: list[object] = []

    def add(self, target: int, source: int, size: int, *arrays: object) -> None:
        """Copy ``size`` bytes, from one address to another. ``arrays``: those that they belong to, held until ``run``."""
        self._arrays += arrays
        self._pieces += [(target + at, source + at, min(_PIECE, size - at)) for at in range(0, size, _PIECE)]

    def run(self) -> None:
        import ctypes

        pieces, self._pieces = self._pieces, []
        for _ in in_parallel(lambda one: ctypes.memmove(*one), pieces):  # lets go of the interpreter's lock
            pass
        self._arrays.clear()
