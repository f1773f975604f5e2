"""Tells whether a script without a guard resumes, by where the attempts in its ledger begin.

A step that was read from the output is a hint. So it makes people look, and holds a chain only where the disk agrees: the
attempt before had left a checkpoint from which this one did not go on.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ftsupervise.model import GUARD, OUTPUT, Attempt
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import counts_from
from ftsupervise.truth import GivenCheckpoint, LeftCheckpoint, show_percent_points

NOT_RESUMED = "it does not resume"
NOT_SEEN_TO_RESUME = "it was not seen to resume"
ADVICE = "launch: {resume: '--your-flag {checkpoint}'} adds a flag when there is something to go on from"
_NEAR = 0.02  # share of what was reached: so close to the beginning is the beginning
_FEW = 3  # steps that are made again are no start over
_LEAST = 1.0  # points of a percentage that were lost, at least, before that is told
HOLDS = 2  # starts over, each with a checkpoint that was left, after which the chain is held


class StartOver(NamedTuple):
    """Attempt ``attempt`` has begun at the beginning, though an earlier one had come further."""

    attempt: int
    step: int  # its first
    before: int  # the attempt that had come furthest
    reached: int
    checkpoint: str = ""  # the newest that was left before it; "": none was found
    other: str = ""  # the folder that this attempt writes into, where that is another one

    def words(self) -> str:
        return (
            f"attempt {self.attempt} began at step {self.step:,}, attempt {self.before} had reached {self.reached:,}: "
            f"{NOT_RESUMED}"
        )

    def why(self, command: str) -> str:
        """Return the likely reason, by what was left and by the text of the command; one clause."""
        if not self.checkpoint:
            where = "does it save, and where? checkpoints.path"
            return f"attempt {self.before} left no checkpoint that was found ({where})"
        if "SLURM_JOB" in command or "SLURM_ARRAY" in command:
            return f"the command names a folder by the number of its job, so each looks elsewhere than at {self.checkpoint}"
        if self.other:
            return f"{self.checkpoint} was left, and it writes into {self.other}"
        if not any(word in command.lower() for word in _FLAGS):
            return f"{self.checkpoint} was left, and no flag of the command says to go on from it"
        return f"{self.checkpoint} was left, and the command did not go on from it"


_FLAGS = ("resume", "from_checkpoint", "from-checkpoint", "init_from", "restore", "--load", "ckpt_path", "continue")


def starts_over(attempts: Sequence[Attempt], earlier: LeftCheckpoint | None = None) -> tuple[StartOver, ...]:
    """Return the newest attempts in a row that began anew, oldest first; () where the last one that shows it goes on.

    ``attempts``: those of one launch, in order. Attempts whose beginning is not known count neither way. ``earlier``: what was
    left before the first of them (``left_before``).
    """
    found: list[StartOver] = []
    best: Attempt | None = None
    origin: Attempt | None = None
    left: LeftCheckpoint | None = None
    for one in attempts:
        known = one.first_step is not None and one.last_step is not None
        if _guarded(one):
            found, best, origin = [], None, None
        elif known and one.source == OUTPUT:
            if best is not None and origin is not None:
                resumed = _goes_on(one, best, origin) or _nothing_newer(origin, one.given or left or earlier)
                again = None if resumed else _again(one, best, left)
                found = [*found, again] if again is not None else [] if _goes_on(one, best, origin) else found
            if best is None or (one.last_step or 0) > (best.last_step or 0):
                best = one
            origin = origin if origin is not None and (origin.first_step or 0) <= (one.first_step or 0) else one
        if one.written is not None:
            left = one.written
    return tuple(found)


def resumes(attempts: Sequence[Attempt]) -> bool:
    """Return whether an attempt has shown that it goes on from what one before it had left."""
    best: Attempt | None = None
    origin: Attempt | None = None
    for one in attempts:
        if _guarded(one) or (one.source == OUTPUT and _begins_behind_given(one)):
            return True
        if one.source == OUTPUT and one.first_step is not None:
            if best is not None and origin is not None and _goes_on(one, best, origin):
                return True
            best, origin = best or one, origin or one
            best = one if (one.last_step or 0) > (best.last_step or 0) else best
    return False


def _guarded(one: Attempt) -> bool:
    return one.resumed is not None or one.source == GUARD


def _begins_at_the_beginning(one: Attempt, best: Attempt, origin: Attempt) -> bool:
    begun, first, last = one.first_step or 0, origin.first_step or 0, best.last_step or 0
    later = one.epoch is not None and origin.epoch is not None and one.epoch > origin.epoch  # the count is of its epoch
    return begun - first <= _NEAR * (last - first) and not later


def _goes_on(one: Attempt, best: Attempt, origin: Attempt) -> bool:
    return _begins_behind_given(one) or not _begins_at_the_beginning(one, best, origin)


def _begins_behind_given(one: Attempt) -> bool:
    """Return whether it begins right behind the checkpoint that it was given, whatever is known of the attempts before."""
    step, begun = None if one.given is None else one.given.step, one.first_step or 0
    return step is not None and begun > _FEW and -1 <= begun - step <= max(_FEW, _NEAR * step)


def _again(one: Attempt, best: Attempt, left: LeftCheckpoint | None) -> StartOver | None:
    begun, last = one.first_step or 0, best.last_step or 0
    if last - begun < _FEW:
        return None
    path = "" if left is None else left.path
    mine = one.written.path.rpartition("/")[0] if one.written is not None else ""
    other = mine if path and mine and mine != path.rpartition("/")[0] else ""
    return StartOver(one.number, begun, best.number, last, path, other)


def _nothing_newer(origin: Attempt, left: LeftCheckpoint | GivenCheckpoint | None) -> bool:
    """Return whether ``origin`` itself went on from somewhere and nothing was saved since: who begins there too resumes."""
    begun = origin.first_step or 0
    if begun <= _FEW or left is None or left.at is None or left.at > origin.started:
        return False
    return left.step is None or left.step <= begun + 1


def left_before(attempts: Sequence[Attempt], number: int) -> LeftCheckpoint | None:
    """Return what was left before attempt ``number``: it may have gone on from that. ``attempts``: in order."""
    return next((one.written for one in reversed(attempts) if one.number < number and one.written is not None), None)


class PercentOver(NamedTuple):
    """Attempt ``attempt`` has begun at the beginning, though an earlier one had come further."""

    attempt: int
    first: float
    before: int
    reached: float

    def words(self) -> str:
        return (
            f"attempt {self.attempt} began again at {show_percent_points(self.first)}, attempt {self.before} had reached "
            f"{show_percent_points(self.reached)}: {NOT_RESUMED}"
        )


def began_again(attempts: Sequence[Attempt], earlier: LeftCheckpoint | None = None) -> PercentOver | None:
    """Return that the newest attempt that shows a percentage began again; None where it did not, or steps say more.

    ``attempts``: those of one launch, in order. ``earlier``: as ``starts_over`` has it.
    """
    if any(one.first_step is not None or one.resumed is not None for one in attempts):
        return None
    known = [(one, one.percent) for one in attempts if one.percent is not None]
    if len(known) < 2:
        return None
    (newest, mine), before = known[-1], [(at, one) for at, one in known[:-1] if one.of == known[-1][1].of]
    if not before:
        return None
    best = max(before, key=lambda pair: pair[1].last)
    origin, begins = min(((at, one.first) for at, one in before), key=lambda pair: pair[1])
    near = mine.first - begins <= _NEAR * (best[1].last - begins)
    if not near or best[1].last - mine.first < _LEAST or best[1].last >= 100:
        return None
    source = newest.given or left_before(attempts, newest.number) or earlier
    if begins > _LEAST and source is not None and source.at is not None and source.at <= origin.started:
        return None  # the first of them went on from it, and nothing was saved since
    return PercentOver(newest.number, mine.first, best[0].number, best[1].last)


def saves_elsewhere(attempts: Sequence[Attempt]) -> str:
    """Return, as a sentence, that the two newest attempts that saved did so each into a folder of its own job's number, where
    no step says whether the later one went on; "" otherwise."""
    if any(one.first_step is not None or one.resumed is not None for one in attempts):
        return ""
    last = [(one.number, one.written) for one in attempts if one.written is not None][-2:]
    if len(last) < 2 or not all(left.by_job for _, left in last) or last[0][1].path == last[1][1].path:
        return ""
    (before, old), (number, new) = last
    return (
        f"attempt {number} saved into {new.path}, a folder of its own job's number, and attempt {before} into {old.path}: "
        f"{NOT_SEEN_TO_RESUME}"
    )


def since_a_person(attempts: Sequence[Attempt], rundir: RunDir) -> list[Attempt]:
    """Return the attempts that count: a person who launches again, or releases the brake, has looked. Raises OSError."""
    first, last = counts_from(rundir), launches(rundir, most=1)
    return [one for one in attempts if one.number >= first and (not last or one.started >= last[0].at)]


def not_resumed(attempts: Sequence[Attempt], rundir: RunDir) -> tuple[tuple[StartOver, ...], PercentOver | None]:
    """Return what ``starts_over`` and ``began_again`` say of the attempts that count. Raises OSError."""
    counted = since_a_person(attempts, rundir)
    earlier = left_before(attempts, counted[0].number) if counted else None
    return starts_over(counted, earlier), began_again(counted, earlier)


def must_hold(found: Sequence[StartOver]) -> bool:
    """Return whether it has begun anew too often, with a checkpoint left each time."""
    return len([one for one in found if one.checkpoint]) >= HOLDS
