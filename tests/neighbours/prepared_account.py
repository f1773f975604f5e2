"""Accounts with prepared runs, their reports read once."""

from __future__ import annotations

import subprocess
from collections.abc import Iterable
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.report.everything import ReportFacts, report_of
from ftsupervise.rundir.paths import RunDir
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

    def report(self, name: str) -> ReportFacts:
        if name not in self._read:
            self._read[name] = report_of(RunDir(self.folder / name), NOW, self.env)
        return self._read[name]

    def type(self, *words: str, cwd: Path) -> subprocess.CompletedProcess[str]:
        return typed(*words, folder=cwd, env=self.env)
