"""Decisions that are only told: nothing is done, it stands in the ledger, and what happened without it too."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.rundir import members
from ftsupervise.rundir.observing import Observes, read_observing, write_observing
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake
from ftsupervise.scheduler.local import Local
from ftsupervise.truth import BACK, BRAKE, DECISIONS, EXCLUSION, HANG, OnlyTold
from tests.neighbours.supervised import SupervisedRun, alive
from tests.neighbours.typed import typed
from tests.story.test_checkpoint_quarantine import TRAIN as FAILS_FROM_A_CHECKPOINT
from tests.story.test_loss_in_a_run import ON_DISK, RESUME, TRAIN

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
    assert "; nothing ends it by itself, because a hang is only told)" in said.splitlines()[0]
    assert f"do        ftsupervise observe --off --only hang {run.rundir.root} " in said
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
    assert kept is not None and set(kept.of or ()) == set(DECISIONS) - {BRAKE}


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
    assert pages[0].what == "set step-00000020 aside, and gone back to step-00000010"
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


def test_a_loss_that_was_no_number_at_the_end_makes_the_next_attempt_go_back_nowhere(run: SupervisedRun) -> None:
    script = TRAIN.replace("{bad}", "attempt == 1 and place == 32").replace(
        "{fault}", "state['step'] == 47 and attempt == 1 and sys.exit(4)"
    )
    words = ("--in-place", "20", "--back-off", "0", "--warm", "off", *ON_DISK, "--observe", "going_back")
    one = run.start(*words, "--", sys.executable, "-c", script)
    assert one.wait(120) == 0, one.said()
    second = run.attempts()[1]
    assert second.resumed is not None and (second.resumed.checkpoint, second.resumed.skip) == ("step-00000045", 0)
    assert quarantined(run.rundir.checkpoints) == ()
    page = second.observed[0]
    assert (
        page.what == "gone back to step-00000020, and set step-00000045, step-00000040, step-00000035 aside with 2 more"
    )
    assert page.why.startswith("loss is not a number: ")


def test_the_only_checkpoint_is_not_said_to_go_aside(run: SupervisedRun) -> None:
    script = FAILS_FROM_A_CHECKPOINT.replace("{load}", "if found: raise ValueError('size mismatch')")
    script = script.replace("{fault}", "step == 13 and sys.exit(4)")
    words = ("--in-place", "20", "--back-off", "0", "--warm", "off", "--observe", "going_back")
    one = run.start(*words, "--", sys.executable, "-c", script)
    assert one.wait(120) == 1, one.said()
    assert not [each for attempt in run.attempts() for each in attempt.observed], "there is none before it"


def test_members_that_are_used_up_where_no_node_is_left_do_not_hold_the_chain(run: SupervisedRun) -> None:
    """Each fails in another way, and its node, which a person has excluded meanwhile, is not used again."""
    here = run.rundir.nodes / "exclude" / os.uname().nodename
    for number in (1, 2, 3):
        script = f"import pathlib, sys; p = pathlib.Path({str(here)!r}); p.parent.mkdir(parents=True, exist_ok=True)"
        one = run.start(
            *("--in-place", "4", "--back-off", "0", "--warm", "off", "--observe", "brake", "--"),
            *(sys.executable, "-c", f"{script}; p.touch(); sys.exit({number})"),
            FTSUPERVISE_JOB_ID=f"local-7_{number}",
        )
        assert one.wait(60) == number, one.said()
    assert read_brake(run.rundir) is None
    assert [each.decision for each in told(run, 3)] == [BRAKE], run.log(3)
    assert not told(run, 2) and "the next member, if any, takes over" in run.log(3).splitlines()[-1]


def test_that_the_chain_would_be_held_is_told_once_though_members_end_without_an_attempt(run: SupervisedRun) -> None:
    one = run.start("--observe", "brake", "--", sys.executable, "-c", "", FTSUPERVISE_JOB_ID="local-7_1")
    assert one.wait(60) == 0
    for number in range(2, 7):
        members.begin(run.rundir, f"local-7_{number}", datetime.now(timezone.utc), 1)
        members.end(run.rundir, f"local-7_{number}", "no node answers", None)
    first: tuple[OnlyTold, ...] = ()
    for number in (7, 8):
        shut = ("--observe", "brake", "--back-off", "0", "--", sys.executable, "-c", "")
        one = run.start(*shut, FTSUPERVISE_JOB_ID=f"local-7_{number}")
        assert one.wait(60) == 0, one.said()
        first = first or told(run, 1)
        assert [each.decision for each in first] == [BRAKE]
        assert told(run, 1) == first
        for made in run.rundir.attempts.glob("0*"):
            if made.name != "0001":
                shutil.rmtree(made)


def test_a_node_that_its_health_command_refuses_is_in_the_ledger_of_each_attempt_and_told_once(
    run: SupervisedRun,
) -> None:
    words = (*FAILS, "--health", "echo the GPU is lost; exit 2", "--health-when", "start", "--observe", "exclusion")
    one = run.start(*words, "--", sys.executable, "-c", "import sys; sys.exit(3)")
    assert one.wait(60) == 3, one.said()
    pages = [told(run, each.number) for each in run.attempts()]
    assert len(pages) == 2 and all([each.decision for each in page] == [EXCLUSION] * len(page) for page in pages), pages
    assert [each.words() for each in pages[0]] == [each.words() for each in pages[1]]
    assert "the GPU is lost" in pages[0][0].why
    assert one.said().count("would have left out") == 1
    assert status(run).count("would have left out") == 1


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Of a run on this machine whose command begins once there is a file ``go``."""
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FTSUPERVISE_UNFIT_SECONDS", "0.1")
    setup = "until [ -e go ]; do sleep 0.05; done; if [ -e unfit ]; then exit 3; fi"
    (tmp_path / "ftsupervise.yaml").write_text(
        f"name: a\nscheduler: local\nlaunch:\n  command: sleep 1000\n  jobs: 2\n  setup: '{setup}'\n"
    )
    yield tmp_path
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def test_what_a_launch_only_tells_is_known_before_its_first_attempt(folder: Path) -> None:
    assert typed("launch", "--observe", folder=folder).returncode == 0
    assert "observes  all decisions are only told" in typed("status", ".", folder=folder).stdout
    said = typed("observe", "--off", "--only", "brake", ".", folder=folder).stdout
    assert said.startswith("a: only told: hang, exclusion, exit analysis, going back."), said


def test_a_launch_that_is_refused_leaves_what_a_person_has_said(folder: Path) -> None:
    rundir = RunDir(folder / "runs" / "a")
    assert typed("launch", folder=folder).returncode == 0
    assert typed("observe", ".", folder=folder).returncode == 0
    tools = folder / "tools"
    tools.mkdir()
    for name, lines in {"sbatch": "echo 'invalid partition specified' >&2; exit 1", "squeue": "", "sinfo": ""}.items():
        (tools / name).write_text(f"#!/bin/sh\n{lines}\n")
        (tools / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tools}:{os.environ['PATH']}"}
    refused = typed("launch", "--scheduler", "slurm", folder=folder, env=env)
    assert refused.returncode != 0 and "invalid partition" in refused.stderr, refused.stderr
    kept = read_observing(rundir)
    assert kept is not None and kept.of == DECISIONS
    typed("launch", "--again", folder=folder)
    assert read_observing(rundir) is None


def test_the_script_of_the_job_follows_no_link_that_says_what_is_only_told(folder: Path, until: Until) -> None:
    rundir = RunDir(folder / "runs" / "a")
    assert typed("launch", "--observe", folder=folder).returncode == 0
    (folder / "elsewhere").write_text('{"of": []}')
    (rundir.state / "observe").symlink_to(folder / "elsewhere")
    (folder / "unfit").touch()
    (folder / "go").touch()
    until(lambda: not Local().queue() or read_brake(rundir), "the end of both members, or the brake")
    assert read_brake(rundir) is None


STOPS = """
import os, signal, time
for step in range(1, 2000):
    print(f"iter {step}: loss 3.1, time 80.12ms", flush=True)
    if step == 20:
        print(f"pid {os.getpid()}", flush=True)
        os.kill(os.getpid(), signal.SIGSTOP)
    time.sleep(0.05)
"""


def test_the_watch_calls_it_hung_as_soon_as_status_does(tmp_path: Path, folder: Path, until: Until) -> None:
    (folder / "train.py").write_text(STOPS)
    (folder / "ftsupervise.yaml").write_text(
        f"name: a\nscheduler: local\nlaunch:\n  command: {sys.executable} train.py\n  restart: {{hang: {{at_least: 2s}}}}\n"
        "act: {hang: observe}\n"
    )
    typed("launch", folder=folder, code=0)
    said = until(lambda: (words := typed("status", ".", folder=folder).stdout) * ("HUNG" in words), "the hang", 120)
    assert "it still stands" in said, said
    seen = typed("check", "hang", folder=folder, code=2).stdout
    assert seen.startswith("CRITICAL hang") and "is stopped; no progress for" in seen, seen
    output = next(RunDir(folder / "runs" / "a").logs.glob("*.out")).read_text()
    os.kill(int(output.rpartition("pid ")[2].split()[0]), signal.SIGCONT)
    until(lambda: "HUNG" not in typed("status", ".", folder=folder).stdout, "that it goes on", 60)
    typed("check", "hang", folder=folder, code=0)


def test_what_a_member_without_an_attempt_would_have_done_is_in_the_status_and_told(folder: Path, until: Until) -> None:
    rundir = RunDir(folder / "runs" / "a")
    typed("launch", "--observe", folder=folder, code=0)
    (folder / "unfit").touch()
    (folder / "go").touch()
    until(lambda: not Local().queue(), "the end of both members", 120)
    assert not any(rundir.attempts.glob("0*"))
    would = [line for line in typed("status", ".", folder=folder).stdout.splitlines() if line.startswith("  would")]
    assert len(would) == 1 and "no attempt began: would have excluded " in would[0], would
    assert "launch.setup ended with 3; no attempt has run on " in would[0], would
    typed("watch", folder=folder)
    events = "".join(path.read_text() for path in (rundir.watch / "events").iterdir())
    assert events.count('"observed"') == 1 and "would have excluded" in events, events
    assert "| none | would have excluded " in typed("report", "--markdown", ".", folder=folder).stdout


@pytest.mark.parametrize("page", ["", "{}", '{"of": "hang"}', '{"of": ["hang"', "x" * 100_000])
def test_a_damaged_page_changes_nothing(run: SupervisedRun, page: str) -> None:
    asks = Observes(run.rundir, (), every=0.0)
    run.rundir.state.mkdir(parents=True)
    run.rundir.switches.mkdir()
    write_observing(run.rundir, (HANG, BACK), who="ada", now=datetime.now(timezone.utc))
    assert asks.all() == (HANG, BACK)
    (run.rundir.state / "observe").write_text(page)
    assert asks.all() == (HANG, BACK)
    assert "hang" in typed("observe", "--only", "hang", run.rundir.root, code=0).stdout, "a person's word replaces it"
