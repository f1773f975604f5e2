"""A group's supervisor that stands for ever is ended; one that waits for a disk is not. The time is an argument."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftsupervise.host.processes import process
from ftsupervise.host.pulse import ENV_PULSE
from ftsupervise.host.standing import Standing, standing
from ftsupervise.replicas.process import SILENCE, SupervisorWatch, is_stopped
from ftsupervise.rundir.attempt_pages import LostEnd, read_page
from tests.neighbours.patience import wait_until

# argv: how it stands, a FIFO, and a file that lets it stand as soon as it is there
PROGRAM = """\
import os, subprocess, sys, threading
from pathlib import Path
from ftsupervise.host.in_time import in_time
from ftsupervise.host.signals import SignalQueue
from ftsupervise.replicas.process import answer_parent

how, fifo, go = sys.argv[1:]
answer_parent(os.environ)
signals = SignalQueue()
print("begun", flush=True)
while not Path(go).exists():
    signals.wait(0.05)

def spin():
    while True:
        pass

def a_lock_that_nobody_gives_back():
    lock = threading.Lock()
    lock.acquire()
    lock.acquire()

def in_a_thread(work):
    one = threading.Thread(target=work)
    one.start()
    one.join()

{
    "lock": a_lock_that_nobody_gives_back,
    "spin": spin,
    "child": lambda: os.waitpid(subprocess.Popen(["sleep", "600"]).pid, 0),
    "disk": lambda: open(fifo),
    "a thread's disk": lambda: in_a_thread(lambda: open(fifo)),
    "a thread's pipe": lambda: in_a_thread(lambda: os.read(os.pipe()[0], 1)),
    "a bound": lambda: in_time(threading.Event().wait, 600),
}[how]()
"""


class Child:
    """The program above as a group's supervisor, and its watch with a time of its own."""

    def __init__(self, folder: Path, how: str) -> None:
        self.folder, self.at = folder, 1_000.0
        program, fifo, self._go = folder / "program.py", folder / "fifo", folder / "go"
        program.write_text(PROGRAM)
        os.mkfifo(fifo)
        self.watch = SupervisorWatch(self.at)
        write = self.watch.pipe.write
        self.process = subprocess.Popen(
            [sys.executable, str(program), how, str(fifo), str(self._go)],
            env={**os.environ, ENV_PULSE: str(write)},
            stdout=subprocess.PIPE,
            pass_fds=(write,),
            start_new_session=True,
        )
        self.watch.begin(self.process.pid)
        assert self.process.stdout is not None
        assert self.process.stdout.readline() == b"begun\n"

    def stand(self, as_expected: Standing) -> None:
        self._go.touch()
        wait_until(lambda: standing(self.process.pid) is as_expected, f"{as_expected}")
        time.sleep(0.2)  # it may just be on its way
        wait_until(lambda: standing(self.process.pid) is as_expected, f"{as_expected}")
        self.watch.look(self.at)  # what it has sent until now

    def goes_by(self, seconds: float, tick: float = 0.5) -> str:
        """Look at it every half second of its time, until there is news."""
        until = self.at + seconds
        while self.at < until:
            self.at += tick
            if said := self.watch.look(self.at):
                return said
        return ""

    def close(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait(10)
        self.watch.pipe.close()


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Callable[[str], Child]]:
    made: list[Child] = []

    def make(how: str) -> Child:
        made.append(Child(tmp_path, how))
        return made[-1]

    yield make
    for one in made:
        one.close()


def test_a_supervisor_that_stands_for_ever_is_ended_with_its_stacks_on_the_disk(
    child: Callable[[str], Child], tmp_path: Path
) -> None:
    one = child("lock")
    one.stand(Standing.FREE)
    assert not one.goes_by(SILENCE - 30), "not before the bound"
    one.at += 100_000  # we were stopped, or the machine slept
    assert not one.goes_by(20), "that time is none of its silence"
    assert "for 600 s, and it waits for no file system: it is ended by SIGKILL" in one.goes_by(20)
    wait_until(lambda: one.watch.look(one.at), "its end")
    assert one.process.wait(10) == -signal.SIGKILL
    one.watch.record(tmp_path, one.watch.ended_for)
    found = read_page(LostEnd, tmp_path)
    assert found is not None and "its supervisor did not answer for 600 s and was ended" in found.words
    stacks = (tmp_path / "evidence" / "supervisor.txt").read_text()
    assert "in a_lock_that_nobody_gives_back" in stacks and "kernel stack" in stacks


@pytest.mark.fault(
    "A group's supervisor is silent because a file system does not answer",
    "it is left alone, and goes on when that answers",
)
def test_a_supervisor_that_waits_for_a_disk_is_left_alone_and_goes_on_when_the_disk_answers(
    child: Callable[[str], Child], tmp_path: Path
) -> None:
    one = child("a thread's disk")
    one.stand(Standing.DISK)
    assert "it may wait for a file system: it is left alone" in one.goes_by(2 * SILENCE)
    assert not one.goes_by(7 * SILENCE, 4.0)
    with (tmp_path / "fifo").open("w"):  # it answers, and the program ends
        assert one.process.wait(10) == 0
    assert not one.watch.ended_for


def test_a_supervisor_that_turns_or_waits_with_a_bound_is_never_silent(child: Callable[[str], Child]) -> None:
    one = child("a bound")
    one.watch.pipe.hear()
    wait_until(one.watch.pipe.hear, "it turns")
    (one.folder / "go").touch()
    time.sleep(0.3)
    one.watch.pipe.hear()
    wait_until(one.watch.pipe.hear, "it waits with a bound, and says so every two seconds", 30)
    assert one.process.poll() is None


def test_one_that_was_stopped_is_not_ended_and_is_told_when_it_goes_on(child: Callable[[str], Child]) -> None:
    one = child("a bound")
    os.kill(one.process.pid, signal.SIGSTOP)
    wait_until(lambda: standing(one.process.pid) is Standing.STOPPED, "it is stopped")
    one.watch.pipe.hear()
    assert "it is stopped: it is left alone" in one.goes_by(2 * SILENCE)
    os.kill(one.process.pid, signal.SIGCONT)
    assert wait_until(lambda: one.watch.look(one.at), "it is heard again") == "its supervisor goes on"
    assert one.process.poll() is None and not one.watch.ended_for


@pytest.mark.parametrize(
    ("how", "expected"),
    [("spin", Standing.FREE), ("child", Standing.FREE), ("a thread's pipe", Standing.FREE), ("disk", Standing.DISK)],
)
def test_where_a_process_stands_is_told_by_its_system_calls(
    child: Callable[[str], Child], how: str, expected: Standing
) -> None:
    one = child(how)
    one.stand(expected)
    assert standing(one.process.pid) is expected
    one.process.kill()
    one.process.wait(10)
    assert standing(one.process.pid) is Standing.UNSEEN


def test_a_process_that_a_person_has_stopped_at_a_terminal_is_not_continued() -> None:
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp("sleep", ["sleep", "600"])
    batch = subprocess.Popen(["sleep", "600"], start_new_session=True)
    try:
        wait_until(lambda: (one := process(pid)) is not None and one.name == "sleep", "it runs")
        assert not is_stopped(pid) and not is_stopped(batch.pid)
        os.write(terminal, b"\x1a")  # Ctrl-Z
        os.kill(pid, signal.SIGSTOP)  # the session's first process gets no stop from its own terminal
        os.kill(batch.pid, signal.SIGSTOP)
        wait_until(lambda: is_stopped(batch.pid), "the one without a terminal may be continued")
        wait_until(lambda: (one := process(pid)) is not None and one.state == "T", "the other one is stopped too")
        assert not is_stopped(pid)
    finally:
        for one in (pid, batch.pid):
            os.kill(one, signal.SIGKILL)
        os.waitpid(pid, 0)
        batch.wait(10)
        os.close(terminal)
