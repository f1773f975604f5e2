"""The signs that a run gives of itself: the beats of its ranks and the output of its job, read through bounded probes.

The watch often runs on another node than the job, so it sees of a rank's host only what the beat says: ``memory`` (share used
of the host or of the job's limit), ``rss`` (bytes of the process), ``loss``. The output is read on from where the last check
ended, a bounded piece of it; after a rotation (another file) or a truncation (a shorter one) it is read anew.
"""

from __future__ import annotations

import fnmatch
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.config.find_run import starred
from ftsupervise.probe import Entry, Missing, NotSeen, Tail
from ftsupervise.rundir.heartbeat_page import of_the_group, parse_beat
from ftsupervise.rundir.log_lines import whole
from ftsupervise.rundir.progress import PROGRESS, ProgressPage
from ftsupervise.rundir.records import decode, parse_object
from ftsupervise.truth import Beat

if TYPE_CHECKING:
    from ftsupervise.watch import Look

MOST = 262_144  # bytes read per tick


@dataclass(frozen=True)
class Piece:
    """The new part of a log: the file, its facts, the bytes since the last check (or those at its end), and whether it
    is a new file.
    """

    path: Path
    entry: Entry
    data: bytes
    fresh: bool


def pattern_of(look: Look, setting: Path | None) -> Path:
    """Return the path of the run's output, possibly with * in its name."""
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
    """Return the newest file that ``setting`` (or the run's own output) names."""
    pattern = pattern_of(look, setting)
    if not re.search(r"[*?[]", pattern.name):
        found = look.probe.look(pattern)
        return (pattern, found) if isinstance(found, Entry) else found
    listing = look.probe.listing(pattern.parent)
    if isinstance(listing, (Missing, NotSeen)):
        return listing
    named = _matcher(pattern.name)
    files = [entry for entry in listing.entries if named(entry.name) and entry.is_file]
    if not files:
        return Missing(str(pattern))
    entry = max(files, key=lambda one: one.mtime)
    return pattern.parent / entry.name, entry


def _matcher(pattern: str) -> Callable[[str], bool]:
    """Return ``fnmatchcase`` for this pattern. Most are a name and one * behind it, and need not be compiled for each run."""
    beginning = pattern.removesuffix("*")
    if re.search(r"[*?[]", beginning):
        return lambda name: fnmatch.fnmatchcase(name, pattern)
    return (lambda name: name.startswith(beginning)) if beginning != pattern else (lambda name: name == pattern)


def read_on(look: Look, setting: Path | None, memory: dict[str, Any]) -> Piece | Missing | NotSeen:
    """Read the new part of a log since the last check and bring ``memory`` (this log's own) up to date."""
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
    memory.update(path=str(path), inode=got.entry.inode, offset=whole(got.data, got.start), size=got.entry.size)
    return Piece(path, got.entry, got.data, fresh)


# ------------------------------------------------------------------------------------------------------------ beats

_RANKS = 256  # beats read at each check; a run that stands still shows in any of them


def number(text: str | None) -> float | None:
    """Return the finite or infinite number in a fact; None if there is none."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def share(text: str | None) -> float | None:
    """Return the share 0-1 in a fact; None if there is none."""
    value = number(text)
    return value if value is not None and math.isfinite(value) and 0 <= value <= 1.5 else None


def attempt(beat: Beat) -> int:
    value = number(beat.facts.get("attempt"))
    return int(value) if value is not None and math.isfinite(value) else 0


def newest_beats(look: Look, now: float) -> tuple[tuple[tuple[Beat, float], ...], str]:
    """Return the freshest beats of the newest attempt with the age of each (s), and why they could not be seen.

    ``now``: seconds by the clock of the file server.
    """
    read, blind = look.once("beats", lambda: _beats(look))
    return tuple((beat, max(0.0, now - written)) for beat, written in read), blind


def _beats(look: Look) -> tuple[list[tuple[Beat, float]], str]:
    """Return the same with the time at which each was written."""
    got = look.probe.texts(look.rundir.beats, prefix="rank-", files=_RANKS, most=64_000)
    if isinstance(got, NotSeen):
        return [], got.sentence
    if isinstance(got, Missing):
        return [], _why_none(look)
    read = [(beat, text.mtime) for text in got if (beat := parse_beat(text.data)) is not None]
    newest = max((attempt(beat) for beat, _ in read), default=0)
    mine = [pair for pair in read if attempt(pair[0]) == newest]
    members = {beat.rank for beat in of_the_group([beat for beat, _ in mine])}
    return [pair for pair in mine if pair[0].rank in members], ""


def _why_none(look: Look) -> str:
    """Return why there is no directory of beats where there should be one; "" for a run that we never started.

    It is made before the first attempt. Without it the ranks cannot write beats, and their absence says nothing about
    the ranks.
    """
    place = look.probe.look(look.rundir.beats)
    if isinstance(place, NotSeen):
        return place.sentence
    if isinstance(place, Entry):
        return "" if place.is_dir else f"{look.rundir.beats} is no directory: no rank can write its beats there"
    begun = look.probe.look(look.rundir.attempts)
    return f"{look.rundir.beats} is gone: no rank can write its beats there" if isinstance(begun, Entry) else ""


def server_now(look: Look, *folders: Path) -> float:
    """Return the time by the clock of the file server of ``folders`` (the run directory's); by this node's own if it
    cannot be asked.
    """
    for folder in folders or (look.rundir.watch, look.rundir.root):
        ahead = look.probe.clock_ahead(folder)
        if isinstance(ahead, float):
            return look.now.timestamp() + ahead
    return look.now.timestamp()


def page_at_work(look: Look) -> ProgressPage | None:
    """Return what its supervisor has seen of the attempt at work; None where there is none, or it cannot be read."""
    last = look.attempts[-1] if look.attempts else None
    if last is None or last.ended is not None:
        return None
    raw = look.once("progress", lambda: look.probe.text(look.rundir.attempt(last.number) / PROGRESS))
    try:
        return decode(ProgressPage, parse_object(raw), lenient=True) if isinstance(raw, bytes) else None
    except ValueError:
        return None
