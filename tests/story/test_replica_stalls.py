"""The stalls that groups have seen, from their own pages to ``status``, the report and the metrics."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.cli.status import group_lines
from ftsupervise.replicas.stalls import GroupStall, StallBook, StallPage, read_stalls, write_seen
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, write_table
from ftsupervise.report.everything import report_of
from ftsupervise.report.groups import groups_of
from ftsupervise.report.html import page as html_page
from ftsupervise.report.markdown import as_markdown
from ftsupervise.report.textfile import measure
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import write_json
from tests.neighbours.patience import wait_until
from tests.story.measured_run import NOW, make_run

NAMES = ("g000", "g001", "g002")


def seen(seconds: float, *gone: str, back: float | None = None) -> GroupStall:
    returned = None if back is None else NOW - timedelta(minutes=5) + timedelta(seconds=back)
    return GroupStall(NOW - timedelta(minutes=5), seconds, 120, 1, gone, returned, None if back is None else 60)


def attempt(run: RunDir, name: str, number: int = 1) -> Path:
    folder = run.group(name).attempt(number)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def test_what_the_groups_have_seen_becomes_one_page_that_the_next_job_goes_on_with(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.replicas.mkdir(parents=True)
    write_seen(attempt(run, "g000"), [seen(1.08, "g001")])
    write_seen(attempt(run, "g002"), [seen(1.10, "g001", back=7.9)])
    (attempt(run, "g001") / "stalls.json").write_text('{"stalls": [{"seconds": "x"')  # damaged: the others count
    first = StallBook(run, NAMES, None, every=0.01)
    page = wait_until(lambda: read_stalls(run), "the page")
    first.close()
    assert [(one.seconds, one.gone, one.away) for one in (page.stalls if page else ())] == [(1.10, ("g001",), 7.9)]
    write_seen(attempt(run, "g000", 2), [seen(1.0, "g002")._replace(at=NOW)])
    StallBook(run, NAMES, None, every=60).close()
    again = read_stalls(run)
    assert again is not None and (again.times, again.lost, round(again.seconds, 2)) == (2, 2, 2.1)


def test_status_report_and_metrics_tell_of_a_stall_after_the_fact(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    run.replicas.mkdir(parents=True)
    rows = tuple(ReplicaGroup(name, GroupState.RUNNING, NOW) for name in NAMES)
    write_table(run, GroupTable(NOW, "host", 3, 2, "allocation", rows))
    newer = GroupStall(NOW - timedelta(minutes=1), 2.0, 400)
    write_json(run.replicas / "stalls.json", StallPage(NOW, 9, 20.5, 7, (seen(1.1, "g001", back=7.9), newer)))
    found = groups_of(run, NOW)
    assert found is not None
    lines = [line for line in group_lines(found, NOW) if "stall " in line]
    assert lines == [
        "  stall     5m ago for 1.1s: g001 was lost; 1 step lost; back after 7.9s, 60 steps missed",
        "  stall     1m ago for 2s: no group was lost",
        "  stall     9 in all, for 20s, 7 steps lost",
    ]
    report = report_of(run, NOW, {})
    text = as_markdown(report)
    assert "waited 9 times for one that was lost or made no progress, 20s in all, and lost 7 steps by it" in text
    assert "| 1.1s | g001 was lost | 1 step lost | back after 7.9s, 60 steps missed |" in text
    assert "back after 7.9s, 60 steps missed" in html_page(report)
    metrics = {line.partition("{")[0]: line.split()[-1] for line in measure(run, (), "", NOW).text.splitlines()}
    assert metrics["ftsupervise_run_group_stalls_total"] == "9"
    assert metrics["ftsupervise_run_group_stall_seconds_total"] == "20.5"
    assert metrics["ftsupervise_run_group_steps_lost_total"] == "7"
    assert metrics["ftsupervise_run_group_back_seconds"] == "7.9"


def test_a_page_that_a_stranger_may_write_is_not_believed(tmp_path: Path) -> None:
    run = RunDir(tmp_path / "run")
    run.replicas.mkdir(parents=True)
    write_json(run.replicas / "stalls.json", StallPage(datetime.now(timezone.utc), 1, 1.0, 1, (seen(1.0),)))
    assert read_stalls(run) is not None
    (run.replicas / "stalls.json").chmod(0o666)
    assert read_stalls(run) is None
