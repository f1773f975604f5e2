"""What runs share of their nodes, through a child process: a file system that hangs may keep the child, never who asks.

A thread would not do: one in uninterruptible sleep keeps its whole process from ending.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import bounded, processes
from ftsupervise.nodes import incidents
from ftsupervise.nodes.incidents import IncidentLog, JudgedNode, NodeHistory
from ftsupervise.nodes.settings import Scoring

_CHILD = "ftsupervise.nodes.shared_store"
_MARK = "ftsupervise-answer:"  # before it: what a site lets every Python say when it starts
PATIENCE = 5.0  # seconds for a directory that is shared with others


class Judgement(NamedTuple):
    """What to think of each node, what that rests on, and whether that was all there is."""

    nodes: tuple[JudgedNode, ...]
    known: NodeHistory
    whole: bool


def judge(places: Sequence[Path], scoring: Scoring, now: datetime) -> Judgement:
    """Read what is known in ``places``, the run's own first, and judge every node by it."""
    known, whole = read(places)
    return Judgement(incidents.judge(known, scoring, now), known, whole)


def read(places: Sequence[Path], patience: float = PATIENCE) -> tuple[NodeHistory, bool]:
    """What is known in the run's own place, the first, and in those shared with others. Is that all? What does not answer is
    among the problems."""
    known, whole = incidents.read(places[:1]), True
    for place in places[1:]:
        found = read_bounded(place, None, patience)
        if found is None:
            whole = False
            what = f"{place} does not answer: what other runs know of the nodes is left out"
            known = known._replace(problems=(*known.problems, what))
        else:
            known = merge(known, found[1])
    return known, whole


def read_bounded(place: Path, log: IncidentLog | None, patience: float) -> tuple[tuple[str, ...], NodeHistory] | None:
    """Write ``log`` into ``place``, if there is one, and read what lies there: what could not be written, what is known.

    None when it does not answer within ``patience`` seconds, or the child failed.
    """
    given = base64.b64encode(pickle.dumps((log, place))).decode()
    try:
        done = bounded.run(processes.own_command(module=_CHILD), timeout=patience, env=os.environ, stdin=given)
    except OSError:
        return None
    if done.code != 0 or _MARK not in done.stdout:
        return None
    try:
        told, known = pickle.loads(
            base64.b64decode(done.stdout.rpartition(_MARK)[2].partition(" ")[0])
        )  # our own child's
    except (ValueError, EOFError, pickle.UnpicklingError):  # cut off
        return None
    return told, known


def merge(own: NodeHistory, others: NodeHistory) -> NodeHistory:
    """Both, the run's own first; what lies in both places counts once."""
    troubles = tuple(dict.fromkeys((*own.incidents, *others.incidents)))
    return NodeHistory(troubles, (*own.overrides, *others.overrides), (*own.problems, *others.problems))


def _answer() -> None:
    """The child: what ``read_bounded`` asks comes as its input."""
    log, place = pickle.loads(base64.b64decode(sys.stdin.read()))
    told = log.write([place]) if log else ()
    sys.stdout.write(_MARK + base64.b64encode(pickle.dumps((told, incidents.read([place])))).decode() + " ")


if __name__ == "__main__":
    _answer()
