"""What is loaded is what was saved, and a run that has saved does not begin anew over what is there."""

from __future__ import annotations

import random
import re
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.digest import BLOCKS, hash_file
from ftsupervise.checkpoints.manifest import loop_file, manifest_of
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.checkpoints.restore import BEGUN, RESTORING, copies_in, restore
from ftsupervise.checkpoints.stores import open_store
from ftsupervise.findings import EventKind
from ftsupervise.guard import resume
from ftsupervise.guard.resume import CannotResume
from ftsupervise.rundir.attempt_pages import read_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake
from ftsupervise.truth import Resumed
from ftsupervise.watch.tour import events
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun

SIZE = 20_000
LIST = ".ftsupervise/rank-00000.state.blocks"
# Saves by guard.save every 10 steps; ends at step LAST.
TRAIN = """
import os, sys
from ftsupervise import Guard
guard = Guard(poll=0.02)
state = {"weights": bytearray(5000), "tokens": 0}
start = guard.restore(state=state)
assert state["tokens"] == (start or 0) and set(state["weights"]) <= {(start or 0) % 251}, "another state was loaded"
last = int(sys.argv[1])
for step in range((start or 0) + 1, last + 1):
    guard.step(step)
    state["weights"][:] = bytes([step % 251]) * 5000
    state["tokens"] = step
    if step % 10 == 0:
        guard.save(step)
if last == 40:
    guard.finished(last)
sys.exit(0 if last == 40 else 3)
"""


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("FTSUPERVISE_RUN_DIR", "FTSUPERVISE_ATTEMPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    return tmp_path / "ckpt"


def content(step: int) -> bytes:
    return random.Random(step).randbytes(SIZE)


def saved(*steps: int, more: Callable[[Guard], object] = lambda guard: None) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        state = {"weights": bytearray(SIZE), "tokens": 0}
        assert guard.restore(state=state) is None
        for step in steps:
            state.update(weights=bytearray(content(step)), tokens=step)
            guard.save(step)
        more(guard)


def restored() -> tuple[int | None, dict[str, Any]]:
    with Guard(signals=(), rank=0, world=1) as guard:
        state: dict[str, Any] = {"weights": bytearray(SIZE), "tokens": 0}
        return guard.restore(state=state), state


def flip(path: Path, at: int, bit: int = 0) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (old,) = file.read(1)
        file.seek(at)
        file.write(bytes([old ^ 1 << bit]))


@pytest.mark.resume(
    "A bit of the newest checkpoint flips, and `guard.restore` begins",
    "the one before; nothing of the damaged one was put into the model",
    "stderr: … has other bytes than were committed; it is not loaded",
)
def test_whatever_bit_flips_the_state_before_it_is_loaded_and_never_another(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    saved(10, 20)
    newest = loop_file(checkpoints / "step-00000020", 0)
    whole, draw = newest.read_bytes(), random.Random(1)
    for _ in range(60):
        flip(newest, draw.randrange(len(whole)), draw.randrange(8))
        step, state = restored()
        assert (step, state["tokens"], bytes(state["weights"])) == (10, 10, content(10))
        newest.write_bytes(whole)
    assert restored()[0] == 20
    assert "rank-00000.state has other bytes than were committed; it is not loaded" in capsys.readouterr().err


@pytest.mark.resume(
    "A bit of the only checkpoint flips",
    "nothing: the program ends with 93; where it is found when a part has been copied into the model, nothing of "
    "that loop is saved",
    "stderr: what is wrong, that a part was loaded, and what to type to begin anew",
)
def test_where_the_only_one_is_damaged_nothing_is_loaded_and_the_run_stops(checkpoints: Path) -> None:
    saved(10)
    flip(loop_file(checkpoints / "step-00000010", 0), 9000)
    state = {"weights": bytearray(SIZE), "tokens": 0}
    with Guard(signals=(), rank=0, world=1) as guard, pytest.raises(SystemExit) as stopped:
        guard.restore(state=state)
    assert stopped.value.code == 93 and "to begin anew: ftsupervise checkpoints anew" in str(stopped.value)
    assert state == {"weights": bytearray(SIZE), "tokens": 0}, "it is as the program made it"


def large_state(step: int) -> dict[str, Any]:
    draw = numpy.random.default_rng(step)
    small = {"bias": draw.random(100), "step": step}
    return {
        "first": draw.random(300_000),
        "second": draw.random((1000, 400)),
        "raw": bytearray(draw.bytes(2 << 20)),
        **small,
    }


def same(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one.keys() == other.keys() and all(numpy.array_equal(one[key], other[key]) for key in one)


def now() -> datetime:
    return datetime.now(timezone.utc)


def save_large(*steps: int) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        state = large_state(0)
        guard.restore(state=state)
        for step in steps:
            state.update(large_state(step))
            guard.save(step)


@pytest.mark.resume(
    "A bit of a large array flips, in the middle of a checkpoint whose first blocks are in the model already",
    "the one before, all of it, over that",
    "stderr: … has other bytes than were committed; it is not loaded",
)
def test_a_bit_of_a_large_array_flips_and_the_checkpoint_before_is_loaded_over_what_was_there_already(
    checkpoints: Path,
) -> None:
    save_large(10, 20)
    newest = loop_file(checkpoints / "step-00000020", 0)
    whole = newest.read_bytes()
    for at in (1 << 20, len(whole) // 2, len(whole) - 1):  # from the middle on, others are in the loop's arrays by then
        flip(newest, at)
        state = large_state(0)
        with Guard(signals=(), rank=0, world=1) as guard:
            assert guard.restore(state=state) == 10 and same(state, large_state(10)), at
            guard.save(11)  # nothing of the damaged one is left
        shutil.rmtree(checkpoints / "step-00000011")
        newest.write_bytes(whole)
    state = large_state(0)
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state=state) == 20 and same(state, large_state(20))


@pytest.mark.resume(
    "A bit of a large array of the only checkpoint flips",
    "nothing: the program ends with 93, and where it goes on all the same, `step` and `save` raise",
    "stderr: … was loaded in part: the objects of the loop are not to be used",
)
def test_where_the_only_one_is_damaged_and_a_part_was_loaded_nothing_is_saved(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    save_large(10)
    newest = loop_file(checkpoints / "step-00000010", 0)
    flip(newest, newest.stat().st_size - 1)
    with Guard(signals=(), rank=0, world=1) as guard:
        with pytest.raises(SystemExit) as stopped:
            guard.restore(state=large_state(0))
        assert stopped.value.code == 93
        assert "step-00000010 was loaded in part: the objects of the loop are not to be used" in capsys.readouterr().err
        for goes_on in (guard.save, guard.step):
            with pytest.raises(RuntimeError, match="step-00000010 was loaded in part only"):
                goes_on(11)


@pytest.mark.resume(
    "The list of the digests of its blocks is missing, damaged or cut",
    "that checkpoint: it is read twice",
    "nothing",
)
@pytest.mark.parametrize("harm", ["gone", "flipped", "cut"])
def test_without_the_list_of_its_blocks_a_checkpoint_is_read_twice_and_loaded(checkpoints: Path, harm: str) -> None:
    save_large(10)
    blocks = checkpoints / "step-00000010" / LIST
    if harm == "gone":
        blocks.unlink()
    elif harm == "flipped":
        flip(blocks, 20)
    else:
        blocks.write_bytes(blocks.read_bytes()[:-16])
    state = large_state(0)
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state=state) == 10 and same(state, large_state(10))


def bytes_read_by(work: Callable[[], object]) -> int:
    """What this process reads meanwhile, as the kernel counts it: mapped pages are not among it."""

    def read() -> int:
        return int(re.search(r"rchar: (\d+)", Path("/proc/self/io").read_text())[1])  # type: ignore[index]

    before = read()
    work()
    return read() - before


def load_large(step: int) -> None:
    state = large_state(0)
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state=state) == step and same(state, large_state(step))


@pytest.mark.resume(
    "A checkpoint is brought back from a copy (`checkpoints restore`)",
    "that checkpoint, read once: its list of blocks is made anew, and none in the copy is believed",
    "nothing",
)
@pytest.mark.parametrize("killed", [False, True], ids=["at once", "by a second call"])
def test_a_checkpoint_that_came_back_from_a_copy_is_read_once(checkpoints: Path, tmp_path: Path, killed: bool) -> None:
    save_large(10)
    here, store = checkpoints / "step-00000010", open_store(tmp_path / "far")
    size, listed = loop_file(here, 0).stat().st_size, (here / LIST).read_bytes()
    once = bytes_read_by(lambda: load_large(10))
    assert once < 1.2 * size
    offload(here, store, now=now)
    (tmp_path / "far" / here.name / LIST).write_bytes(bytes(len(listed)))  # somebody's: nothing in the copy is believed
    shutil.rmtree(here)
    if killed:  # all had come when the first call ended
        (checkpoints / f"{RESTORING}{here.name}").mkdir()
        (checkpoints / f"{RESTORING}{here.name}" / BEGUN).touch()
        shutil.copy(loop_file(tmp_path / "far" / here.name, 0), checkpoints / f"{RESTORING}{here.name}")
    (copy,), _ = copies_in([store])
    restore(copy, checkpoints, now=now)
    assert (here / LIST).read_bytes() == listed
    assert stat.S_IMODE((here / LIST).stat().st_mode) == stat.S_IMODE(manifest_of(here).stat().st_mode)
    assert bytes_read_by(lambda: load_large(10)) < 1.2 * size
    (here / LIST).unlink()
    assert bytes_read_by(lambda: load_large(10)) > 1.5 * size, "read twice, it would be seen"


@pytest.mark.resume(
    "Somebody changes bytes of a checkpoint, and its list of blocks so that it agrees with them",
    "the one before: the manifest decides",
    "stderr: … has other bytes than were committed; it is not loaded",
)
def test_a_list_of_blocks_that_agrees_with_other_bytes_makes_them_no_good(checkpoints: Path) -> None:
    save_large(10, 20)
    newest = checkpoints / "step-00000020"
    flip(loop_file(newest, 0), 3 << 20)
    blocks = bytearray()
    hash_file(loop_file(newest, 0), BLOCKS, blocks=blocks)
    (newest / LIST).write_bytes(blocks)
    load_large(10)


@pytest.mark.resume(
    "One rank of two finds its part of the newest checkpoint damaged",
    "all ranks take the one before",
    "stderr, from rank 0",
)
def test_two_ranks_take_the_one_before_when_one_of_them_cannot_compare_its_part(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save(guard: Guard, rank: int, state: dict[str, Any]) -> None:
        for step in (10, 20):
            state.update(rank=rank, tokens=step, weights=bytearray(content(step + rank)))
            guard.save(step)

    assert together(save) == [None, None]
    flip(loop_file(checkpoints / "step-00000020", 1), 9000)
    seen: list[tuple[int, bytes]] = []
    assert together(lambda guard, rank, state: seen.append((state["rank"], bytes(state["weights"])))) == [10, 10]
    assert sorted(seen) == [(0, content(10)), (1, content(11))]


class Agreement:
    """The maximum over the votes of two ranks that are threads here."""

    def __init__(self) -> None:
        self._votes = [0, 0]
        self._meet = threading.Barrier(2, timeout=60)

    def of(self, rank: int) -> Callable[[int], int]:
        def agree(vote: int) -> int:
            self._votes[rank] = vote
            self._meet.wait()
            most = max(self._votes)
            self._meet.wait()
            return most

        return agree


def together(then: Callable[[Guard, int, dict[str, Any]], object], seen_by_1: Path | None = None) -> list[Any]:
    """Two ranks, in threads, that agree by a function; what each restored, or raised."""
    agreement, found = Agreement(), list[Any]([None, None])
    guards = [Guard(signals=(), rank=0, world=2, agree=agreement.of(0))]
    with pytest.MonkeyPatch.context() as patch:
        if seen_by_1 is not None:
            patch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(seen_by_1))
        guards.append(Guard(signals=(), rank=1, world=2, agree=agreement.of(1)))

    def train(rank: int) -> None:
        with guards[rank] as guard:
            state: dict[str, Any] = {"weights": bytearray(SIZE), "tokens": 0, "rank": rank}
            try:
                found[rank] = guard.restore(state=state)
            except (OSError, RuntimeError, CannotResume) as error:
                found[rank] = error
            else:
                then(guard, rank, state)

    threads = [threading.Thread(target=train, args=(rank,)) for rank in (0, 1)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(60)
    return found


@pytest.mark.resume(
    "A rank does not see yet what rank 0 chose (a network file system)",
    "it waits for a minute; then no rank begins",
    "rank 0 begins from …, and this rank does not see it",
)
def test_a_rank_that_does_not_see_the_choice_waits_and_then_no_rank_begins(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    together(lambda guard, rank, state: guard.save(5))
    seen_by_1 = tmp_path / "as-another-client-sees-it"
    seen_by_1.mkdir()
    threading.Timer(1.0, shutil.copytree, (checkpoints, seen_by_1), {"dirs_exist_ok": True}).start()
    assert together(lambda guard, rank, state: None, seen_by_1) == [5, 5], "it has waited"
    shutil.rmtree(seen_by_1)
    seen_by_1.mkdir()
    monkeypatch.setattr(resume, "SEEN_WITHIN", 0.3)
    first, second = together(lambda guard, rank, state: None, seen_by_1)
    assert isinstance(first, OSError) and isinstance(second, OSError), "all stop"
    assert "rank 0 begins from step-00000005, and this rank does not see it" in str(second)


@pytest.mark.resume(
    'The newest good checkpoint is not of `guard.save` ("best", an export)',
    "the newest that `guard.save` wrote",
    "`status` names it",
)
def test_the_newest_one_that_guard_save_wrote_is_loaded_whatever_newer_one_lies_there(checkpoints: Path) -> None:
    def export(guard: Guard) -> None:
        with guard.checkpoint(30, "best") as folder:
            (folder / "weights").write_bytes(b"best")

    saved(10, 20, more=export)
    assert restored()[0] == 20


@pytest.mark.resume(
    "The loop saves into a folder that everybody may write",
    "nothing is saved there: the first save raises",
    "everybody may write …; type: chmod go-w …",
)
def test_a_folder_that_everybody_may_write_is_refused_at_the_first_save(checkpoints: Path) -> None:
    checkpoints.mkdir()
    checkpoints.chmod(0o777)
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state={})
        with pytest.raises(PermissionError, match=r"everybody may write .*type: chmod go-w"):
            guard.save(10)
    assert not list(checkpoints.glob("step-*"))


@pytest.mark.resume(
    "Somebody opens the folder of the checkpoints to everybody (0777)",
    "nothing, and nothing is replaced: the program ends with 93",
    "stderr: chmod go-w …",
)
def test_a_run_whose_folder_was_opened_to_everybody_stops_and_replaces_nothing(checkpoints: Path) -> None:
    saved(10, 20, 30)
    before = {path: path.read_bytes() for path in checkpoints.rglob("*.state")}
    checkpoints.chmod(0o777)
    with Guard(signals=(), rank=0, world=1) as guard, pytest.raises(CannotResume, match="chmod go-w"):
        guard.restore(state={})
    checkpoints.chmod(0o755)
    assert {path: path.read_bytes() for path in checkpoints.rglob("*.state")} == before
    assert restored()[0] == 30


@pytest.mark.resume(
    "The folder was empty at the start (not mounted) and has old checkpoints at the first save",
    "the loop trains on; an existing step is not replaced",
    "the save raises: … was saved before this loop began",
)
def test_a_run_that_began_anew_replaces_nothing_that_was_there(checkpoints: Path) -> None:
    saved(10)
    shutil.move(checkpoints, checkpoints.with_name("away"))
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state={}) is None
        shutil.copytree(checkpoints.with_name("away"), checkpoints, dirs_exist_ok=True)  # it was not mounted
        with pytest.raises(FileExistsError, match="was saved before this loop began"):
            guard.save(10)
        guard.save(20)
        guard.save(20)
    assert len(list(checkpoints.glob("step-*"))) == 2


@pytest.mark.resume(
    "All checkpoints of a run are deleted, damaged or no longer trusted",
    "nothing: one attempt, exit 93, the chain is held until a person has acted",
    "the *brake* alert, `status`: it cannot go on from what it has saved",
)
@pytest.mark.parametrize("harm", ["deleted", "flipped", "opened"])
def test_a_run_that_has_saved_stops_once_and_says_what_to_type(run: SupervisedRun, harm: str) -> None:
    first = run.start("--in-place", "0", "--warm", "off", "--", sys.executable, "-c", TRAIN, "15")
    assert first.wait(120) == 3
    folder = run.rundir.checkpoints
    if harm == "deleted":
        shutil.rmtree(folder / "step-00000010")
    elif harm == "flipped":
        flip(loop_file(folder / "step-00000010", 0), 9000)
    else:
        folder.chmod(0o777)
    words = ("--in-place", "20", "--back-off", "0", "--warm", "off", "--", sys.executable, "-c", TRAIN, "40")
    second = run.start(*words)
    assert second.wait(120) == 93, second.said()
    assert len(run.attempts()) == 2, "it is not started again and again"
    assert "to begin anew: ftsupervise checkpoints anew" in second.said()
    brake = read_brake(run.rundir)
    assert brake is not None and "it cannot go on from what it has saved" in brake.why
    folder.chmod(0o755)
    cli(run.rundir, "checkpoints", "anew")
    cli(run.rundir, "clear", "--brake")
    third = run.start(*words)
    assert third.wait(120) == 0, third.said()
    assert [one.name for one in quarantined(folder)] == ([] if harm == "deleted" else ["step-00000010"])
    assert run.attempts()[-1].first_step == 1


def cli(rundir: RunDir, *words: str) -> str:
    argv = [sys.executable, "-m", "ftsupervise", *words, str(rundir.root)]
    return subprocess.run(argv, check=True, capture_output=True, text=True).stdout


@pytest.mark.resume(
    "A supervised loop finds that the newest checkpoint is damaged",
    "the one before; the damaged one goes to `.quarantine`",
    "a *damaged* event",
)
def test_a_damaged_checkpoint_is_set_aside_once_and_people_hear_of_it(run: SupervisedRun) -> None:
    first = run.start("--in-place", "0", "--warm", "off", "--", sys.executable, "-c", TRAIN, "25")
    assert first.wait(120) == 3
    folder = run.rundir.checkpoints
    flip(loop_file(folder / "step-00000020", 0), 9000)
    second = run.start("--in-place", "20", "--back-off", "0", "--warm", "off", "--", sys.executable, "-c", TRAIN, "40")
    assert second.wait(120) == 0, second.said()
    (aside,) = quarantined(folder)
    assert aside.name == "step-00000020" and "other bytes than were committed" in aside.reason
    begun = run.attempts()[-1]
    assert begun.resumed is not None and begun.resumed.checkpoint == "step-00000010" and begun.first_step == 11
    (event,) = (one for one in events(run.attempts(), finished_at=None) if one.event is EventKind.DAMAGED)
    assert "step-00000020 is damaged" in event.finding.summary and "from step-00000010" in event.finding.summary


@pytest.mark.resume(
    "A large file of a checkpoint of the program's own making flips a bit",
    "`latest()` names the one before, on all ranks: rank 0 reads every byte",
    "`resumed.json`, `status`: … newer passed over",
)
def test_another_rank_reads_on_rank_0_s_page_what_the_attempt_begins_from(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        for step in (1, 2):
            with guard.checkpoint(step) as folder:
                (folder / "weights").write_bytes(bytes([step]) * 2_000_000)
    flip(checkpoints / "step-00000002" / "weights", 1_000_000)
    rundir = RunDir(tmp_path / "run")
    rundir.attempt(1).mkdir(parents=True)
    for name, value in (("RUN_DIR", rundir.root), ("ATTEMPT_DIR", rundir.attempt(1)), ("ATTEMPT", 1)):
        monkeypatch.setenv(f"FTSUPERVISE_{name}", str(value))
    monkeypatch.setattr(resume, "FOLLOW_WITHIN", 0.3)
    with Guard(signals=(), rank=1, world=2) as other:
        with pytest.raises(OSError, match="rank 0 has not told"):
            other.latest()
        with Guard(signals=(), rank=0, world=2) as first:
            assert first.latest() == checkpoints / "step-00000001", "rank 0 has read every byte"
        assert other.latest() == checkpoints / "step-00000001"
        found = read_page(Resumed, rundir.attempt(1))
        assert found is not None and found.passed == (
            "step-00000002 is damaged: weights has other bytes than were committed",
        )
        shutil.rmtree(checkpoints / "step-00000001")
        monkeypatch.setattr(resume, "SEEN_WITHIN", 0.3)
        with pytest.raises(OSError, match="rank 0 begins from step-00000001, and this rank does not see it"):
            other.latest()


def test_a_rank_that_comes_late_to_restore_does_not_take_what_rank_0_has_asked_latest_for(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop with snapshots and a form of its own on the disk. It set three good checkpoints aside, one for each attempt."""
    with Guard(signals=(), rank=0, world=1) as guard, guard.checkpoint(1) as folder:
        (folder / "weights").write_bytes(b"w" * 1000)
    rundir = RunDir(tmp_path / "run")
    rundir.attempt(1).mkdir(parents=True)
    for name, value in (("RUN_DIR", rundir.root), ("ATTEMPT_DIR", rundir.attempt(1)), ("ATTEMPT", 1)):
        monkeypatch.setenv(f"FTSUPERVISE_{name}", str(value))
    with Guard(signals=(), rank=0, world=2) as first, Guard(signals=(), rank=1, world=2) as other:
        assert first.restore(state={"done": 0}) is None
        assert first.latest() == checkpoints / "step-00000001"
        assert other.restore(state={"done": 0}) is None
    assert sorted(path.name for path in checkpoints.iterdir() if path.name[0] != ".") == ["step-00000001"]


LAUNCHES = {
    "two srun": ({"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "1"}),
    "two torchrun": tuple(
        {"TORCHELASTIC_RUN_ID": "none", "TORCHELASTIC_MAX_RESTARTS": "0", "GROUP_WORLD_SIZE": "1"}
        | {"MASTER_ADDR": "localhost", "MASTER_PORT": port}
        for port in ("29500", "29501")
    ),
}


@pytest.mark.resume(
    "An attempt launches several groups of ranks, one after the other (two `srun`, two `torchrun`)",
    "for each group what its own rank 0 chose",
    "nothing",
)
@pytest.mark.parametrize("how", LAUNCHES)
def test_each_of_several_launches_in_one_attempt_follows_its_own_rank_0(
    checkpoints: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.attempt(1).mkdir(parents=True)
    for name, value in (("RUN_DIR", rundir.root), ("ATTEMPT_DIR", rundir.attempt(1)), ("ATTEMPT", 1)):
        monkeypatch.setenv(f"FTSUPERVISE_{name}", str(value))
    monkeypatch.setattr(resume, "FOLLOW_WITHIN", 0.3)
    one, two = LAUNCHES[how]

    def newest(rank: int, launch: dict[str, str]) -> str:
        for name, value in launch.items():
            monkeypatch.setenv(name, value)
        with Guard(signals=(), rank=rank, world=2) as guard:
            found = guard.latest()
            return "" if found is None else found.name

    def save(step: int) -> None:
        with Guard(signals=(), rank=0, world=1) as guard, guard.checkpoint(step) as folder:
            (folder / "weights").write_bytes(bytes([step]))

    save(1)
    assert newest(0, one) == "step-00000001"
    save(2)
    with pytest.raises(OSError, match="rank 0 has not told"):
        newest(1, two)
    assert newest(0, two) == newest(1, two) == "step-00000002"
    assert newest(1, one) == "step-00000001", "as its own rank 0"


@pytest.mark.resume(
    "Megatron's or DeepSpeed's tracker names a checkpoint, and none is there",
    "nothing: the program ends with 93",
    "… names a checkpoint that is not there or not good",
)
def test_a_program_s_own_tracker_that_names_what_is_gone_keeps_the_run_from_beginning_anew(checkpoints: Path) -> None:
    checkpoints.mkdir()
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("300")
    with (
        Guard(signals=(), rank=0, world=1) as guard,
        pytest.raises(CannotResume, match=r"latest_checkpointed_iteration\.txt"),
    ):
        guard.latest()
    (checkpoints / "latest_checkpointed_iteration.txt").unlink()
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() is None


class Grown(NamedTuple):
    """A change of the code, and what the message names."""

    state: Callable[[], dict[str, Any]]
    named: str


def made(shape: int = 4, dtype: str = "f8", **more: object) -> dict[str, Any]:
    return {"table": numpy.zeros(shape, dtype), "counters": {"tokens": 0, "w": numpy.zeros(3), **more}}


@pytest.mark.resume(
    "An array has another shape or type in the code than when it was saved, or the code has new keys",
    "nothing is loaded, and no further attempt begins; with `restore(…, strict=False)` the rest, and these stay as "
    "the code made them",
    "the error names each difference; with `strict=False` each is said once",
)
@pytest.mark.parametrize(
    "grown",
    [
        Grown(lambda: made(5), r"table is numpy <f8 \(5,\) in the loop, and numpy <f8 \(4,\) in what was saved"),
        Grown(lambda: made(dtype="f4"), r"table is numpy <f4 \(4,\) in the loop"),
        Grown(lambda: made(epochs=0), r"counters\['epochs'\] is in the loop only"),
        Grown(
            lambda: made(w=numpy.zeros(7)), r"counters\['w'\] is numpy <f8 \(7,\) in the loop, and was numpy <f8 \(3,\)"
        ),
    ],
    ids=["shape", "dtype", "new-key", "shape-in-a-dict"],
)
def test_what_no_longer_fits_the_code_is_named_and_with_strict_false_the_rest_is_loaded(
    checkpoints: Path, grown: Grown, capsys: pytest.CaptureFixture[str]
) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        state = made()
        guard.restore(**state)
        state["table"] += 1
        state["counters"].update(tokens=7, later="made by the training")
        guard.save(10)
    now = grown.state()
    with Guard(signals=(), rank=0, world=1) as guard:
        with pytest.raises(RuntimeError, match=grown.named):
            guard.restore(**now)
        assert not now["table"].any() and now["counters"]["tokens"] == 0, "nothing was loaded"
        assert guard.restore(strict=False, **now) == 10
    assert re.search(f"strict=False: {grown.named}", capsys.readouterr().err)
    assert now["counters"]["tokens"] == 7 and now["counters"]["later"] == "made by the training"
    assert now["counters"].keys() - {"later"} == grown.state()["counters"].keys(), "new keys stay"
    assert now["table"].shape == grown.state()["table"].shape


@pytest.mark.resume(
    "The training itself has dropped keys, and its arrays have grown",
    "all as it was saved",
    "nothing",
)
def test_what_the_training_itself_has_changed_comes_back_without_a_word(checkpoints: Path) -> None:
    """It drops keys, and its arrays and buffers grow: the code is the same."""

    def fresh() -> dict[str, Any]:
        return {"todo": {"a": 1, "b": 2, "losses": numpy.zeros(0)}, "log": bytearray()}

    with Guard(signals=(), rank=0, world=1) as guard:
        state = fresh()
        guard.restore(**state)
        del state["todo"]["a"]
        state["todo"]["losses"] = numpy.ones(30)
        state["log"] += b"grown"
        guard.save(10)
    now = fresh()
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(**now) == 10
    assert now["todo"].keys() == {"b", "losses"} and now["todo"]["losses"].sum() == 30 and now["log"] == b"grown"


def by_hand(guard: Guard, *steps: int) -> None:
    for step in steps:
        with guard.checkpoint(step) as folder:
            (folder / "weights").write_bytes(content(step))


@pytest.mark.resume(
    "A loop that has saved with `guard.checkpoint` changes to `guard.save`",
    "nothing by `guard.restore`; the program ends with 93 at its first step or save, unless it asks `guard.latest` "
    "or goes on from a later step",
    "…step-00000020 is good and this run has saved it, but guard.save() did not write it",
)
def test_a_loop_that_changes_from_guard_checkpoint_to_guard_save_does_not_begin_again_at_step_0(
    checkpoints: Path,
) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        by_hand(guard, 10, 20)
    for first in (Guard.step, Guard.save):
        with Guard(signals=(), rank=0, world=1) as guard:
            assert guard.restore(state={"tokens": 0}) is None
            with pytest.raises(CannotResume, match=r"step-00000020 is good .* guard\.latest\(\) names it") as stopped:
                first(guard, 1)
            assert stopped.value.code == 93 and "to begin anew: ftsupervise checkpoints anew" in str(stopped.value)
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state={"tokens": 0}) is None
        assert guard.latest() == checkpoints / "step-00000020", "it loads that one itself, once"
        guard.step(21)
        guard.save(21)
    assert sorted(one.name for one in checkpoints.glob("step-*"))[-1] == "step-00000021"
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state={"tokens": 0}) == 21


def test_a_loop_that_goes_on_from_a_checkpoint_elsewhere_is_not_stopped(checkpoints: Path) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        by_hand(guard, 10)
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state={"tokens": 0}) is None
        guard.step(11)
        guard.save(11)
    assert (checkpoints / "step-00000011").is_dir()


CHANGED = """
from ftsupervise import Guard
guard = Guard()
if not list(guard_folder.glob("step-*")):
    with guard.checkpoint(10) as folder:
        (folder / "weights").write_bytes(b"w")
    raise SystemExit(3)
state = {"tokens": 0}
for step in range((guard.restore(state=state) or 0) + 1, 20):
    guard.step(step)
    guard.save(step)
"""


def test_the_supervisor_holds_the_chain_of_a_loop_that_would_begin_again_over_what_it_has_saved(
    run: SupervisedRun,
) -> None:
    text = f"from pathlib import Path\nguard_folder = Path({str(run.rundir.checkpoints)!r})\n{CHANGED}"
    (run.folder / "train.py").write_text(text)
    words = ("--in-place", "3", "--back-off", "0", "--warm", "off", "--", sys.executable, "train.py")
    assert run.start("--in-place", "0", *words[4:]).wait(60) == 3
    member = run.start(*words)
    assert member.wait(60) == 93, member.said()
    assert len(run.attempts()) == 2, "it is not started again and again"
    assert [one.name for one in run.rundir.checkpoints.glob("step-*")] == ["step-00000010"]
    brake = read_brake(run.rundir)
    assert brake is not None and "guard.save() did not write it" in member.said()


def meddle(path: Path) -> None:
    with path.open("r+b") as file:
        file.seek(-50_000, 2)
        file.write(b"x")


class Meddler:
    """A part of the state while whose loading somebody writes into the file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        meddle(self.path)


CUT = """
import os, sys
from ftsupervise import Guard
state = {"raw": bytearray(4 << 20), "step": 0}
cut = lambda: os.truncate(sys.argv[1], 1 << 20) if os.path.getsize(sys.argv[1]) > 1 << 20 else None
with Guard(signals=(), rank=0, world=1) as guard:
    step = guard.restore(state=state, warm_up=cut if len(sys.argv) > 1 else None)
    assert state == {"raw": bytearray([step or 0]) * (4 << 20), "step": step or 0}, "another state was loaded"
    for step in () if len(sys.argv) > 1 else (10, 20):
        state["raw"][:], state["step"] = bytes([step]) * (4 << 20), step
        guard.save(step)
print("began at", step)
"""


@pytest.mark.resume(
    "The file is cut short while its state is loaded",
    "the one before; the process is not killed (SIGBUS) for pages that are gone",
    "stderr: … was cut short while it was read; it is not loaded",
)
def test_a_file_that_is_cut_short_while_it_is_loaded_is_passed_over_and_kills_nobody(checkpoints: Path) -> None:
    for words, began in (((), 20), ((str(loop_file(checkpoints / "step-00000020", 0)),), 10)):
        done = subprocess.run(
            [sys.executable, "-c", CUT, *words], capture_output=True, text=True, timeout=120, check=False
        )
        assert (done.returncode, done.stdout) == (0, f"began at {began}\n"), done.stderr
    assert "rank-00000.state was cut short while it was read; it is not loaded" in done.stderr


@pytest.mark.resume(
    "Somebody writes into the file while its state is loaded",
    "the state as it was compared",
    "nothing",
)
def test_what_somebody_writes_while_the_state_is_loaded_is_not_loaded(checkpoints: Path) -> None:
    path = loop_file(checkpoints / "step-00000001", 0)
    large = numpy.arange(400_000.0)
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(first=Meddler(path), then={"weights": bytearray(100_000)}, large=large)
        guard.save(1)
    with Guard(signals=(), rank=0, world=1) as guard:
        then = {"weights": bytearray(100_000)}
        assert guard.restore(first=Meddler(path), then=then, large=large) == 1
        assert not any(then["weights"]) and (large == numpy.arange(400_000.0)).all()
        guard.save(2)  # all that was loaded was compared
    assert (checkpoints / "step-00000002").is_dir()


@pytest.mark.resume(
    "A page is read again from the disk, or somebody writes, between the comparison in the mapping of a file (a "
    "tensor on a GPU, a kept snapshot, ranks without xxhash) and the loading",
    "that state, and nothing of this attempt is saved: it ends with the comparison after the loading; the next one "
    "compares anew",
    "the error: step-00000001 changed while it was loaded",
)
def test_what_changed_between_the_comparison_and_the_loading_is_saved_nowhere(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = loop_file(checkpoints / "step-00000001", 0)
    monkeypatch.setitem(
        sys.modules, "xxhash", None
    )  # the digest is that of the file as a whole, taken where it is mapped
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(then={"weights": bytearray(100_000)})
        guard.save(1)
    with Guard(signals=(), rank=0, world=1) as guard:
        then = {"weights": bytearray(100_000)}
        assert guard.restore(then=then, warm_up=lambda: meddle(path)) == 1
        assert any(then["weights"]), "another byte was loaded than was compared"
        with pytest.raises(
            RuntimeError, match=r"step-00000001 changed while it was loaded \(its bytes are others now\)"
        ):
            guard.save(2)
        assert not guard.snapshot(2)
        with pytest.raises(RuntimeError, match="changed while"), guard.checkpoint(2):
            pass
        with pytest.raises(RuntimeError, match="changed while"):
            wait_until(lambda: guard.step(2) is None, "the next look of a step")
    assert sorted(one.name for one in checkpoints.iterdir() if one.name.startswith("step")) == ["step-00000001"]
