"""Forks ranks of replica groups: imports torch and torchft once. Each line of its input is {"argv", "env", "out"}; it answers
with {"pid"}, and later with {"pid", "code"}. What a rank prints goes to ``out``, each line with the time (CLOCK_MONOTONIC)."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import runpy
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # which an optimizer imports when it is made: once here, not in each rank
import torch.distributed.fsdp
import torchft.local_sgd  # noqa: F401

import ftsupervise.integrations.torch_data  # noqa: F401

torch.set_num_threads(1)


class Stamped:
    """A text stream whose lines begin with the time."""

    def __init__(self, stream: Any) -> None:
        self._stream, self._rest = stream, ""

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        *lines, self._rest = (self._rest + text).split("\n")
        for line in lines:
            self._stream.write(f"{time.monotonic():.4f} {line}\n")
        self._stream.flush()
        return len(text)


def rank(order: dict[str, Any]) -> None:
    os.setsid()
    out = os.open(order["out"], os.O_CREAT | os.O_WRONLY | os.O_APPEND, 0o644)
    os.dup2(out, 1)
    os.dup2(out, 2)
    os.environ.clear()
    os.environ.update(order["env"])
    faulthandler.register(signal.SIGUSR2, file=2)  # to see where a test hangs
    sys.stdout, sys.stderr = Stamped(sys.stdout), Stamped(sys.stderr)
    sys.argv = order["argv"]
    sys.path.insert(0, str(Path(order["argv"][0]).parent))
    runpy.run_path(order["argv"][0], run_name="__main__")


def main() -> None:
    def say(**what: Any) -> None:
        sys.__stdout__.write(json.dumps(what) + "\n")  # type: ignore[union-attr]
        sys.__stdout__.flush()  # type: ignore[union-attr]

    gc.collect()
    gc.freeze()  # or each rank goes through all that torch has made when it ends: seconds, and a copy of that memory
    say(ready=True)
    left = b""
    children: set[int] = set()
    while True:
        if select.select([0], [], [], 0.02)[0]:
            read = os.read(0, 1 << 16)
            if not read:
                return None
            *lines, left = (left + read).split(b"\n")
            for line in lines:
                if not (pid := os.fork()):
                    return rank(json.loads(line))  # and end as a program does
                children.add(pid)
                say(pid=pid)
        for pid in list(children):
            found, status = os.waitpid(pid, os.WNOHANG)
            if found:
                children.remove(pid)
                say(pid=pid, code=os.waitstatus_to_exitcode(status))


if __name__ == "__main__":
    main()
