"""A file system that stops answering: everything works until its control file says what hangs, then that never returns.

    python hung_fuse.py MOUNTPOINT CONTROL [BACKING]

CONTROL holds the operations that never answer, e.g. ``statfs`` or ``statfs getattr``, each for everything or for a place and
what lies below it (``read:/run/beats``); ``all`` means each of them; empty: all is well. ``ESTALE!all``: that error is the
answer. With BACKING it shows that directory, and can be written to.
"""

from __future__ import annotations

import errno
import os
import stat
import sys
import time
from pathlib import Path
from typing import Any

import mfusepy as fuse


class Hung(fuse.Operations):
    use_ns = False

    def __init__(self, control: Path) -> None:
        self.control = control
        self.files: dict[str, bytes] = {"/log.txt": b"step 1\nstep 2\n"}
        self.born = time.time()

    def _maybe_hang(self, operation: str, path: str = "/") -> None:
        while (answer := self._found(operation, path)) == "":
            time.sleep(0.05)
        if answer is not None:
            raise fuse.FuseOSError(getattr(errno, answer))

    def _found(self, operation: str, path: str) -> str | None:
        """Return the error that is the answer, "" for none ever; None where all is well."""
        for word in self.control.read_text().split():
            answer, _, asked = word.rpartition("!")
            wanted, _, place = asked.partition(":")
            inside = not place or path == place or path.startswith(place.rstrip("/") + "/")
            if wanted in (operation, "all") and inside:
                return answer
        return None

    def statfs(self, path: str) -> dict[str, int]:
        self._maybe_hang("statfs", path)
        return {
            "f_bsize": 4096,
            "f_frsize": 4096,
            "f_blocks": 1000,
            "f_bfree": 500,
            "f_bavail": 400,
            "f_files": 100,
            "f_ffree": 50,
            "f_favail": 50,
            "f_namemax": 255,
        }

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        self._maybe_hang("getattr", path)
        times = {"st_ctime": self.born, "st_mtime": self.born, "st_atime": self.born}
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2, **times}
        if path in self.files:
            return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": len(self.files[path]), **times}
        raise fuse.FuseOSError(errno.ENOENT)

    def readdir(self, path: str, fh: int) -> list[str]:
        self._maybe_hang("readdir", path)
        return [".", "..", *(name[1:] for name in self.files)]

    def open(self, path: str, flags: int) -> int:
        self._maybe_hang("open", path)
        return 1

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._maybe_hang("read", path)
        return self.files[path][offset : offset + size]


class Through(Hung):
    """The same over a real directory."""

    def __init__(self, control: Path, backing: str) -> None:
        super().__init__(control)
        self.backing = backing

    def _real(self, operation: str, path: str | None) -> str:
        if path is None:  # open still, and removed: a file server has forgotten it
            raise fuse.FuseOSError(errno.ESTALE)
        self._maybe_hang(operation, path)
        return self.backing + path

    def getattr(self, path: str, fh: int | None = None) -> dict[str, Any]:
        found = os.lstat(self._real("getattr", path))
        names = ("st_mode", "st_nlink", "st_uid", "st_gid", "st_size", "st_atime", "st_mtime", "st_ctime", "st_ino")
        return {name: getattr(found, name) for name in names}

    def readdir(self, path: str, fh: int) -> list[str]:
        return [".", "..", *os.listdir(self._real("readdir", path))]

    def readlink(self, path: str) -> str:
        return str(Path(self._real("readlink", path)).readlink())

    def open(self, path: str, flags: int) -> int:
        return os.open(self._real("open", path), flags)

    def create(self, path: str, mode: int, fi: Any = None) -> int:
        return os.open(self._real("write", path), os.O_RDWR | os.O_CREAT | os.O_EXCL, mode)

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._real("read", path)
        return os.pread(fh, size, offset)

    def write(self, path: str, data: bytes, offset: int, fh: int) -> int:
        self._real("write", path)
        return os.pwrite(fh, data, offset)

    def truncate(self, path: str, length: int, fh: int | None = None) -> None:
        os.truncate(self._real("write", path), length)

    def fsync(self, path: str, datasync: int, fh: int) -> int:
        self._real("write", path)
        return 0

    def release(self, path: str, fh: int) -> int:
        os.close(fh)
        return 0

    def mkdir(self, path: str, mode: int) -> None:
        Path(self._real("write", path)).mkdir(mode)

    def unlink(self, path: str) -> None:
        os.unlink(self._real("write", path))

    def rename(self, old: str, new: str) -> None:
        os.rename(self._real("write", old), self.backing + new)

    def link(self, target: str, source: str) -> None:
        os.link(self.backing + source, self._real("write", target))

    def utimens(self, path: str, times: tuple[float, float] | None = None) -> None:
        os.utime(self._real("write", path), times)

    def chmod(self, path: str, mode: int) -> None:
        Path(self._real("write", path)).chmod(mode)


if __name__ == "__main__":
    operations = Through(Path(sys.argv[2]), sys.argv[3]) if len(sys.argv) > 3 else Hung(Path(sys.argv[2]))
    # hard_remove: else the name is gone for a moment when another file takes the place of one that is open
    options = {"attr_timeout": 0, "entry_timeout": 0, "hard_remove": True}
    fuse.FUSE(operations, sys.argv[1], foreground=True, allow_other=False, **options)
