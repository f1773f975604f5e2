"""The checkpoints that are there: how large, how often, how fresh. Sizes are remembered, so that a tree of a hundred
thousand files is walked once and not at every tick."""

from __future__ import annotations

import fnmatch
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ftsupervise.probe import Entry, Listing, Missing, NotSeen, Tree

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_WALKS = 2  # trees measured anew in one check
_UNFINISHED = ("tmp", ".tmp", "incomplete", "partial", ".part", "staging")


@dataclass(frozen=True)
class Written:
    """One checkpoint. ``size`` in bytes and ``files`` are None until it was measured; ``empty`` names of empty files."""

    name: str
    mtime: float
    size: int | None
    files: int | None
    empty: tuple[str, ...] = ()


def folder_of(look: Look) -> Path:
    """Where the run writes its checkpoints."""
    section = look.run.watch.checkpoints
    return section.path if section is not None and section.path is not None else look.rundir.checkpoints


def unfinished(name: str) -> bool:
    """Does the name say that it is not whole yet?"""
    low = name.lower()
    return low.startswith((".", "tmp", "_tmp")) or any(low.endswith(mark) for mark in _UNFINISHED) or ".tmp" in low


def written(look: Look, memory: dict[str, Any], *, newest: int = 4) -> tuple[Written, ...] | Missing | NotSeen:
    """The ``newest`` checkpoints with their sizes and all others without, oldest first. ``memory`` keeps the sizes."""
    section = look.run.watch.checkpoints
    pattern = section.pattern if section is not None else "*"
    folder = folder_of(look)
    got = look.probe.listing(folder, most=5000)
    if not isinstance(got, Listing):
        return got
    entries = [e for e in got.entries if (e.is_dir or e.is_file) and fnmatch.fnmatchcase(e.name, pattern)]
    entries = sorted((e for e in entries if not unfinished(e.name)), key=lambda one: one.mtime)
    known: dict[str, list[Any]] = memory.get("sizes", {})
    sizes: dict[str, list[Any]] = {}
    walks = 0
    for entry in entries[-newest:][::-1]:
        before = known.get(entry.name)
        if before is not None and before[0] == entry.mtime and before[4] >= 2:
            sizes[entry.name] = before
        elif walks < _WALKS:
            walks += 1
            _measure(look, folder, entry, before, sizes)
    memory["sizes"] = sizes
    return tuple(_one(entry, sizes.get(entry.name)) for entry in entries)


def _measure(look: Look, folder: Path, entry: Entry, before: list[Any] | None, sizes: dict[str, list[Any]]) -> None:
    """Walk one; it is settled when two walks at two checks gave the same."""
    tree = look.probe.tree(folder / entry.name)
    if isinstance(tree, Tree) and not tree.more:
        same = before is not None and before[1:3] == [tree.size, tree.files]
        sizes[entry.name] = [
            entry.mtime,
            tree.size,
            tree.files,
            list(tree.empty),
            before[4] + 1 if same and before else 1,
        ]


def _one(entry: Entry, size: list[Any] | None) -> Written:
    if size is None:
        return Written(entry.name, entry.mtime, entry.size if entry.is_file else None, 1 if entry.is_file else None)
    return Written(entry.name, entry.mtime, size[1], size[2], tuple(size[3]))


def usual_size(ones: tuple[Written, ...]) -> int | None:
    """The median size, the newest (which may still be growing) left out if there are others."""
    sizes = [one.size for one in (ones[:-1] or ones) if one.size]
    return int(median(sizes)) if sizes else None


def usual_cadence(ones: tuple[Written, ...]) -> float | None:
    """The median time between two, in seconds; None while there are fewer than three."""
    gaps = [b.mtime - a.mtime for a, b in pairwise(ones) if b.mtime > a.mtime]
    return median(gaps[-20:]) if len(gaps) >= 2 else None
