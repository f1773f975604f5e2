"""Run one entry now, as a person asks: with the environment of a slot and its record, and the output on the terminal too."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from ftsupervise.crontab import execute, history
from ftsupervise.crontab.entries import Entry, find
from ftsupervise.crontab.parts import Kind
from ftsupervise.crontab.place import CronDir, Installed, dir_option, stamp
from ftsupervise.crontab.successors import entry_comment
from ftsupervise.crontab.work import Slot, busy, hand_over, start_record, task_of, write_ended
from ftsupervise.errors import Error, NotFound, Refused


@dataclass(frozen=True)
class ByHand:
    """``code`` is the entry's own exit code (1 when it was ended at its bound), 0 for a job that was submitted."""

    folder: Path
    code: int
    words: str


def entry_called(cron: CronDir, installed: Installed, name: str) -> Entry:
    """The entry ``name``: "hourly/disk", or "disk" if there is one. Raises NotFound, saying why a file is passed over."""
    found = find(cron, installed)
    matching = [entry for entry in found.entries if name in (entry.name, entry.name.partition("/")[2])]
    if len(matching) == 1:
        return matching[0]
    if matching:
        raise NotFound(f"several entries are called {name!r}", hint=f"one of: {', '.join(e.name for e in matching)}")
    for passed in found.passed:
        if name in (passed.name, passed.name.partition("/")[2]):
            raise NotFound(
                f"{passed.name} is passed over: {passed.why}", hint=f"ftsupervise cron list{dir_option(cron)}"
            )
    raise NotFound(f"no entry is called {name!r} in {cron.root}", hint=f"ftsupervise cron list{dir_option(cron)}")


def run_now(slot: Slot, entry: Entry, *, again: bool, echo: Callable[[bytes], None] | None) -> ByHand:
    """Run ``entry`` once, bounded and recorded. Raises Refused while it runs already, CannotWrite, the scheduler's errors."""
    why = busy(slot, history.newest_begun(slot.cron, entry.key))
    if why and not again:
        raise Refused(f"{entry.name} is not started: {why}", hint="--again starts it all the same")
    comment = entry_comment(slot.installed.id, entry.key, stamp(slot.at)) if entry.kind is Kind.JOB else ""
    folder = history.claim(slot.cron, entry.key, slot.at, start_record(slot, 0, job_comment=comment))
    if folder is None:
        raise Refused(f"{entry.name} was started this very second", hint="try again")
    if entry.kind is Kind.JOB:
        hand_over(slot, entry, folder, 0)
        newest = history.newest_begun(slot.cron, entry.key)
        if newest is not None and newest.outcome:
            raise Error(f"{entry.name}: {newest.words}")
        job = newest.job_id if newest is not None else ""
        return ByHand(folder, 0, f"submitted as job {job}" if job else "handed to sbatch, which gave no clear answer")
    task = task_of(entry, slot.cron, slot.installed, folder, slot.at)
    ends: list[execute.Ended] = []
    execute.run_all(
        [task],
        bound=slot.installed.limit.total_seconds(),
        output_limit=slot.installed.output,
        on_end=ends.append,
        echo=echo,
    )
    write_ended(slot, task, ends[0], [])
    code = ends[0].code
    return ByHand(folder, 1 if code is None else code if code >= 0 else 128 - code, ends[0].words)


def stamp_of(now: datetime) -> datetime:
    """The name of a run that has no slot: the second it began."""
    return now.replace(microsecond=0)
