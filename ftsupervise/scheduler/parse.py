"""Parses Slurm's words into values, and renders them back: pure, so that every odd line ever seen can be a test.

The queue is read from ``squeue -o`` with separators that are drawn anew for each question: names and comments may hold
spaces, bars, tabs, control characters and anything else, ``-O`` cuts at 20 columns, and ``--json`` of 22.05 answers "no
jobs" when no controller was asked.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.model import Job, JobState
from ftsupervise.printable import printable
from ftsupervise.rundir.records import as_count

# squeue(1) letters: id, array's id, raw id, state, user, start, end, submit, reason, dependency, nodes wanted,
# partitions, excluded nodes, features, nodes, directory, comment, name
_LETTERS = "iFATuSeVrEDPxfNZkj"
SQUEUE_ENV = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_NOTHING = {"", "N/A", "NONE", "None", "(null)", "Unknown", "n/a"}

# A name, a comment and, since 25.11, the submitted command line are anybody's text; the name stands before what is looked for.
_TEXT = re.compile(r" JobName=.*? UserId=| (?:SubmitLine|Comment|AdminComment)=.*")
_SHOWN = re.compile(r"(?:^|\s)(JobId|ArrayJobId|ArrayTaskId|JobState|StartTime|Requeue|BatchHost|NodeList)=(\S*)")


class SqueueFormat(NamedTuple):
    """The format of one question to squeue, with a random mark in its separators.

    The mark is used once. A job's name and comment may hold any characters, so a separator that is known beforehand could be
    submitted in one of them: it would make the queue unreadable, or pass one field off as another.
    """

    mark: str

    @property
    def record(self) -> str:
        return f"\x1e{self.mark}:"

    @property
    def field(self) -> str:
        return f"\x1f{self.mark}:"

    @property
    def text(self) -> str:
        """The argument of ``squeue -o``."""
        return self.record + self.field.join(f"%{letter}" for letter in _LETTERS)

    def row(self, record: str) -> dict[str, str]:
        """squeue's letter -> what it printed for one job. Raises ValueError."""
        fields = record.removesuffix("\n").split(self.field)
        if len(fields) != len(_LETTERS):
            raise ValueError(f"squeue printed a line with {len(fields)} of {len(_LETTERS)} fields: {record[:200]!r}")
        return dict(zip(_LETTERS, fields, strict=True))


def parse_queue(text: str, form: SqueueFormat) -> tuple[Job, ...]:
    """The output of ``squeue -h -o FORM``. Raises ValueError when it is not that."""
    head, *records = text.split(form.record)
    if head.strip():
        raise ValueError(f"squeue printed something unexpected: {head.strip()[:200]!r}")
    return tuple(_job(form.row(record)) for record in records)


def _job(row: dict[str, str]) -> Job:
    def word(letter: str) -> str:
        return "" if row[letter] in _NOTHING else row[letter]

    wanted = as_count(row["D"].partition("-")[0])
    return Job(
        id=row["i"],
        base_id=row["F"] or row["A"],
        raw_id=row["A"],
        name=row["j"],
        user=row["u"],
        state=parse_state(row["T"]),
        reason=printable(word("r")),  # some are the words of a plug-in
        dependency=word("E"),
        comment=word("k"),
        nodes=expand_hostlist(word("N")),
        submit_time=parse_epoch(row["V"]),
        start_time=parse_epoch(row["S"]),
        end_time=parse_epoch(row["e"]),
        directory=word("Z"),
        nodes_wanted=1 if wanted is None else wanted,
        partitions=tuple(row["P"].split(",")),
        excluded=expand_hostlist(word("x")),
        features=word("f"),
    )


class NodeInventory(NamedTuple):
    """The nodes of the cluster."""

    known: frozenset[str]  # every node Slurm knows by name
    usable: Mapping[str, frozenset[str]]  # partition -> its nodes that take new jobs
    default: str = ""  # the partition of jobs that name none
    features: Mapping[str, frozenset[str]] = {}  # node -> the features that --constraint may ask of it

    def without(self, gone: Collection[str]) -> NodeInventory:
        """Return the same, but ``gone`` are not usable, whatever Slurm says of them."""
        return self._replace(usable={name: nodes - frozenset(gone) for name, nodes in self.usable.items()})


INVENTORY = "%P|%N|%T|%f"  # the argument of ``sinfo -h -a -N -o``


def parse_inventory(text: str) -> NodeInventory:
    usable: dict[str, set[str]] = {}
    features: dict[str, frozenset[str]] = {}
    default = ""
    for line in text.splitlines():
        partition, node, state, having = (*line.strip().split("|"), "", "", "")[:4]
        features[node] = frozenset(having.split(",")) - _NOTHING
        default = partition[:-1] if partition.endswith("*") else default
        takes_jobs = not (is_away(state) or is_leaving(state))
        usable.setdefault(partition.rstrip("*"), set()).update((node,) if takes_jobs else ())
    return NodeInventory(
        frozenset(features), {name: frozenset(nodes) for name, nodes in usable.items()}, default, features
    )


# sinfo's long state words; the suffixes * (not responding), ~ # ! % $ @ ^ - are stripped, and * counts as away.
_AWAY = ("down", "fail", "error", "drained", "unknown", "power", "no_respond", "future", "maint", "reboot", "inval")
_LEAVING = ("drain", "failing")


def is_away(state: str) -> bool:
    """Return whether a node in ``state`` (sinfo's %T) is lost to the jobs on it."""
    word = state.lower()
    return word.rstrip("~#!%$@^-+").endswith("*") or (word.startswith(_AWAY) and not word.startswith("failing"))


def is_leaving(state: str) -> bool:
    """Return whether it keeps its jobs and gets no new ones."""
    return state.lower().startswith(_LEAVING)


def reason_word(reason: str) -> str:
    """Return a reason as one word: squeue prints ``launch failed requeued held`` where scontrol prints it with underscores."""
    return "_".join(reason.split())


def is_held(reason: str) -> bool:
    """Return whether a job that waits for ``reason`` is held: it starts after ``scontrol release`` and not before."""
    return reason.startswith(("JobHeld", "JobHold")) or re.search(r"(^|_)held(_|$)", reason_word(reason)) is not None


def most_alive(jobs: Sequence[Job]) -> Job | None:
    """Return the member of an array that speaks for all: it runs, else it waits, else how the array has ended (a
    failure before a success).

    squeue lists members that have ended before those that run. None for no jobs.
    """

    def rank(job: Job) -> int:
        if job.state.ended:
            return 4 if job.state is JobState.COMPLETED else 3
        return 1 if job.state.waiting else 2 if job.state is JobState.COMPLETING else 0

    return min(jobs, key=rank, default=None)


def complaints(stderr: str) -> frozenset[str]:
    """Return the lines that a command of Slurm's wrote to stderr, each without the program's name and the time before it."""
    lines = (_SPEAKER.sub("", line.strip()) for line in stderr.splitlines())
    return frozenset(line for line in lines if line)


def is_no_answer(complaint: str) -> bool:
    """Return whether this complaint says, whatever the exit code, that the controller was not reached, or not asked what was
    meant."""
    return _NO_ANSWER.search(complaint) is not None


_SPEAKER = re.compile(r"^(?:\[[^\]]*\] )?(?:[a-z]+: (?=error|fatal|warning))?")
_NO_ANSWER = re.compile(
    r"Unable to contact|Unable to (?:connect|communicate)|timed out|slurm_load_|Invalid (?:user|job|node|partition)|Unspecified"
    r"|Zero Bytes|Connection refused|connect failure|connection reset|authentication|can't be reached|problem talking",
    re.I,
)


def parse_state(word: str) -> JobState:
    """Parse "CANCELLED by 1001" and "RUNNING" alike; an unknown word is OTHER."""
    try:
        return JobState(word.strip().split(" ")[0].rstrip("+").upper())
    except ValueError:
        return JobState.OTHER


_CLOCKS = 60.0  # seconds by which the clocks of two hosts may differ


def may_have_run(start: str, began: datetime) -> bool:
    """Return whether something that began at ``began`` may have run in a job that has started at ``start`` (epoch seconds). The
    number of a job is given out again, also to another account's: that one starts later."""
    started = as_count(start.strip())
    return started is not None and started <= began.timestamp() + _CLOCKS


def parse_epoch(text: str) -> datetime | None:
    """Epoch seconds (SLURM_TIME_FORMAT=%s) as UTC; None for Slurm's many ways to say that there is no time."""
    text = text.strip()
    value = as_count(text)
    return datetime.fromtimestamp(value, timezone.utc) if value and value < 10**11 else None


_ARRAY_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def array_size(job_id: str) -> int:
    """The number of members that one queue record stands for: "88_[3-10%1]" -> 8, "88_[1-9:2%1]" -> 5, "88_3" and "87" -> 1."""
    match = re.search(r"_\[([^\]%]*)", job_id)
    if not match:
        return 1
    total = 0
    for item in match[1].split(","):
        part = _ARRAY_ITEM.fullmatch(item.strip())
        if part:
            first, last, step = int(part[1]), int(part[2] or part[1]), int(part[3] or 1)
            total += max(0, (last - first) // max(1, step) + 1)
    return max(1, total)


_WORD = re.compile(r'(?:[^\s"\\]|\\.|"(?:[^"\\]|\\.)*")+')


def _words(line: str) -> list[str]:
    """Return the words of an ``#SBATCH`` line as ``quote`` writes them."""
    return [re.sub(r'\\(.)|"', r"\1", word) for word in _WORD.findall(line)]


def directives(script: str) -> dict[str, str]:
    """Return the ``#SBATCH --key=value`` lines of a script (up to its first command, as sbatch reads them), last one wins."""
    found: dict[str, str] = {}
    for line in script.splitlines()[1:]:
        if line.startswith("#SBATCH"):
            for word in _words(line[len("#SBATCH") :]):
                key, _, value = word.removeprefix("--").partition("=")
                found[key] = value
        elif line.strip() and not line.startswith("#"):
            break
    return found


def quote(value: str) -> str:
    """Return ``value`` as one word of an ``#SBATCH`` line. Raises ValueError for control characters.

    These are sbatch's own rules, not the shell's: a backslash escapes even inside single quotes, and a quoted newline
    ends the line all the same, so that the rest of the value would be run as a command.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ValueError(f"control characters cannot stand in a job script: {value!r}")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\[\]-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'


def srun(*options: str) -> list[str]:
    """Return the words of an srun, before those of its command."""
    return ["srun", *options]


def is_srun(command: Sequence[str]) -> bool:
    return bool(command) and command[0].rpartition("/")[2] == "srun"


_SRUN_FLAGS = frozenset("EHIkKlOQsuvXZ")  # srun's short options without a value
_SRUN_LONG_FLAGS = (
    *("contiguous", "disable-status", "exact", "exclusive", "hold", "immediate", "interactive", "kill-on-bad-exit"),
    *(
        "label",
        "multi-prog",
        "nice",
        "no-allocate",
        "no-kill",
        "overcommit",
        "overlap",
        "oversubscribe",
        "preserve-env",
        "pty",
        "quiet",
    ),
    *("reboot", "send-libs", "spread-job", "unbuffered", "use-min-nodes", "verbose", "wait-all-nodes", "whole"),
)


def srun_options(command: Sequence[str]) -> tuple[list[tuple[str, str]], int]:
    """Return the options of an srun ``command`` with their values, and the index of its program's first word."""
    at, found = 1, list[tuple[str, str]]()
    while at < len(command):
        word = command[at]
        if word == "--":
            return found, at + 1
        if not word.startswith("-") or word == "-":
            return found, at
        if word.startswith("--"):
            name, equals, value = word.partition("=")
            alone = bool(equals) or name[2:] in _SRUN_LONG_FLAGS
        else:
            name, value = word[:2], word[2:]
            alone = bool(value) or name[1] in _SRUN_FLAGS
        at += 1 if alone else 2
        found.append((name, value if alone else "".join(command[at - 1 : at])))
    return found, min(at, len(command))


_TASKS = ("-n", "--ntasks")


def with_fewer(command: Sequence[str], nodes: int, usual: int) -> tuple[str, ...]:
    """Return an srun ``command`` for ``usual`` nodes changed to fewer, with as many tasks on each as before where it
    gives their number.
    """
    options, at = srun_options(command)
    if nodes >= usual:
        return tuple(command)
    told = [value for name, value in options if name in _TASKS]
    tasks = [f"--ntasks={int(told[-1]) * nodes // usual}"] if told and told[-1].isdecimal() else []
    at -= command[at - 1] == "--"
    return (*command[:at], f"--nodes={nodes}", *tasks, *command[at:])  # of two equal options, srun takes the last


def on_nodes(command: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...]:
    """Return an srun ``command`` that starts on ``nodes``."""
    return (command[0], f"--nodelist={compress_hostlist(tuple(nodes))}", *command[1:])


_EXPEDITES = re.compile(r"^SlurmctldParameters\s*=\s*(?:\S*,)?enable_expedited_requeue(?:,|\s|$)", re.M | re.I)
_VERSION = re.compile(r"^SLURM_VERSION\s*=\s*(\d+)\.(\d+)", re.M)
_SINCE = (25, 11)  # an older Slurm refuses --requeue=expedite, whatever its settings say


def offers_expedited_requeue(shown: str) -> bool:
    """Return whether the cluster that prints this as ``scontrol show config`` takes ``sbatch --requeue=expedite``."""
    version = _VERSION.search(shown)
    return bool(version and (int(version[1]), int(version[2])) >= _SINCE and _EXPEDITES.search(shown))


class ShownJob(NamedTuple):
    """One job, as ``scontrol show job`` prints it."""

    id: str  # of this member: the plain number may also mean its whole array
    headless: bool | None  # true if it has lost its batch host; None when that is unknown
    requeue: bool


def parse_shown_job(text: str, job: str) -> ShownJob | None:
    """Parse the output of ``scontrol --oneliner show job``; None when ``job`` is not in it."""
    for line in text.splitlines():
        fields = _shown(line)
        if fields.get("JobId") == job:
            array, task = fields.get("ArrayJobId", ""), fields.get("ArrayTaskId", "")
            return ShownJob(f"{array}_{task}" if array else job, _headless(fields), fields.get("Requeue") == "1")
    return None


def state_and_start(text: str) -> tuple[str, str]:
    """Return the state and the start of the first job that ``scontrol --oneliner show job`` shows; "" where it shows none."""
    fields = _shown(text.partition("\n")[0])
    return fields.get("JobState", ""), fields.get("StartTime", "")


def _shown(line: str) -> dict[str, str]:
    return dict(reversed(_SHOWN.findall(_TEXT.sub(" ", line))))


def _headless(fields: Mapping[str, str]) -> bool | None:
    host, nodes = fields.get("BatchHost", ""), fields.get("NodeList", "")
    if fields.get("JobState") != "RUNNING" or not host or not nodes or "(null)" in (host, nodes):
        return None
    try:
        return host not in expand_hostlist(nodes)
    except ValueError:
        return None
