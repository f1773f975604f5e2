"""A running job brings back the cron that watches it, when somebody or something has ended that for good."""

from __future__ import annotations

from collections.abc import Callable
from shlex import join
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.neighbours.typed import FT, typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
CRON = "cron: {directory: cron, period: 3s}\n"


class Place:
    """A folder with settings, in a sandbox of two nodes."""

    def __init__(self, sandbox: Sandbox, settings: str, **env: str) -> None:
        self.sandbox, self.folder = sandbox, sandbox.directory.parent / "place"
        self.folder.mkdir()
        (self.folder / "ftsupervise.yaml").write_text(settings)
        self.env = {**sandbox.env(), "FTSUPERVISE_STATE_DIR": str(self.folder / "state"), **env}

    def type(self, *words: str) -> None:
        typed(*words, folder=self.folder, env=self.env, code=0)

    def chain(self) -> list[str]:
        return self.sandbox.run(["squeue", "-h", "-n", "ftsupervise-cron", "-o", "%i"]).split()

    def cancel_the_chain(self) -> None:
        while self.chain():  # a tick that runs may just have submitted another
            self.sandbox.run(["scancel", "-n", "ftsupervise-cron"])


@pytest.mark.fault("A cron chain is cancelled whole", "the running training brings it back")
def test_a_chain_that_was_cancelled_whole_is_brought_back_by_the_run(
    make_sandbox: Callable[..., Sandbox], until: Until
) -> None:
    settings = f"name: kept\nlaunch: {{command: sleep 300, jobs: 1}}\n{CRON}"
    here = Place(make_sandbox(nodes=2), settings, FTSUPERVISE_KEEPER_SECONDS="2")
    here.type("cron", "install", "--backend", "slurm")
    until(here.chain, "the chain")
    here.type("launch")
    until(lambda: "RUNNING" in here.sandbox.run(["squeue", "-h", "-n", "kept", "-o", "%T"]), "the run")
    here.cancel_the_chain()
    until(lambda: len(here.chain()) >= 2, "the chain to be brought back by the running job", 120)
    here.type("cron", "remove")
    here.type("kill", "--yes")


@pytest.mark.fault("A cron chain is cancelled as a run ends", "its job asks once more as it ends, and the end is told")
def test_the_end_of_a_run_is_told_although_the_chain_was_cancelled_just_before(
    make_sandbox: Callable[..., Sandbox], until: Until
) -> None:
    command = "'while [ ! -e stop ]; do sleep 0.2; done'"
    receivers = "alerts: {receivers: [{file: {path: heard}}]}\n"
    here = Place(make_sandbox(nodes=2), f"name: last\nlaunch: {{command: {command}, jobs: 1}}\n{CRON}{receivers}")
    here.type("cron", "install", "--backend", "slurm")
    (here.folder / "cron" / "crontab").write_text(f"@tick {join(FT)} watch --all\n")
    here.type("launch")
    seen = here.folder / "runs" / "last" / "watch" / "found.json"
    until(seen.exists, "a tick that has looked at the run", 120)
    here.cancel_the_chain()
    (here.folder / "stop").touch()
    heard = here.folder / "heard"
    until(lambda: "attempt 1 ended: exit 0" in heard.read_text(), "the end to be told", 120)
    here.type("cron", "remove")
