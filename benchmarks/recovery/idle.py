"""What a launcher costs while nothing happens: all processes of the job but its ranks and Slurm's own, over some seconds."""

from __future__ import annotations

import os
import time
from dataclasses import dataclass
from pathlib import Path

from benchmarks.memory import pss
from benchmarks.recovery.launchers import AT, Launcher
from benchmarks.recovery.scene import stage

_SLURM = ("srun", "slurmstepd", "slurmd", "slurmctld", "munged")
_TICKS = os.sysconf("SC_CLK_TCK")


@dataclass
class Cost:
    launcher: str
    processes: int
    pss: float  # MB
    share: float  # of one core, in percent
    each: list[tuple[str, float, float]]  # what each process is, its PSS and its share


def idle(launcher: Launcher, seconds: float, restarted: bool = False) -> Cost | None:
    """From step ``launcher.at`` on; ``restarted``: after a rank was killed there. None when it did not come to its steps."""
    own = {"RECOVERY_AT": str(launcher.at), "RECOVERY_FAULT": "SIGKILL"} if restarted else {"RECOVERY_AT": "0"}
    until = launcher.at + (3 * AT if restarted else 0)
    with stage(launcher, **own) as on:
        launcher.submit(on.folder, on.env)
        if not on.events.until(lambda: any(e.what == "step" and e.step >= until for e in on.events.seen), 180):
            return None
        ranks = set(on.events.pids())
        mark = f"RECOVERY_EVENTS={on.events.path}".encode()
        before = {pid: _cpu(pid) for pid in _others(mark, ranks)}
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            on.events.look(0.2)
            time.sleep(0.2)
        after = _others(mark, ranks)
        took = time.monotonic() - began
        shares = {pid: 100 * (_cpu(pid) - before.get(pid, 0)) / took for pid in after}
        each = sorted((_what(pid), pss(pid) / 2**20, share) for pid, share in shares.items())
        return Cost(launcher.name, len(after), sum(map(pss, after)) / 2**20, sum(shares.values()), each)


def _others(mark: bytes, ranks: set[int]) -> list[int]:
    """Processes of the job, told by its environment: supervisors, agents, shells."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) in ranks or int(entry.name) == os.getpid():
            continue
        try:
            words = (entry / "environ").read_bytes().split(b"\0")
        except OSError:
            continue
        in_job = mark in words and any(word.startswith(b"SLURM_JOB_ID=") for word in words)
        if in_job and _name(int(entry.name)) not in _SLURM:
            found.append(int(entry.name))
    return found


def _name(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def _what(pid: int) -> str:
    """Its name, or the module that its Python runs."""
    try:
        words = Path(f"/proc/{pid}/cmdline").read_text().split("\0")
    except OSError:
        words = []
    return words[words.index("-m") + 1] if "-m" in words[:-1] else _name(pid)


def _cpu(pid: int) -> float:
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / _TICKS
