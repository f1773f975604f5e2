"""A rank of torch.distributed with a worker server: 20 collectives, then rank 1 sleeps where the others are in one.

server_ranks.py DIR [own]     DIR: where the ranks meet and listen; own: without the guard
"""

from __future__ import annotations

import os
import sys
import time

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import _WorkerServer

from ftsupervise import Guard


def main() -> None:
    folder, guarded = sys.argv[1], sys.argv[2:] != ["own"]
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    where = os.environ.setdefault("TORCH_WORKER_SERVER_SOCKET", f"{folder}/{rank}.sock")
    server = _WorkerServer(where)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=world)
    guard = Guard(beat_every=0.05, poll=0.02) if guarded else None
    for step in range(1, 1000):
        if step == 20 and rank == 1:
            time.sleep(1000)
        dist.all_reduce(torch.ones(8))
        if guard is not None:
            guard.step(step)
        print(f"step {step} loss 1.0", flush=True)
    del server


if __name__ == "__main__":
    main()
