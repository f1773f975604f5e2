"""Type what the manual says, in the order it says it, and compare what is shown with what is printed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftsupervise.host.processes import START
from tests.manual.blocks import ROOT, Block, marked

BIN = str(Path(sys.executable).parent)
PATIENCE = 60.0
_MASKS = (
    (r"/home/ada/venv/bin/python[\d.]*", "PYTHON"),
    (r"(raised )?by \S+ on [\w.-]+", r"\1by WHO"),
    (r" on [a-z][\w-]*(?=, )", " on NODE"),
    (r"\b[0-9a-f]{12}\b", "TOKEN"),
    # every other second the next tick is due now
    (r"(last tick \S+ ago), (?:next in [\d. smhd]+|the next was due [\d. smhd]+ ago)", r"\1"),
    (r"\b\d+(\.\d+)?(ms|s|m|h|d)( \d+(ms|s|m|h))?\b", "TIME"),
    (r"\b\d{4}-\d\d-\d\d \d\d:\d\d UTC", "DATE"),
    (r"\b(\d\d-\d\d )?\d\d:\d\d:\d\d\b", "CLOCK"),
    (r"\b(job|queue +)(?= *(local-)?\d)( *)(local-)?\d+(_\d+)?", r"\1\3ID"),
    (r"\bstep \d+", "step N"),
    (r"-(local-)?\d+(_\d+)?\.out\b", "-ID.out"),
)


class Story:
    """One directory in which blocks are typed one after the other."""

    def __init__(self, name: str, place: Path, env: Mapping[str, str], *, on: str = "local") -> None:
        self.name, self.place, self.on = name, place, on
        self.env = {**env, "PATH": f"{BIN}:{env['PATH']}", "FTSUPERVISE_STATE_DIR": str(place.parent / "state")}
        self.replaced: dict[str, str] = {}
        self.run_name = "first"
        place.mkdir(parents=True, exist_ok=True)

    @property
    def run(self) -> Path:
        return self.place / "runs" / self.run_name

    def write(self, block: Block) -> None:
        """A block that is a file. YAML gets the scheduler of this telling."""
        text = block.text
        for old, new in self.replaced.items():
            text = text.replace(old, new)
        name = block.marks["file"]
        if name == "ftsupervise.yaml":
            text += f"scheduler: {self.on}\n"
        (self.place / name).write_text(text)

    def tell(self) -> None:
        for block in marked("run", self.name):
            self.do(block)

    def do(self, block: Block) -> None:
        if "file" in block.marks:
            return self.write(block)
        if block.marks.get("wait") == "training":
            self.until(self.trains, f"{block}: the run to train")
        if block.marks.get("wait") == "watched":
            self.until(self.is_watched, f"{block}: the run to train, and the watch to look at it")
        if block.marks.get("wait") == "answered":
            self.until(lambda: not (self.run / "switches" / "save-switch").exists(), "the save switch to be answered")
        if block.marks.get("wait") == "ended":
            self.until(self.ended, f"{block}: the chain to end")
        compared = block.marks.get("on") in (None, self.on)
        commands = typed(block)
        said = self.type([command for command, _ in commands], strict=block.language == "sh")
        if block.language == "console" and compared:
            for (command, shown), got in zip(commands, said, strict=True):
                assert alike(shown, self.masked(got)), (
                    f"{block}: $ {command}\n{self.masked(got)}\nbut it shows\n{shown}"
                )
        return None

    def type(self, commands: list[str], *, strict: bool) -> list[str]:
        """What each command printed. One shell for all, so that variables last; ``strict``: each must end with 0."""
        lines = ["set -e" if strict else "set +e"]
        for number, command in enumerate(commands):
            lines.append(f"echo '@@@{number}'")
            if " --every " in command:
                log = self.place.parent / f"background-{number}.txt"
                command = command.replace(" --every 60s", " --every 2s")  # nobody waits for a minute here
                lines.append(f"{command} >{log} 2>&1 &\necho $! >>{self.place.parent}/pids")
            else:
                lines.append(command)
        done = subprocess.run(
            ["bash", "-c", "\n".join(lines)],
            cwd=self.place,
            env=self.env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=PATIENCE * 2,
            check=False,
        )
        assert not strict or done.returncode == 0, f"{commands}: exit {done.returncode}\n{done.stdout}"
        return re.split(r"^@@@\d+\n", done.stdout, flags=re.M)[1:]

    def masked(self, text: str) -> str:
        for real in {str(self.place.resolve()), str(self.place)}:
            text = text.replace(real, f"/home/ada/{self.place.name}")
        text = text.replace(str(Path(START).parent), "/home/ada/venv/lib/python3.12/site-packages/ftsupervise")
        return text.replace(BIN, "/home/ada/venv/bin")

    def trains(self) -> bool:
        return any((self.run / "beats").glob("rank-*"))

    def is_watched(self) -> bool:
        return self.trains() and self.seen()["watched_at"] is not None

    def ended(self) -> bool:
        """No job of the run is left, as far as status can see."""
        return bool(self.seen()["jobs"] == [])

    def seen(self) -> dict[str, Any]:
        asked = ["ftsupervise", "status", str(self.run), "--json"]
        done = subprocess.run(asked, env=self.env, capture_output=True, text=True, timeout=60, check=True)
        answer: dict[str, Any] = json.loads(done.stdout)
        return answer

    def until(self, question: Callable[[], object], what: str) -> None:
        end = time.monotonic() + PATIENCE
        while not question():
            if time.monotonic() > end:
                logs = "".join(path.read_text() for path in self.run.glob("logs/*"))
                raise AssertionError(f"waited {PATIENCE:.0f} s for {what}\n{logs}")
            time.sleep(0.1)

    def close(self) -> None:
        """Nothing of the story runs on."""
        pids = self.place.parent / "pids"
        for pid in map(int, pids.read_text().split() if pids.exists() else ()):
            try:
                os.kill(pid, signal.SIGTERM)
            except ProcessLookupError:
                pass
        if (self.run / "switches").is_dir():
            (self.run / "switches" / "kill-switch").touch()
        code = "from ftsupervise.scheduler.local import Local\nfor j in Local().queue(): Local().cancel(j.base_id)"
        subprocess.run([sys.executable, "-c", code], env=self.env, timeout=60, check=False)


def typed(block: Block) -> list[tuple[str, str]]:
    """(command, what it shows). A ``sh`` block shows nothing; in a ``console`` block commands begin with "$ "."""
    if block.language == "sh":
        lines = block.text.replace("\\\n", " ").splitlines()
        return [(line, "") for line in lines if line.strip() and not line.startswith("#")]
    out: list[tuple[str, str]] = []
    for line in block.text.splitlines(keepends=True):
        if line.startswith("$ "):
            out.append((line[2:].rstrip("\n"), ""))
        else:
            out[-1] = (out[-1][0], out[-1][1] + line)
    return out


def alike(shown: str, got: str) -> bool:
    """Line by line the same, but for times, ids, steps, names of hosts; a line of "..." stands for any lines."""
    pattern = "".join(".*" if line == "..." else re.escape(line) + r"\n" for line in plain(shown))
    return re.fullmatch(pattern, "".join(f"{line}\n" for line in plain(got)), re.S) is not None


def plain(text: str) -> list[str]:
    text = re.sub(r"\033\[[0-9;]*m", "", text)
    for pattern, word in _MASKS:
        text = re.sub(pattern, word, text)
    return [line.rstrip() for line in text.strip("\n").split("\n")]


def copy_of(folder: str, place: Path) -> None:
    """An example of the repository, as it stands, without what running it left behind."""
    shutil.copytree(ROOT / folder, place, ignore=shutil.ignore_patterns("runs", "checkpoints", "__pycache__"))
