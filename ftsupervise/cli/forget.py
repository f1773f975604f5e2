"""``ftsupervise forget``: drop a run from what this account lists and watches."""

from __future__ import annotations

import os
import shutil
from datetime import datetime, timezone
from pathlib import Path

import click

from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, answer, for_programs, say


@click.command()
@click.argument("runs", nargs=-1, required=True, metavar="RUN...", type=RUN)
@JSON
def forget(runs: tuple[str, ...], as_json: bool) -> None:
    """Drop each RUN from list, status and the watch of all runs, also one whose directory is gone. RUN is a directory, an
    ftsupervise.yaml, or a name.

    Nothing of the run itself is deleted: its directory, where it is still there, can be named, and launched again. A run
    that has a job is not forgotten; kill it first. Of a run that had finished and was deleted, nothing need be said.
    """
    done = []
    with for_programs(as_json):
        for run, found in [(run, _links(run)) for run in runs]:
            for name, root in found.items():
                _refuse_with_jobs(name, root)
            for name, root in found.items():
                _forget(name, root)
                stays = os.path.lexists(root)
                say(f"{name} is forgotten{f'; its directory stays: {root}' if stays else ''}")
                done.append({"run": name, "directory": root, "stays": stays})
            if not found:
                say(f"{run} is known no more")
    if as_json:
        answer(forgotten=done)


def _links(run: str) -> dict[str, Path]:
    """Return the names that this account has for the run, with its directory. Raises NotFound."""
    from ftsupervise.config.find_run import run_dir_of_config
    from ftsupervise.errors import NotFound, did_you_mean
    from ftsupervise.report.rows import all_runs
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    known = all_runs()
    root = Path(os.path.abspath(run))  # noqa: PTH100 - a link stays one
    if root.is_file():
        root = run_dir_of_config(root).root
    found = {name: at for name, at in known.items() if run == name or root == at}
    if found:
        return found
    if pinned.noted(state_dir(), root) is not None:  # it was never launched here, only watched
        return {str(root): root}
    raise NotFound(
        f"no run called {run!r} is known to this account{did_you_mean(run, known)}",
        hint="ftsupervise list   shows their names and directories",
    )


def _refuse_with_jobs(name: str, root: Path) -> None:
    """Raise Refused where a job of the run is in the queue. A queue that does not answer keeps nobody from forgetting."""
    from ftsupervise.errors import Refused
    from ftsupervise.report.rows import overview

    if not os.path.lexists(root):
        return
    rows = overview({name: root}, datetime.now(timezone.utc), os.environ).rows
    mine = next((row for row in rows if row.name == name and not row.elsewhere), None)
    over = ("FINISHED", "STOPPED", "GONE", "NEW", "UNKNOWN")
    if mine is not None and (mine.verdict not in over or mine.members_left):
        raise Refused(
            f"{name} has jobs ({mine.verdict}): a run that is forgotten is not watched",
            hint=f"ftsupervise kill {name}   stops it; then type this again",
        )


def _forget(name: str, root: Path) -> None:
    from ftsupervise.errors import from_os_error
    from ftsupervise.host.ownership import remove_entry
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.watch.checks import journals_of

    state = state_dir()
    try:
        if "/" not in name and (state / "runs" / name).is_symlink():
            remove_entry(state / "runs" / name)
        pinned.forget(state, root)
        for journal in journals_of(root, state):
            shutil.rmtree(journal, ignore_errors=True)
    except OSError as error:
        raise from_os_error(error, f"forget {name}") from None
