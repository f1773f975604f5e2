"""Checkpoints that come late, small or broken; a run that crawls; a loss that is none; GPUs that are lost."""

from __future__ import annotations

import json
import os
import shutil
import signal
import time
from collections.abc import Iterator
from dataclasses import asdict
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.commit import commit
from ftsupervise.config.load import loads
from ftsupervise.findings import Finding, Severity
from ftsupervise.model import Attempt, Job, JobState
from ftsupervise.probe import Probe, Ran
from ftsupervise.rundir.heartbeat_page import SAVE_FAILED, write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Finished, write_finished
from ftsupervise.truth import Beat, Health, TornSave
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs import load_watchdog
from ftsupervise.watch.watchdogs.gpu import GpuState

HOUR = 3600.0


class Scene:
    def __init__(self, folder: Path, watch: str, probe: Probe) -> None:
        self.run = loads(f"name: r\nlaunch: {{command: a}}\nrun_dir: {folder}\nwatch: {watch}\n", folder / "f.yaml")
        self.rundir, self.probe, self.now = RunDir(folder), probe, time.time()
        for path in (self.rundir.checkpoints, self.rundir.beats, self.rundir.logs, self.rundir.watch):
            path.mkdir(parents=True, exist_ok=True)
        self.memory: dict[str, Any] = {}
        self.attempts: tuple[Attempt, ...] | None = None
        self.jobs: tuple[Job, ...] | None = (
            Job("7_1", "7", "r", "me", JobState.RUNNING, nodes=(os.uname().nodename,)),
        )

    def look(self, name: str, once: dict[str, Any] | None = None) -> dict[str, Finding]:
        """``once``: what this tick has read already."""
        memory = json.loads(json.dumps(self.memory))
        at = datetime.fromtimestamp(self.now, timezone.utc)
        look = Look(
            self.run,
            self.rundir,
            at,
            self.jobs,
            memory,
            "",
            self.probe,
            name,
            self.attempts,
            {} if once is None else once,
        )
        found = list(load_watchdog(name)(look, getattr(self.run.watch, name)))
        self.memory = memory
        return {finding.subject: finding for finding in found}

    def checkpoint(self, step: int, at: float, *, files: int = 2, size: int = 1000) -> None:
        folder = self.rundir.checkpoints / f"step-{step}"
        folder.mkdir()
        for number in range(files):
            (folder / str(number)).write_bytes(b"w" * size)
        os.utime(folder, (at, at))


@pytest.fixture
def probe(tmp_path: Path) -> Iterator[Probe]:
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        yield probe


def with_checkpoints(tmp_path: Path, probe: Probe, watch: str = "{checkpoints: {}}") -> Scene:
    """Five checkpoints, one an hour, the newest half an hour old."""
    scene = Scene(tmp_path / "run", watch, probe)
    for number in range(5):
        scene.checkpoint(number, scene.now - (4.5 - number) * HOUR)
    return scene


def test_a_checkpoint_that_does_not_come_is_told(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    assert scene.look("checkpoints")["age"].health is Health.OK
    for _ in range(3):
        scene.now += HOUR
        found = scene.look("checkpoints")["age"]
    assert found.health is Health.BAD
    assert "one is usual every 1h" in found.summary
    scene.checkpoint(5, scene.now)
    assert scene.look("checkpoints")["age"].health is Health.OK


def test_a_run_that_has_finished_needs_no_newer_checkpoint(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    scene.look("checkpoints")
    scene.rundir.state.mkdir()
    write_finished(scene.rundir, Finished(step=5))
    scene.jobs = None  # nobody asks for those of such a run
    for _ in range(9):
        scene.now += HOUR
        found = scene.look("checkpoints")["age"]
    assert (found.health, found.summary) == (Health.OK, "the run has finished")


def test_time_in_the_queue_does_not_make_a_checkpoint_late(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    scene.look("checkpoints")
    scene.jobs = ()
    for _ in range(9):
        scene.now += HOUR
        assert scene.look("checkpoints")["age"].health is Health.OK


def test_hours_without_a_tick_are_those_at_work_that_the_ledger_knows(tmp_path: Path, probe: Probe) -> None:
    """The cron chain was away while the run waited in the queue: a long wait was a late checkpoint."""

    def attempt(number: int, started: float, ended: float | None) -> Attempt:
        begun, over = (None if at is None else datetime.fromtimestamp(at, timezone.utc) for at in (started, ended))
        assert begun is not None
        return Attempt(number, f"7_{number}", begun, ended=over)

    scene = with_checkpoints(tmp_path, probe)
    began = scene.now
    scene.attempts = (attempt(1, began - 5 * HOUR, None),)
    assert scene.look("checkpoints")["age"].health is Health.OK
    scene.now = began + 9 * HOUR
    waited = (attempt(1, began - 5 * HOUR, began + 60), attempt(2, scene.now - 60, None))
    scene.attempts = waited
    found = scene.look("checkpoints")["age"]
    assert found.health is Health.OK and "9h 30m old, 32m of it at work" in found.summary
    scene.now += 5 * HOUR
    assert scene.look("checkpoints")["age"].health is Health.BAD


@pytest.mark.parametrize(
    ("made", "said"),
    [({"size": 100}, "are usual"), ({"files": 1, "size": 2000}, "has 1 files where 2"), ({"size": 0}, "is empty")],
)
def test_a_checkpoint_that_is_not_whole_is_told_once_it_has_settled(
    made: dict[str, int], said: str, tmp_path: Path, probe: Probe
) -> None:
    scene = with_checkpoints(tmp_path, probe)
    scene.checkpoint(9, scene.now, **made)
    assert scene.look("checkpoints")["size"].health is Health.OK  # it may still be written
    scene.now += HOUR
    found = scene.look("checkpoints")["size"]
    assert found.health is Health.BAD
    assert said in found.summary


def test_what_is_being_written_is_no_checkpoint_yet(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    (scene.rundir.checkpoints / "step-9.tmp").mkdir()
    scene.now += HOUR
    assert "step-4" in scene.look("checkpoints")["size"].summary


def beat(scene: Scene, step: int, **facts: str) -> None:
    record = {"rank": 0, "step": step, "phase": "train", "at": "2026-01-01T00:00:00+00:00", "pid": 1, "host": "n1",
              "facts": facts}  # fmt: skip
    path = scene.rundir.beats / "rank-0"
    path.write_text(json.dumps(record))
    os.utime(path, (scene.now, scene.now))


def test_a_run_that_crawls_is_told_against_its_own_past(tmp_path: Path, probe: Probe) -> None:
    scene, step = Scene(tmp_path / "run", "{throughput: {}}", probe), 0

    def tick(steps: int) -> Finding:
        nonlocal step
        step, scene.now = step + steps, scene.now + 300
        beat(scene, step, attempt="1")
        return scene.look("throughput")["pace"]

    told = [tick(100).health for _ in range(100)]
    assert set(told) == {Health.OK}
    slow = [tick(40) for _ in range(15)]
    assert slow[-1].health is Health.BAD
    assert "40% of the usual 1200" in slow[-1].summary
    assert [tick(100) for _ in range(15)][-1].health is Health.OK


def test_going_back_to_a_checkpoint_is_not_crawling(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{throughput: {}}", probe)
    for number in range(100):
        scene.now += 300
        beat(scene, number * 100, attempt="1")
        scene.look("throughput")
    for number in range(5):
        scene.now += 300
        beat(scene, 5000 + number * 100, attempt="2")
        assert scene.look("throughput")["pace"].health is Health.OK


def test_a_loss_in_the_log_that_is_no_number(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{loss: {}}", probe)
    log = scene.rundir.logs / "r-7_1.out"
    log.write_text("".join(f"step {n} loss: 2.{n % 10}\n" for n in range(50)))
    assert scene.look("loss")["loss"].health is Health.OK
    with log.open("a") as file:
        file.write("step 50 loss: nan\nstep 51 loss: nan\n")
    assert scene.look("loss")["loss"].health is Health.BAD
    assert scene.look("loss")["loss"].health is Health.BAD  # nothing new was written: it stays so
    with log.open("a") as file:
        file.write("step 52 loss: 2.1\n")
    assert scene.look("loss")["loss"].health is Health.OK


def test_a_loss_the_guard_reports(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{loss: {}}", probe)
    for step in range(40):
        beat(scene, step, loss="2.0")
        assert scene.look("loss")["loss"].health is Health.OK
    for step in range(40, 46):
        beat(scene, step, loss="7.5")
        found = scene.look("loss")["loss"]
    assert found.health is Health.BAD
    assert "3.8 times" in found.summary


class DriverOf:
    """Stands where the probe is, with a driver that says what the test wants (this machine has no GPU)."""

    def __init__(self, *gpus: GpuState, dmesg: bytes = b"") -> None:
        self.gpus, self.dmesg = gpus, dmesg

    def run(self, argv: list[str], **_: object) -> Ran:
        said = json.dumps({"gpus": [asdict(one) for one in self.gpus]}).encode()
        return Ran(0, self.dmesg if argv[0] == "dmesg" else said, b"", False)


def gpus(scene: Scene, *states: GpuState, dmesg: bytes = b"") -> dict[str, Finding]:
    scene.probe = DriverOf(*states, dmesg=dmesg)  # type: ignore[assignment]
    host = os.uname().nodename
    return {subject.removeprefix(f"{host} "): one for subject, one in scene.look("gpu").items()}


def test_gpus_that_are_lost_hot_idle_or_broken(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{gpu: {}}", probe)
    well = [GpuState(n, temperature=60, utilisation=0.9, uncorrected=0, throttles=0x1) for n in range(2)]
    assert {one.health for one in gpus(scene, *well).values()} == {Health.OK}
    lost = gpus(scene, well[0], GpuState(1, lost="GPU is lost"))
    assert "1 of 2 GPUs answer (GPU 1: GPU is lost)" in lost["there"].summary
    assert gpus(scene, well[0])["there"].health is Health.BAD
    assert gpus(scene, GpuState(0, temperature=60, throttles=0x40), well[1])["0 heat"].health is Health.BAD
    assert gpus(scene, GpuState(0, uncorrected=3), well[1])["0 errors"].health is Health.BAD
    assert (
        gpus(scene, *well, dmesg=b"NVRM: Xid (PCI:0000:1b:00): 79, pid=1, GPU has fallen")["xid"].health is Health.BAD
    )
    assert gpus(scene, *well, dmesg=b"NVRM: Xid (PCI:0000:1b:00): 31, pid=1, a program's")["xid"].health is Health.OK
    idle = GpuState(0, utilisation=0.0)
    assert gpus(scene, idle, well[1])["0 work"].health is Health.OK
    scene.now += HOUR
    assert gpus(scene, idle, well[1])["0 work"].health is Health.BAD


def test_a_checkpoint_that_is_not_what_was_committed_is_told_and_which_one_is_left(
    tmp_path: Path, probe: Probe
) -> None:
    scene = with_checkpoints(tmp_path, probe)
    (scene.rundir.switches).mkdir()
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.summary) == (Health.OK, "nothing says that checkpoint step-4 is torn"), "no manifest"
    for number in range(5):
        commit(scene.rundir.checkpoints / f"step-{number}")
        os.utime(scene.rundir.checkpoints / f"step-{number}", (scene.now - (4.5 - number) * HOUR,) * 2)
    scene.now += 2 * HOUR
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.summary) == (Health.OK, "checkpoint step-4 is verified")
    os.truncate(scene.rundir.checkpoints / "step-4" / "1", 10)
    assert scene.look("checkpoints")["whole"].health is Health.OK, "it is not read again at every tick"
    scene.now += 2 * HOUR
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.severity) == (Health.BAD, Severity.WARNING)
    assert found.summary == ("checkpoint step-4 is truncated: 1 has 10 bytes of 1000; the run would go on from step-3")
    for number in range(4):
        (scene.rundir.checkpoints / f"step-{number}" / "0").unlink()
    scene.now += 2 * HOUR
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.severity) == (Health.BAD, Severity.CRITICAL)
    assert found.summary.endswith("no checkpoint is good to go on from")


def test_a_torn_save_of_a_script_with_a_form_of_its_own_is_a_warning_and_its_end_is_told(
    tmp_path: Path, probe: Probe
) -> None:
    """No manifest says that one is whole. So nobody knows that none is good to go on from, and the end has to be told."""
    scene = Scene(tmp_path / "run", "{checkpoints: {}}", probe)
    (scene.rundir.switches).mkdir()
    for number, words in ((1, b"weights"), (2, b"weights"), (3, b"")):
        path = scene.rundir.checkpoints / f"checkpoint_{number:04}.pth"
        path.write_bytes(words)
        os.utime(path, (scene.now - (4 - number) * HOUR,) * 2)
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.severity) == (Health.BAD, Severity.WARNING)
    assert found.summary == (
        "checkpoint_0003.pth is torn: it is empty; nothing says that checkpoint_0002.pth before it is torn"
    )
    (scene.rundir.checkpoints / "checkpoint_0003.pth").rename(tmp_path / "aside")
    scene.memory = {}  # the disk was full, and nothing was remembered
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.summary) == (Health.OK, "nothing says that checkpoint_0002.pth is torn")
    torn = TornSave(
        str(scene.rundir.checkpoints / "checkpoint_0002.pth"), "it is empty", 1, aside=str(tmp_path / "old")
    )
    began = datetime.fromtimestamp(scene.now - HOUR, timezone.utc)
    for save, said in (
        (torn, "checkpoint_0002.pth was saved anew, and nothing says that it is torn"),
        (
            torn._replace(aside="", stays="its loader has no other to take"),
            "nothing says that checkpoint_0002.pth is torn",
        ),
    ):
        scene.attempts = (Attempt(2, "88_2", began, torn=(save,)),)
        assert scene.look("checkpoints")["whole"].summary == said


def test_a_save_that_began_behind_the_list_of_checkpoints_is_not_torn(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{checkpoints: {}}", probe)
    (scene.rundir.switches).mkdir()
    for number in (1, 2):
        path = scene.rundir.checkpoints / f"checkpoint_{number:04}.pth"
        path.write_bytes(b"weights")
        os.utime(path, (scene.now - (4 - number) * HOUR,) * 2)
    listed: dict[str, Any] = {}
    assert scene.look("checkpoints", listed)["whole"].health is Health.OK
    (scene.rundir.checkpoints / "checkpoint_0003.pth").write_bytes(b"")
    scene.memory["verdicts"] = {}  # the checkpoints are judged anew, with the list as it was
    assert scene.look("checkpoints", listed)["whole"].health is not Health.BAD


def test_none_good_for_too_long_is_critical_though_an_old_one_is_left(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    (scene.rundir.switches).mkdir()
    for number in range(5):
        commit(scene.rundir.checkpoints / f"step-{number}")
        if number:
            os.truncate(scene.rundir.checkpoints / f"step-{number}" / "1", 10)
        os.utime(scene.rundir.checkpoints / f"step-{number}", (scene.now - (4.5 - number) * HOUR,) * 2)
    found = scene.look("checkpoints")["whole"]
    assert (found.health, found.severity) == (Health.BAD, Severity.CRITICAL)
    assert found.summary.endswith("the run would go on from step-0, and none newer was good for 4h 30m")


def test_a_checkpoint_that_is_just_being_written_is_no_alert_and_one_that_cannot_be_read_neither(
    tmp_path: Path, probe: Probe, monkeypatch: pytest.MonkeyPatch
) -> None:
    scene = with_checkpoints(tmp_path, probe)
    (scene.rundir.switches).mkdir()
    commit(scene.rundir.checkpoints / "step-4")
    probe.listing(scene.rundir.checkpoints)
    others = set(probe.pids)
    torn = scene.rundir.checkpoints / "step-9"
    torn.mkdir()
    (torn / "__0_0.distcp").write_bytes(b"x" * 2000)
    found = scene.look("checkpoints")["whole"]
    assert found.health is Health.OK
    scene.now += HOUR
    scene.memory["verdicts"] = {}
    found = scene.look("checkpoints")["whole"]
    assert found.health is Health.BAD and "step-9 is torn" in found.summary
    monkeypatch.setattr("ftsupervise.watch.watchdogs.checkpoints.VERIFY_WITHIN", 0.2)
    (verifies,) = set(probe.pids) - others
    os.kill(verifies, signal.SIGSTOP)
    scene.memory["verdicts"] = {}
    found = scene.look("checkpoints")["whole"]
    assert found.health is Health.UNKNOWN and "no answer within" in found.summary
    monkeypatch.undo()
    assert scene.look("checkpoints")["size"].health is not Health.UNKNOWN, "the device answers its other questions"


def test_a_save_in_the_background_that_failed_is_told_until_one_is_committed(tmp_path: Path, probe: Probe) -> None:
    scene = with_checkpoints(tmp_path, probe)
    assert "save" not in scene.look("checkpoints")  # a loop that saves by itself

    def say(failed: str) -> None:
        at = datetime.fromtimestamp(scene.now, timezone.utc)
        write_beat(scene.rundir, Beat(0, 300, "train", at, 1, "n1", {"attempt": "1", SAVE_FAILED: failed}))

    say("step 300: rank 1: No space left on device")
    found = scene.look("checkpoints")["save"]
    assert found.health is Health.BAD
    assert found.summary == "not saved: step 300: rank 1: No space left on device (as rank 0 says)"
    say("")
    assert scene.look("checkpoints")["save"].health is Health.OK


def test_retention_does_not_blind_the_watchdog_to_saves_that_stop(tmp_path: Path, probe: Probe) -> None:
    """A night as a table: a save each hour, of which the two newest are left, as retention leaves them; then none comes."""
    scene = Scene(tmp_path / "run", "{checkpoints: {}}\ncheckpoints: {retain: {last: 2, every: 1000}}", probe)
    scene.checkpoint(0, scene.now - 400 * HOUR)  # kept for its step
    night: list[Health] = []
    for hour in range(1, 14):
        scene.now += HOUR
        if hour <= 8:
            scene.checkpoint(100 * hour, scene.now - 60)
            if hour > 2:
                shutil.rmtree(scene.rundir.checkpoints / f"step-{100 * (hour - 2)}")
        night.append(scene.look("checkpoints")["age"].health)
    assert night == [Health.OK] * 11 + [Health.BAD] * 2


def test_a_checkpoint_that_is_written_over_is_new_each_time(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{checkpoints: {}}", probe)
    for _ in range(12):
        scene.now += HOUR
        (scene.rundir.checkpoints / "last.ckpt").write_bytes(b"w" * 1000)
        os.utime(scene.rundir.checkpoints / "last.ckpt", (scene.now, scene.now))
        found = scene.look("checkpoints")["age"]
        assert found.health is Health.OK, found.summary
    for _ in range(4):
        scene.now += HOUR
        found = scene.look("checkpoints")["age"]
    assert found.health is Health.BAD and "one is usual every 1h" in found.summary


def test_fewer_ranks_write_fewer_files_and_a_manifest_says_that_none_is_missing(tmp_path: Path, probe: Probe) -> None:
    scene = Scene(tmp_path / "run", "{checkpoints: {}}", probe)
    for number in range(5):
        scene.checkpoint(number, scene.now - (4.5 - number) * HOUR, files=16)
    scene.checkpoint(9, scene.now, files=8, size=2000)
    commit(scene.rundir.checkpoints / "step-9")
    os.utime(scene.rundir.checkpoints / "step-9", (scene.now, scene.now))
    scene.now += HOUR
    found = scene.look("checkpoints")["size"]
    assert found.health is Health.OK, found.summary
