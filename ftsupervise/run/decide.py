"""The decision after an attempt. Pure: the ledger, this attempt's end, the time left and the budgets give one of three moves.

    restart  start the command again here, after a delay
    leave    end the job, so that the next member of the chain takes over
    stop     the same failure came too often without progress: end the job, and hold the chain until a person has checked

Progress is a later place to resume from than any before: the newest checkpoint that the run reported, else
the first step of an attempt. A run that makes progress between its failures goes on for ever. An attempt that has set a
checkpoint aside begins from another state, and gets its own chance.

A command that leaves with 0 has not failed, and the next member goes on; without a guard a person is asked whether it is
finished. Where it does so again and again at once, without a step or a checkpoint, it is a failure that hides (``|| true``, a
wrong path), and is counted as one.

Whatever ends them, no more than three members in a row are used up without progress: ``used_up`` counts members, not failures,
those too whose end nobody wrote down. What somebody asked for (cancelled, preempted, kill switch) counts neither way. A member
whose script has left a checkpoint of no known step was not used up: nothing says that it came no further.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from ftsupervise.checkpoints.divergence import go_back
from ftsupervise.checkpoints.suspicion import suspect
from ftsupervise.config.supervisor import default
from ftsupervise.model import GUARD, Attempt, Cause, CauseKind, FailureKind
from ftsupervise.rundir.starting_over import (
    ADVICE,
    NOT_RESUMED,
    NOT_SEEN_TO_RESUME,
    left_before,
    must_hold,
    starts_over,
)
from ftsupervise.rundir.switches import LEFT
from ftsupervise.units import show_duration

_MOST_DELAY = 300.0
_TOTAL = 4  # this many times the budget of different failures without progress is no better than the same one
_PATIENT = {FailureKind.NODE: 10}  # kinds whose budget is larger, because time cures them
_LIVED = 600.0  # seconds: an attempt whose steps are unknown has made progress when it ran for this long
_WORKED = 60.0  # seconds: a command that left with 0 after that may have done its work
_MEMBERS = 3  # in a row may be used up without progress, where no budget allows more
TOO_SHORT = "the time limit is too short for the start"
_ANY_NUMBER = 1_000_000
_AT_THE_END = (CauseKind.WARNING, CauseKind.TIME_LIMIT, CauseKind.TOLD)  # causes of an end that the job's limit brought
IDLE = "a finished run has to say so: guard.finished(step), or the file state/finished"
_SET_ASIDE_AFTER = 2  # failures in a row from one checkpoint: one may be chance, and the brake comes on at three
_LEAST_TIME = 30.0  # seconds of the job that must be left
_UNKNOWN_START = 60.0  # seconds from start to first step, while none is known


class NextAction(Enum):
    RESTART = "restart"
    LEAVE = "leave"
    STOP = "stop"


@dataclass(frozen=True)
class Budgets:
    """The limits of restarts. ``same_failure`` 0: no brake. ``of_kind``: limits for single kinds of failure."""

    in_place: int = 0  # restarts inside one job
    same_failure: int = default("budgets.same_failure")
    of_kind: Mapping[str, int] = field(default_factory=dict)
    back_off: float = default("budgets.back_off")
    loss_back: int = default("budgets.loss_back")  # steps, when the loss is no number or diverges
    loss_tries: int = 3  # of going back for the same trouble, each time further; then the brake

    @property
    def set_aside_after(self) -> int:
        """Failures from one checkpoint until it is set aside: before the brake, which counts them too, comes on. 0: never."""
        return min(_SET_ASIDE_AFTER, self.same_failure - 1) if self.same_failure else _SET_ASIDE_AFTER

    def of(self, kind: FailureKind) -> int:
        given = self.of_kind.get(kind.value)
        if given is not None:
            return given
        return max(self.same_failure, _PATIENT.get(kind, 0))

    def members(self, last: Attempt) -> int:
        """Return how many members in a row may be used up without progress, the last one as ``last`` was; 0: any number."""
        given = self.of_kind.get(last.failure.kind.value) if last.failure is not None else None
        return (given or max(self.same_failure, _MEMBERS)) if self.same_failure else 0


@dataclass(frozen=True)
class Situation:
    """The facts when an attempt has ended. ``attempts`` is the ledger since the brake was last released, with the
    attempt that has just ended as its last one."""

    attempts: Sequence[Attempt]
    restarts: int = 0  # made in this job so far
    asked: str = ""  # why no restart is allowed here: asked to stop, kill switch, finished, superseded
    over: str = ""  # why no restart is possible here, whatever the failure: the job ends soon
    time_left: float | None = None  # seconds until the job is ended; None: no limit is known
    warned_after: float | None = None  # seconds from the start of the last attempt to its warning
    first: int = 0  # the first attempt of the newest launch
    asks: bool = False  # a person has to say whether a command is finished that has left with 0


@dataclass(frozen=True)
class RestartDecision:
    move: NextAction
    why: str
    delay: float = 0.0  # seconds, for a restart
    times: int = 0  # how often this failure has come without progress
    failure: str = ""  # the failure, in the most detailed of its wordings
    detail: str = ""  # the newest line of output that goes with it


def decide(situation: Situation, budgets: Budgets) -> RestartDecision:
    """Return the next move."""
    if situation.asked:
        return RestartDecision(NextAction.LEAVE, situation.asked)
    verdict = RestartDecision(NextAction.LEAVE, situation.over) if situation.over else _decide(situation, budgets)
    repeats = verdict.move is NextAction.RESTART or (verdict.move is NextAction.STOP and verdict.times > 1)
    if repeats and (held := _begins_anew(situation.attempts, budgets, situation.first)):
        return held
    return before_leaving(verdict, situation, budgets)


def without_brake(situation: Situation, budgets: Budgets) -> RestartDecision:
    """Return the next move where the brake is only told. What the program itself asks for is done all the same."""
    return decide(replace(situation, asks=False), replace(budgets, same_failure=0, loss_tries=_ANY_NUMBER))


def before_leaving(verdict: RestartDecision, situation: Situation, budgets: Budgets) -> RestartDecision:
    """Return ``verdict``, or a stop where it would leave and too many members have been used up already."""
    if verdict.move is not NextAction.LEAVE or situation.asked:
        return verdict
    return stop_before(situation.attempts, budgets, situation.warned_after, situation.first) or verdict


def stop_before(
    attempts: Sequence[Attempt], budgets: Budgets, warned_after: float | None = None, first: int = 0
) -> RestartDecision | None:
    """Return a stop where too many members in a row were used up without progress; None where the next one may try.

    ``first``: the first attempt of the newest launch.
    """
    if held := _begins_anew(attempts, budgets, first):
        return held
    again = starts_over([one for one in attempts if one.number >= first], left_before(attempts, first))
    spent = used_up(attempts, {one.attempt for one in again})
    most = budgets.members(spent[-1]) if spent else 0
    if not most or len(spent) < most:
        return None
    if all(one.number in {each.attempt for each in again} for one in spent):
        why = f"{len(spent)} members in a row began anew: {again[-1].words()}; {again[-1].why('')}"
        return RestartDecision(NextAction.STOP, why, times=len(spent), failure=NOT_RESUMED, detail=ADVICE)
    last = spent[-1].written
    if last is not None and all(one.written is not None and one.written.by_job for one in spent):
        why = (
            f"{len(spent)} members in a row saved each into a folder of its own job's number, the last one {last.path}"
        )
        return RestartDecision(NextAction.STOP, why, times=len(spent), failure=NOT_SEEN_TO_RESUME, detail=ADVICE)
    if all(one.failure is None and one.kind in _AT_THE_END for one in spent):
        lived = min(_lived(one) for one in spent) if warned_after is None else warned_after
        ready = [one.ready for one in spent if one.ready is not None]
        takes = f"takes {show_duration(round(max(ready)))}" if ready else "is not over by then"
        why = f"{len(spent)} members in a row left nothing to resume from: the start {takes}, and the time limit"
        why += f" less the warning is {show_duration(round(lived))} (launch.time, launch.warn)"
        return RestartDecision(NextAction.STOP, why, times=len(spent), failure=TOO_SHORT)
    ways = dict.fromkeys(_way(one) for one in spent)
    found = _stop(f"{len(spent)} members in a row were used up without a new step", len(spent), spent)
    return replace(found, failure=", ".join(ways))


def _begins_anew(attempts: Sequence[Attempt], budgets: Budgets, first: int) -> RestartDecision | None:
    """Return a stop where a script without the guard has begun anew for the second time, with a checkpoint left each time."""
    counted = [one for one in attempts if one.number >= first] if budgets.same_failure else []
    again = starts_over(counted, left_before(attempts, first))
    if not must_hold(again):
        return None
    why = f"{again[-1].words()} ({_times(len(again))}); {again[-1].why('')}"
    return RestartDecision(NextAction.STOP, why, times=len(again), failure=NOT_RESUMED, detail=ADVICE)


def _way(one: Attempt) -> str:
    return one.failure.words() if one.failure is not None else one.words


def _decide(situation: Situation, budgets: Budgets) -> RestartDecision:
    last = situation.attempts[-1]
    if last.kind is CauseKind.MOVED:  # no fault of this group, and no failure
        return _again(situation, budgets, 0.0, 0, "with that address")
    if last.resumed is not None and last.resumed.refused and last.failure is not None:
        return _stop("it cannot go on from what it has saved", 1, [last], last.resumed.refused)
    if last.failure is None:
        asks = situation.asks and not any(_guarded(one) for one in situation.attempts)
        if asks and may_be_finished(situation.attempts):
            lived = _lived(last)
            after = show_duration(round(lived) if lived >= 1 else round(lived, 1))
            unsaid = f"after {after}, and nothing says that it is finished"
            return RestartDecision(NextAction.STOP, unsaid, times=1, failure=LEFT)
        idle = idle_streak(situation.attempts)
        if budgets.same_failure and len(idle) >= budgets.same_failure:
            held = _stop(f"{_times(len(idle))} in a row without a step or a new checkpoint", len(idle), idle, IDLE)
            return replace(held, failure=LEFT, detail="") if asks else held
        return RestartDecision(NextAction.LEAVE, "the command has ended by itself")
    failure = last.failure
    by_loss = last.trouble is not None and last.trouble.stops and failure.kind is FailureKind.NUMBERS
    if by_loss and (why := _why_not_back(situation.attempts, budgets)):
        return _stop(*why, [last])
    if failure.kind is FailureKind.GIVEN_UP:
        return _stop("the command asks not to be started again", 1, [last])
    streak = since_progress(situation.attempts)
    alike = [one for one in streak if one.failure is not None and one.failure.same(failure)]
    same = len(alike)
    budget = budgets.of(failure.kind)
    if by_loss:
        same, budget = _times_here(situation.attempts, budgets), budgets.loss_tries
    elif budgets.same_failure and same >= budget and not _older_one_next(situation.attempts, budgets):
        return _stop(f"the same failure {_times(same)} without progress{_acquitted(streak)}", same, alike)
    if budgets.same_failure and len(streak) >= _TOTAL * max(budget, 1):
        return _stop(f"{len(streak)} failures without progress", len(streak), alike or [last])
    if failure.sign == CauseKind.NO_STEP.value:
        return RestartDecision(
            NextAction.LEAVE, "no step on the nodes of this job: the next member, if any, takes over", times=same
        )
    count = f"failure {same} of {budget}" if budgets.same_failure else ""
    return _again(situation, budgets, delay(streak, budgets), same, count)


def _again(situation: Situation, budgets: Budgets, pause: float, same: int, why: str) -> RestartDecision:
    """Start it again here after ``pause`` seconds, if this job has a restart and time left for it."""
    if situation.restarts >= budgets.in_place:
        spent = (
            f"all {budgets.in_place} restarts in place are used up"
            if budgets.in_place
            else "no restart in place (--in-place 0)"
        )
        return RestartDecision(NextAction.LEAVE, f"{spent}: the next member, if any, takes over", times=same)
    need = time_needed(situation.attempts) + pause
    if situation.time_left is not None and situation.time_left < need:
        left = f"{max(0.0, situation.time_left):.0f} s are left of this job and a restart needs {need:.0f} s"
        return RestartDecision(NextAction.LEAVE, f"{left}: the next member, if any, takes over", times=same)
    return RestartDecision(NextAction.RESTART, why, pause, same)


def _why_not_back(attempts: Sequence[Attempt], budgets: Budgets) -> tuple[str, int] | None:
    """Return why the run does not go back to an older checkpoint after trouble with its loss, and how often it came there."""
    trouble, times = attempts[-1].trouble, _times_here(attempts, budgets)
    if trouble is not None and trouble.then == "stop":
        return "guard.loss says stop; the next start goes on from an earlier checkpoint", times
    if times > budgets.loss_tries:
        tried = f"{_times(budgets.loss_tries)} after going back to an older checkpoint"
        return f"{_times(times)} in the same place, {tried}", times
    return None


def _times_here(attempts: Sequence[Attempt], budgets: Budgets) -> int:
    found = go_back(reversed(attempts), budgets.loss_back)
    return 1 if found is None else found.times


def _older_one_next(attempts: Sequence[Attempt], budgets: Budgets) -> bool:
    """Return whether the next attempt sets the checkpoint aside that this one began from.

    This is said once: where it cannot, the brake comes on after the next failure.
    """
    after = budgets.set_aside_after
    found = suspect(reversed(attempts), after)
    return found is not None and found.times == after and found.checkpoint.older > 0


def _acquitted(streak: Sequence[Attempt]) -> str:
    aside = [one.resumed.set_aside for one in streak if one.resumed is not None and one.resumed.set_aside]
    return f", from an older checkpoint too: {aside[-1]}, which was set aside, may be good" if aside else ""


def idle_streak(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the attempts at the end of the ledger that exited with 0 and did nothing.

    They made no step and no checkpoint, and were too short to have trained without reporting. Attempts that never
    started, and those that were stopped on request, count neither way.
    """
    streak: list[Attempt] = []
    for one in reversed(attempts):
        if one.failure or one.last_step is not None or one.saved is not None or _lived(one) >= _LIVED:
            break
        if one.cause == Cause(CauseKind.EXIT, code=0):
            streak.append(one)
    return streak[::-1]


def may_be_finished(attempts: Sequence[Attempt]) -> bool:
    """Return whether the last attempt has left with 0 by itself, and it or one before it may have trained: a script that finds
    its work done leaves at once."""
    last = attempts[-1]
    return last.cause == Cause(CauseKind.EXIT, code=0) and (_lived(last) >= _WORKED or any(map(_trained, attempts)))


def _trained(one: Attempt) -> bool:
    shown = one.last_step is not None or one.written is not None or one.percent is not None
    return shown or (one.failure is None and _lived(one) >= _LIVED)


def _guarded(one: Attempt) -> bool:
    return one.source == GUARD or one.resumed is not None


def _stop(why: str, times: int, alike: Sequence[Attempt], detail: str = "") -> RestartDecision:
    failures = [one.failure for one in alike if one.failure is not None]
    detail = detail or next((one.detail for one in reversed(failures) if one.detail), "")
    fullest = max((one.words() for one in failures), key=len, default="")
    return RestartDecision(NextAction.STOP, why, times=times, failure=fullest, detail=detail)


def since_progress(attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return the failures at the end of the ledger without progress between them, oldest first."""
    streak: list[Attempt] = []
    for one, progress in _walk(attempts):
        if progress:
            streak.clear()
        if one.failure:
            streak.append(one)
    return streak


def used_up(attempts: Sequence[Attempt], anew: Collection[int] = ()) -> list[Attempt]:
    """Return the members at the end of the ledger that were used up without progress, each by its last attempt.

    ``anew``: attempts that have begun at the beginning again, which is no progress however long they lived.
    """
    spent: dict[str, Attempt] = {}
    moved: set[str] = set()
    for one, progress in _walk(attempts):
        if progress:
            spent.clear()
            if _gained(one):
                moved.add(one.job_id)
        if one.failure is None and one.number not in anew and _has_left_something(one):
            spent.clear()
            moved.add(one.job_id)
        if one.job_id and one.job_id not in moved and (_counts(one) or (one.number in anew and not _asked(one))):
            spent.pop(one.job_id, None)
            spent[one.job_id] = one
    return list(spent.values())


def _has_left_something(one: Attempt) -> bool:
    """Return whether a script without a guard wrote a checkpoint in it whose name has no step to compare."""
    return one.written is not None and one.written.step is None and not one.written.by_job


def _asked(one: Attempt) -> bool:
    """Return whether somebody has ended it."""
    return one.failure is None and one.kind not in (CauseKind.EXIT, *_AT_THE_END)


def _counts(one: Attempt) -> bool:
    """Return whether an attempt without progress speaks against its member: what was asked for does not."""
    if one.failure is not None or one.cause is None:
        return one.failure is not None
    if one.cause == Cause(CauseKind.EXIT, code=0):
        return one.last_step is None and one.saved is None and _lived(one) < _LIVED
    if one.cause.kind not in _AT_THE_END:
        return False
    if one.ready is None:  # of a loop that does not tell its steps a long life says nothing
        return one.last_step is None and (one.worked is not None or _lived(one) < _LIVED)
    return _lived(one) < 2 * one.ready


def _walk(attempts: Sequence[Attempt]) -> Iterator[tuple[Attempt, bool]]:
    """Yield each attempt, and whether those before it count no more: it has made progress, or begins a line of its own.

    Somebody may take the run back to an older checkpoint on purpose; progress is then counted from there. That is believed
    once, until the run is further than it ever was: checkpoints that get lost again and again are no person's choice.
    """
    best: int | None = None  # the latest place to resume from, in this line
    saved: int | None = None  # the latest of these that lies on a disk
    peak, taken_back, sent_back = -1, False, False
    written: int | None = None  # the latest checkpoint of a script without a guard, as its name says
    for one in attempts:
        place, begins, progress = _place(one), _begins(one), False
        if begins is not None and saved is not None and begins < saved and not taken_back and not sent_back:
            best = saved = begins
            progress = taken_back = True
        if _moved(one, place, best):
            best, progress = place if place is not None else best, True
        elif one.resumed is not None and one.resumed.set_aside:  # it begins from another state than all before
            best = saved = place if place is not None else one.resumed.step
            progress = True
        if one.written is not None and one.written.step is not None and one.written.step > (written or 0):
            written, progress = one.written.step, True
        sent_back = one.trouble is not None and one.trouble.stops  # the next one goes back because of its loss
        known = [n for n in (one.saved, begins, saved) if n is not None]
        saved = max(known, default=None)
        if best is not None and best > peak:
            peak, taken_back = best, False
        yield one, progress


def _begins(one: Attempt) -> int | None:
    """Return the step of the checkpoint that it began from, as far as that is the newest one it was offered; None: unknown,
    or it began from another one for a reason of our own."""
    if one.resumed is not None:
        if not one.resumed.begun:
            return None
        ours = one.resumed.passed or one.resumed.set_aside or one.resumed.skipped
        return None if ours else one.resumed.step or 0
    if one.first_step is None or (one.begins is not None and one.begins.source in ("memory", "kept")):
        return None
    return one.first_step - 1


def _gained(one: Attempt) -> bool:
    """Return whether the progress is its own, and not what the attempt before it has left."""
    if one.saved is not None:
        return one.saved > (_begins(one) or 0)
    return _place(one) is None


def delay(streak: Sequence[Attempt], budgets: Budgets) -> float:
    """Return the seconds to wait before the next start: none after the first failure, then the back-off, doubling."""
    repeated = len(streak) - 1
    return 0.0 if repeated < 1 else min(_MOST_DELAY, budgets.back_off * 2 ** min(repeated - 1, 20))


def time_needed(attempts: Sequence[Attempt]) -> float:
    """Return the seconds a start needs to be worth it: three times what the slowest of the last five took to its first step."""
    seen = [one.ready for one in attempts[-5:] if one.ready is not None]
    return max(_LEAST_TIME, 3 * max(seen)) if seen else _UNKNOWN_START


def _place(one: Attempt) -> int | None:
    """Return the step at which a successor would resume, as far as this attempt reported it."""
    steps = [n for n in (one.saved, None if one.first_step is None else one.first_step - 1) if n is not None]
    return max(steps, default=None)


def _moved(one: Attempt, place: int | None, best: int | None) -> bool:
    if place is not None:
        return place > (best or 0)
    return one.last_step is None and _worked(one) >= _LIVED


def _worked(one: Attempt) -> float:
    """Return the seconds in which it may have made progress: ranks with a guard that stands at its start make none."""
    return _lived(one) if one.worked is None else one.worked


def _lived(one: Attempt) -> float:
    return (one.ended - one.started).total_seconds() if one.ended else 0.0


def _times(count: int) -> str:
    return "once" if count == 1 else "twice" if count == 2 else f"{count} times"
