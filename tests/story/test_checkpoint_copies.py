"""Copies of checkpoints in a second folder and in an object store: resumable, verified there, and brought back whole."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path

import pytest
from click.testing import CliRunner

from ftsupervise.checkpoints import digest
from ftsupervise.checkpoints.commit import commit
from ftsupervise.checkpoints.manifest import FOLDER_NAME, FileEntry, Manifest, encoded, read_manifest, write_manifest
from ftsupervise.checkpoints.offload import CopyDamaged, copies_of, offload
from ftsupervise.checkpoints.quarantine import quarantined
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import FolderStore, Rights, Store, inside, open_store
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, verify
from ftsupervise.cli import ftsupervise
from ftsupervise.errors import NotFound, NotPermitted, UsageError
from ftsupervise.host.ownership import Reach
from tests.neighbours.s3 import s3_server
from tests.neighbours.stranger import STRANGER

NOW = datetime(2026, 11, 23, 4, 0, tzinfo=timezone.utc)


def now() -> datetime:
    return NOW


def make(folder: Path, step: int, *, seed: int = 0, files: int = 5, size: int = 40_000) -> Path:
    """A committed checkpoint of random bytes, one file in a folder of its own and one empty."""
    checkpoint = folder / f"step-{step:08d}"
    (checkpoint / "shards").mkdir(parents=True)
    source = random.Random(f"{seed}-{step}")
    entries = []
    for number in range(files):
        name = f"shards/{number}.bin" if number % 2 else f"{number}.bin"
        data = source.randbytes(size if number else 0)
        (checkpoint / name).write_bytes(data)
        hasher = digest.hasher("xxh3_128")
        hasher.update(data)
        entries.append(FileEntry(name, len(data), hasher.hexdigest()))
    manifest = Manifest(step, tuple(sorted(entries)), "xxh3_128", at=NOW)
    write_manifest(checkpoint, manifest)
    return checkpoint


def content(checkpoint: Path) -> dict[str, bytes]:
    return {
        path.relative_to(checkpoint).as_posix(): path.read_bytes()
        for path in checkpoint.rglob("*")
        if path.is_file() and FOLDER_NAME not in path.parts
    }


@pytest.fixture(scope="module")
def bucket() -> Iterator[str]:
    with s3_server() as server:
        yield server.url


@pytest.fixture(params=["folder", "memory"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return open_store(f"{tmp_path}/far" if request.param == "folder" else f"memory://{tmp_path.name}/far")


@pytest.fixture(params=["folder", "file", "memory", "s3"])
def any_store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    if request.param == "s3":
        return open_store(f"{request.getfixturevalue('bucket')}/{tmp_path.name}")
    places = {"folder": f"{tmp_path}/far", "file": f"file://{tmp_path}/far", "memory": f"memory://{tmp_path.name}/far"}
    return open_store(places[request.param])


def test_a_checkpoint_is_copied_and_comes_back_bit_for_bit(any_store: Store, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 100)
    heard: list[int] = []
    report = offload(checkpoint, any_store, now=now, progress=heard.append)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    assert (report.sent, report.there) == (manifest.size, 0)
    assert sum(heard) == 2 * manifest.size
    (copy,), unseen = copies_in([any_store])
    assert not unseen
    assert copy.manifest == manifest
    passing = any_store.url.startswith("memory:")  # it ends with this process
    assert [one.at for one in copies_of(checkpoint, manifest)] == ([] if passing else [NOW])
    back = restore(copy, tmp_path / "elsewhere", now=now)
    assert content(back) == content(checkpoint)
    assert read_manifest(back) == manifest
    assert sorted(os.listdir(back.parent)) == ["step-00000100"]
    assert verify(back, Scope(Thoroughness.FULL)).state is CheckpointState.VERIFIED


def test_the_commands_copy_into_an_object_store_and_back(bucket: str, tmp_path: Path) -> None:
    """Each does its work in a child, which opens the store anew."""
    checkpoint, there = make(tmp_path / "here", 100), f"{bucket}/commands"
    for words in (
        ("offload", str(checkpoint), "--to", there, "--to", f"{tmp_path}/far"),
        ("restore", "--from", there, "--from", f"{tmp_path}/far", "--to", f"{tmp_path}/back"),
    ):
        done = CliRunner().invoke(ftsupervise, ["checkpoints", *words])
        assert done.exit_code == 0 and f"{there}/{checkpoint.name}" in done.output, f"{done.output}{done.exception!r}"
    assert content(tmp_path / "back" / checkpoint.name) == content(checkpoint)


def test_a_checkpoint_that_is_one_file_and_one_with_links_come_back_as_they_were(store: Store, tmp_path: Path) -> None:
    here = tmp_path / "here"
    linked = here / "step-7"
    linked.mkdir(parents=True)
    (linked / "weights.bin").write_bytes(b"w" * 1000)
    (linked / "newest.bin").symlink_to("weights.bin")
    one = here / "epoch=1.ckpt"
    one.write_bytes(b"c" * 2000)
    for checkpoint in (linked, one):
        commit(checkpoint)
        offload(checkpoint, store, now=now)
    copies, _ = copies_in([store])
    back = [restore(copy, tmp_path / "back", now=now) for copy in copies]
    assert {verify(path, Scope(Thoroughness.FULL)).state for path in back} == {CheckpointState.VERIFIED}
    assert (tmp_path / "back/step-7/newest.bin").readlink() == Path("weights.bin")
    assert (tmp_path / "back/epoch=1.ckpt").read_bytes() == b"c" * 2000
    assert sorted(os.listdir(tmp_path / "back")) == [FOLDER_NAME, "epoch=1.ckpt", "step-7"]


def test_a_copy_that_is_there_is_not_sent_again(store: Store, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 100)
    first = offload(checkpoint, store, now=now)
    again = offload(checkpoint, store, now=now)
    assert (again.sent, again.there) == (0, first.sent)


def test_an_interrupted_copy_is_not_a_copy_and_goes_on_where_it_was(any_store: Store, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 100, files=8)
    manifest = read_manifest(checkpoint)
    assert manifest is not None

    def stop_after_half(size: int) -> None:
        heard.append(size)
        if sum(heard) > manifest.size:
            raise KeyboardInterrupt

    heard: list[int] = []
    with pytest.raises(KeyboardInterrupt):
        offload(checkpoint, any_store, now=now, workers=1, progress=stop_after_half)
    assert copies_in([any_store])[0] == ()
    assert copies_of(checkpoint, manifest) == ()
    report = offload(checkpoint, any_store, now=now)
    assert 0 < report.there < manifest.size
    assert [copy.manifest for copy in copies_in([any_store])[0]] == [manifest]


def test_a_file_that_was_changed_at_the_far_end_is_sent_again_before_the_copy_counts(
    store: Store, tmp_path: Path
) -> None:
    checkpoint = make(tmp_path / "here", 100)
    manifest = read_manifest(checkpoint)
    assert manifest is not None
    entry = manifest.files[-1]
    store.write(f"{checkpoint.name}/{entry.path}", [b"x" * entry.size], Rights(Reach(0o644), Reach(0o755)))
    offload(checkpoint, store, now=now)
    (copy,), _ = copies_in([store])
    assert content(restore(copy, tmp_path / "back", now=now)) == content(checkpoint)


@pytest.mark.fault("A bit flips in a checkpoint before it is copied", "it is not copied, and the file is named")
def test_a_checkpoint_that_is_damaged_here_is_not_copied(any_store: Store, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 100)
    damaged = bytearray((checkpoint / "2.bin").read_bytes())
    damaged[17] ^= 4
    (checkpoint / "2.bin").write_bytes(damaged)
    with pytest.raises(CopyDamaged, match=r"2\.bin is not what was committed"):
        offload(checkpoint, any_store, now=now)
    assert copies_in([any_store])[0] == ()
    assert f"{checkpoint.name}/2.bin" not in any_store.sizes("")


@pytest.mark.threat(
    "A file of a checkpoint, or of a copy, has grown without an end (a sparse one takes no room).",
    "No more of it is copied, or brought back, than its manifest says.",
)
def test_a_file_that_grew_without_an_end_fills_no_disk_where_it_is_copied_or_brought_back(tmp_path: Path) -> None:
    """A sparse file takes no room where it lies. All of it would be written where it is copied to."""
    checkpoint, far, grown = make(tmp_path / "here", 100), FolderStore(tmp_path / "far"), 300_000_000
    os.truncate(checkpoint / "2.bin", grown)
    moved = list[int]()
    with pytest.raises(CopyDamaged, match=r"2\.bin is not what was committed"):
        offload(checkpoint, far, now=now, progress=moved.append)
    whole = make(tmp_path / "there", 200)
    offload(whole, far, now=now)
    os.truncate(tmp_path / "far" / whole.name / "2.bin", grown)
    for copy in copies_in([far])[0]:
        with pytest.raises(CopyDamaged, match=r"2\.bin"):
            restore(copy, tmp_path / "back", now=now, progress=moved.append)
    assert sum(moved) < grown / 10


def test_a_bit_that_flips_at_the_far_end_is_found_when_it_is_restored(store: Store, tmp_path: Path) -> None:
    checkpoint = make(tmp_path / "here", 100)
    offload(checkpoint, store, now=now)
    data = bytearray(b"".join(store.read("step-00000100/shards/1.bin")))
    data[-1] ^= 1
    store.write("step-00000100/shards/1.bin", [bytes(data)], Rights(Reach(0o644), Reach(0o755)))
    (copy,), _ = copies_in([store])
    with pytest.raises(CopyDamaged, match=r"shards/1\.bin"):
        restore(copy, tmp_path / "back", now=now)
    assert not (tmp_path / "back" / "step-00000100").exists()


def test_another_checkpoint_of_the_same_name_takes_nothing_from_the_copy_of_the_first(
    store: Store, tmp_path: Path
) -> None:
    first, second = make(tmp_path / "one", 100, seed=1), make(tmp_path / "two", 100, seed=2)
    assert offload(first, store, now=now).folder == "step-00000100"
    assert offload(second, store, now=now).folder == "step-00000100~2"
    assert offload(first, store, now=now).sent == 0
    copies, _ = copies_in([store])
    assert {copy.name for copy in copies} == {"step-00000100"}
    for copy, original in zip(sorted(copies, key=lambda one: one.folder), (first, second), strict=True):
        assert content(restore(copy, tmp_path / copy.folder, now=now)) == content(original)


def test_a_damaged_checkpoint_here_is_set_aside_and_not_deleted(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "far")
    checkpoint = make(tmp_path / "here", 100)
    before = content(checkpoint)
    offload(checkpoint, store, now=now)
    (checkpoint / "2.bin").write_bytes(b"short")
    (copy,), _ = copies_in([store])
    assert restore(copy, tmp_path / "here", now=now) == checkpoint
    assert content(checkpoint) == before
    (aside,) = quarantined(tmp_path / "here")
    assert aside.name == "step-00000100" and "restored in its place" in aside.reason
    assert aside.path is not None and (aside.path / "2.bin").read_bytes() == b"short"


def test_a_checkpoint_that_is_whole_here_is_left_as_it_is(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "far")
    checkpoint = make(tmp_path / "here", 100)
    offload(checkpoint, store, now=now)
    inode = checkpoint.stat().st_ino
    (copy,), _ = copies_in([store])
    assert restore(copy, tmp_path / "here", now=now).stat().st_ino == inode


def test_the_newest_of_several_places_comes_first_and_a_place_that_is_away_is_named(tmp_path: Path) -> None:
    near, far = FolderStore(tmp_path / "near"), FolderStore(tmp_path / "far")
    offload(make(tmp_path / "here", 100), near, now=now)
    newest = make(tmp_path / "here", 200)
    for store in (far, near):
        offload(newest, store, now=now)
    (tmp_path / "file").touch()
    away = FolderStore(tmp_path / "file")
    copies, unseen = copies_in([away, near, far])
    assert [(copy.manifest.step, copy.store) for copy in copies] == [(200, near), (200, far), (100, near)]
    assert [(one.where, one.why) for one in unseen] == [(str(away.root), "Not a directory")]


@pytest.mark.threat(
    "The manifest of a copy names files outside of the checkpoint (`../../x`).",
    "The manifest is refused, and no file is written.",
)
@pytest.mark.parametrize("name", ["../../x", "/etc/passwd", "a/../../b", "", "a//b", "./a", "a\0b"])
def test_a_manifest_that_leads_out_of_the_checkpoint_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no path of a file inside a checkpoint"):
        inside(name)
    store = FolderStore(tmp_path / "far")
    (tmp_path / "far/step-1" / FOLDER_NAME).mkdir(parents=True)
    write_manifest(tmp_path / "far/step-1", Manifest(1, (FileEntry(name, 1, "00"),), "crc32"))
    copies, unseen = copies_in([store])
    assert copies == ()
    assert "step-1" in unseen[0].where


@pytest.mark.threat(
    "Somebody else may write the folder of copies that a checkpoint is restored from.",
    "The copy is not trusted, and nothing of it is restored.",
)
@pytest.mark.root
def test_a_copy_that_somebody_else_could_have_changed_is_not_restored(tmp_path: Path) -> None:
    store = FolderStore(tmp_path / "far")
    offload(make(tmp_path / "here", 100), store, now=now)
    os.chown(tmp_path / "far/step-00000100/2.bin", STRANGER, STRANGER)
    (copy,), _ = copies_in([store])
    with pytest.raises(NotPermitted, match="is not trusted"):
        restore(copy, tmp_path / "back", now=now)


@pytest.mark.threat(
    "Who may write the bucket of your copies makes a manifest of theirs say that a file lies below a link, which leads into a "
    "private folder of yours: what you bring back would be written there, as `.bashrc`.",
    "Links are made last, and none that leads out of the checkpoint.",
)
@pytest.mark.parametrize("below", ["link/bashrc", "bashrc"])
def test_nothing_is_brought_back_through_a_link_of_the_manifest(bucket: str, tmp_path: Path, below: str) -> None:
    (private := tmp_path / "private").mkdir()
    store, target = open_store(f"{bucket}/{tmp_path.name}-{len(below)}"), os.fsencode(private)

    def entry(path: str, data: bytes, *, link: bool = False) -> FileEntry:
        hasher = digest.hasher("xxh3_128")
        hasher.update(data)
        store.write(f"step-1/{path}", [data], Rights(Reach(0o600), Reach(0o700)))
        return FileEntry(path, len(data), hasher.hexdigest(), link)

    said = Manifest(1, (entry("link", target, link=True), entry(below, b"theirs")), "xxh3_128", at=NOW)
    store.write("step-1/.ftsupervise/manifest.json", [encoded(said)], Rights(Reach(0o600), Reach(0o700)))
    (copy,), _ = copies_in([store])
    with pytest.raises((CopyDamaged, OSError)):
        restore(copy, tmp_path / "back", now=now, workers=1)
    assert not list(private.iterdir()) and not (tmp_path / "back" / "step-1").exists()


def test_a_checkpoint_without_a_manifest_is_not_copied(tmp_path: Path) -> None:
    (tmp_path / "step-1").mkdir()
    with pytest.raises(NotFound, match="has no manifest"):
        offload(tmp_path / "step-1", FolderStore(tmp_path / "far"), now=now)


def test_an_address_that_is_none_is_refused_with_an_example() -> None:
    with pytest.raises(UsageError, match="s3"):
        open_store("gopher://x/y")


# ------------------------------------------------------------------------------------------------------ killed at any moment

COPY = """
import sys
from datetime import datetime, timezone
from pathlib import Path
from ftsupervise.checkpoints.offload import offload
from ftsupervise.checkpoints.restore import copies_in, restore
from ftsupervise.checkpoints.stores import open_store
now = lambda: datetime.now(timezone.utc)
here, far, back = sys.argv[1:]
store = open_store(far)
print("ready", flush=True)
sys.stdin.readline()
offload(Path(here), store, now=now, workers=2)
(copy,), _ = copies_in([store])
restore(copy, Path(back), now=now, workers=2)
print("done", flush=True)
"""


def kill_at_random_moments(tmp_path: Path, rounds: int, seed: int) -> int:
    """Kill copying and restoring ``rounds`` times; after each, what counts as whole is whole. How many were hit."""
    chance = random.Random(seed)
    checkpoint = make(tmp_path / "here", 100, files=30, size=200_000)
    expected = content(checkpoint)
    store, back = FolderStore(tmp_path / "far"), tmp_path / "back"
    hit, takes = 0, 0.0  # seconds that an undisturbed one takes here
    for number in range(rounds + 1):
        command = [sys.executable, "-c", COPY, str(checkpoint), str(store.root), str(back)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
            assert child.stdin is not None and child.stdout is not None
            assert child.stdout.readline() == "ready\n"
            child.stdin.write("\n")
            child.stdin.flush()
            if number == 0:
                began = time.monotonic()
                assert child.stdout.readline() == "done\n"
                takes = time.monotonic() - began
            else:
                time.sleep(chance.random() * takes)
            child.send_signal(signal.SIGKILL)
            hit += number > 0 and "done" not in child.stdout.read()
        for copy in copies_in([store])[0]:
            for entry in copy.manifest.files:
                hasher = digest.hasher(copy.manifest.algorithm)
                hasher.update(b"".join(store.read(f"{copy.folder}/{entry.path}")))
                assert hasher.hexdigest() == entry.digest
        if (back / checkpoint.name).exists():
            assert content(back / checkpoint.name) == expected
        if (number == 0 or chance.random() < 0.7) and back.exists():
            for path in sorted(back.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
        if (number == 0 or chance.random() < 0.6) and store.root.exists():
            for path in sorted(store.root.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
    offload(checkpoint, store, now=now)
    (copy,), _ = copies_in([store])
    restore(copy, back, now=now)
    assert content(back / checkpoint.name) == expected
    leftovers = [path for top in (store.root, back) for path in top.rglob(".*") if path.name != FOLDER_NAME]
    assert leftovers == []
    return hit


@pytest.mark.fault(
    "A crash in the middle of copying a checkpoint elsewhere, or of bringing it back",
    "what counts as a copy is whole, and the next call goes on where it was",
)
def test_copying_and_restoring_may_be_killed_at_any_moment(tmp_path: Path) -> None:
    assert kill_at_random_moments(tmp_path, 12, seed=1) > 0


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_copying_and_restoring_may_be_killed_at_500_moments(tmp_path: Path) -> None:
    assert kill_at_random_moments(tmp_path, 500, seed=2) > 100
