"""The ledger: all attempts of a run, one directory per start of the command. The claimer of an attempt writes its pages.

Reading is light (standard library, no subprocess): ``status``, the gate and the watch do it.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.errors import from_os_error
from ftsupervise.host import processes
from ftsupervise.host.modes import claim_folder
from ftsupervise.model import Attempt, Cause, CauseKind, Claim, End
from ftsupervise.rundir import kept
from ftsupervise.rundir.began import read_began
from ftsupervise.rundir.causes import read_cause, read_failure
from ftsupervise.rundir.fence import last_area
from ftsupervise.rundir.lost_ends import end_as_asked, lost_end, stop_request, without_end
from ftsupervise.rundir.observing import known, read_observed
from ftsupervise.rundir.outputs import own_outputs
from ftsupervise.rundir.paths import ENV_JOB_ID, RunDir
from ftsupervise.rundir.percent import read_percent
from ftsupervise.rundir.progress import read_progress
from ftsupervise.rundir.reached import reached
from ftsupervise.rundir.records import (
    as_count,
    as_counts,
    as_number,
    as_text,
    as_time,
    as_whole,
    decode,
    encode,
    read_json,
    read_record,
    time_of,
    write_json,
)
from ftsupervise.rundir.torn_saves import read_torn
from ftsupervise.rundir.unread import read_unread
from ftsupervise.truth import Beginning, LeftCheckpoint, LossTrouble, NotFrom, OutputPart, Resumed, TornSave


class _Outputs(NamedTuple):
    parts: tuple[OutputPart, ...] = ()


T = TypeVar("T")

START, COPIES, WRITTEN = "start.json", "copies.json", "written.json"  # pages of an attempt
KEPT = "kept"  # the folder of what is kept of scripts without a guard
NEWEST = 1000  # attempts that are read
_LONGEST = 2000  # characters of a text in a page

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
    return as_number((_page(rundir.attempt(number) / START)[0] or {}).get("stop_within"))


def torn_of(rundir: RunDir) -> tuple[TornSave, ...]:
    """Return the checkpoints that attempts have found torn when they began, the newest attempt's first. Raises OSError."""
    try:
        newest = numbers(rundir)[::-1][:NEWEST]
    except FileNotFoundError:
        return ()
    return tuple(one for number in newest for one in read_torn(rundir.attempt(number)))


def kept_of(rundir: RunDir) -> tuple[tuple[int, LeftCheckpoint], ...]:
    """Return what is kept of scripts without a guard, with the number of its attempt, the newest first. Raises OSError."""
    found: list[tuple[int, LeftCheckpoint]] = []
    try:
        there = as_counts(os.listdir(rundir.root / KEPT))
    except FileNotFoundError:
        return ()
    for number in sorted(there, reverse=True):
        left = _written(rundir.attempt(number))
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
    start, bad_start = _page(folder / START)
    end, bad_end = _page(folder / "end.json")
    if start is None:
        note = bad_start or "claimed, but nothing was started"
        return Attempt(
            number, "", _claimed_at(folder), cause=None if _young(folder) else Cause(CauseKind.UNKNOWN), note=note
        )
    resumed, not_from, unread = read_began(folder, Resumed), read_began(folder, NotFrom), read_unread(folder)
    began = Attempt(
        number=number,
        job_id=as_text(start.get("job_id"), _LONGEST),
        started=as_time(start.get("at")) or _claimed_at(folder),
        host=as_text(start.get("host"), _LONGEST),
        nodes=_nodes(str(start.get("nodes") or "")),
        resumed=resumed,
        begins=_begins(_part(Beginning, start.get("begins")), not_from, resumed),
        not_from=not_from,
        kept=kept.read_kept(folder),
        written=_written(folder),
        torn=read_torn(folder),
        unread="" if unread is None else unread.words(),
        percent=read_percent(folder),
        outputs=decode(_Outputs, {"parts": start.get("outputs")}, lenient=True).parts,
        begun_again=as_count(as_text(start.get("restart_count"), 20)) or 0,
        observes=known(_words(start.get("observes"))),
        observed=read_observed(folder),
    )
    return _recorded(began, end) if end is not None else _unrecorded(began, rundir, start, bad_end)


def _recorded(began: Attempt, end: Mapping[str, object]) -> Attempt:
    """Return ``began`` with its end, which is on record."""
    code = as_whole(end.get("exit_code"))
    words = as_text(end.get("cause", CauseKind.UNKNOWN.value), _LONGEST)
    return began._replace(
        ended=as_time(end.get("at")),
        exit_code=code,
        cause=read_cause(end.get("parts"), words, code or 0),
        first_step=as_whole(end.get("first_step")),
        last_step=as_whole(end.get("last_step")),
        note=as_text(end.get("note"), _LONGEST),
        failure=read_failure(end),
        saved=as_whole(end.get("saved")),
        ready=as_number(end.get("ready")),
        saving=as_number(end.get("saving")),
        worked=as_number(end.get("worked")),
        braked=end.get("braked") is True,
        then=as_text(end.get("then"), _LONGEST),
        hardware=as_text(end.get("hardware"), _LONGEST),
        trouble=_part(LossTrouble, end.get("trouble")),
        first_loss=as_number(end.get("first_loss")),
        source=as_text(end.get("source"), _LONGEST),
        epoch=as_whole(end.get("epoch")),
    )


def _unrecorded(began: Attempt, rundir: RunDir, start: Mapping[str, object], bad_end: str) -> Attempt:
    """Return ``began`` without an end on record: it runs, or none was written. ``bad_end``: what is wrong with the page."""
    folder = rundir.attempt(began.number)
    page = read_progress(rundir, began.number)
    seen = reached(rundir, began.number, page)
    words, stop_signal, at = stop_request(folder)
    cause = without_end(start)
    if stop_signal == signal.SIGTERM and cause is not None and cause.kind is CauseKind.LOST:
        cause = end_as_asked(start, at)
    if cause is not None and cause.kind in (CauseKind.LOST, CauseKind.UNKNOWN) and (fate := lost_end(folder)):
        cause = Cause(CauseKind.LOST, text=fate)
    since = began.started.timestamp()
    return began._replace(
        first_step=seen.first,
        last_step=seen.last,
        saved=seen.saved,
        held=as_whole((_page(folder / COPIES)[0] or {}).get("held")),
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


def _words(raw: object) -> tuple[str, ...]:
    return tuple(one for one in raw if isinstance(one, str)) if isinstance(raw, list) else ()


def _part(kind: type[T], raw: object) -> T | None:
    try:
        return None if raw is None else decode(kind, raw, lenient=True)
    except ValueError:
        return None


def _begins(told: Beginning | None, not_from: NotFrom | None, resumed: Resumed | None) -> Beginning | None:
    """Return where an attempt began: as its supervisor told it, unless its ranks did not take that snapshot."""
    if told is None or not_from is None or not_from.step != told.step:
        return told
    step = resumed.step if resumed is not None and resumed.begun else None
    return Beginning("start" if step is None else "disk", step, why=not_from.words())


def _written(folder: Path) -> LeftCheckpoint | None:
    if not os.path.lexists(folder / WRITTEN):
        return None
    try:
        return read_record(LeftCheckpoint, folder / WRITTEN)
    except (OSError, ValueError):
        return None


def write_written(folder: Path, written: LeftCheckpoint) -> None:
    """Write what an attempt without a guard has written like a checkpoint. Raises OSError."""
    write_json(folder / WRITTEN, written, sync=False)


def _page(path: Path) -> tuple[dict[str, object] | None, str]:
    """Return a page, or None and its error ("" if it is just missing)."""
    try:
        return read_json(path), ""
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


def job_id(env: Mapping[str, str]) -> str:
    """Return the job as squeue prints it ("88_3"), or its name at the local scheduler; "" outside any job."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get(ENV_JOB_ID, "")


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
    """Write the first page.

    Others may read it: the command is written without its secrets. Raises CannotWrite, NotPermitted.
    """
    from ftsupervise.hostlist import compress_hostlist
    from ftsupervise.secrecy import masked

    terms = terms or StartTerms()
    record: dict[str, object] = {
        "attempt": mine.number,
        "job_id": job_id(env),
        "at": now.isoformat(),
        "host": os.uname().nodename,
        "nodes": compress_hostlist(terms.nodes) or env.get("SLURM_JOB_NODELIST", ""),
        "in_place": terms.in_place,
        "stop_within": terms.stop_within,
        "observes": list(terms.observes),
        "restart_count": env.get("SLURM_RESTART_COUNT", "0"),
        "command": [masked(word) for word in command],
        "pid": os.getpid(),
        "pid_start": processes.identity(os.getpid()),
        "boot_id": processes.boot_id(),
        "outputs": own_outputs(),
        "job_ends": datetime.fromtimestamp(end, timezone.utc).isoformat() if end else None,
    }
    try:
        write_json(mine.folder / START, record)
    except OSError as error:
        raise from_os_error(error, f"write {mine.folder}") from None


def write_beginning(mine: Claim, begins: Beginning) -> None:
    """Add to the first page where the attempt begins from. Raises OSError, ValueError."""
    record = {**(read_json(mine.folder / START) or {}), "begins": encode(begins, sparse=True)}
    write_json(mine.folder / START, record, sync=False)


def write_copies(mine: Claim, held: int, nodes: int, problem: str, now: datetime) -> None:
    """Write how far the buddy copies are: the step that every buddy holds. Raises OSError."""
    record = {"attempt": mine.number, "at": now.isoformat(), "held": held, "nodes": nodes, "problem": problem}
    write_json(mine.folder / COPIES, record, sync=False)


def write_end(mine: Claim, ended: End, then: str, now: datetime) -> None:
    """Write the last page: the end and the decision after it. Raises OSError."""
    failure = ended.failure
    record: dict[str, object] = {
        "attempt": mine.number,
        "at": now.isoformat(),
        "exit_code": ended.code,
        "cause": ended.cause.words(),
        "parts": encode(ended.cause, sparse=True),
        "kind": failure.kind.value if failure else "",
        "failure": failure.words() if failure else "",
        "sign": failure.sign if failure else "",
        "error": failure.error if failure else "",
        "detail": failure.detail if failure else "",
        "then": then,
        "first_step": ended.reached.first,
        "last_step": ended.reached.last,
        "saved": ended.reached.saved,
        "ready": None if ended.ready is None else round(ended.ready, 2),
        "saving": None if ended.reached.saving is None else round(ended.reached.saving, 2),
        "worked": None if ended.worked is None else round(ended.worked, 2),
        "first_loss": ended.reached.first_loss,
        "source": ended.reached.source,
        "epoch": ended.reached.epoch,
        "trouble": encode(ended.reached.trouble, sparse=True) if ended.reached.trouble else None,
        "seconds": round(ended.seconds, 1),
        "note": ended.note,
        "hardware": ended.hardware,
        "braked": ended.braked,
    }
    write_json(mine.folder / "end.json", record)


def as_attempt(mine: Claim, ended: End, now: datetime) -> Attempt:
    """Return the attempt that has just ended, as the ledger will have it."""
    return Attempt(
        number=mine.number,
        job_id="",
        started=datetime.fromtimestamp(now.timestamp() - ended.seconds, timezone.utc),
        ended=now,
        exit_code=ended.code,
        cause=ended.cause,
        first_step=ended.reached.first,
        last_step=ended.reached.last,
        failure=ended.failure,
        saved=ended.reached.saved,
        ready=ended.ready,
        saving=ended.reached.saving,
        worked=ended.worked,
        hardware=ended.hardware,
        trouble=ended.reached.trouble,
        first_loss=ended.reached.first_loss,
        source=ended.reached.source,
        epoch=ended.reached.epoch,
        resumed=read_began(mine.folder, Resumed),
        written=_written(mine.folder),
        torn=read_torn(mine.folder),
        percent=read_percent(mine.folder),
    )
