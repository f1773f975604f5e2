"""How the cost grows with the number of ranks, runs, attempts, checkpoints and lines: a curve each, with its exponent.

    python benchmarks/scale.py [PART …] [--most 0.1] [--check]

PART is one of ranks, beat-files, runs, ledger-status, ledger-report, ledger-tick, checkpoints-list, checkpoints-prune,
checkpoints-upkeep, log; default: all. Each part is measured at a sixteenth, a quarter and the whole of its largest number, in
a process of its own: the CPU seconds of the work and of the processes that it starts, without the imports, the best of
several rounds where one is short, and the peak memory of that process and its children. The exponent is the slope through
the logarithms: 1 is a cost that grows with the number, 2 one that grows with its square. A start that does not grow makes it
smaller. ``--most`` takes a share of the largest numbers. ``--check`` exits 1 above an exponent of 1.1, or where a minute's
lines take more than a minute.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from benchmarks.tick import SECTIONS, Memory, make_run, make_squeue

STEEP = 1.1
KEY = bytes(range(32))
PER_NODE = 8
NOW = datetime.now(timezone.utc)
LINE = "2026-11-28 12:00:00 INFO [rank 3] step {} | loss 2.1031 | lr 3.0e-4 | 412.1 ms | grad norm 0.71\n"

Work = Callable[[], object]


class Part(NamedTuple):
    """One curve. ``make`` prepares so many in a folder and returns the work to be measured."""

    what: str  # is counted and done
    most: int
    make: Callable[[Path, int], Work]
    breaks: str  # what breaks first at ten times as many
    whole: int = 1 << 62  # so many at most are all read


def ranks(folder: Path, count: int) -> Work:
    """A datagram of each node, the newest of all ranks, and the look of the hang detector: what a second costs."""
    from ftsupervise.ranks import protocol
    from ftsupervise.ranks.hang_detector import Detector, GapHistory, HangLimits
    from ftsupervise.ranks.protocol import Datagram
    from ftsupervise.ranks.rank_table import RankTable
    from ftsupervise.truth import RankState

    now = time.monotonic()
    seal, table = protocol.Seal(KEY), RankTable(KEY, 1.0)
    table.generation = 1
    table.begin(1)
    detector = Detector(HangLimits(), GapHistory())
    turn = iter(range(1, 1_000_000))

    def datagrams(number: int) -> list[bytes]:
        found = []
        for node in range(count // PER_NODE):
            mine = range(node * PER_NODE, (node + 1) * PER_NODE)
            states = [RankState(r, "", number, "train", now - 0.3, now - 0.2, now, 4000 + r, "R", 1.0) for r in mine]
            body = protocol.pack_states(states, now)[0]
            found.append(seal.pack(Datagram(protocol.STATES, 0, 1, 1, 1, number, f"node-{node:06}".encode(), body)))
        return found

    waiting = [datagrams(next(turn)) for _ in range(ROUNDS)]

    def second() -> None:
        for one in waiting.pop(0):
            table.take(one, ("127.0.0.1", 1), now)
        states = table.newest()
        assert len(states) == count // PER_NODE * PER_NODE, len(states)
        detector.look(time.monotonic(), states)

    return second


def beat_files(folder: Path, count: int) -> Work:
    from ftsupervise.rundir.heartbeat_page import read_beats
    from ftsupervise.rundir.paths import RunDir

    run = RunDir(folder)
    run.beats.mkdir()
    beat = {"step": 1000, "phase": "train", "at": NOW.isoformat(), "pid": 1, "host": "n1", "facts": {"attempt": "1"}}
    for rank in range(count):
        (run.beats / f"rank-{rank}").write_text(json.dumps({**beat, "rank": rank}))

    def read() -> None:
        assert len(read_beats(run)) == count

    return read


def tick_of(settings: str, count: int) -> Work:
    from ftsupervise.config.load import loads
    from ftsupervise.scheduler.slurm import Slurm
    from ftsupervise.watch.roster import KnownRun, Roster
    from ftsupervise.watch.tick import tick
    from ftsupervise.watch.tour import TickOrders

    roster = Roster(tuple(f"run-{n}" for n in range(count)))
    for n in range(count):  # one by one, as a tick reads them
        roster.keep(n, KnownRun(Path(), None, loads(settings.format(n=n), Path("ftsupervise.yaml").absolute())))
    state = Path(os.environ["TMPDIR"]) / "state"

    def once() -> None:
        env = dict(os.environ)
        now = datetime.now(timezone.utc)
        done = tick(roster, TickOrders(now=now, state=state, env={}, scheduler=lambda _: Slurm(env), send=False))
        assert sum(report.checks for report in done.runs) > count

    once()  # the first one makes what the next ones read
    return once


def runs(folder: Path, count: int) -> Work:
    for number in range(count):
        make_run(folder, number)
    make_squeue(folder, count)
    os.environ["PATH"] = f"{folder}:{os.environ['PATH']}"
    sections = SECTIONS.replace("{", "{{").replace("}", "}}")
    launch = "launch: {{command: a}}\nscheduler: slurm"
    return tick_of(f"name: run-{{n}}\n{launch}\nrun_dir: {folder}/run-{{n}}\nwatch: {sections}\n", count)


def a_ledger(folder: Path, count: int) -> Path:
    from tests.neighbours.prepared_runs import ninety_days

    rundir, _ = ninety_days(folder, NOW, count)
    (folder / "squeue").write_text("#!/bin/sh\nexit 0\n")
    (folder / "squeue").chmod(0o755)
    return rundir.root


def ledger_status(folder: Path, count: int) -> Work:
    from ftsupervise.report.detail import detail
    from ftsupervise.rundir.paths import RunDir

    run = RunDir(a_ledger(folder, count))
    env = {**os.environ, "PATH": "/nowhere"}
    return lambda: detail(run, NOW, env)


def ledger_report(folder: Path, count: int) -> Work:
    from ftsupervise.report.everything import report_of
    from ftsupervise.report.html import page
    from ftsupervise.rundir.paths import RunDir

    run = RunDir(a_ledger(folder, count))
    env = {**os.environ, "PATH": "/nowhere"}
    return lambda: page(report_of(run, NOW, env))


def ledger_tick(folder: Path, count: int) -> Work:
    root = a_ledger(folder, count)
    sections = "{{hang: {{}}, disk: [{{}}], checkpoints: {{}}, throughput: {{}}}}"
    return tick_of(f"name: long\nlaunch: {{{{command: a}}}}\nscheduler: local\nrun_dir: {root}\nwatch: {sections}\n", 1)


def checkpoints(*words: str) -> Callable[[Path, int], Work]:
    """Return the work of a command that a person types about so many committed checkpoints, in this process."""

    def make(folder: Path, count: int) -> Work:
        from click.testing import CliRunner

        from ftsupervise.checkpoints.commit import Origin, commit
        from ftsupervise.cli import ftsupervise

        run, where = folder / "run", folder / "run" / "checkpoints"
        (run / "switches").mkdir(parents=True)
        text = f"name: long\nscheduler: local\nlaunch: {{command: a}}\ncheckpoints: {{retain: {{last: {count}}}}}\n"
        (run / "run.yaml").write_text(f"{text}run_dir: {run}\n")
        long_ago = time.time() - 3600 * 24
        for step in range(1, count + 1):
            one = where / f"step-{step:08}"
            one.mkdir(parents=True)
            (one / "0.bin").write_bytes(b"w" * 100)
            os.utime(one / "0.bin", (long_ago + step,) * 2)
            commit(one, Origin(step=step))

        def typed() -> None:
            done = CliRunner().invoke(ftsupervise, ["checkpoints", *words, str(run)])
            assert done.exit_code == 0, f"{done.output[-500:]} {done.exception!r}"

        return typed

    return make


def log(folder: Path, count: int) -> Work:
    """The lines of one minute, by which the supervisor sees steps of a script without our guard, a piece every half second."""
    from ftsupervise.ranks.log_heartbeat import FollowedLog

    path = folder / "log"
    path.write_text("")
    each = count // 120 + 1
    starts = range(0, count, each)
    pieces = ["".join(LINE.format(n // 8) for n in range(at, min(count, at + each))) for at in starts]

    def minute() -> None:
        path.write_text("")
        follower = FollowedLog(None, path)
        with path.open("a") as file:
            for piece in pieces:
                file.write(piece)
                file.flush()
                follower.look()

    return minute


PARTS = {
    "ranks": Part("a second of datagrams, the newest of all, the hang detector", 100_000, ranks,
                  "one core: the ring takes a datagram of each node in turn, so the interval grows with the nodes"),
    "beat-files": Part("beat files, all read", 100_000, beat_files,
                       "the metadata server: a file of each rank is opened, so from a few thousand on agents speak instead"),
    "runs": Part("runs, one tick (the second)", 2_000, runs,
                 "the five minutes between two ticks: 100,000 runs take ten times as long as 10,000"),
    "ledger-status": Part("attempts, status", 1_000, ledger_status,
                          "nothing: beyond the bound of the ledger the oldest attempts but the first are not read"),
    "ledger-report": Part("attempts, report", 1_000, ledger_report,
                          "the browser: a report of 10,000 interruptions is a page of some megabytes"),
    "ledger-tick": Part("attempts, a tick of one run", 1_000, ledger_tick,
                        "the bound of eight seconds on a slow file server: pages without an end on record are read anew"),
    "checkpoints-list": Part("checkpoints, listed", 10_000, checkpoints("list"),
                             "the patience of the person: each manifest's head is read"),
    "checkpoints-prune": Part("checkpoints, the plan of prune", 10_000, checkpoints("prune", "--dry-run"),
                              "the metadata server: each manifest is compared with its files"),
    "checkpoints-upkeep": Part("checkpoints, upkeep", 10_000, checkpoints("upkeep", "--quiet"),
                               "the metadata server, as for prune"),
    "log": Part("log lines of a minute, read for steps", 1_000_000, log,
                "the bound of one look: only the end of what came is read", 100_000),
}  # fmt: skip
ROUNDS = 3


def inside(part: str, count: int, folder: Path) -> dict[str, float]:
    """Measure in this process."""
    work = PARTS[part].make(folder, count)
    with contextlib.redirect_stdout(io.StringIO()), Memory() as memory:
        spent: list[float] = []
        rounds = 0
        while rounds < ROUNDS and (rounds == 0 or sum(spent) < 2):
            before = _cpu()
            work()
            spent.append(_cpu() - before)
            rounds += 1
    own = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    return {"seconds": min(spent), "mb": max(own, memory.mb)}


def _cpu() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime


def measured(part: str, count: int) -> dict[str, float]:
    memory = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None  # what a disk takes is not what is asked here
    with tempfile.TemporaryDirectory(prefix="ftsupervise-scale-", dir=memory) as name:
        env = {**os.environ, "TMPDIR": name}
        command = [sys.executable, __file__, part, "--inside", name, "--count", str(count)]
        done = subprocess.run(command, env=env, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return found


def slope(points: list[tuple[int, float]]) -> float:
    """The exponent: the slope of the line through the logarithms."""
    xs, ys = [math.log(count) for count, _ in points], [math.log(max(seconds, 1e-6)) for _, seconds in points]
    middle, level = sum(xs) / len(xs), sum(ys) / len(ys)
    return sum((x - middle) * (y - level) for x, y in zip(xs, ys, strict=True)) / sum((x - middle) ** 2 for x in xs)


def counts(most: int) -> Iterator[int]:
    for share in (16, 4, 1):
        yield max(PER_NODE, most // share)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("parts", nargs="*", metavar="PART")
    parser.add_argument("--most", type=float, default=1.0, help="a share of the largest numbers")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--inside", help=argparse.SUPPRESS)
    parser.add_argument("--count", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.inside:
        print(json.dumps(inside(given.parts[0], given.count, Path(given.inside))))
        return
    if unknown := [name for name in given.parts if name not in PARTS]:
        parser.error(f"there is no part {unknown[0]}: {', '.join(PARTS)}")
    missed = []
    for name in given.parts or PARTS:
        part, points = PARTS[name], []
        print(f"\n{name}: {part.what}")
        for count in counts(int(part.most * given.most)):
            found = measured(name, count)
            points.append((count, found["seconds"]))
            print(f"{count:11,}  {found['seconds']:8.3f} s CPU  {found['mb']:5.0f} MB", flush=True)
        largest = f"{points[-1][0]:,}"
        figure(f"scale/{name}, CPU", points[-1][1], "s", largest)
        figure(f"scale/{name}, memory", found["mb"], "MB", largest)
        if points[-1][0] > part.whole:
            said = f"no exponent: of more than {part.whole:,} only a part is read"
        else:
            exponent = slope(points)
            said = f"exponent {exponent:.2f}"
            figure(f"scale/{name}, exponent", exponent, "power", f"{points[0][0]:,} to {largest}")
            if exponent > STEEP:
                missed.append(f"{name} grows with the power {exponent:.2f}")
        print(f"   {said}; at ten times {largest} this breaks first: {part.breaks}", flush=True)
        if name == "log" and points[-1][1] > 60:
            missed.append(f"{points[-1][0]:,} lines a minute take {points[-1][1]:.0f} s")
    if given.check and missed:
        raise SystemExit(f"missed: {'; '.join(missed)}")


if __name__ == "__main__":
    main()
