"""Writes the metrics of a run as a file for node_exporter's textfile collector: one file for each run, replaced whole.

The file says in its first line which run directory it is about and since when. By that a second run of the same name is
noticed, whose samples would clash (node_exporter then drops both), and counters go on from where they were. A file of another
account is never replaced while it is fresh: a colleague's watch writes it. It is readable for all, because node_exporter has an
account of its own, and there is no secret in it.

An hour after a run has finished its file goes, and so does each file of this account that nobody has written for a day.
"""

from __future__ import annotations

import hashlib
import os
import re
import stat
import time
from collections.abc import Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import Error
from ftsupervise.host import files
from ftsupervise.host.ownership import remove_entry, user_name
from ftsupervise.replicas.stalls import read_stalls
from ftsupervise.report import Status
from ftsupervise.report.detail import account_of, avoided_nodes
from ftsupervise.report.metrics import Sample, counters_in, samples, text_of
from ftsupervise.report.queues import QueueSeen
from ftsupervise.report.reading import read_run
from ftsupervise.report.row import row_of
from ftsupervise.report.verdict import verdict_of
from ftsupervise.rundir.paths import RunDir, write_whole
from ftsupervise.rundir.switches import read_finished

if TYPE_CHECKING:
    from ftsupervise.model import Job

FRESH = timedelta(hours=1)  # a file that young belongs to whoever wrote it
KEPT = timedelta(hours=1)  # of a finished run: Prometheus sees the end of it
STALE = timedelta(days=1)  # nobody writes it any more
_PREFIX, _SUFFIX = "ftsupervise-", ".prom"
_HEAD = "# ftsupervise: "
_MOST_FILES = 20_000
_LARGEST = 256 * 1024
_MODE = 0o644


class RunMetrics(NamedTuple):
    name: str
    user: str
    root: Path
    since: float  # begin of its account: counters of a run that began anew begin anew
    samples: tuple[Sample, ...]
    over: bool  # it finished some time ago

    @property
    def head(self) -> str:
        return f"{_HEAD}{self.since:.0f} {self.root!s}".replace("\n", "?")

    @property
    def text(self) -> str:
        return text_of(self.samples)


def measure(
    rundir: RunDir, jobs: tuple[Job, ...] | None, blind: str, now: datetime, *, ticks: bool = False
) -> RunMetrics:
    """Measure one run. ``ticks``: the watch itself asks, and has just looked. Raises Error."""
    run = read_run(rundir, now)
    verdict, why = verdict_of(run, jobs, blind)
    seen = Status(run, verdict, why, jobs, blind)
    row = row_of(run, QueueSeen(jobs, blind))
    account = account_of(seen)
    user = _owner(rundir)
    stalls = read_stalls(rundir)
    made = samples(seen, row, account, avoided_nodes(rundir, now), user, now if ticks else None, stalls)
    return RunMetrics(run.name, user, rundir.root, account.since.timestamp(), made, _is_over(rundir, run.finished, now))


def write(folder: Path, run: RunMetrics) -> str:
    """Write, or remove, the file of ``run``. Returns why it could not, "" if it could."""
    path = folder / file_name(run.name, run.user)
    try:
        before = _before(path)
        if before is not None and (trouble := _is_anothers(path, before, run)):
            return trouble
        if run.over:
            if before is not None:
                remove_entry(path)
            return ""
        least = counters_in(before.text) if before is not None and before.text.startswith(f"{run.head}\n") else {}
        write_whole(path, f"{run.head}\n{text_of(run.samples, least)}", mode=_MODE, sync=False)
    except OSError as error:
        return f"{run.name}: cannot write {path}: {error.strerror or error}"
    return ""


def sweep(folder: Path) -> None:
    """Remove the files of this account that nobody has written for a day. What cannot be seen or removed stays."""
    try:
        with os.scandir(folder) as found:
            for index, one in enumerate(found):
                if index >= _MOST_FILES:
                    return
                if one.name.startswith(_PREFIX) and one.name.endswith(_SUFFIX):
                    _remove_stale(Path(one.path))
    except OSError:
        return


def export(rundir: RunDir, jobs: tuple[Job, ...] | None, blind: str, now: datetime, folder: Path) -> Sequence[str]:
    """Write the metrics of one run at a tick of the watch. Returns its troubles."""
    try:
        trouble = write(folder, measure(rundir, jobs, blind, now, ticks=True))
    except Error as error:
        trouble = error.message
    if folder not in _swept:
        _swept.add(folder)
        sweep(folder)
    return (trouble,) if trouble else ()


_swept: set[Path] = set()  # by this process, which lives for one tick


def file_name(run: str, user: str) -> str:
    """Return one name for each run of each account, whatever stands in the names."""
    plain = [re.sub(r"[^A-Za-z0-9._-]", "_", part)[:80] for part in (user, run)]
    odd = (
        "" if plain == [user, run] else f"-{hashlib.sha256(f'{user}/{run}'.encode('utf-8', 'replace')).hexdigest()[:8]}"
    )
    return f"{_PREFIX}{plain[0]}-{plain[1]}{odd}{_SUFFIX}"


class _Before(NamedTuple):
    text: str  # "": it is not ours to read
    owner: int
    age: float


def _before(path: Path) -> _Before | None:
    try:
        found = path.lstat()
    except FileNotFoundError:
        return None
    age = time.time() - found.st_mtime
    if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
        return _Before("", found.st_uid, age)
    return _Before(files.read_bounded(path, _LARGEST).decode("utf-8", "replace"), found.st_uid, age)


def _is_anothers(path: Path, before: _Before, run: RunMetrics) -> str:
    if before.age > FRESH.total_seconds():
        return ""
    if before.owner != os.geteuid():
        return f"{run.name}: {path} is written by {user_name(before.owner)} already, so this watch leaves it"
    head = before.text.partition("\n")[0]
    other = head.removeprefix(_HEAD).partition(" ")[2]
    if head.startswith(_HEAD) and other and other != run.head.removeprefix(_HEAD).partition(" ")[2]:
        return f"{run.name}: {path} is about another run of that name, {other}: give one of them another name"
    return ""


def _remove_stale(path: Path) -> None:
    try:
        before = _before(path)
        if before is not None and before.age > STALE.total_seconds() and before.text.startswith(_HEAD):
            remove_entry(path)
    except OSError:
        return


def _is_over(rundir: RunDir, finished: bool, now: datetime) -> bool:
    if not finished:
        return False
    try:
        mark = read_finished(rundir)
    except OSError:
        return False
    return mark is not None and mark.at is not None and now - mark.at > KEPT


def _owner(rundir: RunDir) -> str:
    try:
        return user_name(rundir.root.stat().st_uid)
    except OSError:
        return user_name()
