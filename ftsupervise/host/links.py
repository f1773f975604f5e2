"""The links on the way to a file: one by which another account leads to what is not its own is not followed.

It stands alone because it lies below ``files.py``, by which every file is opened: where the file that was opened does not lie
where its name says, there was a link, and the way is judged. Standard library only: the guard uses this.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from functools import cache, wraps
from typing import Any, TypeVar

LINKS = 40  # as many as the kernel follows
Make = Callable[[str, int], object]  # of a folder: its name, and the open one that it is made in
_HELD = "/proc/self/fd/"  # what ``ownership.held`` names folders by

_TIMES = 32  # that a file is looked for: under a writer of a thousand a second two looks of five find the former one
Look = TypeVar("Look", bound=Callable[..., Any])

_judged: set[tuple[str, str]] = set()  # the folders of files as they were typed, and those that they lead to


def user_name(uid: int | None = None) -> str:
    """Return the name of an account, of this one without ``uid``; where it has none its number, as Slurm prints it."""
    uid = os.geteuid() if uid is None else uid
    try:
        return _name_of(uid)
    except KeyError:  # an account of a container, or one that was removed
        return str(uid)


@cache
def _name_of(uid: int) -> str:
    """Return the name of an account, asked for once: a tick needs it several times for each run, and a server may have to be
    asked. Raises KeyError, each time anew."""
    import pwd

    return pwd.getpwuid(uid).pw_name


def shown_user(uid: int | None = None) -> str:
    """Return ``user_name`` for a sentence: "uid 1234" where the account has no name."""
    name = user_name(uid)
    return f"uid {name}" if name.isdigit() else name


class LinkOfStranger(PermissionError):
    """``clause``: which link, of whom, to what."""

    def __init__(self, link: str, maker: int, owner: int) -> None:
        self.link = link
        self.clause = f"{link} is a link of {shown_user(maker)} to what belongs to {shown_user(owner)}"
        self._made = (link, maker, owner)
        super().__init__(errno.EPERM, f"{self.clause}, so it is not followed", link)

    def __reduce__(self) -> tuple[object, ...]:  # it comes out of a child that works
        return type(self), self._made


class Stale(OSError):
    """ESTALE of each look for the same file: its server has lost it. Who asked for the look does not look again in turn."""


def anew(look: Look) -> Look:
    """Have ``look`` look for its file again, by the name, where that was replaced while it was opened, judged or read: a file
    server says ESTALE of the former one, which another machine has removed. Raises Stale where that does not end."""

    @wraps(look)
    def looked(*args: Any, **named: Any) -> Any:
        left = _TIMES
        while True:
            try:
                return look(*args, **named)
            except OSError as error:
                left -= 1
                if error.errno != errno.ESTALE or isinstance(error, Stale):
                    raise
                if not left:
                    raise Stale(error.errno, error.strerror, error.filename) from None

    return looked  # type: ignore[return-value]


def judge(fd: int, path: str | os.PathLike[str]) -> None:
    """Raise LinkOfStranger where ``fd`` was opened by the name ``path``, the last part of which is no link, through such a one.

    What is not under a link costs two looks at the kernel's name of the file. Raises OSError.
    """
    typed, real = from_the_root(path), os.readlink(f"{_HELD}{fd}")  # noqa: PTH115
    folder, name = os.path.split(typed)
    _judge(fd, folder, os.path.dirname(real), name)  # noqa: PTH120


def judge_folder(fd: int, path: str | os.PathLike[str]) -> None:
    """Do as ``judge`` for a folder that was opened by the name ``path``, which may be a link itself."""
    _judge(fd, from_the_root(path), os.readlink(f"{_HELD}{fd}"), ".")  # noqa: PTH115


def _judge(fd: int, typed: str, real: str, name: str) -> None:
    """Judge the way to the folder ``typed``, where the kernel says that it is another one, ``real``. ``fd``: ``name`` in it."""
    if real == typed or (typed, real) in _judged:
        return
    is_held = typed.startswith(_HELD)
    if is_held:
        number, _, below = typed.removeprefix(_HELD).partition("/")
        if real == f"{os.readlink(_HELD + number)}/{below}".rstrip("/"):  # noqa: PTH115
            return
    folder = descend(typed)
    try:
        there = os.readlink(f"{_HELD}{folder}")  # noqa: PTH115
        found = os.stat(name, dir_fd=folder, follow_symlinks=False)
        opened = os.fstat(fd)
        same = (found.st_dev, found.st_ino) == (opened.st_dev, opened.st_ino)
        if not same and (
            opened.st_nlink or there != real
        ):  # a page that was written anew meanwhile has no name any more
            raise OSError(errno.ESTALE, "exchanged while it was opened", f"{typed}/{name}")
    finally:
        os.close(folder)
    if same and not is_held:
        _judged.add((typed, real))


def from_the_root(path: str | os.PathLike[str]) -> str:
    """Return ``path`` as the kernel goes it: what lies above a link is not what its name says, so ".." stays where it is."""
    path = os.fspath(path)
    if not path.startswith("/"):  # else nothing is asked of a current directory, which may have been removed
        path = os.path.join(os.getcwd(), path)  # noqa: PTH109, PTH118
    return path.rstrip("/") or "/" if ".." in path.split("/") else os.path.normpath(path)


def descend(
    path: str, at: int | None = None, above: str = "", left: Iterator[int] | None = None, *, make: Make | None = None
) -> int:
    """Open ``path`` (O_PATH), component by component, each below the one that is open. ``at``: an open folder, in which a
    relative one begins. ``left``: the links that may still be followed, all in all: each of a chain may name the next one many
    times. Raises OSError, LinkOfStranger."""
    left = iter(range(LINKS)) if left is None else left
    only = os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC
    number, _, below = path.removeprefix(_HELD).partition("/")
    if path.startswith(_HELD) and number.isdecimal():  # a folder that is held open already
        path, at = below, int(number)
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
            link, above = -1, f"{above}/{part}"
            try:  # a server that is gone may refuse each of these, again and again, for days
                if stat.S_ISLNK(os.fstat(inner).st_mode):
                    link, inner = inner, _followed(inner, here, above, left)
            except BaseException:
                os.close(inner)
                raise
            if link >= 0:
                os.close(link)
            os.close(here)
            here = inner
    except BaseException:
        os.close(here)
        raise
    return here


def _followed(link: int, at: int, name: str, left: Iterator[int]) -> int:
    """Return what the open ``link`` in the folder ``at`` leads to, open."""
    if next(left, None) is None:
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), name)
    target = descend(os.readlink("", dir_fd=link), at, os.path.dirname(name), left)  # noqa: PTH120
    try:
        maker, owner = os.fstat(link).st_uid, os.fstat(target).st_uid
        if maker not in (os.geteuid(), 0, owner) and not may_be_root(maker):
            raise LinkOfStranger(name, maker, owner)
    except BaseException:
        os.close(target)
        raise
    return target


def may_be_root(uid: int) -> bool:
    """Return whether this is the number by which a container shows the accounts that it does not have, the machine's root among
    them: without rights of its own (Apptainer, rootless Podman) it has this account alone."""
    try:
        with open("/proc/self/uid_map", encoding="ascii") as file:  # noqa: PTH123 - half the price
            whole = file.read().split()[:3] == ["0", "0", "4294967295"]
        with open("/proc/sys/kernel/overflowuid", encoding="ascii") as file:  # noqa: PTH123
            return not whole and uid == int(file.read())
    except (OSError, ValueError):
        return False
