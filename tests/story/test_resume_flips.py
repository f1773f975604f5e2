"""Ten thousand flipped bits over all layouts of a checkpoint, and over snapshots: never does a state come back that was not
saved, and never is the one named whose byte has changed.

A bit changes in two ways: it rots where it lies, and the times of its file say nothing; or somebody writes, and the file is
newer than its manifest.
"""

from __future__ import annotations

import io
import os
import random
import shutil
import threading
import zipfile
from collections.abc import Callable, Iterator
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

import numpy
import pytest

from ftsupervise import Guard
from ftsupervise.checkpoints.commit import commit
from ftsupervise.model import Cause, CauseKind, Claim
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.rundir import fence, ledger
from ftsupervise.rundir.lineage import keep_lineage
from ftsupervise.rundir.paths import ENV_ATTEMPT, ENV_ATTEMPT_DIR, ENV_CHECKPOINT_DIR, ENV_GUARD, ENV_RUN_DIR, RunDir
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.snapshots import kept as snapshots_kept
from ftsupervise.snapshots import room
from ftsupervise.snapshots.keeper import KeptSnapshots, SnapshotKeeper, Target
from ftsupervise.snapshots.room import SnapshotPlace
from ftsupervise.snapshots.slots import PAGE, SnapshotId, open_slots, pack_header
from tests.neighbours.patience import wait_until
from tests.story.test_checkpoint_layouts import dcp_of_items, hugging_face, safetensors
from tests.story.test_checkpoint_torn_saves import deepspeed, megatron

SHORT, LONG = 25, 910  # flips for each layout; the long ones are of a seed that nobody chose
Begins = Callable[[], "int | None"]  # the step that a loop begins from; it fails where the state is none that was saved


class Scene(NamedTuple):
    """Two states that were saved, and how a loop begins. ``places``: where the newer one lies, as file, begin and end."""

    begins: Begins
    places: list[tuple[Path, int, int]]
    older: int  # the step that is right once the newer one is damaged
    newer: int
    vague: Path | None = None  # a file with bits that belong to nothing that is loaded


def drawn(name: str, flips: int) -> random.Random:
    """The same flips each time for the short ones; for the long ones others, whose seed is printed."""
    seed = name if flips == SHORT else f"{name} {random.SystemRandom().randrange(10**9)}"
    print(f"{flips} flips of seed {seed!r}")
    return random.Random(seed)


def flip(draw: random.Random, scene: Scene) -> Path:
    """Change one bit of the newer one. Half of them rot: the times of the file stay as they were."""
    path, begin, end = draw.choice(scene.places)
    before, at = path.stat(), draw.randrange(begin, end)
    with path.open("r+b") as file:
        file.seek(at)
        byte = file.read(1)[0]
        file.seek(at)
        file.write(bytes([byte ^ 1 << draw.randrange(8)]))
    if draw.random() < 0.5:
        os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    return path


def play(scene: Scene, flips: int, draw: random.Random) -> None:
    """Flip one bit after another, and begin each time."""
    whole = {path: (path.read_bytes(), path.stat()) for path, _, _ in scene.places}
    for _ in range(flips):
        path = flip(draw, scene)
        found = scene.begins()
        assert found == scene.older or (found == scene.newer and path == scene.vague), path
        path.write_bytes(whole[path][0])
        os.utime(path, ns=(whole[path][1].st_atime_ns, whole[path][1].st_mtime_ns))
    assert scene.begins() == scene.newer, "as it was"


def of_folder(newer: Path) -> list[tuple[Path, int, int]]:
    return [
        (path, 0, path.stat().st_size) for path in sorted(newer.rglob("*")) if path.is_file() and path.stat().st_size
    ]


# ----------------------------------------------------------------------------------------------------- on the disk


def saved_by_the_guard(folder: Path, names: tuple[str, ...], draw: random.Random) -> Scene:
    """``names``: the files of ``guard.checkpoint``; () for ``guard.save``."""
    if names == ("large",):
        return saved_in_blocks(folder, draw)
    state: dict[str, Any] = {"weights": bytearray(3000), "step": 0}
    saved = {}
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state=state)
        for step in (1, 2):
            state.update(weights=bytearray(draw.randbytes(3000)), step=step)
            saved[step] = bytes(state["weights"])
            if not names:
                guard.save(step)
                continue
            with guard.checkpoint(step) as staged:
                for name in names:
                    (staged / name).parent.mkdir(exist_ok=True)
                    (staged / name).write_bytes(draw.randbytes(2000))

    def begins() -> int | None:
        if names:
            return named()
        loaded: dict[str, Any] = {"weights": bytearray(3000), "step": 0}
        with Guard(signals=(), rank=0, world=1) as guard:
            step = guard.restore(state=loaded)
        assert step is not None and loaded == {"weights": bytearray(saved[step]), "step": step}
        return step

    return Scene(begins, of_folder(folder / "step-00000002"), 1, 2)


def saved_in_blocks(folder: Path, draw: random.Random) -> Scene:
    """``guard.save`` of arrays that are copied as their blocks are compared, and of one that is used where it is mapped."""

    def made(seed: int) -> dict[str, Any]:
        of = numpy.random.default_rng(seed)
        return {
            "first": of.random(200_000),
            "raw": bytearray(of.bytes(1 << 20)),
            "last": of.random(150_000),
            "step": seed,
        }

    state = made(0)
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(state=state)
        for step in (1, 2):
            state.update(made(step))
            guard.save(step)
    right = {step: made(step) for step in (1, 2)}
    loaded = made(0)

    def begins() -> int | None:
        for value in (loaded["first"], loaded["last"]):
            value[:] = 0
        with Guard(signals=(), rank=0, world=1) as guard:
            step = guard.restore(state=loaded)
        assert step is not None and all(numpy.array_equal(loaded[key], one) for key, one in right[step].items())
        return step

    newer = folder / "step-00000002"
    return Scene(begins, [one for one in of_folder(newer) if one[0].suffix != ".blocks"], 1, 2)


def named() -> int | None:
    """The step that the hooks of Lightning, Hugging Face and DCP give to their loader, and a loop to its own."""
    with Guard(signals=(), rank=0, world=1) as guard:
        found = guard.latest()
    return None if found is None else int("".join(filter(str.isdigit, found.name)))


SIZES = {"tensor_model_parallel_size": 2, "pipeline_model_parallel_size": 2}
ADOPTED: dict[str, Callable[[Path, int], Path]] = {
    "DCP": lambda folder, step: dcp_of_items(folder / f"step_{step}"),
    "Hugging Face": lambda folder, step: hugging_face(folder / f"checkpoint-{step}"),
    "DeepSpeed": lambda folder, step: tracked(folder, deepspeed(folder, step, 2, world=2)),
    "Megatron": lambda folder, step: megatron(folder, step, ["00_000", "00_001", "01_000", "01_001"], **SIZES),
}


def tracked(folder: Path, one: Path) -> Path:
    (folder / "latest").write_text(one.name)
    return one


def adopted(folder: Path, layout: str) -> Scene:
    """Two checkpoints that their program has saved in its own way, and that were adopted since."""
    folder.mkdir()
    older, newer = (ADOPTED[layout](folder, step) for step in (1, 2))
    commit(older)
    commit(newer)
    return Scene(named, of_folder(newer), 1, 2)


def one_file(folder: Path, draw: random.Random, name: str) -> Scene:
    """Lightning's file, or the weights alone; both were adopted. Where its program might have written it again, the checksums
    in it speak: a bit that belongs to none of its contents may change."""
    folder.mkdir()
    contents = {}
    for step in (1, 2):
        path = folder / name.format(step)
        if path.suffix == ".safetensors":
            safetensors(path, 4000)
        else:
            with zipfile.ZipFile(path, "w") as file:
                for part in ("archive/data.pkl", "archive/data/0"):
                    file.writestr(part, draw.randbytes(2000))
        commit(path)
        contents[step] = content_of(path)
    newer = folder / name.format(2)

    def begins() -> int | None:
        step = named()
        assert step is not None and content_of(folder / name.format(step)) == contents[step]
        return step

    page = folder / ".ftsupervise" / f"{newer.name}.json"
    return Scene(begins, [(one, 0, one.stat().st_size) for one in (newer, page)], 1, 2, newer)


def content_of(path: Path) -> object:
    if path.suffix == ".safetensors":
        return path.read_bytes()
    with zipfile.ZipFile(path) as file:
        return {one.filename: file.read(one) for one in file.infolist()}


@pytest.fixture
def checkpoints(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(ENV_CHECKPOINT_DIR, str(tmp_path / "ckpt"))
    return tmp_path / "ckpt"


short_and_long = pytest.mark.parametrize("flips", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])


@pytest.mark.resume(
    "Any bit of any file of a checkpoint flips, its manifest included, in any layout",
    "the one before, from `guard.restore` and from `guard.latest`",
    "… has other bytes than were committed",
)
@pytest.mark.parametrize(
    "names",
    [
        pytest.param((), id="guard.save"),
        pytest.param(("large",), id="guard.save of several blocks"),
        pytest.param(("weights", "sub/optimizer"), id="guard.checkpoint"),
        pytest.param(("__0_0.distcp", "__1_0.distcp", ".metadata"), id="guard.checkpoint with DCP"),
    ],
)
@short_and_long
def test_no_flipped_bit_of_any_layout_is_loaded(checkpoints: Path, names: tuple[str, ...], flips: int) -> None:
    draw = drawn(str(names), flips)
    play(saved_by_the_guard(checkpoints, names, draw), flips, draw)


@pytest.mark.resume(
    "… of one that DCP, Hugging Face, DeepSpeed or Megatron has saved and that was adopted",
    "the one before",
    "… has other bytes than were committed",
)
@pytest.mark.parametrize("layout", ADOPTED)
@short_and_long
def test_no_flipped_bit_of_a_checkpoint_that_was_adopted_is_named(checkpoints: Path, layout: str, flips: int) -> None:
    play(adopted(checkpoints, layout), flips, drawn(layout, flips))


@pytest.mark.resume(
    "… of a single file of Lightning, or of safetensors",
    "the one before; a bit that belongs to no content may change, where the file may have been written again",
    "… is not whole: Bad CRC-32",
)
@pytest.mark.parametrize("name", ["epoch=0-step={}.ckpt", "step-{}.safetensors"], ids=["Lightning", "safetensors"])
@short_and_long
def test_no_flipped_bit_of_a_single_file_brings_another_state(checkpoints: Path, name: str, flips: int) -> None:
    draw = drawn(name, flips)
    play(one_file(checkpoints, draw, name), flips, draw)


def test_a_length_in_the_directory_of_an_archive_that_takes_in_the_record_behind_it_is_damage(
    checkpoints: Path,
) -> None:
    """The directory has no checksum: a bit in the length of a comment hides the record behind it, and all others are whole."""
    scene = one_file(checkpoints, random.Random("a comment"), "epoch=0-step={}.ckpt")
    assert scene.vague is not None
    raw = bytearray(scene.vague.read_bytes())
    first = raw.index(b"PK\x01\x02")
    raw[first + 32] = raw.index(b"PK\x05\x06") - raw.index(b"PK\x01\x02", first + 1)
    scene.vague.write_bytes(raw)
    assert list(content_of(scene.vague)) == ["archive/data.pkl"]  # type: ignore[call-overload]
    assert scene.begins() == scene.older


@pytest.mark.resume(
    "… of one whose blocks are copied into the tensors of a model and its optimizer as they are compared",
    "the one before, all of it, over that",
    "… has other bytes than were committed",
)
@pytest.mark.torch
@short_and_long
def test_no_flipped_bit_of_a_model_and_its_optimizer_is_loaded(checkpoints: Path, flips: int) -> None:
    """What is copied into the tensors of the loop as its blocks are compared: all of the one before is loaded over it, also
    where the loop's own optimizer has made no step yet."""
    torch = pytest.importorskip("torch", reason="torch is not installed: make test-torch")

    def made(seed: int, *, step: bool = True) -> dict[str, Any]:
        torch.manual_seed(seed)
        model = torch.nn.Sequential(torch.nn.Linear(400, 700), torch.nn.BatchNorm1d(700), torch.nn.Linear(700, 400))
        optimizer = torch.optim.AdamW(model.parameters())
        if step:
            model(torch.randn(8, 400)).sum().backward()
            optimizer.step()
        values = {"mean": torch.randn(300_000), "half": torch.randn(600_000).to(torch.bfloat16), "step": seed}
        return {"model": model, "optimizer": optimizer, "values": values}

    def state(of: dict[str, Any]) -> bytes:
        file = io.BytesIO()
        torch.save([of["model"].state_dict(), of["optimizer"].state_dict()["state"], of["values"]], file)
        return file.getvalue()

    draw, right = drawn("torch", flips), {}
    loop = made(0)
    with Guard(signals=(), rank=0, world=1) as guard:
        guard.restore(**loop)
        for number in (1, 2):
            saved = made(number)
            loop["model"].load_state_dict(saved["model"].state_dict())
            loop["optimizer"].load_state_dict(saved["optimizer"].state_dict())
            loop["values"].update(saved["values"])
            guard.save(number)
            right[number] = state(loop)

    def begins() -> int | None:
        nonlocal loop
        if draw.random() < 0.3:
            loop = made(draw.randrange(100), step=draw.random() < 0.5)
        with Guard(signals=(), rank=0, world=1) as guard:
            found = guard.restore(**loop)
        assert found is not None and state(loop) == right[found]
        return found

    newer = checkpoints / "step-00000002"
    play(Scene(begins, [one for one in of_folder(newer) if one[0].suffix != ".blocks"], 1, 2), flips, draw)


# ------------------------------------------------------------------------------------------------------- in memory


class Run:
    """A run whose ranks take snapshots: its supervisor's part of them is real, and so are the loops that begin as it says."""

    def __init__(self, root: Path, top: str, patch: pytest.MonkeyPatch) -> None:
        self.rundir, self._top, self._patch = RunDir(root), top, patch
        self.rundir.attempts.mkdir(parents=True)
        self.rundir.beats.mkdir()
        self.rundir.checkpoints.mkdir()
        keep_lineage(self.rundir, "flips")
        self.log = root / "log"
        self.saved: dict[int, bytes] = {}
        self._open: list[tuple[SnapshotKeeper, Agents]] = []  # of jobs that have not ended
        names = {ENV_RUN_DIR: root, ENV_CHECKPOINT_DIR: self.rundir.checkpoints, "SLURMD_NODENAME": "here"}
        for name, value in {**names, "RANK": 0, "WORLD_SIZE": 1, f"{ENV_GUARD}SNAPSHOT_EVERY": 1}.items():
            patch.setenv(name, str(value))

    def claim(self) -> Claim:
        claim = ledger.claim(self.rundir)
        ledger.write_start(claim, {}, ["flips"], datetime.now(timezone.utc), None)
        return claim

    def job(self) -> tuple[SnapshotKeeper, str]:
        folder = room.new_folder("flips", self._top)
        place = SnapshotPlace(folder)
        agents = Agents(self.rundir, Allocation({}), {}, lambda: None, snapshots=place)
        keeper = SnapshotKeeper(place, agents, "here", KeptSnapshots(self.rundir, self.rundir.checkpoints))
        self._open.append((keeper, agents))
        return keeper, folder

    def end_the_jobs(self) -> None:
        """End what they have started: threads, files, pages in memory."""
        while self._open:
            keeper, agents = self._open.pop()
            keeper.close()
            agents.close()

    def begins(self, keeper: SnapshotKeeper, claim: Claim) -> tuple[Guard, dict[str, Any], int | None]:
        """A loop of the next attempt, which has begun as the supervisor says."""
        state: dict[str, Any] = {"weights": bytearray(3000), "step": 0}
        named = {ENV_ATTEMPT: str(claim.number), ENV_ATTEMPT_DIR: str(claim.folder)}
        with self._patch.context() as patch:
            for name, value in {**named, **keeper.begin(claim, ["here"], self.log)}.items():
                patch.setenv(name, value)
            guard = Guard(signals=(), rank=0, world=1)
            step = guard.restore(state=state)
        assert step is None or state == {"weights": bytearray(self.saved[step]), "step": step}
        return guard, state, step

    def trains(self, keeper: SnapshotKeeper, folder: str, draw: random.Random) -> tuple[Claim, SlotPlaces]:
        """Save step 1 if need be, and take snapshots of the steps 2 and 3. Return the attempt that did, and where step 3
        lies."""
        claim = self.claim()
        guard, state, begun = self.begins(keeper, claim)
        for step in (2, 3) if begun == 1 else (1, 2, 3):
            state.update(weights=bytearray(draw.randbytes(3000)), step=step)
            self.saved[step] = bytes(state["weights"])
            if step == 1:
                guard.save(1)
            else:
                wait_until(partial(guard.snapshot, step), "the memory")
        path = Path(room.rank_file(room.node_folder(folder, "here"), 0))
        found = places_of(path, claim.number)
        guard.close()
        return claim, found


SlotPlaces = list[tuple[Path, int, int]]


def places_of(path: Path, attempt: int) -> SlotPlaces:
    """Where the header, the description and the data of step 3 lie, once its digest is there."""
    with open_slots(path) as file:
        slot = file.held()[SnapshotId(3, attempt)]
        wait_until(lambda: (now := file.valid(slot)) is not None and now.algorithm, "its digest")
        header = file.valid(slot)
        assert header is not None
        data, meta = file.data_at(slot), file.extent(slot, header, 0)[0]
        head = data - file.room.meta - PAGE
    sizes = ((head, len(pack_header(header))), (meta, header.meta_size), (data, header.data_size))
    return [(path, begin, begin + size) for begin, size in sizes]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Run]:
    top = Path(f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}")
    top.mkdir(mode=0o700)
    before = {*threading.enumerate()}
    one = Run(tmp_path / "run", str(top), monkeypatch)
    yield one
    one.end_the_jobs()
    shutil.rmtree(top)
    left = {*threading.enumerate()} - before
    assert not [each.name for each in left if each.name in ("rank-reports", "beats")], "what the jobs started has ended"


@pytest.mark.resume(
    "Any bit of the newest snapshot in memory flips: its header, its description, its data",
    "the snapshot before it",
    "the log: that of rank 0 on … is damaged",
)
@short_and_long
def test_no_flipped_bit_of_a_snapshot_in_memory_is_loaded(run: Run, flips: int) -> None:
    draw = drawn("snapshot", flips)
    for _ in range(flips):
        keeper, folder = run.job()
        _, places = run.trains(keeper, folder, draw)
        flip(draw, Scene(lambda: None, places, 2, 3))
        keeper.ended(ledger.over(1, Cause(CauseKind.WARNING), datetime.now(timezone.utc)), ())
        guard, _, step = run.begins(keeper, run.claim())
        assert step == 2
        guard.close()
        run.end_the_jobs()


@pytest.mark.resume("Any bit of a kept snapshot flips, its page included", "the newest checkpoint", "… is damaged")
@short_and_long
def test_no_flipped_bit_of_a_kept_snapshot_is_loaded(run: Run, flips: int) -> None:
    draw = drawn("kept snapshot", flips)
    keeper, folder = run.job()
    made, _ = run.trains(keeper, folder, draw)
    area = fence.open_area(fence.staging(run.rundir, run.rundir.checkpoints), made.number)
    assert area is not None
    keeper.keep(made, Target(area, monotonic() + 30), run.log)
    run.end_the_jobs()
    later = run.claim()
    (kept,) = snapshots_kept.all_in(run.rundir.checkpoints)
    page, file = kept.path / snapshots_kept.PAGE, Path(room.rank_file(str(kept.path), 0))

    def begins() -> int | None:
        keeper, _ = run.job()
        guard, _, step = run.begins(keeper, later)
        guard.close()
        run.end_the_jobs()
        return step

    places = [*places_of(file, made.number), (page, 0, page.stat().st_size)]
    play(Scene(begins, places, 1, 3, page), flips, draw)
