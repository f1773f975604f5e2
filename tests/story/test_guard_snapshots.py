"""Snapshots in the loop, without torch: a killed loop goes on with the same numbers, and what may not be used is not used."""

from __future__ import annotations

import os
import random
import shutil
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ftsupervise import Guard
from ftsupervise.snapshots.room import node_folder, remove
from ftsupervise.snapshots.slots import SLOTS, Pins, PinsPage, SnapshotId, open_slots

Until = Callable[..., Any]


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The node's part of a job's folder."""
    root = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    place = Path(node_folder(root))
    Path(root).mkdir(mode=0o700)
    place.mkdir(mode=0o700)
    monkeypatch.setenv("FTSUPERVISE_SNAPSHOTS", root)
    monkeypatch.setenv("FTSUPERVISE_GUARD_SNAPSHOT_EVERY", "2")
    for name in ("FTSUPERVISE_SNAPSHOT_STEP", "FTSUPERVISE_RUN_DIR", "RANK", "WORLD_SIZE", "SLURM_PROCID"):
        monkeypatch.delenv(name, raising=False)
    yield place
    shutil.rmtree(root)


@pytest.fixture
def attempt(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., None]:
    """``attempt(2, 10)``: from now on this is attempt 2, which begins from the snapshot of step 10."""

    def begin(number: int, step: int | None = None) -> None:
        folder = tmp_path / "attempts" / f"{number:04d}"
        folder.mkdir(parents=True, exist_ok=True)
        monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(tmp_path))
        monkeypatch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(folder))
        monkeypatch.setenv("FTSUPERVISE_ATTEMPT", str(number))
        if step is None:
            monkeypatch.delenv("FTSUPERVISE_SNAPSHOT_STEP", raising=False)
        else:
            monkeypatch.setenv("FTSUPERVISE_SNAPSHOT_STEP", str(step))

    return begin


def take(guard: Guard, step: int) -> None:
    """A snapshot of this step, once the memory is ready."""
    deadline = time.monotonic() + 60
    while not guard.snapshot(step):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def loop(tell: Callable[[bytes], object], steps: int) -> None:
    """A loop whose numbers depend on every number before: two arrays, the place in the data, two generators."""
    place: dict[str, Any] = {"cursor": 0, "seen": [0.1], "moments": np.zeros((7, 5000), order="F")}
    weights = np.zeros(30_000)
    guard = Guard(signals=())
    random.seed(1)
    np.random.seed(1)
    start = guard.restore(weights=weights, place=place) or 0
    for step in range(start + 1, steps + 1):
        place["cursor"] += 3
        place["seen"].append(random.random())
        weights += np.random.standard_normal(30_000) * place["cursor"]
        place["moments"] *= 0.9
        place["moments"] += weights[:35_000].sum() + place["seen"][-1]
        tell(struct.pack("<q", step))
        if step % 2 == 0:
            take(guard, step)
    whole = np.concatenate([weights, place["moments"].ravel(), place["seen"], [place["cursor"]]])
    tell(b"end-----" + whole.tobytes())
    guard.close()


def child(steps: int) -> tuple[int, int]:
    come, go = os.pipe()
    pid = os.fork()
    if not pid:
        os.close(come)
        try:
            with os.fdopen(go, "wb", buffering=0) as pipe:
                loop(pipe.write, steps)
        finally:
            os._exit(0)
    os.close(go)
    return pid, come


def numbers(come: int) -> bytes:
    with os.fdopen(come, "rb") as pipe:
        return pipe.read().partition(b"end-----")[2]


def killed(memory: Path, kills: int, steps: int) -> None:
    pid, come = child(steps)
    expected = numbers(come)
    os.waitpid(pid, 0)
    (memory / "rank-0").unlink()
    chance = random.Random(5)
    for _ in range(kills):
        pid, come = child(steps)
        for _ in range(chance.randrange(1, 6)):
            word = os.read(come, 8)
            assert len(word) == 8 and word != b"end-----", "the loop ended before it was killed often enough"
        time.sleep(chance.random() * 0.004)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(come)
    pid, come = child(steps)
    found = numbers(come)
    os.waitpid(pid, 0)
    assert expected and found == expected


@pytest.mark.fault("A loop is killed again and again", "it ends with the same bits")
def test_a_loop_that_is_killed_again_and_again_ends_with_the_same_bits(memory: Path) -> None:
    killed(memory, 12, 400)


@pytest.mark.slow
def test_a_loop_that_is_killed_at_450_random_moments_ends_with_the_same_bits(memory: Path) -> None:
    killed(memory, 450, 12_000)


def test_a_snapshot_takes_the_place_of_none_that_is_newer_than_the_agreed_one(
    memory: Path, attempt: Callable[..., None]
) -> None:
    state: dict[str, Any] = {"step": 0}
    attempt(1)
    guard = Guard(signals=())
    assert guard.restore(state=state) is None
    for step in (8, 10):
        state["step"] = step
        take(guard, step)
    guard.close()
    attempt(2, 8)
    second = Guard(signals=())
    assert second.restore(state=state) == 8 and state == {"step": 8}
    with open_slots(memory / "rank-0") as file:
        assert list(file.held()) == [SnapshotId(8, 1)]
    state["step"] = 10
    take(second, 10)
    with open_slots(memory / "rank-0") as file:
        assert list(file.held()) == [SnapshotId(8, 1), SnapshotId(10, 2)]


def test_an_attempt_that_is_given_no_step_uses_none_and_gives_up_what_there_is(
    memory: Path, attempt: Callable[..., None]
) -> None:
    state: dict[str, Any] = {"step": 8}
    attempt(1)
    guard = Guard(signals=())
    guard.restore(state=state)
    take(guard, 8)
    attempt(2)
    assert Guard(signals=()).restore(state=state) is None
    with open_slots(memory / "rank-0") as file:
        assert not file.held()


def test_a_later_attempts_snapshot_and_one_of_another_world_are_not_used(
    memory: Path, attempt: Callable[..., None]
) -> None:
    state: dict[str, Any] = {"step": 8}
    attempt(3)
    guard = Guard(signals=(), rank=0, world=1)
    guard.restore(state=state)
    take(guard, 8)
    attempt(2, 8)
    assert Guard(signals=(), rank=0, world=1).restore(state=state) is None
    attempt(4, 8)
    with pytest.raises(RuntimeError, match="does not hold step 8"):
        Guard(signals=(), rank=0, world=2).restore(state=state)


def test_a_rank_that_cannot_load_what_all_begin_from_does_not_train_on_alone(
    memory: Path, attempt: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    attempt(1)
    guard = Guard(signals=(), rank=0, world=2)
    guard.restore(state={"step": 8})
    take(guard, 8)
    attempt(2, 8)
    with pytest.raises(RuntimeError, match="it holds state, and the loop names other"):
        Guard(signals=(), rank=0, world=2).restore(other={})
    assert Guard(signals=(), rank=0, world=2, agree=lambda vote: vote).restore(other={}) is None
    assert "the snapshot of step 8 cannot be used" in capfd.readouterr().err


@pytest.mark.parametrize(
    ("first", "second", "agreed"),
    [((2, 4), (2, 4), 4), ((2, 4), (4, 6), 4), ((2, 4), (2,), 2), ((2,), (4,), None), ((2, 4), (), None)],
)
def test_without_a_supervisor_the_ranks_agree_on_the_newest_step_that_all_hold(
    memory: Path, first: tuple[int, ...], second: tuple[int, ...], agreed: int | None
) -> None:
    for rank, steps in enumerate((first, second)):
        state = {"step": 0}
        guard = Guard(signals=(), rank=rank, world=2, agree=lambda vote: vote)
        guard.restore(state=state)
        for step in steps:
            state["step"] = step
            take(guard, step)
        guard.close()
    votes, meet = [0, 0], threading.Barrier(2)
    found: list[Any] = [None, None]

    def begin(rank: int) -> None:
        def agree(vote: int) -> int:
            votes[rank] = vote
            meet.wait(20)
            highest = max(votes)
            meet.wait(20)
            return highest

        state = {"step": 0}
        start = Guard(signals=(), rank=rank, world=2, agree=agree).restore(state=state)
        found[rank] = (start, state["step"])

    threads = [threading.Thread(target=begin, args=(rank,)) for rank in range(2)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(30)
    assert found == [(agreed, agreed or 0)] * 2
    for rank, steps in enumerate((first, second)):
        if steps:
            with open_slots(memory / f"rank-{rank}") as file:
                assert [one.step for one in file.held()] == [step for step in steps if step <= (agreed or 0)]


@pytest.mark.fault(
    "An attempt lives on beside its successor and makes snapshots in the same memory",
    "they reach nothing that is read",
)
def test_an_attempt_that_lives_on_beside_its_successor_writes_into_nothing_that_is_read(
    memory: Path, attempt: Callable[..., None], until: Until, capfd: pytest.CaptureFixture[str]
) -> None:
    attempt(1)
    pid, come = child(1 << 30)
    try:
        until(lambda: _steps(memory) and max(_steps(memory)) >= 8, "step 8 of the first attempt")
        os.kill(pid, signal.SIGSTOP)
        step = max(_steps(memory))
        attempt(2, step)
        place: dict[str, Any] = {"cursor": 0, "seen": [0.1], "moments": np.zeros((7, 5000), order="F")}
        guard = Guard(signals=())
        assert guard.restore(weights=np.zeros(30_000), place=place) == step and place["cursor"] == 3 * step
        take(guard, step + 2)
        os.kill(pid, signal.SIGCONT)
        expected, said = [SnapshotId(step, 1), SnapshotId(step + 2, 2)], [""]

        def has_looked() -> bool:
            """Once a second it looks whether its file is still there."""
            said.append(capfd.readouterr().err)
            return "in their place" in "".join(said) or _held(memory) != expected

        until(has_looked, "a look of the first attempt")
        assert _held(memory) == expected
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(come)


def _held(memory: Path) -> list[SnapshotId]:
    with open_slots(memory / "rank-0") as file:
        return list(file.held())


def _steps(memory: Path) -> list[int]:
    return [one.step for one in _held(memory)]


def test_a_folder_is_a_snapshot_for_loops_of_any_kind(memory: Path, tmp_path: Path) -> None:
    guard = Guard(signals=())
    assert guard.restore(folder=tmp_path / "none") is None

    def write(step: int) -> bool:
        with guard.snapshot_folder(step, 100_000) as folder:
            if folder is None:
                return False
            (folder / "inner").mkdir()
            (folder / "inner" / "weights").write_bytes(bytes([step]) * 70_000)
            (folder / "step").write_text(str(step))
        return step in _steps(memory) if (memory / "rank-0").exists() else False

    deadline = time.monotonic() + 30
    while not write(4) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert write(6) and not write(7)
    assert Guard(signals=()).restore(folder=tmp_path / "back") == 6
    assert (tmp_path / "back" / "step").read_text() == "6"
    assert (tmp_path / "back" / "inner" / "weights").read_bytes() == bytes([6]) * 70_000
    with pytest.raises(ZeroDivisionError), guard.snapshot_folder(8, 100):
        raise ZeroDivisionError
    with guard.snapshot_folder(8, 100):
        raise OSError(28, "No space left on device")
    guard.finished(8)
    assert not list(memory.iterdir())


def test_the_files_of_a_rank_that_was_killed_while_it_wrote_them_go_with_the_jobs_folder(memory: Path) -> None:
    pid = os.fork()
    if not pid:
        guard = Guard(signals=())
        with guard.snapshot_folder(2, 1000) as folder:
            assert folder is not None
            (folder / "half").write_bytes(b"x")
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert [path.name for path in memory.iterdir()] == ["writing-0"]
    remove(str(memory.parent))
    assert not memory.parent.exists()
    memory.parent.mkdir(mode=0o700)


def test_a_finished_run_leaves_nothing_in_memory(memory: Path) -> None:
    guard = Guard(signals=())
    guard.restore(state={})
    take(guard, 2)
    assert list(memory.iterdir())
    guard.finished(2)
    assert not list(memory.iterdir()) and not guard.snapshot(4)


def test_where_there_can_be_no_snapshots_the_guard_says_so_once_and_the_loop_trains(
    memory: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def told(state: Any) -> str:
        guard = Guard(signals=())
        guard.restore(state=state)
        assert not any(guard.snapshot(step) for step in range(8))
        said = [line for line in capfd.readouterr().err.splitlines() if "snapshot" in line]
        assert len(said) == 1, said
        return said[0]

    assert "['state']['odd'] is of the type builtins.object, which a snapshot does not hold" in told({"odd": object()})
    memory.chmod(0o770)
    assert "not ours alone" in told({})
    memory.chmod(0o700)
    monkeypatch.setenv("FTSUPERVISE_GUARD_SNAPSHOT_EVERY", "off")
    assert "the settings say so" in told({})
    monkeypatch.setenv("FTSUPERVISE_GUARD_SNAPSHOT_EVERY", "2")
    monkeypatch.delenv("FTSUPERVISE_SNAPSHOTS")
    assert "FTSUPERVISE_SNAPSHOTS is not set" in told({})
    with pytest.raises(TypeError, match="keep such values in a dict"):
        Guard(signals=()).restore(step=3)
    bare = Guard(signals=())
    assert not bare.snapshot(2) and "call restore(" in capfd.readouterr().err


def test_the_step_that_the_buddies_hold_is_not_written_over(memory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_GUARD_SNAPSHOT_SLOTS", str(SLOTS))
    state, page = {"step": 0}, PinsPage(str(memory), write=True)
    guard = Guard(signals=())
    guard.restore(state=state)
    for step in range(2, 30, 2):
        state["step"] = step
        take(guard, step)
        if step == 6:
            page.write(Pins(held=4, wanted=10))
    page.close()
    assert sorted(_steps(memory)) == [4, 10, 26, 28]


def test_a_file_that_was_removed_under_the_loop_is_made_again(memory: Path, until: Until) -> None:
    state = {"step": 2}
    guard = Guard(signals=())
    guard.restore(state=state)
    take(guard, 2)
    (memory / "rank-0").unlink()
    until(lambda: guard.snapshot(4) and (memory / "rank-0").exists(), "a new file")
    assert _steps(memory)[-1] == 4


def test_a_state_that_grows_gets_larger_slots_and_keeps_what_was_there(memory: Path, until: Until) -> None:
    state: dict[str, Any] = {"array": np.arange(10)}
    guard = Guard(signals=())
    guard.restore(state=state)
    take(guard, 2)
    state["array"] = np.arange(1_000_000)
    take(guard, 4)
    assert _steps(memory) == [2, 4]
    state["array"] = np.arange(5)
    take(guard, 6)
    again: dict[str, Any] = {}
    assert Guard(signals=()).restore(state=again) == 6 and np.array_equal(again["array"], np.arange(5))
