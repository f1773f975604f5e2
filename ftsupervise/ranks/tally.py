"""Sums up what the guards of many ranks have counted: each agent for its node, and the supervisor for all nodes.

So a run of 100,000 ranks tells its first step, its newest checkpoint, its seconds in saves and its loss in 61 bytes per node.
Merging is associative, and the order does not matter.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from math import nan
from typing import TypeVar

from ftsupervise.truth import SAVE, HeartbeatSample, Tally

# known, first, age of it, highest, saved, saving, age of the last progress, loss, rank, last step
_FORM = struct.Struct("<BqIqqdIdIq")
_FIRST, _SAVED, _ACTIVE, _LOSS, _LAST, _STEPPED = 1, 2, 4, 8, 16, 32
_LIMIT = (1 << 32) - 1
_Order = TypeVar("_Order", int, float)


def of_pages(pages: Iterable[HeartbeatSample], now: float) -> Tally:
    """Return the tally of these ranks at monotonic ``now``. A save that is being made counts as far as it has come."""
    found = list(pages)
    reporting = [one for one in found if one.loss is not None]
    loss = min(reporting, key=lambda one: one.rank, default=None)
    return Tally(
        first=_least(one.first for one in found),
        first_at=_most(one.first_at for one in found if one.first is not None),
        last=_most(one.step for one in found),
        saved=_most(one.saved for one in found),
        saving=max((one.saving + (now - one.since) * (one.phase == SAVE) for one in found), default=0.0),
        active=_most(max(one.stepped, one.since) for one in found),
        loss=loss.loss if loss is not None else None,
        loss_rank=loss.rank if loss is not None else None,
        last_step=_most(one.last_step for one in found),
    )


def merged(tallies: Iterable[Tally]) -> Tally:
    found = list(tallies)
    loss = min((one for one in found if one.loss_rank is not None), key=lambda one: one.loss_rank or 0, default=Tally())
    return Tally(
        first=_least(one.first for one in found),
        first_at=_most(one.first_at for one in found),
        last=_most(one.last for one in found),
        saved=_most(one.saved for one in found),
        saving=max((one.saving for one in found), default=0.0),
        active=_most(one.active for one in found),
        loss=loss.loss,
        loss_rank=loss.loss_rank,
        last_step=_most(one.last_step for one in found),
    )


def pack(tally: Tally, now: float) -> bytes:
    """Return the body that carries it at monotonic ``now``: times are ages."""
    known = (
        (tally.first is not None and tally.first_at is not None) * _FIRST
        | (tally.last is not None) * _STEPPED
        | (tally.saved is not None) * _SAVED
        | (tally.active is not None) * _ACTIVE
        | (tally.loss is not None) * _LOSS
        | (tally.last_step is not None) * _LAST
    )
    return _FORM.pack(
        known,
        tally.first or 0,
        _ms(now, tally.first_at),
        tally.last or 0,
        tally.saved or 0,
        tally.saving,
        _ms(now, tally.active),
        nan if tally.loss is None else tally.loss,
        tally.loss_rank or 0,
        tally.last_step or 0,
    )


def read(body: bytes, now: float) -> Tally:
    """Unpack a body of ``pack`` that came at monotonic ``now``. Raises ValueError for any other body."""
    try:
        known, first, first_age, highest, saved, saving, age, loss, rank, last = _FORM.unpack(body)
    except struct.error as error:
        raise ValueError(f"no tally: {error}") from None
    return Tally(
        first=first if known & _FIRST else None,
        first_at=now - first_age * 0.001 if known & _FIRST else None,
        last=highest if known & _STEPPED else None,
        saved=saved if known & _SAVED else None,
        saving=saving if 0.0 <= saving < 1e9 else 0.0,
        active=now - age * 0.001 if known & _ACTIVE else None,
        loss=loss if known & _LOSS else None,
        loss_rank=rank if known & _LOSS else None,
        last_step=last if known & _LAST else None,
    )


def _ms(now: float, at: float | None) -> int:
    return 0 if at is None else max(0, min(_LIMIT, int((now - at) * 1000)))


def _most(values: Iterable[_Order | None]) -> _Order | None:
    return max((one for one in values if one is not None), default=None)


def _least(values: Iterable[_Order | None]) -> _Order | None:
    return min((one for one in values if one is not None), default=None)
