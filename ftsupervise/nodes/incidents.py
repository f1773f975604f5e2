"""Which nodes are to be kept away from, and why: troubles by node that fade with time, and what people say besides.

    PLACE/troubles/WRITER.json  what one job ring has seen of its nodes; one file per writer, merged when read
    PLACE/exclude/NODE          a person keeps away from it: ``touch`` excludes, ``rm`` takes it back; JSON says who and why
    PLACE/trust/NODE            never to be kept away from because of its score
    PLACE/cleared/NODE          troubles before this file was written do not count
    PLACE/applied/JOB           which of a waiting job's excluded nodes are ours, and may be taken back

A place is ``RUN/nodes``, and a directory shared by all runs that name it (``nodes.directory``), because a bad node is bad
for every run. A program's own error blames no node, and a failure that goes with a rank to other nodes blames none of them.
Light (standard library): the job ring reads this between two attempts, and ``ftsupervise nodes`` in a hurry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import islice, pairwise
from math import log2
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host.modes import FOLDER, make_folder, may_be_changed, stranger
from ftsupervise.nodes.settings import Scoring
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import as_text, decode, read_json, read_record, time_of, write_json

WORDS = EXCLUDE, TRUST, CLEARED, TROUBLES, APPLIED = "exclude", "trust", "cleared", "troubles", "applied"

# What a trouble weighs. Of the first ones the node itself is the witness, wherever the rank went afterwards.
WEIGHTS: Mapping[str, float] = {
    "health": 3.0,  # its health command said critical
    "hardware": 3.0,  # XID, uncorrectable ECC, a GPU off the bus, in the output of the rank that died there
    "no-answer": 2.0,  # its health command did not end, where others did
    "node": 1.0,  # Slurm lost it, or its slurmd does not answer
    "launch": 1.0,  # a task could not be started on it
    "warning": 0.25,  # its health command warned
    "killed": 1.0,  # a rank there was killed by a signal nobody of us sent
    "hang": 1.0,  # the rank there stopped while the others waited for it
    "crashed": 0.5,  # SIGSEGV, SIGABRT and the like: the program's fault as often as not
    "memory": 0.5,  # out of host memory
}
_OF_THE_NODE = frozenset({"health", "hardware", "no-answer", "node", "launch", "warning"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_FADED = 20  # half-lives after which a trouble is nothing any more
_FAINT = 0.1  # a score below this is none
_MOST = 400  # troubles one writer keeps
_FILES = 10_000  # of one folder that are read
_PAGE, _BYTES = 4_000_000, 64_000_000  # bytes of one page, and of all troubles of a place


class Trouble(NamedTuple):
    """One failure that speaks against a node. ``kind`` is a key of WEIGHTS."""

    node: str
    kind: str
    at: datetime
    run: str = ""
    job: str = ""
    attempt: int = 0
    rank: str = ""  # "3", or several as Slurm writes them
    sign: str = ""  # the failure as the brake counts it
    by: str = ""  # who saw it: the host of the job ring
    evidence: str = ""  # the line that says most


class Mark(NamedTuple):
    """What a person said of a node."""

    node: str
    word: str  # EXCLUDE, TRUST or CLEARED
    at: datetime
    who: str = ""
    why: str = ""
    until: datetime | None = None
    place: str = ""


class MarkPage(NamedTuple):
    """The page of a Mark, whose name and folder say the rest."""

    who: str = ""
    why: str = ""
    at: datetime | None = None
    until: datetime | None = None


class AppliedPage(NamedTuple):
    nodes: Annotated[tuple[str, ...], 100_000] = ()


class Known(NamedTuple):
    """All that lies in the places. ``problems``: what could not be read, a sentence each."""

    troubles: tuple[Trouble, ...] = ()
    marks: tuple[Mark, ...] = ()
    problems: tuple[str, ...] = ()


class Node(NamedTuple):
    """A node as it is judged."""

    name: str
    score: float
    state: str  # "excluded", "by hand", "trusted", "left in" (because of the cap), "" (a past, but not enough)
    why: str = ""
    since: datetime | None = None
    until: datetime | None = None
    last: Trouble | None = None
    troubles: int = 0

    @property
    def avoided(self) -> bool:
        return self.state in ("excluded", "by hand")


def is_name(text: str) -> bool:
    """Can it be the name of a node (and of a file)?"""
    return _NAME.fullmatch(text) is not None


# ------------------------------------------------------------------------------------------------------------- judging


def judge(known: Known, scoring: Scoring, now: datetime) -> tuple[Node, ...]:
    """All nodes with a past or a mark, those kept away from first, the worst first. Pure."""
    marks = _standing(known.marks, now)
    cleared = {mark.node: mark.at for mark in sorted(known.marks, key=lambda m: m.at) if mark.word == CLEARED}
    counted: dict[str, list[Trouble]] = {}
    for one in sorted(without_followers(known.troubles, scoring, now), key=lambda t: t.at):
        if one.at > cleared.get(one.node, _EPOCH):
            counted.setdefault(one.node, []).append(one)
    found = [_judged(name, counted.get(name, []), marks.get(name), scoring, now) for name in {*counted, *marks}]
    found = [node for node in found if node.score >= _FAINT or node.state]
    found.sort(key=lambda node: (-node.score, node.name))
    over = [node for node in found if node.state == "excluded"]
    for node in over[scoring.at_most :]:
        worse = ", ".join(other.name for other in over[: scoring.at_most]) or "none"
        why = f"left in: at most {scoring.at_most} may be kept away from, and {worse} did worse; {node.why}"
        found[found.index(node)] = node._replace(state="left in", why=why)
    order = {"by hand": 0, "excluded": 0, "left in": 1, "": 2, "trusted": 3}
    return tuple(sorted(found, key=lambda node: order[node.state]))


def without_followers(troubles: Iterable[Trouble], scoring: Scoring, now: datetime) -> list[Trouble]:
    """``troubles`` without the faded ones and those that went with a rank: the same failure of the same rank of the same run
    on two nodes within two half-lives is the program's or its data's, not the nodes'. What the node itself witnesses stays."""
    fresh = [t for t in troubles if t.kind in WEIGHTS and _age(t, now) < _FADED * scoring.half_life]
    threads: dict[tuple[str, ...], list[Trouble]] = {}
    for one in sorted(fresh, key=lambda t: t.at):
        if one.kind not in _OF_THE_NODE:
            threads.setdefault(_thread(one), []).append(one)
    near = timedelta(seconds=2 * scoring.half_life)
    went = {
        one
        for thread in threads.values()
        for one in (*_after_another(thread, near), *_after_another(thread[::-1], near))
    }
    return [one for one in fresh if one not in went]


def _after_another(thread: Sequence[Trouble], near: timedelta) -> Iterator[Trouble]:
    """Those that come, within ``near``, after one on another node."""
    other: Trouble | None = None
    for before, one in pairwise(thread):
        other = before if before.node != one.node else other
        if other is not None and abs(one.at - other.at) <= near:
            yield one


def follows(troubles: Iterable[Trouble], one: Trouble) -> tuple[str, ...]:
    """The nodes that the failure of ``one`` has been seen on, with its rank; () when the node itself is the witness."""
    if one.kind in _OF_THE_NODE:
        return ()
    return tuple(sorted({other.node for other in troubles if _thread(other) == _thread(one)} | {one.node}))


def _thread(one: Trouble) -> tuple[str, ...]:
    return one.run, one.kind, one.sign, "" if one.kind == "memory" else one.rank


def score(troubles: Iterable[Trouble], half_life: float, now: datetime) -> float:
    """The sum of the weights, each halved with every half-life that has passed."""
    return float(sum(WEIGHTS.get(one.kind, 0.0) * 0.5 ** (_age(one, now) / half_life) for one in troubles))


def _age(one: Trouble, now: datetime) -> float:
    return max(0.0, (now - one.at).total_seconds())  # a clock that goes ahead makes nothing worse


def _judged(name: str, troubles: list[Trouble], mark: Mark | None, scoring: Scoring, now: datetime) -> Node:
    points = score(troubles, scoring.half_life, now)
    last = troubles[-1] if troubles else None
    node = Node(name, round(points, 3), "", last=last, troubles=len(troubles))
    if mark is not None:
        by = f"by {mark.who}" if mark.who else "by hand"
        why = f"{by}: {mark.why}" if mark.why else by
        state = "by hand" if mark.word == EXCLUDE else "trusted"
        return node._replace(state=state, why=why, since=mark.at, until=mark.until)
    if last is None or points < scoring.exclude_at:
        return node
    left = timedelta(seconds=scoring.half_life * log2(points / scoring.exclude_at))
    count = f"{len(troubles)} troubles" if len(troubles) > 1 else "one trouble"
    why = f"score {points:.2g} of {scoring.exclude_at:g}, {count}, the last: {last.evidence or last.kind}"
    return node._replace(state="excluded", why=why, since=last.at, until=now + left)


def _standing(marks: Iterable[Mark], now: datetime) -> dict[str, Mark]:
    """What people say of each node now. The first place that says something of it has the word, there the newest."""
    found: dict[str, Mark] = {}
    for one in marks:
        if one.word == CLEARED or (one.until is not None and one.until <= now):
            continue
        other = found.get(one.node)
        if other is None or (other.place == one.place and one.at > other.at):
            found[one.node] = one
    return found


# ------------------------------------------------------------------------------------------------------------- reading


def read(places: Sequence[Path]) -> Known:
    """All that lies in ``places``, the run's own first. Never raises: what cannot be read is told in ``problems``."""
    troubles: dict[Trouble, None] = {}
    marks: list[Mark] = []
    problems: list[str] = []
    for place in places:
        left = _BYTES
        for path, whose in _listed(place / TROUBLES, problems):
            found, size = _troubles(path, whose, min(left, _PAGE), problems)
            troubles.update(dict.fromkeys(found))
            left -= size
        for word in (EXCLUDE, TRUST, CLEARED):
            listed = _listed(place / word, problems)
            marks += [mark for path, whose in listed if (mark := _mark(path, whose, word, place, problems))]
    return Known(tuple(troubles), tuple(marks), tuple(problems))


def _listed(folder: Path, problems: list[str]) -> list[tuple[Path, os.stat_result]]:
    """The files of ``folder``, each with the stat of the folder; some of them where there are too many."""
    try:
        whose = folder.stat()
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _FILES + 1) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
        return []
    if len(names) > _FILES:
        problems.append(f"{folder} holds more than {_FILES} files; the rest is left out")
    return [(folder / name, whose) for name in sorted(names)[:_FILES]]


def _troubles(path: Path, whose: os.stat_result, limit: int, problems: list[str]) -> tuple[list[Trouble], int]:
    """What one writer has seen, and the size of its page."""
    size = 0
    try:
        size = min(path.lstat().st_size, limit)
        page = read_json(
            path, limit=limit, distrust=lambda one: stranger(whose, one) or may_be_changed(whose, one, path)
        )
    except (OSError, ValueError) as error:
        problems.append(printable(f"{path} is left out: {error}", 600))
        return [], size
    raw = (page or {}).get("troubles")
    found = decode(tuple[Trouble, ...], raw[-_MOST:] if isinstance(raw, list) else [], lenient=True)
    return [one for one in found if is_name(one.node)], size


def _mark(path: Path, whose: os.stat_result, word: str, place: Path, problems: list[str]) -> Mark | None:
    if not is_name(path.name):
        problems.append(f"{path.parent}/{as_text(path.name)} is no name of a node; it is not obeyed")
        return None
    try:
        found = path.lstat()
        if reason := stranger(whose, found):
            problems.append(f"{path}: {reason}; it is not obeyed")
            return None
        at = time_of(found)
        try:
            page = read_record(
                MarkPage, path, limit=64_000, distrust=lambda opened: may_be_changed(whose, opened, path)
            )
        except ValueError:  # ``touch`` is enough; what others may have written in it is not read
            page = None
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}; it is not obeyed")
        return None
    said = page or MarkPage()
    return Mark(path.name, word, said.at or at, said.who, said.why, said.until, f"{place}")


class Book:
    """What one process has seen of its nodes. ``writer`` names it alone in the world."""

    def __init__(self, writer: str) -> None:
        self.writer = re.sub(r"[^A-Za-z0-9._-]", "_", writer)[:200]
        self.seen: list[Trouble] = []

    def add(self, troubles: Iterable[Trouble]) -> None:
        self.seen = [*self.seen, *troubles][-_MOST:]

    def write(self, places: Sequence[Path]) -> tuple[str, ...]:
        """Write down all that was seen, in each of ``places``; what could not be written, a sentence each. Never raises."""
        page = {"troubles": self.seen}
        problems = []
        for place in places:
            try:
                write_json(folder(place, TROUBLES) / f"{self.writer}.json", page)
            except OSError as error:
                problems.append(f"cannot write {place}: {error.strerror}")
        return tuple(problems)


def folder(place: Path, word: str) -> Path:
    """``PLACE/word``, made if it is not there, and shared with the group where the place is. Raises OSError."""
    found = place / word
    make_folder(place, FOLDER, parents=True)
    make_folder(found)
    return found


def say(place: Path, word: str, node: str, *, who: str, why: str, now: datetime, until: datetime | None = None) -> None:
    """Mark ``node`` as EXCLUDE, TRUST or CLEARED; what was said of it there before is gone. Raises OSError."""
    write_json(folder(place, word) / node, MarkPage(who, why, now, until))
    for other in {EXCLUDE, TRUST} - {word}:
        try:
            os.unlink(place / other / node)
            sync_directory(place / other)
        except FileNotFoundError:
            continue


def applied(place: Path, job: str) -> frozenset[str]:
    """The nodes that waiting job ``job`` is kept away from because of us; all others on its list are somebody's own."""
    try:
        whose = (place / APPLIED).stat()
        path = place / APPLIED / job
        page = read_record(AppliedPage, path, limit=_PAGE, distrust=lambda found: stranger(whose, found))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(filter(is_name, page.nodes if page else ()))


def any_applied(place: Path) -> bool:
    """Is any waiting job kept away from a node because of us?"""
    try:
        return bool(os.listdir(place / APPLIED))
    except OSError:
        return False


def write_applied(place: Path, job: str, nodes: Iterable[str]) -> None:
    """None at all: its file goes. Raises OSError."""
    path, ours = folder(place, APPLIED) / job, sorted(nodes)
    if ours:
        write_json(path, AppliedPage(tuple(ours)))
    else:
        path.unlink(missing_ok=True)


def forget(place: Path, half_life: float, now: datetime) -> None:
    """Remove the files of ``place`` in which nothing counts any more: a run of many jobs reads them after each failure."""
    try:
        for path in (place / TROUBLES).iterdir():
            if now.timestamp() - path.lstat().st_mtime > _FADED * half_life:
                path.unlink(missing_ok=True)
    except OSError:  # not ours to remove, or not there
        return


def prepare(place: Path) -> None:
    """Make the folders of a place, so that ``touch`` is enough for people. Raises OSError."""
    for word in WORDS:
        folder(place, word)
