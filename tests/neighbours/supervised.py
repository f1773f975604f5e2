"""A supervised run on this machine: ``ftsupervise run``, started as a job script starts it where there is no scheduler.

The fixture ``run`` gives one to a test; whatever the test started is ended after it, also when the test fails.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.model import Attempt
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import ENV_RUN_DIR, RunDir
from tests.neighbours.patience import wait_until

OF_A_JOB = ("SLURM_", "FTSUPERVISE_", "RANK", "WORLD_SIZE", "TORCH")


def outside_a_job(**more: str) -> dict[str, str]:
    """The environment of this process without a job, a run or a rank in it, and ``more``."""
    return {**{key: value for key, value in os.environ.items() if not key.startswith(OF_A_JOB)}, **more}


class Program(subprocess.Popen[bytes]):
    """A process of a test. What it and its children print goes into the file ``out``."""

    def __init__(self, argv: list[str], folder: Path, env: dict[str, str], out: Path) -> None:
        self.out = out
        with out.open("wb") as file:
            super().__init__(argv, cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=file, stderr=file)

    @property
    def supervisor(self) -> int:
        """The number of the process that supervises, 0 before it is there: the one that was started is only in front of it
        (host/front.py)."""
        return next(iter(processes.children(zombies=True).get(self.pid, ())), 0)

    def said(self) -> str:
        return self.out.read_text(errors="replace")

    def until_said(self, text: str, seconds: float = 60.0) -> str:
        """Wait until ``text`` was printed; returns all that was. Fails at once when it ends without."""

        def heard() -> str:
            over, said = self.poll() is not None, self.said()
            assert text in said or not over, f"it ended with {self.returncode} before it said {text!r}:\n{said}"
            return said if text in said else ""

        return wait_until(heard, f"{text!r} in {self.out}", seconds)

    def end(self) -> None:
        """End it in order, as a second interrupt does; by force when that takes long."""
        deadline = time.monotonic() + 20
        while self.poll() is None:
            self.send_signal(signal.SIGINT if time.monotonic() < deadline else signal.SIGKILL)
            time.sleep(0.05)


class SupervisedRun:
    """The run directory ``root``, and the members that a test starts for it, in ``folder``."""

    def __init__(self, root: Path, folder: Path) -> None:
        self.rundir, self.folder = RunDir(root), folder
        self.members: list[Program] = []

    def start(self, *words: str, shell: str = "", cwd: str = "", **env: str) -> Program:
        """``start("--in-place", "5", "--", "train")``; without options the words are the command. ``shell``: a job script
        around it, with ``"$@"``."""
        argv = ["sh", "-c", shell, "job"] if shell else []
        argv += [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(self.rundir.root)]
        argv += words if "--" in words else ("--", *words)
        out = self.folder / f"out-{len(self.members)}"
        self.members.append(Program(argv, Path(cwd or self.folder), outside_a_job(**env), out))
        return self.members[-1]

    def attempts(self) -> tuple[Attempt, ...]:
        return ledger(self.rundir)

    def end_page(self, number: int) -> dict[str, Any]:
        """What the ledger's file about the end of an attempt says."""
        return dict(json.loads((self.rundir.attempt(number) / "end.json").read_text()))

    def log(self, number: int = 1) -> str:
        """The supervisor's own lines about an attempt; none before it has begun."""
        path = self.rundir.attempt(number) / "run.log"
        return path.read_text() if path.exists() else ""

    def evidence(self, name: str, number: int = 1) -> str:
        return (self.rundir.attempt(number) / "evidence" / name).read_text()

    def ranks(self, count: int) -> dict[int, int]:
        """rank -> pid, once ``count`` ranks have made a step; {} before."""
        found = {beat.rank: beat.pid for beat in read_beats(self.rundir) if beat.step}
        return found if len(found) == count else {}

    def processes(self) -> list[processes.Process]:
        """All that lives of its commands."""
        return processes.marked(ENV_RUN_DIR).get(str(self.rundir.root), [])

    def close(self) -> None:
        for member in self.members:
            member.end()
        if self.members:
            processes.end_all(self.processes, 10)


def alive(pid: int) -> bool:
    return processes.identity(pid) is not None
