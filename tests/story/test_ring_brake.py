"""The brake over a chain on this machine: the members that wait are kept, and go on when it is released."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, read_brake, write_brake
from ftsupervise.scheduler.local import Local
from tests.neighbours.typed import typed

Until = Callable[..., Any]
Type = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Type]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))

    def one(*words: str, **more: str) -> subprocess.CompletedProcess[str]:
        env = {**{k: v for k, v in os.environ.items() if not k.startswith("SLURM_")}, **more}
        return typed(*words, folder=tmp_path, env=env)

    yield one
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def test_a_chain_that_fails_at_once_keeps_its_members_and_one_alert_says_why(
    type_it: Type, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: broken\nscheduler: local\nlaunch:\n  command: test -e mended\n  jobs: 3\n"
        "  restart: {in_place: 1, back_off: 0s}\n"
    )
    rundir = RunDir(tmp_path / "runs" / "broken")
    assert type_it("launch").returncode == 0
    until(lambda: read_brake(rundir) is not None and read_brake(rundir).held, "the brake")  # type: ignore[union-attr]
    until(lambda: [j.reason for j in Local().queue()] == ["JobHeldUser"], "one member, held")
    assert len(ledger(rundir)) == 3, "two attempts in the first member, the third in the second"
    assert type_it("check", "brake").returncode == 2
    seen = type_it("status", ".").stdout
    assert "STOPPED" in seen and "clear --brake" in seen
    checked = type_it("watch", "--quiet")
    assert checked.returncode == 2, checked.stdout
    firing = type_it("alerts").stdout
    assert "brake" in firing
    again = type_it("launch")
    assert again.returncode == 75 and f"clear --brake {rundir.root}, and the jobs that were held go on" in again.stderr
    plain = type_it("clear").stdout
    assert (
        "The brake of broken stays on: exit 1" in plain
        and f"Release it:  ftsupervise clear --brake {rundir.root}" in plain
    )
    (tmp_path / "mended").touch()
    assert "may start again" in type_it("clear", "--brake").stdout
    until(lambda: len(ledger(rundir)) == 4 and ledger(rundir)[-1].ended, "the last member")
    assert ledger(rundir)[-1].words == "exit 0"


def test_nothing_is_launched_against_a_brake_that_held_nothing(type_it: Type, tmp_path: Path, until: Until) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: broken\nscheduler: local\nlaunch:\n  command: test -e mended\n  jobs: 1\n  restart: {back_off: 0s}\n"
    )
    rundir = RunDir(tmp_path / "runs" / "broken")
    assert type_it("launch").returncode == 0
    until(lambda: read_brake(rundir) is not None and not Local().queue(), "the end of the chain")
    again = type_it("launch")
    assert again.returncode == 75 and f"clear --brake {rundir.root}, then launch again" in again.stderr
    assert len(list(rundir.launches.iterdir())) == 1
    (tmp_path / "mended").touch()
    assert "Nothing was held. Continue:  ftsupervise launch" in type_it("clear", "--brake").stdout
    assert type_it("launch").returncode == 0
    until(lambda: ledger(rundir)[-1].words == "exit 0", "the second chain")


def test_members_that_slurm_could_not_release_are_released_by_the_same_words_again(
    type_it: Type, tmp_path: Path
) -> None:
    """scontrol answers for the first job only, until the controller is back."""
    folder = tmp_path / "bin"
    folder.mkdir()
    scontrol = folder / "scontrol"
    scontrol.write_text(
        f'#!/bin/sh\nif [ "$2" = 89 ] && ! [ -e {tmp_path}/back ]; then\n'
        'echo "Unable to contact slurm controller" >&2; exit 1; fi\n'
        f'echo "$@" >> {tmp_path}/asked\n'
    )
    scontrol.chmod(0o755)
    rundir = RunDir(tmp_path / "run")
    for place in (rundir.state, rundir.switches, rundir.attempts):
        place.mkdir(parents=True)
    write_brake(rundir, Brake("exit 1", "three times", 3, 0, held=("88", "89")))
    path = f"{folder}:{os.environ['PATH']}"
    first = type_it("clear", "--brake", "run", PATH=path)
    assert first.returncode == 69 and "Job 88 may start again." in first.stdout
    assert f"ftsupervise clear --brake {rundir.root}" in first.stderr
    assert read_brake(rundir) is None
    (tmp_path / "back").touch()
    second = type_it("clear", "--brake", "run", PATH=path)
    assert (second.returncode, "Job 89 may start again." in second.stdout) == (0, True)
    assert (tmp_path / "asked").read_text().split() == ["release", "88", "release", "89"]
    assert "was not on" in type_it("clear", "--brake", "run", PATH=path).stdout


def test_a_chain_of_which_no_job_got_as_far_as_an_attempt_is_gone_and_not_new(
    type_it: Type, tmp_path: Path, until: Until
) -> None:
    """As one whose setup leaves without an error: a launch would burn the next one."""
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: burnt\nscheduler: local\nlaunch:\n  command: echo never\n  setup: exit 0\n  jobs: 2\n"
    )
    assert type_it("status", ".").returncode == 66 or "NEW" in type_it("status", ".").stdout
    assert type_it("launch").returncode == 0
    until(lambda: not Local().queue(), "the end of the chain")
    seen = type_it("status", ".").stdout
    assert "GONE" in seen and f"read what they wrote: tail {tmp_path}/runs/burnt/logs/" in seen, seen
    assert not ledger(RunDir(tmp_path / "runs" / "burnt"))


def test_a_setup_that_fails_on_the_only_machine_holds_the_rest_at_once(
    type_it: Type, tmp_path: Path, until: Until
) -> None:
    """As one whose environment has no such module: there is no other node to try. Mended, the chain goes on."""
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: unset\nscheduler: local\nlaunch:\n  command: touch done\n"
        "  setup: '[ -e module ] || { echo no such module >&2; exit 3; }'\n  jobs: 3\n"
    )
    assert type_it("launch", FTSUPERVISE_UNFIT_SECONDS="1").returncode == 0
    rundir = RunDir(tmp_path / "runs" / "unset")
    brake = until(lambda: read_brake(rundir), "the brake")
    assert brake.failure.endswith("is not fit for this run: launch.setup ended with 3"), brake
    until(lambda: [job.reason for job in Local().queue()] == ["JobHeldUser"], "the rest, held")
    seen = type_it("status", ".").stdout
    assert "launch.setup ended with 3" in seen and "ftsupervise clear --brake" in seen, seen
    (tmp_path / "module").touch()
    assert type_it("clear", "--brake", ".").returncode == 0
    until(lambda: not Local().queue(), "the end of the chain")
    assert (tmp_path / "done").exists()
    assert ledger(rundir)
