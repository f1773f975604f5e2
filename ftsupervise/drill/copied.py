"""The copy of the person's run that a drill works on: its command and settings, and nothing that reaches beyond it. Pure."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.launch.rehearsal import rehearsed

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_LIMIT, _WARN = timedelta(minutes=30), timedelta(seconds=15)
_MEMBERS = 4  # one trains; none of the rows takes more than two others
STAND_IN = "mailbox"  # the receiver of a run that has none


def copied(run: Run, folder: Path, scheduler: str) -> Run:
    """Return the run as all rows have it. Raises Refused where this machine cannot hold it."""
    jobs = min(run.launch.jobs, _MEMBERS)
    made = rehearsed(run, folder, scheduler, limit=_LIMIT, warn=_WARN, jobs=jobs)
    watch = made.watch.model_copy(update={"metrics": None, "exec": None})
    return made.model_copy(update={"name": f"{run.name[:80]}-drill", "watch": watch, "alerts": run.alerts})


def for_a_row(run: Run, rundir: Path, port: int, domain: str) -> Run:
    """Return it for one row: in a directory of its own, and with each receiver replaced by mail to its name at ``domain``,
    through ``port`` of this machine, so that the routes of the run decide who is told."""
    from ftsupervise.config.alerting import Email, Receiver

    names = tuple(run.alerts.named) or (STAND_IN,)
    receivers = tuple(
        Receiver(
            name=name,
            email=Email.model_validate(
                {"host": "127.0.0.1", "port": port, "from": "drill@localhost", "to": (f"{name}@{domain}",)}
            ),
        )
        for name in names
    )
    alerts = run.alerts.model_copy(update={"receivers": receivers, "dead_man": None, "weekly_report": None})
    return run.model_copy(update={"run_dir": rundir, "alerts": alerts})
