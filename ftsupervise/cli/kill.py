"""``ftsupervise kill``: raise the kill switch, once a person has said which run."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import JSON, answer, for_a_program, for_programs, say
from ftsupervise.cli.switches import DELAY, RUNS, WHY, Raised, is_up, not_seen
from ftsupervise.launch.switching import put_up, require_names, runs_to_switch, who_hears

if TYPE_CHECKING:
    from ftsupervise.launch.switching import Hearing
    from ftsupervise.rundir.paths import RunDir


@click.command()
@RUNS
@WHY
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--confirm", metavar="NAME", help="Do not ask, but check that this is the run's name.")
@click.option("--now", is_flag=True, help="End its jobs at once, too: what is not saved within seconds is lost.")
@JSON
def kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None, now: bool, as_json: bool) -> None:
    """Raise the kill switch: the run saves and stops at its next step, and no further member trains. Members that the
    brake holds are ended; with --now all its jobs, as the scheduler does it (SIGTERM, and SIGKILL some 30 s later).

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    with for_programs(as_json):
        done = _kill(runs, why, yes, confirm, now)
    if as_json:
        answer(switch="kill", runs=done)


def _kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None, now: bool) -> list[Raised]:
    from ftsupervise.rundir.switches import KILL

    named = runs_to_switch(runs)
    up = [one for one in named if is_up(one[0], KILL, one[1])]
    found = [one for one in named if one not in up]
    if asked := named if now else found:
        _make_sure([name for _, name in asked], yes, confirm, now)
    done = [Raised(name, rundir.root, False, who_hears(rundir), _end_jobs(rundir, name, now)) for rundir, name in up]
    for rundir, name in found:
        heard = who_hears(rundir)
        put_up(rundir, KILL, why)
        for line in ("The kill switch of {} is up.",) if now else _what_follows(heard):
            say(line.format(name))
        say("Members of its chain that start later leave within seconds.")
        if not now and heard.attempt is not None and not heard.guard:
            say(f"To end it at once:  ftsupervise kill --now {rundir.quoted()}")
        say(f"Undo:  ftsupervise clear {rundir.quoted()}")
        done.append(Raised(name, rundir.root, True, heard, _end_jobs(rundir, name, now)))
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


def _end_jobs(rundir: RunDir, name: str, now: bool) -> tuple[str, ...]:
    """End the members that the brake holds, ``now`` all jobs of the run; say so, and return them."""
    from ftsupervise.launch.switching import end_held, end_now

    ended, which = (end_now(rundir), "") if now else (end_held(rundir), " that the brake held")
    again = f"ftsupervise kill {'--now ' if now else ''}{rundir.quoted()}"
    if ended.problem:
        still = "Its jobs may still be there" if now else "Members that the brake holds may still wait"
        say(f"{still}: {ended.problem}", err=True)
        say(f"To end them, type it again:  {again}", err=True)
    if ended.jobs:
        say(f"Members of {name}{which} were ended: {', '.join(ended.jobs)}")
    elif now and not ended.problem:
        say(f"{name} has no job in the queue.")
    return ended.jobs


def _make_sure(names: list[str], yes: bool, confirm: str | None, now: bool) -> None:
    from ftsupervise.errors import Cancelled, UsageError

    name = " and ".join(names)
    require_names(names, confirm)
    if yes or confirm is not None:
        return
    if not sys.stdin.isatty():
        raise UsageError(
            f"no terminal to ask whether to stop {name}",
            hint=f"say --yes, or --confirm {name}" if len(names) == 1 else "say --yes",
        )
    one = len(names) == 1
    if now:
        it = f"{'Its' if one else 'Their'} jobs are ended at once: what is not saved within seconds is lost"
    else:
        it = "It is asked to save, and its whole chain leaves"
        it = it if one else "They are asked to save, and their whole chains leave"
    time_limit.person_is_asked()
    sure = click.confirm(f"Stop {name}? {it}", default=False, err=for_a_program())
    time_limit.person_has_answered()
    if not sure:
        raise Cancelled("cancelled, nothing was changed")
