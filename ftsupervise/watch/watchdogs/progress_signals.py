"""Gathers the signs of progress of one run through bounded probes; ages are by the clock of the file server.

``memory`` holds, for each sign, its last value and when it last moved (seconds of the file server's clock).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from statistics import median
from typing import TYPE_CHECKING, Any

from ftsupervise.model import Job, JobState
from ftsupervise.probe import Entry, Listing, Missing, NotSeen
from ftsupervise.rundir import log_lines
from ftsupervise.truth import Beat
from ftsupervise.units import show_size
from ftsupervise.watch.watchdogs import run_signs
from ftsupervise.watch.watchdogs.run_signs import newest_beats, number, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Hang
    from ftsupervise.watch import Look

# Does a run stand still, by what it shows and by what is usual for it? Pure: seconds in, a verdict out.
#
# A signal is one thing that moves when the run makes progress. A run is hung only if every signal it has stands still for
# longer than its bound; if one of them could not be seen, the answer is unknown. The bounds come from the run's own past:
#
#   training, phases told      10 of its own step times, at least 10 min, or twice the longest pause that ended well
#   another phase              1 h (or as set for it), or twice the longest of that phase that ended well and 10 min more
#   only a log, or no phases   1 h, for a save and an evaluation in a row look like this; or 10 step times, or twice the longest
#                              pause that ended well
#   started, nothing moved yet as a phase, "start"
#
# After a day of watching, what is usual is known, and the hours shrink to twice the longest pause and 10 min more.

TRAIN = "train"
START = "start"
UNTOLD = ""  # the guard reports no phase
_DAY = 86_400.0
_OFTEN = 3  # times that a phase must be seen before its length is known
_MORE = 600.0  # seconds: checks are minutes apart, so a pause was longer than it was seen to be


@dataclass(frozen=True)
class Signal:
    """One sign of progress. ``age``: seconds since it last moved, by the file server's clock; None: it never has."""

    name: str  # "step", "beat", "log", "checkpoint", "gpu"
    age: float | None
    words: str = ""
    blind: str = ""  # why it could not be seen


@dataclass(frozen=True)
class ProgressHistory:
    """The usual times of this run: step times (s), pauses that ended well (s) by phase, and for how long it has been
    watched (s).
    """

    step_times: Sequence[float] = ()
    pauses: Mapping[str, Sequence[float]] = field(default_factory=dict)
    watched: float = 0.0
    tells_phases: bool = False  # the loop has reported another phase than start and train

    def longest(self, phase: str) -> float:
        return max(self.pauses.get(phase, ()), default=0.0)

    @property
    def step_time(self) -> float | None:
        return median(self.step_times) if self.step_times else None


@dataclass(frozen=True)
class StallLimits:
    """The settings of the judge, seconds."""

    at_least: float = 600.0
    quiet: float = 3600.0
    slow: float = 3600.0
    at_most: float = 14_400.0
    times: float = 10.0
    phases: Mapping[str, float] = field(default_factory=dict)


class Progress(Enum):
    MOVING = "moving"
    HUNG = "hung"
    UNSEEN = "unseen"  # some signal could not be seen, and none moves
    NOTHING = "nothing"  # there is no signal to judge by


@dataclass(frozen=True)
class StallVerdict:
    state: Progress
    age: float  # seconds since anything moved
    bound: float  # the limit of that age
    phase: str
    words: str  # the newest sign of progress


def bound(phase: str, past: ProgressHistory, limits: StallLimits) -> float:
    """Return for how many seconds a run may usually stand still in ``phase``."""
    pause = past.longest(phase)
    if phase not in (TRAIN, UNTOLD):
        if phase in limits.phases:
            return limits.phases[phase]
        if past.watched >= _DAY and len(past.pauses.get(phase, ())) >= _OFTEN:
            return max(limits.at_least, min(2 * pause + _MORE, limits.at_most))
        return max(limits.slow, min(2 * pause + _MORE, limits.at_most))
    if phase == TRAIN and past.tells_phases:
        floor = limits.at_least
    elif past.watched >= _DAY:
        floor = min(limits.quiet, max(limits.at_least, 2 * pause + _MORE))
    else:
        floor = limits.quiet
    steps = limits.times * (past.step_time or 0.0)
    return max(floor, steps, min(2 * pause, limits.at_most))


def judge(
    signals: Iterable[Signal], started: float, phases: Iterable[str], past: ProgressHistory, limits: StallLimits
) -> StallVerdict:
    """``started``: seconds since the command (or its job) was started; what moved before that does not count.

    ``phases``: what the ranks are doing, as far as the guard tells; the most patient of them counts.
    """
    signals = tuple(signals)
    moved = [signal for signal in signals if signal.age is not None and signal.age < started]
    blind = [signal for signal in signals if signal.blind]
    newest = min(moved, key=lambda signal: signal.age or 0.0, default=None)
    doing = (tuple(phases) or (UNTOLD,)) if newest is not None else (START,)
    phase = max(doing, key=lambda one: bound(one, past, limits))
    limit = bound(phase, past, limits)
    age = started if newest is None or newest.age is None else newest.age
    if age < limit:
        state = Progress.MOVING
    elif blind:
        state = Progress.UNSEEN
    else:
        state = Progress.HUNG if signals else Progress.NOTHING
    return StallVerdict(state, age, limit, phase, newest.words if newest is not None else "")


AT_WORK = frozenset({JobState.RUNNING, JobState.SIGNALING, JobState.RESIZING, JobState.OTHER})


@dataclass(frozen=True)
class Signs:
    """The signs that were seen.

    ``phases`` are those of the newest attempt's ranks; ``beats`` are those read, with the age of each.
    """

    signals: tuple[Signal, ...]
    phases: frozenset[str]
    started: float  # seconds since the command, or else its job, was started; infinite if that is not known
    beats: tuple[tuple[Beat, float], ...]
    step: int | None
    beat_every: float  # seconds between two beats of one rank
    naive: str  # why ages are by this node's own clock; "" if they are not


def gather(look: Look, settings: Hang, job: Job | None) -> Signs:
    """Gather all signs of the run. ``job`` is the one at work, if the scheduler could tell."""
    ahead = look.probe.clock_ahead(look.rundir.watch)
    if isinstance(ahead, Missing):  # the directory was not made yet
        ahead = look.probe.clock_ahead(look.rundir.root)
    naive = "" if isinstance(ahead, float) else ahead.why if isinstance(ahead, NotSeen) else "there is no run directory"
    now = look.now.timestamp() + (ahead if isinstance(ahead, float) else 0.0)
    wanted = settings.signals or ("step", "beat", "checkpoint", "log")
    signals: list[Signal] = []
    beats, blind = newest_beats(look, now)
    step = max((beat.step for beat, _ in beats if beat.step is not None), default=None)
    if "beat" in wanted:
        signals += _beat_signal(beats, blind)
    if "step" in wanted:
        signals += _step_of_beats(look.memory, beats, step, now, blind)
    if "step" in wanted or "log" in wanted:
        signals += _of_log(look, settings, wanted)
    if "checkpoint" in wanted:
        signals += _checkpoint(look, now)
    if "gpu" in wanted:
        signals += _gpu(look, now)
    look.memory["looked"] = now
    return Signs(
        signals=tuple(_without_weak(signals, look.memory) if not settings.signals else signals),
        phases=frozenset(beat.phase for beat, _ in beats),
        started=_started(look, job, now),
        beats=beats,
        step=step if step is not None else look.memory.get("step", {}).get("step in the log"),
        beat_every=max((number(beat.facts.get("every")) or 0.0 for beat, _ in beats), default=0.0),
        naive=naive,
    )


def _without_weak(signals: list[Signal], memory: dict[str, Any]) -> list[Signal]:
    """Leave out weak signs if the run has ever shown a better one.

    A growing log proves little: runs have hung for hours while their launcher went on talking.
    """
    strong = [signal for signal in signals if signal.name != "log"]
    if any(signal.age is not None for signal in strong):
        memory["strong"] = True
    return strong if memory.get("strong") else signals


def _moved(memory: dict[str, Any], name: str, value: object, at: float) -> float:
    """Return when ``name`` last changed its value: ``at`` if it changed now, or was not known before.

    A change since the last check happened after it, however old the file claims to be (some clients write mtime late).
    """
    values, times = memory.setdefault("step", {}), memory.setdefault("moved", {})
    if name not in times:
        values[name], times[name] = value, at
    elif values.get(name) != value:
        values[name], times[name] = value, max(at, memory.get("looked", at))
    return float(times[name])


# ------------------------------------------------------------------------------------------------------------ beats


def _beat_signal(beats: tuple[tuple[Beat, float], ...], blind: str) -> list[Signal]:
    if blind:
        return [Signal("beat", None, blind=blind)]
    if not beats:
        return []
    beat, age = min(beats, key=lambda pair: pair[1])
    return [Signal("beat", age, f"rank {beat.rank} on {beat.host} in phase {beat.phase or 'unnamed'}")]


def _step_of_beats(
    memory: dict[str, Any], beats: tuple[tuple[Beat, float], ...], step: int | None, now: float, blind: str
) -> list[Signal]:
    if blind:
        return [Signal("step", None, blind=blind)]
    if step is None:
        return []
    youngest = min(age for beat, age in beats if beat.step == step)
    moved = _moved(memory, "step", step, now - youngest)
    return [Signal("step", max(0.0, now - moved), f"step {step}")]


# -------------------------------------------------------------------------------------------------- log, checkpoints


def _of_log(look: Look, settings: Hang, wanted: tuple[str, ...]) -> list[Signal]:
    """Return two signs of the log: the step in it, and its growth by lines that are not our own."""
    mine = look.memory.setdefault("log", {})
    piece = run_signs.read_on(look, settings.log, mine)
    if isinstance(piece, NotSeen):
        return [Signal("step in the log" if "step" in wanted else "log", None, blind=piece.sentence)]
    if isinstance(piece, Missing):
        return []
    now = server_now(look, piece.path.parent)
    pattern = re.compile(settings.pattern) if settings.pattern else log_lines.STEP
    signals = []
    step = log_lines.last_step(piece.data, pattern)
    if step is None:
        step = look.memory.get("step", {}).get("step in the log")
    if "step" in wanted and step is not None:
        moved = _moved(look.memory, "step in the log", step, piece.entry.mtime)
        signals.append(Signal("step in the log", max(0.0, now - moved), f"step {step} in {piece.path.name}"))
    if "log" in wanted:
        theirs = piece.fresh or any(True for _ in log_lines.lines(piece.data))
        grown = mine.get("grown", 0) + (1 if theirs and mine["size"] != mine.get("seen") else 0)
        mine.update(grown=grown, seen=mine["size"])
        moved = _moved(look.memory, "log", grown, piece.entry.mtime)
        words = f"{piece.path.name} at {show_size(piece.entry.size)}"
        signals.append(Signal("log", max(0.0, now - moved), words))
    return signals


def _checkpoint(look: Look, now: float) -> list[Signal]:
    folder = look.run.checkpoints.path or look.rundir.checkpoints
    got = look.probe.listing(folder, most=5000)
    if isinstance(got, NotSeen):
        return [Signal("checkpoint", None, blind=got.sentence)]
    if isinstance(got, Missing) or not got.entries:
        return []
    newest = max(got.entries, key=lambda entry: entry.mtime)
    now = server_now(look, folder)
    return [Signal("checkpoint", max(0.0, now - newest.mtime), f"checkpoint {newest.name}")]


def _gpu(look: Look, now: float) -> list[Signal]:
    """Return the sign that a GPU of this node is at work; only where the watch runs beside the job."""
    from ftsupervise.watch.watchdogs import gpu

    seen = gpu.ask(look.probe)
    if isinstance(seen, str):
        return [Signal("gpu", None, blind=seen)]
    at_work = any((one.utilisation or 0) > 0.05 for one in seen)
    moved = now if at_work else look.memory.get("moved", {}).get("gpu")
    if moved is None:
        return [Signal("gpu", None)]
    look.memory.setdefault("moved", {})["gpu"] = moved
    return [Signal("gpu", max(0.0, now - moved), "a GPU at work")]


# ------------------------------------------------------------------------------------------------------------ start


def _started(look: Look, job: Job | None, now: float) -> float:
    """Seconds since the newest of: the job's start, the start or the end of the newest attempt.

    The job's start is by Slurm's clock, the others by the file server's; both are taken to be the cluster's time.
    """
    ages = [now - job.start_time.timestamp()] if job is not None and job.start_time is not None else []
    attempts = look.probe.listing(look.rundir.attempts, most=20_000)
    if isinstance(attempts, Listing):
        names = sorted(
            (entry.name for entry in attempts.entries if entry.name.isascii() and entry.name.isdigit()), key=int
        )
        for page in ("start.json", "end.json") if names else ():
            entry = look.probe.look(look.rundir.attempts / names[-1] / page)
            if isinstance(entry, Entry):
                ages.append(now - entry.mtime)
    if not ages and job is None:
        return float("inf")
    if not ages and job is not None:  # the scheduler does not say: counted from when it was first seen
        known = look.memory.setdefault("first_seen", {})
        if job.id not in known:
            known.clear()
            known[job.id] = now
        ages.append(now - float(known[job.id]))
    return max(0.0, min(ages))
