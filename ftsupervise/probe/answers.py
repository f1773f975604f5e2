"""What the world may answer: frozen values, and the two ways of having no answer.

``Missing`` is an answer: we looked, and it is not there. ``NotSeen`` is none: nothing is known about the subject, and
whoever gets it must neither complain about the subject nor call it fine.
"""

from __future__ import annotations

import stat
from dataclasses import dataclass


@dataclass(frozen=True)
class NotSeen:
    """Could not look. ``seconds`` is for how long the device has not answered (0: it refused at once)."""

    what: str
    why: str
    seconds: float = 0.0
    hung: bool = False  # the device does not answer, as opposed to: it said no

    @property
    def sentence(self) -> str:
        waited = f" for {self.seconds:.0f} s" if self.hung else ""
        return f"{self.what} not seen{waited}: {self.why}"


@dataclass(frozen=True)
class Missing:
    """Looked, and there is no such thing."""

    path: str


@dataclass(frozen=True)
class Space:
    """One file system as an ordinary user may use it. Bytes and inodes; ``free`` is bavail, never bfree."""

    total: int  # what users can have at all: used + free, as df counts it
    used: int
    free: int
    inodes: int  # 0: this file system has no fixed number of them
    inodes_free: int


@dataclass(frozen=True)
class Mount:
    """What is mounted where, as the mount table has it: "/scratch", "lustre", "10.0.0.1@o2ib:/scratch"."""

    point: str
    kind: str
    source: str


@dataclass(frozen=True)
class Entry:
    """A file or directory as the file server tells it; ``mtime`` in seconds of the server's clock."""

    name: str
    mode: int
    size: int
    mtime: float
    inode: int
    uid: int
    links: int = 1
    device: int = 0

    @property
    def is_dir(self) -> bool:
        return stat.S_ISDIR(self.mode)

    @property
    def is_file(self) -> bool:
        return stat.S_ISREG(self.mode)


@dataclass(frozen=True)
class Listing:
    entries: tuple[Entry, ...]
    more: bool  # there were more entries than asked for


@dataclass(frozen=True)
class Tail:
    """The end of a file: its facts, and ``data`` which begins at byte ``start``."""

    entry: Entry
    start: int
    data: bytes


@dataclass(frozen=True)
class Text:
    name: str
    mtime: float
    data: bytes


@dataclass(frozen=True)
class Tree:
    """Everything below a path: bytes, files, newest change; ``more`` if the counting stopped at its bound."""

    size: int
    files: int
    newest: float
    more: bool
    empty: tuple[str, ...] = ()


@dataclass(frozen=True)
class ProcessMemory:
    """A process. ``start`` in clock ticks since boot (with ``pid`` its identity); bytes."""

    pid: int
    parent: int
    start: int
    state: str
    resident: int
    own: int  # resident without mapped files: what a leak is made of


@dataclass(frozen=True)
class Ran:
    """A command that came to an end, or was ended at its bound (``late``)."""

    code: int
    out: bytes
    err: bytes
    late: bool
