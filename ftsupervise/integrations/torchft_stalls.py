"""A group notes each time that its next step came late because another group was lost, for replicas/stalls.py.

Only a group that was there all the time can say how long the others stood still: one that skips steps was away itself. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from datetime import datetime, timezone
from statistics import median
from typing import NamedTuple

from ftsupervise.replicas.stalls import MOST_SEEN, GroupStall

_WAITED = 1.0  # seconds in a quorum, from which a late step of unknown cause is a stall
_LATE = 3.0  # times the usual time of a step
_USUAL = 30  # steps


class _Commit(NamedTuple):
    at: float  # epoch seconds
    step: int
    starts: frozenset[str]  # of groups that took part: "g002:3f0c…"


class StallRecorder:
    """``stalls``: oldest first."""

    def __init__(self) -> None:
        self.stalls: list[GroupStall] = []
        self._last: _Commit | None = None
        self._usual = deque[float](maxlen=_USUAL)
        self._lost = 0

    def failed(self) -> None:
        """A step was tried in vain."""
        self._lost += 1

    def committed(self, step: int, starts: Iterable[str], waited: float, at: float) -> bool:
        """``step`` is committed, with these starts of groups. ``waited``: seconds in its quorum. Has ``stalls`` changed?"""
        now, last, lost = _Commit(at, step, frozenset(starts)), self._last, self._lost
        self._last, self._lost = now, 0
        changed = self._came_back(now)
        if last is None or step != last.step + 1:
            return changed
        seconds = max(0.0, at - last.at)
        usual = median(self._usual) if self._usual else seconds
        gone = {_name(start) for start in last.starts - now.starts}
        late = waited >= _WAITED and seconds > _LATE * usual
        if not gone and not lost and not late:
            self._usual.append(seconds)
            return changed
        stall = GroupStall(_time(last.at), round(seconds, 3), step, lost, tuple(sorted(gone)))
        self.stalls = [*self.stalls, stall][-MOST_SEEN:]
        self._came_back(now)  # it may have been started again before the others met
        return True

    def _came_back(self, now: _Commit) -> bool:
        """Note of each stall when all that it lost take part again."""
        here, changed = {_name(start) for start in now.starts}, False
        for number, one in enumerate(self.stalls):
            if one.gone and one.back is None and here.issuperset(one.gone):
                self.stalls[number] = one._replace(back=_time(now.at), missed=max(0, now.step - one.step))
                changed = True
        return changed


def _name(start: str) -> str:
    return start.partition(":")[0]


def _time(at: float) -> datetime:
    return datetime.fromtimestamp(at, timezone.utc)
