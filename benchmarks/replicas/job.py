"""The training of all three launchers: a small network, steps of 0.1 s, gradients averaged over four ranks or groups.

    BENCH_MODE=groups    replica groups, with our integration
    BENCH_MODE=torchft   the same groups with torchft as it comes: its manager, its DDP wrapper, its defaults
    BENCH_MODE=timeline  as groups, with a stamp for each part of the way from a death to the next step (timeline.py)
    BENCH_MODE=whole     four ranks of one job, with DDP and our guard: after a fault all of them start again

Each commits to one file of stamps: TIME WHAT GROUP PID STEP, one write of one line, CLOCK_MONOTONIC.
"""

import os
import time
from collections.abc import Callable
from typing import Any

_LOG = os.open(os.environ["BENCH_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
MODE = os.environ["BENCH_MODE"]
GROUP = os.environ.get("REPLICA_GROUP_ID") or f"g{int(os.environ.get('SLURM_PROCID', '0')):03d}"


def stamp(what: str, step: int = 0, more: str = "-") -> None:
    os.write(_LOG, f"{time.monotonic_ns()} {what} {GROUP} {os.getpid()} {step} {more}\n".encode())


stamp("process")

import socket  # noqa: E402
import zlib  # noqa: E402

if (
    MODE == "torchft"
):  # asks for the host's name, which leads to 127.0.1.1 on these hosts: here it finds a good name service
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as _to:
        _to.connect((os.environ["BENCH_HOST"], 9))
        _OWN = _to.getsockname()[0]
    socket.gethostname = lambda: _OWN

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch import nn  # noqa: E402

STEP = float(os.environ.get("BENCH_STEP", "0.1"))
SAVE_EVERY = 100
LAST = int(os.environ.get("BENCH_LAST", "1000000"))
_WAY = torch.randn(32, 32, generator=torch.Generator().manual_seed(7)) / 32**0.5


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    time.sleep(STEP)
    inputs = torch.randn(16, 32, generator=torch.Generator().manual_seed(step * 1009 + int(GROUP[1:])))
    return (model(inputs) - torch.tanh(inputs @ _WAY)).square().mean()


def done(step: int, net: nn.Module) -> None:
    weights = b"".join(part.detach().numpy().tobytes() for part in net.parameters())
    stamp("step", step, f"{zlib.crc32(weights):08x}")


def network() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.set_num_threads(1)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(32, 64), nn.ReLU(), nn.Linear(64, 32))
    return net, torch.optim.AdamW(net.parameters(), lr=1e-3)


def groups(prepare: Callable[[Any], None] = lambda _: None) -> None:
    from torchft import Optimizer

    from ftsupervise.integrations.torchft import DistributedDataParallel, ReplicaManager

    net, inner = network()
    manager = ReplicaManager(model=net, optimizer=inner)
    prepare(manager)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    for step in manager.steps(LAST, save_every=SAVE_EVERY):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if manager.has_committed:
            done(manager.current_step(), net)
        else:
            stamp("lost", step)


def timeline() -> None:
    def prepare(manager: Any) -> None:
        for owner, name, before, after in (
            (manager, "report_error", "failed", ""),
            (manager._client._inside, "_quorum", "asks", "quorum"),
            (manager._pg, "configure", "", "configured"),
        ):
            setattr(owner, name, stamped(getattr(owner, name), before, after))

    class Client:  # torchft's own takes no attributes
        def __init__(self, inside: Any) -> None:
            self._inside, self._quorum = inside, inside._quorum

        def __getattr__(self, name: str) -> Any:
            return getattr(self._inside, name)

    def open_and_prepare(manager: Any) -> None:
        manager._client._inside = Client(manager._client._inside)
        prepare(manager)

    groups(open_and_prepare)


def stamped(call: Callable[..., Any], before: str, after: str) -> Callable[..., Any]:
    def wrapped(*arguments: Any, **named: Any) -> Any:
        if before:
            stamp(before)
        found = call(*arguments, **named)
        if after:
            stamp(after)
        return found

    return wrapped


def torchft_alone() -> None:
    import torchft

    net, inner = network()
    store = dist.TCPStore(socket.gethostname(), 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        net.load_state_dict(state["model"])
        inner.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(),
        load_state_dict=load,
        state_dict=lambda: {"model": net.state_dict(), "optimizer": inner.state_dict()},
        min_replica_size=3,
        replica_id=GROUP,
        rank=0,
        world_size=1,
        store_addr=socket.gethostname(),
        store_port=store.port,
    )
    model = torchft.DistributedDataParallel(manager, net)
    optimizer = torchft.Optimizer(manager, inner)
    while manager.current_step() < LAST:
        step = manager.current_step()
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()
        if manager.current_step() > step:
            done(manager.current_step(), net)
        else:
            stamp("lost", step)


def whole() -> None:
    from ftsupervise import Guard

    net, optimizer = network()
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(net)
    with Guard() as guard:
        start = guard.restore(model=net, optimizer=optimizer) or 0
        for step in range(start, LAST):
            optimizer.zero_grad()
            loss_of(model, step).backward()
            optimizer.step()
            done(step + 1, net)
            guard.snapshot(step + 1)
            decision = guard.step(step + 1)
            if decision.save or (step + 1) % SAVE_EVERY == 0:
                guard.save(step + 1)
            if decision.stop:
                break


{"groups": groups, "timeline": timeline, "torchft": torchft_alone, "whole": whole}[MODE]()
