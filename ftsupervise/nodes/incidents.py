"""Keeps which nodes are excluded, and why: incidents by node that fade with time, and what people decide by hand.

    PLACE/incidents/WRITER.json the incidents that one supervisor has seen; one file per writer, merged when read
    PLACE/exclude/NODE          a person excludes it: ``touch`` excludes, ``rm`` takes it back; JSON says by whom and why
    PLACE/trust/NODE            it is never excluded because of its score
    PLACE/cleared/NODE          incidents before this file was written do not count
    PLACE/applied/JOB           which of a waiting job's excluded nodes were excluded by us, and may be taken back

A place is ``RUN/nodes``, and a directory shared by all runs that name it (``nodes.directory``), because a bad node is bad
for every run. A program's own error blames no node, and a failure that goes with a rank to other nodes blames none of them.
Light (standard library): the supervisor reads this between two attempts, and ``ftsupervise nodes`` in a hurry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import islice, pairwise
from math import ceil, log2
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import FOLDER, NotTrusted, distrust_in, held, make_folder, may_be_changed, stranger
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import as_text, decode, read_json, read_record, time_of, write_json

WORDS = EXCLUDE, TRUST, CLEARED, INCIDENTS, APPLIED = "exclude", "trust", "cleared", "incidents", "applied"

# The weight of an incident. The first ones were seen on the node itself, so they count wherever the rank fails later.
WEIGHTS: Mapping[str, float] = {
    "health": 3.0,  # its health command said critical
    "hardware": 3.0,  # XID, uncorrectable ECC, a GPU off the bus, in the output of the rank that died there
    "no-answer": 2.0,  # its health command did not end, where others did
    "node": 1.0,  # Slurm lost it, or its slurmd does not answer
    "launch": 1.0,  # a task could not be started on it
    "warning": 0.25,  # its health command warned
    "slow": 0.25,  # the others waited for a rank there, at each step, to the end of the attempt
    "killed": 1.0,  # a rank there was killed by a signal that we did not send
    "hang": 1.0,  # the rank there stopped while the others waited for it
    "crashed": 0.5,  # SIGSEGV, SIGABRT and the like: often the program's own fault
    "memory": 0.5,  # out of host memory
}
HALF_LIFE = timedelta(days=1)  # an incident of yesterday counts half; who knows that a node is repaired clears it
EXCLUDE_AT = (
    1.5  # a score: two killed ranks, or one bad answer of the health command; one killed rank may be the program's
)
_OF_THE_NODE = frozenset({"health", "hardware", "no-answer", "node", "launch", "warning"})
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_SHARE = 0.02  # share of the run's nodes that may be excluded, when it has fewer spares
_FADED = 20 * HALF_LIFE  # after which an incident does not count
_FAINT = 0.1  # a score below this is none
_MOST = 400  # incidents that one writer keeps
_FILES = 10_000  # files of one folder that are read
_PAGE, _BYTES = 4_000_000, 64_000_000  # bytes of one page, and of all incidents of a place


class Incident(NamedTuple):
    """One failure that speaks against a node. ``kind`` is a key of WEIGHTS."""

    node: str
    kind: str
    at: datetime
    run: str = ""
    job: str = ""
    attempt: int = 0
    rank: str = ""  # "3", or several as Slurm writes them
    sign: str = ""  # the failure as the brake counts it
    by: str = ""  # the host of the supervisor that saw it
    evidence: str = ""  # the most telling line


class Override(NamedTuple):
    """A person's decision about a node."""

    node: str
    word: str  # EXCLUDE, TRUST or CLEARED
    at: datetime
    who: str = ""
    why: str = ""
    until: datetime | None = None
    place: str = ""


class OverridePage(NamedTuple):
    """The page of an Override, whose name and folder say the rest."""

    who: str = ""
    why: str = ""
    at: datetime | None = None
    until: datetime | None = None


class NodeHistory(NamedTuple):
    """All records in the places. ``problems``: what could not be read, a sentence each."""

    incidents: tuple[Incident, ...] = ()
    overrides: tuple[Override, ...] = ()
    problems: tuple[str, ...] = ()


class JudgedNode(NamedTuple):
    """The judgement of one node."""

    name: str
    score: float
    state: str  # "excluded", "by hand", "trusted", "kept" (because of the cap), "" (a past, but not enough)
    why: str = ""
    since: datetime | None = None
    until: datetime | None = None
    last: Incident | None = None
    incidents: int = 0

    @property
    def excluded(self) -> bool:
        return self.state in ("excluded", "by hand")


def margin(nodes: int, spares: int) -> int:
    """Return how many nodes a run may exclude by itself: its spares, or 2 % of its nodes, at least one."""
    return max(spares, ceil(_SHARE * nodes), 1)


def is_name(text: str) -> bool:
    """Return whether it can be the name of a node (and of a file)."""
    return _NAME.fullmatch(text) is not None


# ------------------------------------------------------------------------------------------------------------- judging


def judge(known: NodeHistory, at_most: int, now: datetime) -> tuple[JudgedNode, ...]:
    """Return all nodes with incidents or an override, the excluded ones first, the worst first. Pure.

    ``at_most``: nodes excluded because of their score; a person's own exclusions come on top.
    """
    marks = _standing(known.overrides, now)
    cleared = {mark.node: mark.at for mark in sorted(known.overrides, key=lambda m: m.at) if mark.word == CLEARED}
    counted: dict[str, list[Incident]] = {}
    for one in sorted(without_followers(known.incidents, now), key=lambda t: t.at):
        if one.at > cleared.get(one.node, _EPOCH):
            counted.setdefault(one.node, []).append(one)
    found = [_judged(name, counted.get(name, []), marks.get(name), now) for name in {*counted, *marks}]
    found = [node for node in found if node.score >= _FAINT or node.state]
    found.sort(key=lambda node: (-node.score, node.name))
    over = [node for node in found if node.state == "excluded"]
    for node in over[at_most:]:
        worse = ", ".join(other.name for other in over[:at_most]) or "none"
        why = f"kept: at most {at_most} may be excluded, and {worse} did worse; {node.why}"
        found[found.index(node)] = node._replace(state="kept", why=why)
    order = {"by hand": 0, "excluded": 0, "kept": 1, "": 2, "trusted": 3}
    return tuple(sorted(found, key=lambda node: order[node.state]))


def without_followers(incidents: Iterable[Incident], now: datetime) -> list[Incident]:
    """Return ``incidents`` without the faded ones and those that went with a rank.

    The same failure of the same rank of the same run on two nodes within two half-lives is the program's or its data's,
    not the nodes'. Incidents that the node itself witnesses stay.
    """
    fresh = [t for t in incidents if t.kind in WEIGHTS and _age(t, now) < _FADED]
    threads: dict[tuple[str, ...], list[Incident]] = {}
    for one in sorted(fresh, key=lambda t: t.at):
        if one.kind not in _OF_THE_NODE:
            threads.setdefault(_thread(one), []).append(one)
    near = 2 * HALF_LIFE
    went = {
        one
        for thread in threads.values()
        for one in (*_after_another(thread, near), *_after_another(thread[::-1], near))
    }
    return [one for one in fresh if one not in went]


def _after_another(thread: Sequence[Incident], near: timedelta) -> Iterator[Incident]:
    """Yield the incidents that come, within ``near``, after one on another node."""
    other: Incident | None = None
    for before, one in pairwise(thread):
        other = before if before.node != one.node else other
        if other is not None and abs(one.at - other.at) <= near:
            yield one


def follows(incidents: Iterable[Incident], one: Incident) -> tuple[str, ...]:
    """Return the nodes that the failure of ``one`` has been seen on, with its rank; () when the node itself is the witness."""
    if one.kind in _OF_THE_NODE:
        return ()
    return tuple(sorted({other.node for other in incidents if _thread(other) == _thread(one)} | {one.node}))


def _thread(one: Incident) -> tuple[str, ...]:
    return one.run, one.kind, one.sign, "" if one.kind == "memory" else one.rank


def score(incidents: Iterable[Incident], now: datetime) -> float:
    """Return the sum of the weights, each halved with every half-life that has passed."""
    return float(sum(WEIGHTS.get(one.kind, 0.0) * 0.5 ** (_age(one, now) / HALF_LIFE) for one in incidents))


def _age(one: Incident, now: datetime) -> timedelta:
    return max(timedelta(0), now - one.at)  # a clock that is ahead makes nothing worse


def _judged(name: str, incidents: list[Incident], mark: Override | None, now: datetime) -> JudgedNode:
    points = score(incidents, now)
    last = incidents[-1] if incidents else None
    node = JudgedNode(name, round(points, 3), "", last=last, incidents=len(incidents))
    if mark is not None:
        by = f"by {mark.who}" if mark.who else "by hand"
        why = f"{by}: {mark.why}" if mark.why else by
        state = "by hand" if mark.word == EXCLUDE else "trusted"
        return node._replace(state=state, why=why, since=mark.at, until=mark.until)
    if last is None or points < EXCLUDE_AT:
        return node
    left = HALF_LIFE * log2(points / EXCLUDE_AT)
    count = f"{len(incidents)} incidents" if len(incidents) > 1 else "one incident"
    why = f"score {points:.2g} of {EXCLUDE_AT:g}, {count}, the last: {last.evidence or last.kind}"
    return node._replace(state="excluded", why=why, since=last.at, until=now + left)


def _standing(marks: Iterable[Override], now: datetime) -> dict[str, Override]:
    """Return the decision of a person that counts for each node now: of the first place that has one, the newest there."""
    found: dict[str, Override] = {}
    for one in marks:
        if one.word == CLEARED or (one.until is not None and one.until <= now):
            continue
        other = found.get(one.node)
        if other is None or (other.place == one.place and one.at > other.at):
            found[one.node] = one
    return found


# ------------------------------------------------------------------------------------------------------------- reading


def read(places: Sequence[Path]) -> NodeHistory:
    """Return all records in ``places``, the run's own first. Never raises: what cannot be read stands in ``problems``."""
    incidents: dict[Incident, None] = {}
    marks: list[Override] = []
    problems: list[str] = []
    for place in places:
        left = _BYTES
        for path, whose in _listed(place / INCIDENTS, problems):
            found, size = _incidents(path, whose, min(left, _PAGE), problems)
            incidents.update(dict.fromkeys(found))
            left -= size
        for word in (EXCLUDE, TRUST, CLEARED):
            listed = _listed(place / word, problems)
            marks += [mark for path, whose in listed if (mark := _override(path, whose, word, place, problems))]
    return NodeHistory(tuple(incidents), tuple(marks), tuple(problems))


def _listed(folder: Path, problems: list[str]) -> list[tuple[Path, os.stat_result]]:
    """Return the files of ``folder``, each with the stat of the folder; only some of them where there are too many."""
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


def _incidents(path: Path, whose: os.stat_result, limit: int, problems: list[str]) -> tuple[list[Incident], int]:
    """Return the incidents that one writer has seen, and the size of its page."""
    size = 0
    try:
        size = min(path.lstat().st_size, limit)
        page = read_json(path, limit=limit, distrust=distrust_in(whose, path))
    except (OSError, ValueError) as error:
        problems.append(printable(f"{path} is left out: {error}", 600))
        return [], size
    raw = (page or {}).get("incidents")
    found = decode(tuple[Incident, ...], raw[-_MOST:] if isinstance(raw, list) else [], lenient=True)
    return [one for one in found if is_name(one.node)], size


def _override(path: Path, whose: os.stat_result, word: str, place: Path, problems: list[str]) -> Override | None:
    if not is_name(path.name):
        problems.append(f"{path.parent}/{as_text(path.name)} is not the name of a node; it is not obeyed")
        return None
    try:
        found = path.lstat()
        if reason := stranger(whose, found):
            problems.append(f"{path}: {reason}; it is not obeyed")
            return None
        at = time_of(found)
        try:
            page = read_record(
                OverridePage, path, limit=64_000, distrust=lambda opened: may_be_changed(whose, opened, path)
            )
        except ValueError:  # ``touch`` is enough; the contents, which others may have written, are not read
            page = None
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}; it is not obeyed")
        return None
    said = page or OverridePage()
    return Override(path.name, word, said.at or at, said.who, said.why, said.until, f"{place}")


class IncidentLog:
    """The incidents that one process has seen. ``writer`` is a name that no other process in the world has."""

    def __init__(self, writer: str) -> None:
        self.writer = re.sub(r"[^A-Za-z0-9._-]", "_", writer)[:200]
        self.seen: list[Incident] = []

    def add(self, incidents: Iterable[Incident]) -> None:
        self.seen = [*self.seen, *incidents][-_MOST:]

    def write(self, places: Sequence[Path]) -> tuple[str, ...]:
        """Write down all incidents in each of ``places``; returns what could not be written, a sentence each. Never raises."""
        page = {"incidents": self.seen}
        problems = []
        for place in places:
            try:
                with held(folder(place, INCIDENTS)) as here:
                    write_json(here / f"{self.writer}.json", page)
            except OSError as error:
                problems.append(f"cannot write {place}: {error.strerror}")
            except NotTrusted as error:
                problems.append(f"nothing is written into {place}: {error}")
        return tuple(problems)


def folder(place: Path, word: str) -> Path:
    """Return ``PLACE/word``, made if it is not there, and shared with the group where the place is. Raises OSError."""
    found = place / word
    make_folder(place, FOLDER, parents=True)
    make_folder(found)
    return found


def set_override(
    place: Path, word: str, node: str, *, who: str, why: str, now: datetime, until: datetime | None = None
) -> None:
    """Mark ``node`` as EXCLUDE, TRUST or CLEARED; an earlier mark there is gone. Raises OSError, NotTrusted."""
    with held(folder(place, word)) as here:
        write_json(here / node, OverridePage(who, why, now, until))
    for other in {EXCLUDE, TRUST} - {word}:
        try:
            with held(place / other) as here:
                os.unlink(here / node)
                sync_directory(here)
        except FileNotFoundError:
            continue


def any_exclusions(place: Path) -> bool:
    """Return whether we have excluded a node for any waiting job."""
    try:
        return bool(os.listdir(place / APPLIED))
    except OSError:
        return False


def forget(place: Path, now: datetime) -> None:
    """Remove the files of ``place`` in which nothing counts any more: a run of many jobs reads them after each failure. Others
    may write the place where it is shared, so the folder is held, and no link of theirs is followed."""
    try:
        with held(place / INCIDENTS) as here:
            for path in here.iterdir():
                if now.timestamp() - path.lstat().st_mtime > _FADED.total_seconds():
                    path.unlink(missing_ok=True)
    except (OSError, NotTrusted):  # not ours to remove, or not there
        return


def prepare(place: Path) -> None:
    """Make the folders of a place, so that ``touch`` is enough for people. Raises OSError."""
    for word in WORDS:
        folder(place, word)
