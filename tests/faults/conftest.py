"""Real faults on this machine. Whatever a test mounts, freezes or starts is undone here, also when it fails."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.neighbours.patience import wait_until

HERE = Path(__file__).parent


def need_root_and(*programs: str) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root for mounts")
    for program in programs:
        if shutil.which(program) is None:
            pytest.skip(f"needs {program} (apt-get install {program})")


class HungMount:
    def __init__(self, point: Path, control: Path, process: subprocess.Popen[bytes]) -> None:
        self.point, self.control, self.process = point, control, process

    def hang(self, *operations: str) -> None:
        """It has read what it does not answer: not even SIGKILL ends who waits for it, as on most parallel file systems."""
        self.control.write_text(" ".join(operations))

    def stop_reading(self) -> None:
        """It hangs, and SIGKILL ends who waits for it, as on NFS."""
        self.process.send_signal(signal.SIGSTOP)

    def answer(self) -> None:
        self.control.write_text("")
        self.process.send_signal(signal.SIGCONT)


@pytest.fixture
def hung_mount(tmp_path: Path) -> Iterator[HungMount]:
    """A FUSE file system that can be told to stop answering."""
    yield from _hung(tmp_path)


@pytest.fixture
def dead_mount(tmp_path: Path) -> Iterator[HungMount]:
    """The same over a real directory (``backing``): it can be written to, and hang at any depth."""
    (tmp_path / "backing").mkdir()
    yield from _hung(tmp_path, tmp_path / "backing")


def _hung(tmp_path: Path, *backing: Path) -> Iterator[HungMount]:
    need_root_and("fusermount3")
    if not Path("/dev/fuse").exists():
        pytest.skip("needs /dev/fuse")
    point, control = tmp_path / "mnt", tmp_path / "control"
    point.mkdir()
    control.write_text("")
    words = [sys.executable, str(HERE / "hung_fuse.py"), str(point), str(control), *map(str, backing)]
    process = subprocess.Popen(words)
    mount = HungMount(point, control, process)
    try:
        wait_until(lambda: f" {point} " in Path("/proc/self/mountinfo").read_text(), "the mount")
        yield mount
    finally:
        mount.answer()
        process.send_signal(signal.SIGKILL)  # aborts the connection: whoever hangs in it gets an error
        process.wait(10)
        _umount("-l", point)


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """``mounted("-t", "tmpfs", "-o", "size=1m", "tmpfs")`` -> the mount point."""
    need_root_and("mount")
    points: list[Path] = []

    def mount(*arguments: str) -> Path:
        point = tmp_path / f"mounted-{len(points)}"
        point.mkdir()
        done = subprocess.run(
            ["mount", *arguments, str(point)], check=False, timeout=30, capture_output=True, text=True
        )
        if done.returncode:
            pytest.skip(f"this machine cannot mount {' '.join(arguments)}: {done.stderr.strip()}")
        points.append(point)
        return point

    try:
        yield mount
    finally:
        for point in points:
            _unmount(point)


def _unmount(point: Path) -> None:
    """Wait for what the test started there (an upkeep, say); what has not ended in ten seconds is named, and let go of."""
    if f" {point} " not in Path("/proc/self/mountinfo").read_text():  # the test has unmounted it
        return
    until = time.monotonic() + 10
    while (done := _umount(point)).returncode and time.monotonic() < until:
        time.sleep(0.1)
    if done.returncode:
        _umount("-l", point)
        pytest.fail(done.stderr)


def _umount(*words: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["umount", *words], check=False, timeout=30, capture_output=True, text=True)


@pytest.fixture
def freezer(tmp_path: Path) -> Iterator[Callable[[int], None]]:
    """``freezer(pid)`` puts a process to sleep so that even SIGKILL has to wait; thawed at the end."""
    need_root_and()
    v1, v2 = Path("/sys/fs/cgroup/freezer"), Path("/sys/fs/cgroup")
    group = (v1 if v1.is_dir() else v2) / f"ftsupervise-test-{os.getpid()}"
    try:
        group.mkdir()
    except OSError as error:
        pytest.skip(f"no freezer here: {error}")
    state, frozen, thawed = (
        (group / "freezer.state", "FROZEN", "THAWED") if v1.is_dir() else (group / "cgroup.freeze", "1", "0")
    )

    def freeze(pid: int) -> None:
        (group / "cgroup.procs").write_text(str(pid))
        state.write_text(frozen)
        wait_until(lambda: frozen in state.read_text(), "the freezer")

    try:
        yield freeze
    finally:
        state.write_text(thawed)
        for pid in (group / "cgroup.procs").read_text().split():
            try:
                os.kill(int(pid), signal.SIGKILL)
            except ProcessLookupError:
                continue
        wait_until(lambda: not (group / "cgroup.procs").read_text().strip(), "the thawed to die")
        group.rmdir()


@pytest.fixture
def top() -> Iterator[Path]:
    """A folder that every account may enter."""
    place = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    place.chmod(0o755)
    yield place
    shutil.rmtree(place)


@pytest.fixture(scope="session")
def python() -> Iterator[str]:
    """An interpreter that every account may run, with what this one has installed."""
    plain = f"/usr/bin/python{sys.version_info[0]}.{sys.version_info[1]}"
    if not os.access(plain, os.X_OK):
        pytest.skip(f"needs {plain}: other accounts cannot run {sys.executable}")
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    subprocess.run([plain, "-m", "venv", "--without-pip", str(top / "venv")], check=True, timeout=60)
    packages = next((top / "venv").glob("lib/python*/site-packages"))
    (packages / "ours.pth").write_text(f"import site; site.addsitedir({sysconfig.get_path('purelib')!r})\n")
    yield str(top / "venv" / "bin" / "python")
    shutil.rmtree(top)
