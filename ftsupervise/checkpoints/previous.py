"""Keeps what a program is about to write over: of a checkpoint that is one file without a step in its name (``last.ckpt``,
``ckpt.pt``) a copy stays under ``previous-NAME``, with its own manifest, so that one torn write is not the end.

A program that opens such a file and writes it anew changes every hard link of it too. So the copy is a reflink, or has bytes of
its own where the file system has no reflinks.
"""

from __future__ import annotations

import errno
import fcntl
import os
from contextlib import suppress
from pathlib import Path

from ftsupervise.checkpoints.digest import hasher
from ftsupervise.checkpoints.find import PREVIOUS
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.checkpoints.manifest import Manifest, write_manifest
from ftsupervise.host import files
from ftsupervise.host.ownership import reach, settle

_FICLONE = 0x40049409
_PIECE = 1 << 20  # bytes
_ROOM = 2  # times its size must be free: a full disk costs the next checkpoint


def is_written_over(checkpoint: Path) -> bool:
    """Return whether its program writes the next one under the same name, by that name."""
    return step_of(checkpoint.name) is None and not checkpoint.name.startswith(PREVIOUS) and checkpoint.is_file()


def keep(checkpoint: Path, manifest: Manifest) -> Path | None:
    """Keep a copy of a checkpoint of one file that was committed just now as ``manifest`` says; return its path.

    None: the file has changed meanwhile, or there is no room for twice its size. Raises OSError.
    """
    target = checkpoint.with_name(PREVIOUS + checkpoint.name)
    (entry,) = manifest.files
    source = files.open_regular(checkpoint)
    try:
        before = os.fstat(source)
        fd, temporary = files.create_temporary(checkpoint.parent, target.name, 0o600)
        try:
            if not _copied(source, fd, before, entry.digest, manifest.algorithm):
                return None
            settle(fd, reach(source))
            os.utime(fd, ns=(before.st_atime_ns, before.st_mtime_ns))
            os.fsync(fd)
            files.rename(temporary, target)
        finally:
            os.close(fd)
            with suppress(FileNotFoundError):
                os.unlink(temporary)
    finally:
        os.close(source)
    write_manifest(target, manifest._replace(files=(entry._replace(path=target.name),)))
    return target


def _copied(source: int, target: int, before: os.stat_result, digest: str, algorithm: str) -> bool:
    """Return whether ``target`` has the bytes of ``source``, and these are what was committed."""
    try:
        fcntl.ioctl(target, _FICLONE, source)
        reads = target
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS):
            raise
        room = os.fstatvfs(target)
        if room.f_bavail * room.f_frsize < _ROOM * before.st_size:
            return False
        reads = source
    summed, offset = hasher(algorithm), 0
    while piece := os.pread(reads, _PIECE, offset):
        summed.update(piece)
        if reads is source:
            os.pwrite(target, piece, offset)
        offset += len(piece)
    return summed.hexdigest() == digest
