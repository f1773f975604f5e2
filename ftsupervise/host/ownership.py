"""The owner of a file, and the accounts that may change it: one rule for every file that is read and trusted.

A file is trusted when its owner is this account, root, or an account named in the settings, and when no stranger may write it:
not everybody, and not a group, unless the settings share it with that group or nobody else is in it. The file is judged by its
open descriptor, so that it cannot be exchanged between the check and the reading.

A file that others may change is not an error of this account: the message names its owner and the command to type.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import struct
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import ExitStack, contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import NotPermitted
from ftsupervise.host import files
from ftsupervise.host.links import LINKS, LinkOfStranger, Make, anew, descend, from_the_root, may_be_root
from ftsupervise.host.links import shown_user as shown_user
from ftsupervise.host.links import user_name as user_name
from ftsupervise.printable import to_type

# Accounts and groups by their names; never by LOGNAME or USER, which anybody can set.
#
# The modules ``pwd`` and ``grp`` are loaded when they are needed, not by a start.


def user_id(name: str) -> int | None:
    """Return the number of the account ``name``; None when there is none."""
    import pwd

    try:
        return pwd.getpwnam(name).pw_uid
    except (KeyError, ValueError):
        return None


def group_name(gid: int) -> str:
    """Return the name of a group, or "gid 1234" where it has none."""
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return f"gid {gid}"


def in_group(uid: int, gid: int) -> bool:
    """Return whether the account ``uid`` is in the group ``gid``, now or a few seconds ago: it is asked of each of thousands of
    files, and a directory service answers slowly. False for an account without a name here."""
    return _in_group(uid, gid, int(time.monotonic() / _FEW_SECONDS))


@lru_cache(1000)
def _in_group(uid: int, gid: int, _when: int) -> bool:
    import pwd

    try:
        account = pwd.getpwuid(uid)
        return gid in os.getgrouplist(account.pw_name, account.pw_gid)
    except (KeyError, OSError):
        return False


_FEW_SECONDS = 4.0
_ACL, _PASSED_ON = "system.posix_acl_access", "system.posix_acl_default"
_NO_LIST = (errno.ENODATA, errno.EOPNOTSUPP)  # there is none, or the file system has none
# the tags of acl(5): its group, the most, accounts and groups
ACL_GROUP, ACL_MASK, ACL_NAMED = 0x04, 0x10, (0x02, 0x08)
LIMIT = 4_000_000  # bytes read of a file that is believed


class NotTrusted(NotPermitted):
    """Another account owns the file or may write it, so nothing in it is trusted and nothing of it is run."""


def distrust(
    found: os.stat_result,
    path: str | os.PathLike[str],
    *,
    accounts: Collection[int] = (),
    group: int | None = None,
) -> str:
    """Return why the file or folder ``path`` (``found`` is its stat) is not trusted, as a clause; "" when it is.

    ``accounts``: user ids that are trusted besides this account and root. ``group``: a group id whose members may write
    it, because the settings share it with them.
    """
    if found.st_uid not in (os.geteuid(), 0, *accounts):
        return f"{os.fspath(path)} belongs to {shown_user(found.st_uid)}"
    if found.st_mode & stat.S_IWOTH and not (stat.S_ISDIR(found.st_mode) and found.st_mode & stat.S_ISVTX):
        return f"everybody may write {os.fspath(path)} (mode {stat.S_IMODE(found.st_mode):04o})"
    if found.st_mode & stat.S_IWGRP and found.st_gid != group and not _harmless_group(found, path):
        return (
            f"the group {group_name(found.st_gid)} may write {os.fspath(path)} (mode {stat.S_IMODE(found.st_mode):04o})"
        )
    if found.st_mode & stat.S_IWGRP and found.st_gid == group and _others_listed(found, path, group):
        return f"an access list lets others write {os.fspath(path)}"
    return ""


def remedy(found: os.stat_result, path: str | os.PathLike[str]) -> str:
    """Return the command for its reader: take the write bits away from an own file, else check its owner."""
    import shlex

    word = shlex.quote(os.fspath(path))
    return f"chmod go-w {word}" if found.st_uid == os.geteuid() else f"ls -ld {word}"


def require(
    found: os.stat_result,
    path: str | os.PathLike[str],
    *,
    accounts: Collection[int] = (),
    group: int | None = None,
) -> None:
    """Raise NotTrusted, with a command to type, unless ``distrust`` finds nothing."""
    reason = distrust(found, path, accounts=accounts, group=group)
    if reason:
        raise NotTrusted(f"{reason}, so nothing in it is trusted", hint=remedy(found, path))


@anew
def read_trusted(
    path: str | os.PathLike[str],
    *,
    limit: int = LIMIT,
    accounts: Collection[int] = (),
    group: int | None = None,
    follow: bool = False,
) -> bytes:
    """Return the bytes of a regular file that is trusted. ``follow``: also of what links lead to, as ``open_judged`` does.

    Raises NotTrusted, and OSError as ``files.read_bounded`` does.
    """
    fd = open_judged(path) if follow else files.open_regular(path)
    try:
        require(os.fstat(fd), path, accounts=accounts, group=group)
        return files.read_open(fd, limit, path)
    finally:
        os.close(fd)


def distrust_route(path: str | os.PathLike[str], *, accounts: Collection[int] = (), group: int | None = None) -> str:
    """Return why a stranger could change or replace the file at ``path``, as a clause; "" when none can.

    Each folder and link that the name passes through is judged as ``distrust`` does, links followed, and so is their
    target. Raises OSError: ENOENT where it leads nowhere, ELOOP for a circle of links.
    """
    for here, found in _route(os.path.abspath(path)):  # noqa: PTH100 - links are followed one by one
        link = stat.S_ISLNK(found.st_mode)  # a link has no mode of its own: its owner counts
        judged = os.stat_result((stat.S_IFLNK, *found[1:])) if link else found
        if reason := distrust(judged, here, accounts=accounts, group=group):
            return reason
    return ""


def _route(path: str) -> Iterator[tuple[str, os.stat_result]]:
    at, links = "/", 0
    left = [part for part in reversed(path.split("/")) if part]
    yield at, os.lstat(at)
    while left:
        part = left.pop()
        if part in ("", ".", ".."):
            at = os.path.dirname(at) if part == ".." else at  # noqa: PTH120
            continue
        here = f"{at.rstrip('/')}/{part}"
        found = os.lstat(here)
        yield here, found
        if not stat.S_ISLNK(found.st_mode):
            at = here
            continue
        links += 1
        if links > LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(here)  # noqa: PTH115
        at = "/" if target.startswith("/") else at
        left += reversed(target.split("/"))


# The path that is really used: what deletes, copies or overwrites opens its folder once, by ``held``, and works in that one.


@contextmanager
def held(folder: str | os.PathLike[str], make: Make | None = None) -> Iterator[Path]:
    """Open ``folder``, and yield a path that leads to this very folder, whatever is put in its place meanwhile.

    Each link on the way is judged as ``strangers_link`` does. ``make``: makes a folder that is missing on the way, by its name
    in an open one. Raises NotTrusted, OSError, which names the folder as it was given.
    """
    try:
        at = _descend(from_the_root(folder), make)
    except OSError as error:  # which names one part of the way alone
        error.filename = os.fspath(folder)
        raise
    try:
        fd = os.open(".", os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC, dir_fd=at)
    finally:
        os.close(at)
    here = f"/proc/self/fd/{fd}"
    try:
        yield Path(here)
    except OSError as error:
        if isinstance(error.filename, str) and f"{error.filename}/".startswith(f"{here}/"):
            error.filename = f"{os.fspath(folder)}{error.filename.removeprefix(here)}"
        raise
    finally:
        os.close(fd)


@contextmanager
def held_to_write(folder: str | os.PathLike[str]) -> Iterator[Path]:
    """Do as ``held``, for a writer whose caller says why a disk could not be written: what is not trusted is an OSError (EPERM)
    too. Raises OSError."""
    try:
        with held(folder) as here:
            yield here
    except NotTrusted as error:
        raise PermissionError(errno.EPERM, error.message, os.fspath(folder)) from None


@anew
def open_judged(path: str | os.PathLike[str]) -> int:
    """Return a descriptor to read the regular file that ``path`` leads to, each link on the way judged as ``strangers_link``
    does: of what is named, and not of another file of this account's, which a stranger's link could lead to.

    Raises NotTrusted, and OSError as ``files.open_regular`` does, which names the file as it was given.
    """
    try:
        at = _descend(from_the_root(path))
        try:
            return files.reopened(f"/proc/self/fd/{at}", follow=True)
        finally:
            os.close(at)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def open_to_read(path: str | os.PathLike[str]) -> int:
    """Do as ``open_judged``, for a reader who says why a file could not be read: what is not trusted is an OSError (EPERM) too.
    Raises OSError."""
    try:
        return open_judged(path)
    except NotTrusted as error:
        raise PermissionError(errno.EPERM, error.message, os.fspath(path)) from None


def strangers_link(path: str | os.PathLike[str]) -> str:
    """Return the link on the way to ``path`` by which another account leads to what is not its own, as a clause; "" when there
    is none.

    Whoever makes a link to a thing of his own could have put that thing there. A path that is not there is judged as far as it
    goes. Raises OSError.
    """
    try:
        os.close(_descend(from_the_root(path)))
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except StrangersLink as error:
        return error.clause
    return ""


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Raise NotTrusted where ``strangers_link`` finds one. Raises OSError."""
    try:
        os.close(_descend(from_the_root(path)))
    except (FileNotFoundError, NotADirectoryError):
        return


def open_above(path: Path) -> str:
    """Return a folder above ``path`` in which accounts other than its owner can rename entries, as a clause; "" if
    there is none.
    """
    for folder in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):  # as typed, and as it resolves
        try:
            found = folder.stat()
        except OSError:
            continue
        if not found.st_mode & stat.S_ISVTX and (why := distrust(found, folder, accounts=(found.st_uid,))):
            return why
    return ""


def exchanged_by(path: Path) -> str:
    """Return a folder above ``path`` in which accounts other than this one and root can put another in the place of what lies
    there, by its mode or because it is theirs, as a clause; "" if there is none. Raises OSError."""
    for folder in dict.fromkeys((*path.absolute().parents, *path.resolve().parents)):
        owner = folder.stat().st_uid
        if owner not in (os.geteuid(), 0) and not may_be_root(owner):
            return f"{folder} belongs to {shown_user(owner)}"
    return open_above(path)


class StrangersLink(NotTrusted):
    """A link on the way by which another account leads to what is not its own; ``clause`` says which."""

    def __init__(self, clause: str, link: str) -> None:
        super().__init__(
            f"{clause}, so it is not followed",
            hint=f"look at it: ls -ld {to_type(link)}; or name the folder itself",
        )
        self.clause, self.link = clause, link

    def __reduce__(self) -> tuple[object, ...]:  # it comes out of a child that works
        return type(self), (self.clause, self.link)


def _descend(path: str, make: Make | None = None) -> int:
    """Do as ``links.descend``, whose error is a NotTrusted here. Raises NotTrusted, OSError."""
    try:
        return descend(path, make=make)
    except LinkOfStranger as error:
        raise StrangersLink(error.clause, error.link) from None


def _harmless_group(found: os.stat_result, path: str | os.PathLike[str]) -> bool:
    """Return whether the group is the owner's private one (its name, their primary group, no other member), with no
    access list.

    Many systems give each account such a group and the umask 002, so that all its files are writable for that group.
    """
    import grp
    import pwd

    try:
        owner, group = pwd.getpwuid(found.st_uid), grp.getgrgid(found.st_gid)
    except KeyError:
        return False
    if owner.pw_gid != group.gr_gid or owner.pw_name != group.gr_name or set(group.gr_mem) - {owner.pw_name}:
        return False
    try:
        return not _list_of(found, path)
    except OSError:
        return False


class AclEntry(NamedTuple):
    """An entry of an access list: the kind of who is meant, their rights (0 to 7), and the number of an account or a group."""

    tag: int
    bits: int
    who: int


def access_list(path: str | os.PathLike[str] | int, *, follow: bool = False) -> tuple[AclEntry, ...]:
    """Return the access list of what is at ``path``, or open; () where the mode alone counts. Raises OSError where that cannot
    be seen."""
    try:
        packed = os.getxattr(path, _ACL, follow_symlinks=follow or isinstance(path, int))
    except OSError as error:
        if error.errno in _NO_LIST:
            return ()
        raise
    body = packed[4:]  # behind its version
    return tuple(AclEntry(*one) for one in struct.iter_unpack("<HHI", body[: len(body) // 8 * 8]))


def _list_of(found: os.stat_result, path: str | os.PathLike[str]) -> tuple[AclEntry, ...]:
    """Return the access list of the file that ``found`` is the stat of. Raises OSError where that cannot be seen; ESTALE where
    another file lies at ``path`` by now."""
    link = os.O_NOFOLLOW if stat.S_ISLNK(found.st_mode) else 0
    fd = os.open(path, os.O_PATH | os.O_CLOEXEC | link)
    try:
        if not os.path.samestat(found, os.fstat(fd)):
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), os.fspath(path))
        return access_list(f"/proc/self/fd/{fd}", follow=True)
    finally:
        os.close(fd)


def _others_listed(found: os.stat_result, path: str | os.PathLike[str], group: int) -> bool:
    """Return whether its access list lets an account, or a group that is not ``group``, write it; also where that cannot be
    seen."""
    try:
        entries = _list_of(found, path)
    except OSError:
        return True
    mask = next((one.bits for one in entries if one.tag == ACL_MASK), 0o7)
    writers = [one for one in entries if one.tag in ACL_NAMED and one.bits & mask & 0o2]
    return any((one.tag, one.who) != (ACL_NAMED[1], group) for one in writers)


def drop_access_list(fd: int) -> None:
    """Take away the access list of an open file or folder of this account, and the one that a folder passes on. Its group then
    has what the list gave at most. Raises OSError."""
    try:
        there = os.listxattr(fd)
    except OSError:  # a file system without them
        return
    for name in {_ACL, _PASSED_ON}.intersection(there):
        os.removexattr(fd, name)


# This account's own folder on this host, for files that must not lie on a home directory that may hang: under $TMPDIR, or
# where that lies on a file server, which may hang too, under /tmp (``local_disks.py``).
#
# Its name is predictable, so a stranger may have made it first. Then another one is made under an unguessable name, and
# found again by its owner: a folder that belongs to this account was made by this account.


def own_folder() -> Path:
    """Return the folder, which may not exist yet. Another account's is returned only where no other can be made."""
    first = _first()
    return first if _free(first) else _others(first) or first


def own_folder_taken() -> str:
    """Return a sentence that says who has taken the usual folder and which one is used instead; "" where it is not taken."""
    first = _first()
    if _free(first):
        return ""
    try:
        found = first.lstat()
    except OSError:
        return ""
    if found.st_uid == os.geteuid():
        whose = "may be written by others" if stat.S_ISDIR(found.st_mode) else "is no folder"
    else:
        whose = f"belongs to {shown_user(found.st_uid)}"
    other = _others(first)
    return f"{first} {whose}: {f'{other} is used' if other else 'nothing is kept on this host'} instead"


def private_folder(directory: Path) -> Path | None:
    """Return ``directory``, made if need be; None if it, or the one above it, belongs to another account or others may
    write to it.
    """
    try:
        for part in (directory.parent, directory):
            part.mkdir(mode=0o700, exist_ok=True)
            if not is_private(part):
                return None
    except OSError:
        return None
    return directory


def is_private(folder: Path | str) -> bool:
    """Return whether it is a folder of this account that no other may write. False where that cannot be seen."""
    try:
        found = os.lstat(folder)
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _first() -> Path:
    from ftsupervise.host.local_disks import temporary_folder

    return Path(temporary_folder(distrust_route)) / f"ftsupervise-{os.geteuid()}"


def _free(first: Path) -> bool:
    return not os.path.lexists(first) or is_private(first)


_chosen: dict[Path, Path] = {}  # the replacements that this process has found: others may make thousands of such names


def _others(first: Path) -> Path | None:
    """Return the replacement folder, or a new one. Two processes may make one each: the first by name stays."""
    known = _chosen.get(first)
    if known is not None and is_private(known):
        return known
    try:
        found = _found(first) or _made(first)
    except OSError:
        return None
    if found is not None:
        _chosen[first] = found
    return found


def _found(first: Path) -> Path | None:
    name = re.compile(re.escape(first.name) + r"\.[0-9a-f]{16}")
    with os.scandir(first.parent) as there:
        names = sorted(
            entry.name for entry in there if name.fullmatch(entry.name) and entry.is_dir(follow_symlinks=False)
        )
    return next((first.with_name(one) for one in names if is_private(first.with_name(one))), None)


def _made(first: Path) -> Path | None:
    mine = first.with_name(f"{first.name}.{os.urandom(8).hex()}")
    mine.mkdir(mode=0o700)
    chosen = _found(first)
    if chosen != mine:
        mine.rmdir()
    return chosen


# ------------------------------------------------------------------------------------------

# The parts of a run directory that its group may write, and the accounts whose pages are trusted there.
#
# By itself the group may write ``switches/`` and nothing else, whatever the umask says. ``share:`` in the settings adds to
# that. The mode of a folder is the record: ``launch`` gives a shared folder group-write and set-group-ID (2775), all others
# 0755, all files 0644. Only a folder's owner can change its mode, so it shows whom its owner trusts. No settings are needed to
# read it. Standard library only: the supervisor and the guard use this.

FOLDER = 0o755
SHARED = 0o2775
OWN = 0o700
PAGE = 0o644
SCRIPT = 0o755


def stranger(
    folder: os.stat_result, page: os.stat_result, accounts: Collection[int] = (), *, members: bool = True
) -> str:
    """Return why the owner of ``page`` in ``folder`` is not trusted there, as a clause; "" when they are.

    Trusted are the folder's owner, this account, root, ``accounts``, and the group's members where the folder is shared
    with them; in a folder that everybody may write, no one is. ``members``: false where the mode of the folder says nothing of
    that, for a person or an umask gave it, and not a launch.
    """
    if folder.st_mode & stat.S_IWOTH and not folder.st_mode & stat.S_ISVTX:
        return "it lies in a folder that everybody may write"
    if page.st_uid in (0, os.geteuid(), folder.st_uid, *accounts):
        return ""
    if not (members and is_shared(folder)):
        return f"it belongs to {shown_user(page.st_uid)}, with whom the folder is not shared"
    if not in_group(page.st_uid, folder.st_gid):
        return f"it belongs to {shown_user(page.st_uid)}, who is not in the group {group_name(folder.st_gid)}"
    return ""


def distrust_shared(folder: os.stat_result, path: str | os.PathLike[str]) -> str:
    """Return why a folder that several accounts fill is no place to read or write for this one, as a clause; "" when it is: its
    owner is this account or root, or shares it with a group that both are in."""
    if folder.st_uid in (0, os.geteuid()):
        return ""
    both = folder.st_gid in (os.getegid(), *os.getgroups()) and in_group(folder.st_uid, folder.st_gid)
    if is_shared(folder) and both:
        return ""
    return f"{os.fspath(path)} belongs to {shown_user(folder.st_uid)}, who shares it with no group of yours"


def may_be_changed(folder: os.stat_result, page: os.stat_result, path: str | os.PathLike[str]) -> str:
    """Return a clause that says who else may write ``page`` than the accounts trusted in ``folder``; "" when no one may."""
    return distrust(page, path, accounts=(page.st_uid,), group=folder.st_gid if is_shared(folder) else None)


def distrust_in(folder: os.stat_result, path: str | os.PathLike[str]) -> Callable[[os.stat_result], str]:
    """Return a check for a reader of the page ``path`` in ``folder``: it says why the opened page is not trusted, by its owner
    and by who may write it; "" when it is."""
    return lambda page: stranger(folder, page) or may_be_changed(folder, page, path)


def is_shared(folder: os.stat_result) -> bool:
    """Return whether the group may write in it."""
    return bool(folder.st_mode & stat.S_IWGRP)


# ----------------------------------------------------------------------------------------------------------------- making


def mode_inside(parent: Path | int) -> int:
    """Return the mode of a folder that is made in ``parent`` (a path, or open), one of ours: shared where that is shared, and
    never wider."""
    try:
        found = os.stat(parent).st_mode  # noqa: PTH116
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
    """Return what the folders above ``path`` leave of 0777, those of the path as it was given and those to which links on it
    lead: nothing for the group, or for others, where one of them keeps these out. Raises OSError."""
    left = Reach(0o777)
    for folder in dict.fromkeys((*path.absolute().parents, *Path(os.path.realpath(path.parent), path.name).parents)):
        found = reach(folder, follow=True)
        through = 0o700 | sum(7 * one for one in (0o001, 0o010) if found.mode & one)
        left = left.within(Reach(through, found.groups if through in (0o770, 0o707) else frozenset()))
    return left


def page_inside(parent: Path) -> int:
    """Return the mode of a file that is made in ``parent``: never wider than that. Raises OSError."""
    return no_wider(PAGE, parent.stat().st_mode)


def make_folder(folder: Path, mode: int | None = None, *, parents: bool = False) -> None:
    """Make ``folder`` with exactly that mode whatever the umask; a folder that exists stays as it is.

    Without ``mode`` it is shared as its parent is. ``parents``: make missing folders above it too. Others may make it, or
    delete it, at the same moment. Raises OSError, also when something else lies in its place.
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
        with suppress(FileNotFoundError):  # it is gone again
            if not stat.S_ISDIR(folder.lstat().st_mode) and not folder.is_dir():
                raise


def make_like(folder: Path, source: Reach) -> None:
    """Make ``folder``, and those that are missing above it, no wider than ``source``; one that is there stays as it is.

    Raises OSError, also when something else lies in its place.
    """
    if folder.is_dir():
        return
    try:
        with _new_folder(folder, OWN) as fd:
            if fd is not None:
                settle(fd, source)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        make_like(folder.parent, source)
        make_like(folder, source)
    except FileExistsError:
        if not folder.is_dir():
            raise


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
    with files.open_folder(folder) as fd:
        settle(fd, source)


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


@contextmanager
def _new_folder(folder: Path, mode: int) -> Iterator[int | None]:
    """Make it where no stranger's link leads, and yield it, open; None where another process has renamed it already. Raises
    OSError, which names the folder."""
    with _above(folder) as at, _new_in(at, folder.name, mode) as fd:
        yield fd


@contextmanager
def _new_in(at: int, name: str, mode: int) -> Iterator[int | None]:
    os.mkdir(name, mode, dir_fd=at)
    with ExitStack() as until:
        fd = None
        with suppress(FileNotFoundError, NotADirectoryError):
            fd = until.enter_context(files.open_folder(name, dir_fd=at))
        yield fd


def remove_entry(path: Path) -> bool:
    """Remove a file or a link where no stranger's link leads; False where there is none. Raises OSError, which names it."""
    try:
        with _above(path) as at:
            os.unlink(path.name, dir_fd=at)
    except FileNotFoundError:
        return False
    return True


@contextmanager
def _above(path: Path) -> Iterator[int]:
    """Open the folder in which it lies."""
    try:
        at = descend(from_the_root(path.parent))
        try:
            yield at
        finally:
            os.close(at)
    except OSError as error:
        error.filename = os.fspath(path)
        raise


def claim_folder(folder: Path, mode: int | None = None) -> None:
    """Make ``folder``, for one caller only: FileExistsError for all others. Without ``mode`` it is shared as its parent is."""
    with _above(folder) as at:
        wanted = mode_inside(at) if mode is None else mode
        with _new_in(at, folder.name, wanted & FOLDER) as fd:  # never more than that, not for a moment
            try:
                if fd is not None:
                    _set_mode(fd, wanted)
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
        with _new_folder(folder, FOLDER) as fd:
            if fd is not None:
                _set_mode(fd, 0o750 | os.fstat(fd).st_mode & 0o005)
    except FileExistsError:
        if not folder.is_dir():
            raise
        return False
    return True


def set_mode(folder: Path, mode: int) -> None:
    """Give a folder of ours that mode. It stays set-group-ID where the folder above made it so. What its group may write has no
    access list, by which others would write it too. Raises OSError."""
    with files.open_folder(folder) as fd:
        _set_mode(fd, mode)


def _set_mode(fd: int, mode: int) -> None:
    now = stat.S_IMODE(os.fstat(fd).st_mode)
    wanted = mode | now & stat.S_ISGID
    if mode & stat.S_IWGRP and access_list(fd):
        drop_access_list(fd)
    if now != wanted:
        os.fchmod(fd, wanted)


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
