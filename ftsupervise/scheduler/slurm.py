"""Real Slurm, through its own commands, each with a bound.

The facts this rests on (measured on 22.05, 24.11 and 26.05): exit 0 is an answer, unless words on stderr say that the
controller was not reached; a cluster whose slurm.conf has an odd line prints a warning with every answer. "Invalid job id" for
one id means there is no such job; everything else is "could not look". An sbatch that timed out may have been accepted.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

from ftsupervise.errors import Error, NotFound, NotPermitted, SchedulerUnavailable, SubmitRejected
from ftsupervise.host import bounded
from ftsupervise.host.ownership import user_name
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Job, Submitted
from ftsupervise.printable import printable
from ftsupervise.rundir.paths import (
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_DEADLINE,
    ENV_GUARD,
    ENV_JOB_ID,
    ENV_RUN,
    ENV_RUN_DIR,
)
from ftsupervise.scheduler import SLURM
from ftsupervise.scheduler.cluster import (
    ASSOC_FIELDS,
    NODE_HOSTS,
    QOS_FIELDS,
    AccountLimit,
    ClusterSettings,
    NodeHost,
    PartitionLimits,
    parse_limits,
    parse_node_hosts,
    parse_partitions,
    parse_settings,
)
from ftsupervise.scheduler.parse import (
    INVENTORY,
    SQUEUE_ENV,
    NodeInventory,
    SqueueFormat,
    complaints,
    is_no_answer,
    most_alive,
    offers_expedited_requeue,
    parse_inventory,
    parse_queue,
)

_OVERFLOW = 65534  # the uid of "nobody"
_GIVEN = "/dev/stdin"  # the script for sbatch: as it would without a name, but arguments may follow
_WARNINGS, _SENTENCE = 10, 300  # warnings of Slurm that are repeated, and characters of each
_TOO_LONG = (
    "the cluster's MaxArraySize is smaller than launch.jobs (scontrol show config prints it: one member fewer is the most);"
    " lower launch.jobs, or write launch: {chain: daisy}"
)
_REFUSAL = 2000  # characters of a refusal by sbatch: a site's filter explains itself in several lines
UMASK = (
    "SLURM_UMASK"  # sbatch has it in the place of its own umask: by it Slurm makes the output, and begins the script
)
_KEEP = frozenset({"SLURM_CONF", "SLURM_CLUSTERS", "SLURM_CONF_SERVER", "SLURM_JWT", UMASK})

_ATTEMPTS_OWN = frozenset(
    {ENV_RUN_DIR, ENV_RUN, ENV_ATTEMPT, ENV_ATTEMPT_DIR, ENV_CHECKPOINT_DIR, ENV_DEADLINE, ENV_JOB_ID}
)

# sbatch's complaints after which the job may be in the queue all the same
_AMBIGUOUS = re.compile(
    r"timed out|Unable to contact slurm controller|Unexpected message|Zero Bytes|connection reset|Connection refused"
    r"|Slurm backup controller|Protocol authentication|Transport|communication|try again",
    re.I,
)


def clean_environment(env: Mapping[str, str]) -> dict[str, str]:
    """Return ``env`` without the variables of an outer job: a nested sbatch or srun would take over its CPU binding,
    memory and node list (this has made a whole fleet three times slower).

    The variables that name the cluster (SLURM_CONF …) stay. Those of an attempt go too, or a run launched from inside
    another one would train into that one's checkpoints.
    """
    kept = {k: v for k, v in env.items() if not k.startswith(("SLURM_", "SLURMD_", "SRUN_")) or k in _KEEP}
    if ENV_ATTEMPT not in env:  # a person's own export, such as FTSUPERVISE_CHECKPOINT_DIR, stays
        return kept
    return {k: v for k, v in kept.items() if k not in _ATTEMPTS_OWN and not k.startswith(ENV_GUARD)}


class Slurm:
    """The port ``Scheduler`` over squeue, sbatch, scancel and scontrol. Times out in ``timeout`` seconds a command."""

    kind = SLURM

    def __init__(self, env: Mapping[str, str] | None = None, *, timeout: float = 60.0) -> None:
        self._env = clean_environment(os.environ if env is None else env)
        self._timeout = timeout
        self.warnings: set[str] = set()  # warnings that came with Slurm's answers
        self.pause: Callable[[float], None] = time.sleep

    # ------------------------------------------------------------------------------------------------------- asking

    def queue(self, *, users: Sequence[str] = ()) -> tuple[Job, ...]:
        names = tuple(dict.fromkeys(users)) or (user_name(),)
        form = new_format()
        done = self._ask(["squeue", "-h", "-u", ",".join(names), "-o", form.text], env=SQUEUE_ENV)
        known = tuple(name for name in names if not (f"Invalid user: {name}" in done.stderr and _is_nobody(name)))
        if known and known != names:
            done = self._ask(["squeue", "-h", "-u", ",".join(known), "-o", form.text], env=SQUEUE_ENV)
        return self._read(self._checked(done), form)

    def find(self, token: str) -> tuple[Job, ...]:
        return tuple(job for job in self.queue() if token in job.comment)

    def describe(self, job_id: str) -> Job | None:
        form = new_format()
        done = self._ask(["squeue", "-h", "-t", "all", "-j", job_id, "-o", form.text], env=SQUEUE_ENV)
        if "Invalid job id" in done.stderr:
            return None
        return most_alive(self._read(self._checked(done), form))

    def batch_script(self, job_id: str) -> str:
        """Return the script that a job in the queue was submitted with. Raises NotFound, SchedulerUnavailable."""
        done = self._ask(["scontrol", "write", "batch_script", job_id, "-"])
        if done.code == 0 and done.stdout.startswith("#!"):
            return done.stdout
        if re.search("Invalid job id|does not contain|not found|no batch script", done.stderr + done.stdout, re.I):
            raise NotFound(f"job {job_id} is not in the queue, or has no script", hint="squeue --me lists yours")
        raise self._blind("scontrol write batch_script", done)

    def inventory(self) -> NodeInventory:
        """Return the nodes of all partitions. Raises SchedulerUnavailable."""
        return parse_inventory(self._answer(["sinfo", "-h", "-a", "-N", "-o", INVENTORY]).stdout)

    def partitions(self) -> tuple[tuple[str, str, str], ...]:
        """Return (name, with a * behind the default one's; time limit; how its nodes are shared).

        Raises SchedulerUnavailable.
        """
        rows = (line.strip().split("|") for line in self._answer(["sinfo", "-h", "-o", "%P|%l|%h"]).stdout.splitlines())
        return tuple((row[0], row[1], row[2]) for row in rows if len(row) == 3)

    def requeued(self, job_id: str) -> bool:
        """Return whether Slurm requeues this job by itself when a node of it fails: with the node list it started with."""
        done = self._ask(["scontrol", "show", "job", "-o", job_id])
        if done.code != 0:
            raise self._blind("scontrol show job", done)
        return re.search(r"\bRequeue=[1-9]", done.stdout) is not None

    def expedites(self) -> bool:
        """Return whether the cluster takes ``--requeue=expedite``. Raises SchedulerUnavailable."""
        return offers_expedited_requeue(self._answer(["scontrol", "show", "config"]).stdout)

    def settings(self) -> ClusterSettings:
        """Return what the cluster is set to. Raises SchedulerUnavailable."""
        return parse_settings(self._answer(["scontrol", "show", "config"]).stdout)

    def partition_limits(self) -> tuple[PartitionLimits, ...]:
        """Return the partitions with what a job may ask of them. Raises SchedulerUnavailable."""
        return parse_partitions(self._answer(["scontrol", "show", "partition", "-o"]).stdout)

    def node_hosts(self) -> tuple[NodeHost, ...]:
        """Return the nodes of all partitions with their hosts. Raises SchedulerUnavailable."""
        return parse_node_hosts(self._answer(["sinfo", "-h", "-a", "-N", "-o", NODE_HOSTS]).stdout)

    def limits(self) -> tuple[AccountLimit, ...]:
        """Return what this account's associations and their QOS allow. Raises SchedulerUnavailable."""
        ask = ["sacctmgr", "-n", "-P", "show"]
        mine = self._accounted([*ask, "assoc", f"user={user_name()}", f"format={ASSOC_FIELDS}"])
        return parse_limits(mine, self._accounted([*ask, "qos", f"format={QOS_FIELDS}"]))

    def _accounted(self, argv: list[str]) -> str:
        done = self._ask(argv)
        if done.code != 0:
            raise self._blind("sacctmgr", done)
        return done.stdout

    def drained(self, reason: str) -> tuple[str, ...]:
        """Return the nodes that are drained for ``reason``, as sinfo's %E has it. Raises SchedulerUnavailable."""
        done = self._answer(["sinfo", "-h", "-a", "-N", "-o", "%N|%T|%E"])
        rows = (line.strip().split("|", 2) for line in done.stdout.splitlines())
        found = (row[0] for row in rows if len(row) == 3 and row[1].startswith("drain") and row[2].strip() == reason)
        return tuple(dict.fromkeys(found))

    # ------------------------------------------------------------------------------------------------------- changing

    def submit(
        self,
        script: str,
        *,
        script_path: Path,
        token: str,
        env: Mapping[str, str] | None = None,
        options: Sequence[str] = (),
        arguments: Sequence[str] = (),
    ) -> Submitted:
        """Submit a script. ``token`` must stand in the comment: the script's own ``#SBATCH --comment`` line, or one of
        ``options``.

        sbatch gets the text itself, and reads no file: by now another one could lie at ``script_path``. ``options`` go before
        those in the script, ``arguments`` to the script itself: one text serves many jobs.
        """
        base = self._env if env is None else clean_environment(env)
        done = self._run(["sbatch", "--parsable", *options, _GIVEN, *arguments], env=base, stdin=script)
        if done.code == 0:
            match = re.search(r"^(\d+)(?:;(\S+))?$", done.stdout.strip(), re.M)
            if match:  # lines that a site's filter prints beside it are no warnings
                self._warn({words for words in complaints(done.stderr) if words.startswith(("error", "warning"))})
                return Submitted(match[1])
        elif done.code is not None and not _AMBIGUOUS.search(done.stderr + done.stdout):
            hint = _TOO_LONG if "Invalid job array specification" in done.stderr else ""
            said = done.stderr.strip()[:_REFUSAL] or done.words()
            raise SubmitRejected(f"sbatch refused {script_path}:\n  {said}", hint=hint)
        return self._look_again(token, done, script_path)

    def _look_again(self, token: str, done: bounded.CompletedCommand, script_path: Path) -> Submitted:
        """Ask the queue before anything else: sbatch's answer leaves it open whether the job is in it."""
        for pause in (0.5, 2.0, 5.0):
            self.pause(pause)
            try:
                found = self.find(token)
            except SchedulerUnavailable:
                continue
            if found:
                return Submitted(found[0].base_id, found_again=True)
        raise SchedulerUnavailable(
            f"sbatch gave no clear answer for {script_path}: {done.words()}",
            hint="the job may still appear; type the same command again later: it looks for it before it submits",
        )

    def cancel(self, job_id: str, *, only_pending: bool = False) -> None:
        done = self._ask(["scancel", *(["--state=PENDING"] if only_pending else []), _waiting(job_id)])
        text = done.stderr + done.stdout
        if "denied" in text or done.code == 210:
            raise NotPermitted(f"job {job_id} belongs to somebody else", hint="raise the kill switch: ftsupervise kill")
        if done.code != 0 and "Invalid job id" not in text:
            raise self._blind("scancel", done)

    def hold(self, job_id: str) -> None:
        self._control("uhold", job_id)  # a hold of the owner's, which the owner may release

    def release(self, job_id: str) -> None:
        self._control("release", job_id)

    def put_back(self, job_id: str) -> bool:
        """As the port says. Seen on 22.05: a job without ``--requeue`` may be requeued once its owner has allowed it."""
        self._control("update", f"JobId={job_id}", "Requeue=1")
        try:
            return self._control("requeuehold", job_id)
        except SchedulerUnavailable:  # the cluster requeues no job (JobRequeue=0), or it is no batch job
            return False

    def remark(self, job_id: str, comment: str) -> None:
        self._control("update", f"JobId={_waiting(job_id)}", f"Comment={comment}")

    def exclude(self, job_id: str, nodes: Sequence[str]) -> bool:
        """Exclude ``nodes``, and no others, for a waiting job: its ExcNodeList. False when it does not wait any more.

        Seen on 22.05: ``JobId=88_[2-5]`` takes the members that wait (the plain id of an array of which one runs is answered
        with an error, and changed all the same); an empty list clears; one unknown node and the whole list is refused.
        """
        return self._control("update", f"JobId={_waiting(job_id)}", f"ExcNodeList={compress_hostlist(tuple(nodes))}")

    def _control(self, word: str, job_id: str, *more: str) -> bool:
        """Run scontrol; return False when the job is gone, or no longer waits. Raises NotPermitted, SchedulerUnavailable."""
        done = self._ask(["scontrol", word, job_id, *more])
        text = done.stderr + done.stdout
        if "denied" in text or "Invalid user id" in text:
            raise NotPermitted(f"job {job_id.removeprefix('JobId=')} belongs to somebody else")
        if done.code != 0 and not re.search("Invalid job id|no longer pending|already", text, re.I):
            raise self._blind(f"scontrol {word}", done)
        return done.code == 0

    # -------------------------------------------------------------------------------------------------------- inside

    def _ask(self, argv: list[str], env: Mapping[str, str] | None = None) -> bounded.CompletedCommand:
        """Ask without a person's SQUEUE_STATES, SINFO_FORMAT …, which would change the answer."""
        asking = {k: v for k, v in self._env.items() if not k.startswith(("SQUEUE_", "SINFO_", "SCANCEL_"))}
        return self._run(argv, env=asking | dict(env or {}))

    def _answer(self, argv: list[str], env: Mapping[str, str] | None = None) -> bounded.CompletedCommand:
        return self._checked(self._ask(argv, env))

    def _checked(self, done: bounded.CompletedCommand) -> bounded.CompletedCommand:
        """Return ``done`` if Slurm has answered. Raises SchedulerUnavailable."""
        if not is_answer(done, self._ask):
            raise self._blind(done.argv[0], done)
        self._warn(complaints(done.stderr))
        return done

    def _warn(self, said: Collection[str]) -> None:
        """Remember what Slurm warns of: ten sentences at most. A command may complain without an end."""
        for words in sorted(said):
            if len(self.warnings) < _WARNINGS:
                self.warnings.add(printable(words, _SENTENCE))

    def _run(self, argv: list[str], env: Mapping[str, str], stdin: str | None = None) -> bounded.CompletedCommand:
        try:
            return bounded.run(argv, timeout=self._timeout, env=env, stdin=stdin)
        except FileNotFoundError:
            raise SchedulerUnavailable(
                f"there is no {argv[0]} on this machine's PATH",
                hint="log in to a Slurm node, or try it here: ftsupervise sandbox up; or set scheduler: local",
            ) from None
        except OSError as error:
            raise Error(f"{argv[0]} could not be started: {error}") from None

    @staticmethod
    def _read(done: bounded.CompletedCommand, form: SqueueFormat) -> tuple[Job, ...]:
        try:
            return parse_queue(done.stdout, form)
        except ValueError as error:
            raise SchedulerUnavailable(f"squeue could not be read: {error}") from None

    @staticmethod
    def _blind(command: str, done: bounded.CompletedCommand) -> SchedulerUnavailable:
        return SchedulerUnavailable(
            f"Slurm did not answer {command}: {done.words()}",
            hint="nothing was changed; scontrol ping says whether the controller is up",
        )


def is_answer(done: bounded.CompletedCommand, ask: Callable[[list[str]], bounded.CompletedCommand]) -> bool:
    """Return whether Slurm has answered: an exit code of 0, and no words on stderr that say otherwise.

    Other words on stderr are a warning. Beside an empty answer they are one only if ``scontrol ping`` (through ``ask``)
    prints them too: then they are about the cluster's settings, and not about the question.
    """
    said = complaints(done.stderr)
    if done.code != 0 or any(map(is_no_answer, said)):
        return False
    if not said or done.stdout.strip():
        return True
    other = ask(["scontrol", "ping"])
    return other.code == 0 and said <= complaints(other.stderr)


def _waiting(job_id: str) -> str:
    """Return the id of the members that wait, as ``scontrol update`` takes it: "88_[3-10%1]" -> "88_[3-10]"."""
    return re.sub(r"%\d+\]$", "]", job_id)


def new_format() -> SqueueFormat:
    """Return the format for the next squeue."""
    return SqueueFormat(os.urandom(6).hex())


def _is_nobody(name: str) -> bool:
    """Return whether it is the account that owns files which a network file system cannot map.

    Slurm 26.05 does not know that account, so it has no jobs there.
    """
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid == _OVERFLOW
    except KeyError:
        return name == str(_OVERFLOW)
