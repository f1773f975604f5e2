"""``status`` of a run whose directory has no room left: nobody can write how it is, and it is not called well."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.crontab import history
from ftsupervise.crontab.dispatch import CronSlot
from ftsupervise.crontab.entries import find
from ftsupervise.crontab.status import findings
from ftsupervise.host import processes
from ftsupervise.report.day import about_run
from ftsupervise.rundir.heartbeat_page import write_watcher
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.rundir.watched import read_found, write_found
from ftsupervise.truth import Health
from tests.neighbours.prepared_trouble import fill, trouble
from tests.neighbours.smtp import MailServer
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed
from tests.story.cron_folder import NINE, make


def test_a_cron_on_a_full_disk_says_so_and_not_that_its_ticks_were_cut_off(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=2m", "small")
    folder = make(place)
    slots = [NINE + timedelta(minutes=5 * n) for n in range(4)]
    for at in slots[:3]:
        history.claim_slot(folder.cron, at, at, "")
    fill(place)
    one = CronSlot(folder.cron, folder.installed, slots[3], slots[3], "", None, lambda: folder.queue)
    said = next(one for one in findings(one, find(folder.cron, folder.installed), "", None) if one.subject == "slots")
    assert said.summary == (
        f"cron: the last 3 ticks could not write down that they ended: the disk of {folder.cron.root} is full"
    )
    (place / "others").unlink()
    for at in slots[:3]:  # on a full disk not even that a tick had begun could be written
        (folder.cron.slots / f"{at:%Y%m%dT%H%M%SZ}" / "claim.json").unlink()
    said = next(one for one in findings(one, find(folder.cron, folder.installed), "", None) if one.subject == "slots")
    assert said.health is Health.OK, "it is over, and no tick was cut off"


def test_a_run_of_which_nothing_is_heard_on_a_full_disk_is_not_running_and_shows_no_rate(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=1m", "small")
    rundir, now = RunDir(place / "run"), datetime.now(timezone.utc)
    for part in ("switches", "watch", "beats", "logs", "launches", "state", "attempts/0001", "nodes", "checkpoints"):
        (rundir.root / part).mkdir(parents=True)
    rundir.config.write_text("name: run\nscheduler: local\n")
    me = processes.process(os.getpid())
    assert me is not None
    start = {"attempt": 1, "at": (now - timedelta(hours=2)).isoformat(), "host": os.uname().nodename}
    start |= {"pid": me.pid, "pid_start": me.start, "boot_id": processes.boot_id()}
    write_json(rundir.attempt(1) / "start.json", start)
    page = ProgressPage(now, 8, 4600, 4600, phase="train", rate=1.0, usual=1.0, last_step=4800)
    env = outside_a_job(FTSUPERVISE_STATE_DIR=str(tmp_path / "state"))

    def status() -> str:
        return typed("status", str(rundir.root), folder=tmp_path, env=env, code=0).stdout

    write_progress(rundir.attempt(1), page)
    (tmp_path / "state" / "runs").mkdir(parents=True, exist_ok=True)
    (tmp_path / "state" / "runs" / "run").symlink_to(rundir.root)
    assert status().startswith("run: RUNNING") and "  rate " in status()
    fill(place)
    assert status().startswith("run: RUNNING, its disk is full (")
    assert re.search(r"  watch     not known: its pages cannot be written to a full disk\n", status()), "not: nobody"
    told = dict(about_run(rundir, (), datetime.now(timezone.utc)).facts)["now"]
    first = status().splitlines()[0]
    assert told.startswith("RUNNING, its disk is full (") and first.startswith(f"run: {told}"), "a mail says the same"
    table = typed("status", folder=tmp_path, env=env).stdout
    assert f"no space is left in {rundir.root}" in table and "1 run needs a look" in table, table
    (place / "others").unlink()
    write_progress(rundir.attempt(1), page._replace(at=datetime.now(timezone.utc) - timedelta(seconds=204)))
    fill(place)
    said = status()
    assert re.match(r"run: SILENT \(no space is left in \S+/run; nothing was heard of attempt 1 for 3m \d", said), said
    assert f"no space is left in {rundir.root}" in said and "make room" in said
    assert "  rate " not in said and " in 3m" not in said


def test_status_alone_says_that_a_run_stands_on_a_full_disk_since_when_and_what_to_type(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    """Its watch is six minutes late, its page three minutes old; the supervisor's last line says what it waits for."""
    place = mounted("-t", "tmpfs", "-o", "size=4m", "small")
    one = trouble("standing on a full disk", tmp_path, place)
    fill(place)
    said = one.status()
    lines = said.splitlines()
    assert re.match(
        r"full: SILENT \(no space is left in \S+/full; nothing was heard of attempt 1 for 3m 2", lines[0]
    ), lines[0]
    assert lines[1].startswith(f"  do        make room: no space is left in {one.rundir.root}; within launch.restart")
    assert lines[1].endswith(f" it goes on by itself, later by: ftsupervise clear --brake {one.rundir.root}"), lines[1]
    assert lines[2].startswith("  do        ftsupervise checkpoints prune --dry-run ")
    assert "  said      20" in said and "waiting up to 600 s for space" in said
    assert re.search(r"watch     last tick 6m( \d+s)? ago, the next was due 5m( \d+s)? ago", said), said
    assert "  rate " not in said


def test_a_watch_whose_pages_lie_on_a_full_disk_is_not_called_late_for_it(
    mounted: Callable[..., Path], tmp_path: Path
) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=4m", "small")
    one = trouble("standing on a full disk", tmp_path, place)
    for page in (one.rundir.watch / "watchers").iterdir():
        page.unlink()
    found = read_found(one.rundir)
    assert found is not None
    long_ago = found.at - timedelta(minutes=60)
    write_watcher(one.rundir, long_ago, timedelta(seconds=60))
    write_found(one.rundir, found._replace(at=long_ago))
    late = one.status()
    assert re.search(r"watch     last tick .*: LATE", late) and "ftsupervise watch --every 60s" in late, late
    fill(place)
    said = one.status()
    assert "pages cannot be written to a full disk: whether it looks is not known" in said, said
    assert "LATE" not in said and "ftsupervise watch --every 60s" not in said


@pytest.mark.fault("The disk that run, checkpoints and journals of the watch lie on is full", "One message says so")
def test_a_full_disk_with_everything_on_it_is_one_message_and_so_is_its_end(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=8m", "small")
    with MailServer() as server:
        receiver = {
            "host": "127.0.0.1",
            "port": server.port,
            "from": "a@lab.org",
            "to": ["b@lab.org"],
            "security": "none",
        }
        settings = {
            "name": "t",
            "scheduler": "local",
            "launch": {"command": "true"},
            "checkpoints": {"path": "out", "pattern": "*.pth"},
            "watch": {"disk": [{"free": "1MB", "left": None}], "checkpoints": {"settle": "1s"}},
            "alerts": {"receivers": [{"email": receiver}]},
        }
        (place / "ftsupervise.yaml").write_text(json.dumps(settings))
        (place / "out").mkdir()
        rundir = RunDir(place / "runs" / "t")
        for part in ("switches", "watch", "state", "attempts", "launches"):
            (rundir.root / part).mkdir(parents=True)
        (rundir.switches / "kill-switch").touch()  # no job is missed
        at = time.time() - 100
        for number, size in ((1, 100_000), (2, 100_000), (3, 0)):
            path = place / "out" / f"step-{number}.pth"
            path.write_bytes(b"x" * size)
            os.utime(path, (at + number, at + number))
        (place / "out" / "step-3.pth").rename(place / "torn")

        def look() -> str:
            env = outside_a_job(FTSUPERVISE_STATE_DIR=str(place / "state"))
            done = typed("watch", folder=place, env=env)
            return done.stdout + done.stderr

        look()
        assert not server.mails, [str(one["Subject"]) for one in server.mails]
        (place / "torn").rename(place / "out" / "step-3.pth")
        fill(place)
        said = [look(), look()]
        assert [str(one["Subject"]).split(" t")[0] for one in server.mails] == ["[FIRING]"], said
        assert f"{rundir.root}: 0 B left, 100.0% used" in " ".join(str(server.mails[0].get_content()).split())
        (place / "others").unlink()
        (place / "out" / "step-3.pth").unlink()
        said = [look(), look()]
        assert [str(one["Subject"]).split(" t")[0] for one in server.mails] == ["[FIRING]", "[RESOLVED]"], said
