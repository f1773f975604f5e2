"""A full disk under the job ring: the chain is not burned on it, and no end is forgotten. Needs root for mounts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.switches import KILL
from tests.neighbours.supervised import Program, SupervisedRun, outside_a_job

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts")]
Until = Callable[..., Any]
# Trains until told, on a disk that a test fills meanwhile; the second attempt goes through.
FAILS = """echo up > "$0/up-$FTSUPERVISE_ATTEMPT"
[ $FTSUPERVISE_ATTEMPT = 1 ] || exit 0
until [ -e "$0/go" ]; do sleep 0.1; done; exit 5"""


@pytest.fixture
def disk(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Path]:
    """A file system of half a megabyte or a few."""
    place = tmp_path / "disk"
    place.mkdir()
    image, kind = tmp_path / "image", getattr(request, "param", "tmpfs")
    if kind == "tmpfs":
        words = ["-t", "tmpfs", "-o", "size=512k,nr_inodes=128", "small", str(place)]
    else:
        image.write_bytes(bytes(4_000_000))
        made = subprocess.run(["mkfs.ext4", "-q", "-m", "0", str(image)], capture_output=True, check=False)
        if made.returncode:
            pytest.skip("no ext4 can be made here")
        words = ["-o", "loop", str(image), str(place)]
    if subprocess.run(["mount", *words], capture_output=True, check=False).returncode:
        pytest.skip(f"mounting {kind} is not allowed here")
    yield place
    subprocess.run(["umount", "-l", str(place)], check=True)


def fill(disk: Path) -> Path:
    """Blocks and inodes, to the last."""
    block = disk / "fill"
    block.mkdir()
    for size in (100_000, 4096, 1, 0):
        try:
            for n in range(10_000):
                (block / f"{size}-{n}").write_bytes(b"x" * size)
        except OSError:
            continue
    return block


def make_room(block: Path) -> None:
    for one in block.iterdir():
        one.unlink()


@pytest.fixture
def run(disk: Path, tmp_path: Path) -> Iterator[SupervisedRun]:
    """On that file system, with its output on another."""
    with closing(SupervisedRun(disk / "run", tmp_path)) as one:
        yield one


def fail_on_a_full_disk(run: SupervisedRun, disk: Path, until: Until, *words: str) -> tuple[Program, Path]:
    """The first attempt has failed with exit 5 and its end could not be written."""
    one = run.start(*words, "--back-off", "0", "--", "sh", "-c", FAILS, str(run.folder))
    until((run.folder / "up-1").exists, "the first attempt")
    block = fill(disk)
    (run.folder / "go").touch()
    one.until_said("it is written as soon as there is space")
    assert not (run.rundir.attempt(1) / "end.json").exists()
    assert "attempt 1 ended: exit 5" in one.said()
    return one, block


@pytest.mark.fault("The disk is full when an attempt ends", "its end is written as soon as there is space")
@pytest.mark.parametrize("disk", ["tmpfs", "ext4"], indirect=True)
def test_the_end_of_an_attempt_is_written_when_there_is_space_and_before_the_next_one_starts(
    run: SupervisedRun, disk: Path, until: Until
) -> None:
    one, block = fail_on_a_full_disk(run, disk, until, "--in-place", "5")
    one.until_said("waiting up to 600 s for space")
    assert not (run.folder / "up-2").exists()
    make_room(block)
    assert one.wait(60) == 0
    first, second = run.attempts()
    assert (first.sign, first.exit_code, second.words) == ("exit 5", 5, "exit 0")
    assert first.ended is not None and first.ended < second.started
    assert json.loads((run.rundir.attempt(1) / "end.json").read_text())["then"].startswith("restarted in place")


def test_a_job_that_leaves_writes_the_end_first_and_the_next_member_counts_it_as_what_it_was(
    run: SupervisedRun, disk: Path, until: Until
) -> None:
    one, block = fail_on_a_full_disk(run, disk, until, "--in-place", "0")
    make_room(block)
    assert one.wait(60) == 5
    (only,) = run.attempts()
    assert (only.sign, only.then) == (
        "exit 5",
        "its supervisor left: no restart in place (--in-place 0): the next member, if any, takes over",
    )
    assert run.start("--", "true").wait(60) == 0
    assert [one.words for one in run.attempts()] == ["exit 5", "exit 0"]


def test_what_never_found_space_stands_in_the_jobs_output(run: SupervisedRun, disk: Path, until: Until) -> None:
    one, _ = fail_on_a_full_disk(run, disk, until, "--space-wait", "1")
    assert one.wait(60) == 5
    assert (
        "not written for lack of space: the end of attempt 1 (exit 5; its supervisor left: no restart in place"
        in one.said()
    )


def test_a_job_told_to_leave_does_not_wait_long_for_space(run: SupervisedRun, disk: Path, until: Until) -> None:
    one, _ = fail_on_a_full_disk(run, disk, until)
    one.send_signal(signal.SIGTERM)
    assert one.wait(30) == 5
    assert "not written for lack of space" in one.said()


@pytest.mark.fault("The disk is full before the command starts", "the member waits at the gate and claims nothing")
def test_a_member_waits_at_the_gate_for_space_and_claims_nothing_meanwhile(run: SupervisedRun, disk: Path) -> None:
    run.rundir.root.mkdir()
    block = fill(disk)
    one = run.start("--", "sh", "-c", "echo trained")
    one.until_said("waiting up to 600 s for space (free some")
    assert not run.rundir.attempts.exists() or not list(run.rundir.attempts.iterdir())
    make_room(block)
    assert one.wait(60) == 0
    assert "there is space again" in one.said() and "trained" in one.said()
    assert one.said().count("waiting up to") == 1
    assert [a.words for a in run.attempts()] == ["exit 0"]


@pytest.mark.parametrize("then", ["there is space again", "the kill switch is up"])
def test_the_member_of_a_replica_group_waits_for_space_before_its_supervisor_begins(
    run: SupervisedRun, disk: Path, then: str
) -> None:
    for folder in (run.rundir.group("g000").state, run.rundir.state, run.rundir.switches):
        folder.mkdir(parents=True)
    block = fill(disk)
    asked = ["--number", "0", "--run-dir", str(run.rundir.root), "--name", "r", "--count", "3", "--lighthouse", "none"]
    words = [sys.executable, "-m", "ftsupervise", "groups", "member", *asked]
    words += ["--", "--space-wait", "500", "--", "sh", "-c", "echo trained"]
    one = Program(words, run.folder, outside_a_job(), run.folder / "out")
    run.members.append(one)
    one.until_said("waiting up to 500 s for space")
    if then == "there is space again":
        make_room(block)
    else:
        min(block.iterdir(), key=lambda one: one.stat().st_size).rename(run.rundir.switches / KILL)
    assert one.wait(60) == 0
    assert then in one.said() and ("trained" in one.said()) is (then == "there is space again")


@pytest.mark.parametrize("by", ["SIGTERM", "kill switch"])
def test_a_member_that_waits_for_space_leaves_when_it_is_told_to(run: SupervisedRun, disk: Path, by: str) -> None:
    run.rundir.switches.mkdir(parents=True)
    run.rundir.state.mkdir()
    block = fill(disk)
    one = run.start("--", "sh", "-c", "echo trained")
    one.until_said("waiting up to 600 s for space")
    if by == "SIGTERM":
        one.send_signal(signal.SIGTERM)
    else:
        min(block.iterdir(), key=lambda one: one.stat().st_size).rename(run.rundir.switches / KILL)
    assert one.wait(30) == 0
    assert "trained" not in one.said()
    assert ("asked to stop" if by == "SIGTERM" else "the kill switch is up") in one.said()
