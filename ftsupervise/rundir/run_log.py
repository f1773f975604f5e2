"""The supervisor's lines: on stderr, which is the job's output, and in the attempt's own log. Neither may fail the command."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.host.modes import PAGE, as_page
from ftsupervise.printable import log_line, printable
from ftsupervise.rundir.paths import WARNING, write_whole


def tell(log: Path | None, text: str) -> None:
    """Write ``text`` as one printable line: parts of it come from a job, a health command or Slurm."""
    text = printable(text)
    try:
        print(log_line(text), file=sys.stderr, flush=True)
    except (OSError, ValueError, AttributeError):
        pass
    if log is None:
        return
    try:
        with os.fdopen(as_page(log), "a", encoding="utf-8") as file:
            file.write(f"{datetime.now(timezone.utc).isoformat(timespec='milliseconds')} {text}\n")
    except OSError:
        return


def warn(folder: Path, words: str, say: Callable[[str], None], signal: int = 0) -> None:
    """Write the file that asks the guards of an attempt, on any node, to stop. On a full disk an empty file is enough.

    The first line is for people, the second for the ledger: the ``signal`` that asked us, if one did, and the time.
    """
    path, at = folder / WARNING, datetime.now(timezone.utc)
    try:
        write_whole(path, f'{words}\n{{"signal": {int(signal)}, "at": "{at.isoformat()}"}}\n')
    except OSError as error:
        try:
            path.touch(mode=PAGE)
        except OSError:
            say(f"cannot write {path}: {error.strerror}; only the signal is passed on")


def shown(command: tuple[str, ...]) -> str:
    """A command in one line that is not too long."""
    import shlex

    text = shlex.join(command)
    return text if len(text) <= 200 else text[:199] + "…"
