"""Keeps what speaks for and against each node: the incidents of runs, and what people decide by hand.

    PLACE/incidents/WRITER.json the incidents that one supervisor has seen; one file per writer, merged when read
    PLACE/exclude/NODE          a person excludes it: ``touch`` excludes, ``rm`` takes it back; JSON says by whom and why
    PLACE/trust/NODE            it is never excluded because of its score
    PLACE/cleared/NODE          incidents before this file was written do not count
    PLACE/applied/JOB           which of a waiting job's excluded nodes were excluded by us, and may be taken back

A place is ``RUN/nodes``, and a directory shared by all runs that name it (``nodes.directory``), because a bad node is bad
for every run. What follows for a node is decided in ``judging.py``.
Light (standard library): the supervisor reads this between two attempts, and ``ftsupervise nodes`` in a hurry.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.ownership import (
    FOLDER,
    NotTrusted,
    distrust_in,
    distrust_shared,
    held,
    make_folder,
    may_be_changed,
    stranger,
)
from ftsupervise.printable import printable, to_type
from ftsupervise.rundir.paths import sync_directory
from ftsupervise.rundir.records import LONGEST, as_text, decode, read_json, read_record, time_of, write_json

WORDS = EXCLUDE, TRUST, CLEARED, INCIDENTS, APPLIED = "exclude", "trust", "cleared", "incidents", "applied"

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,252}")
FADED = timedelta(days=20)  # after which an incident does not count, and may be forgotten
_MOST = 400  # incidents that one writer keeps
_FILES = 10_000  # files of one folder that are read
_PAGE, _BYTES = 4_000_000, 64_000_000  # bytes of one page, and of all incidents of a place
_MARK = 4_000  # bytes of the page of one mark; ours have a few hundred
_SAID = 50  # problems of all places that are told one by one


class Incident(NamedTuple):
    """One failure that speaks against a node. ``kind`` is a key of WEIGHTS (``judging.py``)."""

    node: str
    kind: str
    at: datetime
    run: str = ""
    job: str = ""
    attempt: int = 0
    rank: str = ""  # "3", or several as Slurm writes them
    sign: str = ""  # the failure as the brake counts it
    by: str = ""  # the host of the supervisor that saw it
    evidence: str = ""  # the most telling line


class Override(NamedTuple):
    """A person's decision about a node."""

    node: str
    word: str  # EXCLUDE, TRUST or CLEARED
    at: datetime
    who: str = ""
    why: str = ""
    until: datetime | None = None
    place: str = ""


class OverridePage(NamedTuple):
    """The page of an Override, whose name and folder say the rest."""

    who: str = ""
    why: str = ""
    at: datetime | None = None
    until: datetime | None = None


class NodeHistory(NamedTuple):
    """All records in the places. ``problems``: what could not be read, a sentence each."""

    incidents: tuple[Incident, ...] = ()
    overrides: tuple[Override, ...] = ()
    problems: tuple[str, ...] = ()


def is_name(text: str) -> bool:
    """Return whether it can be the name of a node (and of a file)."""
    return _NAME.fullmatch(text) is not None


def read(places: Sequence[Path]) -> NodeHistory:
    """Return all records in ``places``, the run's own first. Never raises: what cannot be read stands in ``problems``."""
    incidents: dict[Incident, None] = {}
    marks: list[Override] = []
    problems: list[str] = []
    for place in places:
        left = _BYTES
        for path, whose in _listed(place / INCIDENTS, problems):
            found, size = _incidents(path, whose, min(left, _PAGE), problems)
            incidents.update(dict.fromkeys(found))
            left -= size
        for word in (EXCLUDE, TRUST, CLEARED):
            listed = _listed(place / word, problems)
            marks += [mark for path, whose in listed if (mark := _override(path, whose, word, place, problems))]
    more = [f"and {len(problems) - _SAID} problems more"] if len(problems) > _SAID else []
    return NodeHistory(tuple(incidents), tuple(marks), (*problems[:_SAID], *more))


def read_shared(place: Path) -> NodeHistory:
    """Do as ``read`` for a list that several runs share: whoever has made it is not believed for having made it."""
    try:
        with held_shared(place) as here:
            found = read([here])
    except FileNotFoundError:
        return NodeHistory()
    except OSError as error:
        return NodeHistory(problems=(f"{place} cannot be read: {error.strerror}",))
    except NotTrusted as error:
        return NodeHistory(problems=(f"{place} is left out: {error.message}",))
    marks = tuple(one._replace(place=f"{place}") for one in found.overrides)
    return NodeHistory(found.incidents, marks, tuple(one.replace(f"{here}", f"{place}") for one in found.problems))


@contextmanager
def held_shared(place: Path, *, make: bool = False) -> Iterator[Path]:
    """Do as ``held`` for a list that several runs share, which ``make`` makes. Raises NotTrusted too where it is another
    account's, who does not share it with this one."""
    if make:
        make_folder(place, FOLDER, parents=True)
    with held(place) as here:
        if reason := distrust_shared(here.stat(), place):
            raise NotTrusted(reason, hint=f"look at it: ls -ld {to_type(place)}")
        yield here


def _listed(folder: Path, problems: list[str]) -> list[tuple[Path, os.stat_result]]:
    """Return the files of ``folder``, each with the stat of the folder; only some of them where there are too many."""
    try:
        whose = folder.stat()
        if reason := stranger(folder.parent.stat(), whose):
            problems.append(f"{folder}: {reason}; nothing in it is obeyed")
            return []
        with os.scandir(folder) as entries:
            names = [entry.name for entry in islice(entries, _FILES + 1) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return []
    except OSError as error:
        problems.append(f"{folder} cannot be read: {error.strerror}")
        return []
    if len(names) > _FILES:
        problems.append(f"{folder} holds more than {_FILES} files; the rest is left out")
    return [(folder / name, whose) for name in sorted(names)[:_FILES]]


def _incidents(path: Path, whose: os.stat_result, limit: int, problems: list[str]) -> tuple[list[Incident], int]:
    """Return the incidents that one writer has seen, and the size of its page."""
    size = 0
    try:
        size = min(path.lstat().st_size, limit)
        page = read_json(path, limit=limit, distrust=distrust_in(whose, path))
    except (OSError, ValueError) as error:
        problems.append(printable(f"{path} is left out: {error}", 600))
        return [], size
    raw = (page or {}).get("incidents")
    found = decode(tuple[Incident, ...], raw[-_MOST:] if isinstance(raw, list) else [], lenient=True)
    return [one for one in found if is_name(one.node)], size


def _override(path: Path, whose: os.stat_result, word: str, place: Path, problems: list[str]) -> Override | None:
    if not is_name(path.name):
        problems.append(f"{path.parent}/{as_text(path.name)} is not the name of a node; it is not obeyed")
        return None
    try:
        found = path.lstat()
        if reason := stranger(whose, found):
            problems.append(f"{path}: {reason}; it is not obeyed")
            return None
        at = time_of(found)
        try:
            page = read_record(
                OverridePage, path, limit=_MARK, distrust=lambda opened: may_be_changed(whose, opened, path)
            )
        except ValueError:  # ``touch`` is enough; the contents, which others may have written, are not read
            page = None
    except FileNotFoundError:
        return None
    except OSError as error:
        problems.append(f"{path} cannot be read: {error.strerror}; it is not obeyed")
        return None
    said = page or OverridePage()
    return Override(path.name, word, said.at or at, said.who, said.why, said.until, f"{place}")


class IncidentLog:
    """The incidents that one process has seen. ``writer`` is a name that no other process in the world has."""

    def __init__(self, writer: str) -> None:
        self.writer = re.sub(r"[^A-Za-z0-9._-]", "_", writer)[:200]
        self.seen: list[Incident] = []

    def add(self, incidents: Iterable[Incident]) -> None:
        self.seen = [*self.seen, *incidents][-_MOST:]

    def write(self, places: Sequence[Path]) -> tuple[str, ...]:
        """Write down all incidents in each of ``places``; returns what could not be written, a sentence each. Never raises."""
        page = {"incidents": self.seen}
        problems = []
        for place in places:
            try:
                with held(folder(place, INCIDENTS)) as here:
                    write_json(here / f"{self.writer}.json", page)
            except OSError as error:
                problems.append(f"cannot write {place}: {error.strerror}")
            except NotTrusted as error:
                problems.append(f"nothing is written into {place}: {error}")
        return tuple(problems)

    def write_shared(self, place: Path) -> tuple[str, ...]:
        """Do as ``write``, for a list that several runs share."""
        try:
            with held_shared(place, make=True) as here:
                return tuple(one.replace(f"{here}", f"{place}") for one in self.write([here]))
        except (OSError, NotTrusted) as error:
            reason = error.strerror if isinstance(error, OSError) else error.message
            return (f"nothing is written into {place}: {reason}",)


def folder(place: Path, word: str) -> Path:
    """Return ``PLACE/word``, made if it is not there, and shared with the group where the place is. Raises OSError."""
    found = place / word
    make_folder(place, FOLDER, parents=True)
    make_folder(found)
    return found


def set_override(
    place: Path, word: str, node: str, *, who: str, why: str, now: datetime, until: datetime | None = None
) -> None:
    """Mark ``node`` as EXCLUDE, TRUST or CLEARED; an earlier mark there is gone. Raises OSError, NotTrusted."""
    with held(folder(place, word)) as here:
        write_json(here / node, OverridePage(who, why[:LONGEST], now, until))
    for other in {EXCLUDE, TRUST} - {word}:
        try:
            with held(place / other) as here:
                os.unlink(here / node)
                sync_directory(here)
        except FileNotFoundError:
            continue


def any_exclusions(place: Path) -> bool:
    """Return whether we have excluded a node for any waiting job."""
    try:
        return bool(os.listdir(place / APPLIED))
    except OSError:
        return False


def forget(place: Path, now: datetime) -> None:
    """Remove the files of ``place`` in which nothing counts any more: a run of many jobs reads them after each failure. Others
    may write the place where it is shared, so the folder is held, and no link of theirs is followed."""
    try:
        with held(place / INCIDENTS) as here:
            for path in here.iterdir():
                if now.timestamp() - path.lstat().st_mtime > FADED.total_seconds():
                    path.unlink(missing_ok=True)
    except (OSError, NotTrusted):  # not ours to remove, or not there
        return


def prepare(place: Path) -> None:
    """Make the folders of a place, so that ``touch`` is enough for people. Raises OSError."""
    for word in WORDS:
        folder(place, word)
