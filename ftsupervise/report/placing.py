"""The stretches of a run's account as its pictures draw them: each save stands where it was made, by the record of steps.

The account has one stretch for all saves of an attempt. Where the record does not say when they were made, they are not drawn
at a place: their time is part of the training, and ``loose`` says how much it is. Pure.
"""

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import NamedTuple

from ftsupervise.model import Attempt
from ftsupervise.report.account import KEPT_OUT, Spent, Stretch
from ftsupervise.rundir.progress import StepRecord
from ftsupervise.truth import NOT_A_NUMBER, LossTrouble

_ALL = 0.9  # of the saves on record: the rest is rounding
_WORK = (Spent.REDO, Spent.TRAIN)
_NO_STEPS = frozenset((Spent.DETECT, Spent.RESTART, Spent.QUEUE)) | KEPT_OUT


class DrawnTime(NamedTuple):
    """``loose``: attempt -> seconds in saves that are drawn as training."""

    stretches: tuple[Stretch, ...]
    loose: Mapping[int, float]


class TimeGap(NamedTuple):
    """A time without a step. Epoch seconds."""

    begin: float
    end: float


def placed(stretches: Sequence[Stretch], record: StepRecord) -> DrawnTime:
    """Return the same stretches, with the saves where they were made. The time of each attempt stays the same."""
    saves = [((one.number + 1) * record.every, one.saving) for one in record.spans if one.saving > 0]
    found: list[Stretch] = []
    loose: dict[int, float] = {}
    for number, group in groupby(stretches, key=lambda one: one.attempt):
        mine = list(group)
        saved = next((one for one in mine if one.kind is Spent.SAVE), None)
        if saved is None or number is None:
            found += mine
            continue
        work = [one for one in mine if one.kind in _WORK]
        begin = min([saved.begin, *(one.begin for one in work)])
        first = bisect_right(saves, (begin, float("inf")))
        last = bisect_right(saves, (saved.end + record.every, float("inf")))
        blocks = _blocks(saves[first:last], begin, saved)
        rest = saved.seconds - sum(to - at for at, to in blocks)
        if rest >= 1:
            loose[number] = rest
        found += [one for one in mine if one.end <= begin]
        again = sum(one.seconds for one in work if one.kind is Spent.REDO)
        found += _mixed(blocks, begin, saved.end, again, number)
        found += [one for one in mine if one.begin >= saved.end]
    return DrawnTime(tuple(found), loose)


def gaps(stretches: Sequence[Stretch], least: float) -> tuple[TimeGap, ...]:
    """The times of at least ``least`` seconds in which no rank made a step, as far as that is known."""
    found: list[TimeGap] = []
    for one in stretches:
        if one.kind not in _NO_STEPS:
            continue
        if found and one.begin - found[-1].end < 1:
            found[-1] = found[-1]._replace(end=one.end)
        else:
            found.append(TimeGap(one.begin, one.end))
    return tuple(one for one in found if one.end - one.begin >= least)


class BadLoss(NamedTuple):
    """A time in which the loss was no number. Epoch seconds."""

    begin: float
    end: float
    attempt: int
    trouble: LossTrouble
    dated: bool  # the record of steps says when it began; else that is some minute since the attempt began

    @property
    def steps(self) -> int:
        """How many steps had such a loss."""
        first, last = self.trouble.since, self.trouble.step
        return last - first + 1 if first is not None and last is not None else 0


def bad_losses(
    attempts: Sequence[Attempt], record: StepRecord, now: LossTrouble | None, until: float
) -> tuple[BadLoss, ...]:
    """The times in which the loss was no number: by the ledger, and by what the ranks say ``now``; ``until`` is that time."""
    found: list[BadLoss] = []
    for index, one in enumerate(attempts):
        last = index == len(attempts) - 1
        trouble = one.trouble or (now if last and one.ended is None else None)
        if trouble is None or trouble.kind != NOT_A_NUMBER or trouble.since is None:
            continue
        low, high = one.started.timestamp(), one.ended.timestamp() if one.ended is not None else until
        spans = [span for span in record.spans if low - record.every < span.number * record.every < high]
        since = next((span.number * record.every for span in spans if span.step >= trouble.since), None)
        newest = (spans[-1].number + 1) * record.every if spans else low  # the record is a minute older than the ranks
        begin = newest if since is None else since
        found.append(BadLoss(min(max(low, begin), high), high, one.number, trouble, since is not None))
    return tuple(found)


def _blocks(saves: Sequence[tuple[float, float]], begin: float, saved: Stretch) -> list[tuple[float, float]]:
    """Return when it saved: each save ends with its span, none overlaps, all between ``begin`` and the end of ``saved``."""
    known = sum(seconds for _, seconds in saves)
    if known <= 0:
        return []
    factor = saved.seconds / known if known > _ALL * saved.seconds else 1.0
    found: list[tuple[float, float]] = []
    at = begin
    for end, seconds in saves:
        at = max(at, end - seconds * factor)
        found.append((at, at + seconds * factor))
        at += seconds * factor
    last = saved.end
    for index in reversed(range(len(found))):
        low, high = found[index]
        last, high = min(high, last) - (high - low), min(high, last)
        found[index] = (last, high)
    return found


def _mixed(
    blocks: Sequence[tuple[float, float]], begin: float, end: float, again: float, attempt: int
) -> Iterator[Stretch]:
    """The time from ``begin`` to ``end``: saves in ``blocks``, else steps; the first ``again`` seconds of these are redone."""
    at = begin
    for low, high in (*blocks, (end, end)):
        if low > at:
            redone = min(again, low - at)
            if redone > 0:
                yield Stretch(Spent.REDO, at, at + redone, attempt)
            if low > at + redone:
                yield Stretch(Spent.TRAIN, at + redone, low, attempt)
            again -= redone
        if high > low:
            yield Stretch(Spent.SAVE, low, high, attempt)
        at = max(at, high)
