"""Who hears of it and when: routes, quiet hours, inhibition, silences, and the settings that say so."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from ftsupervise.alerts.outbox import Silence
from ftsupervise.alerts.step import due_at, inhibitor, policy_of, receivers_of, silenced
from ftsupervise.alerts.wording import clean
from ftsupervise.config.alerting import Alerts
from ftsupervise.findings import Finding, OfDisk, Severity
from ftsupervise.rundir.records import decode, encode
from ftsupervise.truth import Health

T0 = datetime(2026, 11, 21, 2, 10, tzinfo=timezone.utc)  # a Saturday
MAIL = {"email": {"host": "mail", "from": "a@b.c", "to": ["d@e.f"]}}
FILE = {"file": {"path": "/tmp/x"}}


def settings(**more: Any) -> Alerts:
    return Alerts.model_validate_json(json.dumps({"receivers": [MAIL, FILE], "timezone": "UTC", **more}))


def finding(watchdog: str = "disk", severity: Severity = Severity.WARNING, run: str = "train-70b") -> Finding:
    return Finding(run, watchdog, "/scratch", Health.BAD, severity, "3 TB free", T0)


def of_disk(path: str, part: str, severity: Severity = Severity.CRITICAL) -> Finding:
    disk = OfDisk(Path(path), part)
    return replace(finding("disk", severity), subject=str(disk), disk=disk)


def test_without_routes_everybody_hears() -> None:
    assert receivers_of(settings(), finding(), T0) == ("email", "file")


def test_the_first_route_that_fits_decides() -> None:
    alerts = settings(
        routes=[
            {"severity": "critical", "hours": ["22:00", "07:00"], "to": ["file"]},
            {"watchdog": ["is_running"], "run": ["train-*"], "to": ["email"]},
            {"days": ["sun"], "to": []},
        ]
    )
    assert receivers_of(alerts, finding(severity=Severity.CRITICAL), T0) == ("file",)
    assert receivers_of(alerts, finding(severity=Severity.CRITICAL), T0 + timedelta(hours=8)) == ("email", "file")
    assert receivers_of(alerts, finding("is-running"), T0) == ("email",)
    assert receivers_of(alerts, finding("is-running", run="other"), T0) == ("email", "file")
    assert receivers_of(alerts, finding(), T0 + timedelta(days=1)) == ()


def test_quiet_hours_hold_a_warning_until_morning_and_let_a_critical_through() -> None:
    alerts = settings(quiet={"hours": ["22:00", "07:00"]})
    assert due_at(alerts, Severity.WARNING, T0) == T0.replace(hour=7, minute=0)
    assert due_at(alerts, Severity.CRITICAL, T0) == T0
    late = T0.replace(hour=23)
    assert due_at(alerts, Severity.WARNING, late) == T0.replace(hour=7, minute=0) + timedelta(days=1)
    assert due_at(alerts, Severity.WARNING, T0.replace(hour=12)) == T0.replace(hour=12)


def test_hours_are_those_of_the_place_named() -> None:
    alerts = settings(timezone="America/Los_Angeles", quiet={"hours": ["22:00", "07:00"]})
    assert due_at(alerts, Severity.WARNING, T0) == T0  # 18:10 the evening before


@pytest.mark.parametrize(
    ("cause", "muted", "kept"),
    [
        ("storage", "log-stale", "is-running"),
        ("slurm-unreachable", "is_running", "disk"),
        ("kill-switch", "hang", "disk"),
        ("watch-late", "", "hang"),
        ("disk", "", "hang"),
    ],
)
def test_a_trouble_mutes_what_it_explains_and_nothing_else(cause: str, muted: str, kept: str) -> None:
    causes = [finding(cause)]
    assert not muted or inhibitor(finding(muted), causes)
    assert not inhibitor(finding(kept), causes)
    assert not inhibitor(finding(muted or kept, run="another"), causes)


def test_storage_that_does_not_answer_mutes_what_lives_on_it() -> None:
    hung = of_disk("/scratch/run_7", "there")
    assert inhibitor(finding("hang"), [hung]) == "explained by disk /scratch/run_7 there"
    assert not inhibitor(finding("is-running"), [hung])
    assert not inhibitor(hung, [hung])


def test_a_full_disk_explains_its_forecast_and_the_journal_on_it_and_one_that_fills_up_does_not() -> None:
    full, filling = of_disk("/scratch/run_7", "space"), of_disk("/scratch/run_7", "space", Severity.WARNING)
    for one in (of_disk("/scratch/run_7", "forecast"), finding("alert-journal")):
        assert inhibitor(one, [full]) == "explained by disk /scratch/run_7 space"
        assert not inhibitor(one, [filling])
    assert not inhibitor(of_disk("/home/me", "forecast"), [full]), "another disk"
    assert not inhibitor(of_disk("/scratch/run_7", "inodes"), [full])
    assert not inhibitor(full, [of_disk("/scratch/run_7", "forecast")])


def test_a_disk_is_the_same_whatever_its_name_and_when_its_alert_comes_from_the_journal() -> None:
    odd = "/scratch/of [us]*\u202e\udce9/" + 200 * "long"
    full, forecast = of_disk(odd, "space"), of_disk(odd, "forecast")
    kept = decode(Finding, json.loads(json.dumps(encode(clean(full), sparse=True))))
    assert kept.disk == full.disk
    assert inhibitor(clean(forecast), [kept])
    assert not inhibitor(of_disk(f"{odd}er", "forecast"), [kept]), "another one, whose name is as long as can be shown"


def test_a_silence_is_by_id_or_by_what_it_is_about_and_ends() -> None:
    def silence(pattern: str) -> Silence:
        return Silence("1", pattern, "me", "known", T0, T0 + timedelta(hours=1))

    for pattern in ("disk", "disk: /scratch", "disk: /scr*", "3F9A1C", "*"):
        said = silenced("3f9a1c20", finding(), [silence(pattern)], T0)
        assert said.startswith("silenced by me until"), pattern
        assert not silenced("3f9a1c20", finding(), [silence(pattern)], T0 + timedelta(hours=1))
    for pattern in ("hang", "3f9", "/scratch"):
        assert not silenced("3f9a1c20", finding(), [silence(pattern)], T0), pattern


def test_a_rule_for_one_watchdog_leaves_the_others_alone() -> None:
    alerts = settings(hold="1m", watchdogs={"is_running": {"hold": "10m", "checks": "2 of 3"}})
    assert policy_of(alerts, finding("is-running")).hold == timedelta(minutes=10)
    assert policy_of(alerts, finding("is-running")).of_checks == 3
    assert policy_of(alerts, finding()).hold == timedelta(minutes=1)


@pytest.mark.parametrize(
    "wrong",
    [
        {"receivers": [{"email": MAIL["email"], "file": {"path": "x"}}]},
        {"receivers": [{}]},
        {"receivers": [{"slack": {"token_env": "T"}}]},
        {"receivers": [{"slack": {"webhook_env": "T", "token_env": "T", "channel": "C"}}]},
        {"receivers": [{"slack": {"webhook": "https://hooks.slack.com/secret"}}]},
        {"receivers": [{"email": {**MAIL["email"], "user": "me"}}]},
        {"receivers": [{"email": {**MAIL["email"], "user": "me", "password_env": "P", "security": "none"}}]},
        {"receivers": [{"email": {**MAIL["email"], "to": ["d@e.f\r\nBcc: x@y.z"]}}]},
        {"receivers": [MAIL], "routes": [{"to": ["pager"]}]},
        {"receivers": [{**FILE, "name": "a"}, {**FILE, "name": "a"}]},
        {"receivers": [], "timezone": "Mars/Olympus"},
        {"receivers": [{"webhook": {"url": "https://me:secret@host/x"}}]},
        {"checks": "3 of 2"},
        {"repeat": "0s"},
        {"escalate_after": "0s"},
        {"watchdogs": {"disk": {"checks": "10 of 9"}}},
        {"watchdogs": {"disk": {"repeat": "0s"}}},
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Alerts.model_validate_json(json.dumps(wrong))


def test_receivers_of_a_kind_get_names_of_their_own() -> None:
    alerts = settings(receivers=[MAIL, MAIL, {**FILE, "name": "email-2"}, FILE])
    assert list(alerts.named) == ["email", "email-3", "email-2", "file"]
