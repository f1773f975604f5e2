"""What the ranks of a run report in their beats, for the watchdogs that live off it. Read through bounded probes.

The watch often runs on another node than the job, so what a rank says about its own host is all there is to be seen:
``memory`` (share used of the host or of the job's limit), ``rss`` (bytes of the process), ``loss``.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.probe import Entry, Missing, NotSeen
from ftsupervise.rundir.heartbeat_page import parse_beat
from ftsupervise.truth import Beat

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_RANKS = 256  # beats read at each check; a run that stands still shows in any of them


def number(text: str | None) -> float | None:
    """The finite or infinite number in a fact; None if it is none."""
    try:
        return float(text) if text is not None else None
    except ValueError:
        return None


def share(text: str | None) -> float | None:
    """A share 0-1 in a fact."""
    value = number(text)
    return value if value is not None and math.isfinite(value) and 0 <= value <= 1.5 else None


def attempt(beat: Beat) -> int:
    value = number(beat.facts.get("attempt"))
    return int(value) if value is not None and math.isfinite(value) else 0


def newest_beats(look: Look, now: float) -> tuple[tuple[tuple[Beat, float], ...], str]:
    """The freshest beats of the newest attempt with the age of each (s), and why they could not be seen.

    ``now``: seconds by the clock of the file server.
    """
    got = look.probe.texts(look.rundir.beats, prefix="rank-", files=_RANKS, most=64_000)
    if isinstance(got, NotSeen):
        return (), got.sentence
    if isinstance(got, Missing):
        return (), _why_none(look)
    read = [(beat, max(0.0, now - text.mtime)) for text in got if (beat := parse_beat(text.data)) is not None]
    newest = max((attempt(beat) for beat, _ in read), default=0)
    return tuple(pair for pair in read if attempt(pair[0]) == newest), ""


def _why_none(look: Look) -> str:
    """Why there is no directory of beats where there should be one; "" for a run that was never started by us.

    It is made before the first attempt is: without it the ranks' beats fail, and that nothing is seen says nothing of them.
    """
    place = look.probe.look(look.rundir.beats)
    if isinstance(place, NotSeen):
        return place.sentence
    if isinstance(place, Entry):
        return "" if place.is_dir else f"{look.rundir.beats} is no directory: no rank can write its beats there"
    begun = look.probe.look(look.rundir.attempts)
    return f"{look.rundir.beats} is gone: no rank can write its beats there" if isinstance(begun, Entry) else ""


def server_now(look: Look, *folders: Path) -> float:
    """Now by the clock of the file server of ``folders`` (the run directory's); by this node's own where it cannot be asked."""
    for folder in folders or (look.rundir.watch, look.rundir.root):
        ahead = look.probe.clock_ahead(folder)
        if isinstance(ahead, float):
            return look.now.timestamp() + ahead
    return look.now.timestamp()
