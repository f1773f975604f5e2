"""Replica groups without a launcher: torchft's own lighthouse, and the ranks of each group, forked from one process that has
imported torch. The test kills, stops and starts them; whatever it started is ended after it."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.rundir.paths import RunDir
from tests.manual.blocks import ROOT
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import outside_a_job

BIN = Path(sys.executable).parent
_LINE = re.compile(r"^(\d+\.\d+) (g\d+): step (\d+), (\d+) of \d+ groups, loss (\S+), weights (\w+)$", re.M)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return int(one.getsockname()[1])


def longest_pause(logs: Sequence[Path], fault: Callable[[], object], steps: int = 30) -> float:
    """The longest time that any of these groups makes no step after ``fault``, in seconds, until each has told so many."""
    told = {log: log.read_text().count(": step ") for log in logs}
    until, longest = {log: count + steps for log, count in told.items()}, 0.0
    fault()
    last = dict.fromkeys(logs, time.monotonic())
    while any(told[log] < until[log] for log in logs):
        time.sleep(0.02)
        now = time.monotonic()
        for log in logs:
            count = log.read_text().count(": step ")
            longest = max(longest, now - last[log])
            if count > told[log]:
                told[log], last[log] = count, now
        assert longest < 60, f"{', '.join(log.name for log in logs)} do not go on"
    return longest


class Told(NamedTuple):
    """One line of an example: it has committed ``step``."""

    at: float
    group: str
    step: int
    present: int
    loss: float
    weights: str


@dataclass
class Rank:
    pid: int
    code: int | None = None


class Forker:
    """The process that has imported torch; its children are ranks."""

    def __init__(self) -> None:
        self._known: dict[int, Rank] = {}
        self._new: list[Rank] = []
        self._process = subprocess.Popen(
            [sys.executable, str(ROOT / "tests" / "story" / "replica_ranks.py")],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=outside_a_job(PYTHONPATH=str(ROOT), OMP_NUM_THREADS="1", RUST_LOG=os.environ.get("RUST_LOG", "error")),
        )
        threading.Thread(target=self._listen, daemon=True).start()

    def fork(self, argv: list[str], env: dict[str, str], out: Path) -> Rank:
        before = len(self._new)
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"argv": argv, "env": env, "out": str(out)}) + "\n")
        self._process.stdin.flush()
        wait_until(lambda: len(self._new) > before, "a forked rank", 90)
        return self._new[before]

    def close(self) -> None:
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            said = json.loads(line)
            if "code" in said:
                self._known[said["pid"]].code = said["code"]
            elif "pid" in said:
                self._known[said["pid"]] = Rank(said["pid"])
                self._new.append(self._known[said["pid"]])


class Groups:
    """Runs ``script`` in ``count`` groups. ``lighthouse``: its options; ``ranks``: of each group."""

    def __init__(
        self,
        forker: Forker,
        folder: Path,
        script: Path,
        *options: str,
        count: int = 4,
        ranks: int = 1,
        minimum: int = 3,
        lighthouse: str = "--join_timeout_ms 3000 --heartbeat_timeout_ms 1000 --quorum_tick_ms 50",
        **env: str,
    ) -> None:
        self.folder, self.script, self.options, self.count, self.ranks = folder, script, options, count, ranks
        self.names = [f"g{n:03d}" for n in range(count)]
        self.minimum, self._lighthouse_options, self.port = minimum, lighthouse, free_port()
        self.env = outside_a_job(
            TORCHFT_LIGHTHOUSE=f"http://127.0.0.1:{self.port}",
            NUM_REPLICA_GROUPS=str(count),
            FTSUPERVISE_MIN_REPLICAS=str(minimum),
            FTSUPERVISE_CHECKPOINT_DIR=str(folder / "checkpoints"),
            MASTER_ADDR="127.0.0.1",
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            RUST_LOG="error",
            PYTHONPATH=str(ROOT),
            **env,
        )
        self.of: dict[str, list[Rank]] = {}
        self._forker, self.rundir = forker, RunDir(folder / "run")
        for place in (self.rundir.switches, self.rundir.state, *(self.rundir.group(name).beats for name in self.names)):
            place.mkdir(parents=True)
        self.lighthouse = self.start_lighthouse()

    def start_lighthouse(self) -> subprocess.Popen[bytes]:
        bind = ["--bind", f"127.0.0.1:{self.port}", "--min_replicas", str(self.minimum)]
        with (self.folder / "lighthouse.log").open("ab") as out:
            return subprocess.Popen(
                [str(BIN / "torchft_lighthouse"), *bind, *self._lighthouse_options.split()],
                stdout=out,
                stderr=out,
                env={**self.env, "RUST_LOG": "warn"},
            )

    def start(self, *names: str) -> None:
        for name in names or self.names:
            port = free_port()
            self.of[name] = []
            for rank in range(self.ranks):
                env = {**self.env, "REPLICA_GROUP_ID": name, "MASTER_PORT": str(port)}
                env |= {"RANK": str(rank), "WORLD_SIZE": str(self.ranks), "LOCAL_RANK": str(rank)}
                env["FTSUPERVISE_RUN_DIR"] = str(self.rundir.group(name).root)
                out = self.folder / f"{name}.{rank}.out"
                self.of[name].append(self._forker.fork([str(self.script), *self.options], env, out))

    def send(self, name: str, number: int, *, rank: int | None = None) -> None:
        for at, one in enumerate(self.of[name]):
            if one.code is None and rank in (None, at):
                os.kill(one.pid, number)

    def kill(self, name: str, *, rank: int | None = None) -> None:
        self.send(name, signal.SIGKILL, rank=rank)

    def raise_switch(self, name: str) -> None:
        (self.rundir.switches / name).touch()

    def told(self) -> list[Told]:
        found = []
        for name in self.names:
            for at, group, step, present, loss, weights in _LINE.findall(self.out(name)):
                found.append(Told(float(at), group, int(step), int(present), float(loss), weights))
        return sorted(found)

    def out(self, name: str, rank: int = 0) -> str:
        path = self.folder / f"{name}.{rank}.out"
        return path.read_text(errors="replace") if path.exists() else ""

    def until_all_at(self, step: int, seconds: float = 90, *, present: int | None = None, names: Any = None) -> None:
        """Wait until each of the groups has committed ``step``, or a later one with ``present`` groups."""
        wanted = set(names or self.names)

        def there() -> bool:
            for name in wanted:
                dead = [one for one in self.of.get(name, []) if one.code]
                assert not dead, f"{name} ended with {dead[0].code}:\n{self.out(name)[-3000:]}"
            return wanted <= {one.group for one in self.told() if one.step >= step and present in (None, one.present)}

        wait_until(there, f"step {step} in {sorted(wanted)}", seconds)

    def until_ended(self, seconds: float = 60, names: Any = None) -> dict[str, list[int | None]]:
        """The exit codes of all ranks, by group."""
        of = {name: self.of[name] for name in names or self.of}
        wait_until(lambda: all(one.code is not None for row in of.values() for one in row), "the end of all", seconds)
        return {name: [one.code for one in row] for name, row in of.items()}

    def weights(self) -> dict[int, dict[str, str]]:
        """By step, what each group had after it."""
        found: dict[int, dict[str, str]] = defaultdict(dict)
        for one in self.told():
            found[one.step][one.group] = one.weights
        return found

    def stall(self, after: float, name: str) -> float:
        """The longest time between two commits of a group, of those that end after the given time."""
        times = [one.at for one in self.told() if one.group == name]
        return max((b - a for a, b in pairwise(times) if b > after), default=float("inf"))

    def close(self) -> None:
        for name in self.of:
            self.send(name, signal.SIGKILL)
        self.lighthouse.kill()
        self.lighthouse.wait()

    def __enter__(self) -> Groups:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
