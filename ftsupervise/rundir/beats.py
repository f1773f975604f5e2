"""Beats: each rank's newest proof of progress, one small file per rank, rewritten whole by that rank alone.

This is the slow, universal form (any shared file system, any number of nodes). Whoever wants to know how a run is doing
calls ``read_beats`` and need not know how the beats got there.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.records import decode, encode, parse_object, read_record
from ftsupervise.truth import Beat

WRITES_PER_SECOND = 200  # all ranks of a run together: what one shared directory is asked to take


def interval(world: int, wanted: float) -> float:
    """Seconds between two beats of one rank, so that ``world`` ranks together stay below WRITES_PER_SECOND."""
    return max(wanted, world / WRITES_PER_SECOND)


def write_beat(rundir: RunDir, beat: Beat, area: Path | None = None) -> None:
    """Replace this rank's beat. Not synced: after a power cut an older beat, or none, is just as true. Raises OSError.

    ``area``: made there, so that the beats of a newer attempt, which has sealed it, are never replaced (``fence.py``).
    """
    write_whole(rundir.beats / f"rank-{beat.rank}", json.dumps(encode(beat)) + "\n", sync=False, area=area)


def read_beats(rundir: RunDir) -> tuple[Beat, ...]:
    """The newest beat of every rank that has one, by rank. Raises OSError if the directory cannot be read.

    () when nobody has beaten yet. A beat that is damaged or vanishes meanwhile is left out.
    """
    try:
        names = os.listdir(rundir.beats)
    except FileNotFoundError:
        return ()
    found = (_read_beat(rundir.beats / name) for name in names if name.startswith("rank-"))
    return tuple(sorted((beat for beat in found if beat is not None), key=lambda beat: beat.rank))


def _read_beat(path: Path) -> Beat | None:
    try:
        return read_record(Beat, path, limit=64_000)
    except (OSError, ValueError):
        return None


def parse_beat(data: bytes) -> Beat | None:
    """The beat in the text of a beat file; None if it is damaged or half there."""
    try:
        return decode(Beat, parse_object(data), lenient=True)
    except ValueError:
        return None
