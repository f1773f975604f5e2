"""The end of the job we are in. A person may move it (``scontrol update TimeLimit``), so it is asked for again where it counts.

It stands alone because the supervisor, each attempt and a thread beside it share one.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from pathlib import Path

from ftsupervise import scheduler
from ftsupervise.host.in_time import Every, OneAtATime
from ftsupervise.rundir.paths import DEADLINE, ENV_ATTEMPT_DIR, ENV_DEADLINE, write_whole
from ftsupervise.scheduler import JobNow

_SPARE = 5.0  # seconds before Slurm's SIGKILL, for the end of the supervisor itself
_KEEP = 120.0  # seconds for the memory to go to the disk
_TO_KEEP = 2.0  # seconds before Slurm's SIGKILL at which that has to be over
USUAL_GRACE = scheduler.USUAL_KILL_WAIT - _SPARE
_SOON, _SELDOM = 5.0, 600.0  # seconds between two questions, at least and at most
_UNANSWERED = 9.0  # seconds: a question is given up before that
_MOVED = 2.0  # seconds: less than that is no other end


class JobEnd:
    """``at``: epoch seconds at which the job is killed; None: it has no limit, or that is not known. ``announced``: by
    a signal of which it is not yet known whether it was the end itself."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        self._env = dict(env or {})
        # a person's own word stays; that of an attempt around this one is ours
        self._given = bool(self._env.get(ENV_DEADLINE)) and ENV_ATTEMPT_DIR not in self._env
        self.announced: Announcement | None = None
        self._kill_wait: float | None = None  # not known yet, or not to be known
        self._asking = OneAtATime[tuple[float | None]]()
        self.at = scheduler.deadline_from_environment(self._env)
        if self.at is None:
            self.at = scheduler.ask_slurm_for_the_deadline(self._env)

    def ask(self) -> JobNow | None:
        """Ask Slurm, bounded, and take over what it says of the end; None without an answer."""
        now = scheduler.ask_slurm_about_the_job(self._env)
        if now is not None and not self._given and not now.ending:
            self.at = now.end
        return now

    def grace(self, spare: float = _SPARE, within: float = 0.0) -> float:
        """Return the seconds from Slurm's SIGTERM after which all has to be over, ``spare`` seconds before its SIGKILL, or a
        quarter of the time. ``within``: seconds for the answer, where nobody has asked before; then the usual time is taken."""
        if self._kill_wait is None:
            answer = self._asking(lambda: (scheduler.ask_slurm_for_kill_wait(self._env),), within)
            self._kill_wait = answer[0] if answer is not None else None
        whole = scheduler.USUAL_KILL_WAIT if self._kill_wait is None else self._kill_wait
        return whole - min(spare, whole / 4)

    def left(self, least: float = 0.0) -> float | None:
        """Return the seconds until it; None without one. It is asked for again before fewer than ``least`` are told."""
        if self.at is not None and self.at - time.time() < least:
            self.ask()
        return None if self.at is None else self.at - time.time()

    def keep_until(self, stopped_at: float | None) -> float:
        """Return until when a job that ends may write what only its memory holds. ``stopped_at``: when it was asked to stop.
        Both are monotonic."""
        now = time.monotonic()
        bounds = [now + _KEEP]
        if stopped_at is not None:
            bounds.append(stopped_at + self.grace(_TO_KEEP))
        if self.at is not None:
            bounds.append(now + self.at - time.time() + self.grace(_TO_KEEP))
        return min(bounds)

    def is_due(self, lead: float | None) -> bool:
        """Return whether a warning ``lead`` seconds before the end may come now: Slurm is up to a minute early or late."""
        if self.at is None or lead is None:
            return lead is None
        slack = min(60.0, max(2.0, lead / 2))
        return abs(self.at - time.time() - lead) <= slack


class Announcement:
    """A signal that has announced the end of the job, or was it: ``since`` (monotonic) nobody knows. Slurm is asked."""

    def __init__(self, job: JobEnd, lead: float | None, since: float) -> None:
        self.since = since
        self._job, self._due = job, job.is_due(lead)
        self._asking = OneAtATime[tuple[JobNow | None]]()

    def was_the_end(self, within: float = 0.0) -> bool | None:
        """Return whether the job is being ended; None while that is not known. Where Slurm does not answer, the signal was an
        announcement if it came when one was due."""
        answer = self._asking(lambda: (self._job.ask(),), within)
        if answer is None and time.monotonic() < self.since + _UNANSWERED:
            return None
        now = answer[0] if answer is not None else None
        return now.ending if now is not None else not self._due


class EndFollower:
    """Tells the running ranks of another end, by a file in the folder of their attempt, which their guards read.

    Slurm is asked each time that half of the time is over until a guard would stop for the end, ``before`` seconds ahead of it.
    """

    def __init__(self, end: JobEnd, folder: Path, before: float, say: Callable[[str], None]) -> None:
        self._end, self._file, self._before, self._say = end, folder / DEADLINE, before, say
        self._told = end.at or 0.0
        self._asking = Every(self._pause, self._follow, "job-end") if end.at is not None else None

    def close(self) -> None:
        if self._asking is not None:
            self._asking.close()

    def _follow(self) -> None:
        at = self._end.at if self._end.ask() is not None else None
        if at is None or abs(at - self._told) < _MOVED:
            return
        self._told = at
        try:
            write_whole(self._file, f"{at:.0f}\n")
        except OSError as error:
            self._say(f"the job ends at another time now, and the ranks cannot be told: {error.strerror}")
        else:
            self._say(
                f"the job ends {time.strftime('%Y-%m-%d %H:%M:%S', time.gmtime(at))} UTC now: its limit was changed"
            )

    def _pause(self, _took: float) -> float:
        left = (self._end.at or 0.0) - time.time() - self._before
        return min(max(_SOON, left / 2), _SELDOM)
