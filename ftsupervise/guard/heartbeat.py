"""This rank's beats: what it is doing, written at most every few seconds, and at once when it matters."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ftsupervise.guard import stacks
from ftsupervise.guard.ending import ExitReport
from ftsupervise.guard.log import Voice
from ftsupervise.guard.settings import RankContext
from ftsupervise.rundir import beats, heartbeat_page, imports
from ftsupervise.rundir.fence import is_sealed
from ftsupervise.truth import Beat

_NOW = float("-inf")


def whole(step: Any) -> int | None:
    """A step as loops have it (int, a number of NumPy's, a tensor of one element) as an int; None for what is no number."""
    try:
        return int(step)
    except Exception:  # NaN, None, or whatever a foreign type raises
        return None


class Heart:
    """Knows step, phase and a few facts, and writes them to RUN/beats. Without a run directory it only knows them."""

    def __init__(self, place: RankContext, every: float, voice: Voice, superseded: Callable[[], bool]) -> None:
        self._place = place
        self._superseded = superseded  # a newer attempt has begun: the beats are its ranks' from then on
        self._voice = voice
        self._every = beats.interval(place.world, every)
        self._due = self._phase_due = _NOW
        self.host = os.uname().nodename
        self.phase = "start"
        self._age = imports.age()  # seconds that this process took to come here
        self.step: int | None = None
        self.ending: ExitReport | None = None
        self.page = self._open_page()
        self.facts: dict[str, str] = {"every": f"{self._every:g}"}
        if place.attempt is not None:
            self.facts["attempt"] = str(place.attempt)

    def first(self, step: int) -> None:
        """The first step this process finished."""
        self.facts["first"] = str(whole(step))
        self.facts["first_at"] = f"{time.time():.3f}"
        if self.phase == "start":
            self.phase = "train"
            if self.page is not None:
                self.page.phase("train")
        self._due = _NOW  # that a later attempt trains again is news
        self._tell_imports()

    def _tell_imports(self) -> None:
        """For the standby that is to become the next attempt's ranks, when the ring has one."""
        path = os.environ.get(imports.ENV_IMPORTS, "")
        if not path or self._place.rank != 0:
            return
        try:
            imports.write_imports(path, self._place.attempt, self._age)
        except Exception as error:  # law 7; restarts stay cold
            self._voice.once(f"cannot write {path}: {error}; restarts are cold")

    def _open_page(self) -> heartbeat_page.HeartbeatPage | None:
        """This rank's page in the node's memory, when the job ring has named a place for it."""
        directory = os.environ.get(heartbeat_page.ENV_PAGES, "")
        if not directory or self._place.rundir is None:
            return None
        try:
            page = heartbeat_page.HeartbeatPage(directory, self._place.rank, self._place.attempt)
            self.ending = ExitReport(page)
            atexit.register(self.ending.at_exit)
            stacks.listen(directory, self._place.rank)
            return page
        except Exception as error:  # law 7; the beats in the run directory say the same, slowly
            self._voice.once(f"no page in {directory}: {error}; beats go through the run directory only")
            return None

    def beat(self, now: float) -> bool:
        """Write if it is due at monotonic ``now``; was it?"""
        if self.page is not None:
            self.page.beat(time.monotonic())
        if now < self._due:
            return False
        self._due = time.monotonic() + self._every
        if self._place.rundir is None or self._superseded():
            return True
        at = datetime.now(timezone.utc)
        try:
            mine = Beat(self._place.rank, whole(self.step), str(self.phase), at, os.getpid(), self.host, self.facts)
            beats.write_beat(self._place.rundir, mine, self._place.area)
        except OSError as error:
            if self._place.area is None or not is_sealed(self._place.area):
                self._voice.once(f"cannot write the beat: {error.strerror}; training goes on")
        except Exception as error:  # law 7, and what stands behind the beat in a look must still be looked at
            self._voice.once(f"cannot write the beat: {type(error).__name__}: {error}; training goes on")
        return True

    def beat_now(self) -> None:
        self._due = _NOW
        self.beat(0.0)

    def soon(self) -> None:
        """At the next look, whatever the interval."""
        self._due = _NOW

    def change_phase(self, phase: str) -> None:
        """A phase is worth a beat at once; phases that flicker are not worth one each."""
        self.phase = phase
        if self.page is not None:
            self.page.phase(phase)
        now = time.monotonic()
        if now >= self._phase_due:
            self._phase_due = now + min(1.0, self._every)
            self._due = _NOW
        self.beat(now)
