"""Do the others who watch this run still look? A watch that died must not die in silence."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Health
from ftsupervise.rundir.watchers import look as look_at
from ftsupervise.rundir.watchers import own_name
from ftsupervise.units import show_duration
from ftsupervise.watch import Look


@dataclass(frozen=True)
class Watchers:
    """The watchdog of watchers."""

    name: str = "watchers"

    def check(self, look: Look, settings: object) -> Iterator[Finding]:
        try:
            known, odd = look_at(look.rundir)
        except OSError:
            return  # that the directory cannot be read is told by whoever writes there
        if odd or look.memory.get("crowded"):  # once it was, it is told to be over
            look.memory["crowded"] = True
            yield self._folder(look, odd)
        for watcher in known:
            if watcher.name == own_name() or watcher.every is None:
                continue
            late = watcher.late_by(look.now)
            silent = show_duration(max(0.0, (look.now - watcher.at).total_seconds()))
            page = shlex.quote(str(look.rundir.watch / "watchers" / watcher.name))
            yield Finding(
                run=look.run.name,
                watchdog=self.name,
                subject=watcher.name,
                health=Health.BAD if late is not None else Health.OK,
                severity=Severity.WARNING,
                summary=f"the watch on {watcher.host} last looked {silent} ago",
                at=look.now,
                value=silent,
                limit=f"every {show_duration(watcher.every.total_seconds())}",
                meaning="If this watch goes silent too, nobody looks after the run.",
                look=f"ssh {shlex.quote(watcher.host)} pgrep -af ftsupervise",
                do=f"start it again; if it was stopped for good: rm {page}",
                since=watcher.at if late is not None else None,
            )

    def _folder(self, look: Look, odd: str) -> Finding:
        place = look.rundir.watch / "watchers"
        quoted = shlex.quote(str(place))
        return Finding(
            run=look.run.name,
            watchdog=self.name,
            subject="folder",
            health=Health.BAD if odd else Health.OK,
            severity=Severity.WARNING,
            summary=f"{place} {odd}" if odd else f"{place} is in order again",
            at=look.now,
            meaning="A watch among those left out can go silent, and no other watch notices." if odd else "",
            look=f"ls -l {quoted} | head -50",
            do=f"see whose files they are, then: rm -r {quoted} (each watch writes its own page again)" if odd else "",
        )
