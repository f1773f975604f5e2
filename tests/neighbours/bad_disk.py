"""A disk that has lost a part of a file: a file system of its own, whose image was cut off there. As root."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

_BLOCK = 1024


class BadDisk:
    """The file system at ``place``, of the bytes in ``image``."""

    def __init__(self, place: Path, image: Path) -> None:
        self.place, self._image = place, image

    def lose(self, file: Path) -> None:
        """Let each read of the end of ``file`` fail with EIO. It is written again first, so that its end lies behind all
        other files."""
        again = file.with_name(file.name + ".again")
        shutil.copy2(file, again)
        again.replace(file)
        os.sync()
        begin = max(_extents(file))
        assert begin > max(at for one in self.place.rglob("*") if one.is_file() and one != file for at in _extents(one))
        os.truncate(self._image, begin * _BLOCK)
        for path in (self._image, file):
            fd = os.open(path, os.O_RDONLY)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)
        with pytest.raises(OSError, match="Input/output error"):
            file.read_bytes()


def _extents(file: Path) -> list[int]:
    """Return the first block of each extent of a file."""
    said = subprocess.run(["filefrag", "-b1024", "-v", file], check=True, capture_output=True, text=True).stdout
    rows = [line.split(":")[2] for line in said.splitlines() if line.strip()[:1].isdigit()]
    return [int(row.split("..")[0]) for row in rows] or [0]


@contextmanager
def bad_disk(folder: Path) -> Iterator[BadDisk]:
    """Mount one in ``folder``; skips the test where that cannot be done."""
    if os.geteuid() != 0 or shutil.which("mkfs.ext4") is None:
        pytest.skip("needs root and e2fsprogs, to mount a file system of an image")
    image, place = folder / "image", folder / "disk"
    place.mkdir()
    with image.open("wb") as file:
        file.truncate(48 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-O", "^has_journal", "-b", str(_BLOCK), image], check=True)
    mounted = subprocess.run(["mount", "-o", "loop", image, place], capture_output=True, text=True)
    if mounted.returncode:
        pytest.skip(f"no loop device can be mounted here: {mounted.stderr.strip()}")
    try:
        yield BadDisk(place, image)
    finally:
        subprocess.run(["umount", "-l", place], check=True)
