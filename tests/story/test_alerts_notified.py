"""One incident through the real outbox to a real SMTP conversation and a Slack-like server."""

from __future__ import annotations

from dataclasses import replace
from datetime import datetime
from pathlib import Path

from ftsupervise.alerts.deliver import deliver
from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import announce, record
from ftsupervise.alerts.wording import disk
from ftsupervise.config.alerting import Alerts
from ftsupervise.findings import EventKind, Finding, Reason, Severity, happened
from ftsupervise.report.alert_rows import alert_rows
from ftsupervise.truth import Health
from tests.neighbours.slack import SlackServer
from tests.neighbours.smtp import MailServer, certificate
from tests.story.alerting_scene import RUN, T0, alerts_cli, bot, mailbox, minutes, secret, settings


def tick(journal: Journal, alerts: Alerts, now: datetime, *findings: Finding) -> list[Reason]:
    recorded = record(journal, findings, alerts, now, run_name=RUN)
    deliver([journal], alerts, now, jitter=lambda: 0.0)
    return [notice.reason for notice in recorded.notices]


def test_an_incident_is_told_once_repeated_once_and_told_to_be_over(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([mailbox(mail), bot(slack, tmp_path)])
    good, bad = disk(RUN, T0, health=Health.OK), disk(RUN, T0)
    told = [
        tick(journal, alerts, minutes(at), seen)
        for at, seen in ((0, bad), (5, bad), (245, bad), (250, good), (255, good))
    ]
    assert told == [[Reason.FIRED], [], [Reason.REPEATED], [Reason.RESOLVED], []]
    subjects = [str(m["Subject"]) for m in mail.mails]
    assert [s.split("]")[0] for s in subjects] == ["[FIRING", "[STILL FIRING", "[RESOLVED"]
    first, *followers = mail.mails
    assert all(first["Message-ID"] in str(m["References"]) == str(m["In-Reply-To"]) for m in followers)
    assert "It lasted 4h 10m" in str(mail.mails[-1].get_content())
    post, repeat, over = slack.posts
    assert post.edits == 1 and "RESOLVED" in post.text and "it lasted 4h 10m" in post.readable()
    assert repeat.thread_ts == over.thread_ts == post.ts


def test_an_alert_that_is_kept_open_since_it_comes_and_goes_is_not_shown_as_wrong_and_its_end_is_not_one_long_trouble(
    mail: MailServer, slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    """Between 15:42 and 16:08 fifteen attempts trained, and at its end one heard that it had lasted for 25 minutes."""
    alerts = settings([mailbox(mail), bot(slack, tmp_path)])
    good, bad = disk(RUN, T0, health=Health.OK), disk(RUN, T0)
    for at, seen in enumerate((bad, good, bad, good, bad)):
        tick(journal, alerts, minutes(at), replace(seen, summary=f"look {at}"))
    for at, seen, fires in ((5, good, 0), (6, bad, 1), (7, good, 0)):
        looked = replace(seen, summary=f"look {at}")
        recorded = record(journal, [looked], alerts, minutes(at), run_name=RUN)
        assert (not recorded.notices, len(recorded.firing)) == (True, fires)
    shown = alerts_cli(journal)
    assert "calm " in shown and "over for now: look 7" in shown and "look 6" not in shown, shown
    assert "came 2 times since 2026-11-21 02:14 UTC" in shown
    (row,) = (row for row in alert_rows(journal.read()) if row.ended is None)
    assert (row.word, row.summary, row.do) == ("calm", "over for now: look 7", "")
    assert tick(journal, alerts, minutes(8), replace(good, final=True)) == [Reason.RESOLVED], "a run that has finished"
    over = str(mail.mails[-1].get_content())
    assert "It is over. It came 2 times between 2026-11-21 02:14 UTC and 2026-11-21 02:17 UTC." in over
    assert "lasted" not in over and "since " not in over and "last     look 6" in over, over
    assert "it came 2 times since 2026-11-21 02:14 UTC" in slack.posts[-2].readable(), "the first post of it, edited"


def test_what_has_happened_is_not_said_to_have_ended_with_the_trouble_beside_it(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path)])
    event = happened(EventKind.RESUMED, "resumed-2", T0, "attempt 2 goes on from step 7", attempt=2, run=RUN)
    announce(journal, alerts, event, T0)
    tick(journal, alerts, T0, disk(RUN, T0))
    tick(journal, alerts, minutes(5), disk(RUN, T0, health=Health.OK))
    post = slack.posts[0]
    assert post.edits == 1 and "attempt 2 goes on from step 7" in post.readable() and "RESOLVED" in post.text
    assert post.readable().count("It ended at") == 1


def test_an_end_and_the_restart_that_made_it_say_once_in_one_mail_that_the_run_goes_on(
    mail: MailServer, journal: Journal
) -> None:
    alerts = settings([mailbox(mail)])
    bad = Finding(RUN, "recovery", "attempt", Health.BAD, Severity.WARNING, "attempt 1 failed", T0)
    good = replace(bad, health=Health.OK, summary="attempt 2 trains, from step 7", attempt=2)
    for at, number in ((0, 2), (10, 3)):
        tick(journal, alerts, minutes(at), bad)
        record(journal, [good], alerts, minutes(at + 1), run_name=RUN)
        event = happened(EventKind.RESUMED, f"resumed-{number}", minutes(at + 1), "goes on", attempt=number, run=RUN)
        announce(journal, alerts, event, minutes(at + 1))
        deliver([journal], alerts, minutes(at + 1), jitter=lambda: 0.0)
    _, same, _, other = (str(one.get_content()) for one in mail.mails)
    assert "RESOLVED" in same and "RESUMED" in same and "Now:" not in same, same
    assert "Now: attempt 2 trains" in other, "the restart beside it is another one"


def test_a_new_trouble_is_never_hidden_in_the_thread_of_an_old_one(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([bot(slack, tmp_path)], escalate_after="30m")
    gone = Finding(RUN, "is-running", "", Health.BAD, Severity.CRITICAL, "the run is gone", T0)
    tick(journal, alerts, T0, disk(RUN, T0))
    tick(journal, alerts, minutes(5), disk(RUN, T0, health=Health.OK), gone)
    tick(journal, alerts, minutes(40), gone)
    first, second, third = slack.posts
    assert first.edits == 1 and not second.thread_ts and "the run is gone" in second.readable()
    assert third.thread_ts == second.ts and third.broadcast and "ESCALATED" in third.text


def test_somebody_is_mentioned_for_a_critical_alert_if_asked_for(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    about = bot(slack, tmp_path)
    about["slack"]["mention"] = "<!here>"
    tick(journal, settings([about]), T0, disk(RUN, T0))
    tick(journal, settings([about]), minutes(5), disk(RUN, T0, health=Health.OK))
    assert slack.posts[0].history[0].startswith("<!here> ")
    assert "<!here>" not in slack.posts[0].text and "<!here>" not in slack.posts[1].text


def test_a_webhook_gets_a_post_for_each_because_it_can_edit_nothing(
    slack: SlackServer, journal: Journal, tmp_path: Path
) -> None:
    alerts = settings([{"slack": {"webhook_file": secret(tmp_path, "hook", slack.webhook_url)}}])
    tick(journal, alerts, T0, disk(RUN, T0))
    tick(journal, alerts, minutes(5), disk(RUN, T0, health=Health.OK))
    assert [post.text.split("]")[0] for post in slack.posts] == ["[FIRING", "[RESOLVED"]


def test_mail_goes_over_starttls_with_a_login(tmp_path: Path, journal: Journal) -> None:
    context, trusted = certificate(tmp_path)
    with MailServer(tls=context, login=("me", "correct horse")) as server:
        about = {"security": "starttls", "ca_file": str(trusted), "user": "me", "host": "localhost"}
        alerts = settings([mailbox(server, password_file=secret(tmp_path, "password", "correct horse"), **about)])
        tick(journal, alerts, T0, disk(RUN, T0))
        assert len(server.mails) == 1 and server.logins


def test_a_wrong_password_is_said_to_be_one_and_not_shown(tmp_path: Path, journal: Journal) -> None:
    context, trusted = certificate(tmp_path)
    with MailServer(tls=context, login=("me", "correct horse")) as server:
        about = {"security": "starttls", "ca_file": str(trusted), "user": "me", "host": "localhost"}
        alerts = settings([mailbox(server, password_file=secret(tmp_path, "password", "wrong horse"), **about)])
        tick(journal, alerts, T0, disk(RUN, T0))
        broken = journal.read().receivers["email"].broken
        assert "refused login: 535" in broken and "horse" not in broken and not server.mails


def test_an_event_is_announced_once_whoever_says_it_again(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])
    for _ in range(3):
        announce(journal, alerts, happened(EventKind.STARTED, "started 88", T0, "started as job 88", run=RUN), T0)
    deliver([journal], alerts, T0)
    assert [str(m["Subject"]) for m in mail.mails] == ["[STARTED] train-70b: started as job 88"]


def test_slurm_down_for_three_ticks_is_one_alert_and_moves_nothing_else(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])

    def slurm(health: Health) -> Finding:
        return Finding(RUN, "slurm-unreachable", "", health, Severity.CRITICAL, "slurmctld does not answer", T0)

    def running(health: Health) -> Finding:
        return Finding(RUN, "is-running", "", health, Severity.CRITICAL, "the run is gone", T0)

    night = [(Health.OK, Health.OK), *[(Health.BAD, Health.UNKNOWN)] * 3, (Health.OK, Health.OK)]
    told = [tick(journal, alerts, minutes(5 * i), slurm(a), running(b)) for i, (a, b) in enumerate(night)]
    assert told == [[], [Reason.FIRED], [], [], [Reason.RESOLVED]]
    assert len(mail.mails) == 2
