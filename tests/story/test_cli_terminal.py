"""What a person at a terminal sees: colours only where they can be shown, lines broken between words, a "no" that is one."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import struct
import subprocess
import sys
import termios
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.cli.output import wrapped
from ftsupervise.rundir.paths import RunDir

Until = Callable[..., Any]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "a-run-with-a-name-of-some-length-in-a-deep-directory")
    run.switches.mkdir(parents=True)
    return run


def at_terminal(*words: str, answer: bytes = b"", columns: int = 80, **more: str) -> tuple[int, str]:
    """The exit code and all that a terminal of so many columns shows."""
    parent, child = pty.openpty()
    fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, columns, 0, 0))
    env = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "NO_COLOR")}
    argv = [sys.executable, "-m", "ftsupervise", *words]
    done = subprocess.Popen(argv, stdin=child, stdout=child, stderr=child, env={**env, "TERM": "xterm", **more})
    os.close(child)
    os.write(parent, answer)
    shown = b""
    while True:
        try:
            piece = os.read(parent, 65_536)
        except OSError:  # EIO: the other end is closed
            break
        if not piece:
            break
        shown += piece
    os.close(parent)
    return done.wait(60), shown.decode().replace("\r\n", "\n")


def test_a_terminal_that_knows_no_colours_gets_none(rundir: RunDir) -> None:
    words = ("status", str(rundir.root))
    assert "\033[" in at_terminal(*words)[1]
    assert "\033" not in at_terminal(*words, TERM="dumb")[1]
    assert "\033" not in at_terminal(*words, NO_COLOR="1")[1]


def test_lines_break_between_words_and_a_command_to_type_stays_whole(rundir: RunDir) -> None:
    code, shown = at_terminal("save", str(rundir.root))
    assert code == 0
    command = f"ftsupervise clear {rundir.root} --switch save"
    assert command in shown
    prose = [line for line in shown.splitlines() if command not in line]
    assert max(map(len, prose)) <= 80
    assert " ".join(" ".join(prose).split()).startswith(
        f"The save switch of {rundir.root.name} is up. No attempt of it runs now. The next one with a guard saves at its "
        "first step, and takes the switch down."
    )


def test_what_goes_to_a_pipe_stays_one_line_for_each_thing(rundir: RunDir) -> None:
    argv = [sys.executable, "-m", "ftsupervise", "save", str(rundir.root)]
    done = subprocess.run(argv, capture_output=True, text=True, timeout=60, check=True)
    assert len(done.stdout.splitlines()) == 2


@pytest.mark.parametrize("width", [40, 60, 80])
def test_a_wrapped_line_has_the_words_of_the_line(width: int) -> None:
    line = "  queue     9 waiting to take over (JobArrayTaskLimit), " + "some more words " * 9
    rows = wrapped(line, width).split("\n")
    assert " ".join(" ".join(rows).split()) == " ".join(line.split())
    assert all(len(row) <= width for row in rows)
    assert all(row.startswith(" " * 4) for row in rows[1:])


@pytest.mark.fault(
    "A person says no to `kill` and does not know whether anything happened.",
    '"cancelled, nothing was changed", exit code 130, and no switch is up.',
)
def test_no_means_that_nothing_was_changed_and_says_so(rundir: RunDir) -> None:
    code, shown = at_terminal("kill", str(rundir.root), answer=b"n\n")
    assert code == 130
    assert "cancelled, nothing was changed" in " ".join(shown.split())
    assert os.listdir(rundir.switches) == []


def test_the_version_has_a_short_option() -> None:
    asked = [
        subprocess.run(
            [sys.executable, "-m", "ftsupervise", word], capture_output=True, text=True, timeout=60, check=True
        )
        for word in ("-V", "--version")
    ]
    assert re.fullmatch(r"ftsupervise \d+\.\d+\.\d+\n", asked[0].stdout)
    assert asked[0].stdout == asked[1].stdout


def test_a_watch_that_goes_on_says_what_stays_as_it_was_once(tmp_path: Path, until: Until) -> None:
    text = "name: quiet\nscheduler: local\nlaunch: {command: sleep 600, jobs: 1}\nwatch: {hang: null, disk: null}\n"
    (tmp_path / "ftsupervise.yaml").write_text(text)
    rundir = RunDir(tmp_path / "runs/quiet")
    for folder in (rundir.switches, rundir.watch, rundir.state):
        folder.mkdir(parents=True)
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    log = tmp_path / "log"
    with log.open("wb") as out:
        argv = [sys.executable, "-u", "-m", "ftsupervise", "watch", "--every", "0.3s"]
        watch = subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=out, stderr=subprocess.STDOUT)
    try:
        beat = rundir.watch / "watchers"
        until(lambda: list(beat.glob("*")), "the first tick")
        for _ in range(4):  # so many more ticks
            before = max(path.stat().st_mtime_ns for path in beat.glob("*"))
            until(lambda: max(path.stat().st_mtime_ns for path in beat.glob("*")) > before, "another tick")  # noqa: B023
        until(lambda: "bad: is-running" in log.read_text(), "what is wrong to be said")
        assert log.read_text().count("bad: is-running: no job of this run") == 1, log.read_text()
        assert log.read_text().count("alerts.receivers is empty: nobody is notified when quiet stops") == 1
        rundir.finished.write_text("{}")
        until(lambda: re.search(r"quiet: ok \(\d+ checks\)", log.read_text()), "what has changed to be said")
    finally:
        watch.terminate()
        assert watch.wait(60) == 0


def test_a_simulation_shows_a_bar_at_a_terminal_and_takes_it_away_at_the_end() -> None:
    words = ("simulate", "--gpus", "64", "--mtbf", "1d", "--runs", "30")
    code, shown = at_terminal(*words)
    assert code == 0 and "\033[2K" in shown and "━" in shown and "0/30" in shown
    last = shown[shown.rindex("\033[2K") :]
    assert "━" not in last and "a failure every 1d; 30 runs of 90d" in last
    assert "━" not in at_terminal(*words, "--json")[1] and "━" not in at_terminal(*words, TERM="dumb")[1]


def test_what_a_command_writes_to_one_place_keeps_its_order() -> None:
    """The end of a bar takes a line away: one that came after the result would take that."""
    code = (
        "import os\nfrom ftsupervise.cli import time_limit\ntime_limit.go_on_in_a_child(['status'])\n"
        "for n in range(2000): os.write(1 + n % 2, b'%d\\n' % n)\ntime_limit.end_child(SystemExit(0))"
    )
    done = subprocess.run([sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, check=True)
    assert done.stdout.split() == [b"%d" % n for n in range(2000)]
