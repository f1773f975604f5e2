"""``ftsupervise doctor``: what a night depends on, on one screen, each line that is not well with what to type."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.printable import printable
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.doctor.seen import Examined, Sights
    from ftsupervise.doctor.sights import ToExamine
    from ftsupervise.probe import Probe

SCHEMA_VERSION = 1
_WORDS = {Health.OK: "ok", Health.BAD: "wrong", Health.UNKNOWN: "unseen"}
_COLOURS = {Health.OK: "green", Health.BAD: "red", Health.UNKNOWN: "cyan"}
_WRONG, _UNSEEN = 1, 3  # exit codes
_BOUND, _SLACK = 4.0, 3.0  # seconds for a question to a file system, and beside the bound of each look


@click.command()
@click.argument("run", required=False)
@click.option(
    "--probe", is_flag=True, help="Look from inside a job too: submit one of a minute, and take it away again."
)
@click.option(
    "--wait", default="5m", show_default=True, metavar="TIME", help="How long the job of --probe may wait in the queue."
)
@click.option("--trust", is_flag=True, help="Use settings of another account too, commands included.")
@click.option("--json", "as_json", is_flag=True, help="As a JSON object.")
def doctor(run: str | None, probe: bool, wait: str, trust: bool, as_json: bool) -> None:
    """Look at all that a night depends on, before it: Slurm, the directories, who is told, cron, the script and its Python.

    A line each: ok; wrong, with what to type; or unseen, where it could not be looked at. Nothing is changed, submitted or
    sent. --probe also submits a job of one minute, which looks from inside: whether the warning signal comes and how long
    before the limit, the job's Python, the run directory from a node, its clock, how soon a touched switch is seen, ports
    between nodes, /dev/shm and memory.

    Ends with 0 where nothing is wrong, 1 where something is, 3 where nothing is and something could not be seen.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml, and without one only what needs no
    settings is looked at.

    \b
    ftsupervise doctor
    ftsupervise doctor --probe runs/my-training
    ftsupervise doctor --json
    """
    from ftsupervise.cli.time_limit import extend
    from ftsupervise.doctor.examinations import examine
    from ftsupervise.doctor.sights import look
    from ftsupervise.probe import Probe

    queued = _duration(wait)
    asked, lines = _asked(run, trust=trust, probe=probe)
    with Probe(bound=_BOUND, waits=extend) as bounded:
        seen = look(asked, datetime.now(timezone.utc), bounded, lambda seconds: extend(seconds + _SLACK))
        if probe:
            seen = _with_trial(seen, asked, bounded, queued)
    lines = [*lines, *examine(seen, asked.run)]
    code = code_of(lines)
    if as_json:
        name = None if asked.run is None else asked.run.name
        rows = [{"about": one.about, "word": _WORDS[one.health], "what": one.what, "do": one.do} for one in lines]
        say_json({"schema_version": SCHEMA_VERSION, "run": name, "code": code, "lines": plain(rows)})
    else:
        _table(lines)
    raise SystemExit(code)


def code_of(lines: Sequence[Examined]) -> int:
    """Return the exit code: what is wrong counts before what could not be seen."""
    found = {one.health for one in lines}
    return _WRONG if Health.BAD in found else _UNSEEN if Health.UNKNOWN in found else 0


def _duration(text: str) -> timedelta:
    from ftsupervise.errors import UsageError
    from ftsupervise.units import parse_duration

    try:
        return parse_duration(text)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--wait: {error}") from None


def _with_trial(seen: Sights, asked: ToExamine, bounded: Probe, queued: timedelta) -> Sights:
    """Return ``seen`` with what a job has seen, where one can be submitted at all."""
    from ftsupervise import host
    from ftsupervise.cli.time_limit import extend
    from ftsupervise.doctor.examinations import RUN_DIRECTORY
    from ftsupervise.doctor.seen import ClusterSeen, PlaceSeen
    from ftsupervise.doctor.trial import TrialWait, try_in_a_job
    from ftsupervise.errors import Error
    from ftsupervise.host.ownership import NotTrusted
    from ftsupervise.probe import NotSeen
    from ftsupervise.scheduler.slurm import Slurm

    place = (seen.places or {}).get(RUN_DIRECTORY)
    if (
        asked.run is None
        or not isinstance(seen.cluster, ClusterSeen)
        or not isinstance(place, PlaceSeen)
        or place.trouble
    ):
        why = "no job was submitted: that needs settings, a Slurm that answers, and a run directory that takes files"
        return replace(seen, trial=NotSeen("trial job", why))
    host.answer_by = None  # no bound for all of Slurm's commands together: each has its own, and the wait is extended
    signal.signal(signal.SIGTERM, _leave)  # the job is taken away then too
    say(
        f"a job of one minute is submitted, and waited for: {queued.total_seconds():.0f} s at most in the queue",
        err=True,
    )
    try:
        found = try_in_a_job(asked.run, asked.workdir, Path(place.at), Slurm(), bounded, TrialWait(queued, extend))
    except NotTrusted as error:
        return replace(seen, trial_refused=(error.message, error.hint))
    except (Error, OSError) as error:
        found = NotSeen("trial job", str(error))
    return replace(seen, trial_failed=found) if isinstance(found, str) else replace(seen, trial=found)


def _leave(_number: int, _frame: object) -> None:
    raise SystemExit(143)


def _asked(name: str | None, *, trust: bool, probe: bool) -> tuple[ToExamine, list[Examined]]:
    """Return what is to be looked at, and the line about the settings."""
    from ftsupervise.config.believed import load_believed, load_to_act
    from ftsupervise.config.find_run import launch_file, settings_of
    from ftsupervise.doctor.seen import Examined
    from ftsupervise.doctor.sights import ToExamine
    from ftsupervise.errors import ConfigError, Error, NotFound
    from ftsupervise.scheduler import kind_of

    try:
        path = settings_of(name)
    except NotFound:
        if name is not None:
            raise
        line = Examined(Health.OK, "settings", "no ftsupervise.yaml here: only what needs none is looked at")
        return ToExamine(None, Path.cwd(), kind_of("auto"), True, os.environ), [line]
    try:
        path = launch_file(name)  # of a run that was launched from elsewhere
    except Error:
        pass
    workdir = path.absolute().parent
    try:
        found = load_believed(path, trust=trust)
        if probe:
            load_to_act(path, "the job of --probe would run the commands in it as you", trust=trust)
    except ConfigError as error:
        wrong = [one for one in str(error).splitlines() if one.strip()]
        do = f"ftsupervise config check {printable(str(path))}"
        lines = [Examined(Health.BAD, "settings", printable(one.strip(), 300), do) for one in wrong[:3]]
        return ToExamine(None, workdir, kind_of("auto"), True, os.environ, unread=True), lines
    for sentence in found.sentences(path):
        say(sentence, err=True)
    kind = kind_of(found.run.scheduler)
    line = Examined(Health.OK, "settings", f"{printable(str(path))}, run {found.run.name}, on {kind}")
    return ToExamine(found.run, workdir, kind, not found.why, os.environ), [line]


def _table(lines: Sequence[Examined]) -> None:
    width = max(len(one.about) for one in lines)
    for one in lines:
        word = click.style(f"{_WORDS[one.health]:6}", fg=_COLOURS[one.health], bold=one.health is not Health.OK)
        say(f"{word}  {one.about:{width}}  {one.what}")
        if one.do:
            say(f"{'':6}  {'':{width}}    do: {one.do}")
    counts = {word: sum(one.health is health for one in lines) for health, word in _WORDS.items()}
    told = ", ".join(f"{number} {word}" for word, number in counts.items() if number)
    say(told if code_of(lines) else f"{told}: nothing stands in the way of a night")
