"""Escape sequences in texts of others never reach a terminal: played through the commands, with and without one."""

from __future__ import annotations

import json
import os
import pty
import re
import subprocess
import sys
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.launch.submit import prepare
from ftsupervise.rundir import switches
from ftsupervise.rundir.paths import RunDir

NOW = datetime.now(timezone.utc)
TITLE, CLEAR, BELL, C1, BIDI = "\x1b]0;owned\x07", "\x1b[2J\x1b[H", "\r\x07", "\x9b2J\x85", "\u202egnp.exe\u2066"
HOSTILE = f"begin{TITLE}{CLEAR}{BELL}{C1}{BIDI}\x1b[8mhidden\ud800end"
OURS = re.compile(r"\x1b\[[0-9;]*m")

SETTINGS = "name: r\nscheduler: local\nlaunch: {command: 'true'}\n"


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of which every text that somebody else could have written is hostile."""
    rundir = RunDir(tmp_path / "runs" / "r")
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    prepare(rundir, "r", SETTINGS)
    at = NOW.isoformat()
    start = {"attempt": 1, "job_id": HOSTILE, "at": at, "host": HOSTILE, "nodes": "node-1"}
    failure = {"kind": "code", "sign": HOSTILE, "detail": HOSTILE, "error": HOSTILE}
    end = {"ended": at, "exit_code": 1, "words": HOSTILE, "cause": HOSTILE, "then": HOSTILE, "note": HOSTILE}
    words = {"who": HOSTILE, "why": HOSTILE, "host": HOSTILE, "at": at}
    pages = {
        "attempts/0001/start.json": start,
        "attempts/0001/end.json": {**end, "failure": failure, "first_step": 1, "last_step": 2},
        "launches/0001/launch.json": {
            "state": "submitted",
            "by": HOSTILE,
            "token": HOSTILE,
            "job_ids": [HOSTILE],
            "at": at,
        },
        "nodes/exclude/node-7": words,
        "nodes/incidents/w.json": {
            "incidents": [{"node": "node-8", "kind": "hardware", "at": at, "evidence": HOSTILE}]
        },
        "state/brake": {"failure": HOSTILE, "why": HOSTILE, "detail": HOSTILE, "held": [HOSTILE], "at": at},
        "beats/rank-0": {
            "rank": 0,
            "step": 2,
            "phase": HOSTILE,
            "at": at,
            "host": HOSTILE,
            "facts": {"watch": HOSTILE},
        },
        "watch/watchers/other": {"at": "2026-01-01T00:00:00+00:00", "host": HOSTILE, "every": 60},
        "switches/kill-switch": words,
    }
    for name, page in pages.items():
        (rundir.root / name).parent.mkdir(exist_ok=True, parents=True)
        (rundir.root / name).write_text(json.dumps(page))
    odd = os.fsencode(rundir.root / "nodes" / "exclude") + f"/node{TITLE}{CLEAR}".encode()
    os.close(os.open(odd, os.O_CREAT | os.O_WRONLY))
    return rundir


def typed(run: RunDir, *words: str, terminal: bool) -> str:
    """All that the command prints, its own colours left out where there is a terminal."""
    base = run.root.parents[1]
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(base / "state"), "TERM": "xterm", "COLUMNS": "200"}
    command = [sys.executable, "-m", "ftsupervise", *words]
    if not terminal:
        done = subprocess.run(command, cwd=base, env=env, capture_output=True, timeout=120, check=False)
        return (done.stdout + done.stderr).decode()
    ours, theirs = pty.openpty()
    with subprocess.Popen(command, cwd=base, env=env, stdin=theirs, stdout=theirs, stderr=theirs) as process:
        os.close(theirs)
        text = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:
                break
            if not part:
                break
            text += part
        process.wait(120)
    os.close(ours)
    return OURS.sub("", text.decode().replace("\r\n", "\n"))


def harmless(text: str) -> bool:
    return all(char in "\n\t" or char.isprintable() for char in text)


COMMANDS = (
    ("status", "runs/r"),
    ("nodes",),
    ("check", "all", "runs/r"),
    ("kill", "--yes", "runs/r"),
    ("watch", "--no-send", "runs/r"),
    ("alerts", "list", "runs/r"),
    ("launch",),
    ("clear", "--switch", "save", "runs/r"),
    ("status", f"runs/{TITLE}{CLEAR}"),
    ("nodes", "exclude", f"node{CLEAR}"),
)


@pytest.mark.threat(
    "Escape sequences, C1 controls and direction marks in files, names and marks control the reader's terminal.",
    "Texts are cleaned when they are read, and once more in the one stream through which every command prints.",
)
@pytest.mark.parametrize("terminal", [False, True], ids=["a pipe", "a terminal"])
def test_no_control_character_of_anybody_is_printed(run: RunDir, terminal: bool) -> None:
    for words in COMMANDS:
        text = typed(run, *words, terminal=terminal)
        assert text.strip(), words
        assert "Traceback" not in text, text
        bad = [line for line in text.splitlines() if not harmless(line)]
        assert harmless(text), (words, bad)


def test_the_words_themselves_are_still_told(run: RunDir) -> None:
    for words in (("status", "runs/r"), ("kill", "--yes", "runs/r"), ("nodes",)):
        assert "begin?]0;owned?" in typed(run, *words, terminal=False), words


@pytest.mark.threat(
    "The owner of a switch gives it a time in the year 3,000,000, which would stop the guard that reads it.",
    "The guard reads such a time as 1970, and the switch counts.",
)
def test_a_switch_with_an_absurd_time_is_up_and_does_not_stop_the_reader(run: RunDir) -> None:
    for seconds in (2**62, -(2**40), 99_999_999_999_999):
        try:
            os.utime(run.switches / "kill-switch", (seconds, seconds))
        except (OSError, OverflowError):
            continue
        assert switches.read_switch(run, switches.KILL).up
        assert "kill switch" in typed(run, "status", "runs/r", terminal=False)
