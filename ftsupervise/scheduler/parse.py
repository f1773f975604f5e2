"""Slurm's words into values, and back: pure, so that every odd line ever seen can be a test.

The queue is read from ``squeue -o`` with control characters as separators, free text last: names may hold spaces, bars,
tabs and anything else, ``-O`` cuts at 20 columns, and ``--json`` of 22.05 answers "no jobs" when nobody was asked.
"""

from __future__ import annotations

import re
from datetime import datetime, timedelta, timezone

from ftsupervise.hostlist import expand_hostlist
from ftsupervise.jobs import Job, JobState
from ftsupervise.units import parse_slurm_time

RECORD = "\x1e"
FIELD = "\x1f"
# squeue(1) letters: id, array's id, raw id, state, user, start, end, submit, limit, reason, dependency, nodes, directory,
# comment, name
_LETTERS = "iFATuSeVlrENZkj"
SQUEUE_FORMAT = RECORD + FIELD.join(f"%{letter}" for letter in _LETTERS)
SQUEUE_ENV = {"SLURM_TIME_FORMAT": "%s", "SLURM_BITSTR_LEN": "0"}

_NOTHING = {"", "N/A", "NONE", "None", "(null)", "Unknown", "n/a"}


def parse_queue(text: str) -> tuple[Job, ...]:
    """The output of ``squeue -h -o SQUEUE_FORMAT``. Raises ValueError when it is not that."""
    head, *records = text.split(RECORD)
    if head.strip():
        raise ValueError(f"squeue printed something unexpected: {head.strip()[:200]!r}")
    return tuple(_record(record.removesuffix("\n")) for record in records)


def _record(record: str) -> Job:
    fields = record.split(FIELD, len(_LETTERS) - 1)
    if len(fields) != len(_LETTERS):
        raise ValueError(f"squeue printed a line with {len(fields)} of {len(_LETTERS)} fields: {record[:200]!r}")
    job_id, base, raw, state, user, start, end, submit, limit, reason, dependency, nodes, directory, comment, name = (
        fields
    )
    return Job(
        id=job_id,
        base_id=base or raw,
        raw_id=raw,
        name=name,
        user=user,
        state=parse_state(state),
        reason="" if reason in _NOTHING else reason,
        dependency="" if dependency in _NOTHING else dependency,
        comment="" if comment in _NOTHING else comment,
        nodes=expand_hostlist("" if nodes in _NOTHING else nodes),
        submit_time=parse_epoch(submit),
        start_time=parse_epoch(start),
        end_time=parse_epoch(end),
        time_limit=parse_limit(limit),
        directory="" if directory in _NOTHING else directory,
    )


def parse_state(word: str) -> JobState:
    """ "CANCELLED by 1001" and "RUNNING" alike; a word nobody knows yet is OTHER."""
    try:
        return JobState(word.strip().split(" ")[0].rstrip("+").upper())
    except ValueError:
        return JobState.OTHER


def parse_epoch(text: str) -> datetime | None:
    """Epoch seconds (SLURM_TIME_FORMAT=%s) as UTC; None for Slurm's many ways to say that there is no time."""
    text = text.strip()
    if text in _NOTHING or not text.lstrip("-").isdigit():
        return None
    value = int(text)
    return datetime.fromtimestamp(value, timezone.utc) if 0 < value < 10**11 else None


def parse_limit(text: str) -> timedelta | None:
    """squeue's %l: "20:00:00", "1-00:00:00", "30:00" (minutes:seconds); None for UNLIMITED, INVALID, NOT_SET."""
    try:
        return parse_slurm_time(text)
    except ValueError:
        return None


_ARRAY_ITEM = re.compile(r"(\d+)(?:-(\d+)(?::(\d+))?)?")


def array_size(job_id: str) -> int:
    """How many members one queue record stands for: "88_[3-10%1]" -> 8, "88_[1-9:2%1]" -> 5, "88_3" and "87" -> 1."""
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
    """The words of an ``#SBATCH`` line as ``quote`` writes them."""
    return [re.sub(r'\\(.)|"', r"\1", word) for word in _WORD.findall(line)]


def directives(script: str) -> dict[str, str]:
    """The ``#SBATCH --key=value`` lines of a script (up to its first command, as sbatch reads them), last one wins."""
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
    """``value`` as one word of an ``#SBATCH`` line. Raises ValueError for control characters.

    sbatch's own rules, not the shell's: a backslash escapes even inside single quotes, and a quoted newline ends the
    line all the same, so that the rest of the value would be run as a command.
    """
    if any(ord(character) < 32 or ord(character) == 127 for character in value):
        raise ValueError(f"control characters cannot stand in a job script: {value!r}")
    if re.fullmatch(r"[A-Za-z0-9_@%+=:,./\[\]-]+", value):
        return value
    return '"' + value.replace("\\", "\\\\").replace('"', '\\"') + '"'
