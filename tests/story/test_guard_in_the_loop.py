"""The guard in this process, over a real run directory."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftsupervise import Decision, Guard
from ftsupervise.rundir.heartbeat_page import interval, read_beats
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, SAVE

Make = Callable[..., Guard]


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    run = RunDir(tmp_path / "run")
    for folder in (run.switches, run.state, run.beats, run.attempt(1)):
        folder.mkdir(parents=True)
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(run.root))
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(run.attempt(1)))
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT", "1")
    return run


@pytest.fixture
def make() -> Iterator[Make]:
    """Guards that look at every step, closed after the test."""
    made: list[Guard] = []

    def one(**arguments: object) -> Guard:
        made.append(Guard(**{"poll": 0, **arguments}))  # type: ignore[arg-type]
        return made[-1]

    yield one
    for guard in reversed(made):
        guard.close()


def test_with_nothing_raised_every_step_goes_on(rundir: RunDir, make: Make) -> None:
    guard = make()
    assert all(guard.step(n) == Decision.CONTINUE for n in range(100))


def test_a_kill_switch_stops_and_goes_on_stopping(rundir: RunDir, make: Make) -> None:
    guard = make()
    guard.step(1)
    (rundir.switches / KILL).write_text("loss is nan\n")
    decision = guard.step(2)
    assert decision.stop and decision.save
    assert "loss is nan" in decision.reason
    (rundir.switches / KILL).unlink()
    assert guard.step(3).stop
    assert json.loads((rundir.attempt(1) / "stopped.json").read_text())["cause"] == "kill switch"


class Scalar:
    """A step as NumPy and PyTorch have it: a number that is no int and that JSON does not know."""

    def __int__(self) -> int:
        return 7

    def __mod__(self, other: int) -> int:
        return 7 % other


@pytest.mark.parametrize("step", [Scalar(), float("nan"), None, "x"], ids=["scalar", "nan", "none", "text"])
def test_whatever_a_loop_takes_for_a_step_its_switches_are_heard_and_nothing_is_raised(
    rundir: RunDir, make: Make, step: object
) -> None:
    guard = make(beat_every=0)
    guard.step(step)  # type: ignore[arg-type]
    (rundir.switches / KILL).touch()
    assert guard.step(step).stop  # type: ignore[arg-type]
    guard.saved(step)  # type: ignore[arg-type]
    guard.finished(step)  # type: ignore[arg-type]
    beat = read_beats(rundir)[0]
    assert beat.step == (7 if isinstance(step, Scalar) else None)
    assert rundir.finished.exists()


def test_a_run_directory_that_is_gone_is_not_made_anew(rundir: RunDir, make: Make, tmp_path: Path) -> None:
    guard = make(beat_every=0)
    guard.step(1)
    rundir.root.rename(tmp_path / "away")
    guard.step(2)
    guard.finished(2)
    assert not rundir.root.exists()


def test_an_error_that_cannot_say_what_it_is_leaves_the_loop_as_it_is(rundir: RunDir, make: Make) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise RuntimeError

    with pytest.raises(Odd), make():
        raise Odd


def test_a_kill_switch_raised_before_the_start_is_seen_at_the_first_step(rundir: RunDir, make: Make) -> None:
    (rundir.switches / KILL).touch()
    assert make(poll=3600).step(1).stop


def test_a_save_switch_is_answered_once_and_taken_down_when_saved(rundir: RunDir, make: Make) -> None:
    guard = make()
    (rundir.switches / SAVE).touch()
    assert [int(guard.step(n)) for n in range(3)] == [1, 0, 0]
    assert (rundir.switches / SAVE).exists(), "a crash before the commit must not lose the request"
    guard.saved(0)
    assert os.listdir(rundir.switches) == []
    assert guard.step(4) == Decision.CONTINUE


def test_a_second_touch_during_the_save_is_answered_again(rundir: RunDir, make: Make) -> None:
    guard = make()
    switch = rundir.switches / SAVE
    switch.touch()
    assert guard.step(1).save
    os.utime(switch, ns=(1, time.time_ns() + 5_000_000))
    guard.saved(1)
    assert switch.exists()
    assert guard.step(2).save
    guard.saved(2)
    assert not switch.exists()
    assert not guard.step(3)


def test_a_save_after_a_crash_is_asked_of_the_next_attempt(rundir: RunDir, make: Make) -> None:
    (rundir.switches / SAVE).touch()
    assert make().step(1).save  # and then the process died
    assert make().step(1).save


def test_stopping_answers_the_save_switch_too(rundir: RunDir, make: Make) -> None:
    guard = make()
    (rundir.switches / SAVE).touch()
    (rundir.switches / KILL).touch()
    assert guard.step(1).stop
    guard.saved(1)
    assert os.listdir(rundir.switches) == [KILL]


def test_the_warning_file_stops_ranks_that_hear_no_signal(rundir: RunDir, make: Make) -> None:
    guard = make(signals=())
    guard.step(1)
    (rundir.attempt(1) / "warning").write_text("SIGUSR1 at noon\n")
    decision = max(guard.step(2), guard.step(3))
    assert decision.stop
    assert decision.cause == "warning signal"
    assert "at noon" in decision.reason


@pytest.mark.parametrize(
    ("number", "cause"), [(signal.SIGUSR1, "warning signal"), (signal.SIGTERM, "asked to stop (SIGTERM)")]
)
def test_a_signal_is_answered_at_the_very_next_step(rundir: RunDir, make: Make, number: int, cause: str) -> None:
    guard = make(poll=3600)
    assert not guard.step(1)
    os.kill(os.getpid(), number)
    assert guard.step(2).cause == cause


def test_whoever_had_the_signal_before_still_hears_it_and_gets_it_back(make: Make, rundir: RunDir) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.append(number))
    try:
        mine = signal.getsignal(signal.SIGUSR1)
        guard = make()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert guard.step(1).stop
        assert heard == [signal.SIGUSR1]
        guard.finished(1)
        assert signal.getsignal(signal.SIGUSR1) is mine
    finally:
        signal.signal(signal.SIGUSR1, before)


@pytest.mark.parametrize("reads", [True, False])
def test_a_limit_that_somebody_moves_moves_the_end_of_the_loop_of_every_rank(
    rundir: RunDir, make: Make, monkeypatch: pytest.MonkeyPatch, reads: bool
) -> None:
    monkeypatch.setenv("FTSUPERVISE_DEADLINE", f"{time.time() + 3:.3f}")
    (rundir.attempt(1) / "deadline").write_text(f"{time.time() + 1000:.0f}\n")
    guard = make(stop_before=2.5, **({} if reads else {"agree": int, "rank": 1, "world": 2}))
    until = time.monotonic() + 1.0
    while time.monotonic() < until:  # beyond the end that the attempt began with
        assert not guard.step(1).stop
        time.sleep(0.02)
    (rundir.attempt(1) / "deadline").write_text(f"{time.time() + 1:.0f}\n")
    decision, until = guard.step(2), time.monotonic() + 10
    while reads and not decision.stop and time.monotonic() < until:
        time.sleep(0.02)
        decision = guard.step(2)
    assert (decision.cause == "time limit") == reads, "rank 0 sees a shorter one for all"


TWO_GUARDS = """import os, signal, sys
from ftsupervise import Guard
first, second = Guard(poll=0), Guard(poll=0)
first.step(1), second.step(1)
first.close()
if sys.argv[1] == "between":
    os.kill(os.getpid(), signal.SIGTERM)
    assert second.step(2).stop
    sys.exit(7)
second.close()
assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize(("when", "code"), [("between", 7), ("after", -signal.SIGTERM)])
def test_two_guards_closed_in_the_order_of_their_making_give_sigterm_back(
    when: str, code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    assert subprocess.run([sys.executable, "-c", TWO_GUARDS, when], cwd=tmp_path, timeout=60).returncode == code


TOLD_TWICE = """import atexit, os, signal, subprocess, sys
from ftsupervise import Guard
atexit.register(os.kill, os.getpid(), signal.SIGTERM)
guard = Guard(poll=0)
guard.step(1)
os.kill(os.getpid(), signal.SIGTERM)
assert guard.step(2).stop
guard.close()
os.kill(os.getpid(), signal.SIGTERM)
sys.exit(subprocess.run([sys.executable, "-c", "import os; os.kill(os.getpid(), 15)"]).returncode + 15)
"""


def test_a_second_sigterm_does_not_kill_a_process_that_leaves_because_of_the_first_nor_spare_its_children(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    done = subprocess.run([sys.executable, "-c", TOLD_TWICE], cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


ASKED_BY_ANOTHER = """import atexit, os, signal, sys
from ftsupervise import Guard
from ftsupervise.guard.stop_reasons import Decision, as_vote
atexit.register(lambda: os.write(1, str(signal.getsignal(signal.SIGTERM) is signal.SIG_IGN).encode()))
guard = Guard(poll=0, rank=1, world=2)
assert guard.step(1, as_vote(Decision(2, "warning signal"))).stop
if sys.argv[1] == "closed":
    guard.close()
    os.kill(os.getpid(), signal.SIGTERM)
"""


@pytest.mark.parametrize("how", ["closed", "left open"])
def test_a_rank_that_leaves_because_another_was_asked_to_is_not_killed_by_a_sigterm_that_comes_late(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each rank is told by its own node, and the ranks stop together once one has heard it."""
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    argv = [sys.executable, "-c", ASKED_BY_ANOTHER, how]
    done = subprocess.run(argv, cwd=tmp_path, timeout=60, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert how == "closed" or done.stdout == "True", "ignored when the interpreter takes the handlers away"


def test_a_handler_installed_over_ours_is_told_and_left_alone(
    rundir: RunDir, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = make(beat_every=0)
    theirs = signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    guard.step(1)
    guard.close()
    try:
        assert signal.getsignal(signal.SIGUSR1) is signal.SIG_IGN
        assert "another handler was installed for SIGUSR1" in capsys.readouterr().err
    finally:
        signal.signal(signal.SIGUSR1, signal.SIG_DFL)
        del theirs


def test_in_a_thread_the_guard_says_that_it_is_deaf_and_obeys_switches(
    rundir: RunDir, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[Decision] = []

    def train() -> None:
        guard = Guard(poll=0)
        (rundir.switches / KILL).touch()
        said.append(guard.step(1))

    thread = threading.Thread(target=train)
    thread.start()
    thread.join()
    assert said[0].stop
    assert "cannot receive signals" in capsys.readouterr().err


def test_time_is_up_after_run_for_and_before_the_deadline(
    rundir: RunDir, make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert make(run_for=0).step(1).cause == "run time reached"
    monkeypatch.setenv("FTSUPERVISE_DEADLINE", f"{time.time() + 100:.0f}")
    assert make(stop_before=120).step(1).cause == "time limit"
    assert not make(stop_before=60).step(1)
    assert not make().step(1), "without stop_before Slurm's own signal is the warning"


def test_the_deadline_makes_a_look_due_between_two_polls(
    rundir: RunDir, make: Make, until: Callable[..., object]
) -> None:
    began = time.monotonic()
    guard = make(poll=3600, run_for=0.5)
    assert not guard.step(1).stop or time.monotonic() - began > 0.5
    until(lambda: guard.step(2).stop, "the run time", 10)


def test_all_ranks_leave_at_the_same_step_by_agreement(rundir: RunDir, make: Make) -> None:
    """Two guards as two ranks that meet; only rank 0 looks at the directory."""
    table = {0: 0, 1: 0}

    def agree(rank: int) -> Callable[[int], int]:
        def ask(vote: int) -> int:
            table[rank] = vote
            return max(table.values())

        return ask

    first = make(agree=agree(0), rank=0, world=2)
    second = make(agree=agree(1), rank=1, world=2, signals=())
    assert [first.step(1), second.step(1)] == [0, 0]
    (rundir.switches / KILL).write_text("enough")
    decisions = [first.step(2), second.step(2)]
    assert [d.stop for d in decisions] == [True, True]
    assert [d.cause for d in decisions] == ["kill switch", "kill switch"]


def test_a_vote_rides_on_the_loops_own_collective(rundir: RunDir, make: Make) -> None:
    first, second = make(rank=0, world=2), make(rank=1, world=2, signals=())
    (rundir.switches / SAVE).touch()
    votes = [first.vote(), second.vote()]
    assert votes[1] == 0
    assert [d.save for d in (first.step(1, max(votes)), second.step(1, max(votes)))] == [True, True]
    second.saved(1)
    assert (rundir.switches / SAVE).exists(), "rank 0 alone takes it down"
    first.saved(1)
    assert not (rundir.switches / SAVE).exists()
    assert max(first.vote(), second.vote()) == 0


def test_agreement_is_asked_every_k_steps_and_no_vote_is_lost_in_between(rundir: RunDir, make: Make) -> None:
    asked: list[int] = []

    def agree(vote: int) -> int:
        asked.append(vote)
        return vote

    guard = make(agree=agree, agree_every=4)
    decisions = []
    for step in range(1, 9):
        if step == 5:
            (rundir.switches / SAVE).touch()
        decisions.append(int(guard.step(step)))
    assert len(asked) == 2
    assert decisions == [0, 0, 0, 0, 0, 0, 0, 1]


def test_what_agree_raises_reaches_the_loop(rundir: RunDir, make: Make) -> None:
    def broken(vote: int) -> int:
        raise ConnectionError("another rank is gone")

    with pytest.raises(ConnectionError):
        make(agree=broken).step(1)


def test_without_a_run_it_says_so_once_and_never_stops_anything(
    make: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    guard = make()
    assert not any(guard.step(n) for n in range(10))
    with guard.phase("eval"):
        guard.beat()
    guard.saved(9)
    guard.finished(9)
    assert capsys.readouterr().err.count("\n") == 1


def test_a_run_directory_that_vanishes_is_told_once_and_training_goes_on(
    rundir: RunDir, make: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    import shutil

    guard = make(beat_every=0)
    guard.step(1)
    shutil.rmtree(rundir.root)
    assert not any(guard.step(n) for n in range(2, 50))
    guard.saved(50)
    guard.finished(50)
    assert 1 <= capsys.readouterr().err.count("\n") <= 4


def test_beats_say_step_phase_attempt_and_what_was_saved(rundir: RunDir, make: Make) -> None:
    guard = make(beat_every=0)
    guard.step(7)
    guard.saved(7)
    guard.step(8)
    (beat,) = read_beats(rundir)
    assert (beat.rank, beat.step, beat.phase, beat.pid) == (0, 8, "train", os.getpid())
    assert (beat.facts["first"], beat.facts["saved"], beat.facts["attempt"]) == ("7", "7", "1")
    with guard.phase("eval"):
        assert read_beats(rundir)[0].phase == "eval"


def test_beats_are_rare_and_rarer_with_many_ranks(rundir: RunDir, make: Make) -> None:
    guard = make(beat_every=3600)
    for step in range(500):
        guard.step(step)
    assert read_beats(rundir)[0].step == 0
    assert interval(8, 10.0) == 10.0
    assert 100_000 / interval(100_000, 10.0) <= 200


def test_a_damaged_beat_is_left_out(rundir: RunDir, make: Make) -> None:
    make().step(1)
    (rundir.beats / "rank-1").write_text('{"rank": 1, "ste')
    (rundir.beats / "rank-2").symlink_to("/dev/zero")
    os.mkfifo(rundir.beats / "rank-3")
    assert [beat.rank for beat in read_beats(rundir)] == [0]


def test_finished_is_a_mark_that_says_when_and_by_whom(rundir: RunDir, make: Make) -> None:
    make().finished(400)
    mark = json.loads(rundir.finished.read_text())
    assert (mark["step"], mark["attempt"]) == (400, 1)


@pytest.mark.parametrize("kind", ["symlink", "fifo", "directory", "huge", "hard link"])
def test_what_is_no_switch_is_told_never_obeyed_and_never_waited_for(
    rundir: RunDir, make: Make, kind: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    place = rundir.switches / KILL
    other = tmp_path / "other"
    other.write_text("x")

    def huge() -> None:
        place.touch()
        os.truncate(place, 1 << 40)

    ways: dict[str, Callable[[], object]] = {
        "symlink": lambda: place.symlink_to(other),
        "fifo": lambda: os.mkfifo(place),
        "directory": place.mkdir,
        "huge": huge,
        "hard link": lambda: place.hardlink_to(other),
    }
    ways[kind]()
    guard = make()
    assert not any(guard.step(n) for n in range(5))
    guard.close()
    assert "it is not obeyed" in capsys.readouterr().err
    assert "not obeyed" in read_beats(rundir)[0].facts["problem"]


def test_a_warning_that_comes_while_the_interpreter_ends_does_not_kill_it(rundir: RunDir) -> None:
    """Python gives the signals back before it takes the last objects apart: srun's copy of the warning may come that late."""
    code = (
        "import os, signal\nfrom ftsupervise import Guard\n"
        "class Last:\n"
        "    def __del__(self, kill=os.kill, mine=os.getpid(), number=signal.SIGUSR1, write=os.write):\n"
        "        kill(mine, number)\n        write(1, b'through')\n"
        "last, guard = Last(), Guard()\nguard.step(1)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (0, b"through")


def test_a_checkpoint_is_asked_for_so_long_after_the_last_one(
    rundir: RunDir, make: Make, monkeypatch: pytest.MonkeyPatch, until: Callable[..., object]
) -> None:
    monkeypatch.setenv("FTSUPERVISE_GUARD_SAVE_EVERY", "0.4")
    guard = make()
    began = time.monotonic()
    assert not guard.step(1).save, "it counts from the first step"
    asked = until(lambda: (found := guard.step(2)).save and found, "the first request", 10)
    assert isinstance(asked, Decision) and not asked.stop and asked.cause == "a checkpoint is due"
    assert time.monotonic() - began >= 0.4
    assert not guard.step(3).save, "it was asked for"
    time.sleep(0.3)
    guard.saved(3)
    saved_at = time.monotonic()
    until(lambda: guard.step(4).save, "the next request", 10)
    assert time.monotonic() - saved_at >= 0.4, "counted from the checkpoint, however it came"
    (rundir.switches / SAVE).touch()
    assert until(lambda: guard.step(5).cause == "save switch", "the switch, which is stronger", 10)


def test_without_the_setting_nobody_asks_for_a_checkpoint(rundir: RunDir, make: Make) -> None:
    guard = make()
    guard.step(1)
    time.sleep(0.3)
    assert not guard.step(2).save
