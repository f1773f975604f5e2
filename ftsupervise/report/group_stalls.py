"""The stalls of replica groups in words, the same ones in ``status`` and in the report. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from typing import NamedTuple

from ftsupervise.replicas.stalls import StallPage
from ftsupervise.report.groups import GroupsSeen
from ftsupervise.units import show_duration


class StallRow(NamedTuple):
    """One stall. A text is "" where nothing is known, or nothing is to be said."""

    at: datetime
    stall: str  # "1.1s"
    lost: str  # "g001 was lost"
    steps: str  # "1 step lost"
    back: str  # "back after 7.9s, 60 steps missed"


def stall_rows(seen: GroupsSeen | None) -> tuple[StallRow, ...]:
    """The newest first."""
    page = seen.stalls if seen is not None else None
    return tuple(_rows(page)) if page is not None else ()


def stall_sentence(seen: GroupsSeen | None) -> str:
    """All of them in one sentence; "" where there were none."""
    page = seen.stalls if seen is not None else None
    if page is None or not page.times:
        return ""
    times = "once" if page.times == 1 else f"{page.times:,} times"
    return (
        f"Its replica groups waited {times} for one that was lost or made no progress, {show_duration(page.seconds)} in all, "
        f"and lost {_steps(page.lost)} by it."
    )


def _rows(page: StallPage) -> Iterator[StallRow]:
    for one in reversed(page.stalls):
        names = ", ".join(one.gone[:4]) + (f" and {len(one.gone) - 4} more" if len(one.gone) > 4 else "")
        back = ""
        if one.away is not None:
            missed = f", {_steps(one.missed)} missed" if one.missed else ""
            back = f"back after {show_duration(one.away)}{missed}"
        yield StallRow(
            at=one.at,
            stall=show_duration(one.seconds),
            lost=f"{names} {'was' if len(one.gone) == 1 else 'were'} lost" if names else "no group was lost",
            steps=f"{_steps(one.lost)} lost" if one.lost else "",
            back=back or ("not back yet" if names else ""),
        )


def _steps(number: int) -> str:
    return f"{number:,} step{'' if number == 1 else 's'}" if number else "no step"
