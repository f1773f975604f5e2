"""A press of the Tab key while a mount is dead."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from tests.neighbours.patience import waited_for_a_processor
from tests.neighbours.typed import typed

from .conftest import HungMount

BOUND = 6.0  # two seconds of its own, beside the start of a Python


@pytest.mark.fault(
    "The Tab key is pressed while the state directory, or the run directory, lies on a dead mount",
    "the shell has an answer within seconds, which is nothing at all; commands and options are completed as ever",
)
@pytest.mark.root
def test_the_shell_has_an_answer_while_a_mount_is_dead(tmp_path: Path, dead_mount: HungMount) -> None:
    (tmp_path / "backing/state/runs").mkdir(parents=True)
    (tmp_path / "backing/r/switches").mkdir(parents=True)
    (tmp_path / "backing/state/runs/r").symlink_to(dead_mount.point / "r")
    (tmp_path / "desk").mkdir()
    (tmp_path / "desk/ftsupervise.yaml").write_text(f"name: r\nrun_dir: {dead_mount.point}/r\nlaunch: {{command: a}}\n")
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(dead_mount.point / "state"), "HOME": str(tmp_path / "desk")}

    def asked(line: str) -> tuple[str, float]:
        words = {
            "COMP_WORDS": line,
            "COMP_CWORD": str(len(line.split(" ")) - 1),
            "_FTSUPERVISE_COMPLETE": "bash_complete",
        }
        began, busy = time.monotonic(), waited_for_a_processor()
        done = typed(folder=tmp_path / "desk", env={**env, **words}, code=0)
        assert done.stderr == ""
        return done.stdout, time.monotonic() - began - min(60.0, waited_for_a_processor() - busy)

    assert "plain,r\n" in asked("ftsupervise status ")[0]
    dead_mount.hang("all")
    for line in ("ftsupervise status ", "ftsupervise status ", "ftsupervise alerts ack ", "ftsupervise nodes trust n"):
        said, seconds = asked(line)
        assert "plain" not in said and seconds < BOUND, (line, said, seconds)
    assert "plain,status\n" in asked("ftsupervise stat")[0]
    assert "plain,--json\n" in asked("ftsupervise status --js")[0]
