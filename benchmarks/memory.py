"""Measures the memory of processes: PSS, which counts a page that several share once."""

from __future__ import annotations

from pathlib import Path


def pss(pid: int) -> float:
    """Return its PSS in bytes; 0 where it has ended, or where it is another account's."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:
        return 0.0
    return sum(int(line.split()[1]) * 1024.0 for line in lines if line.startswith("Pss:"))


def family(pid: int) -> list[int]:
    """Return ``pid`` and all that it, or one below it, has started and that is there."""
    found = [pid]
    for one in found:
        for thread in Path(f"/proc/{one}/task").glob("*/children"):
            try:
                found += map(int, thread.read_text().split())
            except OSError:  # it has just ended
                continue
    return found
