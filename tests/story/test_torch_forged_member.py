"""A stranger joins the quorum of real groups and offers them weights that are a program."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from ftsupervise.replicas.record import lighthouse_address
from ftsupervise.replicas.sources import pages_of
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import ledger
from tests.manual.blocks import ROOT
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun, outside_a_job

pytestmark = [pytest.mark.torch, pytest.mark.slow, pytest.mark.timeout(600)]
NAMES = ("g000", "g001", "g002")
_LINE = re.compile(r": step (\d+), (\d) of 3 ")


def newest(run: SupervisedRun, name: str) -> int:
    """The last step of a group."""
    text = "".join(path.read_text(errors="replace") for path in run.rundir.group(name).logs.glob("*.out"))
    return max((int(step) for step, _ in _LINE.findall(text)), default=0)


def said(run: SupervisedRun) -> str:
    logs = [path for name in NAMES for path in run.rundir.group(name).logs.glob("*.out")]
    return "".join(path.read_text(errors="replace") for path in (*logs, *run.rundir.attempts.glob("*/run.log")))


def train(run: SupervisedRun) -> None:
    """Have three groups train."""
    us = [sys.executable, "-m", "ftsupervise", "groups", "run", "--count", "3", "--min", "2", "--slowest-step", "2"]
    each = ["--in-place", "9", "--back-off", "0", "--warm", "off"]
    words = [sys.executable, str(ROOT / "examples" / "replicas" / "ddp.py"), "--steps", "1000000", "--step-time", "0.1"]
    all_words = ("--hang", "off", "--warm", "off", "--", *us, "--", *each, "--", *words, "--log-every", "1")
    run.start(*all_words, GLOO_SOCKET_IFNAME="lo", OMP_NUM_THREADS="1")
    wait_until(lambda: min(newest(run, name) for name in NAMES) > 20, "all groups train", 240)


def train_on(run: SupervisedRun) -> None:
    before = {name: newest(run, name) for name in NAMES}
    wait_until(lambda: min(newest(run, name) - before[name] for name in NAMES) > 10, "they train on", 240)


@pytest.mark.threat(
    "Somebody who reaches the lighthouse joins the quorum by the name of a group, tells a step that is a little higher than "
    "those of all others, and offers as weights a pickle that runs a program.",
    "A group takes the weights of those managers alone that the groups of its run have written into the run directory.",
)
def test_no_group_takes_the_weights_of_a_stranger_at_the_lighthouse(run: SupervisedRun) -> None:
    pytest.importorskip("torchft")
    mark = run.folder / "a program has run"
    train(run)
    address = lighthouse_address(run.rundir.replicas)
    out = run.folder / "stranger.out"
    with out.open("w") as file:
        argv = [sys.executable, str(Path(__file__).with_name("forged_member.py")), address, "3", str(mark)]
        stranger = subprocess.Popen(argv, stdout=file, stderr=file, env=outside_a_job(PYTHONPATH=str(ROOT)))
    try:
        wait_until(lambda: "in a quorum with" in out.read_text(), "the stranger is in", 120)
        wait_until(lambda: mark.exists() or "are not taken" in said(run), "its weights are taken, or are not", 120)
        assert not mark.exists(), "its program has run"
    finally:
        stranger.kill()
        stranger.wait(30)
    train_on(run)
    assert not mark.exists()
    assert [len(ledger(run.rundir.group(name))) for name in NAMES] == [1, 1, 1], "nobody was ended for what it told"


@pytest.mark.threat(
    "Somebody who reaches the manager of a group tells it, as a rank of the group does at each step, that the rank's weights "
    "are at an address of his own, where a pickle that runs a program waits for a group that comes back.",
    "Each rank writes down where its weights are, and they are copied from there alone.",
)
def test_no_group_takes_weights_from_where_a_stranger_has_told_a_manager_that_they_are(run: SupervisedRun) -> None:
    pytest.importorskip("torchft")
    mark = run.folder / "a program has run"
    train(run)
    address = lighthouse_address(run.rundir.replicas)
    others = [page.address for name in NAMES[:2] for page in pages_of(run.rundir.group(name))]
    assert len(others) == 2
    out = run.folder / "stranger.out"
    with out.open("w") as file:
        argv = [sys.executable, str(Path(__file__).with_name("forged_weights.py")), str(mark), address, *others]
        stranger = subprocess.Popen(argv, stdout=file, stderr=file, env=outside_a_job(PYTHONPATH=str(ROOT)))
    try:
        wait_until(lambda: "it tells" in out.read_text(), "the stranger tells it", 60)
        os.kill(next(one.pid for one in read_beats(run.rundir.group("g002")) if one.step), signal.SIGKILL)
        wait_until(
            lambda: mark.exists() or "are not taken" in said(run), "weights are taken from there, or are not", 120
        )
        assert not mark.exists(), "its program has run"
    finally:
        stranger.kill()
        stranger.wait(30)
    train_on(run)
    assert not mark.exists()
