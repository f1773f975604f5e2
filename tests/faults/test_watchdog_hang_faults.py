"""Training that really stops, logs that are rotated, endless or binary, and clocks that are wrong."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest

from ftsupervise.model import JobState
from ftsupervise.probe import Probe
from ftsupervise.rundir import fence
from ftsupervise.rundir.progress import ProgressPage, write_progress
from ftsupervise.rundir.records import write_json
from ftsupervise.truth import Health
from tests.neighbours.patience import wait_until

from .conftest import HungMount
from .watched import Watched

TRAINING = """
import sys, time
from ftsupervise import Guard
with Guard(sys.argv[1], beat_every=0.05) as guard:
    for step in range(10**9):
        guard.step(step)
        print("step", step, flush=True)
        time.sleep(0.02)
"""


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(notes=tmp_path / "notes" / "probe") as probe:
        yield probe


def test_a_training_process_under_sigstop_is_hung_and_moves_again_after_sigcont(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{hang: {at_least: 2s, quiet: 2s, slow: 2s}}", probe=probe)
    with (watched.rundir.logs / "r-7_1.out").open("wb") as log:
        training = subprocess.Popen([sys.executable, "-c", TRAINING, str(watched.rundir.root)], stdout=log)
    try:
        wait_until(lambda: (watched.rundir.beats / "rank-0").exists(), "the first beat")
        watched.jobs = (watched.job(JobState.RUNNING),)
        assert watched.look("hang")["progress"].health is Health.OK
        training.send_signal(signal.SIGSTOP)
        wait_until(lambda: watched.look("hang")["progress"].health is Health.BAD, "the hang to be seen")
        found = watched.look("hang")["progress"]
        assert "no progress for" in found.summary
        assert "rank 0" in found.detail
        training.send_signal(signal.SIGCONT)
        wait_until(lambda: watched.look("hang")["progress"].health is Health.OK, "it to move again")
    finally:
        training.send_signal(signal.SIGKILL)
        training.wait(10)


def log_of(watched: Watched) -> Path:
    return watched.rundir.logs / "r-7_1.out"


def put(path: Path, data: bytes, age: float = 0.0) -> None:
    path.write_bytes(data)
    at = time.time() - age
    os.utime(path, (at, at))


@pytest.mark.fault("A log is rotated, truncated or copied away", "it is followed")
def test_a_log_that_is_rotated_truncated_and_copied_away_is_followed(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    log = log_of(watched)
    for data, step in ((b"step 1\n", 1), (b"step 1\nstep 2\nst", 2), (b"step 1\nstep 2\nstep 3\n", 3)):
        put(log, data)
        assert f"step {step} in" in watched.look("hang")["progress"].summary
    log.rename(log.with_name("old"))
    put(log, b"step 40\n")
    assert "step 40 in" in watched.look("hang")["progress"].summary
    log.write_bytes(b"step 41")
    assert "step 41 in" in watched.look("hang")["progress"].summary


def test_the_step_of_a_log_is_the_one_that_status_shows_and_not_that_of_an_evaluation(
    tmp_path: Path, probe: Probe
) -> None:
    """As llama2.c prints them."""
    watched = Watched(tmp_path, "{}", probe=probe)
    lines = [f"{at} | loss {4 - at / 1e4:.4f} | lr 5.0e-04 | 71.06ms | mfu 0.00%\n" for at in range(1195, 1213)]
    lines.insert(5, "step 1200: train loss 4.0896, val loss 4.0891\n")
    put(log_of(watched), "".join(lines).encode())
    assert "step 1212 in" in watched.look("hang")["progress"].summary
    put(log_of(watched), "".join([*lines, "step 1213: train loss 4.0\n"]).encode())
    assert "step 1212 in" in watched.look("hang")["progress"].summary


def test_a_log_of_a_hundred_gigabytes_costs_no_more_than_its_end(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    with log_of(watched).open("wb") as file:
        file.truncate(100 << 30)
        file.seek(0, os.SEEK_END)
        file.write(b"\n\x1b[1mstep 77\x1b[0m\xff\xfe")
    began = time.monotonic()
    assert "step 77 in" in watched.look("hang")["progress"].summary
    assert time.monotonic() - began < 5
    server = watched.probe.pids[0]
    peak = Path(f"/proc/{server}/status").read_text().partition("VmHWM:")[2].split()[0]
    assert int(peak) < 64_000  # kB


def test_chatter_in_the_log_is_not_progress(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{hang: {quiet: 10m}}", probe=probe)
    put(log_of(watched), b"step 5\n", age=60)
    assert watched.look("hang")["progress"].health is Health.OK
    for minute in range(1, 20):
        watched.ahead = minute * 60.0
        put(log_of(watched), b"step 5\n" + b"PULSE: tr11 is running\nftsupervise: well\n" * minute, age=-watched.ahead)
        found = watched.look("hang")["progress"]
    assert found.health is Health.BAD
    assert "step 5" in found.summary


def test_the_alert_says_whether_its_supervisor_ends_the_hang_and_what_to_type(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    folder = watched.rundir.attempt(1)
    folder.mkdir(parents=True)
    at = datetime.now(timezone.utc)
    write_json(folder / "start.json", {"attempt": 1, "at": (at - timedelta(days=2)).isoformat(), "host": "node-9"})
    os.utime(folder / "start.json", (at.timestamp() - 172_800,) * 2)
    last = "scancel 7_1  (no other job waits: launch it again, and it goes on from the last checkpoint)"
    ends = rf"its supervisor restarts it at \S+ UTC, in [\dms ]+, unless it moves; without waiting for that: {re.escape(last)}"
    acts = f"ftsupervise observe --off --only hang {watched.rundir.root}"
    told = f"nothing ends it by itself, because a hang is only told: {acts}"
    for does, hangs_at, words in (
        ("restarts", at.timestamp() + 120, ends),
        ("told", None, f"{re.escape(told)}, or {re.escape(last)}"),
        ("off", None, f"nothing ends it by itself, because launch.restart.hang is null: {re.escape(last)}"),
        ("", None, re.escape(last)),
    ):
        write_progress(folder, ProgressPage(at=at, ranks=1, step=5, on_hang=does, hang_at=hangs_at))
        assert re.fullmatch(words, watched.look("hang")["progress"].do), watched.look("hang")["progress"].do
    (folder / "progress.json").write_text("[" * 100)
    assert watched.look("hang")["progress"].do == last, "a page that cannot be read says nothing"
    watched.jobs = (watched.job(JobState.RUNNING), watched.job(JobState.PENDING))
    assert watched.look("hang")["progress"].do.endswith(
        "(the next member of the chain goes on from the last checkpoint)"
    )


@pytest.mark.parametrize("state", [JobState.PENDING, JobState.COMPLETING, JobState.SUSPENDED, JobState.CONFIGURING])
def test_a_job_that_cannot_move_is_not_hung(state: JobState, tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    assert watched.look("hang")["progress"].health is Health.BAD
    watched.jobs = (watched.job(state),)
    assert watched.look("hang")["progress"].health is Health.OK
    watched.jobs = ()
    assert watched.look("hang")["progress"].health is Health.OK


def test_a_requeued_job_has_time_to_start(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    watched.jobs = (watched.job(JobState.RUNNING, hours_ago=0.5),)
    assert watched.look("hang")["progress"].health is Health.OK
    watched.jobs = (watched.job(JobState.RUNNING, hours_ago=1.5),)
    assert watched.look("hang")["progress"].health is Health.BAD


def test_a_kill_switch_gives_time_to_leave_and_no_more(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    put(watched.rundir.switches / "kill-switch", b"", age=60)
    assert "the run is leaving" in watched.look("hang")["progress"].summary
    put(watched.rundir.switches / "kill-switch", b"", age=7200)
    found = watched.look("hang")["progress"]
    assert found.health is Health.BAD
    assert "the loop does not see it" in found.summary


@pytest.mark.threat(
    "A member fills `switches/` with thousands of files, so that the kill switch is not among those that are listed.",
    "It is looked for by its name as well.",
)
def test_a_kill_switch_is_found_among_thousands_of_files(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    for number in range(20_000):  # 1,000 are listed, in an order that the file system chooses
        (watched.rundir.switches / f"{number}").touch()
    put(watched.rundir.switches / "kill-switch", b"", age=60)
    assert "the run is leaving" in watched.look("hang")["progress"].summary


def test_nobody_knows_is_not_hung(tmp_path: Path, probe: Probe) -> None:
    watched = Watched(tmp_path, "{}", probe=probe)
    watched.beat(5, age=90_000)
    watched.jobs = None
    assert watched.look("hang")["progress"].health is Health.UNKNOWN
    watched.beat(6)
    assert watched.look("hang")["progress"].health is Health.OK  # beats cannot be newer than the job


@pytest.mark.root
def test_logs_on_a_hung_mount_make_it_unknown(hung_mount: HungMount, tmp_path: Path) -> None:
    with Probe(bound=3, notes=tmp_path / "notes" / "probe") as probe:
        watched = Watched(tmp_path, f"{{hang: {{log: {hung_mount.point}/log.txt}}}}", probe=probe)
        assert "step 2 in log.txt" in watched.look("hang")["progress"].summary
        hung_mount.hang("getattr", "read", "open")
        watched.ahead = 90_000.0
        found = watched.look("hang")["progress"]
        assert found.health is Health.UNKNOWN
        assert "no answer" in found.summary


@pytest.mark.fault("The clock of another node is five minutes off", "no age changes")
@pytest.mark.parametrize("offset", ["-5m", "+5m"])
def test_a_clock_five_minutes_off_changes_no_age(offset: str, tmp_path: Path) -> None:
    """The looker's node is off, the file server is not: ages stay right because it asks the server for the time."""
    faketime = shutil.which("faketime")
    if faketime is None:
        pytest.skip("needs faketime (apt-get install faketime)")
    with Probe(notes=tmp_path / "notes" / "probe") as probe:
        watched = Watched(tmp_path, "{}", probe=probe)
        watched.beat(5, age=120)
    script = (
        "import sys; from pathlib import Path; from datetime import datetime, timezone\n"
        "import time\n"
        "from ftsupervise.probe import Probe\n"
        "with Probe(notes=Path(sys.argv[2])) as probe:\n"
        "    ahead = probe.clock_ahead(sys.argv[1])\n"
        "    mtime = probe.look(sys.argv[1] + '/beats/rank-0').mtime\n"
        "    print(round(ahead), round(time.time() + ahead - mtime), round(time.time() - mtime))\n"
    )
    done = subprocess.run(
        [
            faketime,
            "-m",
            "-f",
            offset,
            sys.executable,
            "-c",
            script,
            str(watched.rundir.root),
            str(tmp_path / "n" / "p"),
        ],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
        env={**os.environ, "NO_FAKE_STAT": "1", "FAKE_UTIME": "1"},
    )
    ahead, age, naive = (int(word) for word in done.stdout.split())
    assert abs(ahead - (300 if offset == "-5m" else -300)) <= 2
    assert 118 <= age <= 150
    assert abs(naive - 120) > 200  # what a watch without it would have believed


def test_a_run_that_was_never_launched_and_a_scheduler_that_does_not_answer_is_unknown(
    tmp_path: Path, probe: Probe
) -> None:
    watched = Watched(tmp_path, probe=probe)
    watched.jobs = None
    found = watched.look("hang")["progress"]
    assert found.health is Health.UNKNOWN
    assert "ever started" in found.summary


@pytest.mark.fault(
    "A file stands in the place of the beats, or their directory is gone",
    "That is unknown, and no hang",
)
def test_a_file_in_the_place_of_the_beats_is_unknown_and_not_a_hang(tmp_path: Path, probe: Probe) -> None:
    """What the ranks do cannot be seen, whatever the last checkpoint is."""
    here = Watched(tmp_path, "{hang: {at_least: 1m}}", probe=probe)
    here.rundir.attempts.mkdir()
    here.beat(7)
    checkpoint = here.rundir.checkpoints / "step-7"
    checkpoint.mkdir()
    assert here.look("hang")["progress"].health is Health.OK
    shutil.rmtree(here.rundir.beats)
    os.utime(checkpoint, (time.time() - 9 * 3600,) * 2)
    here.ahead = 9 * 3600
    gone = here.look("hang")["progress"]
    assert gone.health is Health.UNKNOWN and "is gone" in gone.summary
    here.rundir.beats.write_text("")
    found = here.look("hang")["progress"]
    assert found.health is Health.UNKNOWN and "is no directory" in found.summary
    here.rundir.beats.unlink()
    here.rundir.beats.mkdir()
    assert here.look("hang")["progress"].health is Health.BAD, "ranks that could write and do not are hung"


@pytest.mark.fault(
    "A name that only looks like a number lies among the attempts",
    "It is skipped by the fence, the guard and the watch",
)
def test_a_stray_name_among_the_attempts_ends_no_watch(tmp_path: Path, probe: Probe) -> None:
    here = Watched(tmp_path, "{hang: {at_least: 1m}}", probe=probe)
    for name in ("0001", "\u00b2", "\u0663", "x"):
        (here.rundir.attempts / name).mkdir(parents=True)
    here.beat(7)
    assert here.look("hang")["progress"].health is Health.OK
    assert fence.newer(here.rundir.attempts, 0) == 1
