"""The decisions of a run that were only told: what would have been done, and what happened without it."""

from collections.abc import Sequence
from datetime import datetime
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.observing import as_a_shell_has_it, known, observed_now
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import BRAKE, EXCLUSION, HANG, OnlyTold
from ftsupervise.units import count, show_duration


class ObservedRow(NamedTuple):
    """A decision that was not carried out."""

    attempt: int  # 0: a member of the chain came to it that began none
    decision: str  # one of ``DECISIONS``
    at: datetime
    words: str  # "would have restarted it: rank 3 on node-1 is stopped; no progress for 31.2 s at step 120 (train)"
    then: str  # what happened without it, as far as it is known


def observes(rundir: RunDir, last: Attempt | None) -> tuple[str, ...]:
    """Return the decisions that are only told at present. Where that cannot be read they are those of the launch."""
    launched = _by_launch(rundir, last)
    try:
        return observed_now(rundir, launched)
    except (OSError, ValueError):
        return launched


def _by_launch(rundir: RunDir, last: Attempt | None) -> tuple[str, ...]:
    """Return the decisions that are only told by the launch of the newest attempt, or one after which none has begun."""
    own = () if last is None else last.observes
    if last is not None and last.ended is None:
        return own
    try:
        newest = [one for one in launches(rundir) if one.state != "rejected" and one.written][-1:]
    except OSError:
        return own
    return known(newest[0].observe) if newest and (last is None or newest[0].at > last.started) else own


def observed_rows(
    attempts: Sequence[Attempt], launched: Sequence[datetime] = (), alone: Sequence[OnlyTold] = ()
) -> tuple[ObservedRow, ...]:
    """Return them, oldest first. What attempt after attempt comes to, such as that the chain would be held, is one.

    ``attempts``: the ledger, in order. ``launched``: when a person has launched the run, who may have changed it then, so that
    what came after the next launch says nothing. ``alone``: of members that began no attempt.
    """
    found = [_row_alone(each, each.at, attempts, launched) for each in alone if each.at is not None]
    for index, one in enumerate(attempts):
        before = attempts[index - 1].observed if index else ()
        until = min((at for at in launched if at > one.started), default=None)
        later = [each for each in attempts[index + 1 :] if until is None or each.started < until]
        for each in one.observed:
            if each.at is not None and not each.repeats(before):
                found.append(ObservedRow(one.number, each.decision, each.at, each.words(), _then(each, one, later)))
    return tuple(sorted(found, key=lambda row: row.at))


def _row_alone(told: OnlyTold, at: datetime, attempts: Sequence[Attempt], launched: Sequence[datetime]) -> ObservedRow:
    until = min((one for one in launched if as_a_shell_has_it(one) > at), default=None)
    later = [each for each in attempts if each.started > at and (until is None or each.started < until)]
    return ObservedRow(0, told.decision, at, told.words(), _then(told, Attempt(0, "", at), later))


def _then(told: OnlyTold, one: Attempt, later: Sequence[Attempt]) -> str:
    if told.then:
        return told.then
    if told.decision == BRAKE:
        return _went_on(told, later)
    if told.decision == EXCLUSION:
        there = next((each for each in (one, *later) if told.node in each.nodes and each.number > one.number), None)
        if there is None:
            return f"no attempt has run on {told.node} since"
        return f"attempt {there.number} ran on it" + (f", and ended: {there.words}" if there.words else "")
    if one.ended is None:
        return "it still stands" if told.decision == HANG else "the attempt goes on"
    after = show_duration(max(0.0, (one.ended - told.at).total_seconds())) if told.at is not None else ""
    return f"attempt {one.number} ended {after} later: {one.words}"


def _went_on(told: OnlyTold, later: Sequence[Attempt]) -> str:
    """Say how many attempts came, and how far, where nothing kept them from beginning."""
    if not later:
        return "no attempt has begun since"
    reached = max((one.last_step for one in later if one.last_step is not None), default=None)
    they = "it" if len(later) == 1 else "they"
    far = "no step was made" if reached is None else f"{they} came to step {reached:,}"
    if reached is not None and told.step is not None:
        far += f", {reached - told.step:,} further" if reached > told.step else ", no further"
    return f"{count(len(later), 'attempt')} since: {far}"
