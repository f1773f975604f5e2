"""Replica groups without a training: real managers of torchft, each a process of its own that asks for a quorum at every step.

    managers.py LIGHTHOUSE NAME STORE SECONDS_A_STEP FIRST_STEP FILE

A line in FILE for each step: the time, the step, the quorum's id, its members, and the highest step that one of them told. The
compiled module of torchft is loaded by itself, without torch: a manager is there within a tenth of a second.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

RETRIES = 40  # one a second: torchft's own default is none, with which no group survives a restart of the lighthouse


class Step(NamedTuple):
    """A step of a group, as its quorum was."""

    at: float
    step: int
    quorum: int
    members: int
    highest: int
    heal: bool


class Group:
    """One manager's process. ``store``: what it says its store is."""

    def __init__(
        self, folder: Path, lighthouse: str, name: str, *, store: str = "127.0.0.1:1", seconds: float = 0.1, first: int = 0,
        within: tuple[str, ...] = (),
    ) -> None:  # fmt: skip
        self.name, self.file = name, folder / f"{name}-{time.monotonic_ns()}.jsonl"
        words = [lighthouse, name, store, str(seconds), str(first), str(self.file)]
        env = {**os.environ, "TOKIO_WORKER_THREADS": "2", "RUST_LOG": "error"}  # read before the program begins
        self.process = subprocess.Popen([*within, sys.executable, "-I", __file__, *words], env=env)

    def steps(self) -> list[Step]:
        if not self.file.exists():
            return []
        lines = self.file.read_text("utf-8").split("\n")[:-1]
        return [Step(**told) for told in map(json.loads, lines) if "step" in told]

    def since(self, at: float) -> list[Step]:
        """The steps that began after ``at`` (``time.time``)."""
        return [one for one in self.steps() if one.at > at]

    def kill(self, number: int = signal.SIGKILL) -> None:
        self.process.send_signal(number)

    def end(self) -> None:
        self.process.kill()
        self.process.wait(20)


def compiled() -> Any:
    """The module of torchft that the lighthouse and the managers are in."""
    from importlib.machinery import EXTENSION_SUFFIXES, ExtensionFileLoader, ModuleSpec, PathFinder

    found = PathFinder.find_spec("torchft", sys.path)
    places = found.submodule_search_locations if found else None
    path = next(
        path
        for suffix in EXTENSION_SUFFIXES
        for folder in places or ()
        if (path := Path(folder, f"_torchft{suffix}")).exists()
    )
    loader = ExtensionFileLoader("_torchft", str(path))
    module = loader.create_module(ModuleSpec("_torchft", loader, origin=str(path)))
    loader.exec_module(module)
    return module


def main() -> None:
    lighthouse, name, store, seconds, first, file = sys.argv[1:]

    torchft, out, step = compiled(), Path(file).open("a", encoding="utf-8", buffering=1), int(first)  # noqa: SIM115
    server = torchft.ManagerServer(
        replica_id=f"{name}:{os.urandom(4).hex()}", lighthouse_addr=lighthouse, hostname="127.0.0.1", bind="127.0.0.1:0",
        store_addr=store, world_size=1, heartbeat_interval=timedelta(milliseconds=100), connect_timeout=timedelta(seconds=20),
        quorum_retries=RETRIES,
    )  # fmt: skip
    client = torchft.ManagerClient(server.address(), connect_timeout=timedelta(seconds=20))
    while True:
        try:
            quorum = client._quorum(
                group_rank=0, step=step, checkpoint_metadata="", shrink_only=False, timeout=timedelta(seconds=RETRIES + 1),
                init_sync=False, commit_failures=0,
            )  # fmt: skip
        except Exception as error:
            out.write(json.dumps({"error": str(error)}) + "\n")
            continue
        told = Step(time.time(), step, quorum.quorum_id, quorum.replica_world_size, quorum.max_step, bool(quorum.heal))
        out.write(json.dumps(told._asdict()) + "\n")
        time.sleep(float(seconds))
        step = max(step, quorum.max_step) + 1


if __name__ == "__main__":
    main()
