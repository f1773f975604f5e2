"""The brake: a mark in the run directory that says the chain is stopped, why, and how to go on.

    RUN/state/brake           there: no member starts. JSON: what failed, how often, at which step, since when
    RUN/state/brake-released  which attempt was the last one when a person released it: failures before it do not count;
                              and the jobs that are still to be let go

Light (standard library): the gate, ``status`` and the watch read it.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.rundir.ledger import numbers
from ftsupervise.rundir.paths import RunDir, sync_directory
from ftsupervise.rundir.records import read_record, write_json

BRAKE = "brake"
RELEASED = "brake-released"
Mark = TypeVar("Mark", "Brake", "Released")


class Brake(NamedTuple):
    """What stopped the chain."""

    failure: str = "stopped by hand"  # the failure as the ledger counts it
    why: str = "no reason given"  # one sentence
    times: int = 0
    attempt: int = 0  # the last one
    step: int | None = None
    detail: str = ""  # the line of the output that says most
    held: tuple[str, ...] = ()  # jobs put on hold
    at: str = ""

    def words(self) -> str:
        step = f" at step {self.step}" if self.step is not None else ""
        detail = f": {self.detail}" if self.detail else ""
        where = f"; see attempts/{self.attempt:04d}/evidence, and launch.restart.hang if it was only slow"
        return f"{self.failure}{step}, {self.why} (attempt {self.attempt}){detail}{where if self.failure == 'hang' else ''}"


class Released(NamedTuple):
    """How a person took the brake off."""

    attempt: int = 0  # the last one that does not count
    who: str = ""
    at: str = ""
    held: tuple[str, ...] = ()  # jobs that are still to be let go


def read_brake(rundir: RunDir) -> Brake | None:
    """The brake when it is on; None when it is not. A mark somebody made with ``touch`` is a brake too. Raises OSError."""
    return _read(Brake, rundir.state / BRAKE)


def _read(kind: type[Mark], path: Path) -> Mark | None:
    try:
        return read_record(kind, path, limit=64_000)
    except ValueError:
        return kind()


def write_brake(rundir: RunDir, brake: Brake, area: Path | None = None) -> None:
    """Raises OSError; also when ``area``, the attempt's own, has been sealed by a newer one (``fence.py``)."""
    write_json(rundir.state / BRAKE, brake, area=area)


def release_brake(rundir: RunDir, *, who: str, now: datetime) -> Brake | None:
    """Take the brake off; failures so far do not count any more. The brake that was on, None if none was. Raises OSError.

    The jobs that it held stand in ``still_held`` until they have been let go, however often that takes.
    """
    found = read_brake(rundir)
    if found is not None:
        held = tuple(dict.fromkeys([*still_held(rundir), *found.held]))
        last = max(numbers(rundir), default=0)
        write_json(rundir.state / RELEASED, Released(last, who, now.isoformat(), held))
    try:
        os.unlink(rundir.state / BRAKE)
    except FileNotFoundError:
        return None
    sync_directory(rundir.state)
    return found


def _released(rundir: RunDir) -> Released:
    return _read(Released, rundir.state / RELEASED) or Released()


def still_held(rundir: RunDir) -> tuple[str, ...]:
    """Jobs on hold because of a brake that has been taken off. Raises OSError."""
    return _released(rundir).held


def let_go(rundir: RunDir, job: str) -> None:
    """It may start again: it is held no longer. Raises OSError."""
    before = _released(rundir)
    write_json(rundir.state / RELEASED, before._replace(held=tuple(one for one in before.held if one != job)))


def counts_from(rundir: RunDir) -> int:
    """The first attempt whose failures count. Raises OSError."""
    return _released(rundir).attempt + 1
