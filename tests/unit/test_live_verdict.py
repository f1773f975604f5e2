"""How a run is at this moment, from what its ranks answer."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.diagnosis.live import LiveMaterial, LiveState, judge_live, may_run
from ftsupervise.diagnosis.stacks import RankStack
from ftsupervise.diagnosis.verdict import Confidence
from ftsupervise.diagnosis.vocabulary import FailureClass
from ftsupervise.model import Attempt, Cause, CauseKind
from ftsupervise.ranks.evidence import EvidenceHeader
from ftsupervise.report.pace_word import PaceWord
from ftsupervise.rundir.live_look import LiveAnswer, RankNow
from ftsupervise.rundir.progress import COMES_LAST, RESTARTS, ProgressPage, Straggler

NOW = datetime(2026, 11, 28, tzinfo=timezone.utc)
FRAME = '  File "/home/me/train.py", line {} in {}\n'
WAITS = '  File "/opt/lib/python3/site-packages/torch/distributed/c10d.py", line 1 in all_reduce\n' + FRAME.format(
    30, "step"
)


def rank(number: int, step: int | None = 74, age: float = 30.0, phase: str = "train", state: str = "S") -> RankNow:
    return RankNow(number, f"node-{number // 8}", step, phase, age, age, 0.1, state, 100 + number)


def stack(number: int, *, waits: bool, state: str = "S", frames: str = WAITS) -> RankStack:
    return RankStack(number, EvidenceHeader(number, 100 + number, state, "", "", waits, ""), frames, bool(frames))


def answer(*ranks: RankNow, usual: float | None = 2.0, silent: tuple[str, ...] = (), asked: int = -1) -> LiveAnswer:
    page = ProgressPage(at=NOW, usual=usual, on_hang=RESTARTS, hang_at=NOW.timestamp() + 60)
    return LiveAnswer("1", NOW, ranks, len(ranks) if asked < 0 else asked, silent, page)


def test_thirty_ranks_in_all_reduce_and_one_in_its_own_code() -> None:
    stacks = [stack(one, waits=True) for one in range(31) if one != 17]
    stacks.append(stack(17, waits=False, frames=FRAME.format(99, "read")))
    found = judge_live(LiveMaterial(3, NOW, answer(*map(rank, range(31))), stacks))
    assert (found.state, found.found.culprits, found.found.nodes) == (LiveState.STANDS, (17,), ("node-2",))
    assert found.found.confidence is Confidence.HIGH and found.found.attempt == 3
    assert [one.words() for one in found.found.stacks] == [
        "ranks 0-16,18-30: waits for others in all_reduce (train.py:30 step)",
        "rank 17: is in read (train.py:99 read), state S",
    ]
    assert found.why.startswith("no progress for 30s, at step 74; its supervisor restarts it at 00:01:00 UTC, in 1m")


@pytest.mark.parametrize(
    ("age", "usual", "phase", "state"),
    [
        (14.0, 2.0, "train", LiveState.GOES_ON),
        (16.0, 2.0, "train", LiveState.STANDS),
        (16.0, 0.1, "train", LiveState.GOES_ON),
        (51.0, 0.1, "train", LiveState.STANDS),
        (300.0, 2.0, "eval", LiveState.GOES_ON),
        (300.0, 2.0, "save", LiveState.GOES_ON),
    ],
)
def test_a_run_stands_when_a_step_is_long_due(age: float, usual: float, phase: str, state: LiveState) -> None:
    found = judge_live(LiveMaterial(1, NOW, answer(rank(0, 5, age, phase), rank(1, 5, age, phase), usual=usual)))
    assert found.state is state
    if state is LiveState.GOES_ON:
        assert found.found.kind is FailureClass.NONE and found.found.culprits == ()


def test_a_run_that_saves_is_not_said_to_stand_before_its_supervisor_knows_that_it_hangs() -> None:
    ranks = answer(rank(0, 5, 300.0, "save"), rank(1, 5, 300.0, "save"), usual=2.0)
    found = judge_live(LiveMaterial(1, NOW, ranks))
    assert (found.state, found.why) == (LiveState.GOES_ON, "step 5, and it has been saving for 5m")
    hung = LiveMaterial(1, NOW, ranks, word=PaceWord("HUNG", "no progress for 5m"))
    assert (judge_live(hung).state, judge_live(hung).why) == (LiveState.STANDS, "no progress for 5m")


def test_a_healthy_run_accuses_nobody_whatever_its_stacks_are() -> None:
    stacks = [stack(0, waits=True), stack(1, waits=False, frames=FRAME.format(3, "compute"))]
    found = judge_live(LiveMaterial(1, NOW, answer(rank(0, age=0.2), rank(1, 73, age=0.4)), stacks))
    assert (found.state, found.found.kind) == (LiveState.GOES_ON, FailureClass.NONE)
    assert found.found.headline == "step 74, the last sign of progress 0.2s ago"
    assert [one.words() for one in found.steps] == [
        "rank 1: step 73 (train), 0.4s ago",
        "rank 0: step 74 (train), 0.2s ago",
    ]


def test_a_stopped_rank_stands_at_once() -> None:
    stacks = [stack(0, waits=True), stack(1, waits=False, state="T", frames="")]
    found = judge_live(LiveMaterial(1, NOW, answer(rank(0, age=1.0), rank(1, age=1.0, state="T")), stacks))
    assert (found.state, found.found.kind, found.found.culprits) == (LiveState.STANDS, FailureClass.STOPPED, (1,))
    assert found.found.unseen == (), "why it has no stack is said already"


def test_the_word_of_status_is_the_word_here() -> None:
    slow = judge_live(LiveMaterial(1, NOW, answer(rank(0, age=0.1)), word=PaceWord("SLOW", "a third of what is usual")))
    assert slow.state is LiveState.GOES_ON and "a third of what is usual" in slow.why
    hung = judge_live(LiveMaterial(1, NOW, answer(rank(0, age=0.1)), word=PaceWord("HUNG", "no progress for 12m")))
    assert (hung.state, hung.why) == (LiveState.STANDS, "no progress for 12m")
    assert hung.found.kind is FailureClass.UNKNOWN and hung.found.headline == "no progress for 12m"


def test_what_could_not_be_seen_is_said() -> None:
    none = judge_live(LiveMaterial(1, NOW, unseen=("no answer within 5 s",)))
    assert (none.state, none.found.kind) == (LiveState.UNSEEN, FailureClass.UNKNOWN)
    assert none.found.unseen == ("no answer within 5 s",)
    ranks = answer(*(rank(one, age=0.1) for one in range(16)), silent=("node-1",), asked=10)
    some = judge_live(LiveMaterial(1, NOW, ranks))
    assert some.found.unseen == (
        "node-1 did not answer, with ranks 8-15",
        "10 ranks of 16 were asked, those that differ first",
    )
    assert some.found.confidence is Confidence.MEDIUM, "it goes on, as far as it was seen"


def test_only_the_newest_attempt_without_an_end_may_run() -> None:
    ended = Attempt(1, "7", NOW - timedelta(hours=2), ended=NOW - timedelta(hours=1))
    runs = Attempt(2, "7", NOW - timedelta(hours=1))
    assert may_run((ended, runs), None) is runs and may_run((ended, runs), 2) is runs
    assert may_run((ended, runs), 1) is None and may_run((ended,), None) is None and may_run((), None) is None
    assert may_run((ended, runs._replace(cause=Cause(CauseKind.LOST))), None) is None
    elsewhere = runs._replace(cause=Cause(CauseKind.UNKNOWN))
    assert may_run((elsewhere,), None) is elsewhere, "its supervisor is on another host"


def test_a_run_that_goes_on_and_waits_for_a_slow_rank_at_each_step_says_so() -> None:
    slow = Straggler((1,), "node-0", 0.3, COMES_LAST, 3, NOW)
    ranks = answer(*(rank(number, age=0.1) for number in range(3)))
    found = judge_live(LiveMaterial(1, NOW, ranks, straggler=slow))
    assert (found.state, found.found.kind, found.found.culprits) == (LiveState.GOES_ON, FailureClass.STRAGGLER, (1,))
    assert found.found.headline == slow.words()
