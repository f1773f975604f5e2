"""What Slurm says of a job whose supervisor left no record of its end: was its batch host lost, or is that not known?"""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from ftsupervise.run.attempt import fate_of, note_lost_host
from ftsupervise.rundir.attempt_pages import NAMES, LostEnd
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import WARNING, RunDir
from ftsupervise.rundir.records import write_json
from tests.neighbours.patience import wait_until

LOST, NODE_FAIL = "its batch host node-0 was lost", "one of its nodes was lost, and Slurm ended the job (NODE_FAIL)"


@pytest.mark.parametrize(
    ("shown", "host_is", "words"),
    [
        ("JobState=NODE_FAIL NodeList=node-[0-1] BatchHost=node-0", "down*", f"{LOST} (down)"),
        ("JobState=CANCELLED NodeList=node-[1-2] BatchHost=node-0", "down", f"{LOST} (down)"),
        ("JobState=TIMEOUT NodeList=node-[1-2] BatchHost=node-0", "idle", LOST),
        ("JobState=NODE_FAIL NodeList=node-[0-1] BatchHost=node-0", "idle", NODE_FAIL),
        ("JobState=NODE_FAIL NodeList=(null) BatchHost=(null)", "down", NODE_FAIL),
        ("JobState=FAILED NodeList=node-[0-1] BatchHost=node-0", "idle", ""),
        ("JobState=FAILED NodeList=node-[0-1] BatchHost=node-0", "down", ""),  # since then: it has told how it ended
        ("JobState=FAILED NodeList=(null) BatchHost=node-0", "idle", ""),
        ("JobState=FAILED NodeList= BatchHost=node-0", "idle", ""),
        ("JobState=CANCELLED NodeList=node-[0-", "idle", ""),
        ("JobState=RUNNING NodeList=node-[1-2] BatchHost=node-0", "down", ""),
        ("slurm_load_jobs error: Invalid job id specified", "down", ""),
    ],
)
def test_a_host_is_called_lost_only_where_slurm_says_so(tmp_path: Path, shown: str, host_is: str, words: str) -> None:
    for name, text in (("scontrol", f"JobId=7 {shown}"), ("sinfo", host_is)):
        (tmp_path / name).write_text(f"#!/bin/sh\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    assert fate_of("7", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}) == words
    if words == NODE_FAIL:
        named = fate_of("7", {"PATH": f"{tmp_path}:{os.environ['PATH']}"}, ("node-0",))
        assert named == "its node node-0 was lost, and Slurm ended the job (NODE_FAIL)", "it had no other"


@pytest.mark.parametrize(("asked", "is_noted"), [(0, True), (signal.SIGHUP, True), (signal.SIGTERM, False)])
def test_a_host_that_hung_up_before_it_was_lost_is_lost_but_an_order_to_stop_is_the_cause(
    tmp_path: Path, asked: int, is_noted: bool
) -> None:
    for name, text in (
        ("scontrol", "JobId=7 JobState=NODE_FAIL NodeList=node-[0-1] BatchHost=node-0"),
        ("sinfo", "down*"),
    ):
        (tmp_path / name).write_text(f"#!/bin/sh\necho asked >> {tmp_path}/asked\necho '{text}'\n")
        (tmp_path / name).chmod(0o755)
    rundir = RunDir(tmp_path / "run")
    for number, job in ((1, "7"), (2, "6")):
        rundir.attempt(number).mkdir(parents=True)
        write_json(
            rundir.attempt(number) / "start.json",
            {
                "attempt": number,
                "at": "2026-11-21T02:00:00+00:00",
                "job_id": job,
                "pid": 1 << 22,
                "pid_start": 1,
                "host": "node-0",
            },
        )
    page = {"signal": int(asked), "at": "2026-11-21T03:00:00+00:00"}
    (rundir.attempt(1) / WARNING).write_text(f"as people read it\n{json.dumps(page)}\n")
    env = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "SLURM_JOB_ID": "8", "FTSUPERVISE_JOB_ID": "8"}
    note_lost_host(rundir, 1, env)
    if is_noted:
        wait_until((rundir.attempt(1) / NAMES[LostEnd]).is_file, "what Slurm said is written down")
        assert ledger(rundir)[0].words == f"ended without a record: {LOST} (down)"
    else:
        note_lost_host(rundir, 2, env)  # asked after it, and so an end to wait for
        wait_until((rundir.attempt(2) / NAMES[LostEnd]).is_file, "the later one is answered")
        assert not (rundir.attempt(1) / NAMES[LostEnd]).exists()
        assert len((tmp_path / "asked").read_text().splitlines()) == 2
