"""What the guard answers, and how ranks vote on it with one int."""

from __future__ import annotations

from typing import ClassVar

SUPERSEDED = "superseded"  # a newer attempt has begun: leave, and write nothing any more

# What a vote is about, weakest first. The word is what the ledger says was the cause.
CAUSES = (
    "",
    "save switch",
    "host memory",
    "run time reached",
    "time limit",
    "warning signal",
    "told to stop (SIGTERM)",
    "kill switch",
    SUPERSEDED,
)
_CAUSE_BITS = 4


class Decision(int):
    """CONTINUE < SAVE < STOP. An int, so that it compares and travels; ``reason`` says why, in words.

    ``save`` is true for SAVE and for STOP: who leaves, saves first; unless a newer attempt has begun, which owns the
    checkpoints from then on.
    """

    CONTINUE: ClassVar[Decision]
    SAVE: ClassVar[Decision]
    STOP: ClassVar[Decision]

    reason: str
    cause: str

    def __new__(cls, value: int, cause: str = "", reason: str = "") -> Decision:
        self = super().__new__(cls, value)
        self.cause = cause
        self.reason = reason or cause
        return self

    @property
    def save(self) -> bool:
        return self >= 1 and self.cause != SUPERSEDED

    @property
    def stop(self) -> bool:
        return self >= 2

    @property
    def name(self) -> str:
        return ("CONTINUE", "SAVE", "STOP")[self]

    def __repr__(self) -> str:
        return f"<Decision {self.name}: {self.reason}>" if self.reason else f"<Decision {self.name}>"

    __str__ = __repr__


Decision.CONTINUE = Decision(0)
Decision.SAVE = Decision(1)
Decision.STOP = Decision(2)


def as_vote(decision: Decision) -> int:
    """One non-negative int; the maximum over ranks is the strongest decision. 0 is CONTINUE; fits 6 bits."""
    cause = CAUSES.index(decision.cause) if decision.cause in CAUSES else 0
    return int(decision) << _CAUSE_BITS | cause


def from_vote(vote: int) -> Decision:
    """The inverse, without the details only the voter knows. An int that no vote can be counts as CONTINUE."""
    value, cause = vote >> _CAUSE_BITS, vote & (1 << _CAUSE_BITS) - 1
    if value <= 0 or value > 2 or cause >= len(CAUSES):
        return Decision.CONTINUE
    return Decision(value, CAUSES[cause])
