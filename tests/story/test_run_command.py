"""``ftsupervise run``: gate, one attempt, signals, the end and the ledger, with real processes."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.switches import KILL, read_brake
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun, alive

Until = Callable[..., Any]

# A process that hears TERM and USR1, says so, and lives on unless told otherwise.
HEARS = """
import signal, sys, time
def heard(number, frame):
    print("heard", signal.Signals(number).name, flush=True)
    if number in {leave}: sys.exit(0)
for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2): signal.signal(number, heard)
print("ready", flush=True)
while True: time.sleep(0.05)
"""


def hears(*leave: int) -> str:
    return HEARS.replace("{leave}", repr(tuple(int(n) for n in leave)))


@pytest.mark.parametrize(
    ("command", "code", "cause"),
    [
        ("exit 0", 0, "exit 0"),
        ("exit 3", 3, "exit 3"),
        ("kill -9 $$", 137, "killed by SIGKILL"),
        ("exit 137", 137, "exit 137 (a process killed by SIGKILL)"),
    ],
)
def test_the_exit_code_is_passed_on_and_the_cause_is_written(
    run: SupervisedRun, command: str, code: int, cause: str
) -> None:
    assert run.start("sh", "-c", command).wait(30) == code
    (attempt,) = run.attempts()
    assert (attempt.number, attempt.words) == (1, cause)
    assert attempt.ended is not None and attempt.ended >= attempt.started


def test_the_command_knows_its_run_attempt_and_limits(run: SupervisedRun) -> None:
    code = "import os; print({k: v for k, v in os.environ.items() if k.startswith('FTSUPERVISE_')})"
    one = run.start(
        "--guard-poll", "2", "--guard-memory", "0.9", "--name", "digits", "--", sys.executable, "-c", code,
        FTSUPERVISE_JOB_ID="local-7_1", FTSUPERVISE_DEADLINE="1999999999", FTSUPERVISE_GUARD_RUN_FOR="3",
    )  # fmt: skip
    assert one.wait(30) == 0
    env = eval(next(line for line in one.said().splitlines() if line.startswith("{")))
    assert env["FTSUPERVISE_RUN_DIR"] == str(run.rundir.root)
    assert env["FTSUPERVISE_RUN"] == "digits"
    assert (env["FTSUPERVISE_ATTEMPT"], env["FTSUPERVISE_DEADLINE"]) == ("1", "1999999999")
    assert env["FTSUPERVISE_ATTEMPT_DIR"] == str(run.rundir.attempt(1))
    assert env["FTSUPERVISE_CHECKPOINT_DIR"] == str(run.rundir.checkpoints)
    assert (env["FTSUPERVISE_GUARD_POLL"], env["FTSUPERVISE_GUARD_MEMORY"]) == ("2.0", "0.9")
    assert "FTSUPERVISE_GUARD_RUN_FOR" not in env, "another run's limits are not ours"
    assert run.attempts()[0].job_id == "local-7_1"


def test_a_burst_of_signals_does_not_keep_the_sigterm_behind_it_waiting(run: SupervisedRun) -> None:
    one = run.start(sys.executable, "-c", hears(signal.SIGTERM))
    one.until_said("ready")
    for _ in range(5000):
        os.kill(one.pid, signal.SIGUSR1)
        time.sleep(0.0001)
    one.terminate()
    one.wait(60)
    assert one.said().count("is asked to save and stop") < 1000


def test_a_command_that_is_not_there_is_one_sentence_and_127(run: SupervisedRun) -> None:
    one = run.start("no-such-command-here")
    assert one.wait(30) == 127
    assert "cannot start no-such-command-here: No such file" in one.said()
    assert "Traceback" not in one.said()
    assert run.attempts()[0].words.startswith("could not start")


def test_a_finished_run_burns_members_through(run: SupervisedRun) -> None:
    run.rundir.state.mkdir(parents=True)
    run.rundir.finished.touch()
    began = time.monotonic()
    members = [run.start("sh", "-c", "echo trained") for _ in range(3)]
    assert [m.wait(30) for m in members] == [0, 0, 0]
    assert time.monotonic() - began < 15
    assert all("finished" in m.said() and "trained" not in m.said() for m in members)
    assert run.attempts() == ()


def test_a_kill_switch_shuts_the_gate_and_says_who_and_why(run: SupervisedRun) -> None:
    run.rundir.switches.mkdir(parents=True)
    (run.rundir.switches / "kill-switch").write_text('{"who": "alice", "why": "loss is nan"}')
    one = run.start("sh", "-c", "echo trained")
    assert one.wait(30) == 0
    assert "alice" in one.said() and "loss is nan" in one.said() and "ftsupervise clear" in one.said()
    assert "trained" not in one.said()


def test_attempts_started_at_the_same_moment_get_numbers_of_their_own(run: SupervisedRun) -> None:
    many = [run.start("true") for _ in range(6)]
    assert {m.wait(60) for m in many} <= {0, 143}, "a slow one is told to leave for the newer ones"
    numbers = [a.number for a in run.attempts()]
    assert numbers == list(range(1, len(numbers) + 1))
    assert len(numbers) >= 3, "the brake may come on after three that ended without a step"
    said = "".join(m.said() for m in many)
    assert all(said.count(f"attempt {number} of run: true") <= 1 for number in numbers)


def test_the_warning_reaches_a_command_that_hears_it_and_the_file_is_there(run: SupervisedRun) -> None:
    one = run.start(sys.executable, "-c", hears(signal.SIGUSR1))
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    assert one.wait(30) == 0
    assert "heard SIGUSR1" in one.said()
    assert "SIGUSR1" in (run.rundir.attempt(1) / "warning").read_text()


def test_the_warning_does_not_kill_a_command_that_would_die_of_it(run: SupervisedRun) -> None:
    one = run.start(
        "sh", "-c", "echo ready; while [ ! -e $FTSUPERVISE_ATTEMPT_DIR/warning ]; do sleep 0.1; done; echo saved"
    )
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    assert one.wait(30) == 0
    assert "saved" in one.said()


def test_a_shell_that_starts_one_program_after_another_is_never_taken_for_one_that_hears_the_warning() -> None:
    """It blocks all signals whenever it starts one."""
    shell = subprocess.Popen(["sh", "-c", "while :; do /bin/true; done"])
    try:
        assert not any(processes.who_hears(shell.pid, signal.SIGUSR1) for _ in range(200))
    finally:
        shell.kill()
        shell.wait()


def test_who_blocks_the_warning_alone_hears_it() -> None:
    code = "import signal, time; signal.pthread_sigmask(signal.SIG_BLOCK, [10]); print(flush=True); time.sleep(60)"
    one = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    try:
        assert one.stdout is not None and one.stdout.readline()
        assert processes.who_hears(one.pid, signal.SIGUSR1) == [one.pid]
    finally:
        one.kill()
        one.communicate()


def test_ranks_below_a_shell_and_a_launcher_hear_the_warning_and_the_launcher_does_not(
    run: SupervisedRun, tmp_path: Path
) -> None:
    rank = tmp_path / "rank.py"
    rank.write_text(hears(signal.SIGUSR1))
    launcher = tmp_path / "torchrun"
    launcher.write_text(
        "import signal, subprocess, sys\n"
        "signal.signal(signal.SIGUSR1, lambda *_: print('launcher heard', flush=True))\n"
        f"sys.exit(subprocess.call([sys.executable, {str(rank)!r}]))\n"
    )
    one = run.start("bash", "-c", f"trap : USR1\n{sys.executable} {launcher}; exit $?")
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    assert one.wait(30) == 0
    assert "heard SIGUSR1" in one.said()
    assert "launcher heard" not in one.said()


def test_never_means_the_file_alone_and_always_means_the_signal(run: SupervisedRun, until: Until) -> None:
    quiet = run.start("--forward", "never", "--", sys.executable, "-c", hears())
    quiet.until_said("ready")
    quiet.send_signal(signal.SIGUSR1)
    until(lambda: (run.rundir.attempt(1) / "warning").exists())
    quiet.end()
    assert "heard SIGUSR1" not in quiet.said()
    loud = run.start("--forward", "always", "--", "sh", "-c", "echo ready; sleep 60")
    loud.until_said("ready")
    loud.send_signal(signal.SIGUSR1)
    assert loud.wait(30) == 128 + signal.SIGUSR1


def test_told_to_stop_the_command_may_save_and_its_end_is_kept(run: SupervisedRun) -> None:
    one = run.start(sys.executable, "-c", hears(signal.SIGTERM))
    one.until_said("ready")
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 0
    assert run.attempts()[0].words == "cancelled or preempted (SIGTERM)"


@pytest.mark.parametrize(
    ("left", "words"), [(30, "cancelled or preempted (SIGTERM)"), (5, "time limit"), (-20, "time limit")]
)
def test_a_job_that_is_cancelled_within_its_warning_has_not_met_its_time_limit(
    run: SupervisedRun, left: float, words: str
) -> None:
    one = run.start(sys.executable, "-c", hears(signal.SIGTERM), FTSUPERVISE_DEADLINE=str(time.time() + left))
    one.until_said("ready")
    one.send_signal(signal.SIGTERM)
    one.wait(30)
    assert run.attempts()[0].words == words


def test_a_job_script_that_goes_on_to_its_end_after_the_time_limit_has_not_finished(run: SupervisedRun) -> None:
    """Slurm ends its program first, the script leaves with 0, and only then we are told."""
    line = "slurmstepd-node-0: error: *** JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 DUE TO TIME LIMIT ***"
    one = run.start("sh", "-c", f"echo '{line}' >&2; echo end", SLURM_JOB_ID="5")
    one.wait(30)
    assert run.attempts()[0].words == "time limit" and read_brake(run.rundir) is None
    assert run.attempts()[0].then.endswith("the job ends soon: the next member, if any, takes over")


def test_a_command_that_dies_of_scancel_before_we_are_told_has_not_failed(run: SupervisedRun) -> None:
    line = "slurmstepd-node-0: error: *** JOB 5 ON node-0 CANCELLED AT 2026-11-21T08:00:00 ***"
    one = run.start("sh", "-c", f"echo '{line}' >&2; kill -TERM $$", SLURM_JOB_ID="5")
    one.wait(30)
    (only,) = run.attempts()
    assert only.words == "cancelled or preempted (SIGTERM)" and only.failure is None


@pytest.mark.parametrize("script", ["{0}", "{0}; true"])
def test_a_command_that_the_end_reaches_before_us_was_asked_to_stop(run: SupervisedRun, script: str) -> None:
    """Slurm signals one process after the other: its end was a failure, or where a shell went on behind it a run that may be
    finished."""
    train = f"{sys.executable} -c \"import os, time; print('pid', os.getpid(), flush=True); time.sleep(60)\""
    one = run.start("--in-place", "2", "--finished-by", "ask", "--", "sh", "-c", script.format(train))
    one.until_said("pid ")
    os.kill(int(one.said().partition("pid ")[2].split()[0]), signal.SIGTERM)
    time.sleep(0.1)
    one.send_signal(signal.SIGTERM)
    one.wait(30)
    (ended,) = run.attempts()
    assert (ended.words, ended.failure) == ("cancelled or preempted (SIGTERM)", None)
    assert ended.then == "its supervisor left: asked to stop (SIGTERM)"


def test_a_program_that_somebody_ends_by_sigterm_alone_is_a_failure_that_is_started_again(run: SupervisedRun) -> None:
    one = run.start("--in-place", "1", "--", "sh", "-c", '[ "$FTSUPERVISE_ATTEMPT" = 2 ] || kill -TERM $$')
    assert one.wait(30) == 0
    first, second = run.attempts()
    assert first.failure is not None and first.failure.sign == "killed by SIGTERM"
    assert second.exit_code == 0


def test_what_does_not_leave_is_killed_after_the_grace_with_all_it_started(
    run: SupervisedRun, until: Until, tmp_path: Path
) -> None:
    pids = tmp_path / "pids"
    stubborn = (
        "import os, signal, subprocess, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: None)\n"
        "child = subprocess.Popen(['sleep', '600'], start_new_session=True)\n"
        f"open({str(pids)!r}, 'w').write(f'{{os.getpid()}} {{child.pid}}')\n"
        "while True: time.sleep(0.1)\n"
    )
    one = run.start("--grace", "0.5", "--", "sh", "-c", f'{sys.executable} -c "$0"; true', stubborn)
    until(lambda: pids.exists() and len(pids.read_text().split()) == 2)
    one.send_signal(signal.SIGTERM)
    one.wait(30)
    assert not any(alive(int(pid)) for pid in pids.read_text().split())
    assert run.attempts()[0].words == "cancelled or preempted (SIGTERM)"


def test_nothing_the_command_left_running_survives_it(run: SupervisedRun, tmp_path: Path) -> None:
    code = (
        "import subprocess; p = subprocess.Popen(['sleep', '600'], start_new_session=True);"
        f"open({str(tmp_path / 'pid')!r}, 'w').write(str(p.pid))"
    )
    one = run.start(sys.executable, "-c", code)
    assert one.wait(30) == 0
    assert not alive(int((tmp_path / "pid").read_text()))
    assert "left processes running" in one.said()


def test_what_the_batch_script_started_before_us_is_not_ours_to_end(run: SupervisedRun, tmp_path: Path) -> None:
    us = f"{sys.executable} -m ftsupervise run --run-dir {run.rundir.root} -- true"
    script = f"sleep 600 >/dev/null 2>&1 & echo $! > {tmp_path}/pid; exec {us}"
    done = subprocess.run(["bash", "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False)
    pid = int((tmp_path / "pid").read_text())
    try:
        assert done.returncode == 0
        assert "left processes running" not in done.stderr
        assert alive(pid)
    finally:
        os.kill(pid, signal.SIGKILL)


def test_a_stopped_command_still_hears_that_it_has_to_leave(run: SupervisedRun) -> None:
    one = run.start(sys.executable, "-c", "import os; print('pid', os.getpid(), flush=True)\n" + hears(signal.SIGTERM))
    one.until_said("ready")
    pid = int(one.said().partition("pid ")[2].split()[0])
    os.kill(pid, signal.SIGSTOP)
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 0
    assert "heard SIGTERM" in one.said()


def test_a_second_interrupt_does_not_wait_for_the_grace(run: SupervisedRun) -> None:
    one = run.start("--grace", "600", "--", "sh", "-c", "trap '' INT; echo ready; while :; do sleep 0.1; done")
    one.until_said("ready")
    one.send_signal(signal.SIGINT)
    one.until_said("SIGINT: passed on")
    time.sleep(0.6)  # one that comes at once is the first one again, which a whole process group was sent
    one.send_signal(signal.SIGINT)
    assert one.wait(60) == 137
    assert run.attempts()[0].words == "interrupted (SIGINT)"


def test_when_the_supervisor_itself_is_killed_the_command_is_told(run: SupervisedRun, until: Until) -> None:
    one = run.start(sys.executable, "-c", hears(signal.SIGTERM))
    one.until_said("ready")
    assert run.attempts()[0].words == ""
    one.kill()
    one.wait(30)
    until(lambda: "heard SIGTERM" in one.said(), "the signal")
    assert run.attempts()[0].words == "ended without a record"


def test_the_end_of_an_attempt_on_another_host_is_not_guessed(run: SupervisedRun) -> None:
    run.rundir.attempt(1).mkdir(parents=True)
    start = {"attempt": 1, "job_id": "88_1", "at": "2026-11-21T08:00:00+00:00", "host": "another", "pid": 1}
    (run.rundir.attempt(1) / "start.json").write_text(json.dumps({**start, "nodes": "node-[1-2,7]"}))
    (attempt,) = run.attempts()
    assert (attempt.words, attempt.ended, attempt.nodes) == ("unknown", None, ("node-1", "node-2", "node-7"))


def test_a_damaged_page_is_told_and_hides_no_other(run: SupervisedRun) -> None:
    assert run.start("true").wait(30) == 0
    assert run.start("true").wait(30) == 0
    (run.rundir.attempt(1) / "start.json").write_text('{"attempt": 1, "jo')
    first, second = run.attempts()
    assert "start.json cannot be read" in first.note
    assert second.words == "exit 0"


def test_our_own_lines_go_to_stderr_and_our_own_file(run: SupervisedRun) -> None:
    one = run.start("true")
    assert one.wait(30) == 0
    lines = one.said().splitlines()
    assert lines and all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ftsupervise: ", line) for line in lines)
    assert "attempt 1 ended: exit 0" in run.log()


def test_without_a_run_directory_it_says_what_to_name(tmp_path: Path) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
    done = subprocess.run(
        [sys.executable, "-m", "ftsupervise", "run", "--", "true"],
        cwd=tmp_path, env=clean, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 66
    assert "Traceback" not in done.stderr


def test_a_kill_switch_that_is_not_obeyed_is_told_at_the_gate(run: SupervisedRun) -> None:
    run.rundir.switches.mkdir(parents=True)
    (run.rundir.switches / KILL).symlink_to("/etc/passwd")
    one = run.start("true")
    assert one.wait(30) == 0
    assert "kill-switch is a symbolic link; it is not obeyed" in one.said()


def test_a_command_that_does_not_catch_the_warning_trains_on_and_its_end_by_itself_is_no_answer_to_it(
    run: SupervisedRun,
) -> None:
    code = "import time; print('ready', flush=True); time.sleep(3)"
    one = run.start("--finished-by", "exit 0", "--", sys.executable, "-c", code)
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    one.until_said("nothing in the command catches it, so nothing is sent: it trains on to the end of the job")
    assert one.wait(30) == 0
    assert run.rundir.has_finished(), "nobody had asked it to leave"


def test_a_command_that_leaves_because_it_was_warned_is_not_finished(run: SupervisedRun) -> None:
    one = run.start("--finished-by", "exit 0", "--", sys.executable, "-c", hears(signal.SIGUSR1))
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    assert one.wait(30) == 0 and not run.rundir.has_finished()
    first = run.attempts()[0]
    assert (first.words, first.failure) == ("warning signal, then exit 0", None)
    assert first.cause is not None and first.cause.orderly


def test_a_command_that_the_warning_lets_leave_with_an_exit_code_of_its_own_is_told_with_both(
    run: SupervisedRun,
) -> None:
    """As R does: it writes .RData and exits with 2."""
    code = "import signal, sys, time; signal.signal(signal.SIGUSR1, lambda *_: sys.exit(2)); print('ready', flush=True)"
    one = run.start(sys.executable, "-c", f"{code}; time.sleep(600)")
    one.until_said("ready")
    one.send_signal(signal.SIGUSR1)
    assert one.wait(30) == 2
    assert (run.attempts()[0].words, run.attempts()[0].failure) == ("warning signal, then exit 2", None)


def test_a_command_that_does_not_see_the_kill_switch_is_waited_for_at_no_cost(run: SupervisedRun) -> None:
    """It was looked at for a hang as often as a processor can, for as long as the command took to stop."""
    one = run.start("--hang", "1", "--", "sleep", "600")
    wait_until(lambda: (run.rundir.attempt(1) / "start.json").exists(), "the attempt")
    time.sleep(2)  # the hang would be looked for by now
    (run.rundir.switches / "kill-switch").write_text('{"who": "alice", "why": "enough"}')
    time.sleep(2)

    def spent() -> float:
        fields = Path(f"/proc/{one.supervisor}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    before = spent()
    time.sleep(3)
    assert one.poll() is None and spent() - before < 0.5
