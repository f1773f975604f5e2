"""The folders of a run and their modes: the group may write the switches, the owner the rest, and ``share`` adds to that.

Modes are set, not left to the umask, at each launch: a folder that was open to the group and is not shared any more is closed.
"""

from __future__ import annotations

import os
import shlex
import stat
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.errors import Refused, from_os_error
from ftsupervise.host import files
from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import (
    FOLDER,
    SHARED,
    distrust_route,
    group_name,
    make_folder,
    make_root,
    no_wider,
    open_above,
    set_mode,
)
from ftsupervise.nodes import incidents
from ftsupervise.rundir import pinned
from ftsupervise.rundir.fence import STAGING
from ftsupervise.rundir.paths import RunDir, state_dir
from ftsupervise.rundir.records import as_text, read_json

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run, Sharing

_QUICKLY = 3.0  # seconds
_WORDS = 12  # of a command: those behind are the program's own


def make_folders(run_dir: RunDir, share: Sharing | None) -> None:
    """Make all of them, or set the modes of those that are there and ours. Raises OSError, Refused for an unknown group."""
    group = group_id(share)
    new = make_root(run_dir.root)
    launched = run_dir.launches.is_dir()  # else the directory was somebody's before it became a run's
    if group is not None and (new or launched):
        _open(run_dir.root, None, group)
    if share is not None and share.launch:
        _open(run_dir.root, SHARED, group)
    elif launched:
        _open(run_dir.root, stat.S_IMODE(run_dir.root.stat().st_mode) & ~0o022, None)
    for folder, shared in _folders(run_dir, share):
        mode = SHARED if shared else FOLDER
        make_folder(folder, mode)
        _open(folder, mode, group if shared else None)
    for folder in _of_attempts(run_dir):
        _open(folder, SHARED if share is not None and share.launch else FOLDER, group)


def _of_attempts(run_dir: RunDir) -> Iterator[Path]:
    """Yield the folders that attempts have made so far: the next one seals and sweeps them, whoever launched it."""
    staging = run_dir.checkpoints / STAGING
    if staging.is_dir():
        yield staging
    for above in (run_dir.attempts, run_dir.staging, staging):
        try:
            with os.scandir(above) as found:
                yield from [Path(entry.path) for entry in found if entry.is_dir(follow_symlinks=False)]
        except FileNotFoundError:
            continue


def _folders(run_dir: RunDir, share: Sharing | None) -> list[tuple[Path, bool]]:
    """Return every folder, those above first, and whether the group may write it."""
    launch = share is not None and share.launch
    watch = share is not None and share.watch
    nodes = share is not None and (share.nodes or share.launch)  # its jobs record incidents of nodes there
    own = (run_dir.state, run_dir.attempts, run_dir.launches, run_dir.beats, run_dir.logs)
    found = [(folder, launch) for folder in (*own, run_dir.checkpoints, run_dir.staging)]
    found += [(run_dir.switches, True)]
    found += [(run_dir.watch, watch)]
    found += [(run_dir.watch / name, watch) for name in ("journal", "watchers", "events")]
    found += [(run_dir.nodes, nodes)]
    return found + [(run_dir.nodes / word, nodes) for word in incidents.WORDS]


def _open(folder: Path, mode: int | None, group: int | None) -> None:
    """Set group and mode of a folder of ours, each where it is given; only another person can open theirs. One that is not
    shared is never opened wider than it is."""
    with files.folder_of(folder) as (at, name):  # no other can be put in its place between the look and the change
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        # a link to another disk is left to its target's owner
        if found.st_uid != os.geteuid() or not stat.S_ISDIR(found.st_mode):
            return
        if group is not None and found.st_gid != group:
            _give(at, name, group, folder)
        if mode is not None:
            set_mode(Path(f"/proc/self/fd/{at}/{name}"), mode if mode & 0o020 else no_wider(mode, found.st_mode))


def _give(at: int, name: str, group: int, folder: Path) -> None:
    try:
        os.chown(name, -1, group, dir_fd=at, follow_symlinks=False)
    except PermissionError:
        raise Refused(
            f"you are not in the group {group_name(group)}, so {folder} cannot be given to it",
            hint="share.group takes one of yours: id -Gn",
        ) from None


def group_id(share: Sharing | None) -> int | None:
    """Return the number of ``share.group``; None when none is named. Raises Refused when no such group exists here."""
    if share is None or share.group is None:
        return None
    import grp

    try:
        return grp.getgrnam(share.group).gr_gid
    except KeyError:
        raise Refused(f"no group is called {share.group} here", hint="share.group takes one of yours: id -Gn") from None


def handed_over(run_dir: RunDir, settings: Run, workdir: Path) -> tuple[str, ...]:
    """Return the rights of the run's group, and what others may exchange, a sentence each: printed at launch, so that no person
    shares more than intended."""
    share = settings.share
    try:
        found = run_dir.switches.stat()
    except OSError:
        return ()
    group = f"the group {group_name(found.st_gid)}"
    told = []
    if share.watch:
        told.append(
            f"{group} may watch beside you: it can silence alerts, and its messages go out through your receivers"
        )
    if share.nodes:
        told.append(f"{group} may exclude, trust and clear nodes of this run")
    if share.launch:
        told.append(f"{group} may launch and continue the run: commands that it writes into {run_dir.root} run as you")
    root = run_dir.root.stat()
    if root.st_mode & (stat.S_IWGRP | stat.S_IWOTH) and not share.launch:
        whoever = "everybody" if root.st_mode & stat.S_IWOTH else f"the group {group_name(root.st_gid)}"
        told.append(
            f"{whoever} may write {run_dir.root} itself, and so replace everything in it: chmod go-w {run_dir.quoted()}"
        )
    if not share.launch and (above := open_above(run_dir.root)):
        told.append(
            f"{above}, and so put another run in the place of this one: a folder that only you may write is safer"
        )
    try:
        told += in_time(lambda: _exchanged(settings, workdir, " ".join(told)), _QUICKLY) or []
    except OSError:  # a file system that does not answer keeps no launch back
        pass
    return tuple(told)


def _exchanged(settings: Run, workdir: Path, told: str) -> list[str]:
    """Return what others may put in the place of the checkpoints, of the code in ``workdir`` and of the program of the command,
    but for folders of which that is ``told`` already."""
    found = []
    places = {
        "other checkpoints": settings.checkpoints.path and settings.checkpoints.path / "any",
        "another list of nodes": settings.nodes.directory,
        "other code": workdir / "code",  # any file in it
    }
    for what, path in places.items():
        if path is not None and (why := open_above(path)) and why not in told:
            found.append(f"{why}, and so put {what} in the place of yours")
            told += why
    for path in _files_named(settings.launch.command, workdir):
        if (why := distrust_route(path)) and why not in told:
            found.append(f"{why}, and the command runs {path} as you")
            told += why
    return found


def _files_named(command: str | Sequence[str], workdir: Path) -> list[Path]:
    """Return the files among the first words of a command: its program, and the script that this runs."""
    try:
        words = shlex.split(command, comments=True) if isinstance(command, str) else command
    except ValueError:
        return []
    return [path for word in words[:_WORDS] if "\0" not in word and (path := workdir / word).is_file()]


def require_own(run_dir: RunDir) -> None:
    """Check that the run directory is ours or shared with us. Raises NotPermitted, also where its owner has changed."""
    try:
        pinned.require_own(state_dir(), run_dir)
    except OSError as error:
        raise from_os_error(error, f"look at the run directory {run_dir.root}") from None


def pin(run_dir: RunDir, number: int, checkpoints: Path | None) -> None:
    """Note the run directory, and the folder of its checkpoints, for this account's watch and upkeep. Best effort: a full home
    must not deny a launch that was made."""
    try:
        page = read_json(run_dir.launches / f"{number:04d}" / "launch.json") or {}
        pinned.note(state_dir(), run_dir.root, as_text(page.get("token")))
        pinned.note_checkpoints(state_dir(), run_dir, checkpoints or run_dir.checkpoints)
    except (OSError, ValueError):
        return
