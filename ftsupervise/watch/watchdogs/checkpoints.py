"""Do checkpoints come when they should, whole and of the usual size? The run may look alive and save nothing."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.probe import Entry, Listing, Missing, NotSeen, Tree
from ftsupervise.truth import Health
from ftsupervise.units import show_duration, show_size
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK
from ftsupervise.watch.watchdogs.run_signs import server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import CheckpointsSection as Settings
    from ftsupervise.watch import Look

# The checkpoints that are there: how large, how often, how fresh. Sizes are remembered, so that a tree of a hundred
# thousand files is walked once and not at every tick.

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


WORDS = {
    "age": Words(
        "When the run fails now, all that time is trained again.",
        "ls -lt {folder}",
        "ftsupervise save, and see whether one comes",
    ),
    "size": Words(
        "The run may not be able to go on from it.",
        "ls -lt {folder}",
        "keep the one before it; look into the log of the save",
        Severity.CRITICAL,
    ),
}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    ones = written(look, look.memory)
    if isinstance(ones, NotSeen):
        for subject in ("age", "size"):
            yield _finding(look, subject, None, f"checkpoints {ones.sentence.partition(' ')[2]}")
        return
    now = server_now(look)
    yield _age(look, settings, () if isinstance(ones, Missing) else ones, now)
    if not isinstance(ones, Missing) and ones:
        yield _size(look, settings, ones, now)


def _age(look: Look, settings: Settings, ones: tuple[Written, ...], now: float) -> Finding:
    """Against the declared or the usual cadence; the time the run spent waiting in the queue does not count."""
    at_work = look.jobs is None or any(job.state in AT_WORK for job in look.jobs)
    spent, before = look.memory.get("at_work", 0.0), look.memory.get("looked")
    newest = ones[-1] if ones else None
    if newest is not None and look.memory.get("newest") != newest.name:
        spent = max(0.0, now - newest.mtime) if look.memory.get("newest") is None else 0.0
        look.memory["newest"] = newest.name
    elif before is not None and at_work:
        spent += max(0.0, now - before)
    look.memory.update(at_work=spent, looked=now)
    cadence = settings.cadence.total_seconds() if settings.cadence is not None else usual_cadence(ones)
    name = newest.name if newest is not None else "none yet"
    if cadence is None:
        return _finding(look, "age", False, f"newest checkpoint: {name}; too few to know their cadence")
    limit = settings.late * cadence
    since = f"{show_duration(max(0.0, now - newest.mtime))} old" if newest is not None else "no checkpoint"
    usual = show_duration(cadence)
    text = f"newest checkpoint {name}: {since}, {show_duration(spent)} of it at work; one is usual every {usual}"
    return _finding(look, "age", spent > limit, text, value=show_duration(spent), limit=show_duration(limit))


def _size(look: Look, settings: Settings, ones: tuple[Written, ...], now: float) -> Finding:
    newest, usual = ones[-1], usual_size(ones)
    if newest.size is None:
        return _finding(look, "size", None, f"checkpoint {newest.name} could not be measured")
    young = now - newest.mtime < settings.settle.total_seconds()
    files = [one.files for one in ones[:-1] if one.files]
    wrong = []
    if newest.size == 0:
        wrong.append("is empty")
    elif usual is not None and newest.size < settings.smallest * usual:
        wrong.append(f"is {show_size(newest.size)} where {show_size(usual)} are usual")
    if files and newest.files is not None and newest.files < median(files):
        wrong.append(f"has {newest.files} files where {median(files):.0f} are usual")
    before = next((one for one in reversed(ones[:-1]) if one.size), None)
    if newest.empty and not (before and before.empty):
        wrong.append(f"has empty files ({', '.join(newest.empty[:3])})")
    text = " and ".join(wrong) if wrong else f"is {show_size(newest.size)}"
    if wrong and young:
        text += f", but may still be written ({show_duration(now - newest.mtime)} old)"
    return _finding(look, "size", bool(wrong) and not young, f"checkpoint {newest.name} {text}")


def _finding(look: Look, subject: str, bad: bool | None, summary: str, **more: Any) -> Finding:
    names = {"folder": folder_of(look)}
    return look.finding(subject, Health.of(bad), summary, WORDS[subject], names=names, **more)
