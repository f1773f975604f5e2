"""Who silenced and who acknowledged: the account that wrote the generation in which it first stands, not the name in its text.

Several accounts may share a journal, and each writes whole generations, with all that the others have said in them. What is
new in a generation is the word of its owner. Pure: generations in, a State out.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from ftsupervise.alerts.generations import Generation
from ftsupervise.alerts.outbox import State

Key = tuple[object, ...]


def signed(line: Sequence[Generation], name: Callable[[int], str], me: int) -> State:
    """The State of the last generation in ``line`` (oldest first, without gaps), with the authors that the files' owners prove.

    The first is the ground: what stands in one that ``me`` or root wrote was proved before. In another's it was not, so its
    words are given as what that account says.
    """
    ground = line[0]
    proved = ground.owner in (me, 0)
    known: dict[Key, str] = {}
    for key, author in _words(ground.state):
        known[key] = author if proved or author == name(ground.owner) else _says(author, name(ground.owner))
    for generation in line[1:]:
        for key, _ in _words(generation.state):
            known.setdefault(key, name(generation.owner))
    return _with(line[-1].state, known)


def _says(author: str, teller: str) -> str:
    return author if author.endswith(f" (says {teller})") else f"{author} (says {teller})"


def _words(state: State) -> list[tuple[Key, str]]:
    silences: list[tuple[Key, str]] = [
        ((s.id, s.pattern, s.run, s.start, s.end, s.reason), s.author) for s in state.silences
    ]
    acks = [((a.id, a.incident, a.acked_at, a.ack_note), a.acked_by) for a in state.alerts.values() if a.acked_by]
    return silences + acks


def _with(state: State, known: dict[Key, str]) -> State:
    silences = tuple(
        replace(s, author=known[(s.id, s.pattern, s.run, s.start, s.end, s.reason)]) for s in state.silences
    )
    alerts = {
        key: replace(a, acked_by=known[(a.id, a.incident, a.acked_at, a.ack_note)]) if a.acked_by else a
        for key, a in state.alerts.items()
    }
    return replace(state, silences=silences, alerts=alerts)
