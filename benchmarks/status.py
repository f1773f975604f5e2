"""What ``ftsupervise status`` costs: 1,000 runs in a table, one run of 100,000 ranks, and ``--watch`` while nothing happens.

    python benchmarks/status.py [--runs 1000] [--ranks 100000] [--idle 60] [--check]

Every run has a launch, an attempt with a progress page, a page of the watch and a job in the queue; a ``squeue`` of ours on
the PATH counts how often it is called. The run of many ranks has a beat of each in its directory besides its progress page.
Both are typed as a person does, start of Python included. ``--check`` exits 1 above 2 s, 1 s, 1 % of a core, or at a second
squeue.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import resource
import select
import subprocess
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from benchmarks.tick import make_squeue

TABLE, ONE, IDLE = 2.0, 1.0, 0.01  # seconds, seconds, share of a core
NOW = datetime.now(timezone.utc).isoformat()
PAGE = {
    "at": NOW,
    "ranks": 512,
    "step": 1000,
    "ahead": 1000,
    "phase": "train",
    "first": 1,
    "saved": 900,
    "saved_at": NOW,
}
PAGE |= {"rate": 0.5, "usual": 0.51, "loss": 2.31, "last_step": 100_000}
ALERT = {"id": "3f9a1c", "severity": "warning", "watchdog": "disk", "summary": "/scratch: full in 3d", "since": NOW}


def make_run(run: Path, job: str, ranks: int = 0) -> None:
    for part in ("switches", "beats", "logs", "watch/watchers", "state", "launches/0001", "attempts/0001", "nodes"):
        (run / part).mkdir(parents=True)
    (run / "run.yaml").write_text(f"name: {run.name}\n")
    launch = {"state": "submitted", "token": "t", "at": NOW, "scheduler": "slurm", "job_ids": [job.partition("_")[0]]}
    (run / "launches/0001/launch.json").write_text(json.dumps(launch))
    start = {"attempt": 1, "job_id": job, "at": NOW, "host": "n1", "nodes": "n1", "pid": 1}
    (run / "attempts/0001/start.json").write_text(json.dumps(start))
    (run / "attempts/0001/progress.json").write_text(json.dumps({**PAGE, "ranks": ranks or 512}))
    (run / "watch/found.json").write_text(json.dumps({"at": NOW, "firing": 1, "alerts": [ALERT], "disk": "full in 3d"}))
    (run / "watch/watchers/n1-0").write_text(json.dumps({"host": "n1", "at": NOW, "every": 300.0}))
    beat = {"step": 1000, "phase": "train", "at": NOW, "pid": 1, "host": "n1", "facts": {"attempt": "1"}}
    for rank in range(ranks):
        (run / "beats" / f"rank-{rank}").write_text(json.dumps({"rank": rank, **beat}))


def typed(env: dict[str, str], folder: Path, *words: str) -> tuple[float, str]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-m", "ftsupervise", *words], env=env, cwd=folder, capture_output=True, text=True, check=False
    )
    seconds = time.monotonic() - began
    if done.returncode:
        raise SystemExit(f"{' '.join(words)} ended with {done.returncode}: {done.stderr}")
    return seconds, done.stdout


def idle(env: dict[str, str], folder: Path, seconds: float) -> float:
    """CPU seconds of ``status --watch`` and its children, by wall seconds, after its first look."""
    parent, child = pty.openpty()
    argv = [sys.executable, "-m", "ftsupervise", "status", "--watch"]
    watch = subprocess.Popen(argv, env={**env, "TERM": "xterm"}, cwd=folder, stdin=child, stdout=child, stderr=child)
    os.close(child)

    def drain(until: float) -> None:
        while (left := until - time.monotonic()) > 0:
            if select.select([parent], [], [], left)[0]:
                try:
                    os.read(parent, 65_536)
                except OSError:  # it has left
                    return

    drain(time.monotonic() + 5)
    before = used(watch.pid)
    began = time.monotonic()
    drain(began + seconds)
    share = (used(watch.pid) - before) / (time.monotonic() - began)
    os.write(parent, b"q")
    drain(time.monotonic() + 0.5)
    watch.wait(30)
    os.close(parent)
    return share


def used(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return sum(int(one) for one in fields[11:15]) / os.sysconf("SC_CLK_TCK")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=1000)
    parser.add_argument("--ranks", type=int, default=100_000)
    parser.add_argument("--idle", type=float, default=60.0)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_squeue(folder, options.runs)
        names = folder / "state" / "runs"
        names.mkdir(parents=True)
        for n in range(options.runs):
            make_run(folder / f"run-{n}", f"{n + 100}_1")
            (names / f"run-{n}").symlink_to(folder / f"run-{n}")
        make_run(folder / "many", "100_1", options.ranks)
        (folder / "empty").mkdir()
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
        env |= {
            "PATH": f"{folder}:{env['PATH']}",
            "FTSUPERVISE_STATE_DIR": str(folder / "state"),
            "SLURM_CONF": "/none",
        }
        typed(env, folder / "empty", "status")  # warm
        asked = folder / "calls"
        before = calls(asked)
        table, shown = min(typed(env, folder / "empty", "status") for _ in range(3))
        squeues = (calls(asked) - before) / 3
        one, said = min(typed(env, folder / "empty", "status", str(folder / "many")) for _ in range(3))
        share = idle(env, folder / "empty", options.idle) if options.idle else 0.0
    running = sum(1 for line in shown.splitlines() if line.split()[1:2] == ["RUNNING"])
    if running != options.runs or f"{options.ranks:,} ranks" not in said:
        raise SystemExit(f"something else was shown:\n{shown[:2000]}\n{said}")
    rows = [
        (f"status of {options.runs} runs", table, TABLE, "s"),
        ("squeue calls for it", squeues, 1.0, ""),
        (f"status of a run of {options.ranks} ranks", one, ONE, "s"),
        ("status --watch, idle", 100 * share, 100 * IDLE, "% of a core"),
    ]
    missed = []
    for what, value, bound, unit in rows:
        print(f"{what:<34}{value:8.2f} {unit:<12} bound {bound:g}")
        missed += [what] if value > bound else []
    figure("status/table", table, "s", f"{options.runs} runs")
    figure("status/squeue", squeues, "", "calls for the table")
    figure("status/run", one, "s", f"a run of {options.ranks} ranks")
    if options.idle:
        figure("status/watch", 100 * share, "%", "of a core")
    figure("status/memory", resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024, "MiB")
    print(f"peak of the largest process {resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024:.0f} MB")
    if missed:
        print(f"over the bound: {', '.join(missed)}")
    sys.exit(1 if missed and options.check else 0)


def calls(page: Path) -> int:
    return len(page.read_text().splitlines()) if page.exists() else 0


if __name__ == "__main__":
    main()
