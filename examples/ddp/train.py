"""A network for handwritten digits, trained with DistributedDataParallel: on CPUs with gloo, on GPUs with NCCL.

However often it is interrupted, the last line prints the same digest of the weights as an undisturbed run on the same number
of ranks. The lines marked GUARD are all that ftsupervise needs; the rest is what any such training has.
"""

from __future__ import annotations

import argparse
import gc
import gzip
import hashlib
import os
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from ftsupervise import Guard  # GUARD
from ftsupervise.integrations.torch_data import Batches  # GUARD

BATCH, SCHEDULE, KEEP = 128, 2000, 3


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    device = join()
    train(args, device)
    gc.collect()  # the model of DDP must be gone before the group is, and refers to itself
    dist.destroy_process_group()


def train(args: argparse.Namespace, device: torch.device) -> None:
    rank, world = dist.get_rank(), dist.get_world_size()
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Dropout(0.1), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, SCHEDULE)
    data = TensorDataset(*digits())
    sampler = DistributedSampler(data, seed=args.seed, drop_last=True)
    batches = Batches(DataLoader(data, BATCH // world, sampler=sampler, drop_last=True))  # GUARD
    torch.manual_seed(args.seed * 1_000_003 + rank)  # each rank drops out units of its own

    guard = Guard()  # GUARD
    first = 1 + (
        guard.restore(  # GUARD
            model=net,
            optimizer=optimizer,
            schedule=schedule,
            batches=batches,
            warm_up=lambda: model(torch.zeros(2, 64, device=device)).sum().backward(),
        )
        or 0
    )
    say(f"{f'resumed after step {first - 1}' if first > 1 else 'started'} at world size {world}, to step {args.steps}")

    for step, (images, labels) in zip(range(first, args.steps + 1), batches.forever(), strict=False):
        loss = nn.functional.cross_entropy(model(images.to(device)), labels.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        time.sleep(args.step_time)
        if step % args.log_every == 0:
            say(f"step {step} loss {loss.item():.4f}")

        guard.snapshot(step)  # GUARD: into the node's memory
        decision = guard.step(step)  # GUARD
        if decision.save or step % args.save_every == 0 or step == args.steps:
            guard.save(step)  # GUARD: to the disk
            drop_old(guard)
        if decision.stop:
            say(f"stopped at step {step}: {decision.reason}")
            break
    else:
        say(f"finished at step {args.steps}, weights {digest(net)}")
        guard.finished(args.steps)  # GUARD


def join() -> torch.device:
    """The ranks come together; the device of this one. torchrun and `ftsupervise run` say where to meet; else it is alone."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        dist.init_process_group(backend, store=dist.HashStore(), rank=0, world_size=1)
    return device


def drop_old(guard: Guard) -> None:
    """The last KEEP stay."""
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


def digest(net: nn.Module) -> str:
    weights = torch.cat([part.detach().cpu().ravel() for part in net.parameters()])
    return hashlib.sha256(bytes(weights.view(torch.uint8).tolist())).hexdigest()[:16]


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
