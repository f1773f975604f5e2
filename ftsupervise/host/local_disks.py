"""Finds a folder for what must be written when a file server hangs: on a disk, or in the memory, of this machine.

A person's TMPDIR may lie on a file server, and a process that looks there while it hangs cannot be woken. So the mount table
is asked first, which reads no file system, and of a path only those parts are read that lie on this machine. The module
``tempfile`` would write into TMPDIR to try it.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

_HERE = frozenset(
    {"ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "jfs", "bcachefs", "tmpfs", "ramfs", "devtmpfs", "overlay"}
)
_USUAL = ("/tmp", "/var/tmp", "/dev/shm")
_LINKS = 40  # as many as the kernel follows


def temporary_folder(distrust: Callable[[str], str], env: Mapping[str, str] = os.environ) -> str:
    """Return $TMPDIR where it lies on this machine and may be written, else the first of the usual folders that does.

    ``distrust`` says why a stranger could exchange what is made in a folder ("": none can): one of which it does is left out.
    """
    kinds = _kinds()
    for name in (env.get("TMPDIR"), env.get("TEMP"), env.get("TMP"), *_USUAL):
        if name and name.startswith("/") and lies_here(name, kinds) and _is_usable(name, distrust):
            return os.path.normpath(name)
    return _USUAL[0]


def _is_usable(folder: str, distrust: Callable[[str], str]) -> bool:
    try:
        return os.access(folder, os.W_OK | os.X_OK) and not distrust(folder)
    except OSError:
        return False


def lies_here(path: str, kinds: Mapping[str, str] | None = None) -> bool:
    """Return whether the absolute ``path``, links followed, is served by this machine. It reads nothing that is not.

    ``kinds``: mount point -> kind of file system. What lies with ``/`` counts as here: if that hangs, so does everything.
    """
    kinds = _kinds() if kinds is None else kinds
    at, links = "/", 0
    left = [part for part in reversed(path.split("/")) if part]
    while left:
        part = left.pop()
        if part in (".", ".."):
            at = os.path.dirname(at) if part == ".." else at  # noqa: PTH120
            continue
        here = f"{at.rstrip('/')}/{part}"
        if not _served_here(here, kinds):
            return False
        try:
            target = os.readlink(here)  # noqa: PTH115
        except OSError:  # no link, or nothing of that name
            at = here
            continue
        links += 1
        if links > _LINKS:
            return False
        at = "/" if target.startswith("/") else at
        left += reversed(target.split("/"))
    return True


def is_local(kind: str) -> bool:
    """Return whether a file system of this kind, as the mount table calls it, is this machine's alone."""
    return kind in _HERE


def _served_here(path: str, kinds: Mapping[str, str]) -> bool:
    while path not in kinds and path != "/":
        path = os.path.dirname(path)  # noqa: PTH120
    return path == "/" or kinds[path] in _HERE


def _kinds() -> dict[str, str]:
    """Return mount point -> kind, as the mount table has them; a later mount hides an earlier one on the same point.

    Source: proc(5), /proc/PID/mountinfo: field 5 is the mount point; behind a "-" stands the kind.
    """
    kinds: dict[str, str] = {}
    try:
        with open("/proc/self/mountinfo", "rb") as file:  # noqa: PTH123
            table = file.read()
    except OSError:
        return kinds
    for line in table.splitlines():
        before, _, after = line.partition(b" - ")
        fields, kind = before.split(b" "), after.partition(b" ")[0]
        if len(fields) > 4:
            point = fields[4]
            for code in (b" ", b"\t", b"\n", b"\\"):
                point = point.replace(b"\\%03o" % code[0], code)
            kinds[os.fsdecode(point)] = kind.decode()
    return kinds
