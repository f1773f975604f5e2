"""A job ends with steps that only the memory holds: they are kept on the disk, and the next job of the run begins there."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from threading import Timer
from time import monotonic

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.retain import in_use
from ftsupervise.model import Attempt
from ftsupervise.rundir import fence
from ftsupervise.rundir.anchor import Anchor
from ftsupervise.rundir.lineage import Lineage, keep_lineage, read_lineage
from ftsupervise.rundir.paths import (
    ENV_CHECKPOINT_DIR,
    ENV_RESTART,
    ENV_SNAPSHOT_KEPT,
    ENV_SNAPSHOT_STEP,
    ENV_SNAPSHOTS,
    RunDir,
)
from ftsupervise.snapshots import kept as snapshots_kept
from ftsupervise.snapshots.choice import Begun
from ftsupervise.snapshots.doubts import Beside, against
from ftsupervise.snapshots.keeper import KeptSnapshots, Target
from ftsupervise.snapshots.kept import KeptPage, KeptSnapshot
from ftsupervise.snapshots.node import NO_ANSWER, Done, Keep, keep
from ftsupervise.snapshots.slots import SnapshotId, open_slots
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import Program, SupervisedRun
from tests.neighbours.typed import typed
from tests.story.test_snapshot_slots import made, write
from tests.story.test_snapshots_in_a_run import ranks

SUMS = [f"rank {rank} sum {sum(range(61)) * (rank + 1)}" for rank in (0, 1)]
KILLED = "if attempt == 1 and step == 32 and rank == 1: os.kill(os.getpid(), 9)"


def kept_in(run: SupervisedRun) -> list[KeptSnapshot]:
    return snapshots_kept.all_in(run.rundir.checkpoints)


@pytest.mark.fault(
    "A job ends with steps that only the memory holds",
    "they are kept on the disk, and the next job begins there",
)
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


@pytest.mark.fault("A bit of what was kept on the disk changes", "the run begins from its checkpoint")
@pytest.mark.resume("A bit of a kept snapshot flips", "the newest checkpoint", "the log: … is damaged")
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
    keep_lineage(rundir, "run")
    return KeptSnapshots(rundir, rundir.checkpoints), fence.staging(rundir, rundir.checkpoints), rundir.checkpoints


def test_once_a_newer_attempt_has_begun_nothing_is_kept(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=1) as file:
        write(file, 0, 8)
    kept, where, checkpoints = areas(tmp_path)
    area = fence.open_area(where, 1)
    assert area is not None

    def ask(folder: str, seconds: float) -> dict[str, Done]:
        done = keep(str(memory), Keep(8, 1, (0,), folder))
        fence.seal(where, 2, [1])
        return {"here": done}

    path, why = kept.write(KeptPage(8, 1, 1), Target(area, monotonic() + 30), ask)
    assert path is None and why
    assert snapshots_kept.all_in(checkpoints) == []


def test_a_node_that_does_not_answer_or_has_too_little_time_leaves_nothing(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=2) as file:
        write(file, 0, 8)
    kept, where, checkpoints = areas(tmp_path)
    for number, (seconds, answers, word) in enumerate(
        ((30.0, {"a": Done(""), "b": NO_ANSWER}, "b: no answer"), (0.0, {"a": Done("")}, "too little time")), 1
    ):
        area = fence.open_area(where, number)
        assert area is not None
        path, why = kept.write(KeptPage(8, 1, 2), Target(area, monotonic() + seconds), lambda *_, say=answers: say)
        assert path is None and word in why
    assert snapshots_kept.all_in(checkpoints) == []


def test_a_node_writes_only_what_it_holds_whole(memory: Path, tmp_path: Path) -> None:
    with made(memory, rank=0, world=1) as file:
        header = write(file, 0, 8)
        file.commit(0, header._replace(algorithm=1, digest=b"x" * 16))
        assert "damaged" in keep(str(memory), Keep(8, 1, (0,), str(tmp_path))).problem
        assert "is not in memory any more" in keep(str(memory), Keep(6, 1, (0,), str(tmp_path))).problem
        assert "No such file" in keep(str(memory), Keep(8, 1, (7,), str(tmp_path))).problem
    assert keep(str(memory), Keep(8, 1, (0,), "relative")) == Done("no such question")


@pytest.mark.resume(
    "The next job has another number of ranks than the kept snapshot",
    "the newest checkpoint",
    "the loop's output: 1 rank made it, and 3 would begin from it",
)
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
    wait_until(
        lambda: keep(str(memory / "here"), Keep(8, 0, (0,), str(tmp_path))) == Done(""),
        "its digest, which a thread takes",
    )
    snapshots_kept.write_page(tmp_path, KeptPage(8, 0, 1))
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
        ([Attempt(3, "1", NOW, first_step=1, last_step=130, saved=118)], False),
    ],
)
def test_a_kept_snapshot_is_used_while_it_is_the_runs_newest_state(later: list[Attempt], use: bool) -> None:
    assert (against(SnapshotId(118, 3), later) == "") is use


# --------------------------------------------------------------------------- what somebody threw away does not come back

# Trains to step 40 with a checkpoint every 10. Each attempt leaves its own mark on each step that it makes.
TRAIN = """
import math, os, signal, sys
from ftsupervise import Guard
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
guard = Guard(poll=0.02)
state = {"step": 0, "made": []}
guard.restore(state=state, code="{code}")
print("attempt", attempt, "begins after", state["step"], flush=True)
{first}
for step in range(state["step"] + 1, 41):
    state["step"] = step
    state["made"].append([step, attempt])
    {fault}
    if guard.step(step).stop:
        break
    if step % 10 == 0:
        guard.save(step)
    while step % 2 == 0 and not guard.snapshot(step):
        pass
else:
    guard.finished(40)
"""


def train(run: SupervisedRun, *words: str, first: str = "", fault: str = "", code: str = "", **env: str) -> Program:
    text = TRAIN.replace("{first}", first or "pass").replace("{fault}", fault or "pass").replace("{code}", code)
    one = run.start(
        "--in-place", "0", "--back-off", "0", "--warm", "off", *words, "--", sys.executable, "-c", text, **env
    )
    one.wait(60)
    return one


KILL_AT_36 = "if attempt == 1 and step == 36: os.kill(os.getpid(), 9)"


def begins(run: SupervisedRun) -> list[tuple[str, int | None]]:
    return [(one.begins.source if one.begins else "", one.first_step) for one in run.attempts()]


@pytest.mark.resume(
    "Somebody deletes the newest checkpoints between two jobs, to go back to an older one",
    "the newest checkpoint that was left; the snapshot of later steps that was kept on the disk is not used, and goes",
    "the log: the snapshot of step 34, kept on the disk, is not used: step-00000030, the checkpoint behind it, is "
    "not there any more",
)
def test_who_deletes_checkpoints_to_go_back_is_not_overruled_by_a_kept_snapshot(run: SupervisedRun) -> None:
    one = train(run, fault=KILL_AT_36)
    assert [kept.step for kept in kept_in(run)] == [34], one.said()
    for step in (20, 30):
        shutil.rmtree(run.rundir.checkpoints / f"step-{step:08d}")
    two = train(run)
    assert "attempt 2 begins after 10" in two.said()
    assert (
        "the snapshot of step 34, kept on the disk, is not used: step-00000030, the checkpoint behind it" in two.said()
    )
    assert kept_in(run) == []


@pytest.mark.resume(
    "Somebody moves the newest checkpoint away while the run goes on, and a rank dies",
    "the newest checkpoint that was left, and no snapshot in memory",
    "`status` and the log: step-00000030, the checkpoint behind it, is not there any more",
)
def test_a_checkpoint_that_somebody_moved_aside_takes_the_snapshots_in_memory_with_it(run: SupervisedRun) -> None:
    aside = "if attempt == 1 and step == 34: os.rename(guard.latest(), '{}')".format(run.folder / "aside")
    one = train(run, "--in-place", "1", fault=f"{aside}\n    {KILL_AT_36}")
    assert "attempt 2 begins after 20" in one.said(), one.said()
    assert "step-00000030, the checkpoint behind it, is not there any more" in one.said()


@pytest.mark.resume(
    "The folder of the checkpoints cannot be listed for a moment",
    "the snapshot in memory: what cannot be seen is not deleted",
    "nothing",
)
def test_a_file_system_that_cannot_be_listed_does_not_say_that_a_checkpoint_is_gone(tmp_path: Path) -> None:
    kept, _, checkpoints = areas(tmp_path)
    checkpoints.rmdir()
    checkpoints.symlink_to(checkpoints)
    was = Anchor("step-00000030", 30)
    assert kept.beside(34, was) is None
    checkpoints.unlink()
    assert kept.beside(34, was) == (Beside(was), "step-00000030, the checkpoint behind it, is not there any more")


@pytest.mark.resume(
    "A network file system shows the newest checkpoint a moment late",
    "the snapshot, as if it had shown it at once",
    "nothing",
)
def test_a_checkpoint_that_shows_itself_late_is_not_taken_for_a_deleted_one(tmp_path: Path) -> None:
    kept, _, checkpoints = areas(tmp_path)
    was = Anchor("step-00000030", 30)
    late = Timer(0.5, lambda: (checkpoints / "step-00000030").mkdir())
    late.start()
    assert kept.beside(34, was) == (Beside(was), "")
    late.join()


@pytest.mark.resume(
    "Somebody brings a newer checkpoint back from a copy, while a snapshot is kept on the disk",
    "that checkpoint",
    "the log: the snapshot … is not used: step-00000050 is newer",
)
def test_a_copy_that_somebody_brought_back_is_newer_than_a_kept_snapshot(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36)
    shutil.copytree(run.rundir.checkpoints / "step-00000030", run.rundir.checkpoints / "step-00000050")
    two = train(run)
    assert "kept on the disk, is not used: step-00000050 is newer" in two.said()


@pytest.mark.resume(
    "The state of a kept snapshot crashes the program",
    "the first job tries the snapshot, the next one begins from the newest checkpoint",
    "the log: the snapshot … is not used: attempt 2, which began from it, failed: exit 7",
)
def test_a_kept_snapshot_from_which_the_program_crashed_is_not_tried_by_each_member(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36)
    crash = "if state['step'] == 34: sys.exit(7)"
    two = train(run, first=crash)
    assert "attempt 2 begins after 34" in two.said()
    three = train(run, first=crash)
    assert "attempt 3 begins after 30" in three.said(), three.said()
    assert "is not used: attempt 2, which began from it, failed: exit 7" in three.said()


@pytest.mark.resume(
    "The program crashes from a snapshot in memory, and its job ends",
    "the newest checkpoint: that snapshot is not kept on the disk",
    "`status`: exit 7",
)
def test_a_snapshot_in_memory_from_which_the_program_crashed_is_not_kept(run: SupervisedRun) -> None:
    one = train(run, "--in-place", "1", first="if state['step'] == 34: sys.exit(7)", fault=KILL_AT_36)
    assert "attempt 2 begins after 34" in one.said(), one.said()
    assert kept_in(run) == []


@pytest.mark.resume(
    "The loss is no number after a kept snapshot, with `guard.loss.nonfinite: resume`",
    "a checkpoint from before the trouble, once, and not the snapshot again",
    "the log: the snapshot … is not used: attempt 2 came to trouble with its loss",
)
def test_a_poisoned_kept_snapshot_does_not_defeat_what_is_done_about_the_loss(run: SupervisedRun) -> None:
    """The loss is no number from step 36 on wherever step 34 was made by attempt 1: only going back helps."""
    train(run, fault=KILL_AT_36)
    poison = "guard.loss(math.nan if step >= 36 and [34, 1] in state['made'] else 1.0)"
    words = ("--loss-nonfinite", "resume", "--loss-back", "5")
    two = train(run, *words, fault=poison)
    assert "attempt 2 begins after 34" in two.said()
    three = train(run, *words, fault=poison)
    assert "attempt 3 begins after 30" in three.said(), three.said()
    assert "is not used: attempt 2 came to trouble with its loss: loss is not a number" in three.said()
    assert run.rundir.has_finished()


@pytest.mark.resume(
    "Retention would remove the checkpoint that a kept snapshot goes on from",
    "the kept snapshot: that checkpoint stays",
    "`checkpoints prune`: the kept snapshot of step 34 goes on from it",
)
def test_retention_leaves_the_checkpoint_alone_that_a_kept_snapshot_goes_on_from(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36)
    assert in_use(None, run.rundir.checkpoints, 0.0, snapshots_kept.anchors(run.rundir.checkpoints)) == {
        "step-00000030": "the kept snapshot of step 34 goes on from it"
    }


# ------------------------------------------------------------------------------------------------- whose snapshot it is


@pytest.mark.resume(
    "Another run keeps a snapshot in the same folder",
    "each run's own; neither removes the other's",
    "nothing",
)
def test_two_runs_in_one_folder_never_touch_each_others_kept_snapshots(run: SupervisedRun) -> None:
    """Neither has saved a checkpoint yet; with one of another run there, the second would not begin at all."""
    kill_at_9 = "if step == 9: os.kill(os.getpid(), 9)"
    train(run, fault=kill_at_9)
    other = SupervisedRun(run.folder / "other", run.folder)
    try:
        one = train(other, fault=kill_at_9, **{ENV_CHECKPOINT_DIR: str(run.rundir.checkpoints)})
        assert "attempt 1 begins after 0" in one.said(), one.said()
        assert [kept.step for kept in kept_in(run)] == [8, 8]
        two = train(run)
        assert "attempt 2 begins after 8" in two.said()
        assert run.rundir.has_finished()
        (left,) = kept_in(run)
        assert snapshots_kept.read_page(left.path).run_dir == str(other.rundir.root)
    finally:
        other.close()


@pytest.mark.resume(
    "The run directory was brought back from an older copy, and a kept snapshot is of an attempt that it does not know",
    "the newest checkpoint; that snapshot stays where it is",
    "the log: the snapshot … is not used: the ledger does not know the attempt 1 that made it",
)
def test_a_snapshot_of_an_attempt_that_the_ledger_does_not_know_is_neither_used_nor_removed(run: SupervisedRun) -> None:
    """As where a run directory was brought back from a copy that is older, and has made that attempt again."""
    train(run, fault=KILL_AT_36)
    start = run.rundir.attempt(1) / "start.json"
    start.write_text(start.read_text().replace('"at": "20', '"at": "19'))
    two = train(run)
    assert "attempt 2 begins after 30" in two.said(), two.said()
    assert "is not used: the ledger does not know the attempt 1 that made it" in two.said()
    assert [kept.step for kept in kept_in(run)] == [34]


def test_a_kept_snapshot_says_who_made_it_from_what_and_by_which_code(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36, code="v1")
    (kept,) = kept_in(run)
    page = snapshots_kept.read_page(kept.path)
    lineage = read_lineage(run.rundir)
    assert (page.step, page.attempt, page.world, page.code) == (34, 1, 1, "v1")
    assert (page.run, page.run_id, page.run_dir) == (lineage.name, lineage.id, str(run.rundir.root))
    assert kept.path.name.endswith(lineage.id)
    assert page.beside.anchor.checkpoint == "step-00000030"
    assert page.began == run.attempts()[0].started
    assert page.line == (Begun(1, -1),)


@pytest.mark.resume(
    'The code has changed, and says so: `guard.restore(code="v2", …)`',
    "the newest checkpoint, and no snapshot of the older code",
    "the loop's output: code 'v1' made it, and this is code 'v2'",
)
def test_code_of_another_version_goes_on_from_a_checkpoint_and_not_from_a_snapshot(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36, code="v1")
    two = train(run, code="v2")
    assert "the snapshot of step 34 cannot be used: code 'v1' made it, and this is code 'v2'" in two.said()
    assert "attempt 2 begins after 30" in two.said()


def test_each_replica_group_of_a_run_keeps_its_own_snapshots() -> None:
    me = Lineage("0123456789abcdef")
    names = [
        snapshots_kept.name_of(SnapshotId(8, 1), snapshots_kept.run_of(me, group)) for group in ("", "g000", "g001")
    ]
    assert len(set(names)) == 3


def test_a_folder_of_files_is_not_given_back_to_code_of_another_version(
    memory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    named = {"SLURMD_NODENAME": "here", ENV_SNAPSHOTS: str(memory), ENV_RESTART: "0", "RANK": "0", "WORLD_SIZE": "1"}
    for name, value in named.items():
        monkeypatch.setenv(name, value)
    (memory / "here").mkdir(mode=0o700)

    def snapshot(guard: Guard) -> bool:
        with guard.snapshot_folder(8, size=100) as folder:
            if folder is not None:
                (folder / "state").write_text("eight")
        with open_slots(memory / "here" / "rank-0") as file:
            return bool(file.held())

    guard = Guard()
    assert guard.restore(folder=tmp_path / "into", code="v1") is None
    wait_until(lambda: snapshot(guard), "the memory")
    guard.close()
    two = Guard()
    assert two.restore(folder=tmp_path / "into", code="v2") is None
    assert "code 'v1' made it, and this is code 'v2'" in capfd.readouterr().err
    assert Guard().restore(folder=tmp_path / "into", code="v1") == 8, "it has not begun from anything else"
    assert two.latest() is None
    assert Guard().restore(folder=tmp_path / "into", code="v1") is None, "it has begun without it: it is given up"


@pytest.mark.resume(
    "Somebody begins the run anew (`checkpoints anew`), and a job had kept a snapshot",
    "nothing: it begins at step 0, as that person said",
    "the log: the snapshot of step 8, kept on the disk, is not used: somebody has begun the run anew since",
)
def test_who_begins_a_run_anew_is_not_overruled_by_a_snapshot_of_before(run: SupervisedRun) -> None:
    """Where nothing was saved yet there is no checkpoint behind the snapshot that could be missed."""
    train(run, fault="if attempt == 1 and step == 9: os.kill(os.getpid(), 9)")
    assert [kept.step for kept in kept_in(run)] == [8]
    typed("checkpoints", "anew", str(run.rundir.root), "--reason", "another tokenizer", folder=run.folder, code=0)
    two = train(run)
    assert "attempt 2 begins after 0" in two.said(), two.said()
    assert "is not used: somebody has begun the run anew since" in two.said()


@pytest.mark.resume(
    "Somebody opens a kept snapshot, its page or the folder above to others (mode), or it belongs to another account",
    "the newest checkpoint, or an older kept snapshot",
    "the log: … is not used: everybody may write …; type: chmod go-w …",
)
@pytest.mark.parametrize("what", ["folder", "page", "state", "owner", "above"])
def test_a_kept_snapshot_that_others_may_write_is_refused_with_a_word(run: SupervisedRun, what: str) -> None:
    train(run, fault="if attempt == 1 and step == 9: os.kill(os.getpid(), 9)")
    (kept,) = kept_in(run)
    at = {"above": kept.path.parent, "page": kept.path / "snapshot.json", "state": kept.path / "rank-0"}.get(
        what, kept.path
    )
    if what == "owner":
        if os.geteuid():
            pytest.skip("only root can give a folder away")
        os.chown(at, 12345, -1)
    else:
        at.chmod(0o777)
    two = train(run)
    assert "attempt 2 begins after 8" not in two.said(), two.said()
    word = {"owner": "belongs to uid 12345", "state": "not a file of ours alone"}.get(what, f"everybody may write {at}")
    assert word in two.said(), two.said()
    assert kept.path.exists() or what == "state", "it is left to whoever may have put it there"
