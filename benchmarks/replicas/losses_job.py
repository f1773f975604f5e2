"""The training of losses.py: digits, told apart by a small network, in four replica groups, with the loss of images that it
never trains on.

    python losses_job.py --loop ddp|localsgd|diloco --seed N --steps N --step-time SECONDS

It writes to BENCH_EVENTS as job.py does: TIME WHAT GROUP PID STEP MORE. "compute" says that a gradient is about to be computed;
the word after each "step" is the loss, the number of groups that took part, a checksum of the weights, and if this one took
part.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
import zlib
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "replicas"))

import torch
from common import digits, network
from torch import nn
from torchft import Optimizer
from torchft.local_sgd import DiLoCo, LocalSGD

from ftsupervise.integrations.torchft import DistributedDataParallel, ReplicaManager

BATCH, HELD_BACK, EVERY, GROUPS = 32, 360, 5, 4


def stamp(what: str, step: int = 0, more: str = "-") -> None:
    group = os.environ["REPLICA_GROUP_ID"]
    with Path(os.environ["BENCH_EVENTS"]).open("ab", buffering=0) as log:
        log.write(f"{time.monotonic_ns()} {what} {group} {os.getpid()} {step} {more}\n".encode())


class Digits:
    """The images in an order that is the same for all seeds: the first ones are held back."""

    def __init__(self, seed: int, index: int) -> None:
        images, labels = digits()
        order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
        self.held = images[order[:HELD_BACK]], labels[order[:HELD_BACK]]
        self.train = images[order[HELD_BACK:]], labels[order[HELD_BACK:]]
        self.seed, self.index = seed, index

    def batch(self, number: int) -> tuple[torch.Tensor, torch.Tensor]:
        """This group's own batch: one that is away leaves its images out."""
        draw = torch.Generator().manual_seed(self.seed * 1_000_003 + number * 1009 + self.index)
        rows = torch.randint(len(self.train[0]), (BATCH,), generator=draw)
        return self.train[0][rows], self.train[1][rows]

    @torch.no_grad()
    def loss(self, net: nn.Module) -> float:
        return float(nn.functional.cross_entropy(net(self.held[0]), self.held[1]))


def replay(seed: int, took_part: list[tuple[set[int], int]]) -> list[float]:
    """The loss after each step of one process that trains on the batches of those groups. Their gradients are divided by the
    number beside them, as torchft does: at the very first step all count, and all but one still copy the weights of one."""
    torch.manual_seed(seed)
    torch.set_num_threads(1)
    net = network()
    inner = torch.optim.AdamW(net.parameters(), lr=0.003)
    data, losses = [Digits(seed, index) for index in range(GROUPS)], []
    for step, (groups, count) in enumerate(took_part):
        inner.zero_grad()
        for index in sorted(groups):
            images, labels = data[index].batch(step)
            (nn.functional.cross_entropy(net(images), labels) / count).backward()
        inner.step()
        losses.append(data[0].loss(net))
    return losses


def meet() -> None:
    """At the start all groups wait for each other, so that the undisturbed run has all of them in each step."""
    stamp("ready")
    if os.environ.get("FTSUPERVISE_ATTEMPT", "1") != "1":
        return
    until = time.monotonic() + 120
    while time.monotonic() < until:
        lines = Path(os.environ["BENCH_EVENTS"]).read_text().splitlines()
        if len({line.split()[2] for line in lines if " ready " in line}) == GROUPS:
            return
        time.sleep(0.05)


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    net = network()
    inner = torch.optim.AdamW(net.parameters(), lr=0.003)
    seen = {"batches": 0}
    meet()
    manager = ReplicaManager(use_async_quorum=args.loop == "ddp", model=net, optimizer=inner, seen=seen)
    data = Digits(args.seed, manager.index)
    model: nn.Module = net
    optimizer: Any = inner
    if args.loop == "ddp":
        model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
        train(args, manager, data, net, model, optimizer, seen, args.steps)
        return
    if args.loop == "localsgd":
        around: Any = LocalSGD(manager, net, inner, sync_every=EVERY)
    else:
        # with a momentum of 0.9 the loss of so short a training swings by more than the seeds differ
        outer = torch.optim.SGD(net.parameters(), lr=0.7, momentum=0.5, nesterov=True)
        around = DiLoCo(manager, [net], inner, outer, sync_every=EVERY)
    with around:
        train(args, manager, data, net, model, optimizer, seen, args.steps // EVERY)


def train(
    args: argparse.Namespace,
    manager: Any,
    data: Digits,
    net: nn.Module,
    model: nn.Module,
    optimizer: Any,
    seen: dict[str, int],
    last: int,
) -> None:
    for step in manager.steps(last):
        number = step if args.loop == "ddp" else seen["batches"]
        images, labels = data.batch(number)
        optimizer.zero_grad()
        stamp("compute", step)
        loss = nn.functional.cross_entropy(model(images), labels)
        time.sleep(args.step_time)
        loss.backward()
        seen["batches"] += 1
        optimizer.step()
        if manager.has_committed:
            weights = b"".join(part.detach().numpy().tobytes() for part in net.parameters())
            told = f"{data.loss(net):.6f}/{manager.num_participants()}/{zlib.crc32(weights):08x}"
            told += f"/{int(manager.is_participating())}"
            stamp("step", manager.current_step(), told)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--loop", choices=("ddp", "localsgd", "diloco"), default="ddp")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-time", type=float, default=0.04)
    return parser.parse_args()


if __name__ == "__main__":
    main()
