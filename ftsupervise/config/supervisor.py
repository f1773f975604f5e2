"""The settings of the supervisor, each declared once: key in the settings, flag, value, default, bounds and help.

``schema.py`` takes default, bounds and description of a key from here (``fields.declared``); ``launch`` puts
unusual values into the batch script; ``ftsupervise run`` makes its options from the table and hands their
values to ``run.options_of``. Free of pydantic, because the supervisor starts without it.
"""

from __future__ import annotations

from enum import Enum
from typing import Any, NamedTuple

from ftsupervise.truth import DECISIONS


class Form(Enum):
    """The form of a value in a flag."""

    COUNT = "N"
    NUMBER = "X"
    SECONDS = "S"
    TEXT = "COMMAND"
    FOLDER = "DIR"
    FILE = "FILE"
    PATTERN = "REGEX"
    TOKEN = "TOKEN"
    CHOICE = ""
    CHOICES = " "  # the flag is given once for each
    SET = "  "  # a section: on where it is set
    WORDS = "WORDS"
    COUNTS = "KIND=N"  # the flag is given once for each kind of failure
    MODULES = "M"
    SIGNAL = "SIGNAL[@S]"


class Setting(NamedTuple):
    """``key`` in the settings ("" where only the flag exists), ``value`` in ``run.Options``."""

    flag: str
    key: str
    value: str
    form: Form
    default: Any  # seconds where the form says so; None: not set
    help: str
    least: float | None = None
    above: float | None = None
    most: float | None = None
    off: str | None = None  # the flag's value where the key is null, or its section
    bare: Any = ...  # the value without the flag; ...: the default of the settings
    always: bool = False  # the batch script shows it even where it is the default
    choices: tuple[str, ...] = ()

    @property
    def parameter(self) -> str:
        return self.flag.removeprefix("--").replace("-", "_")

    @property
    def unset(self) -> Any:
        return self.default if self.bare is ... else self.bare


_SECONDS = Form.SECONDS
_RESTART, _HANG, _LOSS = "launch.restart", "launch.restart.hang", "guard.loss"
RETAIN = "checkpoints.retain"
_NONFINITE = ("warn", "stop", "resume")
WITHIN = {"start": "before the first start in each job", "failure": "after each failure, before the next start"}

FINISHED_BY = ("ask", "exit 0", "mark")

SETTINGS = (
    Setting(
        "--launched", "", "launched", Form.TOKEN, "",
        help="The launch that this job belongs to: another folder in the place of the run directory is refused.",
    ),
    Setting(
        "--forward", "", "forward", Form.CHOICE, "auto", choices=("auto", "always", "never"),
        help="Pass the warning signal on? auto: only to processes that handle it. A file warns the guards in any case.",
    ),
    Setting(
        "--warning", "", "warning", Form.SIGNAL, "USR1",
        help="The signal by which Slurm warns before the end, and how many seconds before it, as in sbatch's "
        "--signal=B:TERM@600. launch passes launch.signal on.",
    ),
    Setting(
        "--grace", "", "grace", _SECONDS, None, least=0,
        help="How long the command may take to stop, when the job is asked to, before it is killed. Default: as long as Slurm "
        "gives it (its KillWait), less 5 s for writing down how it ended; 25 s where that is not known.",
    ),
    Setting(
        "--space-wait", f"{_RESTART}.space_wait", "space_wait", _SECONDS, 600.0, least=0,
        help="How long to wait when the disk is full (then exit code 73), or the run directory cannot be used or is gone (66).",
    ),
    Setting(
        "--in-place", f"{_RESTART}.in_place", "budgets.in_place", Form.COUNT, 100, least=0, most=100_000, bare=0, always=True,
        help="Most restarts inside one job, on the nodes it holds; then the next member takes over. 0: never in place.",
    ),
    Setting(
        "--same-failure", f"{_RESTART}.same_failure", "budgets.same_failure", Form.COUNT, 3, least=0, most=1000, always=True,
        help="The chain is stopped after this many times the same failure without progress, over restarts and members: its "
        "members are held, the brake alert fires. Progress is a newer checkpoint or a later first step. 0: never, whatever "
        "budgets say.",
    ),
    Setting(
        "--back-off", f"{_RESTART}.back_off", "budgets.back_off", _SECONDS, 2.0, least=0, always=True,
        help="The second start without progress comes at once; the third waits this long, and each later one twice as long, "
        "up to 5 minutes. 0s: no start waits.",
    ),
    Setting(
        "--stop-within", f"{_RESTART}.stop_within", "stop_within", _SECONDS, 600.0, above=0, always=True,
        help="How long the command may take to stop after the kill switch was raised, before it is ended.",
    ),
    Setting(
        "--distributed", "launch.distributed", "distributed", Form.CHOICE, "auto", choices=("auto", "never"),
        help="auto: the ranks of a Python command without a launcher of its own get the names that torch.distributed reads "
        "(MASTER_ADDR, MASTER_PORT, RANK, WORLD_SIZE, LOCAL_RANK), unless one of them is set.",
    ),
    Setting(
        "--heartbeat-log", "launch.heartbeat.log", "heartbeat_log", Form.PATTERN, "",
        help="For a command without the guard: the regular expression that finds the step in a line of the job's output, or of "
        "heartbeat.file, with one group around the number. auto: the usual forms.",
    ),
    Setting(
        "--heartbeat-file", "launch.heartbeat.file", "heartbeat_file", Form.FILE, None,
        help="The log of that, where it is not the job's output. Without heartbeat.log: a file that the command touches while "
        "it makes progress, or writes its step into.",
    ),
    Setting(
        "--resume", "launch.resume", "resume", Form.WORDS, "",
        help="For a script that has to be told to resume: what is added to its command when there is a checkpoint to go on "
        "from, such as \"--resume {checkpoint}\", or a variable, \"RESUME={checkpoint}\". Shell code has the words in "
        "$FTSUPERVISE_RESUME.",
    ),
    Setting(
        "--finished-by", "launch.finished_by", "finished_by", Form.CHOICE, "ask", choices=FINISHED_BY, bare="mark", always=True,
        help="What a command without the guard means that leaves with 0. ask: the next members wait, held, until a person says "
        "whether it is finished; exit 0: it is finished; mark: only state/finished says so, and the next member goes on.",
    ),
    Setting(
        "--price", "price", "price", Form.NUMBER, None, least=0, most=1_000_000,
        help="Money for one GPU and one hour, in whatever currency: what a slow rank costs is told in it too, and plan and "
        "simulate take it.",
    ),
    Setting(
        "--observe", "act.observed", "observe", Form.CHOICES, (), choices=DECISIONS,
        help="A decision that is only written down and told, and not carried out.",
    ),
    Setting(
        "--warm", f"{_RESTART}.warm", "warm", Form.MODULES, "auto", off="off",
        help="A standby on each node that has imported what the ranks import, and from which a restart in place begins: auto "
        "(what the run turned out to import by its first step, where memory is not tight), a list of modules such as torch and "
        "numpy, or off: restarts are cold.",
    ),
    Setting(
        "--snapshot-every", "checkpoints.snapshot_every", "guard.SNAPSHOT_EVERY", Form.COUNT, 2, least=1, most=1_000_000,
        off="off", bare=None,
        help="Steps from one snapshot in memory to the next, where the loop calls guard.snapshot(). null or off: none.",
    ),
    Setting(
        "--snapshot-copies", "checkpoints.snapshot_copies", "snapshot_copies", Form.NUMBER, 0.02, least=0, most=1,
        help="Share of a node's cores (2 % is 0.02) that copying the snapshots of its ranks to another node may take. 0: none "
        "are copied, and with a lost node the run goes on from the disk.",
    ),
    Setting(
        "--snapshot-wait", "checkpoints.snapshot_wait", "guard.SNAPSHOT_WAIT", _SECONDS, None, above=0, most=60, off="off",
        help="How long, at most, a snapshot waits for its copy on another node before the loop goes on. With snapshot_every: 1 "
        "no step that has counted is made again when a node is lost, and each step takes longer by a copy of the state. null "
        "or off: the copies are made beside the loop.",
    ),
    Setting(
        "--hang", f"{_HANG}.at_least", "hang.floor", _SECONDS, 10.0, above=0, off="off", bare=None, always=True,
        help="A shorter standstill is never a hang; half of it is enough where a rank stays stopped (SIGSTOP).",
    ),
    Setting(
        "--hang-start", f"{_HANG}.start", "hang.start", _SECONDS, 1800.0, above=0,
        help="How long the first step may take.",
    ),
    Setting(
        "--hang-unknown", f"{_HANG}.unknown", "hang.unknown", _SECONDS, 600.0, above=0,
        help="How long a phase may take that was not seen often enough.",
    ),
    Setting(
        "--budget", f"{_RESTART}.budgets", "budgets.of_kind", Form.COUNTS, {}, least=1, most=1000,
        help="A limit other than same_failure for one kind of failure, such as {node: 20, memory: 1}. Default: node: 10.",
    ),
    Setting(
        "--min-nodes", "launch.min_nodes", "care.least", Form.COUNT, None, least=1, most=1_000_000,
        help="The command can also run on as few nodes as this: when nodes are lost and none can take their place, it starts "
        "again on those that are left. Default: it needs launch.nodes.",
    ),
    Setting(
        "--nodes-dir", "nodes.directory", "care.directory", Form.FOLDER, None,
        help="A directory in which runs share their incidents of nodes. Default: each run keeps its own.",
    ),
    Setting(
        "--nodes-at-most", "nodes.at_most", "care.at_most", Form.COUNT, None, least=0, most=100_000,
        help="Most nodes to be excluded because of their score; null: launch.spare_nodes, or 2 % of launch.nodes, at least 1.",
    ),
    Setting(
        "--health", "nodes.health.command", "care.health", Form.TEXT, "",
        help="Shell code that reports the health of a node. Exit 0: healthy; 1: reported, counts a little; "
        "2: the node is not used; 3 and others: unknown. Where it does not end while it ends on other nodes, the node is not "
        "used either.",
    ),
    Setting(
        "--health-timeout", "nodes.health.timeout", "care.health_timeout", _SECONDS, 30.0, above=0,
        help="How long it may take on a node. All nodes are asked at the same time.",
    ),
    Setting(
        "--health-when", "nodes.health.when", "care.health_when", Form.CHOICES, tuple(WITHIN), choices=tuple(WITHIN),
        help="; ".join(f"{word}: {when}" for word, when in WITHIN.items()) + ".",
    ),
    Setting(
        "--guard-poll", "guard.poll", "guard.POLL", _SECONDS, 1.0, above=0, bare=None, always=True,
        help="How often, at most, the guard checks the shared file system.",
    ),
    Setting(
        "--guard-memory", "guard.memory", "guard.MEMORY", Form.NUMBER, 0.95, above=0, most=1, off="off", bare=None, always=True,
        help="Share of the host memory (95 % is 0.95) at which the run saves and stops; null or off: never.",
    ),
    Setting(
        "--guard-gpu-memory", "guard.gpu_memory", "guard.GPU_MEMORY", Form.NUMBER, None, above=0, most=1, off="off",
        help="Share of the memory of a rank's GPU at which the run saves and stops, without what PyTorch's allocator holds in "
        "reserve; null or off: never.",
    ),
    Setting(
        "--loss-nonfinite", f"{_LOSS}.nonfinite", "guard.LOSS_NONFINITE", Form.CHOICE, "warn", choices=_NONFINITE, bare=None,
        help="When a loss that the loop gives to guard.loss() is no number: warn, stop without saving, or resume from an older "
        "checkpoint.",
    ),
    Setting(
        "--loss-diverging", f"{_LOSS}.diverging", "guard.LOSS_DIVERGING", Form.CHOICE, "warn", choices=(*_NONFINITE, "off"),
        off="off", bare=None,
        help="The same when the loss has gone up and stays there; null or off: not judged.",
    ),
    Setting(
        "--loss-tolerate", f"{_LOSS}.tolerate", "guard.LOSS_TOLERATE", Form.COUNT, 0, least=0, most=1_000_000, bare=None,
        help="This many losses in a row may be no number before the run stops, where the loop skips such a step.",
    ),
    Setting(
        "--loss-patience", f"{_LOSS}.patience", "guard.LOSS_PATIENCE", Form.COUNT, 200, least=16, most=1_000_000, bare=None,
        help="A loss diverges when this many in a row are high and do not come down; as many must have been reported before.",
    ),
    Setting(
        "--loss-back", f"{_LOSS}.back", "budgets.loss_back", Form.COUNT, 100, least=0, most=1_000_000_000,
        help="resume goes on from the newest checkpoint that is at least this many steps older than the trouble.",
    ),
    Setting(
        "--guard-stop-before", "guard.stop_before", "guard.STOP_BEFORE", _SECONDS, None, above=0,
        help="Stop this long before the end of the job, besides Slurm's signal.",
    ),
    Setting(
        "--guard-run-for", "guard.run_for", "guard.RUN_FOR", _SECONDS, None, above=0,
        help="Stop after this long, whatever the limit of the job.",
    ),
    Setting(
        "--checkpoints", "checkpoints.path", "checkpoints", Form.FOLDER, None,
        help="Where the run writes its checkpoints: FTSUPERVISE_CHECKPOINT_DIR, unless the job sets that. Default: checkpoints "
        "in the run directory.",
    ),
    Setting(
        "--save-every", "checkpoints.every", "guard.SAVE_EVERY", _SECONDS, None, above=0,
        help="The guard asks the loop to save so long after its last checkpoint, by decision.save at a step. Default: it asks "
        "only when a person or the end of the job does. ftsupervise plan says which interval loses least.",
    ),
    Setting(
        "--verify", "checkpoints.verify", "guard.VERIFY", Form.CHOICE, "full", choices=("sizes", "quick", "sampled", "full"),
        bare=None,
        help="What guard.latest() compares with the manifest: every byte, which takes as long as reading them once; or less: "
        "the sizes of all files, also the digests of small ones (some milliseconds), or of a tenth of them. guard.restore() "
        "compares every byte while it loads, whatever stands here.",
    ),
    Setting(
        "--incremental", "checkpoints.incremental", "guard.INCREMENTAL", Form.COUNT, 0, least=0, most=1000,
        help="A file that guard.checkpoint() finds unchanged since the checkpoint before is kept once, as a reflink or a hard "
        "link; each n-th checkpoint is written in full. 0: every one is.",
    ),
    Setting(
        "--torn", "checkpoints.torn", "torn", Form.CHOICE, "set-aside", choices=("set-aside", "tell"),
        help="A checkpoint of a program with a loader of its own, that an attempt has left torn: it ended while it saved. "
        "set-aside: where an older whole one lies beside it, it is moved into .quarantine before the next start, so that the "
        "loader takes that one; tell: people are told, and it stays.",
    ),
    Setting(
        "--retain", RETAIN, "retain", Form.SET, None, choices=("off", "on"), bare="off",
        help="on: while the run trains, the checkpoints that checkpoints.retain does not keep are removed.",
    ),
)  # fmt: skip
BY_KEY = {setting.key: setting for setting in SETTINGS if setting.key}


def default(value: str) -> Any:
    """Return the default of the value ``value`` of ``run.Options`` ("budgets.same_failure")."""
    return next(setting.default for setting in SETTINGS if setting.value == value)
