"""Tells how far an attempt came, by its progress page, which the supervisor writes, and by the beats of its ranks."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TypeVar

from ftsupervise.model import GUARD, NOBODY, OUTPUT, NodeRanks, Reached
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, read_progress, write_progress
from ftsupervise.rundir.records import as_count, as_number
from ftsupervise.rundir.stalls import START
from ftsupervise.truth import Beat, LossTrouble, Tally

_Order = TypeVar("_Order", int, float)
FEW = 64  # ranks whose beats are read besides a page that counts them all: they may be seconds newer


def reached(rundir: RunDir, number: int, page: ProgressPage | None, *, every_beat: bool = False) -> Reached:
    """Return the steps that attempt ``number`` reached, ``page`` its progress.

    Empty when nothing can be read, or newer beats have taken their place. ``every_beat``: read those of many ranks too,
    for facts that a page does not hold: a loss that is no number, why a rank asked to stop.
    """
    if page is not None and page.ranks > FEW and not every_beat:
        return _of_page(page)
    try:
        mine = [beat for beat in heartbeat_page.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    except OSError:
        return Reached() if page is None else _of_page(page)
    return _of_beats(mine) if page is None else _newer(_of_beats(mine), _of_page(page))


def keep_reached(rundir: RunDir, number: int) -> None:
    """Record how far attempt ``number`` came, if no supervisor lived to record its end.

    The beats of the next one take the place of its own, and its supervisor's last page may be seconds old. Raises
    OSError.
    """
    if number < 1 or os.path.lexists(rundir.attempt(number) / "end.json"):
        return
    page = read_progress(rundir, number)
    if (page is not None and page.ranks > FEW) or len(os.listdir(rundir.beats)) > FEW:
        return
    mine = [beat for beat in heartbeat_page.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    newest = max((beat.at for beat in mine if beat.step is not None), default=None)
    seen, before = reached(rundir, number, page), page or ProgressPage()
    if newest is None or seen.last is None or (before.ahead is not None and seen.last <= before.ahead):
        return
    kept = before._replace(
        at=max(newest, before.at), ranks=max(before.ranks, len(mine)), ahead=seen.last, first=seen.first
    )
    kept = kept._replace(first_at=seen.first_at, saved=seen.saved, saving=seen.saving or 0.0)
    write_progress(rundir.attempt(number), kept._replace(active_at=max(newest.timestamp(), before.active_at or 0.0)))


def counted(beats: Sequence[Beat]) -> Tally:
    """Return the counts of the guards of these ranks. ``first_at`` is in epoch seconds."""
    times = [when for beat in beats if (when := _moment(beat.facts.get("first_at"))) is not None]
    losses = [(beat.rank, loss) for beat in beats if (loss := _moment(beat.facts.get("loss"))) is not None]
    return Tally(
        first=min(_facts(beats, "first"), default=None),
        first_at=max(times, default=None),
        last=max((beat.step for beat in beats if beat.step is not None), default=None),
        saved=max(_facts(beats, "saved"), default=None),
        saving=max((when for beat in beats if (when := _moment(beat.facts.get("saving"))) is not None), default=0.0),
        loss=min(losses)[1] if losses else None,
        loss_rank=min(losses)[0] if losses else None,
        last_step=max(_facts(beats, "last_step"), default=None),
    )


def _source(beats: Sequence[Beat]) -> str:
    """Return who told the steps. The beat of a command that has shown nothing since its start is no word of anybody."""
    beats = [beat for beat in beats if "source" not in beat.facts or beat.phase != START]
    if not beats:
        return NOBODY
    return OUTPUT if all("source" in beat.facts for beat in beats) else GUARD


def _of_beats(beats: Sequence[Beat]) -> Reached:
    tally = counted(beats)
    return Reached(tally.first, tally.last, tally.saved, tally.first_at, tally.saving)._replace(
        source=_source(beats),
        active_at=max(filter(None, (_moment(beat.facts.get("active_at")) for beat in beats)), default=None),
        epoch=max(_facts(beats, "epoch"), default=None),
        trouble=_earliest([beat.trouble for beat in beats if beat.trouble is not None]),
        first_loss=max(filter(None, (_moment(beat.facts.get("first_loss")) for beat in beats)), default=None),
        because=next(
            ((NodeRanks(beat.host, str(beat.rank)), text) for beat in beats if (text := beat.facts.get("because"))),
            None,
        ),
    )


def _of_page(page: ProgressPage) -> Reached:
    return Reached(page.first, page.ahead, page.saved, page.first_at, page.saving, page.active_at)


def _newer(one: Reached, other: Reached) -> Reached:
    """Join the two. Each may be the newer one."""
    firsts = [first for first in (one.first, other.first) if first is not None]
    last, saved = _latest(one.last, other.last), _latest(one.saved, other.saved)
    times = (_latest(one.first_at, other.first_at), _latest(one.saving, other.saving))
    active = _latest(one.active_at, other.active_at)
    source = "" if one.source == NOBODY and other.last is not None else one.source
    return one._replace(
        source=source,
        first=min(firsts, default=None),
        last=last,
        saved=saved,
        first_at=times[0],
        saving=times[1],
        active_at=active,
    )


def _latest(one: _Order | None, other: _Order | None) -> _Order | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _earliest(troubles: Sequence[LossTrouble]) -> LossTrouble | None:
    """Return the one that stopped the run, else the first; as it stood when the last rank saw it."""
    if not troubles:
        return None
    first = min(troubles, key=lambda one: (not one.stops, one.since is None, one.since or 0, one.rank))
    return first._replace(step=max((one.step for one in troubles if one.step is not None), default=None))


def _facts(found: Sequence[Beat], name: str) -> list[int]:
    words = (beat.facts.get(name, "") for beat in found)
    sizes = ((word, as_count(word.removeprefix("-"))) for word in words)
    return [-size if word.startswith("-") else size for word, size in sizes if size is not None]


def _moment(fact: str | None) -> float | None:
    """Return a number in a beat's facts, which are all text; None for other text, and if it is not finite."""
    try:
        return as_number(float(fact)) if fact is not None else None
    except ValueError:
        return None
