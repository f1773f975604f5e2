"""How long does a snapshot in memory hold the training loop up? Beside one memcpy of the same bytes, in the same run.

    python benchmarks/snapshots.py [MB of state]             # one snapshot, its digest, and the way back
    python benchmarks/snapshots.py [MB of state] --copies    # what copies on a second node take from the step rate; 150 s
    python benchmarks/snapshots.py [MB …] --wait             # a step that waits for its copy (checkpoints.snapshot_wait)

The state is a model with the two moments of Adam, in arrays of 4 MB and of 64 numbers. With torch they are tensors, and
``torch.save`` into the same memory is what a user would write instead; without it they are NumPy's arrays, and that is pickle.
With torch there are rows for DCP, and for DCP in the background, into the same memory; with nvidia-resiliency-ext, one for its
LocalCheckpointManager (``checkpoint_peers.py`` says how it runs without a GPU). All rows are made in turn, round by round.
Figures are this machine's; the ratios travel.

The copies are measured on two "nodes" of this machine, with as many ranks as it has cores, so that no core is idle. Both ends
of each copy are in the figure, as they are on a node that sends to one neighbour and receives from the other. The processes
that copy are stopped and continued in turn, a few seconds each, and each stretch is compared with the two beside it.
"""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import pickle
import select
import shutil
import signal
import socket
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import numpy as np

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from ftsupervise import Guard
from ftsupervise.config.supervisor import default
from ftsupervise.snapshots import room
from ftsupervise.snapshots.exchange import start_exchange
from ftsupervise.snapshots.ring import SnapshotRing
from ftsupervise.snapshots.room import node_folder, rank_file
from ftsupervise.snapshots.slots import SLOTS, Compared, compare, open_slots

ROUNDS = 9
PIECE = 4 << 20

try:
    import torch
except ImportError:
    torch = None
else:
    torch.set_num_threads(1)


class State:
    """The state of a loop: ``mb`` MB in many arrays."""

    def __init__(self, mb: int) -> None:
        count = max(1, (mb << 20) // PIECE)
        large = [np.random.default_rng(n).standard_normal(PIECE // 4, dtype=np.float32) for n in range(count)]
        small = [np.full(64, n, dtype=np.float32) for n in range(count)]
        self.plain = {
            f"{kind}.{n}": one for kind, rows in (("weight", large), ("bias", small)) for n, one in enumerate(rows)
        }
        self.arrays: dict[str, Any] = self.plain
        if torch is not None:
            self.arrays = {name: torch.from_numpy(one).clone() for name, one in self.plain.items()}
        self.size = sum(one.nbytes for one in self.plain.values())

    def addresses(self) -> list[tuple[int, int]]:
        where = (one.data_ptr() if torch is not None else one.ctypes.data for one in self.arrays.values())
        return [(address, one.nbytes) for address, one in zip(where, self.plain.values(), strict=True)]

    def save(self, path: Path) -> None:
        path.unlink(missing_ok=True)
        if torch is not None:
            torch.save(self.arrays, path)
        else:
            with path.open("wb") as file:
                pickle.dump(self.arrays, file, protocol=5)


def seconds(call: Callable[[], object]) -> float:
    """Return how long it takes. What it gives back is called afterwards, off the clock."""
    before = time.perf_counter()
    rest = call()
    took = time.perf_counter() - before
    if callable(rest):
        rest()
    return took


def main(mb: int) -> None:
    os.environ.pop("FTSUPERVISE_RUN_DIR", None)
    root = Path(f"/dev/shm/ftsupervise-benchmark-{os.getpid()}")
    os.environ |= {"FTSUPERVISE_SNAPSHOTS": str(root), "FTSUPERVISE_GUARD_SNAPSHOT_EVERY": "1"}
    place = Path(node_folder(str(root)))
    root.mkdir(mode=0o700)
    place.mkdir(mode=0o700)
    try:
        measure(State(mb), place)
    finally:
        shutil.rmtree(root)


def measure(state: State, place: Path) -> None:
    source, target = np.ones(state.size, dtype=np.uint8), np.ones(state.size, dtype=np.uint8)
    where = state.addresses()

    def whole() -> None:
        ctypes.memmove(target.ctypes.data, source.ctypes.data, state.size)

    def pieces() -> None:
        at = target.ctypes.data
        for address, size in where:
            ctypes.memmove(at, address, size)
            at += size

    guard = Guard(signals=())
    guard.restore(model=state.arrays)
    ready = seconds(lambda: wait_for(guard))
    step = iter(range(2, 1000))
    rows: dict[str, Callable[[], object]] = {
        "one memcpy": whole,
        "memcpy, array after array": pieces,
        "guard.snapshot": lambda: guard.snapshot(next(step)),
        f"{'torch.save' if torch is not None else 'pickle'} into the same memory": lambda: state.save(place / "saved"),
    }

    def restore() -> Callable[[], object]:
        again = Guard(signals=())
        again.restore(model=state.arrays)
        return again.close

    ways_back: dict[str, Callable[[], object]] = {"guard.restore": restore}
    missing = others(state, place, rows, ways_back)
    times: dict[str, list[float]] = {name: [] for name in (*rows, *ways_back)}
    sums: list[float] = []
    for n in range(ROUNDS):
        for name, call in rows.items():
            if n < 3 or "memory" not in name:
                times[name].append(seconds(call))
                if name == "guard.snapshot":
                    sums.append(seconds(lambda: wait_for_digest(place)))
    compare = seconds(lambda: compare_all(place))
    for _ in range(3):
        for name, call in ways_back.items():
            times[name].append(seconds(call))
    base = median(times["one memcpy"])
    print(f"{state.size / 1e6:,.0f} MB in {len(state.arrays)} {'tensors' if torch is not None else 'arrays'}")
    print(f"{os.getloadavg()[0]:.1f} processes at work on {os.cpu_count()} cores; medians")
    print(f"{'holds the loop up':<44}{'ms':>8}{'memcpys':>9}")
    for name in rows:
        print_row(name, times[name], base)
    print("beside the loop")
    print_row("its digest", sums, base)
    print_row("until ready", [ready], base)
    print("before the loop")
    print_row("compared again", [compare], base)
    for name in ways_back:
        print_row(name, times[name], base)
    print(*missing, sep="\n")


def print_row(name: str, found: list[float], base: float) -> None:
    print(f"{name:<44}{median(found) * 1e3:>8,.1f}{median(found) / base:>9.2f}   best {min(found) * 1e3:,.1f}")
    figure(f"snapshots/{name}", median(found), "s", "one memcpy", times=median(found) / base)


def others(
    state: State, place: Path, rows: dict[str, Callable[[], object]], ways_back: dict[str, Callable[[], object]]
) -> list[str]:
    """Add the rows of what people use instead, into the same memory. Return a line for each that is not there."""
    if torch is None:
        return ["torch, DCP, NVRx: not installed (pip install torch)"]
    import torch.distributed.checkpoint as dcp

    from benchmarks.checkpoint_peers import loading, nvrx

    arrays, saved, by_dcp, by_nvrx = state.arrays, place / "saved", place / "dcp", place / "nvrx"

    def fill(loaded: dict[str, Any]) -> None:
        for name, one in arrays.items():
            one.copy_(loaded[name])

    def in_background() -> Callable[[], object]:
        result: Callable[[], object] = dcp.async_save(arrays, checkpoint_id=place / "dcp-async", no_dist=True).result
        return result

    rows["dcp.save into the same memory"] = lambda: dcp.save(arrays, checkpoint_id=by_dcp, no_dist=True)
    rows["dcp.async_save into the same memory"] = in_background
    ways_back["torch.load, copied"] = lambda: fill(torch.load(saved))
    ways_back["dcp.load"] = lambda: dcp.load(arrays, checkpoint_id=by_dcp, no_dist=True)
    loads, missing = loading(arrays, by_nvrx)
    if loads:
        save, other = nvrx(arrays, sync=False), place / "nvrx-again"

        def anew() -> Callable[[], object]:
            save(other)
            return lambda: shutil.rmtree(other)  # it does not write over one of the same step

        rows["NVRx local manager into the same memory"] = anew
    ways_back.update({name: partial(lambda load: fill(load()), load) for name, load in loads.items()})
    return missing


def wait_for(guard: Guard) -> None:
    while not guard.snapshot(1):
        time.sleep(0.001)


def wait_for_digest(place: Path) -> None:
    with open_slots(rank_file(str(place), 0)) as file:
        slot = max(file.held().items())[1]
        while (header := file.valid(slot)) is None or not header.algorithm:
            time.sleep(0.0005)


def compare_all(place: Path) -> None:
    with open_slots(rank_file(str(place), 0)) as file:
        slot = max(file.held().items())[1]
        header = file.valid(slot)
        assert header is not None and compare(file, slot, header) is Compared.SAME


# ------------------------------------------------------------------------------------------------------ the copies

STRETCH = 3.0  # seconds
STRETCHES = 41
STEP = 0.05  # seconds, about


class Nodes(NamedTuple):
    """Two "nodes" of this machine, with an exchange each."""

    folder: str
    names: tuple[str, str]
    ring: SnapshotRing
    talks: dict[str, socket.socket]
    pids: list[int]


@contextmanager
def two_nodes(share: float, *, at_once: bool = False) -> Iterator[Nodes]:
    folder, key, names = room.new_folder("benchmark"), os.urandom(32), ("a", "b")
    locks = [room.make(folder, node) for node in names]
    talks: dict[str, socket.socket] = {}
    ring = SnapshotRing(lambda: names, lambda node, body: talks[node].send(body), at_once=at_once)
    pids = []
    try:
        for node in names:
            pid, talks[node] = start_exchange(folder, node, key, share, at_once)
            pids.append(pid)
        ring.begin(0, -1)  # without a supervisor there is no attempt
        yield Nodes(folder, names, ring, talks, pids)
    finally:
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        for node in names:
            room.remove(folder, node)
        for lock in locks:
            if lock is not None:
                os.close(lock)


@contextmanager
def at_work(target: Callable[..., None], each: Iterable[tuple[Any, ...]]) -> Iterator[int]:
    """A process of ``target`` for each of these arguments; yields how many."""
    spawn = multiprocessing.get_context("spawn")
    children = [spawn.Process(target=target, args=one, daemon=True) for one in each]
    try:
        for child in children:
            child.start()
        yield len(children)
    finally:
        for child in children:
            child.kill()
            child.join()


def copies(mb: int) -> None:
    """Two nodes on this machine, a rank for each core, and the exchanges stopped and continued in turn."""
    ranks, share = max(2, len(os.sched_getaffinity(0))), default("snapshot_copies")
    os.environ |= {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    counters = multiprocessing.get_context("spawn").Array("q", ranks, lock=False)
    with two_nodes(share) as on:
        each = [(on.folder, on.names[n % 2], n, ranks, mb, counters) for n in range(ranks)]
        with at_work(one_rank, each):
            rates = alternate(on.ring, on.talks, on.pids, counters)
            tell_copies(rates, ranks, mb, share, on.ring.state.held)


def one_rank(folder: str, node: str, rank: int, world: int, mb: int, counts: Any) -> None:
    """Train: about 50 ms of matrix products a step, and a snapshot every second one."""
    names = {"SNAPSHOTS": folder, "GUARD_SNAPSHOT_SLOTS": str(SLOTS)}
    os.environ |= {f"FTSUPERVISE_{name}": value for name, value in names.items()}
    os.environ |= {"SLURMD_NODENAME": node, "RANK": str(rank), "WORLD_SIZE": str(world)}
    state = State(mb)
    guard = Guard(signals=())
    guard.restore(model=state.arrays)
    one = np.random.default_rng(rank).standard_normal((192, 192))
    count = max(1, int(STEP / min(seconds(lambda: one @ one) for _ in range(50))))
    step = 0
    while True:
        for _ in range(count):
            one @ one
        step += 1
        guard.snapshot(step)
        counts[rank] = step


def alternate(
    ring: SnapshotRing, talks: dict[str, socket.socket], pids: list[int], counts: Any
) -> list[tuple[bool, float, float]]:
    """For each stretch: with copies or not, steps a second of all ranks, and the share of the cores that copying took."""
    listen(ring, talks, until=lambda: ring.state.held >= 0, bound=120.0)
    if ring.state.held < 0:
        raise SystemExit("no step came to every buddy within two minutes")
    found = []
    for n in range(STRETCHES):
        on = bool(n % 2)
        for pid in pids:
            os.kill(pid, signal.SIGCONT if on else signal.SIGSTOP)
        listen(ring, talks, until=lambda: False, bound=0.3)
        began, steps, used = time.monotonic(), sum(counts), sum(cpu(pid) for pid in pids)
        listen(ring, talks, until=lambda: False, bound=STRETCH)
        took = time.monotonic() - began
        busy = (sum(cpu(pid) for pid in pids) - used) / took / len(os.sched_getaffinity(0))
        found.append((on, (sum(counts) - steps) / took, busy))
    return found


def listen(ring: SnapshotRing, talks: dict[str, socket.socket], until: Callable[[], bool], bound: float) -> None:
    """The supervisor's part: pass the reports on to the ring."""
    end = time.monotonic() + bound
    while not until() and (left := end - time.monotonic()) > 0:
        ready = select.select(list(talks.values()), [], [], min(0.05, left))[0]
        for node, talk in talks.items():
            if talk in ready:
                ring.hear(node, "127.0.0.1", talk.recv(4096))


def cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text("ascii").rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def tell_copies(rates: list[tuple[bool, float, float]], ranks: int, mb: int, share: float, held: int) -> None:
    pairs = [rates[n][1] / ((rates[n - 1][1] + rates[n + 1][1]) / 2) for n in range(1, len(rates) - 1) if rates[n][0]]
    pairs.sort()
    off, on = (median(rate for with_it, rate, _ in rates if with_it is which) for which in (False, True))
    low, high = pairs[len(pairs) // 4], pairs[-1 - len(pairs) // 4]
    print(
        f"{ranks} ranks of {mb} MB on two nodes, copies within {share:.0%} of the cores; every buddy held step {held}"
    )
    print(f"steps a second without copies {off:,.2f}, with them {on:,.2f}")
    print(f"each stretch beside its neighbours: median {median(pairs):.3f}, half of them {low:.3f} to {high:.3f}")
    spent = median(busy for with_it, _, busy in rates if with_it)
    print(f"processor time of both ends: {spent:.2%} of the cores")
    figure("snapshot-copies/processor", 100 * spent, "%", f"of the cores, {share:.0%} are allowed")
    figure("snapshot-copies/rate", median(pairs), "", "of the step rate without copies")
    figure("snapshot-copies/rate-low", low, "", "of the step rate without copies, a quarter of the stretches is lower")
    figure(
        "snapshot-copies/rate-high", high, "", "of the step rate without copies, a quarter of the stretches is higher"
    )


# --------------------------------------------------------------------------------------------- waiting for the copy


def waits(mb: int) -> None:
    """Two nodes on this machine with a rank each: how long ``guard.snapshot`` holds the loop up, with the copy and without."""
    print(f"\n{mb} MB for each of two ranks on two nodes, all on this machine")
    print(f"{'holds the loop up':<36}{'ms':>8}{'p90':>8}")
    beside = 0.0
    for words, wait in (("copied beside the loop", "off"), ("until the copy is there", "20")):
        took = sorted(waiting(mb, wait))
        print(f"{words:<36}{median(took) * 1e3:>8,.1f}{took[len(took) * 9 // 10] * 1e3:>8,.1f}")
        name, times = (f"{mb}-MB-copied", median(took) / beside) if beside else (f"{mb}-MB", None)
        figure(
            f"snapshot-waits/{name}", median(took) * 1e3, "ms", "the same beside the loop" if times else "", times=times
        )
        beside = median(took)


def waiting(mb: int, wait: str) -> list[float]:
    found: list[float] = []
    with two_nodes(default("snapshot_copies"), at_once=wait != "off") as on:
        queue = multiprocessing.get_context("spawn").Queue()
        each = [(on.folder, node, rank, mb, wait, queue) for rank, node in enumerate(on.names)]
        with at_work(waiting_rank, each) as count:
            for _ in range(count):
                listen(on.ring, on.talks, until=lambda: not queue.empty(), bound=300.0)
                found += queue.get(timeout=10)
    return found


def waiting_rank(folder: str, node: str, rank: int, mb: int, wait: str, queue: Any) -> None:
    """Steps of 50 ms that use no processor, and a snapshot after each of 40."""
    own = {
        "SNAPSHOTS": folder,
        "GUARD_SNAPSHOT_SLOTS": str(SLOTS),
        "GUARD_SNAPSHOT_EVERY": "1",
        "GUARD_SNAPSHOT_WAIT": wait,
    }
    os.environ |= {f"FTSUPERVISE_{name}": value for name, value in own.items()}
    os.environ |= {"SLURMD_NODENAME": node, "RANK": str(rank), "WORLD_SIZE": "2"}
    state = State(mb)
    guard = Guard(signals=())
    guard.restore(model=state.arrays)
    wait_for(guard)
    time.sleep(2)  # until the other one is there, too
    took = []
    for step in range(2, 50):
        time.sleep(STEP)
        took.append(seconds(lambda step=step: guard.snapshot(step)))  # type: ignore[misc]
    queue.put(took[8:])
    time.sleep(300)


if __name__ == "__main__":
    words = [word for word in sys.argv[1:] if not word.startswith("--")]
    kind = copies if "--copies" in sys.argv else waits if "--wait" in sys.argv else main
    for size in words or ["256"]:
        kind(int(size))
