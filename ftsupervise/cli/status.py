"""``ftsupervise status``: all runs in a table, or one run with its evidence; ``--watch`` goes on showing it."""

from __future__ import annotations

import gc
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from datetime import datetime, timezone
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import columns, plain, say, say_json
from ftsupervise.cli.status_rows import COLOURS, ago
from ftsupervise.model import OUTPUT
from ftsupervise.printable import printable
from ftsupervise.report.account import kinds_over, ratio
from ftsupervise.report.queues import jobs_left
from ftsupervise.report.row import beside_running, pace_of, reason_of
from ftsupervise.rundir.observing import phrase
from ftsupervise.truth import NOT_A_NUMBER, show_percent_points
from ftsupervise.units import count, show_duration, show_percent, show_rate

if TYPE_CHECKING:
    from pathlib import Path

    from ftsupervise.model import Attempt, Job
    from ftsupervise.replicas.table import ReplicaGroup
    from ftsupervise.report import Status
    from ftsupervise.report.account import Stretch
    from ftsupervise.report.detail import RunDetail
    from ftsupervise.report.groups import GroupFault, GroupsSeen
    from ftsupervise.report.row import RunRow
    from ftsupervise.report.rows import Overview

_NEWEST = 5  # attempts whose output is looked for


@click.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option("--watch", "-w", is_flag=True, help="Go on showing it. Keys: q, up, down, Enter: one run, l: its log, r.")
@click.option(
    "--every", "seconds", type=click.FloatRange(5, 3600), default=30, show_default=True, help="Seconds, with --watch."
)
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object (several runs: in its list runs).")
@click.option("--schema", is_flag=True, help="Print the JSON Schema of what --json prints, and nothing else.")
def status(runs: tuple[str, ...], watch: bool, seconds: float, as_json: bool, schema: bool) -> None:
    """Show how all runs of this account are doing, a row each, or RUN in full.

    RUN is a directory, an ftsupervise.yaml, or a name; "." is the run of this directory. Without RUN that one, or in a job
    its run, stands first. Of a file with a sweep each run has a row.
    """
    if schema:
        from ftsupervise.report.published import json_schema

        say_json(json_schema())
        return
    if watch:
        from ftsupervise.cli.status_live import show

        show(runs, seconds)
        return
    if not runs:
        _all(as_json)
        return
    gc.disable()  # nothing that one look makes is garbage, and to look for some takes time
    from ftsupervise.config.find_run import each_run, find_run
    from ftsupervise.report.detail import detail, with_receivers

    if (members := each_run(runs)) != runs and len(runs) == 1:
        _sweep(members, as_json)
        return
    runs = members

    found = [with_receivers(detail(find_run(run), datetime.now(timezone.utc), os.environ)) for run in runs]
    if as_json:
        from ftsupervise.report.published import SCHEMA_VERSION

        records = [record(one) for one in found]
        say_json({"schema_version": SCHEMA_VERSION, **(records[0] if len(records) == 1 else {"runs": records})})
        return
    from ftsupervise.rundir.records import as_count

    for index, one in enumerate(found):
        if index:
            say()
        for line in lines_of(one, columns() or as_count(os.environ.get("COLUMNS", "")) or 100, _advised(one)):
            say(line)
    _notes(words for one in found for words in one.status.warnings)


def _all(as_json: bool) -> None:
    from ftsupervise.config.find_run import each_run, find_run
    from ftsupervise.errors import Error
    from ftsupervise.report.rows import my_runs, overview

    here, missing, runs = None, None, my_runs()
    try:
        swept = each_run(())
        here = None if swept else find_run(None)
        ours = list(map(Path, swept)) if here is None else [here.root]
    except Error as error:
        missing, ours = error if names_a_run() else None, []
    known = {*runs.values()}
    runs = {**{place.name: place for place in ours if not known & {place, place.resolve()}}, **runs}
    seen = overview(runs, datetime.now(timezone.utc), os.environ, here=None if here is None else here.root)
    if missing is not None and not seen.rows:
        raise missing
    _say_rows(seen, as_json)
    if missing is not None:
        say(f"note: {missing.message}{f'; {missing.hint}' if missing.hint else ''}", err=True)
    _notes(seen.warnings)


def _sweep(members: tuple[str, ...], as_json: bool) -> None:
    from ftsupervise.config.find_run import find_run
    from ftsupervise.report.rows import overview

    places = {rundir.root.name: rundir.root for rundir in map(find_run, members)}
    seen = overview(places, datetime.now(timezone.utc), os.environ)
    _say_rows(seen._replace(rows=tuple(row for row in seen.rows if not row.elsewhere)), as_json)
    _notes(seen.warnings)


def _say_rows(seen: Overview, as_json: bool) -> None:
    if as_json:
        from ftsupervise.report.published import SCHEMA_VERSION

        rows = [{**plain(row), "verdict": row.verdict.lower()} for row in seen.rows]
        say_json({"schema_version": SCHEMA_VERSION, "at": seen.at.isoformat(), "runs": rows})
    elif not seen.rows:
        say("This account has launched no run: ftsupervise launch submits the run of an ftsupervise.yaml")
    else:
        from ftsupervise.cli.status_rows import advice, table

        for line in table(seen.rows, seen.at, columns()):
            click.echo(line.rstrip())
        for line in advice(seen.rows, columns(), has_log=_has_log):  # looks into directories: after the table
            click.echo(line.rstrip())


def _has_log(row: RunRow) -> bool:
    """Return whether the output of its newest attempts, which ``logs`` would show, goes to a file."""
    from itertools import islice

    from ftsupervise.report.output import output_files
    from ftsupervise.report.reading import run_name
    from ftsupervise.rundir.ledger import backwards
    from ftsupervise.rundir.paths import RunDir

    rundir = RunDir(Path(row.directory))
    try:
        return bool(output_files(rundir, run_name(rundir), tuple(islice(backwards(rundir), _NEWEST))))
    except OSError:
        return True  # ``logs`` says what is in the way


def names_a_run() -> bool:
    """Does this place name a run: a job of it, or its settings?"""
    from ftsupervise.config.find_run import CONFIG_NAME
    from ftsupervise.rundir.paths import ENV_RUN_DIR

    return bool(os.environ.get(ENV_RUN_DIR)) or Path(CONFIG_NAME).exists()


def _notes(warnings: Any) -> None:
    for words in dict.fromkeys(warnings):
        say(f"note: each command of Slurm warns: {printable(words)}", err=True)


def record(found: RunDetail) -> dict[str, Any]:
    """Return one run as the values that ``--json`` prints."""
    from ftsupervise.report.published import status_of

    seen = status_of(found)
    return {**plain(seen.row), "verdict": seen.verdict.lower(), **plain(seen.fields)}


def _advised(found: RunDetail) -> dict[str, str]:
    """Return what is to be done about each alert that fires, by its name, as far as its journal says it."""
    journal = found.status.rundir.watch / "journal"
    if not found.row.alerts or not journal.is_dir():
        return {}
    from ftsupervise.alerts.journal import Journal

    firing = [one.finding for one in Journal(journal).read().alerts.values() if one.is_bad]
    firing.sort(key=lambda finding: finding.severity)  # the worst one's words stay
    return {finding.watchdog: finding.do for finding in firing if finding.do}


# ------------------------------------------------------------------------------------------
# One run in lines: the verdict first, then its evidence, where its time went, and where to read on.


# character, colour; the order is that of the legend
KINDS = {
    "train": ("=", "green"),
    "save": ("s", "cyan"),
    "redo": ("r", "magenta"),
    "detect": ("d", "red"),
    "restart": (">", "yellow"),
    "queue": (".", "blue"),
    "braked": ("b", "red"),
    "held": ("h", "blue"),
    "unknown": ("?", ""),
}
_SPEAKS = frozenset(("STALLED", "SILENT", "HUNG", "GONE"))  # states in which the supervisor's last line is shown
_A_DAY = 86400
_TORN = 3  # attempts whose torn checkpoints are shown
_WOULD = 3  # decisions that were only told
_FEWEST_SECONDS = 60  # a younger run has no timeline


def lines_of(found: RunDetail, width: int = 80, advised: Mapping[str, str] = MappingProxyType({})) -> list[str]:
    """``advised``: name of an alert that fires -> what its watchdog says is to be done."""
    from ftsupervise.cli.status_advice import advice_of

    seen, row = found.status, found.row
    step = "" if row.step is None else f", step {row.step}"
    if row.step is not None and row.last_step:
        step += f" of {row.last_step} ({100 * row.step / row.last_step:.0f} %)"
    stepped = next((one for one in reversed(seen.attempts) if one.last_step is not None), None)
    if step and stepped is not None and stepped.source == OUTPUT:
        step += ", read from its output"
    if not step and row.percent is not None:
        step = f", {show_percent_points(row.percent)} by its own words"
    head = click.style(seen.verdict, fg=COLOURS.get(seen.verdict, "cyan"), bold=True)
    why = reason_of(row)
    lines = [f"{seen.name}: {head}{_alarm(found)}{f' ({why})' if why else ''}{step}"]
    lines += [f"  do        {words}" for words in advice_of(found, advised)]
    lines += [
        *_queue(found),
        *_observed(found),
        *_last_event(seen),
        *_progress(found),
        *_unread(seen),
        *_groups(found),
        *_memory(seen),
        *_saved(found),
        *_resumes(seen),
    ]
    for switch in seen.run.switches:
        if switch.up or switch.problem:
            by = f", by {switch.who}" if switch.who else ""
            by += f", since {_clock(switch.since)} UTC" if switch.since is not None else ""
            lines.append(f"  switch    {switch.problem or f'the {_spoken(switch.name)} is up'}{by}")
    lines += [*_alerts(found), *_nodes(found), *_attempts(seen), *_why(found), *_time(found, max(40, min(width, 100)))]
    lines += [f"  receiver  {printable(words)}" for words in seen.telling]
    if found.log is not None:
        lines += _said(found.log) if seen.verdict in _SPEAKS else ()
        lines.append(f"  log       {printable(str(found.log))}")
    if found.tracker is not None:
        lines.append(f"  tracker   {found.tracker.url}")
    lines.append(f"  directory {seen.rundir.root}")
    return lines


def _said(log: Path) -> Iterator[str]:
    from ftsupervise.report.output import supervisors_last
    from ftsupervise.secrecy import masked

    if said := supervisors_last(log):
        yield f"  said      {masked(printable(said, 500))}"


def _alarm(found: RunDetail) -> str:
    trouble = found.status.run.loss_trouble
    words = beside_running(found.row, trouble.kind if trouble is not None else "")
    return "".join(f", {click.style(one, fg=colour, bold=colour == 'red')}" for one, colour in words)


def _queue(found: RunDetail) -> list[str]:
    seen = found.status
    if seen.jobs is None:
        return [f"  queue     unknown{f': {seen.blind}' if seen.blind not in seen.why else ''}"]
    if not seen.jobs:
        return ["  queue     no job of this run"]
    from ftsupervise.hostlist import compress_hostlist
    from ftsupervise.scheduler.parse import array_size, is_held

    lines = []
    for job in seen.jobs:
        if job.state.waiting:
            continue
        where = f" on {compress_hostlist(job.nodes)}" if job.nodes else ""
        lines.append(f"  queue     {job.id} {job.state.value}{where}{_until(job, seen)}")
    waiting = sum(array_size(job.id) for job in seen.jobs if job.state.waiting)
    if waiting:
        reason = next(job.reason for job in seen.jobs if job.state.waiting)
        since = f", in the queue for {ago(found.row.waits_since, seen.at)}" if found.row.waits_since is not None else ""
        held = ", held by the brake" if found.row.braked and is_held(reason) else ""
        lines.append(f"  queue     {count(waiting, 'job')} left{held}{f' ({reason})' if reason else ''}{since}")
    return lines


def _observed(found: RunDetail) -> Iterator[str]:
    """Say which decisions are only told, and the newest that were."""
    if found.observes:
        run = found.status.rundir.quoted()
        yield f"  observes  {phrase(found.observes)} (ftsupervise observe --off {run})"
    for one in found.would[-_WOULD:]:
        when = f"{_clock(one.at)} UTC, {f'attempt {one.attempt}' if one.attempt else 'no attempt began'}"
        yield f"  would     {when}: {printable(one.words, 300)}; {printable(one.then, 300)}"
    if len(found.would) > _WOULD:
        yield f"  would     {len(found.would) - _WOULD} earlier: ftsupervise report {found.status.rundir.quoted()}"


def _until(job: Job, seen: Status) -> str:
    if job.end_time is None or job.end_time <= seen.at:
        return ""
    return f", {show_duration((job.end_time - seen.at).total_seconds())} left"


def _last_event(seen: Status) -> Iterator[str]:
    """Say what happened to it last, with its time: the start or the end of an attempt, a switch, an alert."""
    events = [(one.started, f"attempt {one.number} began") for one in seen.attempts[-1:]]
    events += [
        (one.ended, f"attempt {one.number} ended: {one.words or 'nobody knows how'}")
        for one in seen.attempts[-2:]
        if one.ended is not None
    ]
    switches = (one for one in seen.run.switches if one.up and one.since is not None)
    events += [
        (one.since, f"{_spoken(one.name)} raised{f' by {one.who}' if one.who else ''}") for one in switches if one.since
    ]
    told = seen.run.watch.found if seen.verdict != "GONE" else None  # its end came before any alert of it
    alerts = told.alerts if told is not None else ()
    events += [(one.since, f"{one.severity} {printable(one.watchdog)}") for one in alerts if one.since is not None]
    if events:
        at, what = max(events)
        yield f"  last      {_clock(at)} UTC, {ago(at, seen.at)} ago: {what}"


def _progress(found: RunDetail) -> Iterator[str]:
    seen, row, page = found.status, found.row, found.status.run.page
    reached = "no step yet" if seen.step is None else f"step {seen.step}"
    if seen.step is None and row.percent is not None:
        reached = f"{show_percent_points(row.percent)}, read from its output, and no step"
    loss = "" if row.loss is None else f", loss {row.loss:.6g}"
    if page is not None:
        at = row.seen_at or page.at
        heard = f"last heard {ago(at, seen.at)} ago"
        if seen.verdict == "HUNG" and page.active_at is not None:
            heard = f"no progress for {show_duration(round(max(0.0, seen.at.timestamp() - page.active_at)))}; {heard}"
        yield f"  progress  {reached}, {count(page.ranks, 'rank')}{loss}, {heard}"
        if page.slowest and page.ranks > 1 and page.step is not None and page.ahead is not None:
            # the page of replica groups has the step of the first one
            steps = f" ({count(page.ahead - page.step, 'step')})" if page.ahead > page.step else ""
            yield f"  progress  {page.slowest} is the furthest behind{steps}"
    elif seen.beats:
        newest = max(beat.at for beat in seen.beats)
        oldest = min(seen.beats, key=lambda beat: beat.at)
        yield f"  progress  {reached}, {count(len(seen.beats), 'rank')}{loss}, last heard {ago(newest, seen.at)} ago"
        behind = (newest - oldest.at).total_seconds()
        if behind > 60:
            yield f"  progress  rank {oldest.rank} is {show_duration(behind)} behind the others (step {oldest.step})"
    if row.loss_trouble:
        yield f"  loss      {click.style(printable(row.loss_trouble), fg='red')}"
    if row.rate is not None:
        usual = f", usually {show_rate(row.usual, row.rate)}" if row.usual is not None else ""
        done = ""
        if row.done_at is not None:
            left = show_duration(round((row.done_at - seen.at).total_seconds()))
            done = f"; step {row.last_step} in {left}, {row.done_at:%Y-%m-%d %H:%M} UTC"
        yield f"  rate      {show_rate(row.rate)}{usual}{done}"
        yield from _too_few_jobs(found)
    elif row.percent is not None and row.done_at is not None:
        left = show_duration(round((row.done_at - seen.at).total_seconds()))
        yield f"  rate      100 % in {left}, {row.done_at:%Y-%m-%d %H:%M} UTC, if it goes on like this"


def _too_few_jobs(found: RunDetail) -> Iterator[str]:
    """Say how far the jobs that are left come where the last step lies beyond them, and what to type for more."""
    row, now = found.row, found.status.at
    left = jobs_left(found.status.jobs or ()) if found.groups is None else None
    pace = pace_of(row.rate, row.usual)
    if left is None or row.done_at is None or row.step is None or not pace:
        return
    seconds = left.seconds(now)
    if (row.done_at - now).total_seconds() <= seconds:
        return
    them = (
        f"this job and {count(left.waiting, 'job')} behind it run" if left.waiting else "this is the last one: it runs"
    )
    reach = f"{show_duration(round(seconds))} more, to about step {row.step + round(pace * seconds)}"
    yield f"  jobs      {them} {reach}; for more: ftsupervise launch --after {left.last} {found.status.rundir.quoted()}"


def _unread(seen: Status) -> Iterator[str]:
    """Say that no step was found in what the newest attempt prints."""
    last = seen.attempts[-1] if seen.attempts else None
    if last is not None and last.unread and seen.step is None and last.percent is None:
        yield f"  step      {last.unread}"


def _groups(found: RunDetail) -> Iterator[str]:
    if found.groups is None:
        return

    yield from group_lines(found.groups, found.status.at)


def _memory(seen: Status) -> Iterator[str]:
    """Name the rank whose memory will be at its limit first, where that is within a day."""
    for fact, what in (("memory", "memory"), ("gpu_memory", "GPU memory")):
        known = ((beat.facts.get(f"{fact}_left", ""), beat) for beat in seen.beats)
        grows = [(int(left), beat) for left, beat in known if left.isascii() and left.isdigit() and len(left) < 10]
        left, beat = min(grows, key=lambda pair: pair[0], default=(_A_DAY, None))
        if beat is not None and left < _A_DAY:
            where = f"rank {beat.rank} on {printable(beat.host)}"
            yield f"  memory    {where}: {show_duration(left)} until its {what} is at the limit at which the guard leaves"


def _saved(found: RunDetail) -> Iterator[str]:
    row, now = found.row, found.status.at
    if row.saved is not None:
        when = f", {ago(row.saved_at, now)} ago" if row.saved_at is not None else ""
        behind = found.status.step - row.saved if found.status.step is not None else 0
        lost = (
            f"; {count(behind, 'step')} would be made again"
            if behind > 0 and found.status.verdict in ("HUNG", "STALLED", "SILENT")
            else ""
        )
        trouble = found.status.run.loss_trouble
        if trouble is not None and trouble.kind == NOT_A_NUMBER and trouble.since is not None:
            of_no_use = row.saved >= trouble.since - 1  # as ``go_back`` has it
            lost = "; of no use: the loss was no number by then" if of_no_use else lost
        yield f"  saved     step {row.saved}{when}{lost}"
    if found.aside:
        reasons = Counter(one.reason for one in found.aside)
        for reason, times in reasons.most_common(3):
            yield f"  aside     {count(times, 'checkpoint')} set aside: {printable(reason, 200)}"
    torn = [(one.number, each) for one in found.status.attempts[-_TORN:] for each in one.torn]
    aside = [pair for pair in torn if pair[1].aside]
    for number, one in (*aside[-1:], *(pair for pair in torn[-1:] if not pair[1].aside)):
        more = f"; {len(aside) - 1} more: ftsupervise checkpoints list" if one.aside and len(aside) > 1 else ""
        yield f"  torn      before attempt {number}: {printable(f'{one.words()}; {one.now()}', 900)}{more}"


def _resumes(seen: Status) -> Iterator[str]:
    """Say that a script without the guard has begun anew."""
    from ftsupervise.rundir.starting_over import not_resumed

    try:
        found, again = not_resumed(seen.attempts, seen.rundir)
    except OSError:
        return
    if again is not None and not seen.rundir.has_finished():
        yield f"  resume    {click.style(again.words(), fg='red')}"
    if found and not seen.rundir.has_finished():
        kept = next((one.written.kept for one in seen.attempts if one.written is not None and one.written.kept), "")
        yield f"  resume    {click.style(found[-1].words(), fg='red')}{f'; kept: {printable(kept)}' if kept else ''}"


def _alerts(found: RunDetail) -> Iterator[str]:
    row, now = found.row, found.status.at
    for one in row.alerts[:5]:
        since = f", since {_clock(one.since)} UTC, {ago(one.since, now)}" if one.since is not None else ""
        words = click.style(f"{one.severity} {one.watchdog}", fg="red")
        yield f"  alert     {words}: {printable(one.summary)}{since}"
    if row.firing > 5:
        yield f"  alert     {row.firing - 5} more: ftsupervise alerts {found.status.rundir.quoted()}"
    if row.disk:
        yield f"  disk      {printable(row.disk)}"
    if row.watched_at is not None:
        following = ""
        if row.watched_next is not None and row.watched_next > now:
            following = f", next in {show_duration(round((row.watched_next - now).total_seconds()))}"
        elif row.watched_next is not None:
            following = f", the next was due {ago(row.watched_next, now)} ago"
        late = ": " + click.style("LATE", fg="red") if row.watch_late else ""
        if found.status.run.watch.unwritten:
            late = "; its pages cannot be written to a full disk: whether it looks is not known"
        yield f"  watch     last tick {ago(row.watched_at, now)} ago{following}{late}"
    elif row.full:
        yield "  watch     not known: its pages cannot be written to a full disk"
    elif found.status.verdict not in ("FINISHED", "NEW", "STOPPED") or row.braked:
        yield f"  watch     nobody watches this run: ftsupervise watch --every 60s {found.status.rundir.quoted()}"


def _nodes(found: RunDetail) -> Iterator[str]:
    if found.avoided is None:
        yield "  nodes     unknown which are avoided: their incidents cannot be read"
    elif found.avoided:
        from ftsupervise.hostlist import compress_hostlist

        later = " from the next job on" if not _running_nodes(found.status).isdisjoint(found.avoided) else ""
        yield f"  nodes     avoided{later}: {compress_hostlist(found.avoided)}"


def _running_nodes(seen: Status) -> set[str]:
    return {node for job in seen.jobs or () if not job.state.waiting for node in job.nodes}


def _attempts(seen: Status) -> list[str]:
    from ftsupervise.report.detail import attempts_of

    alike = _alike(attempts_of(seen))[-5:]
    lines = []
    if earlier := seen.run.not_read + len(seen.attempts) - sum(map(len, alike)):
        unread = f", of which {seen.run.not_read} were not read" if seen.run.not_read else ""
        noun = "earlier one" if earlier == 1 else "earlier ones"
        lines.append(f"  attempt   ({earlier} {noun}{unread}: ls {seen.rundir.attempts})")
    return lines + [f"  attempt   {_attempt(same, seen)}" for same in alike]


def _alike(attempts: Sequence[Attempt]) -> list[list[Attempt]]:
    """Return them in groups of neighbours that ended in the same way: equal errors are shown once."""
    found: list[list[Attempt]] = []
    for one in attempts:
        if found and one.ended is not None and _how(one) == _how(found[-1][-1]):
            found[-1].append(one)
        else:
            found.append([one])
    return found


def _how(one: Attempt) -> tuple[object, ...]:
    return one.job_id, one.words, one.line, one.last_step, one.held, one.kept, _begins(one), one.ended is None


def _attempt(same: Sequence[Attempt], seen: Status) -> str:
    attempt = same[-1]
    end = attempt.ended or seen.at
    lasted = show_duration(max(0.0, (end - attempt.started).total_seconds()))
    steps = _begins(attempt)
    if attempt.held is not None:
        steps += f", every buddy holds step {attempt.held}"
    if attempt.kept is not None:
        steps += f", step {attempt.kept} kept on the disk"
    job, at = f"(job {attempt.job_id or '-'})", _clock(same[0].started)
    if attempt.ended is None and attempt.cause is None:
        return f"{attempt.number} {job} {at} running for {lasted}{steps}"
    cause = attempt.words or "ended"
    line = f": {attempt.line}" if attempt.line else ""  # last: it may be long
    if attempt.ended is None:
        return f"{attempt.number} {job} {at} {cause}{steps}{line}"
    if len(same) > 1:
        return f"{same[0].number}-{attempt.number} {job} {at}, {len(same)} times: {cause}{steps}{line}"
    return f"{attempt.number} {job} {at} {cause} after {lasted}{steps}{line}"


def _why(found: RunDetail) -> Iterator[str]:
    """Say what ``diagnose`` has said of the newest attempt, which failed."""
    of = found.diagnosis
    if of is not None and (said := of.told()):
        yield f"  why       {printable(f'attempt {of.attempt}: {said}', 300)}"


def _spoken(switch: str) -> str:
    """Return the name of a switch as people say it."""
    return switch.replace("-", " ")


def _clock(at: datetime) -> str:
    return f"{at.astimezone(timezone.utc):%m-%d %H:%M:%S}"


def _begins(attempt: Attempt) -> str:
    """Return what it went on from and how far it came, in words."""
    steps = "" if attempt.last_step is None else f", to step {attempt.last_step}"
    if attempt.percent is not None and attempt.last_step is None:
        steps = f", to {attempt.percent.words()} by its own words"
    elif attempt.unread and attempt.last_step is None:
        steps = f", {attempt.unread.partition(':')[0]}"
    if attempt.resumed is not None and attempt.begins is None:
        steps = f", {attempt.resumed.words()}{steps}"
    elif attempt.begins is not None:
        also = attempt.resumed is not None and attempt.begins.source == "start"
        more = f", {attempt.resumed.words()}" if also and attempt.resumed is not None else ""
        steps = f"{more}, {attempt.begins.words()}{steps}"
    return steps


def _time(found: RunDetail, width: int) -> Iterator[str]:
    """Draw the time since the launch as a line of characters, with its legend, and the ratios with their definitions."""
    from ftsupervise.alerts.last_day import WORDS

    of = found.account
    if of.total < _FEWEST_SECONDS:
        return
    yield f"  time      {timeline(found.drawn.stretches, of.since.timestamp(), of.until.timestamp(), width - 14)}"
    shares = {kind.value: share for kind, share in of.shares().items()}
    legend = [
        f"{KINDS[kind][0]} {WORDS.get(kind, kind)} {show_percent(shares[kind])}" for kind in KINDS if shares[kind] > 0
    ]
    line = f"{show_duration(of.total)}:"
    for one in legend:
        if len(line) + 2 + len(one) > width - 14:
            yield f"            {line}"
            line = "  "
        line += f"  {one}"
    yield f"            {line}"
    meta, byterobust, hour = of.ettr_meta(), of.ettr_byterobust(), of.ettr_last()
    if meta is not None and byterobust is not None:
        last = f", of the last hour {ratio(hour)}" if hour is not None and of.total > 7200 else ""
        yield f"  ETTR      {ratio(meta)} as Meta counts, {ratio(byterobust)} as ByteRobust counts{last}"
    if of.blind:
        yield f"            {count(len(of.blind), 'attempt')} reported nothing (no guard, or not yet): that time is unknown"


def timeline(stretches: Sequence[Stretch], since: float, until: float, width: int) -> str:
    """Return ``width`` characters, each of the kind that matters most in its time."""
    out = ""
    for kind in kinds_over(stretches, since, until, width):
        sign, colour = KINDS[kind.value] if kind is not None else (" ", "")
        out += click.style(sign, fg=colour) if colour else sign
    return out


# ------------------------------------------------------------------------------------------
# The replica groups of a run in lines: how many run, a row for each, the lighthouse, and the last faults.

_COLOURS = {"running": "green", "stopped": "red", "waiting": "yellow", "unknown": "yellow"}
_FAULTS = 5  # that are shown
_ALL_ROWS = 16  # of more groups those that run well are left out


def group_lines(seen: GroupsSeen, now: datetime) -> Iterator[str]:
    from ftsupervise.hostlist import compress_hostlist

    old = "" if seen.fresh else f", as of {ago(seen.at, now)} ago"
    waits = ""
    if seen.waits and seen.below is not None:
        waits = ": " + click.style(f"the run waits since {ago(seen.below, now)}, and goes on by itself", fg="red")
    yield f"  groups    {seen.running} of {seen.wanted} run, at least {seen.least} have to{old}{waits}"
    if seen.slow:
        yield f"  groups    {printable(seen.slow)}"
    for row in seen.rows:
        if len(seen.rows) <= _ALL_ROWS or row.state.value != "running":
            yield f"  group     {_row(row, now)}"
    if seen.spares:
        yield f"  groups    spare: {compress_hostlist(seen.spares)}"
    if (light := seen.lighthouse) is not None:
        words = f"for {ago(light.since, now)}, {count(light.restarts, 'restart')}"
        if light.down_since is not None:
            words = f"down for {ago(light.down_since, now)}: {printable(light.trouble)}"
            words = click.style(words, fg="red") if seen.fresh else words
        yield f"  quorum    lighthouse {printable(light.address)}, {words}"
        if light.away:
            wait = "without it no group makes a step, and they go on by themselves when it is back"
            yield f"  quorum    {click.style('lighthouse away', fg='red')}: {printable(light.away)}; {wait}"
    yield from _stalls(seen, now)
    for fault in seen.faults[-_FAULTS:]:
        yield f"  fault     {_fault(fault, now)}"
    if len(seen.faults) > _FAULTS:
        yield f"  fault     {len(seen.faults) - _FAULTS} earlier ones: ftsupervise status --json"


def _stalls(seen: GroupsSeen, now: datetime) -> Iterator[str]:
    """Show the newest stalls of the groups that were left, oldest first."""
    from ftsupervise.report.groups import stall_rows

    rows = stall_rows(seen)
    for row in reversed(rows[:_FAULTS]):
        more = "; ".join(filter(None, (row.lost, row.steps, row.back)))
        yield f"  stall     {ago(row.at, now)} ago for {row.stall}: {printable(more)}"
    if seen.stalls is not None and seen.stalls.times > _FAULTS:
        page = seen.stalls
        yield f"  stall     {page.times} in all, for {show_duration(page.seconds)}, {count(page.lost, 'step')} lost"


def _row(row: ReplicaGroup, now: datetime) -> str:
    from ftsupervise.hostlist import compress_hostlist

    state = click.style(row.state.value, fg=_COLOURS.get(row.state.value, "cyan"))
    where = f" on {compress_hostlist(row.nodes)}" if row.nodes else ""
    job = f" (job {row.job})" if row.job else ""
    step = f", step {row.step}" if row.step is not None else ""
    attempt = f", attempt {row.attempt}" if row.attempt else ""
    stalled = f", no step for {show_duration(row.stalled)}" if row.stalled is not None and row.stalled > 10 else ""
    back = ""
    if row.back is not None:
        missed = f", {count(row.missed, 'step')} missed" if row.missed else ""
        redone = f", {count(row.redone, 'step')} made again" if row.redone else ""
        back = f"; was away for {show_duration(row.back)}{missed}{redone}"
    why = f": {printable(row.why)}" if row.why else ""
    return f"{row.name} {state} for {ago(row.since, now)}{where}{job}{step}{attempt}{stalled}{back}{why}"


def _fault(fault: GroupFault, now: datetime) -> str:
    step = f" at step {fault.step}" if fault.step is not None else ""
    return f"{ago(fault.at, now)} ago {fault.group}{step}: {printable(fault.cause)}; {printable(fault.then)}"
