"""A command that knows nothing of us: its steps are read from its log, or from a file that it touches."""

from __future__ import annotations

import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import GUARD, NOBODY, OUTPUT
from ftsupervise.ranks.log_heartbeat import (
    BeatsOfCommand,
    FollowedLog,
    LifeOfCommand,
    ProgressSign,
    TouchedFile,
    source,
)
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.run.attempt import LogFollower
from ftsupervise.run.progress_pages import seen_by
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import reached
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import RankState, Tally
from tests.neighbours.supervised import SupervisedRun

Until = Callable[..., Any]
STEP = re.compile(r"step (\d+)")


def steps_in(log: FollowedLog) -> int | None:
    seen = log.look()
    return None if seen is None else seen.step


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


# ------------------------------------------------------------------------------------------------------------- the log


def test_only_what_is_added_to_a_log_counts(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("step 9 of the attempt before\n")
    log = FollowedLog(STEP, path)
    assert log.look() is None
    append(path, "step 1 done\nstep 2 do")
    assert steps_in(log) == 1
    append(path, "ne\nstep 2 again\n")
    assert steps_in(log) == 2
    assert log.look() is None
    append(path, "step 2 once more\n")
    assert log.look() is None


def test_lines_of_ours_are_no_steps_with_labels_neither(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = FollowedLog(STEP, path)
    append(path, "2026-11-22T01:02:03Z ftsupervise: resumed at step 7\n0: ftsupervise: rank 0: leaving at step 8\n")
    assert log.look() is None
    append(path, "3: step 4\n")
    assert steps_in(log) == 4


@pytest.mark.fault("That log is rotated or cut", "it is followed")
def test_a_log_that_appears_late_is_rotated_or_cut_is_followed(tmp_path: Path) -> None:
    path = tmp_path / "log"
    log = FollowedLog(STEP, path)
    assert log.look() is None
    path.write_text("step 1\n")
    assert steps_in(log) == 1
    append(path, "step 2\n")
    path.rename(tmp_path / "log.1")
    path.write_text("")
    assert steps_in(log) == 2
    append(path, "step 3\n")
    assert steps_in(log) == 3
    os.truncate(path, 0)
    assert log.look() is None
    append(path, "step 4\n")
    assert steps_in(log) == 4
    path.unlink()
    assert log.look() is None


def test_a_look_at_a_huge_log_reads_its_last_piece_only(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.touch()
    log = FollowedLog(STEP, path)
    with path.open("wb") as file:
        file.seek(50 << 30)
        file.write(b"\nstep 12\n")
    began = time.monotonic()
    assert steps_in(log) == 12
    assert time.monotonic() - began < 5


def test_what_is_no_plain_file_is_no_log(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in ("fifo", "."):
        with pytest.raises(OSError, match="not a regular file"):
            source("auto", str(tmp_path / path))
        with pytest.raises(OSError, match="not a regular file"):
            source("", str(tmp_path / path))


# ------------------------------------------------------------------------------------------------------------- the file


def test_a_touched_file_is_progress_and_a_number_in_it_the_step(tmp_path: Path) -> None:
    path, output = tmp_path / "alive", os.open(tmp_path, os.O_RDONLY)
    path.write_text("5")
    file = TouchedFile(path, output)
    assert file.look() is None  # as the attempt before has left it
    path.touch()
    assert file.look() == ProgressSign(5)
    path.write_text("6 of 100\n")
    assert file.look() == ProgressSign(6)
    path.write_text("")
    assert file.look() == ProgressSign(None)
    path.write_bytes(b"\xff" * 100_000)
    assert file.look() == ProgressSign(None)
    path.unlink()
    assert file.look() is None
    os.close(output)


def test_the_jobs_own_output_is_no_file_to_be_touched(tmp_path: Path) -> None:
    """Lines of ours stand there: a hung command would seem alive for as long as we complain about it."""
    (tmp_path / "out").touch()
    output = os.open(tmp_path / "out", os.O_RDONLY)
    with pytest.raises(OSError, match="is the job's own output"):
        TouchedFile(tmp_path / "out", output)
    os.close(output)


# --------------------------------------------------------------------------------------------------------- a whole run

LOOP = "i=0; while [ $i -lt {last} ]; do i=$((i+1)); {sign}; sleep 0.3; done; {then}"
PRINTS, WRITES = "echo epoch 1 step $i/99 loss 2.5", "echo $i > alive"


@pytest.mark.parametrize(
    ("how", "sign"),
    [(("--heartbeat-log", "auto"), PRINTS), (("--heartbeat-file", "alive"), WRITES)],
    ids=["log", "file"],
)
def test_the_steps_of_a_shell_loop_are_in_the_ledger(run: SupervisedRun, how: tuple[str, str], sign: str) -> None:
    loop = LOOP.format(last=8, sign=sign, then="exit 3")
    assert run.start(*how, "--", "sh", "-c", loop).wait(60) == 3
    (one,) = run.attempts()
    assert one.last_step is not None
    assert 3 <= one.last_step <= 8
    (beat,) = read_beats(run.rundir)
    assert (beat.rank, beat.phase) == (0, "train")
    assert beat.facts["first_at"]


def test_the_output_is_read_without_a_setting(run: SupervisedRun) -> None:
    loop = LOOP.format(last=9, sign="echo iter $i: loss 2.5", then="exit 3")
    assert run.start("--", "sh", "-c", loop).wait(60) == 3
    (one,) = run.attempts()
    assert one.last_step is not None
    assert 4 <= one.last_step <= 9
    (beat,) = read_beats(run.rundir)
    assert beat.facts["source"] == "launch.heartbeat"


def test_a_busy_command_whose_steps_were_only_read_is_not_hung_and_a_stopped_one_is() -> None:
    from ftsupervise.ranks.hang_detector import Detector, GapHistory, HangLimits, HangState

    for read, state, hung in (
        (False, "R", True),
        (True, "R", False),
        (True, "", False),
        (True, "T", True),
        (True, "S", True),
    ):
        one = Detector(HangLimits(floor=1.0, unknown=2.0), GapHistory())
        found = set()
        for look in range(1000):
            now = look / 20
            cpu = now if state == "R" else 0.0
            rank = RankState(0, "here", 5, "train", 0.0, 0.0, now, 1, state, cpu, read=read)
            found.add(one.look(now, [rank]).health)
        assert (HangState.HUNG in found) is hung, (read, state)


def test_a_stopped_process_is_seen_without_a_step(until: Until) -> None:
    mark = "/nowhere/attempts/0001"
    child = subprocess.Popen(["sleep", "1000"], env={**os.environ, "FTSUPERVISE_ATTEMPT_DIR": mark})
    try:
        life = LifeOfCommand(mark)
        until(lambda: (seen := life.look()) is not None and seen.state == "S", "that it sleeps", 20)
        child.send_signal(signal.SIGSTOP)
        until(lambda: (seen := life.look()) is not None and seen.state == "T", "that it is stopped", 20)
    finally:
        child.kill()
        child.wait()


@pytest.mark.fault(
    "A shell loop without the guard is killed, or stops printing steps",
    "it starts again and resumes; one that stands still is ended as hung first",
)
def test_a_loop_that_stops_printing_is_ended_as_hung_and_one_that_never_did_is_not(
    run: SupervisedRun, until: Until
) -> None:
    loop = LOOP.format(last=40, sign=PRINTS, then='[ "$FTSUPERVISE_ATTEMPT" = 2 ] || sleep 1000')
    limits = ("--hang", "1", "--hang-unknown", "2", "--in-place", "1")
    one = run.start(*limits, "--heartbeat-log", r"step (\d+)", "--", "sh", "-c", loop.replace("0.3", "0.05"))
    assert one.wait(120) == 0
    hung, done = run.attempts()
    assert hung.sign == "hang"
    assert (hung.last_step, done.sign) == (40, "")


@pytest.mark.slow  # it counts as there after 30 s
@pytest.mark.timeout(200)
def test_a_command_that_waits_for_its_data_from_its_start_on_is_ended_as_hung(
    run: SupervisedRun, tmp_path: Path
) -> None:
    """It has shown nothing by which it could be judged: no line, no step, no CPU time."""
    os.mkfifo(tmp_path / "data")
    loop = f'[ "$FTSUPERVISE_ATTEMPT" = 2 ] || read line < {tmp_path}/data; exit 0'
    one = run.start("--hang", "1", "--hang-start", "5", "--in-place", "1", "--", "sh", "-c", loop)
    assert one.wait(150) == 0
    hung, done = run.attempts()
    assert hung.words.startswith("hang: ") and "(start)" in hung.words, hung.words
    assert (hung.last_step, hung.source, done.sign) == (None, NOBODY, "")


def test_a_command_that_is_only_there_is_not_said_to_print_or_compute(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.beats.mkdir(parents=True)
    beats = BeatsOfCommand(rundir, 1, None, asked=False)
    beats.write(ProgressSign(None, starting=True))
    assert reached(rundir, 1, None).source == NOBODY
    beats.write(ProgressSign(None))
    assert reached(rundir, 1, None).source == OUTPUT


def test_a_count_that_was_none_after_all_leaves_no_time_of_its_last_step(tmp_path: Path) -> None:
    """Else the time account takes what came after it for a start that does not end, though it trains."""
    rundir = RunDir(tmp_path / "run")
    rundir.beats.mkdir(parents=True)
    beats = BeatsOfCommand(rundir, 1, None, asked=False)
    beats.write(ProgressSign(7))
    assert reached(rundir, 1, None).active_at is not None
    beats.write(ProgressSign(None, withdrawn=True))
    assert reached(rundir, 1, None).active_at is None


def test_who_told_the_steps_is_known_of_an_attempt_whose_end_nobody_wrote(tmp_path: Path) -> None:
    """Its beats are gone with the next attempt's, and only what was read may be a start over."""
    rundir = RunDir(tmp_path / "run")
    for folder in (rundir.beats, rundir.attempt(1)):
        folder.mkdir(parents=True)
    table, state = RankTable(b""), RankState(0, "here", 5, "train", 0.0, 0.0, 0.0, 1)
    for read, teller in ((True, OUTPUT), (False, GUARD)):
        table.put([state._replace(read=read)], [], Tally(first=1, last=5))
        page = seen_by(table)
        assert page is not None and reached(rundir, 1, page).source == teller


@pytest.mark.fault(
    "The log of a command without the guard cannot be read (dead mount)",
    "its standstill is unknown: nothing is ended",
)
def test_a_follower_that_does_not_look_is_not_believed(tmp_path: Path, until: Until) -> None:
    rundir = RunDir(tmp_path / "run")
    for folder in (rundir.beats, rundir.attempt(1)):
        folder.mkdir(parents=True)
    (tmp_path / "log").touch()
    said: list[str] = []
    follower = LogFollower("auto", tmp_path / "log", rundir, 1, None, said.append)
    beat = RankState(0, "here", 5, "train", 0.0, 0.0, 0.0, 1, read=True)
    rank = beat._replace(rank=1, state="S", read=False)
    numbers = itertools.count()

    def grown() -> Any:
        append(tmp_path / "log", f"step {next(numbers)}\n")
        return read_beats(rundir)

    try:
        until(grown, "a beat", 60)
        assert follower.believed([beat, rank]) == [beat, rank]
        (pid,) = followers(rundir)
        os.kill(pid, signal.SIGSTOP)
        until(lambda: list(follower.believed([beat, rank])) == [rank], "that it is not believed", 30)
        assert [words for words in said if "no hang is noticed" in words] == said
        os.kill(pid, signal.SIGCONT)
        until(lambda: follower.believed([beat, rank]) == [beat, rank], "that it is believed again", 30)
    finally:
        follower.close()


GUARDED = """
import os, subprocess
from ftsupervise.guard import Guard
words = ["pgrep", "-f", "log_heartbeat.*" + os.environ["FTSUPERVISE_RUN_DIR"]]
seen = subprocess.run(words, capture_output=True).stdout.split()
print("followers:", len(seen), flush=True)
with Guard() as guard:
    guard.step(int(os.environ["FTSUPERVISE_ATTEMPT"]))
    if os.environ["FTSUPERVISE_ATTEMPT"] == "1":
        os.kill(os.getpid(), 9)
"""


def test_nobody_reads_the_output_of_a_restart_whose_guard_has_told_its_steps(run: SupervisedRun) -> None:
    one = run.start("--in-place", "1", "--", sys.executable, "-c", GUARDED)
    assert one.wait(120) == 0
    assert re.findall(r"followers: (\d)", one.said()) == ["1", "0"]
    assert [attempt.last_step for attempt in run.attempts()] == [1, 2]


WAITS_BEFORE_ITS_GUARD = """
import os, sys
from ftsupervise.guard import Guard
attempt = int(os.environ["FTSUPERVISE_ATTEMPT"])
if attempt == 2:
    open(sys.argv[1]).read()  # a FIFO that nobody opens
with Guard() as guard:
    guard.step(attempt)
    if attempt == 1:
        os.kill(os.getpid(), 9)
"""


@pytest.mark.slow  # it counts as there after 40 s
@pytest.mark.timeout(200)
def test_a_restart_that_stands_before_it_has_made_its_guard_is_ended_as_hung(
    run: SupervisedRun, tmp_path: Path
) -> None:
    os.mkfifo(tmp_path / "data")
    limits = ("--hang", "1", "--hang-start", "5", "--in-place", "2")
    one = run.start(*limits, "--", sys.executable, "-c", WAITS_BEFORE_ITS_GUARD, str(tmp_path / "data"))
    assert one.wait(180) == 0
    assert [attempt.last_step for attempt in run.attempts()] == [1, None, 3]
    assert run.attempts()[1].words.startswith("hang: "), run.attempts()[1].words


def test_the_output_of_a_guarded_run_is_read_after_all_where_no_rank_reports_for_long(
    tmp_path: Path, until: Until
) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.beats.mkdir(parents=True)
    left_out: list[int] = []
    follower = LogFollower("", None, rundir, 2, None, print, guarded=True)
    follower.leave_out = left_out.append
    rank = RankState(0, "here", 5, "train", 0.0, 0.0, 0.0, 1)
    try:
        assert follower.believed([rank]) == [rank] and not followers(rundir)
        until(lambda: follower.believed([]) or followers(rundir), "the follower", 60)
        assert left_out == followers(rundir), "it is no process of the command"
    finally:
        follower.close()
    assert not followers(rundir)


def test_the_last_lines_count_though_the_follower_had_no_turn_for_two_seconds(tmp_path: Path, until: Until) -> None:
    """A busy machine gave it none: the ledger had a step that was seconds old."""
    rundir = RunDir(tmp_path / "run")
    rundir.beats.mkdir(parents=True)
    (tmp_path / "log").touch()
    follower = LogFollower("auto", tmp_path / "log", rundir, 1, None, print)
    numbers = itertools.count()

    def grown() -> Any:
        append(tmp_path / "log", f"step {next(numbers)}\n")
        return read_beats(rundir)

    until(grown, "a beat", 60)
    (pid,) = followers(rundir)
    os.kill(pid, signal.SIGSTOP)
    append(tmp_path / "log", "".join(f"step {next(numbers)}\n" for _ in range(30)))
    later = threading.Timer(2.0, os.kill, (pid, signal.SIGCONT))
    later.start()
    follower.close()
    later.join()
    assert read_beats(rundir)[0].step == next(numbers) - 1


ENDS_AT_ONCE = """
import sys
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.run.attempt import LogFollower
from ftsupervise.run.progress_pages import seen_by
from ftsupervise.rundir.paths import RunDir

follower = LogFollower("auto", None, RunDir(sys.argv[1]), 1, None, print)
for step in range(46):
    print("step", step, flush=True)
follower.close()
"""


def test_the_last_lines_count_though_the_command_ended_before_the_follower_had_started(tmp_path: Path) -> None:
    rundir = RunDir(tmp_path / "run")
    rundir.beats.mkdir(parents=True)
    with (tmp_path / "out").open("wb") as out:
        subprocess.run([sys.executable, "-c", ENDS_AT_ONCE, str(rundir.root)], stdout=out, check=True, timeout=60)
    assert [one.step for one in read_beats(rundir)] == [45]


@pytest.mark.slow
def test_nothing_is_ended_while_nobody_can_look(run: SupervisedRun, until: Until) -> None:
    """The follower is stopped, as on a dead mount: the last beat stays the same, and proves nothing."""
    loop = LOOP.format(last=1000, sign=PRINTS, then="exit 0")
    limits = ("--hang", "1", "--hang-unknown", "5", "--in-place", "1")
    one = run.start(*limits, "--heartbeat-log", r"step (\d+)", "--", "sh", "-c", loop)
    until(lambda: read_beats(run.rundir), "the first beat", 60)
    (pid,) = followers(run.rundir)
    os.kill(pid, signal.SIGSTOP)
    until(lambda: "no hang is noticed" in run.log(), "that it is said", 90)
    time.sleep(8)  # longer than the bound of a phase that is not known
    assert one.poll() is None
    assert not run.attempts()[0].ended
    os.kill(pid, signal.SIGCONT)


def test_the_guards_word_goes_before_that_of_the_log(run: SupervisedRun, tmp_path: Path) -> None:
    train = (
        "import time\nfrom ftsupervise import Guard\nguard = Guard(agree=None)\n"
        "for step in range(100, 160):\n    print('step', step - 100, flush=True)\n    guard.step(step)\n    time.sleep(0.05)\n"
    )
    (tmp_path / "train.py").write_text(train)
    assert run.start("--heartbeat-log", "auto", "--", sys.executable, "train.py").wait(60) == 0
    assert "the loop has a guard, which is believed instead" in run.log()
    assert (run.attempts()[0].last_step or 0) >= 100


def followers(rundir: RunDir) -> list[int]:
    words = str(rundir.root).encode(), b"log_heartbeat"
    every = (entry for entry in Path("/proc").iterdir() if entry.name.isdigit())
    return [int(entry.name) for entry in every if all(word in cmdline(entry) for word in words)]


def cmdline(entry: Path) -> bytes:
    try:
        return (entry / "cmdline").read_bytes()
    except OSError:
        return b""
