"""The DDP example, in which one group becomes faulty when a file says so: FAULTS/GROUP, with one word.

high, low    its manager reports a step that it has not made: a billion, or twenty less
gil          its main thread holds the interpreter for ever
lock         its main thread waits for a lock that nobody gives back
restored     it goes on as an honest group that has an older checkpoint: fifteen steps less, once
"""

from __future__ import annotations

import ctypes
import os
import runpy
import sys
import threading
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).parents[2] / "examples" / "replicas"
sys.path.insert(0, str(EXAMPLES))

from ftsupervise.integrations import torchft as ours  # noqa: E402 - the example's folder comes first

FAULTS = Path(os.environ["FAULTS"])


class FaultyManager(ours.ReplicaManager):
    def start_quorum(self, *arguments: Any, **named: Any) -> None:
        path = FAULTS / self.group
        word = path.read_text() if path.exists() else ""
        if word == "high":
            self._step = 10**9
        elif word in ("low", "restored"):
            self._step -= 20 if word == "low" else 15
        if word in ("low", "restored", "gil", "lock"):
            path.unlink()
        if word == "gil":
            ctypes.PyDLL(None).sleep(100_000)  # PyDLL keeps the interpreter's lock
        elif word == "lock":
            lock = threading.Lock()
            lock.acquire()
            lock.acquire()
        super().start_quorum(*arguments, **named)


ours.ReplicaManager = FaultyManager  # type: ignore[misc]
sys.argv[0] = str(EXAMPLES / "ddp.py")
runpy.run_path(sys.argv[0], run_name="__main__")
