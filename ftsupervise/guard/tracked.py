"""Links a run to its page in an experiment tracker: the page's address is recorded, and a restart is marked there."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import datetime
from functools import partial
from typing import NamedTuple

from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.guard.side_thread import SideThread

_NAMES = ("WANDB_", "MLFLOW_", "FTSUPERVISE_TRACKER_URL")  # without them a guard that starts imports nothing for this


class Restarted(NamedTuple):
    """This attempt, and the one that it follows."""

    attempt: int
    before: int
    why: str  # the earlier one ended; "" where that is not known
    step: int | None  # the last one that it made
    ended: datetime | None

    def words(self) -> str:
        """Return "attempt 3 goes on where attempt 2 ended at step 118: exit 1"."""
        step = f" at step {self.step}" if self.step is not None else ""
        return f"attempt {self.attempt} goes on where attempt {self.before} ended{step}{f': {self.why}' if self.why else ''}"


def note_page(place: RankContext, voice: Voice, url: str | None = None) -> None:
    """Record the page of this run: ``url``, or the address that the environment names. Rank 0 alone does. Never raises."""
    if place.rank != 0 or place.attempt_dir is None:
        return
    if url is None and not any(name.startswith(_NAMES) for name in os.environ):
        return
    from ftsupervise.rundir.tracker import TrackerPage, from_environment, safe_url, write_tracker

    if url is None:
        page = from_environment(os.environ)
    else:
        shown = safe_url(str(url))
        page = TrackerPage(shown, "W&B" if "wandb" in shown else "tracker") if shown else None
        if page is None:
            voice.later("report(url=…): that is no plain http or https address, so it is not shown")
    if page is None:
        return
    try:
        write_tracker(place.attempt_dir, page)
    except OSError as error:
        voice.later(f"cannot record the page of the tracker: {error.strerror}")


def tell_restart(place: RankContext, voice: Voice, callback: Callable[[Restarted], object], side: SideThread) -> None:
    """Call ``callback`` on rank 0 of an attempt that is not the first.

    An error in it is printed, and costs the loop nothing.
    """
    if place.rank != 0 or place.rundir is None or place.attempt is None or place.attempt < 2:
        return
    try:
        known = side.answer("ledger", partial(_restart, place.attempt, place))
        callback(known or Restarted(place.attempt, place.attempt - 1, "", None, None))
    except Exception as error:  # the tracker's trouble is not the training's
        voice.say(f"on_restart: {type(error).__name__}: {error}")


def _restart(attempt: int, place: RankContext) -> Restarted:
    from ftsupervise.rundir.ledger import backwards

    try:
        before = next(backwards(place.rundir, attempt), None) if place.rundir is not None else None
    except OSError:
        before = None
    if before is None:
        return Restarted(attempt, attempt - 1, "", None, None)
    return Restarted(attempt, before.number, before.why(), before.last_step, before.ended)
