"""The journal on a real file system: several writers, torn files, frozen writers, a full disk."""

from __future__ import annotations

import errno
import os
import stat
import subprocess
import sys
from dataclasses import replace
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.journal import KEEP, Journal
from ftsupervise.alerts.outbox import JournalState, Message
from ftsupervise.alerts.record import record
from ftsupervise.findings import Reason
from tests.story.alerting_scene import RUN, good, minutes, settings

T0 = datetime(2026, 11, 21, 2, 10, tzinfo=timezone.utc)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def journal(tmp_path: Path) -> Journal:
    return Journal(tmp_path / "journal", spare=tmp_path / "private" / "spare")


def say(journal: Journal, word: str) -> JournalState:
    return journal.change(lambda state: replace(state, announced={**state.announced, word: T0}))


def message(ident: str) -> Message:
    return Message(ident, "email", "run", (), created=T0, due=T0)


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir()) if directory.is_dir() else []


def test_what_was_written_is_read_by_anybody(journal: Journal) -> None:
    say(journal, "one")
    say(Journal(journal.directory), "two")
    assert list(Journal(journal.directory).read().announced) == ["one", "two"]
    assert names(journal.directory) == ["00000001.json", "00000002.json"]


def test_a_change_that_changes_nothing_writes_nothing(journal: Journal) -> None:
    journal.change(lambda state: state)
    assert names(journal.directory) == []


def test_the_slower_of_two_writers_makes_its_change_anew_on_what_the_faster_wrote(journal: Journal) -> None:
    calls: list[Any] = []

    def slow(state: JournalState) -> JournalState:
        if not calls:
            say(Journal(journal.directory), "faster")
        calls.append(state)
        return replace(state, announced={**state.announced, "slower": T0})

    assert list(journal.change(slow).announced) == ["faster", "slower"]
    assert len(calls) == 2


_WRITER = """
import sys; from dataclasses import replace; from datetime import datetime, timezone
from ftsupervise.alerts.journal import Journal
for n in range(25):
    word = f"{sys.argv[2]}-{n}"
    Journal(sys.argv[1]).change(lambda s: replace(s, announced={**s.announced, word: datetime.now(timezone.utc)}))
"""


@pytest.mark.fault("Two watchers write the journal at once", "nothing is lost")
def test_four_processes_that_write_at_once_lose_nothing(journal: Journal) -> None:
    command = [sys.executable, "-c", _WRITER, str(journal.directory)]
    writers = [subprocess.Popen([*command, str(n)], cwd=ROOT) for n in range(4)]
    assert [writer.wait(60) for writer in writers] == [0] * 4
    assert len(journal.read().announced) == 100
    assert not [name for name in names(journal.directory) if name.startswith(".tmp")]


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"format": 1', b"\x00" * 500, b'{"format": 99, "sha256": "", "state": {}}\n']
)
def test_a_torn_or_foreign_newest_file_is_passed_over_and_told(journal: Journal, content: bytes) -> None:
    say(journal, "before")
    (journal.directory / "00000002.json").write_bytes(content)
    assert list(journal.read().announced) == ["before"]
    assert "passed over 00000002.json" in journal.problems[0]
    say(journal, "after")
    assert list(journal.read().announced) == ["before", "after"] and not journal.problems


@pytest.mark.fault("A byte of the journal changes on disk", "it is noticed, the generation before is taken")
def test_a_byte_that_changed_on_disk_is_noticed(journal: Journal) -> None:
    say(journal, "one")
    say(journal, "two")
    newest = journal.directory / "00000002.json"
    newest.write_bytes(newest.read_bytes().replace(b"two", b"owt"))
    journal = Journal(journal.directory)
    assert list(journal.read().announced) == ["one"] and "checksum" in journal.problems[0]


@pytest.mark.threat(
    "Links, pipes and folders lie in the journal.",
    "ftsupervise ignores them, and the journal goes on.",
)
def test_links_pipes_and_directories_in_its_place_are_harmless(journal: Journal, tmp_path: Path) -> None:
    say(journal, "one")
    (journal.directory / "00000002.json").symlink_to("/dev/zero")
    os.mkfifo(journal.directory / "00000003.json")
    (journal.directory / "00000004.json").mkdir()
    assert list(journal.read().announced) == ["one"] and len(journal.problems) == 3
    say(journal, "two")
    assert list(journal.read().announced) == ["one", "two"]


def test_old_generations_go_and_the_newest_stay(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", keep_for=-1)
    journal.directory.mkdir()
    (journal.directory / ".tmp-left-by-one-who-was-killed").touch()
    for n in range(100):
        say(journal, str(n))
    assert names(journal.directory)[-1] == "00000100.json"
    assert KEEP <= len(names(journal.directory)) <= KEEP + 5
    assert len(journal.read().announced) == 100


def test_a_writer_that_was_frozen_past_the_pruning_does_not_believe_it_committed(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "journal", keep_for=-1)
    for n in range(3):
        say(journal, str(n))
    based_on: list[Any] = []

    def frozen(state: JournalState) -> JournalState:
        if not based_on:
            for n in range(60):
                say(Journal(journal.directory, keep_for=-1), f"later {n}")
            assert "00000004.json" not in names(journal.directory)
        based_on.append(len(state.announced))
        return replace(state, announced={**state.announced, "frozen": T0})

    journal.change(frozen)
    assert based_on == [3, 63], "what it made of an old state is not committed in the place of a file that is pruned"
    assert "00000004.json" not in names(journal.directory)
    assert len(journal.read().announced) == 64


def test_a_directory_that_cannot_be_written_is_said_and_the_spare_takes_over(journal: Journal) -> None:
    say(journal, "one")
    blocked = journal.directory.with_name("moved")
    journal.directory.rename(blocked)
    journal.directory.write_text("a file where the directory was")
    say(journal, "two")
    assert journal.unsaved and names(journal.spare)
    assert stat.S_IMODE(journal.spare.stat().st_mode) == 0o700
    journal.directory.unlink()
    blocked.rename(journal.directory)
    say(Journal(journal.directory, spare=journal.spare), "three")
    assert list(journal.read().announced) == ["one", "three"]
    assert not names(journal.spare)


def test_messages_that_wait_in_the_spare_are_not_lost_when_the_directory_comes_back(journal: Journal) -> None:
    say(journal, "one")
    blocked = journal.directory.with_name("moved")
    journal.directory.rename(blocked)
    journal.directory.write_text("a file where the directory was")
    journal.change(lambda state: replace(state, outbox=(message("waits"),)))
    journal.directory.unlink()
    blocked.rename(journal.directory)
    say(Journal(journal.directory, spare=journal.spare.with_name("another host")), "two")
    state = say(journal, "three")
    assert list(state.announced) == ["one", "two", "three"] and [m.id for m in state.outbox] == ["waits"]
    assert not names(journal.spare)


@pytest.mark.threat("Another account lays a generation of the journal.", "ftsupervise does not trust it.")
def test_a_spare_that_somebody_else_could_have_put_there_is_not_believed(journal: Journal) -> None:
    say(journal, "one")
    planted = Journal(journal.spare, spare=journal.spare.with_name("other"))
    for word in ("x", "y", "z"):
        say(planted, word)
    journal.spare.chmod(0o777)
    assert list(journal.read().announced) == ["one"]


@pytest.mark.fault(
    "The disk under the alerts' journal is full",
    "its state goes to a spare place and comes back; the message gets out",
)
@pytest.mark.root
def test_a_full_disk_keeps_the_state_in_the_spare_and_comes_back(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk = tmp_path / "disk"
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)], check=True)
    try:
        journal = Journal(disk / "journal", spare=tmp_path / "private" / "spare")
        say(journal, "one")
        filler = disk / "filler"
        with pytest.raises(OSError) as full, filler.open("wb", buffering=0) as file:
            while True:
                file.write(b"x" * 4096)
        assert full.value.errno == errno.ENOSPC
        say(journal, "two")
        assert "No space left" in journal.unsaved
        assert list(Journal(journal.directory, spare=journal.spare).read().announced) == ["one", "two"]
        filler.unlink()
        say(journal, "three")
        assert not journal.unsaved and list(journal.read().announced) == ["one", "two", "three"]
        assert names(disk / "journal")[-1] == "00000003.json"
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)


@pytest.mark.root
def test_a_full_disk_is_told_once_however_many_ticks_it_lasts_and_once_that_it_is_over(tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to mount a small file system")
    disk, heard = tmp_path / "disk", []
    disk.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=200k", "none", str(disk)], check=True)
    try:
        for minute in range(8):  # a journal of its own each time: what fires is known from the spare alone
            if minute == 1:
                (disk / "filler").write_bytes(b"x" * 100_000)
                with pytest.raises(OSError), (disk / "rest").open("wb", buffering=0) as file:
                    while True:
                        file.write(b"x" * 512)
            if minute == 5:
                (disk / "filler").unlink()
            journal = Journal(disk / "journal", spare=tmp_path / "private" / "spare")
            told = record(journal, [good(minutes(minute))], settings([]), minutes(minute), run_name=RUN).notices
            heard += [(minute, notice.reason) for notice in told]
    finally:
        subprocess.run(["umount", "-l", str(disk)], check=True)
    assert heard == [(1, Reason.FIRED), (5, Reason.RESOLVED)]
