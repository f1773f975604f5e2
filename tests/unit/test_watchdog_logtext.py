"""Steps and losses in whatever a job writes."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.printable import log_line
from ftsupervise.rundir.log_lines import last_step, lines, numbers, whole
from ftsupervise.watch.watchdogs.loss import judge


@pytest.mark.parametrize(
    ("line", "step"),
    [
        (b"step 12 | loss 2.1", 12),
        (b"Step: 00120/5000", 120),
        (b"{'global_step': 77, 'loss': 2.1}", 77),
        (b" iteration     1000/  500000 | consumed samples", 1000),
        (b"global_step=31", 31),
        (b"[iter 8] lr 1e-4", 8),
        (b"\x1b[32mstep\x1b[0m \x1b[1m45\x1b[0m", 45),
        (b"\xff\xfe\x00\x01binary step 9\x00", 9),
        (b"40%|####  | step 400\r41%|####  | step 410\r", 410),
        (b"no newline at the end, step 3", 3),
        (b"max_steps: 1000", None),
        (b"num_train_steps=9000, warmup steps 100, gradient_accumulation_steps = 8", None),
        (b"train_iters ..................... 500000", None),
        (b"time per step: 3 s, step 3.5 s", None),
        (b"step=8, max_steps=1000", 8),
        (b"Steps: 12/100, step 12.0", 12),
        (b"footstep 5, stepping, loss 2.0", None),
        (b"ftsupervise: asked at step 99", None),
        (b"2026-11-22T01:02:03Z ftsupervise: asked at step 99", None),
        (b"", None),
    ],
)
def test_the_usual_forms_of_a_step(line: bytes, step: int | None) -> None:
    assert last_step(line) == step


def test_our_own_lines_are_no_sign_of_life() -> None:
    assert list(lines(b"ftsupervise: attempt 3\r\n\x1b[0m\n  \n")) == []
    assert list(lines(log_line("attempt 3, after step 9").encode())) == []


@pytest.mark.parametrize(
    ("line", "loss"),
    [
        (b"lm loss: 2.345678E+00 | grad norm", [2.345678]),
        (b"{'loss': 1.5, 'lr': 3}", [1.5]),
        (b"train_loss=nan", [math.nan]),
        (b"loss -inf", [-math.inf]),
        (b"glossary 5", []),
        (b"Loss info: none", []),
        (b"loss nano 5", []),
        (b"eval_loss: 2.9, val loss 3.1, eval/loss: 3, aux_loss=0.1", []),
        (b"step 5 loss 2.5 eval_loss 9.5", [2.5]),
    ],
)
def test_the_usual_forms_of_a_loss(line: bytes, loss: list[float]) -> None:
    assert str(numbers(line)) == str(loss)


def test_a_step_cut_in_two_is_read_again_as_one() -> None:
    first, second = b"step 1\nstep 12", b"34\n"
    go_on = whole(first, 0)
    assert last_step((first + second)[go_on:]) == 1234


def test_a_line_without_an_end_is_not_kept_for_ever() -> None:
    assert whole(b"x" * 100_000, 7) == 7 + 100_000 - 4096


@given(st.binary(max_size=20_000))
def test_nothing_in_a_log_makes_the_reader_fail(data: bytes) -> None:
    last_step(data)
    numbers(data)
    assert all(len(line) <= 4096 for line in lines(data))
    assert 0 <= whole(data, 0) <= len(data)


def test_a_nan_is_told_and_a_recovered_one_is_over() -> None:
    assert judge([2.0] * 30, [math.nan], 2.0).broken
    assert judge([2.0] * 30, [math.inf, math.inf], None).broken
    assert not judge([2.0] * 30, [math.nan, 2.0, 2.0], 2.0).bad


def test_one_bad_batch_is_no_spike_and_a_new_level_is() -> None:
    assert not judge([2.0] * 30, [9.0], 2.0).bad
    assert judge([2.0] * 30, [9.0, 9.0, 8.0], 2.0).bad
    assert not judge([2.0] * 30, [9.0, 9.0, 8.0], None).bad
