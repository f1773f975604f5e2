"""Retention where a run sets it: by itself while the run trains, among ten thousand checkpoints, and in a folder that a group
shares; and what neither is a checkpoint nor new progress."""

from __future__ import annotations

import os
import stat
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.manifest import encoded, read_manifest
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import FolderStore
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify
from ftsupervise.cli.checkpoint_upkeep import now
from ftsupervise.config.load import dump, loads
from tests.neighbours.patience import wait_until
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed
from tests.story.test_checkpoint_layouts import archive

LOOP = """
import time
from ftsupervise import Guard
with Guard() as guard:
    for step in range(1, 100_000):
        if step <= 30:
            with guard.checkpoint(step) as folder:
                (folder / "weights").write_bytes(b"w" * 1000)
        if guard.step(step).stop:
            break
        time.sleep(0.01 if step < 30 else 0.1)
"""


@pytest.mark.resume(
    "`retain: {last: 5}`, and the run saves thirty times",
    "the newest; five stay, without a crontab",
    "nothing",
)
def test_retention_acts_by_itself_while_the_run_trains(run: SupervisedRun) -> None:
    root = run.rundir.root
    root.mkdir(exist_ok=True)
    settings = "name: r\nscheduler: local\nlaunch: {command: 'true'}\ncheckpoints: {retain: {last: 5}}\n"
    run.rundir.config.write_text(dump(loads(f"{settings}run_dir: {root}\n", root / "f.yaml")))
    (run.folder / "train.py").write_text(LOOP)
    run.start("--retain", "on", "--", sys.executable, "train.py", FTSUPERVISE_UPKEEP_SECONDS="1")

    def kept() -> list[int]:
        found = [one.step or 0 for one in checkpoints_in(run.rundir.checkpoints)]
        return found if found[:1] == [30] and len(found) <= 5 else []

    assert wait_until(kept, "five of thirty checkpoints", 30) == [30, 29, 28, 27, 26]


def many(folder: Path, count: int) -> None:
    one = folder / "step-00000000"
    one.mkdir(parents=True)
    (one / "weights").write_bytes(b"w" * 10)
    made = commit(one, Origin(step=0))
    for step in range(1, count):
        page = folder / f"step-{step:08d}" / ".ftsupervise" / "manifest.json"
        page.parent.mkdir(parents=True)
        (page.parent.parent / "weights").write_bytes(b"w" * 10)
        page.write_bytes(encoded(made._replace(step=step)))


@pytest.mark.resume(
    "`prune` among ten thousand checkpoints",
    "the newest",
    '"4000 of 10000 checkpoints are compared", and so on',
)
@pytest.mark.slow
@pytest.mark.parametrize("words", [["--dry-run"], []], ids=["a dry run", "in earnest"])
def test_prune_among_ten_thousand_checkpoints_says_how_far_it_is_and_does_not_give_up(
    tmp_path: Path, words: list[str]
) -> None:
    many(tmp_path / "ckpt", 10_000)
    done = typed("checkpoints", "prune", "ckpt", "--last", "9990", *words, folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "of 10000 checkpoints are compared" in done.stdout
    assert len(checkpoints_in(tmp_path / "ckpt")) == (10_000 if words else 9_990)


def test_to_compare_a_checkpoint_of_one_file_looks_at_its_own_manifest_only(tmp_path: Path) -> None:
    def seconds(count: int) -> float:
        folder = tmp_path / str(count)
        archive(folder / "epoch=0-step=0.ckpt")
        commit(folder / "epoch=0-step=0.ckpt")
        for step in range(1, count):
            (folder / ".ftsupervise" / f"epoch=0-step={step}.ckpt.json").write_bytes(b"{}")
        runs = []
        for _ in range(5):
            before = time.process_time()
            for _ in range(20):
                assert verify(folder / "epoch=0-step=0.ckpt").good
            runs.append(time.process_time() - before)
        return min(runs)

    assert seconds(2000) < 5 * seconds(2)


@pytest.mark.resume(
    "a second member of the group saves into a folder of mode 2770",
    "the newest, whoever saved it",
    "nothing",
)
def test_in_a_folder_of_a_group_all_that_a_save_makes_lets_the_group_in(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "group"
    folder.mkdir()
    folder.chmod(0o2770)
    before = os.umask(0o022)
    try:
        monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(folder))
        with Guard(signals=(), rank=0, world=1) as guard, guard.checkpoint(1) as at:
            (at / "weights").write_bytes(b"w")
    finally:
        os.umask(before)
    for made in (folder / ".staging", folder / ".staging" / "alone"):
        assert stat.S_IMODE(made.stat().st_mode) & 0o2070 == 0o2070, f"{made} is closed to the group"


@pytest.mark.resume("Orbax was killed while it saved", "the one before: `N.orbax-checkpoint-tmp-…` is none", "nothing")
def test_what_orbax_has_not_finished_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("100", "200.orbax-checkpoint-tmp-1700000000000000", "300.orbax-checkpoint-tmp"):
        (tmp_path / name).mkdir()
    assert [one.path.name for one in checkpoints_in(tmp_path)] == ["100"]


@pytest.mark.resume(
    "an old checkpoint was restored from its copy",
    "the newest, by step",
    "it has its old time: the *checkpoints* watchdog still says that saves are late",
)
@pytest.mark.parametrize("of", ["a folder", "a file"])
def test_an_old_checkpoint_that_was_restored_is_as_old_as_it_was(tmp_path: Path, of: str) -> None:
    make: Callable[..., Any] = archive
    one = tmp_path / "here" / ("step-1/weights.pt" if of == "a folder" else "epoch=0-step=1.ckpt")
    make(one)
    checkpoint = one.parent if of == "a folder" else one
    os.utime(one, (1_700_000_000, 1_700_000_000))
    commit(checkpoint)
    offload(checkpoint, FolderStore(tmp_path / "far"), now=now)
    ((copy,), _) = copies_in([FolderStore(tmp_path / "far")])
    back = restore(copy, tmp_path / "back", now=now)
    assert back.stat().st_mtime == 1_700_000_000
    assert read_manifest(back) == read_manifest(checkpoint) and verify(back, Scope(Thoroughness.QUICK)).good


@pytest.mark.resume(
    "a copy elsewhere has rotted",
    "the checkpoint itself; the copy is mended by `offload --again`",
    '"copied to ...: ... sent and read back"',
)
def test_a_copy_that_has_rotted_is_read_again_when_asked_and_mended(tmp_path: Path) -> None:
    one = tmp_path / "here" / "step-1"
    archive(one / "weights.pt")
    commit(one)
    store = FolderStore(tmp_path / "far")
    offload(one, store, now=now)
    copy = tmp_path / "far" / "step-1" / "weights.pt"
    raw = bytearray(copy.read_bytes())
    raw[1000] ^= 1
    copy.write_bytes(raw)
    assert offload(one, store, now=now).sent == 0, "nobody asked"
    assert offload(one, store, now=now, again=True).sent == len(raw)
    assert copy.read_bytes() == (one / "weights.pt").read_bytes()


def weights(guard: Guard, step: int, name: str | None = None) -> None:
    with guard.checkpoint(step, name) as at:
        (at / "weights").write_bytes(b"w")


@pytest.mark.resume(
    "Exports are made after the checkpoints that `guard.restore` loads, and `retain: {last: 2}` acts",
    "the two newest of each kind stay",
    "`prune` says of which kind",
)
def test_neither_an_export_nor_a_checkpoint_of_its_own_making_takes_the_place_of_what_guard_restore_can_load(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state={"tokens": 0})
        for step in (10, 20, 30):
            guard.save(step)
        for step in (40, 50, 60):
            weights(guard, step, f"export-{step}")
    there = ["export-50", "export-60", "step-00000020", "step-00000030"]
    shown = typed("checkpoints", "prune", "ckpt", "--last", "2", folder=tmp_path)
    assert shown.returncode == 0, shown.stderr
    assert "one of the last 2 of guard.save" in shown.stdout and "one of the last 2 of other files" in shown.stdout
    assert sorted(one.path.name for one in checkpoints_in(tmp_path / "ckpt")) == there
    with Guard(signals=(), rank=0, world=1) as guard:
        assert guard.restore(state={"tokens": 0}) == 30


def test_the_newest_of_each_kind_is_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state={"tokens": 0})
        for step in (10, 20):
            guard.save(step)
        weights(guard, 30, "export-30")
    done = typed("checkpoints", "offload", "ckpt", "--to", str(tmp_path / "far"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    assert sorted(one.name for one in copies_in([FolderStore(tmp_path / "far")])[0]) == ["export-30", "step-00000020"]
