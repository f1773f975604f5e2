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
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from ftsupervise.errors import NotPermitted
from ftsupervise.host import files

# Accounts and groups by their names; never by LOGNAME or USER, which anybody can set.
#
# The modules ``pwd`` and ``grp`` are loaded when they are needed, not by a start.


def user_name(uid: int | None = None) -> str:
    """Return the name of an account, of this one without ``uid``; where it has none its number, as Slurm prints it."""
    import pwd

    uid = os.geteuid() if uid is None else uid
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:  # an account of a container, or one that was removed
        return str(uid)


def shown_user(uid: int | None = None) -> str:
    """Return ``user_name`` for a sentence: "uid 1234" where the account has no name."""
    name = user_name(uid)
    return f"uid {name}" if name.isdigit() else name


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
    """Return whether the account ``uid`` is in the group ``gid``. False for an account without a name here."""
    import pwd

    try:
        account = pwd.getpwuid(uid)
        return gid in os.getgrouplist(account.pw_name, account.pw_gid)
    except (KeyError, OSError):
        return False


_ACL, _PASSED_ON = "system.posix_acl_access", "system.posix_acl_default"
_NO_LIST = (errno.ENODATA, errno.EOPNOTSUPP)  # there is none, or the file system has none
# the tags of acl(5): its group, the most, accounts and groups
ACL_GROUP, ACL_MASK, ACL_NAMED = 0x04, 0x10, (0x02, 0x08)
_LINKS = 40  # as many as the kernel follows
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


def read_trusted(
    path: str | os.PathLike[str],
    *,
    limit: int = LIMIT,
    accounts: Collection[int] = (),
    group: int | None = None,
    follow: bool = False,
) -> bytes:
    """Return the bytes of a regular file that is trusted. Raises NotTrusted, and OSError as ``files.read_bounded`` does."""
    fd = files.open_regular(path, follow=follow)
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
        if links > _LINKS:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), path)
        target = os.readlink(here)  # noqa: PTH115
        at = "/" if target.startswith("/") else at
        left += reversed(target.split("/"))


Make = Callable[[str, int], object]  # of a folder: its name, and the open one that it is made in

# The path that is really used: what deletes, copies or overwrites opens its folder once, by ``held``, and works in that one.


@contextmanager
def held(folder: str | os.PathLike[str], make: Make | None = None) -> Iterator[Path]:
    """Open ``folder``, and yield a path that leads to this very folder, whatever is put in its place meanwhile.

    Each link on the way is judged as ``strangers_link`` does. ``make``: makes a folder that is missing on the way, by its name
    in an open one. Raises NotTrusted, OSError, which names the folder as it was given.
    """
    try:
        at = _descend(os.path.abspath(folder), make=make)  # noqa: PTH100 - links are followed one by one
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


def strangers_link(path: str | os.PathLike[str]) -> str:
    """Return the link on the way to ``path`` by which another account leads to what is not its own, as a clause; "" when there
    is none.

    Whoever makes a link to a thing of his own could have put that thing there. A path that is not there is judged as far as it
    goes. Raises OSError.
    """
    try:
        os.close(_descend(os.path.abspath(path)))  # noqa: PTH100 - links are followed one by one
    except (FileNotFoundError, NotADirectoryError):
        return ""
    except _StrangersLink as error:
        return error.clause
    return ""


def refuse_link(path: str | os.PathLike[str]) -> None:
    """Raise NotTrusted where ``strangers_link`` finds one. Raises OSError."""
    try:
        os.close(_descend(os.path.abspath(path)))  # noqa: PTH100 - links are followed one by one
    except (FileNotFoundError, NotADirectoryError):
        return


class _StrangersLink(NotTrusted):
    def __init__(self, clause: str, link: str) -> None:
        super().__init__(
            f"{clause}, so it is not followed", hint=f"look at it: ls -ld {link}; or name the folder itself"
        )
        self.clause, self.link = clause, link

    def __reduce__(self) -> tuple[object, ...]:  # it comes out of a child that works
        return type(self), (self.clause, self.link)


def _descend(path: str, at: int | None = None, above: str = "", left: int = _LINKS, *, make: Make | None = None) -> int:
    """Open ``path`` (O_PATH), component by component, each below the one that is open. Raises NotTrusted, OSError."""
    only = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    above = "" if path.startswith("/") else above
    here = os.open("/" if at is None or path.startswith("/") else ".", only | os.O_DIRECTORY, dir_fd=at)
    try:
        for part in path.split("/"):
            if part in ("", "."):
                continue
            try:
                inner = os.open(part, only | os.O_DIRECTORY, dir_fd=here)  # mounts what is mounted on demand
            except NotADirectoryError:
                inner = os.open(part, only, dir_fd=here)
            except FileNotFoundError:
                if make is None:
                    raise
                make(part, here)
                inner = os.open(part, only | os.O_DIRECTORY, dir_fd=here)
            if stat.S_ISLNK(os.fstat(inner).st_mode):
                inner = _followed(inner, here, f"{above}/{part}", left)
            os.close(here)
            here, above = inner, f"{above}/{part}"
    except BaseException:
        os.close(here)
        raise
    return here


def _followed(link: int, at: int, name: str, left: int) -> int:
    """Return what the open ``link`` in the folder ``at`` leads to, open; ``link`` is closed."""
    try:
        if not left:
            raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
        target = _descend(os.readlink("", dir_fd=link), at, os.path.dirname(name), left - 1)  # noqa: PTH120
        maker, owner = os.fstat(link).st_uid, os.fstat(target).st_uid
        if maker not in (os.geteuid(), 0, owner):
            os.close(target)
            clause = f"{name} is a link of {shown_user(maker)} to what belongs to {shown_user(owner)}"
            raise _StrangersLink(clause, name)
        return target
    finally:
        os.close(link)


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


def is_private(folder: Path) -> bool:
    """Return whether it is a folder of this account that no other may write. False where that cannot be seen."""
    try:
        found = folder.lstat()
    except OSError:
        return False
    return stat.S_ISDIR(found.st_mode) and found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _first() -> Path:
    from ftsupervise.host.local_disks import temporary_folder

    return Path(temporary_folder()) / f"ftsupervise-{os.geteuid()}"


def _free(first: Path) -> bool:
    return not os.path.lexists(first) or is_private(first)


def _others(first: Path) -> Path | None:
    """Return the replacement folder, or a new one. Two processes may make one each: the first by name stays."""
    try:
        return _found(first) or _made(first)
    except OSError:
        return None


def _found(first: Path) -> Path | None:
    name = re.compile(re.escape(first.name) + r"\.[0-9a-f]{16}")
    with os.scandir(first.parent) as there:
        names = sorted(entry.name for entry in there if name.fullmatch(entry.name))
    return next((first.with_name(one) for one in names if is_private(first.with_name(one))), None)


def _made(first: Path) -> Path | None:
    mine = first.with_name(f"{first.name}.{os.urandom(8).hex()}")
    mine.mkdir(mode=0o700)
    chosen = _found(first)
    if chosen != mine:
        mine.rmdir()
    return chosen
