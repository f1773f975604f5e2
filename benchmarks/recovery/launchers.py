"""What a user would start the job with. Each is a batch job of its own: two nodes with two ranks each, and one spare node where
the launcher's allocation can have one (an array cannot: ``--no-kill`` breaks its ``%1``).
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

JOB = Path(__file__).with_name("job.py")
BIN = Path(sys.executable).parent
PYTHON = sys.executable

AT = 30
LATE = 430  # for ours with its standby, which imports in the background after the first step

_SRUN = f"srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --kill-on-bad-exit=1 {PYTHON} {JOB}"
_AGENT = (
    "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --kill-on-bad-exit=1 {program} --nnodes=2 --nproc-per-node=2"
    " --rdzv-backend=c10d --rdzv-endpoint=127.0.0.1:$((RECOVERY_PORT + n)) --rdzv-id=run-$n --local-addr=127.0.0.1"
    " {options} {job}"
)
_LOOP = "n=0\nuntil {command}; do n=$((n + 1)); [ $n -lt 30 ] || exit 1; done\n"
_ONCE = "n=0\n{command}\n"
_GROUPS = (
    f"{BIN / 'torchft_lighthouse'} --bind 127.0.0.1:$RECOVERY_PORT --min_replicas 3 {{lighthouse}} &\n"
    "export TORCHFT_LIGHTHOUSE=http://127.0.0.1:$RECOVERY_PORT\n"
    f"srun --nodes=2 --ntasks=4 --ntasks-per-node=2 --kill-on-bad-exit=0 --no-kill {PYTHON} {JOB}\n"
)
_WITH_SPARE = ("--nodes=3", "--ntasks-per-node=2", "--no-kill")


def _agent(program: str, options: str) -> str:
    return _AGENT.format(program=BIN / program, options=options, job=JOB)


_NVRX = "--max-restarts=3 --ft-param-rank_heartbeat_timeout={beat} --ft-param-workload_check_interval={check}"


@dataclass(frozen=True)
class Launcher:
    """``script``: what the batch script does; "" for ours, which writes its own. ``extra``: lines for ftsupervise.yaml."""

    name: str
    words: str
    script: str = ""
    options: tuple[str, ...] = _WITH_SPARE
    needs: str = ""  # a module
    env: Mapping[str, str] = field(default_factory=dict)
    extra: str = ""
    ours: bool = False
    tuned: bool = False  # not at its defaults
    at: int = AT  # the step after which the fault comes
    goes_on: bool = False  # with the ranks that are left

    def missing(self) -> str:
        """Why it cannot be measured here, or ""."""
        if self.needs and importlib.util.find_spec(self.needs) is None:
            return f"{self.needs} is not installed"
        return ""

    def submit(self, folder: Path, env: Mapping[str, str]) -> None:
        """Into the queue, as a user would. Raises CalledProcessError."""
        if self.ours:
            (folder / "ftsupervise.yaml").write_text(_YAML.format(python=PYTHON, job=JOB, extra=self.extra))
            words = [PYTHON, "-m", "ftsupervise", "launch"]
        else:
            script = folder / "job.sh"
            script.write_text(f"#!/bin/bash\n{self.script}")
            log = f"--output={folder}/log-%j.out"
            words = [shutil.which("sbatch") or "sbatch", "--time=60", "--no-requeue", log, *self.options, str(script)]
        done = subprocess.run(words, cwd=folder, env=dict(env), capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{self.name}: {done.stderr.strip()}")


_YAML = """\
name: recovery
scheduler: slurm
launch:
  command: [{python}, {job}]
  nodes: 2
  spare_nodes: 1
  tasks_per_node: 2
  jobs: 2
  time: 60m
{extra}"""

LAUNCHERS = (
    Launcher("ftsupervise", "ftsupervise, defaults", ours=True, at=LATE),
    Launcher("ftsupervise-memory", "ftsupervise, with snapshots", ours=True, at=LATE, env={"RECOVERY_SNAPSHOTS": "1"}),
    Launcher(
        "ftsupervise-each",
        "ftsupervise, a copy each step",
        ours=True,
        extra="checkpoints: {snapshot_every: 1, snapshot_wait: 5s}\n",
        tuned=True,
        at=LATE,
        env={"RECOVERY_SNAPSHOTS": "each"},
    ),
    Launcher("ftsupervise-early", "ftsupervise, at once", ours=True),
    Launcher("ftsupervise-cold", "ftsupervise, no standby", ours=True, extra="  restart: {warm: null}\n", tuned=True),
    Launcher(
        "ftsupervise-tuned",
        "ftsupervise, hang 1 s",
        ours=True,
        extra="  restart: {hang: {at_least: 1s}}\n",
        tuned=True,
        at=LATE,
    ),
    Launcher("bash-srun", "bash: until srun", _LOOP.format(command=_SRUN)),
    Launcher("bash-torchrun", "bash: until torchrun", _LOOP.format(command=_agent("torchrun", "")), needs="torch"),
    Launcher("array", "job array %1", f"{_SRUN}\n", options=("--nodes=2", "--ntasks-per-node=2", "--array=1-6%1")),
    Launcher(
        "torchrun",
        "torchrun --max-restarts=3",
        _ONCE.format(command=_agent("torchrun", "--max-restarts=3")),
        needs="torch",
    ),
    Launcher(
        "torchrun-env",
        "torchrun, own store each time",
        _ONCE.format(command=_agent("torchrun", "--max-restarts=3")),
        needs="torch",
        env={"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"},
        tuned=True,
    ),
    Launcher(
        "ft_launcher",
        "ft_launcher, defaults",
        _ONCE.format(command=_agent("ft_launcher", _NVRX.format(beat=2700, check=5))),  # the values it has by itself
        needs="nvidia_resiliency_ext",
    ),
    Launcher(
        "ft_launcher-tuned",
        "ft_launcher, heartbeat 2 s",
        _ONCE.format(command=_agent("ft_launcher", _NVRX.format(beat=2, check=0.25))),
        needs="nvidia_resiliency_ext",
        tuned=True,
    ),
    Launcher(
        "torchft",
        "torchft, gloo 5 s, goes on",
        _GROUPS.format(lighthouse=""),
        needs="torchft",
        env={"RECOVERY_GLOO_TIMEOUT": "5"},
        goes_on=True,
    ),
    Launcher(
        "torchft-tuned",
        "torchft, 1 s, goes on",
        _GROUPS.format(lighthouse="--heartbeat_timeout_ms 1000"),
        needs="torchft",
        env={"RECOVERY_GLOO_TIMEOUT": "1"},
        goes_on=True,
        tuned=True,
    ),
)
