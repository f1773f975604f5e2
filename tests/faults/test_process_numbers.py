"""A process number is used again: what was excluded under it is not what has it now. Needs root to choose the next number."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

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
