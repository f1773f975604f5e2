"""Snapshots of torch's objects: every bit of them comes back, and a DDP training that is killed ends as if it had not been."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.snapshots.room import node_folder
from ftsupervise.snapshots.slots import open_slots

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
STEPS = 60

# Imports torch once; each line of its input starts the ranks of one attempt, forked, and is answered with their process ids.
TRAIN = """
import hashlib, json, os, random, signal, sys, time
import numpy as np, torch, torch._dynamo, torch.distributed as dist, torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from ftsupervise import Guard

def train(rank, world, steps, how, pace):
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    torch.manual_seed(7)
    net = nn.Sequential(nn.Linear(96, 96), nn.BatchNorm1d(96), nn.ReLU(), nn.Dropout(0.1), *(
        layer for _ in range(4) for layer in (nn.Linear(96, 96), nn.ReLU(), nn.Dropout(0.1))), nn.Linear(96, 10))
    if how == "fsdp":
        from torch.distributed.fsdp import fully_shard
        ddp = fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    else:
        ddp = DDP(net, find_unused_parameters=how == "unused", bucket_cap_mb=0.05)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 1000)
    draw = torch.Generator().manual_seed(1)
    xs, ys = torch.randn(512, 96, generator=draw), torch.randint(0, 10, (512,), generator=draw)
    place = {"cursor": 0}
    random.seed(rank); np.random.seed(rank); torch.manual_seed(100 + rank)

    def agree(vote):
        box = torch.tensor([vote]); dist.all_reduce(box, op=dist.ReduceOp.MAX); return int(box)

    def one_pass():
        ddp(xs[:16]).sum().backward()

    guard = Guard(signals=(), agree=agree)
    start = guard.restore(model=net, optimizer=optimizer, schedule=schedule, place=place, draw=draw,
                          warm_up=one_pass if how == "warm" else None)
    print("from", start, flush=True)
    for step in range(start or 0, steps):
        index = torch.randint(0, 512, (16,), generator=draw)
        place["cursor"] += 16
        x = xs[index] * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand()) + rank
        optimizer.zero_grad()
        nn.functional.cross_entropy(ddp(x), ys[index]).backward()
        optimizer.step()
        schedule.step()
        guard.snapshot(step + 1)
        print("step", step + 1, flush=True)
        time.sleep(pace)
    sums = hashlib.sha256()
    state = [t for s in optimizer.state.values() for t in s.values()]
    for tensor in [*net.state_dict().values(), *state, torch.get_rng_state()]:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sums.update(tensor.detach().numpy().tobytes())
    sums.update(repr((place, schedule.state_dict(), random.random(), float(np.random.rand()))).encode())
    print("end", sums.hexdigest(), flush=True)
    dist.destroy_process_group()

torch.set_num_threads(1)
torch.optim.AdamW([torch.zeros(1, requires_grad=True)])
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
for line in sys.stdin:
    order, pids = json.loads(line), []
    for rank in range(order["world"]):
        pids.append(os.fork())
        if not pids[-1]:
            world = str(order["world"])
            os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=order["port"], RANK=str(rank), WORLD_SIZE=world,
                              LOCAL_WORLD_SIZE=world)
            os.dup2(os.open(order["out"] + str(rank), os.O_WRONLY | os.O_CREAT, 0o600), 1)
            try:
                train(rank, order["world"], order["steps"], order["how"], order["pace"])
            finally:
                os._exit(0)
    print(json.dumps(pids), flush=True)
"""


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    root = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    place = Path(node_folder(root))
    Path(root).mkdir(mode=0o700)
    place.mkdir(mode=0o700)
    monkeypatch.setenv("FTSUPERVISE_SNAPSHOTS", root)
    monkeypatch.setenv("FTSUPERVISE_GUARD_SNAPSHOT_EVERY", "2")
    for name in ("FTSUPERVISE_SNAPSHOT_STEP", "FTSUPERVISE_RUN_DIR", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    yield place
    shutil.rmtree(root)


def free_port() -> int:
    with socket.socket() as door:
        door.bind(("127.0.0.1", 0))
        return int(door.getsockname()[1])


class Training:
    """Starts attempts, and kills them."""

    def __init__(self, folder: Path, memory: Path, how: str, world: int) -> None:
        self._folder, self._memory, self._how, self._world = folder, memory, how, world
        (folder / "train.py").write_text(TRAIN)
        env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
        words, pipe = [sys.executable, str(folder / "train.py")], subprocess.PIPE
        self._parent = subprocess.Popen(words, env=env, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, text=True)
        self._attempts = 0

    def close(self) -> None:
        self._parent.kill()
        self._parent.communicate()

    def run(self, kills: int, until: Until) -> tuple[list[str], list[str]]:
        """What the ranks' states sum up to at the end, and the steps that the attempts began from."""
        for one in self._memory.iterdir():
            one.unlink()
        chance, began = random.Random(3), []
        at = sorted(chance.sample(range(8, STEPS - 6), kills))
        for stop in at:
            began.append(self._killed_at(stop, chance, until))
        out, _ = self._begin(0.0)
        until(lambda: all("end " in text for text in self._texts(out)), "the end of all ranks", 120)
        ends = [text.rpartition("end ")[2].strip() for text in self._texts(out)]
        return ends, [*began, _began(self._texts(out)[0])]

    def _killed_at(self, stop: int, chance: random.Random, until: Until) -> str:
        """One attempt, of which a rank is killed soon after it has made that step, and then the others."""
        out, pids = self._begin(0.01)
        until(lambda: max(map(_reached, self._texts(out))) >= stop, f"step {stop}", 120)
        time.sleep(chance.random() * 0.03)
        os.kill(pids[chance.randrange(self._world)], signal.SIGKILL)
        for pid in pids:
            _kill(pid)
        until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in pids), "the death of all ranks")
        return _began(self._texts(out)[0])

    def _begin(self, pace: float) -> tuple[str, list[int]]:
        self._attempts += 1
        out = str(self._folder / f"out-{self._attempts}-")
        order = {
            "world": self._world,
            "port": str(free_port()),
            "steps": STEPS,
            "how": self._how,
            "pace": pace,
            "out": out,
        }
        assert self._parent.stdin is not None and self._parent.stdout is not None
        self._parent.stdin.write(json.dumps(order) + "\n")
        self._parent.stdin.flush()
        return out, json.loads(self._parent.stdout.readline())

    def _texts(self, out: str) -> list[str]:
        paths = [Path(f"{out}{rank}") for rank in range(self._world)]
        return [path.read_text() if path.exists() else "" for path in paths]


def _began(text: str) -> str:
    return text.partition("from ")[2].partition("\n")[0]


def _reached(text: str) -> int:
    """The last step; that which it began from where it has made none yet."""
    steps = re.findall(r"^(?:step|from) ([0-9]+)$", text, re.M)
    return int(steps[-1]) if steps else 0


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def again_and_again(folder: Path, memory: Path, how: str, world: int, kills: int, until: Until) -> bool:
    """Did the training that was killed end with the bits of the undisturbed one?"""
    training = Training(folder, memory, how, world)
    try:
        undisturbed, _ = training.run(0, until)
        disturbed, began = training.run(kills, until)
    finally:
        training.close()
    assert len(began) == kills + 1 and began[0] == "None"
    assert all(step.isdigit() for step in began[1:]), began
    return disturbed == undisturbed


def test_a_ddp_training_that_is_killed_ends_with_the_bits_of_an_undisturbed_one(
    memory: Path, tmp_path: Path, until: Until
) -> None:
    assert again_and_again(tmp_path, memory, "warm", 2, 3, until)


def test_a_sharded_training_that_is_killed_ends_with_the_bits_of_an_undisturbed_one(
    memory: Path, tmp_path: Path, until: Until
) -> None:
    assert again_and_again(tmp_path, memory, "fsdp", 2, 3, until)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["warm", "unused", "fsdp"])
def test_a_training_of_four_ranks_that_is_killed_twenty_times_ends_with_the_bits_of_an_undisturbed_one(
    memory: Path, tmp_path: Path, until: Until, how: str
) -> None:
    assert again_and_again(tmp_path, memory, how, 4, 20, until)


@pytest.mark.slow
def test_without_a_warm_up_pass_ddp_goes_on_with_other_last_bits(memory: Path, tmp_path: Path, until: Until) -> None:
    """Should this fail, DDP sums its first pass as it sums all others, and ``warm_up`` can go."""
    assert not again_and_again(tmp_path, memory, "plain", 4, 6, until)


def take(guard: Guard, step: int) -> None:
    deadline = time.monotonic() + 60
    while not guard.snapshot(step):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def tensors() -> dict[str, Any]:
    import torch

    whole = torch.randn(4, 6, 5, 7).to(memory_format=torch.channels_last)
    kinds = [one for one in vars(torch).values() if isinstance(one, torch.dtype)]
    plain = [one for one in kinds if not str(one).startswith(("torch.q", "torch.bits", "torch.uint", "torch.int"))]
    return {
        "order": whole,
        "turned": whole[0, 0].t(),
        "gaps": torch.arange(100.0)[::3],
        "scalar": torch.tensor(3.25),
        "empty": torch.zeros(0, 3),
        "large": torch.randn(300_000),
        "conjugate": torch.randn(40_000, dtype=torch.complex64).conj(),
        "nested": {0: {"step": torch.tensor(5.0)}, 1: [torch.ones(3), (torch.zeros(2), 0.1, float("inf"))]},
        "words": (torch.float16, torch.Size((2, 3)), torch.device("cpu")),
        "kinds": {str(kind): _of(kind) for kind in plain if _of(kind) is not None},
    }


def _of(kind: Any) -> Any:
    import torch

    try:
        return torch.arange(1, 6).to(torch.float32).to(kind)
    except (RuntimeError, TypeError):
        return None


def equal(one: Any, other: Any) -> bool:
    import torch

    if isinstance(one, torch.Tensor):
        if one.dtype != other.dtype or one.shape != other.shape:
            return False
        raw = [t.resolve_conj().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)]
        return bool(torch.equal(*raw))
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return type(one) is type(other) and len(one) == len(other) and all(map(equal, one, other))
    return type(one) is type(other) and bool(one == other)


def test_tensors_of_every_type_and_order_come_back_bit_for_bit(memory: Path) -> None:
    import torch

    state = tensors()
    assert len(state["kinds"]) > 8
    guard = Guard(signals=())
    guard.restore(state=state)
    take(guard, 2)
    back: dict[str, Any] = {}
    assert Guard(signals=()).restore(state=back) == 2
    assert equal(state, back)
    assert back["order"].is_contiguous(memory_format=torch.channels_last)
    back["large"].zero_()  # memory of its own, not the slot's
    again: dict[str, Any] = {}
    assert Guard(signals=()).restore(state=again) == 2 and equal(state, again)


def test_a_fresh_optimizer_gets_the_moments_it_had_and_a_module_of_another_shape_is_refused(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    def made(size: int = 8) -> tuple[Any, Any]:
        torch.manual_seed(3)
        net = torch.nn.Sequential(torch.nn.Linear(size, 8), torch.nn.BatchNorm1d(8))
        return net, torch.optim.AdamW(net.parameters(), 1e-2)

    def step(net: Any, optimizer: Any) -> None:
        net(torch.randn(16, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    net, optimizer = made()
    guard = Guard(signals=())
    guard.restore(net=net, optimizer=optimizer)
    step(net, optimizer)
    take(guard, 2)
    step(net, optimizer)
    expected = {name: one.clone() for name, one in net.state_dict().items()}
    for _ in range(2):
        other, fresh = made()
        assert Guard(signals=()).restore(net=other, optimizer=fresh) == 2
        step(other, fresh)
        assert all(torch.equal(one, expected[name]) for name, one in other.state_dict().items())
    wider, fresh = made(9)
    assert Guard(signals=()).restore(net=wider, optimizer=fresh) is None
    said = capfd.readouterr().err
    assert "of net, '0.weight' has the shape (8, 9) in the loop, and (8, 8) in what was saved" in said


def test_large_weights_and_moments_that_several_threads_copy_come_back_bit_for_bit_and_in_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch

    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path))

    def made() -> tuple[Any, Any]:
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(1024, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 600))
        net[0].weight.data = net[0].weight.data.t().contiguous().t()  # in another order of memory
        return net, torch.optim.Adam(net.parameters())

    net, optimizer = made()
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(net=net, optimizer=optimizer)
        net(torch.randn(8, 1024)).square().sum().backward()
        optimizer.step()
        guard.save(1)
    other, fresh = made()
    places = [one.data_ptr() for one in other.parameters()]
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(net=other, optimizer=fresh) == 1
    assert [one.data_ptr() for one in other.parameters()] == places
    assert all(torch.equal(one, other.state_dict()[name]) for name, one in net.state_dict().items())
    moments, again = optimizer.state_dict()["state"], fresh.state_dict()["state"]
    assert all(torch.equal(one, again[n][key]) for n, of in moments.items() for key, one in of.items())


def test_weights_that_are_tied_are_kept_once(memory: Path) -> None:
    import torch

    net = torch.nn.ModuleDict({"into": torch.nn.Embedding(2000, 64), "out": torch.nn.Linear(64, 2000, bias=False)})
    net["out"].weight = net["into"].weight
    guard = Guard(signals=())
    guard.restore(net=net)
    take(guard, 2)
    with open_slots(memory / "rank-0") as file:
        header = file.valid(0)
    assert header is not None and header.data_size < 2000 * 64 * 4 * 1.2


def test_a_subclass_that_is_more_than_its_bytes_is_refused_by_name(
    memory: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    import torch

    class Odd(torch.Tensor):
        pass

    guard = Guard(signals=())
    guard.restore(state={"x": torch.zeros(3).as_subclass(Odd)})
    assert not guard.snapshot(2)
    assert "['x'] is of the type" in capfd.readouterr().err
