"""Accounts with prepared runs, their reports read once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.report.everything import ReportFacts, report_of
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_progress, write_progress
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

NOW = datetime.now(timezone.utc)


class PreparedAccount:
    """An account with the prepared runs."""

    def __init__(self, folder: Path, names: Iterable[str]) -> None:
        self.folder = folder
        self.env = outside_a_job(**prepare(folder, NOW, names))
        self._read: dict[str, ReportFacts] = {}
        self._names, self._at = tuple(names), NOW

    def report(self, name: str) -> ReportFacts:
        if name not in self._read:
            self._read[name] = report_of(RunDir(self.folder / name), NOW, self.env)
        return self._read[name]

    def type(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        self._live_on()
        return typed(*words, folder=cwd, env=self.env)

    def _live_on(self) -> None:
        """Let the runs that go on write again what they wrote last: a machine under load comes here minutes later."""
        later = datetime.now(timezone.utc) - self._at
        self._at += later
        for rundir in (RunDir(self.folder / name) for name in self._names):
            last = newest(rundir)
            page = read_progress(rundir, last.number) if last is not None and last.ended is None else None
            if last is not None and page is not None:
                active = None if page.active_at is None else page.active_at + later.total_seconds()
                write_progress(rundir.attempt(last.number), page._replace(at=page.at + later, active_at=active))
