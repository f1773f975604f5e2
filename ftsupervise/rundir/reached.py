"""How far an attempt came, by the beats of its ranks."""

from __future__ import annotations

from ftsupervise.model import NodeRanks, Reached
from ftsupervise.rundir import heartbeat_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import as_count, as_number
from ftsupervise.truth import Beat, LossTrouble


def reached(rundir: RunDir, number: int) -> Reached:
    """The steps that attempt ``number`` reached. Empty when the beats cannot be read, or newer ones have taken their place."""
    try:
        mine = [beat for beat in heartbeat_page.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    except OSError:
        return Reached()
    lasts = [beat.step for beat in mine if beat.step is not None]
    times = [when for beat in mine if (when := _moment(beat.facts.get("first_at"))) is not None]
    return Reached(
        first=min(_facts(mine, "first"), default=None),
        last=max(lasts, default=None),
        saved=max(_facts(mine, "saved"), default=None),
        first_at=max(times, default=None),
        trouble=_earliest([beat.trouble for beat in mine if beat.trouble is not None]),
        first_loss=max(filter(None, (_moment(beat.facts.get("first_loss")) for beat in mine)), default=None),
        because=next(
            ((NodeRanks(beat.host, str(beat.rank)), text) for beat in mine if (text := beat.facts.get("because"))), None
        ),
    )


def _earliest(troubles: list[LossTrouble]) -> LossTrouble | None:
    """The one that stopped the run, else the first; as it stood when the last rank saw it."""
    if not troubles:
        return None
    first = min(troubles, key=lambda one: (not one.stops, one.since is None, one.since or 0, one.rank))
    return first._replace(step=max((one.step for one in troubles if one.step is not None), default=None))


def _facts(found: list[Beat], name: str) -> list[int]:
    words = (beat.facts.get(name, "") for beat in found)
    sizes = ((word, as_count(word.removeprefix("-"))) for word in words)
    return [-size if word.startswith("-") else size for word, size in sizes if size is not None]


def _moment(fact: str | None) -> float | None:
    """A number in a beat's facts, which are all text; None for other text, and if it is not finite."""
    try:
        return as_number(float(fact)) if fact is not None else None
    except ValueError:
        return None
