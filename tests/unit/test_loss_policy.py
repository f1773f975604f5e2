"""What follows from a loss that is no number, or that diverges, by the settings."""

from __future__ import annotations

import math

import pytest

from ftsupervise.guard.loss_policy import LossAction, LossPolicy, LossWatch, loss_policy
from ftsupervise.truth import DIVERGES, NOT_A_NUMBER, LossTrouble


class Told:
    def __init__(self, policy: LossPolicy = LossPolicy(), rank: int = 0) -> None:  # noqa: B008 - a frozen value
        self.warnings: list[str] = []
        self.watch = LossWatch(policy, rank, self.warnings.append, lambda: None)

    def take(self, *losses: float, first: int = 1) -> list[bool]:
        return [self.watch.take(loss, step) for step, loss in enumerate(losses, first)]


def test_a_loss_that_is_no_number_is_warned_of_once_and_the_state_is_not_sound_until_it_is_one_again() -> None:
    told = Told()
    assert told.take(2.0, math.nan, math.nan, 1.9) == [False, True, False, False]
    assert told.watch.trouble is None and told.watch.sound
    assert told.warnings[0].startswith("loss is not a number: nan at step 2") and len(told.warnings) == 2
    told.take(math.inf, first=5)
    assert not told.watch.sound


def test_a_loss_that_stays_no_number_is_told_to_the_ledger_though_nothing_stops() -> None:
    told = Told()
    told.take(2.0, *[math.nan] * 5)
    assert told.watch.trouble == LossTrouble(NOT_A_NUMBER, 2, 6, 0, "nan at step 6, since step 2", "warn")
    told.take(1.0, first=7)
    assert told.watch.trouble is None


@pytest.mark.parametrize("action", [LossAction.STOP, LossAction.RESUME])
def test_it_stops_at_once_where_the_settings_say_so_and_a_number_after_it_changes_nothing(action: LossAction) -> None:
    told = Told(LossPolicy(nonfinite=action), rank=3)
    assert told.take(2.0, -math.inf, math.nan, 1.9) == [False, True, False, False]
    assert told.watch.trouble == LossTrouble(NOT_A_NUMBER, 2, 2, 3, "-inf at step 2", action.value)


def test_so_many_in_a_row_are_tolerated_and_not_one_more() -> None:
    told = Told(LossPolicy(nonfinite=LossAction.STOP, tolerate=2))
    told.take(1.0, math.nan, math.nan, 1.0, math.nan, math.nan)
    assert told.watch.trouble is None
    told.take(math.nan, first=7)
    assert told.watch.trouble is not None and (told.watch.trouble.since, told.watch.trouble.step) == (5, 7)


def test_a_loss_that_diverges_is_warned_of_or_stops_or_neither() -> None:
    curve = [2.0] * 32 + [9.0] * 16
    warned, stopped = Told(LossPolicy(patience=16)), Told(LossPolicy(patience=16, diverging=LossAction.RESUME))
    assert sum(warned.take(*curve)) == 1 and warned.watch.trouble is None and warned.warnings[0].startswith(DIVERGES)
    assert sum(stopped.take(*curve)) == 1 and not stopped.warnings
    assert stopped.watch.trouble == LossTrouble(DIVERGES, 33, 48, 0, "9 at step 48, 2 before step 33", "resume")
    off = Told(LossPolicy(patience=16, diverging=LossAction.OFF))
    assert not any(off.take(*curve)) and not off.warnings


def test_the_step_of_a_loss_is_the_next_one_where_the_loop_gives_it_before_step() -> None:
    watch = LossWatch(LossPolicy(nonfinite=LossAction.STOP), 0, print, lambda: None)
    watch.take(1.0, None)
    watch.take(math.nan, 7)
    assert watch.trouble is not None and watch.trouble.since == 8
    told = LossWatch(LossPolicy(nonfinite=LossAction.STOP), 0, print, lambda: None)
    told.take(math.nan, 7, 3)
    assert told.trouble is not None and told.trouble.since == 3, "the loop reads its losses late, and says so"


def test_the_step_of_a_loss_that_came_before_the_first_step_is_that_of_the_stop() -> None:
    watch = LossWatch(LossPolicy(nonfinite=LossAction.STOP), 0, print, lambda: None)
    watch.take(math.nan, None)
    assert watch.trouble is not None and watch.trouble.since is None
    watch.settle(51)
    settled: LossTrouble = watch.trouble
    assert (settled.since, settled.step) == (51, 51)


def test_a_loss_that_comes_and_goes_does_not_fill_the_log() -> None:
    told = Told()
    told.take(*[1.0, math.nan] * 100)
    assert len(told.warnings) == 10 and told.warnings[-1].endswith("further ones are not reported")


def test_what_is_no_number_of_python_is_refused() -> None:
    with pytest.raises(ValueError, match="much"):
        Told().watch.take("much", 1)  # type: ignore[arg-type]


def test_the_policy_comes_from_the_environment_and_what_is_odd_in_it_is_named() -> None:
    env = {"FTSUPERVISE_GUARD_LOSS_NONFINITE": "resume", "FTSUPERVISE_GUARD_LOSS_PATIENCE": "50"}
    assert loss_policy(env) == (LossPolicy(nonfinite=LossAction.RESUME, patience=50), [])
    odd = {"FTSUPERVISE_GUARD_LOSS_DIVERGING": "panic", "FTSUPERVISE_GUARD_LOSS_TOLERATE": "-1"}
    found, problems = loss_policy(odd)
    assert found == LossPolicy() and len(problems) == 2
