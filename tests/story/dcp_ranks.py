"""Two ranks with gloo that save through ``AsyncCheckpoints``. Imports torch once; each line of its input is a play, in JSON:
``{"play": NAME, "env": {…}}``. It forks both ranks, and answers with what each said and how it ended.

A write is held while there is no file ``go`` in the folder of the play: then the test knows what is under way, by no clock.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

from ftsupervise import Guard
from ftsupervise.integrations.torch_dcp import AsyncCheckpoints

WORLD = 2
PATIENCE = 120.0


class Held(dcp.FileSystemWriter):
    """Writes when it may."""

    def write_data(self, plan: Any, planner: Any) -> Any:
        Path("writing").touch()
        until("go")
        return super().write_data(plan, planner)


def until(*names: str) -> None:
    end = time.monotonic() + PATIENCE
    while not all(Path(name).exists() for name in names):
        if time.monotonic() > end:
            sys.exit(f"no {names} after {PATIENCE:.0f} s")
        time.sleep(0.01)


def state_of(step: int, size: int = 1000) -> dict[str, torch.Tensor]:
    """Each rank has a tensor of its own."""
    return {f"weights-{dist.get_rank()}": torch.full((size,), float(step)), "step": torch.tensor(step)}


def committed() -> list[str]:
    folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
    return sorted(path.name for path in folder.glob("step-*"))


def largest(vote: int) -> int:
    box = torch.tensor(vote)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def facts(guard: Guard) -> dict[str, str]:
    """What the run directory has of this rank."""
    guard.beat()
    beat = Path(os.environ["FTSUPERVISE_RUN_DIR"], "beats", f"rank-{dist.get_rank()}")
    found = json.loads(beat.read_text()) if beat.exists() else {}
    told = {key: found.get("facts", {}).get(key, "") for key in ("saved", "save_failed")}
    return {**told, "phase": found.get("phase", "")}


# ------------------------------------------------------------------------------------------------------------ the plays


def goes_on(guard: Guard) -> dict[str, Any]:
    saves = AsyncCheckpoints(guard, writer=Held)
    switch = Path(os.environ["FTSUPERVISE_RUN_DIR"], "switches", "save-switch")
    asked = bool(guard.step(10).save)
    state = state_of(10)
    began = saves.save(10, state)
    state[f"weights-{dist.get_rank()}"].fill_(-1.0)  # the loop changes what it has saved
    until("writing")
    during = {"committed": committed(), "facts": facts(guard), "switch": switch.exists()}
    dist.barrier()
    Path("go").touch()
    done = saves.wait()
    dist.barrier()
    loaded = state_of(0)
    dcp.load(loaded, checkpoint_id=saves.latest())
    return {
        "asked": asked,
        "began": began,
        "during": during,
        "done": done,
        "committed": committed(),
        "facts": facts(guard),
        "switch": switch.exists(),
        "loaded": sorted({float(value) for one in loaded.values() for value in one.reshape(-1)}),
    }


def killed(guard: Guard) -> dict[str, Any]:
    with AsyncCheckpoints(guard, writer=Held) as saves:
        Path("go").touch()
        first = saves.save(10, state_of(10)) and saves.wait()
        dist.barrier()
        Path("go").unlink(missing_ok=True)
        Path("writing").unlink(missing_ok=True)
        dist.barrier()
        saves.save(20, state_of(20))
        if dist.get_rank() == 1:
            until("writing")
            Path("dying").touch()
            os.kill(os.getpid(), signal.SIGKILL)
        until("dying")
        Path("go").touch()
        return {"first": first, "done": saves.wait(), "committed": committed(), "facts": facts(guard)}


def full_disk(guard: Guard) -> dict[str, Any]:
    with AsyncCheckpoints(guard) as saves:
        began = saves.save(10, state_of(10, 2_000_000))
        failed = saves.wait()
        at_fault = facts(guard)
        dist.barrier()
        left = [str(path) for path in Path(os.environ["FTSUPERVISE_STAGING"]).rglob("*")]
        dist.barrier()  # no rank has begun the next one
        again = saves.save(20, state_of(20)) and saves.wait()
        return {
            "began": began, "failed": failed, "at_fault": at_fault, "left": left, "again": again, "facts": facts(guard)
        }  # fmt: skip


def late(guard: Guard) -> dict[str, Any]:
    saves = AsyncCheckpoints(guard, writer=Held)
    saves.save(10, state_of(10))
    os.environ["FTSUPERVISE_DEADLINE"] = f"{time.time() + 6:.3f}"
    began = time.monotonic()
    done, took, at_end = saves.wait(), time.monotonic() - began, facts(guard)
    dist.barrier()
    Path("go").touch()
    del os.environ["FTSUPERVISE_DEADLINE"]
    return {"done": done, "took": took, "at_end": at_end, "afterwards": saves.wait(), "facts": facts(guard)}


def second(guard: Guard) -> dict[str, Any]:
    saves = AsyncCheckpoints(guard, writer=Held)
    saves.save(10, state_of(10))
    until("writing")
    skipped = saves.save(20, state_of(20), wait=False)
    during = committed()
    dist.barrier()
    if dist.get_rank() == 0:
        Path("go").touch()
    third = saves.save(30, state_of(30))
    there = committed()
    return {"skipped": skipped, "during": during, "third": third, "there": there, "done": saves.wait()}


def switch_between(guard: Guard) -> dict[str, Any]:
    """A save switch that is raised and answered while the save of an earlier one is under way."""
    saves = AsyncCheckpoints(guard, writer=Held)
    switch = Path(os.environ["FTSUPERVISE_RUN_DIR"], "switches", "save-switch")
    saves.save(10, state_of(10))
    until("writing")
    dist.barrier()
    if dist.get_rank() == 0:
        switch.touch()
    dist.barrier()
    asked = bool(guard.step(11).save)
    Path("go").touch()
    first = saves.wait()
    up = switch.exists()
    dist.barrier()
    second = saves.save(11, state_of(11)) and saves.wait()
    dist.barrier()
    return {"asked": asked, "first": first, "up": up, "second": second, "down": not switch.exists()}


def superseded(guard: Guard) -> dict[str, Any]:
    saves = AsyncCheckpoints(guard, writer=Held)
    saves.save(10, state_of(10))
    until("writing")
    Path("ready", str(dist.get_rank())).touch()
    until("sealed")
    Path("go").touch()
    return {"done": saves.wait(), "committed": committed(), "facts": facts(guard)}


# -------------------------------------------------------------------------------------------------------------- the stage


def rank_of(play: str, rank: int, answer: Path) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{Path.cwd()}/meet", rank=rank, world_size=WORLD)
    guard = Guard(signals=(), agree=largest, poll=0.0, beat_every=0.0, rank=rank, world=WORLD)
    said = PLAYS[play](guard)
    answer.write_text(json.dumps(said))


PLAYS = {one.__name__: one for one in (goes_on, killed, full_disk, late, second, switch_between, superseded)}


def main() -> None:
    for line in sys.stdin:
        asked = json.loads(line)
        children = []
        for rank in range(WORLD):
            if (child := os.fork()) == 0:
                os.environ.update(asked["env"])
                os.chdir(asked["folder"])
                rank_of(asked["play"], rank, Path(f"said-{rank}"))
                sys.exit(0)  # as any program ends: threads are waited for
            children.append(child)
        print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children]), flush=True)


if __name__ == "__main__":
    main()
