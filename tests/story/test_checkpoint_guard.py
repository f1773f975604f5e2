"""``guard.checkpoint`` writes manifests, several ranks at once, and ``guard.latest`` finds the newest good one."""

from __future__ import annotations

import multiprocessing
import os
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.manifest import FOLDER_NAME, read_manifest
from ftsupervise.checkpoints.rank_lists import leave_list, list_of, rank_in
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.rundir.attempt_pages import read_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Resumed

FULL = Scope(Thoroughness.FULL)


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    return tmp_path / "ckpt"


@pytest.fixture
def ranks(checkpoints: Path) -> Iterator[list[Guard]]:
    found = [Guard(signals=(), rank=rank, world=4) for rank in range(4)]
    yield found
    for one in found:
        one.close()


def all_save(ranks: list[Guard], step: int, write: Callable[[Path, int], object]) -> list[BaseException]:
    """Each rank in a thread of its own, as processes on nodes are; a threading.Barrier is their collective."""
    barrier, failed = threading.Barrier(len(ranks)), list[BaseException]()

    def save(number: int) -> None:
        try:
            with ranks[number].checkpoint(step, barrier=barrier.wait) as folder:
                write(folder, number)
        except (OSError, threading.BrokenBarrierError) as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(len(ranks))]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    return failed


def test_a_checkpoint_is_in_its_manifest_with_all_that_is_known_of_it(checkpoints: Path) -> None:
    with (
        Guard(signals=(), rank=0, world=1) as guard,
        guard.checkpoint(7, metrics={"loss": 2.5, "nan": float("nan")}) as at,
    ):
        (at / "weights").write_bytes(b"w" * 100_000)
    made = read_manifest(checkpoints / "step-00000007")
    assert made is not None
    assert (made.step, made.world, made.metrics, [one.path for one in made.files]) == (7, 1, {"loss": 2.5}, ["weights"])
    assert made.host == os.uname().nodename and made.at is not None
    assert verify(checkpoints / "step-00000007", FULL).state is CheckpointState.VERIFIED


def test_four_ranks_write_at_once_and_rank_0_joins_their_lists(checkpoints: Path, ranks: list[Guard]) -> None:
    def write(folder: Path, rank: int) -> None:
        (folder / f"__{rank}_0.distcp").write_bytes(os.urandom(10_000))
        (folder / "sub").mkdir(exist_ok=True)
        (folder / "sub" / f"rng-{rank}.bin").write_bytes(os.urandom(10))
        if rank == 2:
            (folder / "no-number").write_bytes(b"of rank 2, which its name does not say")

    assert not all_save(ranks, 100, write)
    whole = checkpoints / "step-00000100"
    made = read_manifest(whole)
    assert made is not None and len(made.files) == 9 and made.world == 4
    assert verify(whole, FULL).state is CheckpointState.VERIFIED
    assert [one.name for one in (whole / FOLDER_NAME).iterdir()] == ["manifest.json"], "the ranks' lists are gone"


@pytest.mark.fault(
    "A rank dies before it has written its part of a checkpoint",
    "the checkpoint is torn, and is not committed",
)
@pytest.mark.usefixtures("one_after_the_other")
def test_a_rank_that_left_no_list_makes_the_checkpoint_torn_and_nothing_is_committed(
    checkpoints: Path, ranks: list[Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(folder: Path, rank: int) -> None:
        (folder / f"__{rank}_0.distcp").write_bytes(b"x")

    before = all_save(ranks, 1, write)
    with ranks[1].checkpoint(2, barrier=lambda: None) as folder:
        write(folder, 1)
    with ranks[3].checkpoint(2, barrier=lambda: None) as folder:
        write(folder, 3)
    monkeypatch.setattr("ftsupervise.checkpoints.rank_lists.PATIENCE", 0.2)
    with (
        pytest.raises(FileNotFoundError, match="rank 2 left no list of its files: the checkpoint is torn"),
        ranks[0].checkpoint(2, barrier=lambda: None) as folder,
    ):
        write(folder, 0)
    assert not before and [one.name for one in checkpoints.glob("step-*")] == ["step-00000001"]
    with ranks[0].checkpoint(2, barrier=lambda: None, ranks=(0, 1, 3)) as folder:  # where three of them save
        write(folder, 0)
    assert verify(checkpoints / "step-00000002", FULL).good


def test_ranks_that_enter_and_write_nothing_take_no_folder_away_from_rank_0(
    checkpoints: Path, ranks: list[Guard]
) -> None:
    inside, left = threading.Event(), threading.Event()

    def watch() -> None:
        with ranks[1].checkpoint(1):
            inside.set()
            left.wait(10)

    other = threading.Thread(target=watch)
    with ranks[0].checkpoint(1) as folder:
        with ranks[2].checkpoint(1):
            pass
        (folder / "weights").write_bytes(b"w")
        other.start()
        inside.wait(10)
        threading.Timer(0.2, left.set).start()  # it leaves without a file while rank 0 waits to commit
    other.join()
    assert verify(checkpoints / "step-00000001", FULL).good


@pytest.mark.resume(
    "One rank of several cannot write its part (a full disk), and there is no barrier",
    "nothing is committed; the one before stays",
    "rank 0 raises: rank 1 could not write its part",
)
def test_rank_0_commits_nothing_without_the_part_of_a_rank_that_could_not_write_it(
    checkpoints: Path, ranks: list[Guard]
) -> None:
    with pytest.raises(FileNotFoundError, match="rank 1 could not write its part"), ranks[0].checkpoint(1) as folder:
        with pytest.raises(OSError, match="full"), ranks[1].checkpoint(1):
            raise OSError(28, "the disk is full")
        (folder / "rank-0.bin").write_bytes(b"w")
    assert not list(checkpoints.glob("step-*"))


@pytest.mark.resume(
    "A loop with a loader of its own asks nobody, and begins at step 1 over what it had saved",
    "the save is refused, nothing is replaced",
    "… which did not go on from it: it is not replaced",
)
@pytest.mark.parametrize("first", [1, 21])
def test_a_loop_that_asks_nobody_replaces_a_step_only_where_it_has_gone_on(checkpoints: Path, first: int) -> None:
    def train(begin: int, *saves: int) -> None:
        with Guard(signals=(), rank=0, world=1) as guard:
            for step in range(begin, max(saves) + 1):
                guard.step(step)
                if step in saves:
                    with guard.checkpoint(step) as folder:
                        (folder / "weights").write_bytes(f"{begin}".encode())

    train(1, 10, 20, 30)
    if first == 21:  # its own loader took step 20
        train(first, 30)
        assert (checkpoints / "step-00000030" / "weights").read_bytes() == b"21"
    else:
        with pytest.raises(FileExistsError, match="which did not go on from it: it is not replaced"):
            train(first, 10)
        assert (checkpoints / "step-00000010" / "weights").read_bytes() == b"1"


def test_a_loop_with_a_loader_of_its_own_writes_its_one_checkpoint_again_and_again(checkpoints: Path) -> None:
    for begin in (1, 11):
        with Guard(signals=(), rank=0, world=1) as guard:
            assert guard.restore(state={"tokens": 0}) is None, "guard.save() did not write it"
            if begin > 1:
                assert guard.latest() == checkpoints / "last"
            for step in range(begin, begin + 10):
                guard.step(step)
                if step % 5 == 0:
                    with guard.checkpoint(step, "last") as folder:
                        (folder / "weights").write_bytes(f"{step}".encode())
    assert (checkpoints / "last" / "weights").read_bytes() == b"20"


@pytest.mark.resume(
    "Several ranks write one checkpoint and give no barrier",
    "all their files: rank 0 waits for those that have entered",
    "nothing",
)
def test_without_a_barrier_the_commit_waits_for_the_ranks_that_have_entered(
    checkpoints: Path, ranks: list[Guard]
) -> None:
    entered, failed = threading.Barrier(4), list[BaseException]()

    def save(number: int) -> None:
        try:
            with ranks[number].checkpoint(1) as folder:
                entered.wait()
                time.sleep(0.3 * number)
                (folder / f"rank-{number}.bin").write_bytes(os.urandom(1000))
        except OSError as error:
            failed.append(error)

    threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
    for one in threads:
        one.start()
    for one in threads:
        one.join()
    made = read_manifest(checkpoints / "step-00000001")
    assert made is not None and len(made.files) == 4 and not failed
    assert [one.name for one in (checkpoints / "step-00000001" / FOLDER_NAME).iterdir()] == ["manifest.json"]


@pytest.mark.resume(
    "… and one of them enters when rank 0 has committed",
    "the checkpoint before: the part is set aside",
    "that rank's save raises: give guard.checkpoint(…, barrier=…)",
)
def test_without_a_barrier_a_rank_that_comes_too_late_raises_and_the_part_is_no_checkpoint(
    checkpoints: Path, ranks: list[Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftsupervise.guard.checkpoint.COMMIT_WITHIN", 0.3)
    with ranks[0].checkpoint(1) as folder:
        (folder / "rank-0.bin").write_bytes(b"one of two")
    with (
        pytest.raises(OSError, match=r"rank 1 had not written its part when rank 0 committed: .*barrier="),
        ranks[1].checkpoint(1) as folder,
    ):
        (folder / "rank-1.bin").write_bytes(b"the other")
    assert not (checkpoints / "step-00000001").exists()
    with ranks[0].checkpoint(2) as folder:
        (folder / "all.bin").write_bytes(b"rank 0 alone saves")
    with ranks[1].checkpoint(2):
        pass  # and the others are in the block all the same
    assert verify(checkpoints / "step-00000002", FULL).good


# One of two ranks; "dies" when it has listed its part, before rank 0 has come.
A_PART = """
import os, signal, sys, threading
from ftsupervise import Guard
from ftsupervise.checkpoints import rank_lists
rank, word, then = int(sys.argv[1]), sys.argv[2], sys.argv[3:]
rank_lists.APART = 0.0
if then == ["dies"]:
    leave_list = rank_lists.leave_list
    rank_lists.leave_list = lambda *given: (leave_list(*given), os.kill(os.getpid(), signal.SIGKILL))
with Guard(signals=(), rank=rank, world=2) as guard, guard.checkpoint(20) as folder:
    (folder / f"part-rank{rank}.bin").write_text(word)
    (folder / f"{word}.bin").write_text(word)
"""


@pytest.mark.resume(
    "Ranks without a supervisor are killed when one of them has written its part, and a later launch saves that step "
    "again",
    "the later one, without the part of before",
    "nothing",
)
def test_a_part_that_a_launch_before_has_left_is_in_no_checkpoint_of_a_later_one(checkpoints: Path) -> None:
    def play(*words: str) -> int:
        return subprocess.run([sys.executable, "-c", A_PART, *words], timeout=60, check=False).returncode

    assert play("1", "old", "dies") == -9 and len([*checkpoints.rglob("part-rank1.bin")]) == 1
    time.sleep(
        0.05
    )  # the kernel tells the start of a process in hundredths of a second, and a launch takes longer than that
    assert play("0", "new") == 0
    made = read_manifest(checkpoints / "step-00000020")
    assert made is not None and [one.path for one in made.files] == ["new.bin", "part-rank0.bin"]
    assert verify(checkpoints / "step-00000020", FULL).state is CheckpointState.VERIFIED


def test_no_rank_leaves_the_block_before_rank_0_has_committed(
    checkpoints: Path, ranks: list[Guard], capfd: pytest.CaptureFixture[str]
) -> None:
    target, seen = checkpoints / "step-00000003", list[bool]()
    meet = threading.Barrier(4)

    def save(number: int) -> None:
        def barrier() -> None:
            meet.wait()
            if number == 0:
                time.sleep(0.3)  # the others are far ahead when it commits

        with ranks[number].checkpoint(3, barrier=barrier) as folder:
            (folder / f"shard-{number}").write_bytes(b"x")
        seen.append(read_manifest(target) is not None)

    for _ in range(2):  # the second one takes the place of the first
        before = target.stat().st_ino if target.exists() else 0
        threads = [threading.Thread(target=save, args=(number,)) for number in range(4)]
        for one in threads:
            one.start()
        for one in threads:
            one.join()
        assert target.stat().st_ino != before
    assert seen == [True] * 8 and "has not committed" not in capfd.readouterr().err


def test_when_rank_0_cannot_commit_each_rank_hears_why(
    checkpoints: Path, ranks: list[Guard], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ftsupervise.checkpoints.rank_lists.PATIENCE", 0.2)
    failed = all_save(ranks[:3], 4, lambda folder, rank: (folder / f"shard-{rank}").write_bytes(b"x"))
    words = sorted(str(one) for one in failed)
    assert len(words) == 3 and all("rank 3 left no list of its files" in one for one in words)
    assert sum("rank 0 could not commit it" in one for one in words) == 2
    assert not all_save(ranks, 4, lambda folder, rank: (folder / f"shard-{rank}").write_bytes(b"x")), (
        "the next one does"
    )


@pytest.mark.usefixtures("one_after_the_other")
def test_a_rank_that_does_not_see_the_commit_in_time_goes_on_and_says_so(
    checkpoints: Path, ranks: list[Guard], capfd: pytest.CaptureFixture[str]
) -> None:
    with ranks[1].checkpoint(2, barrier=lambda: None) as folder:
        (folder / "shard-1").write_bytes(b"x")
    assert "rank 1: step 2: rank 0 has not committed it within 30 s, as far as this rank sees" in capfd.readouterr().err


@pytest.mark.usefixtures("one_after_the_other")
def test_what_a_rank_listed_counts_only_as_long_as_the_file_is_as_it_was(checkpoints: Path, ranks: list[Guard]) -> None:
    def write(folder: Path, rank: int) -> None:
        (folder / f"shard-{rank}").write_bytes(b"x" * 100)

    with ranks[1].checkpoint(5, barrier=lambda: None) as folder:
        write(folder, 1)
    (folder / "shard-1").write_bytes(b"y" * 100)  # by somebody else, after the list
    leave_list(folder, 2, ())
    leave_list(folder, 3, ())
    with ranks[0].checkpoint(5, barrier=lambda: None) as folder:
        write(folder, 0)
    assert verify(checkpoints / "step-00000005", FULL).state is CheckpointState.VERIFIED
    with ranks[1].checkpoint(6, barrier=lambda: None) as folder:
        write(folder, 1)
    leave_list(folder, 2, ())
    leave_list(folder, 3, ())
    (folder / "shard-1").unlink()
    with (
        pytest.raises(FileNotFoundError, match="written by rank 1 and is gone"),
        ranks[0].checkpoint(6, barrier=lambda: None),
    ):
        pass


@pytest.mark.usefixtures("one_after_the_other")
def test_a_damaged_list_of_a_rank_is_not_believed(checkpoints: Path, ranks: list[Guard]) -> None:
    with ranks[1].checkpoint(5, barrier=lambda: None) as folder:
        (folder / "shard-1").write_bytes(b"x")
    list_of(folder, 1).write_text('{"rank": 1, "files"')
    with (
        pytest.raises(OSError, match="no list of a rank's files"),
        ranks[0].checkpoint(5, barrier=lambda: None, ranks=(0, 1)),
    ):
        pass


@pytest.mark.parametrize(
    ("path", "rank"),
    [
        ("__3_0.distcp", 3),
        ("rank-00012.pt", 12),
        ("zero_pp_rank_5_mp_rank_00_optim_states.pt", 5),
        ("mp_rank_02/model_optim_rng.pt", 2),
        ("sub7/weights", 7),
        ("weights", None),
    ],
)
def test_a_file_s_name_says_which_rank_wrote_it(path: str, rank: int | None) -> None:
    assert rank_in(path) == rank


def test_a_file_that_is_still_written_at_the_end_of_the_block_is_not_committed(checkpoints: Path) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        goes_on, stop = threading.Event(), threading.Event()

        def writer(path: Path) -> None:
            with path.open("wb") as file:
                while not stop.is_set():
                    file.write(b"x" * 10_000)
                    file.flush()
                    goes_on.set()

        try:
            with pytest.raises(OSError, match="still being written"), guard.checkpoint(1) as folder:
                thread = threading.Thread(target=writer, args=(folder / "weights",))
                thread.start()
                goes_on.wait()
        finally:
            stop.set()
            thread.join()
    assert not list(checkpoints.glob("step-*"))


def test_latest_passes_over_what_is_broken_and_says_so_once(
    checkpoints: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() is None
        for step in (1, 2, 3):
            with guard.checkpoint(step) as folder:
                (folder / "weights").write_bytes(b"w" * 1000)
        assert guard.latest() == checkpoints / "step-00000003"
        os.truncate(checkpoints / "step-00000003" / "weights", 999)
        assert [guard.latest() for _ in range(3)] == [checkpoints / "step-00000002"] * 3
        assert guard.latest(world=8) is None
    said = capsys.readouterr().err
    assert said.count("checkpoint step-00000003 is truncated: weights has 999 bytes of 1000; it is passed over") == 1


def test_the_attempt_says_which_checkpoint_it_went_on_from_and_which_it_passed_over(
    tmp_path: Path, checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rundir = RunDir(tmp_path / "run")
    attempt = rundir.attempt(1)
    attempt.mkdir(parents=True)
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(rundir.root))
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT_DIR", str(attempt))
    monkeypatch.setenv("FTSUPERVISE_ATTEMPT", "1")
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() is None
        anew = read_page(Resumed, attempt)
        assert anew is not None and anew.words() == "from the beginning"
        for step in (1, 2):
            with guard.checkpoint(step) as folder:
                (folder / "weights").write_bytes(b"w" * 1000)
        (checkpoints / "step-00000002" / "weights").unlink()
        guard.latest()
    found = read_page(Resumed, attempt)
    assert found is not None and (found.checkpoint, found.step) == ("step-00000001", 1)
    assert found.passed == ("step-00000002 is missing: weights is missing",)
    assert found.words() == "from step-00000001 (1 newer passed over)"


def test_a_quick_look_reads_small_files_and_no_more_of_them_than_it_may(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loader's tables are small. The files it looks at are the same for each rank."""
    monkeypatch.setenv("FTSUPERVISE_GUARD_VERIFY", "quick")
    with Guard(signals=(), rank=0, world=1) as guard:
        for step in (1, 2):
            with guard.checkpoint(step) as folder:
                for number in range(40):
                    (folder / f"part-{number:02}").write_bytes(b"p" * (200_000 if number % 2 else 2_000))
        newest = checkpoints / "step-00000002"
        (newest / "part-39").write_bytes(b"P" * 200_000)
        assert guard.latest() == newest, "the twenty smallest and twelve of the next are read"
        (newest / "part-38").write_bytes(b"P" * 2_000)
        assert guard.latest() == checkpoints / "step-00000001"


def test_latest_reads_every_byte_unless_the_settings_say_less(
    checkpoints: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for word, found in (("sizes", 2), ("quick", 2), ("", 1), ("full", 1), ("everything", 1)):
        monkeypatch.setenv("FTSUPERVISE_GUARD_VERIFY", word)
        with Guard(signals=(), rank=0, world=1) as guard:
            for step in (1, 2):
                with guard.checkpoint(step) as folder:
                    (folder / "weights").write_bytes(b"w" * 2_000_000)
            (checkpoints / "step-00000002" / "weights").write_bytes(b"W" * 2_000_000)
            assert guard.latest() == checkpoints / f"step-{found:08d}"
    assert "is not understood: every byte is verified" in capsys.readouterr().err


def test_a_folder_that_cannot_be_read_is_an_error_and_no_beginning_anew(checkpoints: Path) -> None:
    checkpoints.write_text("a file where the folder should be")
    with Guard(signals=(), rank=0, world=1) as guard, pytest.raises(OSError, match="Not a directory"):
        guard.latest()


def test_whatever_the_umask_nobody_else_may_write_a_checkpoint(checkpoints: Path) -> None:
    before = os.umask(0)
    try:
        with Guard(signals=(), rank=0, world=1) as guard, guard.checkpoint(1) as folder:
            (folder / "sub").mkdir()
            (folder / "sub" / "weights").write_bytes(b"w")
        assert guard.latest() == checkpoints / "step-00000001"
    finally:
        os.umask(before)
    modes = [one.stat().st_mode for one in (checkpoints / "step-00000001").rglob("*")]
    assert len(modes) == 4 and not any(mode & (stat.S_IWGRP | stat.S_IWOTH) for mode in modes)


def test_the_guard_imports_nothing_of_it_before_the_first_save(tmp_path: Path) -> None:
    probe = "import sys; from ftsupervise import Guard; Guard(); print([n for n in sys.modules if 'checkpoints' in n])"
    done = subprocess.run([sys.executable, "-c", probe], capture_output=True, text=True, check=True, cwd=tmp_path)
    assert done.stdout.strip() == "[]"


def test_a_folder_that_rank_0_deletes_or_commits_meanwhile_fails_no_other_rank(tmp_path: Path) -> None:
    """Rank 1 enters while rank 0 makes the folder anew, or gives it its name: its program is not to end by that."""
    folder = tmp_path / "checkpoints"
    staged = folder / ".staging" / "0001" / "step-1"
    over = tmp_path / "over"

    def go_and_come() -> None:
        while not over.exists():
            with suppress(OSError):
                staged.mkdir()
                staged.rmdir()

    staged.parent.mkdir(parents=True)
    rank_0 = multiprocessing.get_context("fork").Process(target=go_and_come, daemon=True)
    rank_0.start()
    try:
        place = RankContext(None, None, None, 1, 2, folder, staging=staged.parent)
        checkpoints = Checkpoints(place, lambda: False, Voice(1, 2))
        for _ in range(30_000):
            checkpoints.stage("step-1")
    finally:
        over.touch()
        rank_0.join(60)


# Of two ranks only rank 0 writes; the other comes into the block a little before, or after, or as rank 0 commits.
RANK_0_WRITES = """
import random, sys, time
from ftsupervise import Guard
rank, begin = int(sys.argv[1]), float(sys.argv[2])
luck = random.Random(rank)
with Guard(signals=(), rank=rank, world=2) as guard:
    for step in range(1, 301):
        time.sleep(max(0.0, begin + 0.02 * step - time.time()) + luck.random() * (0.012 if rank else 0.004))
        with guard.checkpoint(step) as folder:
            if not rank:
                (folder / "step").write_text(str(step))
"""


@pytest.mark.resume(
    "Rank 0 alone saves, without a barrier, and commits while another rank comes into the block",
    "that checkpoint",
    "no rank's program ends by it",
)
def test_where_rank_0_alone_writes_another_rank_may_come_at_any_moment(checkpoints: Path) -> None:
    words = [sys.executable, "-c", RANK_0_WRITES]
    begin = str(time.time() + 1)
    both = [subprocess.Popen([*words, rank, begin], stderr=subprocess.PIPE, text=True) for rank in ("0", "1")]
    said = [one.communicate(timeout=120)[1] for one in both]
    assert [one.returncode for one in both] == [0, 0], said
    assert verify(checkpoints / "step-00000300", FULL).good
