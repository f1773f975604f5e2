"""``ftsupervise checkpoints prune|offload|restore`` as people type them, and removing that may be killed at any moment."""

from __future__ import annotations

import fcntl
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from ftsupervise.checkpoints.commit import Origin, commit
from ftsupervise.checkpoints.find import newest
from ftsupervise.checkpoints.retain import REMOVING, sweep
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.cli import ftsupervise

Type = Callable[..., Any]


def make(folder: Path, step: int, loss: float = 1.0, *, files: int = 3) -> Path:
    checkpoint = folder / f"step-{step:08d}"
    checkpoint.mkdir(parents=True)
    for number in range(files):
        (checkpoint / f"{number}.bin").write_bytes(os.urandom(5000))
    commit(checkpoint, Origin(step=step, metrics={"loss": loss}))
    return checkpoint


@pytest.fixture
def type_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Type:
    """A command, what it prints, and its exit code is the one expected. The run's settings are in the working directory."""
    monkeypatch.chdir(tmp_path)

    def one(*words: str, code: int = 0) -> str:
        done = CliRunner().invoke(ftsupervise, ["checkpoints", *words])
        shown = f"{done.output}\n{done.exception!r}"
        assert getattr(done.exception, "exit_code", done.exit_code) == code, shown
        return shown if code else done.output

    return one


def run_with(folder: Path, checkpoints: str) -> None:
    """A run directory with these settings, as a launch leaves it."""
    (folder / "run" / "switches").mkdir(parents=True)
    text = f"name: tr11\nscheduler: local\nlaunch: {{command: sleep 1}}\ncheckpoints: {checkpoints}\nrun_dir: {folder}/run\n"
    (folder / "run" / "run.yaml").write_text(text)


def names(folder: Path) -> list[str]:
    return sorted(one.name for one in folder.iterdir())


def test_a_dry_run_shows_what_goes_and_how_much_it_frees_and_removes_nothing(type_it: Type, tmp_path: Path) -> None:
    for step in range(1, 6):
        make(tmp_path, step)
    shown = type_it("prune", ".", "--last", "2", "--dry-run")
    assert "would go step-00000001, 15 kB" in shown
    assert "3 checkpoints would go, which frees 45 kB" in shown
    assert "step-00000005: one of the 2 newest that are verified" in shown
    assert len(names(tmp_path)) == 5
    found = json.loads(type_it("prune", ".", "--last", "2", "--dry-run", "--json"))
    assert (found["frees"], found["freed"], len(found["remove"])) == (45000, 0, 3)


def test_a_file_that_another_checkpoint_shares_frees_nothing(type_it: Type, tmp_path: Path) -> None:
    """Of a file that only those that go have in common, the bytes are counted once."""
    shared: dict[int, Path] = {}
    for step in range(1, 6):
        checkpoint = make(tmp_path, step)
        base = shared.setdefault(step <= 2, checkpoint)
        if base != checkpoint:
            (checkpoint / "0.bin").unlink()
            (checkpoint / "0.bin").hardlink_to(base / "0.bin")
            commit(checkpoint, Origin(step=step))
    found = json.loads(type_it("prune", ".", "--last", "2", "--dry-run", "--json"))
    assert [one["name"] for one in found["remove"]] == [f"step-0000000{step}" for step in (1, 2, 3)]
    assert found["frees"] == 5 * 5000 + 2 * 5000, "1 and 2 share a file, and 3 shares one with 4"
    records = sum(
        path.stat().st_size for step in (1, 2, 3) for path in (tmp_path / f"step-0000000{step}/.ftsupervise").iterdir()
    )
    assert json.loads(type_it("prune", ".", "--last", "2", "--json"))["freed"] == found["frees"] + records


def test_what_no_rule_keeps_goes_and_nothing_of_it_is_left(type_it: Type, tmp_path: Path) -> None:
    for step, loss in ((100, 3.0), (200, 0.1), (300, 2.0), (400, 1.0), (500, 1.5)):
        make(tmp_path, step, loss)
    shown = type_it("prune", ".", "--last", "2", "--best", "1", "--metric", "loss")
    assert "2 checkpoints removed, 31" in shown  # kB, their manifests with them
    assert names(tmp_path) == ["step-00000200", "step-00000400", "step-00000500"]


def test_the_rules_of_the_settings_count_and_those_typed_go_before(type_it: Type, tmp_path: Path) -> None:
    run_with(tmp_path, f"{{path: {tmp_path}/ckpt, retain: {{last: 4}}}}")
    for step in range(1, 7):
        make(tmp_path / "ckpt", step)
    assert "2 checkpoints would go" in type_it("prune", "run", "--dry-run")
    assert "3 checkpoints would go" in type_it("prune", "run", "--dry-run", "--last", "3")


def test_a_run_that_has_not_begun_or_not_saved_yet_has_nothing_to_remove(type_it: Type, tmp_path: Path) -> None:
    run_with(tmp_path, f"{{path: {tmp_path}/ckpt, retain: {{last: 2}}, offload: {{to: {tmp_path}/far}}}}")
    assert "0 of 0 checkpoints verified" in type_it("prune", "run")
    type_it("upkeep", "run")


def test_without_a_rule_nothing_goes(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path, 1)
    assert "no rule says which checkpoints to keep" in type_it("prune", ".", code=64)


def test_a_damaged_newest_one_is_not_counted_and_not_removed(type_it: Type, tmp_path: Path) -> None:
    for step in range(1, 5):
        make(tmp_path, step)
    (tmp_path / "step-00000004/1.bin").write_bytes(b"x" * 5000)
    shown = type_it("prune", ".", "--last", "2")
    assert "step-00000004: not whole" in shown
    assert names(tmp_path) == ["step-00000002", "step-00000003", "step-00000004"]


def test_with_one_verified_checkpoint_nothing_goes(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path, 1)
    for step in (2, 3, 4):
        (tmp_path / f"step-{step}").mkdir()
        (tmp_path / f"step-{step}/w.bin").write_bytes(b"w")
    shown = type_it("prune", ".", "--last", "2")
    assert "1 of 4 checkpoints verified; nothing is removed before 2 are" in shown
    assert len(names(tmp_path)) == 4


def test_only_what_has_a_copy_goes_where_that_is_asked_for(type_it: Type, tmp_path: Path) -> None:
    for step in range(1, 6):
        make(tmp_path / "here", step)
    type_it("offload", "here/step-00000002", "--to", str(tmp_path / "far"))
    shown = type_it("prune", "here", "--last", "2", "--copied")
    assert "step-00000001: no copy elsewhere yet" in shown
    assert names(tmp_path / "here") == [f"step-0000000{step}" for step in (1, 3, 4, 5)]


def test_the_newest_is_copied_and_comes_back_when_the_disk_is_lost(type_it: Type, tmp_path: Path) -> None:
    for step in (1, 2):
        make(tmp_path / "here", step)
    shown = type_it("offload", "here", "--to", "far")
    assert "step-00000002 is copied to" in shown and "15 kB sent and read back" in shown
    assert "has its copy in" in type_it("offload", "here", "--to", "far")
    assert type_it("offload", "here", "--to", "far", "--quiet") == ""
    for path in (tmp_path / "here").rglob("*.bin"):
        path.unlink()
    shown = type_it("restore", "here", "--from", "far")
    assert f"{tmp_path}/here/step-00000002 is here and whole" in shown
    assert verify(tmp_path / "here/step-00000002", Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED
    assert names(tmp_path / "here/.quarantine") == ["step-00000002"]
    assert f"set aside: {tmp_path}/here/.quarantine/step-00000002, because it is not what" in type_it("list", "here")


def test_folders_and_files_that_are_no_checkpoints_are_never_removed(type_it: Type, tmp_path: Path) -> None:
    for step in range(1, 5):
        make(tmp_path / "p", step)
    for name in ("tensorboard", "logs", "config", "step-0005-notes"):
        (tmp_path / "p" / name).mkdir()
        (tmp_path / "p" / name / "x").write_text("x")
    (tmp_path / "p/base-model.pt").write_bytes(b"x")
    type_it("prune", "p", "--last", "2")
    left = ["base-model.pt", "config", "logs", "step-00000003", "step-00000004", "step-0005-notes", "tensorboard"]
    assert names(tmp_path / "p") == left


def test_a_copy_that_was_damaged_since_lets_nothing_go_and_is_made_good_again(type_it: Type, tmp_path: Path) -> None:
    for step in range(1, 5):
        make(tmp_path / "here", step)
    type_it("offload", "here", "--all", "--to", "far")
    (tmp_path / "far/step-00000001/1.bin").write_bytes(b"cut")
    (tmp_path / "far/step-00000002/1.bin").unlink()
    shown = type_it("prune", "here", "--last", "2", "--copied")
    assert "step-00000001: no copy elsewhere yet" in shown and "step-00000002: no copy elsewhere yet" in shown
    assert "sent and read back" in type_it("offload", "here", "--all", "--to", "far")
    assert "2 checkpoints removed" in type_it("prune", "here", "--last", "2", "--copied")
    assert type_it("restore", "here", "--from", "far", "--name", "step-00000001").strip().endswith("step-00000001")


def test_a_checkpoint_is_no_copy_of_itself(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path / "here", 1)
    (tmp_path / "link").symlink_to("here")
    for place in ("here", "link", "here/step-00000001"):
        assert "that would be no copy" in type_it("offload", "here", "--to", place, code=1)


def test_upkeep_goes_on_with_the_rest_when_one_place_for_copies_fails(type_it: Type, tmp_path: Path) -> None:
    (tmp_path / "bad").touch()
    places = f"[{tmp_path}/bad, {tmp_path}/good]"
    run_with(tmp_path, f"{{path: {tmp_path}/ckpt, retain: {{last: 2}}, offload: {{to: {places}}}}}")
    for step in range(1, 5):
        make(tmp_path / "ckpt", step)
    assert "bad" in type_it("upkeep", "run", code=1)
    assert names(tmp_path / "good") == ["step-00000004"]
    left = [name for name in names(tmp_path / "ckpt") if name.startswith("step-")]
    assert left == ["step-00000003", "step-00000004"]


def test_two_restores_at_once_do_not_disturb_each_other(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path / "here", 1)
    type_it("offload", "here", "--to", "far")
    partial = tmp_path / "back" / ".restoring-step-00000001"
    partial.mkdir(parents=True)
    fd = os.open(partial, os.O_RDONLY)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX)
        assert "another restore works in" in type_it("restore", "--from", "far", "--to", "back", code=100)
    finally:
        os.close(fd)
    assert "is here and whole" in type_it("restore", "--from", "far", "--to", "back")


def test_a_name_with_a_line_feed_makes_no_line_of_its_own(type_it: Type, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 1)
    checkpoint.rename(tmp_path / "here/step-1\nstep-9 is verified")
    for command in (("list", "here"), ("verify", "here"), ("prune", "here", "--last", "2")):
        assert not [line for line in type_it(*command).splitlines() if line.startswith("step-9")]


@pytest.mark.fault("A bit flips in a copy of a checkpoint", "it is not restored; the next copy is taken")
def test_a_damaged_copy_is_passed_over_for_the_next_one(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path / "here", 1)
    type_it("offload", "here", "--to", "near", "--to", "far")
    (tmp_path / "near/step-00000001/1.bin").write_bytes(b"x" * 5000)
    shown = type_it("restore", "here", "--from", "near", "--from", "far", "--to", "back")
    assert "1.bin is not what its manifest says" in shown and "is here and whole, as in" in shown and "far" in shown
    assert names(tmp_path / "back") == ["step-00000001"]


def test_a_place_that_cannot_be_seen_is_not_a_place_without_copies(type_it: Type, tmp_path: Path) -> None:
    make(tmp_path / "here", 1)
    (tmp_path / "far").touch()
    assert "could not be seen: Not a directory" in type_it("restore", "here", "--from", "far", code=3)
    assert "there is no whole copy in" in type_it("restore", "here", "--from", "nothing", code=66)


def test_a_place_for_copies_that_depends_on_the_working_directory_is_refused(type_it: Type, tmp_path: Path) -> None:
    settings = "name: tr11\nscheduler: local\nlaunch: {command: sleep 1}\ncheckpoints: {offload: {to: far}}\n"
    (tmp_path / "ftsupervise.yaml").write_text(settings)
    done = CliRunner().invoke(ftsupervise, ["config", "check"])
    assert "is no absolute path" in f"{done.output}{done.exception}"


@pytest.mark.parametrize("rate", ["0", "fast", "-1MB"])
def test_a_rate_that_makes_no_sense_is_refused(rate: str, type_it: Type, tmp_path: Path) -> None:
    make(tmp_path / "here", 1)
    type_it("offload", "here", "--to", "far", "--rate", rate, code=2)


# ------------------------------------------------------------------------------------------------------ killed at any moment

PRUNE = """
import sys
from pathlib import Path
from ftsupervise.checkpoints.find import checkpoints_in
from ftsupervise.checkpoints.retain import Candidate, Retention, plan, remove, sweep
folder = Path(sys.argv[1])
found = [Candidate(one.path.name, one.step, one.at.timestamp(), 1, True) for one in checkpoints_in(folder)]
print("ready", flush=True)
sys.stdin.readline()
remove(folder, [one.name for one in plan(found, Retention(last=3)).remove])
sweep(folder, rate=2000)
print("done", flush=True)
"""


def kill_while_removing(tmp_path: Path, rounds: int, seed: int) -> int:
    chance = random.Random(seed)
    step, hit = 0, 0
    while rounds:
        rounds -= 1
        for _ in range(3):
            step += 1
            make(tmp_path, step, files=40)
        command = [sys.executable, "-c", PRUNE, str(tmp_path)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("\n")
            child.stdin.flush()
            time.sleep(chance.random() * 0.08)
            child.send_signal(signal.SIGKILL)
            hit += "done" not in child.stdout.read()
        best = newest(tmp_path, Scope(Thoroughness.FULL))
        assert best is not None and best.step == step, "the newest one is there and whole"
        whole = [one for one in names(tmp_path) if one.startswith("step-")]
        assert all(verify(tmp_path / one, Scope(Thoroughness.FULL)).good for one in whole), "no half of one is left"
    sweep(tmp_path, rate=1e9)
    assert not [one for one in names(tmp_path) if one.startswith(REMOVING)]
    return hit


@pytest.mark.fault(
    "A crash in the middle of removing old checkpoints",
    "no half of one is left under its name; the rest is deleted the next time",
)
def test_removing_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    assert kill_while_removing(tmp_path, 6, seed=1) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_removing_may_be_killed_at_500_moments(tmp_path: Path) -> None:
    assert kill_while_removing(tmp_path, 500, seed=2) > 250


@pytest.mark.threat(
    "Somebody lays a link in the place of a checkpoint that is being removed.",
    "The link is removed and not followed.",
)
def test_a_link_in_the_place_of_a_checkpoint_is_removed_and_not_followed(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine/thesis.txt").write_text("all of it")
    (tmp_path / "ckpt").mkdir()
    (tmp_path / f"ckpt/{REMOVING}step-1").symlink_to(tmp_path / "mine")
    sweep(tmp_path / "ckpt")
    assert names(tmp_path / "ckpt") == []
    assert (tmp_path / "mine/thesis.txt").read_text() == "all of it"
