"""Is the run alive? As values: jobs in, one finding out."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import IsRunning as Settings
from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Attempt, Cause, CauseKind, Job, JobState
from ftsupervise.replicas.record import LighthouseRecord
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, write_table
from ftsupervise.rundir.attempt_pages import EndPage, write_page
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import KILL
from ftsupervise.scheduler import ownership
from ftsupervise.scheduler.ownership import RunIdentity, by_mark, candidates, own_job_ids
from ftsupervise.scheduler.pending import NEVER
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.is_running import check

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


def identity(name: str, launches: Iterable[LaunchRecord], own: frozenset[str] = frozenset()) -> RunIdentity:
    found = ownership.identify(RunDir("/scratch/ada/runs/tr11"), name, launches, watch=own)
    return found._replace(users=frozenset({"ada"}), places=lambda: frozenset({"/home/ada/project"}))


def jobs_of_run(
    name: str, launches: Iterable[LaunchRecord], queue: Iterable[Job], own: frozenset[str]
) -> tuple[Job, ...]:
    return ownership.jobs_of_run(identity(name, launches, own), queue)


def job(job_id: str = "88_1", state: JobState = JobState.RUNNING, **more: object) -> Job:
    base = job_id.partition("_")[0]
    fields: dict[str, object] = {
        "name": "tr11",
        "user": "ada",
        "comment": "ftsupervise:tr11:t0",
        "raw_id": base,
        **more,
    }
    return Job(id=job_id, base_id=base, state=state, submit_time=NOW - timedelta(hours=3), **fields)  # type: ignore[arg-type]


REST = job("88_[2-10%1]", JobState.PENDING, reason="JobArrayTaskLimit")


def groups(tmp_path: Path, *states: GroupState, below: bool = False, age: int = 0, at: int = 0) -> dict[str, Finding]:
    """What is found of groups in these states, for ``age`` minutes; the table is ``at`` minutes old."""
    since = NOW - timedelta(minutes=age)
    rows = tuple(ReplicaGroup(f"g00{number}", state, since, "no node") for number, state in enumerate(states))
    (tmp_path / "replicas").mkdir(exist_ok=True)
    table = GroupTable(NOW - timedelta(minutes=at), wanted=3, least=2, groups=rows, below=since if below else None)
    write_table(RunDir(tmp_path), table)
    return {one.subject: one for one in look(tmp_path, job(), REST)}


def test_too_few_groups_are_an_alert_at_once_and_one_that_is_away_later(tmp_path: Path) -> None:
    fine = groups(tmp_path, GroupState.RUNNING, GroupState.RUNNING, GroupState.LEFT)
    assert {fine[name].health for name in ("job", "quorum", "g000", "g002")} == {Health.OK}
    away = groups(tmp_path, GroupState.RUNNING, GroupState.RUNNING, GroupState.WAITING, age=20)
    assert (away["quorum"].health, away["g002"].health) == (Health.OK, Health.OK)
    away = groups(tmp_path, GroupState.RUNNING, GroupState.RUNNING, GroupState.WAITING, age=40)
    assert (away["quorum"].health, away["g002"].health) == (Health.OK, Health.BAD)
    assert "group g002: waiting for 40m: no node" in away["g002"].summary
    few = groups(tmp_path, GroupState.RUNNING, GroupState.WAITING, GroupState.WAITING, below=True, age=1)
    assert few["quorum"].health is Health.BAD and "1 of 3 groups run, at least 2 must" in few["quorum"].summary


def test_a_group_stopped_by_its_brake_is_an_alert_at_once(tmp_path: Path) -> None:
    found = groups(tmp_path, GroupState.RUNNING, GroupState.RUNNING, GroupState.STOPPED)
    assert found["g002"].health is Health.BAD


def test_a_group_of_which_nothing_is_known_is_neither_away_nor_there(tmp_path: Path) -> None:
    found = groups(tmp_path, GroupState.RUNNING, GroupState.UNKNOWN, GroupState.UNKNOWN, age=90)
    assert (found["quorum"].health, found["g001"].health) == (Health.UNKNOWN, Health.UNKNOWN)
    found = groups(tmp_path, GroupState.RUNNING, GroupState.RUNNING, GroupState.UNKNOWN, age=90)
    assert found["quorum"].health is Health.OK, "enough of them run, whatever the third does"


def test_nothing_is_said_of_the_groups_while_no_job_runs(tmp_path: Path) -> None:
    groups(tmp_path, GroupState.WAITING, GroupState.WAITING, GroupState.WAITING, at=90)
    waiting = look(tmp_path, job("88", JobState.PENDING, reason="Priority"))
    assert not {"quorum", "g000"} & {one.subject for one in waiting}, "an old table is no blindness then"
    blind = look(tmp_path, blind="Slurm does not answer")
    assert [one.health for one in blind if one.subject == "quorum"] == [Health.UNKNOWN]


def test_groups_whose_lighthouse_has_no_job_that_runs_make_no_step_and_that_is_said(tmp_path: Path) -> None:
    (tmp_path / "replicas").mkdir()
    rows = tuple(ReplicaGroup(f"g00{number}", GroupState.RUNNING, NOW) for number in range(3))
    table = GroupTable(NOW - timedelta(minutes=10), wanted=3, least=2, groups=rows, place="jobs")
    write_table(RunDir(tmp_path), table)
    of_group = job("99_1", comment="ftsupervise:tr11:t0.2")
    waits = job("88_2", JobState.PENDING, reason="Resources", comment="ftsupervise:tr11:t0.1")
    runs = job("88_1", comment="ftsupervise:tr11:t0.1")

    def quorum(*jobs: Job) -> Finding:
        return {one.subject: one for one in look(tmp_path, *jobs)}["quorum"]

    assert quorum(of_group, waits).health is Health.UNKNOWN, "these groups find each other by themselves"
    write_json(tmp_path / "replicas" / "lighthouse.json", LighthouseRecord(port=20001))
    found = quorum(of_group, waits)
    words = "the groups have had no lighthouse for 10m: its job 88_2 waits in the queue (Resources)"
    assert (found.health, found.summary) == (Health.BAD, words)
    assert "no job of it is in the queue" in quorum(of_group).summary
    assert quorum(of_group, runs).health is Health.UNKNOWN, "its host may be lost, and Slurm has not noticed"


def test_of_an_old_table_nothing_is_known(tmp_path: Path) -> None:
    found = groups(tmp_path, GroupState.RUNNING, GroupState.WAITING, GroupState.WAITING, below=True, at=9)
    assert found["quorum"].health is Health.UNKNOWN and "g002" not in found
    (RunDir(tmp_path).switches / KILL).touch()
    assert groups(tmp_path, GroupState.OVER, GroupState.OVER, GroupState.OVER, at=9)["quorum"].health is Health.OK


def look(tmp_path: Path, *jobs: Job, blind: str = "", members: int = 10, **settings: object) -> list[Finding]:
    run = Run(name="tr11", run_dir=tmp_path, launch=Launch(command="true", jobs=members))
    rundir = RunDir(tmp_path)
    rundir.switches.mkdir(exist_ok=True)
    rundir.launches.mkdir(exist_ok=True)
    rundir.state.mkdir(exist_ok=True)
    seen = Look(run=run, rundir=rundir, now=NOW, jobs=None if blind else jobs, blind=blind, watchdog="is-running")
    found = list(check(seen, Settings(**settings)))  # type: ignore[arg-type]
    return [f for f in found if f.watchdog != "switches" or f.health is Health.BAD]


def test_running_with_a_successor_is_fine(tmp_path: Path) -> None:
    assert [f.health for f in look(tmp_path, job(), REST)] == [Health.OK, Health.OK]


def test_no_job_at_all_is_critical_and_says_what_to_type(tmp_path: Path) -> None:
    finding = look(tmp_path)[0]
    assert finding.health is Health.BAD
    assert "no job of this run" in finding.summary
    assert "ftsupervise launch" in finding.do


def test_of_a_run_whose_job_was_cancelled_it_is_asked_whether_that_was_meant(tmp_path: Path) -> None:
    folder = RunDir(tmp_path).attempt(1)
    folder.mkdir(parents=True)
    write_json(
        folder / "start.json", {"attempt": 1, "job_id": "local-88", "at": (NOW - timedelta(hours=1)).isoformat()}
    )
    write_page(folder, EndPage(ended=NOW, exit_code=143, cause=Cause(CauseKind.CANCELLED, signal=15)))
    finding = look(tmp_path)[0]
    assert (finding.health, finding.severity) == (Health.BAD, Severity.CRITICAL)
    assert finding.do.startswith(f"was that meant? then: ftsupervise kill {tmp_path}; else: ftsupervise launch")


def test_a_dead_slurmctld_is_neither_gone_nor_fine(tmp_path: Path) -> None:
    (finding,) = look(tmp_path, blind="connect failure")
    assert finding.health is Health.UNKNOWN
    assert "connect failure" in finding.summary


@pytest.mark.parametrize(
    "reason", [*sorted(NEVER), "QOSMaxGRESPerJob", "AssocMaxWallDurationPerJobLimit", "QOSMinGRES"]
)
def test_a_reason_that_never_ends_is_not_a_queue_wait(tmp_path: Path, reason: str) -> None:
    finding = look(tmp_path, job("88", JobState.PENDING, reason=reason))[0]
    assert finding.health is Health.BAD
    assert reason in finding.summary
    assert "JOBID" not in finding.do


@pytest.mark.parametrize("reason", ["PartitionDown", "PartitionInactive", "QOSMaxGRESPerUser"])
def test_a_maintenance_and_the_share_of_others_are_waits(tmp_path: Path, reason: str) -> None:
    assert look(tmp_path, job("88", JobState.PENDING, reason=reason))[0].health is Health.OK


@pytest.mark.fault(
    "Slurm holds a job by itself (a prolog failed), and prints the reason with spaces",
    "the watch says that it never starts; it is no successor",
)
@pytest.mark.parametrize(
    "reason",  # as squeue's %r prints them: with spaces
    [
        "launch failed requeued held",
        "job requeued in held state",
        "launch failure limit exceeded requeued held",
        "user env retrieval failed requeued held",
        "AssocGrpCPUMinutesLimit, and what a plug-in has to say",
    ],
)
def test_a_job_that_slurm_has_put_on_hold_by_itself_never_starts_and_has_no_place_in_the_chain(
    tmp_path: Path, reason: str
) -> None:
    found = look(tmp_path, job("88", JobState.PENDING, reason=reason))
    assert (found[0].subject, found[0].health) == ("job", Health.BAD)
    assert reason in found[0].summary
    beside = look(tmp_path, job("88_1"), job("88_[2-10%1]", JobState.PENDING, reason=reason))
    assert [f.subject for f in beside if f.health is Health.BAD] == ["successor"]


def test_an_ordinary_wait_is_healthy_until_its_bound(tmp_path: Path) -> None:
    waiting = job("88_[1-10%1]", JobState.PENDING, reason="Priority")
    assert look(tmp_path, waiting)[0].health is Health.OK
    assert look(tmp_path, waiting, pending_for=timedelta(hours=2))[0].health is Health.BAD
    assert look(tmp_path, waiting, pending_for=timedelta(hours=4))[0].health is Health.OK


def test_completing_is_fine_for_a_while_and_then_a_stuck_node(tmp_path: Path) -> None:
    fresh = job(state=JobState.COMPLETING, end_time=NOW - timedelta(minutes=1))
    stuck = job(state=JobState.COMPLETING, end_time=NOW - timedelta(minutes=20))
    assert look(tmp_path, fresh, REST)[0].health is Health.OK
    assert look(tmp_path, stuck, REST)[0].health is Health.BAD


def night(tmp_path: Path, *table: tuple[int, Job | None], **settings: object) -> list[tuple[int, Health, str]]:
    """What each check finds of the job; ``table``: the minute of the check, and what stands in the queue."""
    run, rundir = Run(name="tr11", run_dir=tmp_path, launch=Launch(command="true", jobs=1)), RunDir(tmp_path)
    memory: dict[str, object] = {}
    out = []
    for minute, one in table:
        now = NOW + timedelta(minutes=minute)
        jobs = () if one is None else (one,)
        memory = json.loads(json.dumps(memory))  # as the page between two ticks keeps it
        seen = Look(run=run, rundir=rundir, now=now, jobs=jobs, memory=memory, watchdog="is-running")
        found = next(iter(check(seen, Settings(**settings))))  # type: ignore[arg-type]
        out.append((minute, found.health, found.summary))
    return out


@pytest.mark.parametrize("state", ["SUSPENDED", "STOPPED", "CONFIGURING", "STAGE_OUT", "EXPEDITING", "COMPLETING"])
def test_a_state_that_nothing_trains_in_has_a_bound(tmp_path: Path, state: str) -> None:
    one = job("88_1", JobState(state))
    found = night(tmp_path, (0, job()), *((minute, one) for minute in (5, 14, 34, 36, 60)))
    late = 14 if state == "COMPLETING" else 34
    assert [health for minute, health, _ in found if minute <= late] == [Health.OK] * (3 if late == 14 else 4)
    assert {health for minute, health, _ in found if minute > max(late, 34)} == {Health.BAD}
    assert state in found[-1][2] and "88_1" in found[-1][2] and "55m" in found[-1][2]


def test_a_job_that_runs_again_in_between_begins_anew(tmp_path: Path) -> None:
    away = job("88_1", JobState.SUSPENDED)
    found = night(tmp_path, (0, away), (20, away), (25, job()), (30, away), (55, away), (61, away))
    assert [health for _, health, _ in found] == [Health.OK] * 5 + [Health.BAD]
    assert night(tmp_path, (0, away), (20, away), passing_for=timedelta(minutes=10))[-1][1] is Health.BAD


def test_how_long_a_run_may_wait_is_learned_from_its_own_waits(tmp_path: Path) -> None:
    def started(number: int, wait: int, at: int) -> Job:
        begun = NOW + timedelta(minutes=at)
        return job(f"{number}", start_time=begun)._replace(submit_time=begun - timedelta(minutes=wait))

    def waits(number: int, since: int) -> Job:
        one = job(f"{number}", JobState.PENDING, reason="Priority")
        return one._replace(submit_time=NOW + timedelta(minutes=since))

    three = [(0, started(1, 180, 0)), (600, started(2, 60, 600)), (1200, started(3, 120, 1200))]
    rest = [(minute, waits(4, 1500)) for minute in (1500, 1500 + 530, 1500 + 545)]
    found = night(tmp_path, *three, *rest)
    assert [health for _, health, _ in found] == [Health.OK] * 5 + [Health.BAD]
    assert "longer than each of its last 3 waits" in found[-1][2] and "9h 5m" in found[-1][2]
    unknown = night(tmp_path, *three[:2], (1500, waits(4, 1500)), (9000, waits(4, 1500)))
    assert unknown[-1][1] is Health.OK, "of two waits nothing is learned"
    wanted = [(minute, one._replace(reason="BeginTime")) for minute, one in rest]
    assert night(tmp_path, *three, *wanted)[-1][1] is Health.OK, "somebody asked for that"


def test_a_wait_on_hold_says_nothing_of_the_queue(tmp_path: Path) -> None:
    held = job("88", JobState.PENDING, reason="JobHeldUser")
    short = [(n, job(f"{n}", start_time=NOW + timedelta(minutes=n))._replace(submit_time=NOW)) for n in (1, 2, 3)]
    late = job("88", start_time=NOW + timedelta(days=3))._replace(submit_time=NOW)
    waits = job("99", JobState.PENDING)._replace(submit_time=NOW + timedelta(days=4))
    days = 24 * 60
    found = night(tmp_path, *short, (10, held), (3 * days + 5, late), (4 * days, waits), (4 * days + 7 * 60, waits))
    assert found[-1][1] is Health.BAD, "the three days on hold are not what this run usually waits"


def test_a_member_of_an_array_waits_since_the_one_before_it_ended(tmp_path: Path) -> None:
    array = job("88_[2-10%1]", JobState.PENDING, reason="Priority")._replace(submit_time=NOW - timedelta(days=3))
    ended = Attempt(1, "88_1", NOW - timedelta(days=3), ended=NOW - timedelta(minutes=20))
    run = Run(name="tr11", run_dir=tmp_path, launch=Launch(command="true"))
    seen = Look(run, RunDir(tmp_path), NOW, (array,), watchdog="is-running", recorded=(ended,))
    found = next(iter(check(seen, Settings(pending_for=timedelta(hours=12)))))
    assert (found.health, found.since) == (Health.OK, NOW - timedelta(minutes=20)) and "for 20m" in found.summary
    seen = replace(seen, recorded=(ended._replace(ended=NOW + timedelta(seconds=2)),))
    found = next(iter(check(seen, Settings(pending_for=timedelta(minutes=5)))))
    assert (found.health, found.since) == (Health.OK, NOW), "the one before it has ended since this look began"


def test_a_job_that_runs_beside_a_stuck_one_is_running(tmp_path: Path) -> None:
    stuck = job(state=JobState.COMPLETING, end_time=NOW - timedelta(hours=1))
    assert look(tmp_path, stuck, job("88_2"), REST)[0].health is Health.OK


def test_the_last_member_has_nobody_behind_it(tmp_path: Path) -> None:
    finding = look(tmp_path, job("88_10"))[1]
    assert finding.health is Health.BAD
    assert finding.do == f"ftsupervise launch --after 88 {tmp_path}"
    assert look(tmp_path, job("88"), members=1)[1].health is Health.OK


def test_a_finished_run_needs_no_job(tmp_path: Path) -> None:
    RunDir(tmp_path).state.mkdir()
    RunDir(tmp_path).finished.write_text("{}")
    assert look(tmp_path)[0].health is Health.OK


def test_a_run_under_the_kill_switch_needs_no_job(tmp_path: Path) -> None:
    RunDir(tmp_path).switches.mkdir()
    (RunDir(tmp_path).switches / KILL).touch()
    assert look(tmp_path)[0].health is Health.OK


def test_between_clear_and_launch_nobody_is_paged_for_want_of_a_job(tmp_path: Path) -> None:
    """In the month in an hour two people got a page between the two commands that they typed."""
    rundir, run, memory = (
        RunDir(tmp_path),
        Run(name="tr11", run_dir=tmp_path, launch=Launch(command="true")),
        dict[str, Any](),
    )
    rundir.switches.mkdir()

    def seen(minutes: float) -> Health:
        at = NOW + timedelta(minutes=minutes)
        return next(check(Look(run, rundir, at, (), memory, watchdog="is-running"), Settings())).health

    (rundir.switches / KILL).touch()
    assert seen(0) is Health.OK
    (rundir.switches / KILL).unlink()
    assert seen(1) is Health.UNKNOWN and seen(4) is Health.UNKNOWN
    assert seen(6) is Health.BAD, "it was forgotten"


LAUNCH = LaunchRecord(1, "submitted", "t0", NOW, "ada@login", "slurm", "array", 10, "87", ("88",))


def test_jobs_are_known_by_comment_by_id_and_by_the_job_the_chain_is_attached_to() -> None:
    ours = [job("88_1"), job("90", comment="ftsupervise:tr11:t0", name="x"), job("87", comment="", name="by-hand")]
    others = [job("95", comment="ftsupervise:tr12:t1", name="tr12"), job("96", comment="", name="other")]
    assert jobs_of_run("tr11", [LAUNCH], [*ours, *others], frozenset()) == tuple(ours)


def test_a_job_submitted_by_hand_counts_by_its_name() -> None:
    by_hand = job("70", comment="")
    assert jobs_of_run("tr11", [], [by_hand], frozenset()) == (by_hand,)


def test_a_watchdog_named_like_its_run_does_not_watch_itself_nor_its_own_successor() -> None:
    mine, successor = job("50", comment="", raw_id="50"), job("51", JobState.PENDING, comment="", raw_id="51")
    own = own_job_ids({"SLURM_JOB_ID": "50"})
    assert jobs_of_run("tr11", [], [mine, successor], own) == ()
    train = job("88_1")
    assert jobs_of_run("tr11", [LAUNCH], [mine, successor, train], own) == (train,)


def test_another_run_of_ours_with_the_same_job_name_is_not_this_one() -> None:
    assert jobs_of_run("tr11", [], [job("88_1")._replace(comment="ftsupervise:other:t")], frozenset()) == ()


def test_the_short_cut_through_a_long_queue_finds_the_same_jobs() -> None:
    other = job("77_1", comment="ftsupervise:other:t", name="other")
    queue = (job("88_1"), REST, job("99", comment=""), other, job("55", comment="", name="older"))
    for after in ("", "55"):
        launched = [LaunchRecord(1, "submitted", "t0", NOW, "ada@login", "slurm", "array", 10, after, ("88",))]
        few = candidates(identity("tr11", launched), by_mark(queue))
        assert other not in few
        assert set(jobs_of_run("tr11", launched, few, frozenset())) == set(
            jobs_of_run("tr11", launched, queue, frozenset())
        )


@pytest.mark.parametrize("reason", ["JobHeldUser", "PartitionNodeLimit", "DependencyNeverSatisfied"])
def test_a_chain_that_never_starts_is_one_trouble_and_not_two(tmp_path: Path, reason: str) -> None:
    found = look(tmp_path, job("88_[1-10%1]", JobState.PENDING, reason=reason))
    assert [f.subject for f in found if f.health is Health.BAD] == ["job"]


def test_a_chain_that_was_cancelled_is_not_told_as_a_last_member_while_it_completes(tmp_path: Path) -> None:
    completing = job(state=JobState.COMPLETING, end_time=NOW - timedelta(seconds=2))
    assert [f.health for f in look(tmp_path, completing)] == [Health.OK, Health.OK]


def test_a_member_that_runs_before_a_held_rest_is_the_last_of_its_chain(tmp_path: Path) -> None:
    held = job("88_[2-10%1]", JobState.PENDING, reason="JobHeldUser")
    assert [f.subject for f in look(tmp_path, held, job()) if f.health is Health.BAD] == ["successor"]


@pytest.mark.parametrize("blind", ["", "connect failure"])
def test_what_lies_in_a_switch_s_place_and_is_not_obeyed_is_told_to_people(tmp_path: Path, blind: str) -> None:
    (tmp_path / "switches").mkdir()
    (tmp_path / "switches" / KILL).symlink_to("/etc/passwd")
    odd = [f for f in look(tmp_path, job(), REST, blind=blind) if f.watchdog == "switches"]
    assert [(f.subject, f.health) for f in odd] == [(KILL, Health.BAD)]
    assert "symbolic link" in odd[0].summary and "not obeyed" in odd[0].summary
    assert "ftsupervise kill" in odd[0].do


def test_a_run_of_the_same_name_in_another_directory_is_not_this_one() -> None:
    """Two checkouts with one ftsupervise.yaml: the one that is gone must not look alive because the other one trains."""
    other = job("99_1", comment="ftsupervise:tr11:0123456789ab")
    link = job("100", comment="ftsupervise:tr11:t0.2")
    assert jobs_of_run("tr11", [LAUNCH], [other, link], frozenset()) == (link,)
    unread = LAUNCH._replace(token="", job_ids=())  # a page that cannot be read might be the one
    assert jobs_of_run("tr11", [unread], [other], frozenset()) == (other,)


@pytest.mark.parametrize("comment", ["", "ftsupervise:tr11:t0", "ftsupervise:tr11:t0.2"])
def test_a_stranger_s_job_is_not_this_run_s_whatever_name_and_comment_it_has(comment: str) -> None:
    assert jobs_of_run("tr11", [], [job("70", comment=comment, user="nobody")], frozenset()) == ()
    assert jobs_of_run("tr11", [LAUNCH], [job("70", comment=comment, user="nobody")], frozenset()) == ()


@pytest.mark.parametrize(
    ("launch", "theirs"),
    [
        (LAUNCH, job("70", comment="")),  # submitted by hand under the run's name
        (LAUNCH, job("87", comment="", name="older")),  # the launch waits for it
        (LAUNCH._replace(token="", job_ids=()), job("88_1")),  # by a launch whose page cannot be read
    ],
)
def test_a_job_of_which_nobody_can_tell_counts_as_alive_and_is_not_touched(launch: LaunchRecord, theirs: Job) -> None:
    run = identity("tr11", [launch])
    assert ownership.jobs_of_run(run, [theirs]) == (theirs,)
    assert ownership.jobs_of_run(run, [theirs], certain=True) == ()
    assert run.ownership(theirs) is ownership.Ownership.UNKNOWN


def test_a_launch_that_has_written_no_page_yet_has_submitted_nothing() -> None:
    claimed = LAUNCH._replace(token="", job_ids=(), after="", written=False)
    assert jobs_of_run("tr11", [claimed], [job("99_1", comment="ftsupervise:tr11:0123456789ab")], frozenset()) == ()


@pytest.mark.threat(
    "A file of the run claims the id of somebody else's job.",
    "The job counts only if it also belongs to the run's own people.",
)
def test_a_stranger_s_job_with_an_id_that_a_page_of_the_run_claims_is_not_this_run_s() -> None:
    assert jobs_of_run("tr11", [LAUNCH], [job("88_1", comment="", user="nobody")], frozenset()) == ()


def test_a_colleague_s_job_to_which_the_launch_was_attached_counts() -> None:
    attached = LAUNCH._replace(after="55")
    theirs = job("55", comment="", user="grace", name="older")
    assert jobs_of_run("tr11", [attached], [theirs], frozenset()) == (theirs,)


@pytest.mark.fault(
    "Somebody trains another checkout by hand under the same name",
    "a job that was submitted elsewhere is not taken for this run's",
)
@pytest.mark.parametrize(
    ("directory", "counts"),
    [
        ("", True),
        ("/scratch/ada/runs/tr11", True),
        ("/scratch/ada/runs/tr11/logs", True),
        ("/scratch/ada", True),
        ("/home/ada/project", True),
        ("/home/ada/another", False),
        ("/scratch/ada/runs/tr1", False),
        ("/", False),
    ],
)
def test_a_job_submitted_by_hand_counts_where_the_run_lives(directory: str, counts: bool) -> None:
    by_hand = job("70", comment="", directory=directory)
    assert bool(jobs_of_run("tr11", [], [by_hand], frozenset())) is counts
