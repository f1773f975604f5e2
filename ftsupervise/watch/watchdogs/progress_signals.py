"""Gathers the signs of progress of one run through bounded probes; ages are by the clock of the file server.

``memory`` holds, for each sign, its last value and when it last moved (seconds of the file server's clock).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from ftsupervise.model import Job, JobState
from ftsupervise.probe import Entry, Listing, Missing, NotSeen
from ftsupervise.rundir import log_lines
from ftsupervise.rundir.stalls import Signal
from ftsupervise.rundir.step_reader import StepReader
from ftsupervise.truth import Beat
from ftsupervise.units import checkpoint_words, show_size
from ftsupervise.watch.watchdogs import run_signs
from ftsupervise.watch.watchdogs.own_checkpoints import folder_of, newest_save
from ftsupervise.watch.watchdogs.run_signs import newest_beats, number, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Hang
    from ftsupervise.watch import Look

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
        signals += _checkpoint(look, settings)
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
    if "source" in beat.facts and not beat.phase:  # read from the output, or seen of its processes
        return [Signal("beat", age, f"a sign of life on {beat.host}")]
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
    signals = []
    step = _step_in(piece.data, settings.pattern, mine)
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


def _step_in(data: bytes, pattern: str | None, memory: dict[str, Any]) -> int | None:
    """Return the last step in lines that were added to the log. Without a person's pattern it is what status shows, too: a word
    such as ``step 1200: val loss`` counts only while nothing has behaved like a step.
    """
    if pattern:
        return log_lines.last_step(data, re.compile(pattern))
    reader = StepReader()
    reader.feed(data, 0.0)
    memory["read"] = memory.get("read", False) or reader.step is not None
    return reader.step if memory["read"] else log_lines.last_step(data)


def _checkpoint(look: Look, settings: Hang) -> list[Signal]:
    """Return the sign that a checkpoint of this run was saved; whatever else moves in their folder is none."""
    found = newest_save(look, look.memory.setdefault("saves", {}), settings.slow.total_seconds())
    if isinstance(found, NotSeen):
        return [Signal("checkpoint", None, blind=found.sentence)]
    if found is None:
        return []
    name, at = found
    now = server_now(look, folder_of(look))
    return [Signal("checkpoint", max(0.0, now - at), checkpoint_words(name))]


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
