"""Who sees ``status`` and nothing else knows what happened to the run, and what to type: ten states, nine of them here.

The tenth, a run that stands on a full disk, is in tests/faults/test_status_full_disk.py: it needs a disk that is full.
"""

from __future__ import annotations

import json
import re
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.rundir.observing import write_observing
from ftsupervise.rundir.progress import OFF, read_progress, write_progress
from ftsupervise.rundir.watched import FiringAlert, read_found, write_found
from ftsupervise.truth import BACK
from tests.neighbours.prepared_trouble import trouble
from tests.neighbours.typed import typed

STANDS = ("  rate ", "% of usual")  # what is shown of a run that moves alone


@pytest.mark.parametrize(
    ("name", "first", "todo", "also"),
    [
        (
            "braked",
            r"crash-loop: STOPPED \(by the brake: exit 1 \(ModuleNotFoundError\), the same failure 5 times",
            [r"ftsupervise clear --brake \S+/crash-loop   \(once that is mended; the jobs that are held start again\)"],
            [r"attempt   2-6 .* \d\d:\d\d:\d\d, 5 times: .*No module named 'webdataset'", r"last .*: critical brake"],
        ),
        (
            "cancelled",
            r"cancelled: GONE \(no job of it is in the queue; attempt 1 ended: cancelled or preempted \(SIGTERM\)\)",
            [r"ftsupervise launch \S+/cancelled   \(it goes on from step \d+\)"],
            [r"last      \d\d-\d\d \d\d:\d\d:\d\d UTC, 25m ago: attempt 1 ended"],
        ),
        (
            "watch dead",
            r"unwatched: RUNNING, its watch is LATE \(job 88_1\)",
            [r"ftsupervise watch --every 60s \S+/unwatched   \(nobody is told of anything"],
            [r"watch     last tick 47m ago, the next was due 46m ago: LATE", r"  rate "],
        ),
        (
            "controller paused",
            r"paused: RUNNING \(its ranks are heard, Slurm does not answer\)",
            [r"scontrol ping   \(whether Slurm's controller answers"],
            [r"queue     unknown: .*Unable to contact slurm controller", r"  rate "],
        ),
        (
            "hung",
            r"hang: HUNG \(no progress for 50m",
            [
                r"ftsupervise check hang \S+/hang",
                r"scancel 88_1   \(ends this job; the next one goes on from step \d+\)",
            ],
            [r"rank 163 on node-21 is the furthest behind", r"saved .*\d+ steps would be made again"],
        ),
        (
            "NaN",
            r"nan: RUNNING, loss is not a number \(job 88_1\)",
            [
                r"scancel 88_1   \(ends this job; the next one begins from a checkpoint from before step (\d+)\)",
                r"guard\.loss: \{nonfinite: resume\}",
            ],
            [r"loss      loss is not a number: \d+ steps since step \d+, about \d\d-\d\d \d\d:\d\d UTC \(rank 0\)"],
        ),
        (
            "waiting for ever",
            r"waits: WAITING \(QOSMaxWallDurationPerJobLimit\)",
            [
                r"scancel 88 ",
                r"correct launch\.time: it asks for more time than its QOS gives, and it never starts by waiting",
                r"ftsupervise launch \S+/waits   \(once that is corrected\)",
            ],
            [r"queue     10 jobs left .*in the queue for 6h"],
        ),
        ("finished", r"finished: FINISHED", [], [r"last .*2h ago: attempt 1 ended: finished"]),
        (
            "gone",
            r"gone: GONE \(no job of it .*; attempt 1 ended: rank 17 on node-03 exit 1: KeyError: 'lr_schedule'\)",
            [
                r"ftsupervise diagnose \S+/gone   \(what failed first, ",
                r"ftsupervise launch \S+/gone   \(once that is mended; it goes on from step \d+\)",
            ],
            [r"last .*40m ago: attempt 1 ended"],
        ),
    ],
)
def test_status_alone_says_what_happened_and_what_to_type(
    name: str, first: str, todo: list[str], also: list[str], tmp_path: Path
) -> None:
    said = trouble(name, tmp_path).status()
    lines = said.splitlines()
    assert re.match(first, lines[0]), lines[0]
    does = [line.removeprefix("  do        ") for line in lines if line.startswith("  do ")]
    assert len(does) >= len(todo) and (todo or not does), said
    for pattern, words in zip(todo, does, strict=False):
        assert re.match(pattern, words), said
    for pattern in also:
        assert re.search(pattern, said), (pattern, said)
    if not re.match(r"\S+: RUNNING", said):
        assert not any(one in said for one in STANDS), said


def test_a_last_step_beyond_the_jobs_that_are_left_is_told_with_what_to_type(tmp_path: Path) -> None:
    def rows(hours: int, waiting: str) -> str:
        now = int(time.time())
        facts = {"T": "RUNNING", "N": "node-[01-04]", "S": str(now - 9 * 3600), "e": str(now + (hours - 9) * 3600)}
        mark = {"excluded": [], "comment": "ftsupervise:unwatched:t-unwatched"}
        jobs = {"88_1": {**mark, "reason": "None", "facts": facts}}
        jobs |= {waiting: {**mark, "reason": "JobArrayTaskLimit"}} if waiting else {}
        (tmp_path / "queue.json").write_text(json.dumps({"nodes": ["node-01"], "jobs": jobs, "away": False}))
        return one.status()

    one = trouble("watch dead", tmp_path)  # 15890 of 20000 steps, half a step a second: 2 h and 17 min are needed
    assert "  jobs  " not in rows(12, "")
    assert re.search(
        r"  jobs      this is the last one: it runs (59m.*|1h) more, to about step 17\d\d\d; "
        r"for more: ftsupervise launch --after 88 \S+/unwatched\n",
        rows(10, ""),
    )
    assert "  jobs  " not in rows(10, "88_[2-3%1]"), "two more of ten hours each are enough"
    one.rundir.attempt(1).joinpath("progress.json").write_text(
        one.rundir.attempt(1).joinpath("progress.json").read_text().replace("20000", "2000000")
    )
    assert re.search(r"  jobs      this job and 2 jobs behind it run (20h 59m|21h)", rows(10, "88_[2-3%1]"))


def test_a_run_that_is_gone_has_no_unknown_time_after_its_end(tmp_path: Path) -> None:
    said = trouble("gone", tmp_path).status()
    assert "unknown" not in said and re.search(r"h held \d+\.\d %", said), said


def test_a_run_that_is_stopped_by_the_brake_says_so_in_one_word_and_that_nobody_watches_it(tmp_path: Path) -> None:
    one = trouble("braked", tmp_path)
    assert "queue     8 jobs left, held by the brake (JobHeldUser)" in one.status()
    assert re.search(r"b stopped by the brake \d+\.\d %", one.status()) and "braked" not in one.status()
    (one.rundir.watch / "found.json").unlink()
    assert "  watch     nobody watches this run: ftsupervise watch --every 60s " in one.status()


def test_no_advice_about_a_next_attempt_stands_where_none_comes_by_itself(tmp_path: Path) -> None:
    said = trouble("being stopped", tmp_path).status()
    assert said.startswith("stopping: STOPPING (kill switch") and "alert     warning recovery: " in said
    assert "next attempt" not in said


def test_what_was_saved_with_a_loss_that_was_no_number_is_not_called_saved_without_a_word(tmp_path: Path) -> None:
    said = trouble("NaN", tmp_path).status()
    assert re.search(r"saved     step \d+, \d+s ago; of no use: the loss was no number by then\n", said), said


def test_where_going_back_is_only_told_nobody_is_promised_that_the_next_attempt_does(tmp_path: Path) -> None:
    one = trouble("NaN", tmp_path)
    write_observing(one.rundir, (BACK,), who="ada", now=datetime.now(timezone.utc))
    said = one.status()
    off = re.search(
        r"  do        ftsupervise observe --off --only going_back \S+/nan   \(else it begins from its newest", said
    )
    assert off is not None and off.start() < said.index("scancel 88_1"), said


def test_the_table_of_all_runs_says_that_a_job_never_starts(tmp_path: Path) -> None:
    one = trouble("waiting for ever", tmp_path)
    said = typed("status", folder=tmp_path, env=dict(one.env)).stdout
    assert (
        "it never starts by waiting: it asks for more time than its QOS gives (QOSMaxWallDurationPerJobLimit)" in said
    )
    assert "ftsupervise status waits   WAITING: what to correct" in said


def test_of_a_run_that_is_gone_the_last_event_is_its_end_and_not_the_alert_that_came_of_it(tmp_path: Path) -> None:
    one = trouble("gone", tmp_path)
    found = read_found(one.rundir)
    assert found is not None
    alert = FiringAlert("1", "critical", "is-running", "no job of this run is running or waiting", found.at)
    write_found(one.rundir, found._replace(firing=1, alerts=(alert,)))
    said = one.status()
    assert re.search(r"  last      .*40m ago: attempt 1 ended: ", said) and "alert     critical is-running" in said, (
        said
    )


def test_a_run_that_makes_no_step_and_is_not_yet_judged_has_something_to_type(tmp_path: Path) -> None:
    """Its watch judges hangs, by a bound that is not over."""
    one = trouble("controller paused", tmp_path)
    page = read_progress(one.rundir, 1)
    assert page is not None and "check hang" not in one.status()
    write_progress(one.rundir.attempt(1), page._replace(active_at=time.time() - 300, rate=0.0))
    said = one.status()
    assert re.search(r"no step for (5m|4m)", said.splitlines()[0]), said
    assert f"  do        ftsupervise check hang {one.rundir.root}   (every sign of progress" in said, said
    page = read_progress(one.rundir, 1)
    assert page is not None and one.status("--json").count('"ends_hang": null') == 1, "its supervisor has not said it"
    write_progress(one.rundir.attempt(1), page._replace(on_hang=OFF))
    table = typed("status", folder=tmp_path, env=dict(one.env)).stdout
    assert re.search(r"no step for \S+( \S+)?, at step \d\d,?\d+; nothing ends it by itself", table), table


def test_why_slurm_could_not_be_asked_is_said_once(tmp_path: Path) -> None:
    one = trouble("controller paused", tmp_path)
    page = read_progress(one.rundir, 1)
    assert page is not None and one.status().count("Unable to contact slurm controller") == 1
    write_progress(one.rundir.attempt(1), page._replace(at=datetime.now(timezone.utc) - timedelta(hours=1)))
    said = one.status()
    assert said.startswith("paused: UNKNOWN (") and said.count("Unable to contact slurm controller") == 1, said
    assert "  queue     unknown\n" in said


def test_jobs_that_a_member_has_put_on_hold_have_a_line_with_what_lets_them_go(tmp_path: Path) -> None:
    one = trouble("waiting for ever", tmp_path)
    assert "clear --brake" not in one.status()
    queue = json.loads((tmp_path / "queue.json").read_text())
    for job in queue["jobs"].values():
        job.update(reason="JobHeldUser", comment=f"{job['comment']} held: No space left on device")
    (tmp_path / "queue.json").write_text(json.dumps(queue))
    said = one.status()
    assert "held by a member of the chain: No space left on device" in said.splitlines()[0], said
    assert f"  do        ftsupervise clear --brake {one.rundir.root}   (once that is repaired" in said, said
