"""The words between the supervisor and a node about its buddy copies: an order, and a report."""

from __future__ import annotations

import json
from typing import NamedTuple

from ftsupervise.rundir.records import decode, encode


class CopyOrder(NamedTuple):
    """The supervisor's order to a node."""

    number: int  # grows: an older one is not obeyed
    attempt: int
    host: str = ""  # of the buddy; "" where there is none
    port: int = 0
    held: int = -1  # the step that every buddy holds
    wanted: int = -1  # the first snapshot from this step on is copied next


class CopyReport(NamedTuple):
    """A node's report to the supervisor."""

    port: int = 0  # where it takes snapshots
    ranks: int = 0  # that run here and make snapshots
    world: int = 0
    newest: int = -1  # step that all of them have
    sent: int = -1  # step that the buddy has of all of them
    attempt: int = 0  # of ``sent``
    missed: int = -1  # a ``wanted`` that came too late
    order: int = 0  # the last one that was obeyed
    host: str = ""  # how others reach this node, as it thinks
    problem: str = ""


def pack(word: CopyOrder | CopyReport) -> bytes:
    return json.dumps(encode(word, sparse=True)).encode()


def read_order(raw: bytes) -> CopyOrder | None:
    try:
        return decode(CopyOrder, json.loads(raw), lenient=True)
    except ValueError:
        return None


def read_report(raw: bytes) -> CopyReport | None:
    try:
        return decode(CopyReport, json.loads(raw), lenient=True)
    except ValueError:
        return None
