"""Does each place answer that a command about checkpoints is going to use? Asked within a bound, before anything is touched.

A process that copies to a dead mount hangs in the kernel, where no signal reaches it. So each folder is looked at first by the
children of a ``Probe``. An object store is not asked: its package has time limits of its own.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.cli.checkpoints import CheckpointPlace, find
from ftsupervise.errors import NoAnswer

if TYPE_CHECKING:
    from ftsupervise.checkpoints.stores import Store
    from ftsupervise.probe import NotSeen, Probe

_FIND = 8.0  # seconds to find a run and read its settings


def must_answer(stores: Iterable[Store], *folders: Path | None, hint: str) -> None:
    """Raise NoAnswer for the first of these places that does not answer. ``hint``: what a person types instead."""
    from ftsupervise.probe import Probe

    with Probe() as probe:
        for folder in (*_folders(stores), *folders):
            if folder is not None:
                _look(probe, folder, hint)


def find_in_time(run: str | None, probe: Probe) -> CheckpointPlace:
    """``find``, for a command that goes through several runs: NoAnswer where the run, its checkpoints or one of its places for
    copies does not answer. With one ``probe`` for all of them a dead mount costs one bound, not one for each run."""
    from ftsupervise.checkpoints.stores import open_store
    from ftsupervise.probe.errand import within
    from ftsupervise.rundir.paths import state_dir

    hint = "ls of it would hang too; its next upkeep goes on when it answers again"
    _look(probe, Path(run or ".") if run is None or "/" in run else state_dir() / "runs" / run, hint)
    try:
        within(_FIND, lambda: _try_to_find(run), key=f"checkpoints upkeep {Path.cwd()} {run or ''}")
    except TimeoutError as error:
        raise NoAnswer(f"the run or its settings do not answer: {error}", hint=hint) from None
    place = find(run)
    offload = place.settings.offload if place.settings is not None else None
    for folder in (place.folder, *_folders(open_store(url) for url in (offload.to if offload is not None else ()))):
        _look(probe, folder, hint)
    return place


def _try_to_find(run: str | None) -> None:
    with suppress(Exception):  # the command itself meets the same error, and tells it
        find(run)


def _folders(stores: Iterable[Store]) -> tuple[Path, ...]:
    from ftsupervise.checkpoints.stores import FolderStore

    return tuple(store.root for store in stores if isinstance(store, FolderStore))


def _look(probe: Probe, folder: Path, hint: str) -> None:
    """The folder, or the nearest one above that is there. A refusal is an answer; what it means the command itself says."""
    seen = _seen(probe, folder.absolute())
    if seen is not None and seen.hung:
        raise NoAnswer(f"{folder} does not answer (mount {seen.what}): {seen.why}", hint=hint)


def _seen(probe: Probe, folder: Path) -> NotSeen | None:
    """The reason why it cannot be seen. Of a folder above only the file system is asked: another mount in it may hang."""
    from ftsupervise.probe import Missing, NotSeen

    for here in (folder, *folder.parents):
        space = probe.space(here)
        if isinstance(space, NotSeen):
            return space
        if not isinstance(space, Missing):
            break
    listing = probe.listing(folder, most=1)
    return listing if isinstance(listing, NotSeen) else None
