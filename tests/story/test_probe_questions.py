"""What the probe answers on file systems that are well, and what it costs."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.host.processes import identity
from ftsupervise.probe import Entry, Listing, Missing, NotSeen, Probe, ProcessMemory, Ran, Space, Tail, Tree
from ftsupervise.probe.server import Mounts, parse_mounts


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        yield probe


def test_space_is_what_df_says(probe: Probe, tmp_path: Path) -> None:
    got, real = probe.space(tmp_path), os.statvfs(tmp_path)
    assert isinstance(got, Space)
    assert abs(got.free - real.f_bavail * real.f_frsize) < 1 << 30
    assert got.total == got.used + got.free


def test_missing_is_not_the_same_as_not_seen(probe: Probe, tmp_path: Path) -> None:
    assert probe.look(tmp_path / "no") == Missing(str(tmp_path / "no"))
    os.mkfifo(tmp_path / "fifo")
    blocked = probe.text(tmp_path / "fifo")  # must neither block nor be read
    assert isinstance(blocked, NotSeen)
    assert "not a regular file" in blocked.sentence


def test_links_are_followed_and_loops_are_not(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "real" / "log").write_text("hello")
    (tmp_path / "link").symlink_to("real/../real")
    (tmp_path / "loop").symlink_to("loop")
    assert probe.text(tmp_path / "link" / "log") == b"hello"
    assert isinstance(probe.text(tmp_path / "loop"), NotSeen)


def test_a_link_to_another_device_is_asked_of_that_device(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "proc").symlink_to("/proc")
    assert isinstance(probe.text(tmp_path / "proc" / "meminfo"), bytes)


def test_a_tail_goes_on_where_it_was_and_skips_what_is_too_much(probe: Probe, tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"a" * 1000)
    first = probe.tail(log, most=100)
    assert isinstance(first, Tail)
    assert (first.start, first.data) == (900, b"a" * 100)
    with log.open("ab") as file:
        file.write(b"b" * 50)
    second = probe.tail(log, inode=first.entry.inode, offset=1000, most=100)
    assert isinstance(second, Tail)
    assert second.data == b"b" * 50
    log.write_bytes(b"c")
    third = probe.tail(log, inode=first.entry.inode, offset=1050, most=100)
    assert isinstance(third, Tail)
    assert third.data == b"c"


def test_listings_and_trees_are_bounded(probe: Probe, tmp_path: Path) -> None:
    for number in range(30):
        (tmp_path / f"f{number}").write_bytes(b"x" * number)
    listing, tree = probe.listing(tmp_path, most=10), probe.tree(tmp_path, most=10)
    assert isinstance(listing, Listing)
    assert (len(listing.entries), listing.more) == (10, True)
    assert isinstance(tree, Tree)
    assert tree.more
    whole = probe.tree(tmp_path)
    assert isinstance(whole, Tree)
    assert whole.empty == ("f0",)


def test_the_clock_leaves_no_file_behind(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "d").mkdir()
    ahead = probe.clock_ahead(tmp_path / "d")
    assert isinstance(ahead, float)
    assert abs(ahead) < 5
    assert list((tmp_path / "d").iterdir()) == []


def test_processes_are_found_with_all_they_started(probe: Probe) -> None:
    child = subprocess.Popen(["sh", "-c", "sleep 60 & wait"])
    try:
        until = time.monotonic() + 10
        found: tuple[ProcessMemory, ...] = ()
        while len(found) < 2 and time.monotonic() < until:
            got = probe.processes([child.pid])
            found = got if isinstance(got, tuple) else ()
        assert {process.parent for process in found} >= {child.pid, os.getpid()}
        assert probe.processes([2**22 + 1]) == ()
    finally:
        for process in reversed(found):
            os.kill(process.pid, 9)
        child.wait(10)


def test_commands_are_run_with_their_words_and_codes(probe: Probe) -> None:
    assert probe.run(["sh", "-c", "echo out; echo err >&2; exit 3"]) == Ran(3, b"out\n", b"err\n", False)
    assert isinstance(probe.run(["no-such-program"]), Missing)
    much = probe.run(["sh", "-c", "yes | head -c 10000000"], most=1000)
    assert isinstance(much, Ran)
    assert (len(much.out), much.code) == (1000, 0)


def test_what_a_command_leaves_running_does_not_hold_us_and_is_ended(probe: Probe) -> None:
    began = time.monotonic()
    ran = probe.run(["sh", "-c", "sleep 321 & echo $!"])
    assert isinstance(ran, Ran)
    assert time.monotonic() - began < 30
    until = time.monotonic() + 10
    while identity(int(ran.out)) is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert identity(int(ran.out)) is None  # ended; init may take its time to sweep up


def test_one_child_answers_thousands_of_questions(probe: Probe, tmp_path: Path) -> None:
    (tmp_path / "f").touch()
    for _ in range(2000):
        assert isinstance(probe.look(tmp_path / "f"), Entry)
    assert len(probe.pids) == 1


def test_children_leave_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = "import sys, time; from pathlib import Path; from ftsupervise.probe import Probe; "
    script += f"p = Probe(notes=Path({str(tmp_path / 'notes' / 'probe')!r})); p.look('/'); "
    script += "print(*p.pids, flush=True); time.sleep(600)"
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.communicate(timeout=10)
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as later:
        assert isinstance(later.look("/"), Entry), "one that is on its way after its parent does not hang"
    until = time.monotonic() + 10
    while identity(child) is not None and time.monotonic() < until:
        time.sleep(0.02)
    assert identity(child) is None


def test_devices_are_told_from_the_mount_table_alone() -> None:
    table = (
        b"21 1 254:0 / / rw - ext4 /dev/a rw\n"
        b"22 21 0:45 / /scratch\\040x rw - lustre a rw\n"
        b"23 22 0:46 / /scratch\\040x/deep rw - nfs b rw\n"
    )
    mounts = Mounts(parse_mounts(table))
    assert mounts.of("/home/me") == "254:0"
    assert mounts.of("/scratch x/run") == "0:45"
    assert mounts.of("/scratch x/deep/run") == "0:46"
    assert mounts.of("/scratch xx") == "254:0"


@pytest.mark.threat("Another account lays notes about abandoned probes.", "The watch ignores them.")
def test_the_watch_never_follows_somebody_elses_notes(tmp_path: Path) -> None:
    shared = tmp_path / "shared" / "probe"
    shared.mkdir(parents=True)
    shared.chmod(0o777)
    (shared / "1.json").write_text("{}")
    with Probe(notes=shared) as probe:
        assert isinstance(probe.look("/"), Entry)
        assert probe.stuck() == []


def test_a_process_with_more_than_a_thousand_open_files_can_ask() -> None:
    code = """
import os, resource
most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
resource.setrlimit(resource.RLIMIT_NOFILE, (min(most, 4096), most))
held = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
from ftsupervise.probe import Probe, Space
from ftsupervise.probe.errand import within
print(within(60, lambda: 7), type(Probe().space("/")).__name__)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout == "7 Space\n", done.stderr
