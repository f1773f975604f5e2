"""The ledger: all attempts of a run, one directory per start of the command. The claimer of an attempt writes its pages.

Reading is light (standard library, no subprocess): ``status``, the gate and the watch do it.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.errors import from_os_error
from ftsupervise.host import processes
from ftsupervise.host.modes import claim_folder
from ftsupervise.model import Attempt, Cause, CauseKind, Claim, End
from ftsupervise.rundir.attempt_pages import (
    NAMES,
    CopiesPage,
    EndPage,
    KeptSnapshotPage,
    LostEnd,
    StartPage,
    TornPage,
    read_page,
    write_page,
)
from ftsupervise.rundir.fence import last_area
from ftsupervise.rundir.lost_ends import end_as_asked, stop_request, without_end
from ftsupervise.rundir.observing import known, read_observed
from ftsupervise.rundir.paths import ENV_JOB_ID, RunDir
from ftsupervise.rundir.progress import read_progress
from ftsupervise.rundir.reached import reached
from ftsupervise.rundir.records import as_counts, read_record, time_of
from ftsupervise.truth import (
    Beginning,
    LeftCheckpoint,
    LinesWithoutStep,
    NotFrom,
    OutputPart,
    PercentReached,
    Resumed,
    TornSave,
)

KEPT = "kept"  # the folder of what is kept of scripts without a guard
_Page = TypeVar("_Page", StartPage, EndPage)
NEWEST = 1000  # attempts that are read

# Attempts whose end is on record, by folder, with the stamp of the folder: every page is renamed into it, so that a new one
# changes the stamp. A supervisor reads all of them at each restart, which took a second at a thousand.
_ended: dict[Path, tuple[tuple[int, int, int], Attempt]] = {}
_MOST_ENDED = 2 * NEWEST
_SETTLED = (
    10.0  # seconds after its last change for a folder to be believed by its stamp: clocks of file systems are coarse
)


# ------------------------------------------------------------------------------------------------------------- reading


def ledger(rundir: RunDir) -> tuple[Attempt, ...]:
    """Return the attempts of the run, oldest first; () if there was none. Raises OSError if the directory cannot be
    read.

    Of more than ``NEWEST`` it gives the first one and the newest: a writer of the folder can make any number of them.
    One that runs has no ``cause`` and no ``ended``. Without an end on record it is LOST when its process is gone from
    this host, and UNKNOWN when it is another host's and cannot be checked from here. A damaged page is named in
    ``note``.
    """
    try:
        found = sorted(numbers(rundir))
    except FileNotFoundError:
        return ()
    read = found if len(found) <= NEWEST else [found[0], *found[1 - NEWEST :]]
    return tuple(_attempt(rundir, number) for number in read)


def newest(rundir: RunDir) -> Attempt | None:
    """Return the last attempt of the run; None if there was none. Raises OSError."""
    try:
        found = numbers(rundir)
    except FileNotFoundError:
        return None
    return _attempt(rundir, max(found)) if found else None


def backwards(rundir: RunDir, before: int | None = None, first: int = 1) -> Iterator[Attempt]:
    """Yield the attempts before number ``before`` and not before ``first``, newest first, each read when it is asked
    for.

    Raises OSError.
    """
    for number in sorted(numbers(rundir), reverse=True):
        if first <= number and (before is None or number < before):
            yield _attempt(rundir, number)


def stop_within(rundir: RunDir, number: int) -> float | None:
    """Return the seconds from the kill switch until attempt ``number`` is ended, as its supervisor has them; None: unknown."""
    page = read_page(StartPage, rundir.attempt(number))
    return None if page is None else page.stop_within


def torn_of(rundir: RunDir) -> tuple[TornSave, ...]:
    """Return the checkpoints that attempts have found torn when they began, the newest attempt's first. Raises OSError."""
    try:
        newest = numbers(rundir)[::-1][:NEWEST]
    except FileNotFoundError:
        return ()
    return tuple(one for number in newest for one in _torn(rundir.attempt(number)))


def kept_of(rundir: RunDir) -> tuple[tuple[int, LeftCheckpoint], ...]:
    """Return what is kept of scripts without a guard, with the number of its attempt, the newest first. Raises OSError."""
    found: list[tuple[int, LeftCheckpoint]] = []
    try:
        there = as_counts(os.listdir(rundir.root / KEPT))
    except FileNotFoundError:
        return ()
    for number in sorted(there, reverse=True):
        left = read_page(LeftCheckpoint, rundir.attempt(number))
        if left is not None and left.kept and os.path.lexists(left.kept):
            found.append((number, left))
    return tuple(found)


def lives_here(attempt: Attempt | None) -> bool:
    """Return whether its supervisor is a living process of this host, whatever the queue says.

    False where that cannot be read here.
    """
    return attempt is not None and bool(attempt.host) and attempt.ended is None and attempt.cause is None


def numbers(rundir: RunDir) -> list[int]:
    """Return the numbers of the attempts that have been claimed. Raises OSError."""
    return as_counts(os.listdir(rundir.attempts))


def _attempt(rundir: RunDir, number: int) -> Attempt:
    folder = rundir.attempt(number)
    stamp = _stamp(folder)
    known = _ended.get(folder)
    if known is not None and known[0] == stamp:
        return known[1]
    one = _read(rundir, number)
    if one.ended is not None and stamp is not None and time.time() - stamp[2] / 1e9 > _SETTLED:
        if len(_ended) >= _MOST_ENDED:
            _ended.clear()
        _ended[folder] = stamp, one
    return one


def _stamp(folder: Path) -> tuple[int, int, int] | None:
    """Return what changes when a page of the folder is written or taken away: its device, its number, its time in ns."""
    try:
        found = folder.stat()
    except OSError:
        return None
    return found.st_dev, found.st_ino, found.st_mtime_ns


def _read(rundir: RunDir, number: int) -> Attempt:
    folder = rundir.attempt(number)
    start, bad_start = _page(StartPage, folder)
    end, bad_end = _page(EndPage, folder)
    if start is None:
        note = bad_start or "claimed, but nothing was started"
        return Attempt(
            number, "", _claimed_at(folder), cause=None if _young(folder) else Cause(CauseKind.UNKNOWN), note=note
        )
    not_from, kept = read_page(NotFrom, folder), read_page(KeptSnapshotPage, folder)
    unread = read_page(LinesWithoutStep, folder)
    began = Attempt(
        number=number,
        job_id=start.job_id,
        started=start.at or _claimed_at(folder),
        host=start.host,
        nodes=_nodes(start.nodes),
        not_from=not_from,
        kept=None if kept is None else kept.step,
        unread="" if unread is None else unread.words(),
        outputs=start.outputs,
        begun_again=start.restart_count,
        observes=known(start.observes),
        observed=read_observed(folder),
    )
    began = _beside(began, folder)
    began = began._replace(begins=_begins(read_page(Beginning, folder), not_from, began.resumed))
    return _with_end(began, end) if end is not None else _unrecorded(began, rundir, start, bad_end)


def _beside(one: Attempt, folder: Path) -> Attempt:
    """Return ``one`` with what others than its supervisor wrote beside its first and last page."""
    return one._replace(
        resumed=read_page(Resumed, folder),
        written=read_page(LeftCheckpoint, folder),
        torn=_torn(folder),
        percent=_percent(folder),
    )


_TOO = tuple(name for name in EndPage._fields if name in Attempt._fields)


def _with_end(one: Attempt, page: EndPage) -> Attempt:
    """Return ``one`` with its end, which is on record."""
    return one._replace(**{name: getattr(page, name) for name in _TOO} | {"cause": _cause(page)})


def _cause(page: EndPage) -> Cause:
    """Return its cause; of a damaged page the words that people read."""
    if page.cause is not None:
        return page.cause
    return Cause(CauseKind.OTHER, text=page.words) if page.words else Cause(CauseKind.UNKNOWN)


def _unrecorded(began: Attempt, rundir: RunDir, start: StartPage, bad_end: str) -> Attempt:
    """Return ``began`` without an end on record: it runs, or none was written. ``bad_end``: what is wrong with the page."""
    folder = rundir.attempt(began.number)
    page = read_progress(rundir, began.number)
    seen = reached(rundir, began.number, page)
    words, stop_signal, at = stop_request(folder)
    cause = without_end(start)
    if stop_signal == signal.SIGTERM and cause is not None and cause.kind is CauseKind.LOST:
        cause = end_as_asked(start, at)
    lost = read_page(LostEnd, folder)
    if cause is not None and cause.kind in (CauseKind.LOST, CauseKind.UNKNOWN) and lost is not None and lost.words:
        cause = Cause(CauseKind.LOST, text=lost.words)
    since, copies = began.started.timestamp(), read_page(CopiesPage, folder)
    return began._replace(
        first_step=seen.first,
        last_step=seen.last,
        saved=seen.saved,
        held=None if copies is None else copies.held,
        cause=cause,
        note="; ".join(filter(None, (bad_end, words))),
        stop_signal=stop_signal,
        ready=None if seen.first_at is None else max(0.0, seen.first_at - since),
        saving=seen.saving,
        worked=None if seen.active_at is None else max(0.0, seen.active_at - since),
        heard=None if page is None else page.at,
        trouble=seen.trouble,
        first_loss=seen.first_loss,
        source=seen.source,
        epoch=seen.epoch,
    )


def _begins(told: Beginning | None, not_from: NotFrom | None, resumed: Resumed | None) -> Beginning | None:
    """Return where an attempt began: as its supervisor told it, unless its ranks did not take that snapshot."""
    if told is None or not_from is None or not_from.step != told.step:
        return told
    step = resumed.step if resumed is not None and resumed.begun else None
    return Beginning("start" if step is None else "disk", step, why=not_from.words())


def _torn(folder: Path) -> tuple[TornSave, ...]:
    page = read_page(TornPage, folder)
    return () if page is None else page.torn


def _percent(folder: Path) -> PercentReached | None:
    """Return the share of its work that it printed; None where it printed none, or that was no progress after all."""
    page = read_page(PercentReached, folder)
    return page if page is not None and 0 <= page.last <= 100 else None


def _page(kind: type[_Page], folder: Path) -> tuple[_Page | None, str]:
    """Return the first or the last page, or None and what is wrong with it ("" if it is just missing)."""
    path = folder / NAMES[kind]
    try:
        return read_record(kind, path), ""
    except (OSError, ValueError) as error:
        return None, f"{path.name} cannot be read: {error}"


def _nodes(text: str) -> tuple[str, ...]:
    if not text:
        return ()
    from ftsupervise.hostlist import expand_hostlist

    try:
        return expand_hostlist(text)
    except ValueError:  # a damaged page: it is not known where it ran
        return ()


def _claimed_at(folder: Path) -> datetime:
    try:
        return time_of(folder.stat())
    except OSError:
        return datetime.fromtimestamp(0, timezone.utc)


def _young(folder: Path) -> bool:
    """Return whether it was claimed a moment ago, so that its first page is still being written."""
    return abs(datetime.now(timezone.utc).timestamp() - _claimed_at(folder).timestamp()) < 60


# ------------------------------------------------------------------------------------------------------------- writing


def claim(rundir: RunDir, past: int = 0) -> Claim:
    """Claim the next attempt number by mkdir and return it: one after ``past``, too. Raises CannotWrite, NotPermitted."""
    try:
        number = 1 + max([*numbers(rundir), last_area(rundir.staging), past])
        while True:
            try:
                return _make(rundir, number)
            except FileExistsError:
                number += 1
    except OSError as error:
        raise from_os_error(error, f"write {rundir.attempts}") from None


def claim_after(rundir: RunDir, mine: int) -> Claim | None:
    """Claim the very next attempt after ``mine``, which was ours too.

    Returns None when another has taken it, and with it our place. Raises CannotWrite, NotPermitted.
    """
    try:
        return _make(rundir, mine + 1)
    except FileExistsError:
        return None
    except OSError as error:
        raise from_os_error(error, f"write {rundir.attempts}") from None


def give_back(mine: Claim) -> None:
    """Remove a claim without any page. One that cannot be removed stays, as an attempt that started nothing."""
    try:
        mine.folder.rmdir()
    except OSError:
        return


def _make(rundir: RunDir, number: int) -> Claim:
    folder = rundir.attempt(number)
    if rundir.attempts.is_symlink():  # none of ours is a link: one leads to a place that another account chose
        raise NotADirectoryError(errno.ENOTDIR, "is a link", str(rundir.attempts))
    claim_folder(folder)
    return Claim(number, folder)


class StartTerms(NamedTuple):
    """The terms that an attempt starts with, besides its command."""

    in_place: int = 0  # restarts in this job before it
    nodes: tuple[str, ...] = ()
    stop_within: float | None = None  # seconds from the kill switch until the command is ended
    observes: tuple[str, ...] = ()  # decisions that the launch says are only told


def write_start(
    mine: Claim,
    env: Mapping[str, str],
    command: Sequence[str],
    now: datetime,
    end: float | None,
    terms: StartTerms | None = None,
) -> None:
    """Write the first page. ``end``: epoch seconds at which the job's time is over. Raises CannotWrite, NotPermitted."""
    from ftsupervise.hostlist import compress_hostlist
    from ftsupervise.secrecy import masked

    terms, restarts = terms or StartTerms(), env.get("SLURM_RESTART_COUNT", "")
    page = StartPage(
        attempt=mine.number,
        job_id=job_id(env),
        at=now,
        host=os.uname().nodename,
        nodes=compress_hostlist(terms.nodes) or env.get("SLURM_JOB_NODELIST", ""),
        in_place=terms.in_place,
        stop_within=terms.stop_within,
        observes=terms.observes,
        restart_count=int(restarts) if restarts.isdigit() else 0,
        command=tuple(masked(word) for word in command),
        pid=os.getpid(),
        pid_start=processes.identity(os.getpid()),
        boot_id=processes.boot_id(),
        outputs=_own_outputs(),
        job_ends=datetime.fromtimestamp(end, timezone.utc) if end else None,
    )
    try:
        write_page(mine.folder, page)
    except OSError as error:
        raise from_os_error(error, f"write {mine.folder}") from None


def job_id(env: Mapping[str, str]) -> str:
    """Return the job as squeue prints it ("88_3"), or its name at the local scheduler; "" outside any job."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get(ENV_JOB_ID, "")


def _own_outputs() -> tuple[OutputPart, ...]:
    """Return the files of this process's standard output and error, each once, with its size now; a pipe or a terminal is none.

    The kernel is asked: this is right for any ``output`` of any scheduler, and for a shell's ``>``.
    """
    found: dict[tuple[int, int], OutputPart] = {}
    for fd in (1, 2):
        try:
            seen, path = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - "… (deleted)" too
        except OSError:
            continue
        if stat.S_ISREG(seen.st_mode) and path.startswith("/"):
            found.setdefault((seen.st_dev, seen.st_ino), OutputPart(path, seen.st_size))
    return tuple(found.values())


def write_end(mine: Claim, ended: End, then: str, now: datetime) -> None:
    """Write the last page: the end and the decision after it. Raises OSError."""
    write_page(mine.folder, _end_page(mine, ended, then, now))


def as_attempt(mine: Claim, ended: End, now: datetime) -> Attempt:
    """Return the attempt that has just ended, as the ledger will have it."""
    started = datetime.fromtimestamp(now.timestamp() - ended.seconds, timezone.utc)
    return _beside(_with_end(Attempt(mine.number, "", started), _end_page(mine, ended, "", now)), mine.folder)


def _end_page(mine: Claim, end: End, then: str, now: datetime) -> EndPage:
    """Return the last page. ``then``: what is done about it."""
    return EndPage(
        attempt=mine.number,
        ended=now,
        words=end.cause.words(),
        exit_code=end.code,
        cause=end.cause,
        failure=end.failure,
        then=then,
        first_step=end.reached.first,
        last_step=end.reached.last,
        saved=end.reached.saved,
        ready=_rounded(end.ready),
        saving=_rounded(end.reached.saving),
        worked=_rounded(end.worked),
        first_loss=end.reached.first_loss,
        source=end.reached.source,
        epoch=end.reached.epoch,
        trouble=end.reached.trouble,
        seconds=round(end.seconds, 1),
        note=end.note,
        hardware=end.hardware,
        braked=end.braked,
    )


def _rounded(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds, 2)
