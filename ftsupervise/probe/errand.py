"""Do a part of this program's work in a child that may hang, so that its parent never does.

A ``Probe`` answers questions; an errand is a whole piece of this program (read the settings of a run, check it, record the
findings) in a forked child. So no path through the code can be forgotten: the child may open any file on any dead mount, the
parent reads nothing but a pipe and a page of memory.

    errand = Errand(work)                      # work(say) runs in the child
    while not errand.ended and not errand.late:  # late: silent for longer than it said it would be
        for value in errand.wait(0.2): ...      # the values that the child sent with ``say.tell``
    errand.finish("run a", "the run a")

The child reports its item, and how long that may take (``say.at``), in shared memory: that costs no system call. One that is
late is killed, and if it does not die of that (state D) it is abandoned and written down, as those of a Probe are.
"""

from __future__ import annotations

import gc
import mmap
import os
import pickle
import select
import signal
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any, NamedTuple, NoReturn, TypeVar

from ftsupervise.errors import Error, NoAnswer
from ftsupervise.host.ownership import own_folder, private_folder
from ftsupervise.host.processes import boot_id, die_with_parent, identity, lives, process
from ftsupervise.printable import to_type
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record, write_json

# Children that did not die: their identity, their device, since when. Kept on this host, for this host.
#
# A child in state D cannot be killed, only left alone; a second one on the same device would hang as well, and many of
# them get a Slurm node drained. So each child is written down when it starts and crossed out when it ended. One that
# was abandoned, or whose parent was killed while it hung, is found here by the next tick, which then does not ask again.
#
# The notes lie in a directory of this account under the host's temporary directory: process ids mean nothing on another
# host or after a reboot, and a home directory may be the very thing that hangs. One file for each child.

_MOMENT = 1.0  # seconds


def is_ready(file: int | IO[bytes], seconds: float, what: int = select.POLLIN) -> bool:
    """Wait for a file, so many seconds at most. By poll: ``select`` takes no descriptor above 1023, and a process that watches
    many things may have as many."""
    poll = select.poll()
    poll.register(file, what)
    return bool(poll.poll(max(0.0, seconds) * 1000))


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
        """Return the seconds that it has been hanging."""
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - self.since)


def _boot() -> str:
    """Return a name of this boot and this PID namespace: process ids mean nothing outside of them."""
    try:
        return f"{boot_id()} {os.readlink('/proc/self/ns/pid')}"  # noqa: PTH115
    except OSError:
        return ""


class Notes:
    """The notes of one host. Works without a directory too: then only this process remembers."""

    def __init__(self, directory: Path | None = None) -> None:
        self.boot = _boot()
        self.directory = private_folder(directory or own_folder() / "probe")
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
        """Return children that hang: abandoned and still alive, or left alive by a parent that is gone. Clears old
        notes.

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


_GRACE = 0.3  # seconds for a child to die
_BUSY = 6  # a busy child on a busy machine may take this many times as long
_HEAD = struct.Struct("<QqdH")  # counter, item, allowance in seconds, length of the words
_PAGE = 4096


class At(NamedTuple):
    """The item that a child works on: its number (-1: none in particular), words, and the seconds it may be silent."""

    item: int
    words: str
    seconds: float


class Say:
    """The child's side of an errand."""

    def __init__(self, board: mmap.mmap, pipe: int) -> None:
        self._board, self._pipe, self._turn = board, pipe, 0
        self._item, self._length = -1, 0

    def at(self, item: int, words: str, seconds: float) -> None:
        """Report the item that begins now, and the seconds it may be silent."""
        raw = words.encode("utf-8", "replace")[: _PAGE - _HEAD.size]
        self._board[_HEAD.size : _HEAD.size + len(raw)] = raw
        self._item, self._length = item, len(raw)
        self.waits(seconds)

    def waits(self, seconds: float) -> None:
        """Report that the same item goes on, and may take ``seconds`` more."""
        self._turn += 1
        self._board[: _HEAD.size] = _HEAD.pack(self._turn, self._item, seconds, self._length)

    def tell(self, value: Any) -> None:
        """Hand ``value`` to the parent. A parent that is gone ends this child."""
        data = pickle.dumps(value, pickle.HIGHEST_PROTOCOL)
        view = memoryview(len(data).to_bytes(8, "little") + data)
        try:
            while view:
                view = view[os.write(self._pipe, view) :]
        except BrokenPipeError:
            os._exit(1)


class _End(NamedTuple):
    error: BaseException | None


class Errand:
    """One child at work. ``allowance``: seconds it may be silent before its first report."""

    def __init__(self, work: Callable[[Say], object], *, allowance: float = 10.0, notes: Notes | None = None) -> None:
        self._board = mmap.mmap(-1, _PAGE)
        self._board[: _HEAD.size] = _HEAD.pack(0, -1, allowance, 0)
        self._notes, self._buffer = notes, bytearray()
        self._turn, self._silent, self._looked = 0, 0.0, time.monotonic()
        self.ended = False  # it has sent all its values, or is gone
        self.error: BaseException | None = None  # the exception of ``work``
        self.died = ""  # the way it ended, if it did not finish
        mine, its = os.pipe2(os.O_CLOEXEC)
        self.pid = os.fork()
        if self.pid == 0:
            _child(work, Say(self._board, its), its)
        os.close(its)
        self._from = mine
        os.set_blocking(mine, False)

    def fileno(self) -> int:
        return self._from

    @property
    def at(self) -> At:
        for _ in range(10):
            turn, item, seconds, length = _HEAD.unpack(self._board[: _HEAD.size])
            words = self._board[_HEAD.size : _HEAD.size + length].decode("utf-8", "replace")
            if _HEAD.unpack(self._board[: _HEAD.size])[0] == turn:
                break
        return At(item, words, seconds)

    @property
    def silent(self) -> float:
        """Return the seconds since its last report, in time in which this process ran."""
        return self._silent

    @property
    def late(self) -> bool:
        """Return whether it has been silent for longer than it announced, and is not merely slow on a busy machine."""
        now = time.monotonic()
        passed, self._looked = min(now - self._looked, 1.0), now  # a parent that slept cannot judge
        turn = _HEAD.unpack(self._board[: _HEAD.size])[0]
        if turn != self._turn:
            self._turn, self._silent = turn, 0.0
            return False
        self._silent += passed
        allowed = self.at.seconds
        if self.ended or self._silent <= allowed:
            return False
        return self._silent > _BUSY * allowed or (its := process(self.pid)) is None or its.state != "R"

    def wait(self, seconds: float) -> list[Any]:
        """Return the values that it has sent meanwhile, after ``seconds`` at most."""
        is_ready(self._from, seconds)
        return self.heard()

    def heard(self) -> list[Any]:
        """Return the values that it has sent, without waiting."""
        values: list[Any] = []
        while not self.ended:
            try:
                part = os.read(self._from, 1 << 20)
            except BlockingIOError:
                break
            if not part:
                self.ended, self.died = True, self.died or "it ended without an answer"
                break
            self._silent = 0.0
            self._buffer += part
            values += self._whole()
        return values

    def _whole(self) -> list[Any]:
        values: list[Any] = []
        while len(self._buffer) >= 8:
            length = int.from_bytes(self._buffer[:8], "little")
            if len(self._buffer) < 8 + length:
                break
            value = pickle.loads(memoryview(self._buffer)[8 : 8 + length])
            del self._buffer[: 8 + length]
            if isinstance(value, _End):
                self.ended, self.error = True, value.error
            else:
                values.append(value)
        return values

    def finish(self, key: str = "", what: str = "") -> bool:
        """End it; return True if it is gone. One that does not die of SIGKILL is left behind and noted under ``key``."""
        os.close(self._from)
        began = time.clock_gettime(time.CLOCK_BOOTTIME) - self._silent
        gone = (self.ended and self._reaped(_GRACE)) or self._killed()
        self._board.close()
        if not gone and self._notes is not None:
            self._notes.write(self.pid, key or "errand", what or self.died, abandoned=True, since=began)
        return gone

    def _killed(self) -> bool:
        try:
            os.kill(self.pid, signal.SIGKILL)
        except ProcessLookupError:
            return True
        return self._reaped(_GRACE)

    def _reaped(self, bound: float) -> bool:
        until, pause = time.monotonic() + bound, 0.0005
        while True:
            try:
                done, status = os.waitpid(self.pid, os.WNOHANG)
            except ChildProcessError:
                return identity(self.pid) is None
            if done:
                code = os.waitstatus_to_exitcode(status)
                if self.died and code < 0:
                    self.died = f"it died of signal {-code}"
                return True
            if time.monotonic() > until:
                return False
            time.sleep(pause)
            pause = min(2 * pause, 0.02)


def within(seconds: float, work: Callable[[], Any], *, key: str = "") -> Any:
    """Run ``work`` in a child; return or raise what it does. Raises TimeoutError when it is not done in ``seconds``.

    ``key``: one that hangs and cannot be killed is noted under it, and while it lives no other one is sent after it.
    """
    notes = Notes()
    stuck = next((note for note in notes.stuck() if key and note.key == key), None)
    if stuck is not None:
        raise TimeoutError(f"no answer for {stuck.seconds:.0f} s; process {stuck.pid} hangs on it")
    errand = Errand(lambda say: say.tell(work()), allowance=seconds, notes=notes)
    until = time.monotonic() + seconds
    values: list[Any] = []
    try:
        while not errand.ended and time.monotonic() < until:
            values += errand.wait(max(0.0, until - time.monotonic()))
    finally:
        errand.finish(key)
    if errand.error is not None:
        raise errand.error
    if not values:
        raise TimeoutError(errand.died or f"no answer within {seconds:.0f} s")
    return values[0]


def _child(work: Callable[[Say], object], say: Say, pipe: int) -> NoReturn:
    try:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        null = os.open(os.devnull, os.O_RDWR)
        for fd in (0, 1, 2):  # an abandoned child keeps no terminal, pipe or lock open
            os.dup2(null, fd)
        os.closerange(3, pipe)
        os.closerange(pipe + 1, 1 << 16)
        gc.freeze()
        error: BaseException | None = None
        try:
            work(say)
        except BaseException as problem:  # handed to the parent, which raises it
            error = problem
        say.tell(_End(portable(error)))
    finally:
        os._exit(0)


def portable(error: BaseException | None) -> BaseException | None:
    """Return ``error`` if it survives the way to the parent, else its words."""
    if error is None:
        return None
    error.__traceback__ = error.__cause__ = None
    error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:  # an exception class of any library
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


# ------------------------------------------------------------------------------------------

# Long work in a child that is watched: it may take hours, and it is given up when nothing in it moves any more.
#
# A copy may take hours, and a thread of it that waits for a dead mount is never scheduled again. So the parent counts how often
# the threads of the child were scheduled, and the child need not report anything. What is given up is killed; a child that does
# not die of that is left behind and noted (``errand.py``), and no other one is sent after it while it lives.
#
#     watched(work, key="copy to /archive")      # work(progress) runs in the child; progress.moved(bytes), progress.line("...")

PATIENCE = 120.0  # seconds without a movement: a file server that changes over takes 90
_LOOK = 1.0  # seconds from one look at the child to the next, at most
_TELL = 0.1  # seconds from one word of progress to the next
T = TypeVar("T")


class Stuck(NoAnswer):
    """Nothing has moved in the work for too long, and it was given up."""


class _Line(NamedTuple):
    text: str


class _Value(NamedTuple):
    value: object


class WorkProgress:
    """The child's side of the work. Several threads may call it."""

    def __init__(self, say: Say) -> None:
        self._say, self._lock = say, threading.Lock()
        self._size, self._at = 0, 0.0

    def moved(self, size: int) -> None:
        """Report that ``size`` more bytes are done."""
        with self._lock:
            self._size += size
            if time.monotonic() - self._at >= _TELL:
                self._flush()

    def line(self, text: str) -> None:
        """Send a line to the person who waits."""
        with self._lock:
            self._say.tell(_Line(text))

    def value(self, value: object) -> None:
        with self._lock:
            self._flush()
            self._say.tell(_Value(value))

    def _flush(self) -> None:
        self._say.tell(self._size)
        self._size, self._at = 0, time.monotonic()


def watched(
    work: Callable[[WorkProgress], T],
    *,
    key: str,
    patience: float = PATIENCE,
    moved: Callable[[int], object] = lambda size: None,
    line: Callable[[str], object] = lambda text: None,
) -> T:
    """Run ``work`` in a child; return or raise what it does.

    ``moved`` is called with bytes, ``line`` with its messages. Raises Stuck when none of its threads has run for
    ``patience`` seconds, and when an earlier child of this ``key`` still hangs; ChildProcessError when the child was
    killed. An exception here (Ctrl-C) ends the child.
    """
    notes = Notes()
    if (left := next((note for note in notes.stuck() if note.key == key), None)) is not None:
        raise Stuck(f"process {left.pid} has been hanging in it for {left.seconds:.0f} s", hint="wait until it answers")
    before_work = die_with_parent(signal.SIGKILL)

    def begin(say: Say) -> None:
        before_work()
        progress = WorkProgress(say)
        progress.value(work(progress))

    errand = Errand(begin, notes=notes)
    found: list[_Value] = []
    stuck = gone = False
    try:
        pulse = _Pulse(errand.pid, patience)
        while not errand.ended and not stuck:
            for message in errand.wait(_LOOK if patience > 2 * _LOOK else patience / 2):
                if isinstance(message, _Value):
                    found.append(message)
                elif isinstance(message, _Line):
                    line(message.text)
                else:
                    moved(message)
            stuck = not errand.ended and pulse.stopped()
    finally:
        gone = errand.finish(key, key)
    if stuck:
        left_behind = "" if gone else f", and process {errand.pid} hangs in it until then"
        raise Stuck(f"nothing has moved for {patience:.0f} s: it was given up{left_behind}")
    if errand.error is not None:
        raise errand.error
    if not found:
        raise ChildProcessError(errand.died or "it ended without an answer")
    return found[0].value  # type: ignore[return-value]


class _Pulse:
    """Tells how long ago a thread of the process last ran. Time in which this process slept does not count."""

    def __init__(self, pid: int, patience: float) -> None:
        self._pid, self._patience = pid, patience
        self._switches, self._silent, self._looked = -1, 0.0, time.monotonic()

    def stopped(self) -> bool:
        now, seen = time.monotonic(), movements(self._pid)
        passed, self._looked = min(now - self._looked, 2 * _LOOK), now
        if seen != self._switches:
            self._switches, self._silent = seen, 0.0
        else:
            self._silent += passed
        return self._silent > self._patience


def movements(pid: int) -> int:
    """Return a number that changes when a thread of the process has run, or is about to: how often they have been taken off a
    processor, with the number of them."""
    count = 0
    try:
        threads = os.listdir(f"/proc/{pid}/task")
    except OSError:
        return -1
    for thread in threads:
        try:
            with open(f"/proc/{pid}/task/{thread}/status", "rb") as file:  # noqa: PTH123 - many times
                said = file.read()
        except OSError:
            continue
        count += 1 + sum(int(line.split()[1]) for line in said.splitlines() if b"ctxt_switches" in line)
        if b"\nState:\tR" in said:  # it waits for a processor, or has one to itself
            count += time.monotonic_ns()
    return count


_ANSWER = 15.0  # seconds for what a start does in the run directory


def no_answer(root: Path) -> NoAnswer:
    return NoAnswer(
        f"the run directory {root} does not answer: its file system hangs", hint=f"findmnt -T {to_type(root)}"
    )


def answers(rundir: RunDir, start: Callable[[], object]) -> bool:
    """Return whether ``start``, which reads and writes there, comes back when a child does it; whatever it raises."""

    def tried() -> bool:
        with suppress(Error, OSError):
            start()
        return True

    try:
        return bool(within(_ANSWER, tried, key=f"start in {rundir.root}"))
    except TimeoutError:
        return False
    except OSError:  # there can be no child now
        return True
