"""A process number is used again: what was excluded under it is not what has it now. Needs root to choose the next number."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import bounded
from ftsupervise.host.processes import end_group
from ftsupervise.run.fencing import OrphanReaper
from ftsupervise.run.supervisor import Repeated
from tests.neighbours.supervised import SupervisedRun, alive

LAST = Path("/proc/sys/kernel/ns_last_pid")
Until = Callable[..., Any]
# A job script that leaves a helper behind before it becomes the supervisor, and a command whose child gets the helper's number.
SCRIPT = """sleep 600 & echo $! > helper
exec "$@"
"""
COMMAND = """import os, signal, sys, time
from pathlib import Path
helper = int(Path("helper").read_text())
os.kill(helper, signal.SIGTERM)
while os.path.exists(f"/proc/{helper}"):
    time.sleep(0.01)
for _ in range(500):
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(helper - 1))
    pid = os.fork()
    if not pid:
        if os.getpid() != helper:
            os._exit(0)
        os.setsid()
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Path("taken").write_text(str(os.getpid()))
        time.sleep(600)
    if pid == helper:
        while not os.path.exists("taken"):
            time.sleep(0.01)
        sys.exit(0)
    os.waitpid(pid, 0)
sys.exit(9)
"""


@pytest.fixture
def run(tmp_path: Path) -> Iterator[SupervisedRun]:
    try:
        LAST.write_text(LAST.read_text())
    except OSError:
        pytest.skip("the next process number cannot be chosen here")
    with closing(SupervisedRun(tmp_path / "run", tmp_path)) as one:
        yield one


@pytest.mark.chain(
    "a helper that the job script had left running ends, and a process of the training gets its number",
    "that process is ended with its attempt, as all others are: a number and a start time together are an identity",
    "none",
    "nothing",
)
@pytest.mark.root
def test_a_straggler_with_the_number_of_a_helper_that_has_ended_is_ended(run: SupervisedRun, until: Until) -> None:
    one = run.start("--", "python3", "-c", COMMAND, shell=SCRIPT)
    assert one.wait(60) == 0, one.said()
    assert not alive(int((run.folder / "taken").read_text()))
    assert run.attempts()[-1].words == "exit 0"


@pytest.mark.root
@pytest.mark.parametrize("begin", [lambda: Repeated(["true"], os.environ, "600", 60), lambda: OrphanReaper(1)])
def test_the_end_of_a_run_ends_nobody_who_has_the_number_of_a_shell_that_died_long_ago(
    run: SupervisedRun,  # skips where no number can be chosen
    until: Until,
    begin: Callable[[], Repeated | OrphanReaper],
) -> None:
    """The shells beside a run last as long as it, for days, and whatever the kernel ends for its memory is reaped at once."""
    beside, other = next(one for one in begun_with_its_number(begin, until) if one is not None)
    try:
        beside.stop()
        time.sleep(0.1)
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()


def begun_with_its_number(
    begin: Callable[[], Repeated | OrphanReaper], until: Until
) -> Iterator[tuple[Repeated | OrphanReaper, subprocess.Popen[bytes]] | None]:
    """A shell that has died, and another run of the account: a process that leads a session, with the shell's number. None for
    each shell whose number some other process of this machine was given."""
    for _ in range(20):
        beside = begin()
        assert beside.shell is not None
        number = beside.shell.pid
        end_group(number)
        until(partial(reaped, number), "the end of the shell")
        for _ in range(20):
            LAST.write_text(str(number - 1))
            one = subprocess.Popen(["sleep", "600"], start_new_session=True)
            if one.pid == number:
                yield beside, one
            one.kill()
            one.wait()
        yield None


def reaped(number: int) -> bool:
    return number in [pid for pid, _ in bounded.reap()]
