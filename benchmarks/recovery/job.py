"""The training that every launcher runs: four gloo ranks, steps of 50 ms and an all-reduce, a checkpoint of 1 MiB every 20.

It stamps what it does into one file (one ``write`` of one line with O_APPEND, CLOCK_MONOTONIC), so that all launchers are
measured with the same clock and the same words, and it brings the fault upon itself after step ``RECOVERY_AT``, once for each
number in ``RECOVERY_AT``.
"""

import os
import time

_LOG = os.open(os.environ["RECOVERY_EVENTS"], os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)


def stamp(what: str, step: int = 0) -> None:
    rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0"))
    os.write(_LOG, f"{time.monotonic_ns()} {what} {rank} {os.getpid()} {step}\n".encode())


stamp("process")  # before anything is imported
if os.getsid(0) != os.getpid():
    # Linux shares a busy processor out by session, and torchrun's ranks have one each while srun's share their node's: twice
    # the processor for the one and not the other, where other work runs beside them.
    if os.getpgrp() == os.getpid():  # who leads a group cannot leave it
        os.setpgid(0, os.getpgid(os.getppid()))
    for _ in range(300):  # until the node's other rank has left the group, too
        try:
            os.setsid()
            break
        except PermissionError:
            time.sleep(0.01)

import signal  # noqa: E402
import sys  # noqa: E402
from contextlib import AbstractContextManager, nullcontext  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

FOLDER = Path(os.environ["RECOVERY_FOLDER"])
STEP = 0.05
SAVE_EVERY = 20
VICTIM = 2  # the first rank of the second node
_SNAPSHOTS = os.environ.get("RECOVERY_SNAPSHOTS", "")
_EACH = _SNAPSHOTS == "each"  # a step counts once its snapshot is on a second node


def join() -> tuple[int, int]:
    """Rank and world. Under torchrun by its own store; under srun rank 0 says in a fresh file where it listens."""
    if "TORCHELASTIC_RUN_ID" in os.environ:
        dist.init_process_group("gloo")
        return dist.get_rank(), dist.get_world_size()
    rank, world = int(os.environ["SLURM_PROCID"]), int(os.environ["SLURM_NTASKS"])
    start = ".".join(os.environ.get(f"SLURM_{word}", "0") for word in ("JOB_ID", "STEP_ID"))
    meet = Path(os.environ.get("FTSUPERVISE_ATTEMPT_DIR", FOLDER)) / f"meet-{start}"
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False)
        meet.with_suffix(".part").write_text(str(store.port))
        meet.with_suffix(".part").replace(meet)
    else:
        while not meet.exists():
            time.sleep(0.005)
        store = dist.TCPStore("127.0.0.1", int(meet.read_text()), world, is_master=False)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    return rank, world


class Together:
    """All ranks, or nobody."""

    def __init__(self) -> None:
        self.rank, _ = join()

    def reduce(self, grain: torch.Tensor, step: int) -> int | None:
        """The step that was made; None: it was not, and is to be made again."""
        dist.all_reduce(grain)
        return step


class Peers:
    """What a launcher wants to be called in the loop: our guard, NVIDIA's heartbeat, or nothing."""

    def __init__(self, rank: int) -> None:
        self.guard = self.monitor = None
        if "FTSUPERVISE_RUN_DIR" in os.environ:
            from ftsupervise import Guard

            self.guard = Guard(rank=rank)
        elif "FT_RANK_MONITOR_IPC_SOCKET" in os.environ:
            from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

            self.monitor = RankMonitorClient()
            self.monitor.init_workload_monitoring()

    def block(self) -> AbstractContextManager[Any]:
        """Around the loop, as our manual has it."""
        return self.guard if self.guard is not None else nullcontext()

    def step(self, step: int) -> None:
        if self.guard is not None:
            self.guard.step(step)
        elif self.monitor is not None:
            self.monitor.send_heartbeat()

    def saved(self, step: int) -> None:
        if self.guard is not None:
            self.guard.saved(step)

    def restore(self, state: dict[str, Any]) -> bool:
        """Does it go on from the node's memory?"""
        return self.guard is not None and bool(_SNAPSHOTS) and self.guard.restore(state=state) is not None

    def snapshot(self, step: int) -> bool:
        """Does the step count? Where it is not known it does with the next one: then all ranks have made it."""
        kept = self.guard is not None and bool(_SNAPSHOTS) and self.guard.snapshot(step)
        return kept or not _EACH


def save(weights: torch.Tensor, step: int) -> None:
    path = FOLDER / "newest.pt"
    with path.with_suffix(".part").open("wb") as file:
        torch.save({"weights": weights, "step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    path.with_suffix(".part").replace(path)


def fault(step: int) -> None:
    """Once for each step in RECOVERY_AT, in the victim."""
    kind = os.environ.get("RECOVERY_FAULT", "")
    try:
        os.close(os.open(FOLDER / f"fault-{step}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return
    if kind == "mixed":
        kind = ("SIGKILL", "exit 1", "SIGSTOP")[int(os.environ["RECOVERY_AT"].split(",").index(str(step))) % 3]
    stamp("fault", step)
    if kind in ("SIGKILL", "SIGSTOP"):
        os.kill(os.getpid(), getattr(signal, kind))
    elif kind == "exit 1":
        sys.exit(1)


def main() -> None:
    torch.set_num_threads(1)
    weights, step = torch.zeros(1 << 18), 1
    if "TORCHFT_LIGHTHOUSE" in os.environ:
        from groups import Groups  # beside this file

        team: Any = Groups(weights)
    else:
        team = Together()
    rank = team.rank
    peers = Peers(rank)
    state = {"weights": weights, "done": 0}
    if peers.restore(state):
        weights, step = state["weights"], state["done"] + 1
    elif (FOLDER / "newest.pt").exists():
        loaded = torch.load(FOLDER / "newest.pt")
        weights[:], step = loaded["weights"], loaded["step"] + 1
    at = {int(text) for text in os.environ["RECOVERY_AT"].split(",")}
    last, uncounted = int(os.environ.get("RECOVERY_LAST", "100000")), 0
    with peers.block():
        while step <= last:
            time.sleep(STEP)
            grain = torch.ones(1024)
            made = team.reduce(grain, step)
            if made is None:
                continue
            step = made
            if rank == 0 and uncounted:
                stamp("step", uncounted)
            weights[:1024] += grain
            if rank == 0 and step % SAVE_EVERY == 0:
                save(weights, step)
            state["done"] = step
            uncounted = 0 if peers.snapshot(step) else step
            peers.step(step)
            if rank == 0 and not uncounted:
                stamp("step", step)
            if step % SAVE_EVERY == 0:
                peers.saved(step)
            if rank == VICTIM and step in at:
                fault(step)
            step += 1
        stamp("end", last)
        if peers.guard is not None:
            peers.guard.finished(last)


main()
