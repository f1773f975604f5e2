"""Settings of a launch that are well-formed and will not work as intended: ``config check`` and ``launch`` say so."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.host.in_time import LOOK, in_time
from ftsupervise.launch.plan import output_folders
from ftsupervise.launch.shell_code import (
    Kind,
    calls_srun,
    expands,
    program_words,
    python_files,
    shell_files,
    understand,
)
from ftsupervise.replicas.bounds import derive
from ftsupervise.scheduler import LOCAL
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_EACH_JOB = (
    "SLURM_ARRAY_TASK_ID", "SLURM_ARRAY_JOB_ID", "SLURM_JOB_ID", "SLURM_JOBID", "SLURM_JOB_START_TIME", "SLURM_RESTART_COUNT",
)  # fmt: skip
# Where the number of the job is only told, or names what lives no longer than the job.
_HARMLESS = re.compile(
    r"--(?:jobid|rdzv[-_]id)(?:\s+|=)\S+|(?:MASTER_)?PORT=.*$"
    r"|^\s*(?:echo|printf(?!\s+-v))\b.*$|(?:[;{]|&&|\|\||\b(?:then|do|else))\s*(?:echo|printf(?!\s+-v))\b[^;&|\n]*"
    r"|(?<![\w./-])(?:sacct|scancel|scontrol|seff|squeue|sstat)\s[^;&|)`\n]*"
    r"|(?:(?:&|\b\d)?>>?(?![&(])|>&(?!\s*[\d-])|\|\s*tee\b(?:\s+-a)?)\s*(?:\"[^\"\n]*\"|[^\s;&|()<>\"]+)+",
    re.M,
)
# Where a step writes its output: options of srun alone, for a program's own --output may be its checkpoints.
_LOGS = re.compile(
    r"(\bsrun(?:\s+(?:-[\w-]+(?:=\S+)?|\d[\d:,-]*))*?)\s+(?:--(?:output|error)[=\s]|-[oe](?![\w-]))\s*(?:\"[^\"\n]*\"|[^\s;&|\"]+)"
)
Read = Callable[[Path], object]  # the bytes of a file, or anything else where it cannot be read in time
_SCRIPT = re.compile(rb"#!\s*\S*(?:/|env\s+)(?:ba|da|k|z)?sh\b")


def doubts(run: Run, workdir: Path, read: Read) -> tuple[str, ...]:
    """Return a sentence for each. What cannot be read in time is passed over."""
    of_files = (*_nested(run, workdir, read), *leaves_with_0(run, workdir, read))
    return (*of_files, *_differs_in_each_job(run), *_no_folder(run), *_hangs_too_long(run))


def _hangs_too_long(run: Run) -> Iterator[str]:
    """A replica group that hangs for longer than the others wait for it: they end themselves before it is ended."""
    groups, hang = run.launch.replica_groups, run.launch.restart.hang
    if groups is None or hang is None or hang.at_least == type(hang)().at_least:  # else it follows from theirs
        return
    step, period = groups.slowest_step.total_seconds(), groups.sync_period.total_seconds()
    quorum = derive(step, groups.state, groups.count, sync_period=period).quorum
    if hang.at_least.total_seconds() >= quorum / 2:
        yield (
            f"launch.restart.hang.at_least: the other groups end themselves when they have waited {show_duration(quorum)} for "
            f"one that hangs; set it to less than {show_duration(quorum / 2)}, or leave it out: it follows from slowest_step"
        )


def _nested(run: Run, workdir: Path, read: Read) -> Iterator[str]:
    """A script that calls srun, started by the srun that is added to the command: it would wait for ever."""
    found = understand(run.launch.command)
    if not run.launch.srun or run.scheduler == LOCAL or found.kind is Kind.AROUND:
        return
    for word in program_words(found)[:50]:
        path = workdir / word
        data = read(path) if not word.startswith("-") and "\n" not in word else b""
        if not isinstance(data, bytes) or not (_SCRIPT.match(data) or path.suffix == ".sh"):
            continue
        if calls_srun(data.decode("utf-8", "replace")):
            yield (
                f"launch.command: {word} calls srun itself, and the srun around it would wait for it for ever; write "
                "srun: false, and the script runs once in the job"
            )


def leaves_with_0(run: Run, workdir: Path, read: Read) -> Iterator[str]:
    """A Python script without the guard: nothing says what it means when it leaves with 0."""
    if "finished_by" in run.launch.model_fields_set:
        return
    if word := without_guard(run, workdir, read):
        yield (
            f"{word} has no guard: when it leaves with 0 the next members wait, held, until you say if it is finished; "
            'launch: {finished_by: "exit 0"} says that it is then, and mark that it never is'
        )


def without_guard(run: Run, workdir: Path, read: Read) -> str:
    """Return the Python script of the command that has no guard; "" where none is known to lack it."""
    word, guarded = guard_of(run, workdir, read)
    return word if guarded is False else ""


def guard_of(run: Run, workdir: Path, read: Read) -> tuple[str, bool | None]:
    """Return the Python script that the command starts, also in a shell script, and whether it has the guard; None where
    no such script is found.
    """
    if run.launch.replica_groups is not None:
        return "", True
    command = understand(run.launch.command)
    codes = [command]
    for name in shell_files(command)[:10]:
        text = read(workdir / name)
        codes += [understand(text.decode("utf-8", "replace"))] if isinstance(text, bytes) and text.strip() else []
    texts = {word: read(workdir / word) for word in [word for code in codes for word in python_files(code)][:10]}
    there = {word: b"ftsupervise" in data for word, data in texts.items() if isinstance(data, bytes) and data}
    first = sorted(there.items(), key=lambda one: (not one[1], "train" not in one[0]))  # not what only makes a report
    return first[0] if first else ("", None)


def _differs_in_each_job(run: Run) -> Iterator[str]:
    """A number that differs in each job of the chain: every member would train something else, or find no checkpoint."""
    launch = run.launch
    texts = {"launch.command": launch.command, "launch.setup": launch.setup or ""}
    texts |= {f"launch.env.{name}": value for name, value in launch.env.items()}
    for key, text in texts.items():
        for name in job_numbers(text if isinstance(text, str) else "\n".join(text)):
            yield (
                f"{key}: {name} differs in each job of the chain, so what it names (a seed, a shard, a folder of checkpoints) "
                "is another one after each restart; $FTSUPERVISE_CHECKPOINT_DIR is the same in all of them"
            )
    path = run.checkpoints.path
    if path is not None and re.search(r"%[jAaJ]|\bSLURM_", str(path)):
        yield f"checkpoints.path: {path} is taken as it stands; no job's number is filled in"


def without_told(code: str) -> str:
    """Return shell code without the places in which a job's number is only told, or names a log."""
    for _ in range(2):  # the output, and the errors
        code = _LOGS.sub(r"\1", code)
    return _HARMLESS.sub("", code)


def job_numbers(code: str) -> tuple[str, ...]:
    """Return the variables in shell code that name the job, and so differ in each job; not where they are only told, nor where
    the code itself sets them.
    """
    told = expands(without_told(code), _EACH_JOB)
    return tuple(name for name in told if not re.search(rf"(?m)^\s*(?:export\s.*\b)?{name}=", code))


def _no_folder(run: Run) -> Iterator[str]:
    """A folder of the jobs' output that is not there and cannot be made, or does not answer."""
    for folder in output_folders(run):
        found = in_time(lambda folder=folder: (_in_the_way(folder),), LOOK)  # type: ignore[misc]
        if found is None:
            yield f"launch.output: {folder} does not answer within {LOOK:.0f} s: its file system hangs"
            return
        if found[0] is not None:
            yield (
                f"launch.output: {folder} cannot be made or written, because of {found[0]}; "
                "Slurm could not open the file there"
            )


def _in_the_way(folder: Path) -> Path | None:
    there = next((one for one in (folder, *folder.parents) if one.exists()), None)
    return there if there is not None and (not there.is_dir() or not os.access(there, os.W_OK | os.X_OK)) else None
