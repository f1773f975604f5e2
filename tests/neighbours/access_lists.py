"""Access lists (POSIX ACLs) as ``setfacl`` writes them, which need not be installed here."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import pytest

NOBODY = 0xFFFFFFFF  # the number in an entry that names no one
OWNER, ACCOUNT, ITS_GROUP, GROUP, MASK, OTHERS = 0x01, 0x02, 0x04, 0x08, 0x10, 0x20


def give_list(
    path: Path, *named: tuple[int, int, int], group: int = 0, others: int = 0, passed_on: bool = False
) -> None:
    """Give ``path`` a list with ``named`` entries (kind, rights, number). ``passed_on``: to all that is made in it."""
    entries = [(OWNER, 7, NOBODY), *named, (ITS_GROUP, group, NOBODY), (MASK, 7, NOBODY), (OTHERS, others, NOBODY)]
    packed = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *one) for one in sorted(entries))
    try:
        os.setxattr(path, f"system.posix_acl_{'default' if passed_on else 'access'}", packed)
    except OSError as error:
        pytest.skip(f"this file system has no access lists: {error}")
