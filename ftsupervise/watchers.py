"""Who watches a run: one small file for each watcher in RUN/watch/watchers, rewritten at every tick.

The run's guard and the other watchers read it, so that a watch that died does not die in silence. Only a watcher that says how
often it means to look (``every``) can be late; a person who types ``ftsupervise watch`` once promises nothing.
Standard library only: the guard uses this inside the training loop.
"""

from __future__ import annotations

import os
from datetime import datetime, timedelta
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir import RunDir, read_json, write_json
from ftsupervise.sharing import make_folder

LATE = 3  # times its own interval, and …
AT_LEAST = timedelta(minutes=10)  # … never sooner: a tick over a thousand runs, a node that is rebooted


class Watcher(NamedTuple):
    name: str
    host: str
    at: datetime
    every: timedelta | None

    def late_by(self, now: datetime) -> timedelta | None:
        """For how long nothing has been heard of it, if that is too long; None while all is well."""
        silent = now - self.at
        if self.every is None or silent <= max(self.every * LATE, AT_LEAST):
            return None
        return silent


def folder(rundir: RunDir) -> Path:
    return rundir.watch / "watchers"


def own_name() -> str:
    return f"{os.uname().nodename}-{os.getuid()}"


def beat(rundir: RunDir, now: datetime, every: timedelta | None) -> None:
    """This watcher has looked. Raises OSError."""
    place = folder(rundir)
    make_folder(place)
    record: dict[str, object] = {"at": now.isoformat(), "host": os.uname().nodename, "pid": os.getpid()}
    if every is not None:
        record["every"] = every.total_seconds()
    write_json(place / own_name(), record, sync=False)


def leave(rundir: RunDir) -> None:
    """This watcher was stopped on purpose: nobody need miss it."""
    try:
        os.unlink(folder(rundir) / own_name())
    except OSError:
        return


def watchers(rundir: RunDir) -> tuple[Watcher, ...]:
    """Everybody who has looked and not taken leave. Raises OSError when the directory cannot be read."""
    try:
        names = os.listdir(folder(rundir))
    except FileNotFoundError:
        return ()
    found = (_read(folder(rundir) / name) for name in sorted(names) if not name.startswith("."))
    return tuple(watcher for watcher in found if watcher is not None)


def _read(path: Path) -> Watcher | None:
    try:
        raw = read_json(path, limit=10_000) or {}
        at = datetime.fromisoformat(str(raw["at"]))
    except (OSError, ValueError, KeyError):
        return None
    every = raw.get("every")
    bound = timedelta(seconds=every) if isinstance(every, (int, float)) else None
    return Watcher(path.name, str(raw.get("host", "")), at, bound)
