"""Ten runs at three in the morning, each in one state, that a person is to understand by ``status`` alone.

    python -m tests.neighbours.prepared_trouble FOLDER   makes them and prints the status of each

The first one lies on a disk that is full in the tests of faults alone: they mount a small one.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ftsupervise.findings import Severity
from ftsupervise.model import Cause, CauseKind, Failure, FailureKind, NodeRanks
from ftsupervise.rundir.heartbeat_page import write_beat, write_watcher
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_progress, write_progress
from ftsupervise.rundir.records import read_json, write_json
from ftsupervise.rundir.watched import WatchFound, write_found
from ftsupervise.truth import Beat
from tests.neighbours.prepared_run import HOUR, MINUTE, PreparedRun
from tests.neighbours.prepared_runs import Story, crash_loop, hang
from tests.neighbours.queue import Queue
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed


@dataclass
class Trouble:
    """One run, and how a person asks about it."""

    rundir: RunDir
    env: Mapping[str, str]

    def status(self, *more: str) -> str:
        said: subprocess.CompletedProcess[str] = typed(
            "status", str(self.rundir.root), *more, folder=self.rundir.root.parent, env=dict(self.env), code=0
        )
        return said.stdout


def trouble(name: str, account: Path, place: Path | None = None) -> Trouble:
    """One of them in a new account; its directory is in ``place``."""
    place = place or account / "runs"
    place.mkdir(exist_ok=True)
    rundir, jobs = MORE[name](place, datetime.now(timezone.utc))
    runs = account / "state" / "runs"
    runs.mkdir(parents=True)
    (runs / rundir.root.name).symlink_to(rundir.root)
    more = {"FTSUPERVISE_STATE_DIR": str(account / "state"), "SLURM_CONF": "/none"}
    queue = Queue(account, ["node-01"], jobs, away=name == "controller paused")
    return Trouble(rundir, outside_a_job(**{**queue.env, **more}))


def trains(folder: Path, now: datetime, name: str, *, watched: float = 20.0, nodes: int = 4) -> PreparedRun:
    """A run that trains as usual, with a watch that looked ``watched`` seconds ago."""
    run = PreparedRun(folder, name, nodes=nodes, rate=0.5, save_every=500, last_step=20_000)
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(9 * HOUR)
    run.write(now, running=True, current=1.0)
    watch_looked(run.rundir, now - timedelta(seconds=watched))
    logs(run.rundir, run.number, "step 16040 loss 2.41", "step 16050 loss 2.40")
    return run


def watch_looked(rundir: RunDir, at: datetime) -> None:
    write_found(rundir, WatchFound(at, 0, (), judges=("hang", "throughput")))
    write_watcher(rundir, at, timedelta(seconds=60))


def logs(rundir: RunDir, number: int, *lines: str) -> Path:
    """The attempt writes to a file, which ends with these lines."""
    path = rundir.logs / f"{rundir.root.name}-88_1.out"
    path.write_text("".join(f"{line}\n" for line in lines))
    page = read_json(rundir.attempt(number) / "start.json") or {}
    write_json(rundir.attempt(number) / "start.json", {**page, "outputs": [{"path": str(path), "begin": 0}]})
    return path


# ------------------------------------------------------------------------------------------------------------- the ten


def stands_on_a_full_disk(folder: Path, now: datetime) -> Story:
    """Its last page is 3m 24s old, and the watch has not looked for six minutes. The caller fills the disk (``fill``)."""
    run = trains(folder, now, "full", watched=360)
    page = read_progress(run.rundir, 1)
    assert page is not None
    write_progress(run.rundir.attempt(1), page._replace(at=now - timedelta(seconds=204)))
    since = now - timedelta(seconds=204)
    words = f"ftsupervise: cannot write {run.rundir.root}: no space left on device; waiting up to 600 s for space"
    logs(run.rundir, 1, "step 16050 loss 2.40", f"{since:%Y-%m-%dT%H:%M:%SZ} {words}")
    return run.rundir, run.jobs(now, running=True)


def fill(place: Path) -> None:
    with suppress(OSError), (place / "others").open("wb", buffering=0) as file:
        while True:
            file.write(b"x" * 4096)


def was_cancelled(folder: Path, now: datetime) -> Story:
    run = PreparedRun(folder, "cancelled", nodes=4, rate=0.5, save_every=500, last_step=20_000)
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(5 * HOUR)
    run.end(Cause(CauseKind.CANCELLED, signal=15), None, after=20, exit_code=143)
    run.queue(25 * MINUTE)
    run.write(now, running=False)
    watch_looked(run.rundir, now - timedelta(seconds=20))
    logs(run.rundir, 1, "step 9000 loss 2.51")
    return run.rundir, {}


def watch_is_dead(folder: Path, now: datetime) -> Story:
    run = trains(folder, now, "unwatched", watched=47 * MINUTE)
    return run.rundir, run.jobs(now, running=True)


def controller_is_paused(folder: Path, now: datetime) -> Story:
    run = trains(folder, now, "paused")
    return run.rundir, run.jobs(now, running=True)


def loss_is_no_number(folder: Path, now: datetime) -> Story:
    run = PreparedRun(folder, "nan", nodes=1, rate=0.5, save_every=500, last_step=20_000)
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(5 * HOUR)
    run.train(30 * MINUTE, number=False)
    run.write(now, running=True, current=1.0)
    watch_looked(run.rundir, now - timedelta(seconds=20))
    for rank in range(8):
        facts = {"attempt": "1", "loss": "nan"}
        trouble = run.trouble()
        assert trouble is not None
        write_beat(run.rundir, Beat(rank, run.step, "train", now, 1, "node-01", facts, trouble if rank == 0 else None))
    logs(run.rundir, 1, f"step {run.step} loss nan")
    return run.rundir, run.jobs(now, running=True)


def waits_for_ever(folder: Path, now: datetime) -> Story:
    run = PreparedRun(folder, "waits", nodes=4)
    run.queue(6 * HOUR)
    run.write(now, running=False)
    watch_looked(run.rundir, now - timedelta(seconds=20))
    jobs: dict[str, Any] = run.jobs(now, running=False, reason="QOSMaxWallDurationPerJobLimit")
    return run.rundir, jobs


def has_finished(folder: Path, now: datetime) -> Story:
    run = PreparedRun(folder, "finished", nodes=4, rate=0.5, save_every=500, last_step=9000)
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(5 * HOUR)
    run.saved = run.step
    run.end(Cause(CauseKind.FINISHED), None)
    run.queue(2 * HOUR)
    run.write(now, running=False)
    run.rundir.finished.write_text("9000\n")
    return run.rundir, {}


def is_gone(folder: Path, now: datetime) -> Story:
    run = PreparedRun(folder, "gone", nodes=4, rate=0.5, save_every=500, last_step=20_000)
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(5 * HOUR)
    where = (NodeRanks("node-03", "17"),)
    bug = Failure(FailureKind.CODE, "exit 1", "KeyError: 'lr_schedule'", "KeyError")
    run.end(Cause(CauseKind.EXIT, where, code=1), bug, after=4, then="its supervisor left")
    run.queue(40 * MINUTE)
    run.write(now, running=False)
    watch_looked(run.rundir, now - timedelta(seconds=20))
    logs(run.rundir, 1, "KeyError: 'lr_schedule'")
    return run.rundir, {}


TEN: dict[str, Callable[[Path, datetime], Story]] = {
    "standing on a full disk": stands_on_a_full_disk,
    "braked": crash_loop,
    "cancelled": was_cancelled,
    "watch dead": watch_is_dead,
    "controller paused": controller_is_paused,
    "hung": hang,
    "NaN": loss_is_no_number,
    "waiting for ever": waits_for_ever,
    "finished": has_finished,
    "gone": is_gone,
}


def is_being_stopped(folder: Path, now: datetime) -> Story:
    """An attempt has failed, the next one has begun, and a person has raised the kill switch; the watch was told of the failure
    before that."""
    run = trains(folder, now, "stopping")
    run.alert(now, "recovery", "", Severity.WARNING, "attempt 1 failed (exit 1) and none has trained since", 120,
              do="read the log if the next attempt fails too")  # fmt: skip
    (run.rundir.switches / "kill-switch").write_text("")
    return run.rundir, run.jobs(now, running=True)


MORE: dict[str, Callable[[Path, datetime], Story]] = {**TEN, "being stopped": is_being_stopped}


def main() -> None:
    for number, name in enumerate(TEN):
        account = Path(sys.argv[1]).absolute() / str(number)
        account.mkdir(parents=True)
        print(f"---- {name}\n{trouble(name, account).status()}")


if __name__ == "__main__":
    main()
