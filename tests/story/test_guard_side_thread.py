"""What the guard does beside the loop: in order, the newest last, never without a bound, and only where there is a loop."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.guard import decider, settings
from ftsupervise.guard.settings import Voice
from ftsupervise.guard.side_thread import SideThread
from ftsupervise.guard.stop_reasons import SwitchReader
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir

Threads = Callable[[], set[threading.Thread]]


def side_threads() -> set[threading.Thread]:
    return {one for one in threading.enumerate() if one.name == "ftsupervise-guard"}


@pytest.fixture
def threads() -> Callable[[], set[threading.Thread]]:
    """The side threads that this test has started; guards of other tests may still be there."""
    before = side_threads()
    return lambda: side_threads() - before


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    for name in ("FTSUPERVISE_ATTEMPT_DIR", "FTSUPERVISE_ATTEMPT", "FTSUPERVISE_PAGES"):
        monkeypatch.delenv(name, raising=False)
    for name in ("switches", "beats"):
        (tmp_path / name).mkdir()
    return RunDir(tmp_path)


def until(true: Callable[[], object]) -> None:
    end = time.monotonic() + 30
    while not true():
        assert time.monotonic() < end
        time.sleep(0.005)


def test_what_waits_is_done_once_as_it_was_asked_for_last() -> None:
    side, gate, said = SideThread(), threading.Event(), list[str]()
    side.start(0.05)
    side.ask("first", gate.wait)
    for n in range(1000):
        side.ask("beat", lambda n=n: said.append(f"beat {n}"))  # type: ignore[misc]
    side.ask("look", lambda: said.append("look"))
    gate.set()
    side.close()
    assert sorted(said) == ["beat 999", "look"]


def test_a_work_that_hangs_is_waited_for_once_and_the_next_ones_not_at_all() -> None:
    side, gate, said = SideThread(), threading.Event(), list[str]()
    side.start(0.05)
    began = time.monotonic()
    assert not side.do("look", gate.wait, 0.3)
    for _ in range(100):
        assert not side.do("beat", lambda: said.append("beat"), 0.3)
    assert 0.25 < time.monotonic() - began < 2
    assert side.waits() > 0.25
    gate.set()
    assert side.do("look", lambda: None, 30)
    assert said == ["beat"]
    side.close()


def test_a_work_that_fails_ends_neither_the_thread_nor_the_loop(threads: Threads) -> None:
    side, said = SideThread(), list[str]()
    side.start(0.05)
    assert side.do("look", lambda: 1 / 0)
    assert side.do("beat", lambda: said.append("beat"))
    side.close()
    assert said == ["beat"] and not threads()


def test_a_program_that_makes_no_step_has_no_thread(rundir: RunDir, threads: Threads) -> None:
    with Guard(rundir.root, signals=()) as guard:
        with guard.phase("convert"):
            assert read_beats(rundir)[0].phase == "convert", "and its beats are written at once"
        assert not threads()
        guard.step(1)
        assert len(threads()) == 1
    assert not threads()


@pytest.mark.parametrize("every", [0.0, 0.0005, 3600.0])
def test_the_last_beat_is_that_of_the_last_step(rundir: RunDir, every: float) -> None:
    for last in range(1, 60):
        with Guard(rundir.root, signals=(), poll=0.0001, beat_every=every) as guard:
            for step in range(1, last + 1):
                guard.step(step)
        assert read_beats(rundir)[0].step == last


def test_a_switch_is_answered_by_quick_steps_that_wait_for_no_look(rundir: RunDir) -> None:
    with Guard(rundir.root, signals=(), poll=0.05) as guard:
        for step in range(20):
            assert not guard.step(step)
            time.sleep(0.01)
        (rundir.switches / "kill-switch").touch()
        until = time.monotonic() + 30
        while not (decision := guard.step(step)).stop and time.monotonic() < until:
            time.sleep(0.01)
    assert decision.cause == "kill switch"


def test_a_slow_step_sees_the_switch_that_was_raised_during_it(rundir: RunDir) -> None:
    with Guard(rundir.root, signals=(), poll=0.05) as guard:
        guard.step(1)
        time.sleep(0.5)  # the step, at whose end the switch goes up
        (rundir.switches / "kill-switch").touch()
        assert guard.step(2).cause == "kill switch"


def test_the_save_switch_is_answered_once_for_each_time_that_it_is_raised(rundir: RunDir) -> None:
    with Guard(rundir.root, signals=(), poll=0.001, beat_every=0.001) as guard:
        for _ in range(20):
            (rundir.switches / "save-switch").touch()
            until, saves = time.monotonic() + 30, 0
            while not saves and time.monotonic() < until:
                saves += guard.step(1).save
            for _ in range(200):
                saves += guard.step(1).save
            assert saves == 1
            guard.saved(1)
            assert not (rundir.switches / "save-switch").exists()


def test_a_forked_child_that_trains_has_a_thread_of_its_own(rundir: RunDir) -> None:
    with Guard(rundir.root, signals=(), poll=0.01, beat_every=0.01) as guard:
        guard.step(1)
        for _ in range(20):  # at whatever moment of the thread
            guard.step(2)
            child = os.fork()
            if child == 0:
                code = 1
                try:
                    signal.alarm(60)
                    (rundir.switches / "kill-switch").touch()
                    while not guard.step(3).stop:
                        time.sleep(0.001)
                    guard.close()
                    code = 0 if read_beats(rundir)[0].pid == os.getpid() else 2
                finally:
                    os._exit(code)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            (rundir.switches / "kill-switch").unlink()
            time.sleep(0.002)


@pytest.mark.fault(
    "The run directory stops answering when the loop has saved a checkpoint or has finished",
    "the loop waits a second for the switch and 30 s for the finished mark, and says which file to touch; when it "
    "answers both are done",
)
def test_a_run_directory_that_hangs_holds_a_save_and_the_end_up_for_a_bound_and_is_told_all_when_it_answers(
    rundir: RunDir, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(decider, "FINISH_WITHIN", 0.5)
    own = rundir.attempt(1)
    own.mkdir(parents=True)
    env = {"FTSUPERVISE_RUN_DIR": str(rundir.root), "FTSUPERVISE_ATTEMPT": "1", "FTSUPERVISE_ATTEMPT_DIR": str(own)}
    limits, _ = settings.limits(env, 0.05, None, None, None, None)
    loop = decider.Decider(settings.place(env, None, 0, 1), limits, (), Voice(0, 1), False, 1)
    gate, switch = threading.Event(), rundir.switches / "save-switch"
    switch.touch()
    loop.side.start(0.05)
    assert loop.outside.switches.look()
    loop.outside.switches.answer()
    loop.side.ask("hang", gate.wait)
    until(lambda: loop.side.waits() > 0)
    rundir.attempt(2).mkdir()
    began = time.monotonic()
    assert not loop.superseded(), "an unknown costs no checkpoint"
    loop.take_down(loop.outside.switches.hand_over())
    loop.finish(1)
    assert time.monotonic() - began < 4, "one bound for all of them"
    assert switch.exists() and not rundir.finished.exists()
    assert f"when it answers, touch {rundir.finished}" in capfd.readouterr().err
    gate.set()
    until(lambda: not switch.exists() and rundir.finished.exists())
    assert loop.superseded()
    loop.close(in_order=True)


def test_a_kill_switch_that_was_seen_stays_seen_while_the_switches_cannot_be_read(rundir: RunDir) -> None:
    reader = SwitchReader(rundir, Voice(0, 1))
    (rundir.switches / "kill-switch").touch()
    assert reader.look() and reader.wanted().stop
    rundir.switches.rename(rundir.root / "away")
    assert not reader.look() and reader.wanted().stop
    (rundir.root / "away").rename(rundir.switches)
    (rundir.switches / "kill-switch").unlink()
    assert reader.look() and not reader.wanted().stop


def test_threads_that_meet_a_guard_whose_thread_has_ended_start_one_together(threads: Threads) -> None:
    side = SideThread()
    side.start(0.02)
    for _ in range(20):
        done: list[Any] = []
        meet = threading.Barrier(8)

        def ask(meet: threading.Barrier = meet, done: list[bool] = done) -> None:
            meet.wait(30)
            done.append(side.do("beat", lambda: None, 30.0))

        askers = [threading.Thread(target=ask) for _ in range(8)]
        for one in askers:
            one.start()
        for one in askers:
            one.join(60)
        assert done == [True] * 8
        assert len(threads()) == 1
        side.close()
        until(lambda: not threads())
