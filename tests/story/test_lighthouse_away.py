"""The status of replica groups with jobs of their own, while the small job that runs their lighthouse does not write."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

import click

from ftsupervise.cli.status import group_lines
from ftsupervise.host.ownership import make_folder
from ftsupervise.model import Job, JobState
from ftsupervise.replicas.record import PAGE_NAME, LighthouseRecord
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, write_table
from ftsupervise.report.groups import GroupsSeen, groups_of
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.scheduler.ownership import comment, link_of

NOW = datetime(2026, 11, 23, 12, tzinfo=timezone.utc)


def a_run(folder: Path, age: float, place: str = "jobs") -> RunDir:
    """``age``: seconds since somebody wrote about the groups."""
    run = RunDir(folder)
    make_folder(run.replicas, parents=True)
    at = NOW - timedelta(seconds=age)
    rows = tuple(ReplicaGroup(name, GroupState.RUNNING, at) for name in ("g000", "g001", "g002"))
    write_table(run, GroupTable(at, "host", 3, 2, place, rows))
    write_json(run.replicas / PAGE_NAME, LighthouseRecord("10.0.0.7", 20001, "http://10.0.0.7:20001", since=at))
    return run


def a_job(link: int, state: JobState, reason: str = "") -> Job:
    return Job(f"1{link}_2", f"1{link}", "train", "me", state, reason, comment=comment("train", f"abc.{link}"))


def away(found: GroupsSeen | None) -> str:
    assert found is not None and found.lighthouse is not None
    return found.lighthouse.away


def test_the_submission_of_a_job_stands_in_its_comment() -> None:
    assert [link_of(a_job(link, JobState.RUNNING)) for link in (1, 2, 17)] == [1, 2, 17]
    for text in ("", "ftsupervise:train:abc", "somebody.1", "ftsupervise:train:abc.x", "ftsupervise:train:abc.²"):
        assert link_of(a_job(1, JobState.RUNNING)._replace(comment=text)) == 0


def test_status_says_where_the_job_of_the_lighthouse_is_when_it_does_not_write(tmp_path: Path) -> None:
    run, groups = a_run(tmp_path, 300), (a_job(2, JobState.RUNNING), a_job(3, JobState.RUNNING))
    waits = (*groups, a_job(1, JobState.PENDING, "Resources"))
    assert away(groups_of(run, NOW, waits)) == "its job 11_2 waits in the queue (Resources)"
    silent = (*groups, a_job(1, JobState.RUNNING), a_job(1, JobState.PENDING))
    assert away(groups_of(run, NOW, silent)) == "its job 11_2 is RUNNING, and has written nothing for a while"
    assert "the queue could not be asked" in away(groups_of(run, NOW, None))
    assert away(groups_of(run, NOW, groups)) == "no job of it is in the queue"
    script = run.launches / "0003" / "train-1.sbatch"
    script.parent.mkdir(parents=True)
    script.touch()
    assert away(groups_of(run, NOW, groups)) == f"no job of it is in the queue: sbatch {script}"
    found = groups_of(run, NOW, waits)
    assert found is not None
    text = click.unstyle("\n".join(group_lines(found, NOW)))
    assert "lighthouse away: its job 11_2 waits in the queue (Resources); without it no group makes a step" in text


def test_a_lighthouse_whose_run_is_over_or_that_is_written_about_is_not_away(tmp_path: Path) -> None:
    jobs = (a_job(2, JobState.RUNNING),)
    assert away(groups_of(a_run(tmp_path / "new", 3), NOW, jobs)) == ""
    assert away(groups_of(a_run(tmp_path / "over", 300), NOW, (), over=True)) == ""
    assert away(groups_of(a_run(tmp_path / "one-job", 300, "allocation"), NOW, jobs)) == ""
