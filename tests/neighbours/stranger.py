"""Another account of this machine, which shares nothing with ours. Needs root to become it."""

from __future__ import annotations

import os
import traceback
from collections.abc import Callable

STRANGER = 65534


def become_stranger() -> None:
    """Become that account, for good, with an umask of 0."""
    os.setgroups([])
    os.setgid(STRANGER)
    os.setuid(STRANGER)
    os.umask(0)


def as_stranger(act: Callable[[], object]) -> None:
    """Do it as that account, with an umask of 0. What it raises fails the test."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            become_stranger()
            act()
            code = 0
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    assert os.waitpid(pid, 0)[1] == 0, "the other account could not do it"


def one_by_one(*acts: Callable[[], object]) -> Callable[[], None]:
    """What does each of ``acts``, in their order."""

    def do() -> None:
        for act in acts:
            act()

    return do
