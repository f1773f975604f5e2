"""Plays what Megatron-LM, DeepSpeed or tinygrad print, and save, at the pace of their own times. It trains nothing.

    play.py megatron     goes on from checkpoints/, as its --load and --save with one folder do
    play.py deepspeed    begins at the first step each time; saves under global_stepN, and never loads
    play.py bar          a bar with the loss in front of it, and no line; saves nothing

The lines have the form of logs that people have published of their runs, with what stands between the steps:
arguments, timers, evaluations, memory, warnings.
"""

from __future__ import annotations

import sys
import time
from datetime import datetime, timezone
from pathlib import Path

TOTAL = 500_000
_ARGUMENTS = """\
------------------------ Megatron arguments ------------------------
  eval_interval ................................... 200
  global_batch_size ............................... 256
  iteration ....................................... 0
  log_interval .................................... 1
  lr_decay_iters .................................. 320000
  save_interval ................................... 20
  train_iters ..................................... 500000
-------------------- end of Megatron arguments ---------------------
> initializing torch distributed ...
WARNING: TensorBoard writing requested but is not available (are you using PyTorch 1.1.0 or later?)
 > number of parameters on (tensor, pipeline) model parallel rank (0, 0): 354871296
"""


def now() -> str:
    return f"{datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S}"


def say(line: str) -> None:
    print(line, flush=True)


def megatron(every: float) -> None:
    folder = Path("checkpoints")
    newest = folder / "latest_checkpointed_iteration.txt"
    begun = int(newest.read_text()) if newest.exists() else 0
    say(_ARGUMENTS)
    if begun:
        say(f" loading checkpoint from checkpoints at iteration {begun}")
        say(f"  successfully loaded checkpoint from checkpoints at iteration {begun}")
    else:
        say(f"WARNING: could not find the metadata file {newest}")
        say("    will not load any checkpoints and will start from random")
    say(f"[after dataloaders are built] datetime: {now()}")
    say(f"[before the start of training step] datetime: {now()}")
    for at in range(begun + 1, TOTAL):
        time.sleep(every)
        say(
            f" [{now()}] iteration {at:8d}/{TOTAL:8d} | consumed samples: {at * 256:12d} | elapsed time per iteration (ms): "
            f"{1000 * every:.1f} | learning rate: 1.500E-04 | global batch size:   256 | lm loss: {11 - at / 1e4:.6E} | "
            f"loss scale: 1.0 | grad norm: 0.{at % 997:03d} | number of skipped iterations:   0 | number of nan iterations: 0 |"
        )
        if at == begun + 1:
            say(f"[Rank 0] (after {at} iterations) memory (MB) | allocated: 6689.83 | max allocated: 12073.51")
        if at % 20 == 0:
            say(f"saving checkpoint at iteration {at:7d} to checkpoints")
            (folder / f"iter_{at:07d}" / "mp_rank_00").mkdir(parents=True, exist_ok=True)
            (folder / f"iter_{at:07d}" / "mp_rank_00" / "model_optim_rng.pt").write_text(f"weights of {at}")
            newest.write_text(str(at))
            say(f"  successfully saved checkpoint at iteration {at:7d} to checkpoints")
        if at % 200 == 0:
            for done in range(1, 11):
                say(f"Evaluating iter {done}/10")
            say(f" validation loss at iteration {at} | lm loss value: 9.2E+00 | lm loss PPL: 9.9E+03 |")


def deepspeed(every: float) -> None:
    say(f"[{now()},001] [INFO] [config.py:1007:print]   steps_per_print .............. 2")
    say(f"[{now()},002] [INFO] [config.py:1007:print]   train_batch_size ............. 1024")
    for at in range(1, TOTAL):
        time.sleep(every)
        head = f"[{now()},167] [INFO]"
        if at % 2 == 0:
            say(f"{head} [logging.py:96:log_dist] [Rank 0] step={at}, skipped=0, lr=[0.001], mom=[(0.9, 0.999)]")
            say(
                f"{head} [timer.py:215:stop] epoch=0/micro_step={4 * at}/global_step={at}, RunningAvgSamplesPerSec=5720.51, "
                "CurrSamplesPerSec=5370.4, MemAllocated=0.01GB, MaxMemAllocated=0.02GB"
            )
        if at % 30 == 0:
            place = Path("saved") / f"global_step{at}"
            place.mkdir(parents=True, exist_ok=True)
            (place / "mp_rank_00_model_states.pt").write_text(f"weights of {at}")
            say(f"{head} [torch_checkpoint_engine.py:21:save] [Torch] Saving {place}/mp_rank_00_model_states.pt...")


def bar(every: float) -> None:
    for at in range(TOTAL):
        share = at / TOTAL
        head = f"loss: {2.3 - share:6.2f} test_accuracy: {11 + 80 * share:5.2f}%: {100 * share:3.0f}%"
        print(
            f"\r{head}|{'█' * int(40 * share):40}| {at}/{TOTAL} [00:01<{at:02d}:50, {1 / every:5.2f}it/s]",
            end="",
            flush=True,
        )
        time.sleep(every)


if __name__ == "__main__":
    {"megatron": megatron, "deepspeed": deepspeed, "bar": bar}[sys.argv[1]](0.4)
