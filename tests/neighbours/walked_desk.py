"""An account with a finished run, and every place of it in which another account may have laid a link into what is private."""

from __future__ import annotations

import hashlib
import json
import os
import pwd
import shutil
import signal
import stat
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import click

from tests.neighbours.leftovers import end_all_under
from tests.neighbours.patience import wait_until

ADA, EVE = pwd.getpwnam("daemon"), pwd.getpwnam("games")  # every Debian has them
GROUP = EVE.pw_gid  # of both
CANARY = "PRIVATE-of-ada"  # stands in all that only she may read
SETTINGS = """
name: thesis
scheduler: local
launch: {{command: [{python}, {project}/train.py], jobs: 1, output: {project}/logs/%A.out}}
nodes: {{directory: {project}/nodes}}
checkpoints: {{retain: {{last: 2}}, offload: {{to: {project}/copies}}}}
watch: {{disk: null, memory: null, metrics: {project}/metrics}}
alerts:
  templates: {project}/templates
  receivers:
    - file: {{path: {project}/told/told.txt}}
"""
TRAIN = """
from ftsupervise import Guard
with Guard() as guard:
    for step in range(3):
        guard.step(step)
        with guard.checkpoint(step) as folder:
            (folder / "weights").write_text("1" * 100)
        guard.saved(step)
    guard.finished(step)
"""
# The walk types these words for parameters that have no default.
WORDS = {
    "action": {"sandbox controller": "stop", "sandbox node": "crash"},
    "command": "true",
    "group": "g000",
    "key": "abc",
    "name": {"sandbox node": "node-1", "cron run": "minutely/nothing"},
    "pattern": "*",
    "shell": "bash",
    "silence_id": "abc",
    "watchdog": "all",
    "verbs": "launch",
}
OPTIONS = {
    "alerts silence": ["--for", "1h"],
    "nodes exclude": ["--for", "1h"],
    "cron install": ["--backend", "loop"],
    "checkpoints prune": ["--last", "2"],
    "launch": ["--again"],
    "kill": ["--yes"],
    "report": ["--output", "PROJECT/report.html"],
    "drill": ["--dry-run"],
    "init": ["--force"],
    "run": ["--run-dir", "RUN"],
    "groups member": ["--number", "0", "--run-dir", "RUN", "--name", "r", "--count", "3", "--lighthouse", "none", "--"],
}


class Typed(NamedTuple):
    """The end of a command; ``code`` None: it did not end in time."""

    code: int | None
    said: str


class Place(NamedTuple):
    """``path``: what is moved away, for what eve lays there by ``how``."""

    path: Path
    how: str


class Desk:
    """Ada's project, in which her group may write, with a finished run that was watched, and what only she may read."""

    def __init__(self, top: Path, python: str) -> None:
        self.top, self.python = top, python
        self.home, self.project, self.private = top / "home", top / "project", top / "home" / "private"
        self.tmp, self.cron, self.aside = top / "tmp", top / "cron", top / "aside"
        self.state = top / "state"
        self.run = self.project / "runs" / "thesis"
        for folder, mode in (
            (self.home, 0o700),
            (self.private, 0o700),
            (self.project, 0o2775),
            (self.tmp, 0o1777),
            (self.cron, 0o755),
            (self.state, 0o755),
            *((self.project / name, 0o2775) for name in ("logs", "nodes", "copies", "metrics", "templates", "told")),
        ):
            folder.mkdir()
            self.give(folder, mode)
        (self.project / "logs").chmod(0o755)  # or the launch is refused
        self.aside.mkdir()
        self.write(self.project / "train.py", TRAIN)
        self.write(self.project / "job.sbatch", "#!/bin/bash\n#SBATCH --nodes=2\nsrun python train.py\n")
        self.write(self.project / "templates" / "alert.text.j2", "it says so\n")
        self.write(self.project / "ftsupervise.yaml", SETTINGS.format(python=python, project=self.project))
        self._live()
        self._make_twins()
        self.kept = top / "kept"
        self.kept.mkdir()
        self._keep()
        self.before = self.seen()

    def give(self, path: Path, mode: int) -> Path:
        os.chown(path, ADA.pw_uid, GROUP)
        path.chmod(mode)
        return path

    def write(self, path: Path, text: str, mode: int = 0o644) -> Path:
        path.write_text(text)
        return self.give(path, mode)

    @property
    def env(self) -> dict[str, str]:
        return {
            "PATH": "/usr/bin:/bin",
            "HOME": str(self.home),
            "TMPDIR": str(self.tmp),
            "FTSUPERVISE_STATE_DIR": str(self.state),
            "FTSUPERVISE_LOCAL_KILL_WAIT": "1",
        }

    def type(self, *words: str, seconds: float = 60.0) -> Typed:
        """Type it as ada in her project."""
        with (self.aside / "said").open("w+b") as out:
            child = subprocess.Popen(
                [self.python, "-I", "-m", "ftsupervise", *words],
                cwd=self.project, env=self.env, user=ADA.pw_uid, group=GROUP, extra_groups=[], umask=0o022,
                stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True,
            )  # fmt: skip
            try:
                code: int | None = child.wait(seconds)
            except subprocess.TimeoutExpired:
                code = None
                os.killpg(child.pid, signal.SIGKILL)
                child.wait()
            out.seek(0)
            return Typed(code, out.read().decode(errors="replace"))

    def _live(self) -> None:
        """All that a run leaves behind: launched, trained to its end, watched, kept up, and asked for this and that."""

        def done(*words: str, code: Sequence[int] = (0,)) -> None:
            end = self.type(*words)
            assert end.code in code, (words, end)

        done("launch")
        wait_until((self.run / "attempts" / "0001" / "end.json").exists, "the end of its job", 60)
        wait_until(lambda: end_all_under(self.top) == 0, "its end")
        done("cron", "install", "--backend", "loop", "--dir", str(self.cron), code=(0, 1))
        entry = self.write(self.cron / "cron.minutely" / "nothing", "#!/bin/sh\n", 0o755)
        assert entry.exists()
        for words in (
            ("watch",), ("nodes", "exclude", "node-1", "--for", "1h"), ("nodes", "trust", "node-2"),
            ("nodes", "clear", "node-3"), ("nodes", "exclude", "node-4", "--shared"),
            ("alerts", "silence", "*", "--for", "1h"), ("save",), ("kill", "--yes"),
            ("clear",), ("save",), ("observe", "exclusion"), ("checkpoints", "verify"), ("checkpoints", "upkeep"),
            ("diagnose",),
            ("metrics", "--to", str(self.project / "metrics")), ("notify", "test"),
            ("cron", "tick", "--dir", str(self.cron)),
            ("status",), ("report", "--output", str(self.project / "report.html")),
        ):  # fmt: skip
            end = self.type(*words)
            assert "Traceback" not in end.said, (words, end)
        wait_until(lambda: end_all_under(self.top) == 0, "the end of what that has started")

    # ------------------------------------------------------------------------------------------------------ the places

    def of(self, path: Path) -> Path:
        """Its private twin."""
        return self.private / "__".join(path.relative_to(self.top).parts)

    def paths(self) -> list[Path]:
        """Every folder and every file there is to be exchanged, found by a walk."""
        found = [
            one
            for top in (self.project, self.cron, self.state, self.tmp)
            for one in (*top.rglob("*"), *((top,) if top is not self.project else ()))
            if not one.is_symlink() and not {"__pycache__", "package"} & set(one.parts)
        ]
        return sorted(found)

    def _make_twins(self) -> None:
        """Each thing's copy for ada alone: its words say whose they are."""
        for path in self.paths():
            twin = self.of(path)
            if path.is_dir():
                shutil.copytree(path, twin, symlinks=True, ignore_dangling_symlinks=True)
            else:
                shutil.copy2(path, twin)
            for one in (twin, *(twin.rglob("*") if twin.is_dir() else ())):
                os.chown(one, ADA.pw_uid, GROUP, follow_symlinks=False)
                if one.is_symlink():
                    continue
                if one.is_file():
                    one.write_bytes(marked(one.read_bytes()))
                one.chmod(0o700 if one.is_dir() else 0o600)

    def places(self) -> list[Place]:
        return [
            Place(path, how)
            for path in self.paths()
            for how in (("link", "folder") if path.is_dir() else ("link", "dangling"))
        ]

    def lay(self, place: Place) -> Callable[[], None]:
        """Eve's link or folder, in the place of what is there. Returns how to take it away again."""
        path, away = place.path, self.aside / "__".join(place.path.relative_to(self.top).parts)
        path.rename(away)
        twin = self.of(path)
        if place.how == "folder":
            path.mkdir()
            for one in twin.iterdir():
                (path / one.name).symlink_to(one)
                os.chown(path / one.name, EVE.pw_uid, GROUP, follow_symlinks=False)
            os.chown(path, EVE.pw_uid, GROUP)
            path.chmod(stat.S_IMODE(away.stat().st_mode))
        else:
            path.symlink_to(twin if place.how == "link" else self.private / "not-there-yet")
            os.chown(path, EVE.pw_uid, GROUP, follow_symlinks=False)

        def back() -> None:
            if path.is_symlink() or path.is_file():
                path.unlink()
            elif path.exists():
                shutil.rmtree(path)
            path.parent.mkdir(parents=True, exist_ok=True)
            away.rename(path)

        return back

    # ------------------------------------------------------------------------------------------------------ what is seen

    def seen(self) -> dict[str, object]:
        """All that is private: names, owners, modes, contents."""
        found: dict[str, object] = {}
        for one in (self.private, *self.private.rglob("*")):
            is_ = one.lstat()
            data = hashlib.md5(one.read_bytes()).hexdigest() if stat.S_ISREG(is_.st_mode) else ""
            found[str(one.relative_to(self.private))] = (is_.st_mode, is_.st_uid, is_.st_gid, data)
        return found

    def broken(self) -> list[str]:
        """Return what has become of the private things, and where else their words stand."""
        now = self.seen()
        wrong = [
            f"{name}: {'made' if name not in self.before else 'gone' if name not in now else 'changed'}"
            for name in sorted({*self.before, *now})
            if self.before.get(name) != now.get(name)
        ]
        for top in (self.project, self.cron, self.tmp, self.state):
            for at, folders, files in os.walk(top):
                folders[:] = [one for one in folders if not Path(at, one).is_symlink()]
                for file in files:
                    path = Path(at, file)
                    if path.is_symlink() or not path.is_file():
                        continue
                    if CANARY.encode() in path.read_bytes() and self._eve_reads(path):
                        wrong.append(f"{path.relative_to(self.top)} says what only ada may read")
        return wrong

    def _eve_reads(self, path: Path) -> bool:
        if not path.lstat().st_mode & 0o044:
            return False
        return all(
            folder.stat().st_mode & 0o011 for folder in path.parents if self.top in folder.parents or folder == self.top
        )

    # ------------------------------------------------------------------------------------------------------ as it was

    def _tops(self) -> Iterator[tuple[Path, Path]]:
        for top in (self.project, self.cron, self.tmp, self.state, self.private):
            yield top, self.kept / top.name

    def _keep(self) -> None:
        for top, kept in self._tops():
            subprocess.run(["cp", "-a", str(top), str(kept)], check=True)
        self.shape = self._shape()

    def _shape(self) -> dict[str, tuple[int, int, int, int, int]]:
        found = {}
        for top, _ in self._tops():
            for one in (top, *top.rglob("*")):
                is_ = one.lstat()
                size = is_.st_size if stat.S_ISREG(is_.st_mode) else 0
                stamp = is_.st_mtime_ns if stat.S_ISREG(is_.st_mode) else 0
                found[str(one)] = (is_.st_mode, is_.st_uid, is_.st_gid, size, stamp)
        return found

    def as_made(self) -> None:
        """Undo what a command has done; the folders that are there keep their inodes, by which they are known."""
        now = self._shape()
        if now == self.shape:
            return
        for name in sorted(now.keys() - self.shape.keys(), reverse=True):
            one = Path(name)
            if one.is_dir() and not one.is_symlink():
                shutil.rmtree(one, ignore_errors=True)
            else:
                one.unlink(missing_ok=True)
        for name, is_ in self.shape.items():
            one = Path(name)
            if now.get(name) == is_:
                continue
            top, kept = next((top, kept) for top, kept in self._tops() if top == one or top in one.parents)
            source = kept / one.relative_to(top)
            if stat.S_ISDIR(is_[0]):
                if not one.is_dir() or one.is_symlink():
                    one.unlink(missing_ok=True)
                    one.mkdir()
                os.chown(one, is_[1], is_[2])
                one.chmod(stat.S_IMODE(is_[0]))
            else:
                if one.is_dir() and not one.is_symlink():
                    shutil.rmtree(one)
                one.unlink(missing_ok=True)
                subprocess.run(["cp", "-a", str(source), str(one)], check=True)

    # ------------------------------------------------------------------------------------------------------ the commands

    def words(self, name: str, command: click.Command, run: str) -> list[str]:
        """Return the words that ada types for her run."""
        options = list(OPTIONS.get(name, []))
        group = name.split()[0]
        if group == "cron":
            options += ["--dir", str(self.cron)]
        if group == "sandbox" and name != "sandbox list":
            options += ["--dir", str(self.project / "sandbox")]
        said: list[str] = []
        for one in command.params:
            if not isinstance(one, click.Argument):
                continue
            known: Any = WORDS.get(str(one.name), "")
            word = known.get(name, "") if isinstance(known, dict) else known
            if one.name in ("run", "runs", "config"):
                word = run
            elif one.name == "names":
                word = "watch-all" if group == "cron" else "node-1"
            elif one.name == "checkpoint":
                word = str(self.run / "checkpoints" / "step-00000002")
            elif one.name == "words" and name == "init":
                word = "job.sbatch"
            said += [word] if word else []
        whole = [*name.split(), *options, *said]
        return [word.replace("PROJECT", str(self.project)).replace("RUN", str(self.run)) for word in whole]


def marked(raw: bytes) -> bytes:
    """The same, with the canary in its words."""
    try:
        page = json.loads(raw)
    except ValueError:
        page = None
    if isinstance(page, dict):

        def of(value: object, key: str) -> object:
            if isinstance(value, dict):
                return {name: of(one, name) for name, one in value.items()}
            if isinstance(value, list):
                return [of(one, key) for one in value]
            free = isinstance(value, str) and key in (
                "why",
                "words",
                "by",
                "host",
                "who",
                "evidence",
                "summary",
                "line",
            )
            return f"{value} {CANARY}" if free else value

        return json.dumps(of({**page, "canary": CANARY}, "")).encode()
    if raw.isascii() and raw.strip():
        return raw.rstrip(b"\n") + f"\n# {CANARY}\n".encode()
    return raw
