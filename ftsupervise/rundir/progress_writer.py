"""Writes what a supervisor knows of its ranks into the run directory: the progress of the attempt and the steps of the run.

A thread of its own writes, because a file system may hang: the training and the supervisor never wait for it.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable
from datetime import datetime
from functools import partial
from pathlib import Path
from statistics import median

from ftsupervise.host.in_time import Every
from ftsupervise.model import Claim
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import (
    ProgressPage,
    StepRecord,
    TimeMark,
    added,
    marked,
    rates,
    read_marks,
    read_progress,
    read_steps,
    write_marks,
    write_progress,
    write_steps,
)
from ftsupervise.rundir.step_rates import SLOW_FOR, paces, usual_rate

_EVERY = 5.0  # seconds between two pages
_FIRST = 1.0  # seconds to the first one
_COST = 20  # a page that takes T is followed by a pause of 20 T at least …
_LONGEST = 60.0  # … seconds at most: one hang of the file system is not followed by minutes of silence
_STEPS_EVERY = 60.0  # seconds between two writes of the steps of the run
_WINDOW = 60.0  # seconds over which the rate is taken
_LEAST = 10.0  # seconds: a shorter span says little
_RECENT = 200  # spans of which the usual rate is the median, until there are enough to tell better
_TRAIN = "train"  # the phase
_APART = 60.0  # seconds between two of the steps that are kept for the rate of the last hour


def pause_after(took: float) -> float:
    """Return the seconds from a page that took ``took`` seconds to the next one."""
    return max(_EVERY, min(_LONGEST, _COST * took))


class ProgressWriter:
    """Writes for one attempt, from its start to ``close``. ``area``: its staging area. ``seen``: the progress as it is now."""

    def __init__(self, rundir: RunDir, mine: Claim, area: Path | None, seen: Callable[[], ProgressPage | None]) -> None:
        self._rundir, self._mine, self._area, self._seen_now = rundir, mine, area, seen
        self._saved: tuple[int, datetime] | None = None
        self._rates: StepRates | None = None  # None: the steps of the run have not been read yet
        self._marks: tuple[TimeMark, ...] = ()
        self._write_steps_at = self._touch_at = 0.0
        self._told = False  # a step
        self._writing = Every(pause_after, self._go_on, "progress", first=_FIRST, last=partial(self._go_on, last=True))

    def close(self, seconds: float = 0.5) -> None:
        """Write a last time. A file system that hangs is not waited for longer than ``seconds``."""
        self._writing.close(seconds)

    def _go_on(self, *, last: bool = False) -> None:
        began = time.monotonic()
        page = self._seen_now()
        if page is not None:
            self._write(page, began, last=last)
        elif began >= self._touch_at:  # no rank reports: should we be lost, the log says until when we lived
            self._touch_at = began + _STEPS_EVERY
            self._touch()

    def _touch(self) -> None:
        try:
            os.utime(self._mine.folder / "run.log", follow_symlinks=False)
        except OSError:
            return

    def _write(self, page: ProgressPage, now: float, *, last: bool) -> None:
        if page.ahead is None and not self._told and self._another_tells():
            return
        self._told = self._told or page.ahead is not None
        if self._rates is None:
            self._rates, self._marks = StepRates(read_steps(self._rundir)), read_marks(self._rundir)
            self._write_steps_at = now + _STEPS_EVERY
        if page.saved is not None and (self._saved is None or self._saved[0] != page.saved):
            self._saved = (page.saved, page.at)
        page = page._replace(saved_at=self._saved[1] if self._saved is not None else None)
        page = self._rates.put_on(page, now)
        try:
            write_progress(self._mine.folder, page)
            if last or now >= self._write_steps_at:
                self._write_steps_at = now + _STEPS_EVERY
                self._rates.learn()
                self._marks = marked(self._marks, self._mark(page))
                write_steps(self._rundir, self._rates.record, self._area)
                write_marks(self._rundir, self._marks, self._area)
        except OSError:  # a full disk, or a newer attempt: the training goes on
            return

    def _another_tells(self) -> bool:
        """Return whether the page has a step that we have not told: the command starts replica groups, and sums them up."""
        page = read_progress(self._rundir, self._mine.number)
        return page is not None and page.ahead is not None

    def _mark(self, page: ProgressPage) -> TimeMark:
        return TimeMark(page.at.timestamp(), self._mine.number, page.ahead, page.saving, page.active_at)


class StepRates:
    """The steps of the run, and how fast they come: over the last minute, in the last hour of training, and as a rule."""

    def __init__(self, record: StepRecord) -> None:
        self.record = record
        self._seen: deque[tuple[float, int]] = deque()  # (monotonic time, step) of the last minute
        self._saving = 0.0  # seconds in saves, as the record has them
        self._training = HourOfTraining()
        self._usual = usual_rate(paces(record))

    def learn(self) -> None:
        """Tell anew from the record what is usual."""
        self._usual = usual_rate(paces(self.record))

    def put_on(self, page: ProgressPage, now: float) -> ProgressPage:
        """Return the page with them; its steps are added to the record."""
        return page._replace(
            rate=self._rate(page, now),
            usual=self._usually(),
            steady=self._training.rate(now, page.ahead, training=page.phase == _TRAIN),
        )

    def _usually(self) -> float | None:
        """Return the usual rate of the run; in its first minutes the median so far."""
        if self._usual is not None:
            return round(self._usual, 6)
        known = sorted(rates(self.record)[-_RECENT:])
        return round(median(known), 6) if known else None

    def _rate(self, page: ProgressPage, now: float) -> float | None:
        """Return steps a second over the last minute; add the steps to the record of the run."""
        if page.ahead is None:
            return None
        before = self._seen[-1][1] if self._seen else (page.first or page.ahead) - 1
        made = max(0, page.ahead - before)
        saving = max(0.0, page.saving - self._saving)
        self._saving = max(self._saving, page.saving)
        self.record = added(self.record, page.at.timestamp(), page.ahead, made, page.loss, saving)
        self._seen.append((now, page.ahead))
        while len(self._seen) > 2 and self._seen[1][0] < now - _WINDOW:
            self._seen.popleft()
        since, step = self._seen[0]
        return round((page.ahead - step) / (now - since), 6) if now >= since + _LEAST else None


class HourOfTraining:
    """The steps of the last hour in which the attempt trained: saves and evaluations are no part of it."""

    def __init__(self) -> None:
        self._trained = 0.0  # seconds
        self._last: float | None = None  # monotonic time of the last page, if the attempt trained then
        self._marks: deque[tuple[float, int]] = deque()  # (seconds trained, step)

    def rate(self, now: float, step: int | None, *, training: bool) -> float | None:
        """Steps a second over that hour; None until there was a whole one."""
        if step is None:
            return None
        if self._last is not None and training:
            self._trained += now - self._last
        self._last = now if training else None
        marks = self._marks
        if not marks or self._trained - marks[-1][0] >= _APART:
            marks.append((self._trained, step))
        while len(marks) > 1 and self._trained - marks[1][0] >= SLOW_FOR:
            marks.popleft()
        since, first = marks[0]
        seconds = self._trained - since
        return round((step - first) / seconds, 6) if seconds >= SLOW_FOR else None
