"""Reads the run directory for the process that starts the groups: in a thread, because a file system may hang.

That process passes signals on, reaps its children and keeps the lighthouse alive, whatever the disk does. While the directory
does not answer, the last answer holds, and nothing is started.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from ftsupervise.host.in_time import OneAtATime, in_time
from ftsupervise.host.signals import STOP
from ftsupervise.model import Attempt, CauseKind, Claim
from ftsupervise.replicas.table import leaves
from ftsupervise.rundir import ledger
from ftsupervise.rundir.paths import STOPPED, RunDir
from ftsupervise.rundir.progress import ProgressPage, read_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.switches import KILL, Stopped, read_brake, read_switch
from ftsupervise.truth import Health

_WRITES = 5.0  # seconds for a page to be written
_WITHIN = 3.0  # seconds for one look at all groups


class GroupReading(NamedTuple):
    """One look at the directory of a group. A part that cannot be read stays as it was in the look before."""

    newest: Attempt | None = None
    page: ProgressPage | None = None  # of the newest attempt
    ends: tuple[Attempt, ...] = ()  # since the last reading, oldest first; also one that left no record of its end
    before: Attempt | None = None  # the attempt before the newest, once that has made a step
    leaves: bool = False  # a person has asked it to leave for good
    braked: str = ""  # why it is not started again; "" without a brake


def read_group(group: RunDir, last: GroupReading, ended: int) -> GroupReading:
    """``ended``: the last attempt whose end is known already. Never raises."""
    found = last._replace(ends=(), leaves=leaves(group, last.leaves), braked=_braked(group, last.braked))
    try:
        newest = ledger.newest(group)
        if newest is None:
            return found._replace(newest=None)
        ends: list[Attempt] = []
        if newest.number > ended:
            found_since = ledger.backwards(group, first=ended + 1)
            ends = [one for one in found_since if one.ended is not None or one.number < newest.number]
        before = last.before
        if before is None or before.number != newest.number - 1 or before.ended is None:
            stepped = newest.number > 1 and newest.first_step is not None
            before = next(ledger.backwards(group, before=newest.number), None) if stepped else None
    except OSError:
        return found
    page = read_progress(group, newest.number)
    return found._replace(newest=newest, page=page, ends=tuple(reversed(ends)), before=before)


def _braked(group: RunDir, last: str) -> str:
    try:
        on = read_brake(group)
    except OSError:
        return last
    return "" if on is None else f"{on.words()}; fix the cause, then: ftsupervise clear --brake {group.quoted()}"


def words_of_its_end(one: Attempt) -> str:
    """Say it for the log: "attempt 2 ended at step 40: killed by SIGKILL; restarted in place"."""
    step = f" at step {one.last_step}" if one.last_step is not None else ""
    then = f"; {one.then}" if one.then else ""
    return f"attempt {one.number} ended{step}: {one.words or 'without a record'}{then}"


def why_over(run: RunDir) -> str:
    """Say why no group of the run is started any more; "" while they are."""
    if run.has_finished():
        return "the run has finished"
    switch = read_switch(run, KILL)
    by = f": raised by {switch.who}{f': {switch.why}' if switch.why else ''}" if switch.who else ""
    return f"{CauseKind.KILL_SWITCH.value}{by}" if switch.health is Health.BAD else ""


def note_stop(run: RunDir, attempt: Claim, told: int, why: str, step: int | None) -> None:
    """Write down why the groups of this attempt of the whole run stopped, for its ledger, as a guard does for its own attempt.
    ``told``: the signal that asked for it, or 0."""

    def note() -> None:
        if told:
            kind = CauseKind.TOLD if told in STOP else CauseKind.WARNING
        elif read_switch(run, KILL).up:
            kind = CauseKind.KILL_SWITCH
        else:
            return
        write_json(attempt.folder / STOPPED, Stopped(kind.value, why, step, datetime.now(timezone.utc)))

    try:
        in_time(note, _WRITES)
    except OSError:  # a full disk: the command has ended by itself, then
        return


class RunDirReader:
    """Reads all that is asked for in one thread, and returns it within a bound."""

    def __init__(self, run: RunDir, say: Callable[[str], None]) -> None:
        self.over, self.begun = "", 0.0  # ``begun``: monotonic, of the last reading
        self._turn = OneAtATime[tuple[float, str, list[GroupReading]]]()
        self._run, self._say, self._blind = run, say, False

    def read(self, known: Sequence[tuple[RunDir, GroupReading, int]]) -> Sequence[GroupReading] | None:
        """Return the reading of each group; None where the directory does not answer. ``known``: the
        arguments of ``read_group``."""

        def work() -> tuple[float, str, list[GroupReading]]:
            return time.monotonic(), why_over(self._run), [read_group(*one) for one in known]

        asked = time.monotonic()
        found = self._turn(work, _WITHIN)
        if found is not None and found[0] < asked:  # it hung, and says how all was before
            found = self._turn(work, _WITHIN)
        if (found is None) is not self._blind:
            self._blind = found is None
            answers = "does not answer: no group is started until it does" if self._blind else "answers again"
            self._say(f"the run directory {self._run.root} {answers}")
        if found is None:
            return None
        self.begun, self.over, readings = found
        return readings
