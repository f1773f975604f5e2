"""A full disk under the job ring: the chain is not burned on it, and no end is forgotten. Needs root for mounts."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL

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


class Runs:
    """``ftsupervise run`` with its output in a file on another disk."""

    def __init__(self, folder: Path, run: RunDir) -> None:
        self.folder, self.rundir = folder, run
        self.output = folder / "job.out"
        self.one: subprocess.Popen[bytes] | None = None

    def start(self, *words: str) -> subprocess.Popen[bytes]:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_"))}
        argv = [sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(self.rundir.root), *words]
        with self.output.open("ab") as file:
            self.one = subprocess.Popen(argv, env=env, stdout=file, stderr=file)
        return self.one

    def said(self) -> str:
        return self.output.read_text()


@pytest.fixture
def runs(disk: Path, tmp_path: Path) -> Iterator[Runs]:
    here = Runs(tmp_path, RunDir(disk / "run"))
    yield here
    if here.one is not None and here.one.poll() is None:
        here.one.kill()
        here.one.wait()


def fail_on_a_full_disk(runs: Runs, disk: Path, until: Until, *words: str) -> Path:
    """The first attempt has failed with exit 5 and its end could not be written."""
    runs.start(*words, "--back-off", "0", "--", "sh", "-c", FAILS, str(runs.folder))
    until((runs.folder / "up-1").exists, "the first attempt")
    block = fill(disk)
    (runs.folder / "go").touch()
    until(lambda: "it is written as soon as there is space" in runs.said(), "the end that could not be written")
    assert not (runs.rundir.attempt(1) / "end.json").exists()
    assert "attempt 1 ended: exit 5" in runs.said()
    return block


@pytest.mark.parametrize("disk", ["tmpfs", "ext4"], indirect=True)
def test_the_end_of_an_attempt_is_written_when_there_is_space_and_before_the_next_one_starts(
    runs: Runs, disk: Path, until: Until
) -> None:
    block = fail_on_a_full_disk(runs, disk, until, "--in-place", "5")
    until(lambda: "waiting up to 600 s for space" in runs.said(), "the wait")
    assert not (runs.folder / "up-2").exists()
    make_room(block)
    assert runs.one is not None
    assert runs.one.wait(60) == 0
    first, second = ledger(runs.rundir)
    assert (first.sign, first.exit_code, second.words) == ("exit 5", 5, "exit 0")
    assert first.ended is not None and first.ended < second.started
    assert json.loads((runs.rundir.attempt(1) / "end.json").read_text())["then"].startswith("restarted in place")


def test_a_job_that_leaves_writes_the_end_first_and_the_next_member_counts_it_as_what_it_was(
    runs: Runs, disk: Path, until: Until
) -> None:
    block = fail_on_a_full_disk(runs, disk, until, "--in-place", "0")
    make_room(block)
    assert runs.one is not None
    assert runs.one.wait(60) == 5
    (only,) = ledger(runs.rundir)
    assert (only.sign, only.then) == (
        "exit 5",
        "left: no restart in place (--in-place 0): the next member takes over",
    )
    assert runs.start("--", "true").wait(60) == 0
    assert [one.words for one in ledger(runs.rundir)] == ["exit 5", "exit 0"]


def test_what_never_found_space_stands_in_the_jobs_output(runs: Runs, disk: Path, until: Until) -> None:
    fail_on_a_full_disk(runs, disk, until, "--space-wait", "1")
    assert runs.one is not None
    assert runs.one.wait(60) == 5
    assert "not written for lack of space: the end of attempt 1 (exit 5; left: no restart in place" in runs.said()


def test_a_job_told_to_leave_does_not_wait_long_for_space(runs: Runs, disk: Path, until: Until) -> None:
    fail_on_a_full_disk(runs, disk, until)
    assert runs.one is not None
    runs.one.send_signal(signal.SIGTERM)
    assert runs.one.wait(30) == 5
    assert "not written for lack of space" in runs.said()


def test_a_member_waits_at_the_gate_for_space_and_claims_nothing_meanwhile(
    runs: Runs, disk: Path, until: Until
) -> None:
    runs.rundir.root.mkdir()
    block = fill(disk)
    one = runs.start("--", "sh", "-c", "echo trained")
    until(lambda: "waiting up to 600 s for space (free some" in runs.said(), "the wait")
    assert not runs.rundir.attempts.exists() or not list(runs.rundir.attempts.iterdir())
    make_room(block)
    assert one.wait(60) == 0
    assert "there is space again" in runs.said() and "trained" in runs.said()
    assert runs.said().count("waiting up to") == 1
    assert [a.words for a in ledger(runs.rundir)] == ["exit 0"]


@pytest.mark.parametrize("by", ["SIGTERM", "kill switch"])
def test_a_member_that_waits_for_space_leaves_when_it_is_told_to(runs: Runs, disk: Path, until: Until, by: str) -> None:
    runs.rundir.switches.mkdir(parents=True)
    runs.rundir.state.mkdir()
    block = fill(disk)
    one = runs.start("--", "sh", "-c", "echo trained")
    until(lambda: "waiting up to 600 s for space" in runs.said(), "the wait")
    if by == "SIGTERM":
        one.send_signal(signal.SIGTERM)
    else:
        min(block.iterdir(), key=lambda one: one.stat().st_size).rename(runs.rundir.switches / KILL)
    assert one.wait(30) == 0
    assert "trained" not in runs.said()
    assert ("asked to stop" if by == "SIGTERM" else "the kill switch is up") in runs.said()
