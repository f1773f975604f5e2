"""How an attempt ended, in the words of the ledger; and when the job will end."""

from __future__ import annotations

import signal

import pytest

from ftsupervise.host.memory import oom_victim
from ftsupervise.model import Cause, CauseKind, ended
from ftsupervise.ranks import protocol
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.run.exit_analysis import (
    First,
    Ours,
    Told,
    by_itself,
    by_slurm_alone,
    cause,
    cause_of,
    first_death,
    first_event,
    last_exits,
    same_rank,
    taken_away,
)
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
        (
            {"code": 143, "stop_signal": signal.SIGTERM, "death": Cause(CauseKind.REQUEUED)},
            "put back into the queue: scontrol requeue",
        ),
        ({"code": 0, "death": Cause(CauseKind.REQUEUED)}, "put back into the queue: scontrol requeue"),
        ({"code": 0, "death": Cause(CauseKind.PREEMPTED)}, "preemption"),
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
    ("line", "job", "kind"),
    [
        ("JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO JOB REQUEUE", "5", CauseKind.REQUEUED),
        ("JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO PREEMPTION", "5", CauseKind.PREEMPTED),
        ("JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT", "5", None),
        ("JOB 6 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO JOB REQUEUE", "5", None),
        ("JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO JOB REQUEUE", "", None),
    ],
)
def test_a_program_that_leaves_with_0_before_we_are_told_has_not_ended_by_itself_where_slurm_took_the_job(
    line: str, job: str, kind: CauseKind | None
) -> None:
    ours = Ours(job)
    found = by_slurm_alone(first_death(f"slurmstepd-node-0: error: *** {line} ***\n", ours), ours)
    assert (found and found.kind) == kind


@pytest.mark.parametrize(
    ("line", "job", "words"),
    [
        ("slurmstepd-node-0: error: *** JOB 5 ON node-0 CANCELLED AT 2026-11-21T08 DUE TO TIME LIMIT ***", "5", "time limit"),
        ("[2026-11-21T08:00:00.1] error: *** JOB 5 ON n CANCELLED AT 2026-11-21T08 DUE TO TIME LIMIT ***", "5", "time limit"),
        ("slurmstepd: error: *** JOB 5 ON n CANCELLED AT 2026-11-21T08:00:00 ***", "5", "cancelled or preempted (SIGTERM)"),
        ("slurmstepd: error: *** JOB 6 ON n CANCELLED AT 2026-11-21T08:00:00 ***", "5", ""),
        ("slurmstepd: error: *** STEP 5.0 ON n CANCELLED AT 2026-11-21T08:00:00 ***", "5", ""),
        ("slurmstepd: error: *** JOB 5 ON n CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***", "", ""),
    ],
)  # fmt: skip
def test_slurm_s_own_line_says_that_it_has_ended_the_job(line: str, job: str, words: str) -> None:
    found = taken_away(f"step 3\n{line}\nTerminated\nend\n", Ours(job))
    assert (found.words() if found is not None else "") == words


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


REQUEST, DEATH, UNSEEN = First.REQUEST, First.DEATH, First.UNSEEN
OVER = 100.0  # when the command was over


@pytest.mark.parametrize(
    ("told", "died_at", "had_heard", "first"),
    [
        # the page of the rank that died says it, whatever the clocks say
        (Told(90.3, here=True), 90.0, True, REQUEST),
        (Told(90.3, here=True), 90.0, False, DEATH),
        (Told(89.0, here=True), 90.0, False, DEATH),  # its death may have been noticed late
        (Told(88.0), 90.0, False, DEATH),
        (Told(93.0), 90.0, True, REQUEST),
        (Told(), 90.0, False, DEATH),
        # it was asked to stop for long, and sat in a library that let no handler run
        (Told(80.0, here=True), 90.0, False, REQUEST),
        (Told(80.1), 90.0, False, DEATH),  # by another machine's clock that proves nothing
        (Told(70.0), 90.0, False, REQUEST),
        # a rank without a page: only clocks say it
        (Told(90.3, here=True), 90.0, None, DEATH),
        (Told(89.5, here=True), 90.0, None, UNSEEN),
        (Told(87.0, here=True), 90.0, None, REQUEST),
        (Told(90.3), 90.0, None, UNSEEN),
        (Told(85.0), 90.0, None, UNSEEN),
        (Told(99.0), 80.0, None, DEATH),
        (Told(79.0), 90.0, None, REQUEST),
        # nobody saw when it died
        (Told(90.0, here=True), None, None, UNSEEN),
        (Told(), None, None, UNSEEN),
        (Told(100.5, here=True), None, None, DEATH),  # what was left was told by us
    ],
)
def test_what_came_first_is_said_as_far_as_it_was_seen(
    told: Told, died_at: float | None, had_heard: bool | None, first: First
) -> None:
    assert first_event(told, ours=OVER, died_at=died_at, had_heard=had_heard) is first


def test_a_command_of_which_nothing_ended_before_was_asked_to_stop_unless_it_was_we_who_asked() -> None:
    assert first_event(Told(99.9, here=True), ours=OVER, by_itself=False) is REQUEST
    assert first_event(Told(), ours=OVER, by_itself=False) is REQUEST
    assert first_event(Told(100.1, here=True), ours=OVER, by_itself=False) is DEATH
    assert first_event(Told(105.0), ours=OVER, by_itself=False) is REQUEST, "another machine's clock proves nothing"


@pytest.mark.parametrize(
    ("code", "death", "first", "words"),
    [
        (1, ended(1, "node-1", "1"), DEATH, "rank 1 on node-1 exit 1"),
        (1, ended(1, "node-1", "1"), REQUEST, "asked to stop (SIGTERM), then rank 1 on node-1 exit 1"),
        (
            *(1, ended(1, "node-1", "1"), UNSEEN),
            "rank 1 on node-1 exit 1, and asked to stop (SIGTERM): which of them came first is not known",
        ),
        (1, None, UNSEEN, "exit 1, and asked to stop (SIGTERM): which of them came first is not known"),
        (3, None, DEATH, "exit 3"),
        (0, None, DEATH, "exit 0"),
        (0, None, REQUEST, "cancelled or preempted (SIGTERM)"),
        (0, None, UNSEEN, "cancelled or preempted (SIGTERM)"),
        (143, Cause(CauseKind.PREEMPTED), REQUEST, "preemption (exit 143)"),
    ],
)
def test_the_first_event_is_the_cause(code: int, death: Cause | None, first: First, words: str) -> None:
    found = cause(code, stopped=Cause(CauseKind.TOLD), death=death, first=first)
    assert found.words() == words
    if death is not None and death.at:
        assert found.first.at == death.at, "the node is the rank's"


def test_what_a_supervisor_was_asked_is_the_cause_whatever_died_of_it() -> None:
    died = ended(1, "node-1", "1")
    told = {"stopped": Cause(CauseKind.TOLD), "death": died, "first": DEATH}
    assert cause(1, stop_signal=signal.SIGTERM, **told).words() == "cancelled or preempted (SIGTERM)"  # type: ignore[arg-type]
    warned = cause(1, stopped=Cause(CauseKind.WARNING), death=died, first=DEATH)
    assert warned.words() == "warning signal, then rank 1 on node-1 exit 1"


def test_whom_the_kernel_killed_for_memory_is_told_by_its_node_where_slurm_makes_no_cgroup() -> None:
    victim = RankExit(2, "node-0", 7, 5.0, -9, False, False, True, oom=True)
    assert protocol.read_exits(protocol.pack_exits([victim], 5.0), "node-0", 5.0) == [victim]
    srun = "srun: error: node-0: task 2: Killed\nsrun: error: node-0: tasks 0-1,3: Exited with exit code 1\n"
    found = cause_of(victim, srun)
    assert (found.kind, found.at[0].words(), found.words()) == (
        CauseKind.MEMORY,
        "rank 2 on node-0",
        "rank 2 on node-0 out of memory",
    )
    assert cause_of(victim._replace(oom=False), srun).words() == "rank 2 on node-0 killed by SIGKILL"


@pytest.mark.parametrize(
    ("record", "victim"),
    [
        (
            "6,1045,3012345678,-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:1204kB, anon-rss:9kB",
            4711,
        ),
        ("3,812,99,-;Out of memory: Killed process 812 (python3) total-vm:9kB, UID:1000 pgtables:9kB", 812),
        ("6,813,99,-;oom_reaper: reaped process 812 (python3), now anon-rss:0kB", None),
        ("12,814,99,-;Out of memory: Killed process 1 (by a program that wrote into the log)", None),
        ("Out of memory: Killed process 5", None),
        ("", None),
    ],
)
def test_the_kernel_s_own_records_alone_name_the_victim(record: str, victim: int | None) -> None:
    assert oom_victim(record) == victim


def test_the_end_of_a_rank_tells_whether_it_had_been_told() -> None:
    gone = [RankExit(0, "n", 7, 5.0, 0, True, False, True, True), RankExit(1, "n", 8, 4.0, 1, True, True, True)]
    assert protocol.read_exits(protocol.pack_exits(gone, 5.0), "n", 5.0) == gone
    assert [by_itself(one) for one in gone] == [False, True]
    again = [RankExit(1, "n", 3, 2.0, 1, True, True, False), *gone, RankExit(2, "n", 9, -70.0, 1, True, True, True)]
    assert last_exits(again, 5.0) == [gone[1], gone[0]], "the newest of each rank, and none that was outlived"
    assert same_rank(ended(1, "n.cluster", "1"), gone[1]) and not same_rank(ended(1, "m", "1"), gone[1])


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
