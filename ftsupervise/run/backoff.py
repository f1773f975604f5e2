"""What is waited for before, between and after attempts: a back-off, a full disk, a run directory that is not mounted.

A full disk would burn a chain of members in seconds, and the end of an attempt that found no space would be forgotten: the
next one would count it as one that died without a word. So both wait, with a bound, and leave when they are told to.
"""

from __future__ import annotations

import errno
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise.errors import DiskFull, Error, from_os_error
from ftsupervise.model import Attempt, Claim, End
from ftsupervise.run import gate
from ftsupervise.run.events import STOP, SignalQueue
from ftsupervise.run.settings import Options
from ftsupervise.rundir import ledger
from ftsupervise.rundir.run_log import tell

_LOOK = 3.0  # seconds between two looks at a full disk
_LAST = 10.0  # seconds for the last pages when we were told to leave
_FULL = (errno.ENOSPC, errno.EDQUOT)


def shut(options: Options) -> str:
    """Why nothing is to be started; "" also when that cannot be seen: who waits goes on waiting, and the start will tell."""
    try:
        return gate.reason_not_to_start(options.rundir)
    except Error:
        return ""


def sit_out(
    seconds: float, ears: SignalQueue, options: Options, log: Path | None = None, ask: Callable[[Options], str] = shut
) -> bool:
    """False when something came that ends it: a signal to leave, however short the wait, or what ``ask`` says."""
    until = time.monotonic() + seconds
    while True:
        rest = until - time.monotonic()
        for number in ears.heard(min(max(rest, 0.0), 1.0)):
            if number in STOP or number == options.warning:
                tell(log, "told to leave while waiting")
                return False
        if rest <= 0:
            return True
        if why := ask(options):
            tell(log, why)
            return False


def wait_for_space(do: Callable[[], object], seconds: float, pause: Callable[[float], bool]) -> bool:
    """Do it, again every few seconds as long as the disk is full or the run directory is not mounted. False when ``pause`` was
    ended; it has told why.

    Raises DiskFull or Gone when that lasts longer than ``seconds``, and at once whatever else ``do`` raises.
    """
    until, told = time.monotonic() + seconds, ""
    while True:
        try:
            do()
        except (DiskFull, gate.RunDirGone) as error:
            rest = until - time.monotonic()
            if rest <= 0:
                raise
            what = "it" if isinstance(error, gate.RunDirGone) else "space"
            if told != what:
                tell(None, f"{error.message}; waiting up to {seconds:g} s for {what} ({error.hint})")
                told = what
            if not pause(min(_LOOK, rest)):
                return False
        else:
            if told:
                tell(None, "there is space again" if told == "space" else "the run directory is there again")
            return True


class PendingWrites:
    """Pages that found no space, in the order in which they are to be written, and the ends among them."""

    def __init__(self) -> None:
        self._pages: dict[str, Callable[[], object]] = {}
        self.ends: dict[int, Attempt] = {}

    def __bool__(self) -> bool:
        return bool(self._pages)

    def end(self, mine: Claim, ended: End, then: str) -> None:
        """The last page of an attempt. Its words stand in the job's output in any case."""
        now = datetime.now(timezone.utc)
        log = mine.folder / "run.log"
        write = partial(ledger.write_end, mine, ended, then, now)
        problem = self.write(f"the end of attempt {mine.number} ({ended.cause.words()}; {then})", write, log)
        if problem is not None and problem.errno in _FULL:
            self.ends[mine.number] = ledger.as_attempt(mine, ended, now)

    def write(self, what: str, page: Callable[[], object], log: Path | None) -> OSError | None:
        """Write it now, or keep it for when there is space; what went wrong. ``what`` kept before is replaced."""
        self._pages.pop(what, None)
        try:
            page()
        except OSError as error:
            kept = "; it is written as soon as there is space" if error.errno in _FULL else ""
            tell(log, f"cannot write {what}: {error.strerror or error}{kept}")
            if kept:
                self._pages[what] = page
            return error
        return None

    def settle(self) -> None:
        """Write what is owed. Raises DiskFull when there is still no space; what goes wrong otherwise is told and dropped."""
        for what, page in list(self._pages.items()):
            try:
                page()
            except OSError as error:
                if error.errno in _FULL:
                    raise from_os_error(error, f"write {what}") from None
                tell(None, f"cannot write {what}: {error.strerror or error}")
            else:
                tell(None, f"written now: {what}")
            del self._pages[what]
        self.ends.clear()

    def settle_at_last(self, options: Options, ears: SignalQueue, *, told: bool) -> None:
        """Before the job is left. What is still owed then is told once more, for the job's output is all that has it.

        ``told``: we were told to leave, and there may be seconds left; otherwise a signal to leave ends the waiting.
        """
        if not self._pages:
            return
        listen = partial(sit_out, ears=ears, options=options, ask=lambda _: "")
        seconds, pause = (min(_LAST, options.space_wait), _doze) if told else (options.space_wait, listen)
        try:
            if wait_for_space(self.settle, seconds, pause):
                return
            self.settle()
        except DiskFull:
            for what in self._pages:
                tell(None, f"never written, for want of space: {what}")


def _doze(seconds: float) -> bool:
    time.sleep(seconds)
    return True
