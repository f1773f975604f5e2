"""Finds leftovers of killed saves in their staging areas. The guard asks at each save, so this imports little."""

from __future__ import annotations

import os
from pathlib import Path

from ftsupervise.rundir import fence

A_DAY = 86400.0  # seconds without a change, after which nothing works there any more


def left_alone(folder: Path, now: float) -> tuple[Path, ...]:
    """Return what saves without a supervisor left in their staging areas and has not changed for a day. Raises OSError."""
    areas = [folder / fence.STAGING / name for name in names_in(folder / fence.STAGING) if fence.is_alone(name)]
    staged = (area / name for area in areas if area.is_dir() and not area.is_symlink() for name in names_in(area))
    return tuple(path for path in staged if unchanged(path, now))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; [] where there is no such folder: the run has not saved yet."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def unchanged(path: Path, now: float) -> bool:
    """Return whether nothing in it has changed for a day. False where that cannot be seen."""
    try:
        if now - path.lstat().st_ctime < A_DAY:
            return False
        for here, folders, names in os.walk(path):
            for name in (*folders, *names):
                if now - os.lstat(f"{here}/{name}").st_ctime < A_DAY:
                    return False
    except OSError:
        return False
    return True
