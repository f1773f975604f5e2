"""Our own questions to Slurm about the scene of ``recorded_slurm``, each with what it comes to, whatever the version."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import Error, SchedulerUnavailable, SubmitRejected
from ftsupervise.model import Job, JobState
from ftsupervise.scheduler import ask_slurm_about_the_job
from ftsupervise.scheduler.accounting import how_they_ended
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.cluster import AccountLimit, PartitionLimits
from ftsupervise.scheduler.parse import NodeInventory
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.recorded_slurm import USER, Scene

Env = Mapping[str, str]
ACCOUNTING = "accounting: "  # what begins so is asked only where there is one


class Question(NamedTuple):
    """``told``: what each Slurm's answer comes to; a version that differs stands in ``but``, with those after it."""

    what: str
    ask: Callable[[Env], object]
    told: object
    but: Mapping[str, object] = {}

    def expected(self, version: str) -> object:
        since = [first for first in self.but if _number(first) <= _number(version)]
        return self.but[max(since, key=_number)] if since else self.told


def _number(version: str) -> tuple[int, ...]:
    return tuple(map(int, version.split(".")[:2]))


def _row(job: Job | None) -> tuple[object, ...] | None:
    if job is None:
        return None
    known = (job.submit_time is not None, job.start_time is not None)
    shown = (job.id, job.base_id, job.raw_id, job.state.value, job.reason, job.dependency, job.nodes, job.excluded)
    return (*shown, job.nodes_wanted, job.partitions, job.comment, job.name, known)


def _raised(act: Callable[[], object]) -> object:
    """Return what it returns, or the kind of error that it raises."""
    try:
        return act()
    except Error as error:
        return type(error)


def _slurm(env: Env) -> Slurm:
    slurm = Slurm(env)
    slurm.pause = lambda seconds: None
    return slurm


def _described(job: str) -> Callable[[Env], object]:
    return lambda env: _row(Slurm(env).describe(job))


def _submitted(*options: str) -> Callable[[Env], object]:
    def ask(env: Env) -> object:
        path, script = Path("short.sh"), "#!/bin/bash\nexit 0\n"
        slurm = _slurm(env)
        told = _raised(lambda: bool(slurm.submit(script, script_path=path, token="ftsupervise:none", options=options)))
        return "taken" if told is True else told

    return ask


def _inside(env: Env) -> Allocation:
    """The job 5, the member of the array that runs, as seen on its first node."""
    here = {"SLURM_JOB_ID": "5", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURMD_NODENAME": "node-0"}
    return Allocation({**env, **here, "SLURM_JOB_PARTITION": "prod"})


def _settings(env: Env) -> tuple[object, ...]:
    found = Slurm(env).settings()
    numbers = (found.most_of_an_array, found.kill_wait, found.slurmd_timeout, found.over_time_limit)
    return (*numbers, found.requeues, found.preempts, found.private, found.expedites)


def _waiting(*fields: object) -> tuple[object, ...]:
    identity, reason, dependency, excluded, wanted, comment, name, starts = fields
    base = str(identity).partition("_")[0]
    shown = (identity, base, base, "PENDING", reason, dependency, (), excluded)
    return (*shown, wanted, ("prod",), comment, name, (True, starts))


_MEMBER = ("4_1", "4", "5", "RUNNING", "", "", ("node-0", "node-1"), (), 2, ("prod",), "ftsupervise:scene", "chain")


def _ended(job: str, state: str, reason: str, name: str, node: str = "node-0") -> tuple[object, ...]:
    return (job, job, job, state, reason, "", (node,), (), 1, ("prod",), "", name, (True, True))


_NAMES = [f"node-{number}" for number in range(4)]
NODES = NodeInventory(
    frozenset(_NAMES), {"prod": frozenset(_NAMES[:3])}, "prod", dict.fromkeys(_NAMES, frozenset[str]())
)
PARTITION = PartitionLimits(name="prod", default=True, up=True, time=None, nodes=4, most_nodes=None)
LIMITS = (AccountLimit("account root", None, None, None), AccountLimit("QOS normal", None, None, None))
QUESTIONS = (
    Question(
        "the queue",
        lambda env: sorted((_row(job) for job in Slurm(env).queue()), key=str),
        [
            (*_MEMBER, (True, True)),
            _waiting("4_[2-4%1]", "JobArrayTaskLimit", "", (), 2, "ftsupervise:scene", "chain", False),
            _waiting("6", "Dependency", "afterany:4_*(unfulfilled)", (), 1, "", "after", False),
            _waiting("7", "JobHeldUser", "", (), 1, "", Scene.ODD, False),
            _waiting("8", "BeginTime", "", ("node-0", "node-1"), 1, "", "later", True),
        ],
    ),
    Question("a member that runs", _described("4_1"), (*_MEMBER, (True, True))),
    Question("an array, of which the member that runs is told", _described("4"), (*_MEMBER, (True, True))),
    Question("a job that has ended well", _described("1"), _ended("1", "COMPLETED", "", "ends")),
    Question("a job that has failed", _described("2"), _ended("2", "FAILED", "NonZeroExitCode", "fails")),
    Question("a job that was cancelled", _described("3"), _ended("3", "CANCELLED", "", "stopped", "node-2")),
    Question("a job that is not there", _described("999"), None),
    Question("the nodes", lambda env: Slurm(env).inventory(), NODES),
    Question("the partitions", lambda env: Slurm(env).partitions(), (("prod*", "infinite", "NO"),)),
    Question("what a job may ask of them", lambda env: Slurm(env).partition_limits(), (PARTITION,)),
    Question(
        "the nodes that take jobs",
        lambda env: [(one.partition, one.node, one.takes_jobs) for one in Slurm(env).node_hosts()],
        [("prod", "node-0", True), ("prod", "node-1", True), ("prod", "node-2", True), ("prod", "node-3", False)],
    ),
    Question("the nodes drained for a reason", lambda env: Slurm(env).drained("ECC errors | GPU 4"), ("node-3",)),
    Question("the cluster's settings", _settings, (10001, 2, 6, 0, True, False, frozenset(), False)),
    Question("whether Slurm requeues it", lambda env: Slurm(env).requeued("4_1"), True),
    Question("the script of a job", lambda env: Slurm(env).batch_script("7").splitlines()[0], "#!/bin/bash"),
    Question(
        "the states of the job's nodes", lambda env: _inside(env).states(), {"node-0": "mixed", "node-1": "mixed"}
    ),
    Question("the job's steps", lambda env: _inside(env).steps(), {"4_1.0"}),
    Question("the state of a job that runs", lambda env: _inside(env).state_of("5"), "RUNNING"),
    Question("the state of a job that has ended", lambda env: _inside(env).state_of("2"), ""),
    Question("the state of no job", lambda env: _inside(env).state_of("999"), ""),
    Question("that it was cancelled", lambda env: _inside(env).was_cancelled("3", datetime.now(timezone.utc)), True),
    Question(
        "that it was not cancelled", lambda env: _inside(env).was_cancelled("2", datetime.now(timezone.utc)), False
    ),
    Question("the time between SIGTERM and SIGKILL", lambda env: _inside(env).kill_wait(), 2.0),
    Question("that it is not begun again", lambda env: _inside(env).begins_again(), None),
    Question(
        "that the job is not ending",
        lambda env: (now := ask_slurm_about_the_job({**env, "SLURM_JOB_ID": "5"})) and now.ending,
        False,
    ),
    Question(
        ACCOUNTING + "how jobs have ended",
        lambda env: {job: end[:2] for job, end in (how_they_ended(["1", "2", "3", "4_1"], env) or {}).items()},
        {
            "1": (JobState.COMPLETED, ""),
            "2": (JobState.FAILED, ""),
            "3": (JobState.CANCELLED, USER),
        },
    ),
    Question(ACCOUNTING + "the limits of the account", lambda env: Slurm(env).limits(), LIMITS),
    # from here on the queue is changed
    Question("to exclude a node for one that waits", lambda env: Slurm(env).exclude("6", ["node-0"]), True),
    Question("for the rest of an array", lambda env: Slurm(env).exclude("4_[2-4%1]", ["node-0"]), True),
    Question("for one that runs", lambda env: Slurm(env).exclude("5", ["node-0"]), False),
    Question("for one that is not there", lambda env: Slurm(env).exclude("999", ["node-0"]), False),
    Question("for one that has ended", lambda env: Slurm(env).exclude("2", ["node-0"]), False),
    Question("to hold the rest of an array", lambda env: Slurm(env).hold("4"), None),
    Question("to release it", lambda env: Slurm(env).release("4"), None),
    Question("to hold one that has ended", lambda env: Slurm(env).hold("2"), None),
    Question("to change its comment", lambda env: Slurm(env).remark("4_[2-4%1]", "ftsupervise:scene held: a b"), None),
    Question("to cancel one that has ended", lambda env: Slurm(env).cancel("2"), None),
    Question("to cancel one that is not there", lambda env: Slurm(env).cancel("999"), None),
    Question("to submit to no partition", _submitted("--hold", "--partition=nosuch"), SubmitRejected),
    Question("to submit with a bad time", _submitted("--hold", "--time=bogus"), SubmitRejected),
    Question("to submit for more nodes than there are", _submitted("--hold", "--nodes=50"), "taken"),
    Question("to submit after a job that is not there", _submitted("--hold", "--dependency=afterany:999"), "taken"),
    Question("to submit with expedited requeue", _submitted("--hold", "--requeue=expedite"), SubmitRejected),
)
WITHOUT_CONTROLLER = (
    Question("the queue", lambda env: _raised(lambda: Slurm(env).queue()), SchedulerUnavailable),
    Question("a job", lambda env: _raised(lambda: Slurm(env).describe("4_1")), SchedulerUnavailable),
    Question("the nodes", lambda env: _raised(lambda: Slurm(env).inventory()), SchedulerUnavailable),
    Question("the settings", lambda env: _raised(lambda: Slurm(env).settings()), SchedulerUnavailable),
    Question("to cancel", lambda env: _raised(lambda: Slurm(env).cancel("7")), SchedulerUnavailable),
    Question("to submit", _submitted("--hold"), SchedulerUnavailable),
    Question("the state of a job", lambda env: _inside(env).state_of("5"), None),
    Question("the end of the job", lambda env: ask_slurm_about_the_job({**env, "SLURM_JOB_ID": "5"}), None),
)
