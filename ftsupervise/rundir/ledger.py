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
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import NamedTuple, TypeVar

from ftsupervise.errors import from_os_error
from ftsupervise.host import files, processes
from ftsupervise.host.ownership import claim_folder, held_to_write
from ftsupervise.model import GUARD, NOBODY, OUTPUT, SOURCES, Attempt, Cause, CauseKind, Claim, NodeRanks, Reached
from ftsupervise.printable import printable
from ftsupervise.rundir import heartbeat_page
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
from ftsupervise.rundir.observing import known, read_observed
from ftsupervise.rundir.paths import ENV_JOB_ID, WARNING, RunDir
from ftsupervise.rundir.progress import ProgressPage, read_progress, write_progress
from ftsupervise.rundir.records import (
    as_count,
    as_counts,
    as_number,
    as_time,
    as_whole,
    parse_object,
    read_record,
    time_of,
)
from ftsupervise.truth import (
    START,
    Beat,
    Beginning,
    GivenCheckpoint,
    LeftCheckpoint,
    LinesWithoutStep,
    LossTrouble,
    NotFrom,
    OutputPart,
    PercentReached,
    Resumed,
    Tally,
    TornSave,
)

# Tells how far an attempt came, by its progress page, which the supervisor writes, and by the beats of its ranks.

_Order = TypeVar("_Order", int, float)
FEW = 64  # ranks whose beats are read besides a page that counts them all: they may be seconds newer


def reached(rundir: RunDir, number: int, page: ProgressPage | None, *, every_beat: bool = False) -> Reached:
    """Return the steps that attempt ``number`` reached, ``page`` its progress.

    Empty when nothing can be read, or newer beats have taken their place. ``every_beat``: read those of many ranks too,
    for facts that a page does not hold: a loss that is no number, why a rank asked to stop.
    """
    if page is not None and page.ranks > FEW and not every_beat:
        return _of_page(page)
    try:
        mine = [beat for beat in heartbeat_page.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    except OSError:
        return Reached() if page is None else _of_page(page)
    return _of_beats(mine) if page is None else _newer(_of_beats(mine), _of_page(page))


def keep_reached(rundir: RunDir, number: int) -> None:
    """Record how far attempt ``number`` came, if no supervisor lived to record its end.

    The beats of the next one take the place of its own, and its supervisor's last page may be seconds old. Raises
    OSError.
    """
    if number < 1 or os.path.lexists(rundir.attempt(number) / "end.json"):
        return
    page = read_progress(rundir, number)
    if (page is not None and page.ranks > FEW) or len(os.listdir(rundir.beats)) > FEW:
        return
    mine = [beat for beat in heartbeat_page.read_beats(rundir) if beat.facts.get("attempt") == str(number)]
    newest = max((beat.at for beat in mine if beat.step is not None), default=None)
    seen, before = reached(rundir, number, page), page or ProgressPage()
    if newest is None or seen.last is None or (before.ahead is not None and seen.last <= before.ahead):
        return
    kept = before._replace(
        at=max(newest, before.at), ranks=max(before.ranks, len(mine)), ahead=seen.last, first=seen.first
    )
    kept = kept._replace(first_at=seen.first_at, saved=seen.saved, saving=seen.saving or 0.0)
    write_progress(rundir.attempt(number), kept._replace(active_at=max(newest.timestamp(), before.active_at or 0.0)))


def counted(beats: Sequence[Beat]) -> Tally:
    """Return the counts of the guards of these ranks. ``first_at`` is in epoch seconds."""
    times = [when for beat in beats if (when := _moment(beat.facts.get("first_at"))) is not None]
    losses = [(beat.rank, loss) for beat in beats if (loss := _moment(beat.facts.get("loss"))) is not None]
    return Tally(
        first=min(_facts(beats, "first"), default=None),
        first_at=max(times, default=None),
        last=max((beat.step for beat in beats if beat.step is not None), default=None),
        saved=max(_facts(beats, "saved"), default=None),
        saving=max((when for beat in beats if (when := _moment(beat.facts.get("saving"))) is not None), default=0.0),
        loss=min(losses)[1] if losses else None,
        loss_rank=min(losses)[0] if losses else None,
        last_step=max(_facts(beats, "last_step"), default=None),
    )


def _source(beats: Sequence[Beat]) -> str:
    """Return who told the steps. The beat of a command that has shown nothing since its start is no word of anybody."""
    beats = [beat for beat in beats if "source" not in beat.facts or beat.phase != START]
    if not beats:
        return NOBODY
    return OUTPUT if all("source" in beat.facts for beat in beats) else GUARD


def _of_beats(beats: Sequence[Beat]) -> Reached:
    tally = counted(beats)
    return Reached(tally.first, tally.last, tally.saved, tally.first_at, tally.saving)._replace(
        source=_source(beats),
        active_at=max(filter(None, (_moment(beat.facts.get("active_at")) for beat in beats)), default=None),
        epoch=max(_facts(beats, "epoch"), default=None),
        trouble=_earliest([beat.trouble for beat in beats if beat.trouble is not None]),
        first_loss=max(filter(None, (_moment(beat.facts.get("first_loss")) for beat in beats)), default=None),
        because=next(
            ((NodeRanks(beat.host, str(beat.rank)), text) for beat in beats if (text := beat.facts.get("because"))),
            None,
        ),
    )


def _of_page(page: ProgressPage) -> Reached:
    source = page.source if page.source in SOURCES else ""
    return Reached(page.first, page.ahead, page.saved, page.first_at, page.saving, page.active_at, source=source)


def _newer(one: Reached, other: Reached) -> Reached:
    """Join the two. Each may be the newer one."""
    firsts = [first for first in (one.first, other.first) if first is not None]
    last, saved = _latest(one.last, other.last), _latest(one.saved, other.saved)
    times = (_latest(one.first_at, other.first_at), _latest(one.saving, other.saving))
    active = _latest(one.active_at, other.active_at)
    source = other.source if one.source == NOBODY and other.last is not None else one.source
    return one._replace(
        source=source,
        first=min(firsts, default=None),
        last=last,
        saved=saved,
        first_at=times[0],
        saving=times[1],
        active_at=active,
    )


def _latest(one: _Order | None, other: _Order | None) -> _Order | None:
    return max((value for value in (one, other) if value is not None), default=None)


def _earliest(troubles: Sequence[LossTrouble]) -> LossTrouble | None:
    """Return the one that stopped the run, else the first; as it stood when the last rank saw it."""
    if not troubles:
        return None
    first = min(troubles, key=lambda one: (not one.stops, one.since is None, one.since or 0, one.rank))
    return first._replace(step=max((one.step for one in troubles if one.step is not None), default=None))


def _facts(found: Sequence[Beat], name: str) -> list[int]:
    words = (beat.facts.get(name, "") for beat in found)
    sizes = ((word, as_count(word.removeprefix("-"))) for word in words)
    return [-size if word.startswith("-") else size for word, size in sizes if size is not None]


def _moment(fact: str | None) -> float | None:
    """Return a number in a beat's facts, which are all text; None for other text, and if it is not finite."""
    try:
        return as_number(float(fact)) if fact is not None else None
    except ValueError:
        return None


# ------------------------------------------------------------------------------------------


# Judges an attempt that has no end on record: it runs, it was lost, or it had been asked to leave.

NEAR_END = 10.0  # seconds by which clocks differ: Slurm ends a job at its limit, or up to half a minute after it


def without_end(start: StartPage) -> Cause | None:
    """Return None where its supervisor lives on this host."""
    if start.host != os.uname().nodename:
        return Cause(CauseKind.UNKNOWN)
    lives = start.pid > 0 and processes.identity(start.pid) == start.pid_start
    return None if lives and start.boot_id == processes.boot_id() else Cause(CauseKind.LOST)


def last_sign(folder: Path, attempt: Attempt, before: datetime | None) -> datetime:
    """Return the newest sign of life of an attempt that left no record of its end. ``before``: the next one's start.

    That is its supervisor's last page, its last line in the log, or the last output of its job.
    """
    signs = [attempt.started, *filter(None, (attempt.heard,))]
    signs += [attempt.started + timedelta(seconds=n) for n in (attempt.ready, attempt.worked) if n is not None]
    for path in (folder / "run.log", *(Path(part.path) for part in attempt.outputs)):
        try:
            signs.append(time_of(path.stat()))
        except OSError:
            continue
    return max(attempt.started, max(min(sign, before) if before is not None else sign for sign in signs))


def end_as_asked(start: StartPage, at: datetime | None) -> Cause:
    """Return the cause of an end that was asked for and could not be recorded: Slurm's last 5 s were too few for it."""
    if start.job_ends is not None and at is not None and (start.job_ends - at).total_seconds() < NEAR_END:
        return Cause(CauseKind.TIME_LIMIT, late=True)
    return Cause(CauseKind.CANCELLED, signal=int(signal.SIGTERM), late=True)


def stop_request(folder: Path) -> tuple[str, int, datetime | None]:
    """Return the stop request to an attempt without a recorded end: text for people, the signal (0: none), and the time."""
    try:
        text = files.read_bounded(folder / WARNING, 64_000).decode("utf-8", "replace")
    except OSError:
        return "", 0, None
    words, _, rest = text.partition("\n")
    try:
        page = parse_object(rest.encode())
    except ValueError:  # it was made on a full disk, or by a person
        page = {}
    reason = printable(words.strip(), 200)
    text = f"asked to stop: {reason}" if reason else "asked to stop"
    return text, as_whole(page.get("signal")) or 0, as_time(page.get("at"))


# ------------------------------------------------------------------------------------------


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
    began = with_pages(began, folder)
    began = began._replace(begins=_begins(read_page(Beginning, folder), not_from, began.resumed))
    return _with_end(began, end) if end is not None else _unrecorded(began, rundir, start, bad_end)


def with_pages(one: Attempt, folder: Path) -> Attempt:
    """Return ``one`` with what others than its supervisor wrote beside its first and last page."""
    return one._replace(
        resumed=read_page(Resumed, folder),
        written=read_page(LeftCheckpoint, folder),
        given=read_page(GivenCheckpoint, folder),
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
    copies = read_page(CopiesPage, folder)
    return _with_steps(began, seen)._replace(
        held=None if copies is None else copies.held,
        cause=cause,
        note="; ".join(filter(None, (bad_end, words))),
        stop_signal=stop_signal,
        heard=None if page is None else page.at,
    )


def _with_steps(one: Attempt, seen: Reached) -> Attempt:
    since = one.started.timestamp()
    return one._replace(
        first_step=seen.first,
        last_step=seen.last,
        saved=seen.saved,
        ready=None if seen.first_at is None else max(0.0, seen.first_at - since),
        saving=seen.saving,
        worked=None if seen.active_at is None else max(0.0, seen.active_at - since),
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
        with held_to_write(mine.folder.parent) as here:
            (here / mine.folder.name).rmdir()
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


def write_end(folder: Path, one: Attempt) -> None:
    """Write the last page of ``one``: the end and the decision after it. Raises OSError."""
    lasted = (one.ended - one.started).total_seconds() if one.ended is not None else 0.0
    recorded = {name: getattr(one, name) for name in _TOO}
    seconds = {name: round(recorded[name], 2) for name in ("ready", "saving", "worked") if recorded[name] is not None}
    write_page(folder, EndPage(one.number, words=one.words, seconds=round(lasted, 1), **recorded | seconds))


def over(number: int, cause: Cause, at: datetime, seconds: float = 0.0, reached: Reached = Reached()) -> Attempt:  # noqa: B008
    """Return attempt ``number``, which has ended ``at``, ``seconds`` after its start, as far as nothing was wrong with it."""
    one = Attempt(number, "", at - timedelta(seconds=seconds), ended=at, exit_code=0, cause=cause)
    return _with_steps(one, reached)
