"""How an attempt ended, in the words of the ledger; and when the job will end."""

from __future__ import annotations

import signal

import pytest

from ftsupervise.model import Cause, CauseKind, ended
from ftsupervise.run.cause import cause
from ftsupervise.scheduler import deadline_from_environment, parse_end_time


@pytest.mark.parametrize(
    ("seen", "words"),
    [
        ({"code": 0, "finished": True}, "finished"),
        ({"code": 1, "finished": True}, "finished, then exit 1"),
        ({"code": 0, "stopped": Cause(CauseKind.KILL_SWITCH)}, "kill switch"),
        ({"code": 1, "stopped": Cause(CauseKind.KILL_SWITCH)}, "kill switch, then exit 1"),
        ({"code": 0, "stopped": Cause(CauseKind.WARNING)}, "warning signal"),
        ({"code": 0}, "exit 0"),
        ({"code": 3}, "exit 3"),
        ({"code": -9}, "killed by SIGKILL"),
        ({"code": 137}, "exit 137 (a process killed by SIGKILL)"),
        ({"code": -15, "stop_signal": signal.SIGTERM}, "cancelled or preempted (SIGTERM)"),
        (
            {"code": 0, "stop_signal": signal.SIGTERM, "stopped": Cause(CauseKind.TOLD)},
            "cancelled or preempted (SIGTERM)",
        ),
        ({"code": 0, "stopped": Cause(CauseKind.TOLD)}, "cancelled or preempted (SIGTERM)"),
        ({"code": 0, "stopped": Cause(CauseKind.TOLD), "past_end": True}, "time limit"),
        ({"code": -9, "stop_signal": signal.SIGTERM, "past_end": True}, "time limit"),
        ({"code": 143, "stop_signal": signal.SIGTERM, "death": Cause(CauseKind.TIME_LIMIT)}, "time limit"),
        ({"code": 0, "stop_signal": signal.SIGTERM, "stopped": Cause(CauseKind.KILL_SWITCH)}, "kill switch"),
        ({"code": -2, "stop_signal": signal.SIGINT}, "interrupted (SIGINT)"),
        ({"code": 0, "stopped": Cause(CauseKind.HOST_MEMORY)}, "host memory"),
        ({"code": -64}, "killed by SIGRTMAX"),
        ({"code": 200}, "exit 200"),
    ],
)
def test_the_surest_witness_names_the_cause(seen: dict[str, object], words: str) -> None:
    assert cause(**seen).words() == words  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("code", "death", "words"),
    [
        (3, ended(3, "node-0", "0"), "rank 0 on node-0 exit 3"),
        (3, ended(13, "node-0", "0"), "rank 0 on node-0 exit 13"),
        (1, ended(3, "node-0", "0"), "rank 0 on node-0 exit 3"),
        (137, ended(-9, "node-0", "0"), "rank 0 on node-0 killed by SIGKILL (exit 137)"),
        (-9, ended(-9, "node-0", "0"), "rank 0 on node-0 killed by SIGKILL (exit 137)"),
    ],
)
def test_one_exit_code_is_said_that_of_the_rank(code: int, death: Cause, words: str) -> None:
    assert cause(code, death=death).words() == words


def test_the_end_of_the_job_is_read_as_slurm_writes_it() -> None:
    assert parse_end_time("JobId=7 StartTime=1795242924 EndTime=1795246524 Deadline=N/A") == 1795246524
    assert parse_end_time("EndTime=2026-11-21T08:00:00 x") is not None
    assert parse_end_time("EndTime=Unknown x") is None
    assert parse_end_time("") is None


def test_what_ftsupervise_run_says_goes_before_slurms_variable() -> None:
    assert deadline_from_environment({"FTSUPERVISE_DEADLINE": "100", "SLURM_JOB_END_TIME": "200"}) == 100
    assert deadline_from_environment({"FTSUPERVISE_DEADLINE": "soon", "SLURM_JOB_END_TIME": "200"}) == 200
    assert deadline_from_environment({"SLURM_JOB_END_TIME": "0"}) is None
    assert deadline_from_environment({}) is None
