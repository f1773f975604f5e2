"""Two runs of one name in two directories, and another account's job of that name and comment: whose job is whose, to each
part of the program that asks. Every part runs against the same queue, in this order: first those that only look."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.config.load import load
from ftsupervise.config.schema import Run
from ftsupervise.errors import Refused
from ftsupervise.launch.plan import plan
from ftsupervise.launch.submit import check_queue
from ftsupervise.model import Job
from ftsupervise.nodes import exclude, judging
from ftsupervise.report import gather
from ftsupervise.run.gate import hold_pending
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.parse import is_held
from ftsupervise.scheduler.slurm import Slurm
from ftsupervise.watch.checks import QueueAnswer, look_at

pytestmark = [pytest.mark.slurm, pytest.mark.root]
NAME = "twin"
TYPED = Path(sys.executable).parent / "ftsupervise"
SETTINGS = f"name: {NAME}\nscheduler: slurm\nlaunch: {{command: sleep 600, jobs: 3, sbatch: [--begin=now+1hour]}}\n"


class Twins:
    """``one`` and ``other``: the run directories. ``stranger``: the job of the account nobody."""

    def __init__(self, top: Path, sandbox: Sandbox) -> None:
        self.sandbox, self.env = sandbox, sandbox.env()
        (sandbox.directory / "munge").chmod(0o711)  # this one has a second user
        self.one, self.other = (self._launch(top / folder) for folder in ("one", "other"))
        (mark,) = (f"ftsupervise:{NAME}:{record.token}" for record in launches(self.one))
        words = ["sbatch", "--parsable", "--begin=now+1hour", "--output=/dev/null", "-J", NAME, f"--comment={mark}"]
        self.stranger = self.type([*words, "--wrap=true"], user="nobody").strip()

    def _launch(self, folder: Path) -> RunDir:
        folder.mkdir()
        (folder / "ftsupervise.yaml").write_text(SETTINGS)
        self.type([str(TYPED), "launch"], folder)
        return RunDir(folder / "runs" / NAME)

    def type(self, words: list[str], folder: Path = Path("/tmp"), user: str | None = None, code: int = 0) -> str:
        done = subprocess.run(
            words, cwd=folder, env=self.env, user=user, capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == code, done.stdout + done.stderr
        return done.stdout

    def run(self, rundir: RunDir) -> Run:
        return load(rundir.root.parents[1] / "ftsupervise.yaml")

    def job(self, rundir: RunDir) -> str:
        return launches(rundir)[0].job_ids[0]

    def queue(self) -> dict[str, Job]:
        """Every account's jobs by id, as Slurm has them now."""
        return {job.base_id: job for job in Slurm(self.env).queue(users=("root", "nobody"))}

    def changed(self, before: dict[str, Job]) -> set[str]:
        """The jobs whose excluded nodes or whose hold are not as before; Slurm itself changes when it expects a start."""
        facts = {job: (one.excluded, is_held(one.reason)) for job, one in before.items()}
        return {job for job, now in self.queue().items() if (now.excluded, is_held(now.reason)) != facts[job]}


@pytest.fixture(scope="module")
def twins(sandbox: Sandbox) -> Iterator[Twins]:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another account")
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    made = Twins(top, sandbox)
    yield made
    sandbox.run(["scancel", "-n", NAME])
    shutil.rmtree(top)


def test_watch_sees_the_jobs_of_its_own_run(twins: Twins) -> None:
    queue = QueueAnswer(tuple(twins.queue().values()), kind="slurm")
    for rundir in (twins.one, twins.other):
        seen = look_at(twins.run(rundir), queue, datetime.now(timezone.utc), own=frozenset(), only=["is-running"])
        assert [job.base_id for job in seen.jobs or ()] == [twins.job(rundir)]


def test_status_shows_the_jobs_of_its_own_run(twins: Twins) -> None:
    for rundir in (twins.one, twins.other):
        seen = gather(rundir, datetime.now(timezone.utc), twins.env)
        assert [job.base_id for job in seen.jobs or ()] == [twins.job(rundir)]


def test_launch_is_refused_because_of_the_jobs_of_its_own_run(twins: Twins) -> None:
    for rundir in (twins.one, twins.other):
        folder = rundir.root.parents[1]
        one = plan(twins.run(rundir), kind="slurm", token="t", workdir=folder, python=sys.executable)
        with pytest.raises(Refused) as refused:
            check_queue(one, Slurm(twins.env), again=False)
        assert refused.value.message == f"{NAME} is in the queue already: {twins.job(rundir)}_[1-3%1]"
    third = twins.one.root.parents[2] / "third"
    third.mkdir()
    (third / "ftsupervise.yaml").write_text(SETTINGS)
    one = plan(load(third / "ftsupervise.yaml"), kind="slurm", token="t", workdir=third, python=sys.executable)
    check_queue(one, Slurm(twins.env), again=False)


def test_nodes_are_excluded_for_the_jobs_of_its_own_run(twins: Twins) -> None:
    before = twins.queue()
    bad = judging.JudgedNode("node-1", 3.0, "excluded", "a failed health command")
    assert exclude.apply(twins.one, twins.env, (bad,), whole=True).problem == ""
    assert twins.changed(before) == {twins.job(twins.one)}
    assert twins.queue()[twins.job(twins.one)].excluded == ("node-1",)


def test_watch_takes_back_what_it_excluded_for_the_jobs_of_its_own_run(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    for key in ("PATH", "SLURM_CONF"):
        monkeypatch.setenv(key, twins.env[key])
    before = twins.queue()
    now = datetime.now(timezone.utc)
    assert exclude.relieve(twins.run(twins.other), now) == ()
    (sentence,) = exclude.relieve(twins.run(twins.one), now)
    assert sentence == f"job {twins.job(twins.one)}_[1-3%1] excludes no node any more"
    assert twins.changed(before) == {twins.job(twins.one)}


def test_the_brake_holds_the_jobs_of_its_own_run(twins: Twins) -> None:
    before = twins.queue()
    assert hold_pending(twins.one, twins.env) == ((twins.job(twins.one),), "")
    assert twins.changed(before) == {twins.job(twins.one)}


def test_the_script_of_cron_does_not_take_another_run_s_jobs_for_its_own(twins: Twins) -> None:
    """``cron.hourly/watch-running`` and ``check is-running``: once its jobs are gone the run is not alive."""
    check = [str(TYPED), "check", "is-running"]
    twins.type([*check, str(twins.other.root)])
    twins.type(["scancel", twins.job(twins.other)])
    said = twins.type([*check, str(twins.other.root)], code=2)
    assert "no job" in said
    script = Path(__file__).parents[2] / "cron" / "cron.hourly" / "watch-running"
    twins.env |= {"FTSUPERVISE": str(TYPED), "FTSUPERVISE_RUNS": str(twins.other.root)}
    twins.type([str(script)])
    assert "is-running" in twins.type([str(TYPED), "alerts", str(twins.other.root)])
