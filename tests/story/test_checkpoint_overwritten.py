"""Programs that save again under the same name: what they have written since its manifest is not damaged, and what they write
over is kept until the next one is committed."""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftsupervise import Guard
from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.find import choose, newest
from ftsupervise.checkpoints.manifest import manifest_of, read_manifest
from ftsupervise.checkpoints.retain import remove, sweep
from ftsupervise.checkpoints.verify import CheckpointState as State
from ftsupervise.checkpoints.verify import Scope, Thoroughness, verify
from ftsupervise.cli import ftsupervise
from tests.story.test_checkpoint_layouts import archive, deepspeed, megatron

QUICK = Scope(Thoroughness.QUICK)


def run_in(folder: Path) -> Path:
    root = folder / "run"
    (root / "switches").mkdir(parents=True)
    settings = "name: r\nscheduler: local\nlaunch: {command: 'true'}\ncheckpoints: {adopt: true}\n"
    (root / "run.yaml").write_text(f"{settings}run_dir: {root}\n")
    (root / "checkpoints").mkdir()
    return root


def upkeep(root: Path) -> str:
    done = CliRunner().invoke(ftsupervise, ["checkpoints", "upkeep", str(root)])
    assert done.exception is None, f"{done.output}\n{done.exception!r}"
    return done.output


@pytest.mark.resume(
    "a program has saved `last.ckpt` or `ckpt.pt` again, in its place or by a rename",
    "the new one: it counts by its own sign, and its archive's checksums",
    "`checkpoints verify` calls it complete, `upkeep` adopts it again",
)
@pytest.mark.resume(
    "the only file, `ckpt.pt`, was torn while it was written over",
    "`previous-ckpt.pt`, the one that was adopted before",
    '"ckpt.pt is torn: ... is cut short"; it is passed over',
)
@pytest.mark.parametrize("name", ["last.ckpt", "ckpt.pt"])
@pytest.mark.parametrize("in_place", [True, False], ids=["in its place", "by a rename"])
def test_one_file_that_is_written_over_is_good_again_and_a_torn_one_goes_back_to_the_one_before(
    tmp_path: Path, name: str, in_place: bool
) -> None:
    root = run_in(tmp_path)
    one = root / "checkpoints" / name

    def save(turn: int) -> bytes:
        archive(one if in_place else one.with_name("new.tmp"))
        if not in_place:
            one.with_name("new.tmp").replace(one)
        os.utime(one, ns=(one.stat().st_mtime_ns + 10**8 * turn,) * 2)
        return one.read_bytes()

    save(0)
    CliRunner().invoke(ftsupervise, ["checkpoints", "commit", str(one)])
    for turn in (1, 2, 3):
        raw = save(turn)
        found = newest(root / "checkpoints", QUICK)
        assert found is not None and (found.path, found.state) == (one, State.COMPLETE), "not yet verified, not damaged"
        upkeep(root)
        assert verify(one, QUICK).state is State.VERIFIED
    one.write_bytes(raw[: len(raw) // 2])
    torn = choose(root / "checkpoints", QUICK)
    assert torn.verdict is not None and torn.verdict.path.read_bytes() == raw
    assert (torn.verdict.path.name, torn.verdict.state) == (f"previous-{name}", State.VERIFIED)
    upkeep(root)
    assert torn.verdict.path.read_bytes() == raw, "a torn one takes no place"


@pytest.mark.resume(
    "a bit flipped while a single file was saved again",
    "the one before",
    '"is damaged: ... is not whole: Bad CRC-32"',
)
def test_a_bit_that_was_flipped_while_it_was_written_again_is_found_by_the_checksums_of_its_archive(
    tmp_path: Path,
) -> None:
    one = tmp_path / "last.ckpt"
    archive(one)
    commit(one)
    archive(one)
    whole, wrong = one.read_bytes(), 0
    at = whole.index(b"archive/data/0") + 14
    for seed in range(50):
        raw = bytearray(whole)
        raw[at + random.Random(seed).randrange(5000)] ^= 1 << seed % 8
        one.write_bytes(raw)
        wrong += not verify(one, QUICK).good
    assert wrong == 50
    one.write_bytes(whole)
    assert verify(one, QUICK).good


@pytest.mark.resume(
    "Megatron or DeepSpeed has saved the same iteration again",
    "that iteration, by its own sign",
    "`upkeep` adopts it again",
)
@pytest.mark.parametrize("write, name", [(deepspeed, "global_step100"), (megatron, "iter_0000100")])
def test_a_folder_that_its_program_saves_again_counts_by_its_own_sign_and_is_adopted_again(
    tmp_path: Path, write: object, name: str
) -> None:
    assert callable(write)
    root = run_in(tmp_path)
    one = write(root / "checkpoints" / name)
    upkeep(root)
    assert verify(one).state is State.VERIFIED
    before = read_manifest(one)
    write(one)
    found = newest(root / "checkpoints", QUICK)
    assert found is not None and (found.path, found.state) == (one, State.COMPLETE)
    upkeep(root)
    assert verify(one, QUICK).state is State.VERIFIED and read_manifest(one) != before


@pytest.mark.resume(
    "only some ranks of an adopted checkpoint have saved again",
    "the one before",
    'it "is damaged: ... has other bytes than were committed"',
)
def test_a_folder_of_which_only_a_part_was_written_again_is_no_good_by_any_sign(tmp_path: Path) -> None:
    one = megatron(tmp_path / "iter_0000100")
    commit(one)
    archive(one / "mp_rank_00" / "model_optim_rng.pt")
    assert verify(one, QUICK).state is State.DAMAGED, "one rank has the new state and the other the old one"


def test_a_copy_with_new_times_is_still_what_its_manifest_says(tmp_path: Path) -> None:
    one = megatron(tmp_path / "iter_0000100")
    commit(one)
    for path in one.rglob("*.pt"):
        os.utime(path)
    assert verify(one, QUICK).state is State.VERIFIED


@pytest.mark.resume(
    "A copy of an adopted checkpoint (`cp -r`: all its files are new) lacks a file, or a bit of it flips",
    "the one before",
    "…is missing; … has other bytes than were committed",
)
@pytest.mark.parametrize("write, name", [(deepspeed, "global_step100"), (megatron, "iter_0000100")])
@pytest.mark.parametrize("harm", ["flipped", "missing"])
def test_a_copy_with_new_times_that_is_harmed_is_no_good(tmp_path: Path, write: object, name: str, harm: str) -> None:
    assert callable(write)
    one = write(tmp_path / name)
    assert len(list(one.rglob("*.pt"))) > 1
    commit(one)
    for path in one.rglob("*"):
        os.utime(path)
    victim = max(one.rglob("*.pt"), key=lambda path: path.stat().st_size)
    if harm == "missing":
        victim.unlink()
        assert verify(one).state is State.MISSING
    else:
        raw = bytearray(victim.read_bytes())
        raw[len(raw) // 2] ^= 1
        victim.write_bytes(raw)
    assert not verify(one, QUICK).good


@pytest.mark.resume(
    "a checkpoint of one file was pruned, and one of the same name is saved later",
    "the later one, judged by itself: the manifest went with the first",
    "nothing",
)
@pytest.mark.parametrize("by", ["prune", "the loop"])
def test_the_manifest_of_one_file_goes_with_it(tmp_path: Path, by: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path))
    one = tmp_path / "epoch=1-step=5.ckpt"
    archive(one)
    commit(one)
    page = manifest_of(one)
    if by == "prune":
        remove(tmp_path, [one.name])
        sweep(tmp_path)
    else:
        with Guard(signals=(), rank=0, world=1) as guard:
            guard.remove(one)
    assert not one.exists() and not page.exists()
    assert not [path.name for path in tmp_path.iterdir() if path.name.startswith(".removing")]
