"""Settings on storage that does not answer: what people are told to type does not touch it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.neighbours.typed import typed

from .conftest import HungMount

pytestmark = pytest.mark.root


@pytest.mark.fault(
    "The settings of a run lie on a dead mount, and the alert tells people to mend the file with a command that "
    "touches it.",
    "It tells them not to touch it, and whom to ask.",
)
def test_nobody_is_told_to_mend_a_file_on_dead_storage(hung_mount: HungMount, tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(
        "name: good\nlaunch: {command: a}\nscheduler: local\nwatch: {hang: null, disk: null}\n"
        f"alerts: {{receivers: [{{file: {{path: {tmp_path}/messages.txt}}}}]}}\n"
    )
    (tmp_path / "tmp").mkdir()
    env = {**os.environ, "TMPDIR": f"{tmp_path}/tmp", "FTSUPERVISE_STATE_DIR": f"{tmp_path}/state"}
    hung_mount.hang("statfs", "getattr", "readdir", "open")
    dead = hung_mount.point / "ftsupervise.yaml"
    typed("watch", "good.yaml", dead, folder=tmp_path, env=env)
    told = (tmp_path / "messages.txt").read_text()
    assert f"the settings of {dead} cannot be read: its storage does not answer" in told
    assert "tell your storage people; nothing was changed" in told
    assert "mend the file" not in told and "config check" not in told
    assert f"do not ls {dead}: your shell would hang" in told


def test_a_broken_file_is_named_once_and_is_to_be_mended(tmp_path: Path) -> None:
    (tmp_path / "good.yaml").write_text(
        "name: good\nlaunch: {command: a}\nscheduler: local\nwatch: {hang: null, disk: null}\n"
        f"alerts: {{receivers: [{{file: {{path: {tmp_path}/messages.txt}}}}]}}\n"
    )
    (tmp_path / "bad one").write_text("")
    done = typed("watch", "good.yaml", "bad one", folder=tmp_path, FTSUPERVISE_STATE_DIR=f"{tmp_path}/state")
    told = (tmp_path / "messages.txt").read_text()
    assert "bad one: bad one" not in done.stdout + done.stderr + told
    assert "the settings of bad one cannot be read: the file is empty" in told
    assert "ftsupervise config check 'bad one'" in told and "fix the file" in told
