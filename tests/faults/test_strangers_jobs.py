"""Somebody whose run is looked at writes the numbers of our jobs, or the name of our run, into it. Ours stay as they are."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
import time
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.crontab.chain import follow
from ftsupervise.crontab.history import EntryRun, RunEnd, RunStart
from ftsupervise.host import processes
from ftsupervise.model import Attempt, Cause, CauseKind
from ftsupervise.nodes import exclude, judging
from ftsupervise.rundir.launches import may_change
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from ftsupervise.sandbox.place import MARK, members
from ftsupervise.scheduler.accounting import how_they_ended, with_end
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.queue import Queue

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root to act as another account")]

STRANGER = 65534
BAD = judging.JudgedNode("n7", 3.0, "by hand", "said the stranger")


@pytest.fixture
def theirs(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "run")
    run.state.mkdir(parents=True)
    page = run.launches / "0001" / "launch.json"
    page.parent.mkdir(parents=True)
    page.write_text(json.dumps({"token": "abc", "state": "submitted", "job_ids": ["88"], "by": "root@here"}))
    for path in (run.root, page):
        os.chown(path, STRANGER, STRANGER)
    return run


@pytest.mark.threat(
    "You watch a run whose owner writes your jobs' numbers or your run's name into its files, and marks all nodes as "
    "bad.",
    "Only launches that this account made itself, or in its own run directory, say which jobs may be changed.",
)
@pytest.mark.parametrize("comment", ["ftsupervise:x:abc", "something else"])
def test_a_run_of_somebody_else_keeps_no_job_of_ours_from_a_node(tmp_path: Path, theirs: RunDir, comment: str) -> None:
    queue = Queue(tmp_path, ["n5", "n6", "n7", "n8"], {"88_[3-10]": {"excluded": [], "comment": comment}})
    exclude.apply(theirs, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": []}
    assert not may_change(theirs, "88_3"), "nor is one of ours let go because of their brake"
    os.chown(theirs.launches / "0001" / "launch.json", 0, 0)
    exclude.apply(theirs, queue.env, (BAD,), whole=True)
    assert queue.excluded() == {"88_[3-10]": ["n7"]}, "one that we have launched there is"
    assert may_change(theirs, "88_3")


BEGAN = datetime.now(timezone.utc) - timedelta(hours=1)
SLURM_SAYS = """#!/bin/sh
case "$0 $*" in
  *sacct*JobID,State*) echo '88|CANCELLED by 65534'; exit;;
  *sacct*JobID,Start*) echo '88|%(start)s'; exit;;
  *scontrol*) echo 'JobId=88 JobName=JobState=FAILED UserId=nobody(65534) JobState=CANCELLED StartTime=%(start)s'; exit;;
esac
echo "%(waits)s"
"""


@pytest.mark.threat(
    "The number of a job of yours is given out again, and the account that has it now cancels its job, or holds it.",
    "An attempt ran only in a job that had started before it: of another one neither the end nor the state is told of it.",
)
@pytest.mark.parametrize(("start", "ours"), [(BEGAN - timedelta(minutes=1), True), (BEGAN + timedelta(hours=1), False)])
def test_a_job_that_has_got_the_number_since_is_not_that_of_the_attempt(
    tmp_path: Path, start: datetime, ours: bool
) -> None:
    words = {"start": int(start.timestamp()), "waits": f"RUNNING|{int(start.timestamp())}" if ours else "PENDING|N/A"}
    for name in ("sacct", "squeue", "scontrol"):
        (tmp_path / name).write_text(SLURM_SAYS % words)
        (tmp_path / name).chmod(0o755)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    one = Attempt(number=1, started=BEGAN, job_id="88", cause=Cause(CauseKind.CANCELLED))
    told = (how_they_ended(("88",), env) or {})["88"]
    assert ("by nobody" in with_end(one, told).words) is ours
    allocation = Allocation(env)
    assert allocation.was_cancelled("88", BEGAN) is ours
    assert allocation.lives("88", BEGAN) is ours


@pytest.mark.threat(
    "The number of a job that your cron folder has submitted is given out again, and the account that has it holds its job.",
    "An entry follows a job by its comment too; the entry's run has ended, and the next one starts.",
)
@pytest.mark.parametrize(("comment", "ended"), [("ftsupervise-cron:mine", False), ("ftsupervise-cron:theirs", True)])
def test_a_cron_entry_does_not_wait_for_a_strangers_job(tmp_path: Path, comment: str, ended: bool) -> None:
    facts = {"T": "PENDING", "u": "nobody"}
    queue = Queue(tmp_path, ["n7"], {"88": {"excluded": [], "comment": comment, "facts": facts}})
    one = EntryRun(BEGAN, tmp_path, RunStart(at=BEGAN, job_comment="ftsupervise-cron:mine", job_id="88"), RunEnd())
    follow(one, (), Slurm(queue.env), datetime.now(timezone.utc))
    assert (tmp_path / "end.json").exists() is ended


@pytest.mark.threat(
    "Another account starts a process with the marks of root's run, or of its sandbox, in its environment.",
    "Only what this account has started counts as its own, also for root, who can read the environments of all.",
)
@pytest.mark.parametrize("words", [("/tmp/%s/slurmctld", "60"), ("su", "root")], ids=["his own", "with root's rights"])
def test_no_mark_of_a_stranger_s_process_counts_for_root(tmp_path: Path, words: tuple[str, str]) -> None:
    folder = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    folder.chmod(0o755)
    shutil.copy("/bin/sleep", folder / "slurmctld")
    env = {"PATH": os.environ["PATH"], MARK: "x", "SLURM_CONF": f"{folder}/slurm.conf", ENV_ATTEMPT_DIR: str(tmp_path)}
    words = (words[0].replace("%s", folder.name), words[1])

    def start(*words: str, **who: Any) -> subprocess.Popen[bytes]:
        return subprocess.Popen(words, env=env, stdin=subprocess.PIPE, stderr=subprocess.DEVNULL, **who)

    with start(*words, user=STRANGER, group=STRANGER, extra_groups=[]) as his, start("sleep", "60") as ours:
        try:
            time.sleep(0.3)
            assert his.poll() is None
            assert [one.pid for one in processes.marked(ENV_ATTEMPT_DIR).get(str(tmp_path), [])] == [ours.pid]
            assert members(folder / "slurm.conf", ["node-0"]) == []
        finally:
            his.kill()
            ours.kill()
            shutil.rmtree(folder)
