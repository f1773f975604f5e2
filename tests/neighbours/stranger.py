"""Other accounts of this machine, who do or type something: one that shares nothing with ours, two of one group. Needs root."""

from __future__ import annotations

import os
import pwd
import subprocess
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

STRANGER = 65534
ADA, EVE = "daemon", "games"  # every Debian has them
GROUP = pwd.getpwnam(EVE).pw_gid  # of both, as they act here


class Typed(NamedTuple):
    """The end of a command."""

    code: int
    said: str


def _become(uid: int, gid: int, umask: int) -> None:
    os.setgroups([])
    os.setgid(gid)
    os.setuid(uid)
    os.umask(umask)


def become_stranger() -> None:
    """Become that account, for good, with an umask of 0."""
    _become(STRANGER, STRANGER, 0)


def _begin(become: Callable[[], object], act: Callable[[], object]) -> int:
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become()
            act()
            code = 0
        except BaseException:  # the end of this process says that it failed
            traceback.print_exc()
        finally:
            os._exit(code)
    return pid


def end(pid: int, who: str = "it") -> None:
    """Wait for a process. What it raised fails the test."""
    assert os.waitpid(pid, 0)[1] == 0, f"{who} could not do it"


def as_stranger(act: Callable[[], object]) -> None:
    """Do it as that account, with an umask of 0. What it raises fails the test."""
    end(_begin(become_stranger, act), "the other account")


def begin_as(who: str, act: Callable[[], object], umask: int = 0o022) -> int:
    """Let ``ADA`` or ``EVE`` begin to do it; return the process."""
    return _begin(partial(_become, pwd.getpwnam(who).pw_uid, GROUP, umask), act)


def as_one(who: str, act: Callable[[], object], umask: int = 0o022) -> None:
    """Do it as ``ADA`` or ``EVE``. What it raises fails the test."""
    end(begin_as(who, act, umask), who)


def type_as(who: str, argv: list[str], home: Path, cwd: Path | str, umask: int, path: str = "/usr/bin:/bin") -> Typed:
    """Type a command as ``ADA`` or ``EVE``."""
    env = {"PATH": path, "HOME": str(home), "FTSUPERVISE_STATE_DIR": str(home / "state")}
    done = subprocess.run(
        argv, cwd=cwd, env=env, user=who, group=GROUP, extra_groups=[], umask=umask,
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    return Typed(done.returncode, done.stdout + done.stderr)


def one_by_one(*acts: Callable[[], object]) -> Callable[[], None]:
    """What does each of ``acts``, in their order."""

    def do() -> None:
        for act in acts:
            act()

    return do
