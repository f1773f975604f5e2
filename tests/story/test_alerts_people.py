"""What people do: list, acknowledge, silence, test a receiver, preview; and what the dead-man service hears."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.alerts.step import alert_id
from ftsupervise.config.alerting import Alerts, DeadMan
from ftsupervise.errors import Error
from ftsupervise.findings import AlertState, Finding, Reason, Severity
from ftsupervise.truth import Health
from ftsupervise.watch.tick import after_tick
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import (
    RUN,
    T0,
    alerts_cli,
    bad,
    good,
    journal_in,
    mailbox,
    minutes,
    secret,
    settings,
    tick,
    type_in,
)

KEY = alert_id(bad())


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    return journal_in(tmp_path)


def test_the_list_says_what_fires_since_when_and_who_was_told(mail: MailServer, journal: Journal) -> None:
    assert "no alerts so far" in alerts_cli(journal)
    tick(journal, settings([mailbox(mail)]), T0, bad())
    said = alerts_cli(journal)
    for words in ("firing", "critical", KEY, "3.2 TB free", "since 2026-11-21 02:10 UTC", "(email: delivered)"):
        assert words in said
    tick(journal, settings([mailbox(mail)]), minutes(5), good())
    assert "nothing fires" in alerts_cli(journal)


def test_the_list_for_programs_is_json(mail: MailServer, journal: Journal) -> None:
    tick(journal, settings([mailbox(mail)]), T0, bad())
    said = json.loads(alerts_cli(journal, "list", "--json"))
    assert said["schema_version"] == 2 and said["alerts"][0]["state"] == "firing"
    assert (said["alerts"][0]["finding"]["severity"], said["alerts"][0]["finding"]["health"]) == ("critical", "bad")


@pytest.mark.parametrize("key", [KEY, KEY[:6], KEY[:3], KEY[:3].upper(), "disk", "disk: /scratch"])
def test_what_is_acknowledged_is_not_repeated_but_told_to_be_over(mail: MailServer, journal: Journal, key: str) -> None:
    alerts = settings([mailbox(mail)], repeat="1h", escalate_after="30m")
    tick(journal, alerts, T0, bad())
    alerts_cli(journal, "ack", key, "--reason", "I am moving checkpoints")
    assert "acknowledged by" in alerts_cli(journal) and "moving checkpoints" in alerts_cli(journal)
    told = [n.reason for hour in range(1, 6) for n in tick(journal, alerts, minutes(60 * hour), bad())[0]]
    told += [n.reason for n in tick(journal, alerts, minutes(400), good())[0]]
    assert told == [Reason.RESOLVED]


def test_what_nobody_acknowledges_is_told_louder_to_others(mail: MailServer, journal: Journal, tmp_path: Path) -> None:
    pager = {"name": "pager", "file": {"path": str(tmp_path / "pager")}}
    routes = [{"escalated": True, "to": ["pager"]}, {"to": ["email"]}]
    alerts = settings([mailbox(mail), pager], escalate_after="30m", routes=routes)
    tick(journal, alerts, T0, bad())
    tick(journal, alerts, minutes(35), bad())
    assert "It has not been acknowledged" in (tmp_path / "pager").read_text()
    tick(journal, alerts, minutes(40), good())
    assert "RESOLVED" in (tmp_path / "pager").read_text()
    assert [str(m["Subject"]).split("]")[0] for m in mail.mails] == ["[FIRING", "[ESCALATED", "[RESOLVED"]


def test_a_silence_holds_back_and_what_still_fires_is_told_when_it_is_lifted(
    mail: MailServer, journal: Journal
) -> None:
    alerts, now = settings([mailbox(mail)]), datetime.now(timezone.utc)
    said = alerts_cli(journal, "silence", "disk*", "--for", "2h", "--reason", "moving house")
    assert "silenced until" in said
    tick(journal, alerts, now, bad(now))
    assert not mail.mails and "silenced by" in alerts_cli(journal) and "moving house" in alerts_cli(journal)
    alerts_cli(journal, "unsilence", "disk*")
    tick(journal, alerts, now + timedelta(minutes=5), bad(now))
    assert len(mail.mails) == 1


def test_what_is_kept_beside_the_run_is_listed_and_acknowledged_with_it(journal: Journal, tmp_path: Path) -> None:
    from types import SimpleNamespace

    from ftsupervise.watch.checks import journal_of

    run: Any = SimpleNamespace(name=RUN, run_dir=journal.directory.parent.parent)
    journal_of(run, tmp_path / "state").parent.mkdir(parents=True)
    dark = Finding(RUN, "storage", "run directory", Health.BAD, Severity.CRITICAL, "does not answer", T0)
    record(Journal(journal_of(run, tmp_path / "state")), [dark], settings([]), T0, run_name=RUN)
    slurm = Finding("", "slurm", "controller", Health.BAD, Severity.WARNING, "slurm unreachable", T0)
    record(Journal(tmp_path / "state" / "watch" / "journal"), [slurm], settings([]), T0, run_name="")
    said = alerts_cli(journal)
    assert "does not answer" in said and "slurm unreachable" in said
    assert "acknowledged" in alerts_cli(journal, "ack", "storage")


def test_what_does_not_exist_is_said_in_one_sentence(journal: Journal) -> None:
    for words in (("ack", "deadbeef"), ("unsilence", "nothing")):
        with pytest.raises(Error) as said:
            alerts_cli(journal, *words)
        assert said.value.hint
    assert isinstance(type_in("alerts", "silence", "x", "/nowhere").exception, Error)
    with pytest.raises(Error):
        alerts_cli(journal, "silence", "disk", "--for", "soon")


def configured(directory: Path, receivers: list[dict[str, object]]) -> str:
    path = directory / "ftsupervise.yaml"
    about = {"name": RUN, "launch": {"command": "true"}, "run_dir": "run", "alerts": {"receivers": receivers}}
    path.write_text(json.dumps(about))
    return str(path)


def test_notify_test_sends_a_real_message_and_says_what_became_of_it(mail: MailServer, tmp_path: Path) -> None:
    broken: dict[str, object] = {"name": "old", "command": {"argv": ["sh", "-c", "exit 78"]}}
    absent: dict[str, object] = {"name": "away", "command": {"argv": ["/no/such/program"]}}
    config = configured(tmp_path, [mailbox(mail), broken, absent])
    result = type_in("notify", "test", config)
    assert result.exit_code == 1 and "email: delivered to " in result.output and "old: will not work" in result.output
    assert "away: refused" in result.output and "/no/such/program: no such program" in result.output
    assert "this is a test" in mail.mails[0].get_content()
    assert type_in("notify", "test", config, "--receiver", "email").exit_code == 0
    assert isinstance(type_in("notify", "test", config, "--receiver", "who").exception, Error)


def test_notify_test_takes_a_mended_receiver_into_use_again(mail: MailServer, journal: Journal, tmp_path: Path) -> None:
    config, alerts = configured(tmp_path, [mailbox(mail)]), settings([mailbox(mail)])
    mail.mood = "MAIL 550"
    tick(journal, alerts, T0, bad())
    assert "given up since" in alerts_cli(journal)
    mail.mood = "ok"
    type_in("notify", "test", config)
    tick(journal, alerts, minutes(5), bad())
    assert [str(m["Subject"]).strip().split("]")[0] for m in mail.mails] == ["[NEWS", "[FIRING"]


@pytest.mark.parametrize("kind", ["text", "slack", "html"])
def test_preview_shows_every_message_and_sends_none(mail: MailServer, tmp_path: Path, kind: str) -> None:
    result = type_in("notify", "preview", configured(tmp_path, [mailbox(mail)]), "--as", kind)
    for word in (
        "STARTED",
        "FIRING",
        "ESCALATED",
        "STILL FIRING",
        "RESOLVED",
        "NO LONGER WATCHED",
        "+137 more",
        "FINISHED",
    ):
        assert word in result.output
    assert result.exit_code == 0 and not mail.mails


def test_a_mistake_in_ones_own_template_is_shown_by_day_and_costs_nothing_by_night(
    mail: MailServer, journal: Journal, tmp_path: Path
) -> None:
    own = tmp_path / "own"
    own.mkdir()
    (own / "alert.text.j2").write_text("{{ m.tilte }}")
    path = Path(configured(tmp_path, [mailbox(mail)]))
    about = json.loads(path.read_text())
    about["alerts"]["templates"] = "own"
    path.write_text(json.dumps(about))
    assert "tilte" in str(type_in("notify", "preview", str(path)).exception)
    tick(journal, settings([mailbox(mail)], templates=str(own)), T0, bad())
    said = mail.mails[0].get_content()
    assert "your own alert.text.j2 cannot be used" in said and "3.2 TB free" in said


def test_a_command_and_a_file_get_the_words_and_no_shell_does(journal: Journal, tmp_path: Path) -> None:
    script = tmp_path / "script"
    script.write_text('#!/bin/sh\ncat > "$1"; echo "$FTSUPERVISE_ALERT_STATE $FTSUPERVISE_ALERT_TITLE" >> "$1"\n')
    script.chmod(0o755)
    wanted: list[dict[str, Any]] = [{"command": {"argv": [str(script), str(tmp_path / "out")]}}]
    wanted.append({"file": {"path": str(tmp_path / "file")}})
    evil = Finding(RUN, "disk", "$(touch canary)", Health.BAD, Severity.WARNING, "`touch canary`; $(touch canary)", T0)
    _, delivered = tick(journal, settings(wanted), T0, evil)
    assert len(delivered.sent) == 2 and not Path("canary").exists()
    for name in ("out", "file"):
        assert "$(touch canary)" in (tmp_path / name).read_text()
    assert "fired [FIRING]" in (tmp_path / "out").read_text()


def test_a_command_that_hangs_is_killed_and_tried_again(journal: Journal) -> None:
    _, delivered = tick(journal, settings([{"command": {"argv": ["sleep", "60"], "timeout": "200ms"}}]), T0, bad())
    assert "took longer" in delivered.failed[0][1] and delivered.critical_waiting == 1


def test_a_disk_that_is_full_for_the_journal_still_gets_its_message_out(mail: MailServer, tmp_path: Path) -> None:
    (tmp_path / "run").write_text("a file where the directory should be")
    (tmp_path / "private").write_text("and no spare either")
    journal = Journal(tmp_path / "run" / "journal", spare=tmp_path / "private" / "spare")
    recorded = record(journal, [bad()], settings([mailbox(mail)]), T0, run_name=RUN)
    assert recorded.unsaved
    from ftsupervise.alerts.deliver import deliver

    deliver([journal], settings([mailbox(mail)]), T0)
    said = "".join(str(m.get_content()) for m in mail.mails)
    assert "3.2 TB free" in said and "journal cannot be written" in said


def test_an_hourly_watchdog_is_not_forgotten_between_its_turns(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)], repeat=None)
    other = Finding(RUN, "hang", "step", Health.OK, Severity.WARNING, "fine", T0)
    tick(journal, alerts, T0, bad(), other)
    for hour in range(1, 48):
        assert not tick(journal, alerts, minutes(60 * hour), other)[0]
    assert [n.reason for n in tick(journal, alerts, minutes(60 * 73), other)[0]] == [Reason.UNWATCHED]
    assert all(a.state is not AlertState.FIRING for a in journal.read().alerts.values())


# ------------------------------------------------------------------------------------------------------- dead-man


class Service:
    """A healthchecks-like service: ``heard`` are (path, text)."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, str]] = []
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                text = self.rfile.read(int(self.headers["Content-Length"])).decode()
                service.heard.append((self.path, text))
                self.send_response(404 if "gone" in self.path else 200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None:
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True).start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"


@pytest.fixture
def service() -> Iterator[Service]:
    one = Service()
    yield one
    one.server.shutdown()
    one.server.server_close()


def test_the_dead_man_hears_of_a_tick_only_if_it_saw_and_could_tell(service: Service, tmp_path: Path) -> None:
    about = DeadMan(url_file=Path(secret(tmp_path, "url", f"{service.url}/ping/uuid")))
    assert after_tick(about, Delivered(waiting=1)) == ""
    assert after_tick(about, Delivered(), "no slurmctld") == ""
    assert after_tick(about, Delivered(critical_waiting=2)) == ""
    paths = [path for path, _ in service.heard]
    assert paths == ["/ping/uuid", "/ping/uuid/log", "/ping/uuid/log"]
    assert "no slurmctld" in service.heard[1][1]


def test_a_dead_man_service_in_trouble_is_a_sentence_without_its_secret(service: Service, tmp_path: Path) -> None:
    gone = DeadMan(url_file=Path(secret(tmp_path, "gone", f"{service.url}/gone/canary123")))
    setattr(service.server.RequestHandlerClass, "timeout", 1)  # noqa: B010 - mypy knows it as a function
    assert "404" in after_tick(gone, Delivered())
    down = DeadMan(url_file=Path(secret(tmp_path, "down", "http://127.0.0.1:9/canary123")))
    plain = DeadMan(url_file=Path(secret(tmp_path, "plain", "http://example.org/canary123")))
    for about in (down, plain, DeadMan(url_env="NOT_SET_ANYWHERE")):
        said = after_tick(about, Delivered())
        assert said and "canary123" not in said


def test_settings_load_from_yaml_as_they_are_written(tmp_path: Path) -> None:
    from ftsupervise.config.load import dump, load, loads

    config = configured(
        tmp_path, [{"email": {"host": "m", "from": "a@b.c", "to": ["d@e.f"], "password_file": "pw", "user": "u"}}]
    )
    run = load(Path(config))
    assert isinstance(run.alerts, Alerts)
    email = run.alerts.named["email"].settings
    assert email.password_file == tmp_path / "pw" and loads(dump(run)).alerts == run.alerts


# ---------------------------------------------------------------------------- a receiver that was given up, or was held


def status_says(journal: Journal) -> str:
    result = type_in("status", str(journal.directory.parent.parent))
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.fault(
    "A receiver is given up",
    "`status`, `alerts` and `notify test` say so, since when, and how many messages wait",
)
def test_given_up_is_said_where_people_look(mail: MailServer, journal: Journal, tmp_path: Path) -> None:
    config, alerts = configured(tmp_path, [mailbox(mail)]), settings([mailbox(mail)])
    assert "  receiver  " not in status_says(journal)
    mail.mood = "MAIL 550"
    tick(journal, alerts, T0, bad())
    for said in (alerts_cli(journal), status_says(journal), type_in("notify", "test", config).output):
        assert "given up since 2026-11-21 02:10 UTC" in said and "1 message waiting" in said
    mail.mood = "greet 554"
    tick(journal, alerts, minutes(120), bad())
    for said in (alerts_cli(journal), status_says(journal)):
        assert "refused 2 times in a row" in said and "given up" not in said
    mail.mood = "ok"
    said = type_in("notify", "test", config).output
    assert "email: delivered to " in said and "it is in use again" in said
    assert "  receiver  " not in status_says(journal) and "receiver email: " not in alerts_cli(journal)


@pytest.mark.fault("A receiver works again, but its messages are held", "`notify test` frees them")
def test_notify_test_frees_what_a_clock_that_was_ahead_holds(
    mail: MailServer, journal: Journal, tmp_path: Path
) -> None:
    config, alerts, year = configured(tmp_path, [mailbox(mail)]), settings([mailbox(mail)]), T0 + timedelta(days=365)
    mail.mood = "MAIL 451"
    tick(journal, alerts, year, bad(year))
    mail.mood = "ok"
    assert type_in("notify", "test", config).exit_code == 0
    health, (message,) = journal.read().receivers["email"], journal.read().outbox
    assert health.not_before is None and not health.failures
    now = datetime.now(timezone.utc)
    assert message.due <= now and message.claimed_until is None
    tick(journal, alerts, now, bad(now))
    assert ["FIRING" in str(m["Subject"]) for m in mail.mails][:2] == [False, True]


def test_notify_test_leaves_quiet_hours_and_a_message_that_somebody_sends_alone(journal: Journal) -> None:

    from ftsupervise.alerts.outbox import JournalState, Message, ReceiverState, free

    morning, lease = T0 + timedelta(hours=5), T0 + timedelta(seconds=90)
    waits = Message("a", "email", RUN, (), created=T0, due=morning)
    sending = Message("b", "email", RUN, (), created=T0, due=T0, tries=1, claimed_by="x", claimed_until=lease)
    state = JournalState(outbox=(waits, sending), receivers={"email": ReceiverState(failures=3, not_before=lease)})
    assert free(state, "email", T0).outbox == (waits, sending)
    fine = replace(state, receivers={})
    assert free(fine, "email", T0) is fine
