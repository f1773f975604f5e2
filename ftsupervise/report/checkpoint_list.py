"""The checkpoints of a run, or in a folder, and whatever else lies there, as plain values: what ``checkpoints list`` prints."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.quarantine import quarantined_of
from ftsupervise.rundir.ledger import kept_of, ledger
from ftsupervise.snapshots.hidden import hidden_in

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found
    from ftsupervise.checkpoints.quarantine import Quarantined
    from ftsupervise.config.checkpoint_place import CheckpointPlace
    from ftsupervise.rundir.paths import RunDir
    from ftsupervise.snapshots.hidden import HiddenEntry
    from ftsupervise.truth import LeftCheckpoint


class CheckpointsSeen(NamedTuple):
    """The checkpoints in ``folder``, newest first, and what lies beside them."""

    folder: Path
    checkpoints: tuple[Found, ...]
    set_aside: tuple[Quarantined, ...] = ()
    hidden: tuple[HiddenEntry, ...] = ()  # that are being written, brought back or removed, and kept snapshots
    kept: tuple[tuple[int, LeftCheckpoint], ...] = ()  # of a script without the guard, each with its attempt
    own_folders: tuple[str, ...] = ()  # where such a script was seen to save, the newest first


def checkpoints_of(place: CheckpointPlace) -> CheckpointsSeen:
    """Read nothing but names and the first lines of manifests. Raises OSError. May hang."""
    return CheckpointsSeen(
        place.folder,
        tuple(checkpoints_in(place.folder, pattern=place.pattern, members=place.members)),
        tuple(quarantined_of(place.folder, place.rundir)),
        tuple(hidden_in(place.folder, _users(place))),
        () if place.rundir is None else tuple(kept_of(place.rundir)),
        () if place.rundir is None else _own_folders(place.rundir),
    )


def _own_folders(rundir: RunDir) -> tuple[str, ...]:
    found = (one.written.path for one in reversed(ledger(rundir)) if one.written is not None)
    return tuple(dict.fromkeys(str(Path(path).parent) for path in found))


def _users(place: CheckpointPlace) -> dict[Path, str]:
    from ftsupervise.snapshots.keeper import KeptSnapshots

    return {} if place.rundir is None else KeptSnapshots(place.rundir, place.folder).users()
