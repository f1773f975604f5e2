"""When final losses agree within the noise of seeds, and that the benchmark's check can fail. Pure."""

from __future__ import annotations

import random
import shlex

import pytest

from benchmarks.replicas import timeline
from benchmarks.replicas.agreement import agreement, permutation_test
from benchmarks.replicas.losses import LOOPS, Learned, arguments, problems, table
from tests.manual.blocks import marked


def test_the_same_seeds_without_a_difference_agree() -> None:
    losses = [0.10, 0.11, 0.12, 0.13, 0.14]
    found = agreement(losses, [one + 0.001 for one in losses])
    assert found.outside == "" and found.p > 0.5 and found.difference == pytest.approx(0.001)


def test_a_difference_that_the_seeds_do_not_explain_is_outside() -> None:
    losses = [0.10, 0.11, 0.12, 0.13, 0.14]
    assert "chance alone" in agreement(losses, [one + 0.1 for one in losses]).outside
    assert "more than the spread" in agreement(losses, [one + 0.028 for one in losses]).outside


def test_the_permutation_test_is_exact_for_few_seeds() -> None:
    assert permutation_test([1, 2, 3, 4, 5], [6, 7, 8, 9, 10]) == pytest.approx(2 / 252)
    assert permutation_test([1, 2], [1, 2]) == 1


def test_by_chance_it_is_outside_about_as_often_as_it_says() -> None:
    draw = random.Random(1)
    small = sum(
        permutation_test([draw.gauss(0, 1) for _ in range(5)], [draw.gauss(0, 1) for _ in range(5)]) < 0.05
        for _ in range(300)
    )
    assert 4 <= small <= 28, "0.048 of 300 is 14"


def test_a_check_that_could_not_fail_is_refused() -> None:
    with pytest.raises(SystemExit):
        arguments(["--check", "--seeds", "4"])


def test_one_seed_is_refused() -> None:
    with pytest.raises(ValueError, match="two seeds"):
        agreement([0.1], [0.1])


def learned(loss: float, kills: int, **more: object) -> Learned:
    return Learned("ddp", 0, loss, loss + 0.01, kills, 0.1, 0)._replace(**more)  # type: ignore[arg-type]


def test_the_check_fails_for_other_losses_for_other_weights_and_for_what_no_batch_explains() -> None:
    fine = [learned(loss, kills, off=1e-6) for loss in (0.10, 0.11, 0.12, 0.13, 0.14) for kills in (0, 4)]
    assert problems(fine) == [] and "FT-DDP" in table(fine)
    assert "outside the noise" in problems([one._replace(loss=one.loss + bool(one.kills)) for one in fine])[0]
    assert "different weights" in problems([*fine[:-1], fine[-1]._replace(differ=1)])[0]
    assert "same batches" in problems([*fine[:-1], fine[-1]._replace(off=0.01)])[0]


def test_the_commands_its_page_shows_are_taken() -> None:
    for block in marked("run", "replica-losses"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            assert words[:2] == ["python", "benchmarks/replicas/losses.py"]
            assert set(arguments(words[2:]).loops.split(",")) <= set(LOOPS)
    for block in marked("run", "replica-timeline"):
        words = shlex.split(block.text)
        assert words[:2] == ["python", "benchmarks/replicas/timeline.py"]
        assert timeline.arguments(words[2:]).kills == 10
