"""Ask the file system or a process, and get an answer within a bound even if it hangs.

A read of a path on a dead file server blocks in the kernel: no timeout, thread or pool of this process gets it back,
and the process could not even exit. So every read of a user's path, and at other processes, is done by a child (one
for each device, started at the first question, serving all that follow), in a session of its own, that is waited for
with a bound, killed, and if it does not die abandoned and remembered. While it lives, its device is not asked again.

    with Probe() as probe:
        match probe.space("/scratch"):
            case Space() as space: ...
            case Missing(): ...
            case NotSeen() as blind: ...
"""

from __future__ import annotations

import errno
import marshal
import os
import select
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any

from ftsupervise.host import processes
from ftsupervise.probe import server
from ftsupervise.probe.errand import Note, Notes, is_ready
from ftsupervise.probe.server import Mounts, read_mounts

_SLACK = 5.0  # seconds beside the bound of a question: a child is started, ended, written down
_GONE = (errno.ENOENT, errno.ENOTDIR)


class Probe:
    """The bounded reads of one tick. Not for use by several threads.

    ``bound`` is the longest one question may take, in seconds. A device that let a question pass its bound is not asked
    again by this Probe, nor by a later one while the abandoned child lives: all in all it costs one bound. ``clocks``
    caches, for each device, how far the file server's clock is ahead of this node's.
    """

    def __init__(
        self, *, bound: float = 5.0, notes: Path | None = None, waits: Callable[[float], None] | None = None
    ) -> None:
        self.bound = bound
        self._waits = waits  # called before each question with the seconds that it may take
        self._notes_directory = notes
        self._details: dict[str, list[Mount]] = {}
        self._led: dict[str, str] = {}  # the device of each path
        self._notes: Notes | None = None
        self._mounts: Mounts | None = None
        self._children: dict[str, Child] = {}
        self._dark: dict[str, NotSeen] = {}  # devices given up, and why
        self._clocks: dict[str, float] = {}
        self._starts: dict[str, int] = {}

    @property
    def pids(self) -> tuple[int, ...]:
        """Return the numbers of the children that answer it now."""
        return tuple(child.pid for child in self._children.values() if child.pid)

    # ----------------------------------------------------------------------------------------------- questions

    def space(self, path: str | Path) -> Space | Missing | NotSeen:
        """Return the free space of the file system of ``path``, for an ordinary user."""
        got = self._ask_path("space", str(path))
        return got if isinstance(got, (Missing, NotSeen)) else Space(*got)

    def mount(self, path: str | Path) -> Mount | Missing | NotSeen:
        """Return the mount of ``path``, symbolic links followed, by the mount table after a first read of the path."""
        if str(path) not in self._led:
            got = self._ask_path("look", str(path))
            if isinstance(got, (Missing, NotSeen)):
                return got
        real = self._led[str(path)]
        found, device = Mount("/", "", ""), self._table.of(real)
        if device not in self._details:  # after the first read: an automounter mounts for it
            self._details[device] = [Mount(point, kind, source) for point, _, kind, source in read_mounts()]
        for mount in self._details[device]:
            inside = real == mount.point or real.startswith(mount.point.rstrip("/") + "/")
            if inside and len(mount.point) >= len(found.point):
                found = mount
        return found

    def look(self, path: str | Path) -> Entry | Missing | NotSeen:
        """Return the facts of one file or directory; symbolic links are followed."""
        got = self._ask_path("look", str(path))
        return got if isinstance(got, (Missing, NotSeen)) else _entry(os.path.basename(str(path)), got)

    def listing(self, path: str | Path, *, most: int = 10_000) -> Listing | Missing | NotSeen:
        """Return the entries of a directory, ``most`` at most. Listing a directory anew sees what a cached look-up misses."""
        got = self._ask_path("listing", str(path), most)
        if isinstance(got, (Missing, NotSeen)):
            return got
        return Listing(tuple(_entry(name, facts) for name, facts in got[0]), got[1])

    def tail(
        self, path: str | Path, *, inode: int = 0, offset: int = 0, most: int = 262_144
    ) -> Tail | Missing | NotSeen:
        """Return the bytes of a file from ``offset`` on, or its last ``most`` bytes if that is less.

        Begins anew if the file is another than ``inode`` (rotated) or shorter than ``offset`` (truncated).
        """
        got = self._ask_path("tail", str(path), inode, offset, most)
        if isinstance(got, (Missing, NotSeen)):
            return got
        return Tail(_entry(os.path.basename(str(path)), got[0]), got[1], got[2])

    def text(self, path: str | Path, *, most: int = 65_536) -> bytes | Missing | NotSeen:
        """Return the first ``most`` bytes of a file, also of one in /proc or /sys."""
        got: bytes | Missing | NotSeen = self._ask_path("text", str(path), most)
        return got

    def texts(
        self, path: str | Path, *, prefix: str = "", files: int = 64, most: int = 65_536
    ) -> tuple[Text, ...] | Missing | NotSeen:
        """Return the ``files`` newest files of a directory whose names start with ``prefix``, ``most`` bytes of each."""
        got = self._ask_path("texts", str(path), prefix, files, most)
        return got if isinstance(got, (Missing, NotSeen)) else tuple(Text(*one) for one in got)

    def tree(self, path: str | Path, *, most: int = 20_000) -> Tree | Missing | NotSeen:
        """Return size and number of the files below ``path``; stops after ``most`` entries and says so."""
        got = self._ask_path("tree", str(path), most)
        return got if isinstance(got, (Missing, NotSeen)) else Tree(got[0], got[1], got[2], got[3], tuple(got[4]))

    def clock_ahead(self, directory: str | Path) -> float | Missing | NotSeen:
        """Return the seconds by which the clock of the file server of ``directory`` is ahead of this node's.

        Asked once for each device, by making a small file in ``directory`` and removing it again.
        """
        device = self._table.of(os.path.normpath(str(directory)))
        if device not in self._clocks:
            got = self._ask_path("clock", str(directory))
            if isinstance(got, (Missing, NotSeen)):
                return got
            self._clocks[device] = got[0] - got[1]
        return self._clocks[device]

    def processes(self, roots: Sequence[int], *, most: int = 100_000) -> tuple[ProcessMemory, ...] | NotSeen:
        """Return the processes ``roots`` and all below them that are on this host."""
        got = self._ask(self._table.of("/proc"), "/proc", "processes", (list(roots), most))
        if isinstance(got, (Missing, NotSeen)):
            return NotSeen("/proc", got.why if isinstance(got, NotSeen) else "it is not mounted")
        return tuple(ProcessMemory(*one) for one in got)

    def call(self, path: str | Path, function: str, *args: Any, bound: float = 30.0) -> Any:
        """Return the plain values that ``function`` ("room.module:name") of ours gives for ``args``; NotSeen after
        ``bound`` seconds.

        ``path`` is the path it looks at. One child for each device makes all these calls, beside the one that answers
        the other questions: a function that takes long leaves those answered.
        """
        module, _, name = function.partition(":")
        key = f"call {self._table.of(os.path.normpath(str(path)))}"
        return self._ask(key, str(path), "call", (module, name, args), bound=bound, asked=str(path))

    def run(
        self, argv: Sequence[str], *, bound: float = 30.0, most: int = 65_536, env: Mapping[str, str] | None = None
    ) -> Ran | Missing | NotSeen:
        """Run a command for at most ``bound`` seconds in a session of its own; it and its children are ended then.

        ``Missing``: there is no such program. ``NotSeen``: it hangs and cannot be killed, now or since an earlier time.
        """
        key = "run " + "\0".join(argv)
        environment = dict(os.environ if env is None else env)
        got = self._ask(key, argv[0], "run", (list(argv), environment, bound, most), bound=bound + self.bound)
        child = self._children.pop(key, None)
        if child is not None and not child.finish(self._records):
            self._abandon(key, argv[0], child)
        return got if isinstance(got, (Missing, NotSeen)) else Ran(*got)

    def stuck(self) -> list[Note]:
        """Return the children on this host that hang and cannot be killed."""
        return self._records.stuck()

    # ------------------------------------------------------------------------------------------------ plumbing

    def _ask_path(self, question: str, path: str, *args: Any) -> Any:
        asked = path
        path = os.path.normpath(path)
        if not path.startswith("/"):
            raise ValueError(f"a probe needs an absolute path, not {path!r}")
        for _ in range(10):
            point = self._table.point(path)
            got = self._ask(self._table.at(point), point, question, (path, *args), asked=asked)
            if not isinstance(got, _Elsewhere):
                self._led[asked] = path
                return got
            path = got.path
            if self._table.of(path) == got.device:  # mounted since we looked at the table
                self._mounts = None
        return NotSeen(asked, "its mounts change during the check")

    def _ask(
        self, key: str, what: str, question: str, args: tuple[Any, ...], *, bound: float | None = None, asked: str = ""
    ) -> Any:
        if key in self._dark:
            return self._dark[key]
        child = self._child(key, what)
        if isinstance(child, NotSeen):
            return child
        if self._waits is not None:
            self._waits((bound or self.bound) + _SLACK)
        began = time.monotonic()
        try:
            verdict, *rest = child.ask(question, args, bound or self.bound)
        except Late:
            return self._give_up(key, what, child, time.monotonic() - began)
        except Died as died:
            del self._children[key]
            child.finish(self._records)
            return NotSeen(what, f"it killed the probe ({died})")
        if verdict == "ok":
            return rest[0]
        if verdict == "elsewhere":
            return _Elsewhere(rest[0], key)
        if verdict == "errno":
            return Missing(asked or what) if rest[0] in _GONE else NotSeen(asked or what, rest[1])
        return NotSeen(asked or what, rest[0])

    def _child(self, key: str, what: str) -> Child | NotSeen:
        """Return the child of a device: a running one, a new one, or why there can be none."""
        if key in self._children:
            return self._children[key]
        for note in self._records.stuck():
            if note.key == key:
                self._dark[key] = _hung(what, note.seconds, note.pid)
                return self._dark[key]
        self._starts[key] = self._starts.get(key, 0) + 1
        if self._starts[key] > 3 and not key.startswith("run "):
            self._dark[key] = NotSeen(what, "it killed the probe three times")
            return self._dark[key]
        try:
            child = Child(key, command=key.startswith("run "))
        except OSError as error:
            return NotSeen(what, f"cannot start a probe: {error.strerror}")
        self._records.write(child.pid, key, what)
        self._children[key] = child
        return child

    def _give_up(self, key: str, what: str, child: Child, waited: float) -> NotSeen:
        self._children.pop(key, None)
        pid = child.pid
        if not child.end(self._records):
            self._abandon(key, what, child, waited)
            self._dark[key] = _hung(what, waited, pid)
        else:
            self._dark[key] = NotSeen(what, f"no answer within {waited:.0f} s", waited, hung=True)
        return self._dark[key]

    def _abandon(self, key: str, what: str, child: Child, waited: float = 0.0) -> None:
        since = time.clock_gettime(time.CLOCK_BOOTTIME) - waited
        for pid in child.survivors:
            self._records.write(pid, key, what, abandoned=True, since=since)

    @property
    def _table(self) -> Mounts:
        if self._mounts is None:
            self._mounts = Mounts(read_mounts())
        return self._mounts

    @property
    def _records(self) -> Notes:
        if self._notes is None:
            self._notes = Notes(self._notes_directory)
        return self._notes

    def close(self) -> None:
        """End all children; one that does not die is abandoned and remembered. Bounded, and safe to repeat."""
        for child in self._children.values():
            child.hang_up()
        for key, child in self._children.items():
            if not child.finish(self._records):
                self._abandon(key, key, child)
        self._children.clear()
        self._dark.clear()
        self._clocks.clear()
        self._details.clear()
        self._led.clear()
        self._starts.clear()
        self._mounts = None

    def __enter__(self) -> Probe:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Elsewhere:
    def __init__(self, path: str, device: str) -> None:
        self.path, self.device = path, device


def _entry(name: str, facts: tuple[Any, ...]) -> Entry:
    mode, size, mtime, inode, uid, links, device = facts
    return Entry(name=name, mode=mode, size=size, mtime=mtime, inode=inode, uid=uid, links=links, device=device)


def _hung(what: str, seconds: float, pid: int) -> NotSeen:
    return NotSeen(what, f"no answer; probe {pid} hangs on it and cannot be killed", seconds, hung=True)


# ------------------------------------------------------------------------------------------
# One child process that answers questions, seen from its parent: ask with a bound, end with a bound, else abandon it.

_SCRIPT = str(Path(server.__file__))
_GRACE = 0.2  # seconds for a child to die of SIGKILL, or to exit after we closed its input


class Late(Exception):
    """There is no answer within the bound."""


class Died(Exception):
    """The child ended instead of answering."""


class Child:
    """A running ``server.py`` for the device ``mine``, or for one command. Raises OSError if it cannot be started."""

    def __init__(self, mine: str, *, command: bool = False) -> None:
        self._command = command
        self._process = subprocess.Popen(
            [sys.executable, "-I", "-S", _SCRIPT, "command" if command else mine],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
            cwd="/",
            bufsize=0,
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._to, self._from = self._process.stdin, self._process.stdout
        os.set_blocking(self._to.fileno(), False)
        self.pid = self._process.pid
        self.survivors: tuple[int, ...] = ()

    def ask(self, question: str, args: tuple[Any, ...], bound: float) -> tuple[Any, ...]:
        """Return the child's answer. Raises Late after ``bound`` seconds, Died if it ends instead."""
        until = time.monotonic() + bound
        payload = marshal.dumps((question, args))
        self._send(len(payload).to_bytes(4, "big") + payload, until)
        got = self._receive(b"", 4, until)
        length = 4 + int.from_bytes(got[:4], "big")
        answer: tuple[Any, ...] = marshal.loads(self._receive(got, length, until)[4:])
        return answer

    def _send(self, data: bytes, until: float) -> None:
        view = memoryview(data)
        while view:
            try:
                view = view[os.write(self._to.fileno(), view) :]
            except BlockingIOError:
                if not is_ready(self._to, until - time.monotonic(), select.POLLOUT):
                    raise Late from None
            except BrokenPipeError:
                raise Died(self._how()) from None

    def _receive(self, got: bytes, count: int, until: float) -> bytes:
        """Return ``got`` and what the child has written since, once these are ``count`` bytes. It writes one answer at a
        time."""
        parts, have = [got], len(got)
        while have < count:
            if not is_ready(self._from, until - time.monotonic()):
                raise Late
            part = os.read(self._from.fileno(), 1 << 20)
            if not part:
                raise Died(self._how())
            parts.append(part)
            have += len(part)
        return b"".join(parts)

    def _how(self) -> str:
        code = self._wait(_GRACE)
        if code is None:
            return "it closed its output"
        return f"signal {-code}" if code < 0 else f"exit {code}"

    def _wait(self, bound: float) -> int | None:
        try:
            return self._process.wait(bound)
        except subprocess.TimeoutExpired:
            return None

    def hang_up(self) -> None:
        """Ask an idle child to exit."""
        self._to.close()

    def finish(self, notes: Notes) -> bool:
        """End a child that has nothing to do; return True if it is gone. Never waits longer than two graces."""
        self.hang_up()
        if self._wait(_GRACE) is None:
            return self.end(notes)
        return self._swept(notes)

    def end(self, notes: Notes) -> bool:
        """Kill it and all of its session; return True if all are gone, else ``survivors`` are those left behind."""
        self.hang_up()
        processes.end_group(self.pid)
        self._wait(_GRACE)
        return self._swept(notes)

    def _swept(self, notes: Notes) -> bool:
        """Kill the rest of the session (a command and its children); remember processes that do not die."""
        self._from.close()
        left = processes.end_all(self._remaining, _GRACE)
        if self._process.returncode is None and not left:
            self._wait(_GRACE)
        self.survivors = tuple(one.pid for one in left)
        if processes.identity(self.pid) is None:
            notes.forget(self.pid)
        return not left

    def _remaining(self) -> list[processes.Process]:
        if self._command:
            return [one for one in processes.living() if one.session == self.pid]
        its = processes.process(self.pid) if self._process.returncode is None else None
        return [its] if its is not None else []


# The possible answers: frozen values, and the two ways of having none.
#
# ``Missing`` is an answer: we checked, and it is not there. ``NotSeen`` is none: nothing is known about the subject, so its
# receiver must neither complain about the subject nor call it fine.


@dataclass(frozen=True)
class NotSeen:
    """The thing could not be read. ``seconds`` is for how long the device has not answered (0: it refused at once)."""

    what: str
    why: str
    seconds: float = 0.0
    hung: bool = False  # the device does not answer, as opposed to: it said no

    @property
    def words(self) -> str:
        """Return it for who has said what it is about."""
        waited = f" for {self.seconds:.0f} s" if self.hung else ""
        return f"not seen{waited}: {self.why}"

    @property
    def sentence(self) -> str:
        return f"{self.what} {self.words}"


@dataclass(frozen=True)
class Missing:
    """The thing was looked for, and does not exist."""

    path: str


@dataclass(frozen=True)
class Space:
    """One file system as an ordinary user may use it. Bytes and inodes; ``free`` is bavail, never bfree."""

    total: int  # the part that users can have: used + free, as df counts it
    used: int
    inodes: int  # 0: this file system has no fixed number of them
    inodes_free: int

    def usable(self, share: float) -> Space:
        """Return the ``share`` of it that can really be filled."""
        return replace(self, total=int(self.total * share))

    @property
    def free(self) -> int:
        """Return the bytes that are left; negative when the usable part is exceeded."""
        return self.total - self.used

    @property
    def used_share(self) -> float:
        return self.used / self.total if self.total > 0 else 1.0

    @property
    def inodes_share(self) -> float | None:
        """Return the share of the inodes that is used; None where this file system does not count them."""
        return 1 - self.inodes_free / self.inodes if self.inodes > 0 else None


@dataclass(frozen=True)
class Mount:
    """A mount by the mount table: "/scratch", "lustre", "10.0.0.1@o2ib:/scratch"."""

    point: str
    kind: str
    source: str


@dataclass(frozen=True)
class Entry:
    """A file or directory as the file server reports it; ``mtime`` in seconds of the server's clock."""

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
    own: int  # resident without mapped files, which are no leak


@dataclass(frozen=True)
class Ran:
    """A command that came to an end, or was ended at its bound (``late``)."""

    code: int
    out: bytes
    err: bytes
    late: bool
