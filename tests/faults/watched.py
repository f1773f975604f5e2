"""A run directory and one look of one watchdog at it, with a clock that may be set."""

from __future__ import annotations

import json
import os
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from ftsupervise.config.load import loads
from ftsupervise.findings import Finding
from ftsupervise.model import Job, JobState
from ftsupervise.probe import Probe
from ftsupervise.rundir.paths import RunDir
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs import load_watchdog


class Watched:
    """``look("disk")`` -> subject -> finding. ``ahead``: seconds the looker's clock is put forward."""

    def __init__(self, folder: Path, watch: str = "{}", *, probe: Probe) -> None:
        root = folder / "run"
        self.run = loads(
            f"name: r\nlaunch: {{command: a}}\nrun_dir: {root}\nwatch: {watch}\n", folder / "ftsupervise.yaml"
        )
        self.rundir, self.probe = RunDir(root), probe
        for path in (
            self.rundir.beats,
            self.rundir.logs,
            self.rundir.switches,
            self.rundir.watch,
            self.rundir.checkpoints,
        ):
            path.mkdir(parents=True, exist_ok=True)
        self.memory: dict[str, dict[str, Any]] = {}
        self.jobs: tuple[Job, ...] | None = (self.job(JobState.RUNNING),)
        self.ahead = 0.0

    @staticmethod
    def job(state: JobState, *, hours_ago: float = 100.0) -> Job:
        start = datetime.fromtimestamp(time.time() - hours_ago * 3600, timezone.utc)
        return Job(id="7_1", base_id="7", name="r", user="me", state=state, start_time=start)

    def look(self, name: str) -> dict[str, Finding]:
        memory = json.loads(json.dumps(self.memory.get(name, {})))
        look = Look(
            run=self.run,
            rundir=self.rundir,
            now=datetime.fromtimestamp(time.time() + self.ahead, timezone.utc),
            jobs=self.jobs,
            memory=memory,
            probe=self.probe,
            watchdog=name,
        )
        found = list(load_watchdog(name)(look, getattr(self.run.watch, name)))
        self.memory[name] = memory
        return {finding.subject: finding for finding in found}

    def beat(self, step: int, *, phase: str = "train", age: float = 0.0, rank: int = 0, **facts: str) -> None:
        """A beat as the guard writes it, ``age`` seconds old."""
        record = {"rank": rank, "step": step, "phase": phase, "at": "2026-01-01T00:00:00+00:00", "pid": os.getpid(),
                  "host": facts.pop("host", "n1"), "facts": facts}  # fmt: skip
        path = self.rundir.beats / f"rank-{rank}"
        path.write_text(json.dumps(record) + "\n")
        at = time.time() - age
        os.utime(path, (at, at))
