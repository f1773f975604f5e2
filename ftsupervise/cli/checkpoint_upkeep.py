"""``ftsupervise checkpoints prune|offload|restore``: remove old checkpoints, copy them elsewhere, bring them back."""

from __future__ import annotations

import time
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli.checkpoint_answers import find_in_time, must_answer
from ftsupervise.cli.checkpoints import CheckpointPlace, bar, checkpoints, find, print_json
from ftsupervise.cli.output import plain, say
from ftsupervise.errors import Error, NoAnswer, NotFound, UsageError

if TYPE_CHECKING:
    from ftsupervise.checkpoints.stores import Store

__all__ = ["checkpoints"]
_UNSEEN = 3


def _now() -> datetime:
    return datetime.now(timezone.utc)


def _rate(_ctx: click.Context, _param: click.Parameter, value: str | None) -> int | None:
    from ftsupervise.units import parse_size

    if value is None:
        return None
    try:
        rate = parse_size(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None
    if rate <= 0:
        raise click.BadParameter("give a rate above zero, such as 200MB")
    return rate


# ----------------------------------------------------------------------------------------------------------------- prune


@checkpoints.command()
@click.argument("run", required=False)
@click.option("-n", "--dry-run", is_flag=True, help="Show what would go and how much it frees; remove nothing.")
@click.option("--last", type=click.IntRange(min=2), help="Keep so many of the newest (checkpoints.retain.last).")
@click.option("--every", type=click.IntRange(min=1), metavar="STEPS", help="Keep the first of each stretch of STEPS.")
@click.option("--best", type=click.IntRange(min=0), metavar="K", help="Keep the best K by --metric.")
@click.option("--metric", metavar="NAME", help="A metric that the loop reported.")
@click.option("--better", type=click.Choice(["low", "high"]), help="Which end of the metric is the better one.")
@click.option("--copied/--not-copied", default=None, help="Remove only what has a copy elsewhere.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def prune(run: str | None, dry_run: bool, as_json: bool, **rules: Any) -> None:
    """Remove checkpoints of RUN that no rule keeps: the rules of checkpoints.retain, or those given here.

    The two newest verified ones (every byte is read), each one in use and each one that is not whole are always kept; with
    fewer than two verified ones nothing is removed. What goes is renamed first and deleted then, at 500 files a second. Without
    rules nothing goes.
    """
    from ftsupervise.checkpoints import retain
    from ftsupervise.checkpoints.in_use import leftovers
    from ftsupervise.cli.checkpoint_retention import plan_of, policy_of, show_plan

    place = find(run)
    if place.one is not None:
        raise UsageError(
            f"{place.one} is one checkpoint", hint=f"name the folder: ftsupervise checkpoints prune {place.folder}"
        )
    policy = policy_of(place, rules)
    planned = plan_of(place, policy, quiet=as_json)
    left = leftovers(place.rundir, place.folder, time.time())
    freed = 0
    if not dry_run:
        retain.remove(place.folder, left)
        gone = retain.remove(place.folder, [one.name for one in planned.remove])
        planned = planned._replace(remove=tuple(one for one in planned.remove if one.name in gone))
        with bar("removed", planned.frees, quiet=as_json) as told:
            freed = retain.sweep(place.folder, progress=told)
    if as_json:
        keep = {name: list(reasons) for name, reasons in planned.keep.items()}
        removed = [plain(one) for one in planned.remove]
        refused = planned.refused or None
        shown = {"folder": str(place.folder), "dry_run": dry_run, "keep": keep, "remove": removed, "leftovers": left}
        print_json({**shown, "frees": planned.frees, "freed": freed, "refused": refused})
        return
    show_plan(planned, left, dry_run=dry_run, freed=freed)


# --------------------------------------------------------------------------------------------------------------- offload


@checkpoints.command()
@click.argument("run", required=False)
@click.option(
    "--to", "places", multiple=True, metavar="PLACE", help="A folder, or s3://bucket/prefix; may be repeated."
)
@click.option("--all", "every", is_flag=True, help="Each checkpoint that has a manifest, not only the newest.")
@click.option("--rate", callback=_rate, metavar="SIZE", help="Bytes a second at most, such as 200MB.")
@click.option("-q", "--quiet", is_flag=True, help="Say nothing of copies that are there already.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def offload(
    run: str | None, places: tuple[str, ...], every: bool, rate: int | None, quiet: bool, as_json: bool
) -> None:
    """Copy the newest checkpoint of RUN to each PLACE (default: checkpoints.offload.to), and read the copy back.

    A copy counts when every file of it has come back with its digest; one that was interrupted goes on where it was. Nothing is
    removed here: `prune` does that, with --copied only of what has a copy.
    """
    from ftsupervise.checkpoints.offload import offload as copy

    place = find(run)
    stores, rate = _stores(place, places, rate)
    must_answer(stores, hint="nothing was copied; --to PLACE names only those that answer")
    wanted = _to_copy(place, every=every)
    reports, failed = [], list[str]()
    for path in wanted:
        for store in stores:
            try:
                with bar("copied", None, quiet=as_json) as told:
                    report = copy(path, store, now=_now, rate=rate, progress=told)
            except (Error, OSError, ValueError) as error:
                failed.append(f"{path.name} to {store.url}: {error}")
                continue
            reports.append((store.url, report))
            if not as_json and (report.sent or not quiet):
                _say_copied(store.url, report)
    if as_json:
        print_json({"copies": [{"place": url, **report._asdict()} for url, report in reports], "failed": failed})
    if failed:
        raise Error("not copied: " + "; ".join(failed), hint="the same command goes on where it was")


def _say_copied(url: str, report: Any) -> None:
    from ftsupervise.units import show_size

    if report.sent:
        say(f"{report.name} is copied to {url}/{report.folder}: {show_size(report.sent)} sent and read back")
    else:
        say(f"{report.name} has its copy in {url}/{report.folder}")


def _stores(place: CheckpointPlace, places: tuple[str, ...], rate: int | None) -> tuple[tuple[Store, ...], int | None]:
    from ftsupervise.checkpoints.stores import open_store

    offload = place.settings.offload if place.settings is not None else None
    if not places and offload is None:
        raise UsageError(
            "no place for copies is known",
            hint="give a PLACE, or write checkpoints: {offload: {to: /archive/run}} in ftsupervise.yaml",
        )
    if rate is None and offload is not None:
        rate = offload.rate
    return tuple(open_store(url) for url in places or (offload.to if offload is not None else ())), rate


def _to_copy(place: CheckpointPlace, *, every: bool) -> tuple[Path, ...]:
    if place.one is not None:
        return (place.one,)
    found = _committed(place, every=every)
    if not found:
        raise NotFound(
            f"{place.folder} holds no checkpoint with a manifest",
            hint=f"ftsupervise checkpoints commit {place.folder} adopts those of other programs",
        )
    return found


def _committed(place: CheckpointPlace, *, every: bool) -> tuple[Path, ...]:
    """The newest with a manifest, or each, newest first."""
    from ftsupervise.checkpoints.find import checkpoints_in

    committed = [one.path for one in checkpoints_in(place.folder, pattern=place.pattern) if one.committed]
    return tuple(committed if every else committed[:1])


# ---------------------------------------------------------------------------------------------------------------- upkeep


@checkpoints.command()
@click.argument("runs", nargs=-1, metavar="[RUN]...")
@click.option("--all", "everything", is_flag=True, help="Every run this account has launched.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what was done.")
def upkeep(runs: tuple[str, ...], everything: bool, quiet: bool) -> None:
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
                _keep_up(find_in_time(run, probe), quiet=quiet)
            except (Error, OSError, ValueError) as error:
                failed.append(f"{run or 'this run'}: {error}")
    if failed:
        raise Error("\n".join(failed))


def _all_runs() -> tuple[str, ...]:
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.watch import roster

    try:
        names: tuple[str, ...] = within(8.0, roster.listed, key=roster.state_key(state_dir()))
        return names
    except TimeoutError as error:
        raise NoAnswer(f"{state_dir()} does not answer: {error}", hint="name the runs") from None


def _keep_up(place: CheckpointPlace, *, quiet: bool) -> None:
    from ftsupervise.checkpoints import retain
    from ftsupervise.checkpoints.in_use import leftovers
    from ftsupervise.checkpoints.offload import offload as copy
    from ftsupervise.cli.checkpoint_retention import plan_of, show_plan

    settings, failed = place.settings, list[str]()
    if settings is None:
        return
    if settings.adopt:
        _adopt(place)
    if settings.offload is not None:
        stores, rate = _stores(place, (), None)
        for path in _committed(place, every=settings.retain is not None and settings.retain.copied):
            for store in stores:
                try:
                    report = copy(path, store, now=_now, rate=rate)
                except (Error, OSError, ValueError) as error:
                    failed.append(f"{path.name} to {store.url}: {error}")
                    continue
                if report.sent or not quiet:
                    _say_copied(store.url, report)
    if settings.retain is not None:
        planned = plan_of(place, settings.retain.policy, quiet=True)
        left = leftovers(place.rundir, place.folder, time.time())
        retain.remove(place.folder, left)
        gone = retain.remove(place.folder, [one.name for one in planned.remove])
        freed = retain.sweep(place.folder)
        if gone or left or not quiet:
            show_plan(planned, left, dry_run=False, freed=freed)
    if failed:
        raise Error("not copied: " + "; ".join(failed))


def _adopt(place: CheckpointPlace) -> None:
    """Commit the checkpoints that their own program calls complete; the others may be under way."""
    from ftsupervise.checkpoints.commit import NotComplete, commit
    from ftsupervise.checkpoints.contents import contents_of
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.layouts import recognise

    for one in checkpoints_in(place.folder, pattern=place.pattern):
        if one.committed or not recognise(one.path, contents_of(one.path)).complete:
            continue
        try:
            commit(one.path)
        except NotComplete:  # it changes while it is read
            continue
        say(f"{one.path.name} is committed")


# --------------------------------------------------------------------------------------------------------------- restore


@checkpoints.command()
@click.argument("run", required=False)
@click.option(
    "--from", "places", multiple=True, metavar="PLACE", help="A folder, or s3://bucket/prefix; may be repeated."
)
@click.option("--name", metavar="NAME", help="This checkpoint; default: the newest that has a copy.")
@click.option("--to", "target", type=Path, metavar="DIR", help="Into another folder.")
@click.option("--rate", callback=_rate, metavar="SIZE", help="Bytes a second at most, such as 200MB.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def restore(
    run: str | None,
    places: tuple[str, ...],
    name: str | None,
    target: Path | None,
    rate: int | None,
    as_json: bool,
) -> None:
    """Bring a checkpoint of RUN back from its nearest whole copy: PLACE, or checkpoints.offload.to in the order given there.

    One that is here and has all its digests is left as it is. A damaged one is set aside, never deleted. When a copy turns out
    to be damaged the next one is taken. Exit code 3: a place could not be seen, and none of the others has a copy.
    """
    from ftsupervise.checkpoints.offload import CopyDamaged
    from ftsupervise.checkpoints.restore import copies_in
    from ftsupervise.checkpoints.restore import restore as bring_back
    from ftsupervise.errors import NotPermitted

    place = CheckpointPlace(target) if run is None and target is not None and places else find(run)
    stores, _ = _stores(place, places, rate)
    must_answer(stores, target, hint="nothing was restored; --from PLACE and --to DIR name only those that answer")
    copies, unseen = copies_in(stores)
    for one in unseen:
        say(f"{one.where} could not be seen: {one.why}", err=True)
    wanted = [copy for copy in copies if name is None or copy.name == name]
    if not wanted:
        _no_copy(name, stores, blind=bool(unseen))
    newest = wanted[0].name
    problem: Error | None = None
    for copy in (one for one in wanted if one.name == newest):
        try:
            with bar("restored", copy.manifest.size, quiet=as_json) as told:
                path = bring_back(copy, (target or place.folder).absolute(), now=_now, rate=rate, progress=told)
        except (CopyDamaged, NotFound, NotPermitted) as error:
            say(str(error), err=True)
            problem = error
            continue
        if as_json:
            print_json({"path": str(path), "step": copy.manifest.step, "from": f"{copy.store.url}/{copy.folder}"})
        else:
            say(f"{path} is here and whole, as in {copy.store.url}/{copy.folder}")
        return
    assert problem is not None
    raise Error(f"no copy of {newest} could be used", hint="--name NAME restores another checkpoint") from problem


def _no_copy(name: str | None, stores: tuple[Store, ...], *, blind: bool) -> None:
    where = ", ".join(store.url for store in stores)
    if blind:
        say(f"no whole copy {f'of {name} ' if name else ''}was found in what could be seen of {where}", err=True)
        raise SystemExit(_UNSEEN)
    raise NotFound(
        f"there is no whole copy {f'of {name} ' if name else ''}in {where}",
        hint="ftsupervise checkpoints offload makes one",
    )
