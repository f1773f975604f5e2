"""Which processes of this machine belong to a sandbox, and how to end them without ever hitting a stranger.

Nothing is looked up in pid files: they lie after a crash, and process numbers are used again. A process belongs to
a sandbox when its environment names that sandbox's slurm.conf *and* it is a Slurm daemon, a Slurm command, or runs
in a job (SLURMD_NODENAME is one of the sandbox's nodes); and so do all descendants of its daemons and jobs. A shell in
which somebody typed ``eval "$(ftsupervise sandbox env)"`` names the slurm.conf too, and is left alone.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.host import processes
from ftsupervise.host.processes import Process

MARK = "FTSUPERVISE_SANDBOX_DAEMON"  # directory of the sandbox, in the environment of its daemons
MARK_OWNER = "FTSUPERVISE_SANDBOX_OWNER"  # in the environment of what ends when its owner does (keeper.py)
MARK_NODE = "FTSUPERVISE_SANDBOX_NODE"  # the node, in the environment of slurmd and what it starts

DAEMONS = {"munged", "slurmctld", "slurmscriptd", "slurmd", "slurmstepd", "slurmdbd", "mariadbd", "mysqld"}
_FORGETFUL = {"slurmscriptd"}  # overwrites the environment it was started with, all but SLURM_CONF
COMMANDS = {"srun", "sbatch", "salloc", "scancel", "squeue", "sinfo", "scontrol", "sacct", "sacctmgr", "sattach"}
COMMANDS |= {"sbcast", "sdiag", "sprio", "sshare", "sstat", "strigger"}


@dataclass(frozen=True)
class Member:
    """A process of a sandbox, and the node it plays on ("" for those of the whole cluster)."""

    process: Process
    node: str


def members(conf: Path, nodes: Collection[str]) -> list[Member]:
    """Every process of the sandbox with this slurm.conf, except ourselves and those who called us."""
    seen = {process.pid: process for process in processes.living()}
    found: dict[int, Member] = {}
    for process in seen.values():
        node = _place(process, processes.environment(process.pid), str(conf), nodes)
        if node is not None:
            found[process.pid] = Member(process, node)
    for process, origin in _descendants(seen, set(found)):
        found[process.pid] = Member(process, found[origin].node)
    return [member for pid, member in found.items() if pid not in _callers(seen)]


def _place(process: Process, environ: dict[str, str], conf: str, nodes: Collection[str]) -> str | None:
    """The node a process plays on, "" if it serves the whole cluster, None if it is none of ours."""
    if process.name == "slurmstepd" and "SLURM_CONF" not in environ:
        return _by_log(process.pid, Path(conf).parent / "log")
    if environ.get("SLURM_CONF") != conf:
        return None
    job_node = environ.get("SLURMD_NODENAME")
    if job_node in nodes:
        return job_node
    if process.name in DAEMONS and (MARK in environ or process.name in _FORGETFUL):
        return environ.get(MARK_NODE, "")
    return "" if process.name in COMMANDS else None


def _by_log(pid: int, logs: Path) -> str | None:
    """The node of a slurmstepd by its open log: in Slurm 24.11 it runs with an empty environment."""
    try:
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            opened = Path(str(fd.readlink()).removesuffix(" (deleted)"))
            if opened.parent == logs and opened.suffix == ".log":
                return opened.stem
    except OSError:  # gone, or somebody else's
        pass
    return None


def _descendants(seen: dict[int, Process], roots: set[int]) -> Iterator[tuple[Process, int]]:
    """Descendants of ``roots`` that are no roots themselves, each with the nearest root above it.

    A command's children are not followed: what ``salloc`` started is the user's own shell.
    """
    for process in seen.values():
        if process.pid in roots:
            continue
        above = process.parent
        while above not in roots and above in seen and above > 1:
            above = seen[above].parent
        if above in roots and seen[above].name not in COMMANDS:
            yield process, above


def _callers(seen: dict[int, Process]) -> set[int]:
    callers, pid = set[int](), os.getpid()
    while pid not in callers and pid > 0:
        callers.add(pid)
        pid = seen[pid].parent if pid in seen else 0
    return callers


def power_cut(choose: Callable[[], Collection[Process]], seconds: float) -> list[Process]:
    """End all processes that ``choose`` names, as if at one moment; those that would not go within ``seconds``.

    All are stopped before any is killed: else one lives to report another's death, and the controller sees a failed
    job instead of a lost node. Looking goes on until nobody new shows up twice in a row: /proc is read entry by entry,
    and one that forks and ends meanwhile, or was just being started, can slip through one look.
    """
    end = time.monotonic() + seconds
    while True:
        held = _stop_all(choose, end)
        for process in held:
            processes.signal_exactly(process, signal.SIGKILL)
        left = processes.wait_gone(held, max(0.5, end - time.monotonic()))
        if not held or left or time.monotonic() >= end:
            return left


def _stop_all(choose: Callable[[], Collection[Process]], end: float) -> list[Process]:
    held: dict[tuple[int, int], Process] = {}
    calm = 0
    while calm < 2 and time.monotonic() < end:
        new = [p for p in choose() if (p.pid, p.start) not in held]
        for process in new:
            processes.signal_exactly(process, signal.SIGSTOP)
            held[process.pid, process.start] = process
        calm = 0 if new else calm + 1
    return list(held.values())
