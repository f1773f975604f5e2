"""Decisions that are only told: nothing is done, it stands in the ledger, and what happened without it too."""

from __future__ import annotations

import json
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.rundir.observing import Observes, read_observing
from ftsupervise.rundir.switches import read_brake
from ftsupervise.truth import BACK, BRAKE, DECISIONS, HANG, OnlyTold
from tests.neighbours.supervised import SupervisedRun, alive
from tests.neighbours.typed import typed
from tests.story.test_checkpoint_quarantine import TRAIN as FAILS_FROM_A_CHECKPOINT
from tests.story.test_loss_in_a_run import RESUME, TRAIN

Until = Callable[..., Any]
TWO_RANKS = str(Path(__file__).with_name("two_ranks.py"))
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
HUNG = ("--in-place", "5", "--hang", "1", "--back-off", "0")
FAILS = ("--in-place", "4", "--same-failure", "2", "--back-off", "0", "--warm", "off")


def told(run: SupervisedRun, number: int = 1) -> tuple[OnlyTold, ...]:
    found = [one for one in run.attempts() if one.number == number]
    return found[0].observed if found else ()


def status(run: SupervisedRun) -> str:
    return typed("status", run.rundir.root).stdout


def test_a_hang_is_told_and_left_alone_and_that_it_went_on_is_told_too(run: SupervisedRun, until: Until) -> None:
    one = run.start(*HUNG, "--observe", "hang", "--", sys.executable, TWO_RANKS, STOPPED)
    until(lambda: told(run), "the page of the hang")
    assert told(run)[0].words().startswith("would have restarted it: rank 1 on ")
    assert "is stopped; no progress for" in told(run)[0].why
    said = until(lambda: (words := status(run)) * ("HUNG" in words), "the page of the progress, a moment later")
    assert "observes  only told: hang (ftsupervise observe --off" in said, said
    assert "it still stands" in said, said
    os.kill(run.ranks(2)[1], signal.SIGCONT)
    assert one.wait(60) == 0
    (first,) = run.attempts()
    assert (first.words, first.last_step) == ("finished", 120)
    assert [each.decision for each in first.observed] == [HANG]
    assert first.observed[0].then.startswith("it went on by itself after "), first.observed
    assert first.observed[0].then in status(run)
    report = typed("report", run.rundir.root, "--markdown").stdout
    assert "## What it would have done" in report and "went on by itself" in report, report


def test_one_command_has_a_hang_ended_that_was_only_told(run: SupervisedRun, until: Until) -> None:
    one = run.start(*HUNG, "--observe", "hang", "--", sys.executable, TWO_RANKS, STOPPED)
    until(lambda: told(run), "the page of the hang")
    ranks = run.ranks(2)
    assert all(alive(pid) for pid in ranks.values())
    said = typed("observe", "--off", run.rundir.root).stdout
    assert said == "run: every decision is carried out.\n"
    assert one.wait(60) == 0
    first, second = run.attempts()
    assert first.failure is not None and first.failure.kind == "hang"
    assert second.words == "finished"
    assert "attempt 1 ended" in status(run)


def test_a_person_has_decisions_only_told_while_the_job_runs(run: SupervisedRun, until: Until) -> None:
    one = run.start(
        *HUNG,
        "--",
        sys.executable,
        TWO_RANKS,
        f"import pathlib\nwhile not pathlib.Path('go').exists(): time.sleep(0.05)\n{STOPPED}",
    )
    until(lambda: run.ranks(2), "both ranks")
    assert "act on them:  ftsupervise observe --off" in typed("observe", run.rundir.root).stdout.lower()
    (run.rundir.attempt(1) / "go").touch()
    until(lambda: told(run), "the page of the hang")
    assert [each.decision for each in told(run)] == [HANG]
    os.kill(run.ranks(2)[1], signal.SIGCONT)
    assert one.wait(60) == 0
    assert [each.words for each in run.attempts()] == ["finished"]
    said = typed("observe", "--off", "--only", "brake", run.rundir.root).stdout
    assert said.startswith("run: only told: hang, exclusion, exit analysis, going back.")
    kept = read_observing(run.rundir)
    assert kept is not None and set(kept.of) == set(DECISIONS) - {BRAKE}


def test_a_chain_that_fails_again_and_again_is_not_held_and_says_when_it_would_have_been(run: SupervisedRun) -> None:
    script = "import sys; print('ValueError: no such shape', file=sys.stderr); sys.exit(1)"
    one = run.start(*FAILS, "--observe", "brake", "--", sys.executable, "-c", script)
    assert one.wait(60) == 1
    assert len(run.attempts()) == 5, "all that --in-place allows"
    assert read_brake(run.rundir) is None
    assert not told(run, 1) and [each.decision for each in told(run, 2)] == [BRAKE]
    assert told(run, 2)[0].words().startswith("would have held the chain: exit 1")
    assert not run.attempts()[-1].braked
    said = status(run)
    assert said.count("would have held the chain") == 1 and "3 attempts since: no step was made" in said, said


def test_what_the_program_itself_asks_for_is_done_all_the_same(run: SupervisedRun) -> None:
    one = run.start(*FAILS, "--observe", "brake", "--", sys.executable, "-c", "import sys; sys.exit(93)")
    assert one.wait(60) == 93
    assert len(run.attempts()) == 1
    assert read_brake(run.rundir) is not None


def test_nobody_is_asked_whether_it_is_finished_by_holding_the_chain(run: SupervisedRun) -> None:
    script = "import time\nfor n in range(1, 61): print('step', n, 'loss 1.0', flush=True); time.sleep(0.02)"
    words = ("--finished-by", "ask", "--observe", "brake", "--heartbeat-log", "auto")
    one = run.start(*FAILS, *words, "--", sys.executable, "-c", script)
    assert one.wait(60) == 0
    assert read_brake(run.rundir) is None and not run.rundir.finished.exists()
    (only,) = run.attempts()
    assert [each.what for each in only.observed] == ["held the chain, to ask whether it is finished"], only


def test_a_loss_that_is_no_number_for_a_while_does_not_stop_the_run(run: SupervisedRun) -> None:
    script = TRAIN.replace("{bad}", "place == 32").replace(
        "{fault}", "state['weights'] = 1.0 if place == 36 else state['weights']"
    )
    words = ("--in-place", "20", "--back-off", "0", "--warm", "off", *RESUME, "--observe", "going_back")
    one = run.start(*words, "--", sys.executable, "-c", script)
    assert one.wait(120) == 0, one.said()
    (only,) = run.attempts()
    assert (only.words, only.last_step) == ("finished", 60)
    assert [each.decision for each in only.observed] == [BACK]
    (page,) = only.observed
    assert (
        page.words()
        == "would have stopped the run and gone back to an older checkpoint: loss is not a number: nan at step 32"
    )
    assert page.then == "the loss is a number again at step 36: 1"
    assert "that the run stops for it is only told" in one.said()
    assert quarantined(run.rundir.checkpoints) == ()


def test_a_checkpoint_that_every_attempt_fails_from_is_not_set_aside(run: SupervisedRun) -> None:
    script = FAILS_FROM_A_CHECKPOINT.replace("{load}", "if health == 'bad': raise ValueError('size mismatch')")
    script = script.replace(
        "{fault}",
        "health = 'bad' if attempt == 1 and step == 20 else health; step == 23 and attempt == 1 and sys.exit(4)",
    )
    words = ("--in-place", "20", "--back-off", "0", "--warm", "off", "--observe", "going_back")
    one = run.start(*words, "--", sys.executable, "-c", script)
    assert one.wait(120) == 1, one.said()
    assert quarantined(run.rundir.checkpoints) == ()
    pages = [each for one in run.attempts() for each in one.observed]
    assert pages and {each.decision for each in pages} == {BACK}, pages
    assert pages[0].what == "set step-00000020 aside, and gone back to the one before"
    assert read_brake(run.rundir) is not None, "the brake acts"


def test_while_the_page_cannot_be_read_what_was_known_before_counts(run: SupervisedRun) -> None:
    asks = Observes(run.rundir, ("hang",), every=0.0)
    assert asks(HANG) and not asks(BRAKE)
    run.rundir.state.mkdir(parents=True)
    page = run.rundir.state / "observe"
    page.write_text(json.dumps({"of": ["brake", "a word of a newer version"]}))
    assert asks.all() == (BRAKE,)
    page.unlink()
    os.mkfifo(page)  # no page: not read, and nothing waits for it
    assert asks.all() == (BRAKE,)
