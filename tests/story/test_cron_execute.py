"""Executables with a bound: nothing hangs a slot, nothing outlives its bound, nothing fills the disk with words."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from ftsupervise.crontab.dispatch import Ended, Task, run_all
from ftsupervise.host.processes import identity


def run(tmp_path: Path, *bodies: str, bound: float = 20, limit: int = 100_000) -> list[Ended]:
    tasks = []
    for n, body in enumerate(bodies):
        folder = tmp_path / str(n)
        folder.mkdir()
        tasks.append(Task(str(n), ("/bin/sh", "-c", body), {"PATH": os.environ["PATH"]}, folder, "/"))
    ended: dict[str, Ended] = {}
    run_all(tasks, bound=bound, output_limit=limit, on_end=lambda one: ended.__setitem__(one.key, one))
    return [ended[str(n)] for n in range(len(bodies))]


def pids(folder: Path) -> list[int]:
    return [int(word) for word in (folder / "output").read_text().split()]


def test_exit_codes_and_signals_are_said(tmp_path: Path) -> None:
    good, bad, killed = run(tmp_path, "exit 0", "exit 7", "kill -9 $$")
    assert good.code == 0
    assert (bad.code, bad.words) == (7, "exit code 7")
    assert (killed.code, killed.words) == (-9, "killed by SIGKILL")


def test_what_cannot_be_started_is_an_end_too(tmp_path: Path) -> None:
    folder = tmp_path / "x"
    folder.mkdir()
    script = tmp_path / "no-interpreter"
    script.write_text("echo\n")
    script.chmod(0o755)
    for argv, says in (((str(script),), "#!"), (("/does/not/exist",), "cannot be started")):
        ended: list[Ended] = []
        run_all([Task("x", argv, {}, folder, "/")], bound=5, output_limit=1000, on_end=ended.append)
        assert says in ended[0].words


def test_entries_run_at_the_same_time(tmp_path: Path) -> None:
    """Two that wait for each other would never end one after the other."""
    fifo = tmp_path / "meet"
    os.mkfifo(fifo)
    first, second = run(tmp_path, f"echo hi >{fifo}", f"cat {fifo}")
    assert first.code == 0
    assert second.code == 0
    assert (tmp_path / "1" / "output").read_text() == "hi\n"


@pytest.mark.fault("A cron entry hangs", "it is ended at its bound with all it started")
def test_one_that_hangs_is_ended_at_its_bound_with_all_it_started(tmp_path: Path) -> None:
    """A child, a child that left the session, and one that left the family: double fork, own session."""
    body = (
        "echo $$; trap '' TERM HUP; sleep 600 & echo $!; setsid sh -c 'trap \"\" TERM; echo $$; sleep 600' &"
        " (setsid sh -c 'echo $$; exec sleep 600' &) ; sleep 600"
    )
    (ended,) = run(tmp_path, body, bound=4.0)
    assert ended.code is None
    assert "ended at its bound of 4s, with all processes that it had started" in ended.words
    seen = pids(tmp_path / "0")
    assert len(seen) == 4
    assert [pid for pid in seen if identity(pid) is not None] == []


def test_one_that_sheds_family_and_environment_does_not_outlive_the_slot(tmp_path: Path) -> None:
    up = tmp_path / "up"
    run(
        tmp_path,
        f"(env -i setsid sh -c 'echo $$; : > {up}; exec sleep 600' &); while [ ! -e {up} ]; do sleep 0.05; done",
    )
    (pid,) = pids(tmp_path / "0")
    assert identity(pid) is None


def test_a_hanging_entry_does_not_keep_the_others(tmp_path: Path) -> None:
    hung, *others = run(tmp_path, "sleep 600", *["echo x"] * 11, bound=6.0)
    assert hung.code is None
    assert "ended at its bound" in hung.words
    assert all(other.code == 0 for other in others)


def test_what_an_entry_leaves_running_ends_with_it_and_is_said(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, "sleep 600 & echo $!")
    assert ended.code == 0
    assert "left running" in ended.words
    assert identity(pids(tmp_path / "0")[0]) is None


@pytest.mark.threat(
    "Processes of other accounts look like ours.",
    "ftsupervise ends only processes that carry our mark.",
)
def test_processes_of_others_are_left_alone(tmp_path: Path) -> None:
    import subprocess

    bystander = subprocess.Popen(["sleep", "600"])
    try:
        run(tmp_path, "exit 0")
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


def test_of_too_much_output_the_beginning_and_the_end_are_kept(tmp_path: Path) -> None:
    (ended,) = run(tmp_path, "echo first; yes 0123456789 | head -c 5000000; echo last", limit=10_000)
    assert ended.code == 0
    kept = (tmp_path / "0" / "output").read_bytes()
    assert kept.startswith(b"first\n")
    assert kept.endswith(b"last\n")
    assert b"bytes are not kept" in kept
    assert len(kept) < 80_000  # the limit, and one read more


def test_the_beginning_of_the_output_is_there_while_it_still_runs(tmp_path: Path) -> None:
    seen: list[str] = []
    folder = tmp_path / "0"
    folder.mkdir()
    body = f"echo early; while [ ! -e {tmp_path}/go ]; do sleep 0.05; done"
    task = Task("0", ("/bin/sh", "-c", body), {"PATH": os.environ["PATH"]}, folder, "/")

    def echo(data: bytes) -> None:
        seen.append((folder / "output").read_text())
        (tmp_path / "go").touch()

    run_all([task], bound=20, output_limit=1000, on_end=lambda _: None, echo=echo)
    assert seen == ["early\n"]


def test_a_pipe_that_stays_open_keeps_nobody(tmp_path: Path) -> None:
    """It ended; a process that has shed the family holds its output open."""
    began = time.monotonic()
    (ended,) = run(tmp_path, "(env -i setsid sleep 600 &) ; echo done")
    assert ended.code == 0
    assert time.monotonic() - began < 60


@pytest.mark.parametrize("count", [20])
def test_many_entries_at_one_slot_all_end(tmp_path: Path, count: int) -> None:
    assert all(one.code == 0 for one in run(tmp_path, *["echo x"] * count))
