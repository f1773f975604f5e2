"""The figures of reports beside a count of the raw pages by other code: runs with lost nodes, hangs, a brake, a queue, and a
script of which only its log is known.

``count`` knows the pages alone: ``launch.json``, ``start.json``, ``end.json`` and ``progress.json``. The night with nine faults
is counted in ``test_report_by_hand.py``; ``test_time_account_of_a_run.py`` has a training that measures itself.
"""

from __future__ import annotations

import json
import sys
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.report.account import Ettr
from ftsupervise.report.everything import ReportFacts, report_of
from ftsupervise.report.plan import plan_rows
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.prepared_account import NOW, PreparedAccount
from tests.neighbours.supervised import SupervisedRun, outside_a_job

NAMES = ("fine", "hang", "crash-loop", "queue-bound")


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> PreparedAccount:
    return PreparedAccount(tmp_path_factory.mktemp("account"), NAMES)


def read(path: Path) -> dict[str, Any]:
    page: dict[str, Any] = json.loads(path.read_text())
    return page


def clock(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def count(folder: Path, now: float) -> dict[str, float]:
    """Seconds of each kind, ends by a fault, steps made again, and the three ratios."""
    found = dict.fromkeys(
        ("train", "save", "redo", "detect", "restart", "queue", "braked", "held", "faults", "again"), 0.0
    )
    launched = min(clock(read(page)["at"]) for page in (folder / "launches").glob("*/launch.json"))
    made, before, over = set[int](), dict[str, Any](), launched
    first_begin, finished = 0.0, False
    for attempt in sorted((folder / "attempts").iterdir()):
        start = read(attempt / "start.json")
        begin = clock(start["at"])
        first_begin = first_begin or begin
        if not before:
            found["queue"] += begin - over
        elif before["job"] == start["job_id"]:
            found["restart"] += begin - over
        else:
            asked = before["end"]["cause"]["kind"] == "kill switch"
            found["braked" if before["end"]["braked"] else "held" if asked else "queue"] += begin - over
        steps = set[int]()
        if (attempt / "end.json").exists():
            end = read(attempt / "end.json")
            length, worked, failed = end["seconds"], end["worked"], bool(end["failure"])
            finished = end["cause"]["kind"] == "finished"
            found["faults"] += failed
            if end["first_step"]:
                steps = set(range(end["first_step"], end["last_step"] + 1))
            ready, saving = end["ready"] if steps else worked, end["saving"] or 0.0
        else:
            end, page = {}, read(attempt / "progress.json")
            length, failed = now - begin, True
            stands = now - page["active_at"] > 600
            worked = page["active_at"] - begin if stands else length
            steps = set(range(page["first"], page["ahead"] + 1))
            ready, saving = page["first_at"] - begin, page["saving"]
        share = len(steps & made) / len(steps) if steps else 0.0
        found["again"] += len(steps & made)
        found["restart"] += ready + (0.0 if failed else length - worked)
        found["detect"] += length - worked if failed else 0.0
        found["save"] += saving
        found["redo"] += share * (worked - ready - saving)
        found["train"] += (1 - share) * (worked - ready - saving)
        made |= steps
        before, over = {"job": start["job_id"], "end": end}, begin + length
    if before["end"] and not finished:
        found["braked" if before["end"]["braked"] else "queue"] += now - over
    until = over if finished else now
    found["goodput"] = found["train"] / (until - launched)
    found["meta"] = found["train"] / (until - launched - found["braked"] - found["held"])
    found["byterobust"] = found["train"] / (until - first_begin)
    return found


def one(ratio: Ettr | None) -> float:
    assert ratio is not None and ratio.least == ratio.most
    return ratio.least


@pytest.mark.parametrize("name", NAMES)
def test_the_figures_agree_with_a_count_of_the_raw_pages_within_a_hundredth(
    account: PreparedAccount, name: str
) -> None:
    report, hand = account.report(name), count(account.folder / name, NOW.timestamp())
    time = report.detail.account
    for kind, seconds in time.seconds().items():
        close = pytest.approx(hand.get(kind.value, 0.0), rel=0.01, abs=0.0005 * time.total)
        assert seconds == close, (kind, hand)
    assert one(time.goodput()) == pytest.approx(hand["goodput"], rel=0.01)
    assert one(time.ettr_meta()) == pytest.approx(hand["meta"], rel=0.01)
    assert one(time.ettr_byterobust()) == pytest.approx(hand["byterobust"], rel=0.01)
    assert sum(not end.planned and not end.goes_on for end in report.incidents) == hand["faults"]
    assert_again(report, hand)


def assert_again(report: ReportFacts, hand: dict[str, float]) -> None:
    rows = [row for row in plan_rows(report) if row.what == "Steps made again"]
    said = rows[0].actual.split()[0].replace(",", "") if rows else "0"
    assert int(said if said.isdigit() else 0) == hand["again"]


# It prints its steps, as scripts do, and dies twice; its third start comes to the end.
SCRIPT = """
import os, sys, time
from pathlib import Path
first = int(Path("saved").read_text()) + 1 if Path("saved").exists() else 1
for step in range(first, 301):
    time.sleep(0.02)
    print(f"step {step} loss {1 / step:.4f}", flush=True)
    if step % 40 == 0:
        Path("saved").write_text(str(step))
    if step in (110, 205) and not Path(f"died-{step}").exists():
        Path(f"died-{step}").touch()
        os.kill(os.getpid(), 9)
"""


def test_steps_and_restarts_of_a_script_whose_log_alone_is_known_agree_with_a_count_of_its_lines(
    run: SupervisedRun,
) -> None:
    (run.folder / "train.py").write_text(SCRIPT)
    job = run.start("--in-place", "9", "--back-off", "0.1", "--", sys.executable, "train.py")
    assert job.wait(120) == 0, job.said()
    lines = [int(line.split()[1]) for line in job.said().splitlines() if line.startswith("step ")]
    again = len(lines) - len(set(lines))
    assert again == (110 - 80) + (205 - 200)
    (run.rundir.config).write_text("name: run\nscheduler: local\nlaunch: {command: python train.py}\n")
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(run.folder / "state"))
    report = report_of(RunDir(run.rundir.root), datetime.now(timezone.utc), env)
    assert [end.kind for end in report.incidents if not end.planned] == ["killed process"] * 2
    assert_again(report, {"again": again})
    ends = [read(page) for page in sorted(run.rundir.attempts.glob("*/end.json"))]
    seconds = report.detail.account.seconds()
    steps = [(end["first_step"], end["last_step"]) for end in ends]
    assert steps == [(1, 110), (81, 205), (201, 300)]
    # a log has no phases: from the first step on, all is steps; the first one had begun before it was printed
    a_step = [(end["worked"] - end["ready"]) / (last - first) for end, (first, last) in zip(ends, steps, strict=True)]
    hand = sum(end["worked"] - end["ready"] + step for end, step in zip(ends, a_step, strict=True))
    trained = sum(spent for kind, spent in seconds.items() if kind.value in ("train", "redo"))
    assert trained == pytest.approx(hand, rel=0.01)
