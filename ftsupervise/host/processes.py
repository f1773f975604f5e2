"""The processes below us: who they are, who can take a signal, and how to end them all.

Whatever the command leaves behind is handed to us (child subreaper), so that nothing of an attempt survives it, also what
has made itself a session of its own.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path

from ftsupervise.host import procfs

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36

_SHELLS = ("sh", "bash", "dash", "zsh", "ksh")  # one with a trap hears the signal, and so do those it waits for

_SRUN = "srun"  # blocks all signals, passes USR1 on to every rank; SIGTERM makes it kill them at once, unsaved

# Programs that hear a warning signal only to tear everything down; the ranks below them are told directly.
_LAUNCHERS = (
    *("torchrun", "torch.distributed.run", "torch.distributed.launch", "accelerate", "deepspeed", "ft_launcher"),
    "client.py",  # our own passes on what it gets, but its rank is asked itself
)


def become_subreaper() -> Callable[[], None]:
    """Orphans below us become our children from now on. Gives what a new child calls before exec to be told when we die."""
    try:
        import ctypes  # here, because who only reads the ledger does not need it
    except ImportError:  # a Python built without libffi: orphans are then found by what else marks them
        return lambda: None
    libc = ctypes.CDLL(None, use_errno=True)
    libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    parent = os.getpid()

    def tell_me_when_you_die() -> None:
        libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM, 0, 0, 0)
        if os.getppid() != parent:
            os._exit(1)

    return tell_me_when_you_die


def children() -> dict[int, list[int]]:
    """Every process of this host that is not a zombie, by its parent."""
    found: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        one = procfs.process(int(name)) if name.isdigit() else None
        if one is not None and not one.gone:
            found.setdefault(one.parent, []).append(one.pid)
    return found


def below(pid: int, without: frozenset[int] = frozenset()) -> list[int]:
    """All living descendants of ``pid``, parents first; not the branches that begin with a pid in ``without``."""
    tree, found = children(), []
    queue = [one for one in tree.get(pid, ()) if one not in without]
    while queue:
        one = queue.pop(0)
        found.append(one)
        queue.extend(tree.get(one, ()))
    return found


def who_hears(pid: int, number: int) -> list[int]:
    """On every branch from ``pid`` down, the first process that signal ``number`` would not kill and that is no launcher.

    What is below such a process (loader workers, helpers) is its own affair and is left out.
    """
    tree, found, queue = children(), [], [pid]
    while queue:
        one = queue.pop(0)
        names = _names(one)
        deaf = names.intersection(_LAUNCHERS) or (_SRUN in names and number == signal.SIGTERM)
        hears = not deaf and _handles(one, number)
        if hears:
            found.append(one)
        if not hears or names.intersection(_SHELLS):
            queue.extend(tree.get(one, ()))
    return found


def sruns(pids: list[int]) -> list[int]:
    return [pid for pid in pids if _SRUN in _names(pid)]


def send(pids: list[int], number: int) -> int:
    """Signal each; how many could be told."""
    told = 0
    for pid in pids:
        try:
            os.kill(pid, number)
            told += 1
        except (ProcessLookupError, PermissionError):
            continue
    return told


def end_session(leader: int) -> None:
    """SIGKILL for a child of ours that leads a session and for all in its group; it is reaped."""
    try:
        os.killpg(leader, signal.SIGKILL)
        os.waitpid(leader, 0)
    except (ProcessLookupError, ChildProcessError):
        pass


def _handles(pid: int, number: int) -> bool:
    """Caught, or blocked in the main thread, as by programs that wait for signals in a thread of their own (srun)."""
    try:
        status = Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return False
    bit = 1 << (number - 1)
    return any(
        int(line.split()[1], 16) & bit for line in status.splitlines() if line.startswith(("SigCgt:", "SigBlk:"))
    )


def _names(pid: int) -> set[str]:
    """What the program is called; for an interpreter also the script or module it runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes()[:4096].decode("utf-8", "replace").split("\0")
    except OSError:
        return set()
    first = words[:3] if os.path.basename(words[0]).startswith("python") else words[:1]
    return {os.path.basename(word) for word in first}
