"""Says of a run that stands what its supervisor's page has: whether it hangs, whether it is ended by itself, when, or why not.
Pure.

It stands alone because ``status``, the report and the watch all say it.
"""

from __future__ import annotations

from datetime import datetime, timezone
from typing import NamedTuple

from ftsupervise.rundir.progress import ENDS, LEFT, OFF, RESTARTS, TOLD, ProgressPage
from ftsupervise.units import show_duration

FRESH = 180.0  # seconds: an older page does not say how the run is now


class HangEnd(NamedTuple):
    """``by_itself`` None: not known."""

    by_itself: bool | None = None
    words: str = ""  # a clause


def hang_left(page: ProgressPage | None, now: datetime, moved: float | None) -> str:
    """Return the hang that its supervisor has found and left alone, in words; "" where there is none.

    The word of a supervisor that still writes is the newest one. An old one counts until something has moved after it.
    ``moved``: epoch seconds of the last sign of progress; None where none was seen.
    """
    if page is None or not page.hung:
        return ""
    fresh = abs((now - page.at).total_seconds()) < FRESH
    return page.hung if fresh or moved is None or moved <= page.at.timestamp() else ""


def hang_end(page: ProgressPage | None, now: datetime) -> HangEnd:
    """Return what becomes of a standstill, where its supervisor has said so lately."""
    if page is None or abs((now - page.at).total_seconds()) >= FRESH:
        return HangEnd()
    if page.on_hang in (RESTARTS, ENDS):
        does = "restarts" if page.on_hang == RESTARTS else "ends"
        if page.hang_at is None:  # it works, by the use of its processes, or its supervisor cannot see it
            return HangEnd(True, f"its supervisor {does} it once it is sure that it hangs")
        seconds = round(page.hang_at - now.timestamp())
        at = datetime.fromtimestamp(page.hang_at, timezone.utc)
        when = f"at {at:%H:%M:%S} UTC, in {show_duration(seconds)}" if seconds > 0 else "now"
        return HangEnd(True, f"its supervisor {does} it {when}, unless it moves")
    nothing = {
        TOLD: "nothing ends it by itself, because a hang is only told",
        LEFT: "nothing ends it by itself: its supervisor was given neither --hang nor --in-place",
        OFF: "nothing ends it by itself, because launch.restart.hang is null",
    }.get(page.on_hang)
    return HangEnd() if nothing is None else HangEnd(False, nothing)
