"""A report that is renewed while its run goes on: what is known of it, when it is over, and what its page says of that.

The looks are made elsewhere, each in a process of its own; here they are only remembered. Pure, but for the looks
themselves at the end.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

from ftsupervise.printable import printable
from ftsupervise.report.summary import stamp
from ftsupervise.secrecy import masked
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.report.everything import ReportFacts
    from ftsupervise.report.week import WeekReport

F = TypeVar("F")
_SURE = 2  # looks in a row that have to find it over: a queue may lose sight of a job for a moment
_GONE = frozenset(("STOPPED", "GONE"))
_ENDED = _GONE | {"FINISHED", "UNKNOWN", ""}  # or it is not known


class PageLife(Enum):
    """The states of a page that is followed."""

    RENEWED = "it is renewed"
    OVER = "what it shows is over, and it is the last one"
    LEFT = "nobody renews it any more"


@dataclass(frozen=True)
class Followed(Generic[F]):
    """A run that is followed: the newest facts, since when there are no newer ones, and whether it is over."""

    facts: F | None = None
    blind_since: datetime | None = None
    why: str = ""  # nothing newer could be seen
    ends: int = 0  # looks in a row that have found it over

    def seen(self, facts: F, now: datetime, *, over: bool, blind: str = "") -> Followed[F]:
        """``blind``: why a part of it could not be seen; "": all was."""
        since = None if not blind else self.blind_since or now
        return Followed(facts, since, blind, self.ends + 1 if over and not blind else 0)

    def unseen(self, why: str, now: datetime) -> Followed[F]:
        return replace(self, blind_since=self.blind_since or now, why=why, ends=0)

    def again(self, verdict: str) -> Followed[F]:
        """Return it as not over where its row says that it goes on: somebody has launched it anew."""
        return replace(self, ends=0) if self.is_over and verdict not in _ENDED else self

    @property
    def is_over(self) -> bool:
        return self.ends >= _SURE


class FollowedPage(NamedTuple):
    """The line of a followed page about itself. ``every``: seconds from one to the next."""

    life: PageLife
    made: datetime
    every: float
    blind_since: datetime | None = None
    why: str = ""

    def shown(self, seen: datetime) -> dict[str, Any]:
        """Return it for the template. ``seen``: the moment that the page shows."""
        every = show_duration(self.every)
        renewed = self.life is PageLife.RENEWED
        words = {
            PageLife.RENEWED: f"Renewed every {every} while ftsupervise report --follow runs.",
            PageLife.OVER: "It is over, and this is the last page: nothing renews it any more.",
            PageLife.LEFT: f"Nobody follows it since {stamp(self.made)}: nothing renews this page any more.",
        }[self.life]
        blind = ""
        if self.blind_since is not None:
            blind = f"Since {stamp(self.blind_since)} it cannot be seen in full: {self.why.rstrip('.')}."
            if seen < self.blind_since:
                blind += f" What stands below was seen at {stamp(seen)}."
        return {"words": words, "blind": blind, "every": max(1, round(self.every)) if renewed else 0}

    def data(self) -> dict[str, Any]:
        """Return it for the script."""
        if self.life is not PageLife.RENEWED:
            return {}
        return {"follow": {"made": round(self.made.timestamp()), "every": max(1, round(self.every))}}


def sentence_of(error: Exception) -> str:
    """Return why a look has failed, for the page: the first line of what was said, without secrets."""
    first = str(error).partition("\n")[0] or type(error).__name__
    return masked(printable(first, 300))


def run_is_over(facts: ReportFacts) -> bool:
    """Return whether nothing of the run can follow by itself: it has finished, or it has stopped and no job of it is left."""
    seen = facts.detail.status
    return seen.verdict == "FINISHED" or (seen.verdict in _GONE and seen.jobs == ())


# ----------------------------------------------------------------------------------- the looks, in a process of their own


def places_of(runs: Sequence[str]) -> dict[str, Path]:
    """Return where these runs are, or the one of this place, by their names; by their directories where two are called alike.
    Raises as ``find_run``."""
    from ftsupervise.config.find_run import each_run, find_run

    where: dict[str, Path] = {}
    for root in (find_run(run).root for run in each_run(tuple(runs)) or (None,)):
        where[str(root) if where.get(root.name, root) != root else root.name] = root
    return where


def run_facts(root: str, now: datetime) -> ReportFacts:
    """Read the run in this directory for its report. Raises Error."""
    from ftsupervise.report.everything import read_report

    return read_report(Path(root), now, os.environ)


def week_facts(runs: Mapping[str, Path] | None, now: datetime) -> tuple[dict[str, Path], WeekReport]:
    """Read the last seven days of these runs, or of all of this account, with where they are. Raises Error."""
    from ftsupervise.report.rows import my_runs
    from ftsupervise.report.week import week_of

    where = dict(my_runs() if runs is None else runs)
    return where, week_of(where, now, os.environ)
