"""Heartbeat pages: one rank's state in memory that its node's other processes can read. Some 100 ns a step, no system call.

    DIR/rank-N     one page per rank of this node, made by that rank alone; DIR is node-local (/dev/shm) and ours (0700)
    DIR/stack-N    its stacks, on request (guard/heartbeat.py)
    DIR/server-N   where its worker server listens, if it has one (ranks/evidence.py)

The page is written in place: every field is one aligned word, so that a reader sees the old or the new one, and the name of the
phase stands under a counter that is odd while it changes. All times are CLOCK_MONOTONIC, which all processes of a host share.
Beats in the run directory say the same slowly and everywhere; who cannot make a page does without.

Standard library only: the guard imports this inside the training loop.
"""

import json
import mmap
import os
import re
import signal
import struct
from collections.abc import Sequence
from datetime import datetime, timedelta
from itertools import islice
from math import nan
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple, Optional, Union

from ftsupervise.host import files, ownership, processes
from ftsupervise.host.ownership import distrust_in, make_folder
from ftsupervise.rundir.paths import ENV_WATCHER, RunDir, write_whole
from ftsupervise.rundir.records import as_count, decode, encode, parse_object, read_json, read_record, write_json
from ftsupervise.truth import Beat, HeartbeatSample

ENV_PAGES = "FTSUPERVISE_PAGES"  # the directory of this attempt's pages on every node, set by ``ftsupervise run``

STACK_SIGNAL = signal.SIGRTMIN + 7  # asks a rank for its stacks (guard/heartbeat.py); no known program uses it

# where PyTorch's worker server of a rank listens: the path of a socket, and for the first one also 127.0.0.1:PORT
ENV_SERVERS = ("FTSUPERVISE_WORKER_SERVER", "TORCH_WORKER_SERVER_SOCKET")

EXIT_FIFO = "exits-"  # begins the names of the exit FIFOs beside the pages' directory (ranks/shm_dir.py)

SAVE_FAILED = "save_failed"  # a fact of a beat: why the newest checkpoint in the background was not saved; "": it was
SIZE = 256  # bytes
_MAGIC = 0x3147504554535446  # "FTSETPG1"
_NONE = -(1 << 63)  # no step yet
# Words of eight bytes. Times and flags are doubles and integers in the same words, read through two views.
_IDENTITY, _PID, _START, _ATTEMPT, _STEP, _STEPPED, _BEATEN, _FLAGS, _TURN, _CODE = range(1, 11)
_PHASE, _PHASE_SIZE = 96, 64
_SINCE, _SAVING, _SAVED, _FIRST, _FIRST_AT, _LOSS, _LAST_STEP, _TOLD = range(20, 28)
_LEAVING = 1  # an exception was raised, the loop was asked to stop, or the interpreter exits normally
_FAILED = 2  # it was an exception
_ENDS = 4  # the interpreter exits because of it, with _CODE
_TRIES = 8


class HeartbeatPage:
    """The rank's own page. ``step`` is the hot call."""

    __slots__ = ("_d", "_map", "_q", "path", "pid")

    def __init__(self, directory: Union[str, os.PathLike[str]], rank: int, attempt: Optional[int]) -> None:
        """Make the page. Raises OSError when there can be none here: no such memory, full, or a directory that is not ours."""
        folder = Path(directory)
        for one in (folder.parent, folder):  # each 0700, whatever the umask; another rank may be first
            try:
                os.mkdir(one, mode=0o700)  # noqa: PTH102
            except FileExistsError:
                pass
        found = os.lstat(folder)
        if found.st_uid != os.getuid() or found.st_mode & 0o022:
            raise PermissionError(13, "not ours alone", str(folder))
        self.path = folder / f"rank-{rank}"
        fd, temp = files.create_temporary(folder, self.path.name, 0o600, read=True)
        try:
            os.posix_fallocate(fd, 0, SIZE)  # a full memory fails here, and not by SIGBUS in the loop
            self._map = mmap.mmap(fd, SIZE)
        finally:
            os.close(fd)
        view = memoryview(self._map)
        self._q, self._d = view.cast("q"), view.cast("d")
        self.pid = os.getpid()
        self._q[_IDENTITY], self._q[_PID] = rank, self.pid
        self._q[_START] = processes.identity(self.pid) or 0
        self._q[_ATTEMPT] = attempt or 0
        self._q[_STEP] = self._q[_SAVED] = self._q[_FIRST] = self._q[_LAST_STEP] = _NONE
        self._d[_LOSS] = nan
        self._d[_STEPPED] = self._d[_BEATEN] = monotonic()
        self.phase("start")
        self._q[0] = _MAGIC
        os.replace(temp, self.path)

    def step(self, step: Any, now: float) -> None:
        """Note the step just made, at monotonic ``now``.

        A step that is no whole number leaves the last one, with the new time.
        """
        try:
            self._q[_STEP] = step
        except (TypeError, ValueError, struct.error):
            try:
                self._q[_STEP] = int(step)
            except Exception:  # NaN, None, or whatever a foreign type raises
                pass
        self._d[_STEPPED] = now

    def beat(self, now: float) -> None:
        """Report that the rank is alive, without a step."""
        self._d[_BEATEN] = now

    def phase(self, name: str, saving: float = 0.0) -> None:
        """Note the phase that begins now. ``saving``: seconds in all saves that are over."""
        text = name.encode("utf-8", "replace")[: _PHASE_SIZE - 1]
        self._q[_TURN] += 1  # odd: being written
        self._map[_PHASE : _PHASE + _PHASE_SIZE] = text.ljust(_PHASE_SIZE, b"\0")
        self._d[_BEATEN] = self._d[_SINCE] = monotonic()
        self._d[_SAVING] = saving
        self._q[_TURN] += 1

    def first(self, step: Optional[int]) -> None:
        """Note that the first step was made just now."""
        self._d[_FIRST_AT] = monotonic()
        self._q[_FIRST] = _whole(step)

    def saved(self, step: Optional[int]) -> None:
        self._q[_SAVED] = _whole(step)

    def loss(self, value: float) -> None:
        self._d[_LOSS] = value

    def last_step(self, step: Optional[int]) -> None:
        """Note the step after which the training is complete."""
        self._q[_LAST_STEP] = _whole(step)

    def told(self) -> None:
        """Note that SIGTERM has come to this rank. Called by the handler of the signal."""
        self._q[_TOLD] = 1

    @property
    def in_order(self) -> bool:
        """Return whether the rank stops without a failure."""
        return self._q[_FLAGS] & (_LEAVING | _FAILED) == _LEAVING

    def leaving(self) -> None:
        """Report that this rank stops: from here on it is neither hung nor making progress."""
        self._q[_FLAGS] |= _LEAVING

    def stays(self) -> None:
        """Report that the exception was caught: the loop goes on, or has ended."""
        self._q[_FLAGS] = 0

    def failed(self) -> None:
        """Report that an exception leaves the loop."""
        self._q[_FLAGS] |= _LEAVING | _FAILED

    def ends(self, code: int) -> None:
        """Report that the interpreter exits after a failure, with exit code ``code``: only teardown follows. Never raises."""
        self._q[_CODE] = code
        self._q[_FLAGS] |= _LEAVING | _FAILED | _ENDS
        base = self.path.parent.parent
        try:
            fifos = [name for name in os.listdir(base) if name.startswith(EXIT_FIFO)]
        except OSError:
            return
        for name in fifos:
            try:
                fd = os.open(base / name, os.O_WRONLY | os.O_NONBLOCK | os.O_NOFOLLOW | os.O_CLOEXEC)
            except OSError:  # it has no reader any more
                continue
            try:
                os.write(fd, b"\0")
            except OSError:  # full of such bytes
                pass
            finally:
                os.close(fd)


def _whole(step: Optional[int]) -> int:
    return step if step is not None and -(1 << 63) < step < 1 << 63 else _NONE


def _step(word: int) -> Optional[int]:
    return None if word == _NONE else word


def stack_path(directory: Union[str, os.PathLike[str]], rank: int) -> Path:
    """Return the file to which the rank writes its stacks on request."""
    return Path(directory, f"stack-{rank}")


def server_note(directory: Union[str, os.PathLike[str]], rank: int) -> Path:
    """Return the file in which the rank says where its worker server listens (``ranks/evidence.py``)."""
    return Path(directory, f"server-{rank}")


def read_page(path: Path) -> Optional[HeartbeatSample]:
    """Return the state of a rank now; None when its page is missing or incomplete. Never blocks: node-local memory."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        return read_open(fd)
    finally:
        os.close(fd)


def read_open(fd: int) -> Optional[HeartbeatSample]:
    """Return the same of a page that is open already."""
    try:
        for _ in range(_TRIES):
            reading, turn = _parse(os.pread(fd, SIZE, 0))
            if reading is None or not turn & 1:
                return reading
        return reading
    except OSError:
        return None


def read_pages(directory: Union[str, os.PathLike[str]]) -> tuple[HeartbeatSample, ...]:
    """Return all ranks of this node that have a page in ``directory``, by rank. Raises OSError if it cannot be read."""
    try:
        names = [name for name in os.listdir(directory) if name.startswith("rank-")]
    except FileNotFoundError:
        return ()
    found = (read_page(Path(directory, name)) for name in names)
    return tuple(sorted((one for one in found if one is not None), key=lambda one: one.rank))


def _parse(raw: bytes) -> tuple[Optional[HeartbeatSample], int]:
    if len(raw) < SIZE:
        return None, 0
    q, d = memoryview(raw).cast("q"), memoryview(raw).cast("d")
    if q[0] != _MAGIC:
        return None, 0
    turn, loss = q[_TURN], d[_LOSS]
    name = raw[_PHASE : _PHASE + _PHASE_SIZE].partition(b"\0")[0].decode("utf-8", "replace")
    return HeartbeatSample(
        rank=q[_IDENTITY],
        attempt=q[_ATTEMPT],
        pid=q[_PID],
        pid_start=q[_START],
        step=_step(q[_STEP]),
        phase=name,
        stepped=d[_STEPPED],
        beaten=max(d[_BEATEN], d[_STEPPED]),
        leaving=bool(q[_FLAGS] & _LEAVING),
        failed=bool(q[_FLAGS] & _FAILED),
        code=q[_CODE] if q[_FLAGS] & _ENDS else None,
        since=d[_SINCE],
        saving=d[_SAVING],
        saved=_step(q[_SAVED]),
        first=_step(q[_FIRST]),
        first_at=d[_FIRST_AT],
        loss=None if loss != loss else loss,
        last_step=_step(q[_LAST_STEP]),
        told=bool(q[_TOLD]),
    ), turn


# Beats: each rank's newest proof of progress, one small file per rank, rewritten whole by that rank alone.
#
# This is the slow, universal form (any shared file system, any number of nodes). A reader
# calls ``read_beats`` and need not know how the beats got there.

WRITES_PER_SECOND = 200  # of all ranks of a run together, into one shared directory


def interval(world: int, wanted: float) -> float:
    """Return the seconds between two beats of one rank, so that ``world`` ranks together stay below WRITES_PER_SECOND."""
    return max(wanted, world / WRITES_PER_SECOND)


def write_beat(rundir: RunDir, beat: Beat, area: Optional[Path] = None) -> None:
    """Replace this rank's beat. Not synced: after a power cut an older beat, or none, is just as true. Raises OSError.

    ``area``: made there, so that the beats of a newer attempt, which has sealed it, are never replaced (``fence.py``).
    """
    write_whole(rundir.beats / f"rank-{beat.rank}", json.dumps(encode(beat)) + "\n", sync=False, area=area)


def read_beats(rundir: RunDir) -> tuple[Beat, ...]:
    """Return the newest beat of every rank that has one, by rank. Raises OSError if the directory cannot be read.

    () when there is none yet. A beat that is damaged or vanishes meanwhile is left out.
    """
    try:
        names = os.listdir(rundir.beats)
    except FileNotFoundError:
        return ()
    found = (_read_beat(f"{rundir.beats}/{name}") for name in names if name.startswith("rank-"))
    return tuple(sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank))


def of_the_group(beats: Sequence[Beat]) -> tuple[Beat, ...]:
    """Return ``beats`` of one attempt without those of ranks that the others have gone on without. Pure.

    torchrun forms its group anew, and may do so with fewer. The newest beat says how many there are.
    """
    newest = max((beat for beat in beats if "world" in beat.facts), key=lambda beat: beat.at, default=None)
    world = as_count(newest.facts["world"]) if newest is not None else None
    return tuple(beat for beat in beats if not world or beat.rank < world)


def _read_beat(path: str) -> Optional[Beat]:
    try:
        return read_record(Beat, path, limit=64_000)
    except (OSError, ValueError):
        return None


def parse_beat(data: bytes) -> Optional[Beat]:
    """Return the beat in the text of a beat file; None if it is damaged or half there."""
    try:
        return decode(Beat, parse_object(data), lenient=True)
    except ValueError:
        return None


# The watchers of a run: one small file for each in RUN/watch/watchers, rewritten at every tick.
#
# The run's guard and the other watchers read it, so that the death of a watch is noticed. Only a watcher that states its
# interval (``every``) can be late. A repeating watch knows it, an entry of our crontab is told it by the tick that runs it, and
# one from another crontab finds it in its own page. ``ftsupervise watch`` typed once states none.

LATE = 3  # times its own interval, and …
MOST_WATCHERS = 200  # watchers of one run that are read
_LISTED = 10_000
LONGEST = timedelta(days=1)  # the interval of a crontab
_ENTRY = r"cron-[A-Za-z0-9._-]{1,100}"
AT_LEAST = timedelta(minutes=10)  # … never sooner: a tick over a thousand runs, a node that is rebooted


class Watcher(NamedTuple):
    name: str
    host: str
    at: datetime
    every: Optional[timedelta] = None
    pid: int = 0

    def late_by(self, now: datetime) -> Optional[timedelta]:
        """Return the time since its last check, if that is too long; None while all is well."""
        silent = now - self.at
        if self.every is None or silent <= max(self.every * LATE, AT_LEAST):
            return None
        return silent


def watcher_folder(rundir: RunDir) -> Path:
    return rundir.watch / "watchers"


def own_watcher() -> str:
    """Return the name of this watch: its host and account, or the entry of our crontab, which runs on many hosts."""
    entry = os.environ.get(ENV_WATCHER, "")
    return entry if re.fullmatch(_ENTRY, entry) else f"{os.uname().nodename}-{os.getuid()}"


def watch_interval(rundir: RunDir, now: datetime, meant: timedelta, *, typed: bool) -> Optional[timedelta]:
    """Return the interval that a watch states that is started anew for each check; None where it is not known.

    A crontab starts it again and again: it is the time since its last check, or ``meant`` where that is longer. A person
    who types it (``typed``) once promises nothing, and takes back no promise of a crontab on the same host.
    """
    before = _read(watcher_folder(rundir) / own_watcher(), rundir.watch.stat())
    if typed or before is None:
        return before.every if before is not None else None
    return min(max(meant, now - before.at), LONGEST)


def write_watcher(rundir: RunDir, now: datetime, every: Optional[timedelta]) -> None:
    """Record a check of this watcher. Raises OSError."""
    place = watcher_folder(rundir)
    make_folder(place)
    host, pid = os.uname().nodename, os.getpid()
    with ownership.held_to_write(place) as here:
        write_json(here / own_watcher(), Watcher(own_watcher(), host, now, every, pid), sync=False, indent=None)


def remove_watcher(rundir: RunDir) -> None:
    """Record that this watcher was stopped on purpose, so that it is not missed."""
    try:
        with ownership.held_to_write(watcher_folder(rundir)) as here:
            os.unlink(here / own_watcher())
    except OSError:
        return


def remove_watchers(rundir: RunDir, beginning: str) -> None:
    """The same for all whose names begin so."""
    try:
        with ownership.held(watcher_folder(rundir)) as here:
            for name in os.listdir(here):
                if name.startswith(beginning):
                    os.unlink(here / name)
    except (OSError, ownership.NotTrusted):
        return


def watchers(rundir: RunDir) -> tuple[Watcher, ...]:
    """Return all watchers that have not signed off, MOST_WATCHERS at most. Raises OSError when the directory cannot be read."""
    return look_at_watchers(rundir)[0]


def look_at_watchers(rundir: RunDir) -> tuple[tuple[Watcher, ...], str]:
    """Return ``watchers``, and a clause about a fault in the folder; "" if there is none. Raises OSError."""
    place = watcher_folder(rundir)
    try:
        whose = place.stat()
        with os.scandir(place) as entries:
            names = [entry.name for entry in islice(entries, _LISTED) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return (), ""
    if own_watcher() in names:  # a flooded folder does not push out the watcher that asks
        names = [own_watcher(), *(name for name in names if name != own_watcher())]
    found = (_read(place / name, whose) for name in names[:MOST_WATCHERS])
    odd = f"holds {len(names)} files or more, of which {MOST_WATCHERS} are read" if len(names) > MOST_WATCHERS else ""
    return tuple(sorted((watcher for watcher in found if watcher is not None), key=lambda one: one.name)), odd


def _read(path: Path, whose: os.stat_result) -> Optional[Watcher]:
    """Return the watcher; None for a page that is damaged, or by an account with which the watch is not shared."""
    try:
        raw = read_json(path, limit=10_000, distrust=distrust_in(whose, path))
        return None if raw is None else decode(Watcher, {**raw, "name": path.name}, lenient=True)
    except (OSError, ValueError):
        return None
