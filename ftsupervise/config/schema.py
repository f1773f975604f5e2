"""The whole of ``ftsupervise.yaml`` as frozen values. It works with nothing but ``name`` and ``launch.command``.

The text under each attribute is its description in ``ftsupervise config schema``, and so in an editor.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ftsupervise.checkpoints.retain import ALWAYS, Better, Retention
from ftsupervise.config.acting import Act, ActOrWord
from ftsupervise.config.alerting import Alerts
from ftsupervise.config.fields import (
    Duration,
    JobFile,
    Lines,
    Matching,
    Off,
    Positive,
    Share,
    Size,
    Strict,
    TimeLimit,
    declared,
    off_is_null,
    wrong_at,
)
from ftsupervise.config.grouping import GROUP_KEYS, least_of
from ftsupervise.config.slurm_options import (
    KEYS,
    Constraint,
    Gpus,
    Gres,
    Licenses,
    Memory,
    Module,
    Name,
    Names,
    Nodes,
    RunName,
    SbatchOption,
    Signal,
    SrunOption,
    VariableName,
    VariableValue,
    option_name,
)
from ftsupervise.config.watchdogs import Pattern, Watch
from ftsupervise.scheduler import SCHEDULERS
from ftsupervise.secrecy import assigned, by_name

# The ``launch.restart:`` section: the reaction to a command that fails or stands still.

ModuleName = Annotated[
    str, Matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a Python module", "torch.distributed")
]
_Warm = Literal["auto"] | tuple[ModuleName, ...]
Kind = Literal["code", "signal", "memory", "node", "disk", "start", "hang", "numbers", "lost"]


class HangSettings(Strict):
    """The time after which a hung command is ended and started again."""

    at_least: Annotated[Duration, Positive] = declared("launch.restart.hang.at_least")
    start: Annotated[Duration, Positive] = declared("launch.restart.hang.start")
    unknown: Annotated[Duration, Positive] = declared("launch.restart.hang.unknown")


class Restart(Strict):
    """The reaction to a failed command: start it again in the same job, leave it to the next member, or stop the chain."""

    in_place: int = declared("launch.restart.in_place")
    same_failure: int = declared("launch.restart.same_failure")
    budgets: dict[Kind, Annotated[int, Field(ge=1, le=1000)]] = declared("launch.restart.budgets")
    back_off: Duration = declared("launch.restart.back_off")
    stop_within: Annotated[Duration, Positive] = declared("launch.restart.stop_within")
    space_wait: Duration = declared("launch.restart.space_wait")
    warm: Annotated[_Warm | None, off_is_null(_Warm | None | Off)] = declared("launch.restart.warm")
    hang: Annotated[HangSettings | None, off_is_null(HangSettings | None | Off)] = HangSettings()
    """When a command that stands still is ended; null: never."""


# ------------------------------------------------------------------------------------------


# Checks the ``launch.replica_groups:`` section: several copies of the training, of which one may fail.

_KEY = "launch.replica_groups"


class ReplicaGroups(Strict):
    """Runs the training as replica groups, which agree on each step by torchft: one may fail, and the others train on."""

    count: int = declared(f"{_KEY}.count")
    nodes_each: int = declared(f"{_KEY}.nodes_each")
    min: Literal["majority"] | Annotated[int, Field(ge=1, le=999)] = Field(
        "majority", description=GROUP_KEYS[f"{_KEY}.min"].help
    )
    in_: Literal["allocation", "jobs"] = Field("allocation", alias="in", description=GROUP_KEYS[f"{_KEY}.in"].help)
    lighthouse: Literal["torchft", "none"] = declared(f"{_KEY}.lighthouse")
    slowest_step: Annotated[Duration, Positive] = declared(f"{_KEY}.slowest_step")
    sync_period: Duration = declared(f"{_KEY}.sync_period")
    state: Size = declared(f"{_KEY}.state")

    @model_validator(mode="after")
    def _enough(self) -> ReplicaGroups:
        if self.least > self.count:
            raise wrong_at(("min",), f"more than count ({self.count}): the run would wait for ever")
        if 2 * self.least <= self.count:
            raise wrong_at(
                ("min",),
                f"at most half of {self.count} groups: two halves could train apart; write {self.count // 2 + 1} or more",
            )
        return self

    @property
    def least(self) -> int:
        """Return the fewest groups that train on."""
        return least_of(self.min, self.count)


# ------------------------------------------------------------------------------------------


# The ``launch.heartbeat:`` section: progress of a command without the guard.


class HeartbeatSettings(Strict):
    """Progress of a command that has no guard in its loop, from what it writes anyway."""

    log: Literal["auto"] | Pattern | Literal[""] = declared("launch.heartbeat.log")
    file: Path | None = declared("launch.heartbeat.file")

    @model_validator(mode="after")
    def _says_where(self) -> HeartbeatSettings:
        if not self.log and self.file is None:
            raise ValueError(
                "write log: the regular expression of a step (or auto), file: a file that the command touches, or both"
            )
        return self


# ------------------------------------------------------------------------------------------


# The ``guard:`` section: the guard's checks inside the training loop.

_LossAction = Literal["warn", "stop", "resume"]


class LossSettings(Strict):
    """The reaction when the loss that the loop gives to ``guard.loss()`` is no number, or diverges."""

    nonfinite: _LossAction = declared("guard.loss.nonfinite")
    diverging: Annotated[_LossAction | None, off_is_null(_LossAction | None | Off)] = declared("guard.loss.diverging")
    tolerate: int = declared("guard.loss.tolerate")
    patience: int = declared("guard.loss.patience")
    back: int = declared("guard.loss.back")


class GuardSettings(Strict):
    """The checks of the guard inside the training loop."""

    poll: Annotated[Duration, Positive] = declared("guard.poll")
    memory: Share | None = declared("guard.memory")
    gpu_memory: Share | None = declared("guard.gpu_memory")
    stop_before: Annotated[Duration, Positive] | None = declared("guard.stop_before")
    run_for: Annotated[Duration, Positive] | None = declared("guard.run_for")
    loss: LossSettings = LossSettings()
    """A loss that is no number, or that diverges."""


# ------------------------------------------------------------------------------------------


# The ``checkpoints:`` section: the folder of the checkpoints, those that are kept, and the places of copies.


class RetainSettings(Strict):
    """Checkpoints to keep; the others are removed while the run trains, and by ``ftsupervise checkpoints prune``. The two
    newest verified ones, and each one in use, are always kept."""

    last: Annotated[int, Field(ge=ALWAYS)] = ALWAYS
    """Keep this many of the newest."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Keep the first one of each stretch of this many steps."""
    best: Annotated[int, Field(ge=0)] = 0
    """Keep this many of the best by ``metric``."""
    metric: str = ""
    """A metric that ``guard.checkpoint(metrics=...)`` or ``ftsupervise checkpoints commit --metric`` reported."""
    better: Literal["low", "high"] = "low"
    """Whether the highest or the lowest value of the metric is the best."""
    copied: bool = False
    """Remove only checkpoints that have a copy elsewhere (``checkpoints.offload``)."""
    before_full: bool = False
    """The disk watchdog may prune when the disk is about to be full."""

    @model_validator(mode="after")
    def _metric_for_best(self) -> RetainSettings:
        if self.best and not self.metric:
            raise ValueError("best: needs metric: which one, as guard.checkpoint(metrics=...) reports it")
        return self

    @property
    def policy(self) -> Retention:
        return Retention(self.last, self.every, self.best, self.metric, Better(self.better), self.copied)


class OffloadSettings(Strict):
    """The places for copies of the checkpoints. ``ftsupervise checkpoints offload`` makes them, from the crontab as a rule."""

    to: tuple[str, ...]
    """A folder, or an object store as fsspec writes it (s3://bucket/prefix), or a list of both. The store's package finds the
    credentials: in the environment, in its own file."""
    rate: Size | None = None
    """Bytes a second at most, such as 200MB."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("to")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(place.strip() for place in value):
            raise ValueError("names no place: write to: s3://bucket/prefix, or a folder")
        for place in value:
            if not place.startswith(("/", "~")) and "://" not in place:
                raise ValueError(f"{place!r} is no absolute path: copies are made from wherever the command runs")
        return value


class CheckpointSettings(Strict):
    """The folder of the run's checkpoints, and the verification before the run goes on from one."""

    path: Path | None = declared("checkpoints.path")
    pattern: str = "*"
    """Names of checkpoints, with * and ? as in a shell."""
    every: Annotated[Duration, Positive] | None = declared("checkpoints.every")
    verify: Literal["sizes", "quick", "sampled", "full"] = declared("checkpoints.verify")
    torn: Literal["set-aside", "tell"] = declared("checkpoints.torn")
    incremental: int = declared("checkpoints.incremental")
    adopt: bool = False
    """Write the manifests of checkpoints that another program completed (ftsupervise checkpoints upkeep)."""
    snapshot_every: int | None = declared("checkpoints.snapshot_every")
    snapshot_copies: Share = declared("checkpoints.snapshot_copies")
    snapshot_wait: Duration | None = declared("checkpoints.snapshot_wait")
    retain: RetainSettings | None = None
    """The checkpoints to keep. Without it none is removed."""
    offload: OffloadSettings | None = None
    """The places for copies. Without it none are made."""


# ------------------------------------------------------------------------------------------


# The ``cron:`` section: where the crontab emulation lives, how often it ticks, and how small its jobs are. Read by
# ``ftsupervise cron install``, which writes what it decided into the installed folder; a tick reads only that.

Times = Annotated[
    str,
    Matching(r"@[a-z]+|[^@\s]\S*(?: +\S+){4}", "minute, hour, day of month, month and day of week", "17 * * * *"),
]


class Cron(Strict):
    """A crontab for clusters without one."""

    directory: Path | None = None
    """The installed folder, the same on all nodes. Default: cron beside your own config.yaml."""
    backend: Literal["auto", "slurm", "scrontab", "crontab", "loop"] = "auto"
    """The back end that starts each slot: a chain of small Slurm jobs, scrontab, crontab, or a loop that a person starts."""
    period: Annotated[Duration, Positive] = timedelta(minutes=5)
    """The time between slots, which lie on the wall clock. Below 5m a busy Slurm cannot keep up."""
    spares: Annotated[int, Field(ge=2, le=20)] = 3
    """The number of next slots whose jobs always wait in the queue; all but one of them may be lost in a row."""
    limit: Annotated[Duration, Positive] = timedelta(minutes=10)
    """An entry that runs longer is ended, with all it started."""
    timezone: str | None = None
    """For the times in the crontab file and of the folders, such as "Europe/Berlin"; default: this machine's own."""
    minutely: Times = "* * * * *"
    """When the executables in cron.minutely are due."""
    hourly: Times = "0 * * * *"
    """When those in cron.hourly are due."""
    daily: Times = "0 0 * * *"
    """When those in cron.daily are due."""
    weekly: Times = "0 0 * * 0"
    """When those in cron.weekly are due."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 30
    """Runs of each entry whose output is kept."""
    partition: Names | None = None
    """Partition of the chain's jobs and of dropped job scripts that name none; best is one that shares its nodes."""
    account: Name | None = None
    """Account of the chain's jobs."""
    qos: Name | None = None
    """Quality of service of the chain's jobs."""
    mem: Memory = "500M"
    """Host memory of the chain's jobs, which is what all entries of a slot share."""
    sbatch: tuple[SbatchOption, ...] = ()
    """Further options of sbatch for the chain's jobs, each one "--key=value"."""
    env: tuple[VariableName, ...] = ()
    """Variables the entries get besides PATH, HOME and the virtual environment, as they are at install. Never a secret."""
    trusted: tuple[Name, ...] = ()
    """Accounts besides you and root whose files in the folders are run, as you: the owner of a file decides what it does."""
    trusted_group: Name | None = None
    """A group whose members may write the folders and the crontab file, and so run what they like as you. Default: none."""

    @model_validator(mode="after")
    def _sound(self) -> Cron:
        if self.period % timedelta(seconds=1):
            raise wrong_at(("period",), "give whole seconds")
        if self.timezone is not None:
            from zoneinfo import ZoneInfo

            try:
                ZoneInfo(self.timezone)
            except (KeyError, ValueError, OSError):
                raise wrong_at(("timezone",), f'unknown time zone {self.timezone!r}; such as "Europe/Berlin"') from None
        for index, name in enumerate(self.env):
            if by_name(name):
                raise wrong_at(("env", index), "a secret would be written into the folder; name a file that holds it")
        return self


# The settings of incidents of nodes, and of the health command.


class HealthCommand(Strict):
    """A command that runs on every node of the job and reports its health."""

    command: Annotated[str, Lines(), Field(examples=["dcgmi diag -r 1"])] = declared("nodes.health.command")
    timeout: Annotated[Duration, Positive] = declared("nodes.health.timeout")
    when: Annotated[tuple[Literal["start", "failure"], ...], Field(min_length=1)] = declared("nodes.health.when")

    @field_validator("command")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("empty; write the command, or leave health out")
        return value


class NodeSettings(Strict):
    """The exclusion of nodes that failed the run: for how long, and how many."""

    directory: Path | None = declared("nodes.directory")
    at_most: int | None = declared("nodes.at_most")
    health: HealthCommand | None = None
    """A command that reports the health of a node; null: none."""


Count = Annotated[int, Field(ge=1, le=1_000_000)]
Command = str | tuple[str, ...]


_SCHEDULERS = ("auto", *SCHEDULERS)
if TYPE_CHECKING:
    SchedulerWord = str
else:
    SchedulerWord = Literal[_SCHEDULERS]


class Launch(Strict):
    """The way the run is put in the queue."""

    command: Annotated[Command, Lines(), Field(examples=["python train.py"])]
    """The command of each rank: text is shell code, a list is a program and its arguments, run as they stand."""
    srun: bool = True
    """On Slurm, start the command through srun (unless it says srun itself). Never on scheduler: local."""
    srun_options: tuple[SrunOption, ...] = ("--kill-on-bad-exit=1",)
    """Options of that srun, one each."""
    jobs: Annotated[int, Field(ge=1, le=1000)] = 10
    """Members of the chain: one runs, the others wait to take over. 1 to 1000 (Slurm's MaxArraySize is 1001)."""
    chain: Literal["array", "daisy"] = "array"
    """array: one job array of which one member runs at a time; daisy: separate jobs, each after the one before."""
    partition: Names | None = None
    """Partition, or several with ',' between."""
    account: Name | None = None
    """Account the time is charged to."""
    qos: Name | None = None
    """Quality of service."""
    constraint: Constraint | None = None
    """Features the nodes must have, as sbatch --constraint takes them."""
    reservation: Names | None = None
    """Reservation to run in."""
    nodes: Count = 1
    """Nodes the command runs on."""
    spare_nodes: Annotated[int, Field(ge=0, le=10_000)] = 0
    """Nodes allocated beyond ``nodes``, to take the place of broken ones without going back to the queue."""
    min_nodes: Count | None = declared("launch.min_nodes")
    ntasks: Count | None = None
    """Ranks started in all, where not every node has the same number."""
    tasks_per_node: Count | None = None
    """Ranks started on each node."""
    cpus_per_task: Count | None = None
    """CPUs of each rank."""
    gpus_per_node: Count | Gpus | None = None
    """GPUs of each node: 8, or with their type "h100:8"."""
    gres: Gres | None = None
    """Generic resources of each node: "gpu:h100:8", "nvme:1"."""
    mem: Memory | None = None
    """Host memory per node in Slurm's form: "500G"; "0" for all there is."""
    mem_per_cpu: Memory | None = None
    """Host memory for each CPU, instead of mem."""
    mem_per_gpu: Memory | None = None
    """Host memory for each GPU, instead of mem."""
    exclusive: bool | Literal["user", "mcs", "topo"] = False
    """Whole nodes, shared with no other job; user, mcs, topo: with those that sbatch --exclusive=... allows."""
    hint: Literal["compute_bound", "memory_bound", "multithread", "nomultithread"] | None = None
    """How the ranks use the cores, as sbatch --hint takes it."""
    licenses: Licenses | None = None
    """Licenses the job needs: "ansys:2"."""
    time: Annotated[TimeLimit, Positive] | None = None
    """Time limit of each job, in quotes: "20:00:00", "2-12:00:00", "20h". Default: the partition's."""
    signal: Signal = "USR1"
    """Signal Slurm sends before the time limit; the run saves and stops at its next step."""
    warn: Annotated[Duration, Positive] | None = None
    """How long before the time limit the signal comes. Default 10m, at most half the limit."""
    exclude: tuple[Nodes, ...] = ()
    """Nodes that are never used: "node-7", "node-[1-4,9]"."""
    restart: Restart = Restart()
    """Restarts after a failure of the command."""
    replica_groups: ReplicaGroups | None = None
    """The run as several copies that agree on each step, by torchft: one may fail while the others train on; null: one copy."""
    distributed: Literal["auto", "never"] = declared("launch.distributed")
    heartbeat: HeartbeatSettings | None = None
    """How to see the progress of a command without the guard; null: it is not followed inside the job."""
    resume: Annotated[str, Field(max_length=1000)] = declared("launch.resume")
    finished_by: Literal["ask", "exit 0", "mark"] = declared("launch.finished_by")
    requeue: bool | None = None
    """Let Slurm put a job that lost a node back in the queue (true), or have the next member take over (false).
    null: Slurm starts it again at once, ahead of others, where the cluster offers that; otherwise as false."""
    output: Annotated[Annotated[str, Field(min_length=1)] | None, JobFile()] = None
    """File the jobs write to, in sbatch's patterns. Default: logs/%x-%A_%a.out in the run directory; one job
    that is no array: logs/%x-%j.out."""
    error: Annotated[Annotated[str, Field(min_length=1)] | None, JobFile()] = None
    """File for what the jobs write to standard error, in sbatch's patterns. Default: that of ``output``."""
    sbatch: tuple[SbatchOption, ...] = ()
    """Further options of sbatch, each one "--key=value"."""
    modules: tuple[Module, ...] = ()
    """Environment modules to load."""
    setup: Annotated[str | None, Lines()] = None
    """Shell lines that run before the command."""
    container: Annotated[Command | None, Lines(), Field(examples=["apptainer exec --nv image.sif"])] = None
    """The words before the command that run it in a container."""
    env: dict[VariableName, VariableValue] = {}  # noqa: RUF012 - pydantic copies it
    """Environment variables of the command. Never a secret: they are written in the job script."""
    take_along: tuple[VariableName, ...] = ()
    """Variables of yours that hold a secret and that the jobs get all the same. Slurm keeps them on its own disks."""
    template: Path | None = None
    """A Jinja2 template of your own for the job script, instead of train.sbatch.j2."""

    @field_validator("command", "container")
    @classmethod
    def _says_something(cls, value: Command | None) -> Command | None:
        words = (value,) if isinstance(value, str) else value
        if words is not None and not (words and words[0].strip()):
            raise ValueError("empty; write the command")
        return value

    @model_validator(mode="after")
    def _belongs_together(self) -> Launch:
        if self.time is not None and self.warn is not None and self.warn >= self.time:
            raise wrong_at(("warn",), "the warning must come later than the start: make warn shorter than time")
        self._slurms_own()
        self._of_groups()
        for name in self.env:
            if name.startswith(("FTSUPERVISE_", "SLURM_", "SBATCH_")):
                raise wrong_at(("env", name), "this name belongs to Slurm or ftsupervise; take another one")
            if by_name(name):
                line = f'export {name}="$(cat ~/.{name.lower()})"'
                raise wrong_at(("env", name), f"a secret would stand in the job script; write launch.setup: {line}")
        for key, said in (("setup", self.setup), ("command", self.command)):
            if isinstance(said, str) and (found := assigned(said)):
                line = f'{found}="$(cat ~/.{found.lower()})"'
                raise wrong_at((key,), f"a secret would stand in the job script; write {line}")
        return self

    def _slurms_own(self) -> None:
        """Refuse options that sbatch would refuse, or read in another way than intended."""
        if self.min_nodes is not None and self.min_nodes > self.nodes:
            raise wrong_at(("min_nodes",), f"more than nodes ({self.nodes}), which is the most that the command gets")
        memory = [key for key in ("mem", "mem_per_cpu", "mem_per_gpu") if getattr(self, key) is not None]
        if len(memory) > 1:
            raise wrong_at((memory[1],), f"{' and '.join(memory)} exclude each other; keep one")
        if self.gpus_per_node is not None and self.gres is not None and re.search(r"(^|,)gpu\b", self.gres):
            raise wrong_at(("gres",), "gpus_per_node asks for the GPUs already; keep one of the two")
        if self.ntasks is not None:
            nodes = self.command_nodes
            if self.ntasks < nodes:
                raise wrong_at(("ntasks",), f"fewer ranks than nodes ({nodes}): Slurm would take fewer nodes")
            if self.tasks_per_node is not None and self.ntasks > nodes * self.tasks_per_node:
                most = nodes * self.tasks_per_node
                raise wrong_at(("ntasks",), f"more ranks than nodes and tasks_per_node have room for ({most})")
            if self.spare_nodes and self.tasks_per_node is None:
                raise wrong_at(("ntasks",), "with spare_nodes, write tasks_per_node: the spare nodes start no rank")
        for index, option in enumerate(self.sbatch):
            key = KEYS.get(option_name(option))
            if key and getattr(self, key):
                raise wrong_at(("sbatch", index), f"launch.{key} says this already; keep one of the two")

    @property
    def command_nodes(self) -> int:
        """Return on how many nodes one start of the command runs: those of a group, where there are groups."""
        return self.nodes if self.replica_groups is None else self.replica_groups.nodes_each

    @property
    def job_nodes(self) -> int:
        """Return the nodes of one job, without the spare ones."""
        groups = self.replica_groups
        return self.command_nodes * (groups.count if groups is not None and groups.in_ == "allocation" else 1)

    def _of_groups(self) -> None:
        """Refuse settings that have another meaning, or none, where each group has nodes of its own."""
        if self.replica_groups is None:
            return
        if self.nodes not in (1, self.replica_groups.nodes_each):
            raise wrong_at(("nodes",), "with replica_groups, write replica_groups.nodes_each: the nodes of each group")
        if self.min_nodes is not None:
            raise wrong_at(
                ("min_nodes",), "a replica group needs all its nodes; write replica_groups.min: the least groups"
            )
        if not self.srun:
            raise wrong_at(
                ("srun",), "with replica_groups, ftsupervise starts each group through srun, on nodes of its own"
            )


class Sharing(Strict):
    """The folders that the run's group may write besides the switches: by default none.

    A writer of a page acts for the owner, so each key says what it hands over.
    """

    group: Name | None = None
    """The Unix group that the run directory is given to, and whose members may use the switches. Default: the group of the
    directory that it is made in where that is set-group-ID, else your primary group."""
    watch: bool = False
    """Members may watch beside you. They share the alerts' journal: they can silence and acknowledge, and what they write
    there goes out through your receivers."""
    nodes: bool = False
    """Members may exclude, trust and clear nodes, and the incidents of their runs count."""
    launch: bool = False
    """Members may launch the run and go on with it. They write its settings, attempts and checkpoints, and these are run
    by the next account that launches or watches it."""


class Run(Strict):
    """One training effort that ftsupervise keeps alive."""

    name: RunName
    """The name of the run in the queue and in every message."""
    launch: Launch
    """How the run is put in the queue."""
    sweep: dict[VariableName, tuple[str | float, ...]] = {}  # noqa: RUF012 - frozen
    """Values for words in braces: with {lr: [0.1, 0.01]}, {lr} in the name, the command and all other text stands for one of
    them, and the file holds a run for each combination. They are launched and listed together."""
    run_dir: Path | None = None
    """Directory of the run, the same on all nodes. Default: runs/NAME beside this file."""
    scheduler: SchedulerWord = "auto"
    """slurm, local (this machine), or auto: Slurm where sbatch answers."""
    share: Sharing = Sharing()
    """The run's group may write the switches; these settings let it write more."""
    act: ActOrWord = Act()
    """observe: decisions are written down and told, and nothing is ended, held or left out for them."""
    price: float | None = declared("price")
    nodes: NodeSettings = NodeSettings()
    """Nodes that failed the run are excluded: for how long, and how many."""
    guard: GuardSettings = GuardSettings()
    """The checks of the guard inside the training loop."""
    checkpoints: CheckpointSettings = CheckpointSettings()
    """Where checkpoints lie, and what is verified before the run goes on from one."""
    watch: Watch = Watch()
    """How often to check from outside, and the settings of each watchdog."""
    alerts: Alerts = Alerts()
    """The receivers of alerts, and how often they are notified."""
    cron: Cron = Cron()
    """The crontab emulation that watches from outside, and which this run helps to keep alive."""
