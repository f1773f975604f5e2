"""A mount whose statfs never answers, and a child in state D: the tick goes on, and at most one child is left behind."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ftsupervise.host.processes import identity
from ftsupervise.probe import Missing, NotSeen, Probe, Ran, Space
from tests.neighbours.patience import wait_until

from .conftest import HungMount

pytestmark = pytest.mark.root

TICK = """
import sys, time
from pathlib import Path
from ftsupervise.probe import Probe
with Probe(bound=3, notes=Path(sys.argv[1])) as probe:
    began = time.monotonic()
    hung = probe.space(sys.argv[2])
    other = probe.space("/tmp")
    print(type(hung).__name__, getattr(hung, "hung", None), type(other).__name__, len(probe.stuck()))
"""


def probes_on(mount: HungMount) -> int:
    """Living probe children of this device."""
    found = 0
    for process in Path("/proc").iterdir():
        if process.name.isdigit() and identity(int(process.name)) is not None:
            try:
                words = (process / "cmdline").read_bytes().split(b"\0")
            except OSError:
                continue
            found += any(w.endswith(b"probe/server.py") for w in words) and device_of(mount.point).encode() in words
    return found


def device_of(point: Path) -> str:
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        if line.split()[4] == str(point):
            return line.split()[2]
    raise AssertionError("not mounted")


def tick(notes: Path, mount: HungMount) -> tuple[str, float]:
    began = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", TICK, str(notes), str(mount.point)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    return done.stdout.strip(), time.monotonic() - began


@pytest.mark.fault("A mount hangs for ten ticks", "one child process is left in it, not ten")
def test_ten_ticks_over_a_mount_that_never_answers_leave_one_child_and_end_by_themselves(
    hung_mount: HungMount, tmp_path: Path
) -> None:
    notes = tmp_path / "notes" / "probe"
    assert tick(notes, hung_mount)[0] == "Space None Space 0"
    hung_mount.hang("statfs")
    said = [tick(notes, hung_mount) for _ in range(10)]
    assert {words for words, _ in said} <= {"NotSeen True Space 1", "NotSeen True Space 0"}
    assert probes_on(hung_mount) <= 1
    assert max(seconds for _, seconds in said) < 30, said
    hung_mount.answer()
    wait_until(lambda: tick(notes, hung_mount)[0] == "Space None Space 0", "the mount to be seen again")
    assert probes_on(hung_mount) == 0
    assert list(notes.glob("*.json")) == []


def test_a_tick_killed_while_its_probe_hangs_does_not_make_the_next_one_start_a_second(
    hung_mount: HungMount, tmp_path: Path
) -> None:
    hung_mount.hang("statfs", "getattr")
    notes = tmp_path / "notes" / "probe"
    for _ in range(3):
        process = subprocess.Popen(
            [sys.executable, "-c", TICK.replace("bound=3", "bound=60"), str(notes), str(hung_mount.point)]
        )
        try:
            wait_until(lambda: probes_on(hung_mount) >= 1, "the probe")
            time.sleep(0.3)
        finally:
            process.send_signal(signal.SIGKILL)
            process.wait(10)
    assert probes_on(hung_mount) <= 1


def test_only_the_hung_mount_is_dark_and_the_time_it_hangs_is_told(hung_mount: HungMount, tmp_path: Path) -> None:
    hung_mount.hang("statfs")
    with Probe(bound=3, notes=tmp_path / "n" / "probe") as probe:
        first = probe.space(hung_mount.point)
        began = time.monotonic()
        again = [probe.space(hung_mount.point) for _ in range(100)]
        assert time.monotonic() - began < 5  # no second wait
        assert isinstance(probe.space("/"), Space)
        assert isinstance(probe.look("/etc/passwd"), object)
    assert isinstance(first, NotSeen)
    assert first.hung
    assert all(isinstance(one, NotSeen) for one in again)
    assert "not seen for" in first.sentence


def test_a_link_from_a_good_file_system_into_a_hung_one_does_not_condemn_the_good_one(
    hung_mount: HungMount, tmp_path: Path
) -> None:
    (tmp_path / "scratch").symlink_to(hung_mount.point)
    with Probe(bound=3, notes=tmp_path / "n" / "probe") as probe:
        assert isinstance(probe.space(tmp_path / "scratch"), Space)
    hung_mount.hang("statfs", "getattr", "readdir")
    with Probe(bound=3, notes=tmp_path / "n" / "probe") as probe:
        assert isinstance(probe.space(tmp_path / "scratch"), NotSeen)
        assert isinstance(probe.look(tmp_path), object)
        assert isinstance(probe.look(tmp_path / "nothing"), Missing)
        assert isinstance(probe.space(tmp_path), Space)


@pytest.mark.fault("A child hangs in the kernel and cannot be killed", "it is abandoned, counted and reported")
@pytest.mark.fault(
    "A probe of a mount cannot be killed",
    "it is abandoned, remembered and not sent again while it lives",
)
def test_a_child_that_sigkill_does_not_reach_is_abandoned_and_remembered(
    freezer: Callable[[int], None], tmp_path: Path
) -> None:
    notes = tmp_path / "n" / "probe"
    probe = Probe(bound=3, notes=notes)
    assert isinstance(probe.space(tmp_path), Space)
    [child] = probe.pids
    freezer(child)
    blind = probe.space(tmp_path)
    assert isinstance(blind, NotSeen)
    assert blind.hung
    began = time.monotonic()
    probe.close()
    assert time.monotonic() - began < 5
    with Probe(bound=3, notes=notes) as later:
        still = later.space(tmp_path)
        assert isinstance(still, NotSeen)
        assert f"probe {child} hangs" in still.why
        assert [note.pid for note in later.stuck()] == [child]
        assert isinstance(later.text("/proc/meminfo"), bytes)


@pytest.mark.fault("A command of a watchdog ignores everything", "it is ended with all it started")
def test_a_command_that_ignores_everything_is_ended_with_all_it_started(tmp_path: Path) -> None:
    script = "trap '' TERM INT HUP; sleep 1000 & echo begun; while true; do sleep 1; done"
    with Probe(bound=1, notes=tmp_path / "n" / "probe") as probe:
        ran = probe.run(["sh", "-c", script], bound=0.5)
    assert isinstance(ran, Ran)
    assert ran.late
    assert ran.out == b"begun\n"
