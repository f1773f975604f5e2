"""Keep the members that wait away from the nodes that are to be avoided: Slurm's ExcNodeList of each, and only our part of it.

What the person put there with ``--exclude`` stays. What we put there is taken back when the node's past has faded.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from ftsupervise import blame
from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.records import launches, people
from ftsupervise.rundir import RunDir
from ftsupervise.scheduler.exclusions import Exclusions, Room, Waiting, fitting
from ftsupervise.shared import Judged

_PATIENCE = 10.0  # seconds for one question: a restart may wait for the answer


class Applied(NamedTuple):
    """What came of it. ``jobs``: those that wait, with what each is kept away from now because of us."""

    jobs: Mapping[str, tuple[str, ...]] = {}
    changed: tuple[str, ...] = ()  # one sentence for each job whose list is another one now
    left_in: tuple[str, ...] = ()  # one sentence for each node that would have to be avoided and is not
    problem: str = ""  # Slurm could not be asked, or refused: nothing is known of the rest

    def avoid(self, node: str) -> bool:
        """Will every member that waits keep away from it? False when none waits."""
        return bool(self.jobs) and not self.problem and all(node in nodes for nodes in self.jobs.values())


def bring_up_to_date(rundir: RunDir, env: Mapping[str, str], judged: Judged, comment: str = "") -> Applied:
    """``apply`` for who has only read. What could not be read may keep the jobs away from a node: then all stays as it is."""
    if not judged.whole:
        return Applied(problem="not all that is known of the nodes could be read")
    return apply(rundir, env, judged.nodes, comment)


def apply(rundir: RunDir, env: Mapping[str, str], nodes: Sequence[blame.Node], comment: str = "") -> Applied:
    """Bring the lists of all waiting jobs of the run up to date with ``nodes``, as judged. Never raises."""
    jobs: dict[str, tuple[str, ...]] = {}
    changed: list[str] = []
    left: dict[str, None] = {}
    problem = ""
    try:
        records = launches(rundir)
        if records and records[-1].kind == "local":
            return Applied()
        slurm = Exclusions(env, timeout=_PATIENCE)
        mine = {job for one in records for job in one.job_ids}
        mine |= {env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_JOB_ID", "")} - {""}
        who = people(rundir)
        waiting = [w for w in slurm.waiting(who) if w.base_id in mine or (comment and w.comment.startswith(comment))]
        room = slurm.room() if waiting and any(node.avoided for node in nodes) else Room(frozenset(), {})
        for job in waiting:
            try:
                said = _one(slurm, rundir, job, nodes, room, left)
            except SchedulerUnavailable:
                raise
            except (Error, OSError) as error:  # somebody else's job, or a mark that cannot be written
                problem = str(error).partition("\n")[0]
                continue
            if said is not None:
                jobs[job.id] = said[0]
                changed += said[1]
    except (Error, OSError) as error:
        problem = str(error).partition("\n")[0]
    return Applied(jobs, tuple(changed), tuple(left), problem)


def _one(
    slurm: Exclusions, rundir: RunDir, job: Waiting, nodes: Sequence[blame.Node], room: Room, left: dict[str, None]
) -> tuple[tuple[str, ...], list[str]] | None:
    """One job's list. What is ours is on disk before Slurm hears of it, so that we never leave behind what we put there."""
    ours = blame.applied(rundir.nodes, job.base_id)
    theirs = [node for node in job.excluded if node not in ours]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in room.known]
    bad = [node.name for node in nodes if node.state == "excluded" and node.name not in theirs]
    chosen = fitting(bad, [*theirs, *by_hand], job.nodes, job.partitions, room, job.features)
    left.update((f"{node}: too few nodes would be left for job {job.id}", None) for node in bad if node not in chosen)
    wanted = list(dict.fromkeys([*theirs, *by_hand, *chosen]))
    keep = frozenset(wanted) - frozenset(theirs)
    if set(wanted) != set(job.excluded):
        blame.write_applied(rundir.nodes, job.base_id, ours | keep)
        if not slurm.exclude(job.id, wanted):
            return None
        what = compress_hostlist(wanted) or "no node any more"
        blame.write_applied(rundir.nodes, job.base_id, keep)
        return tuple(wanted), [f"job {job.id} is kept away from {what}"]
    return tuple(wanted), []
