"""A run directory with a past, played forwards by a clock and written by the package's own writers (``prepared_runs.py``)."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import datetime, timedelta
from pathlib import Path
from random import Random
from typing import Any

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import Message
from ftsupervise.alerts.record import record
from ftsupervise.config.load import dump, loads
from ftsupervise.findings import Finding, Severity
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Cause, CauseKind, Claim, Failure, Reached
from ftsupervise.nodes.incidents import Incident, IncidentLog
from ftsupervise.rundir.ledger import over, write_end
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import (
    KEPT,
    ProgressPage,
    StepRecord,
    TimeMark,
    added,
    write_marks,
    write_progress,
    write_steps,
)
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import FiringAlert, WatchFound, write_found
from ftsupervise.truth import Health, LossTrouble

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
SETTINGS = """
name: {name}
launch: {{command: python train.py, nodes: {nodes}, spare_nodes: 1, jobs: 10, time: "20:00:00", partition: batch}}
run_dir: {folder}
watch: {{disk: [{{}}], hang: {{}}}}
alerts:
  receivers:
    - email: {{host: mail.example.org, from: cluster@example.org, to: [ada@example.org]}}
    - {{name: file, file: {{path: messages.txt}}}}
"""


class PreparedRun:
    """A run whose past is played forwards; ``write`` makes its directory. The clock ends where the past does."""

    def __init__(
        self,
        folder: Path,
        name: str,
        *,
        nodes: int = 64,
        rate: float = 0.1,
        save_every: int = 250,
        last_step: int | None = 100_000,
        sample: float = MINUTE,
    ) -> None:
        self.name, self.nodes, self.rate, self.save_every, self.last_step = name, nodes, rate, save_every, last_step
        self.rundir = RunDir(folder / name)
        self.sample = sample
        self.clock = 0.0  # seconds since the launch
        self.step = self.saved = 0
        self.seen: list[tuple[float, int, int, float | None, float]] = []  # clock, step, made, loss, seconds in saves
        self.pages: list[Callable[[datetime], None]] = []  # written when the begin is known
        self.number, self.job, self.member = 0, "", 0
        self.began = 0.0
        self._first: int | None = None
        self._saved_at = 0.0
        self._marks: list[TimeMark] = []  # their times are clocks
        self._ready = self._saving = 0.0
        self._worked = 0.0
        self._bad_since: int | None = None  # the first step with a loss that is no number
        self.random = Random(name)

    # ------------------------------------------------------------------------------------------------ the past

    def queue(self, seconds: float) -> None:
        self.clock += seconds

    def job_begins(self) -> None:
        self.member += 1
        self.job = f"88_{self.member}"

    def start(self, seconds: float = 5 * MINUTE) -> None:
        """An attempt begins, and reaches its first step ``seconds`` later."""
        if not self.job:
            self.job_begins()
        self.number += 1
        self.began, self.step = self.clock, self.saved
        self._first, self._saving, self._bad_since = None, 0.0, None
        self.clock += seconds
        self._ready, self._worked = seconds, seconds
        self.pages.append(self._start(self.number, self.job, self.began))

    def train(self, seconds: float, *, speed: float = 1.0, number: bool = True) -> None:
        """``number``: the loss is one."""
        rate = self.rate * speed
        end, partly = self.clock + seconds, 0.0
        while self.clock < end:
            length = min(self.sample, end - self.clock)
            partly += length * rate
            made, partly = int(partly), partly - int(partly)
            if made and self._first is None:
                self._first, self._ready = self.step + 1, max(self._ready, self.clock - self.began)
            if made and not number and self._bad_since is None:
                self._bad_since = self.step + 1
            self.step += made
            self.clock += length
            saving = 20.0 if self.step - self.saved >= self.save_every else 0.0
            if saving:
                self.saved, self._saving = self.step, self._saving + saving
                self.clock += saving
                self._saved_at = self.clock
            if made:
                self._worked = self.clock - self.began
                loss = 1.9 + 9.0 / math.sqrt(1 + self.step / 300) + self.random.gauss(0, 0.03)
                self.seen.append((self.clock, self.step, made, loss if number else None, saving))
            self._mark()

    def stand(self, seconds: float) -> None:
        """It makes no step, and its job runs on."""
        end = self.clock + seconds
        while self.clock < end:
            self.clock = min(end, self.clock + MINUTE)
            if self.seen:
                self.seen.append((self.clock, self.step, 0, self.seen[-1][3], 0.0))
            self._mark()

    def _mark(self) -> None:
        step = self.step if self._first is not None else None
        self._marks.append(TimeMark(self.clock, self.number, step, self._saving, self.began + self._worked))

    def end(
        self,
        cause: Cause,
        failure: Failure | None,
        *,
        after: float = 0.0,
        then: str = "",
        braked: bool = False,
        **more: Any,
    ) -> None:
        """The attempt ends ``after`` its last progress. ``more``: fields of ``Attempt``."""
        self.clock += after
        reached = Reached(self._first, self.step if self._first is not None else None, self.saved or None)
        made = self._first is not None
        reached = reached._replace(saving=self._saving if made else None, trouble=self.trouble())
        more = {"exit_code": 1 if failure is not None else 0, "then": then, "braked": braked, **more}
        more.update(failure=failure, ready=self._ready if made else None, worked=self._worked)
        mine, at, lasted = Claim(self.number, self.rundir.attempt(self.number)), self.clock, self.clock - self.began

        def write(begin: datetime) -> None:
            one = over(mine.number, cause, begin + timedelta(seconds=at), lasted, reached)
            write_end(mine.folder, one._replace(**more))

        self.pages.append(write)
        if made:  # the last page of its supervisor stays
            step, saved, active = self.step, self.saved or None, self.began + self._worked
            page = ProgressPage(
                ranks=8 * self.nodes, step=step, ahead=step, phase="train", saved=saved, last_step=self.last_step
            )
            self.pages.append(
                lambda begin: write_progress(
                    mine.folder,
                    page._replace(at=begin + timedelta(seconds=at), active_at=begin.timestamp() + active),
                )
            )

    def fault(self, cause: Cause, failure: Failure, *, after: float = 30.0, pause: float = 20.0, **more: Any) -> None:
        """A fault, and a restart in place ``pause`` later."""
        self.end(cause, failure, after=after, then="restarted in place", **more)
        self.clock += pause

    def time_limit(self, queue: float) -> None:
        """The job ends in order, and the next one waits."""
        self.saved, self._saved_at = self.step, self.clock
        self.end(Cause(CauseKind.TIME_LIMIT), None, after=20.0, then="its supervisor left")
        self.job = ""
        self.queue(queue)

    def trouble(self) -> LossTrouble | None:
        """What its ranks say of the loss of this attempt."""
        if self._bad_since is None:
            return None
        return LossTrouble(
            since=self._bad_since, step=self.step, words=f"nan at step {self.step}, since step {self._bad_since}"
        )

    def _start(self, number: int, job: str, at: float) -> Callable[[datetime], None]:
        nodes = compress_hostlist(tuple(f"node-{index:02}" for index in range(1, self.nodes + 1)))

        def write(begin: datetime) -> None:
            page = {"attempt": number, "job_id": job, "at": (begin + timedelta(seconds=at)).isoformat()}
            folder = self.rundir.attempt(number)
            folder.mkdir(parents=True)
            write_json(folder / "start.json", {**page, "host": "node-01", "nodes": nodes, "pid": 1}, sync=False)

        return write

    # ------------------------------------------------------------------------------------------------ the directory

    def write(
        self, now: datetime, *, running: bool, current: float | None = None, settings: str = "", behind: str = ""
    ) -> RunDir:
        """``running``: the last attempt does. ``current``: its rate now, as a share of the usual. ``behind``: a slow rank."""
        begin = now - timedelta(seconds=self.clock)
        for part in (
            "switches",
            "watch",
            "beats",
            "logs",
            "launches/0001",
            "state",
            "attempts",
            "nodes",
            "checkpoints",
        ):
            (self.rundir.root / part).mkdir(parents=True)
        text = SETTINGS.format(name=json.dumps(self.name), nodes=self.nodes, folder=json.dumps(str(self.rundir.root)))
        self.rundir.config.write_text(dump(loads(text + settings, self.rundir.config)))
        launch = {"state": "submitted", "token": f"t-{self.name}", "at": begin.isoformat(), "scheduler": "slurm"}
        write_json(self.rundir.launches / "0001/launch.json", {**launch, "job_ids": ["88"], "by": "ada@login-1"})
        self.write_attempts(begin)
        record = StepRecord()
        for at, step, made, loss, saving in self.seen:
            record = added(record, begin.timestamp() + at, step, made, loss, saving)
        write_steps(self.rundir, record, None)
        zero = begin.timestamp()
        last = [one for one in self._marks if one.at > self.clock - KEPT]
        write_marks(
            self.rundir, [one._replace(at=zero + one.at, active=zero + (one.active or 0.0)) for one in last], None
        )
        if running:
            self._progress(begin, now, current, behind)
        self._checkpoints(begin)
        return self.rundir

    def write_attempts(self, begin: datetime, now: datetime | None = None) -> None:
        """Only the ledger, of a run that was launched at ``begin``: that of a replica group. ``now``: its last attempt runs."""
        for page in self.pages:
            page(begin)
        if now is not None:
            self._progress(begin, now, 1.0, "")

    def _progress(self, begin: datetime, now: datetime, current: float | None, behind: str) -> None:
        base = begin.timestamp() + self.began
        page = ProgressPage(
            at=now,
            ranks=8 * self.nodes,
            step=self.step,
            ahead=self.step,
            slowest=behind,
            phase="train",
            first=self._first,
            first_at=base + self._ready,
            active_at=base + self._worked,
            stepped=now.timestamp() - base - self._worked,
            saved=self.saved,
            saved_at=begin + timedelta(seconds=self._saved_at),
            saving=self._saving,
            rate=None if current is None else self.rate * current,
            usual=self.rate,
            loss=self.seen[-1][3] if self.seen else None,
            last_step=self.last_step,
        )
        write_progress(self.rundir.attempt(self.number), page)

    def _checkpoints(self, begin: datetime) -> None:
        steps = sorted({step // self.save_every * self.save_every for _, step, *_ in self.seen} - {0})[-8:]
        when = {step // self.save_every * self.save_every: at for at, step, *_ in reversed(self.seen)}
        for step in steps:
            folder = self.rundir.checkpoints / f"step-{step:08d}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"\0" * 64)
            at = begin.timestamp() + when[step]
            os.utime(folder, (at, at))

    def alert(
        self, now: datetime, watchdog: str, subject: str, severity: Severity, words: str, since: float, do: str = ""
    ) -> None:
        """It fires, and two receivers were told. ``do``: what they were advised to do."""
        run = loads(self.rundir.config.read_bytes(), self.rundir.config)
        journal = Journal(self.rundir.watch / "journal", spare=self.rundir.root / "spare")
        at = now - timedelta(seconds=since)
        found = Finding(self.name, watchdog, subject, Health.BAD, severity, words, at, since=at, do=do)
        record(journal, [found], run.alerts, at, run_name=self.name)

        def sent(message: Message) -> Message:
            return replace(message, sent=at + timedelta(seconds=4))

        journal.change(lambda state: replace(state, outbox=(), posts={one.id: sent(one) for one in state.outbox}))
        listed = FiringAlert("3f9a1c", severity.word, watchdog, words, at)
        write_found(self.rundir, WatchFound(now - timedelta(seconds=40), 1, (listed,), judges=("hang",)))

    def blame(self, now: datetime, node: str, kind: str, *ago: float, evidence: str = "") -> None:
        log = IncidentLog("node-01-1")
        log.add(
            Incident(node, kind, now - timedelta(seconds=one), self.name, "88", 1, "12", evidence=evidence)
            for one in ago
        )
        log.write([self.rundir.nodes])

    def jobs(
        self, now: datetime, *, running: bool, waiting: bool = True, reason: str = "JobArrayTaskLimit"
    ) -> dict[str, Any]:
        """For ``neighbours/queue.py``."""
        epoch, mark = now.timestamp(), f"ftsupervise:{self.name}:t-{self.name}"
        name = {"excluded": [], "comment": mark, "reason": reason}
        found: dict[str, Any] = {}
        if running:
            facts = {
                "T": "RUNNING",
                "N": f"node-[01-{self.nodes:02}]",
                "e": str(int(epoch + 10 * HOUR)),
                "j": self.name,
            }
            found[self.job] = {**name, "reason": "None", "facts": facts}
        if waiting:
            found[f"88_[{self.member + 1}-10%1]"] = {**name, "facts": {"j": self.name}}
        return found
