"""``ftsupervise checkpoints prune|upkeep``: remove old checkpoints, and all that the settings of a run ask for."""

from __future__ import annotations

import shlex
import time
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ftsupervise.cli.checkpoint_answers import Patient, folders_of, look, must_answer, patience, patiently
from ftsupervise.cli.checkpoints import checkpoints, keep_if_written_over, print_json, refuse_held, run_to_note
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, for_programs, plain, say
from ftsupervise.config.checkpoint_place import (
    CheckpointPlace,
    note_checkpoints,
    place_of,
    require_checkpoints,
    require_launched,
)
from ftsupervise.errors import Error, NoAnswer, NotFound, Refused, UsageError
from ftsupervise.printable import printable
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found
    from ftsupervise.checkpoints.offload import OffloadReport
    from ftsupervise.checkpoints.restore import FoundCopy, StoreUnseen
    from ftsupervise.checkpoints.retain import Candidate, Retention, RetentionPlan
    from ftsupervise.checkpoints.stores import Store
    from ftsupervise.checkpoints.verify import Verdict
    from ftsupervise.probe import Probe
    from ftsupervise.probe.errand import WorkProgress

# ``ftsupervise checkpoints offload|restore``: copy checkpoints elsewhere, and bring them back.

_UNSEEN = 3


class CopyTarget(NamedTuple):
    """A place for copies. Each child that works there opens it anew: a connection does not survive a fork."""

    address: str  # as it was typed, with a credential if there is one

    def open(self) -> Store:
        from ftsupervise.checkpoints.stores import open_store

        return open_store(self.address)

    @property
    def url(self) -> str:
        return self.open().url


def now() -> datetime:
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


def targets(
    place: CheckpointPlace, places: tuple[str, ...], rate: int | None
) -> tuple[tuple[CopyTarget, ...], int | None]:
    """Return the places that are named, or those of the settings, and the bytes a second at most."""
    offload = place.settings.offload if place.settings is not None else None
    if not places and offload is None:
        refuse_held(place)
        raise UsageError(
            "no place for copies is known",
            hint="give a PLACE, or write checkpoints: {offload: {to: /archive/run}} in ftsupervise.yaml",
        )
    if rate is None and offload is not None:
        rate = offload.rate
    return tuple(CopyTarget(url) for url in places or (offload.to if offload is not None else ())), rate


def committed(place: CheckpointPlace, *, every: bool) -> tuple[Path, ...]:
    """Return the newest of each kind with a manifest, or each one, newest first."""
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.retain import kind_of

    there = checkpoints_in(place.folder, pattern=place.pattern, run=place.run, members=place.members)
    found = [one for one in there if one.committed and one.trusted]
    if not every:  # what loads one kind cannot load another
        newest = {kind_of(one): one for one in reversed(found)}
        found = [one for one in found if one in newest.values()]
    return tuple(one.path for one in found)


# --------------------------------------------------------------------------------------------------------------- offload


@checkpoints.command(short_help="Copy checkpoints to another place, and read the copies back.")
@click.argument("run", required=False, type=RUN)
@click.option(
    "--to", "places", multiple=True, metavar="PLACE", help="A folder, or s3://bucket/prefix; may be repeated."
)
@click.option("--all", "every", is_flag=True, help="Each checkpoint that has a manifest, not only the newest.")
@click.option("--rate", callback=_rate, metavar="SIZE", help="Bytes a second at most, such as 200MB.")
@click.option("--again", is_flag=True, help="Read every byte of a copy that exists already, and mend it.")
@patience
@click.option("-q", "--quiet", is_flag=True, help="Do not mention copies that exist already.")
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def offload(
    run: str | None,
    places: tuple[str, ...],
    every: bool,
    rate: int | None,
    again: bool,
    seconds: float,
    quiet: bool,
    as_json: bool,
) -> None:
    """Copy the newest checkpoint of RUN to each PLACE (default: checkpoints.offload.to), and read the copy back.

    A copy counts when every file of it has come back with its digest; one that was interrupted goes on where it was. Nothing is
    removed here: `prune` does that, with --copied only of what has a copy.
    """
    place = place_of(run, acts=True)
    found, rate = targets(place, places, rate)
    must_answer((one.open() for one in found), hint="nothing was copied; --to PLACE names only those that answer")
    reports: list[tuple[str, OffloadReport]] = []

    def print_copy(url: str, report: OffloadReport) -> None:
        reports.append((url, report))
        if not as_json and (report.sent or not quiet):
            say(copied(url, report))

    wanted, patient = _asked_for(place, every=every), Patient(seconds, as_json)
    failed = copy_each(wanted, found, rate, patient, print_copy, again=again)
    if as_json:
        listed = [{"place": url, **report._asdict()} for url, report in reports]
        print_json({"copies": listed, "failed": [why for why, _ in failed]})
    raise_failed(failed)


def copy_each(
    wanted: Iterable[Path],
    found: tuple[CopyTarget, ...],
    rate: int | None,
    patient: Patient,
    on_copy: Any,
    *,
    again: bool = False,
) -> list[tuple[str, bool]]:
    """Copy each checkpoint to each place, one after the other, each in a child of its own. Returns what failed, and whether
    that was for want of an answer: then the place is left alone, and the others have their turn."""
    failed: list[tuple[str, bool]] = []
    dead: set[CopyTarget] = set()
    for path in wanted:
        for target in found:
            if target in dead:
                continue
            try:
                report = _copy_one(path, target, rate, patient, again=again)
            except (Error, OSError, ValueError) as error:
                failed.append((f"{path.name} to {target.url}: {error}", isinstance(error, NoAnswer)))
                if isinstance(error, NoAnswer):
                    dead.add(target)
                continue
            on_copy(target.url, report)
    return failed


def _copy_one(path: Path, target: CopyTarget, rate: int | None, patient: Patient, *, again: bool) -> OffloadReport:
    from ftsupervise.checkpoints.offload import offload as copy

    return patiently(
        lambda progress: copy(path, target.open(), now=now, rate=rate, progress=progress.moved, again=again),
        patient,
        doing="copied",
        places=(path, target.open()),
    )


def raise_failed(failed: list[tuple[str, bool]]) -> None:
    """Raise the error of copies that failed, if any did: NoAnswer where each of them did for that reason."""
    if failed:
        kind = NoAnswer if all(no_answer for _, no_answer in failed) else Error
        raise kind(
            "not copied: " + "; ".join(why for why, _ in failed), hint="the same command continues where it stopped"
        )


def copied(url: str, report: OffloadReport) -> str:
    from ftsupervise.units import show_size

    if report.sent:
        return f"{report.name} is copied to {url}/{report.folder}: {show_size(report.sent)} sent and read back"
    return f"{report.name} has its copy in {url}/{report.folder}"


def _asked_for(place: CheckpointPlace, *, every: bool) -> tuple[Path, ...]:
    if place.one is not None:
        return (place.one,)
    found = committed(place, every=every)
    if not found:
        raise NotFound(
            f"{place.folder} holds no checkpoint with a manifest",
            hint=f"ftsupervise checkpoints commit {place.folder} adopts those of other programs",
        )
    return found


# --------------------------------------------------------------------------------------------------------------- restore


@checkpoints.command(short_help="Bring a checkpoint back from a copy.")
@click.argument("run", required=False, type=RUN)
@click.option(
    "--from", "places", multiple=True, metavar="PLACE", help="A folder, or s3://bucket/prefix; may be repeated."
)
@click.option("--name", metavar="NAME", help="This checkpoint; default: the newest that has a copy.")
@click.option("--to", "target", type=Path, metavar="DIR", help="Into another folder.")
@click.option("--rate", callback=_rate, metavar="SIZE", help="Bytes a second at most, such as 200MB.")
@patience
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def restore(
    run: str | None,
    places: tuple[str, ...],
    name: str | None,
    target: Path | None,
    rate: int | None,
    seconds: float,
    as_json: bool,
) -> None:
    """Bring a checkpoint of RUN back from its nearest whole copy: PLACE, or checkpoints.offload.to in the order given there.

    One that is here and has all its digests is left as it is. A damaged one is set aside, never deleted. When a copy turns out
    to be damaged, or its place stops to answer, the next one is taken. Exit code 3: a place could not be seen, and none of the
    others has a copy.
    """
    from ftsupervise.checkpoints.offload import CopyDamaged
    from ftsupervise.errors import NotPermitted

    place = CheckpointPlace(target) if run is None and target is not None and places else place_of(run, acts=True)
    found, _ = targets(place, places, rate)
    here = (target or place.folder).absolute()
    hint = "nothing was restored; --from PLACE and --to DIR name only those that answer"
    must_answer((one.open() for one in found), target, hint=hint)
    patient = Patient(seconds, as_json)
    copies, unseen = _look_for_copies(found, patient)
    for one in unseen:
        say(f"{one.where} could not be seen: {one.why}", err=True)
    wanted = [
        (source, copy) for source, copy in copies if copy.name == name or (name is None and _may_take(place, copy))
    ]
    if not wanted:
        _no_copy(name, found, blind=bool(unseen))
    newest = wanted[0][1].name
    problem: Error | None = None
    for source, copy in (one for one in wanted if one[1].name == newest):
        try:
            path = _bring_back(place, source, copy, here, rate, patient)
        except (CopyDamaged, NotFound, NotPermitted, NoAnswer) as error:
            say(str(error), err=True)
            problem = error
            continue
        if as_json:
            print_json({"path": str(path), "step": copy.manifest.step, "from": f"{copy.store.url}/{copy.folder}"})
        else:
            say(f"{path} is here and whole, as in {copy.store.url}/{copy.folder}")
        return
    assert problem is not None
    kind = NoAnswer if isinstance(problem, NoAnswer) else Error
    raise kind(f"no copy of {newest} could be used", hint="--name NAME restores another checkpoint") from problem


def _may_take(place: CheckpointPlace, copy: FoundCopy) -> bool:
    """Return whether it is no copy of another run's checkpoint, which only its name brings back."""
    from ftsupervise.rundir.lineage import Belongs, belongs

    return belongs(place.run, copy.manifest, place.folder) is not Belongs.ANOTHERS


def _look_for_copies(
    found: tuple[CopyTarget, ...], patient: Patient
) -> tuple[list[tuple[CopyTarget, FoundCopy]], list[StoreUnseen]]:
    """Return the whole copies with their places, newest first, and what could not be seen. One silent place hides no other."""
    from ftsupervise.checkpoints.restore import StoreUnseen

    copies: list[tuple[CopyTarget, FoundCopy]] = []
    unseen: list[StoreUnseen] = []
    for source in found:
        try:
            there, blind = patiently(partial(_copies_at, source), patient, doing="", places=(source.open(),))
        except NoAnswer as error:
            unseen.append(StoreUnseen(source.url, error.message))
            continue
        copies += [(source, copy) for copy in there]
        unseen += blind
    copies.sort(key=lambda one: one[1].rank, reverse=True)  # stable: of one checkpoint in the order of the places
    return copies, unseen


def _copies_at(source: CopyTarget, _: WorkProgress) -> tuple[tuple[FoundCopy, ...], tuple[StoreUnseen, ...]]:
    from ftsupervise.checkpoints.restore import copies_in

    return copies_in([source.open()])


def _bring_back(
    place: CheckpointPlace, source: CopyTarget, copy: FoundCopy, here: Path, rate: int | None, patient: Patient
) -> Path:
    from ftsupervise.checkpoints.restore import restore as bring_back

    def work(progress: WorkProgress) -> Path:
        made = not here.exists()
        path = bring_back(copy._replace(store=source.open()), here, now=now, rate=rate, progress=progress.moved)
        if made:
            note_checkpoints(place)
        return path

    return patiently(
        work,
        patient,
        doing="restored",
        total=copy.manifest.size,
        places=(here, copy.store),
    )


def _no_copy(name: str | None, found: tuple[CopyTarget, ...], *, blind: bool) -> None:
    where = ", ".join(one.url for one in found)
    if blind:
        say(f"no whole copy {f'of {name} ' if name else ''}was found in what could be seen of {where}", err=True)
        raise SystemExit(_UNSEEN)
    raise NotFound(
        f"there is no whole copy {f'of {name} ' if name else ''}in {where}",
        hint="ftsupervise checkpoints offload makes one",
    )


# ------------------------------------------------------------------------------------------


__all__ = ["checkpoints"]
_FIND = 8.0  # seconds to find a run and read its settings


# ----------------------------------------------------------------------------------------------------------------- prune


@checkpoints.command(short_help="Remove checkpoints that no rule keeps.")
@click.argument("run", required=False, type=RUN)
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
    place = place_of(run, acts=not dry_run)
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
            "spared": done.spared,
        }
        counted = {"frees": done.planned.frees, "freed": done.freed, "refused": done.planned.refused or None}
        print_json({**shown, **counted})
        return
    show_plan(done.planned, done, place.folder, dry_run=dry_run)


def _quiet(text: str) -> None:
    """Print nothing: the output is for a program."""


# ---------------------------------------------------------------------------------------------------------------- upkeep


@checkpoints.command(short_help="Do what the settings of each run ask for.")
@click.argument("runs", nargs=-1, metavar="[RUN]...", type=RUN)
@click.option("--all", "everything", is_flag=True, help="Every run this account has launched.")
@patience
@click.option("--no-copies", is_flag=True, help="Leave checkpoints.offload to another call.")
@click.option("-q", "--quiet", is_flag=True, help="Print only what was done.")
@JSON
def upkeep(
    runs: tuple[str, ...], everything: bool, seconds: float, no_copies: bool, quiet: bool, as_json: bool
) -> None:
    """Do for each RUN what its settings ask for: adopt checkpoints that another program completed (checkpoints.adopt), copy
    (checkpoints.offload), remove (checkpoints.retain). Made for the crontab: ftsupervise cron add checkpoints.

    The newest checkpoint is copied; all of them where checkpoints.retain.copied lets none go without a copy. What fails for one
    run does not keep the others waiting, nor does a folder of it that does not answer; the exit code is 1 then.
    """
    if everything and runs:
        raise UsageError("--all and names of runs do not go together", hint="leave one of them out")
    from ftsupervise.probe import Probe

    failed, done = [], []
    with Probe() as probe, for_programs(as_json):
        for run in _all_runs() if everything else runs or (None,):
            try:
                place = _find_in_time(run, probe)
                if no_copies and place.settings is not None:
                    place = place._replace(settings=place.settings.model_copy(update={"offload": None}))
                done.append(kept := UpkeepDone(run, place.folder, [], []))
                _keep_up(place, Patient(seconds, quiet=True), kept, quiet=quiet)
            except (Error, OSError, ValueError) as error:
                failed.append(f"{run or 'this run'}: {error}")
    if as_json:
        print_json({"runs": plain(done), "failed": failed})
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
    place = place_of(run, acts=True)
    offload = place.settings.offload if place.settings is not None else None
    for folder in (place.folder, *folders_of(open_store(url) for url in (offload.to if offload is not None else ()))):
        look(probe, folder, hint)
    return place


def _try_to_find(run: str | None) -> None:
    with suppress(Error, OSError, ValueError):  # the command itself meets the same error, and reports it
        place_of(run, acts=True)


def _all_runs() -> tuple[str, ...]:
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.watch import roster

    try:
        names: tuple[str, ...] = within(8.0, roster.listed, key=roster.state_key(state_dir()))
        return names
    except TimeoutError as error:
        raise NoAnswer(f"{state_dir()} does not answer: {error}", hint="name the runs") from None


class UpkeepDone(NamedTuple):
    """The work of an upkeep for one run, for programs."""

    run: str | None
    folder: Path
    copies: list[tuple[str, OffloadReport]]  # each with its place
    removed: list[str]


def _keep_up(place: CheckpointPlace, patient: Patient, kept: UpkeepDone, *, quiet: bool) -> None:
    settings, failed = place.settings, list[tuple[str, bool]]()
    refuse_held(place)
    if settings is None:
        return
    wanted = patiently(lambda progress: _to_copy(place, progress), patient, doing="", places=(place.folder,))
    if settings.offload is not None:
        found, rate = targets(place, (), None)

        def print_copy(url: str, report: OffloadReport) -> None:
            kept.copies.append((url, report))
            if report.sent or not quiet:
                say(copied(url, report))

        failed = copy_each(wanted, found, rate, patient, print_copy)
    if settings.retain is not None:
        policy = settings.retain.policy
        done = patiently(
            lambda progress: retention_of(place, policy, progress), patient, doing="", places=(place.folder,)
        )
        kept.removed.extend(done.removed)
        if done.removed or done.leftovers or not quiet:
            show_plan(done.planned, done, place.folder, dry_run=False)
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
    for one in checkpoints_in(place.folder, pattern=place.pattern, members=place.members):
        if not (one.trusted and _calls_itself_complete(one, place)):
            continue
        try:
            manifest = commit(one.path, origin, progress=progress.moved)
        except NotComplete:  # it changes while it is read
            continue
        progress.line(f"{one.path.name} is committed")
        keep_if_written_over(one.path, manifest, progress)


def _calls_itself_complete(one: Found, place: CheckpointPlace) -> bool:
    """Return whether it is complete by its own sign, and has no manifest, or was written again since."""
    from ftsupervise.checkpoints.contents import contents_of
    from ftsupervise.checkpoints.layouts import recognise
    from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify, written_since

    if not one.committed:
        return recognise(one.path, contents_of(one.path)).complete is True
    if (
        one.head is None
        or not (one.head.adopted or one.path.is_file())
        or not written_since(contents_of(one.path), one.head)
    ):
        return False
    verdict = verify(one.path, Scope(Thoroughness.QUICK, accounts=place.accounts, run=place.run, members=place.members))
    return verdict.state is CheckpointState.COMPLETE


# ------------------------------------------------------------------------------------------

# The plan of ``ftsupervise checkpoints prune`` and ``upkeep``, and how it is shown.

_TELL = 2000  # checkpoints between two lines of progress


class RetentionResult(NamedTuple):
    """The plan, the leftovers of an interrupted save or restore, and the outcome."""

    planned: RetentionPlan
    leftovers: tuple[str, ...]
    removed: tuple[str, ...] = ()
    freed: int = 0  # bytes
    spared: tuple[
        str, ...
    ] = ()  # what looks like a leftover, where others may write the folder and may have named it so


def retention_of(
    place: CheckpointPlace,
    policy: Retention,
    progress: WorkProgress,
    *,
    dry_run: bool = False,
    tell: Callable[[str], object] = lambda text: None,
) -> RetentionResult:
    """Plan what goes by ``policy`` and remove it, unless it is a ``dry_run``. ``progress`` hears of bytes that are read and
    removed, ``tell`` now and then how far it is. The folder that was judged is the one in which something is removed, whatever
    is put in its place meanwhile. Raises NotTrusted, OSError."""
    from ftsupervise.checkpoints import retain
    from ftsupervise.checkpoints.retain import leftovers
    from ftsupervise.host.ownership import held

    require_one_run(place)
    if not place.folder.is_dir():  # the run has not saved yet
        return RetentionResult(_plan(place, policy, progress, tell), ())
    with held(place.folder) as folder:
        if not dry_run:
            require_checkpoints(place, folder.stat())
        place = place._replace(folder=folder)
        # who may write the folder may give a name that we delete to anything of ours there
        judged = retain.keys_in(folder) if retain.others_may_write(folder) else None
        planned = _plan(place, policy, progress, tell)
        left, spared = leftovers(place.rundir, folder, time.time()), tuple[str, ...]()
        if judged is not None:
            left, spared = (), (*left, *sorted(name for name in judged if name.startswith(retain.REMOVING)))
        if dry_run:
            return RetentionResult(planned, left, spared=spared)
        if place.rundir is not None:
            require_launched(place.rundir)  # once more: it took a while to read all that
        retain.remove(folder, left)
        gone = retain.remove(folder, [one.name for one in planned.remove], judged)
        planned = planned._replace(remove=tuple(one for one in planned.remove if one.name in gone))
        only = None if judged is None else {judged[name] for name in gone}
        return RetentionResult(planned, left, gone, retain.sweep(folder, only, progress=progress.moved), spared)


def show_plan(planned: Any, done: RetentionResult, folder: Path, *, dry_run: bool) -> None:
    from ftsupervise.units import show_size

    left, freed = done.leftovers, done.freed

    for name in sorted(planned.keep, reverse=True):
        say(printable(f"kept     {name}: {'; '.join(planned.keep[name])}"))
    for one in reversed(planned.remove):
        size = f", {show_size(one.size)}" if one.size is not None else ""
        say(printable(f"{'would go' if dry_run else 'removed '} {one.name}{size}"))
    for name in left:
        say(f"{'would go' if dry_run else 'removed '} {name}, left by a restore or a save that was interrupted")
    for name in done.spared:
        say(
            printable(
                f"kept     {name}: others may write {folder}, and may have given it this name; if it is what an interrupted "
                f"removal, restore or save left: rm -r {shlex.quote(str(folder / name))}"
            )
        )
    if planned.refused:
        say(planned.refused)
    elif not planned.remove and not freed and not left:
        say("nothing to remove")
    elif dry_run:
        say(f"{count(len(planned.remove), 'checkpoint')} would go, which frees {show_size(planned.frees)}")
    else:
        say(f"{count(len(planned.remove), 'checkpoint')} removed, {show_size(freed)} freed")


def policy_of(place: CheckpointPlace, rules: dict[str, Any]) -> Retention:
    from ftsupervise.checkpoints.retain import Better, Retention

    given = {name: value for name, value in rules.items() if value is not None}
    if "better" in given:
        given["better"] = Better(given["better"])
    retain = place.settings.retain if place.settings is not None else None
    if retain is None and not given:
        refuse_held(place)
        raise UsageError(
            "no rule says which checkpoints to keep, so none is removed",
            hint="give --last 3, or write checkpoints: {retain: {last: 3}} in ftsupervise.yaml",
        )
    policy = (retain.policy if retain is not None else Retention())._replace(**given)
    if policy.best and not policy.metric:
        raise UsageError(
            "--best needs --metric NAME: by which metric", hint="ftsupervise checkpoints list --json shows them"
        )
    return policy


def require_one_run(place: CheckpointPlace) -> None:
    """Raise Refused for a folder that holds checkpoints of several runs, where none of them was named."""
    from ftsupervise.checkpoints.find import checkpoints_in, runs_in
    from ftsupervise.rundir.lineage import whose

    if place.rundir is None and len(runs := runs_in(checkpoints_in(place.folder, pattern=place.pattern))) > 1:
        raise Refused(
            printable(
                f"{place.folder} holds checkpoints of {len(runs)} runs: {', '.join(whose(one) for one in runs[:5])}"
            ),
            hint="name the run whose checkpoints are meant: ftsupervise checkpoints prune RUN",
        )


def _plan(
    place: CheckpointPlace, policy: Retention, progress: WorkProgress, tell: Callable[[str], object]
) -> RetentionPlan:
    """The plan by ``policy``, from the sizes of the files. Where something goes by it, it is made again after every byte of the
    newest checkpoints was read, until two of each kind are verified."""
    from ftsupervise.checkpoints.retain import ALWAYS, plan, would_free

    known: dict[Path, Verdict] = {}
    planned = plan(_candidates(place, policy, 0, progress, known, tell), policy)
    if planned.remove:
        planned = plan(_candidates(place, policy, ALWAYS, progress, known, tell), policy)
    return planned._replace(frees=would_free(place.folder, [one.name for one in planned.remove]))


def _candidates(
    place: CheckpointPlace,
    policy: Retention,
    in_full: int,
    progress: WorkProgress,
    known: dict[Path, Verdict],
    tell: Callable[[str], object],
) -> tuple[Candidate, ...]:
    """All checkpoints of a folder as retention sees them: the newest ones of each kind read in full until ``in_full`` are
    verified, of the others the sizes compared, once (``known``)."""
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.retain import Candidate, in_use, kind_of, of_others
    from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
    from ftsupervise.snapshots.kept import anchors

    used = in_use(place.rundir, place.folder, time.time(), anchors(place.folder))
    found = checkpoints_in(place.folder, pattern=place.pattern, members=place.members)
    spared = of_others(found, place.run)
    scope = Scope(accounts=place.accounts, progress=progress.moved, members=place.members)
    whole = Counter[str]()
    made: list[Candidate] = []
    for one in found:
        if one.path.name in spared:
            made.append(
                Candidate(one.path.name, one.step, one.at.timestamp(), None, None, others=spared[one.path.name])
            )
            continue
        kind = kind_of(one)
        thoroughness = Thoroughness.FULL if whole[kind] < in_full else Thoroughness.SIZES
        verdict = known.get(one.path)
        if verdict is None or thoroughness is Thoroughness.FULL:
            verdict = verify(one.path, scope._replace(thoroughness=thoroughness))
            known[one.path] = verdict
            if made and len(made) % _TELL == 0:
                tell(f"{len(made)} of {len(found)} checkpoints are compared")
        whole[kind] += verdict.state is CheckpointState.VERIFIED
        unknown = verdict.state in (CheckpointState.UNSEEN, CheckpointState.COMPLETE)
        made.append(
            _candidate(one, None if unknown else verdict.good, verdict.size, policy)._replace(
                used_by=used.get(one.path.name, ""), kind=kind
            )
        )
    return tuple(made)


def _candidate(one: Found, verified: bool | None, size: int, policy: Retention) -> Candidate:
    from ftsupervise.checkpoints.manifest import read_manifest
    from ftsupervise.checkpoints.offload import copies_of, holds
    from ftsupervise.checkpoints.retain import Candidate
    from ftsupervise.checkpoints.stores import open_store
    from ftsupervise.errors import Error

    copied = False
    if policy.copied and verified:
        try:
            manifest = read_manifest(one.path)
            known = copies_of(one.path, manifest) if manifest is not None else ()
            copied = manifest is not None and any(holds(open_store(it.url), it.folder, manifest) for it in known)
        except (OSError, ValueError, Error):  # away, or changed: no copy as long as that is so
            copied = False
    metrics = one.head.metrics if one.head is not None else {}
    return Candidate(one.path.name, one.step, one.at.timestamp(), size, verified, metrics, copied)
