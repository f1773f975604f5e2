"""Says how a run is at this moment. Its supervisor asks the ranks where they are, on all nodes, and ends nothing; what it
answers is judged as the evidence of a hang is.

Whether the run stands still is the word of ``status`` (``report/pace_word.py``), which never differs from this one; before that
word is due, a run is said to stand that makes no step for much longer than its steps take.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable, Sequence
from datetime import datetime
from enum import Enum
from time import monotonic, sleep
from typing import NamedTuple

from ftsupervise.diagnosis.flight_recorder import FlightRecord
from ftsupervise.diagnosis.gather import of_pages
from ftsupervise.diagnosis.stacks import RankStack, alike
from ftsupervise.diagnosis.verdict import Confidence, Diagnosis, Material, judge_attempt, with_a_slow_rank
from ftsupervise.diagnosis.vocabulary import FailureClass
from ftsupervise.errors import NotPermitted
from ftsupervise.host.ownership import held, shown_user
from ftsupervise.model import Attempt, CauseKind
from ftsupervise.report.pace_word import PaceWord, heard, pace_word
from ftsupervise.report.reading import RunReading, read_own
from ftsupervise.rundir import live_look
from ftsupervise.rundir.hang_end import hang_end
from ftsupervise.rundir.live_look import LiveAnswer, LiveQuestion, RankNow
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import Straggler
from ftsupervise.truth import SAVE, TRAIN, UNTOLD
from ftsupervise.units import count, rank_words, show_duration

TAKEN = 5.0  # seconds in which a supervisor takes the question: it looks each second, and a shared disk shows it late
ANSWERED = 8.0  # seconds more for its answer, which has bounds of its own
_LOOK = 0.1  # seconds between two looks for the answer
_LONG = 90.0  # seconds without a word of it, after which it may be over
_STANDS, _STEP_TIMES = 15.0, 5.0  # seconds, or times a usual step, without a step
_TRAINS = (TRAIN, UNTOLD)  # phases in which steps are due


class LiveState(str, Enum):
    """The state of a run at this moment."""

    GOES_ON = "it goes on"
    STARTS = "no step is known yet"
    STANDS = "it stands still"
    UNSEEN = "could not see"


class StepGroup(NamedTuple):
    """Ranks at the same step and phase. ``stepped``: seconds since the last of them made its step."""

    ranks: tuple[int, ...]
    step: int | None
    phase: str
    stepped: float

    def words(self) -> str:
        at = f"step {self.step:,}" if self.step is not None else "no step known yet"
        since = f", {show_duration(round(self.stepped, 1))} ago" if self.step is not None else ""
        return f"{rank_words(self.ranks)}: {at}{f' ({self.phase})' if self.phase else ''}{since}"


class LiveDiagnosis(NamedTuple):
    """The state of a run, and why, as a clause. ``found``: whose the standstill is, with the groups of stacks."""

    state: LiveState
    why: str
    found: Diagnosis
    at: datetime
    steps: tuple[StepGroup, ...] = ()
    ranks: int = 0
    asked: int = 0  # of them, for their stacks


class LiveMaterial(NamedTuple):
    """All that is known of a run at this moment. ``word``: that of its pace, as ``status`` says it."""

    attempt: int
    at: datetime
    answer: LiveAnswer | None = None
    stacks: Sequence[RankStack] = ()
    flight: FlightRecord | None = None
    word: PaceWord = PaceWord("")
    unseen: tuple[str, ...] = ()
    straggler: Straggler | None = None


# ----------------------------------------------------------------------------------------------------------------- asking


def look(
    rundir: RunDir,
    attempts: Sequence[Attempt],
    number: int | None,
    now: datetime,
    extend: Callable[[float], object],
) -> tuple[LiveDiagnosis | None, str]:
    """Return how the run is, of which attempt ``number`` is meant (None: the newest), and why its ranks could not be asked.

    None where it does not run, where it is another account's and has failed before, and where nobody answers and nothing was
    heard for so long that it may be over. Raises OSError; NotPermitted for a run of another account, NotFound, NotTrusted.
    """
    last = may_run(attempts, number)
    if last is None:
        return None, ""
    if (owner := owner_of(rundir, last.number)) != os.geteuid():
        only = f"only {shown_user(owner)}, whose run it is, can have its ranks asked"
        if number is None and any(one.failure is not None for one in attempts):
            return None, f"attempt {last.number} runs, and {only}"
        raise NotPermitted(only, hint=f"how it is by its pages: ftsupervise status {rundir.quoted()}")
    answer = ask_the_ranks(rundir, last.number, now, extend)
    run = read_own(rundir, now)
    if answer is None:
        why = f"the supervisor of attempt {last.number} on {last.host or 'its node'} did not answer within {TAKEN:g} s"
        at = heard(run)
        if run.last is None or run.last.number != last.number or run.last.ended is not None:
            return None, ""  # it has ended meanwhile
        if at is None or abs((now - at).total_seconds()) > _LONG:
            return None, why
        return judge_live(LiveMaterial(last.number, now, word=pace_word(run), unseen=(why,))), ""
    stacks, flight, unseen = of_pages(rundir.attempt(last.number) / live_look.NOW, lambda: extend(TAKEN))
    return judge_live(material_of(run, last.number, answer, stacks, flight, unseen)), ""


def may_run(attempts: Sequence[Attempt], number: int | None) -> Attempt | None:
    """Return the newest attempt, if it is the one that is meant and has no end on record; None else."""
    last = attempts[-1] if attempts else None
    if last is None or last.ended is not None or number not in (None, last.number):
        return None
    return None if last.kind is CauseKind.LOST else last


def owner_of(rundir: RunDir, number: int) -> int:
    """Return the account whose run it is. Raises OSError."""
    return rundir.attempt(number).stat().st_uid


def ask_the_ranks(rundir: RunDir, number: int, now: datetime, extend: Callable[[float], object]) -> LiveAnswer | None:
    """Return how the ranks of attempt ``number`` are; None where its supervisor does not answer. ``extend`` is told how many
    seconds more that may take. Raises NotTrusted, OSError."""
    before = _id(rundir, number)
    extend(TAKEN + ANSWERED)
    with held(rundir.attempt(number)) as folder:  # which no stranger's link leads elsewhere
        live_look.ask(folder, LiveQuestion(secrets.token_hex(16), now))
        try:
            until, taken = monotonic() + TAKEN, False
            while monotonic() < until:
                if (found := _newer(rundir, number, before)) is not None:
                    return found
                if not taken and not live_look.waits(rundir.attempt(number)):
                    taken, until = True, monotonic() + ANSWERED
                sleep(_LOOK)
            return None
        finally:
            live_look.take_back(folder)


def _id(rundir: RunDir, number: int) -> str:
    try:
        found = live_look.read_answer(rundir, number)
    except ValueError:
        return ""
    return "" if found is None else found.id


def _newer(rundir: RunDir, number: int, before: str) -> LiveAnswer | None:
    """Return an answer that is not the one from before: also the one to somebody else who asks at the same time."""
    try:
        found = live_look.read_answer(rundir, number)
    except ValueError:
        return None
    return found if found is not None and found.id != before else None


def material_of(
    run: RunReading,
    number: int,
    answer: LiveAnswer,
    stacks: Sequence[RankStack],
    flight: FlightRecord | None = None,
    unseen: Sequence[str] = (),
) -> LiveMaterial:
    """Return what is known, with the progress of the answer in place of the last page."""
    page = answer.progress
    if page is not None and run.page is not None:
        page = page._replace(
            rate=run.page.rate, usual=run.page.usual, steady=run.page.steady, straggler=run.page.straggler
        )
    now = run._replace(page=page or run.page)
    slow = now.page.straggler if now.page is not None else None
    return LiveMaterial(number, answer.at, answer, stacks, flight, pace_word(now), tuple(unseen), slow)


# ---------------------------------------------------------------------------------------------------------------- judging


def judge_live(of: LiveMaterial) -> LiveDiagnosis:
    """Return how the run is. Pure."""
    base = Diagnosis(of.attempt, FailureClass.UNKNOWN, Confidence.LOW, "", unseen=(*of.unseen, *_unseen(of)))
    answer = of.answer
    if answer is None or not answer.ranks:
        why = "its supervisor did not answer" if answer is None else "no rank has reported yet"
        state = LiveState.STANDS if of.word.word in ("HUNG", "STALLED", "SILENT") else LiveState.UNSEEN
        said = "; ".join(filter(None, (why, of.word.why)))
        return LiveDiagnosis(state, said, base._replace(headline=said), of.at)
    state, why = _state(of, answer)
    steps = _steps(answer.ranks)
    base = base._replace(stacks=tuple(alike(of.stacks)))
    found = _culprit(of, base, why) if state is LiveState.STANDS else _well(answer, base, why)
    if of.straggler is not None and state is LiveState.GOES_ON:
        found = with_a_slow_rank(found, of.straggler, runs=True)
    return LiveDiagnosis(state, why, found, of.at, steps, len(answer.ranks), answer.asked)


def _state(of: LiveMaterial, answer: LiveAnswer) -> tuple[LiveState, str]:
    page, word = answer.progress, of.word
    if word.word in ("HUNG", "STALLED", "SILENT"):
        return LiveState.STANDS, word.why
    newest = min(answer.ranks, key=lambda one: min(one.stepped, one.beaten))
    age = min(newest.stepped, newest.beaten)
    step = max((one.step for one in answer.ranks if one.step is not None), default=None)
    stopped = [one.rank for one in answer.ranks if one.state in ("T", "t")]
    usual = page.usual if page is not None else None
    due = max(_STANDS, _STEP_TIMES / usual if usual else 0.0)
    if step is not None and (stopped or (newest.phase in _TRAINS and age > due)):
        end = hang_end(page, of.at).words if page is not None else ""
        words = f"no progress for {show_duration(round(age, 1))}, at step {step:,}"
        return LiveState.STANDS, "; ".join(filter(None, (words, end)))
    if step is None:
        since = f" ({newest.phase} for {show_duration(round(age))})" if newest.phase else ""
        return LiveState.STARTS, f"no rank has told a step{since}"
    since = show_duration(round(age, 1))
    saves = f"step {step:,}, and it has been saving for {since}"
    words = saves if newest.phase == SAVE else f"step {step:,}, the last sign of progress {since} ago"
    return LiveState.GOES_ON, "; ".join(filter(None, (words, word.why)))


def _culprit(of: LiveMaterial, base: Diagnosis, why: str) -> Diagnosis:
    """Return whose the standstill is."""
    found = judge_attempt(Material(None, stacks=of.stacks, flight=of.flight))
    if found.kind is FailureClass.UNKNOWN:
        return base._replace(headline=why)
    nodes = {one.rank: one.node for one in of.answer.ranks} if of.answer is not None else {}
    where = tuple(dict.fromkeys(node for rank in found.culprits if (node := nodes.get(rank, ""))))
    return found._replace(attempt=of.attempt, nodes=where, stacks=base.stacks, unseen=base.unseen)


def _well(answer: LiveAnswer, base: Diagnosis, why: str) -> Diagnosis:
    whole = not answer.silent and not base.unseen
    sure = Confidence.HIGH if whole else Confidence.MEDIUM
    return base._replace(kind=FailureClass.NONE, confidence=sure, headline=why)


def _steps(ranks: Sequence[RankNow]) -> tuple[StepGroup, ...]:
    """Return the ranks by step and phase, those that are furthest behind first."""
    groups: dict[tuple[int, str], list[RankNow]] = {}
    for one in ranks:
        groups.setdefault((-1 if one.step is None else one.step, one.phase), []).append(one)
    return tuple(
        StepGroup(tuple(one.rank for one in some), some[0].step, phase, min(one.stepped for one in some))
        for (_, phase), some in sorted(groups.items())
    )


def _unseen(of: LiveMaterial) -> tuple[str, ...]:
    answer = of.answer
    if answer is None:
        return ()
    found = []
    if answer.silent:
        named = ", ".join(answer.silent[:4])
        more = f" and {len(answer.silent) - 4} more" if len(answer.silent) > 4 else ""
        silent = set(answer.silent)
        theirs = rank_words(one.rank for one in answer.ranks if one.node in silent)
        found.append(f"{named}{more} did not answer, with {theirs}")
    if answer.asked < len(answer.ranks):
        found.append(f"{count(answer.asked, 'rank')} of {len(answer.ranks):,} were asked, those that differ first")
    mute = [one.rank for one in of.stacks if not one.answered and one.seen.state not in ("T", "t", "D")]
    if mute:
        found.append(
            f"{rank_words(mute)} showed no Python stack, as {'one' if len(mute) == 1 else 'ranks'} without the guard"
        )
    return tuple(found)
