"""The step of a training that nobody here wrote: shown true, or not shown."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.rundir.step_reader import FORMATS, Format, StepReader


def read(lines: Iterable[str]) -> StepReader:
    reader = StepReader()
    for line in lines:
        reader.feed(line.encode() + b"\n")
    return reader


def bar(step: int, total: int, before: str = "", after: str = "") -> str:
    return f"{before}{100 * step // total:3d}%|{'█' * (10 * step // total):10}| {step}/{total} [00:01<00:50, 195.31it/s{after}]"


@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_a_real_line_of_each_program_is_taken_by_its_own_format(form: Format) -> None:
    assert form in FORMATS
    fits = next(one for one in FORMATS if one.pattern.search(form.example.strip()))
    assert fits is form


# what a program prints, and the steps that may be shown of it
def nanogpt() -> Iterator[str]:
    yield "max_iters = 600000"
    yield "number of parameters: 10.65M"
    for at in range(0, 1000, 10):
        if at % 250 == 0:
            yield f"step {at}: train loss 2.{at}, val loss 2.{at + 1}"
            yield "saving checkpoint to out-shakespeare-char"
        yield f"iter {at}: loss 2.{at:04d}, time {at % 97}.45ms, mfu 12.34%"


def trainer() -> Iterator[str]:
    yield "***** Running training *****"
    yield "  Num examples = 2,318"
    yield "  Total optimization steps = 281,400"
    for at in range(0, 4000, 3):
        yield bar(at, 281_400)
        if at % 500 < 3:
            yield f"{{'loss': 6.{at}, 'grad_norm': 1.5, 'learning_rate': 4.99e-05, 'epoch': {at / 290:.2f}}}"
            for done in range(0, 51, 10):
                yield bar(done, 50)
            yield f"{{'eval_loss': 6.{at}, 'eval_runtime': 3.2, 'eval_steps_per_second': 15.1, 'epoch': 1.0}}"


def lightning() -> Iterator[str]:
    for epoch in range(3):
        for at in range(0, 101, 5):
            yield bar(at, 100, f"Epoch {epoch}: ", ", v_num=0, train_loss=0.312")
        for at in range(11):
            yield bar(at, 10, "Validation DataLoader 0: ")


def keras() -> Iterator[str]:
    for epoch in range(1, 4):
        yield f"Epoch {epoch}/3"
        for at in range(1, 101, 3):
            yield f"\x1b[1m{at}/100\x1b[0m ━━━━━━━━━━ 2s 45ms/step - accuracy: 0.9{at} - loss: 0.{at}"


def megatron() -> Iterator[str]:
    for at in range(100, 3000, 100):
        yield (
            f" iteration {at:8d}/  500000 | consumed samples: {at * 256} | elapsed time per iteration (ms): 5{at}.3 | "
            f"lm loss: 2.{at}E+00 | number of skipped iterations:   0 | number of nan iterations:   0 |"
        )


def deepspeed() -> Iterator[str]:
    for at in range(10, 500, 10):
        yield f"[2024-05-01 10:00:00,123] [INFO] [logging.py:96:log_dist] [Rank 0] step={at}, skipped=0, lr=[1e-05], mom=[0.9]"


def ranks() -> Iterator[str]:
    for at in range(1000, 1100):
        for rank in range(4):
            yield f"{rank}: step {at:,} | loss 2.{at}"


def language_model() -> Iterator[str]:
    for epoch in range(1, 5):
        for at in range(10, 132, 10):
            yield f"| epoch {epoch:3d} | {at:5d}/  132 batches | lr 20.00 | ms/batch {at}.34 | loss  5.12 | ppl   167.34"
        yield f"| end of epoch   {epoch} | time:  3.47s | valid loss  5.53 | valid ppl   252.0"


def imagenet() -> Iterator[str]:
    for epoch in range(2):
        for at in range(1, 302, 10):
            yield f"Epoch: [{epoch}][{at:3d}/301]\tTime  0.412 ( 0.533)\tData  0.001 ( 0.021)\tLoss 7.{at}e+00 (6.9711e+00)"
        for at in range(1, 26, 10):
            yield f"Test: [{at:2d}/25]\tTime  0.131 ( 0.140)\tLoss 6.9e+00 (6.9e+00)\tAcc@1   0.00 (  0.00)"
        yield " *   Acc@1 0.100 Acc@5 0.500"


def char_rnn() -> Iterator[str]:
    yield "evaluating loss over split index 2"
    yield from (f"{at}/11..." for at in range(1, 12))
    for at in range(1, 90):
        yield f"{at}/21150 (epoch {at / 423:.3f}), train_loss = 4.1{at}, grad/param norm = 4.5006e-01, time/batch = 0.40s"


def llama2() -> Iterator[str]:
    yield "tokens per iteration will be: 131,072"
    for at in range(0, 400, 10):
        if at % 100 == 0:
            yield f"step {at}: train loss 8.{at}, val loss 8.{at}"
        yield f"{at} | loss 2.{at} | lr 5.000000e-04 | 33.{at}ms | mfu -100.00%"


def mingpt() -> Iterator[str]:
    for at in range(0, 300, 10):
        yield f"iter_dt {at}.12ms; iter {at}: train loss 3.{at}"


def makemore() -> Iterator[str]:
    yield "number of parameters: 0.20M"
    for at in range(0, 1001, 10):
        yield f"step {at} | loss 2.{at} | step time {at}.42ms"
        if at % 500 == 0 and at:
            yield f"step {at} train loss: 2.{at} test loss: 2.{at}"


def megatron_deepspeed() -> Iterator[str]:
    """Both of them, with the times that each prints, as Argonne's Megatron-DeepSpeed does on Aurora."""
    for at in range(1, 30):
        time, head = f"2024-06-21 10:{at:02d}:42", "[INFO] [logging.py:96:log_dist] [Rank 0]"
        yield f"[{time},167] {head} time (ms) | optimizer_allgather: 1867.64 | optimizer_step: 46.07"
        yield f"[{time},167] {head} step={at}, skipped=0, lr=[1.8e-08, 1.8e-08], mom=[(0.9, 0.999), (0.9, 0.999)]"
        yield f"[{time},168] {head} time (ms) | fwd: 25341.72 | bwd: 77707.38 | bwd_allreduce: 1955.54 | step: 22{at}.38"
        yield f"[{time}][INFO][training:1609] -  iteration={at:8d}/  317892 | consumed_samples={at * 256:12d} | lm loss=11.20 |"
        yield f"[Rank 0] (after {at} iterations) memory (MB) | allocated: 4866.666015625 | max allocated: 14024.81396484375"


def megatron_dated() -> Iterator[str]:
    """With torchrun's label and the time, as FlagScale prints it."""
    for at in range(3, 40):
        yield (
            f"[default0]: [2026-09-11 12:{at:02d}:52.987995] iteration {at:8d}/ 7629408 | consumed samples: {at * 32:12d} | "
            "elapsed time per iteration (ms): 24379.9 | throughput per GPU (TFLOP/s/GPU): 26.8 | lm loss: 1.107468E+01 |"
        )


@pytest.mark.parametrize(
    ("program", "first", "last"),
    [
        (nanogpt, 0, 990),
        (trainer, 0, 3999),
        (lightning, 0, 300),
        (keras, 1, 300),
        (megatron, 100, 2900),
        (deepspeed, 10, 490),
        (ranks, 1000, 1099),
        (language_model, 10, 526),
        (megatron_deepspeed, 1, 29),
        (megatron_dated, 3, 39),
        (imagenet, 1, 602),
        (char_rnn, 1, 89),
        (llama2, 0, 390),
        (mingpt, 0, 290),
        (makemore, 0, 1000),
    ],
)
def test_the_step_of_a_known_program_is_found(program: object, first: int, last: int) -> None:
    reader = read(program())  # type: ignore[operator]
    assert (reader.first, reader.step) == (first, last)


def slurm() -> Iterator[str]:
    for at in range(1, 20):
        yield f"slurmstepd: error: *** STEP {at}.0 ON node-0 CANCELLED AT 2026-05-01T10:00:{at:02d} ***"
        yield f"srun: Job step {at} aborted"
        yield f"2026-11-22T01:02:{at:02d}Z ftsupervise: attempt {at}, at step {at}"


def epochs_named_iteration() -> Iterator[str]:
    for epoch in range(1, 8):
        yield f"Iteration {epoch}"
        for at in range(1, 60):
            yield f"batch step {at} loss 0.{at}"


def configuration() -> Iterator[str]:
    for _ in range(3):
        yield from (
            "max_iters: 100000",
            "warmup_iters=100",
            "global_step: 100",
            "'logging_steps': 500",
            "total steps 900",
        )
        yield "  Total optimization steps = 281,400"


def other_bars() -> Iterator[str]:
    for at in range(0, 101, 2):
        yield bar(at, 100)
    for name in ("Running tokenizer on dataset: ", "Downloading shards: ", "Loading checkpoint shards: ", "Map: "):
        for at in range(0, 1001, 50):
            yield bar(at, 1000, name)


def a_recipe() -> Iterator[str]:
    yield from (f"Step {at}/8 : {word}" for at, word in enumerate(("FROM a", "RUN b", "COPY c"), 1))
    yield from (f"step {at}: {word}" for at, word in enumerate(("read", "sort", "merge", "write", "check"), 1))


def a_bar_that_broke_off() -> Iterator[str]:
    """It read the data; the training prints losses, and no step."""
    yield from (bar(at, 100) for at in range(0, 61, 5))
    yield from (f"[worker] loss 2.{at}" for at in range(20))


def evaluation() -> Iterator[str]:
    for at in range(100):
        yield f"eval step {at} loss 2.{at}"
        yield f"[validation] iter {at}"
        yield f"2026-05-01 10:{at % 60:02d}:00 INFO 45ms/step loss 2.{at}"


STRANGE = (slurm, configuration, other_bars, a_bar_that_broke_off, a_recipe, evaluation)


def test_a_bar_that_grows_with_the_losses_beside_it_is_that_of_the_training() -> None:
    reader = read(line for at in range(0, 50, 5) for line in (bar(at, 1000), f"{{'loss': 2.{at}, 'epoch': 0.1}}"))
    assert (reader.first, reader.step) == (0, 45)


@pytest.mark.parametrize("program", STRANGE)
def test_what_is_no_step_is_not_shown_as_one(program: object) -> None:
    reader = StepReader()
    for line in program():  # type: ignore[operator]
        reader.feed(line.encode() + b"\n")
        assert reader.step is None, line


def test_a_count_that_begins_anew_with_each_epoch_is_shown_only_while_it_is_true() -> None:
    reader, anew = StepReader(), False
    for line in epochs_named_iteration():
        reader.feed(line.encode() + b"\n")
        anew = anew or (line.startswith("batch step 1 loss") and reader.seen > 2)
        assert not anew or reader.step is None, line
    assert anew


def steps_of_ranks(number: int, behind: int, last: int) -> Iterator[int]:
    """The steps that ranks print which wait for each other only now and then, in the order in which they come."""
    dice, at = random.Random(number * 100 + behind), [0] * number
    while min(at) < last:
        rank = dice.choice([one for one in range(number) if at[one] - min(at) <= behind])
        yield at[rank]
        at[rank] += 1


@pytest.mark.parametrize(("number", "behind"), [(2, 0), (2, 3), (2, 8), (4, 5), (16, 8)])
def test_ranks_that_all_print_the_step_show_the_one_that_the_first_of_them_has_made(number: int, behind: int) -> None:
    reader, furthest = StepReader(), -1
    for step in steps_of_ranks(number, behind, 100):
        reader.feed(f"step {step} loss 2.1\n".encode())
        furthest = max(furthest, step)
        assert reader.step in (None, furthest)
    assert reader.step == furthest


@pytest.mark.parametrize("length", [5, 8, 12, 20, 21, 30])
def test_a_short_count_that_begins_anew_is_not_taken_for_a_rank_that_is_behind(length: int) -> None:
    reader = read(f"step {at} loss 2.1" for _ in range(3) for at in range(1, length + 1))
    for _ in range(10):
        for at in range(1, length + 1):
            reader.feed(f"step {at} loss 2.1\n".encode())
            assert reader.step is None


def test_a_count_of_its_epoch_is_no_step_where_the_run_goes_on_in_a_later_epoch() -> None:
    """As PyTorch's minGPT with DDP prints it: the first is the step, the second only of epoch 4."""
    line = "[RANK0] Epoch {} | Iter {} | Train Loss 3.{}"
    assert read(line.format(1, at, at) for at in range(0, 900, 100)).step == 800
    assert read(line.format(4, at, at) for at in range(0, 900, 100)).step is None
    assert read(line.format(4, at, at) for at in range(40_000, 40_900, 100)).step == 40_800


@pytest.mark.parametrize(
    ("before", "begins"), [("Epoch {}/15: ", 1), ("Train epoch {}: ", 0), ("[Epoch {} of 15] ours: ", 1)]
)
def test_a_bar_with_its_loss_counts_within_the_epoch_that_it_names_and_never_reaches_the_end_of_the_run(
    before: str, begins: int
) -> None:
    reader = StepReader()
    for epoch in range(begins, begins + 3):
        for at in range(1, 41):
            reader.feed(bar(at, 40, before.format(epoch), ", loss=0.12").encode() + b"\n")
            if (epoch, at) > (begins, 4):
                assert (reader.step, reader.total) == ((epoch - begins) * 40 + at, None)
        for at in range(1, 11):  # its validation, with a loss too
            reader.feed(bar(at, 10, f"Valid epoch {epoch}: ", ", loss=0.2").encode() + b"\n")
    goes_on = read(bar(at, 40, before.format(begins + 9), ", loss=0.12") for at in range(1, 9))
    assert (goes_on.first, goes_on.step) == (361, 368)
    assert read(bar(at, 40, before.format(begins)) for at in range(41)).step is None, "nothing says that it trains"


def test_a_bar_below_a_line_that_names_its_epoch_does_not_say_how_much_of_the_run_is_done() -> None:
    lines = [bar(at, 40, after=", loss=0.12") for at in range(1, 41)]
    assert (read(lines).step, read(lines).total) == (40, 40)
    below = read(["Epoch 1 of 15", *lines])
    assert (below.step, below.total) == (40, None)
    announced = read(["Continuing from epoch 3", "Total optimization steps = 40", *lines])
    assert (announced.step, announced.total) == (40, 40)


def test_two_hundred_hours_of_logs_show_no_wrong_step() -> None:
    """A line a minute and more, of trainings with other things in between: each step shown was printed as one before."""
    dice = random.Random(27)
    noise = [line for program in STRANGE for line in program()]
    for made in range(20):  # ten hours each
        reader, step, size = StepReader(), dice.choice((0, 5, 1690, 100_000)), dice.choice((1, 10, 100))
        shown = {
            0: "iter {}: loss {:.4f}, time 12.3ms",
            1: "step {} | loss {:.3f}",
            2: "{{'global_step': {}, 'loss': {:.2f}}}",
        }
        form = shown[made % 3]
        printed: set[int] = set()
        for _ in range(600):
            step += size
            printed.add(step)
            reader.feed(form.format(step, dice.random()).encode() + b"\n")
            for line in dice.sample(noise, dice.randrange(4)):
                reader.feed(line.encode() + b"\n")
            assert reader.step is None or reader.step == step, (form, step, reader.step)
        assert reader.step == step


def test_the_first_step_was_made_when_its_line_came_and_not_when_it_was_known_for_a_step() -> None:
    """GloVe prints a line in two minutes: the time of its first three steps is no time of the start."""
    reader = StepReader()
    for number in range(1, 6):
        reader.feed(f"11/26/26 - 03:56.13PM, iter: {number:03d}, cost: 0.034942\n".encode(), now=1000.0 + 120 * number)
        assert reader.first_at == (1120.0 if number >= 4 else None)
    assert (reader.first, reader.step) == (1, 5)


def test_a_jump_far_away_is_not_the_step() -> None:
    reader = read([*(f"step {at} loss 2.1" for at in range(100)), "step 281400 loss 2.1"])
    assert reader.step == 99


@given(st.lists(st.binary(max_size=300), max_size=50))
def test_nothing_in_a_log_makes_the_step_reader_fail(pieces: list[bytes]) -> None:
    reader = StepReader()
    for piece in pieces:
        reader.feed(piece)
