"""The brake: a mark in the run directory that says the chain is stopped, why, and how to go on.

    RUN/marks/brake           there: no member starts. JSON: what failed, how often, at which step, since when
    RUN/marks/brake-released  which attempt was the last one when a person released it: failures before it do not count;
                              and the jobs that are still to be let go

Light (standard library): the gate, ``status`` and the watch read it.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.ledger import numbers
from ftsupervise.rundir.paths import RunDir, read_json, sync_directory, write_json
from ftsupervise.rundir.reading import as_text, as_texts, as_whole

BRAKE = "brake"
RELEASED = "brake-released"


class Brake(NamedTuple):
    """What stopped the chain."""

    failure: str  # the failure as the ledger counts it
    why: str  # one sentence
    times: int
    attempt: int  # the last one
    step: int | None = None
    detail: str = ""  # the line of the output that says most
    held: tuple[str, ...] = ()  # jobs put on hold
    at: str = ""

    def words(self) -> str:
        step = f" at step {self.step}" if self.step is not None else ""
        detail = f": {self.detail}" if self.detail else ""
        where = f"; see attempts/{self.attempt:04d}/evidence, and launch.restart.hang if it was only slow"
        return f"{self.failure}{step}, {self.why} (attempt {self.attempt}){detail}{where if self.failure == 'hang' else ''}"


def read_brake(rundir: RunDir) -> Brake | None:
    """The brake when it is on; None when it is not. A mark somebody made with ``touch`` is a brake too. Raises OSError."""
    try:
        raw = read_json(rundir.marks / BRAKE, limit=64_000)
    except ValueError:
        raw = {}
    if raw is None:
        return None
    return Brake(
        failure=as_text(raw.get("failure", "stopped by hand")),
        why=as_text(raw.get("why", "no reason given")),
        times=as_whole(raw.get("times")) or 0,
        attempt=as_whole(raw.get("attempt")) or 0,
        step=as_whole(raw.get("step")),
        detail=as_text(raw.get("detail")),
        held=as_texts(raw.get("held")),
        at=as_text(raw.get("at")),
    )


def write_brake(rundir: RunDir, brake: Brake, desk: Path | None = None) -> None:
    """Raises OSError; also when ``desk``, the attempt's own, has been sealed by a newer one (``fence.py``)."""
    write_json(rundir.marks / BRAKE, {**brake._asdict(), "held": list(brake.held)}, desk=desk)


def release_brake(rundir: RunDir, *, who: str, now: datetime) -> Brake | None:
    """Take the brake off; failures so far do not count any more. The brake that was on, None if none was. Raises OSError.

    The jobs that it held stand in ``still_held`` until they have been let go, however often that takes.
    """
    found = read_brake(rundir)
    held = list(dict.fromkeys([*still_held(rundir), *(found.held if found is not None else ())]))
    if found is not None:
        last = max(numbers(rundir), default=0)
        write_json(rundir.marks / RELEASED, {"attempt": last, "who": who, "at": now.isoformat(), "held": held})
    try:
        os.unlink(rundir.marks / BRAKE)
    except FileNotFoundError:
        return None
    sync_directory(rundir.marks)
    return found


def still_held(rundir: RunDir) -> tuple[str, ...]:
    """Jobs on hold because of a brake that has been taken off. Raises OSError."""
    try:
        held = (read_json(rundir.marks / RELEASED, limit=64_000) or {}).get("held")
    except ValueError:
        return ()
    return as_texts(held)


def let_go(rundir: RunDir, job: str) -> None:
    """It may start again: it is held no longer. Raises OSError."""
    try:
        raw = read_json(rundir.marks / RELEASED, limit=64_000) or {}
    except ValueError:
        raw = {}
    write_json(rundir.marks / RELEASED, {**raw, "held": [one for one in still_held(rundir) if one != job]})


def counts_from(rundir: RunDir) -> int:
    """The first attempt whose failures count. Raises OSError."""
    try:
        raw = read_json(rundir.marks / RELEASED, limit=64_000) or {}
    except ValueError:
        return 1
    attempt = as_whole(raw.get("attempt"))
    return attempt + 1 if attempt is not None else 1
