"""Measure what the lighthouse of replica groups costs, and what its death or a group's costs: up to 500 real managers.

    python benchmarks/replicas/control_plane.py [--groups 8,50,200,500] [--seconds 10] [--check]

Each manager is torchft's own (heartbeats from its Rust threads, ten a second) and asks for the next quorum as soon as it has
one: steps that take no time. Beside ours stands what a user would start: the command ``torchft_lighthouse`` in
a shell's loop, so that it comes back, with our flags but for the heartbeat's timeout, which is torchft's own (5 s). All is
on this machine: the managers take the lighthouse's cores. CPU and memory are the lighthouse's own. Needs torchft.

``--check`` exits 1 if, at the largest number: a group counts as dead that is not; ours takes more than a quarter of the
command's memory or of its start; heartbeats take a core, or a quorum a second of CPU or twice as long as the command's;
survivors wait longer for a death than the heartbeat's timeout and two quorums, or longer for the lighthouse's own than 5 s
and two quorums.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.figures import figure
from ftsupervise.host import processes
from ftsupervise.host.ports import first_free
from ftsupervise.replicas.bounds import Timeouts, derive, majority
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.members import LighthousePage, look
from tests.neighbours.managers import compiled

OURS, THEIRS = "ours", "torchft_lighthouse"
HOST = "127.0.0.1"
RETRIES = (
    59  # of a call in a minute, one a second, as ours sets it; torchft's default, none, survives no restart at all
)
_LONGEST = 90.0  # seconds that a stall is followed
SETTLE = 3.0  # seconds between two faults
HEARTBEATS = 5.0  # seconds in which only heartbeats are sent


# ---------------------------------------------------------------------------------------------- the groups, in a process


class Answer(NamedTuple):
    """The lighthouse answers one group: when it was asked, when it came (``time.time``), and the quorum's size and id."""

    began: float
    end: float
    size: int
    quorum: int


class Groups:
    """``count`` managers and their clients, in this process."""

    def __init__(self, lighthouse: str, count: int, first: int) -> None:
        torchft = compiled()
        seconds = timedelta(seconds=30)
        self.servers = [
            torchft.ManagerServer(
                replica_id=f"g{first + number:03d}:{os.urandom(4).hex()}", lighthouse_addr=lighthouse, hostname=HOST,
                bind=f"{HOST}:0", store_addr=f"{HOST}:1", world_size=1, heartbeat_interval=timedelta(milliseconds=100),
                connect_timeout=seconds, quorum_retries=RETRIES,
            )
            for number in range(count)
        ]  # fmt: skip
        self.clients = [torchft.ManagerClient(one.address(), connect_timeout=seconds) for one in self.servers]
        self.newest = [deque[Answer](maxlen=10_000) for _ in self.clients]

    def ask(self, number: int, step: int) -> Answer:
        """One quorum for one of them."""
        began = time.time()
        quorum = self.clients[number]._quorum(
            group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, init_sync=False, commit_failures=0,
            timeout=timedelta(seconds=RETRIES + 1),
        )  # fmt: skip
        return Answer(began, time.time(), quorum.replica_world_size, quorum.quorum_id)

    def run_freely(self) -> None:
        """Let each make steps for itself, as groups do, from now on."""

        def work(number: int) -> None:
            for step in range(1, 1 << 60):
                try:
                    self.newest[number].append(self.ask(number, step))
                except Exception:  # it gave up after a minute, which the next answer shows
                    continue

        for number in range(len(self.clients)):
            threading.Thread(target=work, args=(number,), daemon=True).start()

    def since(self, at: float) -> dict[str, float]:
        """The answers to all that was asked after ``at``: how long they took, and how many one group had."""
        answers = [one for newest in self.newest for one in list(newest) if one.began > at]
        took = [one.end - one.began for one in answers]
        return {
            "median": statistics.median(took), "worst": max(took), "each": len(took) / len(self.newest),
            "id": max(one.quorum for one in answers),
        }  # fmt: skip

    def stall(self, at: float, wanted: Callable[[Answer], bool]) -> dict[str, float]:
        """Return how long after ``at`` all of them had an answer that is ``wanted``."""
        while not all(any(map(wanted, list(newest))) for newest in self.newest):
            if time.time() - at > _LONGEST:
                return {"stall": _LONGEST}
            time.sleep(0.01)
        return {"stall": max(next(filter(wanted, list(newest))).end for newest in self.newest) - at}


def groups_main(lighthouse: str, count: int, first: int) -> None:
    """A line of answer for each line: "freely", "since AT", "without AT" (a group was killed), "anew AT" (the lighthouse)."""
    groups = Groups(lighthouse, count, first)
    print(json.dumps({"ready": count}), flush=True)
    for line in sys.stdin:
        word, _, text = line.strip().partition(" ")
        at = float(text or 0)
        if word == "freely":
            groups.run_freely()
            told: dict[str, float] = {}
        elif word == "since":
            told = groups.since(at)
        elif word == "without":
            told = groups.stall(at, lambda one, at=at: one.end > at and one.size == count)  # type: ignore[misc]
        else:  # what was asked before the death is asked again a second later
            told = groups.stall(at, lambda one, at=at: one.began > at or one.end > at + 0.95)  # type: ignore[misc]
        print(json.dumps(told), flush=True)
    os._exit(0)  # torchft's threads are not waited for


class GroupsProcess:
    """The same as the benchmark sees it."""

    def __init__(self, lighthouse: str, count: int, first: int = 0) -> None:
        words = [sys.executable, __file__, "--as-groups", lighthouse, str(count), str(first)]
        env = {**os.environ, "TOKIO_WORKER_THREADS": "1", "RUST_LOG": "error"}
        pipe = subprocess.PIPE
        self.errors = tempfile.TemporaryFile()  # noqa: SIM115 - read when it fails
        self.child = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=self.errors, text=True, env=env)
        self.read()

    def told(self, word: str) -> dict[str, float]:
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()
        return self.read()

    def read(self) -> dict[str, float]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"the managers' process ended: {self.errors.read()[-500:].decode('utf-8', 'replace')}")
        return dict(json.loads(line))

    def end(self) -> None:
        self.child.kill()
        self.child.communicate()


# --------------------------------------------------------------------------------------------------------- the lighthouse


class Started(NamedTuple):
    """A lighthouse of one kind. ``pid`` is asked anew: it changes when it is restarted."""

    address: str
    port: int
    start: float  # seconds until it listened
    parent: int


@contextmanager
def ours(count: int, timeouts: Timeouts, folder: Path) -> Iterator[Started]:
    place = LighthousePlace(folder / "replicas", HOST, count, majority(count), timeouts)
    said: list[str] = []
    one = SupervisedLighthouse(place, sys.executable, said.append)
    began = time.perf_counter()
    record = one.start()
    try:
        yield Started(record.address, record.port, time.perf_counter() - began, os.getpid())
    finally:
        one.stop()


@contextmanager
def theirs(count: int, timeouts: Timeouts, folder: Path) -> Iterator[Started]:
    """Started again by a shell, at once."""
    port = first_free(range(28_000, 29_000))
    assert port is not None
    program = Path(sys.executable).with_name(THEIRS)
    words = f"--bind {HOST}:{port} --min_replicas {majority(count)} --join_timeout_ms {timeouts.join * 1000:.0f}"
    words += " --quorum_tick_ms 50"
    loop, began = f"while :; do {program} {words}; done", time.perf_counter()
    with (folder / "theirs.log").open("wb") as log:
        env = {**os.environ, "RUST_LOG": "warn"}
        shell = subprocess.Popen(["sh", "-c", loop], stdout=log, stderr=log, start_new_session=True, env=env)
    try:
        while not isinstance(look(HOST, port, 1.0), LighthousePage):
            time.sleep(0.01)
        yield Started(f"http://{HOST}:{port}", port, time.perf_counter() - began, shell.pid)
    finally:
        processes.end_group(shell.pid)
        shell.wait()


KINDS = {OURS: ours, THEIRS: theirs}


def pid_of(started: Started) -> int:
    """The lighthouse: the child of its parent that has the port's program in its command line."""
    for pid in processes.below(started.parent):
        words = Path(f"/proc/{pid}/cmdline").read_bytes()
        ours = b"lighthouse_server.py" in words or THEIRS.encode() in words
        if ours and f":{started.port}".encode() in words and not words.startswith(b"sh\0"):
            return pid
    raise RuntimeError("the lighthouse is gone")


# ---------------------------------------------------------------------------------------------------------- measuring


class Measured(NamedTuple):
    """These are the figures of one kind, with so many groups. Seconds, MiB and cores."""

    start: float
    memory: float
    beating: float  # cores, while nothing but heartbeats is sent
    quorum: float  # the median of all calls
    worst: float
    cpu: float  # of the lighthouse, for a quorum of all
    group_death: float  # until all survivors have their next quorum
    own_death: float  # the same for the lighthouse's own
    false_deaths: int  # quorums that changed while nothing failed


def measure(kind: str, count: int, seconds: float) -> Measured:
    timeouts = derive(1.0, 0, count)
    with tempfile.TemporaryDirectory(prefix="ftsupervise-bench-") as folder, ExitStack() as stack:
        started = stack.enter_context(KINDS[kind](count, timeouts, Path(folder)))
        survivors = GroupsProcess(started.address, count - 1)
        stack.callback(survivors.end)
        victim = GroupsProcess(started.address, 1, count - 1)
        stack.callback(victim.end)
        return _measured(started, survivors, victim, count, seconds)


def _measured(
    started: Started, survivors: GroupsProcess, victim: GroupsProcess, count: int, seconds: float
) -> Measured:
    pid = pid_of(started)
    before, began = _cpu(pid), time.perf_counter()
    time.sleep(HEARTBEATS)
    beating = (_cpu(pid) - before) / (time.perf_counter() - began)
    victim.told("freely")
    survivors.told("freely")
    time.sleep(SETTLE)
    first = survivors.told("since 0")
    at, before = time.time(), _cpu(pid)
    time.sleep(seconds)
    after, told = _cpu(pid), survivors.told(f"since {at}")
    memory = next(one.resident for one in processes.living() if one.pid == pid) / 2**20
    time.sleep(SETTLE)
    at = time.time()
    victim.child.kill()
    group_death = survivors.told(f"without {at}")["stall"]
    time.sleep(SETTLE)
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    own_death = survivors.told(f"anew {at}")["stall"]
    return Measured(
        started.start,
        memory,
        beating,
        told["median"],
        told["worst"],
        (after - before) / told["each"],
        group_death,
        own_death,
        int(told["id"] - first["id"]),
    )


def _cpu(pid: int) -> float:
    found = processes.process_stat(pid)
    assert found is not None, "the lighthouse is gone"
    return found.cpu


# ------------------------------------------------------------------------------------------------------------ the table

HEAD = (
    f"{'groups':>6}  {'lighthouse':18}  start  memory  heartbeats  quorum  worst  CPU/round  group dies  it dies  false"
)


def row(count: int, kind: str, one: Measured) -> str:
    return (
        f"{count:6}  {kind:18}  {one.start:4.2f}s  {one.memory:3.0f}MiB  {one.beating:5.0%} core  {one.quorum * 1e3:4.0f}ms"
        f"  {one.worst * 1e3:4.0f}ms  {one.cpu * 1e3:6.0f}ms  {one.group_death:9.2f}s  {one.own_death:6.2f}s"
        f"  {one.false_deaths:5}"
    )


def ratio(mine: Measured, other: Measured) -> str:
    parts = [
        (mine.start, other.start), (mine.memory, other.memory), (mine.beating, other.beating), (mine.quorum, other.quorum),
        (mine.worst, other.worst), (mine.cpu, other.cpu), (mine.group_death, other.group_death),
        (mine.own_death, other.own_death),
    ]  # fmt: skip
    widths = (5, 6, 10, 6, 5, 9, 10, 7)
    shown = (f"{a / b if b else 0:{width}.2f}" for (a, b), width in zip(parts, widths, strict=True))
    return f"{'':6}  {'ours : theirs':18}  {'  '.join(shown)}"


def wrong(count: int, mine: Measured, other: Measured) -> list[str]:
    """Return a line for each figure that is beyond its bound."""
    heartbeat = derive(1.0, 0, count).heartbeat
    bounds = {
        f"{mine.false_deaths} groups counted as dead that were not": mine.false_deaths > 0,
        f"its memory is {mine.memory / other.memory:.2f} of the command's": mine.memory > other.memory / 4,
        f"its start takes {mine.start / other.start:.2f} of the command's": mine.start > other.start / 4,
        f"heartbeats take {mine.beating:.0%} of a core": mine.beating > 1.0,
        f"a quorum takes {mine.cpu:.2f} s of CPU": mine.cpu > 1.0,
        f"a quorum takes {mine.quorum / other.quorum:.2f} of the command's": mine.quorum > 2 * other.quorum,
        f"survivors wait {mine.group_death:.2f} s for a group's death": mine.group_death
        > heartbeat + 2 * mine.worst + 0.5,
        f"survivors wait {mine.own_death:.2f} s for the lighthouse's death": mine.own_death > 5.0 + 2 * mine.worst,
    }
    return [words for words, is_wrong in bounds.items() if is_wrong]


def say_figures(count: int, mine: Measured, other: Measured) -> None:
    units = {"start": "s", "memory": "MiB", "quorum": "s", "cpu": "s", "group_death": "s", "own_death": "s"}
    for name, unit in units.items():
        value, theirs = getattr(mine, name), getattr(other, name)
        figure(f"lighthouse/{count}/{name}", value, unit, THEIRS, times=value / theirs if theirs else None)
        figure(f"lighthouse/{count}/{name}/torchft", theirs, unit)
    figure(f"lighthouse/{count}/false", mine.false_deaths, "groups")


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default="8,50,200,500")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--check", action="store_true")
    return parser.parse_args(words)


def main() -> int:
    if sys.argv[1:2] == ["--as-groups"]:
        groups_main(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
        return 0
    chosen = arguments()
    problems: list[str] = []
    print(f"torchft 0.2's managers and lighthouse on {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}\n\n{HEAD}")
    for count in map(int, chosen.groups.split(",")):
        found = {kind: measure(kind, count, chosen.seconds) for kind in KINDS}
        for kind, one in found.items():
            print(row(count, kind, one), flush=True)
        print(ratio(found[OURS], found[THEIRS]), flush=True)
        say_figures(count, found[OURS], found[THEIRS])
        problems = wrong(count, found[OURS], found[THEIRS])
    print("".join(f"\n{one}" for one in problems))
    return int(chosen.check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
