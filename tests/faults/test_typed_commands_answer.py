"""A command that a person types answers within fifteen seconds, whatever hangs: one sentence, and an exit code to look up."""

from __future__ import annotations

import errno
import os
import pty
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from ftsupervise import host
from ftsupervise.cli import time_limit
from ftsupervise.config.find_run import find_run
from ftsupervise.errors import NoAnswer

from .conftest import HungMount

BOUND = 15.0
FT = [sys.executable, "-m", "ftsupervise"]


class Place:
    """A run that was launched, somewhere; ``type`` is what a person does."""

    def __init__(self, folder: Path, root: Path, backing: Path | None = None) -> None:
        self.folder, self.root = folder, root
        real = backing or root
        for part in ("switches", "watch/journal", "beats", "logs", "launches/0001", "state", "attempts", "nodes"):
            (real / part).mkdir(parents=True)
        (real / "launches/0001/launch.json").write_text(
            '{"state": "submitted", "scheduler": "slurm", "job_ids": ["7"]}'
        )
        (real / "run.yaml").write_text(f"name: r\nlaunch: {{command: a}}\nscheduler: slurm\nrun_dir: {root}\n")
        (folder / "tmp").mkdir()
        (folder / "bin").mkdir()
        for name in ("squeue", "sbatch", "scontrol", "sinfo"):
            self.program(name, "exit 0")
        self.env = {
            **os.environ,
            "PATH": f"{folder}/bin:{os.environ['PATH']}",
            "TMPDIR": str(folder / "tmp"),
            "FTSUPERVISE_STATE_DIR": str(folder / "state"),
        }

    def program(self, name: str, words: str) -> None:
        (self.folder / "bin" / name).write_text(f"#!/bin/sh\n{words}\n")
        (self.folder / "bin" / name).chmod(0o755)

    def type(self, *words: str) -> tuple[int, str, float]:
        """(exit code, what it said, seconds). Whoever holds its output open keeps a person waiting: ``| cat`` waits, too."""
        began = time.monotonic()
        process = subprocess.Popen(
            [*FT, *words], env=self.env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True
        )
        try:
            said, _ = process.communicate(timeout=60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            pytest.fail(f"{' '.join(words)} hangs")
        return process.returncode, said.decode(), time.monotonic() - began


@pytest.fixture
def dead(tmp_path: Path, dead_mount: HungMount) -> Place:
    place = Place(tmp_path, dead_mount.point / "r", tmp_path / "backing" / "r")
    dead_mount.hang("all")
    return place


COMMANDS = [
    ("status", 74),
    ("check all", 3),
    ("report", 74),
    ("plan", 74),
    ("simulate", 74),
    ("kill --yes", 74),
    ("save", 74),
    ("clear", 74),
    ("alerts list", 74),
    ("nodes list", 74),
    ("cron status --dir", 74),
    ("config check", 74),
    ("checkpoints list", 74),
    ("checkpoints verify --sizes", 74),
    ("checkpoints commit", 74),
    ("launch --dry-run", 74),
    ("notify preview", 74),
    ("sandbox env --dir", 74),
    ("launch", 74),
    ("notify test", 74),
    ("cron run hourly/x --dir", 74),
    ("cron ensure --dir", 74),
    ("cron remove --dir", 74),
    ("sandbox down --dir", 74),
    ("sandbox node node-1 crash --dir", 74),
]


@pytest.mark.fault(
    "A run directory on a dead mount is named in a command that a person types",
    "it answers within fifteen seconds with one sentence and exit code 74 (check: 3)",
)
@pytest.mark.root
@pytest.mark.parametrize(
    "commands",
    [
        pytest.param(COMMANDS[:2], id="status and check all"),
        *(pytest.param([one], id=one[0], marks=pytest.mark.slow) for one in COMMANDS[2:]),
    ],
)
def test_a_run_directory_on_a_dead_mount_holds_nobody_who_types(dead: Place, commands: list[tuple[str, int]]) -> None:
    """Several are typed at the same time: each of them waits for its whole bound."""
    with ThreadPoolExecutor() as people:
        for done in [people.submit(answers, dead, *one) for one in commands]:
            done.result()


def answers(dead: Place, words: str, code: int) -> None:
    ended, said, seconds = dead.type(*words.split(), str(dead.root))
    assert seconds < BOUND, said
    assert ended == code, said
    assert "no answer" in said or "does not answer" in said, said
    assert "Traceback" not in said


@pytest.mark.fault(
    "The mount of a run directory answers each look with an error (ESTALE, EIO, a FUSE daemon that is gone)",
    "a command ends with 74 (check: 3, a tick of watch: 74), says which error and what to look at, and is right again "
    "with the mount",
)
@pytest.mark.root
@pytest.mark.parametrize("how", ["ESTALE", "EIO", "ENOTCONN", "ETIMEDOUT"])
def test_a_mount_that_answers_with_errors_alone_is_no_answer_about_the_run(
    tmp_path: Path, dead_mount: HungMount, how: str
) -> None:
    place = Place(tmp_path, dead_mount.point / "r", tmp_path / "backing" / "r")
    before = place.type("status", str(place.root))
    dead_mount.hang(f"{how}!all")
    for words, code in (("status", 74), ("kill --yes", 74), ("watch", 74), ("check all", 3), ("launch", 74)):
        ended, said, _ = place.type(*words.split(), str(place.root))
        assert ended == code, said
        assert os.strerror(getattr(errno, how)) in said and "findmnt -T" in said, said
        assert "refuses writes" not in said and "Traceback" not in said, "nobody has asked it to write"
    dead_mount.answer()
    assert place.type("status", str(place.root))[:2] == before[:2]


@pytest.mark.fault(
    "A person types a command about a run whose own place is a dead mount",
    "the run is given up after four seconds, before the command is",
)
@pytest.mark.root
def test_a_run_that_is_looked_for_on_a_dead_mount_is_given_up_before_the_command_is(
    dead: Place, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host, "answer_by", time.monotonic() + 0.5)
    with pytest.raises(NoAnswer, match=f"{dead.root} does not answer"):
        find_run(str(dead.root))
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(dead.root))
    with pytest.raises(NoAnswer) as error:
        find_run(None)
    assert error.value.hint.endswith(f"ls {dead.root}"), "the place that hangs, not the folder that one is in"


@pytest.mark.fault("A monitor checks a dead mount every minute", "one process hangs on it, the others answer at once")
@pytest.mark.root
@pytest.mark.slow
def test_a_monitor_that_checks_a_dead_mount_again_and_again_leaves_one_process_behind(dead: Place) -> None:
    for _ in range(3):
        ended, said, seconds = dead.type("check", "all", str(dead.root))
        assert (ended, seconds < BOUND) == (3, True), said
    assert len(list((dead.folder / "tmp").glob("ftsupervise-*/probe/[0-9]*.json"))) == 1


@pytest.mark.fault(
    "`squeue` sleeps while somebody types `status`",
    "it is ended after eight seconds, and what is known without it is shown",
)
def test_a_squeue_that_sleeps_leaves_status_with_what_it_knows_otherwise(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "r")
    place.program("squeue", "sleep 300")
    place.program("scontrol", "sleep 300")
    (place.root / "switches" / "kill-switch").touch()
    ended, said, seconds = place.type("status", str(place.root))
    assert seconds < BOUND, said
    assert ended == 0, said
    assert "UNKNOWN" in said and "squeue" in said, said
    assert "the kill switch is up" in said, said


@pytest.mark.fault(
    "squeue sleeps for ever while somebody types launch",
    "it answers within fifteen seconds with 69, and nothing was submitted",
)
def test_a_squeue_that_sleeps_leaves_launch_with_a_sentence_and_nothing_submitted(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "r")
    (tmp_path / "ftsupervise.yaml").write_text("name: r\nscheduler: slurm\nlaunch:\n  command: sleep 1\n")
    place.program("squeue", "sleep 300")
    place.program("scontrol", "sleep 300")
    place.program("sbatch", f"touch {tmp_path}/submitted; exit 1")
    ended, said, seconds = place.type("launch", str(tmp_path / "ftsupervise.yaml"))
    within = time_limit.BOUNDS["launch"].seconds  # it is typed once, and a Slurm that is slow is waited for
    assert (ended, seconds < within) == (69, True), said
    assert "squeue" in said and "nothing was changed" in said, said
    assert not (tmp_path / "submitted").exists()


LOOKS = ["watch RUN", "cron install --backend slurm --dir CRON"]


def with_a_slurm_that_sleeps(folder: Path, words: str) -> tuple[Place, list[str]]:
    place = Place(folder, folder / "r")
    for name in ("squeue", "scontrol", "sinfo", "sbatch"):
        place.program(name, "sleep 300")
    return place, words.replace("RUN", str(place.root)).replace("CRON", str(folder / "cron")).split()


@pytest.mark.slow
@pytest.mark.parametrize("words", LOOKS)
def test_on_a_terminal_a_slurm_that_sleeps_holds_no_look_and_no_install(tmp_path: Path, words: str) -> None:
    place, typed = with_a_slurm_that_sleeps(tmp_path, words)
    began = time.monotonic()
    master, slave = pty.openpty()
    process = subprocess.Popen([*FT, *typed], env=place.env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    try:
        while part := os.read(master, 4096):
            said += part
    except OSError:  # the terminal is closed: it has ended
        pass
    assert process.wait(60) != 0, said
    assert time.monotonic() - began < BOUND + 5, said
    assert b"Traceback" not in said


@pytest.mark.fault(
    "squeue sleeps for ever under `watch RUN / tee log` or `cron install`",
    "a person is answered within fifteen seconds, behind a pipe too",
)
@pytest.mark.parametrize("words", [LOOKS[0], pytest.param(LOOKS[1], marks=pytest.mark.slow)])
def test_piped_into_tee_a_slurm_that_sleeps_holds_no_look_and_no_install(tmp_path: Path, words: str) -> None:
    place, typed = with_a_slurm_that_sleeps(tmp_path, words)
    ended, said, seconds = place.type(*typed)
    assert ended != 0 and seconds < BOUND, said
    assert "squeue" in said and "Traceback" not in said, said


@pytest.mark.slow
@pytest.mark.parametrize(("words", "slot"), [("watch RUN", "2026-11-22T23:00:00+00:00"), ("watch --quiet RUN", "")])
def test_a_look_that_a_clock_began_waits_longer_for_slurm(tmp_path: Path, words: str, slot: str) -> None:
    place, typed = with_a_slurm_that_sleeps(tmp_path, words)
    for name in ("squeue", "scontrol"):
        place.program(name, "sleep 12")  # longer than a person waits; then an empty queue
    if slot:
        place.env["FTSUPERVISE_CRON_SLOT"] = slot
    _, said, seconds = place.type(*typed)
    assert seconds > 11 and "no answer within" not in said, said


@pytest.mark.parametrize(
    ("words", "tried_first"),
    [
        ("launch runs/r", True),
        ("notify test --receiver slack", True),
        ("cron ensure", True),
        ("cron ensure --run runs/r", False),  # what a running job types again and again
        ("launch --dry-run", False),
        ("cron tick", False),
        ("sandbox down --dir d", True),
        ("checkpoints", False),
        ("checkpoints verify --all runs/r", True),
        ("checkpoints upkeep --all", False),  # the cron's
        ("sandbox -- make test", False),
        ("run -- python train.py", False),
    ],
)
def test_only_what_a_person_types_and_what_acts_is_tried_first(words: str, tried_first: bool) -> None:
    assert time_limit.acts(words.split()) is tried_first


def test_what_a_command_says_and_how_it_ends_is_passed_on(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "r")
    assert place.type("status", str(tmp_path / "nothing"))[0] == 66
    assert place.type("kill", str(place.root))[0] == 64  # nobody to ask
    assert place.type("kill", "--yes", str(place.root))[:2][0] == 0
    assert (place.root / "switches" / "kill-switch").exists()


def test_a_person_who_is_asked_may_take_longer_than_any_bound(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "r")
    master, slave = pty.openpty()
    process = subprocess.Popen([*FT, "kill", str(place.root)], env=place.env, stdin=slave, stdout=slave, stderr=slave)
    os.close(slave)
    said = b""
    while b"Stop r?" not in said:
        said += os.read(master, 1024)
    time.sleep(13)
    assert process.poll() is None, said
    os.write(master, b"y\n")
    assert process.wait(20) == 0
    assert (place.root / "switches" / "kill-switch").exists()
    os.close(master)


def test_ctrl_c_ends_the_command_and_its_child(tmp_path: Path) -> None:
    place = Place(tmp_path, tmp_path / "r")
    place.program("squeue", "echo $PPID > $0.parent; sleep 300")
    heard = ["env", "--default-signal=INT"]  # in the background of a shell, tests begin with SIGINT ignored
    process = subprocess.Popen([*heard, *FT, "status", str(place.root)], env=place.env, start_new_session=True)
    asked = place.folder / "bin" / "squeue.parent"
    until = time.monotonic() + 20
    while not (asked.exists() and asked.read_text().strip()):
        assert time.monotonic() < until
        time.sleep(0.05)
    child = int(asked.read_text())
    os.killpg(process.pid, signal.SIGINT)
    assert process.wait(10) == 130
    until = time.monotonic() + 10
    while Path(f"/proc/{child}/fd").exists() and "ftsupervise" in Path(f"/proc/{child}/cmdline").read_text():
        assert time.monotonic() < until, "its child lives on"
        time.sleep(0.05)
