"""Long output goes through a pager on a terminal, long work says there how far it is, and ``-`` is the standard input."""

from __future__ import annotations

import fcntl
import json
import os
import pty
import select
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest

from tests.neighbours.typed import typed

SETTINGS = "name: r\nscheduler: local\nlaunch: {command: sleep 1, jobs: 3}\nwatch: {hang: null, disk: null}\n"


class Terminal:
    """A command at a terminal of 24 rows."""

    def __init__(self, folder: Path, *words: str, **more: str) -> None:
        parent, child = pty.openpty()
        fcntl.ioctl(child, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
        kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "PAGER", "LESS", "NO_COLOR")}
        env = {**kept, "TERM": "xterm", "HOME": str(folder), "FTSUPERVISE_STATE_DIR": str(folder / "state"), **more}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ftsupervise", *words], cwd=folder, env=env, stdin=child, stdout=child, stderr=child,
            start_new_session=True,
        )  # fmt: skip
        os.close(child)
        self.terminal, self.shown = parent, ""

    def read(self, until: str = "", seconds: float = 60.0) -> str:
        """All that it shows until ``until`` stands there, or to its end."""
        ends = time.monotonic() + seconds
        while time.monotonic() < ends and not (until and until in self.shown):
            if select.select([self.terminal], [], [], 0.2)[0]:
                try:
                    piece = os.read(self.terminal, 65_536)
                except OSError:  # EIO: the other end is closed
                    break
                if not piece:
                    break
                self.shown += piece.decode(errors="replace").replace("\r\n", "\n")
        return self.shown

    def end(self) -> int:
        code = self.process.wait(60)
        os.close(self.terminal)
        return code


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "ftsupervise.yaml").write_text(SETTINGS)
    return tmp_path


def test_long_output_goes_through_the_pager_of_the_person(project: Path) -> None:
    at = Terminal(project, "config", "show", PAGER="sed 's/^/paged: /'")
    lines = at.read().splitlines()
    assert at.end() == 0
    assert len(lines) > 30 and all(line.startswith("paged: ") for line in lines), lines[:5]


@pytest.mark.parametrize(
    ("words", "pager"),
    [
        (["--no-pager", "config", "show"], "sed 's/^/paged: /'"),
        (["config", "show"], "cat"),
        (["config", "show"], ""),
        (["config", "check"], "sed 's/^/paged: /'"),
        (["help", "--help"], "sed 's/^/paged: /'"),
    ],
)
def test_it_does_not_where_it_is_not_wanted(project: Path, words: list[str], pager: str) -> None:
    at = Terminal(project, *words, PAGER=pager)
    shown = at.read()
    assert at.end() == 0 and "paged" not in shown and shown


def test_it_does_not_in_a_pipe(project: Path) -> None:
    said = typed("config", "show", folder=project, code=0, PAGER="sed 's/^/paged: /'").stdout
    assert "paged" not in said and len(said.splitlines()) > 30


def test_the_code_of_the_command_is_that_of_what_is_typed(project: Path) -> None:
    at = Terminal(project, "config", "show", "nosuchrun", PAGER="sed 's/^/paged: /'")
    shown = at.read()
    assert at.end() == 66
    assert "no run called 'nosuchrun'" in shown and "paged" not in shown, "an error is no output"


@pytest.mark.skipif(not os.access("/usr/bin/less", os.X_OK), reason="there is no less: apt-get install less")
def test_less_shows_what_is_longer_than_the_screen_and_is_left_with_q(project: Path) -> None:
    at = Terminal(project, "config", "show")
    at.read("\n:")
    assert "name: r" in at.shown and at.process.poll() is None, at.shown
    os.write(at.terminal, b"q")
    at.read()
    assert at.end() == 0, "to leave it is no error"


@pytest.mark.skipif(not os.access("/usr/bin/less", os.X_OK), reason="there is no less: apt-get install less")
def test_less_does_not_stay_for_what_fits_the_screen(project: Path) -> None:
    at = Terminal(project, "list")
    at.read()
    assert at.end() == 0


@pytest.mark.parametrize("words", [["check"], ["show"], ["show", "--json"], ["show", "--origin"]], ids=" ".join)
def test_settings_come_from_the_standard_input(project: Path, words: list[str]) -> None:
    text = SETTINGS.replace("name: r", "name: typed-in")
    assert "typed-in" in typed("config", *words, "-", folder=project, answer=text, code=0).stdout


def test_messages_are_previewed_by_settings_from_the_standard_input(project: Path) -> None:
    text = SETTINGS.replace("name: r", "name: typed-in")
    assert "typed-in" in typed("notify", "preview", "-", folder=project, answer=text, code=0).stdout


def test_errors_in_the_standard_input_have_their_line(project: Path) -> None:
    done = typed("config", "check", "-", folder=project, answer="name: r\nlaunch: {command: a, nodse: 3}\n", code=78)
    assert "standard input:2:" in done.stderr and "'nodes'" in done.stderr


@pytest.mark.parametrize(
    ("launch", "submits", "asks", "starts"),
    [
        (
            "{command: srun python train.py, nodes: 4, gpus_per_node: 8, time: '20:00:00', partition: main}",
            "an array of 10 jobs, one at a time, to Slurm",
            "--gpus-per-node=8 --nodes=4 --partition=main --time=20:00:00",
            "srun python train.py",
        ),
        ("{command: [python, train.py], jobs: 1}", "one job, to Slurm", "--nodes=1", "python train.py"),
        (
            "{command: srun python train.py, jobs: 3, chain: daisy}",
            "3 jobs, each behind the one before, to Slurm",
            "--nodes=1",
            "srun python train.py",
        ),
    ],
)
def test_config_check_says_in_three_lines_what_would_be_submitted(
    tmp_path: Path, launch: str, submits: str, asks: str, starts: str
) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(f"name: r\nscheduler: slurm\nlaunch: {launch}\n")
    path = "/usr/bin:/bin"
    said = typed("config", "check", folder=tmp_path, code=0, PATH=path).stdout.splitlines()
    assert said[1:4] == [f"  submits: {submits}", f"  each asks for: {asks}", f"  each starts: {starts}"]
    found = json.loads(typed("config", "check", "--json", folder=tmp_path, code=0, PATH=path).stdout)["files"][0][
        "submits"
    ]
    assert found == {"submits": submits, "each asks for": asks, "each starts": starts}


def test_config_check_says_what_this_machine_would_start(project: Path) -> None:
    said = typed("config", "check", folder=project, code=0).stdout.splitlines()
    assert said[1] == "  submits: an array of 3 jobs, one at a time, on this machine"


def test_reports_of_several_runs_say_on_a_terminal_how_far_they_are(tmp_path: Path) -> None:
    for name in ("a", "b", "c"):
        (tmp_path / name / "switches").mkdir(parents=True)
    at = Terminal(tmp_path, "report", "a", "b", "c")
    shown = at.read()
    assert at.end() == 0
    assert "reports: 2 of 3: b" in shown and shown.count("report-") == 3, shown
    quiet = typed("report", "a", "b", "c", folder=tmp_path, code=0)
    assert "of 3" not in quiet.stderr + quiet.stdout
