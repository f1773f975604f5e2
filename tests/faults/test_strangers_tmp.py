"""Somebody makes this account's folder in /tmp first: nothing of theirs is used, and nothing is lost for want of it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import JournalState
from ftsupervise.host import ownership
from ftsupervise.probe.errand import Notes
from ftsupervise.watch import roster
from tests.neighbours.leftovers import end_all_under
from tests.neighbours.stranger import as_stranger

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]

STRANGER = 65534
TYPED = str(Path(sys.executable).with_name("ftsupervise"))
NOW = datetime(2026, 11, 23, tzinfo=timezone.utc)


@pytest.fixture
def shared_tmp(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    place = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    place.chmod(0o1777)
    monkeypatch.setenv("TMPDIR", str(place))
    yield place
    shutil.rmtree(place)


def laid(place: Path, how: str) -> Path:
    """What the stranger has laid under our name; it leads to, or is, a folder that all may write."""
    folder, name = place / "theirs", place / f"ftsupervise-{os.geteuid()}"
    (name if how == "a folder" else folder).mkdir(mode=0o777)
    (name if how == "a folder" else folder).chmod(0o777)
    if how == "a link":
        name.symlink_to(folder)
    elif how == "a file":
        name.write_text("")
    os.chown(name, STRANGER, STRANGER, follow_symlinks=False)
    return name if how == "a folder" else folder


@pytest.mark.threat(
    "A stranger makes `$TMPDIR/ftsupervise-UID` first, as a folder, a link or a file.",
    "ftsupervise makes nothing in it and uses a folder with an unguessable name. The watch says so.",
)
@pytest.mark.parametrize("how", ["a folder", "a link", "a file"])
def test_the_spare_of_the_journal_the_notes_and_the_names_have_a_second_place(shared_tmp: Path, how: str) -> None:
    theirs = laid(shared_tmp, how)
    away = shared_tmp / "no" / "such" / "run" / "journal"  # it cannot be written
    Journal(away).change(lambda state: JournalState(announced={"one": NOW}))
    assert Journal(away).read().announced == {"one": NOW}, "another process finds the spare"
    assert Notes().directory is not None
    roster.remember({"thesis": "/somewhere"})
    assert roster.directories() == {"thesis": "/somewhere"}
    assert list(theirs.iterdir()) == [], "and nothing was made in what is somebody else's"


def test_many_processes_at_once_agree_on_one_second_place(shared_tmp: Path) -> None:
    laid(shared_tmp, "a folder")
    children = []
    for _ in range(12):
        pid = os.fork()
        if pid == 0:
            ownership.own_folder()
            os._exit(0)
        children.append(pid)
    for pid in children:
        os.waitpid(pid, 0)
    chosen = ownership.own_folder()
    assert [one for one in shared_tmp.glob("ftsupervise-*.*") if ownership.is_private(one)] == [chosen]


@pytest.mark.threat(
    "Another account makes this account's folder in /tmp first, and beside it names without number that the one used instead "
    "could have: each command looked through them again and again, and a tick of the watch took minutes.",
    "A process looks for its folder once, among folders alone.",
)
def test_a_process_looks_once_through_the_names_that_a_stranger_has_made(shared_tmp: Path) -> None:
    laid(shared_tmp, "a folder")
    names = [shared_tmp / f"ftsupervise-{os.geteuid()}.{number:016x}" for number in range(500)]

    def make_names() -> None:
        for one in names:
            one.touch()

    as_stranger(make_names)
    listed, over = list[str](), False

    def note(event: str, args: tuple[Any, ...]) -> None:
        if event == "os.scandir" and not over:
            listed.append(str(args[0]))

    sys.addaudithook(note)  # nothing takes it away again
    chosen = ownership.own_folder()
    before = listed.count(str(shared_tmp))
    assert [ownership.own_folder() for _ in range(3)] == [chosen] * 3
    assert ownership.own_folder_taken()
    over = True
    assert listed.count(str(shared_tmp)) == before > 0
    chosen.rmdir()
    assert ownership.is_private(ownership.own_folder()), "one that is gone is looked for again"


def test_it_is_told_whose_it_is_and_what_is_used_instead(shared_tmp: Path) -> None:
    assert ownership.own_folder_taken() == ""
    laid(shared_tmp, "a folder")
    assert (
        ownership.own_folder_taken()
        == f"{shared_tmp}/ftsupervise-{os.geteuid()} belongs to nobody: {ownership.own_folder()} is used instead"
    )


@pytest.mark.threat(
    "Another account reads alerts and names of private runs in `~/.local/state/ftsupervise`, in a home directory "
    "that is open to all.",
    "ftsupervise makes that folder with mode 0700, whatever the umask.",
)
@pytest.mark.parametrize("words", [["launch", "{settings}"], ["watch", "{settings}"], ["watch", "--trust", "{theirs}"]])
def test_the_account_s_own_state_is_readable_by_nobody_else(tmp_path: Path, words: list[str]) -> None:
    """Names and alerts of runs that are kept in private folders stand in it, and a home is often open to all."""
    home = tmp_path / "home"
    home.mkdir(mode=0o755)
    settings, theirs = home / "ftsupervise.yaml", home / "theirs.yaml"
    settings.write_text("name: secret-plan\nscheduler: local\nlaunch: {command: 'true'}\n")
    theirs.write_text(settings.read_text())
    os.chown(theirs, STRANGER, STRANGER)
    typed = [word.format(settings=settings, theirs=theirs) for word in words]
    env = {**os.environ, "HOME": str(home)}
    umask = os.umask(0)
    try:
        subprocess.run([TYPED, *typed], env=env, cwd=home, capture_output=True, timeout=120)
    finally:
        os.umask(umask)
        end_all_under(home)
    state = home / ".local" / "state" / "ftsupervise"
    assert any(state.rglob("*"))
    assert state.stat().st_mode & 0o077 == 0


@pytest.mark.threat(
    "TMPDIR is a folder in which others may rename what is made there: a group or everybody may write it, without the sticky "
    "bit, or it is another account's.",
    "Nothing is kept there. `/tmp` is used, or another folder of this machine in which only the owner of a file renames it.",
)
@pytest.mark.parametrize(("mode", "owner"), [(0o777, 0), (0o2770, 0), (0o1777, STRANGER)])
def test_nothing_is_kept_where_a_stranger_may_exchange_it(shared_tmp: Path, mode: int, owner: int) -> None:
    assert ownership.own_folder().parent == shared_tmp, "a sticky folder of root's is as good as /tmp"
    os.chown(shared_tmp, owner, 100)  # users
    shared_tmp.chmod(mode)
    assert ownership.own_folder().parent == Path("/tmp")
    inside = shared_tmp / "mine"
    inside.mkdir(mode=0o700)
    os.environ["TMPDIR"] = str(inside)
    assert ownership.own_folder().parent == Path("/tmp"), "nor below such a folder"
