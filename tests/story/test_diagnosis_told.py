"""What ``diagnose`` says of a run that fails stands where people look: in ``status``, in the message, in the report."""

from __future__ import annotations

import html
import json
import os
import re
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

import pytest

from ftsupervise.nodes.incidents import Incident, IncidentLog
from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

TWO_RANKS = Path(__file__).with_name("two_ranks.py")
RANK = """
import sys, time
def step(batch):
    return {}[batch]
rank = int(sys.argv[1])
print("step 1 loss 2.3", flush=True)
if rank == 2:
    step("shard-17")
time.sleep(0.5)
for _ in range(3):
    print(f"[rank{rank}]: RuntimeError: [../gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.1.1.3]:4217",
          file=sys.stderr, flush=True)
sys.exit(1)
"""
# Four of them, as srun --label shows them. One has an error of its own; the others lose it, and are three times as loud.
FOUR_RANKS = """
import subprocess, sys, threading
def relay(rank, pipe):
    for line in pipe:
        sys.stdout.write(f"{rank}: {line}")
        sys.stdout.flush()
ranks = [subprocess.Popen([sys.executable, "rank.py", str(n)], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
         for n in range(4)]
threads = [threading.Thread(target=relay, args=(n, one.stdout)) for n, one in enumerate(ranks)]
[one.start() for one in threads]
codes = [one.wait() for one in ranks]
[one.join() for one in threads]
sys.exit(max(codes))
"""


class Scene(NamedTuple):
    """A run that is over, and how to ask about it."""

    folder: Path
    rundir: RunDir
    env: dict[str, str]

    def type(self, *words: str | Path) -> str:
        return typed(*words, folder=self.folder, env=self.env).stdout

    def mail(self) -> str:
        return (self.folder / "mail").read_text()


Launch = Callable[[str, str], Scene]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Launch]:
    made: list[Scene] = []

    def launch(command: str, restart: str) -> Scene:
        (tmp_path / "rank.py").write_text(RANK)
        (tmp_path / "four_ranks.py").write_text(FOUR_RANKS)
        (tmp_path / "ftsupervise.yaml").write_text(
            "name: thesis\nscheduler: local\n"
            f"launch:\n  command: {command}\n  jobs: 1\n  restart: {restart}\n"
            f"nodes: {{directory: {tmp_path}/shared}}\n"
            f"watch: {{hang: null, disk: null}}\nalerts: {{receivers: [{{file: {{path: {tmp_path}/mail}}}}]}}\n"
        )
        env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
        made.append(Scene(tmp_path, RunDir(tmp_path / "runs" / "thesis"), env))
        typed("launch", folder=tmp_path, env=env, code=0)
        return made[0]

    yield launch
    for one in made:
        (one.rundir.switches / "kill-switch").touch()


@pytest.fixture
def braked(scene: Launch) -> Scene:
    """Rank 2 has an error of its own, three times, and the brake is on."""
    run = scene(f"{sys.executable} four_ranks.py", "{back_off: 0s, in_place: 5}")
    wait_until((run.rundir.state / "brake").exists, "the brake")
    wait_until((run.rundir.attempt(3) / "end.json").exists, "the end of the third attempt")
    return run


def cells(page: str, attempt: int) -> list[str]:
    """The texts in the row of an attempt, as a person reads them."""
    (row,) = re.findall(rf'<tr id="attempt-{attempt}".*?</tr>', page, re.S)
    return [html.unescape(one).strip() for one in re.split(r"<[^>]+>", row) if one.strip()]


def test_an_error_of_one_rank_is_told_everywhere_and_not_what_the_louder_ones_say(braked: Scene) -> None:
    root = braked.rundir.root
    braked.type("watch", root)
    said = "an error in the program, rank 2 (confidence: high): KeyError: 'shard-17' at rank.py:4 step"
    assert f"  why       attempt 3: {said}\n" in braked.type("status", root)
    assert f"\nwhy      {said}\nlook     ftsupervise diagnose {root}\n" in braked.mail()
    shown = cells(braked.type("report", root, "-o", "-"), 3)
    assert "an error in the program, rank 2 (confidence: high)" in shown
    assert shown[shown.index("the output of rank 2") + 1] == "KeyError: 'shard-17' at rank.py:4 step"
    assert shown[shown.index("before") + 1] == "the third of this kind in this run (before: attempts 1, 2)"
    assert shown[shown.index("next") + 1].startswith("stop: it failed in this way for the third time")
    written = braked.type("report", root, "--markdown")
    assert "- Attempt 3: **an error in the program, rank 2 (confidence: high)**\n" in written
    assert "  - the output of rank 2: `KeyError: 'shard-17' at rank.py:4 step`\n" in written
    asked = json.loads(braked.type("diagnose", root, "--json"))
    kept = read_page(VerdictPage, braked.rundir.attempt(3))
    assert kept is not None and asked["culprits"] == [2]
    assert (kept.kind, kept.confidence, kept.culprits) == (asked["kind"], asked["confidence"], (2,))
    assert (kept.history, kept.advice) == (tuple(asked["history"]), asked["advice"])


def test_the_message_of_a_run_that_is_gone_says_whose_error_it_was(scene: Launch) -> None:
    run = scene(f"{sys.executable} four_ranks.py", "{back_off: 0s, in_place: 0}")
    wait_until((run.rundir.attempt(1) / "end.json").exists, "the end of the attempt")
    wait_until(lambda: ": GONE (" in run.type("status", run.rundir.root), "the end of its job")
    run.type("watch", run.rundir.root)
    mail = run.mail()
    assert "FIRING (critical)  thesis: is-running job\n" in mail
    assert (
        "\nwhy      an error in the program, rank 2 (confidence: high): KeyError: 'shard-17' at rank.py:4 step\n"
        in mail
    )
    assert f"\nlook     ftsupervise diagnose {run.rundir.root}; squeue --me\n" in mail


def test_a_hang_that_was_ended_is_told_with_the_rank_that_did_not_join(scene: Launch, tmp_path: Path) -> None:
    hang = "{at_least: 1s, start: 60s}"
    node, at = os.uname().nodename, datetime.now(timezone.utc)
    shared = IncidentLog("another")
    shared.add([Incident(node, "hang", at, "sft")])
    assert not shared.write([tmp_path / "shared"])
    run = scene(f"{sys.executable} {TWO_RANKS} 'time.sleep(1000)'", f"{{back_off: 0s, in_place: 5, hang: {hang}}}")
    wait_until(run.rundir.finished.exists, "the end of the run", 120)
    wait_until((run.rundir.attempt(2) / "end.json").exists, "the end of the second attempt")
    run.type("watch", run.rundir.root)
    kept = read_page(VerdictPage, run.rundir.attempt(1))
    assert kept is not None and kept.culprits == (1,) and kept.is_known
    assert kept.advice.startswith("restart: ")
    assert kept.history == (f"{node} has 1 incident of other runs in two weeks, the newest {at:%Y-%m-%d}, hang of sft",)
    assert "ftsupervise diagnose" not in run.type("status", run.rundir.root), "it has finished: nobody need look"
    shown = cells(run.type("report", run.rundir.root, "-o", "-"), 1)
    assert kept.named() in shown and "rank 1" in kept.named()


def test_a_report_diagnoses_what_no_watch_has_seen_and_waits_for_no_fifo(braked: Scene) -> None:
    (log,) = braked.rundir.logs.glob("*.out")
    log.unlink()
    os.mkfifo(log)  # whoever opens it for reading waits for a writer
    shown = cells(braked.type("report", braked.rundir.root, "-o", "-"), 3)
    kept = read_page(VerdictPage, braked.rundir.attempt(3))
    assert kept is not None and kept.unseen and log.name in kept.unseen[0]
    assert shown[shown.index("unseen") + 1] == kept.unseen[0]
