"""The parts of a run directory that its group may write, and the accounts whose pages are trusted there.

By itself the group may write ``switches/`` and nothing else, whatever the umask says. ``share:`` in the settings adds to that.
The mode of a folder is the record: ``launch`` gives a shared folder group-write and set-group-ID (2775), all others 0755, all
files 0644. Only a folder's owner can change its mode, so it shows whom its owner trusts. No settings are needed to read it.
Standard library only: the supervisor and the guard use this.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host import files
from ftsupervise.host.ownership import (
    ACL_GROUP,
    ACL_MASK,
    ACL_NAMED,
    access_list,
    drop_access_list,
    held,
    in_group,
)

FOLDER = 0o755
SHARED = 0o2775
OWN = 0o700
PAGE = 0o644
SCRIPT = 0o755


def stranger(folder: os.stat_result, page: os.stat_result, accounts: Collection[int] = ()) -> str:
    """Return why the owner of ``page`` in ``folder`` is not trusted there, as a clause; "" when they are.

    Trusted are the folder's owner, this account, root, ``accounts``, and the group's members where the folder is shared
    with them; in a folder that everybody may write, no one is.
    """
    from ftsupervise.host.ownership import group_name, shown_user

    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return "it lies in a folder that everybody may write"
    if page.st_uid in (0, os.geteuid(), folder.st_uid, *accounts):
        return ""
    if not is_shared(folder):
        return f"it belongs to {shown_user(page.st_uid)}, with whom the folder is not shared"
    if not in_group(page.st_uid, folder.st_gid):
        return f"it belongs to {shown_user(page.st_uid)}, who is not in the group {group_name(folder.st_gid)}"
    return ""


def may_be_changed(folder: os.stat_result, page: os.stat_result, path: str | os.PathLike[str]) -> str:
    """Return a clause that says who else may write ``page`` than the accounts trusted in ``folder``; "" when no one may."""
    from ftsupervise.host.ownership import distrust

    return distrust(page, path, accounts=(page.st_uid,), group=folder.st_gid if is_shared(folder) else None)


def distrust_in(folder: os.stat_result, path: str | os.PathLike[str]) -> Callable[[os.stat_result], str]:
    """Return a check for a reader of the page ``path`` in ``folder``: it says why the opened page is not trusted, by its owner
    and by who may write it; "" when it is."""
    return lambda page: stranger(folder, page) or may_be_changed(folder, page, path)


def is_shared(folder: os.stat_result) -> bool:
    """Return whether the group may write in it."""
    return bool(folder.st_mode & stat.S_IWGRP)


# ----------------------------------------------------------------------------------------------------------------- making


def mode_inside(parent: Path) -> int:
    """Return the mode of a folder that is made in ``parent``, one of ours: shared where that is shared, and never wider."""
    try:
        found = parent.stat().st_mode
    except OSError:
        return FOLDER
    return SHARED if found & stat.S_IWGRP and found & stat.S_ISGID else no_wider(FOLDER, found)


def no_wider(mode: int, *sources: int) -> int:
    """Return ``mode`` without the rights that one of its ``sources`` does not give to the group and to others: those of a copy,
    of a file that is brought back, of a folder made on the way. What its owner may do stays.
    """
    for source in sources:
        mode &= ~0o077 | source
    return mode


class Reach(NamedTuple):
    """The accounts that reach a file, and so may reach what is made of it: the rights in ``mode``, of which those for the group
    are the members' of each of ``groups``. Where these are empty, its group may do what everybody may."""

    mode: int
    groups: frozenset[int] = frozenset()

    def within(self, *others: Reach) -> Reach:
        """Return this one, no wider than ``others``. What the owner may do stays."""
        return Reach(
            no_wider(self.mode, *(one.mode for one in others)), self.groups.union(*(one.groups for one in others))
        )

    def without(self, bits: int) -> Reach:
        return self._replace(mode=self.mode & ~bits)

    def mode_for(self, group: int) -> int:
        """Return the mode of what belongs to ``group``. A right of another group is none of this one's, and what another one
        lacks nobody gets."""
        if not self.groups - {group}:
            return self.mode
        both = self.mode & self.mode >> 3 & 0o007
        return self.mode & ~0o077 | both << 3 | both


def reach(path: Path | int, *, follow: bool = False) -> Reach:
    """Return who reaches what is at ``path``, or open: by its mode, its group and its access list. Raises OSError."""
    found = os.fstat(path) if isinstance(path, int) else path.stat() if follow else path.lstat()
    mode = found.st_mode & 0o777
    if entries := access_list(path, follow=follow):
        given = {entry.tag: entry.bits for entry in entries}
        mask = given.get(ACL_MASK, 0o7)
        others = mode & 0o7
        for entry in entries:  # an account or a group that is named may have less than the others
            others &= entry.bits & mask if entry.tag in ACL_NAMED else 0o7
        mode = mode & 0o700 | (given.get(ACL_GROUP, 0) & mask) << 3 | others
    return Reach(mode, frozenset({found.st_gid} if mode >> 3 & 0o7 != mode & 0o7 else ()))


def reach_on_the_way(path: Path) -> Reach:
    """Return what the folders above ``path`` leave of 0777: nothing for the group, or for others, where one of them keeps these
    out. Raises OSError."""
    left = Reach(0o777)
    for folder in path.absolute().parents:
        found = reach(folder, follow=True)
        through = 0o700 | sum(7 * one for one in (0o001, 0o010) if found.mode & one)
        left = left.within(Reach(through, found.groups if through in (0o770, 0o707) else frozenset()))
    return left


def page_inside(parent: Path) -> int:
    """Return the mode of a file that is made in ``parent``: never wider than that. Raises OSError."""
    return no_wider(PAGE, parent.stat().st_mode)


def make_folder(folder: Path, mode: int | None = None, *, parents: bool = False) -> None:
    """Make ``folder`` with exactly that mode whatever the umask; a folder that exists stays as it is.

    Without ``mode`` it is shared as its parent is. ``parents``: make missing folders above it too. Others may make it at the
    same moment. Raises OSError, also when something else lies in its place.
    """
    if folder.is_dir():
        return
    try:
        claim_folder(folder, mode)
    except FileNotFoundError:
        if not parents or folder.parent == folder:
            raise
        make_folder(folder.parent, mode if mode is None else mode & FOLDER, parents=True)
        make_folder(folder, mode)
    except FileExistsError:
        if not folder.is_dir():
            raise


def make_like(folder: Path, source: Reach) -> None:
    """Make ``folder``, and those that are missing above it, no wider than ``source``; one that is there stays as it is.

    Raises OSError, also when something else lies in its place.
    """
    if folder.is_dir():
        return
    try:
        folder.mkdir(mode=OWN)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_like(folder.parent, source)
        make_like(folder, source)
    except FileExistsError:
        if not folder.is_dir():
            raise
    else:
        settle_folder(folder, source)


@contextmanager
def held_or_made(folder: Path, source: Reach) -> Iterator[Path]:
    """Do as ``ownership.held``, and make what is missing on the way to ``folder``, no wider than ``source``. Raises NotTrusted,
    OSError."""

    def make(name: str, at: int) -> None:
        try:
            os.mkdir(name, OWN, dir_fd=at)
        except FileExistsError:
            return
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
        try:
            settle(fd, source)
        finally:
            os.close(fd)

    with held(folder, make) as here:
        yield here


def settle_folder(folder: Path, source: Reach) -> None:
    """Do as ``settle`` to a folder of this account. Raises OSError."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        settle(fd, source)
    finally:
        os.close(fd)


def settle(fd: int, source: Reach) -> None:
    """Open what we have just made, a file or a folder with no rights for others yet, to whom ``source`` is open: in the group
    that it got from the folder above, and without the access list that it got from there. A file system without modes is no
    error. Raises OSError where the list cannot be taken away."""
    drop_access_list(fd)
    found = os.fstat(fd)
    wanted = source.mode_for(found.st_gid)
    if stat.S_ISDIR(found.st_mode):
        wanted |= found.st_mode & stat.S_ISGID
    set_file_mode(fd, wanted)


def make_own(folder: Path) -> None:
    """Make the folder of an account's own state, closed to all others; one that is there stays as it is. Raises OSError."""
    make_folder(folder.parent, FOLDER, parents=True)
    make_folder(folder, OWN)


def claim_folder(folder: Path, mode: int | None = None) -> None:
    """Make ``folder``, for one caller only: FileExistsError for all others. Without ``mode`` it is shared as its parent is."""
    wanted = mode_inside(folder.parent) if mode is None else mode
    folder.mkdir(mode=wanted & FOLDER)  # never more than that, not for a moment
    try:
        set_mode(folder, wanted)
    except (FileNotFoundError, NotADirectoryError):  # ours, and already renamed by another process
        return
    except OSError:  # a file system without modes
        if wanted & ~FOLDER:
            raise


def make_root(folder: Path) -> bool:
    """Make a run's own directory: its group may read it and no other account may write it.

    The umask decides whether others may read it. Returns False if it is there already. Raises OSError.
    """
    if folder.is_dir():
        return False
    make_folder(folder.parent, FOLDER, parents=True)
    try:
        folder.mkdir(mode=FOLDER)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    set_mode(folder, 0o750 | folder.stat().st_mode & 0o005)
    return True


def set_mode(folder: Path, mode: int) -> None:
    """Give a folder of ours that mode. It stays set-group-ID where the folder above made it so. What its group may write has no
    access list, by which others would write it too. Raises OSError."""
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))
    now = stat.S_IMODE(found.st_mode)
    wanted = mode | now & stat.S_ISGID
    alone = not mode & stat.S_IWGRP
    if now == wanted and (alone or not access_list(folder)):
        return
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
    try:
        if not alone:
            drop_access_list(fd)
        os.fchmod(fd, wanted)
    finally:
        os.close(fd)


def set_file_mode(fd: int, mode: int) -> None:
    """Set the mode of a file we have just made, which the umask may have cut. A file system without modes is no error."""
    try:
        if stat.S_IMODE(os.fstat(fd).st_mode) != mode:
            os.fchmod(fd, mode)
    except OSError:
        return


def as_page(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to append to a file that grows. It is made with mode 0644; one that is there keeps its own.

    Raises OSError as ``files.open_append`` does.
    """
    try:
        fd = files.create_new(path, PAGE, append=True)
    except FileExistsError:
        return files.open_append(path, PAGE)
    set_file_mode(fd, PAGE)
    return fd
