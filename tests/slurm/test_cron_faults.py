"""Exactly one live chain, and no slot twice, whatever happens: each fault here, twenty times in the soak below."""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftsupervise.sandbox import Sandbox
from tests.slurm import cron_injected as faults
from tests.slurm.cron_lab import Lab, OneCron

pytestmark = pytest.mark.slurm


@pytest.fixture
def home() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="fts-cron-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture
def make_lab(home: Path, make_sandbox: Callable[..., Sandbox]) -> Callable[..., Lab]:  # the jobs end before their home
    def make(chains: int, period: float, *, limit: float = 12.0, name: str = "lab") -> Lab:
        sandbox = make_sandbox(nodes=3, message_timeout=4, slurmd_timeout=6)
        crons = [OneCron(sandbox, home / f"{name}-{n}", period, limit) for n in range(chains)]
        lab = Lab(sandbox, crons, random.Random(os.environ.get("FTSUPERVISE_TEST_SEED", "7")))
        lab.start()
        return lab

    return make


EACH = {
    "killed before it queued its successor": faults.killed_at_once,
    "killed after it queued its successor": faults.killed_after_it_queued,
    "a pending successor cancelled": faults.successor_cancelled,
    "requeued": faults.requeued,
    "two installs at once": faults.installed_by_two,
    "an entry hangs": faults.entry_hangs,
    "the whole chain cancelled, a run notices": faults.everything_cancelled_and_a_run_notices,
}


@pytest.mark.fault(
    "slurmctld, slurmd or a job of the cron chain is killed, paused or cancelled",
    "one chain is left, no slot runs twice",
)
def test_each_fault_leaves_exactly_one_chain_and_no_slot_twice(
    make_lab: Callable[..., Lab], capsys: pytest.CaptureFixture[str]
) -> None:
    """In two labs, beside each other: the faults of one chain, and those of a whole cluster. The controller is killed last: it
    forgets a chain that was installed in its last five seconds."""
    # an entry that hangs makes it long, and a story test has it
    pairs = [(name, fault) for name, fault in EACH.items() if fault is not faults.entry_hangs]

    def of_one_chain() -> Lab:
        lab = make_lab(4, 3, name="chain")
        for four in (pairs[:4], 2 * pairs[4:]):
            lab.mixed(four)
        return lab

    def of_the_cluster() -> Lab:
        lab = make_lab(2, 3, name="cluster")
        lab.whole("node crashed", lambda: faults.nodes_crash(lab))
        lab.whole("scheduler late by more than all spares", lambda: faults.scheduler_late(lab, 4.5))
        lab.whole("controller killed", lambda: faults.controller_down(lab, lab.luck.uniform(2, 6)))
        return lab

    with ThreadPoolExecutor() as beside:
        labs = [one.result() for one in [beside.submit(of_one_chain), beside.submit(of_the_cluster)]]
    with capsys.disabled():
        for line in (line for lab in labs for line in lab.table()):
            print(f"\n  {line}", end="")
    counts = {name: count for lab in labs for name, count in lab.counts.items()}
    assert len(counts) == len(EACH) - 1 + 3
    assert {name: count.injected for name, count in counts.items() if count.injected < 1} == {}


@pytest.mark.slow
@pytest.mark.timeout(7200)
def test_soak_each_fault_twenty_times_at_random_moments_with_ten_second_slots(
    make_lab: Callable[..., Lab], capsys: pytest.CaptureFixture[str]
) -> None:
    lab = make_lab(chains=10, period=10)
    wanted = int(os.environ.get("FTSUPERVISE_SOAK", "20"))

    def often(name: str, once: Callable[[], None]) -> None:
        for _ in range(3 * wanted):
            once()
            with capsys.disabled():
                print(f"\n  {list(lab.table())[-1]}", end="", flush=True)
            if lab.counts[name].injected >= wanted:
                return

    for name, fault in {**EACH, "killed at a random moment": faults.killed_somewhere}.items():
        often(name, lambda name=name, fault=fault: lab.each(name, fault))  # type: ignore[misc]
    for name, cluster in {
        "controller killed, down for up to 40 s": lambda: faults.controller_down(lab, lab.luck.uniform(1, 40)),
        "controller hangs for up to 25 s": lambda: faults.controller_hangs(lab, lab.luck.uniform(1, 25)),
        "node crashed": lambda: faults.nodes_crash(lab),
        "scheduler late by up to 8 slots": lambda: faults.scheduler_late(lab, lab.luck.uniform(3, 8)),
    }.items():
        often(name, lambda name=name, cluster=cluster: lab.whole(name, cluster))  # type: ignore[misc]
    for one in lab.crons:
        one.limit = 300.0
        one.write_settings()
        one.install()
        long = one.cron.folder("minutely") / "long"
        long.write_text("#!/bin/sh\nsleep 600\n")
        long.chmod(0o755)
    name = "killed at the time limit of its job"
    often(name, lambda: lab.each(name, faults.time_limit_reached))
    with capsys.disabled():
        for line in lab.table():
            print(f"\n  {line}", end="")
    assert {name: count.injected for name, count in lab.counts.items() if count.injected < wanted} == {}
