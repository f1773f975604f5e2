"""Leaves the dump of PyTorch's flight recorder where an exception ends the program while it has a process group.

When ranks give tensors of different sizes, gloo aborts the one that was given too much, which need not be the one that is wrong
and which says no more. Its neighbours learn of it at once: what they had called says who it was. It stands alone because it is
the only part of the guard that sees the program's exceptions.
"""

from __future__ import annotations

import os
import sys
import threading
from pathlib import Path
from types import TracebackType

from ftsupervise.host.ownership import make_folder
from ftsupervise.rundir.paths import write_whole

_WITHIN = 0.3  # seconds: the disk may hang


def leave_at_an_exception(attempt: Path, rank: int) -> None:
    """From now on leave it in the folder of ``attempt``, where the evidence of a hang puts those that it asks for."""
    before, pid = sys.excepthook, os.getpid()

    def hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if os.getpid() == pid and issubclass(kind, Exception):  # and not in a child that it has forked
            _leave(attempt / "evidence/flight" / f"rank_{rank}")
        before(kind, error, trace)

    sys.excepthook = hook


def _leave(path: Path) -> None:
    """Write it, without stacks: these cost most, and the traceback has the one that counts. Never raises."""
    try:
        group, recorder = sys.modules.get("torch.distributed"), sys.modules.get("torch._C._distributed_c10d")
        if group is None or recorder is None or not group.is_initialized():
            return
        raw = recorder._dump_fr_trace(True, False, False)  # all collectives, no stacks, not only those under way
        writing = threading.Thread(target=_write, args=(path, raw), daemon=True)
        writing.start()
        writing.join(_WITHIN)
    except Exception:  # law 7: another PyTorch
        return


def _write(path: Path, raw: bytes) -> None:
    try:
        make_folder(path.parent, parents=True)
        write_whole(path, raw, sync=False)
    except OSError:
        return
