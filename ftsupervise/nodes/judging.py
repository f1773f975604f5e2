"""Judges the nodes by the run's own incidents, and by those that other runs share with it.

The shared directory is read by a child process, because a file system that hangs keeps the process that touches it. A
thread would not do: one in uninterruptible sleep keeps its whole process from ending.
"""

from __future__ import annotations

import base64
import os
import pickle
import sys
import time
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.errors import ConfigError, NotFound
from ftsupervise.host import bounded, processes
from ftsupervise.nodes import incidents
from ftsupervise.nodes.incidents import Incident, IncidentLog, JudgedNode, NodeHistory, margin
from ftsupervise.rundir.paths import RunDir, tell

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_CHILD = "ftsupervise.nodes.judging"
_MARK = "ftsupervise-answer:"  # before it: the output that a site makes every Python print when it starts
PATIENCE = 5.0  # seconds for a directory that is shared with others
_ASK_AGAIN = 600.0  # seconds after which a shared directory that has not answered is asked again


class Judgement(NamedTuple):
    """Says how each node is judged, on which history, and whether that history is whole."""

    nodes: tuple[JudgedNode, ...]
    known: NodeHistory
    whole: bool


def judge(at_most: int, places: Sequence[Path], now: datetime) -> Judgement:
    """Read the history in ``places``, the run's own first, and judge every node by it."""
    known, whole = read(places)
    return Judgement(incidents.judge(known, at_most, now), known, whole)


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
        self.nodes = incidents.judge(known, self.at_most, datetime.now(timezone.utc))
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
    unwritten = log.write([place]) if log else ()
    sys.stdout.write(_MARK + base64.b64encode(pickle.dumps((unwritten, incidents.read([place])))).decode() + " ")


if __name__ == "__main__":
    _answer()
