"""What speaks against a snapshot: the ledger, and what lies beside it. A person's decision outlives the machine's memory.

A snapshot goes on from a checkpoint, its anchor: the newest one when it was made. Whoever deletes the anchor or sets it aside
has taken the run back to before it, and the snapshot with it. Retention leaves an anchor alone, so what is gone was taken by
somebody. A folder that cannot be read says nothing.

The ledger knows the rest: a loss that was no number, an attempt that went back, and attempts that began from the snapshot and
failed. All of it holds for the snapshots of every job, in memory and on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.find import unfinished
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.checkpoints.manifest import ManifestHead, read_head
from ftsupervise.model import Attempt, CauseKind, Failure, FailureKind
from ftsupervise.rundir.anchor import Anchor
from ftsupervise.rundir.lineage import Belongs, Lineage, belongs
from ftsupervise.snapshots.slots import SnapshotId
from ftsupervise.truth import NOT_A_NUMBER, LossTrouble

DOUBT = 2  # a snapshot is not used again after this many; the program's own failures count twice
_BY_OTHERS = (FailureKind.SIGNAL, FailureKind.NODE, FailureKind.MEMORY, FailureKind.DISK, FailureKind.LOST)


class Beside(NamedTuple):
    """What lay beside a snapshot when it was made."""

    anchor: Anchor = Anchor()
    ahead: tuple[str, ...] = ()  # checkpoints of later steps, from which the run had not gone on


def steps_in(folder: Path, run: Lineage | None = None) -> dict[str, int | None]:
    """Return the checkpoints of ``folder`` by name, each with the step that its name says. Raises OSError.

    This is one listing, and only the newest ones are opened: those that another run than ``run`` wrote do not count. A
    network file system shows what was made in a folder in its order: a listing that shows a kept snapshot shows its anchor
    too.
    """
    try:
        with os.scandir(folder) as entries:
            found = {one.name: step_of(one.name) for one in entries if not unfinished(one.name)}
    except FileNotFoundError:
        return {}
    newest_first = sorted(
        (name for name, step in found.items() if step is not None), key=lambda name: -(found[name] or 0)
    )
    for name in newest_first if run is not None else ():
        if belongs(run, _head(folder / name), folder) is not Belongs.ANOTHERS:
            break
        del found[name]
    return found


def _head(checkpoint: Path) -> ManifestHead | None:
    try:
        return read_head(checkpoint)
    except (OSError, ValueError):
        return None


def beside(folder: Path, names: Mapping[str, int | None], step: int, anchor: Anchor = Anchor()) -> Beside:  # noqa: B008 - a frozen value
    """Return what lies beside a snapshot of ``step`` now: ``anchor``, or a later checkpoint that shows itself by its name."""
    known = {name: at for name, at in names.items() if at is not None}
    ahead = tuple(sorted(name for name, at in known.items() if at > step and name != anchor.checkpoint))
    best = max(((at, name) for name, at in known.items() if at <= step), default=None)
    if best is None or (anchor.step is not None and anchor.step >= best[0]):
        return Beside(anchor, ahead)
    return Beside(anchor_of(folder / best[1], best[0]), ahead)


def anchor_of(checkpoint: Path, step: int | None) -> Anchor:
    """Return ``checkpoint`` as an anchor."""
    head = _head(checkpoint)
    return Anchor(checkpoint.name, step, None if head is None else head.at)


def taken_back(folder: Path, names: Mapping[str, int | None], was: Anchor) -> str:
    """Return that the anchor ``was`` is not there any more, as a clause; "" where it is, as far as can be seen."""
    if not was.checkpoint:
        return ""
    if was.checkpoint not in names:
        return f"{was.checkpoint}, the checkpoint behind it, is not there any more"
    now = anchor_of(folder / was.checkpoint, was.step)
    if was.committed is not None and now.committed is not None and now.committed != was.committed:
        return f"{was.checkpoint}, the checkpoint behind it, is another one now"
    return ""


def put_there(names: Mapping[str, int | None], step: int, was: Beside) -> str:
    """Return which newer checkpoint somebody has put there since, as a clause; "" where there is none."""
    newer = {name: at for name, at in names.items() if at is not None and at >= step and name != was.anchor.checkpoint}
    name = max((name for name in newer if name not in was.ahead), default="", key=lambda one: newer[one] or 0)
    return f"{name} is newer" if name else ""


def against(one: SnapshotId, attempts: Sequence[Attempt], counts_from: int = 1) -> str:
    """Return what the ledger says against a snapshot, as a clause; "" where nothing does. Pure.

    ``attempts``: those from the one that made it on. ``counts_from``: the first whose failures count.
    """
    later = [each for each in attempts if each.number > one.attempt]
    if any(each.saved is not None and each.saved >= one.step for each in attempts):
        return "a newer checkpoint was saved since"
    for each in later:
        if each.last_step is not None and (each.first_step is None or each.first_step <= one.step):
            return f"attempt {each.number} went on from before it"
    for each in attempts:
        if each.number >= one.attempt and spoils(each.trouble):
            assert each.trouble is not None
            return f"attempt {each.number} came to trouble with its loss: {each.trouble.kind}: {each.trouble.words}"
    return failed_from(one, attempts, counts_from)


def failed_from(one: SnapshotId, attempts: Sequence[Attempt], counts_from: int = 1) -> str:
    """Return which attempt began from a snapshot and failed, as a clause, where enough of them did; else "".

    The next start is from a checkpoint then, and from no older snapshot. Pure; the rest as in ``against``.
    """
    later = [each for each in attempts if each.number > one.attempt]
    failed = [each for each in later if each.number >= counts_from and _began_from(each, one)]
    if sum(weight_of(each) for each in failed) >= DOUBT:
        return f"attempt {failed[-1].number}, which began from it, failed: {failed[-1].words}"
    return ""


def spoils(trouble: LossTrouble | None) -> bool:
    """Return whether no snapshot is used after this trouble with the loss."""
    return trouble is not None and (trouble.stops or trouble.kind == NOT_A_NUMBER)


def weight(failure: Failure | None) -> int:
    """Return how much an attempt that ended so and began from a snapshot says against it; nothing where it did not fail."""
    if failure is None:
        return 0
    return 1 if failure.kind in _BY_OTHERS else DOUBT


def weight_of(attempt: Attempt) -> int:
    """Return the same of an attempt of the ledger. One that left no end, dead or not, counts as one that others ended."""
    lost = attempt.kind in (CauseKind.LOST, CauseKind.UNKNOWN)
    return 1 if attempt.failure is None and lost else weight(attempt.failure)


def _began_from(attempt: Attempt, one: SnapshotId) -> bool:
    begins = attempt.begins
    if begins is None or begins.source not in ("memory", "kept") or begins.step != one.step:
        return False
    return begins.made is None or begins.made == one.attempt
