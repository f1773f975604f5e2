"""Text of others made harmless to print, once, where it enters or where it leaves; and our own lines in a job's log.

Job names, host names, file names, log lines and Slurm's own words come from strangers. A control character in them moves the
cursor, clears the screen or renames the terminal; a direction mark shows words in another order than they stand.
Standard library only, and little of it: the guard uses this inside the training loop.
"""

from __future__ import annotations

import time

# The pattern of how a line of ours begins in a job's log: with its time, or without one when a command failed and says why.
OUR_TIME = r"(?:\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ )?"
OUR_LINE = OUR_TIME + "ftsupervise: "
# one that Slurm writes into a job's output, behind the label that srun may give it; from 25.11 on slurmstepd says only the time
SLURMS_LINE = r"(?:\d+: ?)?(?:srun: |slurmstepd(?:-\S+)?: |\[\d{4}-\d\d-\d\dT\S+\] error: )"


def log_line(text: str) -> str:
    """Return ``text`` as a line of ours in the job's log, beside the training's own: ``2026-11-22T01:02:03Z
    ftsupervise: TEXT``.
    """
    return f"{time.strftime('%Y-%m-%dT%H:%M:%SZ', time.gmtime())} ftsupervise: {text}"


def printable(text: str, limit: int = 0) -> str:
    """Return ``text`` with ``?`` for each invisible character (controls, escapes, direction marks, lone surrogates).

    Line feeds and tabs are replaced too; the text is cut to ``limit`` characters, unless that is 0.
    """
    if not (text.isascii() and text.isprintable()):
        text = "".join(char if char.isprintable() else "?" for char in text)
    return text if not limit or len(text) <= limit else text[: limit - 1] + "…"


def printable_lines(text: str) -> str:
    """Return the same for text of several lines: line feeds and tabs stay."""
    return "".join(char if char in "\n\t" or char.isprintable() else "?" for char in text)


def to_type(path: object) -> str:
    """Return a path as a shell takes it, for a command that a person is told to type: others may have named it."""
    import shlex  # here: a quick command has no need of it

    return shlex.quote(str(path))
