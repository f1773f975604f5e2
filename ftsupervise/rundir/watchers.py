"""The watchers of a run: one small file for each in RUN/watch/watchers, rewritten at every tick.

The run's guard and the other watchers read it, so that the death of a watch is noticed. Only a watcher that states its
interval (``every``) can be late; ``ftsupervise watch`` typed once states none.
Standard library only: the guard uses this inside the training loop.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.modes import make_folder, may_be_changed, stranger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import decode, read_json, write_json

LATE = 3  # times its own interval, and …
MOST = 200  # watchers of one run that are read
_LISTED = 10_000
AT_LEAST = timedelta(minutes=10)  # … never sooner: a tick over a thousand runs, a node that is rebooted


class Watcher(NamedTuple):
    name: str
    host: str
    at: datetime
    every: timedelta | None = None
    pid: int = 0

    def late_by(self, now: datetime) -> timedelta | None:
        """The time since its last check, if that is too long; None while all is well."""
        silent = now - self.at
        if self.every is None or silent <= max(self.every * LATE, AT_LEAST):
            return None
        return silent


def folder(rundir: RunDir) -> Path:
    return rundir.watch / "watchers"


def own_name() -> str:
    return f"{os.uname().nodename}-{os.getuid()}"


def beat(rundir: RunDir, now: datetime, every: timedelta | None) -> None:
    """Record a check of this watcher. Raises OSError."""
    place = folder(rundir)
    make_folder(place)
    host, pid = os.uname().nodename, os.getpid()
    write_json(place / own_name(), Watcher(own_name(), host, now, every, pid), sync=False)


def leave(rundir: RunDir) -> None:
    """Record that this watcher was stopped on purpose, so that it is not missed."""
    try:
        os.unlink(folder(rundir) / own_name())
    except OSError:
        return


def watchers(rundir: RunDir) -> tuple[Watcher, ...]:
    """All watchers that have not signed off, MOST at most. Raises OSError when the directory cannot be read."""
    return look(rundir)[0]


def look(rundir: RunDir) -> tuple[tuple[Watcher, ...], str]:
    """``watchers``, and a clause about anything odd in the folder; "" if there is none. Raises OSError."""
    place = folder(rundir)
    try:
        whose = place.stat()
        with os.scandir(place) as entries:
            names = [entry.name for entry in islice(entries, _LISTED) if not entry.name.startswith(".")]
    except FileNotFoundError:
        return (), ""
    if own_name() in names:  # a flooded folder does not push out the watcher that asks
        names = [own_name(), *(name for name in names if name != own_name())]
    found = (_read(place / name, whose) for name in names[:MOST])
    odd = f"holds {len(names)} files or more, of which {MOST} are read" if len(names) > MOST else ""
    return tuple(sorted((watcher for watcher in found if watcher is not None), key=lambda one: one.name)), odd


def _read(path: Path, whose: os.stat_result) -> Watcher | None:
    """None for a page that is damaged, or by an account with which the watch is not shared."""
    try:
        raw = read_json(
            path, limit=10_000, distrust=lambda found: stranger(whose, found) or may_be_changed(whose, found, path)
        )
        return None if raw is None else decode(Watcher, {**raw, "name": path.name}, lenient=True)
    except (OSError, ValueError):
        return None
