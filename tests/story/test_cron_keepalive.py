"""The run looks after its cron: once a period, bounded, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host.processes import identity
from ftsupervise.run.supervisor import ENV_EVERY, CronKeepalive

Until = Callable[..., Any]


def environment(**more: str) -> dict[str, str]:
    return {**os.environ, "SLURM_JOB_ID": "88", ENV_EVERY: "1", **more}


def test_it_types_its_command_again_and_again_and_is_gone_when_it_is_stopped(tmp_path: Path, until: Until) -> None:
    keeper = CronKeepalive(tmp_path, environment(), ("sh", "-c", f"echo x >> {tmp_path}/typed"))
    assert keeper.shell is not None
    pid = keeper.shell.pid
    until(lambda: (tmp_path / "typed").exists() and len((tmp_path / "typed").read_text()) >= 4, "two rounds")
    keeper.stop()
    assert identity(pid) is None


def test_there_is_none_outside_slurm(tmp_path: Path) -> None:
    assert CronKeepalive(tmp_path, {"PATH": os.environ["PATH"]}).shell is None


def test_it_does_not_outlive_a_supervisor_that_was_killed(tmp_path: Path, until: Until) -> None:
    script = "import os, sys, time; from pathlib import Path; from ftsupervise.run.supervisor import CronKeepalive\n"
    script += "print(CronKeepalive(Path('.'), dict(os.environ), ('true',)).shell.pid, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], env=environment(), stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert identity(pid) is not None
    parent.send_signal(signal.SIGKILL)
    parent.communicate(timeout=30)
    until(lambda: identity(pid) is None, "the end of the keeper")
