"""Judges the steps per hour by the run's own past: a slow node or a sick link makes a run crawl without ever stopping it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.findings import Finding, Words
from ftsupervise.rundir import log_lines
from ftsupervise.truth import TRAIN, UNTOLD, Health
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs import run_signs
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK
from ftsupervise.watch.watchdogs.run_signs import newest_beats, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Throughput as Settings
    from ftsupervise.watch import Look

_KEEP = 100  # windows remembered
_SAMPLES = 200  # in a window: ticks may come every minute, and a window may be a day
_KNOWN = 5  # windows before a pace is called usual
WORDS = Words(
    "The run takes that much longer, and pays for all its nodes meanwhile.",
    "ftsupervise status {run_dir}",
    "look for a slow node: temperatures, clocks, the network; then launch.exclude it",
)


def pace_of(samples: Sequence[Sequence[float]], window: float) -> float | None:
    """Steps per second over the last ``window`` seconds of (seconds of training, steps) samples; None if they span less."""
    last = samples[-1]
    first = next((s for s in reversed(samples) if last[0] - s[0] >= window), None)
    return (last[1] - first[1]) / (last[0] - first[0]) if first is not None else None


def usual_pace(past: Sequence[float]) -> float | None:
    """The median of past windows; saves and evaluations are in them as in the window they are compared with."""
    return median(past) if len(past) >= _KNOWN else None


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    memory = look.memory
    if look.jobs is not None and not any(job.state in AT_WORK for job in look.jobs):
        memory.pop("last", None)
        yield look.finding("pace", Health.OK, "no job of the run is running", WORDS)
        return
    found = _step(look)
    if isinstance(found, str):
        yield look.finding("pace", Health.UNKNOWN, f"throughput not seen: {found}", WORDS)
        return
    window = settings.window.total_seconds()
    count_training(memory, found, window)
    yield judge_pace(look, settings, memory, window)


def count_training(memory: dict[str, Any], found: NewestStep, window: float) -> None:
    """Add what was trained since the last look to ``memory``: the clock runs only while the run trains.

    An evaluation or a save is no slow training, and a window with one in it is not compared with one that has none. A time at
    whose begin or end another phase was seen counts on neither side.
    """
    last = memory.get("last")
    known = isinstance(last, list) and len(last) == 3 and memory.get("start") == found.start
    samples: list[list[float]] = memory.get("trained") or [[0.0, 0.0]]
    if not known or last is None or found.step < last[1]:
        pass  # another start: the time between is not training, and what is trained again counts from here
    elif found.at > last[0]:
        clock, steps = samples[-1]
        if found.trains and last[2]:
            samples.append([clock + found.at - last[0], steps + found.step - last[1]])
        if len(samples) > 2 and samples[-1][0] - samples[-3][0] < window / _SAMPLES:
            del samples[-2]
    else:
        return
    now = samples[-1][0]
    memory.pop("samples", None)
    memory.update(
        start=found.start,
        last=[found.at, found.step, found.trains],
        trained=[one for one in samples if now - one[0] <= 2 * window],
    )


def judge_pace(look: Look, settings: Settings, memory: dict[str, Any], window: float) -> Finding:
    samples = memory["trained"]
    pace = pace_of(samples, window)
    past: list[float] = memory.setdefault("past", [])
    usual = usual_pace(past)
    if pace is None:
        text = f"measuring: no whole {show_duration(window)} of training seen yet"
        return look.finding("pace", Health.OK, text, WORDS)
    slow = usual is not None and pace < settings.least * usual
    if (
        samples[-1][0] - memory.get("window_to", 0.0) >= window and not slow
    ):  # that do not overlap, and only healthy ones
        past.append(pace)
        del past[:-_KEEP]
        memory["window_to"] = samples[-1][0]
    shown = f"{pace * 3600:.4g} steps an hour"
    if usual is None:
        return look.finding("pace", Health.OK, f"{shown}; what is usual is not known yet", WORDS)
    text = f"{shown}, {pace / usual:.0%} of the usual {usual * 3600:.4g}"
    limit = f"{settings.least:.0%} of the usual"
    return look.finding("pace", Health.of(slow), text, WORDS, value=shown, limit=limit)


class NewestStep(NamedTuple):
    """The newest step, by the clock of the file server."""

    at: float
    step: int
    start: str  # which one: the attempt, or the log
    trains: bool = True  # False in another phase


def _step(look: Look) -> NewestStep | str:
    """Return the newest step from beats, else from the log; or why it is unknown."""
    now = server_now(look)
    beats, blind = newest_beats(look, now)
    steps = [(beat.step, now - age, beat) for beat, age in beats if beat.step is not None]
    if steps:
        step, at, beat = max(steps, key=lambda one: one[:2])
        return NewestStep(at, step, beat.facts.get("attempt", ""), beat.phase in (TRAIN, UNTOLD))
    if blind:
        return blind
    section = look.run.watch.hang
    piece = run_signs.read_on(look, section.log if section is not None else None, look.memory.setdefault("log", {}))
    if not isinstance(piece, run_signs.Piece):
        return "neither beats nor a log"
    own = section.pattern if section is not None else None
    found = log_lines.last_step(piece.data, re.compile(own) if own else log_lines.STEP)
    found = look.memory.get("log_step") if found is None else found
    if found is None:
        return f"no step in {piece.path}"
    look.memory["log_step"] = found
    return NewestStep(piece.entry.mtime, found, str(piece.path))
