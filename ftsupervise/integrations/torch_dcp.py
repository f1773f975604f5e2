"""torch's Distributed Checkpoint in the background: a checkpoint begins to exist when all of it is durable, not before.

``dcp.async_save`` copies the state, lets the training go on and writes in a thread. What is left to the caller there is done
here, by a second thread on each rank: it waits for the write, takes the digests of the rank's own files, agrees with the other
ranks that all have written theirs, and rank 0 commits. Only then does each rank say that the step is saved.

Two process groups of gloo, of our own: one for these threads, one for the loop. Collectives of a shared group would meet in
another order on each rank, and whether a save is over is not known at the same moment everywhere: the ranks vote on it.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from pathlib import Path
from types import TracebackType
from typing import Any

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException  # a BaseException, and no Exception

from ftsupervise.guard import Guard
from ftsupervise.guard.background import BackgroundCheckpoint
from ftsupervise.guard.resume import CannotResume
from ftsupervise.scheduler import deadline_from_environment

LEAVE = 5.0  # seconds before the end of the job at which nobody waits for a write any more
_BEAT = 0.5  # seconds between two beats of a rank that waits


class AsyncCheckpoints:
    """Saves in the background, one at a time. Make it on every rank, at the same place of the program.

    guard    the rank's guard, which commits, and which beats while a rank waits
    writer   folder -> storage writer of DCP; default: ``FileSystemWriter``, which syncs its files
    bound    how long a collective among the ranks, hence the slowest rank's write, may take
    """

    def __init__(
        self,
        guard: Guard,
        *,
        writer: Callable[[Path], Any] = dcp.FileSystemWriter,
        bound: timedelta = timedelta(minutes=30),
    ) -> None:
        self._guard, self._writer, self._bound = guard, writer, bound.total_seconds()
        self._threads = self._loop = None  # the two groups; None: this process is alone
        self._rank, self._world = 0, 1
        if dist.is_available() and dist.is_initialized():
            self._threads = dist.new_group(backend="gloo", timeout=bound)
            self._loop = dist.new_group(backend="gloo", timeout=bound)
            self._rank, self._world = dist.get_rank(), dist.get_world_size()
        self._save: BackgroundCheckpoint | None = None
        self._thread: threading.Thread | None = None

    def save(
        self,
        step: int,
        state: Mapping[str, Any],
        *,
        name: str | None = None,
        metrics: Mapping[str, float] | None = None,
        wait: bool = True,
        **options: Any,
    ) -> bool:
        """Call on every rank. When it returns the state has been copied, and the loop may change it. True: the write is under
        way.

        While the save before is under way on any rank, all ranks wait for it; with ``wait=False`` all return False, and nothing
        is saved. False too where the checkpoint cannot be staged, or the job ends before the save before has.
        ``options`` go to ``dcp.async_save`` (``planner``, ``async_stager``).
        """
        with self._guard.phase("save"):
            if wait:
                self._join(self._until(None))
            new = BackgroundCheckpoint(self._guard, step, name, metrics)
            folder = self._begin(new, wait)
            if folder is None:
                return False
            writer = self._writer(folder)
            faults = _faults_of(writer)
            written = dcp.async_save(
                dict(state),
                storage_writer=writer,
                process_group=self._threads,
                no_dist=self._threads is None,
                **options,
            )
            if hasattr(written, "upload_completion"):  # a stager that copies in the background
                written.staging_completion.result()
                written = written.upload_completion
        self._save = new
        # no daemon: an exception in the loop ends the process after the save, not in the middle of it
        self._thread = threading.Thread(
            target=self._follow, args=(new, folder, written, faults), name="checkpoint-commit"
        )
        self._thread.start()
        return True

    def wait(self, within: float | timedelta | None = None) -> bool:
        """Wait until the newest save is durable and committed; before ``guard.finished()``, and before the loop leaves.

        It waits ``within`` seconds at most, and in any case not beyond the end of the job (``FTSUPERVISE_DEADLINE``). True: it
        is committed, or there was none. False: it failed, or is still being written; it counts if it ends before the process
        does.
        """
        save = self._save
        if save is None:
            return True
        seconds = within.total_seconds() if isinstance(within, timedelta) else within
        with self._guard.phase("save"):
            self._join(self._until(seconds))
        if save.done is None:
            save.failed("the time was over before it was durable")
        return bool(save.done)

    def latest(self, world: int | None = None) -> Path | None:
        """Return ``guard.latest()`` of rank 0, on every rank: all begin from the same one. Raises OSError, on every rank."""
        found: Path | OSError | str | None = None
        if self._rank == 0:
            try:
                found = self._guard.latest(world)
            except OSError as error:
                found = error
            except CannotResume as error:
                found = error.words
        answer = self._gather(found, self._loop)[0]
        if isinstance(answer, OSError):
            raise answer
        if isinstance(answer, str):
            raise CannotResume(answer)
        return Path(answer) if answer is not None else None

    def __enter__(self) -> AsyncCheckpoints:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:  # else the others may be gone, and the exit code must not wait
            self.wait()

    # ------------------------------------------------------------------------------------------------------- in the loop

    def _until(self, seconds: float | None) -> float:
        """Return the monotonic time at which a rank waits no longer."""
        end = deadline_from_environment(os.environ)
        left = self._bound if end is None else max(0.0, end - LEAVE - time.time())
        return time.monotonic() + (left if seconds is None else min(left, seconds))

    def _join(self, until: float) -> None:
        while self._thread is not None and self._thread.is_alive():
            left = until - time.monotonic()
            if left <= 0:
                return
            self._thread.join(min(_BEAT, left))
            self._guard.beat()

    def _begin(self, new: BackgroundCheckpoint, wait: bool) -> Path | None:
        """Return the folder of ``new``, on each rank; None where the ranks agree that it is not saved, and it notes why."""
        busy = self._thread is not None and self._thread.is_alive()
        unstaged = self._stage(new) if self._rank == 0 else ""
        votes = self._gather((busy, unstaged), self._loop)
        if any(busy for busy, _ in votes):
            if wait:
                new.failed("the previous save is not over")
            else:
                new.skipped()
            return None
        folder = new.stage(anew=False) if not votes[0][1] else None
        if folder is None:
            self._save = new
            new.failed(votes[0][1])
        return folder

    def _stage(self, new: BackgroundCheckpoint) -> str:
        """Return why it cannot be staged; "" when it is."""
        try:
            new.stage(anew=True)
        except OSError as error:
            return _words(error)
        return ""

    # -------------------------------------------------------------------------------------------------- in its own thread

    def _follow(self, save: BackgroundCheckpoint, folder: Path, written: Any, faults: list[str]) -> None:
        """Wait until the checkpoint is committed on all ranks, or on none."""
        try:
            failed = self._written(save, folder, written, faults)
            if failed := _first(self._gather((faults, failed), self._threads)):
                if self._rank == 0:  # no rank writes there any more
                    save.discard(folder)
                save.failed(failed)
                return
            failed = self._gather(self._commit(save, folder) if self._rank == 0 else "", self._threads)[0]
            if failed:
                save.failed(failed)
            else:
                save.saved()
        except Exception as error:  # another rank has died, or a thread of ours has a fault: the loop must hear of it
            save.failed(_words(error))

    def _written(self, save: BackgroundCheckpoint, folder: Path, written: Any, faults: list[str]) -> str:
        """Return why the parts of all ranks are not durable, as DCP reports it; "" when they are.

        This rank's list lies there then.
        """
        try:
            written.result()
        except (Exception, CheckpointException) as error:  # the storage writer may be anybody's
            return _words(error)
        try:
            if self._threads is not None:
                save.list_own(folder)
        except Exception as error:  # the other ranks wait for this one's answer
            faults.append(_words(error))
        return ""

    def _commit(self, save: BackgroundCheckpoint, folder: Path) -> str:
        try:
            done = save.commit(folder, range(self._world) if self._threads is not None else ())
        except OSError as error:
            return _words(error)
        return "" if done else "a newer attempt has begun"

    def _gather(self, own: Any, group: Any) -> list[Any]:
        """Return the values of all ranks, by rank."""
        if group is None:
            return [own]
        found: list[Any] = [None] * self._world
        dist.all_gather_object(found, own, group=group)
        return found


def _faults_of(writer: Any) -> list[str]:
    """Collect the errors in this rank's part from now on.

    DCP tells the ranks the last exception alone: of a full disk, that an archive has an unexpected position.
    """
    faults: list[str] = []
    write = writer.write_data

    def write_data(*arguments: Any, **named: Any) -> Any:
        try:
            return write(*arguments, **named)
        except BaseException as error:
            faults.append(_words(error))
            raise

    writer.write_data = write_data
    return faults


def _first(outcomes: list[tuple[list[str], str]]) -> str:
    """Return the fault of the first rank that has seen one itself, or else what the first rank was told; "" when all
    have written.
    """
    seen = [f"rank {rank}: {why}" for rank, (faults, _) in enumerate(outcomes) for why in faults]
    return next(iter((*seen, *(why for _, why in outcomes if why))), "")


def _words(error: BaseException) -> str:
    """Return the cause in one line."""
    if isinstance(error, CheckpointException) and error.failures:
        rank, (cause, _) = min(error.failures.items())
        return f"rank {rank}: {_words(cause)}"
    behind: BaseException | None = error
    while behind is not None and not (isinstance(behind, OSError) and behind.strerror):
        behind = behind.__cause__ or behind.__context__
    if isinstance(behind, OSError):
        return f"{behind.strerror}: {behind.filename}" if behind.filename else f"{behind.strerror}"
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


__all__ = ["AsyncCheckpoints"]
