"""A small network in Lightning, on CPUs or GPUs, with dropout, shuffled data, gradient accumulation and a validation.

However often it is interrupted, the last line prints the same digest of the weights as an undisturbed run. The lines marked
GUARD are what ftsupervise needs.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from ftsupervise.integrations.lightning import LightningGuard  # GUARD

FEATURES, CLASSES = 16, 4


class Classifier(pl.LightningModule):
    def __init__(self, step_time: float) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(FEATURES, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, CLASSES))
        self.step_time = step_time

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        time.sleep(self.step_time)
        features, labels = batch
        return nn.functional.cross_entropy(self.net(features), labels)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        features, labels = batch
        self.log("accuracy", (self.net(features).argmax(1) == labels).float().mean(), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=200)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    pl.seed_everything(args.seed)
    data = samples(960)
    model = Classifier(args.step_time)
    guard = LightningGuard(save_every=args.save_every, keep=3)  # GUARD
    trainer = pl.Trainer(
        callbacks=[guard],  # GUARD
        max_epochs=args.epochs,
        accumulate_grad_batches=2,
        val_check_interval=14,  # batches
        accelerator="auto",
        devices=ranks_here(),
        logger=False,
        enable_checkpointing=False,  # the guard saves; a ModelCheckpoint may keep the best ones beside it
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        model,
        DataLoader(data, batch_size=16, shuffle=True),
        DataLoader(samples(64), batch_size=16),
        ckpt_path=guard.latest(),  # GUARD
    )
    how = f"stopped ({guard.stopped.reason})" if guard.stopped else "finished"
    if trainer.is_global_zero:
        print(f"{how} at step {trainer.global_step}, weights {digest(model)}", flush=True)


def ranks_here() -> int:
    """The ranks that torchrun or srun has started on this node."""
    return int(os.environ.get("LOCAL_WORLD_SIZE") or os.environ.get("SLURM_NTASKS_PER_NODE") or 1)


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
