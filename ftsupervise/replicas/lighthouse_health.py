"""Decides whether the lighthouse is to be ended. Pure: what was seen of it, and for how long.

While a lighthouse is slow, or even stopped, all groups wait and lose nothing. A new one knows nobody, and costs more than a
pause of a minute. So it is never restarted to be sure:

- A stopped one is continued, which loses nothing.
- One that answered once, and then not for a minute, is ended. One that never answered may be fine, and our sight wrong: five
  times as long.
- One whose port refuses connections is broken for certain: ten seconds.
- What the network of this host does not let us see ends nothing, and neither does an answer that is not a lighthouse's.
"""

from __future__ import annotations

from enum import Enum
from typing import NamedTuple

from ftsupervise.replicas.lighthouse_page import LighthousePage, PageNotSeen, Unseen
from ftsupervise.units import show_duration

LOOK_EVERY = 2.0  # seconds
_REFUSED = 10.0
_NEVER_ANSWERED = 5  # times as patient
_STOPPED = "T"  # in /proc/PID/stat; a debugger's "t" is left alone


class LighthouseVerdict(Enum):
    LEAVE = "leave"
    CONTINUE = "continue"  # SIGCONT
    END = "end"


class LighthouseHealth(NamedTuple):
    """This holds what was seen of one lighthouse process so far. Times: one monotonic clock, in seconds."""

    begun: float
    answered: float | None = None  # the last time
    refused: float | None = None  # since
    stopped: bool = False

    def after(
        self, now: float, seen: LighthousePage | PageNotSeen, state: str, silent: float
    ) -> tuple[LighthouseHealth, LighthouseVerdict, str]:
        """Add one more look; returns also what to do about it, in words. ``state``: of its process, one letter.
        ``silent``: seconds without an answer, after which it is ended."""
        if isinstance(seen, LighthousePage):
            return self._replace(answered=now, refused=None, stopped=False), *_LEAVE
        if state == _STOPPED:
            words = "" if self.stopped else "it is stopped (SIGSTOP): it is continued"
            return self._replace(stopped=True, refused=None), LighthouseVerdict.CONTINUE, words
        if seen.kind not in (Unseen.REFUSED, Unseen.SILENT):
            # the clocks stand still: these seconds prove nothing
            return self._replace(begun=now, answered=now if self.answered is not None else None, refused=None), *_LEAVE
        refused = (now if self.refused is None else self.refused) if seen.kind is Unseen.REFUSED else None
        then = self._replace(refused=refused, stopped=False)
        if refused is not None and now - refused >= _REFUSED:
            return then, LighthouseVerdict.END, f"it lives, and its port refuses connections for {_REFUSED:.0f} s"
        patience = silent * (1 if self.answered is not None else _NEVER_ANSWERED)
        since = now - (self.begun if self.answered is None else self.answered)
        if since >= patience:
            return then, LighthouseVerdict.END, f"it lives, and has not answered for {show_duration(since)}"
        return then, *_LEAVE


_LEAVE = (LighthouseVerdict.LEAVE, "")
