"""What Slurm says of a job whose supervisor left no record of its end: was its batch host lost, or is that not known?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.run.lost_host import fate_of

LOST, NODE_FAIL = "its batch host node-0 was lost", "one of its nodes was lost, and Slurm ended the job (NODE_FAIL)"


@pytest.mark.parametrize(
    ("shown", "host_is", "words"),
    [
        ("JobState=NODE_FAIL NodeList=node-[0-1] BatchHost=node-0", "down*", f"{LOST} (down*)"),
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
