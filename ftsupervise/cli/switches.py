"""``ftsupervise kill``, ``save`` and ``clear``: as ``touch`` and ``rm`` in RUN/switches, with a name and a reason.

These are typed in a hurry on a loaded login node: nothing is imported that they do not need.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.output import say
from ftsupervise.host.ownership import shown_user

if TYPE_CHECKING:
    from ftsupervise.rundir.paths import RunDir

Found = tuple["RunDir", str]  # and the name of the run

_RUNS = click.argument("runs", nargs=-1, metavar="[RUN]...")
_WHY = click.option("--why", default="", metavar="TEXT", help="The reason, shown to everybody who sees the switch.")
_DELAY = "at the next step after its guard looks: within a second or so, 60 s at worst on a shared file system"


@click.command()
@_RUNS
@_WHY
@click.option("--yes", is_flag=True, help="Do not ask.")
@click.option("--confirm", metavar="NAME", help="Do not ask, but check that this is the run's name.")
def kill(runs: tuple[str, ...], why: str, yes: bool, confirm: str | None) -> None:
    """Raise the kill switch: the run saves and stops at its next step, and no further member trains.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    from ftsupervise.rundir.switches import KILL

    found = [one for one in _find(runs) if not _is_up(one[0], KILL, one[1])]
    if not found:
        return
    _make_sure([name for _, name in found], yes, confirm)
    for rundir, name in found:
        _raise(rundir, KILL, why)
        say(f"The kill switch of {name} is up. It saves and stops {_DELAY}.")
        say("Members of its chain that start later leave within seconds.")
        say(f"Undo:  ftsupervise clear {rundir.quoted()}")


@click.command()
@_RUNS
@_WHY
def save(runs: tuple[str, ...], why: str) -> None:
    """Raise the save switch: the run saves a checkpoint and goes on.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.
    """
    from ftsupervise.rundir.switches import SAVE

    for rundir, name in _find(runs):
        if _is_up(rundir, SAVE, name):
            continue
        _raise(rundir, SAVE, why)
        say(f"The save switch of {name} is up. It saves {_DELAY}, and takes the switch down.")
        say(f"Undo:  ftsupervise clear {rundir.quoted()} --switch save")


@click.command()
@_RUNS
@click.option("--switch", type=click.Choice(["kill", "save", "both"]), default="both", show_default=True)
@click.option("--brake", is_flag=True, help="Release the brake, and let the members that were held start.")
def clear(runs: tuple[str, ...], switch: str, brake: bool) -> None:
    """Lower the switches again. A stopped run stays stopped: ftsupervise launch continues it.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    With --brake: release the brake, which repeated failures without progress put on. Earlier failures no longer
    count, and the held members of the chain go on.
    """
    for rundir, name in _find(runs, brake=brake):
        if brake:
            _release(rundir, name)
            _release_groups(rundir)
        else:
            _take_down(rundir, name, switch)


def _take_down(rundir: RunDir, name: str, switch: str) -> None:
    import shlex

    from ftsupervise.errors import CannotWrite, from_os_error
    from ftsupervise.rundir.switches import clear_switch

    for word in ("kill", "save") if switch == "both" else (switch,):
        path = rundir.switches / f"{word}-switch"
        try:
            removed = clear_switch(rundir, path.name)
        except IsADirectoryError:
            where = shlex.quote(str(path))
            raise CannotWrite(
                f"cannot remove {path}: it is a folder, which no run obeys as a switch",
                hint=f"look at it: ls -la {where}; then rmdir {where}, and type this again",
            ) from None
        except OSError as error:
            raise from_os_error(error, f"remove {path}") from None
        say(f"The {word} switch of {name} {'is down' if removed else 'was not up'}.")
    _tell_of_the_brake(rundir, name)


def _tell_of_the_brake(rundir: RunDir, name: str) -> None:
    from ftsupervise.rundir.switches import read_brake

    try:
        brake = read_brake(rundir)
    except OSError:
        return
    if brake is not None:
        say(f"The brake of {name} stays on: {brake.words()}")
        say(f"Release it:  ftsupervise clear --brake {rundir.quoted()}")


def _release_groups(rundir: RunDir) -> None:
    """Release the brakes of its replica groups, which start again by themselves."""
    from datetime import datetime, timezone

    from ftsupervise.errors import from_os_error
    from ftsupervise.replicas.groups import group_names
    from ftsupervise.rundir.switches import release_brake

    for group in map(rundir.group, group_names(rundir)):
        try:
            was = release_brake(group, who=shown_user(), now=datetime.now(timezone.utc))
        except OSError as error:
            raise from_os_error(error, f"release the brake of {group.root.name}") from None
        if was is not None:
            say(f"The brake of group {group.root.name} is off: {was.words()}")


def _refuse_a_group(rundir: RunDir) -> None:
    """Refuse a replica group: its switches are those of its run."""
    from ftsupervise.errors import UsageError

    if rundir.whole is not None:
        leave = f"ftsupervise groups leave {rundir.root.name} {rundir.whole}"
        raise UsageError(
            f"{rundir.root.name} is a replica group, and a switch is for its whole run: name {rundir.whole}",
            hint=f"to let only this group leave: {leave}",
        )


def _release(rundir: RunDir, name: str) -> None:
    from datetime import datetime, timezone

    from ftsupervise.errors import SchedulerUnavailable, from_os_error
    from ftsupervise.rundir.launches import may_change
    from ftsupervise.rundir.switches import let_go, release_brake, still_held
    from ftsupervise.scheduler import kind_of_job, open_scheduler

    try:
        was = release_brake(rundir, who=shown_user(), now=datetime.now(timezone.utc))
        held = [job for job in still_held(rundir) if may_change(rundir, job)]
        say(f"The brake of {name} {'was not on.' if was is None else f'is off: {was.words()}'}")
        for job in held:
            open_scheduler(kind_of_job(job)).release(job)
            let_go(rundir, job)
            say(f"Job {job} may start again.")
    except OSError as error:
        raise from_os_error(error, f"release the brake of {name}") from None
    except SchedulerUnavailable as error:
        again = f"to let them start, type it again:  ftsupervise clear --brake {rundir.quoted()}"
        raise SchedulerUnavailable(f"{error.message}; held jobs stay on hold", hint=again) from None
    if was is not None and not held:
        from ftsupervise.config.find_run import how_to_launch

        say(f"Nothing was held. Continue:  {how_to_launch(rundir)}")


def _find(runs: tuple[str, ...], *, brake: bool = False) -> list[Found]:
    """Find all of them before anything is done to one."""
    from ftsupervise.config.find_run import find_run

    found = {rundir.root: rundir for rundir in (find_run(run) for run in runs or (None,))}
    for rundir in found.values() if not brake else ():
        _refuse_a_group(rundir)
    return [(rundir, rundir.root.name) for rundir in found.values()]


def _is_up(rundir: RunDir, switch: str, name: str) -> bool:
    """Report that it is raised already: the first reason stays."""
    from ftsupervise.rundir.switches import read_switch

    state = read_switch(rundir, switch)
    if state.problem:
        say(f"ftsupervise: {state.problem}", err=True)
    if state.up:
        since = f" since {state.since:%Y-%m-%d %H:%M} UTC" if state.since else ""
        why = f": {state.why}" if state.why else ""
        say(f"The {switch.replace('-', ' ')} of {name} is up already{since}, raised by {state.who}{why}")
    return state.up


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
    it = "It saves, and its whole chain leaves" if len(names) == 1 else "They save, and their whole chains leave"
    time_limit.person_is_asked()
    sure = click.confirm(f"Stop {name}? {it}", default=False)
    time_limit.person_has_answered()
    if not sure:
        raise Cancelled("cancelled, nothing was changed")


def _raise(rundir: RunDir, switch: str, why: str) -> None:
    from datetime import datetime, timezone

    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir.switches import raise_switch

    try:
        raise_switch(
            rundir, switch, who=shown_user(), host=os.uname().nodename, why=why, now=datetime.now(timezone.utc)
        )
    except OSError as error:
        raise from_os_error(error, f"write {rundir.switches / switch}") from None
