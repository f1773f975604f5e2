"""What one tick of the watch costs: five watchdogs each over 10, 100, 1,000 and 10,000 runs, on this machine.

    python benchmarks/tick.py [--runs 10,100,1000] [--check]

Every run has a directory with beats, a log, checkpoints, an attempt and a job in the queue; *is-running*, *hang*, *disk*,
*checkpoints* and *throughput* look at it through the real tick. A ``squeue`` of ours stands on the PATH, counts how often it
is called and prints the queue. Two ticks are made: the first one walks every checkpoint and creates every journal, the
second is what is paid every five minutes. ``--check`` exits 1 if squeue was called more than once a tick, or if the
time per run grows with the number of runs by more than a half.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

SECTIONS = "{hang: {}, disk: [{}], checkpoints: {}, throughput: {}}"


def make_run(folder: Path, number: int) -> None:
    """What a run in its middle looks like on disk."""
    run = folder / f"run-{number}"
    for part in ("switches", "beats", "logs", "watch", "state", "launches", "attempts/0001", "checkpoints"):
        (run / part).mkdir(parents=True)
    beat = {"rank": 0, "step": 1000, "phase": "train", "at": "2026-01-01T00:00:00+00:00", "pid": 1, "host": "n1",
            "facts": {"attempt": "1", "every": "10"}}  # fmt: skip
    for rank in range(4):
        (run / "beats" / f"rank-{rank}").write_text(json.dumps({**beat, "rank": rank}))
    (run / "logs" / f"run-{number}-7_1.out").write_text("step 1000 | loss 2.1\n" * 50)
    started = {"number": 1, "job_id": f"{number}_1", "started": "2026-01-01T00:00:00+00:00"}
    (run / "attempts" / "0001" / "start.json").write_text(json.dumps(started))
    for step in range(3):
        (run / "checkpoints" / f"step-{step}").mkdir()
        (run / "checkpoints" / f"step-{step}" / "weights").write_bytes(b"w" * 100)
        os.utime(run / "checkpoints" / f"step-{step}", (time.time() - 3600 * (3 - step),) * 2)


def make_squeue(folder: Path, count: int) -> None:
    """A queue with one running job for each run, in the words ``squeue -o`` is asked for."""
    from ftsupervise.host.ownership import user_name
    from ftsupervise.scheduler.parse import SqueueFormat

    form = SqueueFormat("MARK")
    started = str(int(time.time()) - 36_000)
    lines = []
    for n in range(count):
        ids = [f"{n + 100}_1", str(n + 100), str(n + 100), "RUNNING", user_name(), started, "N/A", started]
        asks = ["1", "batch", "(null)", "(null)"]
        more = ["None", "(null)", *asks, "n1", str(folder / f"run-{n}"), "(null)", f"run-{n}"]
        lines.append(form.record + form.field.join([*ids, *more]))
    (folder / "queue").write_text("\n".join(lines))
    # the mark in the separators of this question
    answer = """while [ "$1" != -o ]; do shift; done; mark=${2#?}; mark=${mark%%:*}; """
    answer += f"echo >> {folder}/calls; sed s/MARK/$mark/g {folder}/queue"
    for name, words in (("squeue", answer), ("sbatch", "exit 1")):
        (folder / name).write_text(f"#!/bin/sh\n{words}\n")
        (folder / name).chmod(0o755)


def measured(folder: Path, count: int) -> dict[str, float]:
    """Two ticks over ``count`` runs, in this process (started anew for each count, so that its peak is its own)."""
    from ftsupervise.config.load import loads
    from ftsupervise.scheduler.slurm import Slurm
    from ftsupervise.watch.roster import Roster
    from ftsupervise.watch.tick import tick
    from ftsupervise.watch.tour import TickOrders

    runs = [
        loads(
            f"name: run-{n}\nlaunch: {{command: a}}\nscheduler: slurm\nrun_dir: {folder}/run-{n}\nwatch: {SECTIONS}\n",
            folder / "ftsupervise.yaml",
        )
        for n in range(count)
    ]
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    os.environ["PATH"] = env["PATH"]
    seconds = []
    for _ in range(2):
        began = time.perf_counter()
        now = datetime.now(timezone.utc)
        orders = TickOrders(now=now, state=folder / "state", env={}, scheduler=lambda _: Slurm(env), send=False)
        done = tick(Roster.of(runs), orders)
        seconds.append(time.perf_counter() - began)
    findings = sum(told.checks for told in done.runs)
    return {
        "first": seconds[0],
        "second": seconds[1],
        "findings": findings,
        "unseen": sum(f.health.value == "unknown" for told in done.runs for f in told.findings),
        "mb": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        "children_mb": resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024,
        "squeue": len((folder / "calls").read_text().splitlines()) / 2,
    }


def one(count: int) -> dict[str, float]:
    with tempfile.TemporaryDirectory(prefix="ftsupervise-tick-") as name:
        folder = Path(name)
        for number in range(count):
            make_run(folder, number)
        make_squeue(folder, count)
        env = {**os.environ, "TMPDIR": name}
        command = [sys.executable, __file__, "--inside", name, "--runs", str(count)]
        done = subprocess.run(command, env=env, check=True, capture_output=True, text=True)
        answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
        return answer


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--runs", default="10,100,1000,10000")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    chosen = parser.parse_args()
    if chosen.inside:
        print(json.dumps(measured(Path(chosen.inside), int(chosen.runs))))
        return
    print("  runs  first tick  next tick   per run  findings  unseen  peak memory  its child  squeue/tick")
    per_run, calls = [], []
    for count in (int(text) for text in chosen.runs.split(",")):
        m = one(count)
        per_run.append(m["second"] / count)
        calls.append(m["squeue"])
        print(
            f"{count:6}  {m['first']:8.2f} s  {m['second']:7.2f} s  {per_run[-1] * 1000:5.1f} ms  {m['findings']:8.0f}  "
            f"{m['unseen']:6.0f}  {m['mb']:8.0f} MB  {m['children_mb']:6.0f} MB  {m['squeue']:11.0f}",
            flush=True,
        )
    if chosen.check:
        grows = len(per_run) > 1 and per_run[-1] > 1.5 * min(per_run[:-1])
        if grows or set(calls) != {1.0}:
            raise SystemExit("missed: more than one squeue a tick, or time that grows faster than the number of runs")


if __name__ == "__main__":
    main()
