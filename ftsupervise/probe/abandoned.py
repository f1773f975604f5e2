"""Children that did not die: their identity, their device, since when. Kept on this host, for this host.

A child in state D cannot be killed, only left alone; a second one on the same device would hang as well, and many of
them get a Slurm node drained. So each child is written down when it starts and crossed out when it ended. One that
was abandoned, or whose parent was killed while it hung, is found here by the next tick, which then does not ask again.

The notes lie in a directory of this account under the host's temporary directory: process ids mean nothing on another
host or after a reboot, and a home directory may be the very thing that hangs. One file for each child.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.host.private import home, private
from ftsupervise.host.processes import boot_id, identity, lives
from ftsupervise.rundir.records import read_record, write_json

_MOMENT = 1.0  # seconds


@dataclass(frozen=True)
class Note:
    pid: int
    start: int  # clock ticks since boot: with pid the identity of a process
    key: str  # the device, or the command
    what: str  # the same for reading
    parent: int
    parent_start: int
    since: float  # seconds since boot
    boot: str
    abandoned: bool = False

    @property
    def seconds(self) -> float:
        """The seconds that it has been hanging."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.since)


def _boot() -> str:
    """This boot and this PID namespace: process ids mean nothing outside of them."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


class Notes:
    """The notes of one host. Works without a directory too: then only this process remembers."""

    def __init__(self, directory: Path | None = None) -> None:
        self.boot = _boot()
        self.directory = private(directory or home() / "probe")
        self._mine: list[Note] = []

    def write(self, pid: int, key: str, what: str, *, abandoned: bool = False, since: float | None = None) -> Note:
        """Remember a child. ``since``: seconds since boot, now if not given."""
        note = Note(
            pid=pid,
            start=identity(pid) or 0,
            key=key,
            what=what,
            parent=os.getpid(),
            parent_start=identity(os.getpid()) or 0,
            since=time.clock_gettime(time.CLOCK_BOOTTIME) if since is None else since,
            boot=self.boot,
            abandoned=abandoned,
        )
        if abandoned:
            self._mine.append(note)
        if self.directory is not None:
            try:
                write_json(self.directory / f"{pid}.json", note, mode=0o600, sync=False)
            except OSError:  # a full /tmp: the tick goes on, and this process still remembers
                pass
        return note

    def forget(self, pid: int) -> None:
        self._mine = [note for note in self._mine if note.pid != pid]
        if self.directory is not None:
            try:
                os.unlink(self.directory / f"{pid}.json")
            except OSError:
                pass

    def stuck(self) -> list[Note]:
        """Children that hang: abandoned and still alive, or left alive by a parent that is gone. Clears old notes.

        A child whose parent has just ended may be about to end too: it gets a moment.
        """
        found = []
        until = time.monotonic() + _MOMENT
        for note in self._all():
            if note.boot != self.boot or not lives(note.pid, note.start):
                self.forget(note.pid)
            elif note.abandoned or not lives(note.parent, note.parent_start):
                while not note.abandoned and lives(note.pid, note.start) and time.monotonic() < until:
                    time.sleep(0.02)
                if lives(note.pid, note.start):
                    note = (
                        note
                        if note.abandoned
                        else self.write(note.pid, note.key, note.what, abandoned=True, since=note.since)
                    )
                    found.append(note)
                else:
                    self.forget(note.pid)
        return found

    def _all(self) -> list[Note]:
        notes = {note.pid: note for note in self._mine}
        for path in sorted(self.directory.glob("[0-9]*.json")) if self.directory is not None else ():
            try:
                note = read_record(Note, path, limit=64_000, lenient=False)
            except (OSError, ValueError):  # not ours to understand
                continue
            if note is not None:
                notes.setdefault(note.pid, note)
        return list(notes.values())
