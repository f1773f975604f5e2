"""Members of a quorum that should not be in it: the lighthouse believes them, and we know better.

The lighthouse takes every manager at its word. One that calls itself like another group is counted twice, one of another
training is counted too, and of all steps that are told the highest counts: all others throw their weights away and copy those
of the group that told it. The supervisor knows the groups that it has started, and their steps from their own ranks.

Pure. What is not known makes nobody a suspect.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from enum import Enum
from typing import NamedTuple

from ftsupervise.replicas.lighthouse_page import LighthousePage, QuorumMember, group_of

_AHEAD = 2  # steps: a group reports the one that it is about to make
_AHEAD_FOR = 10.0  # seconds: a page of ours is never that old while its ranks are heard of
_FAR = 100  # steps ahead of all others, beside those that they can have made since they were last asked
_FAR_FOR = 4.0  # seconds that a member reports such a step, on three pages at least


class MemberTrouble(Enum):
    """This is wrong with a member of the quorum."""

    UNKNOWN = "no group of this run"
    TWICE = "two starts of one group"
    AHEAD = "reports a step that it has not made"
    STORE = "its store does not answer"
    FAR = "reports a step that no group can have made"


class SuspectMember(NamedTuple):
    """``words``: a sentence for people."""

    group: str
    replica: str
    trouble: MemberTrouble
    words: str


def suspects(
    page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, silent_stores: Collection[str] = ()
) -> list[SuspectMember]:
    """``steps``: each group of this run, and the newest step that its ranks have told us (None: not known). ``heartbeat``:
    seconds after which a start counts as dead. ``silent_stores``: addresses of stores that do not answer (``stores.py``)."""
    heard = page.heard(heartbeat)
    found = [
        SuspectMember(
            group_of(one), one, MemberTrouble.UNKNOWN, f"{one} reports to the lighthouse and is no group of this run"
        )
        for one in heard
        if group_of(one) not in steps
    ]
    for group in steps:
        starts = [one for one in heard if group_of(one) == group]
        if len(starts) > 1:
            words = f"{len(starts)} starts of group {group} report to the lighthouse: {', '.join(starts)}"
            found += [SuspectMember(group, one, MemberTrouble.TWICE, words) for one in starts]
    alive = [one for one in page.members if one.replica in heard and one.group in steps]
    return found + [suspect for one in alive for suspect in _judged(one, steps[one.group], silent_stores)]


def _judged(one: QuorumMember, known: int | None, silent_stores: Collection[str]) -> list[SuspectMember]:
    found = []
    if one.step is not None and known is not None and one.step > known + _AHEAD:
        words = f"group {one.group} told the lighthouse step {one.step}, and its ranks are at step {known}"
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.AHEAD, words))
    if one.store in silent_stores:
        words = f"the store of group {one.group} at {one.store} does not answer: no group can meet there"
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.STORE, words))
    return found


class SuspectWatch:
    """It tells what is new on a page: each trouble of a start of a group once, when two pages in a row show it. For a moment
    after a restart, both starts of a group are heard of. And our own page about a group's steps may be seconds old: one is
    said to be ahead when its ranks have not made, ten seconds later, the step that it told then."""

    def __init__(self) -> None:
        self._page: LighthousePage | None = None
        self._before: set[tuple[str, MemberTrouble]] = set()
        self._told: set[tuple[str, MemberTrouble]] = set()
        self._claims: dict[str, tuple[int, float]] = {}  # by start: a step that it told, and when

    def news(
        self,
        now: float,
        page: LighthousePage,
        steps: Mapping[str, int | None],
        heartbeat: float,
        silent_stores: Collection[str] = (),
    ) -> list[SuspectMember]:
        """Return what is new of ``suspects``. The same page twice is one look. ``now``: monotonic seconds."""
        if page is self._page:
            return []
        found = {(one.replica, one.trouble): one for one in suspects(page, steps, heartbeat, silent_stores)}
        ahead = {one for one, trouble in found if trouble is MemberTrouble.AHEAD}
        told = {one.replica: one.step for one in page.members if one.replica in ahead and one.step is not None}
        self._claims = {one: self._claims.get(one, (step, now)) for one, step in told.items()}
        for one, (step, _) in list(self._claims.items()):
            known = steps.get(group_of(one))
            if known is not None and known + _AHEAD >= step:  # it was only our page that was old
                self._claims[one] = (told[one], now)
            if now - self._claims[one][1] < _AHEAD_FOR:
                found.pop((one, MemberTrouble.AHEAD))
        sure = self._before | {key for key in found if key[1] is MemberTrouble.AHEAD}
        new = [one for key, one in found.items() if key in sure and key not in self._told]
        self._page, self._before = page, set(found)
        self._told = (self._told & self._before) | {(one.replica, one.trouble) for one in new}
        return new


def far_ahead(
    page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, least: int
) -> list[SuspectMember]:
    """The members that tell a step which no group can have made: fewer than ``least`` groups tell it, without which nothing is
    committed, and it is far beyond what the others have made. ``steps`` as in ``suspects``; None also for a group that has made
    no step since its start. Nobody is accused unless the steps of enough others to train on are known."""
    heard = page.heard(heartbeat)
    alive = [one for one in page.members if one.step is not None and one.replica in heard and one.group in steps]
    found = []
    for one in alive:
        others = [made for group, made in steps.items() if group != one.group and made is not None]
        if one.step is None or len(others) < max(2, least - 1) or one.step <= max(others) + _FAR:
            continue
        if len({other.group for other in alive if (other.step or 0) > max(others) + _FAR}) >= least:
            continue
        words = (
            f"group {one.group} told the lighthouse step {one.step}, and the others are at step {max(others)} at most"
        )
        found.append(SuspectMember(one.group, one.replica, MemberTrouble.FAR, words))
    return found


class LiarWatch:
    """The groups that are to be ended and started again, because their managers report steps that no group can have made: the
    others refuse such weights (integrations/torchft_doubt.py), and so wait until the group is gone. What is seen once may be
    an old page of ours; only a claim that lasts counts."""

    def __init__(self) -> None:
        self._page: LighthousePage | None = None
        self._since: dict[
            str, tuple[float, int]
        ] = {}  # by start of a group: when it was first seen so, and on how many pages

    def after(
        self, now: float, page: LighthousePage, steps: Mapping[str, int | None], heartbeat: float, least: int
    ) -> dict[str, SuspectMember]:
        """Return, by group, those that are sure with this page. ``now``: monotonic seconds."""
        found, new = {one.replica: one for one in far_ahead(page, steps, heartbeat, least)}, page is not self._page
        before, self._page = {replica: self._since.get(replica, (now, 0)) for replica in found}, page
        self._since = {replica: (since, looks + new) for replica, (since, looks) in before.items()}
        sure = [replica for replica, (since, looks) in self._since.items() if now - since >= _FAR_FOR and looks > 2]
        return {found[replica].group: found[replica] for replica in sure}
