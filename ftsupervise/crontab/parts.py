"""Which files in a cron folder count, and why the others do not. Pure; the rules of run-parts, without its silences.

run-parts passes over ``check.sh`` without a word because of the dot; here a dot is fine, only what an editor, a package
manager or a version control system leaves behind is passed over, and everything that is passed over is listed with why.
"""

from __future__ import annotations

import re
import stat
from dataclasses import dataclass
from enum import Enum

JOB_SCRIPTS = (".slurm", ".sbatch")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_LEFTOVER = re.compile(
    r".*(~|,v|\.(bak|orig|rej|swp|swo|tmp|new|old|save|disabled|cfsaved|rpmsave|rpmorig|rpmnew|dpkg-[a-z]+|ucf-[a-z]+))"
)


_PROSE = re.compile(r"(README|LICENSE|NOTES|TODO).*|.*\.(md|txt|rst|ya?ml|json|cfg|ini|toml|log|out)", re.I)


class Kind(Enum):
    EXECUTABLE = "executable"
    JOB = "job"  # handed to sbatch as a job of its own


@dataclass(frozen=True)
class Verdict:
    """``kind`` if the file is an entry; else None, and ``why`` with what to do about it.

    ``wanted``: somebody surely meant it to run, so that passing over it is worth an alert.
    """

    kind: Kind | None
    why: str = ""
    wanted: bool = False


def judge(name: str, mode: int, *, executable: bool) -> Verdict:
    """What a file called ``name`` in a cron folder is. ``mode`` as stat(2) gives it, links followed."""
    if name.startswith("."):
        return Verdict(None, "hidden")
    if _LEFTOVER.fullmatch(name):
        return Verdict(None, "looks like something an editor or installer left behind")
    if not _NAME.fullmatch(name):
        return Verdict(None, "a name is made of letters, digits and _ . + -")
    if stat.S_ISDIR(mode):
        return Verdict(None, "a directory")
    if not stat.S_ISREG(mode):
        return Verdict(None, "not a regular file")
    if mode & stat.S_IWOTH:
        return Verdict(None, f"everybody may write it: chmod o-w {name}", wanted=True)
    if name.endswith(JOB_SCRIPTS):
        return Verdict(Kind.JOB)
    if not executable:
        return Verdict(None, f"not executable: chmod +x {name}", wanted=not _PROSE.fullmatch(name))
    return Verdict(Kind.EXECUTABLE)


def with_directives(script: str, first: tuple[str, ...], last: tuple[str, ...]) -> str:
    """A job script with ``#SBATCH`` lines added: ``first`` ones give way to the script's own, ``last`` ones do not.

    sbatch reads such lines up to the first command, and of two for the same option the later one counts.
    Raises ValueError when it is no script.
    """
    lines, end = _head(script)
    head = [lines[0], *(f"#SBATCH {option}\n" for option in first)]
    return "".join([*head, *lines[1:end], *(f"#SBATCH {option}\n" for option in last), *lines[end:]])


def with_first_command(script: str, command: str) -> str:
    """A job script with one more line before its first command. Raises ValueError when it is no script."""
    lines, end = _head(script)
    return "".join([*lines[:end], f"{command}\n", *lines[end:]])


def _head(script: str) -> tuple[list[str], int]:
    """The lines, and how many of them come before the first command."""
    lines = script.splitlines(keepends=True)
    if not lines or not lines[0].startswith("#!"):
        raise ValueError("a job script begins with a line such as #!/bin/bash")
    if not lines[-1].endswith("\n"):
        lines[-1] += "\n"
    end = 1
    while end < len(lines) and (not lines[end].strip() or lines[end].startswith("#")):
        end += 1
    return lines, end
