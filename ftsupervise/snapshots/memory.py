"""This rank's file of snapshots, mapped and ready to be copied into. What takes time is done in a side thread.

Taking new memory costs five to nine copies of the state, and mapping what is there already two to five. Both happen beside the
loop, before the first snapshot and after a restart; until then there is none. Each copy then goes into pages that are there.

Where a process of an earlier attempt still lives and holds the file, this attempt makes a file of its own in its place, with
what it began from: what the old one writes from then on reaches nobody, and it makes no other file in the place of that one.
"""

from __future__ import annotations

import mmap
import os
import re
import threading
import time
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

from ftsupervise.snapshots.room import MemoryRoom, NoRoom, give_up, populate, rank_file, ranks_in
from ftsupervise.snapshots.slots import (
    Compared,
    Pins,
    PinsPage,
    SlotFile,
    SlotHeader,
    SlotRoom,
    SnapshotId,
    Summing,
    claim,
    compare,
    create_slots,
    open_slots,
    room_for,
    slot_to_write,
    spared,
)
from ftsupervise.snapshots.state import Described

_ALL = SnapshotId(1 << 62, 1 << 62)
_LOOK_EVERY = 1.0  # seconds between two checks of the memory
_PATIENCE = 60.0  # seconds after which memory that was short is asked for again; twice as long each time


class Replaced(Exception):
    """Another process has put its file in the place of this one: none is made any more."""


class Copied(Protocol):
    """The data that is copied into a slot."""

    def places(self, described: Described, buffer: memoryview) -> Any:
        """Return the places in ``buffer`` to copy to: found once for each slot and layout."""

    def copy(self, described: Described, places: Any) -> None:
        """Copy it all."""


class SnapshotMemory:
    """The file of rank ``rank`` in ``folder``. Raises OSError at construction where the memory cannot be looked at."""

    def __init__(self, folder: str, rank: int, world: int, slots: int, most: float) -> None:
        self._folder, self._rank, self._world, self._slots = folder, rank, world, slots
        self._room = MemoryRoom(folder, most)
        self._pins: PinsPage | None = None
        self._file: SlotFile | None = None
        self._mapping: mmap.mmap | None = None
        self._mine = False  # this process holds the file
        self._ready = False  # its pages are there, and the next copy costs no faults
        self._thread: threading.Thread | None = None
        self._made: tuple[SlotFile, mmap.mmap] | OSError | None = None  # by the thread
        self._places: dict[int, tuple[bytes, Any]] = {}  # slot -> layout, and where its arrays go
        self._retry = _Retry()
        self._sums = Summing()

    def find(self) -> None:
        """Open what an earlier attempt has left for this rank, if anything. A damaged file is made anew later."""
        try:
            file = open_slots(rank_file(self._folder, self._rank), write=True)
        except (OSError, ValueError):
            return
        if (file.world, file.rank) != (self._world, self._rank):
            file.close()
            return
        self._mine = claim(file.fd)
        self._file, self._mapping = file, mmap.mmap(file.fd, file.room.size)
        if self._mine:
            self._prepare(file.room)

    def held(self) -> dict[SnapshotId, int]:
        """Return the snapshots in it, oldest first, each with its slot. Raises OSError."""
        return {} if self._file is None else self._file.held()

    def description(self, slot: int) -> bytes:
        """Return the description of a slot. Raises OSError, ValueError."""
        assert self._file is not None
        header = self._file.valid(slot)
        if header is None:
            raise ValueError(f"{self._file.path}: slot {slot} holds no snapshot")
        return self._file.meta(slot, header)

    def compare(self, slot: int) -> Compared:
        """Compare its bytes with those that were copied there. Raises OSError."""
        assert self._file is not None
        header = self._file.valid(slot)
        return Compared.UNKNOWN if header is None else compare(self._file, slot, header)

    def data(self, slot: int) -> memoryview:
        assert self._file is not None and self._mapping is not None
        at = self._file.data_at(slot)
        return memoryview(self._mapping)[at : at + self._file.room.data]

    def invalidate_newer(self, than: SnapshotId | None) -> None:
        """Give up all snapshots newer than ``than``. Raises OSError.

        Where another process holds the file, the new file gets only the remaining ones.
        """
        if self._file is not None and self._mine:
            self._file.invalidate_newer(than)
        elif self._file is not None:
            self._prepare(self._file.room, than)

    # --------------------------------------------------------------------------------------------------------- writing

    def is_ready_for(self, described: Described, size: int = 0) -> bool:
        """Return whether it can be copied now.

        If not, the memory is made ready beside the loop, for ``size`` bytes if it may grow to that. Raises OSError when
        it cannot be had, and asks no more for a while then; Replaced for good.
        """
        if self._thread is not None and not self._finish():
            return False
        now = time.monotonic()
        if now >= self._retry.look:
            self._retry.look = now + _LOOK_EVERY
            self._check()
        file = self._file
        fits = file is not None and self._mine and file.room.slots >= self._slots
        if file is not None and fits and file.room.holds(len(described.description), described.size) and self._ready:
            return True
        if self._retry.may:
            self._prepare(room_for(self._slots, len(described.description), max(size, described.room, described.size)))
        return False

    def write(self, step: int, attempt: int, described: Described, source: Copied) -> None:
        """Copy a state into the oldest slot that is not spared. The loop waits for this. Raises OSError."""
        file = self._file
        assert file is not None
        steps = file.steps()
        slot = slot_to_write(steps, spared(steps, self._pinned()))
        with self._sums.lock:
            turn = file.begin(slot)
        known = self._places.get(slot)
        if known is None or known[0] != described.layout:
            self._places[slot] = known = described.layout, source.places(described, self.data(slot))
        source.copy(described, known[1])
        file.write_meta(slot, described.description)
        size, crc = len(described.description), zlib.crc32(described.description)
        one = SlotHeader(turn, step, attempt, self._world, self._rank, size, described.size, crc, described.layout)
        one = one._replace(at=time.time())
        file.commit(slot, one)
        self._sums.take(file, slot, one, self.data(slot))

    @property
    def staging_folder(self) -> Path:
        """Return the folder where files are written before they are copied into a slot."""
        return Path(self._folder, f"writing-{self._rank}")

    def may_take(self, size: int) -> None:
        """Raise OSError where there is no room for ``size`` bytes more."""
        self._room.may_take(size)

    def remove(self) -> None:
        """Remove the file: the run is complete. A file of another process stays."""
        self._sums.forget()
        file, self._file = self._file, None
        self._mapping, self._ready = None, False
        self._places.clear()
        if file is None:
            return
        try:
            if self._mine and file.path.stat().st_ino == os.fstat(file.fd).st_ino:
                file.path.unlink()
        except OSError:
            pass
        file.close()

    # ------------------------------------------------------------------------------------------------ the memory itself

    def _pinned(self) -> Pins:
        """Return the pins of the process that copies to other nodes, where there is one."""
        if self._pins is None:
            try:
                self._pins = PinsPage(self._folder)
            except OSError:
                return Pins()
        return self._pins.read()

    def _check(self) -> None:
        """Give the memory back when it is needed: the next victim of the kernel would be a rank. Raises NoRoom; Replaced
        where another process has put its file in the place of this one."""
        if self._file is None or not self._mine:
            return
        if self._file.is_gone():  # the end of a login session removes what a user has in shared memory
            if self._is_replaced():
                raise Replaced("a later attempt of this rank keeps its own in their place")
            self.remove()
        elif reason := self._room.tight():
            self._release()
            raise NoRoom(f"{reason}: the snapshots are given up")

    def _is_replaced(self) -> bool:
        """Return whether the file of another process has the name of this one."""
        return os.path.lexists(rank_file(self._folder, self._rank))

    def _release(self) -> None:
        assert self._file is not None and self._mapping is not None
        for slot in range(self._file.room.slots):
            self._file.begin(slot)
        give_up(self._mapping)
        self._retry.later()
        self.remove()

    def _prepare(self, room: SlotRoom, than: SnapshotId | None = _ALL) -> None:
        """Prepare the file. ``than``: newer snapshots are not carried over into a new file (True: all are)."""
        if self._thread is not None:
            self._thread.join()
            self._finish()
        self._ready = False
        self._thread = threading.Thread(target=self._make, args=(room, than), name="ftsupervise-snapshots", daemon=True)
        self._thread.start()

    def _finish(self) -> bool:
        """Take over what the thread has made. Return False while it is at work. Raises the error that stopped it."""
        assert self._thread is not None
        if self._thread.is_alive():
            return False
        self._thread = None
        made, self._made = self._made, None
        if made is None or isinstance(made, OSError):
            self._retry.later()
            raise made or OSError("the memory for snapshots could not be prepared")
        if self._file is not None and made[0] is not self._file:
            self._sums.forget()
            self._file.close()
        self._file, self._mapping = made
        self._mine = self._ready = True
        self._places.clear()
        return True

    def _make(self, room: SlotRoom, than: SnapshotId | None) -> None:
        """Make it, in the thread: only ``_made`` is changed."""
        try:
            file, mapping = self._file, self._mapping
            if file is None or mapping is None or not self._mine or room != file.room:
                old, may_take = file, _Share(self._room, self._folder, self._rank)
                path = rank_file(self._folder, self._rank)

                def fill(new: SlotFile) -> None:
                    claim(new.fd)
                    if old is not None:
                        _carry_over(old, new, than)

                file = create_slots(path, self._world, self._rank, room, may_take, fill)
                try:
                    mapping = mmap.mmap(file.fd, room.size)
                    populate(mapping)
                except OSError:
                    file.path.unlink()  # or it would look like that of another process
                    file.close()
                    raise
            else:
                populate(mapping)
            self._made = (file, mapping)
        except OSError as error:
            self._made = error
        except Exception as error:  # it must not end the thread in silence: the loop tells it once
            self._made = OSError(f"{type(error).__name__}: {error}")


class _Retry:
    """Says when memory that was short may be asked for again, and when it is looked at next."""

    def __init__(self) -> None:
        self.look = 0.0  # monotonic
        self._at, self._wait = 0.0, _PATIENCE

    @property
    def may(self) -> bool:
        return time.monotonic() >= self._at

    def later(self) -> None:
        self._at = time.monotonic() + self._wait
        self._wait *= 2


class _Share:
    """Decides whether this rank may take memory.

    The first question is for all ranks of the node that have none yet: all, or none.
    """

    def __init__(self, room: MemoryRoom, folder: str, rank: int) -> None:
        self._room, self._first = room, True
        self._others = max(0, local_ranks(os.environ) - 1 - len([one for one in ranks_in(folder) if one != rank]))

    def __call__(self, size: int) -> None:
        self._room.may_take(size * (1 + self._others) if self._first else size)
        self._first = False


def local_ranks(env: Mapping[str, str]) -> int:
    """Return how many ranks this node has, as the launcher says; 1 where it does not."""
    for name in ("LOCAL_WORLD_SIZE", "SLURM_STEP_TASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE"):
        if found := re.match(r"([0-9]{1,5})(?:\(x[0-9]+\))?$", env.get(name, "")):
            return int(found[1])
    return 1


def _carry_over(old: SlotFile, new: SlotFile, than: SnapshotId | None) -> None:
    """Copy the newest snapshots that fit, and that another process does not write over meanwhile."""
    held = list(old.held().items())[-new.room.slots :]
    for at, (_, slot) in enumerate(held):
        header = old.valid(slot)
        if header is not None and new.room.holds(header.meta_size, header.data_size):
            try:
                new.receive(at, header, old.pieces(slot, header))
            except ValueError:  # written over meanwhile
                continue
            if not old.still(slot, header):
                new.begin(at)
    new.invalidate_newer(than)
