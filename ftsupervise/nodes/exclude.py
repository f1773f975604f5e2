"""Keep the members that wait away from the nodes that are to be avoided: Slurm's ExcNodeList of each, and only our part of it.

What the person put there with ``--exclude`` stays. What we put there is taken back when the node's past has faded.

Slurm knows no exclusion that ends by itself, and a member that waits for a node that never comes back waits for ever. So a node
is excluded for its past only while enough others are up, and a reserve besides (``reserve``) for those that go while
nobody looks: a batch host dies with the supervisor that could give a node back. Only a supervisor that leaves uses the reserve
up, for the member that is to start in its place; that one gives back what is too much as soon as it runs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Job
from ftsupervise.nodes import incidents
from ftsupervise.nodes.settings import margin
from ftsupervise.rundir.launches import launches, people
from ftsupervise.rundir.ledger import newest
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.ownership import identify, jobs_of_run
from ftsupervise.scheduler.parse import NodeInventory, is_held
from ftsupervise.scheduler.slurm import Slurm

_PATIENCE = 10.0  # seconds for one question: a restart may wait for the answer
_FEATURES = re.compile(r"[\w.:=+-]+(?:&[\w.:=+-]+)*")  # what we understand of --constraint


class Applied(NamedTuple):
    """What came of it. ``jobs``: those that wait, with what each is kept away from now because of us."""

    jobs: Mapping[str, tuple[str, ...]] = {}
    changed: tuple[str, ...] = ()  # one sentence for each job whose list is another one now
    left_in: tuple[str, ...] = ()  # one sentence for each node that would have to be avoided and is not
    problem: str = ""  # Slurm could not be asked, or refused: nothing is known of the rest
    held: frozenset[str] = frozenset()  # those of ``jobs`` that are on hold

    def avoid(self, node: str) -> bool:
        """Will every member that may start keep away from it? False when none waits."""
        those = [nodes for job, nodes in self.jobs.items() if job not in self.held]
        return bool(those) and not self.problem and all(node in nodes for nodes in those)


def apply(
    rundir: RunDir,
    env: Mapping[str, str],
    nodes: Sequence[incidents.Node],
    *,
    whole: bool,
    member: frozenset[str] = frozenset(),
    gone: frozenset[str] = frozenset(),
    leaving: bool = False,
) -> Applied:
    """Bring the lists of all waiting jobs of the run up to date with ``nodes``, as judged. Never raises.

    Without ``whole`` that is not all that is known of them, and what is on a list stays there as long as a job can start with
    it. ``member``: ids of the asking process's own job, where that is one of the run's. ``gone``: nodes that do not answer the
    one who asks, whatever Slurm says of them. ``leaving``: the next member is to start now, so that no reserve is kept. Once
    the run has finished, no node is too bad for who has nothing to do there.
    """
    if rundir.has_finished():
        nodes, whole = (), True
    held: set[str] = set()
    jobs: dict[str, tuple[str, ...]] = {}
    changed: list[str] = []
    left: dict[str, None] = {}
    problem = "" if whole else "not all that is known of the nodes could be read: none is given back"
    try:
        records = launches(rundir)
        if records and records[-1].scheduler == "local":
            return Applied()
        slurm, run = Slurm(env, timeout=_PATIENCE), identify(rundir, "", records, newest(rundir), member=member)
        queue = slurm.queue(users=people(rundir))
        waiting = [job for job in jobs_of_run(run, queue, certain=True) if job.state.waiting]
        ours = Ours(rundir, waiting)
        asked = any(node.avoided for node in nodes) or any(ours.of(job) for job in waiting)
        there = slurm.inventory().without(gone) if waiting and asked else NodeInventory(frozenset(), {})
        for job in waiting:
            try:
                at_once = leaving and asked and not slurm.requeued(job.base_id)
                spare = 0 if at_once else reserve(job.nodes_wanted)
                wanted = _wanted(job, nodes, there, left, ours.of(job), whole, spare)
                told = _tell(slurm, ours, job, wanted)
            except SchedulerUnavailable:
                raise
            except (Error, OSError) as error:  # somebody else's job, or a mark that cannot be written
                problem = str(error).partition("\n")[0]
                ours.keep(job)
                continue
            if told is None:
                continue
            changed += told
            ours.settle(job, wanted)
            jobs[job.id] = tuple(wanted)
            held.update([job.id] if is_held(job.reason) else ())
        ours.close()
    except (Error, OSError) as error:
        problem = str(error).partition("\n")[0]
    return Applied(jobs, tuple(changed), tuple(left), problem, frozenset(held))


def _tell(slurm: Slurm, ours: Ours, job: Job, wanted: list[str]) -> list[str] | None:
    """Change the list of one job where it is another one: in words what was done; None when it waits no longer. Raises Error,
    OSError."""
    if set(wanted) == set(job.excluded):
        return []
    ours.put(job, wanted)
    if not slurm.exclude(job.id, wanted):
        return None
    return [f"job {job.id} excludes {compress_hostlist(wanted) or 'no node any more'}"]


def _wanted(
    job: Job,
    nodes: Sequence[incidents.Node],
    there: NodeInventory,
    left: dict[str, None],
    ours: frozenset[str],
    whole: bool,
    spare: int,
) -> list[str]:
    """The nodes to exclude for one job. Those that cannot be excluded are added to ``left``."""
    theirs = [node for node in job.excluded if node not in ours]
    before = [] if whole else [node for node in job.excluded if node in ours]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in there.known]
    strange = [node.name for node in nodes if node.state == "by hand" and node.name not in there.known]
    left.update((f"{node}: Slurm knows no such node", None) for node in strange)
    bad = [*before, *(node.name for node in nodes if node.state == "excluded")]
    bad = [node for node in dict.fromkeys(bad) if node not in (*theirs, *by_hand)]
    chosen = fitting(bad, [*theirs, *by_hand], job.nodes_wanted + spare, job.partitions, there, job.features)
    needs = f"it needs {job.nodes_wanted}" + (f", and {spare} in reserve" if spare else "")
    few = f"too few nodes would be left for job {job.id} ({needs})"
    left.update((f"{node}: {few}", None) for node in bad if node not in chosen)
    return list(dict.fromkeys([*theirs, *by_hand, *chosen]))


def reserve(needed: int) -> int:
    """How many nodes more than a job needs are to be up before others are excluded for their past: those that may go while no
    one of us runs, above all the batch host of the job that runs, with its supervisor."""
    return margin(needed, 0)


def fitting(
    wanted: Sequence[str],
    theirs: Sequence[str],
    needed: int,
    partitions: Sequence[str],
    there: NodeInventory,
    features: str = "",
) -> list[str]:
    """As many of ``wanted``, from the first on, as leave ``needed`` nodes that are up in a partition beside ``theirs``. Pure.

    Nodes that Slurm does not know are left away: one of them and it would refuse them all. One that is down is no exception
    where too few are up: once it is back it may be the one that is missing. ``features``: the job's --constraint; one that is
    more than names joined by & is taken for met by every node.
    """
    asked = frozenset(features.split("&")) if _FEATURES.fullmatch(features) else frozenset()
    fit = [{n for n in there.usable.get(name, ()) if asked <= there.features.get(n, asked)} for name in partitions]
    chosen: list[str] = []
    for node in wanted:
        if node not in there.known:
            continue
        out = {*theirs, *chosen, node}
        if any(len(nodes - out) >= needed for nodes in fit):
            chosen.append(node)
    return chosen


class Ours:
    """Which nodes on the lists are there because of us, by array: of one there may be several records. It is on disk before
    Slurm hears of it, and stays there until all its records have been seen to, so that nothing of ours is left behind."""

    def __init__(self, rundir: RunDir, jobs: Sequence[Job]) -> None:
        self._place = rundir.nodes
        self._before = {base: incidents.applied(self._place, base) for base in {job.base_id for job in jobs}}
        self._after: dict[str, frozenset[str]] = dict.fromkeys(self._before, frozenset())

    def of(self, job: Job) -> frozenset[str]:
        return self._before[job.base_id]

    def put(self, job: Job, wanted: Sequence[str]) -> None:
        """Soon on its list. Raises OSError."""
        base = job.base_id
        incidents.write_applied(self._place, base, self._before[base] | self._after[base] | self._new(job, wanted))

    def settle(self, job: Job, wanted: Sequence[str]) -> None:
        """It is on its list."""
        self._after[job.base_id] |= self._new(job, wanted)

    def keep(self, job: Job) -> None:
        """Nobody knows what is on its list."""
        self._after[job.base_id] |= self._before[job.base_id]

    def close(self) -> None:
        """All records were seen to. Raises OSError."""
        for base, nodes in self._after.items():
            if nodes != incidents.applied(self._place, base):
                incidents.write_applied(self._place, base, nodes)

    def _new(self, job: Job, wanted: Sequence[str]) -> frozenset[str]:
        theirs = frozenset(job.excluded) - self._before[job.base_id]
        return frozenset(wanted) - theirs
