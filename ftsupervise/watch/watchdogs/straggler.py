"""Checks whether all ranks wait for a slow one, as the supervisor of the attempt has found (``ranks/straggler.py``)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftsupervise.findings import Finding, Words
from ftsupervise.rundir.hang_end import FRESH
from ftsupervise.truth import Health
from ftsupervise.watch.watchdogs.run_signs import page_at_work

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import StragglerSection as Settings
    from ftsupervise.watch import Look

WORDS = Words(
    "All ranks wait for it at each step, and cost that much more.",
    "ftsupervise diagnose {run_dir}",
    "compare its node with the others: clocks, temperatures, other processes, its data; to leave a node out: "
    "ftsupervise nodes exclude NODE {run_dir}",
)


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    """Nothing is found where nobody is slow, unless somebody was."""
    page = page_at_work(look)
    slow = page.straggler if page is not None else None
    bad = slow is not None and slow.cost >= settings.least and slow.lasts(look.now)
    if not bad and not look.memory.get("told"):
        return
    look.memory["told"] = True
    if page is not None and abs((look.now - page.at).total_seconds()) >= FRESH:
        yield look.finding(
            "ranks", Health.UNKNOWN, "the supervisor has not said for minutes whether a rank is slow", WORDS
        )
    elif slow is not None and bad:
        limit = f"{settings.least:.0%}"
        yield look.finding(
            "ranks", Health.BAD, slow.words(), WORDS, value=f"{slow.cost:.0%}", limit=limit, since=slow.since
        )
    else:
        look.memory.pop("told")
        yield look.finding("ranks", Health.OK, "no rank is waited for", WORDS)
