"""Records the findings of the watch's last tick in one small page for ``status``: ``watch/found.json``.

The journal of the alerts is the truth; this page is the part of it that can be read for a thousand runs in a second.
"""

from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ftsupervise.host.ownership import distrust_in
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, decode, read_json, write_json

MOST = 20  # alerts that are listed


class FiringAlert(NamedTuple):
    id: str = ""
    severity: str = ""
    watchdog: str = ""
    summary: str = ""
    since: Optional[datetime] = None


class WatchFound(NamedTuple):
    at: datetime = EPOCH
    firing: int = 0
    alerts: Annotated[tuple[FiringAlert, ...], MOST] = ()  # the worst of them
    disk: str = ""  # the forecast: "full in 3d 4h at 1.2 TB a day"
    disk_at: datetime = EPOCH  # when it was made
    every: timedelta = timedelta(minutes=5)  # how often the run is meant to be checked
    judges: Annotated[tuple[str, ...], 2] = ()  # which of "hang" and "throughput" are switched on


def found_page(rundir: RunDir) -> Path:
    """Return where it is; it is there once a watch has looked at the run."""
    return rundir.watch / "found.json"


def write_found(rundir: RunDir, found: WatchFound) -> None:
    """Write the page. Raises OSError."""
    write_json(found_page(rundir), found, sync=False, indent=None)


def read_found(rundir: RunDir) -> Optional[WatchFound]:
    """Return the page; None where there is none, it is damaged, or by an account with which the watch is not shared."""
    path = found_page(rundir)
    try:
        whose = rundir.watch.stat()
        raw = read_json(path, limit=64_000, distrust=distrust_in(whose, path))
        return None if raw is None else decode(WatchFound, raw, lenient=True)
    except (OSError, ValueError):
        return None
