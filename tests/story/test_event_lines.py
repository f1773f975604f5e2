"""Events as JSON lines: what the watch appends, whole lines whatever happens, and no more than two files of them."""

from __future__ import annotations

import json
import os
import stat
import subprocess
import sys
from datetime import datetime, timedelta, timezone
from multiprocessing import get_context
from pathlib import Path

import pytest

from ftsupervise.errors import Error
from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Cause, CauseKind, NodeRanks
from ftsupervise.replicas.table import GroupState, GroupTable, ReplicaGroup, write_table
from ftsupervise.rundir.attempt_pages import EndPage, StartPage, write_page
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch.tour import EventLine, append, events_path, of_event
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

NOW = datetime(2026, 11, 22, 2, 10, 7, tzinfo=timezone.utc)
LINE = EventLine(NOW, "t", "/scratch/t", "fired", "critical", "disk", "/scratch", "full", since=NOW, alert="3f9a1c")


def lines(path: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in path.read_text().splitlines() if line.strip()]


def test_the_watch_appends_what_happened(tmp_path: Path) -> None:
    settings = "name: t\nscheduler: local\nlaunch: {command: 'true'}\nwatch: {disk: null}\n"
    (tmp_path / "ftsupervise.yaml").write_text(settings)
    rundir = RunDir(tmp_path / "runs" / "t")
    for part in ("switches", "watch", "state", "attempts/0001", "launches"):
        (rundir.root / part).mkdir(parents=True)
    start = {"attempt": 1, "at": datetime.now(timezone.utc).isoformat(), "host": "n", "job_id": "local-7"}
    (rundir.attempt(1) / "start.json").write_text(json.dumps(start))
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))
    done = typed("watch", "--no-send", "--quiet", folder=tmp_path, env=env)
    (path,) = (rundir.watch / "events").glob("*.jsonl*")
    found = lines(path)
    events = {one["event"] for one in found}
    assert "started" in events, (done.stdout, done.stderr, found)
    assert all(one["schema"] == 1 and one["run"] == "t" and one["directory"] == str(rundir.root) for one in found)
    assert stat.S_IMODE(path.stat().st_mode) == 0o644 and path == events_path(rundir)


def test_a_replica_group_that_was_lost_alone_and_is_back_is_told_once(tmp_path: Path) -> None:
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: t\nscheduler: local\nlaunch: {command: 'true', replica_groups: {count: 2, lighthouse: none}}\n"
        "watch: {disk: null}\n"
    )
    rundir = RunDir(tmp_path / "runs" / "t")
    for part in ("switches", "watch", "state", "attempts/0001", "launches", "replicas"):
        (rundir.root / part).mkdir(parents=True)
    now = datetime.now(timezone.utc)
    write_page(rundir.attempt(1), StartPage(1, "local-7", now - timedelta(minutes=9), "n"))
    crash = Cause(CauseKind.SIGNAL, (NodeRanks("node-1", "0"),), signal=11)
    for name, attempts in (("g000", 1), ("g001", 2)):
        for number in range(1, attempts + 1):
            folder = rundir.group(name).attempt(number)
            folder.mkdir(parents=True)
            write_page(folder, StartPage(number, "local-7", now - timedelta(minutes=10 - number), "n"))
        if attempts == 2:
            ended = now - timedelta(minutes=8, seconds=4)
            write_page(rundir.group(name).attempt(1), EndPage(1, ended, cause=crash, first_step=1, last_step=140))
            write_page(folder, EndPage(2, now, cause=Cause(CauseKind.WARNING), first_step=131, last_step=400))
    rows = (
        ReplicaGroup("g000", GroupState.RUNNING, attempt=1),
        ReplicaGroup("g001", GroupState.RUNNING, attempt=2, back=6.0, missed=30, redone=10, back_in=2),
    )
    write_table(rundir, GroupTable(now, "n", 2, 1, "allocation", rows))
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))
    done = [typed("watch", "--no-send", "--quiet", folder=tmp_path, env=env) for _ in range(2)]
    found = [one for path in (rundir.watch / "events").glob("*.jsonl*") for one in lines(path)]
    assert "".join(str(one["summary"]) for one in found if one["event"] == "resumed") == (
        "group g001: attempt 2 (job local-7) goes on from step 131, 4s after attempt 1 ended at step 140 "
        "(rank 0 on node-1 killed by SIGSEGV); 10 steps are done again; the others made 30 steps meanwhile"
    ), [(one.stdout, one.stderr) for one in done]


def test_a_torn_line_never_swallows_the_next_and_hostile_text_stays_in_its_line(tmp_path: Path) -> None:
    path = tmp_path / "events" / "n.jsonl"
    append(path, [LINE])
    with path.open("a") as file:
        file.write('{"schema": 1, "at": "20')  # a crash
    evil = LINE._replace(summary="a\n{}\x1b[2J\ud800\u2028" + "x" * 9000)
    append(path, [evil, LINE])
    rows = path.read_text().split("\n")
    assert rows[1] == '{"schema": 1, "at": "20' and rows[-1] == "" and len(rows) == 5
    first, wide, last = (json.loads(row) for row in (rows[0], rows[2], rows[3]))
    assert first == last and first["alert"] == "3f9a1c" and first["since"] == "2026-11-22T02:10:07+00:00"
    assert len(wide["summary"]) == 2000 and wide["summary"].isprintable()
    finding = Finding("t", "run", "started", Health.OK, Severity.INFO, "job 7", NOW)
    assert of_event(finding, RunDir("/r"), NOW).watchdog == ""


@pytest.mark.fault("The disk is full while an event is appended", "No half line is left")
def test_a_full_disk_leaves_no_half_line(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    append(path, [LINE])
    size = path.stat().st_size
    with pytest.raises(OSError, match="space"):
        _in_a_small_place(path, size + 50)
    assert path.stat().st_size == size
    append(path, [LINE])
    assert len(lines(path)) == 2


def _in_a_small_place(path: Path, limit: int) -> None:
    """Append where the file may not grow beyond ``limit``: the kernel writes the part that fits, as on a full disk."""
    code = (
        "import resource, signal, sys\n"
        "from pathlib import Path\n"
        "from tests.story.test_event_lines import LINE, append\n"
        "signal.signal(signal.SIGXFSZ, signal.SIG_IGN)\n"
        f"resource.setrlimit(resource.RLIMIT_FSIZE, ({limit}, {limit}))\n"
        f"append(Path({str(path)!r}), [LINE])\n"
    )
    root = Path(__file__).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=root, capture_output=True, text=True, timeout=60, check=False
    )
    if done.returncode:
        raise OSError(done.stderr.splitlines()[-1])


def test_only_two_files_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "n.jsonl"
    for number in range(60):
        append(path, [LINE._replace(summary=f"{number}")], largest=2000)
    names = sorted(one.name for one in tmp_path.glob("*.jsonl*"))
    assert names == ["n.jsonl", "n.jsonl.1"]
    both = lines(tmp_path / "n.jsonl.1") + lines(path)
    assert [one["summary"] for one in both] == [f"{n}" for n in range(60 - len(both), 60)]
    assert sum(one.stat().st_size for one in tmp_path.iterdir()) < 2 * 2600


def _many(path: str, who: int) -> None:
    for number in range(100):
        append(Path(path), [LINE._replace(summary=f"{who} {number}")], largest=20_000)


def test_writers_at_the_same_time_lose_and_mix_nothing(tmp_path: Path) -> None:
    path, spawn = tmp_path / "n.jsonl", get_context("fork")
    writers = [spawn.Process(target=_many, args=(str(path), who)) for who in range(3)]
    for one in writers:
        one.start()
    for one in writers:
        one.join(60)
        assert one.exitcode == 0
    kept = lines(path) + lines(Path(f"{path}.1"))
    last = {
        str(one["summary"]).split()[0]: str(one["summary"]).split()[1] for one in lines(Path(f"{path}.1")) + lines(path)
    }
    assert len({one["summary"] for one in kept}) == len(kept) > 50 and "99" in last.values()


@pytest.mark.threat("Somebody lays a link in the place of the file of events.", "It is not written.")
def test_a_link_or_a_strangers_file_in_its_place_is_not_written(tmp_path: Path) -> None:
    path, mine = tmp_path / "n.jsonl", tmp_path / "mine"
    mine.write_text("keep\n")
    path.symlink_to(mine)
    with pytest.raises((OSError, Error)):
        append(path, [LINE])
    path.unlink()
    os.link(mine, path)
    with pytest.raises(OSError, match="second hard link"):
        append(path, [LINE])
    assert mine.read_text() == "keep\n"
