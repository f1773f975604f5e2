"""Checks that the other watches of this run still check it: a watch that dies must not die in silence."""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from ftsupervise.findings import Finding, Words
from ftsupervise.rundir.heartbeat_page import look_at_watchers, own_watcher
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch import Look

SILENT = Words(
    "If this watch goes silent too, the run is not watched at all.",
    "ssh {host} pgrep -af ftsupervise",
    "start it again; if it was stopped for good: rm {page}",
)
CROWDED = Words(
    "A watch among those left out can go silent, and no other watch notices.",
    "ls -l {folder} | head -50",
    "see whose files they are, then: rm -r {folder} (each watch writes its own page again)",
)


def check(look: Look, settings: object) -> Iterator[Finding]:
    try:
        known, odd = look_at_watchers(look.rundir)
    except OSError:
        return  # the watch itself reports that the directory cannot be read
    folder = look.rundir.watch / "watchers"
    if odd or look.memory.get("crowded"):  # its end is reported too
        look.memory["crowded"] = True
        text = f"{folder} {odd or 'is in order again'}"
        yield look.finding("folder", Health.of(bool(odd)), text, CROWDED, names={"folder": shlex.quote(str(folder))})
    for watcher in known:
        if watcher.name == own_watcher() or watcher.every is None:
            continue
        late = watcher.late_by(look.now) is not None
        silent = show_duration(max(0.0, (look.now - watcher.at).total_seconds()))
        yield look.finding(
            watcher.name,
            Health.of(late),
            f"the watch on {watcher.host} last checked the run {silent} ago",
            SILENT,
            names={"host": shlex.quote(watcher.host), "page": shlex.quote(str(folder / watcher.name))},
            value=silent,
            limit=f"every {show_duration(watcher.every.total_seconds())}",
            since=watcher.at if late else None,
        )
