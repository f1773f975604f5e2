"""Whatever lies in a folder of checkpoints is seen by who lists them, with who may use it."""

from __future__ import annotations

import json
import shutil
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.snapshots import kept
from ftsupervise.snapshots.kept import KeptPage
from ftsupervise.snapshots.slots import SnapshotId
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed
from tests.story.test_kept_snapshots import KILL_AT_36, train

NOW = datetime(2026, 11, 24, tzinfo=timezone.utc)


def listed(where: Path, folder: Path, *words: str) -> str:
    return typed("checkpoints", "list", str(where), *words, folder=folder).stdout


@pytest.mark.resume(
    "Snapshots, staged checkpoints and leftovers lie beside the checkpoints under hidden names",
    "what each of them is for",
    "`checkpoints list`: every one of them, and who may use it",
)
def test_who_lists_checkpoints_sees_all_that_lies_there_and_who_may_use_it(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36, code="v1")
    folder, root = run.rundir.checkpoints, run.rundir.root
    set_aside(folder / "step-00000010", "it diverged", NOW)
    (folder / ".staging" / "0001" / "step-00000040").mkdir(parents=True)
    (folder / ".restoring-step-00000050").mkdir()
    (folder / ".removing-step-00000005").mkdir()
    other = folder / kept.name_of(SnapshotId(12, 3), "0123456789abcdef")
    other.mkdir()
    kept.write_page(other, KeptPage(12, 3, 8, run="theirs", run_id="0123456789abcdef", run_dir="/runs/theirs"))
    said = listed(root, run.folder)
    assert "step 34 of 1 rank, by attempt 1, code v1: the next attempt begins from it" in said
    assert f"set aside: {folder}/.quarantine/step-00000010, because it diverged" in said
    assert f"staged: {folder}/.staging/0001/step-00000040: attempt 1 alone, until it is committed" in said
    assert f"being restored: {folder}/.restoring-step-00000050: nobody until it is whole" in said
    assert f"being removed: {folder}/.removing-step-00000005: nobody: it is deleted" in said
    assert "step 12 of 8 ranks, by attempt 3: only run theirs (/runs/theirs) may begin from it" in said
    shutil.rmtree(folder / "step-00000030")
    assert "it is not used: step-00000030, the checkpoint behind it, is not there any more" in listed(root, run.folder)
    kinds = [one["kind"] for one in json.loads(listed(root, run.folder, "--json"))["hidden"]]
    assert kinds == ["kept snapshot", "kept snapshot", "staged", "being removed", "being restored"]


def test_a_folder_that_is_listed_without_its_run_says_whose_the_kept_snapshots_are(run: SupervisedRun) -> None:
    train(run, fault=KILL_AT_36)
    said = listed(run.rundir.checkpoints, run.folder)
    assert f"only run {run.rundir.root.name} ({run.rundir.root}) may begin from it" in said, said


def test_a_listed_folder_without_anything_hidden_says_nothing_of_it(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    assert "staged" not in listed(tmp_path, tmp_path)
