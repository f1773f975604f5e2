"""Whatever lies in the journal's folder: it is passed over and told, and the alerts go on."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.outbox import JournalState, Message, ReceiverState, Silence
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import T0, bad, good, mailbox, minutes, settings, tick
from tests.story.forged import generation, lay

ROOT = Path(__file__).resolve().parents[2]
FAR = '"9999-12-31T23:59:59-14:00"'
EARLY = '"0001-01-01T00:00:00+14:00"'
RECEIVER = '{"receivers": {"email": {"broken": "no", "broken_since": %s}}}'
DAMAGED = {
    "base beyond all numbers": generation(JournalState(), 2, "1e309"),
    "base of four thousand digits": generation(JournalState(), 2, "9" * 4000),
    "base that is a text": generation(JournalState(), 2, '"1"'),
    "base that is true": generation(JournalState(), 2, "true"),
    "base below": generation(JournalState(), 2, "-7"),
    "a date that UTC does not have": generation(RECEIVER % FAR, 2),
    "a date before all dates": generation(RECEIVER % EARLY, 2),
    "a date in the year 9000": generation(RECEIVER % '"9000-01-01T00:00:00+00:00"', 2),
    "a date that is a number": generation(RECEIVER % "1e400", 2),
    "failures beyond all numbers": generation('{"receivers": {"email": {"failures": %s}}}' % ("9" * 4200), 2),
    "failures that are none": generation('{"receivers": {"email": {"failures": NaN}}}', 2),
    "nested": generation('{"announced": ' + "[" * 100_000 + "]" * 100_000 + "}", 2),
    "a list for a state": generation("[]", 2),
    "another generation under its name": generation(JournalState(), 1),
}


@pytest.mark.fault(
    "A generation of the journal is damaged: numbers, dates or nesting that nothing can hold",
    "it is passed over and told, and the watch goes on",
)
@pytest.mark.parametrize("what", DAMAGED)
def test_a_damaged_generation_is_passed_over_told_and_ends_no_watch(
    mail: MailServer, journal: Journal, what: str
) -> None:
    alerts = settings([mailbox(mail)])
    journal.change(lambda state: replace(state, announced={"begun": T0}))
    lay(journal.directory, "00000002", DAMAGED[what])
    tick(Journal(journal.directory, spare=journal.spare), alerts, T0, bad())
    tick(Journal(journal.directory, spare=journal.spare), alerts, minutes(5), good())
    said = [" ".join(str(m["Subject"]).split()) for m in mail.mails]
    assert any("FIRING" in one for one in said) and any("RESOLVED" in one for one in said), said
    assert "00000002.json" in "".join(str(m.get_content()) for m in mail.mails)
    assert "begun" in journal.read().announced, "what was there before is still known"


@pytest.mark.threat(
    "The journal holds a file whose number has 250 digits or is far ahead.",
    "ftsupervise can still write the journal.",
)
@pytest.mark.parametrize("name", ["9" * 250, "9" * 12, "9" * 15, "1" + "0" * 11, "000000000042", "99999999"])
def test_a_generation_with_an_absurd_number_does_not_stop_the_journal(
    mail: MailServer, journal: Journal, name: str
) -> None:
    alerts = settings([mailbox(mail)])
    journal.directory.mkdir(parents=True)
    lay(journal.directory, name if len(name) < 250 else name[:249], b"not whole")
    for minute, finding in ((0, bad()), (5, bad()), (10, good())):
        tick(Journal(journal.directory, spare=journal.spare), alerts, minutes(minute), finding)
    fresh = Journal(journal.directory, spare=journal.spare)
    assert fresh.read().alerts and not fresh.unsaved and not journal.spare.exists()
    said = [" ".join(str(m["Subject"]).split())[:7] for m in mail.mails]
    assert [one for one in said if "FIRING" in one] and "[RESOLV" in said[-1]
    assert (journal.directory / "00000001.json").is_file()


def test_a_number_just_ahead_that_is_taken_is_stepped_over(journal: Journal) -> None:
    journal.directory.mkdir(parents=True)
    lay(journal.directory, "00000009", b"not whole")
    journal.change(lambda state: replace(state, announced={"begun": T0}))
    assert (journal.directory / "00000010.json").is_file()


_MEASURE = """
import resource, sys; from dataclasses import replace; from datetime import datetime, timezone
from ftsupervise.alerts.journal import Journal
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
journal = Journal(sys.argv[1])
journal.change(lambda s: replace(s, announced={**s.announced, "later": datetime.now(timezone.utc)}))
print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, sorted(journal.read().announced))
"""


@pytest.mark.fault("A generation of 60 MB", "it is never read, and told")
def test_a_generation_of_sixty_megabytes_takes_no_memory_and_is_told(journal: Journal) -> None:
    journal.change(lambda state: replace(state, announced={"begun": T0}))
    lay(journal.directory, "00000002", generation('{"more": [' + "[]," * 20_000_000 + "[]]}", 2))
    command = [sys.executable, "-c", _MEASURE, str(journal.directory)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=True)
    kilobytes, _, rest = done.stdout.partition(" ")
    assert int(kilobytes) < 50_000 and rest.strip() == "['begun', 'later']"
    (journal.directory / "00000003.json").unlink()
    journal.read()
    assert any("00000002.json" in problem and "bytes" in problem for problem in journal.problems)


@pytest.mark.threat(
    "The journal holds thousands of foreign files.",
    "ftsupervise skips them and reports them in a few sentences.",
)
def test_five_thousand_files_of_others_are_a_few_sentences(journal: Journal) -> None:
    journal.change(lambda state: replace(state, announced={"begun": T0}))
    for number in range(2, 5_000):
        os.close(os.open(journal.directory / f"{number:08d}.json", os.O_CREAT | os.O_WRONLY))
    assert "begun" in journal.read().announced and len(journal.problems) <= 6


@pytest.mark.fault("The journal's state is too large to be read again", "it is not written, and that is told")
def test_a_state_that_is_too_large_to_be_read_again_is_not_written_but_said(journal: Journal) -> None:
    journal.change(lambda state: replace(state, announced={"begun": T0}))
    many = {f"{'x' * 200}{number}": T0 for number in range(120_000)}
    journal.change(lambda state: replace(state, announced=many))
    assert "too many" in journal.unsaved
    assert len(journal.read().announced) == 120_000, "this process still knows it"
    assert list(Journal(journal.directory, spare=journal.spare).read().announced) == ["begun"]


@pytest.mark.fault("The journal's folder becomes writable for everybody", "it is told, and each alert is told once")
def test_a_folder_that_everybody_may_write_is_told_and_its_alerts_are_told_once(
    mail: MailServer, journal: Journal
) -> None:
    alerts = settings([mailbox(mail)])
    tick(journal, alerts, T0, good())
    journal.directory.chmod(0o777)
    for minute in (5, 10, 15, 20):
        tick(Journal(journal.directory, spare=journal.spare), alerts, minutes(minute), bad(minutes(minute)))
    said = "".join(str(m.get_content()) for m in mail.mails)
    assert said.count("FIRING (critical)  train-70b: disk /scratch") == 1
    assert "everybody may write it (chmod go-w" in said
    journal.directory.chmod(0o755)
    tick(Journal(journal.directory, spare=journal.spare), alerts, minutes(25), good(minutes(25)))
    said = "".join(str(m.get_content()) for m in mail.mails)
    assert (
        said.count("FIRING (critical)  train-70b: disk /scratch") == 1 and "RESOLVED  train-70b: disk /scratch" in said
    )


def test_a_time_without_a_zone_is_utc_and_ends_nothing(mail: MailServer, journal: Journal) -> None:
    journal.directory.mkdir(parents=True)
    state = '{"receivers": {"email": {"failures": 1, "failing_since": "2026-11-21T02:00:00", "error": "x"}}}'
    lay(journal.directory, "00000001", generation(state, 1, 0))
    tick(journal, settings([mailbox(mail)]), T0, bad())
    assert len(mail.mails) == 1


# --------------------------------------------------------------------------------------------- a clock that was ahead

YEAR = T0 + timedelta(days=365)


@pytest.mark.fault("The clock was a year ahead while messages were written", "they are sent when it is right again")
def test_what_a_clock_that_was_ahead_put_off_is_sent_when_it_is_right_again(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "MAIL 451"
    tick(journal, alerts, YEAR, bad(YEAR))
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert len(mail.mails) == 1


@pytest.mark.fault("A receiver was given up by a clock that was ahead", "it is tried again")
def test_a_receiver_that_was_given_up_by_a_clock_that_was_ahead_is_tried_again(
    mail: MailServer, journal: Journal
) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "MAIL 550"
    tick(journal, alerts, YEAR, bad(YEAR))
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert mail.mails


@pytest.mark.fault("Somebody whose clock was ahead silenced an alert", "the silence holds nothing back")
def test_a_silence_from_a_clock_that_was_ahead_silences_nothing_for_a_year(mail: MailServer, journal: Journal) -> None:
    wrong = Silence("abc", "disk", "ada", "", YEAR, YEAR + timedelta(hours=4))
    journal.change(lambda state: replace(state, silences=(wrong,)))
    tick(journal, settings([mailbox(mail)]), T0, bad())
    assert mail.mails


def test_a_claim_of_a_watcher_whose_clock_was_ahead_is_none(mail: MailServer, journal: Journal) -> None:
    alerts = settings([mailbox(mail)])
    mail.mood = "MAIL 451"
    tick(journal, alerts, T0, bad())

    def claimed(state: JournalState) -> JournalState:
        return replace(state, outbox=tuple(replace(m, claimed_by="x", claimed_until=YEAR) for m in state.outbox))

    journal.change(claimed)
    mail.mood = "ok"
    tick(journal, alerts, minutes(5), bad())
    assert len(mail.mails) == 1


def test_quiet_hours_still_hold_what_is_to_wait_for_the_morning() -> None:
    from ftsupervise.alerts.outbox import due

    message = Message("m", "email", "run", (), created=T0, due=T0 + timedelta(hours=9))
    state = JournalState(outbox=(message,), receivers={"email": ReceiverState()})
    assert not due(state, T0 + timedelta(hours=8)) and due(state, T0 + timedelta(hours=9))
    assert due(replace(state, outbox=(replace(message, created=YEAR, due=YEAR),)), T0), (
        "written by a clock that was ahead"
    )
