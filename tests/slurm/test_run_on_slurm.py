"""The job ring under a real Slurm: arrays that burn through, scancel, the warning, a killed rank, the same bits."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import SAVE
from ftsupervise.sandbox import Sandbox
from tests.neighbours import needs

pytestmark = [pytest.mark.slurm, needs.sklearn]
Until = Callable[..., Any]
TRAIN = Path(__file__).parents[2] / "examples" / "minimal" / "train.py"


class Chain:
    """An array over one run directory: two ranks on two nodes for each member."""

    def __init__(self, sandbox: Sandbox, top: Path, members: int, *arguments: str) -> None:
        self.sandbox, self.rundir, self.top = sandbox, RunDir(top / "run"), top
        command = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(self.rundir.root)]
        command += ["--guard-poll", "0.2", "--guard-memory", "0.99", "--", "srun", "--kill-on-bad-exit=1"]
        command += [sys.executable, str(TRAIN), "--log-every", "1", *arguments]
        script = top / "job.sh"
        script.write_text("#!/bin/bash\nexec " + " ".join(f"'{word}'" for word in command) + "\n")
        options = [
            "-N2",
            "--ntasks-per-node=1",
            f"--array=1-{members}%1",
            f"--output={top}/out-%a",
            "--open-mode=append",
        ]
        self.id = self.slurm("sbatch", "--parsable", *options, str(script)).strip()

    def slurm(self, *words: str, codes: tuple[int, ...] = (0,)) -> str:
        env = {**os.environ, **self.sandbox.env()}
        done = subprocess.run(words, env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode in codes, f"{' '.join(words)}: {done.stderr}"
        return done.stdout

    def said(self, member: int) -> str:
        path = self.top / f"out-{member}"
        return path.read_text() if path.exists() else ""

    def steps(self, member: int) -> list[int]:
        return [int(n) for n in re.findall(r"^step (\d+) ", self.said(member), re.M)]

    def gone(self) -> bool:
        return not self.slurm("squeue", "-h", "--me", "-o", "%F").count(self.id)


@pytest.fixture
def chain(sandbox: Sandbox, tmp_path: Path) -> Callable[..., Chain]:
    return lambda members, *arguments: Chain(sandbox, tmp_path, members, *arguments)


def test_interrupted_four_ways_the_chain_ends_with_the_bits_of_an_undisturbed_run(
    chain: Callable[..., Chain], until: Until, tmp_path: Path
) -> None:
    work = ("--steps", "400", "--step-time", "0.02", "--save-every", "20")
    rough = chain(6, *work)
    (tmp_path / "calm").mkdir()
    calm = Chain(rough.sandbox, tmp_path / "calm", 1, "--steps", "400", "--step-time", "0", "--save-every", "200")
    until(lambda: len(rough.steps(1)) > 20)
    (rough.rundir.switches / SAVE).touch()
    until(lambda: not (rough.rundir.switches / SAVE).exists())
    rough.slurm("scancel", f"{rough.id}_1")
    until(lambda: len(rough.steps(2)) > 20)
    rough.slurm("scancel", "--batch", "--signal=USR1", f"{rough.id}_2", codes=(0, 229))  # 229 after it did it: 22.05
    until(lambda: len(rough.steps(3)) > 20)
    (rank,) = [b.pid for b in read_beats(rough.rundir) if (b.rank, b.facts["attempt"]) == (1, "3")]
    os.kill(rank, signal.SIGKILL)
    until(rough.gone, seconds=120)

    attempts = ledger(rough.rundir)
    causes = [attempt.words for attempt in attempts]
    assert causes[0] == "cancelled or preempted (SIGTERM)"
    assert causes[1] == "warning signal"
    assert "SIGKILL" in causes[2]
    assert causes[3:] == ["finished"]
    assert [a.job_id for a in attempts] == [f"{rough.id}_{n}" for n in (1, 2, 3, 4)]
    assert all(len(a.nodes) == 2 for a in attempts)
    assert all("nothing to do" in rough.said(n) for n in (5, 6)), "members after the end burn through"

    until(calm.gone, seconds=120)
    digests = [re.findall(r"weights (\w+)", text) for text in (calm.said(1), rough.said(4))]
    assert digests[0] == digests[1] != []
