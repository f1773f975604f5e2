"""A message is never lost by its name: each incident has keys of its own, for mailboxes, pagers, machines and the journal."""

from __future__ import annotations

import json
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import announce, record, was_announced
from ftsupervise.findings import AlertState, EventKind, Finding, Severity, happened
from ftsupervise.truth import Health
from tests.neighbours.alertmanager import PROGRAM, alertmanager
from tests.neighbours.smtp import MailServer
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.story.alerting_scene import T0, bad, good, journal_in, mailbox, minutes, secret, settings, tick, type_in
from tests.story.measured_run import make_run
from tests.story.test_alerts_webhook import Listener, listener  # noqa: F401  (a fixture)

CHECKS = 30  # good ones between two incidents: more than an alert remembers


def two_incidents(journal: Journal, alerts: Any, start: datetime = T0) -> None:
    """An incident, half an hour in which all is well, checked each minute, and another one: the same alert."""
    tick(journal, alerts, start, bad(start))
    for at in range(1, CHECKS + 1):
        tick(journal, alerts, start + timedelta(minutes=at), good(start + timedelta(minutes=at)))
    again = start + timedelta(minutes=CHECKS + 1)
    tick(journal, alerts, again, bad(again))


def test_what_comes_and_goes_ends_with_the_run_and_not_after_its_calm(tmp_path: Path) -> None:
    """``status`` of a run that had FINISHED still had an alert half an hour later."""
    rundir, now = make_run(tmp_path, failed=3), datetime.now(timezone.utc)
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: train\nscheduler: local\nlaunch: {command: 'true'}\nwatch: {disk: null}\n"
    )
    found = Finding("train", "recovery", "attempt", Health.BAD, Severity.WARNING, "attempt 3 failed", now)
    journal = Journal(rundir.watch / "journal")
    for ago in range(9, 1, -1):
        seen = replace(found, health=Health.OK if ago % 2 else Health.BAD)
        record(journal, [seen], settings([]), now - timedelta(minutes=ago), run_name="train")
    rundir.finished.touch()
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))
    state = Journal(rundir.watch / "journal").read().alerts
    assert [one.state for one in state.values() if one.finding.watchdog == "recovery"] == [AlertState.FIRING]
    typed("watch", "--quiet", folder=tmp_path, env=env)
    state = Journal(rundir.watch / "journal").read().alerts
    assert [one.state for one in state.values() if one.finding.watchdog == "recovery"] == [AlertState.RESOLVED]


@pytest.mark.parametrize("start", [T0, T0 + timedelta(minutes=20)], ids=["in one hour", "over the full hour"])
def test_a_mailbox_that_drops_equal_message_ids_shows_both_incidents(tmp_path: Path, start: datetime) -> None:
    with MailServer() as server:
        two_incidents(journal_in(tmp_path), settings([mailbox(server)]), start)
        mails = {mail["Message-ID"]: mail for mail in server.mails}
    words = [mail["Subject"].partition("]")[0].strip("[") for mail in mails.values()]
    assert words == ["FIRING", "RESOLVED", "FIRING"]


def test_a_lost_journal_does_not_give_an_incident_the_name_of_an_older_one(tmp_path: Path) -> None:
    with MailServer() as server:
        alerts = settings([mailbox(server)])
        tick(journal_in(tmp_path), alerts, T0, bad())
        for path in (tmp_path / "run" / "watch" / "journal").glob("*.json"):
            path.unlink()
        tick(journal_in(tmp_path), alerts, minutes(180), bad(minutes(180)))
        assert len({mail["Message-ID"] for mail in server.mails}) == 2


def test_a_pager_and_a_machine_key_each_incident_and_each_run(
    listener: Listener,  # noqa: F811
    tmp_path: Path,
) -> None:
    key = secret(tmp_path, "key", "R0UT1NG")
    alerts = settings([{"webhook": {"shape": "pagerduty", "url": listener.url, "key_file": key}}])
    for person in ("ada", "grace"):  # two people, one name of a run
        two_incidents(journal_in(tmp_path / person), alerts)
    keys = [(body["event_action"], body["dedup_key"]) for _, body in listener.heard]
    assert [action for action, _ in keys] == ["trigger", "resolve", "trigger"] * 2
    assert keys[0][1] == keys[1][1] != keys[2][1] and len({name for _, name in keys}) == 4
    assert len({headers["Idempotency-Key"] for headers, _ in listener.heard}) == len(keys)


def test_the_second_incident_is_undelivered_until_somebody_has_it(tmp_path: Path) -> None:
    """The dead-man's ping depends on it: a critical notice that nobody has is no "all is well"."""
    with MailServer() as server:
        alerts, journal = settings([mailbox(server)]), journal_in(tmp_path)
        tick(journal, alerts, T0, bad())
        for at in range(1, CHECKS + 1):
            tick(journal, alerts, minutes(at), good(minutes(at)))
        server.mood = "MAIL 451"
        _, delivered = tick(journal, alerts, minutes(40), bad(minutes(40)))
        assert delivered.critical_waiting == 1


@pytest.mark.skipif(PROGRAM is None, reason="no Alertmanager: apt-get install prometheus-alertmanager")
def test_a_real_alertmanager_keeps_a_firing_alert_and_ends_it_when_it_is_over(tmp_path: Path) -> None:
    with alertmanager(tmp_path / "am", resolve_timeout="1s") as server:
        alerts = settings([{"webhook": {"shape": "alertmanager", "url": server.url}}])
        journal, now = journal_in(tmp_path), datetime.now(timezone.utc)
        before = now - timedelta(seconds=1)
        mild = replace(bad(before), severity=Severity.WARNING)
        tick(journal, alerts, before, mild)
        first = server.firing()
        tick(journal, alerts, now, bad(now))  # worse: the same alert
        worse = server.firing()
        assert [one["labels"] for one in first] == [one["labels"] for one in worse] and len(worse) == 1
        assert [one["annotations"]["severity"] for one in (*first, *worse)] == ["warning", "critical"]
        ends = datetime.fromisoformat(worse[0]["endsAt"].replace("Z", "+00:00"))
        assert ends - now > timedelta(days=1), "resolve_timeout does not end it"
        over = datetime.now(timezone.utc)
        tick(journal, alerts, over, good(over))
        assert server.firing() == []


@pytest.mark.skipif(PROGRAM is None, reason="no Alertmanager: apt-get install prometheus-alertmanager")
def test_notify_test_fires_and_ends_a_real_alert(tmp_path: Path) -> None:
    with alertmanager(tmp_path / "am") as server:
        (tmp_path / "ftsupervise.yaml").write_text(
            "name: train\nlaunch: {command: 'true'}\nalerts:\n  receivers:\n"
            f"    - webhook: {{shape: alertmanager, url: '{server.url}'}}\n"
        )
        told = type_in("notify", "test", str(tmp_path))
        assert told.exit_code == 0 and "webhook: delivered to Alertmanager at http://127.0.0.1" in told.output
        assert server.firing() == []
        log = (tmp_path / "am" / "log").read_text()
        assert "panic" not in log


def test_notify_test_sends_a_pager_an_event_and_its_end_and_reads_the_answer(
    listener: Listener,  # noqa: F811
    tmp_path: Path,
) -> None:
    key = secret(tmp_path, "key", "R0UT1NG")
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: train\nlaunch: {command: 'true'}\nalerts:\n  receivers:\n"
        f"    - webhook: {{shape: pagerduty, url: '{listener.url}', key_file: {key}}}\n"
    )
    listener.answer = '{"status": "success", "message": "Event processed", "dedup_key": "x"}'
    told = type_in("notify", "test", str(tmp_path))
    assert told.exit_code == 0 and "webhook: delivered to PagerDuty" in told.output and "Event processed" in told.output
    (_, begins), (_, ends) = listener.heard
    assert (begins["event_action"], ends["event_action"]) == ("trigger", "resolve")
    assert begins["dedup_key"] == ends["dedup_key"] and begins["payload"]["severity"] == "info"
    listener.answer = '{"status": "invalid event", "message": "Event object is invalid"}'
    told = type_in("notify", "test", str(tmp_path))
    assert told.exit_code == 1 and "Event object is invalid" in told.output


def test_news_that_a_pager_does_not_get_says_nothing_about_the_pager(
    listener: Listener,  # noqa: F811
    journal: Journal,
    tmp_path: Path,
) -> None:
    key = secret(tmp_path, "key", "R0UT1NG")
    alerts = settings([{"webhook": {"shape": "pagerduty", "url": listener.url, "key_file": key}}])
    listener.status = 500
    tick(journal, alerts, T0, bad())
    listener.status = 202
    announce(journal, alerts, happened(EventKind.STARTED, "started", T0, "job 1", run="train"), T0)
    deliver([journal], alerts, minutes(0.01), jitter=lambda: 0.0)
    assert journal.read().receiver("webhook").failures == 1, "nothing was sent, so it is not known to work"


def test_each_event_of_ten_thousand_attempts_is_announced_once(journal: Journal) -> None:
    alerts = settings([])

    def tell(number: int) -> bool:
        name = f"resumed-{number}"
        event = happened(EventKind.RESUMED, name, T0, f"attempt {number}", attempt=number, run="train")
        return announce(journal, alerts, event, T0)

    for number in (*range(1, 1500, 7), *range(9000, 10_001)):
        assert tell(number)
    state = journal.read()
    assert len(state.announced) <= 1001
    assert all(was_announced(state, f"resumed-{number}", number) for number in range(9001, 10_001))
    assert was_announced(state, "resumed-8", 8) and not tell(9003) and tell(10_001)
    assert json.dumps(sorted(state.announced))  # the journal keeps plain words


def test_a_silence_that_ends_gives_people_time_before_the_escalation(journal: Journal) -> None:
    alerts = settings([{"file": {"path": str(journal.directory.parent / "out")}}], escalate_after="30m")
    tick(journal, alerts, T0, bad())
    ident = next(iter(journal.read().alerts))
    journal.change(lambda state: replace(state, silences=(_silence(ident),)))
    for at in (10, 60, 119):
        assert tick(journal, alerts, minutes(at), bad())[0] == ()
    assert tick(journal, alerts, minutes(121), bad())[0] == (), "two minutes after the silence nobody was late"
    notices = tick(journal, alerts, minutes(150), bad())[0]
    assert [notice.reason.value for notice in notices] == ["escalated"]


def _silence(pattern: str) -> Any:
    from ftsupervise.alerts.outbox import Silence

    return Silence("s1", pattern, "ada", "known", minutes(5), minutes(120))


def test_a_clock_that_was_ten_days_ahead_does_not_stop_reminders_for_ten_days(journal: Journal) -> None:
    alerts = settings([{"file": {"path": str(journal.directory.parent / "out")}}], repeat="1h")
    tick(journal, alerts, T0 + timedelta(days=10), bad())
    tick(journal, alerts, minutes(1), bad())
    notices = tick(journal, alerts, minutes(62), bad())[0]
    assert [notice.reason.value for notice in notices] == ["repeated"]


def test_the_end_of_a_page_is_not_held_back_by_quiet_hours(tmp_path: Path) -> None:
    with MailServer() as server:
        alerts = settings([mailbox(server)], quiet={"hours": ["00:00", "07:00"]}, timezone="UTC")
        journal = journal_in(tmp_path)
        tick(journal, alerts, T0, bad())  # critical: at once
        tick(journal, alerts, minutes(5), replace(bad(), severity=Severity.WARNING))
        tick(journal, alerts, minutes(10), good())
        assert ["RESOLVED" in mail["Subject"] for mail in server.mails] == [False, True]


def test_a_watchdog_that_was_switched_off_explains_others_for_an_hour_and_no_longer(journal: Journal) -> None:
    alerts = settings([{"file": {"path": str(journal.directory.parent / "out")}}])
    cause = replace(bad(), watchdog="storage", subject="")
    hang = replace(bad(), watchdog="hang", subject="step")

    def at(minute: float, *findings: Any) -> list[str]:
        told = record(journal, findings, alerts, minutes(minute), run_name=bad().run).notices
        return [notice.finding.watchdog for notice in told]

    assert at(0, cause) == ["storage"]
    assert at(1, hang) == [] and at(70, hang) == ["hang"]
