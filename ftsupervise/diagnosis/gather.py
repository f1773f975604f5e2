"""Gathers what is known of an attempt of a run, or of a folder of logs and dumps from elsewhere."""

from __future__ import annotations

import errno
from collections.abc import Callable, Iterable, Sequence
from itertools import islice
from pathlib import Path

from ftsupervise.diagnosis.first_failure import FirstFailure, LogFile, first_failure
from ftsupervise.diagnosis.flight_recorder import FlightRecord, dump_files, read_flight_record
from ftsupervise.diagnosis.stacks import RankStack, read_stacks
from ftsupervise.diagnosis.verdict import Material
from ftsupervise.errors import ConfigError
from ftsupervise.host.ownership import strangers_link
from ftsupervise.model import Attempt
from ftsupervise.nodes.incidents import Incident
from ftsupervise.nodes.judging import of_run_dir, read
from ftsupervise.report.output import Part, not_theirs, output_files, parts_of, rank_files
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import read_progress

MOST = 1 << 30  # bytes of output that are read without being asked for all: the last ones of each file
_RANK_FILES = 100_000
_LOGS = (".log", ".out", ".err", ".txt")
_FILES = 20_000  # of a folder
Progress = Callable[[], object]


def of_attempt(
    rundir: RunDir, attempts: Sequence[Attempt], one: Attempt, *, whole: bool, progress: Progress, most: int = MOST
) -> Material:
    """Return what is known of the attempt ``one`` of ``attempts``. ``whole``: its output from the beginning, however large,
    else the last ``most`` bytes. Raises nothing for what cannot be read: it is named."""
    unseen: list[str] = []
    folder = rundir.attempt(one.number) / "evidence"
    parts = [part for part in parts_of(attempts) if part.attempt == one.number] or (
        output_files(rundir, rundir.root.name) if one is attempts[-1] else []
    )
    logs = _readable(rundir, (log for part in parts for log in _logs_of(part)), unseen)
    output = first_failure(logs if whole else _last_of(logs, most), year=one.started.year, progress=progress)
    if not parts:
        unseen.append("where its output went is not known")
    page = read_progress(rundir, one.number)
    return Material(
        one,
        output,
        _stacks(folder, unseen),
        _flight(folder / "flight", unseen, progress),
        tuple(unseen),
        straggler=page.straggler if page is not None else None,
    )


def of_pages(folder: Path, progress: Progress) -> tuple[Sequence[RankStack], FlightRecord | None, tuple[str, ...]]:
    """Return the stacks and the flight recorder's dumps that lie in a folder of evidence, and what could not be read."""
    unseen: list[str] = []
    return _stacks(folder, unseen), _flight(folder / "flight", unseen, progress), tuple(unseen)


def of_folder(folder: Path, *, whole: bool, progress: Progress) -> Material:
    """Return what the logs, pages of evidence and dumps in a folder tell. Raises OSError where it cannot be listed."""
    unseen: list[str] = []
    if link := strangers_link(folder):
        raise PermissionError(errno.EPERM, f"{link}, so it is not followed", str(folder))
    names = sorted(one.name for one in islice(folder.iterdir(), _FILES))
    logs = [
        LogFile(folder / name, _number_in(name)) for name in names if name.endswith(_LOGS) and (folder / name).is_file()
    ]
    stacks = _stacks(folder, unseen)
    read = {f"rank-{one.rank}.txt" for one in stacks}
    logs = [log for log in logs if log.path.name not in read]
    output = first_failure(logs if whole else _last_of(logs), progress=progress) if logs else FirstFailure(None, ())
    return Material(None, output, stacks, _flight(folder, unseen, progress), tuple(unseen))


def _readable(rundir: RunDir, logs: Iterable[LogFile], unseen: list[str]) -> list[LogFile]:
    """Return those files that the run may name as its output, whosever it is."""
    kept = []
    for log in logs:
        if why := not_theirs(rundir, log.path):
            unseen.append(why)
        else:
            kept.append(log)
    return kept


def _number_in(name: str) -> int | None:
    digits = "".join(one if one.isdigit() else " " for one in name.rpartition(".")[0]).split()
    return int(digits[-1]) if digits and len(digits[-1]) < 7 else None


def _logs_of(part: Part) -> list[LogFile]:
    """Return the file of a part, and those beside it that differ by the number of a rank."""
    found = [LogFile(part.path, part.rank, begin=part.begin, end=part.end)]
    for rank in range(1, _RANK_FILES):
        other = rank_files(part, rank)
        if other is None:
            break
        found.append(LogFile(other.path, rank))
    return [found[0]._replace(rank=0), *found[1:]] if len(found) > 1 else found


def _last_of(logs: Sequence[LogFile], most: int = MOST) -> list[LogFile]:
    """Return the same, each no longer than its share of ``most`` bytes: its end."""
    share, found = most // max(1, len(logs)), []
    for log in logs:
        try:
            size = log.path.stat().st_size
        except OSError:
            size = 0
        end = size if log.end is None else min(log.end, size)
        found.append(log._replace(begin=max(log.begin, end - share)))
    return found


def _stacks(folder: Path, unseen: list[str]) -> list[RankStack]:
    try:
        if link := strangers_link(folder):
            unseen.append(f"{link}, so it is not followed")
            return []
        return read_stacks(folder)
    except OSError as error:
        unseen.append(f"{folder}: {error.strerror or error}")
        return []


def _flight(folder: Path, unseen: list[str], progress: Progress) -> FlightRecord | None:
    try:
        if strangers_link(folder):  # which _stacks has told
            return None
        dumps = {rank: path for rank, path in dump_files(folder).items() if not path.name.endswith(_LOGS)}
    except FileNotFoundError:
        return None
    except OSError as error:
        unseen.append(f"{folder}: {error.strerror or error}")
        return None
    if not dumps:
        return None
    found = read_flight_record(dumps, progress=progress)
    unseen.extend(found.unread[:10])
    return found if found.ranks else None


def chosen(attempts: Sequence[Attempt], number: int | None) -> Attempt | None:
    """Return the attempt that is meant: ``number``, else the newest that failed, else the newest. None: there is none."""
    if number is not None:
        return next((one for one in attempts if one.number == number), None)
    failed = [one for one in attempts if one.has_failed]
    return failed[-1] if failed else attempts[-1] if attempts else None


def incidents_on(rundir: RunDir, nodes: Sequence[str]) -> tuple[Incident, ...]:
    """Return the incidents of these nodes, those of other runs too where the settings name a directory that they share. It is
    left out where it does not answer in a few seconds."""
    if not nodes:
        return ()
    try:
        known, _ = read(of_run_dir(rundir)[1])
    except ConfigError:
        return ()
    return tuple(one for one in known.incidents if one.node in nodes)
