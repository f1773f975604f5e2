"""Tells which program wrote a checkpoint, and whether its own sign says that it is complete. Nothing is unpickled.

| layout | sign that it is complete |
|---|---|
| torch DCP | ``.metadata``, written last, and every shard that it names, as long as it says |
| DeepSpeed | ``latest`` beside it, and as many ranks as its own states or its neighbours say, without a gap |
| Megatron | ``latest_checkpointed_iteration.txt`` beside it, and ranks likewise |
| Lightning | a ``.ckpt`` file with its end, or a folder with ``.metadata`` |
| Hugging Face | ``trainer_state.json``, written last, weights, and every shard of the index |
| any other | none: only a manifest says so |

The format of one file says of each whether its end is missing: the archives of torch and Keras, safetensors, HDF5.
"""

from __future__ import annotations

import errno
import io
import json
import os
import pickletools
import re
import struct
import zipfile
import zlib
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from itertools import count
from math import prod
from pathlib import Path
from typing import IO, Any, NamedTuple

from ftsupervise.checkpoints.contents import Contents, contents_of
from ftsupervise.checkpoints.manifest import CheckpointLayout as Layout
from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.host import files

_METADATA = ".metadata"
_STATE = "trainer_state.json"
_ITERATION = "latest_checkpointed_iteration.txt"
_LATEST = "latest"
_SMALL = 4096  # bytes of a file that holds a name or a number
_LARGE = 64_000_000  # bytes of one that lists files
_WALKED = 16_000_000  # bytes of a pickle whose instructions are read one by one, which takes up to some 3 s
_SHARD = re.compile(rb"__(\d+)_\d+\.distcp")
_RANKS = re.compile(r"(zero_pp_rank|mp_rank)_(\d+)(.*)")
_STEPS = (
    re.compile(r"step[=_-]?(\d+)", re.I),
    re.compile(r"iter(?:ation)?[=_-]?(\d+)", re.I),
    re.compile(r"(?:checkpoint|ckpt|epoch)[=_-]?(\d+)", re.I),
    re.compile(r"(\d+)(?!.*\d)"),
)
_ZIP, _ZIP_END = b"PK\x03\x04", b"PK\x05\x06"
_ZIP_END_SIZE = 22  # bytes of the record at a zip's end, without a comment
_END, _LOCATOR64, _END64 = struct.Struct("<4s4H2LH"), struct.Struct("<4sLQL"), struct.Struct("<4sQ2H2L4Q")
_PIECE = 1 << 20  # bytes
_NEIGHBOURS = 3  # committed checkpoints beside one whose files are compared with it
_MODEL_PARALLEL = ("tensor_model_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_BETWEEN = ("FRAME", "MARK", "PROTO", "MEMOIZE", "BINPUT", "LONG_BINPUT")  # between a name and its value
_TORCH = (".pt", ".pth", ".ckpt", ".bin")
_ARCHIVES = (*_TORCH, ".keras")
_HDF5 = b"\x89HDF\r\n\x1a\n"
_HDF5_SIZE = 64  # bytes of a superblock, at most
NO_WEIGHTS = "it holds no weights"
_WEIGHTS = (*_TORCH, ".safetensors", ".distcp", ".h5", ".msgpack")
_BESIDE_WEIGHTS = ("optimizer", "scheduler", "scaler", "rng_state", "training_args", "random_states")


class Recognised(NamedTuple):
    """A checkpoint's layout, by the files in it. ``complete`` None: nothing in it says so, neither does anything deny it."""

    layout: Layout
    complete: bool | None
    why: str = ""  # what is missing, as a clause; what the sign is where it is complete
    step: int | None = None
    world: int | None = None


def step_of(name: str) -> int | None:
    """Return the step in a checkpoint's name: ``step-00000100``, ``checkpoint-500``, ``iter_0000100``,
    ``epoch=3-step=42.ckpt``.
    """
    for form in _STEPS:
        if (match := form.search(name)) and len(match[1]) <= 18:
            return int(match[1])
    return None


def says_step(name: str) -> bool:
    """Return whether the name says in a word that its number is a step."""
    return any(form.search(name) for form in _STEPS[:-1])


def place_in_name(name: str) -> str:
    """Return how far the run was, where the name says it in a word: "step 500", "epoch 13". Its number may be anything else."""
    if not says_step(name):
        return ""
    by_epoch = re.search(r"epoch[=_-]?\d", name, re.I) and not any(form.search(name) for form in _STEPS[:2])
    return f"{'epoch' if by_epoch else 'step'} {step_of(name)}"


def layout_of(checkpoint: Path, contents: Contents) -> Layout:
    """Return the program that wrote it."""
    if not contents.folders:
        return Layout.LIGHTNING if checkpoint.suffix == ".ckpt" else Layout.FILES
    names = {path for path in contents.files if "/" not in path}
    if _STATE in names or (re.fullmatch(r"checkpoint-\d+", checkpoint.name) and _of_hugging_face(names)):
        return Layout.HUGGING_FACE
    if re.fullmatch(r"iter_\d{7,}|release", checkpoint.name):
        return Layout.MEGATRON
    if any(name.endswith(("_model_states.pt", "_optim_states.pt")) for name in names):
        return Layout.DEEPSPEED
    if checkpoint.suffix == ".ckpt" or (_METADATA in names and "meta.pt" in names):
        return Layout.LIGHTNING
    if _METADATA in names or any(name.endswith(".distcp") for name in names):
        return Layout.DCP
    return Layout.FILES


def _of_hugging_face(names: set[str]) -> bool:
    """Return whether a folder called checkpoint-N has one of these, the first of which are written first."""
    first = {"config.json", "adapter_config.json", "model.safetensors", "pytorch_model.bin"}
    return bool(names & (first | {"training_args.bin", "scheduler.pt", "optimizer.pt"}))


def recognise(checkpoint: Path, contents: Contents, layout: Layout | None = None) -> Recognised:
    """Return its layout, and what its own sign says. Raises OSError where that cannot be seen.

    ``layout``: that of the others beside it, where a save was cut off before its own files showed one.
    """
    layout = layout_of(checkpoint, contents) if layout is None else layout
    signs = {
        Layout.DCP: _dcp,
        Layout.DEEPSPEED: _deepspeed,
        Layout.MEGATRON: _megatron,
        Layout.LIGHTNING: _lightning,
        Layout.HUGGING_FACE: _hugging_face,
    }
    step = step_of(checkpoint.name)
    sign = signs.get(layout)
    found = sign(checkpoint, contents) if sign else Recognised(layout, None, "nothing in it says that it is complete")
    found = found._replace(step=step if found.step is None else found.step)
    if found.complete is not False and (cut := cut_files(checkpoint, contents)):
        return found._replace(complete=False, why=cut)
    return found


def tracker_of(checkpoint: Path, layout: Layout) -> tuple[str, str]:
    """Return the name of the file beside it by which its program's loader goes, and what stands in there; ("", "") where
    there is none. Raises OSError."""
    name = {Layout.DEEPSPEED: _LATEST, Layout.MEGATRON: _ITERATION}.get(layout, "")
    said = _small(checkpoint.parent / name) if name else None
    return (name, said) if said is not None else ("", "")


# ------------------------------------------------------------------------------------------------------- one sign each


def _dcp(checkpoint: Path, contents: Contents) -> Recognised:
    return Recognised(Layout.DCP, *_metadata(checkpoint, contents), world=_ranks(contents))


def _ranks(contents: Contents) -> int | None:
    """Return how many ranks have written a shard, by the shards' names; None where the ranks have a gap.

    It is a lower bound: a rank without anything to save leaves an empty shard, or none where each tensor has a file of
    its own.
    """
    ranks = {int(match[1]) for path in contents.files if (match := _SHARD.search(os.fsencode(path)))}
    return len(ranks) if ranks and max(ranks) == len(ranks) - 1 else None


def _metadata(checkpoint: Path, contents: Contents) -> tuple[bool, str]:
    """Judge by ``.metadata``, which torch writes last, whole and by a rename.

    It is a pickle: only the shards' names and sizes are read.
    """
    facts = contents.files.get(_METADATA)
    if facts is None:
        return False, f"{_METADATA} is missing: not all ranks have written their part"
    raw = files.read_bounded(checkpoint / _METADATA, _LARGE)
    if not raw.endswith(b"."):  # the last byte of every pickle
        return False, f"{_METADATA} is cut short"
    there = {name: path for path in contents.files if (name := _shard(path))}
    wanted = {match[0].decode() for match in _SHARD.finditer(raw)}
    if missing := sorted(wanted - set(there)):
        return False, f"{_METADATA} names {len(wanted)} shards, and {_some(missing)} missing"
    sizes = shard_sizes(raw)
    for name in sorted(wanted):  # others hold nothing: a rank without anything to save leaves an empty one
        one = contents.files[there[name]]
        try:
            size = os.stat(checkpoint / one.path).st_size if one.is_link else one.facts.st_size  # noqa: PTH116
        except FileNotFoundError:
            return False, f"{one.path} leads to a file that is not there"
        if cut := _cut_shard(checkpoint / one.path, size, sizes.get(name, 1)):
            return False, f"{one.path} {cut}"
    return True, _METADATA


def _cut_shard(path: Path, size: int, wanted: int) -> str:
    """Return why a shard is not whole. torch writes its items one after the other, each as a zip; other formats have
    only a size.
    """
    if size < wanted:
        return f"has {size} bytes where {_METADATA} says {wanted}" if size else "is empty"
    fd = files.open_regular(path, follow=True)
    try:
        tail = os.pread(fd, _ZIP_END_SIZE, max(0, size - _ZIP_END_SIZE))
        cut = os.pread(fd, len(_ZIP), 0) == _ZIP and not tail.startswith(_ZIP_END)
    finally:
        os.close(fd)
    return "is cut short: its last archive has no end" if cut else ""


def shard_sizes(raw: bytes) -> dict[str, int]:
    """Return the least bytes of each shard, from a ``.metadata`` of torch: where its last item begins, and how long it
    is.

    The pickle is not executed: its instructions are read for the strings and numbers that they push. {} for one that is
    too large for that, or damaged: then a shard that was cut exactly where an item ends is not noticed.
    """
    if len(raw) > _WALKED:
        return {}
    sizes: dict[str, int] = {}
    memo: dict[object, object] = {}
    last: deque[object] = deque([None] * 6, maxlen=6)  # the newest values
    try:
        for instruction, argument, _ in pickletools.genops(raw):
            kind = instruction.name
            if kind in ("MEMOIZE", "BINPUT", "LONG_BINPUT"):
                memo[len(memo) if kind == "MEMOIZE" else argument] = last[-1]
                continue
            if kind in ("FRAME", "MARK", "PROTO"):
                continue
            value = memo.get(argument) if kind in ("BINGET", "LONG_BINGET") else argument
            last.append(value)
            if isinstance(value, int) and last[-2] == "length" and (last[0], last[2]) == ("relative_path", "offset"):
                name, offset = last[1], last[3]
                if isinstance(name, str) and isinstance(offset, int):
                    sizes[name] = max(sizes.get(name, 0), offset + value)
    except ValueError:
        return {}
    return sizes


def _shard(path: str) -> str:
    match = _SHARD.search(os.fsencode(path))
    return match[0].decode() if match else ""


def _deepspeed(checkpoint: Path, contents: Contents) -> Recognised:
    names = [path for path in contents.files if "/" not in path]
    if gap := _gap(names):
        return Recognised(Layout.DEEPSPEED, False, gap)
    world = sum(name.endswith("_optim_states.pt") for name in names) or None
    said = _small(checkpoint.parent / _LATEST)
    if said is None:
        return Recognised(Layout.DEEPSPEED, False, f"no {_LATEST} beside it: not all ranks have saved", world=world)
    mine, newest = step_of(checkpoint.name), step_of(said)
    if said != checkpoint.name and (mine is None or newest is None or mine > newest):
        return Recognised(Layout.DEEPSPEED, False, f"{_LATEST} still names {said[:80]}", world=world)
    parts = [int(match[2]) for name in names if name.endswith("_optim_states.pt") and (match := _RANKS.search(name))]
    states = next((one for one in sorted(names) if "mp_rank" in one and one.endswith("_model_states.pt")), None)
    wanted = numbers_in(checkpoint / states, ("dp_world_size",)) if states and parts else {}
    if ranks := wanted.get("dp_world_size"):
        whole = max(parts) + 1 >= ranks
        why = _LATEST if whole else f"{max(parts) + 1} of {ranks} ranks have written their part"
        return Recognised(Layout.DEEPSPEED, whole, why, world=world)
    return Recognised(Layout.DEEPSPEED, *_as_its_neighbours(checkpoint, contents, said), world=world)


def _gap(names: list[str]) -> str:
    """Return a gap in the ranks, which are numbered from 0 without one, each with the same kinds of file."""
    ranks: dict[tuple[str, str], set[int]] = {}
    for name in names:
        if match := _RANKS.search(name):
            ranks.setdefault((match[1], match[3]), set()).add(int(match[2]))
    for (word, rest), found in ranks.items():
        # not up to the highest, which may be any number
        first = next(number for number in count() if number not in found)
        if first < max(found):
            return f"{word}_{first}{rest} is missing"
    return ""


def _megatron(checkpoint: Path, contents: Contents) -> Recognised:
    said = _small(checkpoint.parent / _ITERATION)
    if said is None:
        return Recognised(Layout.MEGATRON, False, f"no {_ITERATION} beside it: not all ranks have saved")
    mine = step_of(checkpoint.name)
    if said != checkpoint.name and not (said.isascii() and said.isdigit() and mine is not None and mine <= int(said)):
        return Recognised(Layout.MEGATRON, False, f"{_ITERATION} says {said[:80]}")
    if any(path.endswith(".distcp") for path in contents.files):
        complete, why = _metadata(checkpoint, contents)
        return Recognised(Layout.MEGATRON, complete, why)
    folders = sorted(path for path in contents.folders if re.fullmatch(r"mp_rank(_\d+)+", path))
    if gap := _grid_gap(folders, contents):
        return Recognised(Layout.MEGATRON, False, gap)
    first = next(
        (path for path in sorted(contents.files) if path.endswith(("/model_optim_rng.pt", "/model_rng.pt"))), None
    )
    found = numbers_in(checkpoint / first, _MODEL_PARALLEL) if first else {}
    if "tensor_model_parallel_size" in found:
        ranks, least = prod(found.values()), prod(found[name] for name in _MODEL_PARALLEL[:2] if name in found)
        whole = len(folders) >= ranks or (None if len(folders) >= least else False)
        short = f"{len(folders)} of {ranks} model-parallel ranks have written their part"
        return Recognised(Layout.MEGATRON, whole, _ITERATION if whole else short)
    named = f"iter_{int(said):07d}" if said.isdigit() else said
    return Recognised(Layout.MEGATRON, *_as_its_neighbours(checkpoint, contents, named))


def _grid_gap(folders: list[str], contents: Contents) -> str:
    """Return what is missing of mp_rank_TT[_PPP][_EEE], whose numbers begin at 0 and form a grid, each with the same files."""
    places = {tuple(map(int, name.split("_")[2:])): name for name in folders}
    if not places:
        return "it holds no mp_rank_00"
    kinds = {
        name: frozenset(path.partition("/")[2] for path in contents.files if path.startswith(f"{name}/"))
        for name in folders
    }
    every = frozenset[str]().union(*kinds.values())
    if lacks := next((f"{name}/{min(every - found)}" for name, found in kinds.items() if every - found), ""):
        return f"{lacks} is missing"
    deepest = max(map(len, places))
    sides = [max(place[axis] for place in places if len(place) > axis) + 1 for axis in range(deepest)]
    if any(len(place) != deepest for place in places):
        return "its ranks are numbered in two ways"
    if len(places) == prod(sides):
        return ""
    grid = (_place_in(sides, number) for number in count())  # the sides may be any numbers
    missing = next(place for place in grid if place not in places)
    return f"mp_rank_{missing[0]:02d}{''.join(f'_{number:03d}' for number in missing[1:])} is missing"


def _place_in(sides: Sequence[int], number: int) -> tuple[int, ...]:
    """Return the place that comes after ``number`` others in a grid, the last axis running fastest."""
    place: list[int] = []
    for side in reversed(sides):
        number, at = divmod(number, side)
        place.append(at)
    return tuple(reversed(place))


def _as_its_neighbours(checkpoint: Path, contents: Contents, named: str) -> tuple[bool | None, str]:
    """Judge by the files of others beside it, where nothing in the checkpoint says how many ranks have written it.

    The one that its program has ``named`` is whole unless a neighbour has more files than it. An older one may have been left
    behind torn, and is whole when it has the files of the named one, or of one that is committed.
    """
    mine = frozenset(contents.files)
    others = list(_files_of_neighbours(checkpoint, named))
    if any(mine == other for _, other in others):
        return True, "it has the same files as the others"
    if more := next((name for name, other in others if mine < other), ""):
        return None, f"{more} has files that it lacks: it may be torn, or of fewer ranks"
    if checkpoint.name == named:
        return True, "it is named as the newest"
    return None, f"{named[:80]} has come since, and none beside it has the same files: it may be torn"


def _files_of_neighbours(checkpoint: Path, named: str) -> Iterator[tuple[str, frozenset[str]]]:
    """Yield the files of the one that is ``named``, and of the nearest ones that have a manifest. Raises OSError."""
    whole = checkpoint.parent / named
    if named != checkpoint.name and "/" not in named and whole.is_dir():
        yield named, frozenset(contents_of(whole).files)
    mine, form = step_of(checkpoint.name) or 0, re.sub(r"\d+", "", checkpoint.name)
    with os.scandir(checkpoint.parent) as entries:
        names = [one.name for one in entries if one.name != checkpoint.name and re.sub(r"\d+", "", one.name) == form]
    read = 0
    for name in sorted(names, key=lambda name: abs((step_of(name) or 0) - mine)):
        try:
            manifest = read_manifest(checkpoint.parent / name)
        except (OSError, ValueError):  # a damaged one says nothing about its neighbour
            continue
        if manifest is not None:
            yield name, frozenset(one.path for one in manifest.files)
            read += 1
        if read >= _NEIGHBOURS:
            return


def numbers_in(path: Path, names: Collection[str]) -> dict[str, int]:
    """Return the whole numbers that stand right behind ``names`` in the pickle of a file of torch: the first of each.

    The pickle is not executed. {} for another kind of file, one that is damaged, or too large. Raises OSError.
    """
    found: dict[str, int] = {}
    if not is_archive(path):
        return found
    last: object = None
    try:
        with _Archive(io.FileIO(files.open_regular(path))) as raw, zipfile.ZipFile(raw) as archive:
            record = next((one for one in archive.infolist() if one.filename.endswith("/data.pkl")), None)
            if record is None or record.file_size > _WALKED:
                return found
            for instruction, argument, _ in pickletools.genops(archive.read(record)):
                if instruction.name in _BETWEEN:
                    continue
                if isinstance(argument, int) and not isinstance(argument, bool) and last in names:
                    found.setdefault(str(last), argument)
                last = argument if isinstance(argument, str) else None
                if len(found) == len(names):
                    break
    except (_TooLarge, zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, RuntimeError):
        return found
    return found


class _TooLarge(OSError):
    pass


class _Archive(io.BufferedReader):
    """A file of which no more than ``_LARGE`` is read at once: zipfile reads the whole directory of an archive, however long.
    Raises _TooLarge."""

    def read(self, size: int | None = -1, /) -> bytes:
        if size is not None and size > _LARGE:
            raise _TooLarge(errno.EFBIG, f"its directory is larger than {_LARGE} bytes")
        return super().read(size)


def _lightning(checkpoint: Path, contents: Contents) -> Recognised:
    if not contents.folders:
        facts = contents.files[checkpoint.name].facts
        why = cut_short(checkpoint, facts.st_size)
        return Recognised(Layout.LIGHTNING, not why, why or "the end of its archive")
    if _METADATA in contents.files:
        complete, why = _metadata(checkpoint, contents)
        return Recognised(Layout.LIGHTNING, complete, why)
    said = _small(checkpoint / _LATEST)  # the strategy of DeepSpeed
    if said is not None and said in contents.folders:
        return Recognised(Layout.LIGHTNING, True, _LATEST)
    return Recognised(Layout.LIGHTNING, False, f"it holds neither {_METADATA} nor {_LATEST}")


def _hugging_face(checkpoint: Path, contents: Contents) -> Recognised:
    if _STATE not in contents.files:
        return Recognised(Layout.HUGGING_FACE, False, f"{_STATE} is missing, which is written last")
    state = _object(checkpoint / _STATE)
    if state is None:
        return Recognised(Layout.HUGGING_FACE, False, f"{_STATE} is cut short")
    step = state.get("global_step")
    step = step if isinstance(step, int) and not isinstance(step, bool) and 0 <= step < 2**63 else None
    for name in contents.files:
        if "/" not in name and name.endswith(".index.json"):
            index = _object(checkpoint / name)
            weights = index.get("weight_map") if index else None
            if not isinstance(weights, dict):
                return Recognised(Layout.HUGGING_FACE, False, f"{name} is cut short", step)
            if missing := sorted({str(one) for one in weights.values()} - set(contents.files)):
                return Recognised(Layout.HUGGING_FACE, False, f"{_some(missing)} missing, which {name} names", step)
    if not may_hold_weights(contents):
        return Recognised(Layout.HUGGING_FACE, False, NO_WEIGHTS, step)
    return Recognised(Layout.HUGGING_FACE, True, _STATE, step)


def may_hold_weights(contents: Contents) -> bool:
    """Return whether a file may hold weights: what the Trainer saves beside them is known, and all else may."""
    names = (path.rpartition("/")[2] for path in contents.files)
    return any(name.endswith(_WEIGHTS) and not name.startswith(_BESIDE_WEIGHTS) for name in names)


# ---------------------------------------------------------------------------------------------------------- one file each


def cut_files(checkpoint: Path, contents: Contents) -> str:
    """Return the first file whose own format says that its end is missing, as a clause; "" where none does. Raises OSError."""
    root = checkpoint if contents.folders else checkpoint.parent
    for path, one in contents.files.items():
        if not one.is_link and (why := cut_short(root / path, one.facts.st_size)):
            return f"{path} {why}" if contents.folders else f"it {why}"
    return ""


def cut_short(path: Path, size: int) -> str:
    """Return why a file of torch, Keras, safetensors or HDF5 is not whole, by its own format; "" for one that is, or that says
    nothing."""
    if path.suffix not in (*_ARCHIVES, ".safetensors", ".h5"):
        return ""
    if size == 0:
        return "is empty"
    fd = files.open_regular(path)
    try:
        if path.suffix == ".safetensors":
            return _safetensors(fd, size)
        if path.suffix == ".h5":
            return _hdf5(fd, size)[1]
        if os.pread(fd, 4, 0) != _ZIP:
            return ""
        return "" if _ZIP_END in os.pread(fd, _SMALL, max(0, size - _SMALL)) else "is cut short: its archive has no end"
    finally:
        os.close(fd)


def is_archive(path: Path) -> bool:
    """Return whether a file is an archive as torch.save and Keras make it. Raises OSError."""
    if path.suffix not in _ARCHIVES:
        return False
    fd = files.open_regular(path)
    try:
        return os.pread(fd, 4, 0) == _ZIP
    finally:
        os.close(fd)


def says_whole(path: Path, size: int) -> bool:
    """Return whether a file of ``size`` bytes is whole by its own format; False where that says nothing. Raises OSError."""
    if path.suffix == ".h5":
        fd = files.open_regular(path)
        try:
            return _hdf5(fd, size) == (True, "")
        finally:
            os.close(fd)
    return (path.suffix == ".safetensors" or is_archive(path)) and not cut_short(path, size)


def damaged_archive(path: Path, progress: Callable[[int], object]) -> str:
    """Return what is wrong with an archive by its own checksums, as a clause; "" where nothing is. Every byte is read.

    Raises OSError.
    """
    with _Archive(io.FileIO(files.open_regular(path))) as raw:
        try:
            with zipfile.ZipFile(raw) as archive:
                found, said = len(archive.infolist()), _records_in(raw, archive.comment)
                if (
                    found != said
                ):  # the lengths in its directory have no checksum: one may take in the records behind it
                    return f"is not whole: its directory shows {found} of {said} records"
                for record in archive.infolist():
                    with archive.open(record) as content:
                        while piece := content.read(_PIECE):
                            progress(len(piece))
        except (zipfile.BadZipFile, zlib.error, EOFError, NotImplementedError, ValueError, RuntimeError) as error:
            return f"is not whole: {error}"
    return ""


def _records_in(raw: IO[bytes], comment: bytes) -> int:
    """Return how many records the end of an archive says that it has. Raises ValueError, OSError.

    Source: PKWARE's APPNOTE 4.3.14 to 4.3.16.
    """
    try:
        raw.seek(-len(comment) - _END.size, os.SEEK_END)
        records = int(_END.unpack(raw.read(_END.size))[4])
        if records < 0xFFFF:
            return records
        raw.seek(-len(comment) - _END.size - _LOCATOR64.size, os.SEEK_END)
        raw.seek(_LOCATOR64.unpack(raw.read(_LOCATOR64.size))[2])
        return int(_END64.unpack(raw.read(_END64.size))[7])
    except (struct.error, OverflowError) as error:
        raise ValueError(f"the end of its directory is damaged: {error}") from None


def _safetensors(fd: int, size: int) -> str:
    raw = os.pread(fd, 8, 0)
    length = struct.unpack("<Q", raw)[0] if len(raw) == 8 else size
    if length > min(size - 8, _LARGE):
        return "is cut short in its header"
    try:
        header = json.loads(os.pread(fd, length, 8))
        ends = [one["data_offsets"][1] for name, one in header.items() if name != "__metadata__"]
        wanted = 8 + length + max(ends, default=0)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RecursionError):
        return "has a header that is damaged"
    return "" if wanted == size else f"has {size} bytes where its header says {wanted}"


def _hdf5(fd: int, size: int) -> tuple[bool, str]:
    """Return whether the superblock at the beginning of a file says how long that is, and why the file is not whole.

    The library writes the length when it closes the file, and marks one that is open for writing. What has another program's
    block before it, or was written otherwise than by default, says nothing.
    """
    raw = os.pread(fd, _HDF5_SIZE, 0)
    if len(raw) < _HDF5_SIZE or not raw.startswith(_HDF5):
        return False, ""
    version = raw[8]
    if version < 2:
        widths, at, mark = raw[13], 24 + 4 * version, raw[20]
    else:
        widths, at, mark = raw[9], 12, raw[11]
    if version > 3 or widths != 8:
        return False, ""
    base, _, end = struct.unpack_from("<QQQ", raw, at)
    if base:
        return False, ""
    if end > size:
        return True, f"has {size} bytes where its superblock says {end}"
    if mark & 1 and end != size:
        return True, f"was not closed: it has {size} bytes, and its superblock says {end}"
    return end == size and not mark & 1, ""


def _small(path: Path) -> str | None:
    """Return the word in a file of one word; None where there is none. Raises OSError."""
    try:
        return files.read_bounded(path, _SMALL).decode("utf-8", "replace").strip()
    except FileNotFoundError:
        return None


def _object(path: Path) -> dict[str, Any] | None:
    """Return a JSON object that another program wrote; None for other contents. Raises OSError."""
    try:
        value = json.loads(files.read_bounded(path, _LARGE))
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None


def _some(names: list[str]) -> str:
    more = f" and {len(names) - 1} more are" if len(names) > 1 else " is"
    return f"{names[0]}{more}"
