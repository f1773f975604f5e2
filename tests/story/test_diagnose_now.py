"""``ftsupervise diagnose`` of a run that goes on, or hangs, at this moment: its ranks are asked, and nothing is ended."""

from __future__ import annotations

import json
import os
import signal
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.live_look import ASKED, LiveQuestion, ask, take_question
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

Until = Callable[..., Any]

TWO_RANKS = str(Path(__file__).with_name("two_ranks.py"))
PATIENT = ("--in-place", "5", "--hang", "600", "--back-off", "0")
WAITS = "exec('while not os.path.exists(\"go\"): time.sleep(0.05)')"


def train(*words: str) -> tuple[str, ...]:
    return (sys.executable, TWO_RANKS, *words)


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    """In memory: a rank that waits for a busy disk stands still for all to see."""
    with (
        tempfile.TemporaryDirectory(prefix="fts-now-", dir="/dev/shm") as folder,
        closing(SupervisedRun(Path(folder) / "run", tmp_path)) as one,
    ):
        yield one


def stands(run: SupervisedRun, until: Until) -> dict[int, int]:
    """Wait until both ranks have made the last step before the fault; returns their processes."""

    def found() -> dict[int, int]:
        page = run.rundir.attempt(1) / "progress.json"
        at = json.loads(page.read_text()) if page.exists() else {}
        return run.ranks(2) if at.get("step") == 74 and (at.get("stepped") or 0.0) > 1 else {}

    return dict(until(found, "a run that stands", 60))


def test_the_rank_that_keeps_the_others_waiting_is_named_while_it_does_and_nothing_is_ended(
    run: SupervisedRun, until: Until
) -> None:
    one = run.start(*PATIENT, "--", *train(WAITS))
    ranks = stands(run, until)

    def said() -> str:
        """A step is due for 15 seconds before the run is said to stand."""
        text = typed("diagnose", run.rundir.root, code=0).stdout
        return text if "it stands still" in text else ""

    text = until(said, "a run that is said to stand", 60)
    assert text.splitlines()[0].startswith("run, attempt 1, now: it stands still: "), text
    assert "rank 1 is in <module>" in text and "while rank 0 waits for it" in text
    assert "rank 0: waits for others in all_reduce (two_ranks.py:" in text
    assert "ranks 0-1: step 74 (train)" in text and "unless it moves" in text
    told = json.loads(typed("diagnose", run.rundir.root, "1", "--json", code=0).stdout)
    assert (told["attempt"], told["culprits"], told["now"]["state"]) == (1, [1], "it stands still")
    assert run.ranks(2) == ranks
    (run.rundir.attempt(1) / "go").touch()
    assert one.wait(60) == 0, "it has gone on"
    (only,) = run.attempts()
    assert only.words == "finished" and not (run.rundir.attempt(1) / "evidence" / "hang.txt").exists()


@pytest.mark.fault("A person asks a healthy run again and again how it is", "it goes on, and makes the same steps")
def test_a_healthy_run_that_is_asked_again_and_again_goes_on(run: SupervisedRun, until: Until) -> None:
    one = run.start("--in-place", "5", "--hang", "3", "--", *train("soak", "15", "0.02"))
    until(lambda: run.ranks(2), "steps of both ranks", 60)
    answers = []
    while one.poll() is None:
        answers.append(typed("diagnose", run.rundir.root, code=0).stdout)
    assert any("now: it goes on\n  step " in said for said in answers), answers
    assert not any("stands" in said for said in answers), answers
    assert one.wait(60) == 0
    (only,) = run.attempts()
    assert only.words == "finished"


def test_of_a_command_without_the_guard_the_processes_are_asked(run: SupervisedRun, until: Until) -> None:
    script = run.folder / "own.py"
    script.write_text("import os, time\nr, w = os.pipe()\nprint('step 1 loss 2', flush=True)\nos.read(r, 1)\n")
    both = f"for r in 0 1; do RANK=$r {sys.executable} {script} & done; wait"
    run.start("--", "sh", "-c", both)
    until(run.attempts, "an attempt", 60)

    def said() -> str:
        text = typed("diagnose", run.rundir.root, code=0).stdout
        return text if "ranks 0-1: is in read(), state S" in text else ""

    text = until(said, "both ranks in read()", 60)
    assert "ranks 0-1 showed no Python stack, as ranks without the guard" in text


def test_a_supervisor_that_does_not_answer_is_said_and_the_question_is_taken_back(
    run: SupervisedRun, until: Until
) -> None:
    one = run.start(*PATIENT, "--", *train(WAITS))
    stands(run, until)
    os.kill(one.supervisor, signal.SIGSTOP)
    try:
        said = typed("diagnose", run.rundir.root, code=0).stdout
    finally:
        os.kill(one.supervisor, signal.SIGCONT)
    assert "run, attempt 1, now: could not see" in said and "did not answer within 5 s" in said
    assert not (run.rundir.attempt(1) / ASKED).exists()
    (run.rundir.attempt(1) / "go").touch()
    assert one.wait(60) == 0


def test_the_attempt_that_failed_before_is_named_beside_the_one_that_runs(run: SupervisedRun, until: Until) -> None:
    run.start(*PATIENT, "--", *train("os.environ['FTSUPERVISE_ATTEMPT'] == '1' and os._exit(3)"))
    until(lambda: len(run.attempts()) == 2 and run.ranks(2), "a second attempt", 60)
    said = typed("diagnose", run.rundir.root, code=0).stdout
    if "now:" in said:  # it is a matter of a second
        assert "before    attempt 1 failed: ftsupervise diagnose " in said and said.count("run 1\n") == 1
    assert "now:" not in typed("diagnose", run.rundir.root, "1", code=0).stdout


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="needs files of two accounts")
@pytest.mark.threat("Another account asks for the stacks of a run's ranks", "the question is not believed")
def test_the_question_of_another_account_is_not_believed(tmp_path: Path) -> None:
    from datetime import datetime, timezone

    question = LiveQuestion("1", datetime.now(timezone.utc))
    ask(tmp_path, question)
    assert take_question(tmp_path) == question
    ask(tmp_path, question)
    os.chown(tmp_path / ASKED, 65534, 65534)
    assert take_question(tmp_path) is None
    (tmp_path / ASKED).symlink_to("/etc/passwd")
    assert take_question(tmp_path) is None
    assert not (tmp_path / ASKED).is_symlink()
