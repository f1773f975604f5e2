"""Ranks of torch.distributed with gloo that save and restore by the guard, one order a line.

Imports torch once; each line of its input is {"what", "world", "steps", …}: the ranks are forked, and what each says at its end
is answered in one line, by rank.
"""

from __future__ import annotations

import hashlib
import json
import os
import random
import resource
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch._dynamo  # which an optimizer imports when it is made: once here, not in each rank
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ftsupervise import Guard
from ftsupervise.integrations.torch_data import Batches


def train(rank: int, world: int, order: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(order.get("seed", 7))
    wide = order.get("wide", 1)
    net = nn.Sequential(
        nn.Linear(24, 48 * wide), nn.BatchNorm1d(48 * wide), nn.ReLU(), nn.Dropout(0.1), nn.Linear(48 * wide, 5)
    )
    if order["what"] == "fsdp":
        model: Any = fully_shard(net, mesh=dist.device_mesh.init_device_mesh("cpu", (world,)))
    elif order["what"] == "own":  # each rank has a model of its own, as with pipeline parallelism
        model = net
        for part in net.parameters():
            part.data += rank
    else:
        model = DistributedDataParallel(net, bucket_cap_mb=0.001)
    optimizer = torch.optim.AdamW(net.parameters(), 1e-2)
    draw = torch.Generator().manual_seed(3)
    data = TensorDataset(torch.randn(240, 24, generator=draw), torch.randint(0, 5, (240,), generator=draw))
    batches = Batches(
        DataLoader(data, 10, sampler=DistributedSampler(data, seed=2), num_workers=order.get("workers", 0))
    )
    seeds = random.Random(order.get("seed", 7) * 100 + rank)
    random.seed(seeds.random())
    np.random.seed(seeds.randrange(1 << 30))
    torch.manual_seed(seeds.randrange(1 << 30))
    counters = {"tokens": 0}

    def one_pass() -> None:
        model(torch.ones(4, 24)).sum().backward()

    guard = Guard(signals=())
    start = guard.restore(model=net, optimizer=optimizer, batches=batches, counters=counters, warm_up=one_pass)
    losses = []
    try:
        for step, (xs, ys) in zip(range((start or 0) + 1, order["steps"] + 1), batches.forever(), strict=False):
            loss = nn.functional.cross_entropy(
                model(xs * (1 + 0.01 * random.random()) + 0.01 * float(np.random.rand())), ys
            )
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            counters["tokens"] += len(xs)
            losses.append(loss.item())
            if step % order.get("every", 4) == 0:
                if order.get("full") == rank:
                    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 14, 1 << 14))
                guard.save(step)
    finally:
        guard.close()
    sums = hashlib.sha256()
    for tensor in [*net.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]:
        tensor = tensor.to_local() if hasattr(tensor, "to_local") else tensor
        sums.update(tensor.detach().numpy().tobytes())
    sums.update(repr((counters, random.random(), float(np.random.rand()), torch.rand(3))).encode())
    return {"start": start, "end": sums.hexdigest(), "losses": losses, "counters": counters}


def main() -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for line in sys.stdin:
        order = json.loads(line)
        pids = []
        for rank in range(order["world"]):
            pids.append(os.fork())
            if pids[-1]:
                continue
            os.environ.update(RANK=str(rank), WORLD_SIZE=str(order["world"]), FTSUPERVISE_CHECKPOINT_DIR=order["into"])
            os.dup2(os.open(order["said"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600), 2)
            store = dist.FileStore(order["store"], order["world"])
            try:
                dist.init_process_group("gloo", store=store, rank=rank, world_size=order["world"])
                said = train(rank, order["world"], order)
            except Exception as error:
                said = {"error": f"{type(error).__name__}: {error}"}
            Path(f"{order['store']}-{rank}").write_text(json.dumps(said))
            os._exit(0)
        for pid in pids:
            os.waitpid(pid, 0)
        all_said = [json.loads(Path(f"{order['store']}-{rank}").read_text()) for rank in range(order["world"])]
        print(json.dumps(all_said), flush=True)


if __name__ == "__main__":
    main()
