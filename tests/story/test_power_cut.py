"""The power cut of the sandbox: what is on the node ends at one moment, and nothing there hears of it before."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host import processes
from ftsupervise.sandbox.place import power_cut

# A parent with children in process groups of their own, as slurmstepd has them. Each says what it hears.
FAMILY = """
import os, signal, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
def hears(number, _):
    os.close(os.open(folder / f"heard-{os.getpid()}", os.O_CREAT))
for _ in range(100):
    if not os.fork():
        os.setpgid(0, 0)
        signal.signal(signal.SIGHUP, hears)
        (folder / f"child-{os.getpid()}").touch()
        while True:
            time.sleep(60)
time.sleep(60)
"""


def test_no_process_hears_of_a_power_cut_by_the_death_of_its_parent(tmp_path: Path, until: Callable[..., Any]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", FAMILY, str(tmp_path)], start_new_session=True)
    until(lambda: len(list(tmp_path.glob("child-*"))) == 100, "the children")
    pids = [parent.pid, *(int(path.name[6:]) for path in tmp_path.glob("child-*"))]
    family = [one for pid in pids if (one := processes.process(pid)) is not None]
    assert len(family) == 101
    left = power_cut(lambda: [one for one in family if processes.lives(one.pid, one.start)], 10)
    assert parent.wait(20) == -9
    assert left == []
    assert list(tmp_path.glob("heard-*")) == []
