"""How an attempt ended, in the words of the ledger; and when the job will end."""

from __future__ import annotations

import pytest

from ftsupervise.run.cause import cause
from ftsupervise.scheduler.deadline import from_environment, parse_end_time


def _cause(code: int, *, finished: bool = False, stopped: str = "", told: str = "", past_end: bool = False) -> str:
    return cause(code, finished=finished, stopped=stopped, told=told, past_end=past_end)


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"code": 0, "finished": True}, "finished"),
        ({"code": 1, "finished": True}, "finished, then exit 1"),
        ({"code": 0, "stopped": "kill switch"}, "kill switch"),
        ({"code": 1, "stopped": "kill switch"}, "kill switch, then exit 1"),
        ({"code": 0, "stopped": "warning signal"}, "warning signal"),
        ({"code": 0}, "exit 0"),
        ({"code": 3}, "exit 3"),
        ({"code": -9}, "killed by SIGKILL"),
        ({"code": 137}, "exit 137 (a process killed by SIGKILL)"),
        ({"code": -15, "told": "SIGTERM"}, "cancelled or preempted (SIGTERM)"),
        ({"code": 0, "told": "SIGTERM", "stopped": "told to stop (SIGTERM)"}, "cancelled or preempted (SIGTERM)"),
        ({"code": 0, "stopped": "told to stop (SIGTERM)"}, "cancelled or preempted (SIGTERM)"),
        ({"code": 0, "stopped": "told to stop (SIGTERM)", "past_end": True}, "time limit"),
        ({"code": -9, "told": "SIGTERM", "past_end": True}, "time limit"),
        ({"code": 0, "told": "SIGTERM", "stopped": "kill switch"}, "kill switch"),
        ({"code": -2, "told": "SIGINT"}, "interrupted (SIGINT)"),
        ({"code": 0, "stopped": "host memory"}, "host memory"),
        ({"code": -64}, "killed by SIGRTMAX"),
        ({"code": 200}, "exit 200"),
    ],
)
def test_the_surest_witness_names_the_cause(seen: dict[str, object], words: str) -> None:
    assert _cause(**seen) == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "death", "words"),
    [
        (3, "rank 0 on node-0 exit 3", "rank 0 on node-0 exit 3"),
        (3, "rank 0 on node-0 exit 13", "rank 0 on node-0 exit 13 (exit 3)"),
        (1, "rank 0 on node-0 exit 3", "rank 0 on node-0 exit 3 (exit 1)"),
        (137, "rank 0 on node-0 killed by SIGKILL", "rank 0 on node-0 killed by SIGKILL (exit 137)"),
        (-9, "rank 0 on node-0 killed by SIGKILL", "rank 0 on node-0 killed by SIGKILL (exit 137)"),
    ],
)
def test_an_exit_code_is_said_twice_only_where_the_two_differ(code: int, death: str, words: str) -> None:
    assert cause(code, finished=False, stopped="", told="", past_end=False, death=death) == words


def test_the_end_of_the_job_is_read_as_slurm_writes_it() -> None:
    assert parse_end_time("JobId=7 StartTime=1795242924 EndTime=1795246524 Deadline=N/A") == 1795246524
    assert parse_end_time("EndTime=2026-11-21T08:00:00 x") is not None
    assert parse_end_time("EndTime=Unknown x") is None
    assert parse_end_time("") is None


def test_what_ftsupervise_run_says_goes_before_slurms_variable() -> None:
    assert from_environment({"FTSUPERVISE_DEADLINE": "100", "SLURM_JOB_END_TIME": "200"}) == 100
    assert from_environment({"FTSUPERVISE_DEADLINE": "soon", "SLURM_JOB_END_TIME": "200"}) == 200
    assert from_environment({"SLURM_JOB_END_TIME": "0"}) is None
    assert from_environment({}) is None
