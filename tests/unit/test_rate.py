"""Bytes pass at the rate that was set, however many threads send them."""

from __future__ import annotations

import threading

import pytest

from ftsupervise.host.rate import RateLimit


class Clock:
    def __init__(self) -> None:
        self.now = 100.0
        self._lock = threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


def test_a_thousand_pieces_take_their_time() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, clock=clock, sleep=clock.sleep)
    for _ in range(1000):
        limit.take(10)
    assert clock.now - 100.0 == pytest.approx(10.0, abs=0.2)


def test_a_piece_larger_than_a_second_passes_and_the_next_one_waits_for_it() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, clock=clock, sleep=clock.sleep)
    limit.take(5000)
    limit.take(1)
    assert clock.now - 100.0 == pytest.approx(5.0, abs=0.2)


def test_a_pause_saves_up_no_more_than_a_moment() -> None:
    clock = Clock()
    limit = RateLimit(1000.0, clock=clock, sleep=clock.sleep)
    clock.now += 3600.0
    began = clock.now
    limit.take(2000)
    assert clock.now - began == pytest.approx(2.0, abs=0.2)


def test_without_a_rate_nothing_waits() -> None:
    clock = Clock()
    RateLimit(None, clock=clock, sleep=clock.sleep).take(10**15)
    assert clock.now == 100.0


def test_a_rate_of_nothing_is_refused() -> None:
    with pytest.raises(ValueError, match="lets nothing pass"):
        RateLimit(0)
