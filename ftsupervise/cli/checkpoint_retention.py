"""The plan of ``ftsupervise checkpoints prune`` and ``upkeep``, and how it is shown."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.cli.checkpoints import CheckpointPlace, refuse_held, require_launched
from ftsupervise.cli.output import say
from ftsupervise.errors import Refused, UsageError
from ftsupervise.printable import printable
from ftsupervise.units import count

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found, Verdict
    from ftsupervise.checkpoints.retain import Candidate, Retention, RetentionPlan
    from ftsupervise.probe.errand import WorkProgress

_TELL = 2000  # checkpoints between two lines of progress


class RetentionResult(NamedTuple):
    """The plan, the leftovers of an interrupted save or restore, and the outcome."""

    planned: RetentionPlan
    leftovers: tuple[str, ...]
    removed: tuple[str, ...] = ()
    freed: int = 0  # bytes


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
        place = place._replace(folder=folder)
        planned = _plan(place, policy, progress, tell)
        left = leftovers(place.rundir, folder, time.time())
        if dry_run:
            return RetentionResult(planned, left)
        if place.rundir is not None:
            require_launched(place.rundir)  # once more: it took a while to read all that
        retain.remove(folder, left)
        gone = retain.remove(folder, [one.name for one in planned.remove])
        planned = planned._replace(remove=tuple(one for one in planned.remove if one.name in gone))
        return RetentionResult(planned, left, gone, retain.sweep(folder, progress=progress.moved))


def show_plan(planned: Any, left: tuple[str, ...], *, dry_run: bool, freed: int) -> None:
    from ftsupervise.units import show_size

    for name in sorted(planned.keep, reverse=True):
        say(printable(f"kept     {name}: {'; '.join(planned.keep[name])}"))
    for one in reversed(planned.remove):
        size = f", {show_size(one.size)}" if one.size is not None else ""
        say(printable(f"{'would go' if dry_run else 'removed '} {one.name}{size}"))
    for name in left:
        say(f"{'would go' if dry_run else 'removed '} {name}, left by a restore or a save that was interrupted")
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
    from ftsupervise.checkpoints.find import CheckpointState, Scope, Thoroughness, checkpoints_in, verify
    from ftsupervise.checkpoints.retain import Candidate, in_use, kind_of, of_others
    from ftsupervise.snapshots.kept import anchors

    used = in_use(place.rundir, place.folder, time.time(), anchors(place.folder))
    found = checkpoints_in(place.folder, pattern=place.pattern)
    spared = of_others(found, place.run)
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
            verdict = verify(one.path, Scope(thoroughness, accounts=place.accounts, progress=progress.moved))
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
