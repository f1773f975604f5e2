"""What one tick of the watch costs: five watchdogs each over 10, 100, 1,000 and 10,000 runs, on this machine.

    python benchmarks/tick.py [--runs 10,100,1000,10000] [--check]

Every run has a directory with beats, a log, checkpoints, an attempt, and in the queue a job that runs and the members of its
array that wait; *is-running*, *hang*, *disk*, *checkpoints* and *throughput* look at it through the real tick. No run has an
alert: one that fires costs its run a write of the journal in each tick. A ``squeue`` of ours stands on the PATH, counts how
often it is called and prints the queue. Two ticks are made: the first one walks every checkpoint, the second is what is paid
every five minutes. CPU is that of all processes of the tick. Memory is theirs together, the shared
pages of each counted once (PSS), the largest of some looks a second. ``--check`` exits 1 if squeue was called more than once a
tick, if the CPU per run grows with the number of runs by more than a half, or if 10,000 runs take more than 60 s on two cores
or more than 250 MB.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from benchmarks.memory import family, pss

SECONDS, MB = 60.0, 250.0  # for 10,000 runs
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
    """A queue with one running job for each run, and the rest of its array, in the words ``squeue -o`` is asked for."""
    from ftsupervise.host.ownership import user_name
    from ftsupervise.scheduler.parse import SqueueFormat

    form = SqueueFormat("MARK")
    started = str(int(time.time()) - 36_000)
    lines = []
    for n in range(count):
        array, me, asks = [str(n + 100)] * 2, user_name(), ["(null)", "1", "batch", "(null)", "(null)"]
        runs = [f"{n + 100}_1", *array, "RUNNING", me, started, "N/A", started, "None", *asks, "n1"]
        never = ["N/A", "N/A", started, "JobArrayTaskLimit"]
        wait = [f"{n + 100}_[2-10%1]", *array, "PENDING", me, *never, *asks, ""]
        where = [str(folder / f"run-{n}"), "(null)", f"run-{n}"]
        lines += [form.record + form.field.join(row + where) for row in (runs, wait)]
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
    from ftsupervise.watch.roster import KnownRun, Roster
    from ftsupervise.watch.tick import TickResult, tick
    from ftsupervise.watch.tour import TickOrders

    roster = Roster(tuple(f"{folder}/run-{n}" for n in range(count)))
    for n, name in enumerate(roster.names):  # one by one, as a tick reads them
        text = f"name: run-{n}\nlaunch: {{command: a}}\nscheduler: slurm\nrun_dir: {name}\nwatch: {SECTIONS}\n"
        roster.keep(n, KnownRun(Path(), None, loads(text, folder / "ftsupervise.yaml")))
    env = {**os.environ, "PATH": f"{folder}:{os.environ['PATH']}"}
    os.environ["PATH"] = env["PATH"]
    seconds, cpu, largest = [], [], []
    done: TickResult | None = None
    for _ in range(2):
        done = None  # the next tick has its own
        with Memory() as memory:
            began, spent = time.perf_counter(), cpu_of_all()
            now = datetime.now(timezone.utc)
            orders = TickOrders(now=now, state=folder / "state", env={}, scheduler=lambda _: Slurm(env), send=False)
            done = tick(roster, orders)
            seconds.append(time.perf_counter() - began)
            cpu.append(cpu_of_all() - spent)
        largest.append(memory.mb)
    assert done is not None
    findings = sum(told.checks for told in done.runs)
    return {
        "first": seconds[0],
        "second": seconds[1],
        "first_cpu": cpu[0],
        "second_cpu": cpu[1],
        "findings": findings,
        "unseen": sum(f.health.value == "unknown" for told in done.runs for f in told.findings),
        "first_mb": largest[0],
        "second_mb": largest[1],
        "squeue": len((folder / "calls").read_text().splitlines()) / 2,
    }


def cpu_of_all() -> float:
    """CPU seconds of this process and of all that it has waited for, with theirs."""
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


class Memory:
    """The most memory, in MB, that this process and all below it had together: PSS, which counts a shared page once."""

    def __init__(self) -> None:
        self.mb, self._over = 0.0, threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _watch(self) -> None:
        while not self._over.wait(0.4):
            self.mb = max(self.mb, sum(map(pss, family(os.getpid()))) / 2**20)


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
    print("  runs   first tick    its CPU    next tick    its CPU   per run  findings  unseen  memory  squeue/tick")
    per_run, calls, missed = [], [], []
    for count in (int(text) for text in chosen.runs.split(",")):
        m = one(count)
        per_run.append(m["second_cpu"] / count)
        calls.append(m["squeue"])
        memory = max(m["first_mb"], m["second_mb"])
        print(
            f"{count:6}  {m['first']:9.2f} s  {m['first_cpu']:7.2f} s  {m['second']:9.2f} s  {m['second_cpu']:7.2f} s  "
            f"{per_run[-1] * 1000:5.1f} ms  {m['findings']:8.0f}  {m['unseen']:6.0f}  {memory:3.0f} MB  {m['squeue']:11.0f}",
            flush=True,
        )
    # one child goes through the runs, and waits while another answers it: on a quiet machine it takes the CPU of all
    seconds = min(m["second"], m["second_cpu"])
    if count >= 10_000 and (seconds > SECONDS or memory > MB):
        missed.append(f"{count} runs took {seconds:.0f} s and {memory:.0f} MB")
    if len(per_run) > 1 and per_run[-1] > 1.5 * min(per_run[:-1]):
        missed.append("the CPU grows faster than the number of runs")
    if set(calls) != {1.0}:
        missed.append("squeue was called more than once a tick")
    for name, value in (("first tick", m["first"]), ("next tick", m["second"]), ("next tick CPU", m["second_cpu"])):
        figure(f"tick/{count} runs, {name}", value, "s")
    figure(f"tick/{count} runs, memory", memory, "MB", "all processes of the tick")
    if chosen.check and missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
