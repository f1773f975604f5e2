"""A file system that stops answering: everything works until its control file says ``hang``, then nothing returns.

    python hung_fuse.py MOUNTPOINT CONTROL

CONTROL holds the operations that never answer, e.g. ``statfs`` or ``statfs getattr``; empty: all is well.
"""

from __future__ import annotations

import errno
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

    def _maybe_hang(self, operation: str) -> None:
        while operation in self.control.read_text().split():
            time.sleep(0.05)

    def statfs(self, path: str) -> dict[str, int]:
        self._maybe_hang("statfs")
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
        self._maybe_hang("getattr")
        times = {"st_ctime": self.born, "st_mtime": self.born, "st_atime": self.born}
        if path == "/":
            return {"st_mode": stat.S_IFDIR | 0o755, "st_nlink": 2, **times}
        if path in self.files:
            return {"st_mode": stat.S_IFREG | 0o644, "st_nlink": 1, "st_size": len(self.files[path]), **times}
        raise fuse.FuseOSError(errno.ENOENT)

    def readdir(self, path: str, fh: int) -> list[str]:
        self._maybe_hang("readdir")
        return [".", "..", *(name[1:] for name in self.files)]

    def open(self, path: str, flags: int) -> int:
        self._maybe_hang("open")
        return 1

    def read(self, path: str, size: int, offset: int, fh: int) -> bytes:
        self._maybe_hang("read")
        return self.files[path][offset : offset + size]


if __name__ == "__main__":
    fuse.FUSE(Hung(Path(sys.argv[2])), sys.argv[1], foreground=True, allow_other=False, attr_timeout=0, entry_timeout=0)
