"""A copy of the minimal example on a sandbox, launched as a person would: what the tests of the job ring play on."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

from ftsupervise.config.load import load
from ftsupervise.host import processes
from ftsupervise.launch.plan import plan
from ftsupervise.launch.submit import launch_run
from ftsupervise.model import Attempt
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import ENV_RUN_DIR, RunDir
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

EXAMPLE = Path(__file__).parents[2] / "examples" / "minimal"


@dataclass
class Scene:
    """A copy of the minimal example, launched as a person would."""

    folder: Path
    sandbox: Sandbox
    name: str

    @property
    def rundir(self) -> RunDir:
        return RunDir(self.folder / "runs" / self.name)

    def launch(
        self, command: str, *, python: Path | None = None, outside: Mapping[str, str] | None = None, **launch: Any
    ) -> str:
        restart, more = json.dumps({"back_off": "1s", **launch.pop("restart", {})}), launch.pop("more", "")
        lines = {"command": command, "nodes": 2, "tasks_per_node": 1, "jobs": 3, **launch}
        text = "".join(f"  {key}: {json.dumps(value)}\n" for key, value in lines.items())
        (self.folder / "ftsupervise.yaml").write_text(
            f"name: {self.name}\nlaunch:\n  restart: {restart}\n{text}guard:\n  poll: 100ms\n{more}"
        )
        if python is not None:
            return self._launch_with(python, outside or {})
        said = self.type("launch")
        found = re.search(r"submitted as job (\d+)", said)
        return found[1] if found else re.findall(r"\d+", said)[0]

    def breakable_python(self) -> Path:
        """An interpreter that does not start on a node for which ``self.broken(node)`` is there: a home that is not mounted.
        Where that file says "packages", it starts, and finds no package but ours."""
        python = self.folder / "python"
        lacks = "python: error while loading shared libraries: libpython3.so: cannot open shared object file"
        python.write_text(
            f'#!/bin/sh\nbroken="{self.folder}/broken-$SLURMD_NODENAME"\n'
            f'[ -s "$broken" ] && exec {sys.executable} -S "$@"\n'
            f'[ -e "$broken" ] && echo "{lacks}" >&2 && exit 127\nexec {sys.executable} "$@"\n'
        )
        python.chmod(0o755)
        return python

    def broken(self, node: str) -> Path:
        return self.folder / f"broken-{node}"

    def _launch_with(self, python: Path, more: Mapping[str, str]) -> str:
        run = load(self.folder / "ftsupervise.yaml")
        one = plan(run, kind="slurm", token="0123456789ab", workdir=self.folder, python=str(python))
        env = {**os.environ, **self.sandbox.env(), **more}
        now = datetime.now(timezone.utc)
        return launch_run(replace(one, own_workdir=True), run, Slurm(env), again=False, now=now, env=env).job_ids[0]

    def train(self, words: str, **launch: Any) -> str:
        return self.launch(f"{sys.executable} train.py --log-every 1 {words}", **launch)

    def type(self, *words: str, code: int = 0) -> str:
        done = typed(*words, folder=self.folder, env=self.sandbox.env(), code=code)
        return done.stdout + done.stderr

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.rundir.logs.glob("*.out")))

    def attempts(self) -> tuple[Attempt, ...]:
        return ledger(self.rundir)

    def trains(self, attempt: int, ranks: int = 2) -> dict[int, int]:
        """rank -> pid of those of this attempt that have made a step; {} until all have."""
        beats = [b for b in read_beats(self.rundir) if b.facts.get("attempt") == str(attempt) and b.facts.get("first")]
        return {beat.rank: beat.pid for beat in beats} if len(beats) >= ranks else {}

    def queue(self) -> str:
        return self.sandbox.run(["squeue", "-h", "-n", self.name, "-o", "%i %T %r"]).strip()

    def agents(self, node: str = "") -> list[int]:
        """The node agents of this sandbox, or those of one node: their environment says which Slurm started them."""
        words = {f"SLURM_CONF={self.sandbox.env()['SLURM_CONF']}".encode()}
        words |= {f"SLURMD_NODENAME={node}".encode()} if node else set()
        found = []
        for entry in Path("/proc").iterdir():
            try:
                is_agent = entry.name.isdigit() and b"ftsupervise.ranks" in (entry / "cmdline").read_bytes()
                if is_agent and words <= set((entry / "environ").read_bytes().split(b"\0")):
                    found.append(int(entry.name))
            except OSError:
                continue
        return found

    def watched(self, *pids: int) -> bool:
        """Does an agent hold a descriptor of each of these processes?"""
        found = ""
        for agent in self.agents():
            try:
                found += "".join(one.read_text() for one in Path(f"/proc/{agent}/fdinfo").iterdir())
            except OSError:
                continue
        return all(re.search(rf"^Pid:\s+{pid}$", found, re.M) for pid in pids)

    def lose(self, node: str, how: Literal["crash", "kill", "cut"] = "crash") -> None:
        """``sandbox.node(node, how)``, and Slurm's verdict at once. By itself it comes to it after a dozen seconds, as
        test_sandbox_faults.py and the test of a lost node that is well again wait for."""
        self.sandbox.node(node, how)
        self.sandbox.run(["scontrol", "update", f"NodeName={node}", "State=DOWN", "Reason=lost"])

    def cut_off(self, node: str = "") -> None:
        """The network of a node, or of all, is gone for our agents: they hear and say nothing. Ends with the sandbox."""
        for pid in self.agents(node):
            with suppress(ProcessLookupError):  # the child of one that answered a question
                os.kill(pid, signal.SIGSTOP)

    def processes(self) -> list[int]:
        """Living processes of this run's training, on all nodes."""
        # by its directory: another test may use the name
        return [one.pid for one in processes.marked(ENV_RUN_DIR).get(str(self.rundir.root), [])]


def undisturbed(folder: Path, command: str, within: float = 120) -> str:
    """The weights of a run nobody disturbed: two ranks on this machine, no supervisor."""
    alone = folder / "alone"
    shutil.copytree(EXAMPLE, alone)
    ranks = [
        subprocess.Popen(
            [sys.executable, "train.py", *command.split()],
            cwd=alone,
            env=outside_a_job(RANK=str(rank), WORLD_SIZE="2", FTSUPERVISE_ATTEMPT_DIR=str(alone)),
            stdout=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    texts = [rank.communicate(timeout=within)[0] for rank in ranks]
    found = re.search(r"weights (\w+)", texts[0])
    assert found, texts
    return found[1]
