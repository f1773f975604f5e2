"""The report of runs with a prepared past: the verdict, what cost most, hostile text, Markdown, the week, the mail."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timezone
from html.parser import HTMLParser
from pathlib import Path

import pytest

from ftsupervise.replicas.table import GroupState
from ftsupervise.report.account import Spent
from ftsupervise.report.alert_rows import AlertRow
from ftsupervise.report.everything import CheckpointRow, NodeRow, SettingRow, report_of
from ftsupervise.report.groups import groups_report
from ftsupervise.report.html import page
from ftsupervise.report.markdown import as_markdown
from ftsupervise.report.summary import headline, sentences, times_of
from ftsupervise.report.week import week_of
from ftsupervise.report.week_page import as_markdown as week_as_markdown
from ftsupervise.report.week_page import page as week_page
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.prepared_account import NOW
from tests.neighbours.prepared_account import PreparedAccount as Account
from tests.neighbours.prepared_runs import NASTY, STORIES, prepare
from tests.neighbours.smtp import MailServer
from tests.neighbours.supervised import outside_a_job


@pytest.fixture(scope="module")
def account(tmp_path_factory: pytest.TempPathFactory) -> Account:
    return Account(tmp_path_factory.mktemp("account"), (*STORIES, "hostile", "groups"))


# -------------------------------------------------------------------------------------------------- the six stories


def test_everything_that_is_known_stands_in_it(account: Account) -> None:
    found = account.report("hang")
    assert [(one.kind, one.goes_on) for one in found.incidents] == [("hang", False), ("hang", False), ("hang", True)]
    assert {one.nodes for one in found.incidents} == {("node-21",)}, "also where the hang is not over"
    node = next(row for row in found.nodes.rows if isinstance(row, NodeRow) and row.name == "node-21")
    assert (node.state, node.faults, node.incidents) == ("excluded", 3, 2)
    (alert,) = [row for row in found.alerts.rows if isinstance(row, AlertRow)]
    assert (alert.word, alert.told) == ("firing", ("email", "file"))
    assert [word for word, _ in alert.steps] == ["fired"], "one row for an alert, with all that was sent about it"
    steps = [row.step for row in found.checkpoints.rows if isinstance(row, CheckpointRow)]
    assert len(steps) == 8 and steps == sorted(steps, reverse=True)  # type: ignore[type-var]
    settings = {row.key: row for row in found.settings.rows if isinstance(row, SettingRow)}
    assert settings["launch.jobs"].origin == "default"
    assert re.fullmatch(r".*/run\.yaml:\d+:\d+", settings["launch.nodes"].origin)
    shown = page(found)
    assert '<a href="https://wandb.ai/lab/pretrain/runs/8f3k" rel="noreferrer noopener">' in shown
    assert "Its page in W&B: <https://wandb.ai/lab/pretrain/runs/8f3k>" in as_markdown(found).replace("\\&", "&")
    for text in (
        "ETTR, Meta",
        "ETTR, ByteRobust",
        "rank 163 waits in ncclAllReduce",
        "node-21",
        "email, file",
        "launch.nodes",
    ):
        assert text in shown, text


def test_replica_groups_are_rows_with_the_times_they_were_away_and_the_stalls_that_the_others_saw(
    account: Account,
) -> None:
    found = account.report("groups")
    assert found.groups is not None
    rows = {one.now.name: one for one in found.groups.rows}
    assert [len(rows[name].faults) for name in ("g000", "g001", "g002", "g003")] == [0, 1, 0, 1]
    (restart,) = [one for one in rows["g001"].drawn if one.kind is Spent.RESTART and one.attempt is None]
    assert restart.seconds == pytest.approx(900, abs=5), "lost, and back again"
    assert rows["g003"].drawn[-1].kind is Spent.QUEUE and rows["g000"].drawn[-1].kind is Spent.TRAIN
    seen = found.groups.seen
    stopped = seen._replace(rows=tuple(one._replace(state=GroupState.STOPPED) for one in seen.rows))
    braked = groups_report(found.detail.status.rundir, stopped, NOW)
    assert braked is not None and braked.rows[3].drawn[-1].kind is Spent.BRAKED
    shown = page(found)
    for text in (
        "3 of 4 groups run",
        "waited 2 times for one that was lost or made no progress",
        "back after 17m 10s",
        "not back yet",
        'href="#groups"',
    ):
        assert text in shown, text
    assert 'href="#groups"' not in page(account.report("hang")), "a run without groups has no such part"


# ---------------------------------------------------------------------------------------------------- hostile text


class Tags(HTMLParser):
    """What the page consists of, as a browser would see it."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


@pytest.mark.threat(
    "Names of nodes, jobs and checkpoints, and lines of logs, hold HTML, scripts or Markdown that would act in a "
    "report.",
    "The report escapes them. Its own policy lets only its own script run, by its digest, and fetches nothing.",
)
def test_no_text_of_a_stranger_becomes_markup_whatever_field_it_stands_in(account: Account) -> None:
    found = account.report("hostile")
    clean = page(account.report("hang"))
    seen, usual = Tags(page(found)), Tags(clean)
    assert [tag for tag, _ in seen.tags if tag == "script"] == ["script", "script"]
    assert {tag for tag, _ in seen.tags} <= {tag for tag, _ in usual.tags} | {"br"}, "no other tag than in any report"
    assert not [name for _, attrs in seen.tags for name in attrs if name.startswith("on") or name == "style"]
    assert "\u202e" not in page(found)
    shown = NASTY.replace("\u202e", "?")
    for where in ("cause", "node", "job", "evidence", "alert", "checkpoint", "setting"):
        assert shown[:40] in seen.text, where
    assert seen.text.count(shown[:40]) >= 8, "it is shown, as text, in each of its fields"
    assert all((attrs["href"] or "").startswith("#") for tag, attrs in seen.tags if tag == "a"), (
        "no strange address is a link"
    )
    week = week_of({"hostile": account.folder / "hostile"}, NOW, account.env)
    assert {tag for tag, _ in Tags(week_page(week)).tags} <= {tag for tag, _ in usual.tags} | {"br"}


def test_the_policy_of_the_page_lets_only_its_own_script_run_and_fetches_nothing(account: Account) -> None:
    import base64
    import hashlib

    text = page(account.report("hostile"))
    found = re.search(r'Content-Security-Policy" content="([^"]*)"', text)
    assert found is not None
    policy = dict(part.strip().split(" ", 1) for part in found[1].split(";"))
    assert policy["default-src"] == "'none'"
    script = text.rpartition("<script>")[2].partition("</script>")[0]
    style = text.partition("<style>")[2].partition("</style>")[0]
    for name, content in (("script-src", script), ("style-src", style)):
        assert policy[name] == f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"
    assert not re.search(r"""(?:src|href)=["'](?!#)""", text), "nothing is fetched"


def test_markdown_has_no_markup_of_strangers_either(account: Account) -> None:
    text = as_markdown(account.report("hostile"))
    for line in text.splitlines():
        outside = re.sub(r"`[^`]*`", "", re.sub(r"\\.", "", line))  # without what is escaped, then without code
        assert not re.search(r"[<>]|\]\(|`", outside), line
    head, *rows = [line for line in text.splitlines() if line.startswith("| ")]
    assert all(re.sub(r"\\.", "", row).count("|") in (4, 5, 6, 7) for row in (head, *rows))


def test_a_secret_in_a_line_of_a_log_is_not_passed_on(account: Account) -> None:
    from ftsupervise.report.everything import harmless

    (first, *_) = account.report("hang").incidents
    token = "hf_" + "aBcD" * 9
    assert token not in harmless(first._replace(evidence=f"401 for token={token}", cause=f"exit 1: {token}")).evidence


# ------------------------------------------------------------------------------------------------------ the command


def test_the_command_writes_one_file_and_says_where(account: Account, tmp_path: Path) -> None:
    done = account.type("report", "hang", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert re.fullmatch(rf"{re.escape(str(tmp_path))}/report-hang\.html: \d+ kB\n", done.stdout)
    assert [path.name for path in tmp_path.iterdir()] == ["report-hang.html"]
    (tmp_path / "elsewhere").symlink_to("/etc/hostname")
    done = account.type("report", "hang", "-o", "elsewhere", cwd=tmp_path)
    assert done.returncode == 0 and not (tmp_path / "elsewhere").is_symlink(), "a link is replaced, not followed"
    done = account.type("report", "hang", "hang", cwd=tmp_path)
    assert re.findall(r"report-.*html", done.stdout) == ["report-hang.html", "report-hang-2.html"]
    done = account.type("report", "hang", "-o", "nowhere/x.html", cwd=tmp_path)
    assert done.returncode == 66 or done.returncode == 73, done.stderr
    assert "Traceback" not in done.stderr


def test_markdown_goes_to_standard_output_and_begins_with_the_verdict(account: Account, tmp_path: Path) -> None:
    done = account.type("report", "queue-bound", "--markdown", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("# queue-bound: WAITING\n\n**It has waited in the queue for 8h")
    assert "1. 1d 17h (73." in done.stdout and "waiting in the queue" in done.stdout
    assert not list(tmp_path.iterdir())


# --------------------------------------------------------------------------------------------------------- the week


def test_the_week_of_several_runs_begins_with_those_that_need_a_look_and_why(account: Account) -> None:
    runs = {name: account.folder / name for name in STORIES}
    week = week_of({**runs, "away": account.folder / "away"}, NOW, account.env)
    looks = [(one.row.name, one.head.tone) for one in week.rows if one.needs_a_look]
    assert looks[0] == ("hang", "bad"), "it holds its nodes and does nothing"
    assert [name for name, _ in looks[1:4]] == ["crash-loop", "disk-full", "away"], (
        "they do not go on; the costliest first"
    )
    assert [name for name, _ in looks[4:]] == ["queue-bound", "slow-node"]
    assert [one.row.name for one in week.rows[6:]] == ["fine"]
    by_name = {one.row.name: one for one in week.rows}
    assert by_name["away"].problem == f"{account.folder}/away is not there any more"
    assert by_name["hang"].faults == 3, "two that are over, and the one that goes on"
    blamed = [(node.name, node.faults, node.runs) for node in week.nodes()]
    assert blamed == [("node-21", 3, ("hang",)), ("node-17", 1, ("fine",))], "no missing module, and no full disk"
    total = sum(one.account.total for one in week.rows if one.account is not None)
    assert sum(week.seconds.values()) == pytest.approx(total)
    text = week_as_markdown(week)
    assert "queue-bound | WAITING" in text
    assert text.splitlines()[2].startswith(
        "**6 runs need a look: hang, crash-loop, disk-full, away, queue-bound and 1 more."
    )
    assert "- **hang** (HUNG): It hangs: no progress for 50m" in text and "What cost most: waiting in the queue" in text
    assert by_name["hang"].head == headline(account.report("hang")), "the same job to end, in the same words"
    assert "Its supervisor ends a hang" in by_name["hang"].head.next and "scancel 102_1;" in by_name["hang"].head.next
    costs = text.split("## What cost most")[1].split("## ")[0]
    for named in (r"waiting in the queue\. No job of the run was running\. Most: queue-bound, 1d 17h \(9\d\.\d %\)\.",
                  r"by the brake\. Most: crash-loop, 6h \(66\.\d %\): it was stopped after attempt",
                  r"slow steps\. Only slow-node: the costliest: since",
                  r"planned restarts, 7 times\. [^.]*\. Most: queue-bound, "):  # fmt: skip
        assert re.search(named, costs), costs
    assert "is not there any more" in week_page(week)
    assert "1 other run was not active" in week_page(week._replace(idle=1))
    assert "3 other runs were not active" in week_page(week._replace(idle=3))


def test_a_cost_of_several_runs_has_the_nodes_of_all_and_says_that_one_is_not_over(account: Account) -> None:
    (hang,) = [item for item in account.report("hang").costs if item.name == "hang"]
    over = hang._replace(goes_on=False, nodes=("node-9", "node-8"))
    few, many, most = (over._replace(seconds=over.seconds * by) for by in (0.7, 0.8, 1.2))
    week = week_of({"hang": account.folder / "hang"}, NOW, account.env)
    (row,) = week.rows
    rows = [row._replace(row=row.row._replace(name=name), costs=(item,)) for name, item in
            (("few", few), ("many", many), ("most", most), ("hang", hang))]  # fmt: skip
    (item,) = week._replace(rows=tuple(rows)).costs()
    assert item.run == "most" and item.seconds == pytest.approx(3.7 * hang.seconds)
    assert item.nodes == ("node-9", "node-8", "node-21")
    assert times_of(item) == "12 times on node-9, node-8, node-21; one is not over"


def test_what_was_before_the_week_is_not_in_it(account: Account) -> None:
    runs = {"queue-bound": account.folder / "queue-bound"}
    (row,) = week_of(runs, NOW, account.env, days=0.25).rows
    assert row.account is not None and row.account.total == pytest.approx(6 * 3600)
    assert [item.name for item in row.costs] == ["waiting in the queue"]
    assert row.steps is None or row.steps == 0


@pytest.fixture
def server() -> Iterator[MailServer]:
    with MailServer() as found:
        yield found


def test_the_week_is_mailed_once_to_each_receiver_with_all_its_runs(
    account: Account, tmp_path: Path, server: MailServer
) -> None:
    for name in ("fine", "hang", "queue-bound"):
        config = account.folder / name / "run.yaml"
        text = config.read_text()
        text = re.sub(r"host: (?:mail\.example\.org|127\.0\.0\.1)", "host: 127.0.0.1", text)
        config.write_text(re.sub(r"port: (?:null|\d+)", f"port: {server.port}", text, count=1))
    script = Path(__file__).parents[2] / "cron" / "cron.weekly" / "report"
    (tmp_path / "ftsupervise").write_text(f'#!/bin/sh\nexec {sys.executable} -m ftsupervise "$@"\n')
    (tmp_path / "ftsupervise").chmod(0o755)
    env = {**account.env, "FTSUPERVISE": str(tmp_path / "ftsupervise"), "FTSUPERVISE_RUNS": "fine hang queue-bound"}
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "email: mailed to ada@example.org: 3 runs\n"
    (mail,) = server.wait(1)
    assert mail["Subject"].endswith(": 3 runs") and mail["To"] == "ada@example.org"
    body = mail.get_body(("plain",))
    assert body is not None and "3 runs trained for" in body.get_content().splitlines()[0]
    (attached,) = mail.iter_attachments()
    assert attached.get_filename() == f"report-week-{datetime.now(timezone.utc):%Y-%m-%d}.html"
    assert "queue-bound" in attached.get_content()

    server.mood = "RCPT 550"
    done = subprocess.run(["sh", str(script)], env=env, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "550" in done.stderr and "Traceback" not in done.stderr


def test_a_receiver_that_is_not_for_mail_cannot_be_named_for_the_weekly_report() -> None:
    from ftsupervise.config.load import loads
    from ftsupervise.errors import ConfigError
    from ftsupervise.report.mail import emails

    text = (
        "name: r\nlaunch: {{command: a}}\nalerts:\n  weekly_report: {wanted}\n  receivers:\n"
        "    - file: {{path: m.txt}}\n    - {{name: boss, email: {{host: h, from: a@b.c, to: [d@e.f]}}}}\n"
        "    - email: {{host: h, from: a@b.c, to: [g@e.f]}}\n"
    )
    assert [name for name, _ in emails(loads(text.format(wanted="null")).alerts)] == ["boss", "email"]
    assert [name for name, _ in emails(loads(text.format(wanted="[boss]")).alerts)] == ["boss"]
    assert emails(loads(text.format(wanted="[]")).alerts) == []
    with pytest.raises(ConfigError, match="no email receiver is called 'file'; there are: boss, email"):
        loads(text.format(wanted="[file]"))


def test_a_run_without_a_guard_or_without_any_attempt_has_a_report_too(tmp_path: Path, account: Account) -> None:
    run = tmp_path / "bare"
    (run / "switches").mkdir(parents=True)
    found = report_of(RunDir(run), NOW, account.env)
    assert headline(found).sentence == "Nothing was launched yet."
    assert "The run has no time to account for yet." in page(found) and as_markdown(found).startswith("# bare: NEW")
    for seconds, code in (("1.2", 0), ("0.1", 3)):
        words = [
            sys.executable,
            "-m",
            "ftsupervise",
            "run",
            "--run-dir",
            str(run),
            "--",
            "sh",
            "-c",
            f"sleep {seconds}; exit {code}",
        ]
        assert subprocess.run(words, env=account.env, capture_output=True, timeout=60, check=False).returncode == code
    found = report_of(RunDir(run), datetime.now(timezone.utc), account.env)
    assert [(one.kind, one.planned) for one in found.incidents] == [("left in order", True), ("program error", False)]
    said = " ".join(sentences(found))
    assert "2 attempts reported nothing" in said and "it trained" not in said
    assert found.costs[-1].name == "attempts that reported nothing"
    assert "No step is on record" in page(found)


@pytest.mark.threat(
    "You report a run of somebody else whose settings name a folder of yours as that of the checkpoints.",
    "The report lists nothing of it.",
)
@pytest.mark.root
def test_settings_of_somebody_else_make_a_report_list_no_folder_of_ours(tmp_path: Path) -> None:
    env = outside_a_job(**prepare(tmp_path / "account", NOW, ["fine"]))
    run, mine = tmp_path / "account" / "fine", tmp_path / "mine"
    (mine / "step-00000007").mkdir(parents=True)
    text = re.sub(
        r"^checkpoints:\n  path: null", f"checkpoints:\n  path: {mine}", (run / "run.yaml").read_text(), flags=re.M
    )
    (run / "run.yaml").write_text(text)
    assert "step-00000007" in page(report_of(RunDir(run), NOW, env)), "of one's own run it is listed"
    for path in (run, *run.rglob("*")):
        os.chown(path, 65534, 65534, follow_symlinks=False)
    found = page(report_of(RunDir(run), NOW, env))
    assert "step-00000007" not in found and str(mine) in found, "it is shown among the settings, and not looked at"
