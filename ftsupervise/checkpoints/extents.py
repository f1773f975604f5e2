"""The blocks that files have in common by reflinks, as the file system knows them: such a block is free with its last file.

FIEMAP is asked, which reads no data. A file system without it has no reflinks either. Source: filesystems/fiemap.rst of the
kernel's documentation.
"""

from __future__ import annotations

import fcntl
import os
import struct
from collections.abc import Iterable

from ftsupervise.host import files

_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQLLLL")  # start, length, flags, mapped, count, reserved
_EXTENT = struct.Struct("=QQQQQLLLL")  # logical, physical, length, two and flags and three reserved ones
_AT_ONCE = 256
_LAST, _SHARED = 0x1, 0x2000

Range = tuple[int, int]  # of blocks: the first byte on the device, and the first one behind


def shared_ranges(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> list[Range]:
    """Return the blocks of a regular file that another file has too; [] where the file system does not say.

    Raises OSError where the file cannot be opened.
    """
    fd = files.open_regular(path, dir_fd=dir_fd)
    try:
        found: list[Range] = []
        start, last = 0, False
        while not last:
            asked = bytearray(_HEAD.size + _AT_ONCE * _EXTENT.size)
            _HEAD.pack_into(asked, 0, start, 2**64 - 1 - start, 0, 0, _AT_ONCE, 0)
            try:
                fcntl.ioctl(fd, _FIEMAP, asked)
            except OSError:
                return []
            mapped = _HEAD.unpack_from(asked)[3]
            for number in range(mapped):
                logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(
                    asked, _HEAD.size + number * _EXTENT.size
                )
                start, last = logical + length, bool(flags & _LAST)
                if flags & _SHARED:
                    found.append((physical, physical + length))
            last = last or not mapped
        return found
    finally:
        os.close(fd)


def length_without(ranges: Iterable[Range], others: Iterable[Range]) -> int:
    """Return the bytes in ``ranges``, each counted once, that are not in ``others``."""
    edges = [(at, side, 0) for one in ranges for at, side in zip(one, (1, -1), strict=True)]
    edges += [(at, side, 1) for one in others for at, side in zip(one, (1, -1), strict=True)]
    length, before, inside = 0, 0, [0, 0]
    for at, side, kind in sorted(edges):
        if inside[0] and not inside[1]:
            length += at - before
        before, inside[kind] = at, inside[kind] + side
    return length
