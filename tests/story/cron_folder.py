"""An installed cron folder for the tests, ticked by hand with a clock of the test's own: no Slurm, real files and processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.config.alerting import Alerts
from ftsupervise.config.schema import Cron
from ftsupervise.crontab import history
from ftsupervise.crontab.history import EntryRun
from ftsupervise.crontab.install import decide, install
from ftsupervise.crontab.installation import CronDir, Installed, read_installed, write_installed
from ftsupervise.crontab.tick import CronTicked, tick
from ftsupervise.model import Job, JobState, Submitted

NINE = datetime(2026, 11, 21, 9, 0, tzinfo=timezone.utc)


@dataclass
class FakeQueue:
    """A neighbour with moods: takes jobs, forgets nothing, may be down or refuse."""

    kind: str = "slurm"
    jobs: dict[str, Job] = field(default_factory=dict)
    scripts: dict[str, str] = field(default_factory=dict)
    down: str = ""
    refuses: str = ""
    breaks: str = ""  # raises what nobody expects
    asked: int = 0
    cancelled: list[str] = field(default_factory=list)
    drained_nodes: tuple[str, ...] = ()
    warnings: set[str] = field(default_factory=set)

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        from ftsupervise.errors import SchedulerUnavailable

        self.asked += 1
        if self.down:
            raise SchedulerUnavailable(self.down)
        return tuple(job for job in self.jobs.values() if not job.state.ended)

    def submit(
        self,
        script: str,
        *,
        script_path: Path,
        token: str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> Submitted:
        from ftsupervise.errors import SchedulerUnavailable, SubmitRejected

        if self.down:
            raise SchedulerUnavailable(self.down)
        if self.breaks:
            raise RuntimeError(self.breaks)
        if self.refuses:
            raise SubmitRejected(self.refuses)
        number = str(len(self.scripts) + 1)
        self.scripts[number] = script
        self.jobs[number] = Job(number, number, "x", "me", JobState.PENDING, comment=token, raw_id=number)
        return Submitted(number)

    def find(self, token: str) -> tuple[Job, ...]:
        return tuple(job for job in self.queue() if token in job.comment)

    def hold(self, job_id: str) -> None:
        self.jobs[job_id] = self.jobs[job_id]._replace(reason="JobHeldUser")

    def release(self, job_id: str) -> None:
        self.jobs[job_id] = self.jobs[job_id]._replace(reason="")

    def put_back(self, job_id: str) -> bool:
        return False

    def remark(self, job_id: str, comment: str) -> None:
        self.jobs[job_id] = self.jobs[job_id]._replace(comment=comment)

    def describe(self, job_id: str) -> Job | None:
        return self.jobs.get(job_id)

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        self.cancelled.append(job_id)
        self.end(job_id, JobState.CANCELLED)

    def drained(self, reason: str) -> tuple[str, ...]:
        from ftsupervise.errors import SchedulerUnavailable

        if self.down:
            raise SchedulerUnavailable(self.down)
        return self.drained_nodes if reason == "Duplicate jobid" else ()

    def end(self, job_id: str, state: JobState, reason: str = "") -> None:
        self.jobs[job_id] = self.jobs[job_id]._replace(state=state, reason=reason)


@dataclass
class Folder:
    """One installed folder."""

    cron: CronDir
    queue: FakeQueue = field(default_factory=FakeQueue)
    ticks: int = 0

    @property
    def installed(self) -> Installed:
        found = read_installed(self.cron)
        assert found is not None
        return found

    def change(self, **what: object) -> None:
        write_installed(self.cron, replace(self.installed, **what))  # type: ignore[arg-type]

    def drop(self, folder: str, name: str, body: str, *, mode: int = 0o755) -> Path:
        path = self.cron.folder(folder) / name
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(mode)
        return path

    def tick(self, now: datetime, *, slot: datetime | None = None, job_id: str = "") -> CronTicked:
        self.ticks += 1
        done = tick(self.cron, slot=slot, now=now, job_id=job_id, slurm=lambda _: self.queue, jobs=lambda _: self.queue)
        assert done is not None
        return done

    def runs(self, key: str) -> tuple[EntryRun, ...]:
        return history.runs(self.cron, key)

    def output(self, key: str) -> str:
        return self.runs(key)[0].output.read_text()


def make(root: Path, *, now: datetime = NINE, alerts: Alerts | None = None, **settings: object) -> Folder:
    """Installed a moment before ``now``; the loop back end unless ``backend`` says otherwise, times in UTC."""
    wanted = {"directory": root / "cron", "backend": "loop", "timezone": "UTC", **settings}
    plan = decide(
        Cron(**wanted),  # type: ignore[arg-type]
        alerts or Alerts(),
        alerts_from="the test",
        now=now - timedelta(seconds=1),
        env=os.environ,
        python=sys.executable,
    )
    folder = Folder(plan.cron)
    install(plan, now - timedelta(seconds=1), folder.queue if plan.installed.backend == "slurm" else None)
    return folder
