"""A network for handwritten digits, trained with DistributedDataParallel: on CPUs with gloo, on GPUs with NCCL.

However often it is interrupted, the last line prints the same digest of the weights as an undisturbed run on the same number
of ranks. The lines marked GUARD are all that ftsupervise needs; the rest is what any such training has.
"""

from __future__ import annotations

import argparse
import gzip
import hashlib
import os
import socket
import time
from importlib.util import find_spec
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ftsupervise import Guard  # GUARD

BATCH, KEEP = 128, 3
JOIN = 120.0  # seconds to wait for rank 0


def main() -> None:
    args = arguments()
    torch.manual_seed(args.seed)
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    rank, world, device = join()
    images, labels = (part.to(device) for part in digits())

    # find_unused_parameters: otherwise DDP adds gradients up in another order after its first step, and a restart shows in the
    # last bits of the weights (it warns once that it costs a little)
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)).to(device)
    model = DistributedDataParallel(net, find_unused_parameters=True)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
    first = load(net, optimizer, device)
    guard = Guard(rank=rank, world=world, agree=lambda vote: largest(vote, device))  # GUARD
    say(
        rank,
        f"{f'resumed after step {first - 1}' if first > 1 else 'started'} on {world} rank(s), to step {args.steps}",
    )

    for step in range(first, args.steps + 1):
        seen = torch.Generator().manual_seed(
            args.seed * 1_000_003 + step
        )  # of the step alone, so that nothing need be saved
        batch = torch.randint(len(images), (BATCH,), generator=seen)[rank::world].to(device)
        loss = nn.functional.cross_entropy(model(images[batch]), labels[batch])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        time.sleep(args.step_time)
        if step % args.log_every == 0:
            say(rank, f"step {step} loss {loss.item():.4f}")

        decision = guard.step(step)  # GUARD
        if decision.save or step % args.save_every == 0 or step == args.steps:
            if rank == 0:
                save(guard, net, optimizer, step)
            dist.barrier()  # nobody says that it is saved before it is
            guard.saved(step)  # GUARD
        if decision.stop:
            say(rank, f"stopped at step {step}: {decision.reason}")
            break
    else:
        guard.finished(args.steps)  # GUARD
        say(rank, f"finished at step {args.steps}, weights {digest(net)}")
    dist.destroy_process_group()


def join() -> tuple[int, int, torch.device]:
    """This process's rank, the number of ranks and its device. torchrun says where to meet; srun does not: there rank 0 opens a
    store on a free port and says so in the attempt's own directory, so that no rank ever meets the store of a dead attempt."""
    cuda = torch.cuda.is_available()
    local = int(os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0")))
    device = torch.device("cuda", local % torch.cuda.device_count()) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    backend = "nccl" if cuda else "gloo"
    if "MASTER_ADDR" in os.environ and "RANK" in os.environ:
        dist.init_process_group(backend)
    else:
        step = "SLURM_STEP_ID" in os.environ  # a batch script has a rank of Slurm's too, and is none
        rank = int(os.environ["SLURM_PROCID"]) if step else 0
        world = int(os.environ["SLURM_STEP_NUM_TASKS"]) if step else 1
        dist.init_process_group(backend, store=meet(rank, world), rank=rank, world_size=world)
    return dist.get_rank(), dist.get_world_size(), device


def meet(rank: int, world: int) -> dist.Store:
    if world == 1:
        return dist.HashStore()
    start = f"{os.environ['SLURM_JOB_ID']}.{os.environ['SLURM_STEP_ID']}"
    place = Path(os.environ.get("FTSUPERVISE_ATTEMPT_DIR", ".")) / f"meet-{start}"
    if rank == 0:
        store = dist.TCPStore(socket.gethostname(), 0, world, is_master=True, wait_for_workers=False)
        part = place.with_suffix(".part")
        part.write_text(f"{socket.gethostname()} {store.port}")
        part.replace(place)
        return store
    until = time.monotonic() + JOIN
    while not place.exists():
        if time.monotonic() > until:
            raise SystemExit(f"rank 0 has not said in {place} where it listens, for {JOIN:.0f} s")
        time.sleep(0.01)
    host, port = place.read_text().split()
    return dist.TCPStore(host, int(port), world, is_master=False)


def largest(vote: int, device: torch.device) -> int:
    """The largest vote of all ranks: so they all leave, or save, at the same step."""
    box = torch.tensor(vote, device=device)
    dist.all_reduce(box, op=dist.ReduceOp.MAX)
    return int(box)


def save(guard: Guard, net: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> None:
    """Whole or not at all, and never over a successor's. The last KEEP stay."""
    with guard.checkpoint(step) as folder:  # GUARD
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, folder / "state.pt")
    for old in sorted(checkpoints().glob("step-*"))[:-KEEP]:
        guard.remove(old)


def checkpoints() -> Path:
    return Path(os.environ.get("FTSUPERVISE_CHECKPOINT_DIR", "checkpoints"))


def load(net: nn.Module, optimizer: torch.optim.Optimizer, device: torch.device) -> int:
    """From the newest checkpoint, if there is one; the step to go on with."""
    newest = max(checkpoints().glob("step-*"), default=None)
    if newest is None:
        return 1
    saved = torch.load(newest / "state.pt", map_location=device, weights_only=True)
    net.load_state_dict(saved["net"])
    optimizer.load_state_dict(saved["optimizer"])
    return int(saved["step"]) + 1


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


def say(rank: int, text: str) -> None:
    if rank == 0:
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
