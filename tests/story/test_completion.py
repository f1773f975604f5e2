"""A press of the Tab key, in a real bash, zsh and fish: commands, options, names, and nothing where something is wrong."""

from __future__ import annotations

import os
import pty
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path

import pytest

from ftsupervise.cli import COMMANDS
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

BIN = Path(sys.executable).parent
ASK = {"bash": "bash_complete", "zsh": "zsh_complete", "fish": "fish_complete"}


@pytest.fixture
def account(tmp_path: Path) -> dict[str, str]:
    """An account with three runs, one of which has a name that no shell would take as it is."""
    for name in ("tr11", "tr12-long", "odd*name"):
        (tmp_path / name / "switches").mkdir(parents=True)
        (tmp_path / "state/runs").mkdir(parents=True, exist_ok=True)
        (tmp_path / "state/runs" / name).symlink_to(tmp_path / name)
    (tmp_path / "desk").mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("FTSUPERVISE_", "SLURM_", "XDG_"))}
    own = {"FTSUPERVISE_STATE_DIR": str(tmp_path / "state"), "HOME": str(tmp_path / "desk")}
    return {**kept, **own, "PATH": f"{BIN}:{os.environ['PATH']}", "TERM": "xterm", "LC_ALL": "C.UTF-8"}


def asked(line: str, env: Mapping[str, str]) -> list[str]:
    """What the program answers a bash in which ``line`` is typed up to here."""
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split(" ")) - 1), "_FTSUPERVISE_COMPLETE": "bash_complete"}
    done = typed(folder=Path(env["HOME"]), env={**env, **words}, code=0)
    assert done.stderr == ""
    return [value for kind, _, value in (one.partition(",") for one in done.stdout.splitlines()) if kind == "plain"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ftsupervise st", ["status"]),
        ("ftsupervise status tr", ["tr11", "tr12-long"]),
        ("ftsupervise kill tr11 tr12", ["tr12-long"]),
        ("ftsupervise status --js", ["--json"]),
        ("ftsupervise cron in", ["install"]),
        ("ftsupervise checkpoints verify --qu", ["--quick"]),
        ("ftsupervise checkpoints ver", ["verify"]),
        ("ftsupervise alerts a", ["ack"]),
        ("ftsupervise alerts tr11", ["tr11"]),
        ("ftsupervise alerts --js", ["--json"]),
        ("ftsupervise check dis", ["disk"]),
        ("ftsupervise watch --only is", ["is-running"]),
        ("ftsupervise alerts silence thr", ["throughput"]),
        ("ftsupervise cron add watch-a", ["watch-all", "watch-all.slurm"]),
        ("ftsupervise cron install --backend cr", ["crontab"]),
        ("ftsupervise help checkpoints re", ["restore"]),
        ("ftsupervise completion z", ["zsh"]),
        ("ftsupervise statsu ", []),
        ("ftsupervise status ./", []),
        ("ftsupervise nodes exclude n", []),
    ],
)
def test_the_program_says_what_may_stand_there(account: dict[str, str], line: str, found: list[str]) -> None:
    if found:  # on a busy machine it is too late at times, and says nothing
        wait_until(lambda: asked(line, account) == found, f"{found} for {line!r}", 100)
    assert asked(line, account) in (found, [])


def test_every_command_is_offered_and_no_name_that_a_shell_would_expand(account: dict[str, str]) -> None:
    wait_until(lambda: set(asked("ftsupervise ", account)) == set(COMMANDS), "all commands", 100)
    assert asked("ftsupervise status o", account) == []


def test_nodes_with_a_history_and_firing_alerts_are_offered(account: dict[str, str]) -> None:
    home = Path(account["HOME"])
    (home / "ftsupervise.yaml").write_text(
        "name: r\nscheduler: local\nlaunch: {command: sleep 1}\nwatch: {disk: null}\n"
    )
    (home / "runs/r/switches").mkdir(parents=True)
    (home / "runs/r/run.yaml").write_text("name: r\nscheduler: local\nlaunch: {command: sleep 1}\n")
    typed("nodes", "exclude", "node-[7,9]", "--no-apply", folder=home, env=account, code=0)
    wait_until(lambda: asked("ftsupervise nodes trust node", account) == ["node-7", "node-9"], "both nodes", 100)
    typed("watch", "--no-send", folder=home, env=account)
    typed("watch", "--no-send", folder=home, env=account)
    shown = typed("alerts", folder=home, env=account, code=0).stdout
    ids = [line.split()[2] for line in shown.splitlines() if line.startswith("firing")]
    assert ids, shown
    wait_until(lambda: asked("ftsupervise alerts ack ", account) == ids, "the alerts that fire", 100)
    wait_until(lambda: ids[0] in asked(f"ftsupervise alerts silence {ids[0][:3]}", account), "the alert", 100)


def test_where_nothing_can_be_read_nothing_is_said(account: dict[str, str], tmp_path: Path) -> None:
    assert asked("ftsupervise status ", {**account, "FTSUPERVISE_STATE_DIR": str(tmp_path / "missing")}) == []
    assert asked("ftsupervise alerts ack ", account) == []
    assert asked("ftsupervise cron run ", account) == []
    wrong = {**account, "_FTSUPERVISE_COMPLETE": "tcsh_complete", "COMP_WORDS": "ftsupervise ", "COMP_CWORD": "1"}
    assert typed(env=wrong, code=0).stdout == ""
    assert typed(env={**account, "_FTSUPERVISE_COMPLETE": "bash_complete"}, code=0).stdout == ""


class Shell:
    """A shell at a terminal."""

    def __init__(self, words: list[str], env: Mapping[str, str]) -> None:
        self.seen = ""
        self.pid, self.terminal = pty.fork()
        if not self.pid:
            os.chdir(env["HOME"])
            os.execvpe(words[0], words, dict(env))

    def type(self, text: str) -> None:
        os.write(self.terminal, text.encode())

    def shows(self, text: str, seconds: float = 60.0) -> bool:
        """Wait until ``text`` is on the terminal, and forget all before it."""
        until = time.monotonic() + seconds
        while text not in self.seen and time.monotonic() < until:
            if select.select([self.terminal], [], [], 0.2)[0]:
                try:
                    self.seen += os.read(self.terminal, 65536).decode(errors="replace")
                except OSError:  # EIO: it has ended
                    break
        before, found, self.seen = self.seen.partition(text)
        if not found:
            self.seen = before
        return bool(found)

    def end(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)
        os.close(self.terminal)


def needed(shell: str) -> None:
    if shutil.which(shell) is None:
        pytest.skip(f"there is no {shell} here: apt-get install {shell}")


def test_in_bash(account: dict[str, str]) -> None:
    needed("bash")
    shell = Shell(["bash", "--norc", "--noprofile", "-i"], {**account, "PS1": "PROMPT> "})
    try:
        assert shell.shows("PROMPT> ")
        shell.type('eval "$(ftsupervise completion bash)"; echo re""ady\n')
        assert shell.shows("ready"), shell.seen
        shell.type("ftsupervise stat\t")
        assert shell.shows("ftsupervise status "), shell.seen
        shell.type("tr12\t")
        assert shell.shows("tr12-long "), shell.seen
        shell.type("--js\t")
        assert shell.shows("--json"), shell.seen
    finally:
        shell.end()


def test_in_zsh(account: dict[str, str]) -> None:
    needed("zsh")
    shell = Shell(["zsh", "-f", "-i"], {**account, "PS1": "PROMPT> "})
    try:
        assert shell.shows("PROMPT> ")
        shell.type('autoload -U compinit; compinit -D -u; eval "$(ftsupervise completion zsh)"; echo re""ady\n')
        assert shell.shows("ready\r\n"), shell.seen
        shell.type("ftsupervise stat\t")
        assert shell.shows("ftsupervise status"), shell.seen
        shell.type("tr12\t")
        assert shell.shows("-long"), shell.seen
    finally:
        shell.end()


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("ftsupervise stat", ["status"]),
        ("ftsupervise status tr", ["tr11", "tr12-long"]),
        ("ftsupervise alerts sil", ["silence"]),
        ("ftsupervise check dis", ["disk"]),
    ],
)
def test_in_fish(account: dict[str, str], line: str, found: list[str]) -> None:
    needed("fish")
    script = f"ftsupervise completion fish | source; complete -C '{line}'"
    done = subprocess.run(
        ["fish", "--no-config", "-c", script],
        cwd=account["HOME"],
        env=account,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert [one.split("\t")[0] for one in done.stdout.splitlines()] == found, done.stderr
