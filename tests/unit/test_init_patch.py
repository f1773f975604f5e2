"""``init --patch`` puts the guard's lines where their places are sure, and says otherwise why not: text in, text out."""

from __future__ import annotations

from pathlib import Path

import pytest

from ftsupervise.importer.patch import CannotPlace, diff, with_guard
from ftsupervise.importer.training import look_at, script_in, spelled_out


def added(before: str) -> list[str]:
    """Return the lines that the patch adds, blanks around them apart; each other line stays."""
    after = with_guard(before).text
    lines = diff(before, after, "train.py").splitlines()[2:]
    return [line[1:].strip() for line in lines if line.startswith("+")]


PLAIN = """import torch

start = 0
for it in range(start, steps + 1):
    for micro in range(4):
        loss = model(next(data))
        loss.backward()
    optimizer.step()
    if it > 0 and it % every == 0:
        if rank == 0:
            torch.save(model.state_dict(), "ckpt.pt")
    print(it)
print("done")
"""


def test_a_plain_loop_that_saves_every_so_many_steps() -> None:
    assert added(PLAIN) == [
        "from ftsupervise import Guard",
        "guard = Guard()",
        "decision = guard.step(it)",
        "if decision.save or (it > 0 and it % every == 0):",
        "guard.saved(it)",
        "if decision.stop:",
        "break",
        "else:",
        "guard.finished(steps)",
    ]


@pytest.mark.parametrize(
    ("end", "last"),
    [("5001", "5000"), ("args.steps", "args.steps - 1"), ("first + n", "(first + n) - 1"), ("LAST + 1", "LAST")],
)
def test_what_is_finished_is_the_last_step_and_not_the_end_of_the_range(end: str, last: str) -> None:
    assert f"guard.finished({last})" in added(PLAIN.replace("steps + 1", end))


def test_a_trainer_of_hugging_face_gets_the_callback_and_what_it_goes_on_from() -> None:
    text = """from transformers import Seq2SeqTrainer as T

def main(model, args, found):
    trainer = T(
        model=model,
        args=args,  # (the arguments)
    )
    trainer.train(resume_from_checkpoint=found)
    trainer.save_model()
"""
    made = with_guard(text)
    assert added(text) == [
        "from ftsupervise.integrations.huggingface import HuggingFaceGuard",
        "guard = HuggingFaceGuard()",
        "args=args, callbacks=[guard],  # (the arguments)",
        "trainer.train(resume_from_checkpoint=guard.latest() or found)",
    ]
    assert made.notes == ("trainer.save_model behind it runs after a stop, too: put it under `if not guard.stopped:`",)


@pytest.mark.parametrize(
    ("given", "gets"),
    [
        ("", "callbacks=[guard]"),
        ("max_epochs=3", "max_epochs=3, callbacks=[guard]"),
        ("callbacks=[]", "callbacks=[guard]"),
        ("callbacks=[EarlyStopping()]", "callbacks=[guard, EarlyStopping()]"),
        ("callbacks=mine()", "callbacks=[guard, *(mine() or [])]"),
        ("logger=(x)", "logger=(x), callbacks=[guard]"),
        ("logger=(x) ,", "logger=(x), callbacks=[guard] ,"),
    ],
)
def test_a_trainer_of_lightning_keeps_the_callbacks_that_it_has(given: str, gets: str) -> None:
    text = f"import lightning.pytorch as pl\ntrainer = pl.Trainer({given})\ntrainer.fit(model, loader)\n"
    made = with_guard(text).text
    assert f"trainer = pl.Trainer({gets})\n" in made
    assert made.endswith("trainer.fit(model, loader, ckpt_path=guard.latest())\n")
    assert made.index("import LightningGuard") < made.index("guard = LightningGuard()") < made.index("pl.Trainer")


def test_the_loops_of_accelerate_are_wrapped_with_their_tabs_and_line_ends() -> None:
    text = (
        "from accelerate import Accelerator\r\n\r\n"
        "def main():\r\n\taccelerator = Accelerator()\r\n"
        "\tfor epoch in range(args.epochs):\r\n\t\tfor step, batch in enumerate(loader):\r\n"
        "\t\t\taccelerator.backward(loss)\r\n\t\tfor batch in held_out:\r\n\t\t\tpass"
    )
    made = with_guard(text).text
    assert "\tguard = AccelerateGuard(accelerator)\r\n\tfor epoch in guard.epochs(args.epochs):\r\n" in made
    assert "in enumerate(guard.batches(loader)):\r\n" in made
    assert made.endswith("for batch in held_out:\r\n\t\t\tpass")


TRAINER = "from transformers import Trainer\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("import torch\nwhile True:\n    loss.backward()\n", "line 2: the loop is not of the form"),
        ("import torch\nprint(1)\n", "one loop around the backward pass is expected, and no .backward"),
        (PLAIN.replace("    print(it)", "    if bad: continue"), "line 12: a continue leaves out"),
        (PLAIN.replace("it > 0 and", "rank == 0 and"), "line 9: whether it saves depends on rank == 0, too"),
        (PLAIN.replace("torch.save", "keep"), "an `if` in the loop that saves .* and there is none"),
        (
            PLAIN.replace("        loss.backward()", "        loss.backward()\n        o.step()"),
            "line 5: the optimizer makes its steps in this loop",
        ),
        (PLAIN.replace("print(it)", "guard = it"), "line 12: it has a name guard of its own"),
        (PLAIN.replace("import torch\n", ""), "no import stands at its top"),
        (PLAIN.replace("start = 0", "start = 0; x = 1").replace("for it", "for it"), ""),
        ("def f(:\n", "Python cannot read it"),
        (f"{TRAINER}t = Trainer(m)\nu = Trainer(m)\n", "it makes 2 of them"),
        (f"{TRAINER}Trainer(m).train()\n", "line 2: its Trainer is not put into a variable"),
        (f"{TRAINER}t = Trainer(**settings)\nt.train()\n", r"line 2: the callbacks may stand in \*\*settings"),
        (f"{TRAINER}t = Trainer(m)\nt.train()\nt.train()\n", "t.train is called 2 times"),
        (f"{TRAINER}x = 1; t = Trainer(m)\nt.train()\n", "line 2: two statements stand in one line"),
        ("from lightning.pytorch.cli import LightningCLI\nLightningCLI(M)\n", "LightningCLI makes its Trainer"),
        (
            "from accelerate import Accelerator\na = Accelerator()\na.load_state(x)\n",
            "line 3: it goes on from checkpoints of its own",
        ),
    ],
)
def test_what_is_not_sure_is_left_to_a_person(text: str, why: str) -> None:
    if not why:
        assert with_guard(text).text.count("guard = Guard()") == 1
        return
    with pytest.raises(CannotPlace, match=why):
        with_guard(text)


HOME = {"PWD": ".", "HOME": "/home/ada"}


@pytest.mark.parametrize(
    ("before", "command", "script"),
    [
        ("", "srun torchrun --nproc-per-node=4 src/train.py --lr 1", "src/train.py"),
        ('CMD="train.py -c base.yaml"\n', 'srun bash -c "torchrun --rdzv_id=7 $CMD"', "train.py"),
        ('LIB=$HOME/meg\nexport CMD=" \\\n  ${LIB}/pretrain.py --tp 2 "\n', "srun $CMD", "/home/ada/meg/pretrain.py"),
        (
            'export L="\n accelerate launch \\\n --machine_rank=\\${SLURM_NODEID} \\\n tune.py \\\n"\n',
            'srun bash -c "$L"',
            "tune.py",
        ),
        ("", "torchrun --nproc_per_node=2 -m src.train_ddp --epochs 3", "src/train_ddp.py"),
        ("", "python -u -m torch.distributed.run --nproc_per_node 8 `pwd`/train.py", "train.py"),
        ("", "python -m torch.distributed.run -m tools.fit", "tools/fit.py"),
        ("X=$(date)\n", "srun $X", ""),
        ("A=$B\nB=$A\n", "srun $A", ""),
    ],
)
def test_the_training_script_is_found_behind_variables_and_as_a_module(before: str, command: str, script: str) -> None:
    assert script_in(spelled_out(command, before, HOME)) == script


@pytest.mark.parametrize(
    ("text", "page"),
    [
        ("import lightning as L\n", "docs/frameworks/lightning.md"),
        ("from transformers import Trainer\n", "docs/frameworks/huggingface.md"),
        ("import torch\nfrom torch.nn.parallel import DistributedDataParallel\n", "docs/frameworks/ddp.md"),
        ("import torch\n", "docs/frameworks/pytorch.md"),
        ("import jax\n", "docs/frameworks/jax.md"),
        ("print(1)\n", "docs/frameworks.md"),
    ],
)
def test_a_framework_has_a_page_of_its_own(text: str, page: str) -> None:
    assert look_at("train.py", text).page == page
    assert (Path(__file__).parents[2] / page).is_file()
