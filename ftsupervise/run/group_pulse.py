"""The pipe between a group's supervisor and the process that started it: no disk is between them.

The supervisor's main thread sends a byte whenever it turns or waits with a bound, and its stacks when it is asked for them. The
other way round, each supervisor continues the process above it where somebody has stopped that, and says so through the pipe.
"""

from __future__ import annotations

import faulthandler
import os
import signal
import stat
import threading
import time
from collections.abc import MutableMapping

from ftsupervise.host import pulse
from ftsupervise.host.processes import process, signal_exactly, stat_fields
from ftsupervise.host.pulse import ENV_PULSE
from ftsupervise.rundir.heartbeat_page import STACK_SIGNAL

STOPPED_FOR = 2.0  # seconds after which a stopped process is continued
_STOPPED_LOOK = 0.5  # seconds between two looks at the process above
_STOPPED = "T"  # in /proc/PID/stat; a debugger's "t" is left alone
_CONTINUED = b"\1"
_MOST = 1 << 20  # characters of its stacks


class PulsePipe:
    """The end of the process above."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.stacks = ""  # as the supervisor has written them
        self.has_continued_us = False
        self._read, self.write = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)

    def given(self) -> None:
        """The supervisor has the other end now."""
        os.close(self.write)
        self.write = -1

    def close(self) -> None:
        for fd in (self._read, self.write):
            if fd >= 0:
                os.close(fd)
        self._read = self.write = -1

    def hear(self) -> bool:
        """Read what came; return whether the main thread has sent something. Never waits."""
        heard = False
        while self._read >= 0:
            try:
                data = os.read(self._read, 1 << 16)
            except BlockingIOError:
                break
            if not data:
                break
            heard |= pulse.PULSE in data
            self.has_continued_us |= _CONTINUED in data
            self.stacks += data.translate(None, pulse.PULSE + _CONTINUED).decode("utf-8", "replace")
        self.stacks = self.stacks[:_MOST]
        return heard


# In the supervisor of a group.


def answer_parent(env: MutableMapping[str, str]) -> None:
    """Send the bytes from now on, answer with our stacks, and keep the process above us from being stopped. Nothing where we
    are no group's supervisor. Takes the name of the pipe out of ``env``: our command does not get it."""
    number = env.pop(ENV_PULSE, "")
    if not number.isdecimal():
        return
    fd = int(number)
    try:
        if not stat.S_ISFIFO(os.fstat(fd).st_mode):
            return
        os.set_inheritable(fd, False)
    except OSError:
        return
    pulse.start(fd)
    if signal.getsignal(STACK_SIGNAL) == signal.SIG_DFL:
        faulthandler.register(STACK_SIGNAL, file=fd, all_threads=True)
    threading.Thread(target=_keep_going, args=(os.getppid(),), name="process-above", daemon=True).start()


def _keep_going(parent: int) -> None:
    looks = 0  # a clock would also count the time in which we were stopped ourselves, as all of a suspended job are
    while os.getppid() == parent:
        time.sleep(_STOPPED_LOOK)
        looks = looks + 1 if is_stopped(parent) else 0
        one = process(parent)
        if looks * _STOPPED_LOOK >= STOPPED_FOR and one is not None and os.getppid() == parent:
            looks = 0
            signal_exactly(one, signal.SIGCONT)
            pulse.send(_CONTINUED)


def is_stopped(pid: int) -> bool:
    """Return whether a process was stopped (SIGSTOP) and may be continued. One with a controlling terminal is left alone: the
    person who sits there may have stopped it (Ctrl-Z)."""
    found = stat_fields(f"/proc/{pid}/stat")
    return found is not None and found[1][0] == _STOPPED and found[1][4] == "0"
