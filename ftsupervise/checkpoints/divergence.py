"""Decides where the run goes back to when its loss was no number or diverged, and how many batches it skips. Pure.

The newest checkpoints are the state that diverged. The run goes on from one that is older by some steps, as published runs did
(about 100 steps before the spike), and may skip the batches from there to where the trouble was seen. Where the trouble comes
again in the same place it goes back further; and after some tries the supervisor stops (``run/decide.py``).
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.truth import NOT_A_NUMBER, LossTrouble, SkippedBatches

_BACK = 60  # attempts that are looked at


class GoBack(NamedTuple):
    """``newest``: step that the checkpoint to go on from may have; where there is none, ``before`` is the bound."""

    trouble: LossTrouble
    times: int  # that the run came to this trouble
    newest: int
    before: int
    seen: int = 0  # batches that had been used when it was noticed
    skipped: tuple[SkippedBatches, ...] = ()  # of the attempt that came to it

    def skipping(self, step: int) -> tuple[SkippedBatches, ...]:
        """Return the batches that are skipped when the run goes on from ``step``."""
        kept = skipped_before(self.skipped, step)
        if self.trouble.then != "resume":
            return kept
        more = self.seen - used(kept, step)
        return (*kept, SkippedBatches(step, more)) if more > 0 else kept

    def words(self) -> str:
        """A clause."""
        again = "" if self.times == 1 else f", {self.times} times here"
        return f"{self.trouble.kind}: {self.trouble.words}{again}"


def go_back(newest_first: Iterable[Attempt], back: int) -> GoBack | None:
    """Return where to go back to; None where the last attempt that began anything had no trouble with its loss.

    ``back``: steps before the trouble.
    """
    last, older = _last_to_begin(newest_first)
    if last is None or last.trouble is None or last.trouble.since is None:
        return None
    trouble, since = last.trouble, last.trouble.since
    if not trouble.stops and trouble.kind != NOT_A_NUMBER:
        return None
    here = [last, *_same_window(since, older, back)]
    begun = [one.trouble.since for one in here if one.trouble is not None and one.trouble.since is not None]
    # the state that gave the first loss that is no number may be the one after the step before
    margin = 2 if trouble.kind == NOT_A_NUMBER else 1
    newest = min(begun) - max(margin, back if trouble.then == "resume" else 0)
    if len(here) > 1 and last.resumed is not None and last.resumed.step is not None:
        newest = min(newest, last.resumed.step - 1)
    skipped = last.resumed.skipped if last.resumed is not None else ()
    at = trouble.step if trouble.step is not None else since
    return GoBack(trouble, len(here), newest, min(begun), used(skipped, at), skipped)


def used(skipped: Sequence[SkippedBatches], step: int) -> int:
    """Return the batches that had been used or skipped after ``step``."""
    return step + sum(one.batches for one in skipped)


def skipped_before(skipped: Sequence[SkippedBatches], step: int) -> tuple[SkippedBatches, ...]:
    """Return the part of what an attempt had skipped that a checkpoint of ``step`` knows of."""
    return tuple(one for one in skipped if one.step < step)


def _last_to_begin(newest_first: Iterable[Attempt]) -> tuple[Attempt | None, Iterable[Attempt]]:
    source = iter(islice(newest_first, _BACK))
    for one in source:
        if one.trouble is not None or one.last_step is not None or (one.resumed is not None and one.resumed.begun):
            return one, source
    return None, ()


def _same_window(since: int, older: Iterable[Attempt], back: int) -> list[Attempt]:
    """Return the attempts before that came to the same trouble. One that ended for another reason says nothing about it."""
    found = []
    for one in older:
        if one.trouble is None or one.trouble.since is None:
            continue
        furthest = one.trouble.step if one.trouble.step is not None else one.trouble.since
        if not one.trouble.stops or since > furthest + back:
            break
        found.append(one)
    return found
