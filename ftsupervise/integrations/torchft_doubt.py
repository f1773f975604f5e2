"""A group doubts a step that no group can have made, and does not take the weights of the one that reports it.

torchft believes the highest step that any manager reports: all others throw their own weights away for those. A group whose
counter is broken, or that has loaded a checkpoint of another run, would so replace the training of all. A group that has made
steps with the others knows better: a step needs the minimum of groups, so one that fewer of them report, and that is far beyond
what the others can have made since it met them, was never committed.

A group that has made no step yet believes what it hears: at a cold start all go on from the latest checkpoint that one of
them has. A doubt costs little where it is wrong: that group waits, is started again, and believes. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from math import inf
from typing import NamedTuple

_FAR = 100  # steps that a group may always be behind
_FASTER = 10  # times as fast as ever before the others may have been without it
_PACES = 100  # steps whose times are remembered
_FASTEST = 0.001  # seconds


class ToldStep(NamedTuple):
    """A quorum says this of the highest step: which it is, how many members report it, and who one of them is."""

    step: int
    tellers: int
    teller: str = ""


class StepDoubt:
    """The steps that this group has committed with the others. ``least``: groups without which none is. Times: one clock, in
    seconds, that goes on while the machine sleeps."""

    def __init__(self, least: int) -> None:
        self._least = least
        self._step: int | None = None
        self._at, self._paces = 0.0, deque[float](maxlen=_PACES)

    def committed(self, step: int, at: float) -> None:
        if self._step is not None and step == self._step + 1:
            self._paces.append(max(_FASTEST, at - self._at))
        self._step, self._at = step, at

    def furthest(self, at: float) -> float:
        """The step that the others can have come to by now; infinite where this group has made too few to know."""
        if self._step is None or not self._paces:
            return inf
        return self._step + _FAR + _FASTER * max(0.0, at - self._at) / min(self._paces)

    def of(self, told: ToldStep, at: float) -> str:
        """Say why the step is not believed; "" where it is."""
        if told.tellers >= self._least or told.step <= self.furthest(at):
            return ""
        who = told.teller or "a group"
        return (
            f"{who} reports step {told.step}, and the last step that this group has made with the others is {self._step}: its "
            "weights are not taken, and the step waits until that group is gone"
        )


def told_by(quorum: object) -> ToldStep:
    """Read it from torchft's answer to a group that asked for a quorum."""
    ids: Sequence[str] = getattr(quorum, "replica_ids", ())
    rank: int | None = getattr(quorum, "recover_src_replica_rank", None)
    teller = ids[rank].partition(":")[0] if rank is not None and 0 <= rank < len(ids) else ""
    return ToldStep(int(getattr(quorum, "max_step", 0)), int(getattr(quorum, "max_world_size", 0)), teller)
