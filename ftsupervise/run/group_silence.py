"""Ends the supervisor of a group that stands for ever, so that another one takes its place.

One whose main thread has sent nothing for ten minutes, and that waits for no file system meanwhile, will not go on: its stacks
are read, then it is killed. What follows is the end of any killed supervisor. One that waits for a dead disk goes on when
the disk answers, and its ranks train meanwhile: it is left alone. So is one of which it cannot be seen where it stands.
"""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Mapping
from pathlib import Path

from ftsupervise.host.in_time import OneAtATime
from ftsupervise.host.ownership import make_folder
from ftsupervise.host.standing import Standing, standing
from ftsupervise.ranks.evidence import evidence
from ftsupervise.run.group_pulse import PulsePipe
from ftsupervise.rundir.attempt_pages import LostEnd, write_page
from ftsupervise.rundir.heartbeat_page import STACK_SIGNAL
from ftsupervise.rundir.paths import write_whole

ENV_SILENCE = "FTSUPERVISE_SILENCE_SECONDS"  # for tests
SILENCE = 600.0  # seconds. Its waits that send nothing, one behind the other, take less than half of that: see docs/replicas.md
_AGO = 0.1  # of that: from then on it is looked at where it stands
_LOOK = 5.0  # seconds between two such looks, at most
_SEEN = 0.2  # seconds for one
_GAP = 5.0  # seconds between two reads of the pipe: where more went by we did not run, and it may not have run either
_STACKS = 4.0  # seconds for its stacks
_DIES = 10.0  # seconds after SIGKILL


def silence_bound(env: Mapping[str, str]) -> float:
    text = env.get(ENV_SILENCE, "")
    return float(text) if text.isdecimal() else SILENCE


class SupervisorWatch:
    """Follows one supervisor from its start to its end. ``at`` is monotonic."""

    def __init__(self, at: float, bound: float = SILENCE) -> None:
        """Raises OSError."""
        self.pipe = PulsePipe()
        self.ended_for = ""  # why we have ended it
        self._bound, self._pid, self._evidence = bound, 0, ""
        self._heard = self._looked = at
        self._silent = self._counts = 0.0  # seconds: of silence, and of those in which it waited for no file system
        self._asked: float | None = None  # since when its stacks are read, or since its SIGKILL
        self._stands, self._told = Standing.FREE, False
        self._look, self._outside = OneAtATime[Standing](), OneAtATime[str]()

    def begin(self, pid: int) -> None:
        """It has started."""
        self._pid = pid
        self.pipe.given()

    def look(self, at: float) -> str:
        """Hear it, and end it when its time is over. Returns a sentence for the log where there is news."""
        gap, self._heard = at - self._heard, at
        heard = self.pipe.hear()
        if self.ended_for:
            return self._after_the_kill(at)
        if heard:
            goes_on, self._told, self._asked = self._told or self._asked is not None, False, None
            self._silent, self._counts, self._stands = 0.0, 0.0, Standing.FREE
            return "its supervisor goes on" if goes_on else ""
        if self._asked is not None:
            return self._kill(at) if self._have_stacks(at) else ""
        if gap > _GAP:
            return ""
        self._silent += gap
        if self._silent >= _AGO * self._bound and at >= self._looked + min(_LOOK, _AGO * self._bound):
            self._looked = at
            self._stands = self._look(lambda: standing(self._pid), _SEEN) or Standing.UNSEEN
        self._counts += gap if self._stands is Standing.FREE else 0.0
        return self._judge(at)

    def _judge(self, at: float) -> str:
        words = f"its supervisor has not answered for {self._silent:.0f} s"
        if self._counts >= self._bound and self._stands is Standing.FREE:
            self._asked = at
            self._ask_for_stacks()
            return f"{words}, and {self._stands.value}: it is ended by SIGKILL as soon as its stacks are read"
        if self._silent < self._bound or self._told or self._stands is Standing.FREE:
            return ""
        self._told = True
        return f"{words}; {self._stands.value}: it is left alone"

    def _ask_for_stacks(self) -> None:
        self.pipe.stacks = ""
        caught = re.search(r"^SigCgt:\s*([0-9a-f]+)", _status(self._pid), re.M)
        if caught is not None and int(caught[1], 16) >> (STACK_SIGNAL - 1) & 1:
            self._send(STACK_SIGNAL)

    def _have_stacks(self, at: float) -> bool:
        assert self._asked is not None
        outside = self._outside(lambda: evidence(self._pid), 0.0)
        self._evidence = outside or self._evidence
        return outside is not None or at >= self._asked + _STACKS

    def _kill(self, at: float) -> str:
        self.ended_for = f"its supervisor did not answer for {self._silent:.0f} s and was ended"
        self._asked, self._told = at, False
        self._send(signal.SIGKILL)
        return f"{self.ended_for}; its ranks are ended too, then the group is started again"

    def _after_the_kill(self, at: float) -> str:
        assert self._asked is not None
        if self._told or at < self._asked + _DIES:
            return ""
        self._told = True
        return "SIGKILL does not end its supervisor: nothing is started in its place before it has ended"

    def record(self, attempt: Path, why: str) -> None:
        """Write down ``why`` the attempt has no end of its own in the ledger ("": it has one), and the stacks of a supervisor
        that we have ended. Raises OSError."""
        if why:
            write_page(attempt, LostEnd(why))
        if not self.ended_for:
            return
        make_folder(attempt / "evidence")
        inside = self.pipe.stacks or "none: it did not answer the signal that asks for them\n"
        text = f"{self._evidence}\n== Python stacks (the main thread is the last one)\n{inside}"
        write_whole(attempt / "evidence" / "supervisor.txt", text)

    def _send(self, number: int) -> None:
        try:
            os.kill(self._pid, number)  # a child that we have not reaped: the number is its own
        except ProcessLookupError:
            return


def _status(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/status").read_text("ascii", "replace")
    except OSError:
        return ""
