"""The manual's first story on a real Slurm, with what it shows compared, and its page about the sandbox."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.sandbox import ENV_DIRECTORY, Sandbox
from tests.manual.blocks import marked
from tests.manual.stories import Story

pytestmark = pytest.mark.slurm


def test_three_steps_lead_to_a_supervised_run_on_slurm(sandbox: Sandbox, tmp_path: Path) -> None:
    story = Story("first", tmp_path / "first", sandbox.env(), on="slurm")
    messages = story.place / "messages.txt"
    try:
        story.tell()
        story.until(lambda: "STARTED" in messages.read_text(), "the message that it began")
        story.until(lambda: list((story.run / "checkpoints").glob("step-*")), "the checkpoint that was asked for")
    finally:
        story.close()
        story.until(story.ended, "the queued members to leave at the gate")


def test_the_sandbox_does_what_the_manual_types(slurm_installed: None, short_tmp: Path) -> None:
    type_all("sandbox", short_tmp)


@pytest.mark.root
@pytest.mark.slow
def test_so_does_the_sandbox_with_hosts(hosts_allowed: None, slurm_installed: None, short_tmp: Path) -> None:
    type_all("hosts", short_tmp)


def type_all(mark: str, short_tmp: Path) -> None:
    place = short_tmp / f"typed-{mark}"
    story = Story(mark, short_tmp / f"cwd-{mark}", {**os.environ, ENV_DIRECTORY: str(place)})
    try:
        assert marked("run", mark)
        story.tell()
        assert not place.exists()
    finally:
        if place.exists():
            Sandbox.remains(place).down()
