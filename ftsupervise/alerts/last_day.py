"""The last day of a run as a picture for its messages: rows of table cells in a mail's HTML, characters everywhere else.

Mail clients do not show what pages show: no script, no SVG, often no image before somebody clicks. Cells of a table with a
background colour are shown by all of them, at once. Slack gets characters in a code block, so nothing is uploaded.

The values come from above (``report``); here they are only drawn. Pure.
"""

from __future__ import annotations

from datetime import datetime
from itertools import groupby
from typing import NamedTuple

from ftsupervise.units import show_duration, show_rate

PARTS = 72  # of the time that is drawn: 20 minutes each in a day

# character, colour; the order is that of the legend
KINDS = {
    "train": ("=", "#2e7d32"),
    "save": ("s", "#0097a7"),
    "redo": ("r", "#8e24aa"),
    "detect": ("d", "#c62828"),
    "restart": (">", "#f9a825"),
    "queue": (".", "#1565c0"),
    "braked": ("b", "#8d6e63"),
    "held": ("h", "#5c6bc0"),
    "unknown": ("?", "#9e9e9e"),
}
WORDS = {"braked": "stopped by the brake"}  # where a kind has another name for people
_BARS = "▁▂▃▄▅▆▇█"


class LastDay(NamedTuple):
    """``kinds`` has what each of PARTS equal parts went into, oldest first; ``rates`` steps a second in each, None where
    nothing was recorded; ``shares`` of each kind, 0-1; all three end at ``until``."""

    since: datetime
    until: datetime
    kinds: tuple[str, ...]
    rates: tuple[float | None, ...]
    shares: tuple[tuple[str, float], ...]

    @property
    def narrow(self) -> LastDay:
        """Return it with half as many parts, for a telephone. A part with anything but training in it keeps that."""
        pairs = [self.kinds[index : index + 2] for index in range(0, len(self.kinds), 2)]
        kinds = tuple(next((kind for kind in pair if kind != "train"), pair[0]) for pair in pairs)
        known = [
            [rate for rate in self.rates[index : index + 2] if rate is not None]
            for index in range(0, len(self.rates), 2)
        ]
        return self._replace(kinds=kinds, rates=tuple(sum(pair) / len(pair) if pair else None for pair in known))

    @property
    def span(self) -> str:
        return show_duration(round((self.until - self.since).total_seconds() / 60) * 60)

    @property
    def title(self) -> str:
        return "the last day" if self.span == "1d" else f"the last {self.span}"

    @property
    def line(self) -> str:
        """Return "====s..>rr====": a character for each part."""
        return "".join(KINDS[kind][0] for kind in self.kinds)

    @property
    def spark(self) -> str:
        """Return the rates as bars; "·" where nothing was recorded, "" where there was no step."""
        highest = max((rate for rate in self.rates if rate is not None), default=0.0)
        if highest <= 0:
            return ""
        top = len(_BARS) - 1
        return "".join("·" if rate is None else _BARS[round(top * rate / highest)] for rate in self.rates)

    @property
    def highest(self) -> str:
        """Return the rate of the highest bar."""
        rate = max((rate for rate in self.rates if rate is not None), default=0.0)
        return show_rate(rate) if rate > 0 else ""

    @property
    def legend(self) -> tuple[tuple[str, str, str, str], ...]:
        """Return (character, colour, kind, share) of the kinds that occur."""
        shown = ((kind, share) for kind, share in self.shares if share >= 0.0005)
        return tuple((*KINDS[kind], WORDS.get(kind, kind), f"{100 * share:.1f} %") for kind, share in shown)

    @property
    def cells(self) -> tuple[tuple[str, str, int], ...]:
        """Return (colour, kind, parts) of each stretch of one kind."""
        parts = ((kind, len(list(same))) for kind, same in groupby(self.kinds))
        return tuple((KINDS[kind][1], WORDS.get(kind, kind), number) for kind, number in parts)

    @property
    def bars(self) -> tuple[int, ...]:
        """Return the rates as heights, 0-24 pixels."""
        highest = max((rate for rate in self.rates if rate is not None), default=0.0)
        return tuple(round(24 * rate / highest) if rate and highest else 0 for rate in self.rates)

    @property
    def words(self) -> str:
        """Return the whole in words, for readers who do not see the picture."""
        return f"{self.title}: " + ", ".join(f"{kind} {share}" for _, _, kind, share in self.legend)

    @property
    def text(self) -> str:
        """Return the same in lines of text."""
        legend = "  ".join(f"{sign} {kind} {share}" for sign, _, kind, share in self.legend)
        lines = [f"{self.title}, to {self.until:%Y-%m-%d %H:%M} UTC", self.line]
        if self.spark:
            lines += [self.spark, f"(steps; the highest bar is {self.highest})"]
        return "\n".join([*lines, legend])


class AboutRun(NamedTuple):
    """Messages about a run carry this besides: its last day, its page in an experiment tracker ("": it has none), and how it is
    now, as names and words."""

    day: LastDay | None = None
    tracker: str = ""
    facts: tuple[tuple[str, str], ...] = ()


def sample(until: datetime) -> LastDay:
    """Return a day with a fault in it, for ``notify preview``."""
    from datetime import timedelta

    kinds = ["train"] * 30 + ["detect"] + ["queue"] * 3 + ["restart"] + ["redo"] * 2 + ["train"] * 35
    kinds[10] = kinds[50] = "save"
    rates = [0.0 if kind in ("queue", "detect", "restart") else 0.098 + 0.001 * (n % 3) for n, kind in enumerate(kinds)]
    count = {kind: kinds.count(kind) / PARTS for kind in KINDS}
    return LastDay(until - timedelta(days=1), until, tuple(kinds), tuple(rates), tuple(count.items()))


def sample_facts(until: datetime) -> tuple[tuple[str, str], ...]:
    """Return what a message says of a run, for ``notify preview``."""
    return (
        ("now", "RUNNING"),
        ("step", "48,210 of 120,000 (40 %)"),
        ("loss", "2.31"),
        ("ETA", f"{until:%Y-%m-%d} 23:10 UTC, in 2d 4h"),
        ("job", "88_1 is RUNNING, 9h left"),
    )
