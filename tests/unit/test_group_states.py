"""What is believed of a replica group where something about it cannot be seen."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.model import Attempt, Job, JobState
from ftsupervise.replicas.apart import state_apart
from ftsupervise.replicas.disk import GroupReading
from ftsupervise.replicas.job import GroupPages, NodesSeen
from ftsupervise.replicas.options import GroupOptions, read_settings
from ftsupervise.replicas.process import GroupProcess
from ftsupervise.replicas.table import LEAVE, GroupState, read_table
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.rundir.switches import KILL, Brake, reason_not_to_start, write_brake
from ftsupervise.scheduler.allocation import Allocation

NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


def a_group(root: Path, name: str = "g001") -> GroupProcess:
    return GroupProcess(name, int(name[1:]), RunDir(root).group(name), (), NOW)


def job(state: JobState) -> Job:
    return Job(id="88_1", base_id="88", name="tr11", user="ada", state=state, raw_id="89")


def test_a_group_stays_away_while_nobody_can_see_whether_it_may_come_back(tmp_path: Path) -> None:
    group = a_group(tmp_path)
    state = group.rundir.state
    state.mkdir(parents=True)
    group.look(NOW)
    assert not group.seen.leaves and not group.seen.braked
    (state / LEAVE).touch()
    write_brake(group.rundir, Brake())
    group.look(NOW)
    assert group.seen.leaves and "ftsupervise clear --brake" in group.seen.braked
    state.rename(state.with_name("gone"))
    state.touch()  # no folder: no answer
    group.look(NOW)
    assert group.seen.leaves and group.seen.braked


@pytest.mark.parametrize(
    ("jobs", "page_age", "expected"),
    [
        ((job(JobState.RUNNING),), 3, GroupState.RUNNING),
        ((job(JobState.RUNNING),), 300, GroupState.RUNNING),
        ((job(JobState.RUNNING),), None, GroupState.RUNNING),
        ((job(JobState.PENDING),), 300, GroupState.WAITING),
        ((), 300, GroupState.WAITING),
        (None, 300, GroupState.UNKNOWN),
        (None, 3, GroupState.RUNNING),
    ],
)
def test_a_group_in_its_own_job_runs_as_long_as_its_page_or_its_job_says_so(
    tmp_path: Path, jobs: tuple[Job, ...] | None, page_age: float | None, expected: GroupState
) -> None:
    """A disk that hangs for half a minute makes no group wait, and neither does a command that has no guard."""
    group = a_group(tmp_path)
    newest = Attempt(number=1, started=NOW - timedelta(hours=1), job_id="88_1")
    page = None if page_age is None else ProgressPage(at=NOW - timedelta(seconds=page_age), ranks=1)
    group.take(GroupReading(newest, page), NOW)
    assert state_apart(group, jobs, "", NOW)[0] is expected
    over = state_apart(group, jobs, "the run has finished", NOW)[0]
    assert over is (GroupState.OVER if expected is GroupState.WAITING else expected), "its ranks may still save"


def test_a_group_that_has_no_job_is_submitted_alone(tmp_path: Path) -> None:
    """A new launch of the whole run would start a second copy of the groups that run."""
    group = a_group(tmp_path)
    assert state_apart(group, (), "", NOW)[1] == "no job of it is in the queue"
    script = tmp_path / "launches" / "0002" / "train-3.sbatch"
    script.parent.mkdir(parents=True)
    script.touch()
    assert state_apart(group, (), "", NOW)[1].endswith(f"in the queue: sbatch {script}")


def test_groups_of_which_nothing_is_known_do_not_make_the_run_wait(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.replicas.mkdir()
    groups = [a_group(tmp_path, f"g00{number}") for number in range(4)]
    asked = GroupOptions(run, "tr11", "", 4, 1, 3, {}, ("true",))
    said = list[str]()
    pages = GroupPages(asked, groups, NodesSeen(Allocation({}), run), said.append, None)
    states = [GroupState.RUNNING, GroupState.RUNNING, GroupState.UNKNOWN, GroupState.WAITING]
    for group, state in zip(groups, states, strict=True):
        group.move(state, "", NOW)
    pages.write("")
    table = read_table(run)
    assert table is not None and table.below is None and not said
    groups[2].move(GroupState.WAITING, "", NOW)
    pages.write("")
    table = read_table(run)
    assert table is not None and table.below is not None and "2 of 4 groups run" in said[0]


def test_the_run_begins_where_its_groups_begin_in_this_job_and_not_where_they_did_in_the_one_before(
    tmp_path: Path,
) -> None:
    """People heard that a run of 1,346 steps "goes on from step 1". A group that is started again begins later than the run."""
    run = RunDir(tmp_path)
    group = a_group(tmp_path)
    group.row = group.row._replace(pid=4711)
    pages = GroupPages(
        GroupOptions(run, "tr11", "", 1, 1, 1, {}, ("true",)), [group], NodesSeen(Allocation({}), run), print, None
    )
    now = datetime.now(timezone.utc)

    def seen(number: int, started: datetime, first: int) -> ProgressPage | None:
        page = ProgressPage(at=now, ranks=1, step=first + 9, ahead=first + 9, first=first)
        group.take(GroupReading(Attempt(number, "1", started), page), now)
        return pages.progress()

    assert seen(1, now - timedelta(hours=1), 1) is None, "lost with its job, without an end"
    told = [seen(2, now + timedelta(seconds=2), 1347), seen(3, now + timedelta(minutes=2), 1501)]
    assert [(one.first, one.ahead) for one in told if one is not None] == [(1347, 1356), (1347, 1510)]


def test_the_last_progress_of_a_run_is_that_with_which_its_groups_have_ended(tmp_path: Path) -> None:
    """People heard that an attempt "ended at step 1389" whose groups had saved step 1426 at its end."""
    run, now = RunDir(tmp_path), datetime.now(timezone.utc)
    groups = [a_group(tmp_path, f"g00{number}") for number in range(2)]
    asked = GroupOptions(run, "tr11", "", 2, 1, 2, {}, ("true",))
    pages = GroupPages(asked, groups, NodesSeen(Allocation({}), run), print, None)
    for group, step in zip(groups, (1426, 1423), strict=True):
        page = ProgressPage(at=now, ranks=1, step=1389, ahead=1389, first=1, saved=1350)
        newest = Attempt(1, "1", now + timedelta(seconds=2), ended=now, last_step=step, saved=step)
        group.take(GroupReading(newest, page), now)
    assert pages.progress() is None, "none of them runs"
    for group in groups:
        group.move(GroupState.OVER, "asked to stop", now)
    told = pages.progress()
    assert told is not None and (told.step, told.ahead, told.saved) == (1426, 1426, 1426)


def test_a_kill_switch_that_keeps_a_group_from_starting_is_cleared_for_the_whole_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    for folder in (run.switches, run.state, run.group("g001").state):
        folder.mkdir(parents=True)
    (run.switches / KILL).touch()
    assert f"nothing is started (ftsupervise clear {tmp_path})" in reason_not_to_start(run.group("g001"))


def test_the_settings_of_a_group_s_supervisor_are_read_by_nobody_else(tmp_path: Path) -> None:
    """Its settings may come from a file of mode 0600, and no copy of them is wider."""
    page = GroupOptions(RunDir(tmp_path), "tr11", "", 4, 1, 3, {"in_place": "9"}, ("true",)).prepare(0)
    assert page.stat().st_mode & 0o777 == 0o600
    assert read_settings(page) == {"in_place": "9"}
