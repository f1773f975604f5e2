"""A job ends with steps that only the memory holds: they are kept on the disk, and the next job of the run begins there."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from time import monotonic

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints import memory_kept
from ftsupervise.checkpoints.memory_kept import KeptSnapshot
from ftsupervise.checkpoints.memory_slots import SnapshotId, open_slots
from ftsupervise.model import Attempt
from ftsupervise.ranks.snapshot_relay import keep
from ftsupervise.run.kept_snapshots import KeptSnapshots, Target, may_begin_from
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import ENV_RESTART, ENV_SNAPSHOT_KEPT, ENV_SNAPSHOT_STEP, ENV_SNAPSHOTS, RunDir
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun
from tests.story.test_snapshot_slots import made, write
from tests.story.test_snapshots_in_a_run import ranks

SUMS = [f"rank {rank} sum {sum(range(61)) * (rank + 1)}" for rank in (0, 1)]
KILLED = "if attempt == 1 and step == 32 and rank == 1: os.kill(os.getpid(), 9)"


def kept_in(run: SupervisedRun) -> list[KeptSnapshot]:
    return memory_kept.all_in(run.rundir.checkpoints)


def test_the_next_job_begins_from_what_only_the_memory_held(run: SupervisedRun) -> None:
    one = run.start("--in-place", "0", "--warm", "off", "--", *ranks(KILLED))
    one.wait(60)
    assert "step 30 was in memory only: it is kept in " in one.said(), one.said()
    assert [(kept.step, kept.attempt) for kept in kept_in(run)] == [(30, 1)]
    assert run.attempts()[0].kept == 30
    two = run.start("--warm", "off", "--", *ranks(KILLED))
    assert two.wait(60) == 0, two.said()
    begins = run.attempts()[1].begins
    assert begins is not None and (begins.source, begins.step) == ("kept", 30)
    assert "begins from step 30, kept on the disk from the memory of an older job" in two.said()
    for line in ("rank 0 attempt 2 begins after step 30", "rank 1 attempt 2 begins after step 30", *SUMS):
        assert line in two.said()
    assert kept_in(run) == [], "the run has finished"


def test_a_loop_that_is_told_to_end_and_does_not_save_is_kept_too(run: SupervisedRun) -> None:
    """As at Slurm's time limit: SIGTERM, and SIGKILL half a minute later."""
    deaf = "if step == 32: time.sleep(1000)"
    one = run.start("--grace", "1", "--warm", "off", "--", *ranks(deaf))
    wait_until(
        lambda: [seen for seen in run.attempts() if seen.last_step == 31], "the last step before it hears nothing"
    )
    one.send_signal(signal.SIGTERM)
    one.wait(60)
    assert [kept.step for kept in kept_in(run)] == [30], one.said()


def test_what_is_older_than_a_checkpoint_is_not_kept_and_goes(run: SupervisedRun) -> None:
    one = run.start("--in-place", "0", "--warm", "off", "--", *ranks(KILLED))
    one.wait(60)
    (kept,) = kept_in(run)
    later = "if attempt == 2 and step == 41 and rank == 1: time.sleep(0.3); os.kill(os.getpid(), 9)"
    two = run.start("--in-place", "0", "--warm", "off", "--", *ranks(later))
    two.wait(60)
    assert not kept.path.exists(), two.said()
    assert kept_in(run) == [], "step 40 is on the disk, and nothing newer in memory"


def test_a_kept_snapshot_with_a_flipped_bit_is_not_begun_from(run: SupervisedRun) -> None:
    run.start("--in-place", "0", "--warm", "off", "--", *ranks(KILLED)).wait(60)
    (kept,) = kept_in(run)
    with open_slots(kept.path / "rank-1", write=True) as file:
        header = file.valid(0)
        assert header is not None
        at = file.extent(0, header, 0)[0] + 5
        os.pwrite(file.fd, bytes([os.pread(file.fd, 1, at)[0] ^ 4]), at)
    two = run.start("--in-place", "5", "--warm", "off", "--back-off", "0", "--", *ranks(KILLED))
    assert two.wait(60) == 0, two.said()
    assert "is damaged" in two.said()
    begins = [(one.begins.source, one.begins.step) for one in run.attempts() if one.begins]
    assert begins[0] == ("kept", 30)
    assert "rank 1 attempt 3 begins after step 20 from disk" in two.said()
    assert all(line in two.said() for line in SUMS)


# ------------------------------------------------------------------------------------------------------ its parts


@pytest.fixture
def memory() -> Iterator[Path]:
    place = Path(f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}")
    place.mkdir(mode=0o700)
    yield place
    shutil.rmtree(place)


def areas(tmp_path: Path) -> tuple[KeptSnapshots, Path, Path]:
    """Of a run, its staging areas and its checkpoints."""
    rundir = RunDir(tmp_path / "run")
    rundir.attempts.mkdir(parents=True)
    rundir.checkpoints.mkdir()
    return KeptSnapshots(rundir, rundir.checkpoints), fence.staging(rundir, rundir.checkpoints), rundir.checkpoints


def test_once_a_newer_attempt_has_begun_nothing_is_kept(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=1) as file:
        write(file, 0, 8)
    kept, where, checkpoints = areas(tmp_path)
    area = fence.open_area(where, 1)
    assert area is not None

    def ask(folder: str, seconds: float) -> dict[str, str]:
        done = keep(str(memory), f"8/1 0 {folder}")
        fence.seal(where, 2, [1])
        return {"here": done}

    path, why = kept.write(SnapshotId(8, 1), 1, Target(area, monotonic() + 30), ask)
    assert path is None and why
    assert memory_kept.all_in(checkpoints) == []


def test_a_node_that_does_not_answer_or_has_too_little_time_leaves_nothing(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=2) as file:
        write(file, 0, 8)
    kept, where, checkpoints = areas(tmp_path)
    for number, (seconds, answers, word) in enumerate(
        ((30.0, {"a": "done", "b": "no answer"}, "b: no answer"), (0.0, {"a": "done"}, "too little time")), 1
    ):
        area = fence.open_area(where, number)
        assert area is not None
        path, why = kept.write(SnapshotId(8, 1), 2, Target(area, monotonic() + seconds), lambda *_, say=answers: say)
        assert path is None and word in why
    assert memory_kept.all_in(checkpoints) == []


def test_a_node_writes_only_what_it_holds_whole(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=1) as file:
        header = write(file, 0, 8)
        file.commit(0, header._replace(algorithm=1, digest=b"x" * 16))
        assert "damaged" in keep(str(memory), f"8/1 0 {tmp_path}")
        assert "is not in memory any more" in keep(str(memory), f"6/1 0 {tmp_path}")
        assert "No such file" in keep(str(memory), f"8/1 7 {tmp_path}")
    assert keep(str(memory), "8/1 0 relative") == "no such question"


def test_a_rank_loads_what_was_kept_and_ranks_of_another_number_do_not(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    named = {"SLURMD_NODENAME": "here", ENV_SNAPSHOTS: str(memory), ENV_RESTART: "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    (memory / "here").mkdir(mode=0o700)
    weights = bytearray(os.urandom(1_000_000))
    guard, state = Guard(), {"weights": bytearray(weights), "done": 8}
    guard.restore(state=state)
    wait_until(lambda: guard.snapshot(8), "the memory")
    assert keep(str(memory / "here"), f"8/0 0 {tmp_path}") == "done"
    memory_kept.write_page(tmp_path, SnapshotId(8, 0), 1)
    guard.finished(8)
    monkeypatch.setenv(ENV_SNAPSHOT_KEPT, str(tmp_path))
    monkeypatch.setenv(ENV_SNAPSHOT_STEP, "8")
    other = {"weights": bytearray(1_000_000), "done": 0}
    guard = Guard()
    assert guard.restore(state=other) == 8
    assert other == {"weights": weights, "done": 8}
    wait_until(lambda: guard.snapshot(10), "snapshots in memory after that")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert Guard().restore(state=other) is None
    assert "1 rank made it, and 3 would begin from it" in capfd.readouterr().err


NOW = datetime(2026, 1, 1, tzinfo=timezone.utc)


@pytest.mark.parametrize(
    ("later", "use"),
    [
        ([], True),
        ([Attempt(4, "2", NOW)], True),  # it took no step
        ([Attempt(4, "2", NOW, first_step=119, last_step=130)], True),  # it began there
        ([Attempt(4, "2", NOW, first_step=119, last_step=130, saved=120)], False),
        ([Attempt(4, "2", NOW, first_step=101, last_step=105)], False),  # it went back behind it
        ([Attempt(4, "2", NOW, last_step=130)], False),  # nobody knows where it began
        ([Attempt(2, "1", NOW, first_step=1, last_step=90, saved=80)], True),
        ([Attempt(2, "1", NOW, first_step=1, last_step=130, saved=118)], False),
    ],
)
def test_a_kept_snapshot_is_used_while_it_is_the_runs_newest_state(later: list[Attempt], use: bool) -> None:
    assert may_begin_from(KeptSnapshot(Path("x"), 118, 3), later) is use
