"""The loop's own state in checkpoints: ``guard.save`` writes it, and ``guard.restore`` brings it back where memory has none.

All ranks do the same or all raise: rank 0 chooses from which checkpoint they begin, each step of a save is over on all of them
before the next one begins, and a fault of one is raised on each.
"""

from __future__ import annotations

import errno
import shlex
import time
from collections.abc import Callable, Mapping
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.checkpoints.compared_file import ComparedFile, Damaged
from ftsupervise.checkpoints.digest import CannotJudge
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.checkpoints.manifest import loop_file
from ftsupervise.checkpoints.verify import CheckpointState, Verdict
from ftsupervise.guard import loop_files
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.loaded_again import LoadedAgain, LoadedInPart
from ftsupervise.guard.loop_files import SavedRank
from ftsupervise.guard.loop_state import LoopState
from ftsupervise.guard.resume import CannotResume, Wanted, refuse, set_damaged_aside, wait_for
from ftsupervise.guard.settings import RankContext, Voice

_OVER = "a newer attempt has begun"
_NONE, _FAULT, _REFUSED, _STEPS = (
    0,
    1,
    2,
    3,
)  # what rank 0 tells as a vote: none, it could not see, none may be used; or a step

_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # the disk is bad in this place; other files may be read
_READ_AGAIN = 2.0  # seconds until such a checkpoint is read once more

Latest = Callable[[Wanted], Path | None]


class _Kind(Enum):
    """How the reading of a checkpoint went, the worst last: what one rank has seen holds for all."""

    FINE = 0
    MISFIT = 1  # it is as it was saved, and this loop cannot take it
    DAMAGED = 2
    UNREAD = 3  # the disk does not give its bytes
    UNSEEN = 4


class _Outcome(NamedTuple):
    kind: _Kind = _Kind.FINE
    words: str = ""


class _Read(NamedTuple):
    """The state of rank 0 and of this rank. Each array is compared before it is used."""

    first: SavedRank
    state: SavedRank

    @property
    def files(self) -> tuple[ComparedFile, ...]:
        return (self.state.file,) if self.first is self.state else (self.first.file, self.state.file)


class LoopCheckpoints:
    """The checkpoints of one loop. ``agree``: int -> int, the maximum over all ranks; None: they have none."""

    def __init__(
        self,
        loop: LoopState,
        place: RankContext,
        checkpoints: Checkpoints,
        voice: Voice,
        agree: Callable[[int], int] | None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self._loop, self._place, self._checkpoints, self._voice, self._agree = loop, place, checkpoints, voice, agree
        self._beat, self._tells, self._noted, self._warm = beat, False, False, False
        self._looked: Path | None = None  # the last one of which a rank could not read all

    # ----------------------------------------------------------------------------------------------------------- restore

    def restore(self, latest: Latest, one_pass: Callable[[], object] | None) -> int | None:
        """Return the step of the newest good checkpoint that ``guard.save`` wrote, loaded; None when there is none.

        No byte is loaded that was not compared with the manifest. One that is damaged is set aside, and all ranks take the one
        before, of which all is loaded over what may have been loaded by then; one that the disk does not give stays, and they
        take the one before likewise. Raises OSError where the checkpoints cannot be read, RuntimeError where this loop cannot
        load the one that was chosen, CannotResume where there must be one. Where it raises when it has loaded a part, nothing
        of this loop is saved.
        """
        self._tells = self._place.world == 1 or self._agree is not None or self._ranks() is not None
        wanted = Wanted(lambda path: loop_file(path, 0).is_file(), compares=True)
        begun: list[str] = []
        try:
            return self._restore(latest, wanted, one_pass, begun)
        except BaseException:
            if begun:
                self._checkpoints.again = LoadedInPart(begun[-1])
                self._voice.once(
                    f"{begun[-1]} was loaded in part: the objects of the loop are not to be used as they are now"
                )
            raise

    def _restore(
        self, latest: Latest, wanted: Wanted, one_pass: Callable[[], object] | None, begun: list[str]
    ) -> int | None:
        """``begun`` gets the names of those of which a part may be loaded."""
        while True:
            newest = self._newest(lambda now=wanted: latest(now))  # type: ignore[misc]
            if newest is None and begun:
                raise RuntimeError(f"{begun[-1]} is damaged, and there is none before it")
            if newest is None:
                return None
            read, mine = self._read(newest)
            outcome = self._worst(mine)
            if outcome.kind is _Kind.FINE:
                assert read is not None
                self._warm_up(one_pass)
                begun.append(newest.name)
                put, mine = self._fill(newest, read)
                outcome = self._worst(mine)
                if put is not None and outcome.kind is _Kind.FINE:
                    return self._put(newest, read, put)
                if outcome.kind is _Kind.MISFIT:
                    raise RuntimeError(f"{newest} cannot be loaded: {outcome.words}")
            if outcome.kind is _Kind.DAMAGED:
                wanted = self._without(wanted, newest, outcome.words)
                continue
            if outcome.kind is _Kind.UNREAD:
                wanted = self._after_unread(wanted, newest, outcome.words)
                continue
            if outcome.kind is _Kind.UNSEEN:
                raise OSError(errno.EIO, f"no rank begins: {outcome.words}", str(newest))
            if outcome.kind is _Kind.MISFIT:
                words = f"{newest} cannot be loaded: {outcome.words}"
                refuse(self._place, words, self._voice)
                raise RuntimeError(words)

    def _newest(self, latest: Callable[[], Path | None]) -> Path | None:
        """Return the newest one, the same on all ranks."""
        place, ranks = self._place, self._ranks()
        if place.world == 1 or (ranks is None and self._agree is None):
            return latest()
        found: Path | OSError | CannotResume | None = None
        if place.rank == 0:
            try:
                found = latest()
            except (OSError, CannotResume) as error:
                found = error
        found = _opened(ranks.from_rank_0(_sealed(found))) if ranks is not None else self._by_vote(found)
        if isinstance(found, (OSError, CannotResume)):
            raise found
        return found

    def _by_vote(self, found: Path | OSError | CannotResume | None) -> Path | OSError | CannotResume | None:
        """Return what rank 0 found; it tells the others the step alone."""
        assert self._agree is not None
        vote = {OSError: _FAULT, CannotResume: _REFUSED}.get(type(found), _FAULT) if found is not None else _NONE
        if isinstance(found, Path):
            vote = _STEPS + (step_of(found.name) or 0)
        told = int(self._agree(vote))
        if self._place.rank == 0:
            return found
        if told == _FAULT:
            return OSError(errno.EIO, "rank 0 cannot read the checkpoints")
        if told == _REFUSED:
            return CannotResume("rank 0 finds nothing that this run may go on from")
        return None if told == _NONE else self._place.checkpoints / name_of(told - _STEPS)

    def _read(self, newest: Path) -> tuple[_Read | None, _Outcome]:
        """Return what this rank loads, and how that went: its description was compared, and the loop can take it."""
        try:
            if self._place.rank:
                wait_for(newest)
            read = self._compared(newest)
            reason = self._loop.why_not(read.state.description)
            return read, _Outcome(_Kind.MISFIT, reason) if reason else _Outcome()
        except (OSError, ValueError) as error:
            return None, self._judged(newest, error)

    def _judged(self, newest: Path, error: OSError | ValueError) -> _Outcome:
        if isinstance(error, Damaged):
            return _Outcome(_Kind.DAMAGED, str(error))
        if isinstance(error, CannotJudge):
            return _Outcome(_Kind.UNSEEN, self._who(str(error)))
        if isinstance(error, OSError):
            kind = _Kind.UNREAD if error.errno in _UNREADABLE else _Kind.UNSEEN
            return _Outcome(kind, self._who(f"{error.strerror or error}: {error.filename or newest}"))
        return _Outcome(_Kind.MISFIT, str(error))

    def _warm_up(self, one_pass: Callable[[], object] | None) -> None:
        if not self._warm:
            self._warm = True
            self._loop.warm_up(one_pass)

    def _fill(self, newest: Path, read: _Read) -> tuple[Callable[[], None] | None, _Outcome]:
        """Read all that this rank loads, every byte compared; return what puts it into the loop's objects, and how it went."""
        first, state = read
        try:
            put = self._loop.fill(
                state.description, lambda at: state.data if at in state.own else first.data, read.files
            )
            for file in read.files if not self._tells else read.files[-1:]:  # rank 0 compares the rest of its own
                file.rest()
            return put, _Outcome()
        except (OSError, ValueError) as error:
            return None, self._judged(newest, error)
        except Exception as error:  # the other ranks must not wait for this one
            return None, _Outcome(_Kind.MISFIT, self._who(str(error) or type(error).__name__))

    def _compared(self, newest: Path) -> _Read:
        rank, world = self._place.rank, self._place.world
        whole = not self._loop.strict  # what it leaves out of one must not be there from another
        first = loop_files.read(newest, 0, self._beat, whole=whole)
        if first.world != world:
            if rank == 0 or not self._tells:
                self._require_whole(newest, first.world)
            return _Read(first, first)
        return _Read(first, loop_files.read(newest, rank, self._beat, whole=whole) if rank else first)

    def _who(self, why: str) -> str:
        return why if self._place.world == 1 else f"rank {self._place.rank}: {why}"

    def _worst(self, mine: _Outcome) -> _Outcome:
        """Return the worst outcome of all ranks, the same on each; where they cannot tell each other, this rank's."""
        ranks = self._ranks()
        if self._place.world == 1 or not self._tells:
            return mine
        if ranks is not None:
            told = [_Outcome(_Kind(kind), words) for kind, words in ranks.of_all((mine.kind.value, mine.words))]
            return max(told, key=lambda one: one.kind.value)
        assert self._agree is not None
        kind = _Kind(int(self._agree(mine.kind.value)))
        return mine if kind is mine.kind else _Outcome(kind, "as another rank says")

    def _without(self, wanted: Wanted, newest: Path, why: str) -> Wanted:
        """Go on without a damaged one. Raises OSError where the other ranks cannot be told."""
        if self._place.rank == 0 or not self._tells:
            self._voice.once(f"checkpoint {newest.name} is damaged: {why}; it is not loaded")
        if not self._tells:
            set_damaged_aside(self._place, newest.name, why, self._voice)
            raise OSError(
                errno.EIO, f"{why}; start again: the ranks cannot tell each other to take another", str(newest)
            )
        words = f"{newest.name} is damaged: {why}"
        return wanted._replace(without=(*wanted.without, newest.name), damaged=(*wanted.damaged, words))

    def _after_unread(self, wanted: Wanted, newest: Path, why: str) -> Wanted:
        """Go on without one whose bytes the disk does not give, after another look at it. It stays where it is. Raises OSError
        where the other ranks cannot be told."""
        if not self._tells:
            todo = f"to take the one before: ftsupervise checkpoints set-aside {shlex.quote(str(newest))}"
            raise OSError(errno.EIO, f"{why}; the ranks cannot tell each other to take another; {todo}", str(newest))
        if self._looked != newest:
            self._looked = newest
            self._voice.once(f"checkpoint {newest.name} cannot be read: {why}; it is read once more")
            time.sleep(_READ_AGAIN)
            return wanted
        unread = Verdict(newest, CheckpointState.UNSEEN, (why,), step=step_of(newest.name), error=errno.EIO)
        return wanted._replace(unread=(*wanted.unread, unread))

    def _put(self, newest: Path, read: _Read, put: Callable[[], None]) -> int:
        rank, world, loop = self._place.rank, self._place.world, self._loop
        first, state = read
        try:
            put()
        except ValueError as error:
            raise RuntimeError(f"{newest} cannot be loaded: {error}") from error
        again = [file.unchanged for file in read.files if not file.is_held]
        self._checkpoints.again = LoadedAgain(newest.name, again) if again else None
        for words in loop.left(state.description):
            self._voice.once(f"strict=False: {words}")
        if first.world != world:
            loop.begin_other_streams(first.description, rank, world)
            if rank == 0:
                self._voice.once(
                    f"checkpoint {newest.name} was saved by {first.world} ranks, and {world} go on from it: random numbers and "
                    "the place in the data are not exactly those of an undisturbed run"
                )
        return first.step

    def _require_whole(self, newest: Path, saved: int) -> None:
        """Raise ValueError where a rank that wrote it kept a part of the model for itself."""
        bound: set[str] = set()
        for rank in range(1, saved):
            state: SavedRank = loop_files.read(newest, rank, self._beat)
            bound.update(self._loop.bound_to_ranks(state.description, state.own))
        if bound:
            raise ValueError(
                f"it was saved by {saved} ranks, each with a part of its own of {', '.join(sorted(bound))}: begin with "
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
        self.note_saved(step)
        return True

    def note_saved(self, step: int) -> None:
        """Note once, on rank 0, that there is a checkpoint for ``restore``: a later start must find one."""
        place = self._place
        if self._noted or place.rank or place.rundir is None:
            return
        from ftsupervise.rundir.beginnings import note_restorable

        self._noted = True
        try:
            note_restorable(place.rundir, step, place.attempt)
        except OSError as error:
            self._voice.once(f"cannot note in {place.rundir.state} that guard.save() has saved: {error.strerror}")

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


def _sealed(found: Path | OSError | CannotResume | None) -> tuple[str, Any]:
    """Return what rank 0 found, as it travels."""
    if isinstance(found, CannotResume):
        return "refused", found.words
    return "found", found


def _opened(told: tuple[str, Any]) -> Path | OSError | CannotResume | None:
    how, what = told
    return CannotResume(what) if how == "refused" else what


def name_of(step: int) -> str:
    return f"step-{step:08d}"
