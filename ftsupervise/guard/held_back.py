"""Holds back what this rank would do about its loss, where that is only told (``act`` in the settings)."""

from __future__ import annotations

from datetime import datetime, timezone
from functools import partial
from time import monotonic

from ftsupervise.guard.settings import RankContext
from ftsupervise.host.in_time import in_time
from ftsupervise.rundir.observing import Observes, note
from ftsupervise.truth import BACK, NOT_A_NUMBER, LossTrouble, OnlyTold

_AGAIN = 5.0  # seconds between two looks whether that is still so, while the trouble lasts
_WRITE = 0.25  # seconds: the loop waits for it


class HeldBack:
    """Asked when the policy says stop: true where that is only told, which is then written down."""

    def __init__(self, place: RankContext) -> None:
        self._place = place
        self._observes = Observes(place.rundir, place.observe) if place.rundir is not None else None
        self._told: OnlyTold | None = None  # while the loss is no number
        self._asked = 0.0
        self._kept = 0  # pages

    def __call__(self, trouble: LossTrouble) -> bool:
        if self._observes is None:
            return False
        lasts = (
            self._told is not None and trouble.kind == NOT_A_NUMBER
        )  # of one that diverges each rise is reported once
        if lasts and monotonic() < self._asked + _AGAIN:
            return True
        self._asked = monotonic()
        if not self._observes(BACK):
            return False
        if not lasts:
            what = "stopped the run"
            what += " and gone back to an older checkpoint" if trouble.then == "resume" else ""
            one = OnlyTold(BACK, what, f"{trouble.kind}: {trouble.words}", _now(), trouble.step)
            self._kept += 1
            self._told = one if trouble.kind == NOT_A_NUMBER else self._told
            self._keep(one)
        return True

    def over(self, words: str) -> None:
        """Note that the loss is a number again, without us."""
        if self._told is not None:
            self._keep(self._told._replace(then=words))
            self._told = None

    def _keep(self, one: OnlyTold) -> None:
        if self._place.attempt_dir is None:
            return
        at = one.at.strftime("%H%M%S") if one.at is not None else ""
        name = f"{BACK}-rank-{self._place.rank}-{at}-{self._kept}"
        write = partial(note, self._place.attempt_dir, name, one, by_a_rank=True)
        try:
            in_time(write, _WRITE)
        except OSError:  # the rank has said it
            pass


def _now() -> datetime:
    return datetime.now(timezone.utc)
