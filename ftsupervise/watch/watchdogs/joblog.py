"""The newest output of the run's job, and what was written to it since the last look. Never more than a bounded piece.

Rotation (another file), truncation (a shorter one) and copies are survived: what cannot be gone on with is begun anew.
"""

from __future__ import annotations

import fnmatch
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.config.job_output import starred
from ftsupervise.probe import Entry, Missing, NotSeen, Tail
from ftsupervise.watch.watchdogs import logtext

if TYPE_CHECKING:
    from ftsupervise.watch import Look

MOST = 262_144  # bytes looked at per tick


@dataclass(frozen=True)
class Piece:
    """What is new in a log: the file, its facts, the bytes since the last check (or its end), and if it is a new file."""

    path: Path
    entry: Entry
    data: bytes
    fresh: bool


def pattern_of(look: Look, setting: Path | None) -> Path:
    """The path, possibly with * in its name, that the run's output has."""
    if setting is not None:
        return setting if setting.is_absolute() else look.rundir.root / setting
    output = look.run.launch.output
    if output is None:
        return look.rundir.logs / f"{_literally(look.run.name)}-*"
    name = _literally(look.run.name)
    star = Path(starred(_literally(output), name))
    return star if star.is_absolute() else look.rundir.root / star


def _literally(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def newest(look: Look, setting: Path | None) -> tuple[Path, Entry] | Missing | NotSeen:
    """The newest file that ``setting`` (or the run's own output) means."""
    pattern = pattern_of(look, setting)
    if not re.search(r"[*?[]", pattern.name):
        found = look.probe.look(pattern)
        return (pattern, found) if isinstance(found, Entry) else found
    listing = look.probe.listing(pattern.parent)
    if isinstance(listing, (Missing, NotSeen)):
        return listing
    files = [entry for entry in listing.entries if entry.is_file and fnmatch.fnmatchcase(entry.name, pattern.name)]
    if not files:
        return Missing(str(pattern))
    entry = max(files, key=lambda one: one.mtime)
    return pattern.parent / entry.name, entry


def read_on(look: Look, setting: Path | None, memory: dict[str, Any]) -> Piece | Missing | NotSeen:
    """What came since the last check; ``memory`` (this log's own) is brought up to date."""
    found = newest(look, setting)
    if not isinstance(found, tuple):
        return found
    path, _ = found
    same = memory.get("path") == str(path)
    inode, offset = (memory.get("inode", 0), memory.get("offset", 0)) if same else (0, 0)
    got = look.probe.tail(path, inode=inode, offset=offset, most=MOST)
    if not isinstance(got, Tail):
        return got
    fresh = not same or got.entry.inode != inode or got.entry.size < offset
    memory.update(path=str(path), inode=got.entry.inode, offset=logtext.whole(got.data, got.start), size=got.entry.size)
    return Piece(path, got.entry, got.data, fresh)
