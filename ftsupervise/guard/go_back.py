"""The checkpoint that an attempt goes on from when the loss of the one before was no number, or diverged.

Every rank comes to the same choice from the ledger and from what is there, as in ``resume.py``. Rank 0 alone moves all newer
checkpoints into the quarantine: they belong to a way that the run has left.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import NamedTuple

from ftsupervise.checkpoints.divergence import GoBack, go_back
from ftsupervise.checkpoints.find import Choice, Found, checkpoints_in
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.model import Attempt
from ftsupervise.rundir import ledger
from ftsupervise.rundir.lineage import Lineage
from ftsupervise.truth import SkippedBatches

_BACK = 60  # attempts that are asked for their first loss


class WayBack(NamedTuple):
    """The choice, what has to go aside, newest first, and what is skipped on the way to it."""

    why: str  # a clause
    choice: Choice
    aside: tuple[Found, ...]
    skipped: tuple[SkippedBatches, ...]
    anew: bool = (
        False  # nothing was saved before the trouble, and the beginning is not farther than it goes back anyhow
    )


def way_back(
    place: RankContext, pick: Callable[[Collection[str]], Choice], run: Lineage | None, voice: Voice
) -> WayBack | None:
    """Return the way back; None where there was no trouble with the loss, or the ledger cannot be read.

    ``pick``: the newest good one without those of these names. Raises OSError as ``choose`` does.
    """
    try:
        found = go_back(_before(place), place.loss_back)
    except OSError as error:
        voice.once(f"cannot read the ledger ({error.strerror}): it is not known whether the loss diverged before")
        return None
    return None if found is None else _choose(place, pick, run, found)


def first_loss(place: RankContext) -> float | None:
    """Return the first loss of the run that an earlier attempt has reported; None where it is not known."""
    if place.rundir is None or place.attempt is None:
        return None
    try:
        numbers = sorted(one for one in ledger.numbers(place.rundir) if one < (place.attempt or 0))
        for number in numbers[:_BACK]:
            for one in ledger.backwards(place.rundir, number + 1, number):
                if one.first_loss is not None:
                    return one.first_loss
    except OSError:
        return None
    return None


def _before(place: RankContext) -> Iterator[Attempt]:
    if place.rundir is None or place.attempt is None:
        return iter(())
    return ledger.backwards(place.rundir, place.attempt)


def _choose(
    place: RankContext, pick: Callable[[Collection[str]], Choice], run: Lineage | None, found: GoBack
) -> WayBack:
    """Return the newest that is old enough; else the oldest.

    From the beginning only where that is near, or there is none at all.
    """
    there = checkpoints_in(place.checkpoints, run=run)
    choice = pick(_names(there, found.newest))
    older = [one for one in there if one.step is not None and one.step < found.before]
    near = found.before <= max(place.loss_back, 1)
    if choice.verdict is None:
        for one in reversed(older or ([] if near else there)):
            choice = pick([other.path.name for other in there if other is not one])
            if choice.verdict is not None:
                break
    step = choice.verdict.step if choice.verdict is not None else None
    begins = found.newest if choice.verdict is None else step or 0
    aside = tuple(one for one in there if one.step is not None and one.step > begins)
    return WayBack(found.words(), choice, aside, found.skipping(step or 0), near and not older)


def _names(there: tuple[Found, ...], newest: int) -> list[str]:
    return [one.path.name for one in there if one.step is None or one.step > newest]
