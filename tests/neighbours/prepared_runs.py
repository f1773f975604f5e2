"""Runs with a prepared past: what a report and ``status`` are tried on.

    python -m tests.neighbours.prepared_runs FOLDER [NAME]...   makes them, and says how to look at them

Six stories have one trouble each (``STORIES``); ``nine_days`` has some of each, for the pictures of the manual; ``ninety_days``
has a thousand incidents; ``hostile`` has the worst text in every field that others can write.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.findings import Severity
from ftsupervise.model import Cause, CauseKind, Failure, FailureKind, NodeRanks, Standstill
from ftsupervise.replicas.stalls import STALLS, GroupStall, StallPage
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, write_table
from ftsupervise.rundir.attempt_pages import DecidingLine, VerdictPage, write_page
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import Brake, write_brake
from ftsupervise.rundir.tracker import TrackerPage, write_tracker
from tests.neighbours.prepared_run import DAY, HOUR, MINUTE, PreparedRun
from tests.neighbours.queue import Queue

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
    run.alert(now, "brake", "", Severity.CRITICAL, f"stopped by the brake: {brake.words()}", 6 * HOUR - 120)
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
    run.stand(50 * MINUTE)
    run.write(now, running=True, current=0.0, behind="rank 163 on node-21")
    write_tracker(run.rundir.attempt(3), TrackerPage("https://wandb.ai/lab/pretrain/runs/8f3k", "W&B"))
    run.blame(now, "node-21", "hang", 12.5 * HOUR, 6 * HOUR, evidence="rank 163 made no step")
    run.alert(now, "hang", "", Severity.CRITICAL, f"no progress for 50m (limit 40m), the last being step {run.step}",
              45 * MINUTE, do="scancel 102_1  (the next job continues from the last checkpoint)")  # fmt: skip
    return run.rundir, run.jobs(now, running=True)


def slow_node(folder: Path, now: datetime) -> Story:
    """For nine hours it has trained at 62 % of its usual speed: one node's clock is throttled."""
    run = PreparedRun(folder, "slow-node")
    run.queue(10 * MINUTE)
    run.start()
    run.train(16 * HOUR)
    run.train(9 * HOUR, speed=0.62)
    run.write(now, running=True, current=0.61, behind="rank 317 on node-40")
    do = "look for a slow node: temperatures, clocks, the network; then launch.exclude it"
    run.alert(now, "throughput", "", Severity.WARNING, "221 steps an hour, 62% of the usual 357", 8 * HOUR, do=do)
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
    run.alert(
        now,
        "disk",
        "/scratch",
        Severity.CRITICAL,
        "/scratch is full: 0 bytes of 50 TB are free",
        3.5 * HOUR,
        do="delete what is not needed, or have the quota raised",
    )
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


def nine_days(folder: Path, now: datetime) -> Story:
    """A bit of everything, for the pictures of the manual."""
    run = PreparedRun(folder, "train-10b")
    node = NodeRanks("node-17", "130")
    run.queue(3 * HOUR)
    run.start(6 * MINUTE)
    run.train(19 * HOUR)
    run.time_limit(1.5 * HOUR)
    run.start(5 * MINUTE)
    run.train(11 * HOUR)
    fault = Failure(
        FailureKind.CODE, "exit 1", "RuntimeError: CUDA error: uncorrectable ECC error encountered", "RuntimeError"
    )
    run.fault(Cause(CauseKind.EXIT, (node,), code=1), fault, after=40, hardware="NVRM: Xid 94: uncorrectable ECC error")
    run.start(4 * MINUTE)
    run.train(8 * HOUR)
    run.time_limit(7.2 * HOUR)
    run.start(5 * MINUTE)
    run.train(13 * HOUR)
    still = Cause(
        CauseKind.HANG, (NodeRanks("node-40", "317"),), how=Standstill.IDLE, phase="train", step=run.step, waited=1830
    )
    run.fault(still, Failure(FailureKind.HANG, "hang", "rank 317 waits in ncclAllReduce"), after=31 * MINUTE)
    run.start(4 * MINUTE)
    run.train(6 * HOUR)
    run.time_limit(40 * MINUTE)
    run.start(5 * MINUTE)
    run.train(9 * HOUR)
    run.train(10 * HOUR, speed=0.66)
    run.time_limit(2 * HOUR)
    run.start(5 * MINUTE)
    run.train(15 * HOUR)
    run.fault(Cause(CauseKind.NODE, (node,)), Failure(FailureKind.NODE, "node failure", "NODE_FAIL: node-17"), after=80)
    run.start(5 * MINUTE)
    run.train(4 * HOUR)
    run.time_limit(HOUR)
    for _ in range(4):
        run.start(5 * MINUTE)
        run.train(19.5 * HOUR)
        run.time_limit(run.random.uniform(0.1, 3) * HOUR)
    run.start(5 * MINUTE)
    run.train(7.6 * HOUR)
    run.write(now, running=True, current=0.98)
    run.blame(now, "node-17", "hardware", 6.9 * DAY, 4.1 * DAY, evidence="NVRM: Xid 94: uncorrectable ECC error")
    run.blame(now, "node-40", "hang", 5.6 * DAY, evidence="rank 317 made no step")
    run.alert(
        now,
        "disk",
        "/scratch",
        Severity.WARNING,
        "/scratch: full in 2d 6h at 1.3 TB a day (24h)",
        2 * HOUR,
        do="delete what is not needed, or have the quota raised",
    )
    return run.rundir, run.jobs(now, running=True)


def groups(folder: Path, now: datetime) -> Story:
    """Four replica groups, one of which was lost and came back, and one of which is away now."""
    run = PreparedRun(folder, "groups")
    run.queue(10 * MINUTE)
    run.start(2 * MINUTE)
    run.train(9 * HOUR)
    run.write(now, running=True, current=1.0)
    begin = now - timedelta(seconds=run.clock)
    rows = []
    for number in range(4):
        part = PreparedRun(run.rundir.root / "groups", f"g{number:03}", nodes=16)
        part.queue(10 * MINUTE)
        part.start(2 * MINUTE)
        where = (NodeRanks(f"node-{17 + number}", "3"),)
        lost = Cause(CauseKind.NODE, where), Failure(FailureKind.NODE, "node failure", f"NODE_FAIL: node-{17 + number}")
        if number == 1:
            part.train(4 * HOUR)
            part.fault(*lost, after=8, pause=900)
            part.start(2 * MINUTE)
        if number == 3:
            part.train(7.5 * HOUR)
            part.fault(*lost, after=8)
        away = number == 3
        if not away:
            part.train(run.clock - part.clock)
        part.write_attempts(begin, None if away else now)
        at = begin + timedelta(seconds=part.clock)
        state = GroupState.WAITING if away else GroupState.RUNNING
        why = "no node is free to take the place of node-20" if away else ""
        nodes = () if away else (f"node-{10 * number + 1:02}",)
        rows.append(
            ReplicaGroup(
                f"g{number:03}", state, at if away else begin, why, nodes, step=part.step if away else run.step
            )
        )
    run.rundir.replicas.mkdir()
    write_table(run.rundir, GroupTable(now, "node-01", 4, 2, groups=tuple(rows)))
    first, second = (begin + timedelta(hours=hours) for hours in (4.2, 7.7))
    stalls = (
        GroupStall(first, 1.1, 1440, 1, ("g001",), first + timedelta(seconds=1030), 104),
        GroupStall(second, 1.4, 2690, 1, ("g003",)),
    )
    write_json(run.rundir.replicas / STALLS, StallPage(now, 2, 2.5, 2, stalls))
    return run.rundir, run.jobs(now, running=True)


def night(folder: Path, now: datetime) -> Story:
    """Nine faults in nine hours: a loss that was no number and was taken back, five starts that failed in the same way, a node
    that was lost on the way back, two crashes; it has stood for ten minutes too. It trains at its usual speed since."""
    run = PreparedRun(folder, "night", rate=0.5, save_every=500)
    code = Failure(FailureKind.CODE, "exit 1", "RuntimeError: NCCL error: remote process exited", "RuntimeError")
    rank = NodeRanks("node-09", "66")
    run.queue(5 * MINUTE)
    run.start(2 * MINUTE)
    run.train(2 * HOUR)
    run.stand(10 * MINUTE)
    run.train(HOUR)
    good = run.saved
    run.train(40 * MINUTE, number=False)
    bad = Failure(FailureKind.NUMBERS, "loss is not a number", f"nan at step {run.step}")
    back = Cause(CauseKind.NOT_A_NUMBER, (NodeRanks("node-01", "0"),))
    run.end(back, bad, after=10, then="restarted in place, from an older checkpoint")
    run.saved = good
    run.clock += 15
    for _ in range(5):
        run.start(30)
        run.fault(Cause(CauseKind.EXIT, (rank,), code=1), code, after=5, pause=20)
    run.start(2 * MINUTE)
    run.train(20 * MINUTE)
    lost = Failure(FailureKind.NODE, "node failure", "NODE_FAIL: node-17")
    run.fault(Cause(CauseKind.NODE, (NodeRanks("node-17", "130"),)), lost, after=70)
    for _ in range(2):
        run.start(2 * MINUTE)
        run.train(100 * MINUTE)
        run.fault(Cause(CauseKind.EXIT, (rank,), code=1), code, after=8)
    run.start(2 * MINUTE)
    run.train(70 * MINUTE)
    run.write(now, running=True, current=0.99)
    for step in range(good + 500, good + 7 * 500 + 1, 500):
        folder = run.rundir.checkpoints / f"step-{step:08d}"
        folder.mkdir(exist_ok=True)
        set_aside(folder, "loss is not a number", now - timedelta(hours=5))
    for step in range(500, 60 * 500, 500):
        (run.rundir.checkpoints / f"step-{step:08d}").mkdir(exist_ok=True)
    return run.rundir, run.jobs(now, running=True)


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
    for one in ledger(run.rundir):
        if one.has_failed and one.cause is not None:
            diagnose(run.rundir, one.number, f"rank {one.number % 4096}: {one.line or one.words}")
    return run.rundir, run.jobs(now, running=True)


def diagnose(rundir: RunDir, number: int, text: str) -> None:
    """Keep a verdict about an attempt as the watch does, with ``text`` in each field that has words of others."""
    lines = (DecidingLine(text, text), DecidingLine("the ledger", text))
    before = ("the third of this kind in this run (before: attempts 1, 2)",)
    page = VerdictPage(
        number, None, "an error in the program", "high", text, f"rank 5 on {text[:20]}", (5,), (text,), text
    )
    write_page(rundir.attempt(number), page._replace(evidence=lines, history=before, advice=text, remedy=text))


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
    page = json.loads((run.rundir.attempt(1) / "start.json").read_text())
    write_json(run.rundir.attempt(1) / "start.json", {**page, "job_id": text, "host": text})
    diagnose(run.rundir, 1, text)
    write_tracker(run.rundir.attempt(2), TrackerPage(f"javascript:alert(1)//{own}", own))
    run.job = "88_1"
    return run.rundir, run.jobs(now, running=True)


EVERY: dict[str, Callable[[Path, datetime], Story]] = {
    **STORIES,
    "nine-days": nine_days,
    "groups": groups,
    "night": night,
    "ninety-days": ninety_days,
    "hostile": hostile,
}


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
        (state / rundir.root.name).symlink_to(rundir.root)
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
