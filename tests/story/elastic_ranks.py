"""A rank that torchrun starts, on however many nodes there are.

    torchrun … elastic_ranks.py LOG

In ``LOG/ROUND-RANK`` it notes what its guard said at which step.

A round is one group of ranks that torchrun formed; each has a port of its own. Its agents do not count restarts alike.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

from ftsupervise import Guard


def main(log: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    name = f"{os.environ.get('FTSUPERVISE_ATTEMPT', 0)}-{os.environ['MASTER_PORT']}"
    box = torch.ones(1)
    with Guard(poll=0.1, beat_every=0.2) as guard, (log / f"{name}-{rank}").open("a", buffering=1) as note:
        print(f"world {world} pid {os.getpid()} since {time.time():.3f}", file=note)
        for step in range(1, 1_000_000):
            time.sleep(0.01)
            dist.all_reduce(box)
            box.fill_(1.0)
            decision = guard.step(step)
            if step % 10 == 0 or decision:
                print(f"step {step} {decision.name}", file=note)
            if decision.save:
                dist.barrier()
                guard.saved(step)
            if decision.stop:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
