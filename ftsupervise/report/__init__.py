"""The status of runs by one look at their directories and one ``squeue``; light enough for every prompt and loop.

    reading.py   what the directory of a run says          account.py   where its time went
    queues.py    the jobs of all runs, asked at once       row.py       a run as a row; rows.py: all runs
    verdict.py   one word, and why                         output.py    the files that its jobs write to

A part that could not be read is shown as unknown, with the reason; never as fine nor as gone.
"""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.report.queues import ask_queues
from ftsupervise.report.reading import RunReading, read_own, run_name
from ftsupervise.report.verdict import verdict_of
from ftsupervise.report.who_ended import with_ends

if TYPE_CHECKING:
    from ftsupervise.model import Attempt, Job
    from ftsupervise.rundir.paths import RunDir
    from ftsupervise.truth import Beat

__all__ = ["Status", "gather", "run_name"]


class Status(NamedTuple):
    """The result of one look. ``verdict``: see ``verdict_of``."""

    run: RunReading
    verdict: str
    why: str
    jobs: tuple[Job, ...] | None
    blind: str
    warnings: tuple[str, ...] = ()  # warnings of Slurm's commands beside their answers
    telling: tuple[str, ...] = ()  # receivers that are in trouble, a sentence each

    @property
    def name(self) -> str:
        return self.run.name

    @property
    def rundir(self) -> RunDir:
        return self.run.rundir

    @property
    def at(self) -> datetime:
        return self.run.at

    @property
    def attempts(self) -> tuple[Attempt, ...]:
        return self.run.attempts

    @property
    def beats(self) -> tuple[Beat, ...]:
        return self.run.beats

    @property
    def step(self) -> int | None:
        return step_of(self.run)


def step_of(run: RunReading) -> int | None:
    """The step that all ranks have reached; after the attempt's end the ledger's, which is newer."""
    beats = min((beat.step for beat in run.beats if beat.step is not None), default=None)
    told = run.last.last_step if run.last is not None and run.last.ended is not None else None
    page = run.page.step if run.page is not None else None
    return max((step for step in (beats, told, page) if step is not None), default=None)


def gather(rundir: RunDir, now: datetime, env: Mapping[str, str]) -> Status:
    """Raises NotFound, NotPermitted when the run directory cannot be read."""
    run = with_ends([read_own(rundir, now)], env)[0]
    queues = ask_queues([run], env)
    jobs, blind = queues.of[0]
    verdict, why = verdict_of(run, jobs, blind)
    return Status(run, verdict, why, jobs, blind, queues.warnings)
