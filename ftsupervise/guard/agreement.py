"""The ranks come to the same decision at the same step.

They agree through the store of torch.distributed, where the program has one (store_agreement.py): no rank waits for
another there. Otherwise they do so through a function that all ranks call in the same step: the user's own
(``AskedAgreement``), or one small all_reduce every few steps (``ReducedAgreement``). A decision and its step belong
together for all ranks, so all count the calls of ``Guard.step``: its numbers may begin anywhere, repeat or skip.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from ftsupervise.guard.stop_reasons import Decision, as_vote, from_vote

_CONTINUE = Decision.CONTINUE
_monotonic = time.monotonic

AHEAD = 0.5  # seconds of steps that ranks may make between two questions: a decision waits no longer
MOST_AHEAD = 32  # steps, however quick they are: the next ones may be slow


class Agreement(Protocol):
    """The agreement of the ranks.

    ``count``: the calls of ``Guard.step`` so far, counted there. Up to ``free`` a call need not come to ``decide``.
    ``lost``: why this rank decides alone for now, or "".
    """

    count: int
    free: int
    lost: str

    def decide(self, want: Decision) -> Decision:
        """Return the decision of all ranks for this call; ``want``: this rank's own wish."""

    def pending(self) -> Decision:
        """Return what is decided for a call to come, as far as this rank knows."""

    def tell(self, want: Decision) -> None:
        """Pass this rank's wish on before its next call."""

    def close(self, *, in_order: bool) -> None:
        """End: the loop is over. ``in_order``: the other ranks are about to leave too, and are waited for a little."""


class AskedAgreement:
    """``agree``: int -> int, the maximum over all ranks; every rank calls it in each ``every``-th step."""

    lost = ""

    def __init__(self, agree: Callable[[int], int], every: int) -> None:
        self.count = 0
        self._agree, self._every = agree, max(1, every)
        self.free = self._every - 1

    def decide(self, want: Decision) -> Decision:
        if self.count <= self.free:
            return _CONTINUE
        self.free = self.count + self._every - 1
        return common(want, self._agree(as_vote(want)))

    def pending(self) -> Decision:
        return _CONTINUE

    def tell(self, want: Decision) -> None:
        return

    def close(self, *, in_order: bool) -> None:
        return


def common(want: Decision, agreed: int) -> Decision:
    """Return the decision that all have voted for; with this rank's own reason if it voted for the same."""
    return want if agreed == as_vote(want) else from_vote(int(agreed))


class StepPace:
    """Tells how many steps take ``seconds``, from the time that the last ones took.

    The number grows step by step: the first step may be quick.
    """

    def __init__(self, seconds: float, most: int) -> None:
        self.step_takes = 0.0  # seconds
        self.steps = 0
        self._seconds, self._most = seconds, most
        self._at, self._count = 0.0, 0

    def measure(self, count: int, now: float) -> int:
        if self._at and count > self._count:
            self.step_takes = (now - self._at) / (count - self._count)
            fit = int(self._seconds / self.step_takes) if self.step_takes > 0 else self._most
            self.steps = min(fit, 2 * self.steps + 1, self._most)
        self._at, self._count = now, count
        return self.steps


class ReducedAgreement:
    """``maximum``: ints -> their maxima over all ranks, a collective; every few steps, as many on every rank."""

    def __init__(self, maximum: Callable[..., list[int]]) -> None:
        self.count = self.free = 0
        self.lost = ""
        self._maximum = maximum
        self._pace = StepPace(AHEAD, MOST_AHEAD)

    def decide(self, want: Decision) -> Decision:
        if self.lost:
            return want
        if self.count <= self.free:
            return _CONTINUE
        steps = self._pace.measure(self.count, _monotonic())
        try:
            agreed, fewest = self._maximum(as_vote(want), -steps)
        except Exception as error:  # law 7: the loop's own next collective meets the same
            self.lost = f"{type(error).__name__}: {error}".partition("\n")[0][:200]
            return want
        self.free = self.count - fewest
        return common(want, agreed)

    def pending(self) -> Decision:
        return _CONTINUE

    def tell(self, want: Decision) -> None:
        return

    def close(self, *, in_order: bool) -> None:
        return
