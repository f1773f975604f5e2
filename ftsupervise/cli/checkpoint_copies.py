"""``ftsupervise checkpoints offload|restore``: copy checkpoints elsewhere, and bring them back."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import click

from ftsupervise.cli.checkpoint_answers import Patient, must_answer, patience, patiently
from ftsupervise.cli.checkpoints import CheckpointPlace, checkpoints, find, print_json, refuse_held
from ftsupervise.cli.output import say
from ftsupervise.errors import Error, NoAnswer, NotFound, UsageError

if TYPE_CHECKING:
    from ftsupervise.checkpoints.offload import OffloadReport
    from ftsupervise.checkpoints.restore import FoundCopy, StoreUnseen
    from ftsupervise.checkpoints.stores import Store
    from ftsupervise.probe.errand import WorkProgress

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

    found = [one for one in checkpoints_in(place.folder, pattern=place.pattern, run=place.run) if one.committed]
    if not every:  # what loads one kind cannot load another
        newest = {kind_of(one): one for one in reversed(found)}
        found = [one for one in found if one in newest.values()]
    return tuple(one.path for one in found)


# --------------------------------------------------------------------------------------------------------------- offload


@checkpoints.command()
@click.argument("run", required=False)
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
    place = find(run, acts=True)
    found, rate = targets(place, places, rate)
    must_answer((one.open() for one in found), hint="nothing was copied; --to PLACE names only those that answer")
    reports: list[tuple[str, OffloadReport]] = []

    def print_copy(url: str, report: OffloadReport) -> None:
        reports.append((url, report))
        if not as_json and (report.sent or not quiet):
            say(copied(url, report))

    wanted, patient = _to_copy(place, every=every), Patient(seconds, as_json)
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


def _to_copy(place: CheckpointPlace, *, every: bool) -> tuple[Path, ...]:
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


@checkpoints.command()
@click.argument("run", required=False)
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

    place = CheckpointPlace(target) if run is None and target is not None and places else find(run, acts=True)
    found, _ = targets(place, places, rate)
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
    here = (target or place.folder).absolute()
    problem: Error | None = None
    for source, copy in (one for one in wanted if one[1].name == newest):
        try:
            path = _bring_back(source, copy, here, rate, patient)
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


def _bring_back(source: CopyTarget, copy: FoundCopy, here: Path, rate: int | None, patient: Patient) -> Path:
    from ftsupervise.checkpoints.restore import restore as bring_back

    return patiently(
        lambda progress: bring_back(
            copy._replace(store=source.open()), here, now=now, rate=rate, progress=progress.moved
        ),
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
