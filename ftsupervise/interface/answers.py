"""The answers of the acts of ``Run``; its looks return the values that the commands print."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ftsupervise.truth import SwitchState


class RaisedSwitch(NamedTuple):
    """A switch that is up, and who hears it."""

    run: str  # its name
    switch: SwitchState  # who raised it, since when and why
    was_up: bool  # it was up already, and the first reason stays
    attempt: int | None = None  # the one that runs; None: none does, or its attempts cannot be read
    guard: bool | None = None  # whether a guard reports in it, and so hears it; None: not known, or not yet
    stop_within: float | None = None  # seconds from the kill switch until a command that does not hear it is ended
    ended: tuple[str, ...] = ()  # jobs that the brake held, which a kill ends
    problem: str = ""  # why such jobs may still wait


class RunLaunched(NamedTuple):
    """The jobs that were submitted, or that were found submitted already."""

    name: str
    directory: Path  # of the run
    job_ids: tuple[str, ...]
    found_again: bool = False  # an earlier submission without an answer had been accepted after all
    known_as: str = ""  # on this account: another run may have its name
    notes: tuple[str, ...] = ()  # what ``launch`` prints as notes, a sentence each
