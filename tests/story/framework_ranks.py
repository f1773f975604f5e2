"""One rank that torchrun starts: it runs the examples of frameworks one after the other, because importing them takes most of
the time. Each runs undisturbed, then stopped and gone on with, then from an older checkpoint. Rank 0 leaves what they print.

    framework_ranks.py FOLDER EXAMPLE...
"""

from __future__ import annotations

import importlib.util
import io
import json
import os
import shutil
import sys
import threading
import time
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import torch.distributed as dist

from tests.manual.blocks import ROOT, marked

WORDS = ["--epochs", "2", "--save-every", "7"]


def main(folder: Path, names: list[str]) -> None:
    dist.init_process_group("gloo")
    said = {}
    for name in names:
        spec = importlib.util.spec_from_file_location(name, ROOT / "examples" / name / "train.py")
        assert spec is not None and spec.loader is not None
        example = importlib.util.module_from_spec(spec)
        sys.modules[name + "_example"] = example
        spec.loader.exec_module(example)
        alone, again, older = (folder / name / place for place in ("alone", "again", "older"))
        said[name] = [
            train(example, alone, "0"),
            train(example, again, "0.02", stop=True),
            train(example, again, "0"),
        ]
        go_back(alone, older)
        said[name].append(train(example, older, "0"))
        show(name, folder / name / "shown", example)
        if name == "huggingface":
            keep_best(folder / name / "best", example)
    if dist.get_rank() == 0:
        (folder / "said.json").write_text(json.dumps(said))


def train(example: Any, place: Path, step_time: str, *, stop: bool = False) -> str:
    """What the example prints. ``stop``: the kill switch goes up after its first checkpoint, and comes down at the end."""
    enter(place)
    switch = place / "run" / "switches" / "kill-switch"
    if stop and dist.get_rank() == 0:
        threading.Thread(target=raise_switch, args=(place / "checkpoints", switch), daemon=True).start()
    sys.argv = ["train.py", *WORDS, "--step-time", step_time]
    text = io.StringIO()
    with redirect_stdout(text):
        example.main()
    dist.barrier()
    switch.unlink(missing_ok=True)
    return text.getvalue()


def go_back(alone: Path, older: Path) -> None:
    """The oldest checkpoint that the undisturbed run has kept; Lightning's is of a batch that a validation followed."""
    if dist.get_rank() == 0:
        oldest = min((alone / "checkpoints").glob("*-*"), key=lambda path: int(path.name.rpartition("-")[2]))
        shutil.copytree(oldest, older / "checkpoints" / oldest.name)
    dist.barrier()


def raise_switch(checkpoints: Path, switch: Path) -> None:
    while not list(checkpoints.glob("*-*")):
        time.sleep(0.01)
    switch.touch()


def enter(place: Path) -> None:
    """A run directory of its own, as ``ftsupervise run`` would name it."""
    (place / "run" / "switches").mkdir(parents=True, exist_ok=True)
    os.environ["FTSUPERVISE_RUN_DIR"] = str(place / "run")
    os.environ["FTSUPERVISE_CHECKPOINT_DIR"] = str(place / "checkpoints")
    os.chdir(place)


def show(name: str, place: Path, example: Any) -> None:
    """Run what the page of frameworks shows, as it stands there."""
    import torch
    from torch.utils.data import DataLoader

    enter(place)
    (block,) = marked("run", name)
    known: dict[str, Any] = {}
    if name == "lightning":
        import lightning.pytorch as pl

        class Tested(example.Classifier):
            def test_step(self, batch: Any, batch_idx: int) -> None:
                self.validation_step(batch, batch_idx)

        def trainer(**options: Any) -> Any:
            quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
            return pl.Trainer(accelerator="cpu", devices=dist.get_world_size(), **quiet, **options)

        known = {"model": Tested(0.0), "loader": DataLoader(example.samples(64), batch_size=16), "Trainer": trainer}
    if name == "huggingface":
        import transformers

        config = transformers.GPT2Config(vocab_size=example.WORDS, n_embd=8, n_layer=1, n_head=1)
        args = transformers.TrainingArguments("out", max_steps=3, save_steps=2, report_to="none", use_cpu=True)
        known = {"model": transformers.GPT2LMHeadModel(config), "args": args, "data": example.Counting(64)}
        known["Trainer"] = transformers.Trainer
    if name == "accelerate":
        import accelerate

        model = torch.nn.Bilinear(example.FEATURES, 1, 1)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        data = [(torch.randn(example.FEATURES), torch.randn(1)) for _ in range(64)]
        known = {"model": model, "optimizer": optimizer, "loader": DataLoader(data, batch_size=8)}
        known |= {"accelerator": accelerate.Accelerator(cpu=True), "evaluate": lambda model: None}
    exec(block.text, known)


def keep_best(place: Path, example: Any) -> None:
    """The Trainer saves only what is the best so far, and loads it at the end."""
    from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

    from ftsupervise.integrations.huggingface import HuggingFaceGuard

    enter(place)
    when = {"eval_strategy": "steps", "eval_steps": 2, "save_strategy": "best", "metric_for_best_model": "loss"}
    args = TrainingArguments(
        "out", max_steps=12, load_best_model_at_end=True, save_total_limit=2, report_to="none", use_cpu=True, **when
    )
    model = GPT2LMHeadModel(GPT2Config(vocab_size=example.WORDS, n_embd=8, n_layer=1, n_head=1))
    data = {"train_dataset": example.Counting(64), "eval_dataset": example.Counting(16)}
    trainer = Trainer(model, args, callbacks=[HuggingFaceGuard()], **data)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert best.parent == place / "checkpoints" and (best / "trainer_state.json").exists(), best
    assert args.output_dir == "out"


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
