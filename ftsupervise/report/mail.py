"""The report of the last days by mail: to the email receivers of each run, one mail for each receiver with all its runs."""

from __future__ import annotations

from collections.abc import Mapping
from datetime import datetime
from email.headerregistry import Address
from email.message import EmailMessage
from email.utils import format_datetime, make_msgid
from pathlib import Path
from typing import NamedTuple

from ftsupervise.config.alerting import Alerts, Email
from ftsupervise.config.believed import load_believed
from ftsupervise.errors import Error
from ftsupervise.printable import printable
from ftsupervise.report.week import WeekReport
from ftsupervise.report.week_page import as_markdown, lead, page, title
from ftsupervise.rundir.paths import RunDir
from ftsupervise.units import count


class Addressee(NamedTuple):
    """An email receiver, and the runs whose settings name it."""

    name: str
    settings: Email
    runs: Mapping[str, Path]


def addressees(runs: Mapping[str, Path]) -> tuple[tuple[Addressee, ...], tuple[str, ...]]:
    """The receivers of these runs; and a sentence for each run whose settings cannot be read. Another account's settings name
    nobody: this account's own receivers stand in."""
    found: dict[str, Addressee] = {}
    problems = []
    for name, directory in runs.items():
        try:
            alerts = load_believed(RunDir(directory).config, watched=False).run.alerts
        except (Error, OSError) as error:
            problems.append(printable(f"{name}: {error}", 300))
            continue
        for receiver, settings in emails(alerts):
            key = settings.model_dump_json()
            known = found.get(key) or Addressee(receiver, settings, {})
            found[key] = known._replace(runs={**known.runs, name: directory})
    return tuple(found.values()), tuple(problems)


def emails(alerts: Alerts) -> list[tuple[str, Email]]:
    """The receivers that get the report."""
    wanted = alerts.weekly_report
    return [
        (name, receiver.settings)
        for name, receiver in alerts.named.items()
        if isinstance(receiver.settings, Email) and (wanted is None or name in wanted)
    ]


def compose(week: WeekReport, settings: Email) -> EmailMessage:
    """The mail: the report as text, and as a file to open."""
    mail = EmailMessage()
    domain = settings.from_.rpartition("@")[2]
    mail["From"] = Address("ftsupervise", addr_spec=settings.from_)
    mail["To"] = tuple(Address(addr_spec=to) for to in settings.to)
    mail["Subject"] = f"{title(week)}: {count(len(week.rows), 'run')}"
    mail["Date"] = format_datetime(week.end)
    mail["Message-ID"] = make_msgid(domain=domain)
    mail["Auto-Submitted"] = "auto-generated"
    mail["X-Auto-Response-Suppress"] = "All"
    mail["List-Id"] = "ftsupervise reports <ftsupervise.reports>"
    mail.set_content(
        f"{printable(lead(week))}\n\nThe attached page has the pictures.\n\n{as_markdown(week)}", charset="utf-8"
    )
    mail.add_attachment(page(week).encode(), maintype="text", subtype="html", filename=filename(week.end))
    return mail


def filename(end: datetime) -> str:
    return f"report-week-{end:%Y-%m-%d}.html"


def send(week: WeekReport, settings: Email) -> str:
    """Send it; the recipients that were refused, and why. Raises TryLater, Broken."""
    from ftsupervise.alerts.receivers.email import post

    return post(compose(week, settings), settings)
