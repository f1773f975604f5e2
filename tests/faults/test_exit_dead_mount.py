"""The run directory stops answering while a run trains, and does not come back: who has started the supervisor is let go."""

from __future__ import annotations

import os
import pty
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host.standing import Standing, standing
from tests.neighbours.supervised import Program, SupervisedRun, alive, outside_a_job

from .conftest import HungMount

pytestmark = pytest.mark.root
Until = Callable[..., Any]
# Leaves at SIGTERM and at the warning with 0, else with the number that somebody writes into "leave"; notes what it hears.
RANK = """import signal, sys, time
from pathlib import Path
here, told = Path(sys.argv[1]), []
def hear(number, _):
    told.append(number)
    with (here / "heard").open("a") as file:
        print(signal.Signals(number).name, file=file)
for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1):
    signal.signal(number, hear)
(here / "up").touch()
while not told and not ((here / "leave").exists() and (here / "leave").read_text()):  # and not while it is empty still
    time.sleep(0.01)
if told and len(sys.argv) > 2:
    time.sleep(float(sys.argv[2]))
    (here / "saved").touch()
sys.exit(0 if told else int((here / "leave").read_text()))
"""


@pytest.fixture
def run(dead_mount: HungMount, tmp_path: Path) -> Iterator[SupervisedRun]:
    one = SupervisedRun(dead_mount.point / "run", tmp_path)
    yield one
    dead_mount.answer()
    one.close()


def trains(run: SupervisedRun, until: Until, *options: str) -> Program:
    (run.folder / "rank.py").write_text(RANK)
    member = run.start(*options, "--", sys.executable, str(run.folder / "rank.py"), str(run.folder))
    until((run.folder / "up").exists, "the rank")
    return member


def turns(pid: int) -> int:
    """How often it has had a processor."""
    return int(Path(f"/proc/{pid}/schedstat").read_text().split()[2])


def hang(mount: HungMount, how: str, member: Program, until: Until) -> int:
    """Let it hang so that a thread of the supervisor waits for it; returns the supervisor's number."""
    pid = member.supervisor
    mount.hang("all") if how == "read" else mount.stop_reading()
    until(lambda: standing(pid) is Standing.DISK, "a thread of the supervisor waits for it")
    return pid


@pytest.mark.fault(
    "The run directory hangs while a job trains and does not come back, and then the command ends",
    "the job says so and waits for it as for a full disk (`launch.restart.space_wait`); then it ends with the exit "
    "code of the command, also where not even SIGKILL ends the supervisor",
)
@pytest.mark.parametrize("how", ["read", "unread"])
@pytest.mark.parametrize("code", [0, 3])
def test_a_command_ends_and_the_job_ends_with_its_exit_code_when_the_disk_has_had_its_time(
    run: SupervisedRun, dead_mount: HungMount, until: Until, how: str, code: int
) -> None:
    member = trains(run, until, "--in-place", "5", "--space-wait", "3")
    pid = hang(dead_mount, how, member, until)
    (run.folder / "leave").write_text(str(code))
    assert member.wait(60) == code
    assert f"left with exit code {code}: the file system does not answer" in member.said()
    if how == "unread":
        until(lambda: not alive(pid), "SIGKILL reaches a supervisor that waits for a file server", 20)
    else:
        assert alive(pid), "nothing ends a thread whose request the file system has taken: it is left behind"
        dead_mount.answer()
        until(lambda: not alive(pid), "it ends when the file system answers")


@pytest.mark.fault(
    "The same, and the job is asked to stop (SIGTERM)",
    "its ranks hear that at once; it ends ten seconds after they have ended",
)
def test_asked_to_stop_it_leaves_ten_seconds_after_its_command_whatever_the_disk_has_else(
    run: SupervisedRun, dead_mount: HungMount, until: Until
) -> None:
    member = trains(run, until, "--space-wait", "900")
    hang(dead_mount, "read", member, until)
    member.send_signal(signal.SIGTERM)
    assert member.wait(60) == 0
    assert (run.folder / "heard").read_text() == "SIGTERM\n"
    assert "left with exit code 0" in member.said()


def test_asked_to_stop_while_it_waits_for_the_disk_it_leaves(
    run: SupervisedRun, dead_mount: HungMount, until: Until
) -> None:
    member = trains(run, until, "--space-wait", "900")
    hang(dead_mount, "read", member, until)
    (run.folder / "leave").write_text("3")
    member.until_said("a file system does not answer")
    assert member.poll() is None, "it has 900 s"
    member.send_signal(signal.SIGTERM)
    assert member.wait(30) == 3


def test_while_the_command_runs_nobody_leaves_however_long_the_disk_hangs(
    run: SupervisedRun, dead_mount: HungMount, until: Until
) -> None:
    member = trains(run, until, "--space-wait", "1")
    hang(dead_mount, "read", member, until)
    before = turns(member.pid)
    until(lambda: turns(member.pid) >= before + 5, "it has been looked at five times")
    assert member.poll() is None
    member.send_signal(signal.SIGUSR1)
    assert member.wait(60) == 0, "it has left at the warning, and then the disk had its second"
    assert (run.folder / "heard").read_text() == "SIGUSR1\n"


@pytest.mark.fault("The same, and it answers again within that time", "the end is recorded and the run goes on")
def test_a_disk_that_answers_in_time_costs_no_record_and_no_restart(
    run: SupervisedRun, dead_mount: HungMount, until: Until
) -> None:
    member = trains(run, until, "--in-place", "5", "--space-wait", "900")
    hang(dead_mount, "read", member, until)
    (run.folder / "up").unlink()
    (run.folder / "leave").write_text("3")
    member.until_said("a file system does not answer")
    (run.folder / "leave").unlink()
    dead_mount.answer()
    until((run.folder / "up").exists, "the next attempt")
    member.until_said("the file system answers again")
    member.send_signal(signal.SIGTERM)
    assert member.wait(60) == 0
    assert [one.words for one in run.attempts()] == ["exit 3", "cancelled or preempted (SIGTERM)"]


@pytest.mark.fault(
    "The supervisor is killed (memory) while one of its threads waits for a disk that hangs",
    "the job ends as killed",
)
def test_a_supervisor_that_is_killed_while_a_thread_hangs_holds_nobody(
    run: SupervisedRun, dead_mount: HungMount, until: Until
) -> None:
    member = trains(run, until)
    os.kill(hang(dead_mount, "read", member, until), signal.SIGKILL)
    assert member.wait(30) == -signal.SIGKILL


def test_it_has_no_file_open_that_the_job_has(run: SupervisedRun, until: Until) -> None:
    member = trains(run, until)
    place = Path(f"/proc/{member.pid}/fd")
    kinds = until(lambda: all("null" in str(one) or "pipe:" in str(one) for one in open_files(place)), "it lets go")
    assert kinds
    (run.folder / "leave").write_text("0")
    assert member.wait(30) == 0


def open_files(place: Path) -> list[Path]:
    return [one.readlink() for one in place.iterdir()]


def test_an_interrupt_of_the_terminal_comes_once(tmp_path: Path, until: Until) -> None:
    """A second one would end the rank at once."""
    (tmp_path / "rank.py").write_text(RANK)
    words = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(tmp_path / "run"), "--"]
    words += [sys.executable, str(tmp_path / "rank.py"), str(tmp_path), "2"]
    pid, terminal = pty.fork()
    if not pid:
        os.execve(words[0], words, outside_a_job())
    try:
        until((tmp_path / "up").exists, "the rank")
        os.write(terminal, b"\x03")
        until((tmp_path / "saved").exists, "the checkpoint")
        ended = until(lambda: os.waitpid(pid, os.WNOHANG)[0] and [0], "its end")
        assert ended
    finally:
        os.close(terminal)


def test_the_command_reads_what_is_typed_at_the_terminal(tmp_path: Path, until: Until) -> None:
    code = "import pathlib; pathlib.Path('typed').write_text(input())"
    words = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(tmp_path / "run"), "--"]
    pid, terminal = pty.fork()
    if not pid:
        os.chdir(tmp_path)
        os.execve(words[0], [*words, sys.executable, "-c", code], outside_a_job())
    try:
        os.write(terminal, b"step into\n")
        ended = until(lambda: [one for one in [os.waitpid(pid, os.WNOHANG)] if one[0]], "its end")
        assert os.waitstatus_to_exitcode(ended[0][1]) == 0
        assert (tmp_path / "typed").read_text() == "step into"
    finally:
        os.close(terminal)


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV, signal.SIGTERM])
def test_it_ends_as_its_child_has(run: SupervisedRun, until: Until, number: int) -> None:
    member = trains(run, until)
    pid = member.supervisor
    if number == signal.SIGTERM:  # a person who signals the process that ps shows
        os.kill(pid, number)
        assert member.wait(30) == 0
        return
    os.kill(pid, number)
    assert member.wait(30) == -number


def test_a_supervisor_does_not_outlive_the_process_in_front(run: SupervisedRun, until: Until) -> None:
    member = trains(run, until)
    pid = member.supervisor
    member.kill()
    until(lambda: not alive(pid), "its end")
    until(lambda: not run.processes(), "that of the rank", 60)
