"""A training that measures its own goodput, killed now and then, and the account that the ledger gives of it: they agree."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from typing import Any

from ftsupervise.report.account import Spent, account
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.progress import read_progress, read_steps
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]

# Measures itself: a line for each step and each save with the seconds since the line before, so that no moment without a turn
# on a busy machine is lost between two. Kills itself in its first attempts.
TRAIN = """
import json, os, sys, time
from pathlib import Path
from ftsupervise import Guard
folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
first = max((int(p.name) for p in folder.glob("[0-9]*")), default=0) + 1
own = open(f"own-{attempt}", "w", buffering=1)
guard = Guard(beat_every=0.5, poll=0.2)
guard.report(last_step=LAST)
time.sleep(0.4)
told_at = time.monotonic()
def told(what, step):
    global told_at
    now = time.monotonic()
    own.write(json.dumps([what, step, now - told_at]) + "\\n")
    told_at = now
for step in range(first, LAST + 1):
    time.sleep(0.03)
    if attempt <= KILLS and step == first + 85:
        if attempt % 2:
            os.kill(os.getpid(), 9)
        raise RuntimeError("a fault")
    guard.loss(1 / step)
    guard.step(step)
    told("step", step)
    if step % 30 == 0:
        with guard.phase("save"):
            time.sleep(0.15)
            (folder / str(step)).touch()
            guard.saved(step)
        told("save", step)
guard.finished(LAST)
"""


def measured(run: SupervisedRun) -> dict[str, float]:
    """What the training wrote down: the seconds of the steps that counted, of those made again, and of the saves."""
    found, highest = {"train": 0.0, "redo": 0.0, "save": 0.0}, 0
    for attempt in run.attempts():
        lines = (run.folder / f"own-{attempt.number}").read_text().splitlines()
        for what, step, seconds in map(json.loads, lines):
            found["save" if what == "save" else "train" if step > highest else "redo"] += seconds
        highest = max([highest, *(json.loads(line)[1] for line in lines)])
    return found


def test_the_account_agrees_within_a_point_with_what_the_training_measured_itself(run: SupervisedRun) -> None:
    text = TRAIN.replace("LAST", "330").replace("KILLS", "3")
    one = run.start("--in-place", "9", "--back-off", "0.2", "--", sys.executable, "-c", text)
    assert one.wait(120) == 0, one.said()
    attempts = run.attempts()
    assert len(attempts) == 4
    found = account(attempts, launches(run.rundir), datetime.now(timezone.utc))
    own, shares, total = measured(run), found.shares(), found.total
    told = ", ".join(f"{kind.value} {100 * share:.2f} %" for kind, share in shares.items())
    for kind in (Spent.TRAIN, Spent.REDO, Spent.SAVE):
        assert abs(shares[kind] - own[kind.value] / total) < 0.01, f"{told}; measured {own} of {total:.2f} s"
    goodput = found.goodput()
    assert goodput is not None and abs(goodput.least - own["train"] / total) < 0.01
    assert shares[Spent.UNKNOWN] == 0, "the guard tells all"
    assert shares[Spent.RESTART] > 0.1

    page = read_progress(run.rundir, 4)
    assert page is not None
    assert (page.ahead, page.saved, page.last_step) == (330, 330, 330)
    record = read_steps(run.rundir)
    assert record.spans[-1].step == 330
    made = sum(span.made for span in record.spans)
    assert made >= 330, "those made again count too"
    assert record.spans[-1].loss is not None


def test_a_command_without_the_guard_is_unknown_time_and_so_it_is_said(run: SupervisedRun) -> None:
    one = run.start("--", "sleep", "1")
    assert one.wait(60) == 0
    found = account(run.attempts(), (), datetime.now(timezone.utc))
    assert found.blind == (1,)
    assert found.seconds()[Spent.UNKNOWN] >= 1.0
    assert found.seconds()[Spent.TRAIN] == 0


def test_the_account_of_a_run_that_still_runs_is_seconds_old(run: SupervisedRun, until: Until) -> None:
    text = TRAIN.replace("LAST", "100000").replace("KILLS", "0")
    run.start("--in-place", "9", "--", sys.executable, "-c", text)
    page = until(lambda: (page := read_progress(run.rundir, 1)) and (page.ahead or 0) > 60 and page, "a page", 60)
    assert page.rate is None or page.rate > 0
    assert (datetime.now(timezone.utc) - page.at).total_seconds() < 60
    found = account(run.attempts(), launches(run.rundir), datetime.now(timezone.utc), running=True)
    seconds = found.seconds()
    assert seconds[Spent.TRAIN] > 1.5
    assert seconds[Spent.SAVE] > 0.2
    assert seconds[Spent.UNKNOWN] == 0
