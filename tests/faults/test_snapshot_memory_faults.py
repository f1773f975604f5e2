"""Snapshots where the memory is short: they stay away, or go again, before the kernel kills a rank for them."""

from __future__ import annotations

import mmap
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from ftsupervise.host.memory import HostMemory
from ftsupervise.snapshots.room import MemoryRoom, NoRoom, populate
from ftsupervise.snapshots.slots import create_slots, room_for

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts and cgroups")]
MB = 1 << 20


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 200 MiB below our own, v1 or v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if not v1 and (number, controllers) != ("0", ""):
            continue
        folder = Path("/sys/fs/cgroup", "memory" if v1 else "", path.lstrip("/"), f"fts-snapshots-{os.getpid()}")
        try:
            folder.mkdir()
            (folder / ("memory.limit_in_bytes" if v1 else "memory.max")).write_text(str(200 * MB))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no memory cgroup of our own here")


@pytest.fixture
def shm() -> Iterator[Path]:
    place = Path(f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}")
    place.mkdir(mode=0o700)
    yield place
    shutil.rmtree(place)


def in_group(cgroup: Path, code: str) -> subprocess.CompletedProcess[str]:
    enter = f"import os\nopen({str(cgroup / 'cgroup.procs')!r}, 'w').write(str(os.getpid()))\n"
    words = [sys.executable, "-c", enter + code]
    return subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)


TAKE = """
import mmap
from ftsupervise.snapshots.room import MemoryRoom, NoRoom, populate
from ftsupervise.snapshots.slots import create_slots, room_for
room = MemoryRoom({place!r})
try:
    file = create_slots({place!r} + "/rank-0", 1, 0, room_for(2, 100, {size}), room.may_take if {asked} else lambda size: None)
except NoRoom as error:
    print(error)
else:
    mapping = mmap.mmap(file.fd, file.room.size)
    populate(mapping)
    for at in range(0, len(mapping), 4096):
        mapping[at] = 1
    print("taken", room.tight() or "and not tight")
"""


@pytest.mark.fault("The job's memory is too small for snapshots", "there are none, and the kernel kills nothing")
def test_a_job_that_is_too_small_for_snapshots_gets_none_and_lives(cgroup: Path, shm: Path) -> None:
    killed = in_group(cgroup, TAKE.format(place=str(shm), size=150 * MB, asked=False))
    assert killed.returncode == -9, "without the question the kernel kills it"
    for one in shm.iterdir():
        one.unlink()
    asked = in_group(cgroup, TAKE.format(place=str(shm), size=150 * MB, asked=True))
    assert asked.returncode == 0 and "of the job's memory (210 MB)" in asked.stdout, asked
    assert not list(shm.iterdir())
    fits = in_group(cgroup, TAKE.format(place=str(shm), size=40 * MB, asked=True))
    assert fits.returncode == 0 and fits.stdout == "taken and not tight\n", fits


def test_memory_that_a_dead_rank_has_left_in_the_job_counts(cgroup: Path, shm: Path) -> None:
    first = in_group(cgroup, TAKE.format(place=str(shm), size=70 * MB, asked=True))
    assert "taken" in first.stdout, first
    (shm / "rank-0").rename(shm / "rank-1")
    second = in_group(cgroup, TAKE.format(place=str(shm), size=70 * MB, asked=True))
    assert second.returncode == 0 and "of the job's memory" in second.stdout, second


def test_file_pages_do_not_keep_snapshots_away(cgroup: Path, shm: Path, tmp_path: Path) -> None:
    (tmp_path / "data").write_bytes(b"x" * 190 * MB)
    read = f"""
import os
with open({str(tmp_path / "data")!r}, "rb", buffering=0) as file:
    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    while file.read(1 << 20): pass
"""
    done = in_group(cgroup, read + TAKE.format(place=str(shm), size=40 * MB, asked=True))
    assert "taken" in done.stdout, done


def test_a_job_whose_memory_fills_up_later_is_told_that_it_is_tight(cgroup: Path, shm: Path) -> None:
    fill = """
import os
hog = os.urandom(1) * (105 << 20)
print(room.tight())
"""
    done = in_group(cgroup, TAKE.format(place=str(shm), size=40 * MB, asked=True) + fill)
    assert done.returncode == 0 and "of the job's memory (210 MB)" in done.stdout, done


@pytest.mark.fault("The job's memory fills up while there are snapshots", "they go first, and the loop trains on")
def test_a_loop_whose_memory_fills_up_gives_its_snapshots_up_and_trains_on(cgroup: Path, shm: Path) -> None:
    (shm / os.uname().nodename).mkdir(mode=0o700)
    loop = f"""
import os, time
os.environ.update(FTSUPERVISE_SNAPSHOTS={str(shm)!r}, FTSUPERVISE_GUARD_SNAPSHOT_EVERY="1")
os.environ.pop("SLURMD_NODENAME", None)
from ftsupervise import Guard
state = {{"weights": bytearray(40 << 20)}}
guard = Guard(signals=())
guard.restore(state=state)
while not guard.snapshot(1): time.sleep(0.01)
hog, rounds = [os.urandom(1) * (49 << 20)], 0  # with the weights and two slots of them nearly 90 % of 200 MiB
while guard.snapshot(2) and rounds < 9:
    hog.append(os.urandom(1) * (3 << 20))
    rounds += 1
    time.sleep(1.02)
print("given up", 0 < rounds < 9)
hog.append(os.urandom(1) * (60 << 20))  # only where the memory of the snapshots is free again
print("trains on", guard.snapshot(3))
guard.close()
"""
    done = in_group(cgroup, loop)
    assert done.returncode == 0, done
    assert not list((shm / os.uname().nodename).iterdir())
    assert done.stdout == "given up True\ntrains on False\n" and "the snapshots are given up" in done.stderr


def test_snapshots_stay_below_the_share_at_which_the_guard_leaves(cgroup: Path, shm: Path) -> None:
    (shm / os.uname().nodename).mkdir(mode=0o700)
    loop = f"""
import os, time
os.environ.update(FTSUPERVISE_SNAPSHOTS={str(shm)!r}, FTSUPERVISE_GUARD_SNAPSHOT_EVERY="1")
os.environ.pop("SLURMD_NODENAME", None)
from ftsupervise import Guard
guard = Guard(signals=(), memory=0.6, poll=0)
guard.restore(state={{"weights": bytearray(40 << 20)}})
print([guard.snapshot(step) or time.sleep(0.1) for step in range(5)], guard.step(5).stop)
"""
    done = in_group(cgroup, loop)
    assert done.stdout == "[None, None, None, None, None] False\n" and "45% stay free" in done.stderr, done


@pytest.mark.fault("`/dev/shm` is too small for snapshots", "there are none, and no SIGBUS")
def test_a_small_tmpfs_is_full_without_a_sigbus(mounted: Callable[..., Path]) -> None:
    place = mounted("-t", "tmpfs", "-o", "size=64m,mode=0700", "tmpfs")
    room = MemoryRoom(place)
    with pytest.raises(NoRoom, match=r"and .*/mounted-0 has 67 MB free"):
        create_slots(place / "rank-0", 1, 0, room_for(2, 100, 50 * MB), room.may_take)
    with pytest.raises(OSError, match="No space left"):
        create_slots(place / "rank-0", 1, 0, room_for(2, 100, 50 * MB))
    assert not list(place.iterdir()) and os.statvfs(place).f_bfree == os.statvfs(place).f_blocks
    file = create_slots(place / "rank-0", 1, 0, room_for(2, 100, 25 * MB), room.may_take)
    with file, mmap.mmap(file.fd, file.room.size) as mapping:
        populate(mapping)
        mapping[:] = b"x" * len(mapping)
    (place / "bare").write_bytes(b"")
    with (place / "bare").open("r+b") as bare:  # no memory was taken for it: mapped, it could only end in SIGBUS
        bare.truncate(60 * MB)
        with mmap.mmap(bare.fileno(), 60 * MB) as mapping, pytest.raises(OSError):
            populate(mapping)
    room.close()


def test_a_memory_that_cannot_be_looked_at_has_no_room(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 900 kB\n")
    room = MemoryRoom(tmp_path, memory=HostMemory(str(tmp_path), str(tmp_path / "none")))
    with pytest.raises(NoRoom, match="host's memory"):
        room.may_take(850_000)
    room.may_take(700_000)
    assert room.tight() == ""
    (tmp_path / "meminfo").write_text("MemTotal: 1000 kB\nMemFree: 10 kB\nMemAvailable: 60 kB\n")
    assert "60,000" in room.tight() or "host's memory" in room.tight()
    (tmp_path / "meminfo").write_text("nonsense\n")
    with pytest.raises(OSError, match="meminfo"):
        room.may_take(1)
    room.close()
