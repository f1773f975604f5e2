"""The generations of snapshots that no rank overwrites: the one that every buddy holds, and the one that is being copied.

A buddy copy takes seconds where snapshots come many times a second. Without a word to the ranks the slot that is being copied
would be overwritten on the way, and after the loss of a node the buddy would hold a step that nobody else holds any more. So
the copier writes two numbers into the node's folder, and a rank that is about to write a snapshot reads them:

    held    the step that every buddy holds; -1 where there is none
    wanted  the first snapshot of this step or a later one is copied next; -1 where nothing is copied

Both are functions of the step alone, so the ranks of all nodes keep the same generations. Two more slots take turns, so that a
rank that is killed while it writes has a whole newer one: SLOTS in all, and two where nothing is copied.
"""

from __future__ import annotations

import mmap
import os
import struct
from collections.abc import Sequence
from typing import NamedTuple

SLOTS = 4  # held by every buddy, being copied, and two that take turns
SLOTS_ALONE = 2  # where nothing is copied
NAME = "kept"
_PAGE = struct.Struct("<qq")


class Pins(NamedTuple):
    held: int = -1
    wanted: int = -1


def slot_to_write(steps: Sequence[int], pins: Pins) -> int:
    """Return the slot that the next snapshot overwrites. ``steps``: the step of each slot, -1 for an empty or torn one.
    Pure.

    It is the oldest one that is not kept; never the newest of all. With fewer slots than there are to keep, the oldest
    kept one goes.
    """
    kept = keeps(steps, pins)
    newest = max(steps)
    order = sorted(range(len(steps)), key=lambda slot: (steps[slot] in kept and steps[slot] >= 0, steps[slot]))
    return next((slot for slot in order if steps[slot] != newest or newest < 0), order[0])


def keeps(steps: Sequence[int], pins: Pins) -> frozenset[int]:
    """Return those of ``steps`` that are not overwritten. Pure."""
    wanted = min((step for step in steps if pins.wanted >= 0 and step >= pins.wanted), default=-1)
    return frozenset(step for step in (pins.held, wanted) if step >= 0 and step in steps)


class PinsPage:
    """The two numbers in the node's folder ``place``: each is one aligned word, written by the copier alone."""

    def __init__(self, place: str, *, write: bool = False) -> None:
        """Open the page. Raises OSError: FileNotFoundError for a reader before there is a copier."""
        flags = (os.O_RDWR | os.O_CREAT if write else os.O_RDONLY) | os.O_NOFOLLOW | os.O_CLOEXEC
        fd = os.open(f"{place}/{NAME}", flags, 0o600)
        try:
            if write and os.fstat(fd).st_size != _PAGE.size:
                os.pwrite(fd, _PAGE.pack(-1, -1), 0)
            if os.fstat(fd).st_size < _PAGE.size:  # it is being made
                raise FileNotFoundError(f"{place}/{NAME}")
            access = mmap.ACCESS_WRITE if write else mmap.ACCESS_READ
            self._map = mmap.mmap(fd, _PAGE.size, access=access)
        finally:
            os.close(fd)
        self._words = memoryview(self._map).cast("q")

    def read(self) -> Pins:
        return Pins(self._words[0], self._words[1])

    def write(self, pins: Pins) -> None:
        """Write the held one first: between the two stores it is also the first of the wanted."""
        self._words[0] = pins.held
        self._words[1] = pins.wanted

    def close(self) -> None:
        self._words.release()
        self._map.close()
