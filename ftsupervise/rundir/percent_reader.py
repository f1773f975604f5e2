"""Finds the percentage by which a program says how far it is, in what it prints. Pure, with bounded memory.

It stands apart from the page, which ``status`` reads: its patterns are compiled where an output is followed.
"""

from __future__ import annotations

import re

from ftsupervise.truth import PercentReached

_GROWN = 4  # values, each greater than the one before, after which it is progress
_SLACK = 1.0  # points by which the line of another thread may be behind
_MOST = 16  # counters that are remembered
_SAYS = re.compile(
    r"(?<![a-z])progress\W{0,6}(?P<said>\d{1,3}(?:\.\d{1,6})?)\s?%"
    r"|(?<![\d.,])(?P<done>\d{1,3}(?:\.\d{1,6})?)\s?%\s+(?:complete|completed|done|finished)\b",
    re.I,
)
_NUMBERS = re.compile(r"[-+]?\d[\d,]*(?:\.\d*)?(?:e[-+]?\d+)?|\s+", re.I)
_OTHER = re.compile(
    r"(?<![a-z])(?:eval|valid|test|sampl|generat|warm|download|upload|load|token|mapp|filter|prepro|predict|sanity|restor|"
    r"checkpoint|sav(?:ed|ing)|cop(?:y|ied)|extract|unpack|install|compil|build|shuffl|sort|index|read|disk|memory|usage)",
    re.I,
)


class _Counter:
    """The values of the lines of one shape."""

    def __init__(self, value: float, now: float) -> None:
        self.first = self.last = value
        self.first_at = self.last_at = now
        self.grown, self.fell = 1, False

    def add(self, value: float, now: float) -> None:
        if value > self.last:
            self.last, self.last_at, self.grown = value, now, self.grown + 1
        elif value < self.last - _SLACK:
            self.fell, self.last = True, value


class PercentReader:
    """Reads lines, one by one. Pure, with bounded memory."""

    def __init__(self) -> None:
        self._counters: dict[str, _Counter] = {}

    def read(self, line: str, now: float) -> None:
        """Take a line. ``now``: when it was there, in epoch seconds."""
        match = _SAYS.search(line)
        if match is None or _OTHER.search(line[: match.end()]) is not None:
            return
        value = float(match["said"] or match["done"])
        if value > 100:
            return
        of = _NUMBERS.sub(" ", line[: match.end()]).strip()[:200]
        if of in self._counters:
            self._counters[of].add(value, now)
        else:
            self._counters[of] = _Counter(value, now)
            while len(self._counters) > _MOST:
                del self._counters[next(iter(self._counters))]

    def found(self) -> PercentReached | None:
        """Return how far it has come; None while nothing behaves like progress."""
        sure = [(of, one) for of, one in self._counters.items() if one.grown >= _GROWN and not one.fell]
        if len(sure) != 1:  # two that grow: nobody knows which is that of the training
            return None
        of, one = sure[0]
        return PercentReached(
            round(one.last, 3), round(one.first, 3), round(one.first_at, 1), round(one.last_at, 1), of
        )
