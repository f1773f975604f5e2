"""Public training scripts, unmodified, on a real Slurm: see ``tests/story/test_public_scripts.py``.

One that loads by rules of its own is killed in the middle of its saves too, until it ends whole.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.rundir.switches import read_brake, read_finished
from ftsupervise.sandbox import Sandbox
from tests.neighbours.public_scripts import PUBLIC, NotHere
from tests.neighbours.smtp import MailServer
from tests.story.public_walk import Stage, killed_in_a_save, walk

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3000)]
Until = Callable[..., Any]


@pytest.fixture(params=PUBLIC, ids=lambda one: one.name)
def stage(request: pytest.FixtureRequest, tmp_path: Path, make_sandbox: Callable[..., Sandbox]) -> Iterator[Stage]:
    try:
        folder = request.param.fetch(tmp_path / request.param.name)
    except NotHere as why:
        pytest.skip(str(why))
    with MailServer() as mail:
        yield Stage(request.param, folder, tmp_path / "state", mail, make_sandbox(nodes=1, kill_wait=30))


def test_a_public_script_on_slurm_is_seen_and_loses_nothing_to_deaths_limits_and_cancels(
    stage: Stage, until: Until
) -> None:
    walk(stage, until)


_TORN = 10  # saves that are cut off, besides those that were made by then all the same


def test_a_public_script_that_is_killed_in_the_middle_of_its_saves_ends_whole(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, until: Until
) -> None:
    clm = next(one for one in PUBLIC if one.name == "run-clm")
    clm = replace(clm, command=f"{clm.command} --max_steps 1000 --save_steps 20", more='  finished_by: "exit 0"\n')
    try:
        folder = clm.fetch(tmp_path / clm.name)
    except NotHere as why:
        pytest.skip(str(why))
    with MailServer() as mail:
        stage = Stage(clm, folder, tmp_path / "state", mail, make_sandbox(nodes=1, kill_wait=30))
        stage.type("launch")
        attempt = torn = 0
        while torn < _TORN:
            attempt += 1
            torn += killed_in_a_save(stage, until, attempt, torn % 7)
            stage.note(f"attempt {attempt} is killed: {torn} torn")
        until(lambda: read_finished(stage.rundir) or read_brake(stage.rundir), "the end of the run", 600)
        stage.note("it has ended")
    assert read_brake(stage.rundir) is None and len(stage.attempts()) == attempt + 1
    assert len(quarantined(folder / "out")) == torn
    assert (folder / "out" / "model.safetensors").is_file() and "it does not resume" not in stage.type("status", ".")
