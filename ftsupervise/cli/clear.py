"""``ftsupervise clear``: lower the switches, or release the brake."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.output import JSON, answer, for_programs, say
from ftsupervise.cli.switches import RUNS
from ftsupervise.host.ownership import shown_user
from ftsupervise.launch.switching import runs_to_switch
from ftsupervise.printable import printable

if TYPE_CHECKING:
    from ftsupervise.rundir.paths import RunDir

_LOOK = 2.0  # seconds for a file that may hang


@click.command()
@RUNS
@click.option("--switch", type=click.Choice(["kill", "save", "both"]), default="both", show_default=True)
@click.option("--brake", is_flag=True, help="Release the brake, and let the members that were held start.")
@click.option("--finished", is_flag=True, help="The training is complete: the members that were held leave at once.")
@JSON
def clear(runs: tuple[str, ...], switch: str, brake: bool, finished: bool, as_json: bool) -> None:
    """Lower the switches again. This starts nothing: a run that has stopped goes on with ftsupervise launch.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    With --brake: release the brake, which repeated failures without progress put on. Earlier failures no longer
    count. If jobs of the chain are held, they start again; if none is left, launch again (ftsupervise launch).

    With --finished: the answer to "is it finished?" for a command without the guard that has left with 0.
    """
    done = []
    with for_programs(as_json):
        for rundir, name in runs_to_switch(runs, brake=brake or finished):
            lowered, released, started = list[str](), False, list[str]()
            if finished:
                _finish(rundir, name)
            if brake or finished:
                released, started = _release(rundir, name)
                _release_groups(rundir)
            else:
                lowered = _take_down(rundir, name, switch)
            record = {"run": name, "directory": rundir.root, "lowered": lowered, "brake_released": released}
            done.append({**record, "started": started, "finished": finished})
    if as_json:
        answer(runs=done)


def _finish(rundir: RunDir, name: str) -> None:
    """Write the finished mark, as a loop with a guard does. It comes first: a member that is let go must find it."""
    from datetime import datetime, timezone

    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir.ledger import newest
    from ftsupervise.rundir.switches import Finished, write_finished

    try:
        last = newest(rundir)
        step, number = (None, None) if last is None else (last.last_step, last.number)
        if not rundir.has_finished():
            write_finished(rundir, Finished(step, number, os.uname().nodename, datetime.now(timezone.utc)))
    except OSError as error:
        raise from_os_error(error, f"write {rundir.finished}") from None
    say(f"{name} is finished.")


def _take_down(rundir: RunDir, name: str, switch: str) -> list[str]:
    """Return the switches that were up."""
    import shlex

    from ftsupervise.errors import CannotWrite, from_os_error
    from ftsupervise.rundir.switches import clear_switch

    were_up = []
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
        were_up += [word] if removed else []
    _tell_of_the_brake(rundir, name)
    return were_up


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
    from ftsupervise.rundir.switches import release_brake

    for group in map(rundir.group, rundir.group_names()):
        try:
            was = release_brake(group, who=shown_user(), now=datetime.now(timezone.utc))
        except OSError as error:
            raise from_os_error(error, f"release the brake of {group.root.name}") from None
        if was is not None:
            say(f"The brake of group {group.root.name} is off: {was.words()}")


def _release_unseen(rundir: RunDir, done: list[str]) -> list[str]:
    """Release the jobs that a member has held without a page, as their comments say; return them. Raises OSError,
    SchedulerUnavailable."""
    from ftsupervise.rundir.launches import launches, of_this_account
    from ftsupervise.scheduler import open_scheduler
    from ftsupervise.scheduler.ownership import comment_without_hold, token_of, why_held

    records = of_this_account(rundir, launches(rundir))
    tokens, found = {one.token for one in records} - {""}, list[str]()
    if not tokens:
        return found
    scheduler = open_scheduler(records[-1].scheduler or "auto")
    for job in scheduler.queue():
        if why_held(job) and token_of(job) in tokens:
            scheduler.remark(job.id, comment_without_hold(job))
            if job.base_id not in (*done, *found):
                scheduler.release(job.base_id)
                found.append(job.base_id)
                say(f"Job {job.base_id} may start again.")
    return found


def _release(rundir: RunDir, name: str) -> tuple[bool, list[str]]:
    """Return whether the brake was on, and the jobs that may start again."""
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
        try:
            held += _release_unseen(rundir, held)
        except SchedulerUnavailable:
            if was is None:  # otherwise the page names all that is held
                raise
    except OSError as error:
        raise from_os_error(error, f"release the brake of {name}") from None
    except SchedulerUnavailable as error:
        again = f"to let them start, type it again:  ftsupervise clear --brake {rundir.quoted()}"
        raise SchedulerUnavailable(f"{error.message}; held jobs stay on hold", hint=again) from None
    from ftsupervise.config.find_run import how_to_launch

    if held and not rundir.has_finished() and (changed := _changed_since_the_launch(rundir)):
        say(
            f"They go on with the settings of their launch; {changed} was changed since. To use it, end them and launch again:"
        )
        say(f"  ftsupervise kill --now {rundir.quoted()}; ftsupervise clear {rundir.quoted()}; {how_to_launch(rundir)}")
    if was is not None and not held:
        say(f"Nothing was held. Continue:  {how_to_launch(rundir)}")
    return was is not None, held


def _changed_since_the_launch(rundir: RunDir) -> str:
    """Return the settings file of the last launch, where it was written after that; "" where it was not, or cannot be seen."""
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.launches import launches

    def look() -> str:
        last = next((one for one in reversed(launches(rundir)) if one.config and one.written), None)
        is_newer = last is not None and Path(last.config).stat().st_mtime > last.at.timestamp()
        return printable(last.config) if last is not None and is_newer else ""

    try:
        found: str = within(_LOOK, look, key="settings of the launch")
    except (OSError, TimeoutError):
        return ""
    return found
