"""What each version of Slurm answered to our own questions, recorded word by word and played back.

``tests/golden/slurm/VERSION.txt`` holds the answers of one version: the command after ``$ ``, its output after ``| ``, its
complaints after ``! ``, its exit code after ``= ``. They were recorded from a real Slurm that ``Scene`` was played on:
``UPDATE_RECORDED=1 make test-slurm-versions ARGS=tests/slurm/test_recorded_answers.py``. Played back, programs of the same
names stand on the PATH and say the same again.
"""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import user_name
from ftsupervise.sandbox import Sandbox

FOLDER = Path(__file__).parents[1] / "golden" / "slurm"
PROGRAMS = ("sbatch", "scancel", "scontrol", "sinfo", "squeue", "sacct", "sacctmgr")
USER = "root"  # the account that they were recorded as
_MARKED = re.compile("([\x1e\x1f])[0-9a-f]{12}:")  # the separators of one question to squeue


class Answer(NamedTuple):
    """One command and what it said."""

    asked: str
    said: str = ""
    complained: str = ""
    code: int = 0


def versions() -> list[str]:
    """Return the recorded versions, the oldest first."""
    names = (path.stem for path in FOLDER.glob("[0-9]*.txt") if "-" not in path.stem)
    return sorted(names, key=lambda name: [*map(int, name.split("."))])


def write_answers(path: Path, answers: list[Answer]) -> None:
    lines: list[str] = []
    for one in sorted({one.asked: one for one in reversed(answers)}.values()):
        lines += [f"$ {one.asked}", *(f"| {line}" for line in one.said.split("\n")[:-1])]
        lines += [*(f"! {line}" for line in one.complained.splitlines()), f"= {one.code}", ""]
    path.write_text("\n".join(lines), "utf-8")


def read_answers(path: Path) -> dict[str, Answer]:
    found: dict[str, Answer] = {}
    for block in path.read_text("utf-8").split("\n\n"):
        kinds: dict[str, list[str]] = {"$ ": [], "| ": [], "! ": [], "= ": []}
        for line in block.strip("\n").split("\n"):
            kinds[line[:2]].append(line[2:] + "\n")
        asked = kinds["$ "][0][:-1]
        found[asked] = Answer(asked, "".join(kinds["| "]), "".join(kinds["! "]), int(kinds["= "][0]))
    return found


def key(words: list[str]) -> str:
    """Return a command as it stands in the recording: without what changes with the question, the account or the machine."""
    me = user_name()
    own = [USER if word == me else f"user={USER}" if word == f"user={me}" else word for word in words]
    return visible(shlex.join(own))


def visible(text: str) -> str:
    return _MARKED.sub(lambda found: "␞" if found[1] == "\x1e" else "␟", text)


# ------------------------------------------------------------------------------------------ programs on the PATH


_SPY = """\
#!{python} -I
import subprocess, sys
sys.path[:0] = {path!r}
from tests.neighbours.recorded_slurm import note
done = subprocess.run([{real!r}, *sys.argv[1:]], capture_output=True, text=True)
note({folder!r}, [{name!r}, *sys.argv[1:]], done.stdout, done.stderr, done.returncode)
sys.stdout.write(done.stdout)
sys.stderr.write(done.stderr)
sys.exit(done.returncode)
"""
_PLAYER = """\
#!{python} -I
import sys
sys.path[:0] = {path!r}
from tests.neighbours.recorded_slurm import play
play({file!r}, [{name!r}, *sys.argv[1:]])
"""
_HERE = [str(Path(__file__).parents[2])]


def spies(folder: Path, env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` with programs on its PATH that note what the real ones answer, each in a file below ``folder``."""
    programs = {name: shutil.which(name, path=env["PATH"]) for name in PROGRAMS}
    (folder / "notes").mkdir()
    texts = {
        name: _SPY.format(python=sys.executable, path=_HERE, real=real, folder=str(folder / "notes"), name=name)
        for name, real in programs.items()
    }
    return _on_path(folder / "bin", texts, env)


def players(version: str, folder: Path, env: Mapping[str, str] = os.environ) -> dict[str, str]:
    """Return ``env`` with programs on its PATH that answer as those of ``version`` did."""
    file = str(FOLDER / f"{version}.txt")
    texts = {name: _PLAYER.format(python=sys.executable, path=_HERE, file=file, name=name) for name in PROGRAMS}
    return _on_path(folder, texts, {**env, "SLURM_CONF": "/dev/null"})


def _on_path(folder: Path, texts: Mapping[str, str], env: Mapping[str, str]) -> dict[str, str]:
    folder.mkdir()
    for name, text in texts.items():
        (folder / name).write_text(text)
        (folder / name).chmod(0o755)
    return {**env, "PATH": f"{folder}:{env['PATH']}"}


def note(folder: str, words: list[str], said: str, complained: str, code: int) -> None:
    answer = Answer(key(words), visible(said), visible(complained), code)
    write_answers(Path(folder) / f"{time.time_ns()}-{os.getpid()}", [answer])


def noted(folder: Path) -> list[Answer]:
    return [answer for path in sorted((folder / "notes").iterdir()) for answer in read_answers(path).values()]


def play(file: str, words: list[str]) -> None:
    asked = " ".join(words)
    answer = read_answers(Path(file)).get(key(words))
    if answer is None:
        sys.exit(f"never recorded: {key(words)}")
    marks = dict(zip("␞␟", (_MARKED.search(asked, asked.find(sep)) for sep in "\x1e\x1f"), strict=True))
    text = answer.said
    for sign, mark in marks.items():
        text = text.replace(sign, mark[0]) if mark else text
    sys.stdout.write(text)
    sys.stderr.write(answer.complained)
    sys.exit(answer.code)


# ------------------------------------------------------------------------------------------ what is recorded


_JOB = textwrap.dedent("""\
    #!/bin/bash
    env | grep -o '^SLURM_[A-Z_]*' | sort > env-$SLURM_JOB_ID
    srun --nodes=1 --ntasks=1 --job-name=train sleep 600
    """)


class Scene:
    """A queue in which each state stands that the tool has to tell from the others: always with the same job ids."""

    ODD = "a|b 'c' \"d\" é%j"

    def __init__(self, sandbox: Sandbox, folder: Path, until: Callable[..., object]) -> None:
        self.sandbox, self.folder, self._until = sandbox, folder, until
        (folder / "job.sh").write_text(_JOB)
        (folder / "short.sh").write_text('#!/bin/bash\nexit "$1"\n')

    def play(self) -> None:
        self._submit("--job-name=ends", "short.sh", "0")  # 1
        self._submit("--job-name=fails", "short.sh", "3")  # 2
        self._is("1", "COMPLETED")
        self._is("2", "FAILED")
        self._submit("--job-name=stopped", "--nodelist=node-2", "--output=stopped.out", "job.sh")  # 3
        self._is("3", "RUNNING")
        self._until(lambda: "3.0" in self._run("squeue", "-h", "-s", "-o", "%i"), "its step")
        self._run("scancel", "3")
        self._is("3", "CANCELLED")
        self._submit("--job-name=chain", "--nodes=2", "--array=1-4%1", "--comment=ftsupervise:scene", "job.sh")  # 4, 5
        self._is("4_1", "RUNNING")
        self._until(lambda: "4_1.0" in self._run("squeue", "-h", "-s", "-o", "%i"), "its step")
        self._submit("--job-name=after", "--dependency=afterany:4", "job.sh")  # 6
        self._submit("--hold", f"--job-name={self.ODD}", "job.sh")  # 7
        self._submit("--job-name=later", "--begin=now+5days", "--exclude=node-[0-1]", "job.sh")  # 8
        self._run("scontrol", "update", "nodename=node-3", "state=drain", "reason=ECC errors | GPU 4")
        waits = {"4_[2-4%1]": "JobArrayTaskLimit", "6": "Dependency", "7": "JobHeldUser", "8": "BeginTime"}
        self._until(lambda: self._reasons().items() >= waits.items(), "the reasons of those that wait")

    def beside(self) -> Iterator[Answer]:
        """Yield what is not asked of Slurm's commands: the variables in a job, what a job's output says of its end."""
        yield Answer("# variables of an array member", (self.folder / "env-5").read_text())
        log = (self.folder / "stopped.out").read_text()
        yield Answer(
            "# output of a job that was cancelled", re.sub(r"\d{4}-\d\d-\d\dT[\d:.]+", "2026-11-21T08:00:00", log)
        )
        yield Answer("# programs", "".join(f"{name}\n" for name in ("scrontab",) if shutil.which(name)))

    def _submit(self, *words: str) -> None:
        output = () if any(word.startswith("--output") for word in words) else ("--output=/dev/null",)
        self._run("sbatch", "-Q", *output, *words)

    def _is(self, job: str, state: str) -> None:
        asked = ("squeue", "-h", "-t", "all", "-j", job, "-o", "%T")
        self._until(lambda: self._run(*asked).split() == [state], f"{job} is {state}")

    def _reasons(self) -> dict[str, str]:
        rows = (line.split(" ") for line in self._run("squeue", "-h", "-o", "%i %r").splitlines())
        return {row[0]: row[1] for row in rows}

    def _run(self, *words: str) -> str:
        done = subprocess.run(
            words, env=self.sandbox.env(), cwd=self.folder, capture_output=True, text=True, check=True, timeout=60
        )
        return done.stdout


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work there meanwhile: a path of a script is the same in every recording."""
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def has_accounting(version: str) -> bool:
    answers = read_answers(FOLDER / f"{version}.txt")
    return any(asked.startswith("sacct ") and answer.code == 0 for asked, answer in answers.items())
