"""``ftsupervise diagnose`` as a person types it, after a run has failed."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from pathlib import Path

import pytest

from ftsupervise.scheduler.local import Local
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

TRAIN = """
def step(batch):
    return {}[batch]
print("step 1 loss 2.3", flush=True)
step("tokens of hf_abcdefghijklmnopqrstuvwxyz012345")
"""


@pytest.fixture
def failed(tmp_path: Path) -> Path:
    """A run that fails three times in the same way, until the brake comes on."""
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "ftsupervise.yaml").write_text(
        "name: thesis\nscheduler: local\nlaunch: {command: python3 train.py, jobs: 1, restart: {back_off: 0s}}\n"
        f"alerts: {{receivers: [{{file: {{path: {tmp_path}/mail}}}}]}}\n"
    )
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    typed("launch", folder=tmp_path, env=env, code=0)
    run = tmp_path / "runs" / "thesis"
    wait_until((run / "state" / "brake").exists, "the brake")
    wait_until((run / "attempts" / "0003" / "end.json").exists, "the end of the third attempt")
    wait_until(lambda: not Local(env).queue(), "the end of its job, which writes last")
    return run


def test_the_verdict_names_the_class_the_line_and_what_was_done(failed: Path) -> None:
    said = typed("diagnose", failed, code=0).stdout
    assert said.splitlines()[0] == "thesis, attempt 3: an error in the program (confidence: high)", said
    assert (
        "at train.py:3 step" in said and "before    the third of this kind in this run (before: attempts 1, 2)" in said
    )
    assert "done      stopped by the brake" in said
    assert (
        "next      stop: it failed in this way for the third time, and another start will too; once that is mended:"
        in said
    )
    assert "abcdefghijklmnopqrstuvwxyz" not in said, "a secret of the output is not shown"
    said = typed("diagnose", failed, "1", "--json", code=0).stdout
    assert "abcdefghijklmnopqrstuvwxyz" not in said
    found = json.loads(said)
    assert (found["attempt"], found["kind"], found["alike_before"]) == (1, "an error in the program", [])


def test_what_it_says_stands_in_status_and_in_the_messages(failed: Path, tmp_path: Path) -> None:
    """A person who got the mail, or types ``status``, need not know of ``diagnose`` to be told."""
    env = {**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    before = typed("status", failed, env=env, code=0).stdout
    assert f"  do        ftsupervise diagnose {failed}   (what failed first, whose it was, and what to try)" in before
    assert json.loads(typed("status", failed, "--json", env=env, code=0).stdout)["diagnosis"] is None
    typed("watch", failed, env=env)
    why = "an error in the program (confidence: high): KeyError: 'tokens of <secret>' at train.py:3 step"
    assert f"  why       attempt 3: {why}\n" in typed("status", failed, env=env, code=0).stdout
    mail = (tmp_path / "mail").read_text()
    assert f"\nwhy      {why}\nlook     ftsupervise diagnose {failed}\n" in mail
    assert "abcdefghijklmnopqrstuvwxyz" not in mail, "a secret of the output is not sent"
    told = json.loads(typed("status", failed, "--json", env=env, code=0).stdout)["diagnosis"]
    assert told["history"] == ["the third of this kind in this run (before: attempts 1, 2)"]
    assert told["advice"].startswith("stop: it failed in this way for the third time")
    typed("watch", failed, env=env)
    assert (tmp_path / "mail").read_text().count("\nwhy ") == 1, "there is no second message for it"


def test_it_changes_nothing_of_the_run(failed: Path) -> None:
    before = {str(one): (one.stat().st_mtime_ns, one.stat().st_size) for one in failed.rglob("*")}
    typed("diagnose", failed, code=0)
    assert {str(one): (one.stat().st_mtime_ns, one.stat().st_size) for one in failed.rglob("*")} == before


def test_an_attempt_that_there_is_not_is_one_sentence(failed: Path) -> None:
    assert "thesis has no attempt 99\n  it has attempts up to 3" in typed("diagnose", failed, "99", code=66).stderr
    shutil.rmtree(failed / "attempts")
    assert "thesis has no attempt\n  it has begun none" in typed("diagnose", failed, code=66).stderr


def test_a_folder_of_dumps_and_logs_from_elsewhere(tmp_path: Path) -> None:
    for rank in range(4):
        calls = [{"process_group": ["0", "default_pg"], "collective_seq_id": 1, "profiling_name": "nccl:all_reduce",
                  "input_sizes": [[8]], "input_dtypes": ["Float"], "state": "started", "frames": []}]  # fmt: skip
        dump = {"pg_config": {"0": {"ranks": "[0, 1, 2, 3]"}}, "entries": [] if rank == 2 else calls}
        (tmp_path / f"rank_{rank}").write_bytes(pickle.dumps(dump))
        (tmp_path / f"out-{rank}.log").write_text("step 1\n")
    said = typed("diagnose", tmp_path, code=0).stdout
    assert f"{tmp_path}: a rank that did not join a collective (confidence: medium)" in said
    assert "rank 2 did not join all_reduce, number 1 of group 0, which ranks 0-1,3 wait for" in said


def test_a_folder_of_something_else_is_said_to_be_none(tmp_path: Path) -> None:
    said = typed("diagnose", tmp_path, code=66).stderr
    assert f"{tmp_path} is no run, and holds no log" in said and "rank_0, rank_1" in said
