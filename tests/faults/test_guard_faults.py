"""Full disks, unreadable directories and full memory under guard and job ring. Needs root for mounts and cgroups."""

from __future__ import annotations

import os
import pwd
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.guard.stop_reasons import MemoryLimits
from ftsupervise.host.memory import HostMemory
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import Program, SupervisedRun

pytestmark = [pytest.mark.root, pytest.mark.skipif(os.geteuid() != 0, reason="needs root for mounts and cgroups")]
Until = Callable[..., Any]


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 kB and 64 files."""
    disk = tmp_path / "disk"
    disk.mkdir()
    options = ["-t", "tmpfs", "-o", "size=256k,nr_inodes=64", "small", str(disk)]
    if subprocess.run(["mount", *options], capture_output=True, check=False).returncode:
        pytest.skip("mounting is not allowed here")
    yield disk
    subprocess.run(["umount", "-l", str(disk)], check=True)


def fill(disk: Path, *, inodes: bool = False) -> None:
    try:
        for n in range(10_000):
            with (disk / f"fill-{n}").open("wb") as file:
                if not inodes:
                    file.write(b"x" * 1_000_000)
    except OSError:
        return


@pytest.fixture
def run(small_disk: Path, tmp_path: Path) -> Iterator[SupervisedRun]:
    """On that disk, with its output on another."""
    with closing(SupervisedRun(small_disk / "run", tmp_path)) as one:
        yield one


def start(run: SupervisedRun, *command: str) -> Program:
    return run.start("--space-wait", "1", "--", *command)


@pytest.mark.parametrize("inodes", [False, True])
def test_a_full_disk_is_one_sentence_and_73_before_the_command_starts(
    run: SupervisedRun, small_disk: Path, inodes: bool
) -> None:
    (small_disk / "run").mkdir()
    fill(small_disk, inodes=inodes)
    one = start(run, "echo", "trained")
    code = one.wait(60)
    out = one.said()
    assert code == 73, out
    assert re.search("cannot (use|write) .*No space left", out)
    assert "df -h" in out and "Traceback" not in out and "trained" not in out


@pytest.mark.fault("The disk fills up during the training", "the training goes on")
def test_a_disk_that_fills_up_does_not_end_the_training(
    run: SupervisedRun, small_disk: Path, tmp_path: Path, until: Until
) -> None:
    code = (
        "import os, sys, time; from ftsupervise import Guard\n"
        "guard = Guard(poll=0, beat_every=0)\n"
        "print('ready', flush=True)\n"
        f"while not os.path.exists({str(tmp_path / 'go')!r}): guard.step(1); time.sleep(0.01)\n"
        "for n in range(2, 200): guard.step(n)\n"
        "guard.saved(n); guard.finished(n); print('trained'); sys.exit(5)\n"
    )
    one = start(run, sys.executable, "-c", code)
    until(lambda: (run.rundir.beats / "rank-0").exists())
    fill(small_disk)
    (tmp_path / "go").touch()
    left = one.wait(60)
    out = one.said()
    assert left == 5, out
    assert "trained" in out and "Traceback" not in out
    assert "cannot write" in out and out.count("ftsupervise:") < 10


def test_the_warning_gets_through_on_a_full_disk(run: SupervisedRun, small_disk: Path, until: Until) -> None:
    code = "import time, os\nwhile not os.path.exists(os.environ['FTSUPERVISE_ATTEMPT_DIR'] + '/warning'): time.sleep(0.05)"
    one = start(run, sys.executable, "-c", code)
    until(lambda: "attempt 1" in run.log())
    fill(small_disk)
    one.send_signal(signal.SIGUSR1)
    left = one.wait(60)
    out = one.said()
    assert left == 0, out


def test_an_unreadable_run_directory_is_one_sentence_and_77(tmp_path: Path) -> None:
    """As root without the right to override permissions, on a directory of somebody else's."""
    if not shutil.which("setpriv"):
        pytest.skip("no setpriv here")
    theirs = tmp_path / "theirs"
    theirs.mkdir(mode=0o700)
    os.chown(theirs, pwd.getpwnam("nobody").pw_uid, -1)
    weaker = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
    done = subprocess.run(
        [*weaker, sys.executable, "-m", "ftsupervise", "run", "--run-dir", str(theirs), "--", "echo", "trained"],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert done.returncode == 77, done.stderr
    assert "belongs to nobody" in done.stderr and "nothing is started" in done.stderr, done.stderr
    assert "Traceback" not in done.stderr
    assert "trained" not in done.stdout


@pytest.mark.fault("The switches cannot be read", "the training goes on and says so")
def test_a_guard_that_cannot_read_the_switches_trains_on_and_says_so(capfd: pytest.CaptureFixture[str]) -> None:
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    try:
        top.chmod(0o755)
        rundir = RunDir(top / "run")
        rundir.switches.mkdir(parents=True)
        (rundir.switches / KILL).touch()
        rundir.switches.chmod(0o700)
        pid = os.fork()
        if pid == 0:
            os.setgroups([])
            os.setuid(pwd.getpwnam("nobody").pw_uid)
            guard = Guard(rundir.root, poll=0, signals=())
            os._exit(int(max(guard.step(n) for n in range(20))))
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        err = capfd.readouterr().err
        assert err.count("cannot read the switches") == 1
    finally:
        shutil.rmtree(top)


@pytest.fixture
def cgroup() -> Iterator[Path]:
    """A memory cgroup of 96 MB below our own, v1 or v2."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        number, controllers, path = line.split(":", 2)
        v1 = "memory" in controllers.split(",")
        if not v1 and (number, controllers) != ("0", ""):
            continue
        base = Path("/sys/fs/cgroup", "memory" if v1 else "", path.lstrip("/"))
        file = "memory.limit_in_bytes" if v1 else "memory.max"
        folder = base / "fts-test"
        try:
            folder.mkdir()
            (folder / file).write_text(str(96_000_000))
        except OSError:
            if folder.is_dir():
                folder.rmdir()
            continue
        yield folder
        folder.rmdir()
        return
    pytest.skip("no memory cgroup of our own here")


@pytest.mark.fault("The memory of the job fills up", "the run saves and leaves before the kernel kills it")
def test_the_jobs_memory_stops_the_run_before_the_kernel_does_and_file_pages_do_not(
    cgroup: Path, tmp_path: Path
) -> None:
    big = tmp_path / "data"
    big.write_bytes(b"x" * 150_000_000)
    code = f"""
import os
open({str(cgroup / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from ftsupervise import Guard
guard = Guard({str(tmp_path)!r}, poll=0, memory=0.8, signals=())
look = lambda: max((guard.step(n) for n in range(4)), default=0)
assert look() == 0, "at the start"
with open({str(big)!r}, "rb", buffering=0) as file:
    while file.read(1 << 20): pass
assert look() == 0, "with the page cache full"
hog = bytearray(os.urandom(1)) * 75_000_000
decision = look()
assert decision.stop and decision.cause == "host memory", repr(decision)
print(decision.reason)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert "job memory" in done.stdout and "limit 80%" in done.stdout


@pytest.mark.fault(
    "A leak in the job's memory",
    "it is announced with the time that is left, and the loop saves and leaves before the kernel kills it",
)
def test_a_leak_in_the_job_is_announced_before_the_limit_and_the_tightest_group_on_the_path_counts(
    cgroup: Path,
) -> None:
    inner = cgroup / "step"  # without a limit of its own, below the one that is short
    inner.mkdir()
    code = f"""
import os
open({str(inner / "cgroup.procs")!r}, "w").write(str(os.getpid()))
from ftsupervise.guard.stop_reasons import MemoryLimits
limits, taken, now, short = MemoryLimits(0.8, None, None, print), [], 0.0, None
while short is None and now < 3600:
    now += 20.0
    taken.append(bytearray(os.urandom(1)) * 1_500_000)
    short = limits.check_host(now)
    if now == 300.0:
        print("facts", limits.facts()["memory_left"])
print(short.cause, "at", now, short.words)
"""
    try:
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
        assert done.returncode == 0, done.stderr
    finally:
        wait_until(lambda: not (inner / "cgroup.procs").read_text().strip(), "the group to be empty")
        inner.rmdir()
    *_, told = lines = done.stdout.splitlines()
    assert told.startswith("host memory at ") and "job memory 8" in told and "limit 80%, growing by" in told
    reached = float(told.split()[3])
    left = next(float(line.split()[1]) for line in lines if line.startswith("facts"))
    assert left == pytest.approx(reached - 300, rel=0.3, abs=60), told
    assert sum("to the limit of 80%" in line for line in lines) == 1, lines


def test_the_host_without_limits_is_read_from_proc(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job\n")
    (tmp_path / "meminfo").write_text(
        "MemTotal:       1000 kB\nMemFree:  10 kB\nMemAvailable:    100 kB\nBuffers: 1 kB\n"
    )
    memory = HostMemory(str(tmp_path), str(tmp_path / "no-cgroups"))
    assert memory.shares() == {"host": pytest.approx(0.9)}
    assert memory.rooms() == [(100 << 10, 1000 << 10)]
    memory.close()


def test_a_v2_job_cgroup_is_read_without_its_file_pages(tmp_path: Path) -> None:
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/job/step\n")
    (tmp_path / "meminfo").write_text("MemTotal: 9000000 kB\nMemFree: 10 kB\nMemAvailable: 8999999 kB\n")
    step = tmp_path / "cg" / "job" / "step"
    step.mkdir(parents=True)
    (step / "memory.max").write_text("max\n")
    job = step.parent
    (job / "memory.max").write_text("1048576\n")
    (job / "memory.current").write_text("1000000\n")
    (job / "memory.stat").write_text("anon 100000\nfile 900000\ninactive_file 500000\nactive_file 400000\n")
    memory = HostMemory(str(tmp_path), str(tmp_path / "cg"))
    assert memory.shares()["job"] == pytest.approx(100_000 / 1048576)
    assert memory.rooms()[1:] == [(1048576 - 100_000, 1048576)]  # the job's limit
    memory.close()
    (step / "memory.high").write_text("131072\n")  # throttles; nobody is killed for it
    (step / "memory.current").write_text("127000\n")
    (step / "memory.stat").write_text("anon 127000\ninactive_file 0\nactive_file 0\n")
    memory = HostMemory(str(tmp_path), str(tmp_path / "cg"))
    assert memory.shares() == {
        "host": pytest.approx(0, abs=0.01),
        "job": pytest.approx(100_000 / 1048576),
        "job up to memory.high": pytest.approx(127_000 / 131072),
    }
    assert memory.rooms()[2:] == [(131072 - 127_000, 131072)]
    limits = MemoryLimits(0.95, None, None, print, memory)
    (step / "memory.current").write_text("7000\n")
    assert limits.check_host(0.0) is None
    (step / "memory.current").write_text("127000\n")
    short = limits.check_host(60.0)
    assert short is not None
    assert short.words == (
        "memory.high of the job 96.9% used, limit 95%; beyond memory.high the kernel slows the job down"
    )
    limits.close()


_FAILS_FOR_SPACE = """
import os
from ftsupervise import Guard
guard = Guard()
def save(step, size, kind=None):
    try:
        with guard.checkpoint(step) as folder:
            (folder / "a").write_bytes(b"a" * 4096)
            with open(folder / "state", "wb", buffering=0) as file:
                for _ in range(size // 4096):
                    try:
                        file.write(os.urandom(4096))
                    except OSError as error:
                        raise (kind or OSError)(f"file write failed: {error}")
        print(f"step {step} is saved", flush=True)
    except Exception as error:
        print(f"step {step}: {type(error).__name__}", flush=True)
for step, size, kind in ((1, 40_960, None), (2, 400_960, None), (3, 400_960, RuntimeError), (4, 40_960, None)):
    guard.step(step)
    save(step, size, kind)
guard.finished(4)
"""


def test_a_save_that_finds_no_space_gives_back_what_it_has_taken_and_the_next_one_is_made(
    run: SupervisedRun, tmp_path: Path
) -> None:
    (tmp_path / "saves.py").write_text(_FAILS_FOR_SPACE)
    one = start(run, sys.executable, str(tmp_path / "saves.py"))
    assert one.wait(60) == 0, one.said()
    said = one.said()
    assert re.findall(r"^step (\d.*)$", said, re.M) == ["1 is saved", "2: OSError", "3: RuntimeError", "4 is saved"], (
        said
    )
    assert said.count("a checkpoint could not be saved: what was written of it is deleted") == 1
