"""A disk that does not give the bytes of the newest checkpoint any more, and gives those of the one before."""

from __future__ import annotations

import errno
import random
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.manifest import loop_file
from ftsupervise.guard import loop_state
from ftsupervise.guard.resume import CannotResume
from tests.neighbours.bad_disk import BadDisk, bad_disk

SIZE = 4 << 20


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[BadDisk]:
    for name in ("FTSUPERVISE_RUN_DIR", "FTSUPERVISE_ATTEMPT_DIR"):
        monkeypatch.delenv(name, raising=False)
    with bad_disk(tmp_path) as made:
        monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(made.place / "ckpt"))
        yield made


def train(steps: tuple[int, ...] = (), *, ranks: int = 1) -> list[Any]:
    """Return what each rank restored, a step and a state, or what it raised; then each saves ``steps``."""
    meet, votes = threading.Barrier(ranks, timeout=60), [0] * ranks
    found = list[Any]([None] * ranks)

    def rank(number: int) -> None:
        def agree(vote: int) -> int:
            votes[number] = vote
            meet.wait()
            most = max(votes)
            meet.wait()
            return most

        state: dict[str, Any] = {"weights": bytearray(SIZE), "step": 0}
        with Guard(signals=(), rank=number, world=ranks, agree=agree if ranks > 1 else None) as guard:
            try:
                step = guard.restore(state=state)
            except (OSError, RuntimeError, CannotResume) as error:
                found[number] = error
                return
            found[number] = step, bytes(state["weights"])
            for step in steps:
                state.update(weights=bytearray(weights(step, number)), step=step)
                guard.save(step)

    threads = [threading.Thread(target=rank, args=(number,)) for number in range(ranks)]
    for one in threads:
        one.start()
    for one in threads:
        one.join(120)
    return found


def weights(step: int, rank: int = 0) -> bytes:
    return random.Random(step + rank).randbytes(SIZE)


@pytest.mark.resume(
    "The disk does not give the bytes of the newest checkpoint (EIO), on one rank or more",
    "it is read once more, two seconds later; then all ranks take the one before, and that one stays where it is. "
    "Where there is none before it, the error is raised and nothing begins anew",
    "the log: … cannot be read: Input/output error; `status`: … newer passed over",
)
def test_the_newest_cannot_be_read_and_the_one_before_is_loaded(
    disk: BadDisk, capsys: pytest.CaptureFixture[str]
) -> None:
    train((10, 20))
    newest = disk.place / "ckpt" / "step-00000020"
    disk.lose(loop_file(newest, 0))
    assert train() == [(10, weights(10))]
    said = capsys.readouterr().err
    assert "step-00000020 cannot be read: Input/output error" in said and "it is read once more" in said
    assert "step-00000020 is unseen: Input/output error" in said and "it is passed over" in said
    assert newest.is_dir(), "what could not be read is not set aside: the disk may come back"
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.latest() == disk.place / "ckpt" / "step-00000010", "both say the same"


def test_all_ranks_take_the_one_before_where_one_of_them_cannot_read_its_part(disk: BadDisk) -> None:
    train((10, 20), ranks=2)
    disk.lose(loop_file(disk.place / "ckpt" / "step-00000020", 1))
    assert train(ranks=2) == [(10, weights(10)), (10, weights(10, 1))]


def test_where_the_only_one_cannot_be_read_nothing_begins_anew(disk: BadDisk) -> None:
    train((10,))
    disk.lose(loop_file(disk.place / "ckpt" / "step-00000010", 0))
    (error,) = train()
    assert isinstance(error, OSError) and error.errno == errno.EIO


def test_a_disk_that_stumbles_once_costs_no_step(disk: BadDisk, monkeypatch: pytest.MonkeyPatch) -> None:
    train((10, 20))
    newest = loop_file(disk.place / "ckpt" / "step-00000020", 0)
    whole = newest.read_bytes()
    disk.lose(newest)

    def come_back(_: float) -> None:
        newest.unlink()
        newest.write_bytes(whole)

    monkeypatch.setattr(loop_state, "time", SimpleNamespace(sleep=come_back))
    assert train() == [(20, weights(20))]
