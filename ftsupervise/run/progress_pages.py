"""The progress of an attempt as its supervisor sees it: all ranks as one page, with what is done about a hang."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from datetime import datetime, timezone
from typing import NamedTuple

from ftsupervise.ranks.hang_detector import JITTER, HangVerdict
from ftsupervise.ranks.hang_monitor import cause_of
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.rundir.progress import (
    ProgressPage,
)

_BEHIND = 2  # steps: a rank this far behind the first one is named


class OnHang(NamedTuple):
    """The supervisor does this about a hang. ``does``: one of ``ON_HANG``. ``at``, in monotonic seconds: the present standstill
    is a hang from then on."""

    does: str = ""
    at: float | None = None


def seen_by(
    table: RankTable, left: HangVerdict | None = None, on_hang: Callable[[], OnHang] = OnHang
) -> ProgressPage | None:
    """Return the progress of the ranks as they last reported; None where none has. ``left``: a hang that was left alone."""
    states, tally = table.newest(), table.tally()
    if not states:
        return None
    now, at = time.monotonic(), time.time()
    stepping = [one for one in states if one.step is not None]
    slow = min(stepping, key=lambda one: one.step or 0, default=None)
    ahead = max((one.step for one in stepping if one.step is not None), default=None)
    ahead = max((step for step in (ahead, tally.last) if step is not None), default=None)
    step = slow.step if slow is not None and len(stepping) == len(states) else None
    behind = slow is not None and ahead is not None and ahead - (slow.step or 0) >= _BEHIND
    hang = on_hang()
    goes_on = left is None or any(max(one.stepped, one.beaten) > left.since + JITTER for one in states)
    return ProgressPage(
        at=datetime.fromtimestamp(at, timezone.utc),
        ranks=len(states),
        step=step,
        ahead=ahead,
        slowest=f"rank {slow.rank}{f' on {slow.node}' if slow.node else ''}" if behind and slow is not None else "",
        phase=Counter(one.phase for one in states).most_common(1)[0][0],
        stepped=round(now - max(one.stepped for one in stepping), 3) if stepping else None,
        first=tally.first,
        first_at=None if tally.first_at is None else round(at - (now - tally.first_at), 3),
        active_at=None if tally.active is None else round(at - (now - tally.active), 3),
        saved=tally.saved,
        saving=round(tally.saving, 3),
        loss=tally.loss,
        last_step=tally.last_step,
        hung="" if left is None or goes_on else cause_of(left).hang_words(),
        on_hang=hang.does,
        hang_at=None if hang.at is None else round(at + (hang.at - now), 3),
    )
