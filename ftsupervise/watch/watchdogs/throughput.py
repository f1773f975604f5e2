"""Judges the steps per hour by the run's own past: a slow node or a sick link makes a run crawl without ever stopping it."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from statistics import median
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Words
from ftsupervise.rundir import log_lines
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs import run_signs
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK
from ftsupervise.watch.watchdogs.run_signs import newest_beats, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Throughput as Settings
    from ftsupervise.watch import Look

_KEEP = 100  # windows remembered
_KNOWN = 5  # windows before a pace is called usual
WORDS = Words(
    "The run takes that much longer, and pays for all its nodes meanwhile.",
    "ftsupervise status {run_dir}",
    "look for a slow node: temperatures, clocks, the network; then launch.exclude it",
)


def pace_of(samples: Sequence[Sequence[float]], window: float) -> float | None:
    """Steps per second over the last ``window`` seconds of (time, step) samples; None if they span less than that."""
    last = samples[-1]
    first = next((s for s in reversed(samples) if last[0] - s[0] >= window), None)
    return (last[1] - first[1]) / (last[0] - first[0]) if first is not None else None


def usual_pace(past: Sequence[float]) -> float | None:
    """The median of past windows; saves and evaluations are in them as in the window they are compared with."""
    return median(past) if len(past) >= _KNOWN else None


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    memory = look.memory
    if look.jobs is not None and not any(job.state in AT_WORK for job in look.jobs):
        memory.pop("samples", None)
        yield look.finding("pace", Health.OK, "no job of the run is running", WORDS)
        return
    found = _step(look)
    if isinstance(found, str):
        yield look.finding("pace", Health.UNKNOWN, f"throughput not seen: {found}", WORDS)
        return
    at, step, start = found
    samples: list[list[float]] = memory.get("samples", [])
    if memory.get("start") != start or (samples and step < samples[-1][1]):
        samples = []  # another start: the time between is not training
    if not samples or at > samples[-1][0]:
        samples.append([at, step])
    window = settings.window.total_seconds()
    memory.update(start=start, samples=[s for s in samples if at - s[0] <= 2 * window][-600:])
    yield _judge(look, settings, memory, window)


def _judge(look: Look, settings: Settings, memory: dict[str, Any], window: float) -> Finding:
    pace = pace_of(memory["samples"], window)
    past: list[float] = memory.setdefault("past", [])
    usual = usual_pace(past)
    if pace is None:
        text = f"measuring: no whole {show_duration(window)} since the start yet"
        return look.finding("pace", Health.OK, text, WORDS)
    slow = usual is not None and pace < settings.least * usual
    last = memory.get("window_at", 0.0)
    if memory["samples"][-1][0] - last >= window and not slow:  # windows that do not overlap, and only healthy ones
        past.append(pace)
        del past[:-_KEEP]
        memory["window_at"] = memory["samples"][-1][0]
    shown = f"{pace * 3600:.4g} steps an hour"
    if usual is None:
        return look.finding("pace", Health.OK, f"{shown}; what is usual is not known yet", WORDS)
    text = f"{shown}, {pace / usual:.0%} of the usual {usual * 3600:.4g}"
    limit = f"{settings.least:.0%} of the usual"
    return look.finding("pace", Health.of(slow), text, WORDS, value=shown, limit=limit)


def _step(look: Look) -> tuple[float, int, str] | str:
    """Return (when, step, which start) by the clock of the file server, from beats, else from the log; or why it is unknown."""
    now = server_now(look)
    beats, blind = newest_beats(look, now)
    steps = [(beat.step, now - age, beat.facts.get("attempt", "")) for beat, age in beats if beat.step is not None]
    if steps:
        step, at, start = max(steps)
        return at, step, start
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
    return piece.entry.mtime, found, str(piece.path)
