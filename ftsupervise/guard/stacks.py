"""Where does this rank stand? Asked from outside by a signal, answered by ``faulthandler`` in C: also with the GIL held.

The answer goes to ``stack-N`` beside the rank's page, in node-local memory: a file system that hangs is not asked for it.
The signal is one that nobody else uses; a handler that the program has set for it, before or after, stays.
"""

from __future__ import annotations

import os
import signal

from ftsupervise.rundir import heartbeat_page


def listen(directory: str | os.PathLike[str], rank: int) -> None:
    """Answer from now on. Raises OSError when there can be no file, RuntimeError when there can be no handler."""
    if signal.getsignal(heartbeat_page.STACK_SIGNAL) != signal.SIG_DFL:
        return
    import faulthandler

    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(heartbeat_page.stack_path(directory, rank), flags, 0o600)
    faulthandler.register(heartbeat_page.STACK_SIGNAL, file=fd, all_threads=True)
