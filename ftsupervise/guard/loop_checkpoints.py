"""The loop's own state in checkpoints: ``guard.save`` writes it, and ``guard.restore`` brings it back where memory has none.

All ranks do the same or all raise: rank 0 chooses from which checkpoint they begin, each step of a save is over on all of them
before the next one begins, and a fault of one is raised on each.
"""

from __future__ import annotations

import errno
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from ftsupervise.guard import loop_files
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.loop_files import SavedRank
from ftsupervise.guard.loop_state import LoopState
from ftsupervise.guard.settings import RankContext, Voice

_OVER = "a newer attempt has begun"
_NONE, _FAULT, _STEPS = 0, 1, 2  # what rank 0 tells as a vote: there is none, it could not see, or a step and 2


class LoopCheckpoints:
    """The checkpoints of one loop. ``agree``: int -> int, the maximum over all ranks; None: they have none."""

    def __init__(
        self,
        loop: LoopState,
        place: RankContext,
        checkpoints: Checkpoints,
        voice: Voice,
        agree: Callable[[int], int] | None,
    ) -> None:
        self._loop, self._place, self._checkpoints, self._voice, self._agree = loop, place, checkpoints, voice, agree

    # ----------------------------------------------------------------------------------------------------------- restore

    def restore(self, latest: Callable[[], Path | None], one_pass: Callable[[], object] | None) -> int | None:
        """Return the step of the newest good checkpoint that ``guard.save`` wrote, loaded; None when there is none.

        Raises OSError where the checkpoints cannot be read, RuntimeError where this loop cannot load the one that was
        chosen.
        """
        newest = self._newest(latest)
        if newest is None:
            return None
        try:
            return self._load(newest, one_pass)
        except ValueError as error:
            raise RuntimeError(f"{newest} cannot be loaded: {error}") from error

    def _newest(self, latest: Callable[[], Path | None]) -> Path | None:
        """Return the newest one, the same on all ranks."""
        place, ranks = self._place, self._ranks()
        if place.world == 1 or (ranks is None and self._agree is None):
            return self._ours(latest())
        found: Path | OSError | None = None
        if place.rank == 0:
            try:
                found = self._ours(latest())
            except OSError as error:
                found = error
        found = ranks.from_rank_0(found) if ranks is not None else self._by_vote(found)
        if isinstance(found, OSError):
            raise found
        return found

    def _by_vote(self, found: Path | OSError | None) -> Path | OSError | None:
        """Return what rank 0 found; it tells the others the step alone."""
        assert self._agree is not None
        vote = _FAULT if isinstance(found, OSError) else _NONE
        if isinstance(found, Path):
            try:
                vote = _STEPS + loop_files.read(found, 0).step
            except (OSError, ValueError) as error:
                vote, found = _FAULT, OSError(errno.EIO, str(error))
        told = int(self._agree(vote))
        if self._place.rank == 0:
            return found
        if told == _FAULT:
            return OSError(errno.EIO, "rank 0 cannot read the checkpoints")
        return None if told == _NONE else self._place.checkpoints / name_of(told - _STEPS)

    def _ours(self, newest: Path | None) -> Path | None:
        if newest is None or loop_files.file_of(newest, 0).is_file():
            return newest
        self._voice.once(f"checkpoint {newest.name} was not written by guard.save(): load it yourself (guard.latest())")
        return None

    def _load(self, newest: Path, one_pass: Callable[[], object] | None) -> int:
        rank, world, loop = self._place.rank, self._place.world, self._loop
        first = loop_files.read(newest, 0)
        same = first.world == world
        state = loop_files.read(newest, rank) if same and rank else first
        if not same:
            self._require_whole(newest, first.world)
        if reason := loop.why_not(state.description):
            raise RuntimeError(f"{newest} cannot be loaded: {reason}")
        loop.warm_up(one_pass)
        loop.load(state.description, lambda at: state.data if at in state.own else first.data)
        if not same:
            loop.begin_other_streams(first.description, rank, world)
            if rank == 0:
                self._voice.once(
                    f"checkpoint {newest.name} was saved by {first.world} ranks, and {world} go on from it: random numbers and "
                    "the place in the data are not exactly those of an undisturbed run"
                )
        return first.step

    def _require_whole(self, newest: Path, saved: int) -> None:
        """Raise RuntimeError where a rank that wrote it kept a part of the model for itself."""
        bound: set[str] = set()
        for rank in range(1, saved):
            state: SavedRank = loop_files.read(newest, rank)
            bound.update(self._loop.bound_to_ranks(state.description, state.own))
        if bound:
            raise RuntimeError(
                f"{newest} was saved by {saved} ranks, each with a part of its own of {', '.join(sorted(bound))}: begin with "
                f"{saved} ranks, or save with torch's DCP (AsyncCheckpoints), which loads with any number of ranks"
            )

    # -------------------------------------------------------------------------------------------------------------- save

    def write(self, folder: Path, step: int) -> None:
        """Write this rank's whole state, into a folder of its own making.

        Raises OSError, and TypeError for a value that cannot be kept.
        """
        loop_files.write(folder, self._loop, self._loop.describe(), (step, self._place.rank, self._place.world))

    def is_together(self) -> bool:
        """Return whether the program has a process group of all ranks, through which they can save together."""
        return self._ranks() is not None

    def save(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Save one checkpoint on all ranks; when it returns, it is committed on all of them. False: a newer attempt has
        begun.

        Raises OSError on all ranks when one of them could not write its part, or rank 0 could not commit.
        """
        place, ranks, checkpoints, name = self._place, self._ranks(), self._checkpoints, name_of(step)
        assert ranks is not None
        described = self._loop.describe()
        first = ranks.from_rank_0(loop_files.first_arrays(self._loop, described) if place.rank == 0 else None)

        def write() -> bool:
            folder = checkpoints.stage(name)
            loop_files.write(folder, self._loop, described, (step, place.rank, place.world), first)
            checkpoints.list_own(folder)
            return True

        def commit() -> bool:
            return checkpoints.commit(checkpoints.stage(name), step, metrics, range(place.world))

        alone: tuple[tuple[bool, Callable[[], object]], ...] = (
            (place.rank == 0, lambda: checkpoints.stage_anew(name)),
            (True, write),
            (place.rank == 0, commit),
        )
        for mine, work in alone:
            failed = next(filter(None, ranks.of_all(self._outcome(work) if mine else "")), "")
            if failed == _OVER:
                return False
            if failed:
                if place.rank == 0:
                    checkpoints.discard(checkpoints.stage(name))
                raise OSError(errno.EIO, f"step {step} was not saved: {failed}")
        return True

    def _outcome(self, work: Callable[[], object]) -> str:
        """Return why it failed; "" when it did not."""
        try:
            return "" if work() else _OVER
        except OSError as error:
            if self._checkpoints.over():
                return _OVER
            return (
                f"rank {self._place.rank}: {error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            )

    def _ranks(self) -> Any:
        return self._loop.ranks(self._place.rank, self._place.world)


def name_of(step: int) -> str:
    return f"step-{step:08d}"
