"""Draws strategies side by side as one SVG, which needs no other file: where their time goes, and how sure that is. Pure.

It stands alone because nothing else here knows of a picture.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from html import escape

from ftsupervise.planning.simulator import StrategyOutcome, TimeKind
from ftsupervise.printable import printable
from ftsupervise.report.drawing import nice

_COLOURS = {
    TimeKind.TRAIN: "#2e7d5b",
    TimeKind.SAVE: "#3f7fb8",
    TimeKind.REDO: "#c9a227",
    TimeKind.DETECT: "#b3402e",
    TimeKind.RESTART: "#d97b3a",
    TimeKind.QUEUE: "#8a8f98",
    TimeKind.HELD: "#5c6370",
    TimeKind.AWAY: "#a05fa5",
}
_LEFT, _WIDE, _ROW, _TOP = 260, 640, 34, 46


def picture(outcomes: Sequence[StrategyOutcome], title: str) -> str:
    """A bar for each strategy, with its interval; one run alone has none. The axis begins at the round share below the lowest
    ratio, where that is above a half."""
    low = min(one.ettr - _known(one) for one in outcomes)
    begin = max(0.0, nice(low, 1.0, 6)[0]) if low > 0.5 else 0.0
    high = _TOP + _ROW * len(outcomes)
    box = (
        f'viewBox="0 0 {_LEFT + _WIDE + 90} {high + 60}" role="img" font-family="system-ui, sans-serif" font-size="13"'
    )
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {box}><title>{_text(title)}</title>',
        f'<rect width="100%" height="100%" fill="#fff"/><text x="12" y="24" font-size="15">{_text(title)}</text>',
    ]
    for share in nice(begin, 1.0, 6):
        if begin <= share <= 1.0:
            x = _x(share, begin)
            parts.append(f'<path d="M{x:.1f} {_TOP - 6}V{high}" stroke="#ddd"/>')
            parts.append(f'<text x="{x:.1f}" y="{high + 16}" text-anchor="middle" fill="#555">{100 * share:g} %</text>')
    for index, one in enumerate(outcomes):
        parts += _bar(one, _TOP + _ROW * index, begin)
    parts += _legend(outcomes, high + 40)
    return "".join((*parts, "</svg>\n"))


def _bar(one: StrategyOutcome, y: int, begin: float) -> list[str]:
    parts, at = [f'<text x="{_LEFT - 10}" y="{y + 17}" text-anchor="end">{_text(one.strategy.name[:38])}</text>'], 0.0
    for kind, share in zip(TimeKind, one.shares, strict=True):
        left, right = _x(max(begin, at), begin), _x(max(begin, at + share), begin)
        at += share
        if right - left > 0.05:
            parts.append(
                f'<rect x="{left:.1f}" y="{y}" width="{right - left:.1f}" height="24" fill="{_COLOURS[kind]}">'
                f"<title>{kind.name.lower()}: {share:.2%}</title></rect>"
            )
    if _known(one):
        ends = [_x(max(begin, one.ettr + sign * one.certain), begin) for sign in (-1, 1)]
        caps = "".join(f"M{end:.1f} {y + 7}v10" for end in ends)
        parts.append(f'<path d="M{ends[0]:.1f} {y + 12}H{ends[1]:.1f}{caps}" stroke="#000"/>')
    parts.append(f'<text x="{_LEFT + _WIDE + 8}" y="{y + 17}">{one.ettr:.1%}</text>')
    return parts


def _known(one: StrategyOutcome) -> float:
    return one.certain if math.isfinite(one.certain) else 0.0


def _legend(outcomes: Sequence[StrategyOutcome], y: int) -> list[str]:
    parts, x = [], 12
    for kind in TimeKind:
        if any(one.shares[kind] > 0.0005 for one in outcomes):
            word = kind.name.lower()
            parts.append(f'<rect x="{x}" y="{y - 11}" width="12" height="12" fill="{_COLOURS[kind]}"/>')
            parts.append(f'<text x="{x + 17}" y="{y}">{word}</text>')
            x += 38 + 8 * len(word)
    return parts


def _x(share: float, begin: float) -> float:
    return _LEFT + _WIDE * (min(1.0, share) - begin) / (1 - begin)


def _text(words: str) -> str:
    return escape(printable(words, 200))
