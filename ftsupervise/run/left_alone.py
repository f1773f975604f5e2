"""The decisions on the command of an attempt that are only told, and what happens then (``rundir/observing.py``)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise.host.in_time import OneAtATime
from ftsupervise.ranks.hang_detector import HangVerdict
from ftsupervise.rundir.observing import note
from ftsupervise.truth import HANG, OnlyTold
from ftsupervise.units import show_duration

_WRITE = 2.0


class LeftAlone:
    """The decisions on one attempt that are not carried out."""

    def __init__(self, observes: Callable[[str], bool], folder: Path | None, say: Callable[[str], None]) -> None:
        """``folder``: of the attempt; None where there is none, and the decision is only said."""
        self.hang: HangVerdict | None = None  # that was found, and is not over
        self._observes, self._folder, self._say = observes, folder, say
        self._write = OneAtATime[None]()
        self._noted: dict[str, OnlyTold] = {}  # by the name of the page
        self._counts: dict[str, int] = {}

    def observes(self, decision: str) -> bool:
        return self._observes(decision)

    def note(self, decision: str, what: str, why: str, step: int | None = None) -> None:
        """Say, and write down, what is not done. The same again, while it is the newest, is said once."""
        number = self._counts.get(decision, 0)
        last = self._noted.get(f"{decision}-{number}")
        if last is not None and not last.then and (last.what, last.why) == (what, why):
            return
        one = OnlyTold(decision, what, why, datetime.now(timezone.utc), step)
        self._say(f"{one.words()}; this decision is only told")
        self._counts[decision] = number + 1
        self._keep(f"{decision}-{number + 1}", one)

    def went_on(self, step: int | None) -> None:
        """Note that the hang is over, without us."""
        self.hang = None
        name = f"{HANG}-{self._counts.get(HANG, 0)}"
        at = f", at step {step}" if step is not None else ""
        last = self._noted.get(name)
        if last is None or last.at is None:
            self._say(f"the hang is over: it goes on by itself{at}")
            return
        after = show_duration(round((datetime.now(timezone.utc) - last.at).total_seconds()))
        one = last._replace(then=f"it went on by itself after {after}{at}")
        self._say(one.then)
        self._keep(name, one)

    def _keep(self, name: str, one: OnlyTold) -> None:
        self._noted[name] = one
        if self._folder is None:
            return
        try:
            self._write(partial(note, self._folder, name, one), _WRITE)
        except OSError as error:
            self._say(f"cannot write that down: {error.strerror or error}")
