"""The decisions of a run that were only told: what would have been done, and what happened without it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.rundir.observing import observed_now
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import BRAKE, EXCLUSION, HANG, OnlyTold
from ftsupervise.units import count, show_duration


class ObservedRow(NamedTuple):
    """A decision that was not carried out."""

    attempt: int
    decision: str  # one of ``DECISIONS``
    at: datetime
    words: str  # "would have restarted it: rank 3 on node-1 is stopped; no progress for 31.2 s at step 120 (train)"
    then: str  # what happened without it, as far as it is known


def observes(rundir: RunDir, attempts: Sequence[Attempt]) -> tuple[str, ...]:
    """Return the decisions that are only told at present; () also where that cannot be read."""
    try:
        return observed_now(rundir, attempts[-1].observes if attempts else ())
    except OSError:
        return ()


def observed_rows(attempts: Sequence[Attempt], launched: Sequence[datetime] = ()) -> tuple[ObservedRow, ...]:
    """Return them, oldest first. That the chain would be held, attempt after attempt, is one.

    ``attempts``: the ledger, in order. ``launched``: when a person has launched the run, who may have changed it then, so that
    what came after the next launch says nothing.
    """
    found = []
    for index, one in enumerate(attempts):
        braked = index > 0 and any(each.decision == BRAKE for each in attempts[index - 1].observed)
        until = min((at for at in launched if at > one.started), default=None)
        later = [each for each in attempts[index + 1 :] if until is None or each.started < until]
        for each in one.observed:
            if each.at is not None and not (each.decision == BRAKE and braked):
                found.append(ObservedRow(one.number, each.decision, each.at, each.words(), _then(each, one, later)))
    return tuple(sorted(found, key=lambda row: row.at))


def _then(told: OnlyTold, one: Attempt, later: Sequence[Attempt]) -> str:
    if told.then:
        return told.then
    if told.decision == BRAKE:
        return "; ".join(_went_on(told, later)) or "no attempt has begun since"
    if told.decision == EXCLUSION:
        there = next((each for each in (one, *later) if told.node in each.nodes and each.number > one.number), None)
        if there is None:
            return f"no attempt has run on {told.node} since"
        return f"attempt {there.number} ran on it" + (f", and ended: {there.words}" if there.words else "")
    if one.ended is None:
        return "it still stands" if told.decision == HANG else "the attempt goes on"
    after = show_duration(max(0.0, (one.ended - told.at).total_seconds())) if told.at is not None else ""
    return f"attempt {one.number} ended {after} later: {one.words}"


def _went_on(told: OnlyTold, later: Sequence[Attempt]) -> Iterator[str]:
    """Say how many attempts came, and how far, where nothing kept them from beginning."""
    if not later:
        return
    reached = max((one.last_step for one in later if one.last_step is not None), default=None)
    they = "it" if len(later) == 1 else "they"
    far = "no step was made" if reached is None else f"{they} came to step {reached:,}"
    if reached is not None and told.step is not None:
        far += f", {reached - told.step:,} further" if reached > told.step else ", no further"
    yield f"{count(len(later), 'attempt')} since: {far}"
