"""How an alert is named: by its id or the beginning of one, its watchdog, its subject; and the heading of one about no run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from ftsupervise.alerts.journal import Journal
from ftsupervise.alerts.record import record
from ftsupervise.alerts.step import alert_id
from ftsupervise.errors import Error
from tests.neighbours.smtp import MailServer
from tests.story.alerting_scene import T0, alerts_cli, bad, journal_in, mailbox, settings, tick, type_in


@pytest.fixture
def journal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Journal:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    return journal_in(tmp_path)


@pytest.mark.fault(
    "The short beginning of an id acknowledges another alert than was meant.",
    "A beginning that several alerts have is refused, and names them.",
)
def test_the_beginning_of_an_id_means_the_one_alert_that_has_it(mail: MailServer, journal: Journal) -> None:
    many = [replace(bad(), subject=f"/scratch{n}") for n in range(40)]
    tick(journal, settings([mailbox(mail)]), T0, *many)
    ids = [alert_id(one) for one in many]
    first = next(one for one in ids if sum(other.startswith(one[:2]) for other in ids) > 1)
    error = type_in("alerts", "ack", first[:2], str(journal.directory.parents[1])).exception
    assert isinstance(error, Error) and error.exit_code == 64
    assert f"{first[:2]!r} is the beginning of several: " in str(error) and first in str(error)
    assert not any(alert.acked_by for alert in journal.read().alerts.values())
    alerts_cli(journal, "silence", first[:7])
    (silence,) = journal.read().silences
    assert silence.pattern == first  # nothing that comes later can have it too
    alerts_cli(journal, "unsilence", silence.id[:3])
    assert journal.read().silences == ()


@pytest.mark.fault(
    "A misspelt silence, `silence nosuchdog`, is taken and silences nothing.",
    "A name that no watchdog and no alert has is refused, with the names there are.",
)
@pytest.mark.parametrize(
    ("pattern", "said"),
    [
        ("nosuchdog", "no watchdog and no alert is called 'nosuchdog'"),
        ("dsik", "did you mean 'disk'?"),
        ("nosuchdog: /scratch", "is called 'nosuchdog: /scratch'"),
        ("ffffffff", "is called 'ffffffff'"),
    ],
)
def test_a_silence_for_a_name_that_nobody_knows_is_refused(journal: Journal, pattern: str, said: str) -> None:
    error = type_in("alerts", "silence", pattern, str(journal.directory.parents[1])).exception
    assert isinstance(error, Error) and error.exit_code == 64
    assert said in str(error) and "is-running" in error.hint
    assert journal.read().silences == ()


@pytest.mark.parametrize("pattern", ["disk", "d*", "storage", "slurm", "disk: /scratch", "cron", "is_running"])
def test_a_silence_for_a_name_that_may_still_come_is_taken(journal: Journal, pattern: str) -> None:
    alerts_cli(journal, "silence", pattern)
    assert [one.pattern for one in journal.read().silences] == [pattern]


def test_every_name_that_an_alert_can_have_is_known_to_silence() -> None:
    import ast

    import ftsupervise
    from ftsupervise.findings import BESIDES
    from ftsupervise.watch.watchdogs import WATCHDOGS

    found = set()
    for path in Path(ftsupervise.__file__).parent.rglob("*.py"):
        tree = ast.parse(path.read_text())
        constants = {ast.unparse(n.targets[0]): n.value for n in tree.body if isinstance(n, ast.Assign)}
        for node in ast.walk(tree):
            name: ast.expr | None = None
            if isinstance(node, ast.keyword) and node.arg == "watchdog":  # of a Finding or of Words
                name = node.value
            elif isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".finding"):
                name = node.args[0].elts[1] if isinstance(node.args[0], ast.Tuple) else None  # (run, watchdog, subject)
            if isinstance(name, ast.Name):
                name = constants.get(name.id)
            if isinstance(name, ast.Constant):
                found.add(name.value)
    assert {*BESIDES} - {"run", "cron"} <= found <= {*WATCHDOGS, *BESIDES}


def test_a_message_about_no_run_has_no_empty_name_in_its_heading(mail: MailServer, journal: Journal) -> None:
    record(journal, [replace(bad(), run="")], settings([mailbox(mail)]), T0, run_name="")
    (message,) = journal.read().outbox
    from ftsupervise.alerts.wording import Parcel, render

    for kind in ("text", "slack", "html"):
        text = render(f"alert.{kind}.j2", Parcel(message, T0), kind=kind)
        said = text.replace("```", "")  # which begins and ends a command to copy
        assert "  : " not in said and "``" not in said and ">&ensp;: " not in said, text
    assert "FIRING (critical)  disk /scratch" in render("alert.text.j2", Parcel(message, T0))
    assert "  disk /scratch" in alerts_cli(journal) and ": disk" not in alerts_cli(journal)
