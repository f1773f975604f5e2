"""``ftsupervise kill``: raise the kill switch, once a person has said which run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import JSON, answer, for_a_program, for_programs, say
from ftsupervise.cli.switches import DELAY, RUNS, WHY, Hearing, Raised, find, is_up, not_seen, put_up, who_hears

if TYPE_CHECKING:
    from collections.abc import Collection

    from ftsupervise.rundir.paths import RunDir

_ASKING = 10.0  # seconds for all that the scheduler is asked once the switch is up


@click.command()
@RUNS
@WHY
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--confirm", metavar="NAME", help="Do not ask, but check that this is the run's name.")
@JSON
def kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None, as_json: bool) -> None:
    """Raise the kill switch: the run saves and stops at its next step, and no further member trains. Members that the
    brake holds are ended.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    with for_programs(as_json):
        done = _kill(runs, why, yes, confirm)
    if as_json:
        answer(switch="kill", runs=done)


def _kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None) -> list[Raised]:
    from ftsupervise.rundir.switches import KILL

    named = find(runs)
    up = [one for one in named if is_up(one[0], KILL, one[1])]
    found = [one for one in named if one not in up]
    done = [Raised(name, rundir.root, False, who_hears(rundir), _end_held(rundir, name)) for rundir, name in up]
    if not found:
        return done
    _make_sure([name for _, name in found], yes, confirm)
    for rundir, name in found:
        heard = who_hears(rundir)
        put_up(rundir, KILL, why)
        for line in _what_follows(heard):
            say(line.format(name))
        say("Members of its chain that start later leave within seconds.")
        say(f"Undo:  ftsupervise clear {rundir.quoted()}")
        done.append(Raised(name, rundir.root, True, heard, _end_held(rundir, name)))
    return done


def _what_follows(heard: Hearing) -> tuple[str, ...]:
    """Return what the switch does to the attempt that runs, as lines. ``{}`` stands for the name of the run."""
    from ftsupervise.units import show_duration

    within = "after launch.restart.stop_within"
    within = f"in {show_duration(heard.stop_within)}" if heard.stop_within is not None else within
    ended = f"ended by SIGTERM {within}, with what it has saved by then (launch.restart.stop_within)."
    if unseen := not_seen(heard):
        return (
            f"The kill switch of {{}} is up; {unseen}.",
            f"With a guard it saves and stops {DELAY}.",
            f"Without one, unless its command looks at the switch, it is {ended}",
        )
    if heard.attempt is None:
        return ("The kill switch of {} is up. No attempt of it runs now.",)
    if heard.guard:
        return (f"The kill switch of {{}} is up. It saves and stops {DELAY}.",)
    return (
        "The kill switch of {} is up. No guard reports in it: unless its command looks at the switch, it is",
        ended,
    )


def _end_held(rundir: RunDir, name: str) -> tuple[str, ...]:
    """End the members that the brake holds, and return them: nobody will release them, and they stay in the queue for ever.

    Only jobs that are certainly this run's, that wait, and that are on hold. The switch is up whatever comes of it.
    """
    from ftsupervise.errors import Error
    from ftsupervise.replicas.table import group_names
    from ftsupervise.rundir.switches import nothing_held, read_brake, still_held

    try:
        braked = [
            one for one in (rundir, *map(rundir.group, group_names(rundir))) if read_brake(one) or still_held(one)
        ]
        held = {job for one in braked if (on := read_brake(one)) for job in on.held}
        ended = _cancel_held(rundir, held.union(*map(still_held, braked))) if braked else []
        for one in braked:
            nothing_held(one)
    except (Error, OSError) as error:
        said = str(error).partition("\n")[0]
        say(f"Members that the brake holds may still wait: {said}", err=True)
        say(f"To end them, type it again:  ftsupervise kill {rundir.quoted()}", err=True)
        return ()
    if ended:
        say(f"Members of {name} that the brake held were ended: {', '.join(ended)}")
    return tuple(ended)


def _cancel_held(rundir: RunDir, known: Collection[str]) -> list[str]:
    """Return the jobs that were cancelled. ``known``: those that the brake's page names, for Slurm's word comes seconds later.

    Raises Error, OSError.
    """
    import time

    from ftsupervise import host
    from ftsupervise.rundir.launches import launches, people
    from ftsupervise.scheduler import open_scheduler
    from ftsupervise.scheduler.ownership import identify_to_change, jobs_of_run
    from ftsupervise.scheduler.parse import is_held

    before = host.answer_by
    host.answer_by = before or time.monotonic() + _ASKING
    ended = []
    try:
        records = launches(rundir)
        run = identify_to_change(rundir, records, frozenset())
        for kind in dict.fromkeys(record.scheduler for record in records if record.scheduler):
            scheduler = open_scheduler(kind)
            for job in jobs_of_run(run, scheduler.queue(users=people(rundir, records)), certain=True):
                if job.state.waiting and (is_held(job.reason) or job.base_id in known):
                    scheduler.cancel(job.id, only_pending=True)
                    ended.append(job.id)
    finally:
        host.answer_by = before
    return ended


def _make_sure(names: list[str], yes: bool, confirm: str | None) -> None:
    from ftsupervise.errors import Cancelled, UsageError

    name = " and ".join(names)
    if confirm is not None and [confirm] != names:
        called = f"this run is called {name!r}" if len(names) == 1 else f"these runs are called {name}"
        raise UsageError(f"{called}, not {confirm!r}: nothing was done")
    if yes or confirm is not None:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"no terminal to ask whether to stop {name}",
            hint=f"say --yes, or --confirm {name}" if len(names) == 1 else "say --yes",
        )
    it = "It is asked to save, and its whole chain leaves"
    it = it if len(names) == 1 else "They are asked to save, and their whole chains leave"
    time_limit.person_is_asked()
    sure = click.confirm(f"Stop {name}? {it}", default=False, err=for_a_program())
    time_limit.person_has_answered()
    if not sure:
        raise Cancelled("cancelled, nothing was changed")
