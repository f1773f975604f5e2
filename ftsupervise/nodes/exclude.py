"""Exclude bad nodes for the run's waiting jobs: each job's ExcNodeList in Slurm, and only our part of it.

What a person put there with ``--exclude`` stays. What we put there is taken back when the node's incidents have faded.

An exclusion in Slurm does not end by itself, and a job that waits for a node that never comes back waits for ever. So a node
is excluded for its score only while enough others are up, and a reserve besides (``reserve``), because a batch host dies with
the supervisor that could take an exclusion back. Only a supervisor that leaves uses the reserve up, for the member that starts
in its place; that member takes back what is too much as soon as it runs.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

from ftsupervise.errors import Error, SchedulerUnavailable
from ftsupervise.host.ownership import remove_entry, stranger
from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.model import Job
from ftsupervise.nodes import incidents
from ftsupervise.nodes.judging import JudgedNode, margin, of_run, read_and_judge
from ftsupervise.rundir.launches import launches, people
from ftsupervise.rundir.observing import Observes
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.scheduler import SLURM
from ftsupervise.scheduler.ownership import identify_to_change, jobs_of_run
from ftsupervise.scheduler.parse import NodeInventory, is_held
from ftsupervise.scheduler.slurm import Slurm, clean_environment
from ftsupervise.truth import EXCLUSION

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_PATIENCE = 10.0  # seconds for one question: a restart may wait for the answer
_FEATURES = re.compile(r"[\w.:=+-]+(?:&[\w.:=+-]+)*")  # the forms of --constraint that we understand


class ExclusionResult(NamedTuple):
    """The changes that were made in Slurm."""

    jobs: Mapping[str, tuple[str, ...]] = {}  # each waiting job with the nodes that are excluded for it now
    changed: tuple[str, ...] = ()  # a sentence for each job whose list was changed
    not_excluded: tuple[str, ...] = ()  # a sentence for each bad node that could not be excluded
    problem: str = ""  # why Slurm could not be asked, or what it refused
    held: frozenset[str] = frozenset()  # those of ``jobs`` that are on hold

    def excludes(self, node: str) -> bool:
        """Return whether ``node`` is excluded for every waiting job that may start. False when none waits."""
        those = [nodes for job, nodes in self.jobs.items() if job not in self.held]
        return bool(those) and not self.problem and all(node in nodes for nodes in those)


def apply(
    rundir: RunDir,
    env: Mapping[str, str],
    nodes: Sequence[JudgedNode],
    *,
    whole: bool,
    member: frozenset[str] = frozenset(),
    gone: frozenset[str] = frozenset(),
    leaving: bool = False,
) -> ExclusionResult:
    """Update the excluded nodes of all waiting jobs of the run from ``nodes``, as judged. Never raises.

    Without ``whole``, ``nodes`` rest on a part of what is known: what is excluded stays so as long as a job can start.
    ``member``: ids of the asking process's own job, where that is one of the run's. ``gone``: nodes that do not answer the
    supervisor, whatever Slurm says of them. ``leaving``: the next member is to start now, so no reserve is kept. Once the run
    has finished no node is excluded: the members that wait have nothing to do.
    """
    if rundir.has_finished():
        nodes, whole = (), True
    held: set[str] = set()
    jobs: dict[str, tuple[str, ...]] = {}
    changed: list[str] = []
    not_excluded: dict[str, None] = {}
    problem = "" if whole else "not all incidents of the nodes could be read: no exclusion is taken back"
    try:
        records = launches(rundir)
        if records and records[-1].scheduler not in ("", SLURM):
            return ExclusionResult()
        slurm, run = Slurm(env, timeout=_PATIENCE), identify_to_change(rundir, records, member)
        queue = slurm.queue(users=people(rundir))
        waiting = [job for job in jobs_of_run(run, queue, certain=True) if job.state.waiting]
        ledger = ExclusionLedger(rundir, waiting)
        asked = any(node.excluded for node in nodes) or any(ledger.of(job) for job in waiting)
        inventory = slurm.inventory().without(gone) if waiting and asked else NodeInventory(frozenset(), {})
        for job in waiting:
            try:
                at_once = leaving and asked and not slurm.requeued(job.base_id)
                spare = 0 if at_once else reserve(job.nodes_wanted)
                target = _target(job, nodes, inventory, not_excluded, ledger.of(job), whole, spare)
                sentences = _update(slurm, ledger, job, target)
            except SchedulerUnavailable:
                raise
            except (Error, OSError) as error:  # another account's job, or a page that cannot be written
                problem = str(error).partition("\n")[0]
                ledger.retain(job)
                continue
            if sentences is None:
                continue
            changed += sentences
            ledger.confirm(job, target)
            jobs[job.id] = tuple(target)
            held.update([job.id] if is_held(job.reason) else ())
        ledger.close()
    except (Error, OSError) as error:
        problem = str(error).partition("\n")[0]
    return ExclusionResult(jobs, tuple(changed), tuple(not_excluded), problem, frozenset(held))


def exclude_alike(slurm: Slurm, links: Sequence[str]) -> None:
    """Exclude for each link of a daisy chain that waits what was excluded for another: the script of the first excludes a node
    that is not fit for those that wait then, and a busy controller takes the last ones minutes later. One that is missed costs
    a member at most. Never raises.
    """
    try:
        mine = [job for job in slurm.queue() if job.id in links]
        nodes = sorted({node for job in mine for node in job.excluded})
        for job in mine:
            if job.state.waiting and len(set(job.excluded)) < len(nodes):
                slurm.exclude(job.id, nodes)
    except (Error, OSError):
        return


def _update(slurm: Slurm, ledger: ExclusionLedger, job: Job, target: list[str]) -> list[str] | None:
    """Change the excluded nodes of one job where they differ: a sentence if they did; None when the job no longer
    waits.

    Raises Error, OSError.
    """
    if set(target) == set(job.excluded):
        return []
    ledger.record(job, target)
    if not slurm.exclude(job.id, target):
        return None
    return [f"job {job.id} excludes {compress_hostlist(target) or 'no node any more'}"]


def _target(
    job: Job,
    nodes: Sequence[JudgedNode],
    inventory: NodeInventory,
    not_excluded: dict[str, None],
    ours: frozenset[str],
    whole: bool,
    spare: int,
) -> list[str]:
    """Return the nodes to exclude for one job. Those that cannot be excluded are added to ``not_excluded``."""
    theirs = [node for node in job.excluded if node not in ours]
    before = [] if whole else [node for node in job.excluded if node in ours]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in inventory.known]
    strange = [node.name for node in nodes if node.state == "by hand" and node.name not in inventory.known]
    not_excluded.update((f"{node}: Slurm knows no such node", None) for node in strange)
    bad = [*before, *(node.name for node in nodes if node.state == "excluded")]
    bad = [node for node in dict.fromkeys(bad) if node not in (*theirs, *by_hand)]
    chosen = fitting(bad, [*theirs, *by_hand], job.nodes_wanted + spare, job.partitions, inventory, job.features)
    needs = f"it needs {job.nodes_wanted}" + (f", and {spare} in reserve" if spare else "")
    few = f"too few nodes would be left for job {job.id} ({needs})"
    not_excluded.update((f"{node}: {few}", None) for node in bad if node not in chosen)
    return list(dict.fromkeys([*theirs, *by_hand, *chosen]))


def reserve(needed: int) -> int:
    """Return the number of nodes that must be up beyond a job's need before others are excluded for their score: they
    replace nodes that fail while no supervisor runs, above all the batch host with its supervisor.
    """
    return margin(needed, 0)


def fitting(
    target: Sequence[str],
    theirs: Sequence[str],
    needed: int,
    partitions: Sequence[str],
    inventory: NodeInventory,
    features: str = "",
) -> list[str]:
    """Return as many of ``target``, from the first on, as leave ``needed`` nodes that are up in a partition beside
    ``theirs``. Pure.

    Nodes that Slurm does not know are left out: with one of them it would refuse all. One that is down is no exception
    where too few are up: once it is back it may be the one that is missing. ``features``: the job's --constraint; one
    that is more than names joined by & is taken for met by every node.
    """
    asked = frozenset(features.split("&")) if _FEATURES.fullmatch(features) else frozenset()
    fit = [
        {n for n in inventory.usable.get(name, ()) if asked <= inventory.features.get(n, asked)} for name in partitions
    ]
    chosen: list[str] = []
    for node in target:
        if node not in inventory.known:
            continue
        out = {*theirs, *chosen, node}
        if any(len(nodes - out) >= needed for nodes in fit):
            chosen.append(node)
    return chosen


class ExclusionPage(NamedTuple):
    """The page of one waiting job, ``applied/JOB``."""

    nodes: Annotated[tuple[str, ...], 100_000] = ()


def our_exclusions(place: Path, job: str) -> frozenset[str]:
    """Return the nodes that we excluded for the waiting job ``job``; all others on its list are a person's own."""
    try:
        whose = (place / incidents.APPLIED).stat()
        path = place / incidents.APPLIED / job
        page = read_record(ExclusionPage, path, distrust=lambda found: stranger(whose, found))
    except (OSError, ValueError):
        return frozenset()
    return frozenset(filter(incidents.is_name, page.nodes if page else ()))


def write_exclusions(place: Path, job: str, nodes: Iterable[str]) -> None:
    """Write down the nodes that we exclude for ``job``; without any its file is removed. Raises OSError."""
    path, ours = incidents.folder(place, incidents.APPLIED) / job, sorted(nodes)
    if ours:
        write_json(path, ExclusionPage(tuple(ours)))
    else:
        remove_entry(path)


class ExclusionLedger:
    """The excluded nodes that we added, per job array (an array may have several records in the queue). Written before Slurm
    is told, and removed after every record is updated, so that none of our exclusions is forgotten."""

    def __init__(self, rundir: RunDir, jobs: Sequence[Job]) -> None:
        self._place = rundir.nodes
        self._before = {base: our_exclusions(self._place, base) for base in {job.base_id for job in jobs}}
        self._after: dict[str, frozenset[str]] = dict.fromkeys(self._before, frozenset())

    def of(self, job: Job) -> frozenset[str]:
        return self._before[job.base_id]

    def record(self, job: Job, target: Sequence[str]) -> None:
        """Record that ``target`` is about to be excluded for ``job``. Raises OSError."""
        base = job.base_id
        write_exclusions(self._place, base, self._before[base] | self._after[base] | self._new(job, target))

    def confirm(self, job: Job, target: Sequence[str]) -> None:
        """Record that ``target`` is excluded for ``job``."""
        self._after[job.base_id] |= self._new(job, target)

    def retain(self, job: Job) -> None:
        """Record that it is not known what is excluded for ``job``."""
        self._after[job.base_id] |= self._before[job.base_id]

    def close(self) -> None:
        """Record that all records are updated. Raises OSError."""
        for base, nodes in self._after.items():
            if nodes != our_exclusions(self._place, base):
                write_exclusions(self._place, base, nodes)

    def _new(self, job: Job, target: Sequence[str]) -> frozenset[str]:
        theirs = frozenset(job.excluded) - self._before[job.base_id]
        return frozenset(target) - theirs


# The nodes that a launch excludes besides ``launch.exclude``: those with a bad score, and those a person has excluded.


def to_avoid(run: Run, now: datetime) -> tuple[tuple[JudgedNode, ...], tuple[str, ...]]:
    """Return the nodes to exclude, a person's own first, then the worst, and notes: what could not be read, and whom the run
    would exclude if that were not only told (``act``). Reads files only."""
    judged = read_and_judge(*of_run(run), now)
    if EXCLUSION in run.act.observed:
        hand = tuple(node for node in judged.nodes if node.state == "by hand")
        told = (f"would have excluded {node.name}: {node.why}" for node in judged.nodes if node.state == "excluded")
        return hand, (*judged.known.problems, *told)
    avoided = sorted((node for node in judged.nodes if node.excluded), key=lambda node: node.state != "by hand")
    return tuple(avoided), judged.known.problems


def that_fit(
    nodes: Sequence[JudgedNode], run: Run, exclude: Sequence[str]
) -> tuple[tuple[JudgedNode, ...], tuple[str, ...]]:
    """Return those of ``nodes`` that Slurm knows and that leave the partition large enough for the job, and a sentence
    for each other one.

    Returns all of them when Slurm cannot be asked: the launch will report that.
    """
    try:
        inventory = Slurm(timeout=10.0).inventory()
    except Error as error:
        return tuple(nodes), (f"it is not known which of the excluded nodes the partition can spare: {error.message}",)
    launch = run.launch
    partitions = launch.partition.split(",") if launch.partition else [inventory.default]
    theirs = [node for text in exclude for node in expand_hostlist(text)]
    by_hand = [node.name for node in nodes if node.state == "by hand" and node.name in inventory.known]
    bad = [node.name for node in nodes if node.state != "by hand"]
    needed = launch.job_nodes + launch.spare_nodes
    needed += reserve(needed)
    fit = fitting(bad, [*theirs, *by_hand], needed, partitions, inventory, launch.constraint or "")
    chosen = {*by_hand, *fit}
    not_excluded = [node for node in nodes if node.name not in chosen]
    return tuple(node for node in nodes if node.name in chosen), tuple(
        f"{node.name} is not excluded: "
        + (
            f"fewer than {needed} nodes would be left, with a reserve"
            if node.name in inventory.known
            else "Slurm knows no such node"
        )
        for node in not_excluded
    )


# ``watch`` helps a run whose jobs all wait: it takes back the exclusions that keep them from starting. A member that
# starts or fails does it by itself (``selector.py``). But with one node excluded and another one dead there may be too
# few left for any to start, and then no supervisor runs that could do it.


def relieve(run: Run, now: datetime) -> tuple[str, ...]:
    """Bring Slurm's lists of the waiting jobs up to date; returns a sentence for each that has changed. Bounded."""
    assert run.run_dir is not None
    rundir = RunDir(Path(run.run_dir))
    if not incidents.any_exclusions(rundir.nodes):
        return ()
    judged = read_and_judge(*of_run(run), now)
    nodes = judged.nodes
    if Observes(rundir, run.act.observed)(EXCLUSION):
        nodes = tuple(node for node in nodes if node.state == "by hand")
    return apply(rundir, clean_environment(os.environ), nodes, whole=judged.whole).changed
