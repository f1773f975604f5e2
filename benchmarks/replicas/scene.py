"""One launcher on a sandbox of six hosts, four of them with a group each; the faults, and what the stamps say of them.

With root each node is a host with a network of its own, so that a lost node is a power cut, and its cable can be pulled:
neither closes a connection. Without root all nodes are this machine, whose kernel closes the connections of what ends, and
there is no cable.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import NamedTuple

from ftsupervise.replicas.record import read_lighthouse
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox, temporary
from ftsupervise.sandbox.conf import address

JOB = Path(__file__).with_name("job.py")
NAMES = ("g000", "g001", "g002", "g003")
KILL, STOP, LIGHTHOUSE, NODE, CABLE = "SIGKILL", "SIGSTOP", "lighthouse", "node", "cable"
WORDS = {
    KILL: "SIGKILL to a group",
    STOP: "SIGSTOP to a group",
    LIGHTHOUSE: "lighthouse killed",
    NODE: "node lost",
    CABLE: "node cut off",
}
HOSTS = os.geteuid() == 0
ONCE = (NODE, CABLE) if HOSTS else (NODE,)  # faults that take a spare node
_YAML = """\
name: bench
scheduler: slurm
launch:
  command: [{python}, {job}]
  nodes: {nodes}
  spare_nodes: 2
  jobs: 1
  time: 60m
{groups}"""
# torchft alone, as a user would write it: each group in a loop of its own, the lighthouse too, all at their defaults
_ALONE = """\
#!/bin/bash
#SBATCH --nodes=6 --no-kill --time=60 --no-requeue
export TORCHFT_LIGHTHOUSE=http://$BENCH_HOST:$BENCH_PORT
lighthouse() {{
  while :; do
    {bin}/torchft_lighthouse --bind $BENCH_HOST:$BENCH_PORT --min_replicas 3 & echo $! > lighthouse.pid
    wait $!
  done
}}
group() {{
  export REPLICA_GROUP_ID=$1
  until srun --nodes=1 --ntasks=1 --exact --no-kill --nodelist=node-$2 {python} {job}; do sleep 1; done
}}
lighthouse & sleep 2
for n in 0 1 2 3; do group g00$n $n & done
wait
"""


@dataclass(frozen=True)
class Launcher:
    mode: str  # of job.py
    words: str
    faults: tuple[str, ...] = (KILL, STOP, LIGHTHOUSE, *ONCE)
    bound: float = 60.0  # seconds: how long a recovery is waited for


LAUNCHERS = (
    Launcher("groups", "replica groups, ftsupervise"),
    Launcher("whole", "whole job restarts, ftsupervise", (KILL, STOP, *ONCE)),
    Launcher("torchft", "replica groups, torchft alone", bound=80.0),
)


class Stamp(NamedTuple):
    at: float
    what: str
    group: str
    pid: int
    step: int
    weights: str


class Stamps:
    def __init__(self, path: Path) -> None:
        self.path, self.all = path, list[Stamp]()
        self._read = 0

    def look(self) -> list[Stamp]:
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self._read)
                data = file.read()
            data = data[: data.rfind(b"\n") + 1]
            self._read += len(data)
            for line in data.decode().splitlines():
                at, what, group, pid, step, weights = line.split()
                self.all.append(Stamp(int(at) / 1e9, what, group, int(pid), int(step), weights))
        return self.all

    def until(self, question: Callable[[], bool], bound: float) -> bool:
        end = time.monotonic() + bound
        while True:
            self.look()
            if question():
                return True
            if time.monotonic() > end:
                return False
            time.sleep(0.02)

    def steps(self, group: str = "") -> list[Stamp]:
        return [one for one in self.all if one.what == "step" and group in ("", one.group)]

    def pid(self, group: str) -> int:
        """The newest process of the group that has made a step."""
        return next((one.pid for one in reversed(self.all) if one.what == "step" and one.group == group), 0)


@dataclass
class Fault:
    kind: str
    group: str  # "": of no group
    at: float
    stall: float | None = None  # seconds without a new step of the groups that were not hit: the worst of them
    back: float | None = None  # until the group that was hit makes steps again
    lost: int = 0  # steps that were made, or tried, for nothing: by each
    note: str = ""


@dataclass
class Played:
    launcher: str
    faults: list[Fault] = field(default_factory=list)
    effective: float = 0.0  # share of the time that went into steps that count
    step: float = 0.0  # seconds, undisturbed
    steps: int = 0
    differ: int = 0  # steps after which the weights of two groups were not the same
    manual: int = 0  # times that a person would have had to help
    note: str = ""


class Scene:
    def __init__(self, launcher: Launcher, sandbox: Sandbox, folder: Path) -> None:
        self.launcher, self.sandbox, self.folder = launcher, sandbox, folder
        self.stamps = Stamps(folder / "events")
        self.rundir = RunDir(folder / "runs" / "bench")
        self._cut = ""  # the node whose cable is out
        self.env = {
            **sandbox.env(),
            "BENCH_EVENTS": str(self.stamps.path),
            "BENCH_MODE": launcher.mode,
            "BENCH_HOST": address(sandbox.subnet, "node-0") if HOSTS else "127.0.0.1",
            "BENCH_PORT": str(29000 + os.getpid() % 1000),
            "FTSUPERVISE_STATE_DIR": str(folder / "state"),
            "TMPDIR": str(folder),
            "GLOO_SOCKET_IFNAME": "eth0" if HOSTS else "lo",
            "OMP_NUM_THREADS": "1",
            "PYTHONWARNINGS": "ignore",
        }

    def submit(self) -> None:
        """Raises RuntimeError."""
        if self.launcher.mode == "torchft":
            script = self.folder / "job.sh"
            script.write_text(_ALONE.format(bin=Path(sys.executable).parent, python=sys.executable, job=JOB))
            words = ["sbatch", f"--output={self.folder}/log", str(script)]
        else:
            groups = self.launcher.mode == "groups"
            extra = "  replica_groups: {count: 4}\n" if groups else ""
            text = _YAML.format(python=sys.executable, job=JOB, nodes=1 if groups else 4, groups=extra)
            (self.folder / "ftsupervise.yaml").write_text(text)
            words = [sys.executable, "-m", "ftsupervise", "launch"]
        done = subprocess.run(words, cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=60)
        if done.returncode:
            raise RuntimeError(f"{self.launcher.words}: {done.stderr.strip()}")

    def all_train(self, after: float = 0.0) -> bool:
        """Does each group make steps with the others? As far as the stamps tell: the same step in all of them."""
        steps = [one for one in self.stamps.steps() if one.at > after]
        reached = [max((one.step for one in steps if one.group == name), default=0) for name in NAMES]
        return min(reached) > 0 and max(reached) - min(reached) <= 2 and time.monotonic() - steps[-1].at < 1.5

    def hit(self, kind: str, group: str) -> Fault:
        """Raises ProcessLookupError where the group has no process any more."""
        at = time.monotonic()
        if kind in (KILL, STOP):
            pid = self.stamps.pid(group)
            if not pid:  # 0 would be ourselves
                raise ProcessLookupError(f"{group} has made no step")
            os.kill(pid, getattr(signal, kind))
        elif kind == LIGHTHOUSE:
            os.kill(self.lighthouse(), signal.SIGKILL)
        else:
            self._cut = self.node(group)
            self.sandbox.node(self._cut, "cut" if kind == CABLE else "crash")
        return Fault(kind, group, at)

    def end(self, group: str) -> None:
        os.kill(self.stamps.pid(group), signal.SIGKILL)

    def lighthouse(self) -> int:
        """The pid of torchft's own process."""
        if self.launcher.mode == "torchft":
            return int((self.folder / "lighthouse.pid").read_text())
        record = read_lighthouse(self.rundir.replicas)
        if record is None:
            raise LookupError("no lighthouse is written down")
        return record.pid

    def node(self, group: str) -> str:
        """The node of a group, by the environment of its process. Raises ProcessLookupError."""
        try:
            text = Path(f"/proc/{self.stamps.pid(group)}/environ").read_bytes().split(b"\0")
        except FileNotFoundError:
            raise ProcessLookupError(f"{group} has no process") from None
        return next(one for one in text if one.startswith(b"SLURMD_NODENAME=")).decode().partition("=")[2]

    def measure(self, fault: Fault) -> None:
        """Follow a fault until the group is back with the others, or the bound is reached."""
        old = {name: self.stamps.pid(name) for name in NAMES}
        highest = max(one.step for one in self.stamps.look() if one.what == "step")

        def over() -> bool:
            if self.launcher.mode == "whole" or not fault.group:
                fresh = fault.at + (0.5 if not fault.group else 0.0)
                done = {one.group for one in self.stamps.steps() if one.at > fresh and one.step > highest + 5}
                return done == set(NAMES)
            back = [one for one in self.stamps.steps(fault.group) if one.at > fault.at and one.pid != old[fault.group]]
            return len(back) > 3 and self.all_train(back[0].at)

        if not self.stamps.until(over, self.launcher.bound):
            fault.note = f"not over after {self.launcher.bound:.0f} s"
        self._figures(fault, old, highest)
        if fault.kind == CABLE:
            self.sandbox.node(self._cut, "plug")

    def _figures(self, fault: Fault, old: dict[str, int], highest: int) -> None:
        stalls = []
        for name in NAMES:
            if name == fault.group and self.launcher.mode != "whole":
                continue
            new: list[float] = []
            reached = 0
            for one in self.stamps.steps(name):  # steps that are made again do not count
                if one.step > reached:
                    reached = one.step
                    new.append(one.at)
            gaps = [b - a for a, b in pairwise(new) if b > fault.at]
            waits = time.monotonic() - new[-1]
            stalls.append(max([*gaps, waits if waits > 5 else 0.0]))
        fault.stall = max(stalls)
        if fault.group:
            back = [
                one.at for one in self.stamps.steps(fault.group) if one.at > fault.at and one.pid != old[fault.group]
            ]
            fault.back = back[0] - fault.at if back else None
        after = [one for one in self.stamps.all if one.at > fault.at]
        tried = max((sum(one.what == "lost" and one.group == name for one in after) for name in NAMES), default=0)
        again = max(
            (sum(one.what == "step" and one.group == name and one.step <= highest for one in after) for name in NAMES),
            default=0,
        )
        fault.lost = tried + (again if again > 2 or self.launcher.mode == "whole" else 0)


@contextmanager
def stage(launcher: Launcher) -> Iterator[Scene]:
    top = Path(tempfile.mkdtemp(prefix="fts-rep-", dir="/tmp"))
    (top / "run").mkdir()
    try:
        with temporary(top / "slurm", nodes=6, gpus_per_node=0, kill_wait=30, slurmd_timeout=6, hosts=HOSTS) as sandbox:
            yield Scene(launcher, sandbox, top / "run")
    finally:
        if keep := os.environ.get("BENCH_KEEP"):
            shutil.copytree(top / "run", Path(keep) / f"{launcher.mode}-{os.getpid()}", dirs_exist_ok=True)
        shutil.rmtree(top, ignore_errors=True)


def effective(stamps: Stamps, step: float, until: float) -> float:
    """The share of the time since the first step that went into steps that count, over all groups."""
    steps = stamps.steps()
    useful = sum(len({one.step for one in steps if one.group == name}) for name in NAMES)
    return useful * step / (len(NAMES) * (until - steps[0].at))


def step_time(stamps: Stamps) -> float:
    """Seconds of an undisturbed step."""
    times = [one.at for one in stamps.steps("g000")]
    return median(b - a for a, b in pairwise(times))


def differing(stamps: Stamps) -> int:
    by_step: dict[int, set[str]] = {}
    for one in stamps.steps():
        by_step.setdefault(one.step, set()).add(one.weights)
    return sum(len(found) > 1 for found in by_step.values())
