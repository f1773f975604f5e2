"""A process that really leaks, a cgroup that is really nearly full, and a run whose memory cannot be seen from here."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.findings import Finding, Severity
from ftsupervise.probe import Probe
from ftsupervise.truth import Health
from ftsupervise.watch.watchdogs.memory import cgroups, host
from tests.neighbours.patience import wait_until

from .conftest import need_root_and
from .watched import Watched

LEAK = """
import mmap, sys, tempfile, time
kept, mapped = [], None
with tempfile.TemporaryFile() as file:
    file.truncate(64 << 20)
    mapped = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
    for line in sys.stdin:
        word, size = line.split()
        if word == "leak":
            kept.append(bytearray(b"x" * int(size)))
        else:
            sum(mapped[i] for i in range(0, int(size), 4096))  # pages of a file: no leak
        print("done", flush=True)
"""


class Leaking:
    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", LEAK], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def do(self, word: str, size: int) -> None:
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.write(f"{word} {size}\n")
        assert self.process.stdout.readline() == "done\n"


@pytest.fixture
def leaking() -> Iterator[Leaking]:
    leaking = Leaking()
    try:
        yield leaking
    finally:
        leaking.process.send_signal(signal.SIGKILL)
        leaking.process.communicate(timeout=10)


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(notes=tmp_path / "notes" / "probe") as probe:
        yield probe


def beat_of(watched: Watched, pid: int) -> None:
    watched.beat(5, host=socket.gethostname(), attempt="1", age=-watched.ahead)
    path = watched.rundir.beats / "rank-0"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pid": pid}))
    at = time.time() + watched.ahead
    os.utime(path, (at, at))


def hours(watched: Watched, leaking: Leaking, word: str, size: int, looks: int) -> dict[str, Finding]:
    """``looks`` looks, an hour of the looker's clock between two."""
    found: dict[str, Finding] = {}
    for _ in range(looks):
        leaking.do(word, size)
        watched.ahead += 600.0
        beat_of(watched, leaking.process.pid)
        found = watched.look("memory")
    return found


@pytest.mark.fault("Memory leaks", "the time of the end is forecast")
def test_a_leak_is_forecast_before_the_memory_is_full(leaking: Leaking, tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {leak: 365d}}", probe=probe)
    beat_of(watched, leaking.process.pid)
    found = hours(watched, leaking, "leak", 4_000_000, 10)
    assert found["leak"].health is Health.BAD
    assert "MB an hour: full in" in found["leak"].summary
    per_hour = float(found["leak"].summary.partition("growing by ")[2].split()[0])
    assert 18 < per_hour < 30  # 4 MB every ten minutes
    assert found["used"].health is not Health.UNKNOWN


def test_pages_of_a_mapped_file_are_no_leak(leaking: Leaking, tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {leak: 3650d}}", probe=probe)
    beat_of(watched, leaking.process.pid)
    leaking.do("map", 4096)
    taken = [watched.look("memory")["leak"]]
    for pages in range(1, 10):
        leaking.do("map", pages * 6_000_000)
        watched.ahead += 600.0
        beat_of(watched, leaking.process.pid)
        taken.append(watched.look("memory")["leak"])
    assert [one.health for one in taken] == [Health.OK] * 10


def test_memory_on_another_node_is_seen_through_what_the_ranks_report(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {}}", probe=probe)
    watched.beat(5, rank=0, host="n1", memory="0.41")
    watched.beat(5, rank=1, host="n2", memory="0.98")
    found = watched.look("memory")["used"]
    assert (found.health, found.severity) == (Health.BAD, Severity.CRITICAL)
    assert "host n2" in found.summary
    watched.beat(6, rank=1, host="n2", memory="0.50")
    assert watched.look("memory")["used"].health is Health.OK


def test_the_forecast_of_a_rank_s_guard_is_taken_and_that_of_the_first_to_be_full(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {leak: 2h, gpu: 90%}}", probe=probe)
    watched.beat(5, rank=0, host="n1", memory="0.41", memory_left="steady", gpu_memory="0.70")
    watched.beat(5, rank=1, host="n2", memory="0.60", memory_left="3600", gpu_memory="0.93")
    watched.beat(5, rank=2, host="n3", memory="0.60", memory_left="", gpu_memory="much")
    found = watched.look("memory")
    assert found["leak"].health is Health.BAD and "host n2, as rank 1 reports, grows: 1h until" in found["leak"].summary
    assert found["gpu memory"].health is Health.BAD and "rank 1 on n2 93.0% used" in found["gpu memory"].summary
    watched.beat(6, rank=1, host="n2", memory="0.60", memory_left="steady", gpu_memory="0.50")
    found = watched.look("memory")
    assert (found["leak"].health, found["gpu memory"].health) == (Health.OK, Health.OK)


def test_memory_that_nobody_reports_is_not_seen_and_not_that_of_the_looker(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {}}", probe=probe)
    watched.beat(5, rank=0, host="n1")
    found = watched.look("memory")
    assert {subject: one.health for subject, one in found.items()} == {"used": Health.UNKNOWN}
    assert "the run is on n1" in found["used"].summary


def test_the_host_is_as_full_as_the_kernel_says() -> None:
    [whole] = host()
    assert 0 < whole.used < 1


@pytest.mark.root
def test_the_limit_of_the_jobs_cgroup_counts(leaking: Leaking, probe: Probe) -> None:
    need_root_and()
    base = Path("/sys/fs/cgroup/memory")
    base = base if base.is_dir() else Path("/sys/fs/cgroup")
    group = base / f"ftsupervise-test-{os.getpid()}"
    limit_in = "memory.limit_in_bytes" if base.name == "memory" else "memory.max"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no memory cgroup here: {error}")
    try:
        try:
            (group / limit_in).write_text(str(400 << 20))
        except OSError as error:
            pytest.skip(f"no memory limit here: {error}")
        (group / "cgroup.procs").write_text(str(leaking.process.pid))
        leaking.do("leak", 100 << 20)
        wait_until(lambda: bool(cgroups(probe, leaking.process.pid)), "the cgroup")
        [level] = [one for one in cgroups(probe, leaking.process.pid) if "419 MB" in one.whose]
        assert 0.2 < level.used < 0.6
    finally:
        leaking.process.kill()
        leaking.process.wait(10)
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the group to be empty")
        until = time.monotonic() + 10
        while group.exists() and time.monotonic() < until:
            try:
                group.rmdir()
            except OSError:
                time.sleep(0.05)


def test_a_guarded_loop_reports_its_memory_in_its_beats(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{memory: {}}", probe=probe)
    loop = f"""
import time
from ftsupervise import Guard
with Guard({str(watched.rundir.root)!r}, beat_every=0.01, poll=0.01, memory=1.0) as guard:
    for step in range(40):
        guard.step(step)
        time.sleep(0.01)
"""
    subprocess.run([sys.executable, "-c", loop], check=True, timeout=60)
    [beat] = watched.rundir.beats.glob("rank-0")
    assert 0 < float(json.loads(beat.read_text())["facts"]["memory"]) < 1
    found = watched.look("memory")["used"]  # its process is gone, so what it said counts
    assert "as rank 0 reports" in found.summary
