"""What the stories about alerts share: a clock, settings for the neighbours, a tick."""

from __future__ import annotations

import json
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

from click.testing import CliRunner, Result

from ftsupervise.alerts.deliver import Delivered, deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.alerts.wording import disk
from ftsupervise.cli import ftsupervise
from ftsupervise.config.alerting import Alerts
from ftsupervise.errors import Error
from ftsupervise.findings import Finding, Notice
from ftsupervise.truth import Health
from tests.neighbours.slack import TOKEN, SlackServer
from tests.neighbours.smtp import MailServer

T0 = datetime(2026, 11, 21, 2, 10, tzinfo=timezone.utc)
RUN = "train-70b"


def minutes(count: float) -> datetime:
    return T0 + timedelta(minutes=count)


def journal_in(directory: Path) -> Journal:
    (directory / "run" / "switches").mkdir(parents=True, exist_ok=True)
    return Journal(directory / "run" / "watch" / "journal", spare=directory / "private" / "spare")


def secret(directory: Path, name: str, text: str) -> str:
    path = directory / name
    path.write_text(text + "\n")
    path.chmod(0o600)
    return str(path)


def settings(receivers: list[dict[str, Any]], **more: Any) -> Alerts:
    return Alerts.model_validate_json(json.dumps({"receivers": receivers, **more}))


def email(port: int, **more: Any) -> dict[str, Any]:
    about = {"host": "127.0.0.1", "port": port, "from": "ft@example.org", "to": ["me@example.org"], "timeout": "15s"}
    return {"email": {**about, **more}}


def mailbox(server: MailServer, **more: Any) -> dict[str, Any]:
    return email(server.port, **more)


def bot(server: SlackServer, directory: Path, **more: Any) -> dict[str, Any]:
    token = secret(directory, "token", TOKEN)
    about = {"token_file": token, "channel": "C1", "api_url": server.api_url, "timeout": "15s"}
    return {"slack": {**about, **more}}


def bad(at: datetime = T0) -> Finding:
    return disk(RUN, at)


def good(at: datetime = T0) -> Finding:
    return disk(RUN, at, health=Health.OK)


def tick(journal: Journal, alerts: Alerts, now: datetime, *findings: Finding) -> tuple[tuple[Notice, ...], Delivered]:
    recorded = record(journal, findings, alerts, now, run_name=RUN)
    return recorded.notices, deliver([journal], alerts, now, jitter=lambda: 0.0)


def type_in(*words: str) -> Result:
    return CliRunner().invoke(ftsupervise, list(words))


def alerts_cli(journal: Journal, *words: str) -> str:
    result = type_in("alerts", *words, str(journal.directory.parent.parent))
    if isinstance(result.exception, Error):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output
