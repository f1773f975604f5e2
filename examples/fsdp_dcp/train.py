"""A network for handwritten digits, sharded over the ranks with FSDP2 and saved with torch's Distributed Checkpoint while it
trains: on CPUs with gloo, on GPUs with NCCL.

Saved by four ranks, it goes on with two, or with any other number: DCP gives every rank its part. However often it is
interrupted on the same number of ranks, the last line prints the same digest of the weights as an undisturbed run on them. The
lines marked GUARD are what ftsupervise needs.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from ftsupervise import Guard  # GUARD
from ftsupervise.integrations.torch_dcp import AsyncCheckpoints  # GUARD

BATCH, KEEP = 128, 3


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = join()
    rank, world = dist.get_rank(), dist.get_world_size()
    images, labels = (part.to(device) for part in digits())

    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    mesh = init_device_mesh(device.type, (world,))
    for layer in (model[0], model[2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)

    guard = Guard()  # GUARD
    saves = AsyncCheckpoints(guard)  # GUARD
    first = 1 + (guard.restore(model=model, optimizer=optimizer) or 0)  # GUARD: from memory, after a fault
    newest = saves.latest() if first == 1 else None  # GUARD
    if newest is not None:
        first = load(newest, model, optimizer)
    whole = digest(model)
    say(f"{f'resumed after step {first - 1}' if first > 1 else 'started'} at world size {world}, weights {whole}")

    for step in range(first, args.steps + 1):
        seen = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        batch = torch.randint(len(images), (BATCH,), generator=seen)[rank::world].to(device)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_time)
        if step % args.log_every == 0:
            say(f"step {step} loss {loss.item():.4f}")

        guard.snapshot(step)  # GUARD: into the node's memory
        decision = guard.step(step)  # GUARD
        if decision.save or step % args.save_every == 0 or step == args.steps:
            net, adam = get_state_dict(model, optimizer)
            saves.save(
                step, {"net": net, "optimizer": adam, "step": step}
            )  # GUARD: copies it, and writes while we train
            whole = digest(model)
            say(f"saving step {step}, weights {whole}")
            drop_old(guard)
        if decision.stop:
            saves.wait()  # GUARD
            say(f"stopped at step {step}: {decision.reason}")
            break
    else:
        whole = digest(model)
        say(f"finished at step {args.steps}, weights {whole}")
        if saves.wait():  # GUARD
            guard.finished(args.steps)  # GUARD
    dist.destroy_process_group()


def join() -> torch.device:
    """torchrun says where to meet."""
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl" if cuda else "gloo")
    return device


def load(newest: Path, model: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Each rank reads its part, whatever the number of ranks that wrote it; the step to go on with."""
    net, adam = get_state_dict(model, optimizer)
    state = {"net": net, "optimizer": adam, "step": 0}
    dcp.load(state, checkpoint_id=newest)
    set_state_dict(model, optimizer, model_state_dict=state["net"], optim_state_dict=state["optimizer"])
    return int(state["step"]) + 1


def drop_old(guard: Guard) -> None:
    """The last KEEP stay; a checkpoint that is being written is none yet."""
    if dist.get_rank() == 0:
        folder = Path(os.environ.get("FTSUPERVISE_CHECKPOINT_DIR", "checkpoints"))
        for old in sorted(folder.glob("step-*"))[:-KEEP]:
            guard.remove(old)


def digits() -> tuple[torch.Tensor, torch.Tensor]:
    """1,797 images of 8 x 8 as rows of 64, and their labels: the file scikit-learn ships, without importing it."""
    package = find_spec("sklearn")
    if package is None or not package.submodule_search_locations:
        raise SystemExit("this example trains on the digits that scikit-learn ships: pip install scikit-learn")
    path = Path(package.submodule_search_locations[0]) / "datasets" / "data" / "digits.csv.gz"
    with gzip.open(path, "rt") as file:
        table = torch.tensor([[float(word) for word in line.split(",")] for line in file])
    return table[:, :64] / 16, table[:, 64].long()


def digest(model: nn.Module) -> str:
    """Of the whole weights, which all ranks gather; "" on all but rank 0."""
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    weights = get_model_state_dict(model, options=options)
    parts = [weights[name].ravel() for name in sorted(weights)]
    return hashlib.sha256(torch.cat(parts).numpy().tobytes()).hexdigest()[:16] if parts else ""


def say(text: str) -> None:
    if dist.get_rank() == 0:
        print(text, flush=True)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--step-time", type=float, default=0.02, help="seconds each step is slowed by")
    parser.add_argument("--save-every", type=int, default=50)
    parser.add_argument("--log-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
