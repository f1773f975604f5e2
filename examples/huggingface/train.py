"""A tiny GPT-2 of Transformers, made here, with dropout, trained by the Trainer on sequences that count. Nothing is downloaded.

However often it is interrupted, the last line prints the same digest of the weights as an undisturbed run. The lines marked
GUARD are what ftsupervise needs.
"""

from __future__ import annotations

import argparse
import hashlib
import time
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments, set_seed

from ftsupervise.integrations.huggingface import HuggingFaceGuard  # GUARD

WORDS, LENGTH = 32, 12


class Counting(Dataset[dict[str, torch.Tensor]]):
    """Sequences that count up from somewhere, in steps of one, two or three."""

    def __init__(self, count: int, step_time: float = 0.0) -> None:
        self.count, self.step_time = count, step_time

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(self.step_time)
        words = (torch.arange(LENGTH) * (1 + index % 3) + index) % WORDS
        return {"input_ids": words, "labels": words}


def main() -> None:
    args = arguments()
    torch.set_num_threads(1)
    set_seed(args.seed)  # the weights are drawn here, before the Trainer sets its seed
    shape = {"n_embd": 16, "n_layer": 2, "n_head": 2, "n_positions": LENGTH}
    model = GPT2LMHeadModel(GPT2Config(vocab_size=WORDS, bos_token_id=0, eos_token_id=0, **shape))
    settings = TrainingArguments(
        output_dir="out",
        num_train_epochs=args.epochs,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=2,
        learning_rate=0.005,
        save_steps=args.save_every,
        save_total_limit=3,
        eval_strategy="epoch",
        logging_steps=10,
        seed=args.seed,
        use_cpu=not torch.cuda.is_available(),  # else the ranks would train alone, each by itself
        report_to="none",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    guard = HuggingFaceGuard()  # GUARD
    trainer = Trainer(
        model,
        settings,
        train_dataset=Counting(480, args.step_time / 16),
        eval_dataset=Counting(32),
        callbacks=[guard],  # GUARD
    )
    trainer.train(resume_from_checkpoint=guard.latest())  # GUARD
    how = f"stopped ({guard.stopped.reason})" if guard.stopped else "finished"
    if trainer.is_world_process_zero():
        print(f"{how} at step {trainer.state.global_step}, weights {digest(model)}", flush=True)


def digest(model: Any) -> str:
    weights = torch.cat([part.detach().cpu().ravel() for part in model.parameters()])
    return hashlib.sha256(weights.numpy().tobytes()).hexdigest()[:16]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--step-time", type=float, default=0.04, help="seconds each step is slowed by")
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--seed", type=int, default=0)
    return parser.parse_args()


if __name__ == "__main__":
    main()
