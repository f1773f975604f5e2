"""The modules that this process has imported by its first step, for a standby that imports them in advance.

Only modules of Python and installed packages: the program's own modules may change between two attempts.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.rundir.records import write_json

ENV_IMPORTS = "FTSUPERVISE_IMPORTS"  # the file for the list; set by ``ftsupervise run`` when it needs one


class Imports(NamedTuple):
    """The modules that a rank had imported by its first step."""

    attempt: int | None = None
    seconds: float = 0.0  # that it took
    cpus: int = 0
    rss: int = 0  # bytes
    modules: Annotated[tuple[str, ...], 100_000] = ()  # in the order in which they were imported


def installed() -> list[str]:
    """Names of the imported modules that are installed, in the order in which they were imported."""
    roots = {str(Path(os.__file__).parent) + os.sep}
    roots |= {f"{entry}{os.sep}" for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    inside = tuple(roots)
    found = []
    for name, module in list(sys.modules.items()):
        spec = getattr(module, "__spec__", None)
        file = getattr(module, "__file__", None)
        real = spec is not None and getattr(spec, "name", "") == name and isinstance(file, str)
        if real and str(file).startswith(inside) and name != "sitecustomize" and not name.startswith("ftsupervise"):
            found.append(name)
    return found


def write_imports(path: str, attempt: int | None, seconds: float) -> None:
    """Write them down. ``seconds``: from the start of this process to where its imports were over. Raises OSError."""
    record = Imports(attempt, round(seconds, 2), len(os.sched_getaffinity(0)), _rss(), tuple(installed()))
    write_json(Path(path), record, sync=False)


def age() -> float:
    """Seconds since this process was started; 0.0 where that cannot be seen."""
    try:
        with open("/proc/self/stat", "rb") as file:
            ticks = int(file.read().rpartition(b")")[2].split()[19])
        return max(0.0, time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return 0.0


def _rss() -> int:
    try:
        with open("/proc/self/statm", "rb") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
