"""The guard's rank, run and limits, from its arguments first, then from the environment; its pace and its lines on stderr."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import timedelta
from math import inf
from pathlib import Path
from resource import RUSAGE_THREAD, getrusage, struct_rusage
from typing import Any, NamedTuple

from ftsupervise.guard.process_group import find_process_group
from ftsupervise.printable import log_line
from ftsupervise.rundir.paths import (
    ENV_AREA,
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_GUARD,
    ENV_RUN_DIR,
    ENV_STAGING,
    ENV_VERSION,
    RunDir,
)
from ftsupervise.version import VERSION

_RANK = ("RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK", "PMI_RANK")
_WORLD = ("WORLD_SIZE", "SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE")


class RankContext(NamedTuple):
    """The run, attempt and rank of this process."""

    rundir: RunDir | None
    attempt_dir: Path | None
    attempt: int | None
    rank: int
    world: int
    checkpoints: Path
    area: Path | None = None  # see fence.py; None: there is none
    staging: Path | None = None
    verify: str = "full"  # how a checkpoint is verified before the run goes on from it
    incremental: int = (
        0  # each n-th checkpoint is written in full, the others share files with the one before; 0: all are full
    )
    quarantine_after: int = 0  # attempts that fail from the same checkpoint; 0: never
    loss_back: int = 100  # steps to go back when the loss is no number or diverges
    observe: tuple[str, ...] = ()  # decisions that the launch says are only told


def run_owner(place: RankContext) -> tuple[int, ...]:
    """Return the account whose checkpoints are trusted besides ours and root's: the owner of the run directory, if it is still
    the one that this attempt began in. Raises OSError."""
    from ftsupervise.rundir.pinned import seen_with

    found = None if place.rundir is None else seen_with(place.rundir, place.attempt_dir)
    return () if found is None else (found.st_uid,)


class Limits(NamedTuple):
    """The limits of the process. Seconds; a share 0-1; None: not checked."""

    poll: float
    memory: float | None
    stop_before: float | None
    run_for: float | None
    gpu_memory: float | None = None
    save_every: float | None = None  # from one checkpoint to the next


def place(
    env: Mapping[str, str], run_dir: str | os.PathLike[str] | None, rank: int | None, world: int | None
) -> RankContext:
    """Return the place of this rank. ``rank`` and ``world`` are as given, else as the launcher says.

    Where the launcher knows of one rank, or of none, they are as the initialised process group says: the program may
    have started its ranks by itself.
    """
    root = run_dir or env.get(ENV_RUN_DIR)
    told = max(1, _int(env, _WORLD) or 1)
    if rank is None and world is None and told == 1 and (group := find_process_group()) is not None:
        rank, world = group.rank, group.world
    own = env.get(ENV_ATTEMPT_DIR) if not run_dir or str(run_dir) == env.get(ENV_RUN_DIR) else None
    return RankContext(
        rundir=RunDir(Path(root).absolute()) if root else None,
        attempt_dir=Path(own) if own else None,
        attempt=_int(env, (ENV_ATTEMPT,)) if own else None,
        rank=rank if rank is not None else _int(env, _RANK) or 0,
        world=world if world is not None else told,
        checkpoints=Path(env.get(ENV_CHECKPOINT_DIR) or "checkpoints").absolute(),
        area=Path(env[ENV_AREA]) if own and env.get(ENV_AREA) else None,
        staging=Path(env[ENV_STAGING]) if own and env.get(ENV_STAGING) else None,
        verify=env.get(ENV_GUARD + "VERIFY") or "full",
        incremental=_int(env, (ENV_GUARD + "INCREMENTAL",)) or 0,
        quarantine_after=(_int(env, (ENV_GUARD + "QUARANTINE_AFTER",)) or 0) if own else 0,
        observe=tuple(env.get(ENV_GUARD + "OBSERVE", "").split(",")) if own else (),
        loss_back=100 if (back := _int(env, (ENV_GUARD + "LOSS_BACK",))) is None else back,
    )


def limits(
    env: Mapping[str, str],
    poll: float | timedelta | None,
    memory: float | None,
    stop_before: float | timedelta | None,
    run_for: float | timedelta | None,
    gpu_memory: float | None = None,
) -> tuple[Limits, list[str]]:
    """Return the limits, and the variables that were not understood. Raises ValueError for an argument that makes no sense."""
    for name, share in (("memory", memory), ("gpu_memory", gpu_memory)):
        if share is not None and not 0 < share <= 1:
            raise ValueError(f"{name}={share!r} is not a share between 0 and 1; 95 % is 0.95")
    problems: list[str] = []

    def setting(name: str, given: float | timedelta | None, most: float = 1e9) -> float | None:
        if given is not None:
            return given.total_seconds() if isinstance(given, timedelta) else float(given)
        text = env.get(ENV_GUARD + name, "")
        if text in ("", "off"):
            return None
        try:
            value = float(text)
        except ValueError:
            value = -1.0
        if not 0 <= value <= most:
            problems.append(f"{ENV_GUARD}{name}={text!r} is not understood and not used")
            return None
        return value

    every = setting("POLL", poll)
    found = Limits(
        poll=1.0 if every is None else every,
        memory=setting("MEMORY", memory, 1.0) or None,
        stop_before=setting("STOP_BEFORE", stop_before),
        run_for=setting("RUN_FOR", run_for),
        gpu_memory=setting("GPU_MEMORY", gpu_memory, 1.0) or None,
        save_every=setting("SAVE_EVERY", None) or None,
    )
    return found, problems


def other_version(env: Mapping[str, str], rank: int) -> list[str]:
    """Return what is to be said of a guard that is not of its supervisor's version, by rank 0 alone."""
    theirs = env.get(ENV_VERSION, "")
    if rank or theirs in ("", VERSION):
        return []
    where = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))  # noqa: PTH100, PTH120
    words = (
        f"this guard is ftsupervise {VERSION} and its supervisor is {theirs}: remove {where} from the training's Python"
    )
    return [f"{words}, which then gets the guard of its supervisor, or install that version there"]


def warning_signal(env: Mapping[str, str]) -> int:
    """Return the signal by which Slurm warns, as the supervisor names it (``launch.signal``): SIGUSR1 unless it is another."""
    name = env.get(f"{ENV_GUARD}SIGNAL", "")
    found = getattr(signal, name, None)
    if isinstance(found, signal.Signals):
        return int(found)
    number = name.removeprefix("signal ")  # a real-time signal has no name
    return int(number) if number.isdecimal() and int(number) in signal.valid_signals() else signal.SIGUSR1


def whole(step: Any) -> int | None:
    """Return a step as loops have it (int, a number of NumPy's, a tensor of one element) as an int; None for what is no
    number.
    """
    try:
        return int(step)
    except Exception:  # NaN, None, or whatever a foreign type raises
        return None


def _int(env: Mapping[str, str], names: tuple[str, ...]) -> int | None:
    for name in names:
        if env.get(name, "").isdecimal():
            return int(env[name])
    return None


# The guard's few lines on stderr. A rank whose stderr is closed or full trains on.


class Voice:
    """Prints lines as rank ``rank`` of ``world``; a line printed ``once`` is not printed again by this process."""

    def __init__(self, rank: int, world: int) -> None:
        self._who = f"rank {rank}: " if world > 1 else ""
        self._told: set[str] = set()
        self._held: deque[str] = deque(maxlen=20)

    def say(self, text: str, *, for_all: bool = False) -> None:
        """Print one line; ``for_all``: it concerns every rank, so no rank is named."""
        try:
            print(log_line(f"{'' if for_all else self._who}{text}"), file=sys.stderr, flush=True)
        except (OSError, ValueError, AttributeError):
            return

    def once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(text)

    def later(self, text: str) -> None:
        """Keep a line of the side thread, for the loop to print with its next check.

        A process that is forked in the middle of a line would find stderr locked for good.
        """
        if text not in self._told:
            self._held.append(text)

    def say_held(self) -> None:
        while self._held:
            self.once(self._held.popleft())


# The guard checks as often as it was told, and more rarely where a check takes long.

NOW = -inf
_SLOW = (
    0.05  # seconds that a check may take; slower ones are spread so that they take no more than this share of the time:
)
_SHARE = 0.02
_LONGEST_POLL = 60.0


class Pace:
    """``due`` is the monotonic time of the next check. ``poll``: seconds between two checks."""

    def __init__(self, poll: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.due = NOW
        self.poll, self._clock = poll, clock
        self._began = self._slow_until = NOW  # a slow check before ``_slow_until`` is not the first one
        self._usage: struct_rusage | None = None

    def begin(self, end: float) -> float:
        """Begin a check and return the time.

        The next one is set first, at the deadline ``end`` at the latest, if that is to come.
        """
        self._began = now = self._clock()
        self._usage = getrusage(RUSAGE_THREAD)
        due = now + self.poll
        self.due = end if now < end < due else due
        return now

    def done(self, end: float) -> None:
        """End the check. A single slow one, as when a server is away for a moment, does not delay the next."""
        now = self._began
        if (took := self._clock() - now) <= _SLOW or (spent := min(took, self._own_time())) <= _SLOW:
            return
        if now < self._slow_until:
            due = now + max(self.poll, min(spent / _SHARE, _LONGEST_POLL))
            self.due = end if now < end < due else due
        self._slow_until = now + 2 * _LONGEST_POLL

    def _own_time(self) -> float:
        """Return the seconds that the check took: all of them if it waited for something, but not those in which this
        thread had no turn on a busy machine.
        """
        here, before = getrusage(RUSAGE_THREAD), self._usage
        if before is None or here.ru_nvcsw > before.ru_nvcsw:
            return inf
        return here.ru_utime + here.ru_stime - before.ru_utime - before.ru_stime
