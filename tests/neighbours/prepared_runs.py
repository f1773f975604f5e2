"""Run directories with a past, made from records by the package's own writers: what a report and ``status`` are tried on.

    python -m tests.neighbours.prepared_runs FOLDER [NAME]...   makes them, and says how to look at them

Six stories have one trouble each (``STORIES``); ``ninety_days`` has a thousand incidents; ``hostile`` has the worst text in
every field that others can write.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from random import Random
from typing import Any

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import Message
from ftsupervise.alerts.record import record
from ftsupervise.config.load import dump, loads
from ftsupervise.findings import Finding, Severity
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Cause, CauseKind, Claim, End, Failure, FailureKind, NodeRanks, Reached, Standstill
from ftsupervise.nodes.incidents import Incident, IncidentLog
from ftsupervise.rundir.ledger import START, write_end
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.steps import StepRecord, added, write_steps
from ftsupervise.rundir.switches import Brake, write_brake
from ftsupervise.rundir.watched import FiringAlert, WatchFound, write_found
from ftsupervise.truth import Health
from tests.neighbours.queue import Queue

MINUTE, HOUR, DAY = 60.0, 3600.0, 86400.0
SETTINGS = """
name: {name}
launch: {{command: python train.py, nodes: {nodes}, spare_nodes: 1, jobs: 10, time: "20:00:00", partition: batch}}
run_dir: {folder}
nodes: {{half_life: 2d}}
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
        self.seen: list[tuple[float, int, int, float]] = []  # clock, step, made, loss
        self.pages: list[Callable[[datetime], None]] = []  # written when the begin is known
        self.number, self.job, self.member = 0, "", 0
        self.began = 0.0
        self._first: int | None = None
        self._ready = self._saving = 0.0
        self._worked = 0.0
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
        self._first, self._saving = None, 0.0
        self.clock += seconds
        self._ready, self._worked = seconds, seconds
        self.pages.append(self._start(self.number, self.job, self.began))

    def train(self, seconds: float, *, speed: float = 1.0) -> None:
        rate = self.rate * speed
        end, partly = self.clock + seconds, 0.0
        while self.clock < end:
            length = min(self.sample, end - self.clock)
            partly += length * rate
            made, partly = int(partly), partly - int(partly)
            if made and self._first is None:
                self._first, self._ready = self.step + 1, max(self._ready, self.clock - self.began)
            self.step += made
            self.clock += length
            if self.step - self.saved >= self.save_every:
                self.saved, self._saving = self.step, self._saving + 20.0
                self.clock += 20.0
            if made:
                self._worked = self.clock - self.began
                loss = 1.9 + 9.0 / math.sqrt(1 + self.step / 300) + self.random.gauss(0, 0.03)
                self.seen.append((self.clock, self.step, made, loss))

    def end(self, cause: Cause, failure: Failure | None, *, after: float = 0.0, then: str = "", **more: Any) -> None:
        """The attempt ends ``after`` its last progress. ``more``: fields of ``End``."""
        self.clock += after
        reached = Reached(self._first, self.step if self._first is not None else None, self.saved or None)
        made = self._first is not None
        ended = End(
            cause,
            failure,
            more.pop("code", 1 if failure is not None else 0),
            self.clock - self.began,
            reached._replace(saving=self._saving if made else None),
            self._ready if made else None,
            self._worked,
            **more,
        )
        number, at = self.number, self.clock
        self.pages.append(
            lambda begin: write_end(
                Claim(number, self.rundir.attempt(number)), ended, then, begin + timedelta(seconds=at)
            )
        )

    def fault(self, cause: Cause, failure: Failure, *, after: float = 30.0, pause: float = 20.0, **more: Any) -> None:
        """A fault, and a restart in place ``pause`` later."""
        self.end(cause, failure, after=after, then="restarted in place", **more)
        self.clock += pause

    def time_limit(self, queue: float) -> None:
        """The job ends in order, and the next one waits."""
        self.saved = self.step
        self.end(Cause(CauseKind.TIME_LIMIT), None, after=20.0, then="left to the next member")
        self.job = ""
        self.queue(queue)

    def _start(self, number: int, job: str, at: float) -> Callable[[datetime], None]:
        nodes = compress_hostlist(tuple(f"node-{index:02}" for index in range(1, self.nodes + 1)))

        def write(begin: datetime) -> None:
            page = {"attempt": number, "job_id": job, "at": (begin + timedelta(seconds=at)).isoformat()}
            folder = self.rundir.attempt(number)
            folder.mkdir(parents=True)
            write_json(folder / START, {**page, "host": "node-01", "nodes": nodes, "pid": 1}, sync=False)

        return write

    # ------------------------------------------------------------------------------------------------ the directory

    def write(self, now: datetime, *, running: bool, current: float | None = None, settings: str = "") -> RunDir:
        """``running``: the last attempt does. ``current``: its rate now, as a share of the usual."""
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
        for page in self.pages:
            page(begin)
        record = StepRecord()
        for at, step, made, loss in self.seen:
            record = added(record, begin.timestamp() + at, step, made, loss)
        write_steps(self.rundir, record, None)
        if running:
            self._progress(begin, now, current)
        self._checkpoints(begin)
        return self.rundir

    def _progress(self, begin: datetime, now: datetime, current: float | None) -> None:
        base = begin.timestamp() + self.began
        page = ProgressPage(
            at=now,
            ranks=8 * self.nodes,
            step=self.step,
            ahead=self.step,
            phase="train",
            first=self._first,
            first_at=base + self._ready,
            active_at=base + self._worked,
            stepped=now.timestamp() - base - self._worked,
            saved=self.saved,
            saved_at=now - timedelta(seconds=(self.step - self.saved) / self.rate),
            saving=self._saving,
            rate=None if current is None else self.rate * current,
            usual=self.rate,
            loss=self.seen[-1][3] if self.seen else None,
            last_step=self.last_step,
        )
        write_progress(self.rundir.attempt(self.number), page)

    def _checkpoints(self, begin: datetime) -> None:
        steps = sorted({step // self.save_every * self.save_every for _, step, _, _ in self.seen} - {0})[-8:]
        when = {step // self.save_every * self.save_every: at for at, step, _, _ in reversed(self.seen)}
        for step in steps:
            folder = self.rundir.checkpoints / f"step-{step:08d}"
            folder.mkdir()
            (folder / "model.safetensors").write_bytes(b"\0" * 64)
            at = begin.timestamp() + when[step]
            os.utime(folder, (at, at))

    def alert(self, now: datetime, watchdog: str, subject: str, severity: Severity, words: str, since: float) -> None:
        """It fires, and two receivers were told."""
        run = loads(self.rundir.config.read_bytes(), self.rundir.config)
        journal = Journal(self.rundir.watch / "journal", spare=self.rundir.root / "spare")
        at = now - timedelta(seconds=since)
        found = Finding(self.name, watchdog, subject, Health.BAD, severity, words, at, since=at)
        record(journal, [found], run.alerts, at, run_name=self.name)

        def sent(message: Message) -> Message:
            return replace(message, sent=at + timedelta(seconds=4))

        journal.change(lambda state: replace(state, outbox=(), posts={one.id: sent(one) for one in state.outbox}))
        listed = FiringAlert("3f9a1c", severity.word, watchdog, words, at)
        write_found(self.rundir, WatchFound(now - timedelta(seconds=40), 1, (listed,)))

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


# ---------------------------------------------------------------------------------------------------- the six stories

Story = tuple[RunDir, dict[str, Any]]


def fine(folder: Path, now: datetime) -> Story:
    """Four days, two orderly changes of jobs, one node that failed: nothing to worry about."""
    run = PreparedRun(folder, "fine")
    run.queue(12 * MINUTE)
    for _ in range(2):
        run.start()
        run.train(19.6 * HOUR)
        run.time_limit(4 * MINUTE)
    run.start()
    run.train(11 * HOUR)
    where = (NodeRanks("node-17", "130"),)
    run.fault(Cause(CauseKind.NODE, where), Failure(FailureKind.NODE, "node failure", "NODE_FAIL: node-17"), after=70)
    run.start(80)
    run.train(7 * HOUR)
    run.time_limit(9 * MINUTE)
    run.start()
    run.train(9.5 * HOUR)
    run.write(now, running=True, current=0.99)
    run.blame(now, "node-17", "node", 18 * HOUR, evidence="Slurm lost it")
    return run.rundir, run.jobs(now, running=True)


def crash_loop(folder: Path, now: datetime) -> Story:
    """It trained for a day; since somebody changed the code it fails at its start, and the brake came on."""
    run = PreparedRun(folder, "crash-loop")
    run.queue(8 * MINUTE)
    run.start()
    run.train(14 * HOUR)
    run.end(Cause(CauseKind.KILL_SWITCH, text="raised by grace: new data loader"), None, then="stopped")
    run.queue(40 * MINUTE)
    run.job = ""
    missing = Failure(
        FailureKind.CODE, "exit 1", "ModuleNotFoundError: No module named 'webdataset'", "ModuleNotFoundError"
    )
    for turn in range(5):
        run.start(45)
        last = turn == 4
        run.end(Cause(CauseKind.EXIT, (NodeRanks("node-03", "17"),), code=1), missing, after=3, braked=last,
                then="stopped: the same failure 5 times" if last else "restarted in place")  # fmt: skip
        run.clock += 0 if last else 30 * 2**turn
    run.queue(6 * HOUR)
    run.write(now, running=False)
    brake = Brake(missing.words(), "the same failure 5 times without a step", 5, run.number, at=_hours_ago(now, 6))
    write_brake(run.rundir, brake)
    run.alert(now, "brake", "", Severity.CRITICAL, f"the brake is on: {brake.words()}", 6 * HOUR - 120)
    return run.rundir, run.jobs(now, running=False, reason="JobHeldUser")


def hang(folder: Path, now: datetime) -> Story:
    """One rank has stopped, and all others have waited for it for fifty minutes. Two hangs before were ended and restarted."""
    run = PreparedRun(folder, "hang")
    run.queue(5 * MINUTE)
    run.start()
    for waited in (31 * MINUTE, 33 * MINUTE):
        run.train(6 * HOUR)
        where = (NodeRanks("node-21", "163"),)
        cause = Cause(CauseKind.HANG, where, how=Standstill.IDLE, phase="train", step=run.step, waited=waited)
        run.fault(cause, Failure(FailureKind.HANG, "hang", "rank 163 waits in ncclAllReduce"), after=waited)
        run.start(4 * MINUTE)
    run.train(5 * HOUR)
    run.clock += 50 * MINUTE
    run.write(now, running=True, current=0.0)
    run.blame(now, "node-21", "hang", 12.5 * HOUR, 6 * HOUR, evidence="rank 163 stood still")
    run.alert(now, "hang", "", Severity.CRITICAL, f"no progress for 50m, at step {run.step}; rank 163 on node-21 stands still",
              45 * MINUTE)  # fmt: skip
    return run.rundir, run.jobs(now, running=True)


def slow_node(folder: Path, now: datetime) -> Story:
    """For nine hours it has trained at 62 % of its usual speed: one node's clock is throttled."""
    run = PreparedRun(folder, "slow-node")
    run.queue(10 * MINUTE)
    run.start()
    run.train(16 * HOUR)
    run.train(9 * HOUR, speed=0.62)
    run.write(now, running=True, current=0.61)
    run.alert(
        now, "throughput", "", Severity.WARNING, "221 steps an hour, usually 357; node-40 is the slowest", 8 * HOUR
    )
    return run.rundir, run.jobs(now, running=True)


def queue_bound(folder: Path, now: datetime) -> Story:
    """Short jobs, long waits."""
    run = PreparedRun(folder, "queue-bound", nodes=256)
    run.queue(9 * HOUR)
    for waited in (7.5, 11, 6):
        run.start(6 * MINUTE)
        run.train(3.7 * HOUR)
        run.time_limit(waited * HOUR)
    run.start(6 * MINUTE)
    run.train(3.7 * HOUR)
    run.time_limit(8 * HOUR)
    run.write(now, running=False)
    return run.rundir, run.jobs(now, running=False, reason="Priority")


def disk_full(folder: Path, now: datetime) -> Story:
    """The file system is full: three attempts died while they saved."""
    run = PreparedRun(folder, "disk-full")
    run.queue(6 * MINUTE)
    run.start()
    run.train(15 * HOUR)
    where = (NodeRanks("node-01", "0"),)
    full = Failure(
        FailureKind.DISK, "no space left on device", "OSError: [Errno 28] No space left on device: 'model.distcp'"
    )
    for turn in range(3):
        last = turn == 2
        run.end(Cause(CauseKind.EXIT, where, code=1), full, after=12, braked=last,
                then="stopped: the disk is full" if last else "restarted in place")  # fmt: skip
        if not last:
            run.clock += 60
            run.start(4 * MINUTE)
            run.train(38 * MINUTE)
    run.queue(3 * HOUR)
    run.write(now, running=False)
    write_brake(run.rundir, Brake(full.sign, "the disk is full", 3, run.number, run.step, at=_hours_ago(now, 3)))
    run.alert(now, "disk", "/scratch", Severity.CRITICAL, "/scratch is full: 0 bytes of 50 TB are free", 3.5 * HOUR)
    return run.rundir, run.jobs(now, running=False, reason="JobHeldUser")


STORIES: dict[str, Callable[[Path, datetime], Story]] = {
    "fine": fine,
    "crash-loop": crash_loop,
    "hang": hang,
    "slow-node": slow_node,
    "queue-bound": queue_bound,
    "disk-full": disk_full,
}


def _hours_ago(now: datetime, hours: float) -> str:
    return (now - timedelta(hours=hours)).isoformat()


# ------------------------------------------------------------------------------------------------------ others

_FAULTS: tuple[tuple[Cause, Failure], ...] = (
    (Cause(CauseKind.NODE), Failure(FailureKind.NODE, "node failure", "NODE_FAIL")),
    (Cause(CauseKind.SIGNAL, signal=9), Failure(FailureKind.SIGNAL, "killed by SIGKILL", "slurmstepd: task 12 killed")),
    (
        Cause(CauseKind.EXIT, code=1),
        Failure(FailureKind.CODE, "exit 1", "RuntimeError: NCCL error: unhandled system error"),
    ),
    (
        Cause(CauseKind.MEMORY),
        Failure(FailureKind.MEMORY, "out of memory", "torch.OutOfMemoryError: CUDA out of memory"),
    ),
    (Cause(CauseKind.HANG, phase="train", waited=1800), Failure(FailureKind.HANG, "hang", "collective timed out")),
)


def ninety_days(folder: Path, now: datetime, faults: int = 1000, name: str = "ninety-days") -> Story:
    """About ``faults`` interruptions in 90 days, of which some change the job."""
    run = PreparedRun(folder, name, last_step=None, sample=15 * MINUTE, nodes=512)
    each = 90 * DAY / (faults + 1)
    run.queue(HOUR)
    for turn in range(faults - 1):
        run.start(4 * MINUTE)
        run.train(max(MINUTE, each * run.random.uniform(0.7, 1.3) - 10 * MINUTE))
        if turn % 17 == 16:
            run.time_limit(run.random.uniform(1, 90) * MINUTE)
            continue
        cause, failure = _FAULTS[run.random.randrange(len(_FAULTS))]
        where = NodeRanks(f"node-{run.random.randrange(1, 512):03}", str(run.random.randrange(4096)))
        cause = cause._replace(at=(where,), step=run.step if cause.kind is CauseKind.HANG else None)
        run.fault(cause, failure, after=run.random.uniform(5, 600))
    run.start()
    run.train(each)
    run.write(now, running=True, current=1.0)
    return run.rundir, run.jobs(now, running=True)


NASTY = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "' -->]]>\u202e{{7*7}}`|*#</style></title><svg onload=alert(1)>"
)


def hostile(folder: Path, now: datetime, text: str = NASTY) -> Story:
    """``text`` in every field that others can write: names of nodes and jobs, lines of logs, alerts, checkpoints, settings."""
    own = "".join(char for char in text if char.isprintable())  # no setting holds another
    run = PreparedRun(folder, "hostile")
    run.start()
    run.train(3 * HOUR)
    where = (NodeRanks(text, text),)
    failure = Failure(FailureKind.CODE, text, text, text)
    run.fault(Cause(CauseKind.OTHER, where, text=text), failure, note=text, hardware=text)
    run.job = text
    run.start()
    run.train(HOUR)
    run.write(now, running=True, current=1.0, settings=f"checkpoints: {{pattern: {json.dumps(own)}}}\n")
    run.alert(now, "disk", text, Severity.CRITICAL, text, HOUR)
    (run.rundir.checkpoints / own.replace("/", "_")).mkdir()
    page = json.loads((run.rundir.attempt(1) / START).read_text())
    write_json(run.rundir.attempt(1) / START, {**page, "job_id": text, "host": text})
    run.job = "88_1"
    return run.rundir, run.jobs(now, running=True)


EVERY: dict[str, Callable[[Path, datetime], Story]] = {**STORIES, "ninety-days": ninety_days, "hostile": hostile}


def prepare(folder: Path, now: datetime, names: Iterable[str] = tuple(STORIES)) -> dict[str, str]:
    """Make these runs as those of one account, with their jobs in one queue. Returns the environment to ask about them."""
    jobs: dict[str, dict[str, Any]] = {}
    state = folder / "state" / "runs"
    state.mkdir(parents=True)
    for number, name in enumerate(names):
        rundir, own = EVERY[name](folder, now)
        base, launch = str(100 + number), rundir.launches / "0001/launch.json"
        write_json(launch, {**json.loads(launch.read_text()), "job_ids": [base]})
        jobs |= {f"{base}{id.removeprefix('88')}": job for id, job in own.items()}
        (state / name).symlink_to(rundir.root)
    return {
        **Queue(folder, ["node-01"], jobs).env,
        "FTSUPERVISE_STATE_DIR": str(folder / "state"),
        "SLURM_CONF": "/none",
    }


def main() -> None:
    folder = Path(sys.argv[1]).absolute()
    folder.mkdir(parents=True)
    env = prepare(folder, datetime.now(timezone.utc), sys.argv[2:] or STORIES)
    print(f"export PATH={env['PATH'].split(':')[0]}:$PATH FTSUPERVISE_STATE_DIR={folder}/state SLURM_CONF=/none")


if __name__ == "__main__":
    main()
