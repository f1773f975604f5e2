"""A process as /proc/PID/stat has it. Process numbers are used again; a number and a start time together are an identity."""

from __future__ import annotations

from typing import NamedTuple

STANDBY = "ftsup-standby"  # the name (comm) of a process that waits to become the next attempt's ranks


class Process(NamedTuple):
    pid: int
    name: str
    state: str  # one letter: R, S, D (uninterruptible), T (stopped), Z (only its number is left) …
    parent: int
    session: int
    start: int  # clock ticks since boot

    @property
    def gone(self) -> bool:
        """A zombie holds nothing but its number; in a container it may stand there for long."""
        return self.state in "ZX"


def process(pid: int) -> Process | None:
    """The process with this number now; None if there is none. ``stat`` can be read even of one in state D."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:  # noqa: PTH123 - half the price, and asked of every process there is
            text = file.read().decode("utf-8", "replace")
    except OSError:  # gone, or going while we read
        return None
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    return Process(pid, name, fields[0], int(fields[1]), int(fields[3]), int(fields[19]))


def identity(pid: int) -> int | None:
    """The start time of a living process in clock ticks since boot; None if there is none, or only its corpse."""
    found = process(pid)
    return None if found is None or found.gone else found.start


def boot_id() -> str:
    """Which boot of this host: process numbers of another one mean nothing. "" if it cannot be read."""
    try:
        with open("/proc/sys/kernel/random/boot_id", encoding="ascii") as file:  # noqa: PTH123
            return file.read().strip()
    except OSError:
        return ""
