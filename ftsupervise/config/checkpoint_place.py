"""Which folder of checkpoints is meant, or which one of them: that of a run, or a path."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from ftsupervise.checkpoints.find import Found
    from ftsupervise.config.schema import CheckpointSettings
    from ftsupervise.rundir.lineage import Lineage
    from ftsupervise.rundir.paths import RunDir


class CheckpointPlace(NamedTuple):
    """The subject of a command: a folder of checkpoints, or one of them."""

    folder: Path
    one: Path | None = None
    pattern: str = "*"
    accounts: tuple[int, ...] = ()  # user ids that are trusted there
    settings: CheckpointSettings | None = None  # of the run, where it has some
    rundir: RunDir | None = None
    held: tuple[str, ...] = ()  # sentences: what another account's settings ask for, and is not done

    @property
    def run(self) -> Lineage | None:
        """The run that was named; None where it was a folder. Raises OSError."""
        from ftsupervise.rundir.lineage import read_lineage

        return None if self.rundir is None else read_lineage(self.rundir)

    @property
    def members(self) -> int | None:
        """The group whose members are trusted there too; None: none. Raises OSError."""
        from ftsupervise.rundir.lineage import believed_group

        return believed_group(self.rundir)


def place_of(run: str | None, *, acts: bool) -> CheckpointPlace:
    """The folder of checkpoints that is meant, or the one checkpoint.

    ``acts``: something is written, removed or copied. Then the run has to be the one that was launched, settings that another
    account may write do not count, and no link of another account is followed. Raises NotFound, ConfigError, NotTrusted.
    """
    from ftsupervise.errors import from_os_error
    from ftsupervise.host.ownership import refuse_link

    place = _found(run, acts=acts)
    if acts:
        try:
            refuse_link(place.folder)
            require_checkpoints(place)
        except OSError as error:
            raise from_os_error(error, f"look at {place.folder}") from None
    return place


def _found(run: str | None, *, acts: bool) -> CheckpointPlace:
    from ftsupervise.config.find_run import find_run, refuse_namesake

    refuse_namesake(run)
    path = Path(run).absolute() if run is not None else None
    if path is not None and path.exists() and not _is_run(path):
        accounts = (path.stat().st_uid,)  # a person who names it trusts its owner too
        if path.is_file() or _is_checkpoint(path):
            return CheckpointPlace(path.parent, path, accounts=accounts)
        return CheckpointPlace(path, accounts=accounts)
    rundir = find_run(run)
    if acts:
        require_launched(rundir)
    section, held = _settings(rundir, acts=acts)
    accounts = (rundir.root.stat().st_uid,)
    if section is None:
        return CheckpointPlace(rundir.checkpoints, accounts=accounts, rundir=rundir, held=held)
    return CheckpointPlace(section.path or rundir.checkpoints, None, section.pattern, accounts, section, rundir)


def require_launched(rundir: RunDir) -> None:
    """Raise NotTrusted unless it is the run directory that this account has launched, where it has launched one there."""
    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    try:
        pinned.require(state_dir(), rundir)
    except OSError as error:
        raise from_os_error(error, f"look at the run directory {rundir.root}") from None


def require_checkpoints(place: CheckpointPlace, seen: os.stat_result | None = None) -> None:
    """Raise NotTrusted unless its folder, or the open one with the facts ``seen``, is the one that the run saves in. Raises
    OSError."""
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    if place.rundir is not None:
        pinned.require_checkpoints(state_dir(), place.rundir, place.folder, seen)


def note_checkpoints(place: CheckpointPlace) -> None:
    """Note that the run saves in its folder as it is now: a command that a person typed has made it. Best effort: where it is
    not noted, the next command refuses and says what to type."""
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    if place.rundir is not None:
        with suppress(OSError):
            pinned.note_checkpoints(state_dir(), place.rundir, place.folder)


def _settings(rundir: RunDir, *, acts: bool) -> tuple[CheckpointSettings | None, tuple[str, ...]]:
    """Return the settings as the run was launched, and what is held back of them; None for a run directory without settings,
    and for settings of others where this account ``acts``."""
    from ftsupervise.config.believed import load_believed

    if not rundir.config.is_file():
        return None, ()
    found = load_believed(rundir.config)
    if not (acts and found.why):
        return found.run.checkpoints, ()
    asked = tuple(line for line in found.held if line.startswith("checkpoints."))
    return None, found._replace(held=asked).sentences(rundir.config)


def _is_run(path: Path) -> bool:
    if path.is_file():
        return path.suffix in (".yaml", ".yml")
    from ftsupervise.rundir.paths import has_switches

    return has_switches(path) or (path / "ftsupervise.yaml").is_file()


def _is_checkpoint(folder: Path) -> bool:
    """Return whether it is one checkpoint, and not a folder of them.

    It is one by its manifest, its layout, or a step in its name where it holds no checkpoint of another step; or
    because nothing in it is a checkpoint.
    """
    from ftsupervise.checkpoints.contents import contents_of
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.layouts import layout_of, says_step
    from ftsupervise.checkpoints.manifest import CheckpointLayout, manifest_of

    if os.path.lexists(manifest_of(folder)):
        return True
    try:
        contents = contents_of(folder)
    except PermissionError:  # something of another account, which lies in a folder of several
        return False
    if layout_of(folder, contents) is not CheckpointLayout.FILES:
        return True
    inside = checkpoints_in(folder)
    if says_step(folder.name):
        return not any(_is_another(one, folder) for one in inside)
    return bool(contents.files) and not any(one.committed or one.step is not None for one in inside)


def _is_another(one: Found, folder: Path) -> bool:
    """Return whether it is a checkpoint by itself, in a folder with a step in its name: ``ckpt7/step-100``.

    It is one by its manifest, or by its layout and another step in its name.
    """
    from ftsupervise.checkpoints.contents import contents_of
    from ftsupervise.checkpoints.layouts import layout_of, says_step, step_of
    from ftsupervise.checkpoints.manifest import CheckpointLayout

    if one.committed or one.step == step_of(folder.name) or not says_step(one.path.name):
        return one.committed
    return layout_of(one.path, contents_of(one.path)) is not CheckpointLayout.FILES
