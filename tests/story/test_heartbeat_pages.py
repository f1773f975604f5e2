"""A rank's page in node-local memory: what its neighbours read, and what happens where there can be none."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.rundir.heartbeat_page import ENV_PAGES, HeartbeatPage, read_page, read_pages


@pytest.fixture
def rundir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv(ENV_PAGES, str(tmp_path / "pages"))
    for name in ("run", "run/beats", "run/switches"):
        (tmp_path / name).mkdir()
    yield tmp_path / "run"


def test_the_steps_of_a_guard_stand_in_its_page_at_once(rundir: Path) -> None:
    guard = Guard(rundir, rank=3, world=4, signals=(), poll=60)
    (before,) = read_pages(rundir.parent / "pages")
    assert (before.rank, before.pid, before.step, before.phase) == (3, os.getpid(), None, "start")
    for step in range(1, 8):
        guard.step(step)
    with guard.phase("eval"):
        (during,) = read_pages(rundir.parent / "pages")
    (after,) = read_pages(rundir.parent / "pages")
    assert (during.step, during.phase, after.phase) == (7, "eval", "train")
    assert before.stepped < after.stepped <= after.beaten
    assert not after.leaving


def test_a_loop_that_falls_with_an_exception_says_that_it_leaves(rundir: Path) -> None:
    with pytest.raises(RuntimeError), Guard(rundir, rank=0, world=1, signals=()) as guard:
        guard.step(1)
        raise RuntimeError
    assert read_pages(rundir.parent / "pages")[0].leaving


@pytest.mark.parametrize("step", [float("nan"), None, "seven", 1 << 70])
def test_a_step_that_is_no_number_leaves_the_last_one(rundir: Path, step: object) -> None:
    guard = Guard(rundir, rank=0, world=1, signals=(), poll=60)
    guard.step(5)
    first = read_pages(rundir.parent / "pages")[0]
    guard.step(step)  # type: ignore[arg-type]
    second = read_pages(rundir.parent / "pages")[0]
    assert second.step == 5
    assert second.stepped > first.stepped


def test_a_directory_that_others_may_write_to_is_not_used(
    rundir: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "pages").mkdir()
    (tmp_path / "pages").chmod(0o777)
    guard = Guard(rundir, rank=0, world=1, signals=())
    guard.step(1)
    assert "not ours alone" in capsys.readouterr().err
    assert read_pages(tmp_path / "pages") == ()
    assert (rundir / "beats" / "rank-0").exists(), "the slow beats go on"


def test_a_reader_never_sees_half_a_phase_name(tmp_path: Path) -> None:
    page, over = HeartbeatPage(tmp_path / "pages", 0, 1), threading.Event()

    def flicker() -> None:
        while not over.is_set():
            page.phase("a" * 60)
            page.phase("b" * 60)

    thread = threading.Thread(target=flicker)
    thread.start()
    try:
        seen = {read_page(page.path).phase for _ in range(3000)}  # type: ignore[union-attr]
    finally:
        over.set()
        thread.join()
    assert seen <= {"a" * 60, "b" * 60, "start"}


def test_what_is_no_page_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "rank-0").write_bytes(b"x" * 256)
    (tmp_path / "rank-1").write_bytes(b"")
    os.mkfifo(tmp_path / "rank-2")
    (tmp_path / "rank-3").symlink_to(tmp_path / "rank-0")
    assert read_pages(tmp_path) == ()
    assert read_pages(tmp_path / "none") == ()
