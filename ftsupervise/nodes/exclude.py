"""Keep the members that wait away from the nodes that are to be avoided: Slurm's ExcNodeList of each, and only our part of it.

What the person put there with ``--exclude`` stays. What we put there is taken back when the node's past has faded.

Slurm knows no exclusion that ends by itself, and a member that waits for a node that never comes back waits for ever. So a node
is excluded for its past only while enough others are up, and a reserve besides (``reserve``) for those that go while
nobody looks: a batch host dies with the supervisor that could give a node back. Only a supervisor that leaves uses the reserve
up, for the member that is to start in its place; that one gives back what is too much as soon as it runs.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.nodes import incidents
from ftsupervise.rundir.launches import job_ids, launches, of_this_account, people
from ftsupervise.rundir.paths import RunDir
from ftsupervise.scheduler.exclusions import Exclusions, Room, Waiting, fitting
from ftsupervise.scheduler.exclusions import reserve as reserve_of

_PATIENCE = 10.0  # seconds for one question: a restart may wait for the answer


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
    comment: str = "",
    *,
    whole: bool,
    gone: frozenset[str] = frozenset(),
    leaving: bool = False,
) -> Applied:
    """Bring the lists of all waiting jobs of the run up to date with ``nodes``, as judged. Never raises.

    Without ``whole`` that is not all that is known of them, and what is on a list stays there as long as a job can start with
    it. ``gone``: nodes that do not answer the one who asks, whatever Slurm says of them. ``leaving``: the next member is to
    start now, so that no reserve is kept. Once the run has finished, no node is too bad for who has nothing to do there.
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
        believed = of_this_account(rundir, records)
        comment = comment if believed or rundir.root.stat().st_uid == os.geteuid() else ""
        slurm, mine = Exclusions(env, timeout=_PATIENCE), job_ids(believed, env)
        everyone = slurm.waiting(people(rundir))
        waiting = [one for one in everyone if one.base_id in mine or (comment and one.comment.startswith(comment))]
        ours = Ours(rundir, waiting)
        asked = any(node.avoided for node in nodes) or any(ours.of(job) for job in waiting)
        room = slurm.room().without(gone) if waiting and asked else Room(frozenset(), {})
        for job in waiting:
            try:
                at_once = leaving and asked and not slurm.requeued(job.base_id)
                reserve = 0 if at_once else reserve_of(job.nodes)
                wanted = _wanted(job, nodes, room, left, ours.of(job), whole, reserve)
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
            held.update([job.id] if job.held else ())
        ours.close()
    except (Error, OSError) as error:
        problem = str(error).partition("\n")[0]
    return Applied(jobs, tuple(changed), tuple(left), problem, frozenset(held))


def _tell(slurm: Exclusions, ours: Ours, job: Waiting, wanted: list[str]) -> list[str] | None:
    """Change the list of one job where it is another one: in words what was done; None when it waits no longer. Raises Error,
    OSError."""
    if set(wanted) == set(job.excluded):
        return []
    ours.put(job, wanted)
    if not slurm.exclude(job.id, wanted):
        return None
    return [f"job {job.id} is kept away from {compress_hostlist(wanted) or 'no node any more'}"]


def _wanted(
    job: Waiting,
    nodes: Sequence[incidents.Node],
    room: Room,
    left: dict[str, None],
    ours: frozenset[str],
    whole: bool,
    reserve: int,
) -> list[str]:
    """The nodes that one job is to be kept away from. What cannot be is added to ``left``."""
    theirs = [node for node in job.excluded if node not in ours]
    before = [] if whole else [node for node in job.excluded if node in ours]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in room.known]
    strange = [node.name for node in nodes if node.state == "by hand" and node.name not in room.known]
    left.update((f"{node}: Slurm knows no such node", None) for node in strange)
    bad = [*before, *(node.name for node in nodes if node.state == "excluded")]
    bad = [node for node in dict.fromkeys(bad) if node not in (*theirs, *by_hand)]
    chosen = fitting(bad, [*theirs, *by_hand], job.nodes + reserve, job.partitions, room, job.features)
    needs = f"it needs {job.nodes}" + (f", and {reserve} in reserve" if reserve else "")
    few = f"too few nodes would be left for job {job.id} ({needs})"
    left.update((f"{node}: {few}", None) for node in bad if node not in chosen)
    return list(dict.fromkeys([*theirs, *by_hand, *chosen]))


class Ours:
    """Which nodes on the lists are there because of us, by array: of one there may be several records. It is on disk before
    Slurm hears of it, and stays there until all its records have been seen to, so that nothing of ours is left behind."""

    def __init__(self, rundir: RunDir, jobs: Sequence[Waiting]) -> None:
        self._place = rundir.nodes
        self._before = {base: incidents.applied(self._place, base) for base in {job.base_id for job in jobs}}
        self._after: dict[str, frozenset[str]] = dict.fromkeys(self._before, frozenset())

    def of(self, job: Waiting) -> frozenset[str]:
        return self._before[job.base_id]

    def put(self, job: Waiting, wanted: Sequence[str]) -> None:
        """Soon on its list. Raises OSError."""
        base = job.base_id
        incidents.write_applied(self._place, base, self._before[base] | self._after[base] | self._new(job, wanted))

    def settle(self, job: Waiting, wanted: Sequence[str]) -> None:
        """It is on its list."""
        self._after[job.base_id] |= self._new(job, wanted)

    def keep(self, job: Waiting) -> None:
        """Nobody knows what is on its list."""
        self._after[job.base_id] |= self._before[job.base_id]

    def close(self) -> None:
        """All records were seen to. Raises OSError."""
        for base, nodes in self._after.items():
            if nodes != incidents.applied(self._place, base):
                incidents.write_applied(self._place, base, nodes)

    def _new(self, job: Waiting, wanted: Sequence[str]) -> frozenset[str]:
        theirs = frozenset(job.excluded) - self._before[job.base_id]
        return frozenset(wanted) - theirs
