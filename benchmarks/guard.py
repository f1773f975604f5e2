"""What does the guard cost in the training loop? Beside what people put there instead, in the same run.

    python benchmarks/guard.py
    python benchmarks/guard.py --check    # one rank only; 1 if a step costs more with everything on than it may

Figures are this machine's; the ratios travel. "by hand" is what the usual guides put into every step: ``os.path.exists`` for
the kill and the save switch and ``psutil.virtual_memory()``. The rows that need torch, or NVIDIA's resiliency extension, are
left out where these are not installed (pip install -e '.[peers]').
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import struct
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from ftsupervise import Guard
from ftsupervise.rundir.heartbeat_page import ENV_PAGES

STEPS_PER_SECOND = 20
AT_MOST = 2_000  # ns of a step with everything on
SPEED = 50  # times faster than life: steps, looks and beats alike
WORLD, SECONDS, BLOCK, PAIRS = (
    4,
    0.05,
    10,
    30,
)  # ranks, seconds of a step, steps, pairs of blocks with and without agreement
_clock = time.perf_counter_ns


def each(call: Callable[[], object], number: int) -> tuple[float, float]:
    """Median and 99th percentile of the nanoseconds of one call, those of an empty one taken off."""

    def times(one: Callable[[], object]) -> list[int]:
        found = []
        for _ in range(number):
            began = _clock()
            one()
            found.append(_clock() - began)
        return sorted(found)

    empty, spent = median(times(lambda: None)), times(call)
    return spent[number // 2] - empty, spent[number * 99 // 100] - empty


class SeccompProgram(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("filter", ctypes.c_void_p))


def allow_only_write() -> None:
    """From here on the kernel ends this process at any system call but write()."""
    write = {"x86_64": 1, "aarch64": 64}[os.uname().machine]
    load, jump_if, give_back, allowed, ended = 0x20, 0x15, 0x06, 0x7FFF0000, 0x80000000
    steps = ((load, 0, 0, 0), (jump_if, 0, 1, write), (give_back, 0, 0, allowed), (give_back, 0, 0, ended))
    code = b"".join(struct.pack("HBBI", *one) for one in steps)
    box = ctypes.create_string_buffer(code)
    program, prctl = SeccompProgram(len(steps), ctypes.addressof(box)), ctypes.CDLL(None).prctl
    prctl(38, 1, 0, 0, 0)  # PR_SET_NO_NEW_PRIVS
    prctl(22, 2, ctypes.byref(program))  # PR_SET_SECCOMP, SECCOMP_MODE_FILTER


def no_system_call(call: Callable[[], object], number: int = 100_000) -> bool | None:
    """Does ``call`` do without the kernel? None: it cannot be told here, where not even the clock does."""

    def survives(one: Callable[[], object]) -> bool:
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                one()
                allow_only_write()
                for _ in range(number):
                    one()
                os.write(writer, b"x")
            finally:
                os._exit(0)  # at which the kernel ends it
        os.close(writer)
        os.waitpid(child, 0)
        with os.fdopen(reader, "rb") as pipe:
            return pipe.read() == b"x"

    return survives(call) if survives(time.monotonic) and not survives(os.getppid) else None


def by_hand(root: Path) -> Callable[[], bool]:
    """The guide's checks; without psutil its place is taken by reading /proc/meminfo, which is cheaper."""
    kill, save = str(root / "kill-switch"), str(root / "save-switch")
    try:
        import psutil
    except ImportError:

        def memory() -> float:
            return float(Path("/proc/meminfo").read_text().split(None, 2)[1])
    else:

        def memory() -> float:
            return float(psutil.virtual_memory().percent)

    return lambda: os.path.exists(kill) or os.path.exists(save) or memory() < 0  # noqa: PTH110


def in_a_loop(check: Callable[[int], object], steps: int = 300) -> float:
    """Mean ns of ``check`` between bits of work that turn the caches over, as in a real loop."""
    work, spent = bytearray(1 << 22), 0
    for step in range(steps):
        work[:] = work[::-1]
        before = _clock()
        check(step)
        spent += _clock() - before
    return spent / steps


STEP, LOOKS = "step(), nothing due", "step() that looks (once a second)"
BEATS, LOSS = "step() that looks and beats (every 2 s)", "loss(), every step"
FIGURES = {
    "step": STEP,
    "step-looks": LOOKS,
    "step-beats": BEATS,
    "loss": LOSS,
    "by-hand": "by hand, every step",
    "exists": "os.path.exists, every step",
    "nvrx-heartbeat": "NVRx send_heartbeat(), every step",
    "step-agrees": "step() that agrees, 4 ranks, in the loop",
    "all-reduce": "all_reduce of one int, every step",
}


def amortised(rows: dict[str, tuple[float, float]]) -> float:
    """ns of a step with everything on, at STEPS_PER_SECOND."""
    step, look, beat, loss = (rows[name][0] for name in (STEP, LOOKS, BEATS, LOSS))
    return step + loss + look / STEPS_PER_SECOND + (beat - look) / 2 / STEPS_PER_SECOND


class Paced(NamedTuple):
    """One step of a loop with everything on: in ``step()`` and ``loss()``, in the latter alone, CPU time of the side thread."""

    calls: float  # ns
    loss: float
    beside: float


def with_everything_on(steps: int = 8000, block: int = 2 * 2 * STEPS_PER_SECOND) -> Paced:
    """As many steps between two looks and two beats as at STEPS_PER_SECOND, and a loss in each. The medians over blocks in
    which each comes several times, so that a machine that is busy with other things counts in few of them."""
    work, wanted = bytearray(1 << 17), 1e9 / STEPS_PER_SECOND / SPEED
    took, empty = each(lambda: hashlib.sha256(work), 50)[0], each(lambda: None, 1000)[0]
    work *= max(1, round(wanted / took))
    calls, losses, beside = [], [], []
    with guarded(poll=1 / SPEED, beat_every=2 / SPEED) as guard:
        guard.step(0)
        for at in range(-block, steps, block):
            spent = lost = 0
            used = time.process_time_ns() - time.thread_time_ns()
            for step in range(block):
                hashlib.sha256(work)  # without the interpreter's lock, as a GPU is waited for
                before = _clock()
                guard.loss(2.0 + step / 1e6)
                between = _clock()
                guard.step(step)
                spent += _clock() - before
                lost += between - before
            if at >= 0:
                calls.append(spent / block - 2 * empty)
                losses.append(lost / block - empty)
                beside.append((time.process_time_ns() - time.thread_time_ns() - used) / block)
    return Paced(median(calls), median(losses), median(beside))


@contextmanager
def run_directory() -> Iterator[Path]:
    """With all that a supervisor gives a rank: switches, an attempt, a heartbeat page in the node's memory."""
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory(dir="/dev/shm") as pages:
        root = Path(folder)
        attempt = root / "attempts" / "0001"
        for place in (root / "switches", root / "beats", root / "state", attempt):
            place.mkdir(parents=True)
        os.environ |= {
            "FTSUPERVISE_RUN_DIR": folder,
            "FTSUPERVISE_ATTEMPT_DIR": str(attempt),
            "FTSUPERVISE_ATTEMPT": "1",
            ENV_PAGES: pages,
        }
        yield root


def guarded(**given: Any) -> Guard:
    """With every check on."""
    return Guard(**{"memory": 0.999, "stop_before": 60, "run_for": 1e6, **given})


@contextmanager
def nvrx_heartbeat() -> Iterator[Callable[[], object] | None]:
    """NVIDIA's heartbeat to its monitor process; None where it is not installed."""
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        yield None
        return
    from nvidia_resiliency_ext.fault_tolerance import FaultToleranceConfig, RankMonitorClient, RankMonitorServer

    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/monitor"
        os.environ |= {"FT_RANK_MONITOR_IPC_SOCKET": path, "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
        server = RankMonitorServer.run_in_subprocess(FaultToleranceConfig(), path)
        client = RankMonitorClient()
        client.init_workload_monitoring()
        try:
            yield client.send_heartbeat
        finally:
            client.shutdown_workload_monitoring()
            server.terminate()
            for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"):
                del os.environ[name]


def alone() -> dict[str, tuple[float, float]]:
    """The rows of one rank."""
    rows = {"time.monotonic()": each(time.monotonic, 100_000)}
    with run_directory() as root:
        with guarded(poll=3600) as guard:
            guard.step(0)
            rows[STEP] = each(lambda: guard.step(1), 100_000)
            quiet = no_system_call(lambda: guard.step(1))
        with guarded(poll=0, beat_every=3600) as eager:
            eager.step(0)
            rows["step() that waits for its look (poll=0)"] = each(lambda: eager.step(1), 2_000)
            rows["a beat that is news, and waited for"] = each(eager._heart.beat_now, 500)
        with guarded(poll=1e-9, beat_every=3600) as busy:
            busy.step(0)
            rows[LOOKS] = each(lambda: busy.step(1), 20_000)
            rows[LOSS] = each(lambda: busy.loss(2.0), 20_000)
            busy._heart._every, busy._heart._due = 0.0, 0.0  # each look is one at which a beat is due, and no news
            rows[BEATS] = each(lambda: busy.step(1), 20_000)
        paced = with_everything_on()
        missing = str(root / "switches" / "kill-switch")
        rows["os.path.exists, every step"] = each(lambda: os.path.exists(missing), 20_000)  # noqa: PTH110
        check = by_hand(root)
        rows["by hand, every step"] = each(check, 2_000)
        with guarded() as polite:
            real, real_naive = in_a_loop(polite.step), in_a_loop(lambda _: check())
    with nvrx_heartbeat() as beat:
        if beat is not None:
            rows["NVRx send_heartbeat(), every step"] = each(beat, 2_000)
    told = {True: "none in 100,000 calls (seccomp would end them)", False: "SOME", None: "cannot be told here"}
    print(f"system calls of step(), nothing due: {told[quiet]}")
    print(f"in a loop with cold caches: {real:,.0f} ns per step; by hand {real_naive:,.0f} ns")
    print(words(paced))
    figure("guard/in-a-loop", real, "ns", "by hand", times=real / real_naive)
    figure("guard/everything", paced.calls, "ns")
    figure("guard/everything-in-loss", paced.loss, "ns")
    figure("guard/side-thread", paced.beside, "ns")
    return rows


def words(paced: Paced) -> str:
    return (
        f"everything on, with cold caches and beside a busy loop: {paced.calls:,.0f} ns per step, {paced.loss:,.0f} of them in "
        f"loss(); {paced.beside:,.0f} ns of CPU time in the side thread"
    )


# ------------------------------------------------------------------------------------------------------------- four ranks


def rank_of(rank: int, port: int, writer: int) -> None:
    """Blocks of steps with agreement and without in turn, so that a busy machine is as busy for both."""
    import json

    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    store = dist.TCPStore("127.0.0.1", port, WORLD, rank == 0, wait_for_workers=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    gradients, box = torch.ones(1000), torch.zeros(1, dtype=torch.int64)

    def reduce() -> None:
        dist.all_reduce(box, op=dist.ReduceOp.MAX)
        box.item()

    took: dict[str, list[float]] = {"agreement": [], "alone": []}
    cpu: dict[str, list[float]] = {"agreement": [], "alone": []}
    inside: dict[str, list[float]] = {"agreement": [], "alone": []}
    calls: dict[str, list[float]] = {"agreement": [], "alone": [], "reduce": []}
    with Guard(signals=()) as agreeing, Guard(signals=(), agree=False) as lonely:
        for block in range(-2, PAIRS):
            for name, guard in (("agreement", agreeing), ("alone", lonely))[:: 1 if block % 2 else -1]:
                dist.barrier()
                began, used, spent = time.perf_counter(), time.process_time(), []
                for step in range(BLOCK):
                    time.sleep(SECONDS)
                    dist.all_reduce(gradients)
                    at = _clock()
                    guard.step(step)
                    spent.append(float(_clock() - at))
                if block >= 0:
                    took[name].append((time.perf_counter() - began) / BLOCK)
                    cpu[name].append((time.process_time() - used) / BLOCK)
                    calls[name] += spent
                    inside[name].append(sum(spent) / BLOCK / 1e9)
        for _ in range(300):
            at = _clock()
            reduce()
            calls["reduce"].append(float(_clock() - at))
    os.write(writer, json.dumps([took, cpu, inside, calls]).encode() if rank == 0 else b"")
    dist.destroy_process_group()


def on_ranks(rows: dict[str, tuple[float, float]]) -> str:
    """The rows of four ranks with gloo, and what agreement adds to a step."""
    import json
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    reader, writer = os.pipe()
    with run_directory():
        children = []
        for rank in range(WORLD):
            if (child := os.fork()) == 0:
                code = 1
                try:
                    rank_of(rank, port, writer)
                    code = 0
                finally:
                    os._exit(code)
            children.append(child)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            said = pipe.read()
        failed = [os.waitpid(child, 0)[1] for child in children]
    if any(failed) or not said:
        return "four ranks: failed"
    took, cpu, inside, calls = json.loads(said)
    for name, words in (("agreement", "that agrees, 4 ranks"), ("alone", "that does not, 4 ranks")):
        spent = sorted(calls[name])
        rows[f"step() {words}, in the loop"] = spent[len(spent) // 2], spent[len(spent) * 99 // 100]
    spent = sorted(calls["reduce"])
    rows["all_reduce of one int, every step"] = spent[len(spent) // 2], spent[len(spent) * 99 // 100]

    def more(blocks: dict[str, list[float]]) -> float:
        return median(one - other for one, other in zip(blocks["agreement"], blocks["alone"], strict=True)) / SECONDS

    beside = f"of a step of {SECONDS * 1e3:.0f} ms"
    figure("guard/agreement-step", 100 * more(inside), "%", beside)
    figure("guard/agreement-cpu", 100 * more(cpu), "%", beside)
    figure("guard/agreement-all", 100 * more(took), "%", beside)
    return (
        f"agreement of {WORLD} gloo ranks adds to a step of {SECONDS * 1e3:.0f} ms, by {PAIRS} pairs of {BLOCK} steps: "
        f"{more(inside):+.3%} inside step(), {more(cpu):+.3%} of CPU time, {more(took):+.2%} in all"
    )


def main() -> None:
    rows = alone()
    only = sys.argv[1:] == ["--check"]
    told = "torch is not installed: four ranks and all_reduce left out"
    if only:
        told = ""
    elif importlib.util.find_spec("torch") is not None:
        import torch.distributed  # noqa: F401 - once, for all ranks

        told = on_ranks(rows)
    clock = rows["time.monotonic()"][0]
    print(f"\n{'ns per call':<44}{'median':>11}{'p99':>12}{'x monotonic()':>15}")
    for name, (middle, high) in rows.items():
        print(f"{name:<44}{middle:>11,.0f}{high:>12,.0f}{middle / clock:>15,.1f}")
    print(
        f"\neverything on at {STEPS_PER_SECOND} steps/s: {amortised(rows):,.0f} ns per step, {rows[LOSS][0]:,.0f} of them in "
        f"loss(); by hand {rows['by hand, every step'][0]:,.0f} ns"
    )
    print(told)
    for slug, name in FIGURES.items():
        if name in rows:
            figure(f"guard/{slug}", rows[name][0], "ns", "time.monotonic()", times=rows[name][0] / clock)
    figure("guard/amortised", amortised(rows), "ns", "by hand", times=amortised(rows) / rows["by hand, every step"][0])
    sys.exit(only and amortised(rows) > AT_MOST)


if __name__ == "__main__":
    main()
