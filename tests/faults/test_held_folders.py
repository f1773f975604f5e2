"""Folders and pages that are opened to be judged, on a file server that answers with errors, or whose pages are replaced."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from ftsupervise.host import files, ownership
from ftsupervise.rundir import fence, ledger, members, pinned, switches
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir, write_named, write_whole

from .conftest import HungMount

pytestmark = pytest.mark.root


def open_files() -> list[str]:
    found = []
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            found.append(str(Path(f"/proc/self/fd/{name}").readlink()))
    return sorted(found)


def looks_at(run: RunDir) -> list[Callable[[], object]]:
    """The ways in which a supervisor, a guard or a command opens what lies in a run directory."""
    through = run.root / "link"
    return [
        lambda: switches.read_switch(run, switches.KILL),
        lambda: switches.clear_answered(run, switches.SAVE, (1, 1)),
        lambda: switches.read_brake(run),
        lambda: fence.newer(run.attempts, 1),
        lambda: fence.open_area(run.staging, 1),
        lambda: fence.seal(run.staging, 2, (1,)),
        lambda: ledger.newest(run),
        lambda: members.forget_all(run),
        lambda: pinned.seen_with(run, run.attempt(1)),
        lambda: read_beats(run),
        lambda: ownership.strangers_link(through / "x"),
        lambda: os.close(ownership.open_judged(through / "page")),
        lambda: files.read_bounded(through / "page", 100),
        lambda: os.close(files.open_append(through / "page")),
        lambda: write_whole(through / "page", "1", sync=False),
        lambda: write_named(through / "page", "1", sync=False),
        lambda: ownership.remove_entry(through / "nothing"),
        lambda: ownership.make_folder(run.root / "more"),
    ]


@pytest.mark.fault(
    "A file server answers each look at a run with an error, for days (ESTALE, EIO, a FUSE daemon that is gone)",
    "no look leaves a file open, so that the supervisor does not run out of them",
)
@pytest.mark.parametrize(
    "how", ["ESTALE!all", "ESTALE!getattr", "EIO!read", "EIO!readlink", "EIO!write", "ENOTCONN!open", ""]
)
def test_looks_at_a_server_that_answers_with_errors_leave_no_file_open(
    tmp_path: Path, dead_mount: HungMount, how: str
) -> None:
    run, real = RunDir(dead_mount.point / "r"), tmp_path / "backing" / "r"
    for part in ("switches", "state/members", "attempts/0001", "staging", "beats"):
        (real / part).mkdir(parents=True)
    (real / "link").symlink_to(run.root)
    (real / "page").write_text("1")
    looks = looks_at(run)
    for look in looks:  # what a process keeps for good is open from now on
        with suppress(OSError, ownership.NotTrusted):
            look()
    before = open_files()
    dead_mount.hang(how)
    for _ in range(20):
        for look in looks:
            with suppress(OSError, ownership.NotTrusted):
                look()
    assert open_files() == before


@pytest.mark.fault(
    "A page on a file server is replaced while a command opens it to judge its way",
    "the one that has its name now is read: ESTALE, which the server says of the former one, is told to nobody",
)
def test_a_page_that_is_replaced_while_it_is_judged_is_read_as_it_is_now(tmp_path: Path, dead_mount: HungMount) -> None:
    folder, over = dead_mount.point / "d", threading.Event()
    folder.mkdir()
    (tmp_path / "link").symlink_to(folder)
    page = tmp_path / "link" / "page"
    write_whole(page, "0", sync=False)

    def replace() -> None:
        while not over.wait(0.001):
            write_whole(folder / "page", f"{time.monotonic_ns()}", sync=False)

    writer = threading.Thread(target=replace)
    writer.start()
    try:
        for _ in range(300):
            os.close(ownership.open_judged(page))
            assert ownership.read_trusted(page, follow=True).isdigit()
            assert files.read_bounded(page, 100).isdigit()
    finally:
        over.set()
        writer.join(30)
