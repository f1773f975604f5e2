"""Which lines of Slurm's are about our ranks, and which of them the nodes confirm."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import pytest

from ftsupervise.hostlist import expand_counts
from ftsupervise.model import Cause
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.run.deaths import HintChecker
from ftsupervise.run.exit_analysis import Ours, blamed, cause_of, first_death, hints
from tests.neighbours.patience import wait_until

OURS = Ours("88", "88.1", frozenset(("node-0", "node-1")), frozenset())
NODE = "srun: error: Node failure on node-1\n"
LAUNCH = "srun: error: Task launch for StepId=88.1 failed on node node-1: Communication connection failure\n"
OOM = "slurmstepd: error: Detected 1 oom_kill event in StepId=88.1. Some of the step tasks have been OOM Killed.\n"
DUE = "slurmstepd: error: *** JOB 88 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***\n"
TASK = "srun: error: node-1: task 3: Exited with exit code 1\n"
NO_STEP = "srun: error: Unable to create step for job 88: More processors requested than permitted\n"


@pytest.mark.parametrize(
    ("line", "theirs"),
    [
        (LAUNCH, LAUNCH.replace("88.1", "88.4")),
        (LAUNCH, LAUNCH.replace("node-1", "node-9")),
        (OOM, OOM.replace("88.1", "88.7")),
        (OOM, OOM.replace("88.1", "12.1")),
        (DUE, DUE.replace("JOB 88", "JOB 12")),
        (DUE.replace("JOB 88", "STEP 88.1"), DUE.replace("JOB 88", "STEP 88.4")),
        (TASK, TASK.replace("node-1", "node-9")),
        (NO_STEP, NO_STEP.replace("88", "12")),
    ],
)
def test_a_line_about_another_job_step_or_node_is_no_cause(line: str, theirs: str) -> None:
    assert first_death(line, OURS) is not None
    assert first_death(theirs, OURS) is None
    assert blamed(theirs, OURS) == ()
    assert hints(theirs, OURS) == []


def test_a_node_is_lost_when_slurm_or_its_agent_says_so_and_not_when_a_line_does() -> None:
    assert first_death(NODE, OURS) is None and blamed(NODE, OURS) == ()
    lost = OURS._replace(lost=frozenset(("node-1",)))
    assert blamed(NODE, lost) == ("node-1",)


def test_a_refused_step_is_not_ours_once_our_ranks_have_run() -> None:
    assert first_death(NO_STEP, OURS._replace(began=True)) is None


BOTH = {
    "node-0": "88.1 0 node-[0-1] 2(x2)\n88.1 1 node-[0-1] 2(x2)",
    "node-1": "88.1 2 node-[0-1] 2(x2)\n88.1 3 node-[0-1] 2(x2)\n88.4 0 node-1 1",
}


@pytest.mark.parametrize(
    ("said", "answers", "states", "true"),
    [
        (TASK, BOTH, {}, False),
        (TASK, {**BOTH, "node-1": "88.1 2 node-[0-1] 2(x2)"}, {}, True),
        (TASK, {**BOTH, "node-1": ""}, {}, True),
        # of an evaluation on that node: its rank 0 is not ours, all of ours live there
        (TASK.replace("task 3", "task 0"), BOTH, {}, False),
        (TASK.replace("task 3", "tasks 2-3"), {**BOTH, "node-1": "88.1 2 node-[0-1] 2(x2)"}, {}, False),
        (TASK, {"node-0": BOTH["node-0"]}, {}, None),  # its agent does not answer
        (TASK, {"node-0": "", "node-1": ""}, {}, None),  # an environment that was cleaned: nobody sees our tasks
        (LAUNCH, BOTH, {}, False),
        (LAUNCH, {**BOTH, "node-1": ""}, {}, True),
        (NODE, BOTH, {"node-0": "mixed", "node-1": "mixed"}, False),
        (NODE, BOTH, {"node-0": "mixed", "node-1": "down*"}, True),
        (NODE, BOTH, {}, None),  # Slurm does not answer
    ],
)
def test_what_was_said_is_true_when_the_node_or_slurm_says_so_too(
    said: str, answers: Mapping[str, str], states: Mapping[str, str], true: bool | None
) -> None:
    woken: list[bool] = []
    asked: list[bool] = []

    def ask(questions: Mapping[str, str], timeout: float) -> dict[str, str]:
        asked.append(True)
        return {node: answers[node] for node in questions if node in answers}

    ours = Ours("88", nodes=frozenset(("node-0", "node-1")))
    one = HintChecker(ours, Path("/runs/a/attempts/0001"), "login", ask, lambda: states, lambda: woken.append(True))
    found: list[Cause] = hints(said, ours)
    one.take(found, 77)
    if true:
        wait_until(lambda: woken, "the answer", 10)
        assert one.confirmed == found[0]
    elif true is None:
        wait_until(lambda: len(asked) > 2, "that it is asked again", 10)
        assert one.confirmed is None and not one.settled
    else:
        wait_until(lambda: one.settled == 77, "the answer", 10)
        assert one.confirmed is None
    one.close()


def test_an_older_line_of_another_rank_is_not_believed_of_a_node_that_is_not_ours() -> None:
    told = RankExit(0, "node-0", 1, 0.0, 1, leaving=True, failed=True, final=True)
    theirs = "srun: error: node-9: task 5: Segmentation fault (core dumped)\n"
    assert cause_of(told, theirs, ours=OURS).words() == "rank 0 on node-0 exit 1"


def test_slurms_short_form_of_many_counts() -> None:
    assert expand_counts("2(x3),1") == (2, 2, 2, 1)
    for wrong in ("", "2(x", "2(x999999999)", "two"):
        with pytest.raises(ValueError, match="not a list of counts"):
            expand_counts(wrong)


THROUGH = RankExit(3, "node-1", 1, 0.0, 0, leaving=True, failed=False, final=True)


@pytest.mark.parametrize("line", [TASK, TASK.replace("task 3", "task 0")])
@pytest.mark.parametrize(
    ("exits", "true"), [((THROUGH,), False), ((THROUGH._replace(code=1, failed=True),), True), ((), True)]
)
def test_a_rank_that_has_ended_in_order_is_not_missing_when_anothers_evaluation_fails_on_its_node(
    line: str, exits: tuple[RankExit, ...], true: bool
) -> None:
    """Rank 3 is through; the srun of an evaluation on its node fails, and numbers its tasks as ours are numbered."""
    answers = {**BOTH, "node-1": "88.1 2 node-[0-1] 2(x2)"}
    ours = Ours("88", nodes=frozenset(("node-0", "node-1")))
    folder = Path("/runs/a/attempts/0001")
    one = HintChecker(ours, folder, "login", lambda asked, _: answers, dict, lambda: None, lambda: exits)
    found: list[Cause] = hints(line, ours)
    one.take(found, 77)
    wait_until(lambda: one.confirmed or one.settled, "the answer", 10)
    assert one.confirmed == (found[0] if true else None)
    one.close()
