"""Switches as files: what counts as raised, who did it, and what lies there and is none."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import (
    KILL,
    SAVE,
    clear_answered,
    clear_switch,
    look_at_switch,
    raise_switch,
    read_switch,
)
from ftsupervise.truth import Health

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.switches.mkdir(parents=True)
    return run


def test_an_empty_directory_means_down(rundir: RunDir) -> None:
    assert read_switch(rundir, KILL).health is Health.OK


def test_touch_is_enough_and_shows_owner_and_time(rundir: RunDir) -> None:
    (rundir.switches / KILL).touch()
    os.utime(rundir.switches / KILL, (NOON.timestamp(), NOON.timestamp()))
    state = read_switch(rundir, KILL)
    assert state.up
    assert state.since == NOON
    assert state.who


def test_what_is_written_into_it_is_the_reason(rundir: RunDir) -> None:
    (rundir.switches / KILL).write_text("loss is nan\nsince step 400\n")
    assert read_switch(rundir, KILL).why == "loss is nan"


def test_the_command_records_who_where_and_why(rundir: RunDir) -> None:
    raise_switch(rundir, SAVE, who="alice", host="login1", why="before the move", now=NOON)
    state = read_switch(rundir, SAVE)
    assert state.up
    assert "alice" in state.who and "login1" in state.who
    assert state.why == "before the move"
    assert not read_switch(rundir, KILL).up


@pytest.mark.threat(
    "The text in a switch file names another person.",
    "ftsupervise shows the owner of the file as well.",
)
def test_a_name_in_the_file_does_not_hide_its_owner(rundir: RunDir) -> None:
    raise_switch(rundir, KILL, who="somebody-else", host="", why="", now=NOON)
    import pwd

    assert pwd.getpwuid(os.getuid()).pw_name in read_switch(rundir, KILL).who


@pytest.mark.threat(
    'The text in a switch file contains the owner\'s own name, as in "ada (not eve)".',
    "ftsupervise shows the owner of the file as well, unless the text is exactly their name.",
)
def test_a_name_that_holds_the_owners_name_does_not_hide_its_owner_either(rundir: RunDir) -> None:
    import pwd

    owner = pwd.getpwuid(os.getuid()).pw_name
    raise_switch(rundir, KILL, who=f"somebody-else (not {owner})", host="", why="", now=NOON)
    assert read_switch(rundir, KILL).who == f"somebody-else (not {owner}) (the file is {owner}'s)"


@pytest.mark.parametrize("text", ["\x1b[31mred\x07", "[" * 50_000, '{"why": {"a": 1}}', "\x00\xff", '{"who": 5}'])
def test_no_content_breaks_reading_or_the_terminal(rundir: RunDir, text: str) -> None:
    (rundir.switches / KILL).write_bytes(text.encode("latin-1"))
    state = read_switch(rundir, KILL)
    assert state.up
    assert (state.who + state.why).isprintable()
    assert len(state.why) <= 300


def test_a_directory_that_cannot_be_looked_at_is_unknown_never_down(tmp_path: Path) -> None:
    state = read_switch(RunDir(tmp_path / "nowhere"), KILL)
    assert state.health is Health.UNKNOWN
    assert not state.up
    assert "cannot read" in state.problem


@pytest.mark.threat(
    "A link, a FIFO, a folder, a second hard link or a huge file lies in the place of a switch.",
    "ftsupervise reports it and does not obey it.",
)
@pytest.mark.parametrize(
    ("kind", "words"),
    [
        ("symlink", "a symbolic link"),
        ("fifo", "a FIFO"),
        ("directory", "a directory"),
        ("socket", "not a regular file"),
        ("huge", "bytes long"),
        ("hard link", "second hard link"),
    ],
)
def test_what_is_no_plain_file_is_told_and_not_obeyed(rundir: RunDir, tmp_path: Path, kind: str, words: str) -> None:
    place, other = rundir.switches / KILL, tmp_path / "other"
    other.write_text("x")
    if kind == "symlink":
        place.symlink_to(other)
    elif kind == "fifo":
        os.mkfifo(place)
    elif kind == "directory":
        place.mkdir()
    elif kind == "socket":
        import socket

        here = Path.cwd()
        os.chdir(rundir.switches)  # the path of a socket may be no longer than 107 characters
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(KILL)
        os.chdir(here)
    elif kind == "huge":
        place.touch()
        os.truncate(place, 1 << 40)
    else:
        place.hardlink_to(other)
    state = read_switch(rundir, KILL)
    assert state.health is Health.OK
    assert words in state.problem and "not obeyed" in state.problem


def test_a_directory_everybody_may_write_is_not_obeyed_unless_sticky(rundir: RunDir) -> None:
    (rundir.switches / KILL).touch()
    rundir.switches.chmod(0o777)
    assert "chmod o-w" in read_switch(rundir, KILL).problem
    rundir.switches.chmod(0o1777)
    assert read_switch(rundir, KILL).up


def test_clearing_says_whether_there_was_anything(rundir: RunDir) -> None:
    (rundir.switches / KILL).touch()
    assert clear_switch(rundir, KILL)
    assert not clear_switch(rundir, KILL)


def test_only_the_raising_that_was_answered_is_taken_down(rundir: RunDir) -> None:
    switch = rundir.switches / SAVE
    switch.touch()
    _, answered = look_at_switch(rundir, SAVE)
    assert answered is not None
    os.utime(switch, ns=(1, 1))  # touched again meanwhile
    assert not clear_answered(rundir, SAVE, answered)
    assert switch.exists()
    _, answered = look_at_switch(rundir, SAVE)
    assert answered is not None
    assert clear_answered(rundir, SAVE, answered)
    assert os.listdir(rundir.switches) == []
    assert not clear_answered(rundir, SAVE, answered)


@pytest.mark.threat(
    "A member of the group fills `switches/` with files, so that each look of each rank takes seconds.",
    "The guard asks for the switches by name if the folder holds very many files.",
)
def test_very_many_files_beside_the_switches_hold_up_no_look(tmp_path: Path) -> None:
    """Whoever may raise a switch can also make any number of files there. Each rank looks every second."""
    place = Path(tempfile.mkdtemp(dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else tmp_path))
    try:
        run = RunDir(place)
        run.switches.mkdir()
        for number in range(60_000):
            os.close(os.open(run.switches / f"{number}", os.O_CREAT | os.O_WRONLY))
        assert read_switch(run, KILL).health is Health.OK
        (run.switches / KILL).touch()
        assert read_switch(run, KILL).up
        assert not read_switch(run, SAVE).up
        assert min(_took(lambda: read_switch(run, KILL)) for _ in range(9)) < min(
            _took(lambda: os.listdir(run.switches)) for _ in range(9)
        )
    finally:
        shutil.rmtree(place)


def _took(do: Callable[[], object]) -> float:
    began = time.perf_counter()
    do()
    return time.perf_counter() - began
