"""Checks that the loss is a number and near its recent values, from the log or from the guard's report (fact ``loss``)."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.probe import NotSeen
from ftsupervise.rundir import log_lines
from ftsupervise.truth import NOT_A_NUMBER, Beat, Health
from ftsupervise.watch.watchdogs import run_signs
from ftsupervise.watch.watchdogs.run_signs import newest_beats, number, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Loss as Settings
    from ftsupervise.watch import Look

_KEEP = 200
_NOW = 5  # losses that make up "now": one bad batch is no spike
_KNOWN = 20
WORDS = Words(
    "The training from here on is probably worth nothing.",
    "ftsupervise check loss {run_dir}",
    "look at the last batches and the learning rate; go back to a checkpoint from before, or let the run do so: guard.loss",
)


@dataclass(frozen=True)
class LossVerdict:
    bad: bool
    broken: bool  # not a number
    words: str


def judge(past: Sequence[float], new: Sequence[float], spike: float | None) -> LossVerdict:
    """Judge the losses in ``new`` by ``past``, finite losses before them, oldest first.

    The last of ``new`` decide: a loss that has recovered is over.
    """
    latest = [*past, *new][-_NOW:]
    broken = [value for value in latest if not math.isfinite(value)]
    if latest and not math.isfinite(latest[-1]):
        return LossVerdict(True, True, f"loss is {latest[-1]} ({len(broken)} of the last {len(latest)})")
    finite = [value for value in latest if math.isfinite(value)]
    if not finite:
        return LossVerdict(False, False, "no loss seen yet")
    now = median(finite)
    base = [value for value in past if math.isfinite(value)]
    if spike is None or len(base) < _KNOWN or median(base) <= 0:
        return LossVerdict(False, False, f"loss {now:.4g}")
    usual = median(base)
    words = f"loss {now:.4g}, {now / usual:.2g} times its recent {usual:.4g}"
    return LossVerdict(now > spike * usual, False, words)


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    beats, blind = newest_beats(look, server_now(look))
    if settings.only_guard:
        yield from _as_the_guard_says(look, [beat for beat, _ in beats], blind)
        return
    new = _new(look, settings, [beat for beat, _ in beats], blind)
    if isinstance(new, str):
        yield look.finding("loss", Health.UNKNOWN, f"loss not seen: {new}", WORDS)
        return
    past: list[float] = look.memory.get("past", [])
    recent = [float(text) for text in look.memory.get("recent", [])]  # text: JSON knows no NaN
    found = judge(past, new or recent, settings.spike)
    if new:
        look.memory["recent"] = [str(value) for value in new[-_NOW:]]
        if not found.bad:  # a spike must not become the new usual
            look.memory["past"] = [*past, *(value for value in new if math.isfinite(value))][-_KEEP:]
    limit = f"{settings.spike:g} times the recent median" if settings.spike is not None else ""
    severity = Severity.CRITICAL if found.broken else Severity.WARNING
    yield look.finding("loss", Health.of(found.bad), found.words, WORDS, severity=severity, limit=limit)


def _as_the_guard_says(look: Look, beats: Sequence[Beat], blind: str) -> Iterator[Finding]:
    """Yield what the guard finds wrong with the losses that the loop gives to it; nothing where it was given none."""
    reports = _reports(beats)
    if blind and "given" in look.memory:
        yield look.finding("loss", Health.UNKNOWN, f"loss not seen: {blind}", WORDS)
    if not reports:
        return
    look.memory["given"] = True
    troubles = [beat.trouble for beat in beats if beat.trouble is not None]
    if troubles:
        worst = min(troubles, key=lambda one: (one.kind != NOT_A_NUMBER, one.rank))
        severity = Severity.CRITICAL if worst.kind == NOT_A_NUMBER else Severity.WARNING
        yield look.finding("loss", Health.BAD, f"{worst.kind}: {worst.words}", WORDS, severity=severity)
    else:
        yield look.finding("loss", Health.OK, f"loss {max(reports)[1]:.4g}", WORDS)


def _reports(beats: Sequence[Beat]) -> list[tuple[int, float]]:
    """Return step and loss of each rank that has reported one."""
    return [(beat.step or 0, value) for beat in beats if (value := number(beat.facts.get("loss"))) is not None]


def _new(look: Look, settings: Settings, beats: Sequence[Beat], blind: str) -> list[float] | str:
    reports = _reports(beats)
    if reports:
        # one rank whose loss is no number is enough, whatever the others of that step say
        step, value = max(reports, key=lambda pair: (not math.isfinite(pair[1]), pair[0]))
        same = look.memory.get("step") == step
        look.memory["step"] = step
        return [] if same else [value]
    piece = run_signs.read_on(look, settings.log, look.memory.setdefault("log", {}))
    if isinstance(piece, NotSeen):
        return piece.sentence
    if not isinstance(piece, run_signs.Piece):
        return blind or f"there is no log {run_signs.pattern_of(look, settings.log)}"
    return log_lines.numbers(piece.data, re.compile(settings.pattern) if settings.pattern else log_lines.LOSS)
