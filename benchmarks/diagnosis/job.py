"""A rank of a job that fails in one of the ways that ``diagnose`` is asked about.

Arguments: the scene, and the rank that does it.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from ftsupervise import Guard

AT, LAST = 25, 60


class Rows(Dataset[torch.Tensor]):
    """Rows, one of which takes for ever where ``slow`` is set."""

    slow = False

    def __len__(self) -> int:
        return 1000

    def __getitem__(self, index: int) -> torch.Tensor:
        if self.slow:
            time.sleep(3600)
        return torch.ones(4)


def main() -> None:
    scene, culprit = sys.argv[1], int(sys.argv[2])
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    host, port = os.environ["FTSUPERVISE_MASTER_ADDR"], os.environ["FTSUPERVISE_MASTER_PORT"]
    torch.set_num_threads(1)
    dist.init_process_group("gloo", f"tcp://{host}:{port}", rank=rank, world_size=world, timeout=timedelta(seconds=600))
    guard, rows = Guard(), Rows()
    batches = iter(DataLoader(rows, batch_size=2))
    for step in range(1, LAST + 1):
        mine = step == AT and rank == culprit and os.environ["FTSUPERVISE_ATTEMPT"] == "1"
        value = torch.ones(1000)
        if mine:
            rows.slow = scene == "loader"
            value = misbehave(scene, value)
        batch = next(batches)
        if mine and scene == "another collective":
            dist.broadcast(value, src=culprit)
        else:
            dist.all_reduce(value)
        assert batch is not None
        time.sleep(0.02)
        guard.step(step)


def misbehave(scene: str, value: torch.Tensor) -> torch.Tensor:
    if scene == "sleep":
        time.sleep(3600)
    elif scene == "read":
        with Path(os.environ["HUNG_FILE"]).open("rb") as file:
            file.read(1)
    elif scene == "stopped":
        os.kill(os.getpid(), signal.SIGSTOP)
    elif scene == "lock":
        lock = threading.Lock()
        lock.acquire()
        lock.acquire()
    elif scene == "interpreter":
        ctypes.PyDLL(None).sleep(3600)  # holds the interpreter's lock
    elif scene == "loop":
        while True:
            pass
    elif scene == "segfault":
        ctypes.string_at(0)
    elif scene == "exception":
        raise KeyError("tokens")
    elif scene == "size":
        return torch.ones(500)
    return value


if __name__ == "__main__":
    main()
