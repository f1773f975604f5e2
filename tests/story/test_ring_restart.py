"""Restart in place, the brake and clean ends, with real processes on this machine."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.config.schema import Launch
from ftsupervise.launch.plan import train_command
from ftsupervise.model import Attempt
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake

Until = Callable[..., Any]
Run = Callable[..., "subprocess.Popen[str]"]

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


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


@pytest.fixture
def run(tmp_path: Path, rundir: RunDir) -> Iterator[Run]:
    started: list[subprocess.Popen[str]] = []

    def one(*words: str, **env: str) -> subprocess.Popen[str]:
        clean = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
        cut = words.index("--")
        argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(rundir.root), *words[:cut], *words[cut:]]
        out = tmp_path / f"out-{len(started)}"
        with out.open("w") as log:
            process = subprocess.Popen(argv, env={**clean, **env}, stdout=log, stderr=subprocess.STDOUT, text=True)
        process.out = out  # type: ignore[attr-defined]
        started.append(process)
        return process

    yield one
    for process in started:
        if process.poll() is None:
            process.kill()
            process.wait(30)


def said(process: subprocess.Popen[str]) -> str:
    return str(process.out.read_text())  # type: ignore[attr-defined]


def page(rundir: RunDir, number: int) -> dict[str, Any]:
    return dict(json.loads((rundir.attempt(number) / "end.json").read_text()))


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except OSError:
        return False


def test_a_run_that_dies_once_goes_on_in_place_from_its_checkpoint_and_finishes(run: Run, rundir: RunDir) -> None:
    one = run("--in-place", "5", "--", *train("if step == 35 and attempt == 1: os.kill(os.getpid(), 9)"))
    assert one.wait(60) == 0
    first, second = ledger(rundir)
    assert first.words == "killed by SIGKILL"
    assert first.failure is not None and first.failure[:2] == ("signal", "killed by SIGKILL")
    assert first.then.startswith("restarted in place")
    assert (second.words, second.first_step) == ("finished", 31)
    assert "from 31 restart 1" in said(one)
    assert first.saved == 30
    assert first.ready is not None


def test_a_run_that_progresses_between_its_failures_goes_on_for_ever(run: Run, rundir: RunDir) -> None:
    one = run(
        "--in-place", "50", "--back-off", "0", "--", *train("if step % 10 == 5 and step > first + 9: sys.exit(4)")
    )
    assert one.wait(90) == 0
    attempts = ledger(rundir)
    assert len(attempts) >= 5
    assert attempts[-1].words == "finished"
    assert {a.sign for a in attempts[:-1]} == {"exit 4"}
    assert read_brake(rundir) is None


def test_the_same_failure_without_progress_puts_the_brake_on_and_clear_takes_it_off(run: Run, rundir: RunDir) -> None:
    broken = (sys.executable, "-c", "import no_such_module_here")
    one = run("--in-place", "50", "--back-off", "0.1", "--", *broken)
    assert one.wait(60) == 1
    attempts = ledger(rundir)
    assert [a.sign for a in attempts] == ["exit 1 (ModuleNotFoundError)"] * 3
    assert attempts[-1].then.startswith("stopped by the brake")
    on = read_brake(rundir)
    assert on is not None
    assert (on.times, on.attempt, on.failure) == (3, 3, "exit 1 (ModuleNotFoundError)")
    assert "no_such_module_here" in on.detail
    again = run("--", *broken)
    assert again.wait(30) == 0
    assert "the brake is on" in said(again) and "clear --brake" in said(again)
    assert len(ledger(rundir)) == 3, "the gate starts nothing"
    cleared = subprocess.run(
        [sys.executable, "-m", "ftsupervise", "clear", "--brake", str(rundir.root)],
        capture_output=True, text=True, timeout=60, check=True,
    )  # fmt: skip
    assert "is off" in cleared.stdout
    fine = run("--", "true")
    assert fine.wait(30) == 0
    assert ledger(rundir)[-1].words == "exit 0"


def test_the_brake_counts_over_members_that_do_not_restart_in_place(run: Run, rundir: RunDir) -> None:
    codes = [run("--back-off", "0", "--", "sh", "-c", "exit 7").wait(30) for _ in range(4)]
    assert codes == [7, 7, 7, 0]
    assert len(ledger(rundir)) == 3
    assert page(rundir, 2)["then"].startswith("left: no restart in place")


def test_a_failure_deep_in_the_run_without_a_newer_checkpoint_is_no_progress(run: Run, rundir: RunDir) -> None:
    one = run("--in-place", "50", "--back-off", "0", "--", *train("if step == 35: raise ValueError('bad batch 35')"))
    assert one.wait(60) == 1
    assert [a.first_step for a in ledger(rundir)] == [1, 31, 31]
    on = read_brake(rundir)
    assert on is not None
    assert on.detail == "ValueError: bad batch 35"


def test_the_budget_of_a_job_sends_it_to_the_next_member(run: Run, rundir: RunDir) -> None:
    one = run("--in-place", "2", "--same-failure", "0", "--back-off", "0", "--", "sh", "-c", "exit 9")
    assert one.wait(30) == 9
    assert [a.then.partition(":")[0] for a in ledger(rundir)] == ["restarted in place", "restarted in place", "left"]


def test_too_little_time_is_left_to_the_next_member(run: Run, rundir: RunDir) -> None:
    one = run("--in-place", "5", "--", "sh", "-c", "exit 9", FTSUPERVISE_DEADLINE=str(int(time.time()) + 20))
    assert one.wait(30) == 9
    (attempt,) = ledger(rundir)
    assert "are left of this job" in attempt.then


def test_a_program_that_says_it_is_no_use_is_believed(run: Run, rundir: RunDir) -> None:
    assert run("--in-place", "5", "--", "sh", "-c", "exit 93").wait(30) == 93
    assert len(ledger(rundir)) == 1
    assert read_brake(rundir) is not None


def test_a_run_directory_that_was_moved_away_is_not_made_anew_for_a_restart(run: Run, rundir: RunDir) -> None:
    """As when its mount is gone: what then stands in its place lies on the disk beneath."""
    away = rundir.root.with_name("away")
    process = run(
        "--in-place",
        "5",
        "--",
        sys.executable,
        "-c",
        f"import os; os.rename({str(rundir.root)!r}, {str(away)!r}); os._exit(3)",
    )
    assert process.wait(60) == 3
    said = process.out.read_text()  # type: ignore[attr-defined]
    assert "no longer holds 0001, this attempt" in said, said
    assert not (rundir.root / "attempts" / "0002").exists()


def test_told_to_stop_in_a_back_off_it_leaves_at_once(run: Run, rundir: RunDir, until: Until) -> None:
    one = run("--in-place", "5", "--back-off", "500", "--", "sh", "-c", "exit 9")
    until(lambda: "in 300 s" in said(one) or "in 500 s" in said(one))
    one.send_signal(signal.SIGTERM)
    assert one.wait(60) == 9


def test_a_kill_switch_ends_a_loop_that_hangs(run: Run, rundir: RunDir, until: Until) -> None:
    hang = "print('hangs', flush=True); time.sleep(0.1); os.kill(os.getpid(), 19)"
    one = run("--in-place", "5", "--hang", "off", "--stop-within", "0.5", "--", *train(hang))
    until(lambda: "hangs" in said(one))
    (rundir.switches / "kill-switch").write_text("stop it")
    one.wait(60)
    (attempt,) = ledger(rundir)
    assert attempt.words == "kill switch: the command did not stop within 0.5 s"
    assert attempt.sign == ""


def test_a_kill_switch_is_obeyed_by_a_loop_that_lives_and_nothing_is_restarted(
    run: Run, rundir: RunDir, until: Until
) -> None:
    one = run("--in-place", "5", "--stop-within", "30", "--", *train("time.sleep(0.2)"))
    until(lambda: "from 1" in said(one))
    (rundir.switches / "kill-switch").touch()
    assert one.wait(30) == 0
    assert [a.words for a in ledger(rundir)] == ["kill switch"]


def test_killed_itself_it_leaves_nothing_running_and_the_next_one_counts_it_as_lost(
    run: Run, rundir: RunDir, until: Until, tmp_path: Path
) -> None:
    one = run("--in-place", "5", "--", "sh", "-c", f"echo $$ > {tmp_path}/pid; while :; do sleep 0.1; done")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    pid = int((tmp_path / "pid").read_text())
    one.kill()
    one.wait(10)
    until(lambda: not alive(pid), "the end of the command", 40)
    two = run("--in-place", "5", "--", "true")
    assert two.wait(30) == 0
    lost: Attempt = ledger(rundir)[0]
    assert lost.words == "ended without a record"


def test_a_newer_attempt_ends_the_older_one_and_its_pages_stay_its_own(run: Run, rundir: RunDir, until: Until) -> None:
    up = rundir.root.parent / "up"
    old = run("--in-place", "5", "--", "sh", "-c", f"trap '' TERM; touch {up}; while :; do sleep 0.1; done")
    until(up.exists, "the older one's command")
    new = run("--", "sleep", "600")
    assert old.wait(60) in (137, 143)
    assert new.poll() is None
    first, second = ledger(rundir)
    assert first.words == "superseded by attempt 2"
    assert "attempt 2 has begun meanwhile" in first.then
    assert (first.sign, second.ended) == ("", None)


def test_three_members_that_leave_with_0_and_have_done_nothing_put_on_the_brake(run: Run, rundir: RunDir) -> None:
    for _ in (1, 2):
        assert run("--", "true").wait(60) == 0
        assert read_brake(rundir) is None
    assert run("--", "true").wait(60) == 0
    on = read_brake(rundir)
    assert on is not None
    assert on.words().startswith(
        "exit 0, 3 times in a row without a step or a new checkpoint (attempt 3): a finished run has"
    )
    fourth = run("--", "true")
    assert fourth.wait(60) == 0
    assert "the brake is on" in said(fourth)
    assert len(ledger(rundir)) == 3


def test_three_members_that_leave_with_0_and_say_that_the_run_is_done_change_nothing(run: Run, rundir: RunDir) -> None:
    for _ in range(4):
        assert run("--", "sh", "-c", 'touch "$FTSUPERVISE_RUN_DIR/state/finished"').wait(60) == 0
    assert read_brake(rundir) is None
    assert [one.words for one in ledger(rundir)] == ["finished"]


def test_a_pipe_into_tee_does_not_hide_that_the_training_failed(run: Run, rundir: RunDir, tmp_path: Path) -> None:
    settings = Launch(command=f"sh -c 'echo loss; exit 7' 2>&1 | tee {tmp_path}/log")
    assert run("--", *train_command(settings, "local")).wait(60) == 7
    assert (tmp_path / "log").read_text() == "loss\n"
    assert ledger(rundir)[0].sign == "exit 7"


def test_status_the_ledger_and_the_log_show_the_line_that_decides_and_no_escape_sequence_of_the_job(
    run: Run, rundir: RunDir
) -> None:
    says = "raise RuntimeError('\\x1b[2J\\x1b]0;mine\\x07uncorrectable ECC error \\x9b on GPU 3')"
    assert run("--", sys.executable, "-c", says).wait(60) == 1
    assert run("--", "sh", "-c", "exit 3").wait(60) == 3
    texts = [(rundir.attempt(n) / page).read_text() for n in (1, 2) for page in ("end.json", "run.log")]
    shown = subprocess.run(
        [sys.executable, "-m", "ftsupervise", "status", str(rundir.root)], capture_output=True, text=True, check=False
    ).stdout
    for text in (*texts, shown):
        assert all(char.isprintable() for char in text.replace("\n", ""))
    assert page(rundir, 1)["detail"] == "RuntimeError: uncorrectable ECC error ? on GPU 3"
    assert page(rundir, 2)["detail"] == "no output"
    assert ": RuntimeError: uncorrectable ECC error" in shown
    assert "exit 3 after" in shown and ": no output" in shown
