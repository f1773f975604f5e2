"""A small network with Accelerate, with dropout, shuffled data, gradient accumulation and a schedule, on CPUs or GPUs.

However often it is interrupted, the last line prints the same digest of the weights as an undisturbed run. The lines marked
GUARD are what ftsupervise needs.
"""

from __future__ import annotations

import argparse
import hashlib
import time

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ftsupervise.integrations.accelerate import AccelerateGuard  # GUARD

FEATURES, CLASSES = 16, 4


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    set_seed(args.seed)
    by_cpu = not torch.cuda.is_available()  # else the ranks would train alone, each by itself
    accelerator = Accelerator(cpu=by_cpu, gradient_accumulation_steps=2)
    guard = AccelerateGuard(accelerator, save_every=args.save_every, keep=3)  # GUARD

    net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))
    optimizer = torch.optim.AdamW(net.parameters(), lr=0.01)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
    loader = DataLoader(samples(960), batch_size=16, shuffle=True)
    net, optimizer, loader, schedule = accelerator.prepare(net, optimizer, loader, schedule)

    for epoch in guard.epochs(args.epochs):  # GUARD
        for features, labels in guard.batches(loader):  # GUARD
            time.sleep(args.step_time)
            with accelerator.accumulate(net):
                loss = nn.functional.cross_entropy(net(features), labels)
                accelerator.backward(loss)
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()
            if guard.steps % 10 == 0 and accelerator.sync_gradients:
                guard.loss(loss.item())  # GUARD
        accelerator.print(f"epoch {epoch} ends at step {guard.steps}", flush=True)

    how = f"stopped ({guard.stopped.reason})" if guard.stopped else "finished"
    accelerator.print(f"{how} at step {guard.steps}, weights {digest(accelerator.unwrap_model(net))}", flush=True)


def samples(count: int) -> TensorDataset:
    seen = torch.Generator().manual_seed(count)
    features = torch.randn(count, FEATURES, generator=seen)
    return TensorDataset(features, features[:, :CLASSES].argmax(1))


def digest(model: nn.Module) -> str:
    weights = torch.cat([part.detach().cpu().ravel() for part in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-time", type=float, default=0.02, help="seconds each batch is slowed by")
    parser.add_argument("--save-every", type=int, default=10, help="optimizer steps")
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
