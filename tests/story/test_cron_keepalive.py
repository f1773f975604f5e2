"""The run looks after its cron: once a period, bounded, and nothing is left of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
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


def test_at_the_end_it_is_typed_once_more_for_a_run_that_was_watched_and_not_for_ever(tmp_path: Path) -> None:
    script = f"echo $* >> {tmp_path}/typed; echo $$ > {tmp_path}/pid; sleep 600"
    words, env = ("sh", "-c", script, "sh"), environment(**{ENV_EVERY: "600"})
    CronKeepalive(tmp_path, env, words).look_at_last(time.monotonic() + 5)
    assert not (tmp_path / "typed").exists()  # no watch has looked at it
    (tmp_path / "watch").mkdir()
    (tmp_path / "watch" / "found.json").touch()
    CronKeepalive(tmp_path, env, words).look_at_last(time.monotonic() + 0.5)
    assert not (tmp_path / "typed").exists()  # there is no time for it
    keeper, begun = CronKeepalive(tmp_path, env, words), time.monotonic()
    keeper.look_at_last(begun + 2)
    assert (tmp_path / "typed").read_text() == "--at-last\n"
    assert time.monotonic() - begun < 60 and keeper.shell is None
    assert identity(int((tmp_path / "pid").read_text())) is None


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
