"""Two hundred hours of logs through the reader and the hang detector: no wrong step is shown, and no hang is called.

The trainings are made, in the forms of real ones (``FORMATS``), with all that stands between their steps in real logs:
evaluations and their bars, epochs, totals, dates, configurations, checkpoints, downloads, Slurm's lines, those of other tools.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from ftsupervise.ranks.hang_detector import HangLimits
from ftsupervise.rundir.log_lines import lines
from ftsupervise.rundir.percent_reader import PercentReader
from ftsupervise.rundir.step_reader import StepReader
from tests.unit.hang_world import World
from tests.unit.test_step_reader import STRANGE, bar

EPOCH = 250  # steps of one


class Said(NamedTuple):
    """What a training prints for a step, and the step that this is; None: it says none that could be known."""

    text: str
    step: int | None


def nanogpt(at: int) -> Said:
    return Said(f"iter {at}: loss 2.{at % 997:03d}, time {at % 97}.45ms, mfu 12.34%", at)


def llama2(at: int) -> Said:
    return Said(f"{at} | loss 2.{at % 997:03d} | lr 5.000000e-04 | 33.{at % 97}ms | mfu -100.00%", at)


def trainer(at: int) -> Said:
    total = 281_400
    return Said(bar(at, total) + f"\n{{'loss': 6.{at % 97}, 'learning_rate': 4.99e-05, 'epoch': {at / EPOCH:.2f}}}", at)


def described(at: int) -> Said:
    return Said(bar(at, 281_400, f"loss: 2.{at % 97} test_accuracy: {at % 99}.25%: "), at)


def diffusers(at: int) -> Said:
    return Said(bar(at, 50_000, "Steps: ", f", lr=1e-5, step_loss=0.{at % 97}"), at)


def lightning(at: int) -> Said:
    epoch, here = divmod(at, EPOCH)
    return Said(bar(here, EPOCH, f"Epoch {epoch}: ", f", v_num=0, train_loss=0.{at % 97}"), at)


def keras(at: int) -> Said:
    epoch, here = divmod(at - 1, EPOCH)
    text = f"{here + 1}/{EPOCH} ━━━━━━━━━━ 2s 45ms/step - accuracy: 0.9{at % 97} - loss: 0.{at % 97}"
    return Said(f"Epoch {epoch + 1}/900\n{text}", at)


def megatron(at: int) -> Said:
    return Said(
        f" [2026-05-01 10:00:00] iteration {at:8d}/  500000 | consumed samples: {at * 256:12d} | elapsed time per iteration "
        f"(ms): 5{at % 97}.3 | lm loss: 2.{at % 97}E+00 | number of skipped iterations:   0 |",
        at,
    )


def deepspeed(at: int) -> Said:
    head = f"[2026-05-01 10:00:{at % 60:02d},123] [INFO]"
    return Said(
        f"{head} [logging.py:96:log_dist] [Rank 0] step={at}, skipped=0, lr=[1e-05], mom=[0.9]\n{head} [timer.py:215:stop] "
        f"epoch=0/micro_step={4 * at}/global_step={at}, RunningAvgSamplesPerSec=57{at % 97}.5, MemAllocated=0.01GB",
        at,
    )


def imagenet(at: int) -> Said:
    epoch, here = divmod(at, EPOCH)
    return Said(
        f"Epoch: [{epoch}][{here:3d}/{EPOCH}]\tTime  0.412 ( 0.533)\tData  0.001 ( 0.021)\tLoss 7.{at % 97}e+00", at
    )


def timm(at: int) -> Said:
    epoch, here = divmod(at, EPOCH)
    return Said(f"Train: {epoch} [{here:4d}/{EPOCH} ({100 * here // EPOCH:3d}%)]  Loss: 6.93 (6.95)  Time: 0.501s", at)


def language_model(at: int) -> Said:
    epoch, here = divmod(at, EPOCH)
    return Said(
        f"| epoch {epoch + 1:3d} | {here:5d}/{EPOCH:5d} batches | lr 20.00 | ms/batch 12.{at % 97} | loss  5.12", at
    )


def four_ranks(at: int) -> Said:
    return Said("\n".join(f"{rank}: step {at:,} | loss 2.{at % 97}" for rank in range(4)), at)


def anew_each_epoch(at: int) -> Said:
    """Nothing says how long an epoch is: the number that it prints may be shown, until it falls."""
    return Said(f"batch step {at % EPOCH} loss 0.{at % 97}", at % EPOCH)


def bar_of_each_epoch(at: int) -> Said:
    return Said(bar(at % EPOCH, EPOCH, "", f", loss=0.{at % 97}"), at % EPOCH)


def only_epochs(at: int) -> Said:
    return Said(f"epoch {at // 10}: {{'accuracy': 0.6{at % 97}, 'f1': 0.8}}", None)


def only_numbers(at: int) -> Said:
    """As R prints them."""
    return Said(f"[1] {at}\n   0.20819    0.19171   -0.04148    0.10329   -0.1{at % 97}", None)


def percent(at: int) -> Said:
    return Said(f"Alpha: 0.04{at % 97}  Progress: {min(100, at / 1300):.2f}%  Words/thread/sec: 12.31k", None)


def silent(at: int) -> Said:
    return Said("", None)


def losses(at: int) -> Said:
    return Said(f"2026-05-01T10:{at % 60:02d}:00Z [worker] loss 2.{at % 97}, {at % 3} files open, {at} MB", None)


PROGRAMS = (
    *(nanogpt, llama2, trainer, described, diffusers, lightning, keras, megatron, deepspeed, imagenet, timm),
    *(
        language_model,
        four_ranks,
        anew_each_epoch,
        bar_of_each_epoch,
        only_epochs,
        only_numbers,
        percent,
        silent,
        losses,
    ),
)
KNOWN = frozenset(PROGRAMS[:13])  # whose step is found


def evaluation(draw: random.Random) -> Iterator[str]:
    size = draw.choice((10, 50, 391))
    for at in range(0, size, max(1, size // 10)):
        yield draw.choice(
            (
                f"Test: [{at:2d}/{size}]\tTime  0.131 ( 0.140)\tLoss 6.9e+00 (6.9e+00)",
                f"Evaluating iter {at}/{size}",
                bar(at, size, "Validation DataLoader 0: "),
                bar(at, size, "eval loss 0.4: "),
                f"eval step {at} loss 2.{at}",
            )
        )
    yield f"{{'eval_loss': 6.9, 'eval_runtime': 3.2, 'eval_steps_per_second': 15.1, 'eval_step': {draw.randrange(9000)}}}"


def saving(draw: random.Random) -> Iterator[str]:
    at = draw.randrange(100_000)
    yield f"saving checkpoint at iteration {at:7d} to checkpoints"
    yield f"[Torch] Saving global_step{at}/mp_rank_00_model_states.pt..."
    yield bar(draw.randrange(8), 8, "Writing model shards: ")
    yield f"  successfully saved checkpoint at iteration {at:7d} to checkpoints"
    yield f"Model weights saved in out/checkpoint-{at}/model.safetensors"


def tools(draw: random.Random) -> Iterator[str]:
    at = draw.randrange(100_000)
    yield f"wandb: Synced 5 W&B file(s), {at} media file(s)"
    yield f"2026-05-{draw.randrange(1, 29):02d} 10:00:00.{at:06d}: I tensorflow/core/platform/cpu_feature_guard.cc:182]"
    yield f"[rank{draw.randrange(8)}]: NCCL INFO Channel {draw.randrange(32):02d}/32 : 0 1 2 3"
    yield f"[2026-05-01 10:00:00,123] torch.distributed.run: [WARNING] restart {draw.randrange(3)}/3"
    yield f"slurmstepd: error: *** STEP {at}.0 ON node-0 CANCELLED AT 2026-05-01T10:00:00 ***"
    yield f"srun: Job step {at} aborted"
    yield f"2026-11-22T01:02:03Z ftsupervise: attempt 3 goes on, at step {at}"
    yield f"Downloading shards: progress {draw.randrange(100)}%"
    yield f"max_steps: {at}, warmup steps {draw.randrange(999)}, save_steps = {draw.randrange(999)}"
    yield f"gradient overflow. Skipping step, loss scaler reducing loss scale to {2 ** draw.randrange(3, 15)}"
    yield f"number of parameters: {draw.randrange(900)}.65M, tokens per iteration will be: 491,520"


def between(draw: random.Random) -> Iterator[str]:
    yield from draw.choice((evaluation, saving, tools))(draw)
    strange = list(draw.choice(STRANGE)())
    at = draw.randrange(len(strange))
    yield from strange[at : at + draw.randrange(40)]


class Training:
    """A training of hours, attempt after attempt, as its reader and the hang detector see it."""

    def __init__(self, program: Callable[[int], Said], seed: int) -> None:
        self.program, self.draw = program, random.Random(seed)
        self.world = World(HangLimits(unknown=600.0), ranks=1)
        self.world.change(0, read=True, phase="", state="S")
        self.shown, self.sums = 0, 0

    def life(self, seconds: float) -> None:
        """It computes, or waits for a disk: there is CPU time or traffic each ten seconds. Now and then there is neither."""
        while seconds > 0:
            part = min(10.0, seconds)
            self.world.wait(part)
            self.world.change(0, beaten=self.world.now, cpu=(self.world.pulses[0].cpu or 0.0) + part * 0.5)
            seconds -= part
        if self.draw.random() < 0.02:
            self.world.wait(self.draw.uniform(30, 150))

    def attempt(self, seconds: float, first: int) -> int:
        reader, percents, end = StepReader(), PercentReader(), self.world.now + seconds
        at, size = first, self.draw.choice((1, 1, 2, 5))
        truth: int | None = None
        fell = False
        while self.world.now < end:
            said = self.program(at)
            fell = fell or (said.step is not None and said.step < (truth or 0))
            extra = list(between(self.draw)) if self.draw.random() < 0.1 else []
            for text in (said.text, *extra):
                truth = None if fell else said.step
                reader.feed(text.encode() + b"\n", self.world.now)
                for line in lines(text.encode()):
                    percents.read(line, self.world.now)
                assert reader.step is None or reader.step == truth, (self.program.__name__, text, truth, reader.step)
                self.shown += reader.step is not None
            found = percents.found()
            assert found is None or self.program is percent, (self.program.__name__, found)
            self.world.change(0, beaten=self.world.now, step=reader.step)
            self.life(self.draw.choice((15.0, 30.0, 30.0, 60.0)))
            assert self.world.alarm is None, (self.program.__name__, self.world.alarm)
            at += size
            self.sums += 1
        if self.program in KNOWN:
            assert reader.step == truth, (self.program.__name__, reader.step, truth)
        return at


def play(hours: float, seed: int) -> float:
    """Let each program train for so long, in attempts of some hours. Return the hours played."""
    played = 0.0
    for number, program in enumerate(PROGRAMS):
        one = Training(program, 1000 * seed + number)
        began, at = one.world.now, 1
        while one.world.now - began < 3600 * hours:
            at = one.attempt(3600 * min(hours, one.draw.uniform(1, 5)), at if one.draw.random() < 0.7 else 1)
            one.world = World(one.world.patience, one.world.past, ranks=1, now=one.world.now)
            one.world.change(0, read=True, phase="", state="S")
        played += (one.world.now - began) / 3600
        assert bool(one.shown) is (program in KNOWN) or program in (anew_each_epoch, bar_of_each_epoch)
    return played


class Recorded(NamedTuple):
    """The regular expressions of the lines that a program prints."""

    step: str = ""  # its step, and the steps of an epoch where each begins anew; "": it prints none
    epoch: str = ""  # the epoch that begins, from 1


# made by the walks of public scripts on Slurm (tests/slurm/test_public_scripts_on_slurm.py), and shortened
RECORDED = {
    "keras": Recorded(r"(\d+)/(1250)\b", r"^Epoch (\d+)/5"),
    "llama2": Recorded(r"^(\d+) \|"),
    "makemore": Recorded(r"^step (\d+) \|"),
    "mingpt": Recorded(r"iter (\d+):"),
    "language-model": Recorded(r"\| +(\d+)/ +(\d+) batches", r"^\| epoch +(\d+) \|"),
    "r": Recorded(),
    "word2vec": Recorded(),
    "lightning": Recorded(),
}


@pytest.mark.parametrize("name", RECORDED)
def test_a_recorded_log_shows_no_step_but_those_that_the_program_printed(name: str) -> None:
    data = (Path(__file__).with_name("recorded_logs") / f"{name}.log").read_bytes()
    form, reader, world = RECORDED[name], StepReader(), Training(silent, seed=3)
    epoch, truth, shown = 1, None, 0
    for piece in re.findall(rb"[^\n\r]*[\n\r]+", data):
        text = re.sub(r"\x1b\[[\d;]*m|\x08", "", piece.decode().strip())
        if form.epoch and (found := re.search(form.epoch, text)):
            epoch = int(found[1])
        if form.step and (found := re.search(form.step, text)):
            truth = int(found[1]) + (epoch - 1) * int((*found.groups(), 0)[1])
        reader.feed(piece, world.world.now)
        assert reader.step is None or reader.step == truth, (text, reader.step, truth)
        shown += reader.step is not None
        world.world.change(0, beaten=world.world.now, step=reader.step)
        world.life(30)
        assert world.world.alarm is None, text
    assert bool(shown) is bool(form.step) and reader.step == truth


def test_hours_of_logs_show_no_wrong_step_and_no_hang_is_called() -> None:
    assert play(0.3, seed=1) > 5


@pytest.mark.slow
def test_two_hundred_hours_of_logs_show_no_wrong_step_and_no_hang_is_called() -> None:
    assert play(10, seed=2) >= 200
