"""The pages of the ledger: what stands in them is read back as it was, and those of an older version stay readable."""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.model import (
    Attempt,
    Cause,
    CauseKind,
    Claim,
    Failure,
    FailureKind,
    NodeRanks,
    Reached,
    Standstill,
)
from ftsupervise.model import ended as died
from ftsupervise.rundir.attempt_pages import KeptSnapshotPage, write_page
from ftsupervise.rundir.ledger import claim, ledger, over, write_end, write_start
from ftsupervise.rundir.paths import RunDir

GOLDEN = Path(__file__).parents[1] / "golden" / "records" / "ledger"
NOW = datetime(2026, 11, 22, 3, tzinfo=timezone.utc)
HANG = Cause(
    CauseKind.HANG,
    (NodeRanks("node-1", "2"), NodeRanks("node-2", "5")),
    more=2,
    how=Standstill.STOPPED,
    phase="train",
    step=30,
    waited=9.1,
)
CAUSES = (
    HANG,
    Cause(CauseKind.EXIT, code=0),
    died(-9, "node-1", "0-2,7")._replace(left=137),
    Cause(CauseKind.KILL_SWITCH, then=Cause(CauseKind.EXIT, code=1)),
    Cause(CauseKind.NODE, (NodeRanks("node-2"),), text="node-2 is down", then=died(None, "", "3")),
    Cause(CauseKind.CANCELLED, signal=15, late=True),
    Cause(CauseKind.OTHER, text="job requeue"),
)


_watched: list[list[str]] = []


def _note(event: str, args: tuple[object, ...]) -> None:
    if event == "open":
        for one in _watched:
            one.append(str(args[0]))


sys.addaudithook(_note)  # for good: an audit hook cannot be taken away


@contextmanager
def files_opened() -> Iterator[list[str]]:
    """The names of the files that are opened meanwhile."""
    found: list[str] = []
    _watched.append(found)
    try:
        yield found
    finally:
        _watched.remove(found)


def written(tmp_path: Path, *ends: Attempt) -> tuple[Attempt, ...]:
    rundir = RunDir(tmp_path)
    rundir.attempts.mkdir()
    for end in ends:
        mine: Claim = claim(rundir)
        write_start(mine, {"SLURM_JOB_ID": "88"}, ["true"], NOW, None)
        write_end(mine.folder, end._replace(number=mine.number, then="left"))
    return ledger(rundir)


@pytest.mark.parametrize("cause", CAUSES, ids=lambda one: one.kind.name)
def test_a_cause_is_read_as_it_was_written(tmp_path: Path, cause: Cause) -> None:
    (one,) = written(tmp_path, over(1, cause, NOW))
    assert (one.cause, one.words, one.failure) == (cause, cause.words(), None)


def test_a_failure_is_read_as_it_was_written_and_its_page_can_be_read_without_us(tmp_path: Path) -> None:
    failed = Failure(FailureKind.CODE, "exit 1", "ValueError: no such shape", "ValueError")
    reached = Reached(1, 50, 40, NOW.timestamp() - 47.5)
    ended = over(1, died(1, "node-1", "3"), NOW, 60.0, reached)
    (one,) = written(tmp_path, ended._replace(failure=failed, exit_code=1))
    assert (one.failure, one.first_step, one.last_step, one.saved, one.ready) == (failed, 1, 50, 40, 12.5)
    page = json.loads((tmp_path / "attempts" / "0001" / "end.json").read_text())
    assert page["words"] == "rank 3 on node-1 exit 1"
    assert page["cause"]["kind"] == "exit" and page["cause"]["code"] == 1
    assert page["cause"]["at"] == [{"node": "node-1", "ranks": "3"}]
    assert page["failure"] == {
        "kind": "code",
        "sign": "exit 1",
        "detail": "ValueError: no such shape",
        "error": "ValueError",
    }


@pytest.mark.parametrize(
    "cause",
    [
        None, [], 7, {"kind": "later"}, {"kind": ["hang"]},
        {"kind": "hang", "at": 3, "more": "x", "how": {}, "step": 1e300, "waited": None, "then": [], "text": True},
        {"kind": "hang", "at": [1, {"node": {}}, {"ranks": ["a"]}, None]},
    ],
)  # fmt: skip
def test_a_damaged_page_is_read_as_far_as_it_goes(tmp_path: Path, cause: object) -> None:
    written(tmp_path, over(1, HANG, NOW))
    path = tmp_path / "attempts" / "0001" / "end.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "cause": cause}))
    (one,) = ledger(RunDir(tmp_path))
    assert one.cause is not None and one.words.startswith("hang: ")


def test_pages_of_a_run_are_read_as_they_lie_on_the_disk() -> None:
    crash, killed, hang, switch, done = ledger(RunDir(GOLDEN))
    assert crash.failure == Failure(FailureKind.CODE, "exit 1", "ValueError: no such shape", "ValueError")
    assert crash.why() == "rank 1 on node-1 exit 1: ValueError: no such shape"
    assert (killed.words, killed.exit_code) == ("rank 1 on node-1 killed by SIGKILL (exit 137)", 137)
    assert hang.words.startswith("hang: rank 2 on node-1, rank 5 on node-2 are stopped")
    assert hang.failure is not None and hang.failure.kind is FailureKind.HANG
    assert (switch.cause, done.cause) == (Cause(CauseKind.KILL_SWITCH), Cause(CauseKind.FINISHED))
    assert [one.job_id for one in (crash, done)] == ["88_1", "88_1"]
    assert (done.first_step, done.last_step, done.saved, done.ready) == (500, 550, 540, 12.5)


def test_an_attempt_that_has_ended_is_read_again_only_when_its_folder_has_changed(tmp_path: Path) -> None:
    def opened(events: list[str]) -> list[str]:
        return [one for one in events if one.endswith(".json")]

    written(tmp_path, *(over(1, died(1, "node-1", "0"), NOW) for _ in range(3)))
    rundir, hour_ago = RunDir(tmp_path), time.time() - 3600
    for number in (1, 2, 3):
        os.utime(rundir.attempt(number), (hour_ago, hour_ago))
    first = ledger(rundir)
    with files_opened() as events:
        assert ledger(rundir) == first
    assert opened(events) == []

    write_page(
        rundir.attempt(2), KeptSnapshotPage(NOW, 40, "somewhere")
    )  # a page that comes later is a change of its folder
    with files_opened() as events:
        assert [one.kept for one in ledger(rundir)] == [None, 40, None]
    assert {Path(one).parent for one in opened(events)} == {rundir.attempt(2)}
    os.utime(rundir.attempt(2), (hour_ago, hour_ago + 1))
    (rundir.attempt(2) / "kept.json").unlink()
    assert [one.kept for one in ledger(rundir)] == [None, None, None]
