"""Keeps the newest snapshot of a job that ends on the disk, where the next member of the chain begins.

It is kept where the loop has not saved those steps itself: a job that was killed at its limit, that leaves because a
node is bad, or whose loop did not hear the warning. Every node writes the snapshots of its ranks, within the time that
is left; the folder gets its name when all have. It is fenced as a checkpoint is: once a newer attempt has begun nothing
appears any more.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from time import monotonic, sleep, time
from typing import NamedTuple

from ftsupervise.checkpoints import memory_kept
from ftsupervise.checkpoints.memory_doubts import (
    DOUBT,
    Beside,
    against,
    beside,
    failed_from,
    put_there,
    steps_in,
    taken_back,
)
from ftsupervise.checkpoints.memory_kept import KeptPage, KeptSnapshot
from ftsupervise.checkpoints.memory_slots import SnapshotId
from ftsupervise.host.in_time import in_time
from ftsupervise.model import Attempt
from ftsupervise.ranks.snapshot_relay import is_done
from ftsupervise.run.job_end import JobEnd
from ftsupervise.rundir import fence, ledger, switches
from ftsupervise.rundir.anchor import Anchor
from ftsupervise.rundir.beginnings import begun_anew
from ftsupervise.rundir.lineage import Lineage, read_lineage
from ftsupervise.rundir.paths import RunDir

_KEEP = 120.0  # seconds for the memory to go to the disk
_SPARE = 2.0  # seconds before Slurm's SIGKILL
_LOOK = 10.0  # seconds for the file system to show the kept snapshot
_LATE = 2.0  # seconds in which a checkpoint that is missed may still show itself
_ANSWER = 1.0  # seconds for a listing
_ANEW = "somebody has begun the run anew since"


class Target(NamedTuple):
    """The place where an attempt may keep a snapshot."""

    staging: Path  # its area
    until: float  # monotonic


class KeptSnapshots:
    """The kept snapshots of one run."""

    def __init__(self, rundir: RunDir, checkpoints: Path) -> None:
        self._rundir, self._checkpoints = rundir, checkpoints
        self._there: bool | None = None  # None: not looked yet
        self._known: Lineage | None = None
        self._doubts: dict[SnapshotId, int] = {}  # of this job, whose ends may not be on record yet

    def doubt(self, one: SnapshotId, weight: int) -> None:
        """Note that an attempt began from ``one`` and left nothing newer in memory."""
        self._doubts[one] = self._doubts.get(one, 0) + weight

    def candidate(self, before: int, saved: int | None) -> tuple[KeptSnapshot | None, Beside, str]:
        """Return the snapshot that attempt ``before`` may begin from and what lay beside it; or why the newest is not used.

        ``saved``: the newest step on the disk, as this job knows.
        """
        if self._there is False:
            return None, Beside(), ""
        found = in_time(lambda: self._look(before, saved), _LOOK)
        if found is None:
            return None, Beside(), "the disk of the checkpoints does not answer"
        return found

    def _look(self, before: int, saved: int | None) -> tuple[KeptSnapshot | None, Beside, str]:
        why = ""
        try:
            kept = self._mine()
            self._there = bool(kept)
            names = self._names() if kept else {}
            first = switches.counts_from(self._rundir) if kept else 1
            for one in reversed(kept):
                try:
                    page = self._page(one)
                except (OSError, ValueError) as error:
                    why = why or f"the snapshot of step {one.step}, kept on the disk, is not used: {error}"
                    continue
                attempts = self._since(one, before)
                speaks = (
                    self._against(one, page, names, first, attempts)
                    or ("attempts have failed from it" if self._doubts.get(one.id, 0) >= DOUBT else "")
                    or ("a newer checkpoint was saved since" if saved is not None and saved >= one.step else "")
                )
                if not speaks:
                    return one, page.beside, ""
                why = why or f"the snapshot of step {one.step}, kept on the disk, is not used: {speaks}"
                if self._failed(one, page, first, attempts):
                    break
        except (OSError, ValueError) as error:
            return None, Beside(), f"a snapshot kept on the disk is not used: {error}"
        return None, Beside(), why

    def _since(self, one: KeptSnapshot, before: int | None = None) -> tuple[Attempt, ...]:
        """Return the attempts from the one that made it on."""
        return tuple(reversed([*ledger.backwards(self._rundir, before, one.attempt)]))

    def _against(
        self,
        one: KeptSnapshot,
        page: KeptPage,
        names: Mapping[str, int | None],
        first: int,
        attempts: Sequence[Attempt],
    ) -> str:
        return (
            _of_another(page, attempts)
            or (_ANEW if one.attempt <= begun_anew(self._rundir) else "")
            or taken_back(self._checkpoints, names, page.beside.anchor)
            or put_there(names, one.step, page.beside)
            or against(one.id, attempts, first)
        )

    def _failed(self, one: KeptSnapshot, page: KeptPage, first: int, attempts: Sequence[Attempt]) -> bool:
        """Return whether attempts have failed from it. Then the next one begins from a checkpoint: no older one is used, which
        may be there where it could not be removed."""
        if _of_another(page, attempts):
            return False
        return self._doubts.get(one.id, 0) >= DOUBT or bool(failed_from(one.id, attempts, first))

    def users(self) -> dict[Path, str]:
        """Return what the next attempt does with each of this run's: path -> a clause. For people. Raises OSError."""
        kept, found, instead = self._mine(), dict[Path, str](), ""
        names, first = (self._names(), switches.counts_from(self._rundir)) if kept else ({}, 1)
        for one in reversed(kept):
            why = instead
            if not why:
                try:
                    page, attempts = self._page(one), self._since(one)
                    why = self._against(one, page, names, first, attempts)
                    failed = self._failed(one, page, first, attempts)
                    instead = (
                        "attempts have failed from a newer one" if failed else "" if why else "a newer one is used"
                    )
                except (OSError, ValueError) as error:
                    why = str(error)
            found[one.path] = f"it is not used: {why}" if why else "the next attempt begins from it"
        return found

    def anew_since(self, attempt: int) -> str:
        """Return that somebody has begun the run anew since ``attempt``, as a clause; "" where nobody is seen to."""
        try:
            found = in_time(lambda: begun_anew(self._rundir), _ANSWER)
        except OSError:
            return ""
        return _ANEW if found is not None and found >= attempt else ""

    def beside(self, step: int, was: Anchor) -> tuple[Beside, str] | None:
        """Return what lies beside a snapshot of ``step`` now, and that its anchor ``was`` is gone, "" if not; None where the
        disk does not answer, or cannot be read.
        """

        def look() -> tuple[Beside, str]:
            names = self._names()
            return beside(self._checkpoints, names, step, was), taken_back(self._checkpoints, names, was)

        until = monotonic() + _LATE
        while True:
            try:
                found = in_time(look, _ANSWER)
            except OSError:
                return None
            if found is None or not found[1] or monotonic() > until:
                return found
            sleep(0.2)  # a network file system may show a moment later what another node has just committed

    def write(
        self, page: KeptPage, to: Target, ask: Callable[[str, float], Mapping[str, str]]
    ) -> tuple[Path | None, str]:
        """Return where it is kept now, or why not.

        ``ask(folder, seconds)`` has all nodes write what they hold: node -> "done", or why not.
        """
        one = SnapshotId(page.step, page.attempt)
        staged = to.staging / f"snapshot-{one.step}-{one.attempt}"
        target: Path | None = None

        def prepare() -> str:
            nonlocal target
            if not self._me().id:
                return f"{self._rundir.lineage} gives this run no id"
            target = self._checkpoints / memory_kept.name_of(one, self._run())
            staged.mkdir(mode=0o700)
            return ""

        def commit() -> str:
            assert target is not None
            memory_kept.write_page(staged, self._complete(page, staged))
            _sync(staged)
            if not fence.move(staged, target, to.staging):
                return "a newer attempt has begun"
            _sync(self._checkpoints)
            self._there = True
            self._remove(but=target)
            return ""

        for work in (prepare, lambda: _wrong(ask(str(staged), to.until - monotonic())), commit):
            left = to.until - monotonic()
            problem = in_time(lambda work=work: _said(work), left) if left > 0 else None  # type: ignore[misc]
            if problem is None:
                return None, "there was too little time"
            if problem:
                return None, problem
        return target, ""

    def superseded_by(self, saved: int | None) -> None:
        """Remove older kept snapshots: a checkpoint of step ``saved`` is on the disk."""
        if saved is not None and self._there:
            in_time(lambda: self._remove(until=saved), _LOOK)

    def finished(self) -> None:
        """Remove all: the run is complete."""
        in_time(self._remove, _LOOK)

    def _remove(self, but: Path | None = None, until: float = inf) -> None:
        try:
            for one in self._mine():
                if one.path != but and one.step <= until and self._may_go(one):
                    memory_kept.remove(one)
        except OSError:
            return

    def _may_go(self, one: KeptSnapshot) -> bool:
        try:
            return not _of_another(self._page(one), self._attempt(one.attempt))
        except (OSError, ValueError):  # somebody else's, as far as is known
            return False

    def _me(self) -> Lineage:
        """Raises OSError."""
        if self._known is None or not self._known.id:
            self._known = read_lineage(self._rundir)
        return self._known

    def _run(self) -> str:
        return memory_kept.run_of(self._me(), self._rundir.root.name if self._rundir.whole is not None else "")

    def _mine(self) -> list[KeptSnapshot]:
        """Return this run's, oldest first. Raises OSError."""
        return memory_kept.all_in(self._checkpoints, self._run())

    def _page(self, one: KeptSnapshot) -> KeptPage:
        """Raises OSError; ValueError where others than this account may write it."""
        return memory_kept.read_trusted(one.path, (self._rundir.root.stat().st_uid,))

    def _names(self) -> dict[str, int | None]:
        """Return the checkpoints in the folder, but those of other runs. Raises OSError."""
        return steps_in(self._checkpoints, self._me())

    def _attempt(self, number: int) -> tuple[Attempt, ...]:
        return tuple(ledger.backwards(self._rundir, number + 1, number))

    def _complete(self, page: KeptPage, staged: Path) -> KeptPage:
        """Return the page with the run that keeps it. Raises OSError, ValueError."""
        me, made = self._me(), self._attempt(page.attempt)
        code = memory_kept.code_of(staged)
        page = page._replace(run=me.name, run_id=me.id, run_dir=me.root, code=code, at=datetime.now(timezone.utc))
        return page._replace(began=made[0].started if made else None)


def keep_until(stopped_at: float | None, job: JobEnd) -> float:
    """Return until when, monotonic, a job that ends may write. ``stopped_at``: when it was asked to stop, monotonic."""
    now = monotonic()
    bounds = [now + _KEEP]
    if stopped_at is not None:
        bounds.append(stopped_at + job.grace(_SPARE))
    if job.at is not None:
        bounds.append(now + job.at - time() + job.grace(_SPARE))
    return min(bounds)


def _of_another(page: KeptPage, attempts: Sequence[Attempt]) -> str:
    """Return that the attempt which made a snapshot is not the one in this ledger, as a clause; "" where it is."""
    made = next((one for one in attempts if one.number == page.attempt), None)
    if made is not None and page.began == made.started:
        return ""
    return f"the ledger does not know the attempt {page.attempt} that made it: the run directory is a copy, or was made anew"


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _wrong(answers: Mapping[str, str]) -> str:
    return "; ".join(f"{node}: {text}" for node, text in sorted(answers.items()) if not is_done(text))[:300]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
