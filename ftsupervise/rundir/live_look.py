"""The question how the ranks of a running attempt are at this moment, and its answer: two pages that a person and the
supervisor leave for each other, because the run directory is what a login node and every node of the job can reach.

    attempts/NNNN/asked.json             the question; the supervisor takes it away, and believes it of the run's account alone
    attempts/NNNN/evidence/now/          the answer: now.json, and a page for each rank that was asked (rank-N.txt)

The answer replaces the one before. Who gets none in time takes the question back.
"""

from __future__ import annotations

import os
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host import files
from ftsupervise.host.ownership import distrust, held_to_write, make_folder, remove_entry
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.rundir.records import EPOCH, read_record, write_json

ASKED = "asked.json"
NOW = Path("evidence", "now")
_ANSWER = "now.json"
_LARGEST = 64 << 20  # bytes of an answer
_PAGES = ("rank-", "rank_", "node-")  # of the evidence (ranks/evidence.py)
FLIGHT = "flight"


class LiveQuestion(NamedTuple):
    """A person asks. ``id``: nobody guesses it."""

    id: Annotated[str, 100] = ""
    at: datetime = EPOCH


class RankNow(NamedTuple):
    """A rank as its supervisor knows it. Ages in seconds."""

    rank: int = 0
    node: str = ""
    step: int | None = None
    phase: Annotated[str, 100] = ""
    stepped: float = 0.0
    beaten: float = 0.0
    heard: float = 0.0
    state: str = ""  # of its process, one letter
    pid: int = 0
    read: bool = False  # its step was read from the output


class LiveAnswer(NamedTuple):
    """The answer of the supervisor. ``progress``: all ranks as one, at the same moment."""

    id: Annotated[str, 100] = ""
    at: datetime = EPOCH
    ranks: Annotated[tuple[RankNow, ...], 200_000] = ()
    asked: int = 0  # of them, for their stacks
    silent: Annotated[tuple[str, ...], 100_000] = ()  # nodes that did not answer
    progress: ProgressPage | None = None


def ask(attempt: Path, question: LiveQuestion) -> None:
    """Leave a question for the supervisor of the attempt in the folder ``attempt``. Raises OSError."""
    write_json(attempt / ASKED, question, sync=False)


def waits(attempt: Path) -> bool:
    """Return whether a question lies there that nobody has taken. Raises OSError."""
    return bool(files.among(attempt, (ASKED,)))


def take_back(attempt: Path) -> None:
    """Remove a question that nobody has taken. Raises OSError."""
    remove_entry(attempt / ASKED)


def take_question(attempt: Path) -> LiveQuestion | None:
    """Return the question that lies there, and take it away; None where there is none, or another account's. Raises OSError.

    The folder is listed: on NFS a missing name may be cached for a minute.
    """
    if not waits(attempt):
        return None
    try:
        found = read_record(LiveQuestion, attempt / ASKED, distrust=lambda seen: distrust(seen, attempt / ASKED))
    except (OSError, ValueError):  # another's, no regular file, or damaged
        found = None
    take_back(attempt)
    return found


def begin_answer(attempt: Path) -> Path:
    """Return the folder for an answer, without the pages of the last one. Raises OSError."""
    make_folder(attempt / NOW, parents=True)
    for folder in (attempt / NOW, attempt / NOW / FLIGHT):
        make_folder(folder)
        with held_to_write(folder) as here:
            for name in os.listdir(here):
                if name.startswith((*_PAGES, files.TEMPORARY)):
                    (here / name).unlink(missing_ok=True)
    return attempt / NOW


def answer(attempt: Path, found: LiveAnswer) -> None:
    """Write the answer: its pages are there. Raises OSError."""
    write_json(attempt / NOW / _ANSWER, found, sync=False, indent=None)


def read_answer(rundir: RunDir, number: int) -> LiveAnswer | None:
    """Return the newest answer about attempt ``number``; None where there is none. Raises OSError, ValueError."""
    folder = rundir.attempt(number) / NOW
    try:
        if not files.among(folder, (_ANSWER,)):
            return None
    except FileNotFoundError:
        return None
    path = folder / _ANSWER
    return read_record(LiveAnswer, path, limit=_LARGEST, distrust=lambda seen: distrust(seen, path))
