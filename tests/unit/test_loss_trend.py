"""Which losses diverge? Curves as trainings have them, with their noise, warm-ups, spikes and restarts of the learning rate."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator

import pytest

from ftsupervise.guard.loss_policy import LossRise, LossTrend

Curve = Callable[[int, random.Random], float]


def language_model(step: int, chance: random.Random) -> float:
    """Cross entropy from 11 down to about 2.7, a power law after the warm-up, with the noise of batches."""
    return 2.4 + 8.6 / math.pow(1 + step / 40, 0.7) + chance.gauss(0, 0.06)


def pictures(step: int, chance: random.Random) -> float:
    """A classifier that learns its training set by heart: from 2.3 to 0.05."""
    return 0.04 + 2.3 * math.exp(-step / 600) + abs(chance.gauss(0, 0.02))


def heavy_tailed(step: int, chance: random.Random) -> float:
    """A loss whose single batches jump to many times the usual."""
    return 1.0 / (1 + step / 300) + 0.2 * chance.paretovariate(1.5)


def spike(of: Curve, at: int, high: float, lasts: float) -> Curve:
    """Up at once, and back with ``lasts`` steps to a third."""
    return lambda step, chance: of(step, chance) + (high * math.exp(-(step - at) / lasts) if step >= at else 0.0)


def learning_rate_restarts(step: int, chance: random.Random) -> float:
    """Cosine with warm restarts each 1500 steps: the loss goes up a good deal, stays there, and comes down late."""
    cycle = step % 1500 / 1500
    floor = 0.05 + 0.45 * (1 + math.cos(math.pi * cycle)) / 2
    return floor + 2.3 * math.exp(-step / 300) + abs(chance.gauss(0, 0.03))


def warm_up_hump(step: int, chance: random.Random) -> float:
    """The loss falls, rises again while the learning rate is warmed up, and falls for good."""
    return language_model(step, chance) + 1.5 * math.exp(-(((step - 300) / 120) ** 2))


def diverges(of: Curve, at: int, to: float, within: float) -> Curve:
    return lambda step, chance: (
        of(step, chance) + ((to - of(step, chance)) * (1 - math.exp(-(step - at) / within)) if step >= at else 0.0)
    )


def rises(
    of: Curve, steps: int = 6000, patience: int = 200, seed: int = 1, first: float | None = None
) -> list[LossRise]:
    chance, trend = random.Random(seed), LossTrend(patience, lambda: first)
    return [one for step in range(steps) if (one := trend.add(of(step, chance), step)) is not None]


HARMLESS: dict[str, Curve] = {
    "a language model": language_model,
    "pictures": pictures,
    "heavy tails": heavy_tailed,
    "a spike that recovers at once": spike(language_model, 3000, 5.0, 10),
    "a spike that takes 300 steps to recover": spike(language_model, 3000, 4.0, 300),
    "a hump in the warm-up": warm_up_hump,
    "restarts of the learning rate": learning_rate_restarts,
    "a constant": lambda step, chance: 1.0,
    "a loss below zero": lambda step, chance: -step / 1000 + chance.gauss(0, 0.2),
    "a game that is lost again and again": lambda step, chance: math.sin(step / 200) + chance.gauss(0, 0.3),
}


@pytest.mark.fault("A spike of the loss that recovers, a warm-up, a restart of the learning rate", "nothing")
@pytest.mark.parametrize("name", HARMLESS)
def test_a_loss_that_is_only_restless_never_diverges(name: str) -> None:
    for seed in range(4):
        assert rises(HARMLESS[name], seed=seed) == [], f"seed {seed}"


@pytest.mark.parametrize(
    ("of", "to", "within"),
    [(language_model, 7.5, 30), (language_model, 6.0, 200), (language_model, 1e6, 50), (pictures, 2.3, 50)],
)
def test_a_loss_that_goes_up_and_stays_there_diverges_since_where_it_began(of: Curve, to: float, within: float) -> None:
    for seed in range(4):
        (found, *_) = rises(diverges(of, 3000, to, within), seed=seed)
        assert 2990 <= found.since <= 3000 + within, f"seed {seed}"
        assert found.now > 1.5 * found.before


def test_it_is_said_within_the_patience_and_once() -> None:
    chance, trend = random.Random(3), LossTrend(200)
    curve = diverges(language_model, 3000, 8.0, 20)
    said = [step for step in range(5000) if trend.add(curve(step, chance), step) is not None]
    assert len(said) == 1 and 3180 <= said[0] <= 3260


def test_a_longer_patience_lets_a_slower_spike_recover() -> None:
    slow = spike(language_model, 3000, 5.0, 1500)
    assert rises(slow, patience=200) and not rises(slow, patience=2000, steps=9000)


def test_a_process_that_began_late_asks_what_the_run_gained_before_it_judges() -> None:
    def restart(
        step: int, chance: random.Random
    ) -> float:  # from a checkpoint: the loss is 0.05, then the rate is raised
        return (0.05 if step < 1000 else 0.45) + abs(chance.gauss(0, 0.02))

    assert rises(restart, 2000), "nothing else is known of the run"
    assert not rises(restart, 2000, first=2.3), "0.45 is little beside the 2.3 that it came from"


def test_the_first_loss_is_asked_for_once_and_only_when_it_matters() -> None:
    def ask() -> Iterator[float | None]:
        yield None
        pytest.fail("asked twice")

    source, chance = ask(), random.Random(1)
    trend = LossTrend(200, lambda: next(source))
    curve = diverges(language_model, 1500, 9.0, 10)
    for step in range(4000):
        trend.add(curve(step, chance), step)


def test_losses_that_are_reported_rarely_are_judged_one_by_one() -> None:
    curve = diverges(language_model, 3000, 8.0, 20)
    chance, trend = random.Random(5), LossTrend(16)
    said = [one for step in range(0, 6000, 50) if (one := trend.add(curve(step, chance), step)) is not None]
    assert len(said) == 1 and 3000 <= said[0].since <= 3100
