"""A checkpoint that is written while the training goes on. The guard counts it as saved when it is committed, not before.

Its thread calls everything here but the constructor and ``stage``. The loop beats meanwhile and may ask for the next save: the
switch that this checkpoint answers is its own from the beginning.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.guard.settings import whole
from ftsupervise.rundir.heartbeat_page import SAVE_FAILED

if TYPE_CHECKING:
    from ftsupervise.guard.guard import Guard

_LONGEST = 200  # characters of a reason in a beat


class BackgroundCheckpoint:
    """One rank's part of the checkpoint of ``step``. ``done``: committed, not committed, or None while that is open."""

    def __init__(self, guard: Guard, step: int, name: str | None, metrics: Mapping[str, float] | None) -> None:
        self.step = whole(step)
        self.name = name or f"step-{self.step or 0:08d}"
        self.done: bool | None = None
        self._guard, self._metrics = guard, metrics or {}
        self._place, self._checkpoints = guard._place, guard._checkpoints
        self._answered = guard._outside.switches.hand_over()

    def stage(self, *, anew: bool) -> Path:
        """Return the folder to write into. ``anew``: empty; one rank asks so, before the others ask. Raises OSError."""
        return self._checkpoints.stage_anew(self.name) if anew else self._checkpoints.stage(self.name)

    def list_own(self, folder: Path) -> None:
        """Leave the list of the files that this rank wrote, with their digests. Raises OSError."""
        self._checkpoints.list_own(folder)

    def commit(self, folder: Path, ranks: Collection[int]) -> bool:
        """Commit on rank 0, when all ``ranks`` have left their lists: from then on it is a checkpoint.

        False: a newer attempt has begun. Raises OSError when it cannot be committed.
        """
        return self._checkpoints.commit(folder, self.step, self._metrics, ranks)

    def over(self) -> bool:
        """Return whether a newer attempt has begun. Then nothing of this one is saved any more."""
        return self._checkpoints.over()

    def saved(self) -> None:
        """Note that it is committed: every rank says so, and rank 0 takes down the switch that it answers."""
        self.done = True
        if not self._guard.may_save():
            return
        facts = self._guard._heart.facts
        facts["saved"], facts[SAVE_FAILED] = str(self.step), ""
        self._guard._heart.soon()
        self._guard._decider.take_down(self._answered)

    def skipped(self) -> None:
        """Note that it was not begun: the next one answers the switch."""
        self.done = False
        self._guard._outside.switches.take_back(self._answered)

    def failed(self, why: str) -> None:
        """Note that it is not committed, and the training goes on: a line on stderr, and a fact for the *checkpoints*
        watchdog.
        """
        self.skipped()
        if self.over():
            self._guard.may_save()  # says that a newer attempt has begun
            return
        self._guard._heart.facts[SAVE_FAILED] = f"step {self.step}: {why}"[:_LONGEST]
        self._guard._heart.soon()
        if self._place.rank == 0:
            self._guard._voice.say(f"the checkpoint of step {self.step} was not saved: {why}; the training goes on")

    def discard(self, folder: Path) -> None:
        self._checkpoints.discard(folder)
