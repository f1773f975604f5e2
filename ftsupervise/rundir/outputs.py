"""Finds the files of an attempt's output, and where in them it begins; its supervisor writes them into its first page.

The supervisor asks the kernel for its own output: this is right for any ``output`` of any scheduler, and for a shell's
``>``.
"""

from __future__ import annotations

import os
import stat

from ftsupervise.rundir.records import encode
from ftsupervise.truth import OutputPart


def own_outputs() -> list[object]:
    """Return the files of this process's standard output and error, as records: each file once, with its size now.

    A pipe or a terminal is none.
    """
    found: dict[tuple[int, int], OutputPart] = {}
    for fd in (1, 2):
        try:
            seen, path = os.fstat(fd), os.readlink(f"/proc/self/fd/{fd}")  # noqa: PTH115 - "… (deleted)" too
        except OSError:
            continue
        if stat.S_ISREG(seen.st_mode) and path.startswith("/"):
            found.setdefault((seen.st_dev, seen.st_ino), OutputPart(path, seen.st_size))
    return [encode(one) for one in found.values()]
