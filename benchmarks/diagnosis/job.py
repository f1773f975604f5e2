"""A rank of a job that fails again and again, each attempt in a way of its own: those that ``diagnose`` is asked about.

Arguments: the file of the trials, drawn by ``__main__.py``. Attempt 1 only waits until a standby has imported torch, so that
nothing else has to: attempt N plays trial N - 2.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import queue
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

from ftsupervise import Guard

FOLDER = Path(sys.argv[1]).parent
ATTEMPT, RANK = int(os.environ["FTSUPERVISE_ATTEMPT"]), int(os.environ["SLURM_PROCID"])
if ATTEMPT == 1:
    first = Guard(agree=None)
    first.step(1)
    while not (FOLDER / "warm").exists():
        first.beat()
        time.sleep(0.2)
    sys.exit(3)

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402
from torch._C._distributed_c10d import _WorkerServer  # noqa: E402
from torch.utils.data import DataLoader, Dataset  # noqa: E402

TRIALS: list[dict[str, Any]] = json.loads(Path(sys.argv[1]).read_text())
while len(TRIALS) <= ATTEMPT - 2:  # all is played: the kill switch is there, once this file is
    if (FOLDER / "done").exists():
        sys.exit(5)
    time.sleep(0.2)
TRIAL = TRIALS[ATTEMPT - 2]
MINE = TRIAL["culprit"] == RANK


class Rows(Dataset[torch.Tensor]):
    """Rows, one of which takes for ever where ``slow`` is there."""

    slow = -1

    def __len__(self) -> int:
        return 100_000

    def __getitem__(self, index: int) -> torch.Tensor:
        if index == self.slow:
            time.sleep(3600)
        return torch.ones(4)


def call(kind: str, size: int) -> None:
    value = torch.ones(size)
    if kind == "all_reduce":
        dist.all_reduce(value)
    elif kind == "all_gather":
        dist.all_gather([torch.empty(size) for _ in range(dist.get_world_size())], value)
    elif kind == "broadcast":
        dist.broadcast(value, src=0)
    else:
        dist.barrier()


def main() -> None:
    world = int(os.environ["SLURM_NTASKS"])
    host, port = os.environ["FTSUPERVISE_MASTER_ADDR"], os.environ["FTSUPERVISE_MASTER_PORT"]
    torch.set_num_threads(1)
    where = os.environ["TORCH_WORKER_SERVER_SOCKET"] = f"{FOLDER}/{os.getpid()}-{time.time_ns() % 10**6}.sock"
    server = _WorkerServer(where)
    dist.init_process_group("gloo", f"tcp://{host}:{port}", rank=RANK, world_size=world, timeout=timedelta(seconds=600))
    guard, rows = Guard(), Rows()
    if MINE and TRIAL["scene"] == "loader":
        rows.slow = TRIAL["step"] - 1
    batches = iter(DataLoader(rows, batch_size=1, num_workers=TRIAL["workers"]))
    try:
        for step in range(1, TRIAL["last"] + 1):
            train(step, batches)
            guard.step(step)
        if TRIAL["scene"] == "slow":
            while not is_over():
                step += 1
                train(step, batches)
                guard.step(step)
        dist.barrier()
    except RuntimeError as error:
        if TRIAL["scene"] == "exception" and not MINE:  # louder than the one that failed
            for _ in range(TRIAL["loud"]):
                logging.exception("rank %d: training failed: %s", RANK, error)
        raise
    finally:
        Path(where).unlink(missing_ok=True)
        del server
    os._exit(4)  # a trial in which nothing failed


def is_over() -> bool:
    """Return whether the driver has seen enough of a slow rank. All agree on it."""
    seen = torch.tensor([float((FOLDER / f"over-{ATTEMPT}").exists())])
    dist.all_reduce(seen)
    return bool(seen > 0)


def train(step: int, batches: Iterator[Any]) -> None:
    program: list[tuple[str, int]] = [(kind, size) for kind, size in TRIAL["program"]]
    slow = 2 if MINE and TRIAL["scene"] == "slow" else 1
    time.sleep(TRIAL["pace"] * slow * (1 - TRIAL["after"]))
    next(batches)
    now = MINE and step == TRIAL["step"]
    at = TRIAL["at"]
    if now and TRIAL["scene"] == "order":
        program[at], program[at + 1] = program[at + 1], program[at]
    if now and TRIAL["scene"] == "size":
        program[at] = program[at][0], max(1, int(program[at][1] * TRIAL["factor"]))
    for number, (kind, size) in enumerate(program):
        if now and number == at:
            if TRIAL["scene"] == "skip":
                if TRIAL["variant"] == "elsewhere":
                    evaluate()
                continue
            if (what := MISDEEDS.get(TRIAL["scene"])) is not None:
                what()
        call(kind, size)
    time.sleep(TRIAL["pace"] * slow * TRIAL["after"])  # the optimizer's part


def evaluate() -> None:
    time.sleep(3600)


def read() -> None:
    with (FOLDER / "mount/log.txt").open("rb") as file:
        (FOLDER / "control").write_text("read")
        file.read(1)


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def lock() -> None:
    first, second = threading.Lock(), threading.Lock()
    if TRIAL["variant"] == "twice":
        first.acquire()
        first.acquire()
    elif TRIAL["variant"] == "queue":
        queue.Queue[int]().get()
    else:  # two threads, two locks, in different orders

        def other() -> None:
            with second:
                time.sleep(0.2)
                with first:
                    pass

        with first:
            threading.Thread(target=other, daemon=True).start()
            time.sleep(0.1)
            with second:
                pass


def hold() -> None:
    if TRIAL["variant"] == "sleeps":
        ctypes.PyDLL(None).sleep(3600)  # PyDLL does not give the interpreter's lock away
    re.match(r"(a+)+b", "a" * 64)  # nor does the engine of regular expressions, in C, which takes years for this


def fault() -> None:
    if TRIAL["variant"] == "null":
        ctypes.string_at(0)
    os.kill(os.getpid(), signal.SIGSEGV)


def take_memory() -> None:
    """Take more and more memory in a cgroup with a limit, until the kernel's OOM killer comes."""
    group = Path(os.environ["OOM_CGROUP"], f"rank-{RANK}-{ATTEMPT}")
    group.mkdir(parents=True)
    (group / "memory.limit_in_bytes").write_text(str(200 << 20))
    (group / "cgroup.procs").write_text(str(os.getpid()))
    kept = []
    while True:
        kept.append(bytearray(b"x") * (8 << 20))
        time.sleep(TRIAL["pace"] / 4)


def fail() -> None:
    ERRORS[TRIAL["variant"]]()


def _of_shapes() -> None:
    torch.ones(3, 4) @ torch.ones(5, 6)


def _of_a_key() -> None:
    {"text": 1}["tokens"]


def _of_an_index() -> None:
    [][TRIAL["step"]]


def _of_its_own() -> None:
    class BadBatch(Exception):
        pass

    raise BadBatch(f"batch {TRIAL['step']} is empty")


def _of_a_check() -> None:
    assert torch.isfinite(torch.tensor(float("inf"))), "activation is not finite"


ERRORS = {"key": _of_a_key, "index": _of_an_index, "shapes": _of_shapes, "own": _of_its_own, "assert": _of_a_check}
MISDEEDS: dict[str, Callable[[], None]] = {
    "read": read,
    "stop": stop,
    "lock": lock,
    "interpreter": hold,
    "segfault": fault,
    "memory": take_memory,
    "exception": fail,
}

if __name__ == "__main__":
    main()
