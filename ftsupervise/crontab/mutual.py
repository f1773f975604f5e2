"""The run watches its cron as the cron watches the run: what a running job calls once a period.

In a process of its own (``ftsupervise cron ensure --run RUN``), so that a supervisor that must stay small and never hang
loads no settings, asks no scheduler and sends no mail itself.
"""

from __future__ import annotations

from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.crontab.chain import Queue, look_after
from ftsupervise.findings import Finding
from ftsupervise.host import interpreter
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run


def command(run_dir: Path) -> tuple[str, ...]:
    """What the job ring runs once a period, bounded (a minute or two), its output and exit code of no interest."""
    return tuple(interpreter.command("cron", "ensure", "--run", str(run_dir)))


def look_after_for(run: Run, scheduler: Queue, now: datetime) -> Finding | None:
    """Revive the cron that ``run`` is watched by, or tell the run's own receivers that it is dead; and when it lives again.

    None when there is no cron to look after. Nothing is written while all is well.
    """
    found = look_after(run.cron.directory, scheduler, now, run=run.name)
    if found is None or run.run_dir is None:
        return found
    journal = Journal(RunDir(run.run_dir).watch / "journal")
    known = any(
        a.finding.watchdog == found.watchdog and a.finding.run == run.name for a in journal.read().alerts.values()
    )
    if found.health is Health.BAD or known:
        record(journal, [found], run.alerts, now, run_name=run.name, partial=True)
        deliver([journal], run.alerts, now)
    return found
