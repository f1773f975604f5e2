"""Judges a row of the drill by what was seen: it passed, it failed and why, or it could not be tried. Pure."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime
from enum import Enum
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.drill.mailbox import Mail
from ftsupervise.model import NOBODY, OUTPUT, Attempt, CauseKind
from ftsupervise.units import named, show_duration

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


_UNRECORDED = (CauseKind.LOST, CauseKind.UNKNOWN)  # its end is told by the next one


class RowOutcome(str, Enum):
    """The three answers of a row."""

    PASS = "pass"
    FAIL = "fail"
    NOT_TRIED = "could not be tried"


class Shortfall(NamedTuple):
    """Something that must be seen and was not. ``do``: what to change."""

    why: str
    do: str


class RowResult(NamedTuple):
    """A row of the table at the end. Times are seconds from the fault; None: it was not seen, or does not apply."""

    row: str
    outcome: RowOutcome
    detected: float | None = None
    recovered: float | None = None
    steps_lost: int | None = None
    told: tuple[str, ...] = ()  # receivers, by their names in the settings
    messages: tuple[str, ...] = ()  # subjects
    seen: str = ""  # in words
    problems: tuple[Shortfall, ...] = ()
    why_not: str = ""  # it could not be tried


class SeenAfter(NamedTuple):
    """The attempt that was hit at ``at``, its end, and the one after it."""

    at: datetime
    left: Attempt  # as it was then
    within: float  # seconds that were waited
    ended: Attempt | None = None
    back: Attempt | None = None  # it has made a step
    back_at: datetime | None = None
    mails: tuple[Mail, ...] = ()

    @property
    def told(self) -> tuple[str, ...]:
        return told_by(self.mails)

    @property
    def detected(self) -> float | None:
        """Return the seconds until the ledger, a later attempt or, where it lived on, a message said that it was hit."""
        lost = self.ended is not None and self.ended.kind in _UNRECORDED
        if self.ended is not None and self.ended.ended is not None and not lost:
            return _seconds(self.ended.ended, self.at)
        if self.back is not None:
            return _seconds(self.back.started, self.at)
        return _seconds(self.mails[0].at, self.at) if self.mails and self.back_at is not None else None

    @property
    def recovered(self) -> float | None:
        return _seconds(self.back_at, self.at) if self.back_at is not None else None

    @property
    def reached(self) -> int | None:
        """Return the last step of the attempt that was hit."""
        one = self.ended or self.left
        return one.last_step if one.last_step is not None else self.left.last_step

    @property
    def steps_lost(self) -> int | None:
        """Return the steps that are made again."""
        if self.back is None or self.back.first_step is None or self.reached is None:
            return None
        return max(0, self.reached + 1 - self.back.first_step)

    def words(self) -> str:
        """Return what became of both attempts."""
        ended = f"attempt {self.left.number}: {self.ended.words}" if self.ended is not None and self.ended.words else ""
        back = (
            f"attempt {self.back.number} went on at step {self.back.first_step:,}"
            if self.back is not None and self.back.first_step is not None
            else ""
        )
        return "; ".join(filter(None, (ended, back)))


def _seconds(later: datetime, at: datetime) -> float:
    return max(0.0, (later - at).total_seconds())


def told_by(mails: Iterable[Mail]) -> tuple[str, ...]:
    """Return the receivers that got these, each once."""
    return tuple(dict.fromkeys(name for mail in mails for name in mail.to))


def is_guarded(attempt: Attempt) -> bool:
    """Return whether its steps are told by the guard."""
    return attempt.source not in ("", OUTPUT, NOBODY)


def judged(row: str, seen: SeenAfter, problems: Iterable[Shortfall]) -> RowResult:
    """Return the row of an attempt that was hit."""
    found = tuple(problems)
    outcome = RowOutcome.FAIL if found else RowOutcome.PASS
    result = RowResult(row, outcome, seen.detected, seen.recovered, seen.steps_lost, seen.told)
    return result._replace(messages=tuple(mail.subject for mail in seen.mails), seen=seen.words(), problems=found)


def usual_problems(seen: SeenAfter, run: Run) -> Iterator[Shortfall]:
    """Yield what is wrong after a fault that ends an attempt: a later one must go on from what was saved, and people must
    hear of it."""
    if seen.ended is None and seen.back is None:
        yield Shortfall(f"nothing ended or replaced attempt {seen.left.number} within {seen.within:.0f} s", _look(run))
    elif seen.back is None:
        yield _no_successor(seen, run)
    else:
        yield from _lost_too_much(seen, run)
    yield from nobody_told(seen.told, run)


def _no_successor(seen: SeenAfter, run: Run) -> Shortfall:
    why = f"no later attempt made a step within {seen.within:.0f} s"
    if run.launch.jobs == 1:
        return Shortfall(f"{why}, and no member waited to take over", "launch.jobs: 2 or more")
    return Shortfall(why, _look(run))


def _lost_too_much(seen: SeenAfter, run: Run) -> Iterator[Shortfall]:
    back, left = seen.back, seen.left
    assert back is not None
    saved = left.saved
    if back.first_step is None or left.first_step is None:
        return
    if back.first_step <= left.first_step and (seen.reached or 0) > left.first_step:
        yield Shortfall(f"it began again at step {back.first_step:,} instead of going on", resumes(run, left))
    elif saved is not None and back.first_step <= saved:
        yield Shortfall(
            f"step {saved:,} was saved, and it went on at step {back.first_step:,}",
            "go on from guard.latest(), on all ranks (docs/guard.md)",
        )


def resumes(run: Run, attempt: Attempt) -> str:
    """Return what makes the run go on from what it saved."""
    if is_guarded(attempt):
        if attempt.saved is None:
            return "save with guard.checkpoint() where decision.save says so: it saved nothing (docs/guard.md)"
        return "load guard.latest() before the first step (docs/guard.md)"
    return f"{put_the_guard_in(run)}, or say how it resumes: launch.resume (docs/own-script.md)"


def put_the_guard_in(run: Run) -> str:
    """Return the command that puts the guard into the script of the run."""
    from ftsupervise.importer.training import script_in

    command = run.launch.command if isinstance(run.launch.command, str) else shlex.join(run.launch.command)
    return f"ftsupervise init --patch {shlex.quote(script_in(command) or 'train.py')}"


def nobody_told(told: Iterable[str], run: Run) -> Iterator[Shortfall]:
    """Yield that no message came, and the setting that held it back."""
    if any(told):
        return
    alerts = run.alerts
    held = [
        word for word, value in (("routes", alerts.routes), ("quiet", alerts.quiet), ("hold", alerts.hold)) if value
    ]
    do = f"look at alerts.{' and alerts.'.join(held)}" if held else "ftsupervise notify test says whether mail arrives"
    yield Shortfall("nobody was told", do)


def hang_problems(seen: SeenAfter, run: Run) -> Iterator[Shortfall]:
    """Yield what is wrong after a rank was stopped: it must be seen as a hang, and ended."""
    cause = seen.ended.cause if seen.ended is not None else None
    if cause is not None and cause.kind is CauseKind.HANG:
        yield from usual_problems(seen, run)
        return
    if cause is not None:
        yield Shortfall(f"it ended, and not as a hang: {cause.words()}", _look(run))
        return
    why = f"a rank that stood still was not ended within {seen.within:.0f} s"
    if run.launch.restart.hang is None:
        yield Shortfall(f"{why}: launch.restart.hang is off", "take launch.restart.hang: null out of the settings")
    elif run.act.hang == "observe":
        yield Shortfall(f"{why}: a hang is only told (act)", "act: {hang: act}, once you trust what it tells")
    elif not is_guarded(seen.left):
        unknown = show_duration(round(run.launch.restart.hang.unknown.total_seconds()))
        yield Shortfall(f"{why}: without the guard a standstill takes {unknown} or more", put_the_guard_in(run))
    else:
        yield Shortfall(why, _look(run))


def torn_problems(seen: SeenAfter, run: Run, torn: Iterable[str]) -> Iterator[Shortfall]:
    """Yield what is wrong after a save was cut. ``torn``: what lies there under a checkpoint's name and is not whole."""
    for words in torn:
        yield Shortfall(f"a torn checkpoint lies there: {words}", "save inside guard.checkpoint() (docs/guard.md)")
    yield from usual_problems(seen, run)


def damage_problems(seen: SeenAfter, run: Run, name: str) -> Iterator[Shortfall]:
    """Yield what is wrong after the checkpoint ``name`` was damaged: the one before must be taken, and that be said."""
    if seen.back is None:
        yield from usual_problems(seen, run)
        return
    resumed = seen.back.resumed
    if resumed is None:
        yield Shortfall(
            f"{name} was damaged, and nothing compares what the run loads with what it saved", resumes(run, seen.left)
        )
    elif resumed.checkpoint == name:
        verify = f"checkpoints.verify: full (it is {run.checkpoints.verify})"
        yield Shortfall(f"it went on from {name}, which is damaged", verify)
    elif not resumed.checkpoint:
        yield Shortfall(f"it began anew, though an older whole one lay beside {name}", _look(run))
    elif not (resumed.passed or resumed.damaged or resumed.set_aside):
        yield Shortfall(f"it went on from {resumed.checkpoint}, and did not say that {name} is damaged", _look(run))
    yield from nobody_told(seen.told, run)


def mail_problems(run: Run, *, kept: bool, mails: Sequence[Mail]) -> Iterator[Shortfall]:
    """Yield what is wrong after the mail server refused all: the message must be kept, and delivered later."""
    if mails:
        return
    if kept:
        yield Shortfall("the message was kept, and not sent when the mail server took mail again", _look(run))
    else:
        yield from nobody_told((), run)


def disk_problems(seen: SeenAfter, run: Run, *, fired: bool) -> Iterator[Shortfall]:
    """Yield what is wrong after the disk was full. ``fired``: the alert about the disk did."""
    if not fired:
        off = run.watch.disk is None
        do = (
            "take watch.disk: null out of the settings"
            if off
            else "watch.disk: limits that are reached before it is full"
        )
        yield Shortfall(f"no alert said that the disk is full{': watch.disk is off' if off else ''}", do)
    else:
        yield from nobody_told(seen.told, run)
    if seen.back_at is None:
        yield Shortfall(f"it did not train on within {seen.within:.0f} s of having space again", _look(run))
    elif seen.back is not None:
        yield from _lost_too_much(seen, run)


def slurm_problems(seen: SeenAfter, run: Run, *, went_on: bool, false_alarm: bool) -> Iterator[Shortfall]:
    """Yield what is wrong while Slurm did not answer."""
    if not went_on:
        yield Shortfall("it stood still while Slurm did not answer", _look(run))
    elif seen.back_at is None:
        yield Shortfall("the alert about Slurm did not end when it answered again", _look(run))
    if false_alarm:
        yield Shortfall("people were told that its job is gone, which nobody could see", _look(run))
    yield from nobody_told(seen.told, run)


def lighthouse_problems(
    seen: SeenAfter, run: Run, *, back: bool, moved: bool, lost: Sequence[str]
) -> Iterator[Shortfall]:
    """Yield what is wrong after the lighthouse was killed. ``lost``: groups that were started again."""
    if not back:
        yield Shortfall(f"no lighthouse came in its place within {seen.within:.0f} s", _look(run))
    elif seen.back_at is None:
        yield Shortfall(f"the groups made no step within {seen.within:.0f} s of that", _look(run))
    if moved:
        yield Shortfall("the new one is at another address, so all groups were started again", _look(run))
    elif lost:
        yield Shortfall(f"{named('group', lost)} had to be started again", _look(run))


def _look(run: Run) -> str:
    return f"ftsupervise drill --keep FOLDER keeps what {run.name} leaves: read the logs in it"
