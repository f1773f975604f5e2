"""Slurm's lines as seen in real outputs, and who is to blame."""

from __future__ import annotations

from functools import partial

import pytest

from ftsupervise.model import ended
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.run.exit_analysis import cause_of, failure, first_death, is_believed, named_alone


@pytest.mark.fault(
    "slurmstepd's lines read otherwise: several slurmds on a host, 24.11, 26.05",
    "All recorded forms are known",
)
@pytest.mark.parametrize(
    ("lines", "cause"),
    [
        (["srun: error: node-1: task 1: Killed"], "rank 1 on node-1 killed by SIGKILL"),
        (
            ["srun: error: node-0: task 0: Terminated", "srun: error: node-1: task 1: Killed"],
            "rank 1 on node-1 killed by SIGKILL",
        ),
        (["srun: error: node-0: tasks 0-7: Exited with exit code 3"], "ranks 0-7 on node-0 exit 3"),
        (["srun: error: node-1: task 5: Segmentation fault (core dumped)"], "rank 5 on node-1 killed by SIGSEGV"),
        (
            [
                "srun: error: node-0: task 0: Exited with exit code 1",
                "srun: error: node-1: task 5: Bus error (core dumped)",
            ],
            "rank 5 on node-1 killed by SIGBUS",
        ),
        (
            ["srun: error: node-0: task 0: Exited with exit code 1", "srun: error: node-1: task 5: Aborted"],
            "rank 0 on node-0 exit 1",
        ),
        (
            ["srun: error: node-0: task 0: Out Of Memory", "srun: error: node-1: task 5: Segmentation fault"],
            "rank 0 on node-0 out of memory",
        ),
        (["srun: error: node-1: task 1: Out Of Memory"], "rank 1 on node-1 out of memory"),
        (
            ["slurmstepd: error: Detected 1 oom-kill event(s) in StepId=2.0. Some of your"],
            "out of memory (the kernel or Slurm killed a process)",
        ),
        (["srun: error: Node failure on node-1", "srun: error: node-0: task 0: Killed"], "node failure on node-1"),
        (
            ["slurmstepd: error: *** JOB 2 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***"],
            "time limit",
        ),
        (
            [
                "slurmstepd: error: *** JOB 2 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO NODE FAILURE, SEE SLURMCTLD ***"
            ],
            "node failure",
        ),
        (["slurmstepd: error: *** STEP 2.0 ON node-0 CANCELLED AT 2026-11-21T08:00:00 ***"], ""),
        (["step 120 loss 0.3", "Killed"], ""),
        # recorded: several slurmds on one host (22.05), 24.11, 26.05
        (
            [
                "slurmstepd-node-0: error: *** STEP 7.0 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO JOB REQUEUE ***"
            ],
            "put back into the queue",
        ),
        (
            [
                (
                    "slurmstepd-node-1: error: *** JOB 2 ON node-1 CANCELLED AT 2026-11-21T08:00:00 DUE TO NODE FAILURE, "
                    "SEE SLURMCTLD LOG FOR DETAILS ***"
                )
            ],
            "node failure",
        ),
        (
            [
                "[2026-11-21T08:00:00.123] error: *** JOB 2 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***",
            ],
            "time limit",
        ),
        (
            [
                "[2026-11-21T08:00:00.123] error: *** STEP 2.0 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO PREEMPTION ***"
            ],
            "preemption",
        ),
        (
            [
                "[2026-11-21T08:00:00] error: *** STEP 2.0 ON n0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TASK FAILURE ***",
                "srun: error: node-1: task 5: Exited with exit code 7",
            ],
            "rank 5 on node-1 exit 7",
        ),
        (
            [
                (
                    "[2026-11-21T08:00:00.123] error: *** STEP 2.0 ON node-0 CANCELLED AT 2026-11-21T08:00:00 "
                    "DUE to SIGNAL Terminated ***"
                )
            ],
            "",
        ),
        (
            [
                (
                    "[2026-09-14T17:14:38.784] error: Detected 1 oom_kill event in StepId=22035606.1. Some of the step tasks "
                    "have been OOM Killed."
                ),
                "srun: error: nid005475: tasks 0-2,5,7: Terminated",
            ],
            "out of memory (the kernel or Slurm killed a process)",
        ),
        (
            [
                "slurmstepd-lulu: error: Detected 2 oom_kill events in StepId=7.0. Some of the step tasks have been OOM Killed."
            ],
            "out of memory (the kernel or Slurm killed a process)",
        ),
        (["error: *** JOB 2 ON node-0 FAILED (non-zero exit code or other failure mode) ***"], ""),
        (
            ["srun: error: Unable to create step for job 3: Requested node configuration is not available"],
            "srun could not create a step (Requested node configuration is not available)",
        ),
    ],
)
def test_the_first_death_is_the_cause_and_not_its_victims(lines: list[str], cause: str) -> None:
    found = first_death("\n".join(["step 1 loss 2.3", *lines, "ftsupervise: end"]))
    assert (found.words() if found is not None else "") == cause


def test_a_rank_that_has_raised_and_crashes_in_its_teardown_is_named_for_what_it_raised() -> None:
    told = RankExit(5, "node-1", 77, 1.0, 1, leaving=True, failed=True, final=True)
    said = "srun: error: node-1: task 5: Segmentation fault (core dumped)\nsrun: error: node-0: task 0: Killed\n"
    assert cause_of(told, said).words() == "rank 5 on node-1 exit 1"
    victim = "srun: error: node-0: task 2: Segmentation fault\n"
    assert cause_of(told, victim + said, {2, 5}).words() == "rank 5 on node-1 exit 1"
    assert cause_of(told, victim + said, {5}).words() == "rank 2 on node-0 killed by SIGSEGV"


def test_a_crash_is_named_before_the_rank_that_has_raised_for_it() -> None:
    told = RankExit(0, "node-0", 1, 0.0, 1, leaving=True, failed=True, final=True)
    said = "srun: error: node-1: task 5: Segmentation fault (core dumped)\nsrun: error: node-0: task 0: Killed\n"
    assert cause_of(told, said).words() == "rank 5 on node-1 killed by SIGSEGV"
    assert cause_of(told, said.partition("\n")[2]).words() == "rank 0 on node-0 exit 1"


def test_a_crash_that_the_agent_of_the_rank_has_not_seen_is_quoted_from_another_log() -> None:
    told = RankExit(1, "node-1", 8, 1.0, 1, leaving=True, failed=True, final=True)
    quoted = "srun: error: node-0: task 0: Segmentation fault (core dumped)\n"
    pages = {("0", "node-0"), ("1", "node-1")}
    assert named_alone(quoted + "srun: error: node-1: task 1: Killed\n") == {("0", "node-0")}

    def named(*exits: RankExit, pages: set[tuple[str, str]] = pages) -> str:
        believed = partial(is_believed, pages=pages, exits=(told, *exits))
        return cause_of(told, quoted, believed=believed).words()

    def zero(code: int | None, *, final: bool = True) -> RankExit:
        return RankExit(0, "node-0", 7, 1.1, code, leaving=False, failed=False, final=final)

    assert named(zero(-9)) == named() == "rank 1 on node-1 exit 1", "we have killed it"
    crashed = "rank 0 on node-0 killed by SIGSEGV"
    assert named(zero(-11)) == named(zero(139)) == named(zero(None)) == crashed
    assert named(zero(-9, final=False)) == crashed, "srun saw a shell around it"
    assert named(pages={("1", "node-1")}) == crashed, "without a page its agent knows nothing of it"
    elsewhere = {("1", "node-1"), ("0", "node-7")}
    assert named(zero(-11), pages=elsewhere) == "rank 1 on node-1 exit 1", "it is the task of another srun"


def test_a_rank_that_was_killed_before_anybody_ended_anything_is_named_before_one_that_has_raised_for_it() -> None:
    """The whole step was over before we came to look who was dying."""
    told = RankExit(0, "node-0", 1, 0.0, 1, leaving=True, failed=True, final=True)
    killed, left = "srun: error: node-1: task 1: Killed\n", "srun: error: node-0: task 0: Exited with exit code 1\n"
    assert cause_of(told, killed + left, {0}, before=killed + left).words() == "rank 1 on node-1 killed by SIGKILL"
    assert cause_of(told, killed + left, {0}).words() == "rank 0 on node-0 exit 1", "it may have been us"
    assert cause_of(told, left + killed, {0}, before=left + killed).words() == "rank 0 on node-0 exit 1", (
        "or srun, for it"
    )
    assert cause_of(told, killed + left, {0, 1}, before=killed + left).words() == "rank 0 on node-0 exit 1", (
        "it raised too"
    )


def test_a_rank_that_left_without_a_word_is_named_before_one_that_has_raised_for_it() -> None:
    told = RankExit(0, "node-0", 1, 0.0, 1, leaving=True, failed=True, final=True)
    said = "srun: error: node-0: task 0: Killed\nsrun: error: node-1: task 5: Exited with exit code 7\n"
    assert cause_of(told, said).words() == "rank 5 on node-1 exit 7"
    assert cause_of(told, said, frozenset({5})).words() == "rank 0 on node-0 exit 1", "it raised too, and later"
    own = "srun: error: node-0: task 0: Exited with exit code 1\n"
    assert cause_of(told, own + said).words() == "rank 0 on node-0 exit 1"


def test_what_others_raise_for_a_rank_that_crashed_is_not_said_of_that_rank() -> None:
    raised = (
        "Traceback (most recent call last):\n  File 'a.py', line 1, in step\nConnectionResetError: [Errno 104] reset\n"
    )
    raised += "[rank1]:[E1] Watchdog caught collective operation timeout\n"
    crashed = ended(-11, "node-5", "0")._replace(left=143)
    assert crashed.words() == "rank 0 on node-5 killed by SIGSEGV", "143 is how the others were ended"
    assert crashed._replace(left=139).words() == "rank 0 on node-5 killed by SIGSEGV (exit 139)"
    found = failure(143, crashed, death=crashed, output=raised)
    assert found is not None and (found.sign, found.detail, found.error) == ("killed by SIGSEGV", "", "")
    own = failure(143, crashed, death=crashed, output="Fatal Python error: Segmentation fault\n" + raised)
    assert own is not None and own.detail == "Fatal Python error: Segmentation fault"
    killed = ended(-9, "node-5", "0")
    other = failure(137, killed, death=killed, output=raised.splitlines()[0] + "\nValueError: no such shape\n")
    assert other is not None and other.detail == "ValueError: no such shape", "its launcher may have killed it for that"
