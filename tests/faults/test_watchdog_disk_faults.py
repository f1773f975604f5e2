"""Disks that are full in the ways disks are really full, and storage that does not answer."""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.findings import Finding, Severity
from ftsupervise.probe import Probe
from ftsupervise.truth import Health
from tests.neighbours.typed import typed

from .conftest import HungMount, need_root_and
from .watched import Watched

pytestmark = pytest.mark.root


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as probe:
        yield probe


@pytest.mark.fault("The inodes run out while blocks are free", "it is found as that")
def test_a_tmpfs_out_of_inodes_with_blocks_free(mounted: Callable[..., Path], tmp_path: Path, probe: Probe) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m,nr_inodes=20", "tmpfs")
    watched = Watched(tmp_path, f"{{disk: [{{path: {point}}}]}}", probe=probe)
    assert watched.look("disk")[f"{point} inodes"].health is Health.OK
    with pytest.raises(OSError, match="No space left"):
        for number in range(30):
            (point / str(number)).touch()
    found = watched.look("disk")
    assert found[f"{point} inodes"].health is Health.BAD
    assert found[f"{point} inodes"].severity is Severity.CRITICAL
    assert "0 of 20 inodes left" in found[f"{point} inodes"].summary
    assert found[f"{point} space"].health is Health.OK
    for number in range(10):
        (point / str(number)).unlink()
    assert watched.look("disk")[f"{point} inodes"].health is Health.OK


@pytest.mark.fault("The disk is full for users, not for root", "it is judged as the user sees it")
def test_an_ext4_that_is_full_for_users_and_not_for_root(
    mounted: Callable[..., Path], tmp_path: Path, probe: Probe
) -> None:
    need_root_and("mkfs.ext4")
    image = tmp_path / "image"
    with image.open("wb") as file:
        file.truncate(32 << 20)
    subprocess.run(["mkfs.ext4", "-q", "-F", "-m", "10", str(image)], check=True, timeout=60)
    point = mounted("-o", "loop", str(image))
    watched = Watched(tmp_path, f"{{disk: [{{path: {point}, free: 2MB}}]}}", probe=probe)
    assert watched.look("disk")[f"{point} space"].health is Health.OK
    free_for_users = os.statvfs(point).f_bavail * os.statvfs(point).f_frsize
    with (point / "full").open("wb") as file:
        file.write(b"x" * (free_for_users + 4096))
        os.fsync(file.fileno())
    assert os.statvfs(point).f_bfree * 4096 > 1_000_000  # root still has room
    found = watched.look("disk")[f"{point} space"]
    assert (found.health, found.severity) == (Health.BAD, Severity.CRITICAL)
    assert "0 B left, 100.0%" in found.summary


@pytest.mark.fault("The storage does not answer", 'an alert of its own, no "disk full"')
def test_storage_that_does_not_answer_is_an_alert_of_its_own_and_no_full_disk(
    hung_mount: HungMount, tmp_path: Path, probe: Probe
) -> None:
    watched = Watched(tmp_path, f"{{disk: [{{path: {hung_mount.point}}}, {{}}]}}", probe=probe)
    assert watched.look("disk")[f"{hung_mount.point} there"].health is Health.OK
    hung_mount.hang("statfs")
    found = watched.look("disk")
    dark, space = found[f"{hung_mount.point} there"], found[f"{hung_mount.point} space"]
    assert (dark.health, dark.severity) == (Health.BAD, Severity.CRITICAL)
    assert "has not answered for" in dark.summary
    assert "were left" in dark.summary  # the last known figure, with its age
    assert space.health is Health.UNKNOWN
    assert found[f"{watched.rundir.root} space"].health is Health.OK


def test_a_path_that_vanishes_is_an_alert(tmp_path: Path, probe: Probe) -> None:
    (tmp_path / "scratch").mkdir()
    watched = Watched(tmp_path, f"{{disk: [{{path: {tmp_path}/scratch}}]}}", probe=probe)
    assert watched.look("disk")[f"{tmp_path}/scratch there"].health is Health.OK
    (tmp_path / "scratch").rmdir()
    found = watched.look("disk")
    assert found[f"{tmp_path}/scratch there"].health is Health.BAD
    assert f"{tmp_path}/scratch space" not in found


def test_checkpoints_that_are_measured_are_forecast(mounted: Callable[..., Path], tmp_path: Path, probe: Probe) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=16m", "tmpfs")
    (point / "run").mkdir()
    watched = Watched(point, "{disk: [{checkpoints: 4, left: null}]}", probe=probe)
    for number in range(3):
        folder = watched.rundir.checkpoints / f"step-{number}"
        folder.mkdir()
        (folder / "weights").write_bytes(b"w" * 3_000_000)
    found = watched.look("disk")[f"{watched.rundir.root} forecast"]
    assert "room for 2 checkpoints of 3 MB" in found.summary
    assert (found.health, found.severity) == (Health.BAD, Severity.WARNING)


@pytest.mark.parametrize(
    ("script", "health", "said"),
    [
        ("echo ' /s 95 0 100 - 5 0 0 -'", Health.BAD, "95.0%"),
        ("echo ' /s 5 0 100 - 5 0 0 -'", Health.OK, "5.0%"),
        ("exit 0", Health.UNKNOWN, "does not match"),
        ("echo oops >&2; exit 4", Health.UNKNOWN, "exit 4 oops"),
        ("sleep 60", Health.UNKNOWN, "did not end within 1 s"),
    ],
)
def test_a_quota_command_is_asked_and_not_trusted(
    script: str, health: Health, said: str, tmp_path: Path, probe: Probe
) -> None:
    quota = f"{{command: [sh, -c, {script!r}], format: lfs, timeout: {'1s' if 'sleep' in script else '20s'}}}"
    watched = Watched(tmp_path, f"{{disk: [{{quota: {quota}}}]}}", probe=probe)
    found = watched.look("disk")[f"{watched.rundir.root} quota"]
    assert found.health is health
    assert said in found.summary


def test_the_process_that_looked_at_a_hung_mount_ends_by_itself(hung_mount: HungMount, tmp_path: Path) -> None:
    hung_mount.hang("statfs", "getattr")
    config = tmp_path / "ftsupervise.yaml"
    config.write_text(
        f"name: r\nlaunch: {{command: a}}\nscheduler: local\nwatch:\n  disk: [{{path: {hung_mount.point}}}, {{path: /tmp}}]\n"
    )
    done = typed("check", "disk", config, "--nagios", code=2, TMPDIR=str(tmp_path))
    assert "has not answered for" in done.stdout


@pytest.mark.fault(
    "A watched file system is not mounted any more",
    "that is an alert of its own; the disk beneath it neither fires nor resolves anything about space, inodes and "
    "quota",
)
def test_a_mount_that_is_lost_is_told_as_such_and_resolves_nothing(
    mounted: Callable[..., Path], tmp_path: Path, probe: Probe
) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m,nr_inodes=50", "scratch")
    settings = f"{{disk: [{{path: {point}, free: 512KB, inodes: 50%, quota: {{command: [echo, 900KB 1MB],"
    settings += " pattern: '(?P<used>\\S+) (?P<limit>\\S+)'}}]}"
    watched = Watched(tmp_path, settings, probe=probe)
    (point / "full").write_bytes(b"x" * 900_000)
    full = watched.look("disk")
    assert full[f"{point} space"].health is Health.BAD
    assert f"{point} mount" not in full
    subprocess.run(["umount", str(point)], check=True, timeout=30)
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as later:
        watched.probe = later
        lost = watched.look("disk")
    assert lost[f"{point} mount"].health is Health.BAD
    assert lost[f"{point} mount"].severity is Severity.CRITICAL
    assert f"scratch on {point} (tmpfs) is gone" in lost[f"{point} mount"].summary
    for subject in ("space", "inodes", "quota"):
        assert lost[f"{point} {subject}"].health is Health.UNKNOWN, "the disk beneath it is not the one that is watched"
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "scratch", str(point)], check=True, timeout=30)
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as later:
        watched.probe = later
        back = watched.look("disk")
    assert back[f"{point} mount"].health is Health.OK
    assert back[f"{point} space"].health is Health.OK


@pytest.mark.fault("Another file system is mounted where the watched one was", "it is told, and believed after a day")
def test_another_file_system_at_the_same_place_is_told_and_accepted_after_a_day(
    mounted: Callable[..., Path], tmp_path: Path, probe: Probe
) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m", "old")
    watched = Watched(tmp_path, f"{{disk: [{{path: {point}, free: 512KB}}]}}", probe=probe)
    assert watched.look("disk")[f"{point} space"].health is Health.OK
    subprocess.run(["umount", str(point)], check=True, timeout=30)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "new", str(point)], check=True, timeout=30)
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as later:
        watched.probe = later
        other = watched.look("disk")
        watched.ahead = 90_000.0
        accepted = watched.look("disk")
    assert other[f"{point} mount"].health is Health.BAD
    assert f"new on {point} (tmpfs), where old on" in other[f"{point} mount"].summary
    assert other[f"{point} space"].health is Health.UNKNOWN
    assert accepted[f"{point} mount"].health is Health.OK
    assert accepted[f"{point} space"].health is Health.OK


@pytest.mark.fault(
    "The watch moves to a host where the file system was never mounted",
    "it is missed there too, from what the other hosts have seen",
)
def test_a_mount_that_only_other_hosts_have_seen_is_missed_here_too(
    mounted: Callable[..., Path], tmp_path: Path, probe: Probe
) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=1m", "scratch")
    watched = Watched(tmp_path, f"{{disk: [{{path: {point}}}]}}", probe=probe)
    watched.look("disk")
    mounts = watched.memory["disk"][str(point)]["mounts"]
    mounts["another-host"] = mounts.pop(os.uname().nodename)
    subprocess.run(["umount", str(point)], check=True, timeout=30)
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as later:
        watched.probe = later
        assert watched.look("disk")[f"{point} mount"].health is Health.BAD


@pytest.mark.fault(
    "The disk of the checkpoints is about to be full",
    "where the run allows it, old checkpoints go as its rules say, and the alert says so",
)
def test_old_checkpoints_go_before_the_disk_is_full_where_the_run_allows_it(
    mounted: Callable[..., Path], probe: Probe, until: Callable[..., Any]
) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=12m", "tmpfs")
    rules = "checkpoints: {retain: {last: 2, before_full: true}}"
    watched = Watched(point, f"{{disk: [{{path: {point}, free: 8MB}}]}}\n{rules}", probe=probe)
    watched.rundir.config.write_text(f"name: r\nlaunch: {{command: a}}\nrun_dir: {watched.rundir.root}\n{rules}\n")
    assert watched.look("disk")[f"{point} space"].health is Health.OK
    save(watched, 1, 6)
    found = watched.look("disk")[f"{point} space"]
    assert found.health is Health.BAD
    assert "old checkpoints are removed as checkpoints.retain says (upkeep was started at" in found.summary
    left = {"step-00000004", "step-00000005"}

    def gone() -> bool:
        names = {one.name for one in watched.rundir.checkpoints.iterdir()}
        return {name for name in names if name != ".staging"} == left

    until(gone, "the old checkpoints are gone", 60)
    assert watched.look("disk")[f"{point} space"].health is Health.OK


def save(watched: Watched, first: int, end: int) -> None:
    """Checkpoints of 1.2 MB, verified."""
    for step in range(first, end):
        folder = watched.rundir.checkpoints / f"step-{step:08d}"
        folder.mkdir()
        (folder / "weights").write_bytes(os.urandom(1_200_000))
        commit(folder, Origin(step=step))


def test_a_disk_that_fills_up_again_is_freed_again_but_not_more_often_than_once_an_hour(
    mounted: Callable[..., Path], probe: Probe, until: Callable[..., Any]
) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=12m", "tmpfs")
    rules = "checkpoints: {retain: {last: 2, before_full: true}}"
    watched = Watched(point, f"{{disk: [{{path: {point}, free: 8MB}}]}}\n{rules}", probe=probe)
    watched.rundir.config.write_text(f"name: r\nlaunch: {{command: a}}\nrun_dir: {watched.rundir.root}\n{rules}\n")

    def steps() -> set[int]:
        return {int(one.name[-8:]) for one in watched.rundir.checkpoints.glob("step-*")}

    def look() -> Finding:
        return watched.look("disk")[f"{point} space"]

    save(watched, 1, 6)
    first = look().summary
    assert "upkeep was started at" in first
    until(lambda: steps() == {4, 5}, "the first two to stay", 60)
    until(lambda: look().health is Health.OK, "it to be over, for they are renamed first and removed then", 60)
    save(watched, 6, 9)
    again = look()
    assert again.health is Health.BAD and again.summary.rpartition("started at")[2] == first.rpartition("started at")[2]
    watched.ahead = 3590.0
    assert look().summary.rpartition("started at")[2] == first.rpartition("started at")[2]
    time.sleep(1)  # what was started would be at work
    assert steps() == {4, 5, 6, 7, 8}
    watched.ahead = 3700.0
    assert look().summary.rpartition("started at")[2] != first.rpartition("started at")[2]
    until(lambda: steps() == {7, 8}, "the newest two to stay", 60)


def test_without_that_setting_the_disk_watchdog_removes_nothing(mounted: Callable[..., Path], probe: Probe) -> None:
    point = mounted("-t", "tmpfs", "-o", "size=12m", "tmpfs")
    watched = Watched(point, f"{{disk: [{{path: {point}, free: 30MB}}]}}", probe=probe)
    found = watched.look("disk")[f"{point} space"]
    assert found.health is Health.BAD and "upkeep" not in found.summary


def test_a_path_of_two_words_that_cannot_be_seen_is_told_once(tmp_path: Path, probe: Probe) -> None:
    path = tmp_path / "two words"
    path.symlink_to(path)
    (found,) = Watched(tmp_path, f"{{disk: [{{path: {path}}}]}}", probe=probe).look("disk").values()
    assert found.health is Health.UNKNOWN
    assert found.summary == f"{path}: space not seen: Too many levels of symbolic links"
