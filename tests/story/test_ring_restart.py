"""Restart in place, the brake and clean ends, with real processes on this machine."""

from __future__ import annotations

import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch
from ftsupervise.host.ownership import shown_user
from ftsupervise.launch.plan import train_command
from ftsupervise.model import Attempt
from ftsupervise.rundir.switches import read_brake
from tests.neighbours.supervised import SupervisedRun, alive
from tests.neighbours.typed import typed

Until = Callable[..., Any]

# Trains to step 60 with a checkpoint every 10 and a fault of its own choice; resumes.
TRAIN = """
import os, sys, time
from pathlib import Path
from ftsupervise import Guard
folder = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"])
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
first = max((int(p.name) for p in folder.glob("[0-9]*")), default=0) + 1
guard = Guard(beat_every=0.05, poll=0.02)
print("from", first, "restart", os.environ["FTSUPERVISE_RESTART"], flush=True)
for step in range(first, 61):
    time.sleep(0.01)
    decision = guard.step(step)
    if step % 10 == 0:
        (folder / str(step)).touch()
        guard.saved(step)
    {fault}
    if decision.stop:
        break
else:
    guard.finished(60)
"""


def train(fault: str) -> tuple[str, ...]:
    return (sys.executable, "-c", TRAIN.replace("{fault}", fault))


def test_a_run_that_dies_once_goes_on_in_place_from_its_checkpoint_and_finishes(run: SupervisedRun) -> None:
    one = run.start("--in-place", "5", "--", *train("if step == 35 and attempt == 1: os.kill(os.getpid(), 9)"))
    assert one.wait(60) == 0
    first, second = run.attempts()
    assert first.words == "killed by SIGKILL"
    assert first.failure is not None and first.failure[:2] == ("signal", "killed by SIGKILL")
    assert first.then.startswith("restarted in place")
    assert (second.words, second.first_step) == ("finished", 31)
    assert "from 31 restart 1" in one.said()
    assert first.saved == 30
    assert first.ready is not None


def test_a_run_that_progresses_between_its_failures_goes_on_for_ever(run: SupervisedRun) -> None:
    one = run.start(
        "--in-place", "50", "--back-off", "0", "--", *train("if step % 10 == 5 and step > first + 9: sys.exit(4)")
    )
    assert one.wait(90) == 0
    attempts = run.attempts()
    assert len(attempts) >= 5
    assert attempts[-1].words == "finished"
    assert {a.sign for a in attempts[:-1]} == {"exit 4"}
    assert read_brake(run.rundir) is None


def test_the_same_failure_without_progress_puts_the_brake_on_and_clear_takes_it_off(run: SupervisedRun) -> None:
    broken = (sys.executable, "-c", "import no_such_module_here")
    one = run.start("--in-place", "50", "--back-off", "0.1", "--", *broken)
    assert one.wait(60) == 1
    attempts = run.attempts()
    assert [a.sign for a in attempts] == ["exit 1 (ModuleNotFoundError)"] * 3
    assert attempts[-1].then.startswith("stopped by the brake")
    on = read_brake(run.rundir)
    assert on is not None
    assert (on.times, on.attempt, on.failure) == (3, 3, "exit 1 (ModuleNotFoundError)")
    assert "no_such_module_here" in on.detail
    again = run.start("--", *broken)
    assert again.wait(30) == 0
    assert "stopped by the brake" in again.said() and "clear --brake" in again.said()
    assert len(run.attempts()) == 3, "the gate starts nothing"
    cleared = typed("clear", "--brake", run.rundir.root, code=0)
    assert "is off" in cleared.stdout
    fine = run.start("--", "true")
    assert fine.wait(30) == 0
    assert run.attempts()[-1].words == "exit 0"


def test_the_brake_counts_over_members_that_do_not_restart_in_place(run: SupervisedRun) -> None:
    codes = [run.start("--back-off", "0", "--", "sh", "-c", "exit 7").wait(30) for _ in range(4)]
    assert codes == [7, 7, 7, 0]
    assert len(run.attempts()) == 3
    assert run.end_page(2)["then"].startswith("its supervisor left: no restart in place")


def test_a_failure_deep_in_the_run_without_a_newer_checkpoint_is_no_progress(run: SupervisedRun) -> None:
    one = run.start(
        "--in-place", "50", "--back-off", "0", "--", *train("if step == 35: raise ValueError('bad batch 35')")
    )
    assert one.wait(60) == 1
    assert [a.first_step for a in run.attempts()] == [1, 31, 31]
    on = read_brake(run.rundir)
    assert on is not None
    assert on.detail == "ValueError: bad batch 35"


def test_the_budget_of_a_job_sends_it_to_the_next_member(run: SupervisedRun) -> None:
    one = run.start("--in-place", "2", "--same-failure", "0", "--back-off", "0", "--", "sh", "-c", "exit 9")
    assert one.wait(30) == 9
    then = [a.then.partition(":")[0] for a in run.attempts()]
    assert then == ["restarted in place", "restarted in place", "its supervisor left"]


def test_too_little_time_is_left_to_the_next_member(run: SupervisedRun) -> None:
    one = run.start("--in-place", "5", "--", "sh", "-c", "exit 9", FTSUPERVISE_DEADLINE=str(int(time.time()) + 20))
    assert one.wait(30) == 9
    (attempt,) = run.attempts()
    assert "are left of this job" in attempt.then


def test_a_program_that_says_it_is_no_use_is_believed(run: SupervisedRun) -> None:
    assert run.start("--in-place", "5", "--", "sh", "-c", "exit 93").wait(30) == 93
    assert len(run.attempts()) == 1
    assert read_brake(run.rundir) is not None


@pytest.mark.fault(
    "The mount of the run directory goes away, or the directory is moved, while the run trains",
    "no restart in place makes it anew on the disk beneath; the job says so and ends",
)
def test_a_run_directory_that_was_moved_away_is_not_made_anew_for_a_restart(run: SupervisedRun) -> None:
    """As when its mount is gone: what then stands in its place lies on the disk beneath."""
    away = run.rundir.root.with_name("away")
    process = run.start(
        *("--in-place", "5", "--", sys.executable, "-c"),
        f"import os; os.rename({str(run.rundir.root)!r}, {str(away)!r}); os._exit(3)",
    )
    assert process.wait(60) == 3
    said = process.said()
    assert "no longer holds 0001, this attempt" in said, said
    assert not (run.rundir.root / "attempts" / "0002").exists()


def test_told_to_stop_in_a_back_off_it_leaves_at_once(run: SupervisedRun, until: Until) -> None:
    one = run.start("--in-place", "5", "--back-off", "500", "--", "sh", "-c", "exit 9")
    until(lambda: "in 300 s" in one.said() or "in 500 s" in one.said())
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 9


@pytest.mark.fault("The loop hangs and the kill switch is up", "it is ended after `stop_within`")
def test_a_kill_switch_ends_a_loop_that_hangs(run: SupervisedRun) -> None:
    hang = "print('hangs', flush=True); time.sleep(0.1); os.kill(os.getpid(), 19)"
    one = run.start("--in-place", "5", "--hang", "off", "--stop-within", "0.5", "--", *train(hang))
    one.until_said("hangs")
    (run.rundir.switches / "kill-switch").write_text("stop it")
    one.wait(60)
    (attempt,) = run.attempts()
    assert attempt.words == "kill switch: the command did not stop within 0.5 s"
    assert attempt.sign == ""


def test_a_kill_switch_is_obeyed_by_a_loop_that_lives_and_nothing_is_restarted(run: SupervisedRun) -> None:
    one = run.start("--in-place", "5", "--stop-within", "30", "--", *train("time.sleep(0.2)"))
    one.until_said("from 1")
    (run.rundir.switches / "kill-switch").touch()
    assert one.wait(30) == 0
    (attempt,) = run.attempts()
    assert attempt.words == f"kill switch: raised by {shown_user()}", (
        "it is said of the attempt when the switch is down"
    )


@pytest.mark.fault("The supervisor is killed", "the command is told and nothing is left running")
def test_killed_itself_it_leaves_nothing_running_and_the_next_one_counts_it_as_lost(
    run: SupervisedRun, until: Until, tmp_path: Path
) -> None:
    one = run.start("--in-place", "5", "--", "sh", "-c", f"echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    pid = int((tmp_path / "pid").read_text())
    one.kill()
    one.wait(10)
    until(lambda: not alive(pid), "the end of the command", 40)
    two = run.start("--in-place", "5", "--", "true")
    assert two.wait(30) == 0
    lost: Attempt = run.attempts()[0]
    assert lost.words == "ended without a record"


def test_a_newer_attempt_ends_the_older_one_and_its_pages_stay_its_own(run: SupervisedRun, until: Until) -> None:
    up = run.rundir.root.parent / "up"
    old = run.start("--in-place", "5", "--", "sh", "-c", f"trap '' TERM; touch {up}; while :; do sleep 0.1; done")
    until(up.exists, "the older one's command")
    new = run.start("--", "sleep", "600")
    assert old.wait(60) in (137, 143)
    assert new.poll() is None
    first, second = run.attempts()
    assert first.words == "superseded by attempt 2"
    assert "attempt 2 has begun meanwhile" in first.then
    assert (first.sign, second.ended) == ("", None)


@pytest.mark.fault(
    "A command leaves with 0 again and again and does nothing",
    "The brake comes on after three such attempts in a row, and says how a run tells that it is done",
)
def test_three_members_that_leave_with_0_and_have_done_nothing_put_on_the_brake(run: SupervisedRun) -> None:
    for _ in (1, 2):
        assert run.start("--", "true").wait(60) == 0
        assert read_brake(run.rundir) is None
    assert run.start("--", "true").wait(60) == 0
    on = read_brake(run.rundir)
    assert on is not None
    assert on.words().startswith(
        "exit 0, 3 times in a row without a step or a new checkpoint (attempt 3): a finished run has"
    )
    fourth = run.start("--", "true")
    assert fourth.wait(60) == 0
    assert "stopped by the brake" in fourth.said()
    assert len(run.attempts()) == 3


def test_three_members_that_leave_with_0_and_say_that_the_run_is_done_change_nothing(run: SupervisedRun) -> None:
    for _ in range(4):
        assert run.start("--", "sh", "-c", 'touch "$FTSUPERVISE_RUN_DIR/state/finished"').wait(60) == 0
    assert read_brake(run.rundir) is None
    assert [one.words for one in run.attempts()] == ["finished"]


@pytest.mark.fault(
    "The training fails in a pipe whose last part succeeds (/ tee log)",
    "The shell that runs shell code of launch.command has pipefail set",
)
def test_a_pipe_into_tee_does_not_hide_that_the_training_failed(run: SupervisedRun, tmp_path: Path) -> None:
    settings = Launch(command=f"sh -c 'echo loss; exit 7' 2>&1 | tee {tmp_path}/log")
    assert run.start("--", *train_command(settings, "local")).wait(60) == 7
    assert (tmp_path / "log").read_text() == "loss\n"
    assert run.attempts()[0].sign == "exit 7"


@pytest.mark.threat(
    "A job prints escape sequences that would reach a terminal, a mail or Slack.",
    "Its output is made plain text before it is searched. `run.log`, the ledger and the brake hold printable text "
    "only.",
)
def test_status_the_ledger_and_the_log_show_the_line_that_decides_and_no_escape_sequence_of_the_job(
    run: SupervisedRun,
) -> None:
    says = "raise RuntimeError('\\x1b[2J\\x1b]0;mine\\x07uncorrectable ECC error \\x9b on GPU 3')"
    assert run.start("--", sys.executable, "-c", says).wait(60) == 1
    assert run.start("--", "sh", "-c", "exit 3").wait(60) == 3
    texts = [(run.rundir.attempt(n) / page).read_text() for n in (1, 2) for page in ("end.json", "run.log")]
    shown = typed("status", run.rundir.root).stdout
    for text in (*texts, shown):
        assert all(char.isprintable() for char in text.replace("\n", ""))
    assert run.end_page(1)["failure"]["detail"] == "RuntimeError: uncorrectable ECC error ? on GPU 3"
    assert run.end_page(2)["failure"]["detail"] == "no output"
    assert ": RuntimeError: uncorrectable ECC error" in shown
    assert "exit 3 after" in shown and ": no output" in shown
