"""Two people launch the same run at the same instant: one chain, and the second person is told of the first."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch, Run
from ftsupervise.errors import Refused, SchedulerUnavailable
from ftsupervise.launch.plan import plan
from ftsupervise.launch.submit import Launched, check_queue, launch_run, prepare
from ftsupervise.model import Job, Submitted
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, read_brake, write_brake
from ftsupervise.scheduler.local import Local
from ftsupervise.scheduler.slurm import Slurm

NOW = datetime(2026, 11, 21, 2, 10, tzinfo=timezone.utc)


class Overtaken(Local):
    """A scheduler whose first answer is old news: right after it, the other person's launch goes through."""

    def __init__(self, other: Local, run: Run) -> None:
        super().__init__()
        self.other, self.run, self.asked = other, run, 0

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        self.asked += 1
        found = super().queue(users=users)
        if self.asked == 1:
            launch(self.run, self.other)
        return found


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FTSUPERVISE_LOCAL_KILL_WAIT", "1")
    scheduler = Local()
    yield scheduler
    for job in scheduler.queue():
        scheduler.cancel(job.base_id)


class Breaks(Local):
    """A scheduler that is not to be reached any more after two jobs."""

    taken = 0

    def submit(self, script: str, **more: Any) -> Submitted:
        if self.taken == 2:
            raise SchedulerUnavailable("Socket timed out")
        self.taken += 1
        return super().submit(script, **more)


def a_run(tmp_path: Path, name: str = "tr11", **more: Any) -> Run:
    return Run(name=name, run_dir=tmp_path / "run", launch=Launch(command=("sleep", "600"), **{"jobs": 2, **more}))


def launch(run: Run, scheduler: Local, *, after: str = "", again: bool = False) -> Launched:
    assert run.run_dir is not None
    token = os.urandom(6).hex()
    one = plan(run, kind="local", token=token, workdir=run.run_dir.parent, python=sys.executable, after=after)
    return launch_run(one, run, scheduler, again=again, now=NOW, env=os.environ)


def chains(local: Local) -> set[str]:
    return {job.base_id for job in local.queue()}


@pytest.mark.threat("Two people launch the same run at the same moment.", "Only one of the two chains is submitted.")
def test_who_looked_before_the_other_submitted_and_claimed_after_it_is_refused(local: Local, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    with pytest.raises(Refused, match="in the queue already"):
        launch(run, Overtaken(local, run))
    assert len(chains(local)) == 1
    assert [p.name for p in (tmp_path / "run" / "launches").iterdir()] == ["0001"]


def test_two_chains_behind_the_same_job_would_start_at_once_and_are_refused(local: Local, tmp_path: Path) -> None:
    run = a_run(tmp_path)
    first = launch(run, local).job_ids[0]
    second = launch(run, local, after=first).job_ids[0]
    with pytest.raises(Refused, match=f"waits for job {first} already") as refused:
        launch(run, local, after=first)
    assert f"--after {second}" in refused.value.hint
    launch(run, local, after=second)
    assert len(chains(local)) == 3


def test_a_run_that_was_renamed_meanwhile_is_still_in_the_queue(local: Local, tmp_path: Path) -> None:
    launch(a_run(tmp_path), local)
    with pytest.raises(Refused, match="in the queue already"):
        launch(a_run(tmp_path, "tr12"), local)
    launch(a_run(tmp_path, "tr12"), local, again=True)
    assert len(chains(local)) == 2


def test_a_daisy_chain_that_broke_off_says_how_to_get_the_rest(local: Local, tmp_path: Path) -> None:
    run = a_run(tmp_path, chain="daisy", jobs=5)
    with pytest.raises(SchedulerUnavailable):
        launch(run, Breaks())
    with pytest.raises(Refused) as refused:
        launch(run, local)
    assert "after 2 of 5 jobs" in refused.value.hint
    assert "launch --after local-2 --jobs 3" in refused.value.hint


def test_links_that_come_into_the_queue_behind_the_brake_are_held_with_the_others(local: Local, tmp_path: Path) -> None:
    """The first link fails at once while the others are being submitted, and holds those that it sees."""
    run_dir = RunDir(tmp_path / "run")

    class Fails(Local):
        def submit(self, script: str, **more: Any) -> Submitted:
            answer = super().submit(script, **more)
            if answer.job_id == "local-2":
                self.hold("local-2")
                write_brake(run_dir, Brake("exit 1", "the same failure 3 times", held=("local-2",)))
            return answer

    launched = launch(a_run(tmp_path, chain="daisy", jobs=4), Fails())
    brake = read_brake(run_dir)
    assert brake is not None and brake.held == launched.job_ids[1:] == ("local-2", "local-3", "local-4")
    assert {job.base_id for job in local.queue() if job.reason == "JobHeldUser"} >= set(brake.held)


def test_a_run_at_work_without_slurm_is_not_launched_on_slurm_too(
    local: Local, tmp_path: Path, until: Callable[..., Any]
) -> None:
    """Neither queue shows the other's jobs, and each member would end the attempt of the other's."""

    class Empty(Slurm):
        def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
            return ()

    run = a_run(tmp_path)
    launch(run, local)
    until(lambda: (one := newest(RunDir(tmp_path / "run"))) and one.job_id)  # claimed is not begun yet
    here = plan(run, kind="slurm", token="t", workdir=tmp_path, python=sys.executable)
    with pytest.raises(Refused, match=r"attempt 1 of tr11 is at work in job local-1_1, which is not in this queue"):
        check_queue(here, Empty({}), again=False)
    check_queue(here, Empty({}), again=True)
    for job in local.queue():
        local.cancel(job.base_id)
    until(lambda: not local.queue() and newest(RunDir(tmp_path / "run")).cause is not None)  # type: ignore[union-attr]
    check_queue(here, Empty({}), again=False)


def test_what_lay_in_the_directory_before_it_became_a_run_s_is_not_written_over(local: Local, tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "README").write_text("my project\n")
    launch(a_run(tmp_path), local)
    assert (tmp_path / "run" / "README").read_text() == "my project\n"
    other = a_run(tmp_path, "tr12").model_copy(update={"run_dir": tmp_path / "other"})
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.yaml").write_text("mine: 1\n")
    with pytest.raises(Refused, match="no launch wrote it"):
        launch(other, local)
    assert [p.name for p in (tmp_path / "other").iterdir()] == ["run.yaml"]


def test_a_directory_that_another_launch_makes_while_we_look_is_a_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir, there = RunDir(tmp_path / "run"), Path.is_dir

    def the_other_is_quick(self: Path) -> bool:
        found = there(self)
        if self == rundir.launches and not rundir.config.exists():
            rundir.launches.mkdir(parents=True, exist_ok=True)
            rundir.config.write_text("theirs: 1\n")
        return found

    monkeypatch.setattr(Path, "is_dir", the_other_is_quick)
    prepare(rundir, "tr11", "ours: 1\n")
