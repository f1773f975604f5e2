"""What ``ftsupervise cron status`` says, line by line."""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Iterator
from datetime import datetime
from typing import TYPE_CHECKING

import click

from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.crontab.history import Ran
    from ftsupervise.crontab.place import Installed
    from ftsupervise.crontab.report import EntryStatus, Status

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
    """A time as the crontab file means it."""
    return at.astimezone(installed.zone).strftime("%Y-%m-%d %H:%M:%S" if at.second else "%Y-%m-%d %H:%M")


def lines(seen: Status) -> Iterator[str]:
    """The verdict first, then what it rests on."""
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


def _why(seen: Status) -> str:
    if seen.verdict == "REMOVED":
        return f" {seen.installed.removed}"
    where = f"--dir {shlex.quote(str(seen.cron.root))}"
    start = f": ftsupervise cron run --foreground {where}" if seen.installed.backend == "loop" else ""
    if seen.verdict == "UNSTARTED":
        return f", nobody has started its loop{start}"
    last = seen.newest
    said = ", no slot yet"
    if last is not None:
        said = f", last slot {show_duration(max(0.0, (seen.at - last.at).total_seconds()))} ago"
    if seen.verdict != "DEAD":
        return said
    lost = f" ({seen.lost_lines})" if seen.lost_lines else ""
    return f"{said}{lost}{start or f': ftsupervise cron ensure {where}'}"


def _slot_lines(seen: Status) -> Iterator[str]:
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


def _entry_lines(entry: EntryStatus, seen: Status) -> Iterator[str]:
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
        took = f" in {show_duration(last.seconds)}" if last.seconds >= 0.05 else ""
        late = f", {show_duration(last.late)} late" if last.late >= 1 else ""
        missed = f", after {last.missed} missed slots" if last.missed else ""
        how = last.words or "its tick was killed"
        when = local(last.started or last.at, installed)
        yield f"  {entry.entry.name}: {word}; last {when}: {how}{took}{late}{missed}; next {coming}"
    if current is not None:
        job = f" as job {current.job_id}" if current.job_id else f" on {current.host}" if current.host else ""
        yield f"      runs since {local(current.started or current.at, installed)}{job}"
    newest = entry.runs[0]
    if newest not in (last, current):
        yield f"      {local(newest.at, installed)}: {newest.words}"
    for ran in (last, current):
        if ran is not None:
            yield f"      output: {ran.output}"


def as_json(seen: Status) -> Iterator[str]:
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
        "runs": [{"at": ran.at, "outcome": ran.outcome, "words": ran.words} for ran in entry.runs],
    }


def _run_json(ran: Ran | None) -> dict[str, object] | None:
    if ran is None:
        return None
    return {
        "at": ran.started or ran.at,
        "slot": ran.at,
        "late": ran.late,
        "seconds": ran.seconds,
        "code": ran.code,
        "words": ran.words,
        "job_id": ran.job_id,
        "output": str(ran.output),
    }
