"""A line through noisy points, trained by any number of ranks that torchrun starts: on CPUs with gloo, on GPUs with NCCL.

Which points a step sees follows from its number alone, and each rank takes its part of them. So the run goes on with however
many ranks there are after a restart. With the same number all the time, the last line is the same to the bit as that of an
undisturbed run. The lines marked GUARD are all that ftsupervise needs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time

import torch
import torch.distributed as dist
from torch.distributed.elastic.multiprocessing.errors import record

from ftsupervise import Guard  # GUARD

POINTS = 840  # of a step: whatever number of ranks up to eight shares them equally


@record  # torchrun passes on the error of the rank that failed first
def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    dist.init_process_group("nccl" if cuda else "gloo")  # where to meet, and who we are, torchrun has told
    rank, world = dist.get_rank(), dist.get_world_size()
    guard = Guard()  # GUARD

    weights, first = torch.zeros(2, device=device), 1
    newest = guard.latest() if rank == 0 else None  # GUARD: one rank looks, so that all begin from the same checkpoint
    if newest is not None:
        saved = torch.load(newest / "state.pt", map_location=device, weights_only=True)
        weights, first = saved["weights"], saved["step"] + 1
    begin = torch.tensor(first, device=device)
    dist.broadcast(begin, 0)
    dist.broadcast(weights, 0)
    first = int(begin)
    say(rank, f"{f'resumed after step {first - 1}' if first > 1 else 'started'} at world size {world}")

    for step in range(first, args.steps + 1):
        draw = torch.Generator().manual_seed(args.seed * 1_000_003 + step)
        x = torch.rand(POINTS, generator=draw)
        y = 3.0 * x - 1.0 + 0.1 * torch.randn(POINTS, generator=draw)
        mine = torch.stack([x, torch.ones(POINTS)], 1)[rank::world].to(device)
        error = mine @ weights - y[rank::world].to(device)
        gradient = mine.T @ error / POINTS
        dist.all_reduce(gradient)
        weights -= 0.1 * gradient
        time.sleep(args.step_time)
        if step % args.log_every == 0:
            say(rank, f"step {step} loss {float((error**2).mean()):.4f}")

        decision = guard.step(step)  # GUARD
        if decision.save or step % args.save_every == 0 or step == args.steps:
            with guard.checkpoint(step, barrier=dist.barrier) as folder:  # GUARD
                if rank == 0:
                    torch.save({"weights": weights, "step": step}, folder / "state.pt")
        if decision.stop:
            say(rank, f"stopped at step {step}: {decision.reason}")
            break
    else:
        guard.finished(args.steps)  # GUARD
        digest = hashlib.sha256(weights.cpu().numpy().tobytes()).hexdigest()[:16]
        say(rank, f"finished at step {args.steps} at world size {world}, weights {digest}")
    dist.destroy_process_group()


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
