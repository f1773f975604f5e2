"""The rank for which the others wait, told from the states that the agents report. The ranks are played."""

from __future__ import annotations

import random
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from itertools import pairwise

import pytest

from ftsupervise.ranks.straggler import StragglerDetector, pause_after
from ftsupervise.rundir.progress import COMES_LAST, WORKS, Straggler
from ftsupervise.truth import RankState

NOW = datetime(2026, 11, 28, 3, 0, tzinfo=timezone.utc)
EVERY = pause_after(0.0)  # seconds between two looks


class Training:
    """Ranks that work and then meet, step after step. ``takes(rank, step)``: seconds of its own work."""

    def __init__(self, world: int, takes: Callable[[int, int], float], *, before: bool, spins: bool = False) -> None:
        """``before``: the loop reports its step before the ranks meet, and not after; ``spins``: while it waits."""
        self.world, self.takes, self.before, self.spins = world, takes, before, spins
        self.phases: Callable[[int, float], str] = lambda rank, now: "train"
        self.step, self.begun = 0, 0.0

    def states(self, now: float) -> list[RankState]:
        while now >= (met := self.begun + max(self.takes(rank, self.step) for rank in range(self.world))):
            self.begun, self.step = met, self.step + 1
        return [self._state(rank, now) for rank in range(self.world)]

    def _state(self, rank: int, now: float) -> RankState:
        works_until = self.begun + self.takes(rank, self.step)
        works = now < works_until
        made, at = self.step, self.begun
        if self.before:  # the last one was reported at the end of the work
            made, at = (self.step, works_until) if not works else (self.step - 1, self.begun - self._waited(rank))
        state = "R" if works or self.spins else "S"
        return RankState(rank, f"node-{rank // 4}", made, self.phases(rank, now), at, at, now, 1000 + rank, state)

    def _waited(self, rank: int) -> float:
        last = [self.takes(one, self.step - 1) for one in range(self.world)]
        return max(last) - last[rank]


def watched(training: Training, minutes: float = 10.0, price: float | None = None) -> Straggler | None:
    detector, now = StragglerDetector(price=price), 0.0
    while now < minutes * 60:
        now += EVERY + 0.37 * (now % 3)
        detector.look(training.states(now), now)
    return detector.found(now, NOW)


def even(jitter: float, seed: int = 1) -> Callable[[int, int], float]:
    return lambda rank, step: 1.0 + jitter * random.Random(f"{seed} {rank} {step}").random()


def slow(who: int, factor: float, jitter: float = 0.05) -> Callable[[int, int], float]:
    usual = even(jitter)
    return lambda rank, step: usual(rank, step) * (factor if rank == who else 1.0)


@pytest.mark.parametrize("before", [True, False])
def test_a_rank_that_is_twice_as_slow_is_named_with_what_it_costs(before: bool) -> None:
    found = watched(Training(8, slow(5, 2.0), before=before))
    assert found is not None and (found.ranks, found.node, found.of) == ((5,), "node-1", 8)
    assert 0.35 < found.cost < 0.6
    assert found.how == (COMES_LAST if before else WORKS) or before
    assert NOW - timedelta(minutes=10) <= found.since < NOW - timedelta(minutes=4)
    assert watched(Training(8, slow(5, 2.0), before=before), minutes=3) is not None


def test_ranks_that_spin_while_they_wait_tell_only_by_their_arrival() -> None:
    found = watched(Training(8, slow(5, 1.5), before=True, spins=True), price=2.0)
    assert found is not None and (found.ranks, found.how) == ((5,), COMES_LAST)
    assert "rank 5 on node-1 is slow: it comes last at each step, which costs 3" in found.words()
    assert found.words().endswith(f"of all 8 ranks, {found.cost * 8 * 24 * 2:,.2f} a day at the price given")
    assert watched(Training(8, slow(5, 1.5), before=False, spins=True)) is None


def test_all_ranks_of_one_slow_node_are_named_together() -> None:
    usual = even(0.05)
    takes = lambda rank, step: usual(rank, step) * (1.6 if rank // 4 == 7 else 1.0)  # noqa: E731
    found = watched(Training(48, takes, before=True), minutes=3)
    assert found is not None and (found.ranks, found.node) == ((28, 29, 30, 31), "node-7")
    assert found.words().startswith("ranks 28-31 on node-7 are slow: they ")


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("before", [True, False])
def test_jitter_names_nobody(seed: int, before: bool) -> None:
    for jitter in (0.0, 0.1, 0.5, 3.0):
        assert watched(Training(6, even(jitter, seed), before=before), minutes=6) is None, jitter


def test_a_rank_that_is_slow_now_and_then_is_no_straggler() -> None:
    takes = lambda rank, step: 1.0 + (9.0 if rank == 2 and not step % 40 else 0.0)  # noqa: E731
    assert watched(Training(8, takes, before=True), minutes=15) is None


def test_half_of_the_ranks_are_not_stragglers() -> None:
    takes = lambda rank, step: 2.0 if rank % 2 else 1.0  # noqa: E731
    assert watched(Training(8, takes, before=True), minutes=6) is None


def test_a_rank_that_waits_for_the_slow_one_in_a_broadcast_and_comes_late_as_well_hides_it_not() -> None:
    takes = lambda rank, step: {6: 2.0, 7: 1.2}.get(rank, 1.0)  # noqa: E731
    found = watched(Training(8, takes, before=True, spins=True), minutes=3)
    assert found is not None and found.ranks == (6,) and 0.35 < found.cost < 0.45
    two = lambda rank, step: {6: 2.0, 7: 1.8}.get(rank, 1.0)  # noqa: E731
    assert watched(Training(8, two, before=True, spins=True), minutes=6) is None


@pytest.mark.parametrize("phase", ["save", "eval"])
def test_a_phase_of_one_rank_counts_for_none(phase: str) -> None:
    """Rank 0 saves for half of the time, and the others wait for it."""
    training = Training(8, lambda rank, step: 8.0 if rank == 0 and step % 8 == 7 else 1.0, before=True)
    training.phases = lambda rank, now: phase if rank == 0 and training.step % 8 == 7 else "train"
    assert watched(training, minutes=15) is None


def test_the_first_steps_count_for_none() -> None:
    takes = lambda rank, step: (60.0 if step < 9 else 1.0) * (2.0 if rank == 3 and step < 9 else 1.0)  # noqa: E731
    assert watched(Training(8, takes, before=True), minutes=10) is None


def test_it_is_told_no_more_when_it_is_as_fast_as_the_others_again() -> None:
    one = Training(8, lambda rank, step: 2.0 if rank == 5 and step < 400 else 1.0, before=True)
    detector, told = StragglerDetector(), []
    for at in range(1200):
        now = at * EVERY
        detector.look(one.states(now), now)
        told.append(detector.found(now, NOW) is not None)
    assert told[120] and not told[-1]
    assert sum(before != after for before, after in pairwise(told)) == 2


@pytest.mark.parametrize("ages", [(0.0, 0.9), (0.9, 0.0), (0.1, 0.6), (0.3, 2.4)])
def test_a_slow_rank_is_named_as_soon_where_the_reports_of_two_nodes_are_of_different_age(
    ages: tuple[float, float],
) -> None:
    """Looks, reports and steps of 2.3 s keep time with each other: always the same half of the ranks is a step behind."""
    training, detector, named = Training(8, slow(6, 2.0, 0.0), before=True, spins=True), StragglerDetector(), 0.0
    training.takes = lambda rank, step: 2.3 if rank == 6 else 1.15
    reports: list[list[RankState]] = []
    for tenth in range(1500):
        now = tenth / 10
        reports.append(training.states(now))
        if tenth % 10 == 0 and tenth >= 30:
            found = [reports[tenth - round(10 * ages[rank // 4])][rank] for rank in range(8)]
            detector.look(found, now)
            named = named or (now if detector.found(now, NOW) is not None else 0.0)
    last = detector.found(150.0, NOW)
    assert last is not None and last.ranks == (6,) and 0.4 < last.cost < 0.6
    assert named < 110


def test_two_ranks_are_too_few_to_tell() -> None:
    assert watched(Training(2, slow(1, 3.0), before=True)) is None


def test_steps_of_a_minute_are_told_too() -> None:
    found = watched(Training(8, lambda rank, step: 90.0 if rank == 6 else 60.0, before=True), minutes=120)
    assert found is not None and found.ranks == (6,) and 0.2 < found.cost < 0.4


def test_a_look_at_a_hundred_thousand_ranks_is_followed_by_a_pause() -> None:
    """Looks take a fiftieth of the time at most; where that allows it they come once a second, as often as reports do."""
    assert pause_after(0.1) == pytest.approx(5.0)
    assert pause_after(0.001) == 1.0
