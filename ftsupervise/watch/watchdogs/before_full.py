"""Removes old checkpoints before a disk is full, where the run allows it (``checkpoints.retain.before_full``).

The watch does not wait for that: it starts ``ftsupervise checkpoints upkeep`` in the background, with a bound, and once
an hour while the disk stays full or fills up again. Its rules are those of ``checkpoints.retain``, so nothing goes here
that would not go at any other time.
"""

from __future__ import annotations

import os
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.host import processes
from ftsupervise.probe import Entry
from ftsupervise.watch.watchdogs.own_checkpoints import folder_of

if TYPE_CHECKING:
    from ftsupervise.watch import Look

_LONGEST = 3600  # seconds that it may take
_AGAIN = 3600.0  # seconds until it is started again


def ask(look: Look, path: Path, memory: dict[str, Any], *, bad: bool) -> str:
    """Return words to add to a finding about ``path``: that old checkpoints are being removed, and since when; "" if
    none are.

    ``memory`` is kept from check to check.
    """
    if not bad or not _allowed(look, path):
        return ""
    now, started = look.now.timestamp(), float(memory.get("upkeep", 0.0))
    if not 0 <= now - started < _AGAIN:
        try:
            _start(look)
        except OSError as error:
            return f"; ftsupervise checkpoints upkeep could not be started: {error.strerror}"
        memory["upkeep"] = started = now
    at = datetime.fromtimestamp(started, timezone.utc)
    return f"; old checkpoints are removed as checkpoints.retain says (upkeep was started at {at:%H:%M} UTC)"


def _allowed(look: Look, path: Path) -> bool:
    """Return whether the run allows it, and whether its checkpoints lie on that file system."""
    retain = look.run.checkpoints.retain
    if retain is None or not retain.before_full:
        return False
    folder = folder_of(look)
    here, there = look.probe.look(path), look.probe.look(folder)
    return isinstance(here, Entry) and isinstance(there, Entry) and here.device == there.device


def _start(look: Look) -> None:
    """Start it in a session of its own, so that neither the end of this check nor a signal to it cuts it short.

    Raises OSError.
    """
    command = processes.own_command("checkpoints", "upkeep", "--quiet", str(look.rundir.root))
    subprocess.Popen(
        ["timeout", "--kill-after=60", str(_LONGEST), *command],
        cwd="/",
        env=dict(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
