"""Judges each node: whether it is excluded, and for how long, by a score of its incidents that halves each day.

They are the run's own incidents, and those that other runs share with it. A program's own error blames no node, and a failure
that goes with a rank to other nodes blames none of them.
The shared directory is read by a child process, because a file system that hangs keeps the process that touches it. A
thread would not do: one in uninterruptible sleep keeps its whole process from ending.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime, timedelta, timezone
from itertools import pairwise
from math import ceil, log2
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.errors import ConfigError, NotFound
from ftsupervise.host import bounded, processes
from ftsupervise.nodes import incidents
from ftsupervise.nodes.incidents import CLEARED, EXCLUDE, FADED, Incident, IncidentLog, NodeHistory, Override
from ftsupervise.rundir.paths import RunDir, tell

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_CHILD = "ftsupervise.nodes.judging"
_MARK = "ftsupervise-answer:"  # before it: the output that a site makes every Python print when it starts
PATIENCE = 5.0  # seconds for a directory that is shared with others
_ASK_AGAIN = 600.0  # seconds after which a shared directory that has not answered is asked again


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
_EPOCH = datetime.fromtimestamp(0, timezone.utc)
_SHARE = 0.02  # share of the run's nodes that may be excluded, when it has fewer spares
_FAINT = 0.1  # a score below this is none


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
    fresh = [t for t in incidents if t.kind in WEIGHTS and _age(t, now) < FADED]
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


def seen_on(incidents: Iterable[Incident], one: Incident) -> tuple[str, ...]:
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


class Judgement(NamedTuple):
    """Says how each node is judged, on which history, and whether that history is whole."""

    nodes: tuple[JudgedNode, ...]
    known: NodeHistory
    whole: bool


def read_and_judge(at_most: int, places: Sequence[Path], now: datetime) -> Judgement:
    """Read the history in ``places``, the run's own first, and judge every node by it."""
    known, whole = read(places)
    return Judgement(judge(known, at_most, now), known, whole)


def read(places: Sequence[Path], patience: float = PATIENCE) -> tuple[NodeHistory, bool]:
    """Return the history in the run's own place, the first, and in those shared with others; and whether it is whole.

    A place that does not answer is among the problems.
    """
    known, whole = incidents.read(places[:1]), True
    for place in places[1:]:
        found = read_bounded(place, None, patience)
        if found is None:
            whole = False
            what = f"{place} does not answer: the incidents of other runs are left out"
            known = known._replace(problems=(*known.problems, what))
        else:
            known = merge(known, found[1])
    return known, whole


def read_bounded(place: Path, log: IncidentLog | None, patience: float) -> tuple[tuple[str, ...], NodeHistory] | None:
    """Write ``log`` into ``place``, if there is one, and read that place: returns what could not be written, and its
    history.

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
        unwritten, known = pickle.loads(
            base64.b64decode(done.stdout.rpartition(_MARK)[2].partition(" ")[0])
        )  # from our own child
    except (ValueError, EOFError, pickle.UnpicklingError):  # cut off
        return None
    return unwritten, known


def merge(own: NodeHistory, others: NodeHistory) -> NodeHistory:
    """Return both, the run's own first; an incident in both places counts once."""
    seen = tuple(dict.fromkeys((*own.incidents, *others.incidents)))
    return NodeHistory(seen, (*own.overrides, *others.overrides), (*own.problems, *others.problems))


class NodeJudge:
    """Knows, for one supervisor, the incidents and the judgement of all nodes, and is brought up to date after each
    incident.
    """

    def __init__(self, own: Path, shared: Path | None, at_most: int, writer: str) -> None:
        self.own, self.shared, self.at_most = own, shared, at_most
        self.log = IncidentLog(writer)
        self.nodes: tuple[JudgedNode, ...] = ()
        self.whole = True  # True if the shared directory answered this time
        self._others = NodeHistory()  # its last answer
        self._not_before = 0.0  # monotonic time before which it is not asked again, because it has not answered

    def scores(self) -> dict[str, float]:
        """Return node -> score, the worst to be taken last; trusted nodes have none."""
        return {node.name: node.score for node in self.nodes if node.state != "trusted"}

    def by_hand(self) -> dict[str, str]:
        """Return the nodes that a person has excluded, and why."""
        return {node.name: f"excluded {node.why}" for node in self.nodes if node.state == "by hand"}

    def excluded(self) -> frozenset[str]:
        """Return the nodes that are to be excluded."""
        return frozenset(node.name for node in self.nodes if node.excluded)

    def note(self, found: Sequence[Incident], log: Path | None) -> NodeHistory:
        """Write down new incidents and judge all nodes anew."""
        self.log.add(found)
        return self.judge_anew(log, write=bool(found))

    def judge_anew(self, log: Path | None, *, write: bool = False) -> NodeHistory:
        """Read the history of all nodes and judge them; with ``write``, first write down what this process has seen."""
        problems = self.log.write([self.own]) if write else ()
        known = incidents.read([self.own])
        if self.shared is not None:
            unwritten = self._ask_shared(self.shared, log, write)
            problems, known = (*problems, *unwritten), merge(known, self._others)
        for problem in (*problems, *known.problems):
            tell(log, problem)
        self.nodes = judge(known, self.at_most, datetime.now(timezone.utc))
        return known

    def _ask_shared(self, place: Path, log: Path | None, write: bool) -> tuple[str, ...]:
        """Read the incidents of other runs. Returns what could not be written, a sentence each."""
        self.whole = False
        if time.monotonic() < self._not_before:
            return ()
        found = read_bounded(place, self.log if write else None, PATIENCE)
        if found is None:
            what = "the incidents of other runs are unknown, and no exclusion is taken back"
            tell(log, f"{place} does not answer: {what}")
            self._not_before = time.monotonic() + _ASK_AGAIN
            return ()
        self.whole, (unwritten, self._others) = True, found
        return unwritten


# The way a run judges its nodes, and the places of its pages, by its settings.


def of_run(run: Run) -> tuple[int, list[Path]]:
    """Return the most nodes to be excluded and the places by the settings of ``run``; the run's own place is the first."""
    assert run.run_dir is not None
    given, most = run.nodes, margin(run.launch.job_nodes, run.launch.spare_nodes)
    at_most = most if given.at_most is None else given.at_most
    return at_most, [RunDir(run.run_dir).nodes, *([given.directory] if given.directory else [])]


def of_run_dir(rundir: RunDir) -> tuple[int, list[Path]]:
    """Return the same from the run.yaml that launch wrote, fast: without the schema.

    Defaults without a launch. Raises ConfigError.
    """
    given, launch = _section(rundir, "nodes"), _section(rundir, "launch")
    try:
        most = margin(int(launch.get("nodes", 1)), int(launch.get("spare_nodes", 0)))
        at_most = most if given.get("at_most") is None else int(given["at_most"])
    except (ValueError, TypeError) as error:
        raise ConfigError(f"{rundir.config}: nodes: {error}", hint="launch writes that file; launch again") from None
    return at_most, [rundir.nodes, *([Path(given["directory"])] if given.get("directory") else [])]


def _section(rundir: RunDir, name: str) -> dict[str, Any]:
    """Return a section of the run.yaml that launch wrote; {} for a run that no launch has made."""
    from ftsupervise.config import sources

    try:
        text = sources.read_file(rundir.config)
        document = sources.fill(text, os.environ, unfilled=sources.of_strangers(rundir.config))
    except NotFound:
        return {}
    found = document.value.get(name) if isinstance(document.value, dict) else None
    return found if isinstance(found, dict) else {}


def _answer() -> None:
    """Answer as the child of ``read_bounded``, whose request comes as its input."""
    log, place = pickle.loads(base64.b64decode(sys.stdin.read()))
    unwritten = log.write_shared(place) if log else ()
    sys.stdout.write(_MARK + base64.b64encode(pickle.dumps((unwritten, incidents.read_shared(place)))).decode() + " ")


if __name__ == "__main__":
    _answer()
