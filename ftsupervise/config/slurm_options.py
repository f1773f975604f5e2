"""The forms of Slurm's own option values, and the options that ``launch`` sets itself.

These values reach a ``#SBATCH`` line, where quoting protects nothing: each value has one strict form.
Sources: sbatch(1), slurm.conf(5).
"""

from __future__ import annotations

import re
import signal
from typing import Annotated

from pydantic import AfterValidator, BeforeValidator, WithJsonSchema

from ftsupervise.config.fields import Matching
from ftsupervise.units import signal_name

_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.+@-]*"
_NODE = r"[A-Za-z0-9][A-Za-z0-9._-]*(?:\[[0-9]+(?:-[0-9]+)?(?:,[0-9]+(?:-[0-9]+)?)*\][A-Za-z0-9._-]*)*"

RunName = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
        "letters, digits, '.', '_' and '-', at most 100 of them, a letter or digit first",
        "train-10b",
    ),
]
Names = Annotated[str, Matching(rf"{_NAME}(?:,{_NAME})*", "a name, or several with ',' between", "gpu")]
Name = Annotated[str, Matching(_NAME, "a name of letters, digits and '_', '.', '+', '@', '-'", "physics")]
Constraint = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_\[(][A-Za-z0-9_.&|*()\[\],:+=-]*", "node features as sbatch --constraint takes them", "h100&ib"
    ),
]
Nodes = Annotated[str, Matching(_NODE, "a node, or a range of nodes", "node-[1-4,7]")]
Gpus = Annotated[
    str,
    Matching(
        r"(?:[A-Za-z][A-Za-z0-9_.-]*:)?[1-9][0-9]{0,4}(?:,[A-Za-z][A-Za-z0-9_.-]*:[1-9][0-9]{0,4})*",
        "a number of GPUs, or a type and a number",
        "h100:8",
    ),
]
Memory = Annotated[str, Matching(r"[0-9]{1,12}[KMGTkmgt]?", "Slurm's form of memory per node, 0 for all of it", "500G")]
Gres = Annotated[
    str,
    Matching(
        r"[A-Za-z_][\w.-]*(?::[A-Za-z_][\w.-]*)?(?::[0-9]{1,9}[KMGTP]?)?"
        r"(?:,[A-Za-z_][\w.-]*(?::[A-Za-z_][\w.-]*)?(?::[0-9]{1,9}[KMGTP]?)?)*",
        "generic resources of each node as sbatch --gres takes them",
        "gpu:h100:8",
    ),
]
Licenses = Annotated[
    str,
    Matching(
        r"[A-Za-z0-9_][\w.@/-]*(?::[0-9]{1,9})?(?:[,;|][A-Za-z0-9_][\w.@/-]*(?::[0-9]{1,9})?)*",
        "licenses as sbatch --licenses takes them",
        "ansys:2",
    ),
]
Module = Annotated[
    str, Matching(r"[A-Za-z0-9_][A-Za-z0-9_.+/:=@-]*", "a module as 'module load' takes it", "cuda/12.4")
]
VariableName = Annotated[str, Matching(r"[A-Za-z_][A-Za-z0-9_]*", "a variable name", "OMP_NUM_THREADS")]
SrunOption = Annotated[str, Matching(r"-[\s\S]*", "an option that begins with '-'", "--cpu-bind=none")]

# faults of a program, the end of a child, job control of a terminal
_NOT_A_WARNING = (
    *("SEGV", "BUS", "FPE", "ILL", "TRAP", "SYS", "ABRT", "IOT", "PIPE", "CHLD", "CLD"),
    *("CONT", "TSTP", "TTIN", "TTOU"),
)
_CAUGHT = {one.name.removeprefix("SIG") for one in signal.Signals} - {"KILL", "STOP"}


def _signal(value: object) -> object:
    """ "USR1", "SIGUSR1", "usr1", "10" and 10 are one signal, kept as sbatch has it: USR1."""
    if not isinstance(value, (str, int)) or isinstance(value, bool):
        return value
    word = str(value).upper().removeprefix("SIG")
    number = int(word) if re.fullmatch(r"[0-9]{1,3}", word) else None
    if word in ("KILL", "STOP") or number in (signal.SIGKILL, signal.SIGSTOP):
        raise ValueError("no program can answer this signal; take USR1, USR2 or TERM")
    if number in signal.valid_signals():
        word = signal_name(number).removeprefix("SIG") if number in set(signal.Signals) else word
    elif word not in _CAUGHT:
        raise ValueError('expected a signal such as "USR1", "USR2" or "TERM"')
    if word in _NOT_A_WARNING:
        raise ValueError(f"programs get {word} for reasons of their own; take USR1, USR2 or TERM")
    return word


Signal = Annotated[
    str,
    BeforeValidator(_signal),
    WithJsonSchema(
        {"anyOf": [{"type": "string", "examples": ["USR1"]}, {"type": "integer", "minimum": 1, "maximum": 64}]}
    ),
]


def _number_as_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


VariableValue = Annotated[
    str, BeforeValidator(_number_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "integer"}]})
]

# Option of sbatch -> the setting to write in its place.
_OURS = {
    "account": "launch.account",
    "array": "launch.jobs and launch.chain",
    "chdir": "launch.setup, with a line 'cd DIRECTORY'",
    "comment": "nothing: ftsupervise finds its jobs by it",
    "constraint": "launch.constraint",
    "cpus-per-task": "launch.cpus_per_task",
    "dependency": "ftsupervise launch --after JOBID",
    "exclude": "launch.exclude",
    "gpus-per-node": "launch.gpus_per_node",
    "job-name": "name",
    "mem": "launch.mem",
    "no-requeue": "launch.requeue",
    "nodes": "launch.nodes",
    "ntasks-per-node": "launch.tasks_per_node",
    "output": "launch.output",
    "parsable": "nothing: ftsupervise reads sbatch's answer itself",
    "partition": "launch.partition",
    "qos": "launch.qos",
    "requeue": "launch.requeue",
    "reservation": "launch.reservation",
    "signal": "launch.signal and launch.warn",
    "test-only": "ftsupervise launch --dry-run",
    "time": "launch.time",
    "wait": "ftsupervise watch",
    "wrap": "launch.command",
}
# Words that other programs have for a key of ``launch``: PBS, LSF and SGE, Slurm's own listings, submitit.
_OTHERS_WORDS = {
    "duration": "time",
    "max-time": "time",
    "queue": "partition",
    "time-limit": "time",
    "timelimit": "time",
    "wall-time": "time",
    "walltime": "time",
}
# Further options of sbatch that launch.sbatch takes; those with a key of their own are also named there.
_FURTHER_WORDS = """
    acctg-freq batch bb bbf begin cluster-constraint clusters container container-id contiguous core-spec
    cores-per-socket cpu-freq cpus-per-gpu deadline delay-boot distribution export export-file extra extra-node-info
    get-user-env gpu-bind gpu-freq gpus gpus-per-socket gpus-per-task gres-flags hold ignore-pbs input
    kill-on-invalid-dep mcs-label mem-bind mincpus network nice nodefile nodelist ntasks-per-core ntasks-per-gpu
    ntasks-per-socket overcommit oversubscribe power prefer priority profile propagate reboot resv-ports segment
    sockets-per-node spread-job stepmgr switches thread-spec threads-per-core time-min tmp tres-bind tres-per-task
    use-min-nodes wait-all-nodes wckey
"""
_FURTHER = frozenset(_FURTHER_WORDS.split())
# Keys of ``launch`` for options that may stand in launch.sbatch instead: once, not twice.
KEYS = {
    "error": "error",
    "exclusive": "exclusive",
    "gres": "gres",
    "hint": "hint",
    "licenses": "licenses",
    "mem-per-cpu": "mem_per_cpu",
    "mem-per-gpu": "mem_per_gpu",
    "ntasks": "ntasks",
}
_OPTION = re.compile(r"--([a-z][a-z0-9-]*)(?:=(.*))?")
# Whole names that happen to begin one of ours.
_OTHER = frozenset({"no-kill"})


def option_name(text: str) -> str:
    """Return "exclusive" for "--exclusive=user"; "" for a word that is no long option."""
    match = _OPTION.fullmatch(text)
    return match[1] if match else ""


def instead_of(key: str, value: object) -> str:
    """Return the setting to write in place of an option of sbatch written as the key ``key``; "" where neither it nor
    another scheduler has one of that name.
    """
    name = key.replace("_", "-")
    if name in ("mail-type", "mail-user"):
        return (
            "ftsupervise sends the messages itself: name its receivers in alerts.receivers, such as "
            "- email: {host: ..., from: ..., to: [...]}; Slurm's own mail for each job of the chain comes with "
            'sbatch: ["--mail-type=END"]'
        )
    if name == "open-mode":
        return "ftsupervise always appends: leave it out"
    if name in _OTHERS_WORDS:
        return f"did you mean {_OTHERS_WORDS[name]!r}?"
    if name in _OURS:
        return f"for sbatch's --{name} {_instead(name)}"
    if name not in _FURTHER:
        return ""
    plain_value = isinstance(value, (str, int)) and re.fullmatch(r"[\w.:,@/+-]{1,60}", str(value))
    given = "" if value is True or value in (None, "") else f"={value}" if plain_value else "=..."
    return f'write it as an option of sbatch: sbatch: ["--{name}{given}"]'


def _instead(name: str) -> str:
    text = _OURS[name]
    return f"write {text}" if text.startswith("nothing: ") else f"use {text} instead"


def _option(text: str) -> str:
    match = _OPTION.fullmatch(text)
    if not match:
        raise ValueError('expected one option of sbatch, written --key=value, such as "--contiguous" or "--switches=1"')
    name = match[1]
    if name in _OURS:
        raise ValueError(f"--{name} is set by ftsupervise itself; {_instead(name)}")
    begun = [ours for ours in _OURS if ours.startswith(name)]
    if begun and name not in _OTHER and name not in KEYS and name not in _FURTHER:
        raise ValueError(f"--{name} is short for --{begun[0]}, which ftsupervise sets itself; {_instead(begun[0])}")
    return text


SbatchOption = Annotated[
    str, AfterValidator(_option), WithJsonSchema({"type": "string", "pattern": "^--", "examples": ["--switches=1"]})
]
