"""What the lighthouse of replica groups costs, and what its death and a group's cost the others: up to 500 real managers.

    python benchmarks/replicas/control_plane.py [--groups 8,50,200,500] [--rounds 10] [--check]

Each manager is torchft's own (heartbeats from its Rust threads, ten a second) and asks for a quorum in every round, all at
once, as groups do whose steps end together. Beside ours stands what a user would start: the command ``torchft_lighthouse`` in
a shell's loop, so that it comes back, with our flags but for the heartbeat's timeout, which is torchft's own (5 s). All is
on this machine: the managers take the lighthouse's cores. CPU and memory are the lighthouse's own. Needs torchft.

``--check`` exits 1 if, at the largest number: a group counts as dead that is not; ours takes more than a quarter of the
command's memory or of its start; heartbeats take a core; a quorum takes 2 s; survivors wait longer for a death than the
heartbeat's timeout and two quorums, or longer than 10 s for the lighthouse's own.
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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ftsupervise.host import processes
from ftsupervise.host.ports import first_free
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.lighthouse_page import LighthousePage, look
from ftsupervise.replicas.timeouts import Timeouts, derive, majority
from tests.neighbours.managers import compiled

OURS, THEIRS = "ours", "torchft_lighthouse"
HOST = "127.0.0.1"
RETRIES = (
    59  # of a call in a minute, one a second, as ours sets it; torchft's default, none, survives no restart at all
)
HEARTBEATS = 5.0  # seconds in which only heartbeats are sent


# ---------------------------------------------------------------------------------------------- the groups, in a process


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
        self.step = 0

    def round(self) -> dict[str, float]:
        """One step of all, at once: when the last of them has its quorum, and its size."""
        self.step += 1
        took, sizes, ids, failed = [0.0] * len(self.clients), [0] * len(self.clients), set[int](), list[str]()

        def ask(number: int) -> None:
            began = time.perf_counter()
            try:
                quorum = self.clients[number]._quorum(
                    group_rank=0, step=self.step, checkpoint_metadata="", shrink_only=False, init_sync=False,
                    timeout=timedelta(seconds=RETRIES + 1), commit_failures=0,
                )  # fmt: skip
            except Exception as error:
                failed.append(str(error)[:200])
                return
            took[number], sizes[number] = time.perf_counter() - began, quorum.replica_world_size
            ids.add(quorum.quorum_id)

        threads = [threading.Thread(target=ask, args=(number,)) for number in range(len(self.clients))]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        return {
            "at": time.time(), "slowest": max(took), "least": min(sizes), "most": max(sizes), "id": min(ids, default=0),
            "failed": len(failed),
        }  # fmt: skip


def groups_main(lighthouse: str, count: int, first: int) -> None:
    """A line of answer for each line: "round"; "rounds": again and again, each told, until the input ends."""
    groups = Groups(lighthouse, count, first)
    print(json.dumps({"ready": count}), flush=True)
    for line in sys.stdin:
        print(json.dumps(groups.round()), flush=True)
        while line.strip() == "rounds":
            print(json.dumps(groups.round()), flush=True)
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

    def tell(self, word: str) -> None:
        assert self.child.stdin is not None
        self.child.stdin.write(word + "\n")
        self.child.stdin.flush()

    def read(self) -> dict[str, float]:
        assert self.child.stdout is not None
        line = self.child.stdout.readline()
        if not line:
            self.errors.seek(0)
            raise RuntimeError(f"the managers' process ended: {self.errors.read()[-500:].decode('utf-8', 'replace')}")
        return dict(json.loads(line))

    def until(self, wanted: Callable[[dict[str, float]], bool]) -> dict[str, float]:
        """The first round that is as ``wanted``."""
        while not wanted(told := self.read()):
            if told["failed"]:
                raise RuntimeError(f"{told['failed']:.0f} survivors gave up")
        return told

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
    """Of one kind, with so many groups. Seconds, MiB and cores."""

    start: float
    memory: float
    beating: float  # cores, while nothing but heartbeats is sent
    quorum: float  # the slowest call of a round, the median of rounds
    worst: float
    cpu: float  # of the lighthouse, for a round
    group_death: float  # until all survivors have their next quorum
    own_death: float  # the same for the lighthouse's own
    false_deaths: int  # quorums that changed while nothing failed


def measure(kind: str, count: int, rounds: int) -> Measured:
    timeouts = derive(1.0, 0, count)
    with tempfile.TemporaryDirectory(prefix="ftsupervise-bench-") as folder, ExitStack() as stack:
        started = stack.enter_context(KINDS[kind](count, timeouts, Path(folder)))
        survivors = GroupsProcess(started.address, count - 1)
        stack.callback(survivors.end)
        victim = GroupsProcess(started.address, 1, count - 1)
        stack.callback(victim.end)
        return _measured(started, survivors, victim, count, rounds)


def _measured(started: Started, survivors: GroupsProcess, victim: GroupsProcess, count: int, rounds: int) -> Measured:
    pid = pid_of(started)
    before, began = _cpu(pid), time.perf_counter()
    time.sleep(HEARTBEATS)
    beating = (_cpu(pid) - before) / (time.perf_counter() - began)
    victim.tell("rounds")
    survivors.tell("round")
    first = survivors.read()
    told, before = [], _cpu(pid)
    for _ in range(rounds):
        survivors.tell("round")
        told.append(survivors.read())
    cpu = (_cpu(pid) - before) / rounds
    memory = next(one.resident for one in processes.living() if one.pid == pid) / 2**20
    slowest = [one["slowest"] for one in told]
    changed = int(told[-1]["id"] - first["id"])
    survivors.tell("rounds")
    survivors.read()
    at = time.time()
    victim.child.kill()
    alone = survivors.until(lambda one: one["most"] == count - 1)
    group_death = alone["at"] - at
    at = time.time()
    os.kill(pid, signal.SIGKILL)
    again = survivors.until(lambda one: one["id"] < alone["id"])  # a new lighthouse counts from one
    own_death = again["at"] - at
    return Measured(
        started.start, memory, beating, statistics.median(slowest), max(slowest), cpu, group_death, own_death, changed
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
    """What is beyond its bound."""
    heartbeat = derive(1.0, 0, count).heartbeat
    bounds = {
        f"{mine.false_deaths} groups counted as dead that were not": mine.false_deaths > 0,
        f"its memory is {mine.memory / other.memory:.2f} of the command's": mine.memory > other.memory / 4,
        f"its start takes {mine.start / other.start:.2f} of the command's": mine.start > other.start / 4,
        f"heartbeats take {mine.beating:.0%} of a core": mine.beating > 1.0,
        f"a quorum takes {mine.quorum:.2f} s": mine.quorum > 2.0,
        f"survivors wait {mine.group_death:.2f} s for a group's death": mine.group_death
        > heartbeat + 2 * mine.worst + 0.5,
        f"survivors wait {mine.own_death:.2f} s for the lighthouse's death": mine.own_death > 10.0,
    }
    return [words for words, is_wrong in bounds.items() if is_wrong]


def arguments(words: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--groups", default="8,50,200,500")
    parser.add_argument("--rounds", type=int, default=10)
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
        found = {kind: measure(kind, count, chosen.rounds) for kind in KINDS}
        for kind, one in found.items():
            print(row(count, kind, one), flush=True)
        print(ratio(found[OURS], found[THEIRS]), flush=True)
        problems = wrong(count, found[OURS], found[THEIRS])
    print("".join(f"\n{one}" for one in problems))
    return int(chosen.check and bool(problems))


if __name__ == "__main__":
    sys.exit(main())
