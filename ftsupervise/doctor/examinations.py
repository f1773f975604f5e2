"""The table of examinations: from what was seen, and what the run asks for, to lines. Pure.

Each is a small function that yields one line where all is well, and one for each thing that is not. A line that is not well
says what to type; one that could not be seen says how to look.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from ftsupervise.doctor.seen import (
    ClusterSeen,
    CronSeen,
    Examined,
    PlaceSeen,
    PythonSeen,
    ScriptSeen,
    Sights,
    TrialSeen,
)
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.printable import printable
from ftsupervise.probe import NotSeen
from ftsupervise.scheduler.cluster import PartitionLimits, other_hosts
from ftsupervise.truth import Health
from ftsupervise.units import count, format_slurm_time, show_duration, show_size

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch, Run
    from ftsupervise.doctor.seen import MemorySeen

RUN_DIRECTORY, STATE, CHECKPOINTS = "run directory", "state directory", "checkpoints"
OK, WRONG, UNSEEN = Health.OK, Health.BAD, Health.UNKNOWN
Examination = Callable[[Sights, "Run | None"], Iterator[Examined]]
_ADMIN = "ask your administrator: "
_SHORT_WAIT = 2  # seconds of KillWait below which a rank that is told to end saves nothing
_LONG_SILENCE = 900  # seconds of SlurmdTimeout beyond which the night is lost before Slurm gives a node up
_LITTLE_SPACE = 1_000_000_000  # bytes: a checkpoint of a small model
_LITTLE_STATE = 50_000_000  # bytes of the state directory: pages and journals
_FEW_INODES = 1000
_SETTING = {RUN_DIRECTORY: "run_dir:", CHECKPOINTS: "checkpoints: {path:}", STATE: "FTSUPERVISE_STATE_DIR"}
_CLOCK = 2.0  # seconds between two clocks, beyond which ages of files mislead
_LITTLE_SHARED = 256 << 20  # bytes of /dev/shm: a container's 64 MB are too few for NCCL, and for the ranks' pages
_LITTLE_MEMORY = 0.05
_OLDEST = (3, 9)  # of the Python that imports the guard (tests/unit/test_old_python.py)
_AGAIN = "ftsupervise doctor   (again, when the machine is less busy)"
_SLOW_SWITCH = 30.0  # seconds


def examine(seen: Sights, run: Run | None) -> tuple[Examined, ...]:
    """Return all lines. ``run``: None where there are no settings: what needs them is left out."""
    return tuple(line for one in EXAMINATIONS for line in one(seen, run))


# ------------------------------------------------------------------------------------------------------------ Slurm


def controller(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Slurm's commands, and whether the controller answers them."""
    if not seen.slurm:
        return
    if seen.missing_commands:
        names = ", ".join(seen.missing_commands)
        do = "module load slurm, or log in to a node of the cluster; ftsupervise sandbox up tries it here"
        yield Examined(WRONG, "Slurm", f"not on the PATH: {names}", do)
    elif isinstance(seen.cluster, NotSeen):
        yield Examined(UNSEEN, "Slurm", seen.cluster.why, "scontrol ping   (whether the controller answers)")
    elif seen.cluster is not None:
        yield Examined(OK, "Slurm", f"{seen.cluster.settings.version}; the controller answers")


def settings_of_the_cluster(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Settings of slurm.conf under which a chain breaks or a night is lost."""
    if not isinstance(seen.cluster, ClusterSeen):
        return
    found = seen.cluster.settings
    wrong = [*_of_the_chain(seen.cluster, run)]
    if found.over_time_limit is None:
        do = f"{_ADMIN}OverTimeLimit=0; until then end a member that outlives its limit by hand: scancel JOBID"
        what = "OverTimeLimit=UNLIMITED: a member that hangs at its time limit is never ended, and the next one waits"
        wrong.append(Examined(WRONG, "OverTimeLimit", what, do))
    if found.kill_wait < _SHORT_WAIT:
        what = f"KillWait={found.kill_wait}: after scancel the ranks have no time to save"
        do = f"{_ADMIN}KillWait=30; stop the run by: ftsupervise kill"
        wrong.append(Examined(WRONG, "KillWait", what, do))
    if not 0 < found.slurmd_timeout <= _LONG_SILENCE:
        when = f"only {show_duration(found.slurmd_timeout)} after its last word" if found.slurmd_timeout else "never"
        what = f"SlurmdTimeout={found.slurmd_timeout}: Slurm gives up a lost node {when}"
        do = f"{_ADMIN}SlurmdTimeout=300; launch: {{spare_nodes: 1}} goes on in the allocation meanwhile"
        wrong.append(Examined(WRONG, "SlurmdTimeout", what, do))
    if found.preempts and not found.warns_the_preempted:
        what = f"a member that is preempted gets SIGTERM and {found.kill_wait} s, and no warning signal"
        do = f"{_ADMIN}SlurmctldParameters=preempt_send_user_signal; until then save as often as you mind to lose steps"
        wrong.append(Examined(WRONG, "preemption", what, do))
    yield from wrong
    if not wrong:
        parts = f"MaxArraySize {found.most_of_an_array}, KillWait {found.kill_wait} s, SlurmdTimeout {found.slurmd_timeout} s"
        requeue = "expedited" if found.expedites else "offered" if found.requeues else "not offered, and not asked for"
        yield Examined(OK, "slurm.conf", f"{parts}; requeue {requeue}")


def _of_the_chain(cluster: ClusterSeen, run: Run | None) -> Iterator[Examined]:
    if run is None:
        return
    found, launch = cluster.settings, run.launch
    most = found.most_of_an_array - 1
    if launch.chain == "array" and launch.jobs > max(most, 1):
        what = f"launch.jobs: {launch.jobs} makes an array of so many, and MaxArraySize={most + 1} lets it have {most}"
        yield Examined(
            WRONG, "MaxArraySize", what, f"write launch: {{jobs: {max(most, 1)}}}, or launch: {{chain: daisy}}"
        )
    if launch.requeue and not found.requeues:
        what = "launch.requeue is true, and JobRequeue=0: no job is requeued after the loss of a node"
        yield Examined(WRONG, "JobRequeue", what, "write launch: {requeue: false}: the next member takes over")
    if "jobs" in found.private and (run.share.watch or run.share.launch):
        what = "PrivateData=jobs: the others of share see none of this run's jobs, so their watch is blind"
        do = f"{_ADMIN}PrivateData without jobs; or leave share: {{watch, launch}} out"
        yield Examined(WRONG, "PrivateData", what, do)


def partition(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Whether a partition takes the run: it is there and up, and has the time and the nodes."""
    if not isinstance(seen.cluster, ClusterSeen) or run is None:
        return
    known = {one.name: one for one in seen.cluster.partitions}
    default = [one.name for one in seen.cluster.partitions if one.default]
    asked = run.launch.partition.split(",") if run.launch.partition else default
    if not asked:
        what = "launch.partition is not set, and the cluster has no default partition"
        yield Examined(WRONG, "partition", what, f"set it: launch: {{partition: {next(iter(known), 'NAME')}}}")
        return
    for name in asked:
        if name not in known:
            there = ", ".join(sorted(known)) or "none"
            do = f"set another: launch: {{partition: {next(iter(sorted(known)), 'NAME')}}}"
            yield Examined(WRONG, "partition", f"no partition is called {printable(name)}; there are: {there}", do)
            return
    troubles = {name: _trouble(known[name], seen.cluster, run.launch) for name in asked}
    fits = [name for name, trouble in troubles.items() if trouble is None]
    if fits:
        limit = known[fits[0]].time
        within = "no time limit" if limit is None else f"time limit {show_duration(limit.total_seconds())}"
        yield Examined(OK, "partition", f"{fits[0]} takes the run: {within}")
    else:
        trouble = next(one for one in troubles.values() if one is not None)
        yield Examined(WRONG, "partition", *trouble)


def _trouble(one: PartitionLimits, cluster: ClusterSeen, launch: Launch) -> tuple[str, str] | None:
    """Return why the partition does not take the run, and what to do; None where it does."""
    nodes = launch.job_nodes + launch.spare_nodes
    free = {host.node for host in cluster.hosts if host.partition == one.name and host.takes_jobs}
    if not one.up:
        return f"{one.name} is not up", f"scontrol show partition {one.name}   (wait, or set another launch.partition)"
    if one.time is not None and launch.time is not None and launch.time > one.time:
        theirs = format_slurm_time(one.time)
        return f"launch.time is longer than the limit of {one.name}, {theirs}", f'write launch: {{time: "{theirs}"}}'
    if nodes > min(one.nodes, one.most_nodes or one.nodes):
        has = min(one.nodes, one.most_nodes or one.nodes)
        return (
            f"the run wants {count(nodes, 'node')}, and {one.name} gives a job {has}",
            "set launch.nodes, launch.spare_nodes",
        )
    if nodes > len(free):
        gone = f"{len(free)} of {count(one.nodes, 'node')} of {one.name} take jobs, and the run wants {nodes}"
        return gone, f"sinfo -R -p {one.name}   (why; {_ADMIN}scontrol update nodename=NODE state=resume)"
    return None


def limits(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """What the account's association and QOS allow, against the settings."""
    if not isinstance(seen.cluster, ClusterSeen) or run is None or seen.cluster.limits is None:
        return
    found, launch = seen.cluster.limits, run.launch
    if isinstance(found, NotSeen):
        yield Examined(UNSEEN, "limits", found.why, "sacctmgr show assoc user=$USER   (what this account may have)")
        return
    asked = [one for one in found if one.partition in ("", launch.partition) and _is_meant(one.whose, launch)]
    wrong = []
    for one in asked:
        if one.submitted is not None and launch.jobs > one.submitted:
            what = f"{one.whose} takes {one.submitted} jobs at a time, and launch.jobs is {launch.jobs}: sbatch would refuse"
            wrong.append(Examined(WRONG, "limits", what, f"write launch: {{jobs: {one.submitted}}}"))
        if one.time is not None and launch.time is not None and launch.time > one.time:
            theirs = format_slurm_time(one.time)
            what = f"{one.whose} allows {theirs}, and launch.time is longer: the job would wait for ever"
            wrong.append(Examined(WRONG, "limits", what, f'write launch: {{time: "{theirs}"}}'))
    yield from wrong or [Examined(OK, "limits", f"{count(len(asked), 'rule')} of the accounting, and none forbids it")]


def _is_meant(whose: str, launch: Launch) -> bool:
    kind, _, name = whose.partition(" ")
    chosen = launch.account if kind == "account" else launch.qos
    return chosen is None or chosen == name


# ------------------------------------------------------------------------------------------------------ directories


def places(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """The directories that a run writes: whether each takes files as it should, has room, and is seen from the nodes."""
    for name, place in (seen.places or {}).items():
        quoted = shlex.quote(place.path if isinstance(place, PlaceSeen) else place.what)
        if isinstance(place, NotSeen):
            yield Examined(
                UNSEEN, name, f"{place.what}: {place.why}", f"ls -ld {quoted}   (once its file system answers)"
            )
            continue
        wrong = [*_of_place(name, place, run, seen)]
        yield from wrong
        if not wrong:
            room = "" if place.space is None else f": {show_size(place.space.free)} free"
            where = place.path if place.there else f"{place.path} can be made"
            yield Examined(OK, name, f"{printable(where)}{room}")


def _of_place(name: str, place: PlaceSeen, run: Run | None, seen: Sights) -> Iterator[Examined]:
    at, quoted = printable(place.at), shlex.quote(place.at)
    space = place.space
    if place.owner:
        do = f"ls -ld {quoted}   (launch as that account, or name another: run_dir:)"
        yield Examined(WRONG, name, f"{at} belongs to {place.owner}", do)
    elif place.stranger and not (run is not None and run.share.launch):
        yield Examined(WRONG, name, place.stranger, f"chmod go-w {quoted}")
    if space is not None and space.free < (_LITTLE_STATE if name == STATE else _LITTLE_SPACE):
        what = f"{at} has {show_size(space.free)} of {show_size(space.total)} free"
        yield Examined(WRONG, name, what, f"du -xh {quoted} | sort -h | tail   (make room)")
    elif space is not None and space.inodes and space.inodes_free < _FEW_INODES:
        what = f"{at} has {count(space.inodes_free, 'inode')} free of {space.inodes}"
        yield Examined(WRONG, name, what, f"df -i {quoted}   (remove small files)")
    elif place.full:
        yield Examined(WRONG, name, f"{at} takes no file: {place.trouble}", f"df -h {quoted}; df -i {quoted}; quota -s")
    if place.trouble and not place.full:
        do = f"touch {quoted}/x   (another directory: run_dir:; or ask the file system's administrator)"
        yield Examined(WRONG, name, f"{at} cannot be used: {printable(place.trouble)}", do)
    if place.ahead is not None and abs(place.ahead) > _CLOCK:
        word = "ahead of" if place.ahead > 0 else "behind"
        what = f"the clock of the file server of {at} is {abs(place.ahead):.0f} s {word} this machine's: ages are wrong by that"
        yield Examined(WRONG, "clock", what, f"{_ADMIN}chronyc tracking, here and on the file server")
    others = other_hosts(seen.cluster.hosts, seen.here) if isinstance(seen.cluster, ClusterSeen) else ()
    if place.local_kind and others:
        alone = f"{at} lies on a disk of {seen.here} alone ({place.local_kind})"
        what = f"{alone}, and other nodes are {compress_hostlist(others)}"
        do = f"set {_SETTING.get(name, 'it')} to a directory that all nodes see; ftsupervise doctor --probe looks from one"
        yield Examined(WRONG, name, what, do)


# ----------------------------------------------------------------------------------------------------------- people


def messages(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Whether people can be told: a receiver is there, and what it sends to answers."""
    if run is None:
        return
    if not run.alerts.receivers:
        do = "write alerts: {receivers: [{file: {path: messages.txt}}]}, or email: or slack:; then: ftsupervise notify test"
        yield Examined(WRONG, "receivers", f"there is none: nobody is told when {run.name} stops", do)
    for one in seen.receivers:
        about = f"receiver {printable(one.name)}"
        test = f"ftsupervise notify test --receiver {shlex.quote(one.name)}   (sends a real message)"
        if one.trouble:
            yield Examined(UNSEEN if one.late else WRONG, about, printable(one.trouble, 300), test)
        else:
            yield Examined(OK, about, f"{printable(one.where)} (notify test sends a real message)")


_CRON = {
    "ABSENT": ("none is installed: nothing outside the job watches the run", "ftsupervise cron install{dir}"),
    "REMOVED": ("it was removed: nothing outside the job watches the run", "ftsupervise cron install{dir}"),
    "DEAD": ("it is dead: no slot comes any more", "ftsupervise cron ensure{dir}"),
    "LATE": ("it is late: no slot has come for two periods", "ftsupervise cron status{dir}"),
    "UNSTARTED": ("its loop was never started", "ftsupervise cron run --foreground{dir}"),
}


def cron(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Whether something outside the job looks at the run, every few minutes."""
    found = seen.cron
    if isinstance(found, NotSeen):
        yield Examined(UNSEEN, "cron", found.why, "ftsupervise cron status")
    if not isinstance(found, CronSeen):
        return
    if found.verdict in _CRON:
        what, do = _CRON[found.verdict]
        yield Examined(WRONG, "cron", what, do.format(dir=found.option))
        return
    if found.verdict == "UNKNOWN":
        yield Examined(
            UNSEEN, "cron", found.blind or "whether it lives is not known", f"ftsupervise cron status{found.option}"
        )
    elif found.watches:
        yield Examined(OK, "cron", f"{found.verdict.lower()}, by {found.backend}")
    if not found.watches:
        do = f"ftsupervise cron add watch-all{found.option}"
        yield Examined(WRONG, "cron", f"no entry in {printable(found.directory)} watches runs", do)
    for one in found.passed_over:
        yield Examined(WRONG, "cron", f"it passes over {printable(one)}", f"ftsupervise cron list{found.option}")


# ---------------------------------------------------------------------------------------------------------- account


def account(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """The umask, and the group that the run is shared with."""
    found = seen.account
    if found is None:
        return
    group = run.share.group if run is not None else None
    shares = run is not None and (run.share.launch or run.share.watch or run.share.nodes)
    wrong = []
    if not found.umask & 0o002:
        what = f"umask {found.umask:04o}: everybody may write the files that the command makes"
        wrong.append(Examined(WRONG, "umask", what, "umask 022   (in ~/.profile, and in launch.setup)"))
    if shares and found.umask & 0o040:
        what = f"umask {found.umask:04o}: the group that shares the run cannot read the files that the command makes"
        wrong.append(Examined(WRONG, "umask", what, "write launch: {setup: umask 027}"))
    if group is not None and group not in found.groups:
        what = f"share.group: you are not in {printable(group)}, so nothing can be given to it"
        wrong.append(Examined(WRONG, "group", what, "id -Gn   (share.group takes one of these)"))
    yield from wrong or [Examined(OK, "account", f"umask {found.umask:04o}{f', group {group}' if group else ''}")]


# ----------------------------------------------------------------------------------------------------------- script


def script(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """The training script: it is there, has the guard or says what leaving with 0 means, and goes on where it was."""
    found = seen.script
    if isinstance(found, NotSeen):
        yield Examined(UNSEEN, "script", found.why, "ftsupervise config check")
    if not isinstance(found, ScriptSeen):
        return
    wrong = []
    if found.refusal:
        wrong.append(Examined(WRONG, "launch", f"launch would refuse: {found.refusal}", found.remedy))
    if found.missing:
        what = f"launch.command: {printable(found.missing)} is not there"
        wrong.append(Examined(WRONG, "script", what, "set launch.command, or launch from the folder where it lies"))
    without = "from ftsupervise import Guard   (a few lines in the loop: docs/guard.md); or set launch.finished_by"
    wrong += [Examined(WRONG, "guard", sentence, without) for sentence in found.unguarded]
    again = "ftsupervise config check   (says it again, once it is corrected)"
    wrong += [
        Examined(WRONG, "launch", sentence, again) for sentence in found.doubts if sentence not in found.unguarded
    ]
    yield from wrong
    if not wrong:
        guard = (
            "the script imports ftsupervise"
            if found.uses_guard
            else "no guard was found; launch.finished_by is set or no script is known"
        )
        yield Examined(OK, "script", guard)


def python(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """The Python of the job against ours."""
    found = seen.python
    if isinstance(found, NotSeen):
        if not isinstance(seen.trial, TrialSeen) or seen.trial.python is None:
            yield Examined(UNSEEN, "python", found.why, "ftsupervise doctor --probe   (asks it in a job)")
    elif found is not None:
        yield _judge_python("python", found, seen)


def _judge_python(about: str, found: PythonSeen, seen: Sights) -> Examined:
    needs = not isinstance(seen.script, ScriptSeen) or seen.script.uses_guard
    numbers = tuple(int(part) for part in found.version.split(".")[:2] if part.isdigit())
    if found.late:
        return Examined(UNSEEN, about, f"{printable(found.path)}: {printable(found.trouble, 200)}", _AGAIN)
    if found.trouble:
        what = f"{printable(found.path)} does not start: {printable(found.trouble, 200)}"
        return Examined(
            WRONG, about, what, "set launch.command to a Python that is there, or launch.setup to make it so"
        )
    if needs and numbers < _OLDEST:
        what = f"{printable(found.path)} is Python {found.version}, and the guard needs {_OLDEST[0]}.{_OLDEST[1]}"
        return Examined(WRONG, about, what, "set launch.command, or launch.setup, to a newer one")
    gives = ""  # run/guard_folder.py
    if needs and found.package != seen.version:
        has = f"ftsupervise {printable(found.package)}" if found.package else "no ftsupervise"
        gives = f", which has {has}: the run gives it the guard of {seen.version}"
    return Examined(OK, about, f"{printable(found.path)}, Python {found.version}{gives}")


def watchdogs(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Settings of the watchdogs that are well written and still wrong."""
    for sentence in seen.watchdogs:
        yield Examined(WRONG, "watchdogs", printable(sentence, 400), "ftsupervise check all")


def memory(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """Memory and /dev/shm, of this machine where it is the one that trains."""
    if isinstance(seen.memory, NotSeen):
        yield Examined(UNSEEN, "memory", seen.memory.why, "cat /proc/meminfo")
    elif seen.memory is not None:
        yield from _judge_memory(seen.memory, seen.here)


def _judge_memory(found: MemorySeen, host: str) -> Iterator[Examined]:
    wrong = []
    if found.free < _LITTLE_MEMORY * found.total:
        what = f"{host} has {show_size(found.free)} of {show_size(found.total)} of memory free"
        wrong.append(
            Examined(WRONG, "memory", what, "set launch.mem, or end what takes it: ps --sort -rss -eo rss,args | head")
        )
    if found.shared is None:
        what = f"{host} has no /dev/shm: no standby, no snapshots, and ranks whose progress is not seen"
        wrong.append(Examined(WRONG, "/dev/shm", what, "give the container one: --ipc host, or --shm-size 8g"))
    elif found.shared < _LITTLE_SHARED:
        what = f"/dev/shm of {host} has {show_size(found.shared)} free: too little for snapshots, standby and NCCL"
        wrong.append(Examined(WRONG, "/dev/shm", what, "ls -la /dev/shm   (what fills it; a container: --shm-size 8g)"))
    shared = "" if found.shared is None else f", /dev/shm {show_size(found.shared)}"
    yield from wrong or [Examined(OK, "memory", f"{host}: {show_size(found.free)} free{shared}")]


# ------------------------------------------------------------------------------------------------------------ trial


def trial(seen: Sights, run: Run | None) -> Iterator[Examined]:
    """What the job of ``--probe`` has found from inside."""
    if seen.trial_failed:
        do = "ftsupervise launch --dry-run   (the script it would run; look at launch.setup and launch.modules)"
        yield Examined(WRONG, "trial job", printable(seen.trial_failed, 400), do)
    why, do = seen.trial_refused
    if why:
        yield Examined(UNSEEN, "trial job", printable(why, 400), do)
    if isinstance(seen.trial, NotSeen):
        yield Examined(UNSEEN, "trial job", seen.trial.why, "squeue --me --start   (when Slurm would start it)")
    if not isinstance(seen.trial, TrialSeen):
        return
    found = seen.trial
    if found.signal_lead is None:
        what = (
            f"the warning signal did not reach job {found.job} before its limit: members would be killed as they train"
        )
        do = f"{_ADMIN}why sbatch --signal=B:USR1@30 sends none (a filter of sbatch, or its wrapper, may take it out)"
        yield Examined(WRONG, "signal", what, do)
    else:
        yield Examined(OK, "signal", f"it came {found.signal_lead:.0f} s before the limit of job {found.job}")
    if found.python is not None:
        yield _judge_python("job's python", found.python, seen)
    wrong = [*_of_place(f"run directory on {found.host}", found.place._replace(local_kind=""), run, seen)]
    yield from wrong or [Examined(OK, f"run directory on {found.host}", "it takes files there")]
    yield from _of_the_switch(found)
    if found.memory is not None:
        yield from _judge_memory(found.memory, found.host)
    yield from _of_the_nodes(found)


def _of_the_switch(found: TrialSeen) -> Iterator[Examined]:
    if found.switch_after is None:
        what = f"{found.host} did not see a file that was touched here: a switch would not be seen"
        yield Examined(WRONG, "switch", what, "set run_dir: to a directory that this machine and the nodes share")
    else:
        slow = found.switch_after > _SLOW_SWITCH
        do = (
            "mount the file system with acregmax=3,acdirmax=3 (NFS), or wait as long after: ftsupervise kill"
            if slow
            else ""
        )
        what = f"a touched switch is seen on {found.host} after {found.switch_after:.1f} s"
        yield Examined(WRONG if slow else OK, "switch", what, do)
    if found.ahead is not None:
        wrong = abs(found.ahead) > _CLOCK
        what = f"the clock of {found.host} is {abs(found.ahead):.1f} s {'ahead of' if found.ahead > 0 else 'behind'} this one"
        yield Examined(
            WRONG if wrong else OK, "job's clock", what, f"{_ADMIN}chronyc tracking, on {found.host}" if wrong else ""
        )


def _of_the_nodes(found: TrialSeen) -> Iterator[Examined]:
    for one in found.nodes:
        if not one.sees:
            what = f"{one.node} does not see what was made beside the run directory"
            yield Examined(WRONG, "nodes", what, "set run_dir: to a directory that all nodes share")
        if one.reached:
            what = f"{one.node} does not reach a port of {found.host}: {printable(one.reached, 200)}"
            do = f"{_ADMIN}open ports above 1024 between nodes; NCCL_SOCKET_IFNAME names another network"
            yield Examined(WRONG, "ports", what, do)
    if found.nodes and all(one.sees and not one.reached for one in found.nodes):
        yield Examined(OK, "nodes", f"{count(len(found.nodes), 'node')} see the run directory and reach {found.host}")


EXAMINATIONS: tuple[Examination, ...] = (
    controller,
    settings_of_the_cluster,
    partition,
    limits,
    places,
    messages,
    cron,
    account,
    script,
    python,
    watchdogs,
    memory,
    trial,
)
