"""``ftsupervise status``: a verdict first, then its evidence."""

from __future__ import annotations

import os
from datetime import datetime, timezone
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.model import Attempt, Job
    from ftsupervise.report import Status

SCHEMA_VERSION = 2
_A_DAY = 86400
_COLOURS = {"RUNNING": "green", "FINISHED": "green", "GONE": "red", "UNKNOWN": "yellow", "STOPPED": "yellow"}


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object (several runs: in its list runs).")
def status(runs: tuple[str, ...], as_json: bool) -> None:
    """Show how RUN is doing. RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml."""
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report import gather

    found = [find_run(run) for run in runs or (None,)]
    seen = [gather(rundir, datetime.now(timezone.utc), os.environ) for rundir in found]
    seen = [_with_receivers(one) for one in seen]
    if as_json:
        records = [{**plain(one), "step": one.step, "verdict": one.verdict.lower()} for one in seen]
        say_json({"schema_version": SCHEMA_VERSION, **(records[0] if len(records) == 1 else {"runs": records})})
        return
    for index, one in enumerate(seen):
        if index:
            say()
        for line in lines_of(one):
            say(line)
    for words in dict.fromkeys(words for one in seen for words in one.warnings):
        say(f"note: each command of Slurm warns: {printable(words)}", err=True)


def _with_receivers(seen: Status) -> Status:
    """The state of its receivers. What reads a journal is imported where there is one: half of a start."""
    journal = seen.rundir.watch / "journal"
    try:
        if not os.listdir(journal):
            return seen
    except OSError:
        return seen
    from ftsupervise.alerts.self_monitor import telling

    return seen._replace(telling=telling(journal, seen.at))


def lines_of(seen: Status) -> list[str]:
    step = f", step {seen.step}" if seen.step is not None else ""
    why = f" ({seen.why})" if seen.why else ""
    head = click.style(seen.verdict, fg=_COLOURS.get(seen.verdict, "cyan"), bold=True)
    lines = [f"{seen.name}: {head}{why}{step}", *_queue(seen), *_progress(seen)]
    for switch in seen.switches:
        if switch.up or switch.problem:
            lines.append(
                f"  switch    {switch.problem or f'{switch.name} is up'}" + (f", by {switch.who}" if switch.who else "")
            )
    lines += _attempts(seen)
    lines += [f"  receiver  {printable(words)}" for words in seen.telling]
    lines.append(f"  directory {seen.rundir.root}")
    return lines


def _queue(seen: Status) -> list[str]:
    if seen.jobs is None:
        return [f"  queue     unknown: {seen.blind}"]
    if not seen.jobs:
        return ["  queue     no job of this run"]
    from ftsupervise.hostlist import compress_hostlist
    from ftsupervise.scheduler.parse import array_size

    lines = []
    for job in seen.jobs:
        if job.state.waiting:
            continue
        where = f" on {compress_hostlist(job.nodes)}" if job.nodes else ""
        lines.append(f"  queue     {job.id} {job.state.value}{where}{_until(job, seen.at)}")
    waiting = sum(array_size(job.id) for job in seen.jobs if job.state.waiting)
    if waiting:
        reason = next(job.reason for job in seen.jobs if job.state.waiting)
        lines.append(f"  queue     {waiting} waiting to take over{f' ({reason})' if reason else ''}")
    return lines


def _until(job: Job, now: datetime) -> str:
    from ftsupervise.units import show_duration

    if job.end_time is None or job.end_time <= now:
        return ""
    return f", {show_duration((job.end_time - now).total_seconds())} left"


def _progress(seen: Status) -> list[str]:
    if not seen.beats:
        return []
    from ftsupervise.units import show_duration

    newest = max(beat.at for beat in seen.beats)
    oldest = min(seen.beats, key=lambda beat: beat.at)
    age = show_duration(max(0.0, (seen.at - newest).total_seconds()))
    reached = "no step yet" if seen.step is None else f"step {seen.step}"
    lines = [f"  progress  {reached}, {len(seen.beats)} rank(s), last beat {age} ago"]
    behind = (newest - oldest.at).total_seconds()
    if behind > 60:
        lines.append(
            f"  progress  rank {oldest.rank} is {show_duration(behind)} behind the others (step {oldest.step})"
        )
    return lines + _memory(seen)


def _memory(seen: Status) -> list[str]:
    """The rank whose memory is at the limit first, where that is within a day."""
    from ftsupervise.units import show_duration

    lines = []
    for fact, what in (("memory", "memory"), ("gpu_memory", "GPU memory")):
        known = ((beat.facts.get(f"{fact}_left", ""), beat) for beat in seen.beats)
        grows = [(int(left), beat) for left, beat in known if left.isascii() and left.isdigit() and len(left) < 10]
        if grows and (first := min(grows, key=lambda pair: pair[0]))[0] < _A_DAY:
            left, beat = first
            where = f"rank {beat.rank} on {printable(beat.host)}"
            lines.append(
                f"  memory    {where}: {show_duration(left)} until its {what} is at the limit at which the guard leaves"
            )
    return lines


def _attempts(seen: Status) -> list[str]:
    shown = seen.attempts[-5:]
    lines = []
    if earlier := seen.not_read + len(seen.attempts) - len(shown):
        unread = f", of which {seen.not_read} were not read" if seen.not_read else ""
        lines.append(f"  attempt   ({earlier} earlier ones{unread}: ls {seen.rundir.attempts})")
    return lines + [f"  attempt   {_attempt(attempt, seen.at)}" for attempt in shown]


def _attempt(attempt: Attempt, now: datetime) -> str:
    from ftsupervise.units import show_duration

    end = attempt.ended or now
    lasted = show_duration(max(0.0, (end - attempt.started).total_seconds()))
    steps = "" if attempt.last_step is None else f", to step {attempt.last_step}"
    if attempt.resumed is not None and attempt.begins is None:
        steps = f", {attempt.resumed.words()}{steps}"
    elif attempt.begins is not None:
        more = (
            f", {attempt.resumed.words()}" if attempt.resumed is not None and attempt.begins.source == "start" else ""
        )
        steps = f"{more}, {attempt.begins.words()}{steps}"
    if attempt.held is not None:
        steps += f", every buddy holds step {attempt.held}"
    if attempt.ended is None and attempt.cause is None:
        return f"{attempt.number} (job {attempt.job_id or '-'}) running for {lasted}{steps}"
    cause = attempt.words or "ended"
    line = f": {attempt.line}" if attempt.line else ""  # last: it may be long
    if attempt.ended is None:
        return f"{attempt.number} (job {attempt.job_id or '-'}) {cause}{steps}{line}"
    return f"{attempt.number} (job {attempt.job_id or '-'}) {cause} after {lasted}{steps}{line}"
