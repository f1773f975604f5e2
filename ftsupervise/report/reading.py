"""Reads the directory of a run, a few small files, for ``status`` of one run and of a thousand.

Nothing here asks a scheduler. A file that hangs hangs this too: the callers bound it.
"""

import os
from datetime import datetime, timedelta, timezone
from itertools import islice
from typing import NamedTuple

from ftsupervise.errors import from_os_error
from ftsupervise.host import files
from ftsupervise.host.in_time import in_time
from ftsupervise.model import Attempt
from ftsupervise.report.placing import bad_losses
from ftsupervise.rundir import pinned
from ftsupervise.rundir.attempt_pages import NAMES, StartPage
from ftsupervise.rundir.heartbeat_page import AT_LEAST, LATE, of_the_group, read_beats, watchers
from ftsupervise.rundir.launches import NEWEST as ALL_LAUNCHES
from ftsupervise.rundir.launches import LaunchRecord, launches
from ftsupervise.rundir.ledger import FEW, NEWEST, backwards, ledger, newest, numbers
from ftsupervise.rundir.paths import RunDir, state_dir
from ftsupervise.rundir.progress import ProgressPage, read_progress, read_steps
from ftsupervise.rundir.switches import KILL, SAVE, Brake, read_brake, read_switch, still_held
from ftsupervise.rundir.watched import WatchFound, read_found
from ftsupervise.truth import Beat, LossTrouble, SwitchState
from ftsupervise.units import count

_DAY = timedelta(days=1)
_FEW_ATTEMPTS = 40  # that are read for a row of a run that may wait
_FEW_LAUNCHES = 20  # that are read for a row: the jobs of older ones have ended
_LOOK = 1.0  # seconds for the note that this account has of the run, on another disk
_MOST_STARTS = 200  # attempts that are counted as restarts of the last day


class WatchSeen(NamedTuple):
    """The watch of a run: what its last tick found, when the next one is due, and whether one is missing."""

    found: WatchFound | None = None
    next_tick: datetime | None = None
    late: bool = False
    gone: bool = False  # it was checked by hand, too long ago for what is meant: nobody watches it
    unwritten: bool = False  # it would be late, and its pages lie on a full disk: whether it looks is not known


class RunReading(NamedTuple):
    name: str
    rundir: RunDir
    at: datetime
    records: tuple[LaunchRecord, ...]
    attempts: tuple[Attempt, ...]  # all; for a row the newest, and of a run that may wait some more
    not_read: int  # attempts that are not in ``attempts``, of very many
    page: ProgressPage | None  # of the newest attempt
    beats: tuple[Beat, ...]  # of the newest attempt; none where there are many ranks, for the page has them all
    switches: tuple[SwitchState, ...]
    finished: bool
    brake: str  # "": it is off
    held_by_us: bool  # waiting members are on hold since the brake
    restarts: int  # in the last day
    watch: WatchSeen = WatchSeen()
    braked: Brake | None = None  # ``brake`` as a record
    full: str = ""  # which of its file systems has no room left, in words

    @property
    def loss_trouble(self) -> LossTrouble | None:
        """Return what is wrong with the loss that the newest attempt reports; None where nothing is seen to be."""
        return next((beat.trouble for beat in self.beats if beat.trouble is not None), None)

    @property
    def bad_loss(self) -> str:
        """Return the same in words: of a loss that is no number, how many steps and since when; "" where nothing is wrong."""
        trouble = self.loss_trouble
        if trouble is None:
            return ""
        bad = bad_losses(self.attempts, read_steps(self.rundir), trouble, self.at.timestamp())
        if not bad or not bad[-1].steps or bad[-1].attempt != self.attempts[-1].number:
            return f"{trouble.kind}: {trouble.words} (rank {trouble.rank})"
        since = datetime.fromtimestamp(bad[-1].begin, timezone.utc)
        when = f", about {since:%m-%d %H:%M} UTC" if bad[-1].dated else ""
        return f"{trouble.kind}: {count(bad[-1].steps, 'step')} since step {trouble.since}{when} (rank {trouble.rank})"

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


def read_run(rundir: RunDir, now: datetime, *, row: bool = False) -> RunReading:
    """Read the directory; for a ``row`` only what the overview shows. Raises NotFound, NotPermitted when it cannot be read."""
    try:
        files.among(rundir.switches)
        records = launches(rundir, _FEW_LAUNCHES if row else ALL_LAUNCHES)
        claimed = _numbers(rundir)
        attempts = ledger(rundir) if not row else _newest_few(rundir)
        page = read_progress(rundir, attempts[-1].number) if attempts else None
        beats = () if page is not None and page.ranks > FEW else _of_the_last(read_beats(rundir), attempts)
        braked = _brake(rundir)
    except OSError as error:
        raise from_os_error(error, f"read the run directory {rundir.root}") from None
    full, watch = _full(rundir), watch_seen(rundir, now)
    if full and watch.late:
        watch = watch._replace(late=False, gone=False, unwritten=True)
    return RunReading(
        name=run_name(rundir),
        rundir=rundir,
        at=now,
        records=records,
        attempts=attempts,
        not_read=max(0, len(claimed) - len(attempts)) if len(attempts) >= NEWEST else 0,
        page=page,
        beats=beats,
        switches=tuple(read_switch(rundir, switch) for switch in (KILL, SAVE)),
        finished=rundir.finished.exists(),
        brake=_brake_words(braked, rundir),
        braked=braked,
        held_by_us=_held_by_us(rundir),
        restarts=_restarts(rundir, claimed, now),
        watch=watch,
        full=full,
    )


def read_own(rundir: RunDir, now: datetime, *, row: bool = False) -> RunReading:
    """Do the same for who asks for the run, and not for what lies in its place.

    Raises NotTrusted where another directory lies there than this account has launched, or first watched.
    """

    def look() -> tuple[int, int]:
        before = pinned.identity(rundir.root)
        pinned.require(state_dir(), rundir, copies=True)
        return before

    try:
        before = in_time(look, _LOOK)
    except OSError:  # of the directory: it is told below
        before = None
    found = read_run(rundir, now, row=row)
    if before is not None:
        pinned.require_still(rundir, before)
    return found


def _full(rundir: RunDir) -> str:
    """Return what is full: who stands there may be unable to write that he waits for space."""
    for folder in (rundir.root, rundir.checkpoints):
        try:
            seen = os.statvfs(folder)
        except OSError:
            continue
        if seen.f_bavail * seen.f_frsize < files.NO_ROOM:
            return f"no space is left in {folder}"
        if seen.f_files and not seen.f_favail:
            return f"no more files can be made in {folder} (its inodes are used up)"
    return ""


def _newest_few(rundir: RunDir) -> tuple[Attempt, ...]:
    """Return the newest attempt; where it has ended, those before it too: they tell how much of its time the run waits."""
    last = newest(rundir)
    if last is None or last.ended is None or rundir.finished.exists():
        return () if last is None else (last,)
    return (*reversed(tuple(islice(backwards(rundir, last.number), _FEW_ATTEMPTS - 1))), last)


def watch_seen(rundir: RunDir, now: datetime) -> WatchSeen:
    found = read_found(rundir)
    try:
        there = [one for one in watchers(rundir) if one.every is not None]
    except OSError:
        there = []
    late = bool(there) and all(one.late_by(now) is not None for one in there)
    if found is not None and not there and now - found.at > max(LATE * found.every, AT_LEAST):
        return WatchSeen(found, late=True, gone=True)
    due = min((one.at + one.every for one in there if one.every is not None), default=None)
    return WatchSeen(found, due, late)


def run_name(rundir: RunDir) -> str:
    """Return the name under which the run was launched: the first line of run.yaml that says so, else the directory's name."""
    try:
        for line in files.read_bounded(rundir.config, 4_000_000).decode("utf-8").splitlines():
            key, _, value = line.partition(":")
            if key == "name":
                return value.strip().strip("'\"")
    except (OSError, UnicodeDecodeError):
        pass
    return rundir.root.name


def _numbers(rundir: RunDir) -> list[int]:
    try:
        return sorted(numbers(rundir))
    except FileNotFoundError:
        return []


def _of_the_last(beats: tuple[Beat, ...], attempts: tuple[Attempt, ...]) -> tuple[Beat, ...]:
    """Return the beats of the newest attempt: an older one's stay until its rank beats again, or for ever where there are
    fewer ranks now. Beats that name no attempt count by their time."""
    if not attempts:
        return beats
    last = attempts[-1]

    def is_its(beat: Beat) -> bool:
        named = beat.facts.get("attempt")
        return named == str(last.number) if named else beat.at >= last.started

    return of_the_group([beat for beat in beats if is_its(beat)])


def _brake(rundir: RunDir) -> Brake | None:
    try:
        return read_brake(rundir)
    except OSError:
        return None


def _brake_words(on: Brake | None, rundir: RunDir) -> str:
    return f"by the brake: {on.words()}; {on.what_to_type(rundir.quoted())}" if on else ""


def _held_by_us(rundir: RunDir) -> bool:
    try:
        return bool(still_held(rundir))
    except OSError:
        return False


def _restarts(rundir: RunDir, claimed: list[int], now: datetime) -> int:
    """Count the attempts that began within a day, but for the first of the run, by the times of their first pages."""
    since, count = (now - _DAY).timestamp(), 0
    for number in reversed(claimed[1:][-_MOST_STARTS:]):
        try:
            began = (rundir.attempt(number) / NAMES[StartPage]).stat().st_mtime
        except OSError:
            continue
        if began < since:
            break
        count += 1
    return count
