"""Keeps the newest snapshot of a job that ends on the disk, where the next member of the chain begins.

It is kept where the loop has not saved those steps itself: a job that was killed at its limit, that leaves because a
node is bad, or whose loop did not hear the warning. Every node writes the snapshots of its ranks, within the time that
is left; the folder gets its name when all have. It is fenced as a checkpoint is: once a newer attempt has begun nothing
appears any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from time import monotonic, time
from typing import NamedTuple

from ftsupervise.checkpoints import memory_kept
from ftsupervise.checkpoints.memory_kept import KeptSnapshot
from ftsupervise.checkpoints.memory_slots import SnapshotId
from ftsupervise.host.in_time import in_time
from ftsupervise.model import Attempt
from ftsupervise.rundir import fence, ledger
from ftsupervise.rundir.paths import RunDir

_KEEP = 120.0  # seconds for the memory to go to the disk
_KILL_WAIT = 28.0  # seconds from Slurm's SIGTERM: its SIGKILL comes after 30
_LOOK = 10.0  # seconds for the file system to show the kept snapshot


class Target(NamedTuple):
    """The place where an attempt may keep a snapshot."""

    staging: Path  # its area
    until: float  # monotonic


class KeptSnapshots:
    """The kept snapshots of one run."""

    def __init__(self, rundir: RunDir, checkpoints: Path) -> None:
        self._rundir, self._checkpoints = rundir, checkpoints
        self._found: KeptSnapshot | None = None
        self._looked = False

    def candidate(self, saved: int | None, refused: Collection[int]) -> KeptSnapshot | None:
        """Return the snapshot that the next attempt may begin from.

        ``saved``: the newest step on the disk, as this job knows.
        """
        if not self._looked:
            self._looked = True
            self._found = in_time(self._look, _LOOK)
        found = self._found
        if found is None or found.step in refused or (saved is not None and saved >= found.step):
            return None
        return found

    def _look(self) -> KeptSnapshot | None:
        try:
            kept = memory_kept.all_in(self._checkpoints)
            attempts = ledger.ledger(self._rundir) if kept else ()
        except OSError:
            return None
        return next((one for one in reversed(kept) if may_begin_from(one, attempts)), None)

    def write(
        self, one: SnapshotId, world: int, to: Target, ask: Callable[[str, float], Mapping[str, str]]
    ) -> tuple[Path | None, str]:
        """Return where it is kept now, or why not.

        ``ask(folder, seconds)`` has all nodes write what they hold: node -> "done", or why not.
        """
        staged = to.staging / memory_kept.name_of(one).removeprefix(".")
        target = self._checkpoints / memory_kept.name_of(one)

        def prepare() -> str:
            staged.mkdir(mode=0o700)
            return ""

        def commit() -> str:
            memory_kept.write_page(staged, one, world)
            _sync(staged)
            if not fence.move(staged, target, to.staging):
                return "a newer attempt has begun"
            _sync(self._checkpoints)
            self._remove(but=target)
            return ""

        for work in (prepare, lambda: _wrong(ask(str(staged), to.until - monotonic())), commit):
            problem = in_time(lambda work=work: _said(work), to.until - monotonic())  # type: ignore[misc]
            if problem is None:
                return None, "there was too little time"
            if problem:
                return None, problem
        return target, ""

    def superseded_by(self, saved: int | None) -> None:
        """Remove older kept snapshots: a checkpoint of step ``saved`` is on the disk."""
        if saved is not None and self._found is not None and self._found.step <= saved:
            gone, self._found = self._found, None
            in_time(lambda: memory_kept.remove(gone), _LOOK)

    def finished(self) -> None:
        """Remove all: the run is complete."""
        in_time(self._remove, _LOOK)

    def _remove(self, but: Path | None = None) -> None:
        try:
            kept = memory_kept.all_in(self._checkpoints)
        except OSError:
            return
        for one in kept:
            if one.path != but:
                memory_kept.remove(one)


def keep_until(stopped_at: float | None, end: float | None) -> float:
    """Return until when, monotonic, a job that ends may write.

    ``stopped_at``: when it was asked to stop, monotonic; ``end``: its time limit, epoch seconds.
    """
    now = monotonic()
    bounds = [now + _KEEP]
    if stopped_at is not None:
        bounds.append(stopped_at + _KILL_WAIT)
    if end is not None:
        bounds.append(now + end - time() + _KILL_WAIT)
    return min(bounds)


def may_begin_from(kept: KeptSnapshot, attempts: Collection[Attempt]) -> bool:
    """Return whether it is still the run's newest state. Pure.

    It is not once a newer step was saved, or a later attempt has made its steps again from an older one: it is an
    abandoned future then.
    """
    if any(one.saved is not None and one.saved >= kept.step for one in attempts):
        return False
    later = [one for one in attempts if one.number > kept.attempt and one.last_step is not None]
    return all(one.first_step is not None and one.first_step > kept.step for one in later)


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _wrong(answers: Mapping[str, str]) -> str:
    return "; ".join(f"{node}: {text}" for node, text in sorted(answers.items()) if text != "done")[:300]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
