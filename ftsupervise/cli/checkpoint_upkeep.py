"""``ftsupervise checkpoints prune|upkeep``: remove old checkpoints, and all that the settings of a run ask for."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.checkpoint_answers import Patient, folders_of, look, patience, patiently
from ftsupervise.cli.checkpoint_copies import committed, copied, copy_each, raise_failed, targets
from ftsupervise.cli.checkpoints import (
    CheckpointPlace,
    checkpoints,
    find,
    keep_if_written_over,
    print_json,
    refuse_held,
    run_to_note,
)
from ftsupervise.cli.output import plain, say
from ftsupervise.errors import Error, NoAnswer, UsageError

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found
    from ftsupervise.checkpoints.offload import OffloadReport
    from ftsupervise.probe import Probe
    from ftsupervise.probe.errand import WorkProgress

__all__ = ["checkpoints"]
_FIND = 8.0  # seconds to find a run and read its settings


# ----------------------------------------------------------------------------------------------------------------- prune


@checkpoints.command()
@click.argument("run", required=False)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would go and how much it frees; remove nothing.")
@click.option("--last", type=click.IntRange(min=2), help="Keep this many of the newest (checkpoints.retain.last).")
@click.option("--every", type=click.IntRange(min=1), metavar="STEPS", help="Keep the first of each stretch of STEPS.")
@click.option("--best", type=click.IntRange(min=0), metavar="K", help="Keep the best K by --metric.")
@click.option("--metric", metavar="NAME", help="A metric that the loop reported.")
@click.option("--better", type=click.Choice(["low", "high"]), help="Which end of the metric is the better one.")
@click.option("--copied/--not-copied", default=None, help="Remove only what has a copy elsewhere.")
@patience
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def prune(run: str | None, dry_run: bool, seconds: float, as_json: bool, **rules: Any) -> None:
    """Remove checkpoints of RUN that no rule keeps: the rules of checkpoints.retain, or those given here.

    The two newest verified ones (every byte is read), each one in use and each one that is not whole are always kept; with
    fewer than two verified ones nothing is removed. What goes is renamed first and deleted then, at 500 files a second. Without
    rules nothing goes.
    """
    from ftsupervise.cli.checkpoint_retention import policy_of, retention_of, show_plan

    place = find(run, acts=not dry_run)
    if place.one is not None:
        raise UsageError(
            f"{place.one} is one checkpoint", hint=f"name the folder: ftsupervise checkpoints prune {place.folder}"
        )
    policy = policy_of(place, rules)
    done = patiently(
        lambda progress: retention_of(
            place, policy, progress, dry_run=dry_run, tell=_quiet if as_json else progress.line
        ),
        Patient(seconds, as_json),
        doing="read" if dry_run else "read and removed",
        places=(place.folder,),
    )
    if as_json:
        keep = {name: list(reasons) for name, reasons in done.planned.keep.items()}
        removed = [plain(one) for one in done.planned.remove]
        shown = {
            "folder": str(place.folder),
            "dry_run": dry_run,
            "keep": keep,
            "remove": removed,
            "leftovers": done.leftovers,
        }
        counted = {"frees": done.planned.frees, "freed": done.freed, "refused": done.planned.refused or None}
        print_json({**shown, **counted})
        return
    show_plan(done.planned, done.leftovers, dry_run=dry_run, freed=done.freed)


def _quiet(text: str) -> None:
    """Print nothing: the output is for a program."""


# ---------------------------------------------------------------------------------------------------------------- upkeep


@checkpoints.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "everything", is_flag=True, help="Every run this account has launched.")
@patience
@click.option("--no-copies", is_flag=True, help="Leave checkpoints.offload to another call.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what was done.")
def upkeep(runs: tuple[str, ...], everything: bool, seconds: float, no_copies: bool, quiet: bool) -> None:
    """Do for each RUN what its settings ask for: adopt checkpoints that another program completed (checkpoints.adopt), copy
    (checkpoints.offload), remove (checkpoints.retain). Made for the crontab: ftsupervise cron add checkpoints.

    The newest checkpoint is copied; all of them where checkpoints.retain.copied lets none go without a copy. What fails for one
    run does not keep the others waiting, nor does a folder of it that does not answer; the exit code is 1 then.
    """
    if everything and runs:
        raise UsageError("--all and names of runs do not go together", hint="leave one of them out")
    from ftsupervise.probe import Probe

    failed = []
    with Probe() as probe:
        for run in _all_runs() if everything else runs or (None,):
            try:
                place = _find_in_time(run, probe)
                if no_copies and place.settings is not None:
                    place = place._replace(settings=place.settings.model_copy(update={"offload": None}))
                _keep_up(place, Patient(seconds, quiet=True), quiet=quiet)
            except (Error, OSError, ValueError) as error:
                failed.append(f"{run or 'this run'}: {error}")
    if failed:
        raise Error("\n".join(failed))


def _find_in_time(run: str | None, probe: Probe) -> CheckpointPlace:
    """Do the same as ``find``, for a command that goes through several runs.

    Raises NoAnswer where the run, its checkpoints or one of its places for copies does not answer. With one ``probe``
    for all of them a dead mount costs one bound, not one for each run.
    """
    import ftsupervise.config.believed  # noqa: F401 - here, because the child of ``within`` cannot hand it on
    from ftsupervise.checkpoints.stores import open_store
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir

    hint = "ls of it would hang too; its next upkeep goes on when it answers again"
    look(probe, Path(run or ".") if run is None or "/" in run else state_dir() / "runs" / run, hint)
    try:
        within(_FIND, lambda: _try_to_find(run), key=f"checkpoints upkeep {Path.cwd()} {run or ''}")
    except TimeoutError as error:
        raise NoAnswer(f"the run or its settings do not answer: {error}", hint=hint) from None
    place = find(run, acts=True)
    offload = place.settings.offload if place.settings is not None else None
    for folder in (place.folder, *folders_of(open_store(url) for url in (offload.to if offload is not None else ()))):
        look(probe, folder, hint)
    return place


def _try_to_find(run: str | None) -> None:
    with suppress(Error, OSError, ValueError):  # the command itself meets the same error, and reports it
        find(run, acts=True)


def _all_runs() -> tuple[str, ...]:
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.watch import roster

    try:
        names: tuple[str, ...] = within(8.0, roster.listed, key=roster.state_key(state_dir()))
        return names
    except TimeoutError as error:
        raise NoAnswer(f"{state_dir()} does not answer: {error}", hint="name the runs") from None


def _keep_up(place: CheckpointPlace, patient: Patient, *, quiet: bool) -> None:
    from ftsupervise.cli.checkpoint_retention import retention_of, show_plan

    settings, failed = place.settings, list[tuple[str, bool]]()
    refuse_held(place)
    if settings is None:
        return
    wanted = patiently(lambda progress: _to_copy(place, progress), patient, doing="", places=(place.folder,))
    if settings.offload is not None:
        found, rate = targets(place, (), None)

        def print_copy(url: str, report: OffloadReport) -> None:
            if report.sent or not quiet:
                say(copied(url, report))

        failed = copy_each(wanted, found, rate, patient, print_copy)
    if settings.retain is not None:
        policy = settings.retain.policy
        done = patiently(
            lambda progress: retention_of(place, policy, progress), patient, doing="", places=(place.folder,)
        )
        if done.removed or done.leftovers or not quiet:
            show_plan(done.planned, done.leftovers, dry_run=False, freed=done.freed)
    raise_failed(failed)


def _to_copy(place: CheckpointPlace, progress: WorkProgress) -> tuple[Path, ...]:
    """Adopt the checkpoints that the settings ask for; return those that are to be copied then."""
    assert place.settings is not None
    if place.settings.adopt:
        _adopt(place, progress)
    retain = place.settings.retain
    return committed(place, every=retain is not None and retain.copied) if place.settings.offload is not None else ()


def _adopt(place: CheckpointPlace, progress: WorkProgress) -> None:
    """Commit the checkpoints that their own program calls complete, also those that it has written again since; the others may
    be under way. Of one that it writes over again and again, what is committed is kept."""
    from ftsupervise.checkpoints.commit import NotComplete, Origin, commit
    from ftsupervise.checkpoints.find import checkpoints_in

    origin = Origin().written_by(run_to_note(place))
    for one in checkpoints_in(place.folder, pattern=place.pattern):
        if not _calls_itself_complete(one, place):
            continue
        try:
            manifest = commit(one.path, origin, progress=progress.moved)
        except NotComplete:  # it changes while it is read
            continue
        progress.line(f"{one.path.name} is committed")
        keep_if_written_over(one.path, manifest, progress)


def _calls_itself_complete(one: Found, place: CheckpointPlace) -> bool:
    """Return whether it is complete by its own sign, and has no manifest, or was written again since."""
    from ftsupervise.checkpoints.find import CheckpointState, Scope, Thoroughness, verify, written_since
    from ftsupervise.checkpoints.layouts import recognise
    from ftsupervise.checkpoints.manifest import contents_of

    if not one.committed:
        return recognise(one.path, contents_of(one.path)).complete is True
    if (
        one.head is None
        or not (one.head.adopted or one.path.is_file())
        or not written_since(contents_of(one.path), one.head)
    ):
        return False
    verdict = verify(one.path, Scope(Thoroughness.QUICK, accounts=place.accounts, run=place.run))
    return verdict.state is CheckpointState.COMPLETE
