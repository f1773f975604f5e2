"""What real Slurm prints, and what we make of it: separators in names, arrays half over, warnings beside answers."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.host.ownership import user_name
from ftsupervise.model import JobState
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.parse import is_held
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.fixture
def submit(sandbox: Sandbox) -> Iterator[Callable[..., str]]:
    made: list[str] = []

    def one(*options: str) -> str:
        words = ["sbatch", "--parsable", "--output=/dev/null", "--mem=10M", *options, "--wrap", "sleep 600"]
        made.append(sandbox.run(words).strip())
        return made[-1]

    yield one
    subprocess.run(["scancel", *made], env=sandbox.env(), check=False)


@pytest.fixture
def warned(sandbox: Sandbox, tmp_path: Path) -> dict[str, str]:
    """The environment of somebody whose slurm.conf has a line that each command warns of."""
    conf = tmp_path / "slurm.conf"
    text = re.sub(r"(?m)^SlurmctldPort=.*$", r"\g<0>\nBackupController=foo", sandbox.layout.slurm_conf.read_text())
    conf.write_text(text)
    env = sandbox.env() | {"SLURM_CONF": str(conf)}
    said = subprocess.run(["squeue", "-h"], env=env, capture_output=True, text=True, check=False)
    assert said.returncode == 0
    if "BackupController" not in said.stderr:
        pytest.skip(f"this Slurm does not warn of it: {said.stderr!r}")
    return env


@pytest.mark.threat(
    "A job's name or comment contains the characters that separate the fields of squeue.",
    "ftsupervise draws new separators for each question, so no job is hidden and no field is shifted.",
)
def test_a_name_and_a_comment_of_control_characters_neither_hide_the_queue_nor_shift_a_field(
    sandbox: Sandbox, submit: Callable[..., str]
) -> None:
    odd = submit("--hold", "--job-name=a\x1eb\x1fc", "--comment=ftsupervise:other:t0\x1fname\x1e88\x1f88")
    ours = submit("--hold", "--job-name=ours", "--comment=ftsupervise:ours:t0")
    jobs = {job.base_id: job for job in Slurm(sandbox.env()).queue()}
    assert (jobs[ours].name, jobs[ours].comment) == ("ours", "ftsupervise:ours:t0")
    assert "ours" not in jobs[odd].name
    assert jobs[odd].name.endswith("c")
    assert jobs[odd].state is JobState.PENDING
    assert is_held(jobs[odd].reason)


@pytest.mark.fault(
    "The first members of an array are over and a later one runs",
    "the array is alive, and launch --after attaches to it",
)
def test_an_array_whose_first_members_are_over_is_alive_while_one_runs(
    sandbox: Sandbox, submit: Callable[..., str], until: Until
) -> None:
    array = submit("--array=1-4%1")
    slurm = Slurm(sandbox.env())

    def running(member: str) -> bool:
        job = slurm.describe(f"{array}_{member}")
        return job is not None and job.state is JobState.RUNNING

    until(lambda: running("1"), "the first member")
    sandbox.run(["scancel", f"{array}_1"])
    until(lambda: running("2"), "the second member")
    job = slurm.describe(array)
    assert job is not None
    assert (job.id, job.state) == (f"{array}_2", JobState.RUNNING)


@pytest.mark.fault(
    "Each command of Slurm prints a warning about the settings of the cluster",
    "the answer counts by the exit code; words that say that nobody answered still count as no answer",
)
def test_a_warning_about_the_settings_of_the_cluster_takes_no_answer_away(
    warned: dict[str, str], submit: Callable[..., str], sandbox: Sandbox
) -> None:
    job_id = submit("--hold", "--comment=ftsupervise:warned:t0")
    slurm = Slurm(warned)
    assert job_id in {job.base_id for job in slurm.queue()}
    assert slurm.inventory().known
    described = slurm.describe(job_id)
    assert described is not None
    assert any("BackupController" in words for words in slurm.warnings)
    assert slurm.queue(users=("root" if user_name() != "root" else "daemon",)) == ()  # nothing but the warning


@pytest.mark.fault("Each command of Slurm warns of the site's settings", "`launch` and `status` say it once")
def test_what_slurm_warns_of_is_said_once_at_launch_and_by_status(
    warned: dict[str, str], sandbox: Sandbox, tmp_path: Path
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text("name: warned\nlaunch: {command: sleep 600, jobs: 2, chain: daisy}\n")
    env = {**os.environ, **warned, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    try:
        for words in (["launch"], ["status"], ["status", "warned", "warned"]):
            done = typed(*words, folder=tmp_path, env=env, code=0)
            assert done.stderr.count("BackupController") == 1, done.stderr
            assert "warns: error: Ignoring BackupController" in done.stderr
    finally:
        subprocess.run(["scancel", "--name=warned"], env=sandbox.env(), check=False)


@pytest.mark.fault(
    "squeue is asked about an account that does not exist, and ends with exit code 0",
    "that is no empty queue",
)
def test_a_question_about_nobody_is_not_an_empty_queue_with_and_without_a_warning(
    warned: dict[str, str], sandbox: Sandbox
) -> None:
    for env in (sandbox.env(), warned):
        with pytest.raises(SchedulerUnavailable, match="Invalid user"):
            Slurm(env).queue(users=("no-such-account",))


@pytest.mark.fault("A person has set SQUEUE_STATES", "what we see of the queue is not filtered by it")
def test_what_a_person_set_for_squeue_does_not_filter_the_queue_we_see(
    sandbox: Sandbox, submit: Callable[..., str]
) -> None:
    job_id = submit("--hold")
    env = sandbox.env() | {"SQUEUE_STATES": "RUNNING", "SQUEUE_PARTITION": "elsewhere"}
    assert job_id in {job.base_id for job in Slurm(env).queue()}


@pytest.mark.fault(
    "A person drained a node for a reason of their own",
    "it is not taken for one that Slurm drained by itself",
)
def test_a_node_that_slurm_has_drained_by_itself_is_told_from_one_that_a_person_drained(
    make_sandbox: Callable[..., Sandbox],
) -> None:
    """The words are those of slurmctld, which drains a node that has a job it does not know (src/slurmctld/agent.c)."""
    own = make_sandbox(nodes=3)
    slurm = Slurm(own.env())
    assert slurm.drained("Duplicate jobid") == ()
    for node, reason in (
        (own.shape.node_names[0], "Duplicate jobid"),
        (own.shape.node_names[1], "new fan | Duplicate"),
    ):
        own.run(["scontrol", "update", f"nodename={node}", "state=drain", f"reason={reason}"])
    assert slurm.drained("Duplicate jobid") == (own.shape.node_names[0],)
