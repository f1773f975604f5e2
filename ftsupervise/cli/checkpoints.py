"""``ftsupervise checkpoints``: list them, verify them, and name the one that a run would resume from."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ftsupervise.cli.checkpoint_answers import Patient, patience, patiently
from ftsupervise.cli.command_group import DefaultGroup
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import JSON, plain, say, say_json
from ftsupervise.config.checkpoint_place import CheckpointPlace, place_of
from ftsupervise.errors import NotFound, Refused, UsageError
from ftsupervise.printable import printable
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found
    from ftsupervise.checkpoints.manifest import Manifest
    from ftsupervise.checkpoints.verify import Verdict
    from ftsupervise.probe.errand import WorkProgress
    from ftsupervise.rundir.lineage import Lineage
    from ftsupervise.snapshots.hidden import HiddenEntry
    from ftsupervise.truth import LeftCheckpoint

SCHEMA_VERSION = 1
_BAD, _UNSEEN = 1, 3  # exit codes of verify


@click.group(cls=DefaultGroup)
def checkpoints() -> None:
    """List checkpoints, verify them, remove old ones, copy them elsewhere and bring them back.

    \b
    ftsupervise checkpoints                   of the run of this directory
    ftsupervise checkpoints verify            the newest one, every byte
    ftsupervise checkpoints verify --all DIR  each one in a folder
    ftsupervise checkpoints commit DIR        write the manifest of one
    ftsupervise checkpoints prune --dry-run   which old ones may go
    ftsupervise checkpoints offload           copy the newest one elsewhere
    ftsupervise checkpoints restore           bring the newest copy back
    ftsupervise checkpoints set-aside DIR     keep a loader from taking this one
    ftsupervise checkpoints anew              set all aside, and begin at step 0

    RUN, where it is named, is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml. A directory that is no
    run is one of checkpoints, or a checkpoint.

    Exit codes: 0 done; 1 not what was committed (verify); 3 could not be seen (verify); 66 no such run or checkpoint, 73, 77
    cannot be written, 75 not complete (commit).
    """


@checkpoints.command("list", short_help="List the checkpoints and what else lies there (the default).")
@click.argument("run", required=False, type=RUN)
@click.option("--json", "as_json", is_flag=True, help="For programs.")
@click.option("--unread", is_flag=True, hidden=True, help="Only look whether the folder answers.")
def list_checkpoints(run: str | None, as_json: bool, unread: bool) -> None:
    """List the checkpoints of RUN, newest first (the default), and whatever else lies there: snapshots that a job has kept,
    checkpoints that were set aside, and those that are being written, brought back or removed. Then what is kept of a script
    without the guard, from before a start that may write over it.

    Nothing is read but the first lines of manifests.
    """
    from ftsupervise.checkpoints.find import runs_in
    from ftsupervise.report.checkpoint_list import checkpoints_of

    place = place_of(run, acts=False)
    if unread:
        os.path.lexists(place.folder) and os.listdir(place.folder)
        return
    seen = checkpoints_of(place)
    found = seen.checkpoints
    if as_json:
        listed = [plain({"path": one.path, "step": one.step, "at": one.at, "manifest": one.head}) for one in found]
        kept = [{"attempt": number, **plain(one)} for number, one in seen.kept]
        print_json({**plain(seen), "checkpoints": listed, "kept": kept})
        return
    if not found:
        own = f"; the run's own were seen in {' and in '.join(seen.own_folders[:3])}" if seen.own_folders else ""
        say(printable(f"{place.folder} holds no checkpoint{own}"))
    width = max((len(one.path.name) for one in found), default=0)
    me = place.run
    several = me is None and len(runs_in(found)) > 1
    for one in found:
        say(f"{printable(one.path.name):{width}}  {_line(one)}{_whose(one, me, several)}")
    for each in seen.set_aside:
        say(printable(f"set aside: {each.path}, because {each.reason}"))
    for entry in seen.hidden:
        say(printable(f"{entry.kind}: {entry.path}{_of_what(entry)}: {entry.use}"))
    for number, left in seen.kept:
        say(printable(f"kept: {left.kept}, {_size_of(left)} of attempt {number}, from {left.path} ({left.how})"))


def _size_of(left: LeftCheckpoint) -> str:
    from ftsupervise.checkpoints.layouts import place_in_name
    from ftsupervise.units import show_size

    at = f"{left.at:%Y-%m-%d %H:%M} UTC" if left.at is not None else ""
    return ", ".join(filter(None, (at, place_in_name(Path(left.path).name), show_size(left.size))))


def _of_what(entry: HiddenEntry) -> str:
    if entry.world is None:
        return ""
    code = f", code {entry.code}" if entry.code else ""
    return f", step {entry.step} of {count(entry.world, 'rank')}, by attempt {entry.attempt}{code}"


def _whose(one: Found, run: Lineage | None, several: bool) -> str:
    """Return whose it is, where it is another run's, or the folder holds those of several."""
    from ftsupervise.rundir.lineage import Belongs, whose

    if one.head is None or not (one.head.run_id or one.head.run):
        return ""
    belongs = one.belongs(run)
    if several or belongs is Belongs.ANOTHERS:
        return printable(f"  of {whose(one.head)}")
    return printable(f"  taken over from {whose(one.head)}") if belongs is Belongs.TAKEN else ""


@checkpoints.command(short_help="Set all checkpoints aside: the next attempt begins at step 0.")
@click.argument("run", required=False, type=RUN)
@click.option("--reason", default="a new start", metavar="TEXT", help="Why, for those who find them set aside.")
@JSON
def anew(run: str | None, reason: str, as_json: bool) -> None:
    """Begin RUN anew: set all its checkpoints aside, so that the next attempt begins at step 0.

    Nothing is deleted: they lie in .quarantine, and moving one back brings it back. Without this a run that has saved and finds
    nothing that it may use stops (exit code 93) and does not begin again over what is there.
    """
    from datetime import datetime, timezone

    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.quarantine import set_aside
    from ftsupervise.host.ownership import user_name
    from ftsupervise.rundir import ledger
    from ftsupervise.rundir.beginnings import Anew, note_anew
    from ftsupervise.rundir.lineage import read_lineage
    from ftsupervise.rundir.switches import read_brake

    place, now = place_of(run, acts=True), datetime.now(timezone.utc)
    if place.one is not None:
        raise UsageError(f"{place.one} is one checkpoint", hint="name the run, or the folder of all its checkpoints")
    last = ledger.newest(place.rundir) if place.rundir is not None else None
    if last is not None and place.rundir is not None and last.ended is None and last.cause is None:
        raise Refused(
            f"attempt {last.number} of {place.rundir.root} is running", hint=f"ftsupervise kill {place.rundir.root}"
        )
    known = read_lineage(place.rundir) if place.rundir is not None else None
    # what accounts that are not trusted have laid there is not gone on from, and may not be movable
    there = checkpoints_in(place.folder, pattern=place.pattern, run=known, members=place.members)
    mine = [one for one in there if one.trusted]
    put = [set_aside(one.path, f"{reason}, by {user_name()}", now) for one in mine]
    if place.rundir is not None:
        note_anew(place.rundir, Anew(last.number if last is not None else 0, now, user_name(), len(mine)))
    braked = place.rundir is not None and read_brake(place.rundir) is not None
    if as_json:
        print_json({"folder": str(place.folder), "set_aside": plain(put), "brake": braked})
        return
    say(printable(f"{count(len(mine), 'checkpoint')} of {place.folder} set aside: the next attempt begins at step 0"))
    if place.rundir is not None and braked:
        say(printable(f"it is stopped by the brake; to let it begin: ftsupervise clear --brake {place.rundir.root}"))


@checkpoints.command("set-aside", short_help="Set one checkpoint aside, so that no loader takes it.")
@click.argument("checkpoint", type=click.Path())
@click.option("--reason", default="as somebody asked", metavar="TEXT", help="Why, for those who find it set aside.")
@JSON
def one_aside(checkpoint: str, reason: str, as_json: bool) -> None:
    """Set CHECKPOINT aside, a folder or a file, so that a loader that takes the newest one takes the one before.

    Nothing is deleted: it lies in .quarantine, and moving it back brings it back. For a program that loads by rules of its own,
    and crashes on its newest checkpoint; guard.restore() and guard.latest() pass over what is torn by themselves.
    """
    from datetime import datetime, timezone
    from shlex import quote

    from ftsupervise.checkpoints.quarantine import set_aside
    from ftsupervise.errors import from_os_error
    from ftsupervise.host.ownership import refuse_link, user_name

    place = place_of(checkpoint, acts=True)
    if place.one is None:
        raise UsageError(f"{checkpoint} is no checkpoint", hint="name one: ftsupervise checkpoints list")
    path = place.one
    try:
        refuse_link(path)
        put = set_aside(path, f"{reason}, by {user_name()}", datetime.now(timezone.utc))
    except OSError as error:
        raise from_os_error(error, f"set {path} aside") from None
    if as_json:
        print_json({"path": str(path), "put": str(put)})
        return
    say(printable(f"{path.name} is set aside; to bring it back: mv -T {quote(str(put))} {quote(str(path))}"))


def _line(one: Found) -> str:
    from ftsupervise.checkpoints.manifest import CheckpointLayout
    from ftsupervise.units import show_size

    step = f"step {one.step}" if one.step is not None else "no step"
    start = f"{one.at:%Y-%m-%d %H:%M} UTC  {step:>12}"
    if one.head is None:
        return f"{start}  {'a damaged manifest' if one.committed else 'no manifest'}"
    by = "" if one.head.layout is CheckpointLayout.FILES else f"  {one.head.layout.value}"
    return f"{start}  {show_size(one.head.size):>8}  {count(one.head.listed, 'file')}{by}"


@checkpoints.command(short_help="Compare checkpoints with their manifests.")
@click.argument("run", required=False, type=RUN)
@click.option("--all", "every", is_flag=True, help="Each checkpoint, not only the newest good one.")
@click.option("--sizes", "thoroughness", flag_value="sizes", help="Compare only the sizes of the files.")
@click.option(
    "--quick", "thoroughness", flag_value="quick", help="And the digests of small files, as guard.latest() does."
)
@click.option("--sample", "thoroughness", flag_value="sampled", help="And the digests of a tenth of the files.")
@click.option(
    "--full", "thoroughness", flag_value="full", default="full", help="And the digest of every file (the default)."
)
@click.option("--world", type=click.IntRange(min=1), help="The number of ranks that must have written it.")
@patience
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def verify(run: str | None, every: bool, thoroughness: str, world: int | None, seconds: float, as_json: bool) -> None:
    """Compare checkpoints of RUN with their manifests, and name the newest good one.

    Without --all it looks from the newest one back until one is good. A checkpoint itself may be named too.
    """
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness
    from ftsupervise.checkpoints.verify import verify as judge

    place = place_of(run, acts=False)
    found = checkpoints_in(place.folder, pattern=place.pattern, run=place.run, members=place.members)
    wanted = (place.one,) if place.one else tuple(one.path for one in found)
    if not wanted:
        raise NotFound(f"{place.folder} holds no checkpoint", hint="the run has not saved yet, or it saves elsewhere")

    def judge_all(progress: WorkProgress) -> list[Verdict]:
        verdicts: list[Verdict] = []
        scope = Scope(Thoroughness(thoroughness), world, place.accounts, progress.moved, members=place.members)
        for path in wanted:
            verdicts.append(judge(path, scope))
            if verdicts[-1].good and not every:
                break
        return verdicts

    verdicts = patiently(judge_all, Patient(seconds, as_json), doing="read", places=(place.folder,))
    good = next((one for one in verdicts if one.good), None)
    if as_json:
        newest = None if good is None else str(good.path)
        print_json({"folder": str(place.folder), "newest": newest, "checkpoints": [plain(one) for one in verdicts]})
    else:
        for verdict in verdicts:
            say(printable(verdict.words()))
        if good is None:
            say("none of them is good to resume from", err=True)
    wrong = [one for one in verdicts if not one.good]
    if good is None or (every and wrong):
        raise SystemExit(_UNSEEN if all(one.state is CheckpointState.UNSEEN for one in wrong) else _BAD)


@checkpoints.command(short_help="Adopt checkpoints that another program wrote.")
@click.argument("run", required=False, type=RUN)
@click.option("--step", type=click.IntRange(min=0), help="The step; default: from its name, or its own files.")
@click.option("--world", type=click.IntRange(min=1), help="The number of ranks that wrote it; default: from its files.")
@click.option("--metric", "metrics", multiple=True, metavar="NAME=X", help="A metric of it; may be repeated.")
@click.option("--again", is_flag=True, help="Replace the manifest that it has.")
@patience
@click.option("--json", "as_json", is_flag=True, help="For programs.")
def commit(
    run: str | None,
    step: int | None,
    world: int | None,
    metrics: tuple[str, ...],
    again: bool,
    seconds: float,
    as_json: bool,
) -> None:
    """Adopt checkpoints that another program wrote, as they are: read each file once, and write the manifest.

    Name one checkpoint; or RUN, or a folder of them: then each is adopted that has no manifest and whose own sign says that it
    is complete. It is refused where that sign says no, and while it changes.
    """
    from ftsupervise.checkpoints.commit import NotComplete, Origin
    from ftsupervise.checkpoints.commit import commit as adopt

    place = place_of(run, acts=True)
    wanted = _to_commit(place, again=again, single=step is not None or bool(metrics) or again)
    origin = Origin(step=step, world=world, metrics=_numbers(metrics)).written_by(run_to_note(place))

    def adopt_all(progress: WorkProgress) -> tuple[dict[Path, Manifest], list[str]]:
        done: dict[Path, Manifest] = {}
        refused: list[str] = []
        for path in wanted:
            try:
                done[path] = adopt(path, origin, by_its_sign=place.one is None, progress=progress.moved)
                keep_if_written_over(path, done[path], progress)
            except NotComplete as error:
                refused.append(str(error))
        return done, refused

    done, refused = patiently(adopt_all, Patient(seconds, as_json), doing="read", places=(place.folder,))
    if as_json:
        print_json({"folder": str(place.folder), "committed": {str(path): plain(one) for path, one in done.items()}})
    for path, manifest in done.items() if not as_json else ():
        say(_committed(path, manifest))
    if not wanted and not as_json:
        say(f"{place.folder}: nothing to commit")
    if refused:
        raise Refused("\n".join(refused), hint="wait until the save is over, or remove it")


def run_to_note(place: CheckpointPlace) -> Lineage | None:
    """Return the run that wrote what is adopted there; None where no run was named, or another one has saved there too."""
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.retain import of_others

    me = place.run
    there = checkpoints_in(place.folder, pattern=place.pattern, members=place.members)
    return None if me is None or of_others(there, me) else me


def _to_commit(place: CheckpointPlace, *, again: bool, single: bool) -> tuple[Path, ...]:
    """Those that are meant. ``again``: with a manifest too; ``single``: an option was given that suits one alone."""
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.manifest import manifest_of

    if place.one is not None and os.path.lexists(manifest_of(place.one)) and not again:
        raise Refused(
            f"{place.one} has a manifest", hint=f"ftsupervise checkpoints verify {place.one}; --again replaces it"
        )
    if place.one is None and single:
        raise UsageError(
            f"--step, --metric and --again are for one checkpoint, and {place.folder} holds several",
            hint=f"name one: ls {place.folder}",
        )
    found = checkpoints_in(place.folder, pattern=place.pattern, members=place.members)
    return (place.one,) if place.one else tuple(one.path for one in found if not one.committed and one.trusted)


def keep_if_written_over(checkpoint: Path, manifest: Manifest, progress: WorkProgress) -> None:
    """Keep a copy of one that its program writes over, and say so, or why not."""
    from ftsupervise.checkpoints.previous import is_written_over, keep

    if not is_written_over(checkpoint):
        return
    try:
        kept = keep(checkpoint, manifest)
    except OSError as error:
        progress.line(f"{checkpoint.name} has no copy that outlives the next write: {error.strerror}")
        return
    if kept is None:
        progress.line(
            f"{checkpoint.name} has no copy that outlives the next write: no room for twice its size, or it changed"
        )
    else:
        progress.line(f"{kept.name} outlives the next write of {checkpoint.name}")


def _committed(checkpoint: Path, manifest: Manifest) -> str:
    from ftsupervise.units import show_size

    step = f"step {manifest.step}, " if manifest.step is not None else ""
    what = f"{step}{count(len(manifest.files), 'file')}, {show_size(manifest.size)}"
    return f"{checkpoint.name} is committed: {what}, {manifest.layout.value}"


def _numbers(given: tuple[str, ...]) -> dict[str, float]:
    from math import isfinite

    found = {}
    for text in given:
        name, _, value = text.partition("=")
        try:
            found[name] = float(value)
        except ValueError:
            found[name] = float("nan")
        if not name or not isfinite(found[name]):
            raise click.BadParameter(f'"{text}" is not NAME=X with a finite number X', param_hint="--metric")
    return found


# ----------------------------------------------------------------------------------------------------------------- parts


def refuse_held(place: CheckpointPlace) -> None:
    """Raise NotTrusted where another account's settings ask for something that is not done for them."""
    from ftsupervise.host.ownership import NotTrusted

    if place.held:
        raise NotTrusted("\n".join(place.held))


def print_json(value: dict[str, object]) -> None:
    say_json({"schema_version": SCHEMA_VERSION, **value})
