"""One writer: an attempt that still breathes after a newer one has begun must not write any more.

Slurm does not keep two attempts apart: an array's ``%1``, ``afterany`` and ``singleton`` all let the next job begin while
the old one is COMPLETING, and the ranks on a node whose slurmd is lost run on for ever. The generation is the attempt's
number, claimed by mkdir in the run directory; whoever is about to write looks whether a greater one has been claimed.
"""

from __future__ import annotations

import os

from ftsupervise.rundir import RunDir

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC


def newer(attempts: str | os.PathLike[str], mine: int) -> int | None:
    """The newest attempt claimed after attempt ``mine``, None if mine is the newest. Raises OSError if it cannot look.

    The directory is opened anew each time: on NFS that is what revalidates a cached listing.
    """
    fd = os.open(attempts, _DIRECTORY)
    try:
        newest = max((int(name) for name in os.listdir(fd) if name.isdigit()), default=mine)
    finally:
        os.close(fd)
    return newest if newest > mine else None


def superseded(rundir: RunDir, mine: int) -> int | None:
    """Like ``newer``; None as well when it cannot be told: what cannot be seen stops nobody."""
    try:
        return newer(rundir.attempts, mine)
    except OSError:
        return None
