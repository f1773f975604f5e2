"""A standby for one command line, as the ring starts it, and ranks handed to it. For the tests; no test by itself."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from pathlib import Path
from typing import Any

from ftsupervise.ranks import shm_dir

WARM = Path(__file__).parents[2] / "ftsupervise" / "warm"
OFF = ("SLURM", "FTSUPERVISE", "PYTEST")


def clean(**more: str) -> dict[str, str]:
    return {**{key: value for key, value in os.environ.items() if not key.startswith(OFF)}, **more}


class Standby:
    """A standby for one command line, as the ring starts it."""

    def __init__(
        self,
        folder: Path,
        words: list[str],
        flags: int,
        modules: tuple[str, ...],
        env: dict[str, str],
        imports: Path | None = None,
        warm: Path = WARM,
        between: tuple[str, ...] = (),
    ) -> None:
        """``imports``: the list of an attempt's rank 0; ``warm``: the room, of this package or of a copy; ``between``: the
        words of a program that starts it."""
        self.place = Path(
            tempfile.mkdtemp(prefix="warm-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else "/tmp")
        )
        self.words, self.folder, self.env = words, folder, env
        self.said = folder / f"said-{self.place.name}"
        orders = json.dumps({"place": str(self.place), "modules": modules, "imports": str(imports or "")})
        with self.said.open("ab") as said:
            self.process = subprocess.Popen(
                [*between, sys.executable, "-IS", str(warm / "sitecustomize.py"), orders, str(flags), "--", *words],
                cwd=folder, env=env, stdin=subprocess.DEVNULL, stdout=said, stderr=said, start_new_session=True,
            )  # fmt: skip

    def facts(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.said.read_text().splitlines() if line.startswith("{")]

    def ready(self) -> bool:
        assert self.process.poll() is None, self.said.read_text()
        return any(fact.get("ready") for fact in self.facts())

    def proxy(self, *words: str, patience: float | str = 0) -> list[str]:
        client = [sys.executable, "-IS", str(WARM / "client.py"), str(self.place), str(patience), "--"]
        return [*client, *(words or self.words)]

    def run(self, *words: str, patience: float = 0, **how: Any) -> subprocess.CompletedProcess[str]:
        given: dict[str, Any] = {"cwd": self.folder, "env": self.env, "stdin": subprocess.DEVNULL, **how}
        argv = self.proxy(*words, patience=patience)
        return subprocess.run(argv, capture_output=True, text=True, timeout=60, **given)

    def ranks(self) -> list[int]:
        return [
            int(pid) for pid in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()
        ]

    def end(self) -> None:
        self.process.kill()
        self.process.wait(30)
        for pid in at_home(self.folder):  # what the ranks started and left
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        shm_dir.clear(str(self.place))


def at_home(folder: Path) -> list[int]:
    """The processes whose working directory is ``folder``, but this one."""
    found = []
    for name in os.listdir("/proc"):
        try:
            if name.isdigit() and int(name) != os.getpid() and Path(f"/proc/{name}/cwd").readlink() == folder:
                found.append(int(name))
        except OSError:
            continue
    return found


def script(folder: Path, text: str, name: str = "train.py") -> str:
    (folder / name).write_text(text)
    return name
