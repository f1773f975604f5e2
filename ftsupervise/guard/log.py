"""The guard's few lines on stderr. A rank whose stderr is closed or full trains on."""

from __future__ import annotations

import sys


class Voice:
    """Says things as rank ``rank`` of ``world``; what has been said ``once`` is not said again by this process."""

    def __init__(self, rank: int, world: int) -> None:
        self._who = f"rank {rank}: " if world > 1 else ""
        self._told: set[str] = set()

    def say(self, text: str, *, for_all: bool = False) -> None:
        """One line; ``for_all``: it concerns every rank, so no rank is named."""
        try:
            print(f"ftsupervise: {'' if for_all else self._who}{text}", file=sys.stderr, flush=True)
        except (OSError, ValueError, AttributeError):
            return

    def once(self, text: str) -> None:
        if text not in self._told:
            self._told.add(text)
            self.say(text)
