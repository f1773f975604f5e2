"""Prediction and reality: real runs under random faults in a sandbox, each predicted before it starts, and then measured.

    python -m benchmarks.prediction [--seconds 150] [--only warm,cold] [--check]
    python -m benchmarks.prediction --apply      a run with a bad interval, and the same after ``ftsupervise plan --apply``

Each strategy is calibrated by a run of its own with a few faults: what saves, restarts and waits take is read from that run
as ``ftsupervise plan`` reads it. From these values the simulator predicts the ratio of a longer run whose faults come at
random, 15 to 35 s apart (lost nodes 50 to 70 s): over a thousand such sequences, and for the very one that was drawn. Then
that run is started. Its ratio is that of its own account of time, from its first step on. ``--check`` exits 1 where the two
differ by more than 5 points, where the calibration did not measure a value that is needed, or where a run was over too early.
All runs are on this machine at the same time.
"""

from __future__ import annotations

import argparse
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timezone
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, NamedTuple

import yaml

from benchmarks.figures import figure
from ftsupervise.host import processes
from ftsupervise.planning.faults import Fault
from ftsupervise.planning.inputs import KnownBy, PlanInputs
from ftsupervise.planning.measured import inputs_of
from ftsupervise.planning.simulator import Strategy, play
from ftsupervise.report.account import Spent, TimeAccount, account
from ftsupervise.report.everything import report_of
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.sandbox import Sandbox, temporary

JOB = Path(__file__).with_name("job.py")
GAP = 15.0, 35.0  # seconds between two faults
CALIBRATION, LENGTH = (12.0, 32.0, 52.0), 80.0  # seconds at which faults come, and in all
WITHIN = 0.05
_START = 150.0  # seconds for the first steps
_GROUPS = 3
_SHORT = 3.0  # seconds by which an account may end before the run was looked at
_REPAIR = 40.0  # seconds until a crashed node is back


class Scenario(NamedTuple):
    name: str
    words: str
    launch: dict[str, Any]
    env: dict[str, str] = {"PREDICTION_EVERY": "60"}  # noqa: RUF012 - never changed
    checkpoints: dict[str, Any] = {"snapshot_every": None}  # noqa: RUF012
    node: bool = False  # a fault takes the node, not the process
    groups: bool = False
    gap: tuple[float, float] = GAP
    calibration: tuple[float, ...] = CALIBRATION


_RESTART = {"in_place": 1000, "same_failure": 0, "back_off": "200ms", "hang": None}
SCENARIOS = (
    Scenario("warm", "restart in the same job from a standby", {"restart": {**_RESTART, "warm": ["json", "decimal"]}}),
    Scenario(
        "cold",
        "each fault ends the job; the next member of the chain goes on",
        {"restart": {**_RESTART, "in_place": 0}},
    ),
    Scenario(
        "snapshots",
        "a checkpoint each 20 s, snapshots in memory every 2 steps",
        {"restart": _RESTART},
        {"PREDICTION_EVERY": "400", "PREDICTION_SNAPSHOTS": "1"},
        {"snapshot_every": 2},
    ),
    Scenario(
        "spare",
        "each fault takes a node, and two spare ones are there",
        {"nodes": 2, "tasks_per_node": 1, "spare_nodes": 2, "restart": _RESTART},
        node=True,
        gap=(50.0, 70.0),
        calibration=(12.0, 45.0),
    ),
    Scenario(
        "groups",
        f"{_GROUPS} replica groups; a fault takes one of them",
        {"restart": _RESTART, "replica_groups": {"count": _GROUPS, "nodes_each": 1, "min": 2, "lighthouse": "none"}},
        {"PREDICTION_PEERS": "peers"},
        groups=True,
    ),
)


class Playing:
    """One run of a scenario, in a folder of its own."""

    def __init__(self, of: Scenario, top: Path, name: str, sandbox: Sandbox) -> None:
        self.of, self.name, self.sandbox = of, name, sandbox
        self.folder = top / name
        self.folder.mkdir()
        self.rundir = RunDir(self.folder / "run")
        own = {"FTSUPERVISE_STATE_DIR": str(top / "state"), "FTSUPERVISE_SITE_CONFIG": "/nonexistent", "COLUMNS": "100"}
        self.env = {**sandbox.env(), **own}
        self.missed = 0

    def launch(self) -> float:
        """Return the time at which all of it trains, epoch seconds."""
        env = {
            key: str(self.folder / value) if key == "PREDICTION_PEERS" else value for key, value in self.of.env.items()
        }
        plain = {"command": f"{sys.executable} {JOB}", "exclusive": True, "jobs": 60, "time": "1:00:00", "env": env}
        settings = {
            "name": self.name,
            "run_dir": str(self.rundir.root),
            "launch": {**plain, **self.of.launch},
            "nodes": {"at_most": 0},
            "guard": {"poll": "200ms"},
            "checkpoints": self.of.checkpoints,
        }
        (self.folder / "ftsupervise.yaml").write_text(f"# {self.of.words}\n{yaml.safe_dump(settings, sort_keys=False)}")
        return self.go_on()

    def go_on(self) -> float:
        began = time.time()
        self.type("launch")
        wanted = _GROUPS if self.of.groups else 1
        until = time.monotonic() + _START
        while len({at.started for one in self.parts() for at in ledger(one)[-1:] if self.pids(one, began)}) < wanted:
            if time.monotonic() > until:
                raise RuntimeError(f"{self.name} never came to its first step: see {self.folder}")
            time.sleep(0.1)
        return time.time()

    def type(self, *words: str) -> str:
        done = subprocess.run(
            [sys.executable, "-m", "ftsupervise", *words],
            cwd=self.folder, env=self.env, capture_output=True, text=True, timeout=180,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"{self.name}: {words}: {done.stdout}{done.stderr}")
        return done.stdout

    def parts(self) -> list[RunDir]:
        """The run, or each of its groups."""
        return [self.rundir.group(f"g{n:03}") for n in range(_GROUPS)] if self.of.groups else [self.rundir]

    def pids(self, part: RunDir, since: float = 0.0) -> list[int]:
        """The processes that make steps now."""
        try:
            beats = read_beats(part)
        except OSError:
            return []
        return [
            beat.pid
            for beat in beats
            if beat.step
            and beat.at.timestamp() > max(since, time.time() - 3)
            and processes.identity(beat.pid) is not None
        ]

    def meet(self, faults: Iterator[Fault], begin: float, seconds: float) -> None:
        """Bring the faults upon it, each at its time after ``begin``."""
        for fault in faults:
            time.sleep(max(0.0, begin + fault.at - time.time()))
            part = self.parts()[fault.node % len(self.parts())]
            pids = self.pids(part)
            if not pids:
                self.missed += 1
            elif self.of.node:
                node = ledger(part)[-1].nodes[-1]  # the first one has the job's script
                self.sandbox.node(node, "crash")
                threading.Timer(_REPAIR, self.sandbox.node, (node, "start")).start()
            else:
                for pid in pids:
                    os.kill(pid, signal.SIGKILL)
        time.sleep(max(0.0, begin + seconds - time.time()))

    def measured(self, begin: float, seconds: float) -> float:
        """The ratio by its own account; of groups, their mean."""
        now = datetime.now(timezone.utc)
        return fmean(ratio_of(_account(part, now), begin, seconds, self.name) for part in self.parts())

    def inputs(self) -> PlanInputs:
        """Return the measurements of the run; of groups, those of the first that met a fault."""
        found = [inputs_of(report_of(part, datetime.now(timezone.utc), self.env)) for part in self.parts()]
        return next((one for one in found if one.mtbf.note.startswith("of ")), found[0])

    def end(self) -> None:
        self.type("kill", "--yes", str(self.rundir.root))


def _account(part: RunDir, now: datetime) -> TimeAccount:
    from ftsupervise.rundir.progress import read_marks

    attempts = ledger(part)
    return account(attempts, (), now, running=attempts[-1].ended is None, marks=read_marks(part))


def ratio_of(whole: TimeAccount, begin: float, seconds: float, name: str) -> float:
    """The share that trains. A run that was over before the end has lost the rest of that time too: raises RuntimeError."""
    found = whole.within(begin, begin + seconds)
    if found.total < seconds - _SHORT:
        raise RuntimeError(f"{name} was over after {found.total:.0f} of {seconds:.0f} s")
    return found.seconds()[Spent.TRAIN] / found.total


def assumed_of(of: Scenario, inputs: PlanInputs) -> list[str]:
    """The values that this prediction needs and its calibration did not measure."""
    names = ["detect", "step"]
    names += ["cold", "queue"] if of.launch["restart"]["in_place"] == 0 else ["warm"]
    names += [] if of.groups else ["save", "interval"]
    return [name for name in names if getattr(inputs, name).origin is KnownBy.ASSUMED]


def drawn(chance: Random, seconds: float, gap: tuple[float, float] = GAP) -> list[Fault]:
    """Faults at random times."""
    at, found = chance.uniform(*gap), list[Fault]()
    while at < seconds - 5:
        found.append(Fault(at, len(found), lost=False))
        at += chance.uniform(*gap)
    return found


def strategy_of(of: Scenario, inputs: PlanInputs) -> Strategy:
    base = inputs.strategy(of.name)
    if of.groups:
        away = inputs.detect.value + inputs.warm.value
        return base._replace(groups=_GROUPS, least=2, away=away, detect=0.0, save=0.0)
    return base


def predicted(of: Scenario, how: Strategy, trace: list[Fault], seconds: float) -> tuple[float, float, float]:
    """The mean ratio over a thousand sequences of faults, nine tenths of them around it, and that for ``trace``."""
    chance = Random(9)
    found = sorted(play(how, _lost(of, drawn(chance, seconds, of.gap)), seconds).ettr for _ in range(1000))
    return fmean(found), (found[949] - found[50]) / 2, play(how, _lost(of, trace), seconds).ettr


def _lost(of: Scenario, trace: list[Fault]) -> list[Fault]:
    return [one._replace(lost=of.node) for one in trace]


def predict(sandbox: Sandbox, top: Path, scenarios: list[Scenario], seconds: float) -> int:
    def calibrate(of: Scenario) -> PlanInputs:
        run = Playing(of, top, f"{of.name}-calibration", sandbox)
        run.meet((Fault(at, index) for index, at in enumerate(of.calibration)), run.launch(), LENGTH)
        found = run.inputs()
        run.end()
        return found

    with ThreadPoolExecutor(len(scenarios)) as pool:
        inputs = list(pool.map(calibrate, scenarios))
        print(
            f"{'strategy':<11}{'predicted':>10}{'':>9}{'of these':>10}   save, detect, warm, cold, queue (s)",
            flush=True,
        )
        traces = [drawn(Random(index + 1), seconds, of.gap) for index, of in enumerate(scenarios)]
        told = []
        guessed = False
        for of, values, trace in zip(scenarios, inputs, traces, strict=True):
            if missing := assumed_of(of, values):
                guessed = True
                print(f"{of.name}: its calibration measured no {', '.join(missing)}: predicted from what is assumed")
            told.append(predicted(of, strategy_of(of, values), trace, seconds))
            mean, around, these = told[-1]
            parts = (values.save, values.detect, values.warm, values.cold, values.queue)
            words = ", ".join(f"{one.value:.2f}" for one in parts)
            print(f"{of.name:<11}{mean:>10.1%}{f'± {100 * around:.1f}':>9}{these:>10.1%}   {words}", flush=True)

        def measure(index: int) -> tuple[float, int, int]:
            run = Playing(scenarios[index], top, scenarios[index].name, sandbox)
            begin = run.launch()
            run.meet(iter(traces[index]), begin, seconds)
            ratio, met = run.measured(begin, seconds), sum(len(ledger(part)) - 1 for part in run.parts())
            run.end()
            return ratio, met, run.missed

        found = list(pool.map(measure, range(len(scenarios))))
    print(f"{'strategy':<11}{'predicted':>10}{'measured':>10}{'differs':>9}{'faults':>8}   what it is", flush=True)
    worst = 0.0
    for of, (mean, _, _), (ratio, met, missed) in zip(scenarios, told, found, strict=True):
        worst = max(worst, abs(mean - ratio))
        gone = f" ({missed} found nothing to hit)" if missed else ""
        figure(f"prediction/{of.name}/predicted", 100 * mean, "%")
        figure(f"prediction/{of.name}", 100 * ratio, "%", f"{100 * (ratio - mean):+.1f} points from the prediction")
        print(f"{of.name:<11}{mean:>10.1%}{ratio:>10.1%}{100 * (ratio - mean):>+9.1f}{met:>8}   {of.words}{gone}")
    figure("prediction/worst", 100 * worst, "points")
    print(f"the worst differs by {100 * worst:.1f} points")
    return int(guessed or worst > WITHIN)


def apply(sandbox: Sandbox, top: Path, seconds: float) -> int:
    """A run that saves once in 90 s and meets a fault every 25 s; then the same, with what ``plan --apply`` has written."""
    launch = {**SCENARIOS[0].launch, "jobs": 1}
    bad = SCENARIOS[0]._replace(
        name="apply", launch=launch, env={}, checkpoints={"snapshot_every": None, "every": "90s"}
    )
    run = Playing(bad, top, "apply", sandbox)
    ratios = []
    for turn in range(2):
        begin = run.launch() if not turn else run.go_on()
        run.meet(iter(drawn(Random(7), seconds)), begin, seconds)
        ratios.append(run.measured(begin, seconds))
        if not turn:
            run.end()
            _wait_for_an_empty_queue(run)
            print(run.type("plan", str(run.rundir.root), "--interval", "90s", "--save", "0.5s", "--apply", "--yes"))
            run.type("clear", str(run.rundir.root))
    run.end()
    figure("prediction-apply/before", 100 * ratios[0], "%")
    figure("prediction-apply/after", 100 * ratios[1], "%")
    print(f"before {ratios[0]:.1%}, after {ratios[1]:.1%}: {100 * (ratios[1] - ratios[0]):+.1f} points")
    return int(ratios[1] <= ratios[0])


def _wait_for_an_empty_queue(run: Playing) -> None:
    """The rest of the chain finds the kill switch up, and leaves."""
    until = time.monotonic() + 120
    while time.monotonic() < until:
        asked = subprocess.run(
            ["squeue", "--noheader"], env=run.env, capture_output=True, text=True, timeout=60, check=False
        )
        if not asked.returncode and not asked.stdout.strip():
            return
        time.sleep(0.5)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=150.0)
    parser.add_argument("--only", default="", help="names of strategies, with commas")
    parser.add_argument("--apply", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--keep", action="store_true", help="leave the folder there")
    given = parser.parse_args()
    scenarios = [one for one in SCENARIOS if not given.only or one.name in given.only.split(",")]
    top = Path(tempfile.mkdtemp(prefix="fts-pred-", dir="/tmp"))
    try:
        with temporary(top / "slurm", nodes=4 * len(scenarios) + 4, gpus_per_node=0, slurmd_timeout=6) as sandbox:
            wrong = (
                apply(sandbox, top, given.seconds) if given.apply else predict(sandbox, top, scenarios, given.seconds)
            )
    finally:
        if given.keep:
            print(top)
        else:
            shutil.rmtree(top, ignore_errors=True)
    return wrong if given.check else 0


if __name__ == "__main__":
    sys.exit(main())
