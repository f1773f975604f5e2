"""A folder of files as a snapshot, for loops that have no state dicts: written into the node's memory, copied into a slot.

The files are written into a folder beside the slots, and copied into the slot when the block ends: two copies, where a state of
tensors takes one. Their names and sizes are the description; nothing of them is interpreted.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any

from ftsupervise.checkpoints.memory_state import Described
from ftsupervise.guard.snapshot_memory import SnapshotMemory

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.ENOMEM)


class FolderState:
    """The files below ``folder``, to be copied into a slot."""

    def __init__(self, folder: Path, code: str = "") -> None:
        self._folder, self._code = folder, code

    def describe(self) -> Described:
        """Describe the files. Raises OSError."""
        found = sorted(path for path in self._folder.rglob("*") if path.is_file() and not path.is_symlink())
        rows = [(path.relative_to(self._folder).as_posix(), path.stat().st_size) for path in found]
        total = sum(size for _, size in rows)
        text = json.dumps({"files": rows, "code": self._code}).encode()
        return Described(text, b"", (), tuple(found), total)

    def places(self, described: Described, buffer: memoryview) -> memoryview:
        return buffer

    def copy(self, described: Described, places: Any) -> None:
        at = 0
        for path, (name, size) in zip(described.values, json.loads(described.description)["files"], strict=True):
            fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                end = at + size
                while at < end:
                    done = os.readv(fd, [places[at:end]])
                    if not done:
                        raise OSError(errno.EIO, f"{name} has become shorter")
                    at += done
            finally:
                os.close(fd)


@contextmanager
def staging(memory: SnapshotMemory, size: int, say: Callable[[str], None]) -> Iterator[Path | None]:
    """Give an empty folder in memory with room for ``size`` bytes; None where there is none. It is gone at the end.

    The room is checked before, because a job whose memory is full is killed while it writes.
    """
    folder = memory.staging_folder
    try:
        shutil.rmtree(folder, ignore_errors=True)
        memory.may_take(size)
        folder.mkdir(mode=0o700)
    except OSError as error:
        say(f"no snapshots for now: {error}")
        yield None
        return
    try:
        yield folder
    except OSError as error:
        if error.errno not in _FULL:
            raise
        say(f"no snapshot: {error}")
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def why_not(description: bytes) -> str:
    """Return why a snapshot is not one of a folder, as a clause; "" when it is. Raises ValueError for a damaged one."""
    _rows(description)
    return ""


def unpack(description: bytes, buffer: memoryview, into: Path) -> None:
    """Write the files below ``into``. Raises OSError, and ValueError for names that lead elsewhere."""
    at = 0
    for name, size in _rows(description):
        target = into / name
        target.parent.mkdir(parents=True, exist_ok=True)
        with target.open("wb") as file:
            file.write(buffer[at : at + size])
        at += size


def _rows(description: bytes) -> list[tuple[str, int]]:
    try:
        rows = [(str(name), int(size)) for name, size in json.loads(description)["files"]]
    except (KeyError, TypeError, ValueError):
        raise ValueError("the loop keeps a folder, and the snapshot holds something else") from None
    for name, size in rows:
        parts = PurePosixPath(name).parts
        if not parts or name.startswith("/") or ".." in parts or size < 0:
            raise ValueError(f"{name!r} is not the name of a file in a snapshot")
    return rows
