"""The example trains for real, is interrupted in every way, and ends with the same bits."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours import needs
from tests.neighbours.supervised import Program, outside_a_job

pytestmark = needs.sklearn
TRAIN = Path(__file__).parents[2] / "examples" / "minimal" / "train.py"
Until = Callable[..., Any]
Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start one rank of the example in ``tmp_path``; whatever still runs is ended after the test."""
    running: list[Program] = []

    def one(*arguments: str, rank: int = 0, world: int = 1, run: Path | None = None, **env: str) -> Program:
        if world > 1:
            env |= {"RANK": str(rank), "WORLD_SIZE": str(world)}
        if run is not None:
            (run / "switches").mkdir(parents=True, exist_ok=True)
            env |= {"FTSUPERVISE_RUN_DIR": str(run), "FTSUPERVISE_GUARD_POLL": "0"}
        argv = [sys.executable, str(TRAIN), "--log-every", "1", *arguments]
        running.append(Program(argv, tmp_path, outside_a_job(**env), tmp_path / f"out-{len(running)}"))
        return running[-1]

    yield one
    for program in running:
        program.end()


def steps(process: Program) -> list[int]:
    return [int(n) for n in re.findall(r"^step (\d+) ", process.said(), re.M)]


def digest(process: Program) -> str:
    found = re.search(r"finished at step \d+, weights (\w+)", process.said())
    assert found, process.said()
    return found[1]


def test_an_interrupted_run_of_two_ranks_ends_with_the_bits_of_an_undisturbed_one(
    start: Start, until: Until, tmp_path: Path
) -> None:
    long = ("--steps", "300", "--save-every", "40")

    def both(**env: str) -> list[Program]:
        return [start(*long, "--step-time", env.pop("time", "0"), rank=r, world=2, **env) for r in (0, 1)]

    calm = both(FTSUPERVISE_CHECKPOINT_DIR=str(tmp_path / "calm"))
    assert [p.wait(120) for p in calm] == [0, 0], calm[0].said()

    first = both(FTSUPERVISE_CHECKPOINT_DIR=str(tmp_path / "rough"), time="0.03")
    until(lambda: len(steps(first[0])) > 60)
    first[1].kill()
    assert first[0].wait(60) != 0, "the other rank must not wait for a dead one"
    second = both(FTSUPERVISE_CHECKPOINT_DIR=str(tmp_path / "rough"), time="0.03")
    until(lambda: len(steps(second[0])) > 60)
    second[0].send_signal(signal.SIGUSR1)
    assert [p.wait(60) for p in second] == [0, 0]
    third = both(FTSUPERVISE_CHECKPOINT_DIR=str(tmp_path / "rough"))
    assert [p.wait(120) for p in third] == [0, 0]

    assert "resumed" in second[0].said() and "resumed" in third[0].said()
    assert digest(third[0]) == digest(calm[0])


def test_a_kill_switch_ends_it_with_no_step_trained_after_it_was_seen(
    start: Start, until: Until, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = start("--steps", "5000", run=run)
    until(lambda: len(steps(train)) > 20)
    (run / "switches" / "kill-switch").write_text("no longer needed")
    assert train.wait(60) == 0
    seen = re.search(r"no longer needed: saving and stopping at step (\d+)", train.said())
    assert seen, train.said()
    assert max(steps(train)) == int(seen[1])
    assert f"saved step {seen[1]}" in train.said()


def test_a_save_switch_leaves_exactly_one_more_checkpoint_and_is_gone(
    start: Start, until: Until, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    train = start("--steps", "100000", "--save-every", "200000", "--step-time", "0.01", run=run)
    until(lambda: len(steps(train)) > 20)
    switch = run / "switches" / "save-switch"
    switch.touch()
    until(lambda: not switch.exists())
    (run / "switches" / "kill-switch").touch()
    assert train.wait(120) == 0
    assert len(re.findall("^saved step", train.said(), re.M)) == 2, "one asked for, one at the end"
    assert len(list((tmp_path / "checkpoints").glob("step-*"))) == 2


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGTERM])
def test_a_warning_to_one_rank_stops_both_at_the_same_step(start: Start, until: Until, number: int) -> None:
    ranks = [start("--steps", "5000", "--step-time", "0.01", rank=r, world=2) for r in (0, 1)]
    until(lambda: len(steps(ranks[0])) > 20)
    ranks[1].send_signal(number)
    assert [p.wait(60) for p in ranks] == [0, 0]
    stopped = re.search(r"stopped at step (\d+)", ranks[0].said())
    assert stopped and max(steps(ranks[0])) == int(stopped[1])


def test_forked_workers_die_of_sigterm_and_not_of_the_warning(tmp_path: Path) -> None:
    code = """
import multiprocessing, os, signal, time
from ftsupervise import Guard
guard = Guard()
fork = multiprocessing.get_context("fork")
up = fork.Event()
worker = fork.Process(target=lambda: (up.set(), time.sleep(60)))
worker.start()
assert up.wait(60)
os.kill(worker.pid, signal.SIGUSR1)
worker.join(0.3)
assert worker.is_alive(), worker.exitcode
worker.terminate()
worker.join(20)
assert worker.exitcode == -signal.SIGTERM, worker.exitcode
assert not guard.step(1)
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


def test_the_guard_loads_the_standard_library_only() -> None:
    code = """
import sys, sysconfig
before = set(sys.modules)
from ftsupervise import Guard, Decision
Guard(poll=0, memory=0.99).step(1)
foreign = {n.partition(".")[0] for n in set(sys.modules) - before} - set(sys.stdlib_module_names) - {"ftsupervise"}
print(sorted(foreign))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_a_step_with_nothing_due_costs_some_empty_calls(tmp_path: Path) -> None:
    """A wide bound against a system call or an allocation creeping in; benchmarks/guard.py has the figures."""
    from timeit import repeat

    from ftsupervise import Guard

    def empty(step: int) -> None:
        return None

    with Guard(tmp_path, poll=3600, signals=()) as guard:
        guard.step(0)
        bare = min(repeat(lambda: empty(1), number=20_000, repeat=9))
        asked = min(repeat(lambda: guard.step(1), number=20_000, repeat=9))
    assert asked < 10 * bare
