"""The watch against real Slurm: what is gone is told, what could not be seen is neither gone nor fine."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.neighbours.slack import TOKEN, SlackServer
from tests.neighbours.smtp import MailServer
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@dataclass
class Night:
    """A run, its watch, and what people heard."""

    folder: Path
    env: dict[str, str]
    mail: MailServer
    slack: SlackServer

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        return typed(*words, folder=self.folder, env=self.env, seconds=180)

    def tick(self) -> int:
        return self.type("watch").returncode

    def subjects(self) -> list[str]:
        return [str(mail["Subject"]) for mail in self.mail.mails]

    def posts(self) -> list[str]:
        return [post.text for post in self.slack.posts]


@pytest.fixture
def night(make_sandbox: Callable[..., Sandbox], short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Night]:
    sandbox = make_sandbox(nodes=1, message_timeout=4)
    folder = short_tmp / f"night-{os.urandom(3).hex()}"
    folder.mkdir()
    with MailServer() as mail, SlackServer() as slack:
        token = folder / "token"
        token.write_text(TOKEN)
        token.chmod(0o600)
        (folder / "ftsupervise.yaml").write_text(f"""\
name: nightly
launch: {{command: sleep 600, jobs: 3}}
watch: {{hang: null, disk: null}}
alerts:
  receivers:
    - email: {{host: 127.0.0.1, port: {mail.port}, from: ft@lab.example, to: [ada@lab.example]}}
    - slack: {{token_file: token, channel: C0TRAINING, api_url: "{slack.api_url}"}}
""")
        env = sandbox.env() | {"FTSUPERVISE_STATE_DIR": str(folder / "state"), "FTS_SANDBOX": str(sandbox.directory)}
        yield Night(folder, env, mail, slack)


@pytest.mark.fault("slurmctld is dead for several ticks", "one alert about Slurm; nothing else fires or is resolved")
def test_three_ticks_without_slurmctld_are_one_slurm_alert_and_no_is_running_alert(night: Night, until: Until) -> None:
    sandbox = Sandbox.at(Path(night.env["FTS_SANDBOX"]))
    assert night.type("launch").returncode == 0
    until(lambda: list((night.folder / "runs/nightly/attempts").glob("*/start.json")), "the first attempt")
    assert night.tick() == 0
    night.mail.wait(1)
    before = len(night.mail.mails)  # it has started
    sandbox.controller("pause")
    assert [night.tick() for _ in range(3)] == [1, 1, 1]
    assert [s for s in night.subjects()[before:] if "slurm unreachable" in s] == night.subjects()[before:]
    assert len(night.subjects()[before:]) == 1
    sandbox.controller("cont")
    sandbox.wait_ready()
    assert night.tick() == 0
    assert night.tick() == 0
    after = night.subjects()[before:]
    assert len(after) == 2, after
    assert after[1].startswith("[RESOLVED]")
    assert "slurm unreachable" in after[1]
    posts = [text for text in night.posts() if "unreachable" in text]
    assert len([p for p in night.slack.posts if not p.thread_ts and "unreachable" in p.text]) == 1, posts
    assert not any("no job of this run" in text for text in [*night.posts(), *night.subjects()])


@pytest.mark.fault("All jobs of the run are gone", "people are notified once, and once when it is back")
def test_a_run_that_is_gone_is_told_once_and_so_is_its_return(night: Night, until: Until) -> None:
    sandbox = Sandbox.at(Path(night.env["FTS_SANDBOX"]))
    assert night.type("launch").returncode == 0
    until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-o", "%T"]), "the job to run")
    assert night.tick() == 0
    sandbox.run(["scancel", "-n", "nightly"])
    until(lambda: not sandbox.run(["squeue", "-h"]).strip(), "an empty queue")
    assert [night.tick() for _ in range(3)] == [2, 2, 2]
    firing = [s for s in night.subjects() if s.startswith("[FIRING") and "no job of this run" in s]
    assert len(firing) == 1
    assert night.type("launch").returncode == 0
    until(lambda: "RUNNING" in sandbox.run(["squeue", "-h", "-o", "%T"]), "the job to run again")
    until(lambda: night.tick() is not None and any("RESOLVED" in s for s in night.subjects()), "the all-clear", 60)


def test_a_job_held_by_its_owner_is_not_taken_for_a_healthy_wait(night: Night, until: Until) -> None:
    sandbox = Sandbox.at(Path(night.env["FTS_SANDBOX"]))
    text = (night.folder / "ftsupervise.yaml").read_text().replace("jobs: 3}", "jobs: 1, sbatch: [--hold]}")
    (night.folder / "ftsupervise.yaml").write_text(text)
    assert night.type("launch").returncode == 0
    until(lambda: "JobHeldUser" in sandbox.run(["squeue", "-h", "-o", "%r"]), "the hold")
    assert night.tick() == 2
    body = night.mail.wait(1)[0].get_body(("plain",))
    assert body is not None
    assert "scontrol release" in body.get_content()


@pytest.mark.fault("The controller is paused during launch", "no second chain")
def test_a_paused_controller_does_not_make_a_second_chain_out_of_one_launch(night: Night, until: Until) -> None:
    """sbatch times out, the job was accepted all the same: the same command finds it."""
    sandbox = Sandbox.at(Path(night.env["FTS_SANDBOX"]))
    sandbox.run(["true"])
    sandbox.controller("pause")
    blind = night.type("launch")
    assert blind.returncode == 69, blind.stdout + blind.stderr  # the queue could not be asked: nothing was submitted
    sandbox.controller("cont")
    sandbox.wait_ready()
    assert night.type("launch").returncode == 0
    again = night.type("launch")
    assert again.returncode == 75
    assert "in the queue already" in again.stderr
    lines = sandbox.run(["squeue", "-h", "-r", "-o", "%i"]).split()
    assert len(lines) == 3, lines


@pytest.mark.threat(
    "Another account submits a job with the name or the comment of somebody's run.",
    "Only jobs of the run's own people count, so the alert that the run is gone stays.",
)
@pytest.mark.root
@pytest.mark.parametrize("comment", ["", "ftsupervise:nightly:0123456789ab"])
def test_a_stranger_s_job_of_the_same_name_does_not_resolve_that_a_run_is_gone(
    night: Night, until: Until, comment: str
) -> None:
    """Somebody else's jobs are in the answer of squeue as soon as one of the runs that are watched together is theirs."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to submit as nobody")
    sandbox = Sandbox.at(Path(night.env["FTS_SANDBOX"]))
    text = (night.folder / "ftsupervise.yaml").read_text()
    (night.folder / "theirs.yaml").write_text(text.replace("name: nightly", "name: theirs"))
    for name in ("nightly", "theirs"):
        for part in ("switches", "watch"):
            (night.folder / "runs" / name / part).mkdir(parents=True)
    os.chown(night.folder / "runs" / "theirs", 65534, 65534)
    assert night.type("watch", "ftsupervise.yaml", "theirs.yaml").returncode == 2
    gone = [s for s in night.subjects() if "nightly" in s and "no job of this run" in s]
    assert len(gone) == 1
    words = ["--uid=65534", "--gid=65534", "--job-name=nightly", "--output=/dev/null", "--chdir=/"]
    sandbox.run(["sbatch", *words, *([f"--comment={comment}"] if comment else []), "--wrap=sleep 300"])
    until(lambda: "nobody RUNNING" in sandbox.run(["squeue", "-h", "-o", "%u %T"]), "the stranger's job to run")
    for _ in range(3):
        said = night.type("watch", "ftsupervise.yaml", "theirs.yaml").stdout
        assert "nightly: bad: is-running: no job of this run" in said, said
    assert not any("RESOLVED" in s and "nightly" in s for s in night.subjects())
