"""The plan of a launch: pure. ``launch --dry-run`` prints a ``Plan`` and ends; ``submit`` carries it out.

Why the options are as they are (facts measured on real Slurm): ``--signal=B:`` reaches the batch shell, which the
supervisor has replaced by ``exec``, so that the ranks get the warning through any launcher; ``--no-kill`` in an
array with ``%1`` starts the next member beside a shrunken one, so runs with spare nodes are chained one by one.
"""

from __future__ import annotations

import os
import re
import shlex
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from keyword import iskeyword
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.config.grouping import GROUP_SETTINGS
from ftsupervise.config.supervisor import BY_KEY, RETAIN, Form, Setting
from ftsupervise.errors import ConfigError
from ftsupervise.host import processes
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.launch.shell_code import Kind, in_a_shell, understand, words_before_a_program
from ftsupervise.rundir.observing import phrase
from ftsupervise.rundir.paths import whole_run
from ftsupervise.scheduler import SLURM
from ftsupervise.scheduler.ownership import comment
from ftsupervise.scheduler.parse import srun, srun_options
from ftsupervise.units import format_slurm_time

if TYPE_CHECKING:
    from ftsupervise.config.schema import Launch, Run
    from ftsupervise.nodes.judging import JudgedNode

SbatchOptions = Mapping[str, str | None]  # by sbatch's long names; None: it has no value
_EXPEDITED, _PLAIN, _NEVER = ("requeue", "expedite"), ("requeue", None), ("no-requeue", None)
_KNOWN_AT_LAUNCH = ("%%", "%x", "%u")  # sbatch's patterns that are the same for all jobs of a chain
PREVIOUS = "ID-OF-THE-JOB-BEFORE"  # stands in a daisy chain's plan until the job before has its id
# Key of ``launch`` -> option of sbatch, where the value is passed on as it stands.
_PASSED_ON = (
    ("partition", "partition"),
    ("account", "account"),
    ("qos", "qos"),
    ("constraint", "constraint"),
    ("reservation", "reservation"),
    ("mem", "mem"),
    ("mem_per_cpu", "mem-per-cpu"),
    ("mem_per_gpu", "mem-per-gpu"),
    ("tasks_per_node", "ntasks-per-node"),
    ("cpus_per_task", "cpus-per-task"),
    ("gpus_per_node", "gpus-per-node"),
    ("gres", "gres"),
    ("hint", "hint"),
    ("licenses", "licenses"),
)
_TASKS = ("--ntasks", "-n", "--ntasks-per-node")
_NODES = ("--nodes", "-N", "--nodelist", "-w", *_TASKS)
_ONE_SRUN = 'write one srun and its program alone: command: "srun python train.py --lr $LR"'


@dataclass(frozen=True)
class PlannedGroup:
    """The chain of one replica group."""

    options: SbatchOptions
    command: tuple[str, ...]


@dataclass(frozen=True)
class Plan:
    """One launch. ``submissions`` is 1 for an array, ``members`` for a daisy chain, and one for each group and the
    lighthouse for groups.
    """

    name: str
    token: str
    kind: str  # of the scheduler
    chain: str  # "array", "daisy", or "groups": an array for each replica group
    members: int
    run_dir: Path
    workdir: Path
    options: SbatchOptions  # without the dependency, in which the links of a daisy chain differ
    after: str  # the running job this chain attaches to, or ""
    command: tuple[str, ...]  # the command that replaces the script by exec
    avoided: tuple[str, ...] = ()  # nodes excluded because of their incidents, not by the settings
    notes: tuple[str, ...] = ()  # notes for the person
    config: Path | None = None  # the settings file, to be found again by the run's name
    groups: tuple[PlannedGroup, ...] = ()  # each with a chain of its own, after that of the lighthouse
    assignments: tuple[str, ...] = ()  # NAME=value before the command, as the person wrote them before their srun
    least_nodes: int = 0  # without the spare ones; 0: there are none
    observe: tuple[str, ...] = ()  # decisions that are only told
    umask: str = ""  # by which others could open the job's output to write; the script sets it once Slurm has made that
    own_workdir: bool = False  # the token of this launch: a job that finds another account's folder there does nothing

    @property
    def submissions(self) -> int:
        return self.members if self.chain == "daisy" else 1 + len(self.groups)

    def part(self, index: int) -> Plan:
        """Return the part of submission ``index`` alone: that of a group has options and a command of its own."""
        if index == 0 or not self.groups:
            return self
        one = self.groups[index - 1]
        return replace(self, options=one.options, command=one.command, groups=())

    def token_of(self, index: int) -> str:
        return self.token if self.submissions == 1 else f"{self.token}.{index + 1}"

    def link(self, index: int, previous: str = PREVIOUS) -> SbatchOptions:
        """Return the options of submission ``index`` (from 0); ``previous``: the ids of those before, with colons between them.

        It waits for all of them: one that waits for the last alone would begin beside the first when that one is cancelled.
        """
        before = self.after if index == 0 or self.groups else ":".join(filter(None, (self.after, previous)))
        options = dict(self.part(index).options)
        options["comment"] = comment(self.name, self.token_of(index))  # a token of its own: each can be found again
        if index and self.least_nodes:  # a successor does not wait for spare nodes: a lost node may be why it begins
            options["nodes"] = f"{self.least_nodes}-{options['nodes']}"
        return {**options, "dependency": f"afterany:{before}"} if before else options


def plan(
    run: Run,
    *,
    kind: str,
    token: str,
    workdir: Path,
    python: str,
    after: str = "",
    exclude: tuple[str, ...] = (),
    avoid: Sequence[JudgedNode] = (),
) -> Plan:
    """Return the launch of ``run`` on a scheduler of ``kind``. Raises ConfigError where the settings do not fit
    together.

    ``exclude``: nodes the person names now; ``avoid``: those that are excluded because of their score.
    """
    launch, groups = run.launch, run.launch.replica_groups
    assert run.run_dir is not None
    _check_that_it_fits(run, kind)
    apart = groups is not None and groups.in_ == "jobs"
    chain = "groups" if apart else "daisy" if _outlives_a_node(launch) else launch.chain
    theirs = {node for text in (*launch.exclude, *exclude) for node in expand_hostlist(text)}
    avoided = tuple(node.name for node in avoid if node.name not in theirs)
    options = _options(run, array=chain != "daisy", token=token, workdir=workdir, exclude=(*exclude, *avoided))
    trains = train_command(launch, kind)
    of_groups: tuple[PlannedGroup, ...] = ()
    if groups is not None and apart:
        commands = [(*in_its_job(run, token, python, number), *trains) for number in range(groups.count)]
        of_groups = tuple(PlannedGroup(options, command) for command in commands)
        options = _of_the_lighthouse(options)
    return Plan(
        name=run.name,
        token=token,
        kind=kind,
        chain=chain,
        members=launch.jobs,
        run_dir=run.run_dir,
        workdir=workdir,
        options=options,
        after=after,
        command=(*_supervisor(run, token, python), *trains),
        avoided=avoided,
        notes=(*_of_observing(run.act.observed, run.run_dir), *_notes(launch, kind, avoid)),
        observe=run.act.observed,
        groups=of_groups,
        assignments=understand(launch.command).assignments,
        least_nodes=launch.job_nodes if launch.spare_nodes else 0,
    )


def _check_that_it_fits(run: Run, kind: str) -> None:
    """Raises ConfigError where settings that are fine each do not fit together, or not to a scheduler of ``kind``."""
    launch = run.launch
    assert run.run_dir is not None
    if (whole := whole_run(run.run_dir)) is not None:
        raise ConfigError(
            f"run_dir: {run.run_dir} is the path of a replica group of the run in {whole}: it would obey the switches there",
            hint="give the directory another name than groups/g and digits",
        )
    _check_resume(launch)
    if kind == SLURM:
        _check_output(run)
    if launch.replica_groups is None or launch.replica_groups.in_ != "jobs":
        return
    if kind != SLURM:
        raise ConfigError(
            f"launch.replica_groups: in: jobs needs Slurm (scheduler: {kind})",
            hint="in: allocation runs all groups in one",
        )
    if launch.spare_nodes:
        raise ConfigError(
            "launch.spare_nodes: a replica group with a job of its own cannot have spare nodes yet",
            hint="its next member takes over on other nodes; in: allocation has spare nodes",
        )


def _check_resume(launch: Launch) -> None:
    """Raises ConfigError for words that would reach no program."""
    if not launch.resume:
        return
    try:
        shlex.split(launch.resume)
    except ValueError as error:
        raise ConfigError(f"launch.resume: {error}", hint="write words, as in a shell: --resume {checkpoint}") from None
    found = understand(launch.command)
    of_a_shell = found.kind in (Kind.CODE, Kind.AROUND) or "-c" in found.words[:3]
    if of_a_shell and "FTSUPERVISE_RESUME" not in " ".join(found.words):
        raise ConfigError(
            "launch.resume: launch.command is shell code, so nothing says which of its programs gets the words",
            hint="write $FTSUPERVISE_RESUME where they belong: command: python train.py $FTSUPERVISE_RESUME | tee log",
        )


def _check_output(run: Run) -> None:
    """Raises ConfigError for a path of the jobs' output that Slurm cannot open: a member then ends before anything starts."""
    given = {"launch.output": run.launch.output, "launch.error": run.launch.error}
    if run.launch.output is None:
        given["run_dir"] = str(run.run_dir)
    for key, path in given.items():
        if path is not None and "\\" in path:
            raise ConfigError(
                f"{key}: {path} holds a backslash, and Slurm then fills in no pattern (%j, %x) and drops the backslash",
                hint="give it a name without a backslash",
            )
        folder = "" if path is None or key == "run_dir" else path.rpartition("/")[0]
        differs = [one for one in re.findall(r"%%|%\d*[A-Za-z]", folder) if one not in _KNOWN_AT_LAUNCH]
        if differs:
            name = f"{folder.partition(differs[0])[0]}%x-%A_%a.out"
            raise ConfigError(
                f"{key}: the folder {folder} differs from job to job ({differs[0]}), and Slurm before 24.11 makes no folder: "
                "its members would end before anything starts",
                hint=f"put the job's number into the file's name, such as {name}",
            )


def output_folders(run: Run) -> tuple[Path, ...]:
    """Return the folders that the jobs' output needs beside the run directory's own: Slurm makes none of them."""
    import pwd

    values = {"%%": "%", "%x": run.name}
    found = []
    for path in (run.launch.output, run.launch.error):
        folder = "" if path is None else path.rpartition("/")[0]
        if "%u" in folder:
            values["%u"] = pwd.getpwuid(os.geteuid()).pw_name
        if folder:
            found.append(Path(re.sub(r"%%|%[xu]", lambda one: values.get(one[0], one[0]), folder)))
    return tuple(dict.fromkeys(found))


class Requeue(NamedTuple):
    """What Slurm does with a member that has lost a node: the option of sbatch with its value, and why."""

    asked: tuple[str, str | None]
    why: str

    @property
    def option(self) -> str:
        return word(*self.asked)


def word(name: str, value: str | None) -> str:
    """Return an option as a word of the command line: --requeue=expedite."""
    return f"--{name}" if value is None else f"--{name}={value}"


def wants_expedited(launch: Launch) -> bool:
    """Return whether the run is better off with expedited requeue: the loss of a node ends its job, and nobody has decided
    otherwise."""
    return launch.requeue is None and launch.replica_groups is None and not _outlives_a_node(launch)


def requeue_of(launch: Launch, *, expedites: bool | None) -> Requeue:
    """Return the choice. ``expedites``: whether the cluster offers expedited requeue; None: it has not been asked."""
    if launch.requeue is not None:
        return Requeue(_PLAIN if launch.requeue else _NEVER, f"launch.requeue is {str(launch.requeue).lower()}")
    if not wants_expedited(launch):
        why = (
            "each group begins again by itself"
            if launch.replica_groups
            else "the job goes on without a node that it loses"
        )
        return Requeue(_NEVER, why)
    if expedites:
        return Requeue(_EXPEDITED, "a member that loses a node begins again at once on its other nodes and a free one")
    where = "SlurmctldParameters has no enable_expedited_requeue, or Slurm is older than 25.11"
    asked = where if expedites is False else f"not asked yet; {word(*_EXPEDITED)} where scontrol show config offers it"
    return Requeue(_NEVER, f"the next member takes over after the loss of a node ({asked})")


def requeued(made: Plan, launch: Launch, *, expedites: bool | None) -> Plan:
    """Return the plan ``made`` for a cluster of which that is known; it was made for one that does not offer it."""
    if expedites is False or made.kind != SLURM or not wants_expedited(launch):
        return made
    choice = requeue_of(launch, expedites=expedites)
    options = {name: value for name, value in made.options.items() if name != _NEVER[0]}
    return replace(
        made, options={**options, **dict([choice.asked])}, notes=(f"{choice.option}: {choice.why}", *made.notes)
    )


def _of_observing(of: tuple[str, ...], run_dir: Path) -> tuple[str, ...]:
    return (f"{phrase(of)} (to act on them: ftsupervise observe --off {shlex.quote(str(run_dir))})",) if of else ()


def _notes(launch: Launch, kind: str, avoid: Sequence[JudgedNode]) -> tuple[str, ...]:
    """Sentences for the person about choices that the settings do not name."""
    notes = []
    if _outlives_a_node(launch) and launch.chain == "array":
        asks = "replica_groups" if launch.replica_groups else "spare_nodes" if launch.spare_nodes else "min_nodes"
        notes.append(
            f"{asks} asks Slurm for --no-kill, which makes an array's %1 start two members at once after a node "
            "failure; the jobs are chained by --dependency instead"
        )
    if launch.time is None and kind == SLURM:
        notes.append(
            "no launch.time: the partition's default limit applies, and the warning before it may come too late "
            'to save; set it, such as time: "20:00:00"'
        )
    notes += _of_its_sruns(launch, kind)
    notes += [f"{node.name} is excluded: {node.why} (ftsupervise nodes)" for node in avoid]
    return tuple(notes)


def _supervisor(run: Run, token: str, python: str) -> tuple[str, ...]:
    """The command line of the supervisor, up to the command that it runs."""
    groups = run.launch.replica_groups
    settings = words_of_one(run) if groups is None else words_of_the_whole(run)
    own = processes.own_command(
        "run", "--run-dir", str(run.run_dir), "--launched", token, *settings, "--", python=python
    )
    return (*own, *(in_groups(run, token, python) if groups else ()))


_LARGE = frozenset((
    "no-kill", "ntasks-per-node", "ntasks-per-gpu", "ntasks-per-socket", "cpus-per-task", "cpus-per-gpu",
    "gpus", "gpus-per-node", "gpus-per-task", "gpus-per-socket", "gres", "exclusive", "nodelist", "nodefile",
))  # fmt: skip
_MEMORY = frozenset(("mem", "mem-per-cpu", "mem-per-gpu"))


def _of_the_lighthouse(options: SbatchOptions) -> SbatchOptions:
    """Return ``options`` of a group's job, changed for the small one that serves all groups and trains nothing."""
    small = {name: value for name, value in options.items() if name not in _LARGE | _MEMORY}
    return {**small, "nodes": "1", "ntasks": "1", **({"mem": "2G"} if _MEMORY & options.keys() else {})}


def _options(run: Run, *, array: bool, token: str, workdir: Path, exclude: tuple[str, ...]) -> SbatchOptions:
    launch = run.launch
    assert run.run_dir is not None
    number = "%A_%a" if array and launch.jobs > 1 else "%j"  # outside of an array Slurm makes %a 4294967294
    outlives = _outlives_a_node(launch)
    asked = {
        "job-name": run.name,
        "comment": comment(run.name, token),
        "chdir": workdir,
        "output": launch.output or f"{str(run.run_dir).replace('%', '%%')}/logs/%x-{number}.out",
        "error": launch.error or None,
        "open-mode": "append",
        "nodes": launch.job_nodes + launch.spare_nodes,
        "signal": f"B:{warning_option(launch)}",
        "array": f"1-{launch.jobs}%1" if array and launch.jobs > 1 else None,
        "time": format_slurm_time(launch.time) if launch.time else None,
        **{option: getattr(launch, key) for key, option in _PASSED_ON},
        "ntasks": None if outlives else launch.ntasks,  # the spare nodes start none: srun is told the number
        "exclusive": launch.exclusive if isinstance(launch.exclusive, str) else None,
        "exclude": ",".join((*launch.exclude, *exclude)) or None,
    }
    options: dict[str, str | None] = {name: str(value) for name, value in asked.items() if value is not None}
    options |= dict([requeue_of(launch, expedites=False).asked])
    options |= {name: None for name, on in (("no-kill", outlives), ("exclusive", launch.exclusive is True)) if on}
    for name, given, value in (one.removeprefix("--").partition("=") for one in launch.sbatch):
        options[name] = value if given else None
    return options


def train_command(launch: Launch, kind: str) -> list[str]:
    """Return the command as an argv: through srun on Slurm, as it stands on this machine.

    One srun of the person's becomes ours, with its options kept. Code that calls srun in another way runs once in the job,
    around its sruns: another srun around it would never end.
    """
    found = understand(launch.command, launch.signal)
    words, container = list(found.words), _container(launch)
    if kind != SLURM:
        if found.kind is Kind.SRUN:
            raise ConfigError(
                f"launch.command starts with srun, but the scheduler is not Slurm (scheduler: {kind})",
                hint="leave srun out: ftsupervise adds it on Slurm (launch.srun_options)",
            )
        return [*container, *words]
    if found.kind is Kind.AROUND:
        return _around(launch, words, container)
    if found.kind is Kind.SRUN:
        at = srun_options(words)[1]
        theirs, program = words[1 : at - (words[at - 1] == "--")], words[at:]
        if not launch.srun:
            return [words[0], *theirs, *container, *program]
        return [words[0], *_ours(launch, theirs), *theirs, *container, *program]
    if not launch.srun:
        return [*container, *words]
    return [*srun(*_ours(launch, launch.srun_options)), *container, *words]


def _ours(launch: Launch, given: Sequence[str]) -> list[str]:
    """Return the options that an srun gets from us, before those ``given``: of two equal ones srun takes the last."""
    found = list(launch.srun_options)
    if not _has(
        [*found, *given], "--kill-on-bad-exit", "-K"
    ):  # without it srun waits for ranks that wait for a dead one
        found.insert(0, "--kill-on-bad-exit=1")
    if _outlives_a_node(launch):
        # sbatch's own numbers, which srun would take over, count the spare nodes and the lost ones too
        if not _has(given, "--nodes", "-N"):
            found.append(f"--nodes={launch.command_nodes}")
        if not _has(given, *_TASKS):
            found.append(f"--ntasks={_ranks(launch)}")
    if launch.cpus_per_task is not None and not _has(given, "--cpus-per-task", "-c"):
        found.append(f"--cpus-per-task={launch.cpus_per_task}")  # srun has not taken it over from sbatch since 22.05
    return found


def _container(launch: Launch) -> list[str]:
    if not launch.container:
        return []
    if not isinstance(launch.container, str):
        return list(launch.container)
    try:
        return list(words_before_a_program(launch.container))
    except ValueError:
        raise ConfigError(
            "launch.container: its words stand before those of the command, so they cannot be more than one command",
            hint="write the words alone, such as apptainer exec --nv image.sif; other lines go to launch.setup",
        ) from None


def _around(launch: Launch, words: list[str], container: list[str]) -> list[str]:
    """Return the command for code that calls srun itself. Raises ConfigError for settings that only our srun could carry."""
    wanted = {"container": bool(container), "replica_groups": launch.replica_groups is not None}
    for key in (key for key, given in wanted.items() if given):
        raise ConfigError(
            f"launch.command calls srun inside shell code, which launch.{key} cannot reach",
            hint=f"{_ONE_SRUN}; the other lines go to launch.setup",
        )
    code = words[-1]
    stops = any(re.fullmatch(r"-K1?|--kill-on-bad-exit(=1)?", option) for option in launch.srun_options)
    if not isinstance(launch.command, str) or not launch.srun or not stops:
        return words
    body = code.removeprefix(in_a_shell("", launch.signal)[-1])
    return list(in_a_shell(body, launch.signal, "export SLURM_KILL_BAD_EXIT=${SLURM_KILL_BAD_EXIT:-1}\n"))


def _outlives_a_node(launch: Launch) -> bool:
    """Return whether the job goes on without a node that it has lost."""
    if launch.replica_groups is not None and launch.replica_groups.in_ == "allocation":
        return True
    return launch.spare_nodes > 0 or (launch.min_nodes is not None and launch.min_nodes < launch.nodes)


def _ranks(launch: Launch) -> int:
    return launch.ntasks or launch.command_nodes * (launch.tasks_per_node or 1)


def _has(words: Sequence[str], *options: str) -> bool:
    """Return whether one of these srun options is among ``words``: --ntasks=8, --ntasks 8, -n8, -n $N."""
    short = tuple(one for one in options if not one.startswith("--"))
    return any(word.partition("=")[0] in options or (word[:2] in short and word[2:3] not in "=") for word in words)


def _of_its_sruns(launch: Launch, kind: str) -> list[str]:
    """Return what a person has to know of a command that calls srun in its own way, or not through ours."""
    found = understand(launch.command)
    if kind != SLURM or launch.replica_groups is not None:
        return []
    notes = []
    if found.kind is Kind.AROUND and launch.srun:
        notes.append(
            "launch.command calls srun itself, inside shell code: the code runs once in the job, and launch.srun_options "
            f"are not added to its sruns. To have ftsupervise place the ranks, {_ONE_SRUN}"
        )
    own = found.kind is Kind.AROUND or not launch.srun
    if not launch.spare_nodes or not own or "FTSUPERVISE_NODES" in " ".join(found.words):
        return notes
    if found.kind is Kind.SRUN and _has(found.words, *_NODES):
        return notes
    how = f"--nodes={launch.nodes} --ntasks={_ranks(launch)}"
    said = "spare_nodes: the command asks for no number of nodes, and may take the spare ones too"
    return [*notes, f"{said}; its srun needs {how} (or leave srun to ftsupervise)"]


# ------------------------------------------------------------------------------------------
# The settings of a run as words of the batch script: options of ``ftsupervise run``, and of ``ftsupervise groups run``.


# The supervisor of a run of replica groups supervises the process that starts the groups: it has no ranks of its own,
# no hang detector and nothing to keep warm. Each group's supervisor has these.
_WARN = timedelta(minutes=10)
_OBSERVE = "act.observed"
_WHOLE = (
    *(f"launch.restart.{word}" for word in ("in_place", "same_failure", "back_off", "stop_within")),
    RETAIN,
    _OBSERVE,
)


def warning_lead(launch: Launch) -> timedelta:
    """Return the time from the warning to the limit: ``warn``, else 10 minutes, but at most half the limit."""
    if launch.warn is not None:
        return launch.warn
    return min(_WARN, launch.time / 2) if launch.time else _WARN


def warning_option(launch: Launch) -> str:
    """Return when and by what signal Slurm warns, as in sbatch's --signal: USR1@600."""
    return f"{launch.signal}@{max(1, int(warning_lead(launch).total_seconds()))}"


def _warning(run: Run) -> list[str]:
    return [] if run.launch.signal == "USR1" else ["--warning", warning_option(run.launch)]


def words_of_one(run: Run) -> list[str]:
    """Return the options of the supervisor of a run without replica groups."""
    return [*words_of(run), *_warning(run)]


def words_of_the_whole(run: Run) -> list[str]:
    settings = [BY_KEY[key] for key in _WHOLE]
    none = ("--hang", "off", "--warm", "off", "--snapshot-every", "off", "--distributed", "never")
    return [*words_of(run, settings), *_warning(run), *none]


def in_groups(run: Run, token: str, python: str) -> list[str]:
    """Return the words before the command that start it once for each replica group."""
    return [*processes.own_command("groups", "run", python=python), *_of_the_groups(run, token)]


def in_its_job(run: Run, token: str, python: str, number: int) -> list[str]:
    """Return the same for one group that has a job of its own."""
    member = ("member", "--number", str(number), "--run-dir", str(run.run_dir), "--name", run.name)
    return [*processes.own_command("groups", *member, python=python), *_of_the_groups(run, token)]


def _of_the_groups(run: Run, token: str) -> list[str]:
    """Return the settings of the groups, and those of each one's supervisor."""
    left_out = {RETAIN, *_OF_A_SCRIPT}  # the run's supervisor removes for all groups
    left_out |= set() if _says_when_it_hangs(run) else {_HANG}
    each = [one for one in BY_KEY.values() if one.key not in left_out]
    groups = words_of(run, [one for one in GROUP_SETTINGS if one.key])
    return ["--launched", token, *groups, "--", *words_of(run, each), *_warning(run), "--"]


_HANG = "launch.restart.hang.at_least"
_OF_A_SCRIPT = ("launch.resume", "launch.finished_by")  # without a guard, which every group has


def _says_when_it_hangs(run: Run) -> bool:
    """Return whether a hang's bound is given; without one it follows from the timeouts of the groups."""
    hang = run.launch.restart.hang
    return hang is None or hang.at_least != type(hang)().at_least


def words_of(run: Run, settings: Iterable[Setting] = BY_KEY.values()) -> list[str]:
    """Return the settings of ``run`` in the batch script: those that differ from the default, and a few that people
    search for.
    """
    found: list[str] = []
    for setting in settings:
        value = _value(run, setting)
        if value is ...:
            continue
        if value is None and setting.off is not None:
            found += [setting.flag, setting.off] if setting.default is not None else []
        elif value is not None and (setting.always or value != setting.default):
            found += [word for text in _texts(setting.form, value) for word in (setting.flag, text)]
    return found


def _value(run: Run, setting: Setting) -> Any:
    """Return seconds as a number; None where it is null, or its section; ... to leave out a section that is null."""
    value: Any = run
    *sections, last = setting.key.split(".")
    for name in sections:
        value = getattr(value, name)
        if value is None:
            return None if setting.off is not None else ...
    value = getattr(value, f"{last}_" if iskeyword(last) else last)
    return value.total_seconds() if isinstance(value, timedelta) else value


def _texts(form: Form, value: Any) -> list[str]:
    if form is Form.CHOICES:
        return list(value)
    if form is Form.COUNTS:
        return [f"{kind}={number}" for kind, number in value.items()]
    if form is Form.SET:
        return ["on"]
    if form is Form.MODULES:
        return [value if isinstance(value, str) else ",".join(value) or "off"]
    return [f"{value:g}" if isinstance(value, float) else str(value)]
