"""The output of ``ftsupervise cron status`` and ``cron list``, line by line, and the ticks that are made in a terminal.

It stands alone because the commands (``cron.py``) can be read without their words.
"""

from __future__ import annotations

import dataclasses
import json
import os
import shlex
import sys
import time
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from ftsupervise.crontab.entries import CronEntries, CronEntry
    from ftsupervise.crontab.history import EntryRun
    from ftsupervise.crontab.installation import CronDir, Installed
    from ftsupervise.crontab.status import CronStatus, EntryStatus
    from ftsupervise.crontab.tick import CronTicked
    from ftsupervise.scheduler import Scheduler
    from ftsupervise.scheduler.slurm import Slurm

_COLOURS = {
    "ALIVE": "green",
    "WAITING": "yellow",
    "UNSTARTED": "red",
    "LATE": "yellow",
    "UNKNOWN": "yellow",
    "DEAD": "red",
    "REMOVED": "cyan",
}


def local(at: datetime, installed: Installed) -> str:
    """Return a time as the crontab file means it."""
    return at.astimezone(installed.zone).strftime("%Y-%m-%d %H:%M:%S" if at.second else "%Y-%m-%d %H:%M")


def lines(seen: CronStatus) -> Iterator[str]:
    """Yield the verdict first, then its grounds."""
    installed = seen.installed
    head = click.style(seen.verdict, fg=_COLOURS.get(seen.verdict, "cyan"), bold=True)
    yield f"cron in {seen.cron.root}: {head}{_why(seen)}"
    yield f"  kept by   {installed.why}"
    period = show_duration(installed.period.total_seconds())
    coming = f", next {local(seen.next_slot, installed)}" if seen.next_slot else ""
    yield f"  slots     every {period}{coming} ({installed.timezone})"
    yield from _slot_lines(seen)
    if seen.chain is not None:
        chain = seen.chain
        more = [f"{len(chain.ahead)} wait for their slots", f"{chain.running} running"]
        more += [f"{chain.overdue} overdue"] if chain.overdue else []
        more += [f"{len(chain.held)} held: scontrol release {' '.join(chain.held)}"] if chain.held else []
        yield f"  jobs      {', '.join(more)}"
    elif seen.blind:
        yield f"  jobs      unknown: {seen.blind}"
    if seen.drained:
        from ftsupervise.crontab.chain import drained_words

        yield f"  nodes     {drained_words(seen.drained)} (sinfo -R)"
    for words in seen.warnings:
        yield f"  note      each command of Slurm warns: {words}"
    for entry in seen.entries:
        yield from _entry_lines(entry, seen)
    for passed in seen.passed:
        yield f"  {passed.name}: passed over: {passed.why}"
    if not seen.entries:
        yield f"  nothing to run yet: drop an executable or a .slurm file into {seen.cron.folder('hourly')}"


def _why(seen: CronStatus) -> str:
    if seen.verdict == "REMOVED":
        return f" {seen.installed.removed}"
    where = f"--dir {shlex.quote(str(seen.cron.root))}"
    start = f": ftsupervise cron run --foreground {where}" if seen.installed.backend == "loop" else ""
    if seen.verdict == "UNSTARTED":
        return f", its loop was never started{start}"
    last = seen.newest
    said = ", no slot yet"
    if last is not None:
        said = f", last slot {show_duration(max(0.0, (seen.at - last).total_seconds()))} ago"
    if seen.verdict != "DEAD":
        return said
    lost = f" ({seen.lost_lines})" if seen.lost_lines else ""
    return f"{said}{lost}{start or f': ftsupervise cron ensure {where}'}"


def _slot_lines(seen: CronStatus) -> Iterator[str]:
    slots = seen.slots
    if not slots.known:
        return
    parts = [f"{len(slots.known)} of the last {max(slots.expected, len(slots.known))} came"]
    if slots.missed:
        newest = ", ".join(local(at, seen.installed) for at in slots.missed[-3:])
        parts.append(f"{len(slots.missed)} missed (last: {newest})")
    if slots.died:
        parts.append(f"{len(slots.died)} cut off")
    if slots.lates:
        worst = max(slots.lates)
        parts.append(f"late by {show_duration(slots.lates[-1])} now, {show_duration(worst)} at worst")
    yield f"            {'; '.join(parts)}"


def _entry_lines(entry: EntryStatus, seen: CronStatus) -> Iterator[str]:
    installed = seen.installed
    coming = local(entry.next, installed) if entry.next else "never"
    last, current = entry.last, entry.current
    word = click.style(entry.word, fg={"ok": "green", "failed": "red", "cut off": "red"}.get(entry.word, "yellow"))
    if last is None and current is None:
        yield f"  {entry.entry.name}: has not run yet; next {coming}"
        return
    if last is None:
        yield f"  {entry.entry.name}: {word}; next {coming}"
    else:
        took = f" in {show_duration(last.end.seconds)}" if last.end.seconds >= 0.05 else ""
        late = f", {show_duration(last.start.late)} late" if last.start.late >= 1 else ""
        missed = f", after {last.start.missed} missed slots" if last.start.missed else ""
        how = last.end.words or "its tick was killed"
        when = local(last.began, installed)
        yield f"  {entry.entry.name}: {word}; last {when}: {how}{took}{late}{missed}; next {coming}"
    if current is not None:
        job = (
            f" as job {current.start.job_id}"
            if current.start.job_id
            else f" on {current.start.host}"
            if current.start.host
            else ""
        )
        yield f"      runs since {local(current.began, installed)}{job}"
    newest = entry.runs[0]
    if newest not in (last, current):
        yield f"      {local(newest.at, installed)}: {newest.end.words}"
    for run in (last, current):
        if run is not None:
            yield f"      output: {run.output}"


def as_json(seen: CronStatus) -> Iterator[str]:
    """One JSON object."""
    slots = seen.slots
    chain = dataclasses.asdict(seen.chain) if seen.chain is not None else None
    yield json.dumps(
        {
            "schema_version": 1,
            "verdict": seen.verdict,
            "directory": str(seen.cron.root),
            "backend": seen.installed.backend,
            "period": seen.installed.period.total_seconds(),
            "next_slot": seen.next_slot,
            "slots": {
                "known": len(slots.known),
                "expected": slots.expected,
                "missed": slots.missed,
                "cut_off": [slot.at for slot in slots.died],
                "last": slots.last.at if slots.last else None,
                "late": slots.lates[-1] if slots.lates else None,
                "worst_late": max(slots.lates, default=None),
            },
            "drained": seen.drained,
            "lost_lines": seen.lost_lines,
            "chain": chain,
            "blind": seen.blind,
            "entries": [_entry_json(entry) for entry in seen.entries],
            "passed_over": [dataclasses.asdict(passed) for passed in seen.passed],
        },
        default=lambda value: value.isoformat() if isinstance(value, datetime) else str(value),
        indent=1,
    )


def _entry_json(entry: EntryStatus) -> dict[str, object]:
    return {
        "name": entry.entry.name,
        "schedule": entry.entry.schedule.text,
        "next": entry.next,
        "state": entry.word,
        "last": _run_json(entry.last),
        "running": _run_json(entry.current),
        "runs": [{"at": run.at, "outcome": run.end.outcome, "words": run.end.words} for run in entry.runs],
    }


def _run_json(run: EntryRun | None) -> dict[str, object] | None:
    if run is None:
        return None
    return {
        "at": run.began,
        "slot": run.at,
        "late": run.start.late,
        "seconds": run.end.seconds,
        "code": run.end.code,
        "words": run.end.words,
        "job_id": run.start.job_id,
        "output": str(run.output),
    }


def entry_lines(found: CronEntries, installed: Installed, now: datetime) -> Iterator[str]:
    """Yield the output of ``cron list``: what runs when, and what is passed over."""
    from ftsupervise.crontab.status import next_slot

    for entry in found.entries:
        coming = next_slot(entry, installed, now)
        when = local(coming, installed) if coming else "never"
        yield f"{entry.name:32}  {entry.schedule.text:14}  next {when}  {_program(entry)}"
    for passed in found.passed:
        yield f"{passed.name:32}  passed over: {passed.why}"


def entries_as_json(found: CronEntries, installed: Installed, now: datetime) -> Iterator[str]:
    """Yield the output of ``cron list --json``: one JSON object."""
    from ftsupervise.crontab.status import next_slot

    entries = []
    for entry in found.entries:
        coming = next_slot(entry, installed, now)
        due = coming.isoformat() if coming else None
        entries.append({"name": entry.name, "schedule": entry.schedule.text, "next": due, "runs": _program(entry)})
    passed = [{"name": one.name, "why": one.why} for one in found.passed]
    yield json.dumps({"schema_version": 1, "entries": entries, "passed_over": passed}, indent=1, ensure_ascii=False)


def _program(entry: CronEntry) -> str:
    return str(entry.path) if entry.path else entry.argv[-1]


# A tick, one entry by hand, the loop in a terminal.


def now() -> datetime:
    return datetime.now(timezone.utc)


def slurm(env: Mapping[str, str]) -> Slurm:
    from ftsupervise.scheduler.slurm import Slurm

    return Slurm(env)


def jobs(env: Mapping[str, str]) -> Scheduler:
    from ftsupervise.scheduler import open_scheduler

    return open_scheduler("auto", env)


_HOME = 4.0  # seconds for a home directory to answer
_ANSWER = 15.0  # seconds in which the folder of a cron must answer before a slot of it begins


def answering_place(directory: Path | None) -> CronDir:
    """Return the installed folder, once a child has read it as a slot does. Raises NoAnswer where it hangs: no slot begins
    then, and while that child hangs none is sent after it. A slot that hangs could not be ended, and each would leave one more.
    """
    from ftsupervise.config.find_run import cron_directory
    from ftsupervise.crontab import ENV_DIR
    from ftsupervise.crontab.entries import find
    from ftsupervise.crontab.installation import CronDir, read_installed
    from ftsupervise.errors import NoAnswer
    from ftsupervise.probe.errand import within

    def read() -> str:
        place = CronDir(cron_directory(directory))
        installed = read_installed(place)
        if installed is not None:
            find(place, installed)
        return str(place.root)

    where = directory or os.environ.get(ENV_DIR) or "the folder of the cron"
    try:
        return CronDir(Path(within(_ANSWER, read, key=f"cron {where}")))
    except TimeoutError as error:
        raise NoAnswer(f"{where}: {error}", hint="no slot was begun; the next one tries again") from None


def answers(home: Path) -> bool:
    """Return whether a home directory is there and its file system answers; an entry begins in ``/`` otherwise."""
    from ftsupervise.probe.errand import within

    try:
        return bool(within(_HOME, home.is_dir, key=f"home {home}"))
    except TimeoutError:
        return False


def tick(place: CronDir, slot: datetime | None) -> CronTicked | None:
    from ftsupervise.crontab.installation import read_installed
    from ftsupervise.crontab.tick import tick as one

    installed = read_installed(place)
    for name, value in (installed.whole_environment if installed is not None else {}).items():
        os.environ.setdefault(
            name, value
        )  # receivers need the proxy; a tick of crontab, or of Slurm, has only some of these variables
    return one(
        place, slot=slot, now=now(), job_id=os.environ.get("SLURM_JOB_ID", ""), slurm=slurm, jobs=jobs, answers=answers
    )


def run_one(place: CronDir, name: str, *, again: bool, dry_run: bool) -> None:
    from ftsupervise.crontab.dispatch import CronSlot, entry_called, run_now
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error

    installed = need_installed(place)
    entry = entry_called(place, installed, name)
    if dry_run:
        click.echo(f"would {'submit' if entry.kind.value == 'job' else 'run'} {' '.join(entry.argv)}")
        return
    at = now()
    queue = None
    if entry.kind.value == "job":
        try:
            queue = jobs(installed.environment).queue()
        except Error:
            queue = None  # so that no run starts beside an earlier one that may still go on
    scheduler = partial(jobs, installed.environment)
    slot = CronSlot(place, installed, at.replace(microsecond=0), at, "", queue, scheduler, answers=answers)
    done = run_now(slot, entry, again=again, echo=_to_terminal)
    click.echo(f"{entry.name}: {done.words}; output in {done.folder}", err=True)
    raise SystemExit(done.code)


def _to_terminal(data: bytes) -> None:
    sys.stdout.buffer.write(data)
    sys.stdout.buffer.flush()


def loop(place: CronDir, dry_run: bool) -> None:
    from ftsupervise.cli.watch import stop_on_signals
    from ftsupervise.crontab.entries import slots_after
    from ftsupervise.crontab.installation import need_installed
    from ftsupervise.errors import Error

    installed = need_installed(place)
    if dry_run:
        for slot in slots_after(now(), installed.period, 5):
            click.echo(f"would tick at {local(slot, installed)}")
        return
    stopping = stop_on_signals()
    period = show_duration(installed.period.total_seconds())
    click.echo(f"cron: a tick every {period} in {place.root}; Ctrl-C stops it", err=True)
    while not stopping:
        slot = slots_after(now(), installed.period, 1)[0]
        while not stopping and now() < slot:
            time.sleep(min(0.5, max(0.0, (slot - now()).total_seconds())))
        if stopping:
            break
        try:
            done = tick(place, slot)
        except (Error, OSError) as error:  # a file system that is away for a while must not end the keeping of time
            click.echo(f"{local(slot, installed)} {error}", err=True)
            continue
        if done is None:
            click.echo("cron: removed", err=True)
            return
        for line in (*(f"ran {name}" for name in done.worked.ran), *done.trouble, *done.notified):
            click.echo(f"{local(done.slot, installed)} {line}")  # a late tick works for a later slot
    click.echo("cron: stopped", err=True)
