"""Finds out whether the fault lies in the checkpoint: by the ledger, when attempts fail again and again from the same
one.

A run that diverged, or whose checkpoint crashes its loader, fails from its newest checkpoint for ever. Such a one is
set aside (``quarantine.py``) and the one before gets its chance. Pure, but for the reading that goes on behind the
iterator.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Sequence
from itertools import chain, islice
from typing import NamedTuple

from ftsupervise.model import Attempt, Failure, FailureKind
from ftsupervise.truth import Resumed

# failures that a checkpoint can be the cause of; a node, a disk, a command that cannot be started are not
_OF_THE_PROGRAM = frozenset(
    {FailureKind.CODE, FailureKind.SIGNAL, FailureKind.NUMBERS, FailureKind.MEMORY, FailureKind.HANG}
)
# from outside: no checkpoint makes its loader end in this way
_SENT = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
# So many are set aside without progress. A failure that comes from an older one too lies in the program; a run may have
# diverged before the older one was written.
_MOST = {FailureKind.NUMBERS: 3}
_BACK = 60  # attempts that are looked at


class Suspicion(NamedTuple):
    """A checkpoint from which ``times`` attempts in a row failed in the same way."""

    checkpoint: Resumed
    times: int
    failure: Failure

    def words(self) -> str:
        """A clause."""
        return f"{self.times} attempts in a row began from it and failed in the same way: {self.failure.words()}"


def suspect(newest_first: Iterable[Attempt], after: int) -> Suspicion | None:
    """Return the checkpoint that the newest ``after`` attempts or more failed from; None where there is none, and for
    ``after`` 0.

    Reads no further than it must. An attempt without a record of its checkpoint, or that saved a newer one, ends the
    search.
    """
    source = islice(newest_first, _BACK)
    streak: list[Attempt] = []
    broke: tuple[Attempt, ...] = ()
    for one in source if after else ():
        if not _counts(one, streak):
            broke = (one,)
            break
        streak.append(one)
    if not streak or len(streak) < after:
        return None
    newest = streak[0]
    assert newest.resumed is not None and newest.failure is not None
    if _set_aside(chain(streak, broke, source)) >= _MOST.get(newest.failure.kind, 1):
        return None
    return Suspicion(newest.resumed, len(streak), newest.failure)


def _counts(one: Attempt, newer: Sequence[Attempt]) -> bool:
    begun, failure = one.resumed, one.failure
    if begun is None or not begun.checkpoint or failure is None or not may_come_of_a_checkpoint(one):
        return False
    if not begun.begun:  # the program as it was then could not take it: that says nothing about the checkpoint
        return False
    if one.begins is not None and one.begins.source == "memory":
        return False
    if one.saved is not None and (begun.step is None or one.saved > begun.step):
        return False
    if not newer:
        return True
    last = newer[0]
    assert last.resumed is not None and last.failure is not None
    return begun.same(last.resumed) and failure.same(last.failure)


def may_come_of_a_checkpoint(one: Attempt) -> bool:
    """Return whether it ended in a way in which a program ends that cannot use what it has loaded."""
    if one.failure is None or one.failure.kind not in _OF_THE_PROGRAM or one.hardware:
        return False
    if one.failure.kind is not FailureKind.SIGNAL or one.cause is None:
        return True
    return one.cause.first.killed_by not in _SENT


def _set_aside(newest_first: Iterable[Attempt]) -> int:
    """Return the checkpoints that were set aside since the run last came further than one of them."""
    count, saved = 0, -1
    for one in newest_first:
        saved = max(saved, one.saved if one.saved is not None else -1)
        if one.resumed is None or not one.resumed.set_aside:
            continue
        if one.resumed.set_aside_step is not None and saved > one.resumed.set_aside_step:
            break
        count += 1
    return count
