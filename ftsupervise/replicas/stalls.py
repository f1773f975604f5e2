"""Each stall of replica groups is kept, so that a person can ask days later: when they stood still and for how long, which
group was lost, what it cost, and when that group was back.

    RUN/groups/G/attempts/NNNN/stalls.json   what one start of a group has seen, written by its first rank
    RUN/replicas/stalls.json                 all of them put together, written by the process that runs the lighthouse

Several groups see the same stall, a little apart: those whose times overlap are one. Both pages keep the newest ones; what has
left the second one is still counted in its sums.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host.in_time import Every
from ftsupervise.replicas.table import read_trusted
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, write_json

STALLS = "stalls.json"
MOST_SEEN, MOST = 100, 500  # stalls on a page of one start, and on that of the run
_EVERY = 5.0  # seconds between two looks at what the groups have seen
_ATTEMPTS = 3  # of each group that are read: the newest
_LONGEST = 3600.0  # seconds: longer ones are no stall of a step any more, and would swallow all others


class GroupStall(NamedTuple):
    """``at``: when the last step before it was committed. ``back``: when all of ``gone`` took part again, None while they do
    not."""

    at: datetime = EPOCH
    seconds: float = 0.0  # until the next step
    step: int = 0  # that one
    lost: int = 0  # steps that were tried in vain by each of those that were left
    gone: Annotated[tuple[str, ...], 1000] = ()  # groups that took part before it and not after it
    back: datetime | None = None
    missed: int | None = None  # steps that were made without them

    @property
    def ended(self) -> datetime:
        return self.at + timedelta(seconds=self.seconds)

    @property
    def away(self) -> float | None:
        """Seconds until the lost groups took part again; None while they do not."""
        return None if self.back is None or not self.gone else max(0.0, (self.back - self.at).total_seconds())


class SeenStalls(NamedTuple):
    """The page of one start of a group."""

    stalls: Annotated[tuple[GroupStall, ...], MOST_SEEN] = ()


class StallPage(NamedTuple):
    """The page of the run. The sums are of all stalls, those that it does not list any more too."""

    at: datetime = EPOCH
    times: int = 0
    seconds: float = 0.0
    lost: int = 0
    stalls: Annotated[tuple[GroupStall, ...], MOST] = ()  # oldest first


def with_seen(page: StallPage, seen: Iterable[GroupStall]) -> StallPage:
    """Return ``page`` with the stalls that a group has seen: twice the same changes nothing. Pure."""
    stalls = list(page.stalls)
    for one in seen:
        if not 0 <= one.seconds <= _LONGEST or (len(stalls) >= MOST and one.at < stalls[0].at):
            continue
        same = next((n for n, other in enumerate(stalls) if _is_same(one, other)), None)
        if same is None:
            stalls.append(one)
        else:
            stalls[same] = _together(stalls[same], one)
    stalls.sort(key=lambda one: one.at)
    old = (page.times - len(page.stalls), page.seconds - _seconds(page.stalls), page.lost - _lost(page.stalls))
    return StallPage(
        page.at,
        old[0] + len(stalls),
        round(old[1] + _seconds(stalls), 3),
        old[2] + _lost(stalls),
        tuple(stalls[-MOST:]),
    )


def _is_same(one: GroupStall, other: GroupStall) -> bool:
    """Two stalls of one group may follow each other at once: those only touch, and are of two steps."""
    both = (min(one.ended, other.ended) - max(one.at, other.at)).total_seconds()
    return both >= 0 and (one.step == other.step or 2 * both > min(one.seconds, other.seconds))


def _together(one: GroupStall, other: GroupStall) -> GroupStall:
    """Return the worst of what two groups saw of it. The first that saw the lost groups again knows when they were back."""
    backs = [back for back in (one.back, other.back) if back is not None]
    missed = [steps for steps in (one.missed, other.missed) if steps is not None]
    return GroupStall(
        at=min(one.at, other.at),
        seconds=max(one.seconds, other.seconds),
        step=min(one.step, other.step),
        lost=max(one.lost, other.lost),
        gone=tuple(sorted({*one.gone, *other.gone})),
        back=min(backs, default=None),
        missed=min(missed, default=None),
    )


def _seconds(stalls: Iterable[GroupStall]) -> float:
    return sum(one.seconds for one in stalls)


def _lost(stalls: Iterable[GroupStall]) -> int:
    return sum(one.lost for one in stalls)


def read_stalls(rundir: RunDir) -> StallPage | None:
    """Return the stalls of the run's groups; None where there is no such page, or it cannot be read or trusted."""
    return read_trusted(StallPage, rundir.replicas / STALLS)


def write_seen(attempt: Path, stalls: Sequence[GroupStall]) -> None:
    """Write the newest stalls that this start of a group has seen. Raises OSError."""
    write_json(attempt / STALLS, SeenStalls(tuple(stalls[-MOST_SEEN:])), sync=False)


class StallBook:
    """A thread that puts together what the groups have seen: a file system may hang, and nobody waits for this."""

    def __init__(self, rundir: RunDir, names: Sequence[str], area: Path | None, every: float = _EVERY) -> None:
        self._rundir, self._names, self._area = rundir, tuple(names), area
        self._page: StallPage | None = None  # as it was read, or written last
        self._looking = Every(every, self._look, "stalls", last=self._look)

    def close(self, within: float = 2.0) -> None:
        """Have it look once more, and end."""
        self._looking.close(within)

    def _look(self) -> None:
        if self._page is None:
            self._page = read_stalls(self._rundir) or StallPage()
        found = self._page
        for name in self._names:
            found = with_seen(found, self._seen(self._rundir.group(name)))
        if found == self._page:
            return
        with suppress(OSError):  # a full disk, or a newer attempt: it is tried again
            write_json(self._rundir.replicas / STALLS, found._replace(at=_now()), sync=False, area=self._area)
            self._page = found

    def _seen(self, group: RunDir) -> list[GroupStall]:
        found: list[GroupStall] = []
        try:
            for number in sorted(ledger.numbers(group))[-_ATTEMPTS:]:
                seen = read_trusted(SeenStalls, group.attempt(number) / STALLS)
                found += seen.stalls if seen is not None else ()
        except OSError:
            return found
        return found


def _now() -> datetime:
    return datetime.now(timezone.utc)
