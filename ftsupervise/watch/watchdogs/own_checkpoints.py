"""The checkpoints of this run, as the listing of their folder shows them: three watchdogs look at them.

Other things lie and move in that folder too: logs, results of evaluations, checkpoints of other runs, what is being removed.
None of them is a checkpoint, and none says that the run lives.
"""

from __future__ import annotations

import fnmatch
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.checkpoints.find import ONE_FILE, unfinished
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.probe import Entry, Listing, Missing, NotSeen
from ftsupervise.rundir.fence import STAGING

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_MOST = 5000  # entries of the folder
_AREAS = 1000  # staging areas


def folder_of(look: Look) -> Path:
    """Return the folder in which the run writes its checkpoints."""
    return look.run.checkpoints.path or look.rundir.checkpoints


def finished(look: Look, memory: dict[str, Any]) -> tuple[Entry, ...] | Missing | NotSeen:
    """Return the checkpoints of this run whose names do not say that they are unfinished, oldest first.

    With the default pattern a file counts only where its name ends as a checkpoint's does. ``memory`` keeps which of them
    are other runs'.
    """
    pattern = look.run.checkpoints.pattern
    got = _listing(look)
    if not isinstance(got, Listing):
        return got
    entries = [one for one in got.entries if fnmatch.fnmatchcase(one.name, pattern) and not unfinished(one.name)]
    entries = [one for one in entries if one.is_dir or (one.is_file and _is_checkpoint(one.name, pattern))]
    others = _of_others(look, entries, memory)
    return tuple(sorted((one for one in entries if one.name not in others), key=lambda one: one.mtime))


def _listing(look: Look) -> Listing | Missing | NotSeen:
    return look.once("the folder of the checkpoints", lambda: look.probe.listing(folder_of(look), most=_MOST))


def _is_checkpoint(name: str, pattern: str) -> bool:
    return pattern != "*" or name.endswith(ONE_FILE)


def newest_save(look: Look, memory: dict[str, Any], longest: float) -> tuple[str, float] | NotSeen | None:
    """Return the name of the checkpoint of this run that was written to last, and when, by the clock of its file server;
    None where there is none. One that is being written counts too.

    A folder counts for ``longest`` seconds after it was first seen, for a save takes no longer: what others write into a
    finished checkpoint later, such as the result of an evaluation, is no save.
    """
    mine = finished(look, memory)
    if isinstance(mine, NotSeen):
        return mine
    if isinstance(mine, Missing):
        return None
    known: dict[str, list[float]] = memory.get("first", {})
    first: dict[str, list[float]] = {}
    found: list[tuple[float, str]] = []
    for one in (*mine, *_staged(look)):
        at = one.mtime
        if one.is_dir:
            before = known.get(one.name)
            begun = before[1] if before is not None and before[0] == one.inode else at
            first[one.name], at = [one.inode, begun], min(at, begun + longest)
        found.append((at, one.name))
    memory["first"] = first
    at, name = max(found, default=(0.0, ""))
    return (name, at) if found else None


def _staged(look: Look) -> tuple[Entry, ...]:
    """Return what the newest attempt of this run has in its staging area, and what a program without the guard writes
    under a name with a step that says that it is unfinished. In a folder of several runs it is not known whose that is."""
    folder, own = folder_of(look), look.rundir.checkpoints
    if folder != own:
        return ()
    areas = look.probe.listing(own / STAGING, most=_AREAS)
    area = max(areas.entries, key=lambda one: one.name, default=None) if isinstance(areas, Listing) else None
    inside = look.probe.listing(own / STAGING / area.name, most=_AREAS) if area is not None and area.is_dir else None
    beside = _listing(look)
    return (
        *(inside.entries if isinstance(inside, Listing) else ()),
        *(one for one in (beside.entries if isinstance(beside, Listing) else ()) if _in_the_making(one)),
    )


def _in_the_making(entry: Entry) -> bool:
    return unfinished(entry.name) and not entry.name.startswith(".") and step_of(entry.name) is not None


def _of_others(look: Look, entries: list[Entry], memory: dict[str, Any]) -> frozenset[str]:
    """Return the names of the checkpoints of other runs in the same folder. Asked once of each name, or when it has changed;
    in a folder that only this run has, never."""
    if folder_of(look) == look.rundir.checkpoints:
        return frozenset()
    there = {entry.name: entry.mtime for entry in entries}
    known: dict[str, list[Any]] = {k: v for k, v in memory.get("others", {}).items() if there.get(k) == v[0]}
    if asked := there.keys() - known.keys():
        folder, root = folder_of(look), str(look.rundir.root)
        words = (str(folder), look.run.checkpoints.pattern, root, sorted(known))
        got = look.probe.call(folder, "checkpoints.find:names_of_other_runs", *words)
        if not isinstance(got, (Missing, NotSeen)):
            known |= {name: [there[name], name in got] for name in asked}
    memory["others"] = known
    return frozenset(name for name, (_, other) in known.items() if other)
