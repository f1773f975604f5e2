"""A call that may hang is waited for with a bound, and none is begun behind it."""

from __future__ import annotations

import subprocess
import sys
import threading
import time

import pytest

from ftsupervise.host import addresses
from ftsupervise.host.in_time import Every, OneAtATime, PendingCall, all_at_once, in_time


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


def test_a_call_that_has_begun_goes_on_beside_and_tells_its_result_or_its_error_to_who_asks() -> None:
    go = threading.Event()
    asked = PendingCall(lambda: go.wait(60))
    assert not asked.is_over()
    assert asked(0.01) is None
    go.set()
    assert asked(60) is True
    assert asked.is_over()
    failed = PendingCall(fail)
    assert failed.is_over(60)
    with pytest.raises(OSError, match="no such"):
        failed(60)


def test_calls_for_several_are_made_at_the_same_time_and_one_that_hangs_costs_the_others_nothing() -> None:
    meet, go = threading.Barrier(3), threading.Event()

    def work(number: int) -> int:
        meet.wait(60)  # each waits for the two others
        return number if number != 1 or go.wait(60) else 0

    try:
        found = all_at_once(work, range(3), 0.5)
        assert found == [0, None, 2]
    finally:
        go.set()
    assert all_at_once(lambda number: number + 1, range(3)) == [1, 2, 3]


def test_a_thread_looks_again_and_again_until_it_is_closed_and_once_more_then() -> None:
    looks, took, three = list[str](), list[float](), threading.Event()

    def look() -> None:
        looks.append("look")
        if len(looks) == 3:
            three.set()

    def pause(seconds: float) -> float:
        took.append(seconds)
        return 0.001

    every = Every(pause, look, "test", first=0.0, last=lambda: looks.append("last"))
    assert three.wait(60)
    every.close(60)
    assert looks[-1] == "last"
    assert looks.count("last") == 1
    assert len(took) == looks.count("look"), "the pause is told from each look, the first one has its own"
    seen = len(looks)
    every.close(60)
    assert len(looks) == seen


def test_what_a_look_raises_is_told_once_and_the_next_look_comes(capfd: pytest.CaptureFixture[str]) -> None:
    """Of a thread that ends nobody hears: the switches would not be looked at any more, and status would say nothing of it."""
    code = """
import threading
from ftsupervise.host.in_time import Every
looks, five = [], threading.Event()
def look():
    looks.append("look")
    if len(looks) == 5:
        five.set()
    raise AttributeError("no such thing" if len(looks) < 3 else "another thing")
every = Every(0.001, look, "looks")
assert five.wait(60)
every.close(60)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
    said = capfd.readouterr().err
    assert said.count("AttributeError: no such thing") == 1 and said.count("AttributeError: another thing") == 1, said


def test_a_look_that_hangs_holds_nobody_who_closes() -> None:
    begun, go = threading.Event(), threading.Event()

    def look() -> None:
        begun.set()
        go.wait(60)

    every = Every(0.0, look, "test")
    assert begun.wait(60)
    every.close(0.01)  # returns
    go.set()


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
