"""A call that may hang is waited for with a bound, and none is begun behind it."""

from __future__ import annotations

import threading
import time

import pytest

from ftsupervise.host import addresses
from ftsupervise.host.in_time import OneAtATime, in_time


def test_what_takes_too_long_is_none_and_an_error_in_time_is_raised() -> None:
    assert in_time(lambda: 5, 10) == 5
    assert in_time(threading.Event().wait, 0.01) is None
    with pytest.raises(OSError, match="no such"):
        in_time(lambda: fail(), 10)


def test_a_result_that_comes_too_late_is_handed_over_to_be_undone_and_one_in_time_is_not() -> None:
    go, undone, after = threading.Event(), list[int](), threading.Event()

    def slow() -> int:
        go.wait(60)
        return 7

    def undo(result: int) -> None:
        undone.append(result)
        after.set()

    assert in_time(lambda: 5, 10, late=undo) == 5
    assert in_time(slow, 0.01, late=undo) is None
    assert not undone
    go.set()
    assert after.wait(60)
    assert undone == [7]
    with pytest.raises(OSError, match="no such"):
        in_time(lambda: fail(), 10, late=undo)


def test_a_slow_call_is_not_made_twice_and_its_result_is_that_of_a_later_one() -> None:
    begun, go, turn = list[int](), threading.Event(), OneAtATime[int]()

    def slow() -> int:
        begun.append(len(begun))
        go.wait(60)
        return begun[-1]

    assert [turn(slow, 0.01), turn(slow, 0.01)] == [None, None]
    go.set()
    assert turn(slow, 60) == 0, "the first call, which has ended now"
    assert turn(slow, 60) == 1
    assert begun == [0, 1]


def test_without_a_thread_for_it_nothing_is_known_and_a_later_call_is_made() -> None:
    turn, usual = OneAtATime[int](), threading.stack_size(1 << 46)  # more than there are addresses for
    try:
        assert turn(lambda: 5, 60) is None
    finally:
        threading.stack_size(usual)
    assert turn(lambda: 6, 60) == 6


def fail() -> int:
    raise OSError("no such thing")


def test_four_names_and_a_slow_name_server_cost_one_bound_and_not_four() -> None:
    silent = threading.Event()
    names = addresses.Names(lambda name: str(silent.wait(60)))
    try:
        began = time.monotonic()
        addresses.own_address([f"node-{number}" for number in range(4)], names)
        assert time.monotonic() - began < 4.0
        began = time.monotonic()
        addresses.own_address([f"node-{number}" for number in range(4)], names)
        assert time.monotonic() - began < 1.0, "nobody waits for them again"
    finally:
        silent.set()
