"""The account of a run's time: every second belongs to exactly one of train, save, redo, detect, restart, queue, braked, held,
unknown.

It is made of the ledger alone, so it can be made anywhere and at any time, also of a run that still runs. What the ledger does
not know is unknown, and never guessed: an attempt without the guard, the time after an attempt that nobody lived to end. Marks
of the last two hours (``rundir/progress.py``) tell what a part of an attempt was; without them a part has even shares.

    train    steps that no earlier attempt had made
    save     checkpoints, as far as the training waits for them
    redo     steps that an earlier attempt had made and that its fault undid
    detect   from the last progress before a fault to its end on record
    restart  from the start of a command to its first step, between two attempts of one job that Slurm has not put back into the
             queue, and after an orderly last step
    queue    no attempt, and a job of the run waits in the queue
    braked   no attempt, because it is stopped by the brake
    held     no attempt, because a person keeps it so, or has not launched it
    unknown  it cannot be told

Pure: times are arguments. Attempts that overlap, and clocks that jump, are clipped: a later attempt begins where the one before
ends at the latest, and nothing lies in the future.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from datetime import datetime, timedelta
from enum import Enum
from typing import NamedTuple

from ftsupervise.model import Attempt, CauseKind
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.progress import TimeMark
from ftsupervise.units import show_percent

_SANE = 946_684_800.0  # the year 2000: an earlier time is a damaged page's
_WEIGHT = 4  # of what is no training where a picture has one place for several kinds
_STALL = 60.0, 20.0  # seconds, and steps: a longer time without progress in a running attempt is no step
_NOT_STARTED = frozenset((CauseKind.NOT_STARTED, CauseKind.NO_START, CauseKind.NO_STEP, CauseKind.LAUNCH))
_BY_SIGTERM = (CauseKind.CANCELLED, CauseKind.TOLD)
_BY_A_PERSON = frozenset((CauseKind.KILL_SWITCH, *_BY_SIGTERM, CauseKind.INTERRUPTED))


class Spent(str, Enum):
    TRAIN = "train"
    SAVE = "save"
    REDO = "redo"
    DETECT = "detect"
    RESTART = "restart"
    QUEUE = "queue"
    BRAKED = "braked"
    HELD = "held"
    UNKNOWN = "unknown"


KEPT_OUT = frozenset((Spent.BRAKED, Spent.HELD))  # no job of the run could have been running
_SURE = 150.0  # seconds between two marks: what lies between them is known well enough
_WITHIN = (Spent.RESTART, Spent.REDO, Spent.TRAIN, Spent.SAVE, Spent.DETECT, Spent.UNKNOWN)  # an attempt, in this order


class Stretch(NamedTuple):
    """A time of one kind. Within an attempt the kinds stand in the order restart, redo, train, save, detect: saves, which are
    spread over it, stand as one. Epoch seconds."""

    kind: Spent
    begin: float
    end: float
    attempt: int | None = None

    @property
    def seconds(self) -> float:
        return self.end - self.begin


class Ettr(NamedTuple):
    """An effective training time ratio, 0-1. Unknown time may have been training: it lies between the two."""

    least: float
    most: float


def ratio(ettr: Ettr | None) -> str:
    """ "97.3 %", or from least to most where they differ."""
    if ettr is None:
        return "unknown"
    if ettr.most - ettr.least < 0.0005:
        return show_percent(ettr.least)
    return f"{show_percent(ettr.least)} to {show_percent(ettr.most)}"


class AttemptCut(NamedTuple):
    """The seconds that an attempt had spent at an instant within it, as ``_WITHIN`` has the kinds."""

    attempt: int
    at: float
    spent: tuple[float, ...]


class TimeAccount(NamedTuple):
    """``stretches`` follow each other without a gap from ``since`` to ``until``."""

    since: datetime
    until: datetime
    stretches: tuple[Stretch, ...] = ()
    blind: tuple[int, ...] = ()  # attempts of which nothing is known but begin and end: without the guard
    cuts: tuple[AttemptCut, ...] = ()  # in the order of their times

    @property
    def total(self) -> float:
        return (self.until - self.since).total_seconds()

    def seconds(self) -> dict[Spent, float]:
        found = dict.fromkeys(Spent, 0.0)
        for one in self.stretches:
            found[one.kind] += one.seconds
        return found

    def shares(self) -> dict[Spent, float]:
        """0-1 each, 1 in all; all 0 for a run that has no time yet."""
        spent = self.seconds()
        whole = sum(spent.values())
        return {kind: one / whole if whole else 0.0 for kind, one in spent.items()}

    def goodput(self) -> Ettr | None:
        """Training by all time since the launch. None: there was no time."""
        return self._ratio(frozenset())

    def ettr_meta(self) -> Ettr | None:
        """Meta's definition (Kokolis et al., HPCA 2025): by the time in which a job of the run was running or could have been,
        so without ``KEPT_OUT``. The queue counts."""
        return self._ratio(KEPT_OUT)

    def ettr_byterobust(self) -> Ettr | None:
        """ByteRobust's definition (SOSP 2025), cumulative: by all time since the first attempt began. The first wait does not
        count, all later ones do."""
        first = next((one.begin for one in self.stretches if one.attempt is not None), None)
        return None if first is None else self.within(first, self.until.timestamp()).goodput()

    def ettr_last(self, seconds: float = 3600.0) -> Ettr | None:
        """ByteRobust's sliding window: the same of the last hour. None also where it begins within an attempt and
        no mark tells how far that was then."""
        until = self.until.timestamp()
        if not self._knows(until - seconds):
            return None
        return self.within(until - seconds, until).ettr_byterobust()

    def within(self, begin: float, end: float) -> TimeAccount:
        """The part of it between two epoch seconds. Where these cut an attempt, its kinds are those between the marks, and
        where it has none they have even shares."""
        since, until = max(begin, self.since.timestamp()), min(end, self.until.timestamp())
        if until <= since:
            return TimeAccount(self.since, self.since)
        cut = tuple(_cut(self, since, until))
        zero = self.since - timedelta(seconds=self.since.timestamp())
        return TimeAccount(zero + timedelta(seconds=since), zero + timedelta(seconds=until), cut, self.blind)

    def _knows(self, at: float) -> bool:
        """Tell whether it is known what the attempt at that instant, if there was one, had spent until then."""
        near = next((one for one in self.stretches if one.attempt is not None and one.begin <= at <= one.end), None)
        mine = [one for one in self.stretches if near is not None and one.attempt == near.attempt]
        if not mine or not mine[0].begin < at < mine[-1].end:
            return True
        number = mine[0].attempt
        if len({one.kind for one in mine}) == 1:
            return True
        known = [mine[0].begin, *(one.at for one in self.cuts if one.attempt == number), mine[-1].end]
        before = max(one for one in known if one <= at)
        return min(one for one in known if one >= at) - before <= _SURE

    def _ratio(self, without: frozenset[Spent]) -> Ettr | None:
        spent = self.seconds()
        whole = sum(seconds for kind, seconds in spent.items() if kind not in without)
        if whole <= 0:
            return None
        return Ettr(spent[Spent.TRAIN] / whole, (spent[Spent.TRAIN] + spent[Spent.UNKNOWN]) / whole)


def account(
    attempts: Sequence[Attempt],
    launches: Sequence[LaunchRecord],
    now: datetime,
    *,
    running: bool = False,
    afterwards: Spent = Spent.UNKNOWN,
    marks: Sequence[TimeMark] = (),
) -> TimeAccount:
    """``running``: the last attempt still runs, whatever can be read of it; ``afterwards``: what the time since the last
    attempt's end is (QUEUE, BRAKED, HELD or UNKNOWN); ``marks``: in the order of their times. The account of a run that has
    finished ends there."""
    until = now.timestamp()
    begins = _begins(attempts, until)
    known = [at for one in launches if _SANE < (at := one.at.timestamp()) <= until]
    since = min([*known, *begins[:1]], default=until)
    if not begins:
        return _made(now, since, until, [Stretch(afterwards, since, until)])
    stretches = [Stretch(Spent.QUEUE, since, begins[0])]
    highest: int | None = None
    blind, cuts = [], list[AttemptCut]()
    for index, one in enumerate(attempts):
        last = index == len(attempts) - 1
        bound = until if last else begins[index + 1]
        end = bound if last and running else _clip(_end(one, begins[index]), begins[index], bound)
        parts = _parts(one, end - begins[index], highest, running=last and running)
        at = begins[index]
        for kind, seconds in parts:
            to = min(end, at + seconds)
            stretches.append(Stretch(kind, at, to, one.number))
            at = to
        if parts[0][0] is Spent.UNKNOWN:
            blind.append(one.number)
        if at < end:  # what rounding has left
            stretches.append(Stretch(parts[-1][0], at, end, one.number))
        cuts += _cuts(one, begins[index], end, highest, marks)
        highest = max((step for step in (highest, one.last_step) if step is not None), default=None)
        if last and one.kind is CauseKind.FINISHED and one.ended is not None:
            until = end
        elif last:
            stretches.append(Stretch(Spent.UNKNOWN if one.ended is None and not running else afterwards, end, until))
        else:
            stretches += _between(one, attempts[index + 1], launches, end, bound)
    return _made(now, since, until, stretches, tuple(blind), tuple(cuts))


def _made(
    now: datetime,
    since: float,
    until: float,
    parts: Sequence[Stretch],
    blind: tuple[int, ...] = (),
    cuts: tuple[AttemptCut, ...] = (),
) -> TimeAccount:
    zero = now - timedelta(seconds=now.timestamp())
    found = tuple(one for one in parts if one.end > one.begin)
    return TimeAccount(zero + timedelta(seconds=since), zero + timedelta(seconds=until), found, blind, cuts)


def _begins(attempts: Sequence[Attempt], until: float) -> list[float]:
    """Return when each attempt began: in their order, and none in the future."""
    found: list[float] = []
    first = next((at for one in attempts if (at := one.started.timestamp()) > _SANE), until)
    for one in attempts:
        at = one.started.timestamp()
        floor = found[-1] if found else 0.0
        found.append(_clip(at if at > _SANE else max(floor, min(first, until)), floor, until))
    return found


def _end(one: Attempt, begin: float) -> float:
    """Return when it ended, else until when it is known to have lived."""
    if one.ended is not None:
        return one.ended.timestamp()
    heard = one.heard.timestamp() if one.heard is not None else begin
    return max(heard, begin + (one.worked or one.ready or 0.0))


def _parts(one: Attempt, length: float, highest: int | None, *, running: bool) -> list[tuple[Spent, float]]:
    """Return the kinds of an attempt of ``length`` seconds, in order; ``highest``: the last step of all earlier ones."""
    failed = one.failure is not None or (one.ended is None and not running)
    tail = Spent.DETECT if failed else Spent.RESTART
    if one.first_step is None or one.last_step is None or one.ready is None:
        if one.kind in _NOT_STARTED:
            return [(Spent.RESTART, length)]
        if one.worked is None:
            stood = min(length, one.cause.waited) if one.cause is not None and one.kind is CauseKind.HANG else 0.0
            before = [(Spent.UNKNOWN, length - stood)] if length - stood >= 1 or not stood else []
            return [*before, (Spent.DETECT, stood)] if stood else before
        alive = length if running else _clip(one.worked, 0.0, length)
        return [(Spent.RESTART, alive), (tail, length - alive)]
    worked = length if one.worked is None else _clip(one.worked, 0.0, length)
    ready, made = _clip(one.ready, 0.0, worked), max(0, one.last_step - one.first_step)
    saving = _clip(one.saving or 0.0, 0.0, worked - ready)
    step = (worked - ready - saving) / made if made else 0.0
    ready -= min(step, ready)  # the first step ended there
    if running and length - worked < max(_STALL[0], _STALL[1] * step):
        worked = length  # a step, or a save, is being made
    trained = max(0.0, worked - ready - saving)
    again = 0 if highest is None else max(0, min(one.last_step, highest) - one.first_step + 1)
    redone = trained * again / (made + 1)
    rest = Spent.DETECT if running else tail
    return [
        (Spent.RESTART, ready),
        (Spent.REDO, redone),
        (Spent.TRAIN, trained - redone),
        (Spent.SAVE, saving),
        (rest, max(0.0, length - worked)),
    ]


def _between(
    one: Attempt, after: Attempt, launches: Sequence[LaunchRecord], end: float, begin: float
) -> Iterator[Stretch]:
    """Yield the time from the end of an attempt to the begin of the next."""
    if one.ended is None:
        yield Stretch(Spent.UNKNOWN, end, begin)
        return
    if one.job_id and one.job_id == after.job_id:
        yield Stretch(Spent.RESTART if one.begun_again == after.begun_again else Spent.QUEUE, end, begin)
        return
    job = after.job_id.partition("_")[0]
    launched = next((two.at.timestamp() for two in reversed(launches) if job and job in two.job_ids), None)
    held = Spent.BRAKED if one.braked else Spent.HELD
    if launched is not None and end < launched <= begin:
        yield Stretch(held, end, launched)
        yield Stretch(Spent.QUEUE, launched, begin)
        return
    by_a_person = one.kind in _BY_A_PERSON
    if by_a_person and one.kind in _BY_SIGTERM:  # else the next member waited for it in the queue all the time
        by_a_person = not _of_one_launch(one, after, launches)
    yield Stretch(held if one.braked or by_a_person else Spent.QUEUE, end, begin)


def _of_one_launch(one: Attempt, after: Attempt, launches: Sequence[LaunchRecord]) -> bool:
    bases = {each.job_id.partition("_")[0] for each in (one, after)}
    return len(bases) == 1 or any(bases <= set(two.job_ids) for two in launches)


def _cuts(
    one: Attempt, begin: float, end: float, highest: int | None, marks: Sequence[TimeMark]
) -> Iterator[AttemptCut]:
    """Yield what ``one`` had spent at each of its marks, by the rules for an attempt that still runs."""
    if one.first_step is None:
        return
    for mark in marks:
        if mark.attempt != one.number or not begin < mark.at < end:
            continue
        step = mark.step if mark.step is not None and mark.step >= one.first_step else None
        worked = None if mark.active is None else mark.active - begin
        then = one._replace(last_step=step, saving=mark.saving, worked=worked, cause=None, ended=None)
        spent = dict.fromkeys(_WITHIN, 0.0)
        if step is None:  # its first step was still to come
            spent[Spent.RESTART] = mark.at - begin
        else:
            spent.update(_parts(then, mark.at - begin, highest, running=True))
        yield AttemptCut(one.number, mark.at, tuple(spent.values()))


def kinds_over(stretches: Sequence[Stretch], since: float, until: float, count: int) -> list[Spent | None]:
    """The kind that matters most in each of ``count`` equal parts of a time: a short fault is to be seen in a long run."""
    size, at, found = (until - since) / count, 0, list[Spent | None]()
    for index in range(count):
        low, high = since + index * size, since + (index + 1) * size
        while at < len(stretches) - 1 and stretches[at].end <= low:
            at += 1
        weights: dict[Spent, float] = {}
        for one in stretches[at:]:
            if one.begin >= high:
                break
            weight = 1 if one.kind is Spent.TRAIN else _WEIGHT
            weights[one.kind] = weights.get(one.kind, 0.0) + weight * max(0.0, min(high, one.end) - max(low, one.begin))
        found.append(max(weights, key=lambda kind: weights[kind]) if weights else None)
    return found


def _cut(of: TimeAccount, since: float, until: float) -> Iterator[Stretch]:
    """Yield the stretches between two times; those of an attempt that is cut are made anew."""
    whole: dict[int, list[Stretch]] = {}
    for one in of.stretches:
        if one.attempt is not None:
            whole.setdefault(one.attempt, []).append(one)
    for one in of.stretches:
        if one.attempt is None:
            low, high = max(one.begin, since), min(one.end, until)
            if high > low:
                yield one._replace(begin=low, end=high)
        elif (mine := whole.pop(one.attempt, None)) is not None:
            begin, end = mine[0].begin, mine[-1].end
            if since <= begin and end <= until:
                yield from mine
            elif max(begin, since) < min(end, until):
                known = [cut for cut in of.cuts if cut.attempt == one.attempt]
                yield from _part_of(mine, known, max(begin, since), min(end, until))


def _part_of(mine: Sequence[Stretch], known: Sequence[AttemptCut], low: float, high: float) -> Iterator[Stretch]:
    """Yield what an attempt did between two instants within it."""
    spent = dict.fromkeys(_WITHIN, 0.0)
    for one in mine:
        spent[one.kind] += one.seconds
    number = mine[0].attempt or 0
    points = [
        AttemptCut(number, mine[0].begin, (0.0,) * len(_WITHIN)),
        *known,
        AttemptCut(number, mine[-1].end, tuple(spent.values())),
    ]
    first, last = _spent_until(points, low), _spent_until(points, high)
    parts = [max(0.0, later - earlier) for earlier, later in zip(first, last, strict=True)]
    scale, at = (high - low) / (sum(parts) or 1.0), low
    shown = [(kind, seconds) for kind, seconds in zip(_WITHIN, parts, strict=True) if seconds > 0]
    for index, (kind, seconds) in enumerate(shown):
        to = high if index == len(shown) - 1 else min(high, at + seconds * scale)
        if to > at:
            yield Stretch(kind, at, to, number)
        at = to


def _spent_until(points: Sequence[AttemptCut], at: float) -> tuple[float, ...]:
    """Return the seconds of each kind at an instant; between two points they grow evenly."""
    after = next(index for index in range(1, len(points)) if points[index].at >= at)
    one, other = points[after - 1], points[after]
    share = (at - one.at) / (other.at - one.at) if other.at > one.at else 1.0
    return tuple(early + share * (late - early) for early, late in zip(one.spent, other.spent, strict=True))


def _clip(value: float, low: float, high: float) -> float:
    return max(low, min(high, value))
