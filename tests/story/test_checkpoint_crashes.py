"""SIGKILL at any moment and power cuts that drop what was not synced: what is found is whole, and the newest committed."""

from __future__ import annotations

import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.checkpoints.find import checkpoints_in, choose
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify
from tests.story.power_loss import RECORDER, Disk, recorded

FULL = Scope(Thoroughness.FULL)
# Saves again and again, each step its own bytes; every third step a second time, which replaces the first.
SAVER = """
import hashlib, os, sys
from ftsupervise import Guard

def content(step, name):
    return hashlib.sha256(f"{step} {name}".encode()).digest() * SIZE

with Guard(signals=(), rank=0, world=1) as guard:
    for step in range(FIRST, LAST):
        for turn in range(2 if step % 3 == 0 else 1):
            with guard.checkpoint(step) as folder:
                (folder / "sub").mkdir()
                for name in ("weights", "sub/optimizer"):
                    (folder / name).write_bytes(content(step, name))
                for number in range(FROZEN):
                    (folder / f"frozen-{number}").write_bytes(b"%d" % number * 70_000)
            DONE(step)
        old = folder.parents[1].parent / f"step-{step - 3:08d}"
        if old.is_dir():
            guard.remove(old)
"""


def whole(folder: Path, step: int, size: int) -> bool:
    """Does it load, byte by byte what was saved?"""
    import hashlib

    return all(
        (folder / name).read_bytes() == hashlib.sha256(f"{step} {name}".encode()).digest() * size
        for name in ("weights", "sub/optimizer")
    )


def incremental(frozen: int) -> dict[str, str]:
    return {"FTSUPERVISE_GUARD_INCREMENTAL": "4"} if frozen else {}


def recording(tmp_path: Path, last: int, frozen: int = 0) -> tuple[Path, list[list[Any]]]:
    """The operations of a saver, and the place in which they were made. ``frozen``: files that never change, kept once."""
    place, log = tmp_path / "disk", tmp_path / "log"
    place.mkdir()
    saver = SAVER.replace("SIZE", "3").replace("FIRST", "1").replace("LAST", str(last + 1))
    saver = saver.replace("FROZEN", str(frozen))
    (tmp_path / "saver.py").write_text(saver.replace("DONE(", "sys.recorder_note('done', "))
    (tmp_path / "recorder.py").write_text(RECORDER)
    env = {**os.environ, "FTSUPERVISE_CHECKPOINT_DIR": str(place / "ckpt"), **incremental(frozen)}
    words = [sys.executable, str(tmp_path / "recorder.py"), str(log), str(place), str(tmp_path / "saver.py")]
    subprocess.run(words, check=True, env=env, timeout=100)
    return place, recorded(log)


def cut_everywhere(tmp_path: Path, last: int, seed: int, frozen: int = 0) -> None:
    place, lines = recording(tmp_path, last, frozen)
    assert ["done", last] in lines
    assert any(line[0] == "link" for line in lines) == bool(frozen)
    disk, draws, done = Disk(place), random.Random(seed), None
    for number, line in enumerate(lines):
        if line[0] == "done":
            done = line[1]
        else:
            disk.play(line)
        for keep in (None, draws):
            left = tmp_path / f"cut-{number}"
            disk.cut(left, keep)
            found = choose(left / "ckpt", FULL).verdict
            step = found.step if found is not None else None
            assert done is None or (step is not None and step >= done), f"{line}: {done} was committed, {step} is found"
            assert found is None or whole(found.path, found.step or 0, 3), f"{line}: {found} does not load"
            shutil.rmtree(left)


@pytest.mark.fault(
    "The power fails during a save, and the disk drops what was not synced",
    "the newest committed checkpoint is there, whole, and found",
)
def test_a_power_cut_after_any_operation_leaves_the_newest_committed_checkpoint(tmp_path: Path) -> None:
    cut_everywhere(tmp_path, last=3, seed=1)


def test_a_power_cut_loses_no_file_that_two_checkpoints_share(tmp_path: Path) -> None:
    cut_everywhere(tmp_path, last=2, seed=1, frozen=1)


def test_the_disk_of_this_test_does_drop_what_was_not_synced(tmp_path: Path) -> None:
    place, lines = recording(tmp_path, last=1)
    for unsynced in (str(place / "ckpt"), str(place), "manifest.json", "weights"):
        disk = Disk(place)
        for line in lines:
            if line[0] != "done" and not (
                line[0] == "sync" and (line[1] == unsynced or unsynced in Path(line[1]).name)
            ):
                disk.play(line)
        left = tmp_path / "cut"
        disk.cut(left, None)
        assert choose(left / "ckpt", FULL).verdict is None, unsynced
        shutil.rmtree(left)


def killed(tmp_path: Path, kills: int, seed: int, frozen: int = 0) -> int:
    """Kill a saver at random moments; after each kill look at what is found, and go on from there. Of ``frozen`` files that
    never change each is kept once: then the older checkpoints are read too."""
    size, draws = 20_000, random.Random(seed)
    folder, tell = tmp_path / "ckpt", tmp_path / "told"
    # one interpreter that forks a saver for each kill: a start costs more than a save
    saver = SAVER.replace("SIZE", str(size)).replace("FIRST", "int(sys.argv[1])").replace("LAST", "10**6")
    saver = saver.replace("FROZEN", str(frozen))
    done = saver.replace("DONE(step)", "os.pwrite(told, b'%12d' % step, 0)")
    (tmp_path / "saver.py").write_text(
        "import os, sys\n"
        "import ftsupervise.guard.guard, ftsupervise.checkpoints.manifest, ftsupervise.checkpoints.commit\n"
        f"import ftsupervise.checkpoints.layouts, xxhash\ncode = compile({done!r}, 'saver', 'exec')\n"
        f"told = os.open({str(tell)!r}, os.O_RDWR | os.O_CREAT)\n"
        "for line in sys.stdin:\n"
        "    pid = os.fork()\n"
        "    if not pid:\n"
        "        sys.argv[1:] = [line.strip()]\n"
        "        exec(code, {'told': told})\n"
        "        os._exit(0)\n"
        "    print(pid, flush=True)\n"
        "    os.waitpid(pid, 0)\n"
        "    print('ended', flush=True)\n"
    )
    env = {**os.environ, "FTSUPERVISE_CHECKPOINT_DIR": str(folder), **incremental(frozen)}
    step, window = 0, 0.2
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "saver.py")], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as forks:
        assert forks.stdin is not None and forks.stdout is not None
        for _ in range(kills):
            forks.stdin.write(f"{step + 1}\n")
            forks.stdin.flush()
            pid = int(forks.stdout.readline())
            time.sleep(draws.uniform(0.0, window))
            os.kill(pid, signal.SIGKILL)
            assert forks.stdout.readline() == "ended\n"
            committed = int(tell.read_bytes() or b"0") if tell.exists() else 0
            found = choose(folder, FULL)
            assert not found.passed, "what has a checkpoint's name is whole"
            now = found.verdict.step if found.verdict is not None else 0
            assert now is not None and now >= committed, f"{committed} was committed, {now} is found"
            assert found.verdict is None or whole(found.verdict.path, now, size)
            for one in checkpoints_in(folder)[:6] if frozen else ():
                assert verify(one.path, FULL).good and whole(one.path, one.step or 0, size), one
            window *= 1.2 if now == step else 0.8  # about every second kill comes before the first save is over
            step = now
        forks.stdin.close()
    left = [path.name for path in folder.iterdir() if path.name != ".staging" and not path.name.startswith("step-")]
    assert not left, "nothing but checkpoints and the staging area"
    if frozen:
        assert all(verify(one.path, FULL).good for one in checkpoints_in(folder))
        shared = [
            path for one in checkpoints_in(folder) for path in one.path.glob("frozen-*") if path.stat().st_nlink > 1
        ]
        assert shared, "and some of them have files in common"
        assert not list(folder.glob("step-*/**/.tmp-*"))
    return step


def test_a_killed_save_leaves_the_checkpoint_before_it(tmp_path: Path) -> None:
    assert killed(tmp_path, 20, seed=7) > 3


@pytest.mark.fault(
    "A save is killed while it shares files with the checkpoint before",
    "both are whole, and so is each older one",
)
def test_a_save_that_is_killed_while_it_shares_files_harms_no_checkpoint(tmp_path: Path) -> None:
    assert killed(tmp_path, 15, seed=7, frozen=10) >= 2


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_save_that_shares_files_may_be_killed_five_hundred_times(tmp_path: Path) -> None:
    assert killed(tmp_path, 500, seed=int(time.time()), frozen=10) > 20


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_save_may_be_killed_five_hundred_times(tmp_path: Path) -> None:
    assert killed(tmp_path, 500, seed=int(time.time())) > 20


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(2, 12))
def test_power_cuts_of_many_kinds(tmp_path: Path, seed: int) -> None:
    cut_everywhere(tmp_path, last=9, seed=seed)
