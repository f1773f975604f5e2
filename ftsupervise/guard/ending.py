"""How this process ends, told on its page before it has ended: with torch loaded it takes a second, or hangs in its teardown.

Told when the interpreter ends, after the program's own ``except``, ``finally`` and threads, and after what it registered with
``atexit`` behind its guard. Its exit code is known then if an exception ended it, or a ``sys.exit()`` out of ``with Guard()``.
Of a loop that was told to stop, or has finished, nothing is told but that it leaves.
"""

from __future__ import annotations

import os
import sys

from ftsupervise.rundir.heartbeat_page import HeartbeatPage

_OUTERMOST = ("<module>", "_run_module_as_main")  # of a program, and with ``python -m``


class ExitReport:
    def __init__(self, page: HeartbeatPage) -> None:
        self._page = page
        self._code = 0  # of a sys.exit() that went through the guard's block

    def passes(self, error: BaseException | None) -> None:
        """Something is on its way out of the guard's block, and may be caught further out. Nothing is made of it once the loop
        leaves in order: others may be about to save, and srun tells of this one."""
        if not self._is_mine() or self._page.in_order:
            return
        self._code = _exit_code(error) if isinstance(error, SystemExit) else 0
        if self._code or isinstance(error, Exception):
            self._page.failed()

    def forget(self) -> None:
        """What went through the block before was caught: the loop is entered anew, or has come to its end in order."""
        if self._is_mine():
            self._code = 0
            self._page.stays()

    def leaves(self) -> None:
        if self._is_mine():
            self._page.leaving()

    def at_exit(self) -> None:
        """Who dies without this was killed."""
        if not self._is_mine():
            return
        code = 0 if self._page.in_order else 1 if _uncaught() else self._code
        if code:
            _flush()
            self._page.ends(code)
        else:
            self._page.leaving()

    def _is_mine(self) -> bool:
        """A child that the rank has forked ends, too, and maps the same page."""
        return os.getpid() == self._page.pid


def _flush() -> None:
    """What the program printed: the interpreter writes it only after this, and may not come to it."""
    for name in ("stdout", "stderr", "__stdout__"):
        try:
            getattr(sys, name).flush()
        except Exception:  # none, or closed
            continue


def _exit_code(error: SystemExit) -> int:
    """As the interpreter makes it of what ``sys.exit()`` was given."""
    try:
        code = error.code
    except Exception:  # a subclass of somebody's
        return 1
    if code is None:
        return 0
    return code & 0xFF if isinstance(code, int) else 1


def _uncaught() -> bool:
    """Has an exception left the program? One that some extension printed and forgot began in another frame."""
    error = getattr(sys, "last_exc", None) or getattr(sys, "last_value", None)
    trace = getattr(error, "__traceback__", None)
    if not isinstance(error, Exception) or trace is None:
        return False
    return trace.tb_frame.f_back is None and trace.tb_frame.f_code.co_name in _OUTERMOST
