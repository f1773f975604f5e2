"""Keeps a part of the training loop and puts it back: the objects that the loop named, and the random generators.

An object with ``state_dict`` and ``load_state_dict`` (a module, an optimizer, a schedule, a scaler, a stateful loader)
gives its own state. A dictionary, a list or an array is kept as it is and changed in place: a loop keeps its place in
the data there. The generators of Python, NumPy and torch are kept without being named.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, Optional

from ftsupervise.checkpoints import block_lists
from ftsupervise.checkpoints.compared_file import ComparedFile, Damaged
from ftsupervise.checkpoints.digest import CRC32, CannotJudge, best_algorithm, hash_buffer
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.checkpoints.manifest import Manifest, loop_file, read_manifest
from ftsupervise.checkpoints.verify import CheckpointState, Verdict
from ftsupervise.guard.checkpoint import Checkpoints
from ftsupervise.guard.loaded_again import LoadedAgain, LoadedInPart
from ftsupervise.guard.resume import CannotResume, Wanted, refuse, set_damaged_aside, wait_for
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.host import files
from ftsupervise.snapshots.state import (
    ALIGNED,
    PAGE,
    Arrays,
    Bytes,
    CannotKeep,
    Described,
    Describer,
    Node,
    NumPyArrays,
    StoredArray,
    build,
    copy_blocks,
    parse,
)
from ftsupervise.snapshots.wait import LARGE, Copies, Range
from ftsupervise.units import checkpoint_words

# Loaded by name, where the program itself has loaded the framework: the guard imports none, and starts without them.
_INTEGRATIONS = {"torch": "ftsupervise.integrations.torch"}
_KEYS = 2000  # of the dicts of a loop: more of them are data, and not compared with those of the code
_NAMED = 5  # differences that a sentence names
_WARM_UPS = 2  # DDP rebuilds its buckets after the first pass, and uses them from the second on

Places = tuple[memoryview, list[list[Any]]]  # of the loose arrays, by framework


class _Part(NamedTuple):
    """One thing that the loop named: how its state is taken, and put back."""

    target: Any
    take: Callable[[], Any]
    put: Callable[[Any], object] | None  # None: it is changed in place


class LoopState:
    """The loop's state, to be described and loaded any number of times.

    Raises TypeError for what can be neither asked for its state nor changed in place, such as a number.
    """

    def __init__(self, named: Mapping[str, object], code: str = "", *, strict: bool = True) -> None:
        self.code = code  # the version of the loop's code, where it names one
        self._strict = strict  # what does not fit the code is refused; else it keeps what the code has made
        self._integrations = [import_module(name).FRAMEWORK for at, name in _INTEGRATIONS.items() if at in sys.modules]
        self._frameworks: list[Arrays] = [
            *(row for one in self._integrations for row in one.arrays),
            NumPyArrays(),
            Bytes(),
        ]
        self._parts = {name: self._part(name, target) for name, target in named.items()}
        self._describer = Describer(self._frameworks)
        # What the code makes before anything is loaded: what a training changes later is no change of the code.
        in_place = [(name, part.target) for name, part in self._parts.items() if part.put is None]
        made = [row for name, target in in_place for row in islice(self._outline(target, name), _KEYS)]
        self._made = dict(made) if len(made) < _KEYS else {key: text for key, text in made if key in self._parts}

    def _outline(self, value: Any, path: str) -> Iterator[tuple[str, str]]:
        """Yield the keys of a value that is changed in place, and of its arrays the kind, type and shape."""
        if type(value) is dict:
            for key, one in value.items():
                at = f"{path}[{key!r}]"
                yield at, ""
                yield from self._outline(one, at)
        elif type(value) not in (bytes, bytearray):
            for framework in self._frameworks:
                if framework.owns(value):
                    with suppress(CannotKeep):  # the first snapshot says so
                        yield path, _words(framework.describe(value))
                    return

    def describe(self) -> Described:
        """Return the state as it is now. Raises CannotKeep for a value of no known kind."""
        return self._describer.describe(
            {
                "parts": {name: part.take() for name, part in self._parts.items()},
                "rng": self._generators(),
                "code": self.code,
                "made": self._made,
            }
        )

    def places(self, described: Described, buffer: memoryview) -> Places:
        """Return where each array goes in ``buffer``."""
        loose = [described.arrays[n] for n in described.loose]
        return buffer, [[one.view(buffer, row) for row in loose if row.kind == one.kind] for one in self._frameworks]

    def copy(self, described: Described, places: Places) -> None:
        """Copy all arrays to their places. The loop waits for this."""
        buffer, views = places
        copy_blocks(described, buffer)
        for framework, mine in zip(self._frameworks, views):
            if mine:
                kind, rows = framework.kind, described.arrays
                framework.copy(mine, [described.values[n] for n in described.loose if rows[n].kind == kind])

    def raw(self, described: Described, at: int) -> memoryview:
        """Return the bytes of one array as the description has them: where they lie, or a copy from another device."""
        row, value = described.arrays[at], described.values[at]
        if not row.size:
            return memoryview(b"")
        framework = next(one for one in self._frameworks if one.kind == row.kind)
        if address := framework.address(value, row):
            import ctypes

            return memoryview((ctypes.c_char * row.size).from_address(address)).cast("B")
        room = memoryview(bytearray(row.size))
        framework.copy([framework.view(room, row._replace(offset=0))], [value])
        return room

    # --------------------------------------------------------------------------------------------------------- loading

    def why_not(self, description: bytes) -> str:
        """Return why the loop cannot take this state, as a clause; "" when it can. Raises ValueError for a damaged one."""
        tree, rows = parse(description)
        parts = tree["dict"]["parts"]["dict"]
        if parts.keys() != self._parts.keys():
            return f"it holds {_names(parts)}, and the loop names {_names(self._parts)}"
        unknown = {row.kind for row in rows} - {framework.kind for framework in self._frameworks}
        if unknown:
            return f"it holds arrays of {_names(unknown)}, which the program has not loaded"
        if not self._strict:
            return ""
        found = self._misfits(tree, rows)
        more = f" (and {len(found) - _NAMED} more)" if len(found) > _NAMED else ""
        return f"{'; '.join(found[:_NAMED])}{more} (to begin all the same: restore(…))" if found else ""

    def left(self, description: bytes) -> tuple[str, ...]:
        """Return what ``strict=False`` leaves out, or loads as another type: clauses. ValueError for a damaged one."""
        return () if self._strict else tuple(self._misfits(*parse(description)))

    def _misfits(self, tree: dict[str, Any], rows: tuple[StoredArray, ...]) -> list[str]:
        """Return the differences between what was saved and what the code makes, as clauses."""
        parts, found = tree["dict"]["parts"]["dict"], []
        for name, part in self._parts.items():
            for one in self._integrations:
                if one.copies(part.target):
                    saved = build(parts[name], lambda at: (rows[at].shape, rows[at].dtype), self._frameworks)
                    found += [f"of {name}, {reason}" for reason in one.misfits(part.target, saved).values()]
        return [*found, *self._changed(tree, rows).values()]

    def _changed(self, tree: dict[str, Any], rows: tuple[StoredArray, ...]) -> dict[str, str]:
        """Return what the code makes otherwise than the code that saved, of what is changed in place: path -> a clause."""
        parts, found = tree["dict"]["parts"]["dict"], {}
        if "made" in tree["dict"]:
            before = build(tree["dict"]["made"], lambda at: None, self._frameworks)
            for path, words in self._made.items():
                if path not in before:
                    found[path] = f"{path} is in the loop only"
                elif before[path] != words:
                    found[path] = f"{path} is {words or 'no array'} in the loop, and was {before[path] or 'no array'}"
        for name in self._made.keys() & self._parts.keys():  # an array that the loop named has the place that it has
            saved = build(parts[name], lambda at: _words(rows[at]), self._frameworks)
            if saved != self._made[name]:
                found[name] = f"{name} is {self._made[name]} in the loop, and {saved} in what was saved"
        return found

    @property
    def strict(self) -> bool:
        """Return whether a load puts all of a state back, so that nothing of another one is left."""
        return self._strict

    def load(self, description: bytes, buffer: Callable[[int], memoryview]) -> None:
        """Put a state back into the loop's objects, the generators last. ``buffer``: where the n-th array lies, at its offset.
        Raises what their loading raises."""
        self.fill(description, buffer)()

    def fill(
        self, description: bytes, buffer: Callable[[int], memoryview], files: Sequence[ComparedFile] = ()
    ) -> Callable[[], None]:
        """Read all of a state, and return what puts it into the loop's objects. Arrays that are only copied into theirs are
        there already. ``files``: those that the arrays lie in. Raises what reading raises."""
        tree, rows = parse(description)
        keep = frozenset() if self._strict else frozenset(self._changed(tree, rows))
        saved = _Saved(rows, buffer, self._frameworks, files, keep)
        parts = tree["dict"]["parts"]["dict"]
        puts = [self._put(name, part, parts[name], saved) for name, part in self._parts.items()]
        generators = saved.own(tree["dict"]["rng"])
        saved.copies.run()

        def put_all() -> None:
            for put in puts:
                put()
            self._set_generators(generators)

        return put_all

    def warm_up(self, one_pass: Callable[[], object] | None) -> None:
        """Run the passes in which DistributedDataParallel arranges its buckets anew, before a state is loaded.

        The gradients of these passes belong to no step.
        """
        for _ in range(_WARM_UPS if one_pass is not None else 0):
            assert one_pass is not None
            one_pass()
        for part in self._parts.values():
            for one in self._integrations:
                one.forget_gradients(part.target)

    def begin_other_streams(self, description: bytes, rank: int, world: int) -> None:
        """Seed the global generators from the saved state, differently on each rank.

        Where another number of ranks saved it, no generator in it is this rank's own.
        """
        state_of_python = parse(description)[0]["dict"]["rng"]["dict"]["python"]
        seed = (
            int.from_bytes(blake2b(json.dumps([state_of_python, rank, world]).encode(), digest_size=8).digest(), "big")
            >> 1
        )
        random.seed(seed)
        if "numpy.random" in sys.modules:
            import_module("numpy.random").seed([seed >> 32, seed & 0xFFFFFFFF])
        for one in self._integrations:
            one.seed(seed)

    def bound_to_ranks(self, description: bytes, own: frozenset[int]) -> list[str]:
        """Return the modules and optimizers of which a rank behind rank 0 kept a part for itself, among its arrays ``own``."""
        parts, found = parse(description)[0]["dict"]["parts"]["dict"], []
        for name, part in self._parts.items():
            numbers: set[int] = set()
            state = build(parts.get(name), lambda at, seen=numbers: seen.add(at) or at, self._frameworks)  # type: ignore[misc]
            if any(one.is_bound(part.target, state, numbers & own) for one in self._integrations):
                found.append(name)
        return found

    def ranks(self, rank: int, world: int) -> Any:
        """Return two functions by which all ranks share a value: ``from_rank_0(value)`` and ``of_all(value)``.

        None where the program has no process group of all of them.
        """
        return next((one for one in self._integrations if world > 1 and one.rank_and_world() == (rank, world)), None)

    def _put(self, name: str, part: _Part, node: Node, saved: _Saved) -> Callable[[], object]:
        """Return what puts a part into its object, once the copies are made."""
        if part.put is None:
            saved.merge(part.target, saved.views(node), name)
            return lambda: None
        for one in self._integrations:
            if one.copies(part.target):
                state, own = saved.views(node), one.own(part.target)
                for key in state:
                    if key not in own:
                        state[key] = saved.settle(state[key])
                break
        else:
            state = saved.own(node)
        put = part.put
        for one in self._integrations:
            if not self._strict:
                put = one.lenient(part.target, state) or put
            one.adopt(part.target, state, saved.copies)
        saved.use(state)
        return partial(put, state)

    def _part(self, name: str, target: Any) -> _Part:
        if callable(getattr(target, "state_dict", None)) and callable(getattr(target, "load_state_dict", None)):
            return _Part(target, target.state_dict, target.load_state_dict)
        if callable(getattr(target, "get_state", None)) and callable(getattr(target, "set_state", None)):
            return _Part(target, target.get_state, target.set_state)  # torch.Generator, numpy.random.RandomState
        if isinstance(target, random.Random):
            return _Part(target, target.getstate, target.setstate)
        if hasattr(target, "bit_generator"):  # numpy.random.Generator
            bits = target.bit_generator
            return _Part(target, lambda: bits.state, lambda state: setattr(bits, "state", state))
        if type(target) in (dict, list, bytearray) or any(
            one.owns(target) for one in self._frameworks if one.kind != "bytes"
        ):
            return _Part(target, lambda: target, None)
        for one in self._integrations:
            if better := one.better(target):
                raise TypeError(f"restore({name}=…): {type(target).__name__} has no state_dict; {better}")
        raise TypeError(
            f"restore({name}=…): {type(target).__name__} has no state_dict and cannot be changed in place; "
            "keep such values in a dict and give the dict"
        )

    # ------------------------------------------------------------------------------------------------------ generators

    def _generators(self) -> dict[str, Any]:
        found: dict[str, Any] = {"python": random.getstate()}
        numpy = sys.modules.get("numpy.random")
        if numpy is not None:
            found["numpy"] = numpy.get_state(legacy=False)
        for one in self._integrations:
            found[one.name] = one.rng_state()
        return found

    def _set_generators(self, saved: Mapping[str, Any]) -> None:
        random.setstate(saved["python"])
        if "numpy" in saved:
            import_module("numpy.random").set_state(saved["numpy"])
        for one in self._integrations:
            if one.name in saved:
                one.set_rng_state(saved[one.name])


class _Saved:
    """The arrays of one snapshot, where they lie."""

    def __init__(
        self,
        rows: tuple[StoredArray, ...],
        buffer: Callable[[int], memoryview],
        frameworks: list[Arrays],
        files: Sequence[ComparedFile] = (),
        keep: frozenset[str] = frozenset(),
    ) -> None:
        self.copies = Copies(files)  # into the loop's arrays and into memory of their own: made before they are used
        self._in_files = bool(files)
        self._keep = keep  # paths of what stays as the code has made it
        self._rows, self._buffer, self._frameworks = rows, buffer, frameworks
        self._by_kind = {one.kind: one for one in frameworks}
        self._seen: dict[int, tuple[Any, StoredArray]] = {}  # by identity; kept, so that no identity is used again
        self._places: dict[int, Range] = {}  # of large views in files, by identity
        if files:
            self.copies.hold(self._range(at) for at, row in enumerate(rows) if 0 < row.size < LARGE)
            self.copies.use(self._range(at) for at, row in enumerate(rows) if row.size >= LARGE and row.kind == "bytes")

    def views(self, node: Node) -> Any:
        """Return a state whose arrays lie in the slot: to be copied from, and not kept."""
        return build(node, self._view, self._frameworks)

    def own(self, node: Node) -> Any:
        """Return a state in memory of its own."""
        return build(node, self._clone, self._frameworks)

    def use(self, state: Any) -> None:
        """Make the large views in ``state`` usable, which somebody copies by himself."""
        if self._places and isinstance(state, dict):
            self.copies.use(place for one in state.values() if (place := self._places.get(id(one))) is not None)

    def settle(self, value: Any) -> Any:
        """Return a part of ``views`` in memory of its own."""
        if id(value) in self._seen:
            view, row = self._seen[id(value)]
            return self._by_kind[row.kind].clone(view, row, self.copies)
        if isinstance(value, dict):
            for key in value:
                value[key] = self.settle(value[key])
            return value
        if isinstance(value, (list, tuple, set, frozenset)):
            return type(value)(self.settle(one) for one in value)
        return value

    def merge(self, live: Any, saved: Any, path: str) -> Any:
        """Return ``live`` with the saved values, in place as far as possible."""
        if path in self._keep:
            return live
        if type(live) is dict and type(saved) is dict:
            merged = {key: self.merge(live.get(key), one, f"{path}[{key!r}]") for key, one in saved.items()}
            kept = {key: one for key, one in live.items() if key not in saved and f"{path}[{key!r}]" in self._keep}
            live.clear()
            live.update({**merged, **kept})
            return live
        if type(live) is list and type(saved) is list:
            old = [*live[: len(saved)], *[None] * (len(saved) - len(live))]
            live[:] = [self.merge(one, other, "") for one, other in zip(old, saved)]
            return live
        if id(saved) in self._seen:
            view, row = self._seen[id(saved)]
            return live if self._by_kind[row.kind].load(live, view, self.copies) else self.settle(saved)
        return self.settle(saved)

    def _view(self, at: int) -> Any:
        row = self._rows[at]
        view = self._by_kind[row.kind].view(self._buffer(at), row)
        self._seen[id(view)] = (view, row)
        if self._in_files and row.size >= LARGE:
            self._places[id(view)] = self._range(at)
        return view

    def _range(self, at: int) -> Range:
        """Return where an array lies in memory."""
        import ctypes

        row = self._rows[at]
        return ctypes.addressof(ctypes.c_char.from_buffer(self._buffer(at), row.offset)), row.size

    def _clone(self, at: int) -> Any:
        row = self._rows[at]
        framework = self._by_kind[row.kind]
        return framework.clone(framework.view(self._buffer(at), row), row, self.copies)


def _words(row: StoredArray) -> str:
    return f"{row.kind} {row.dtype} {row.shape}"


def _names(words: Any) -> str:
    return ", ".join(sorted(map(str, words))) or "nothing"


# ------------------------------------------------------------------------------------------

# The state of a training loop in the files of a checkpoint: one of each rank, without pickle.
#
# Rank 0 alone writes what all ranks hold alike (the weights and moments of a data-parallel training). Which arrays those are is
# seen, not assumed: each rank compares the digests of its arrays with those of rank 0, and writes what differs. The file of a
# rank is the description that snapshots have (``snapshots/state.py``), and the bytes of its arrays behind it.

_MAGIC = b"ftsupervise loop state 1\n"
_HEADER = PAGE  # bytes, the magic included
_PIECE = 1 << 30  # bytes written at once: the kernel takes 2 GiB at most


class FirstArray(NamedTuple):
    """An array of rank 0: its digest, type and shape in one word, and its place in that rank's file."""

    word: str
    offset: int


class SavedRank(NamedTuple):
    """The state that one rank saved, as it lies in its file: each array is to be compared before it is used."""

    step: int
    rank: int
    world: int
    description: bytes
    own: frozenset[int]  # the arrays that lie in this rank's file; the others lie in rank 0's
    data: memoryview
    file: ComparedFile

    def arrays(self) -> tuple[StoredArray, ...]:
        return parse(self.description)[1]


def first_arrays(loop: LoopState, described: Described) -> list[FirstArray]:
    """Return the arrays of this rank as rank 0 describes them to the others: where it would write them, were it rank 0."""
    rows, _ = _pack(described.arrays, frozenset(range(len(described.arrays))))
    return [FirstArray(_word(row, loop.raw(described, at)), row.offset) for at, row in enumerate(rows)]


def write_loop_file(
    checkpoint: Path, loop: LoopState, described: Described, who: tuple[int, int, int], first: Sequence[FirstArray] = ()
) -> None:
    """Write the file of the rank: ``who`` is its step, its rank and the number of ranks. ``first``: the arrays of rank 0, to
    compare with; without them all are written. Raises OSError."""
    step, rank, world = who
    shared: dict[int, int] = {}
    if rank and first:
        places = {one.word: one.offset for one in first}
        mine = first_arrays(loop, described)
        shared = {at: places[one.word] for at, one in enumerate(mine) if one.word in places}
    own = frozenset(range(len(described.arrays))) - shared.keys()
    rows, size = _pack(described.arrays, own)
    rows = [row._replace(offset=shared.get(at, row.offset)) for at, row in enumerate(rows)]
    tree, _, _ = described.description.partition(b"\n")
    description = b"\n".join((_json(_ranges(own)), tree, _json(rows)))
    header = {"step": step, "rank": rank, "world": world, "description": len(description), "size": size}
    head = _MAGIC + _json(header) + b"\n"
    begin = _page(_HEADER + len(description))
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_CLOEXEC
    # a stranger's link on the way may lead to another checkpoint
    with files.folder_of(loop_file(checkpoint, rank)) as (folder, name):
        fd = os.open(name, flags, 0o644, dir_fd=folder)
    try:
        _write_at(fd, memoryview(head), 0)
        _write_at(fd, memoryview(description), _HEADER)
        for at in sorted(own):
            _write_at(fd, loop.raw(described, at), begin + rows[at].offset)
        os.ftruncate(fd, begin + size)
    finally:
        os.close(fd)


def read_loop_file(
    checkpoint: Path, rank: int, beat: Callable[[], object] = lambda: None, *, whole: bool = False
) -> SavedRank:
    """Return the state of a rank. Its description was compared with the manifest; its arrays are, each before it is used, by
    its ``file``. ``whole``: every byte was.

    Raises Damaged for one that is not what was committed, CannotJudge where the digest cannot be taken here, ValueError for
    one of another version, OSError, FileNotFoundError where there is none.
    """
    manifest, path = _manifest(checkpoint), loop_file(checkpoint, rank)
    entry = next((one for one in manifest.files if one.path == path.name), None)
    if entry is None:
        raise Damaged(f"{path} is not in the manifest")
    fd = files.open_regular(path)
    try:
        before = os.fstat(fd)
        if before.st_size != entry.size or not entry.size:
            raise Damaged(f"{path} has {before.st_size} bytes of {entry.size}")
        blocks = b"" if whole else block_lists.known(checkpoint, entry, manifest.algorithm)
        file = ComparedFile(fd, before.st_size, manifest.algorithm, entry.digest, path, blocks, beat)
    finally:
        os.close(fd)
    file.hold([(0, _HEADER)])
    if file.data[: len(_MAGIC)] != _MAGIC:
        raise ValueError(f"{path} is not the state of a loop, or of another version of ftsupervise")
    try:
        return _parsed(json.loads(bytes(file.data[len(_MAGIC) : _HEADER]).partition(b"\n")[0]), file, rank)
    except Damaged:
        raise
    except (ValueError, KeyError, TypeError) as error:
        raise Damaged(f"{path} is damaged: {error}") from None


def _manifest(checkpoint: Path) -> Manifest:
    try:
        manifest = read_manifest(checkpoint)
    except CannotJudge:
        raise
    except ValueError as error:
        raise Damaged(str(error)) from None
    if manifest is None:
        raise FileNotFoundError(errno.ENOENT, "has no manifest", str(checkpoint))
    return manifest


def _parsed(said: dict[str, Any], file: ComparedFile, rank: int) -> SavedRank:
    whole = file.data
    step, of, world, length, size = (int(said[name]) for name in ("step", "rank", "world", "description", "size"))
    begin = _page(_HEADER + length)
    if of != rank or min(length, size) < 0 or begin + size != len(whole):
        raise ValueError(f"it has {len(whole)} bytes, and {begin + size} were written")
    file.hold([(_HEADER, _HEADER + length)])
    numbers, _, description = bytes(whole[_HEADER : _HEADER + length]).partition(b"\n")
    own = frozenset(at for first, last in json.loads(numbers) for at in range(int(first), int(last) + 1))
    state = SavedRank(step, rank, world, description, own, whole[begin:], file)
    for number, row in enumerate(state.arrays()):
        if number in own and not 0 <= row.offset <= row.offset + row.size <= size:
            raise ValueError("an array lies outside of it")
    return state


def _pack(arrays: Sequence[StoredArray], own: frozenset[int]) -> tuple[list[StoredArray], int]:
    """Return the rows with the places of our own arrays, one behind the other; and the bytes that they take. The small ones
    come first: they are read together, and a block of large ones is copied as it is read."""
    rows, at = list(arrays), 0
    for number in sorted(own, key=lambda one: (arrays[one].size >= LARGE, one)):
        at = -(-at // ALIGNED) * ALIGNED
        rows[number] = arrays[number]._replace(offset=at)
        at += arrays[number].size
    return rows, at


def _word(row: StoredArray, data: memoryview) -> str:
    algorithm = best_algorithm()
    digest = blake2b(data, digest_size=16).hexdigest() if algorithm == CRC32 else hash_buffer(data, algorithm)
    return f"{digest} {row.kind} {row.dtype} {row.shape} {row.strides}"


def _json(value: object) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode()


def _write_at(fd: int, data: memoryview, at: int) -> None:
    while data:
        done = os.pwrite(fd, data[:_PIECE], at)
        data, at = data[done:], at + done


def _ranges(numbers: frozenset[int]) -> list[tuple[int, int]]:
    found: list[tuple[int, int]] = []
    for one in sorted(numbers):
        if found and found[-1][1] == one - 1:
            found[-1] = found[-1][0], one
        else:
            found.append((one, one))
    return found


def _page(at: int) -> int:
    return -(-at // PAGE) * PAGE


# ------------------------------------------------------------------------------------------

# The loop's own state in checkpoints: ``guard.save`` writes it, and ``guard.restore`` brings it back where memory has none.
#
# All ranks do the same or all raise: rank 0 chooses from which checkpoint they begin, each step of a save is over on all of
# them before the next one begins, and a fault of one is raised on each.

_OVER = "a newer attempt has begun"
_NONE, _FAULT, _REFUSED, _STEPS = (
    0,
    1,
    2,
    3,
)  # what rank 0 tells as a vote: none, it could not see, none may be used; or a step

_UNREADABLE = (errno.EIO, errno.EBADMSG, errno.EUCLEAN)  # the disk is bad in this place; other files may be read
_READ_AGAIN = 2.0  # seconds until such a checkpoint is read once more

Latest = Callable[[Wanted], Optional[Path]]


class _Kind(Enum):
    """How the reading of a checkpoint went, the worst last: what one rank has seen holds for all."""

    FINE = 0
    MISFIT = 1  # it is as it was saved, and this loop cannot take it
    DAMAGED = 2
    UNREAD = 3  # the disk does not give its bytes
    UNSEEN = 4


class _Outcome(NamedTuple):
    kind: _Kind = _Kind.FINE
    words: str = ""


class _Read(NamedTuple):
    """The state of rank 0 and of this rank. Each array is compared before it is used."""

    first: SavedRank
    state: SavedRank

    @property
    def files(self) -> tuple[ComparedFile, ...]:
        return (self.state.file,) if self.first is self.state else (self.first.file, self.state.file)


class LoopCheckpoints:
    """The checkpoints of one loop. ``agree``: int -> int, the maximum over all ranks; None: they have none."""

    def __init__(
        self,
        loop: LoopState,
        place: RankContext,
        checkpoints: Checkpoints,
        voice: Voice,
        agree: Callable[[int], int] | None,
        beat: Callable[[], object] = lambda: None,
    ) -> None:
        self._loop, self._place, self._checkpoints, self._voice, self._agree = loop, place, checkpoints, voice, agree
        self._beat, self._tells, self._noted, self._warm = beat, False, False, False
        self._looked: Path | None = None  # the last one of which a rank could not read all

    # ----------------------------------------------------------------------------------------------------------- restore

    def restore(self, latest: Latest, one_pass: Callable[[], object] | None) -> int | None:
        """Return the step of the newest good checkpoint that ``guard.save`` wrote, loaded; None when there is none.

        No byte is loaded that was not compared with the manifest. One that is damaged is set aside, and all ranks take the one
        before, of which all is loaded over what may have been loaded by then; one that the disk does not give stays, and they
        take the one before likewise. Raises OSError where the checkpoints cannot be read, RuntimeError where this loop cannot
        load the one that was chosen, CannotResume where there must be one. Where it raises when it has loaded a part, nothing
        of this loop is saved.
        """
        self._tells = self._place.world == 1 or self._agree is not None or self._ranks() is not None
        wanted = Wanted(lambda path: loop_file(path, 0).is_file(), compares=True)
        begun: list[str] = []
        try:
            return self._restore(latest, wanted, one_pass, begun)
        except BaseException:
            if begun:
                self._checkpoints.again = LoadedInPart(begun[-1])
                self._voice.once(
                    f"{begun[-1]} was loaded in part: the objects of the loop are not to be used as they are now"
                )
            raise

    def _restore(
        self, latest: Latest, wanted: Wanted, one_pass: Callable[[], object] | None, begun: list[str]
    ) -> int | None:
        """``begun`` gets the names of those of which a part may be loaded."""
        while True:
            newest = self._newest(lambda now=wanted: latest(now))  # type: ignore[misc]
            if newest is None and begun:
                raise RuntimeError(f"{begun[-1]} is damaged, and there is none before it")
            if newest is None or self._is_of_another_form(newest):
                return None
            read, mine = self._read(newest)
            outcome = self._worst(mine)
            if outcome.kind is _Kind.FINE:
                assert read is not None
                self._warm_up(one_pass)
                begun.append(newest.name)
                put, mine = self._fill(newest, read)
                outcome = self._worst(mine)
                if put is not None and outcome.kind is _Kind.FINE:
                    return self._put(newest, read, put)
                if outcome.kind is _Kind.MISFIT:
                    raise RuntimeError(f"{newest} cannot be loaded: {outcome.words}")
            if outcome.kind is _Kind.DAMAGED:
                wanted = self._without(wanted, newest, outcome.words)
                continue
            if outcome.kind is _Kind.UNREAD:
                wanted = self._after_unread(wanted, newest, outcome.words)
                continue
            if outcome.kind is _Kind.UNSEEN:
                raise OSError(errno.EIO, f"no rank begins: {outcome.words}", str(newest))
            if outcome.kind is _Kind.MISFIT:
                words = f"{newest} cannot be loaded: {outcome.words}"
                refuse(self._place, words, self._voice)
                raise RuntimeError(words)

    def _is_of_another_form(self, newest: Path) -> bool:
        """Return whether rank 0 has found nothing for ``restore`` and has asked ``guard.latest`` since: what this rank reads on
        its page then is good, and in a form of the loop's own."""
        if self._place.rank == 0 or self._tells:
            return False
        try:
            wait_for(newest)
            return not loop_file(newest, 0).is_file()
        except OSError:  # whoever reads it says why
            return False

    def _newest(self, latest: Callable[[], Path | None]) -> Path | None:
        """Return the newest one, the same on all ranks."""
        place, ranks = self._place, self._ranks()
        if place.world == 1 or (ranks is None and self._agree is None):
            return latest()
        found: Path | OSError | CannotResume | None = None
        if place.rank == 0:
            try:
                found = latest()
            except (OSError, CannotResume) as error:
                found = error
        found = _opened(ranks.from_rank_0(_sealed(found))) if ranks is not None else self._by_vote(found)
        if isinstance(found, (OSError, CannotResume)):
            raise found
        return found

    def _by_vote(self, found: Path | OSError | CannotResume | None) -> Path | OSError | CannotResume | None:
        """Return what rank 0 found; it tells the others the step alone."""
        assert self._agree is not None
        vote = {OSError: _FAULT, CannotResume: _REFUSED}.get(type(found), _FAULT) if found is not None else _NONE
        if isinstance(found, Path):
            vote = _STEPS + (step_of(found.name) or 0)
        told = int(self._agree(vote))
        if self._place.rank == 0:
            return found
        if told == _FAULT:
            return OSError(errno.EIO, "rank 0 cannot read the checkpoints")
        if told == _REFUSED:
            return CannotResume("rank 0 finds nothing that this run may go on from")
        return None if told == _NONE else self._place.checkpoints / name_of(told - _STEPS)

    def _read(self, newest: Path) -> tuple[_Read | None, _Outcome]:
        """Return what this rank loads, and how that went: its description was compared, and the loop can take it."""
        try:
            if self._place.rank:
                wait_for(newest)
            read = self._compared(newest)
            reason = self._loop.why_not(read.state.description)
            return read, _Outcome(_Kind.MISFIT, reason) if reason else _Outcome()
        except (OSError, ValueError) as error:
            return None, self._judged(newest, error)

    def _judged(self, newest: Path, error: OSError | ValueError) -> _Outcome:
        if isinstance(error, Damaged):
            return _Outcome(_Kind.DAMAGED, str(error))
        if isinstance(error, CannotJudge):
            return _Outcome(_Kind.UNSEEN, self._who(str(error)))
        if isinstance(error, OSError):
            kind = _Kind.UNREAD if error.errno in _UNREADABLE else _Kind.UNSEEN
            return _Outcome(kind, self._who(f"{error.strerror or error}: {error.filename or newest}"))
        return _Outcome(_Kind.MISFIT, str(error))

    def _warm_up(self, one_pass: Callable[[], object] | None) -> None:
        if not self._warm:
            self._warm = True
            self._loop.warm_up(one_pass)

    def _fill(self, newest: Path, read: _Read) -> tuple[Callable[[], None] | None, _Outcome]:
        """Read all that this rank loads, every byte compared; return what puts it into the loop's objects, and how it went."""
        first, state = read
        try:
            put = self._loop.fill(
                state.description, lambda at: state.data if at in state.own else first.data, read.files
            )
            for file in read.files if not self._tells else read.files[-1:]:  # rank 0 compares the rest of its own
                file.rest()
            return put, _Outcome()
        except (OSError, ValueError) as error:
            return None, self._judged(newest, error)
        except Exception as error:  # the other ranks must not wait for this one
            return None, _Outcome(_Kind.MISFIT, self._who(str(error) or type(error).__name__))

    def _compared(self, newest: Path) -> _Read:
        rank, world = self._place.rank, self._place.world
        whole = not self._loop.strict  # what it leaves out of one must not be there from another
        first = read_loop_file(newest, 0, self._beat, whole=whole)
        if first.world != world:
            if rank == 0 or not self._tells:
                self._require_whole(newest, first.world)
            return _Read(first, first)
        return _Read(first, read_loop_file(newest, rank, self._beat, whole=whole) if rank else first)

    def _who(self, why: str) -> str:
        return why if self._place.world == 1 else f"rank {self._place.rank}: {why}"

    def _worst(self, mine: _Outcome) -> _Outcome:
        """Return the worst outcome of all ranks, the same on each; where they cannot tell each other, this rank's."""
        ranks = self._ranks()
        if self._place.world == 1 or not self._tells:
            return mine
        if ranks is not None:
            told = [_Outcome(_Kind(kind), words) for kind, words in ranks.of_all((mine.kind.value, mine.words))]
            return max(told, key=lambda one: one.kind.value)
        assert self._agree is not None
        kind = _Kind(int(self._agree(mine.kind.value)))
        return mine if kind is mine.kind else _Outcome(kind, "as another rank says")

    def _without(self, wanted: Wanted, newest: Path, why: str) -> Wanted:
        """Go on without a damaged one. Raises OSError where the other ranks cannot be told."""
        if self._place.rank == 0 or not self._tells:
            self._voice.once(f"{checkpoint_words(newest.name)} is damaged: {why}; it is not loaded")
        if not self._tells:
            set_damaged_aside(self._place, newest.name, why, self._voice)
            raise OSError(
                errno.EIO, f"{why}; start again: the ranks cannot tell each other to take another", str(newest)
            )
        words = f"{newest.name} is damaged: {why}"
        return wanted._replace(without=(*wanted.without, newest.name), damaged=(*wanted.damaged, words))

    def _after_unread(self, wanted: Wanted, newest: Path, why: str) -> Wanted:
        """Go on without one whose bytes the disk does not give, after another look at it. It stays where it is. Raises OSError
        where the other ranks cannot be told."""
        if not self._tells:
            todo = f"to take the one before: ftsupervise checkpoints set-aside {shlex.quote(str(newest))}"
            raise OSError(errno.EIO, f"{why}; the ranks cannot tell each other to take another; {todo}", str(newest))
        if self._looked != newest:
            self._looked = newest
            self._voice.once(f"{checkpoint_words(newest.name)} cannot be read: {why}; it is read once more")
            time.sleep(_READ_AGAIN)
            return wanted
        unread = Verdict(newest, CheckpointState.UNSEEN, (why,), step=step_of(newest.name), error=errno.EIO)
        return wanted._replace(unread=(*wanted.unread, unread))

    def _put(self, newest: Path, read: _Read, put: Callable[[], None]) -> int:
        rank, world, loop = self._place.rank, self._place.world, self._loop
        first, state = read
        try:
            put()
        except ValueError as error:
            raise RuntimeError(f"{newest} cannot be loaded: {error}") from error
        again = [file.unchanged for file in read.files if not file.is_held]
        self._checkpoints.again = LoadedAgain(newest.name, again) if again else None
        for words in loop.left(state.description):
            self._voice.once(f"strict=False: {words}")
        if first.world != world:
            loop.begin_other_streams(first.description, rank, world)
            if rank == 0:
                self._voice.once(
                    f"{checkpoint_words(newest.name)} was saved by {first.world} ranks, and {world} go on from it: random "
                    "numbers and the place in the data are not exactly those of an undisturbed run"
                )
        return first.step

    def _require_whole(self, newest: Path, saved: int) -> None:
        """Raise ValueError where a rank that wrote it kept a part of the model for itself."""
        bound: set[str] = set()
        for rank in range(1, saved):
            state: SavedRank = read_loop_file(newest, rank, self._beat)
            bound.update(self._loop.bound_to_ranks(state.description, state.own))
        if bound:
            raise ValueError(
                f"it was saved by {saved} ranks, each with a part of its own of {', '.join(sorted(bound))}: begin with "
                f"{saved} ranks, or save with torch's DCP (AsyncCheckpoints), which loads with any number of ranks"
            )

    # -------------------------------------------------------------------------------------------------------------- save

    def write(self, folder: Path, step: int) -> None:
        """Write this rank's whole state, into a folder of its own making.

        Raises OSError, and TypeError for a value that cannot be kept.
        """
        write_loop_file(folder, self._loop, self._loop.describe(), (step, self._place.rank, self._place.world))

    def is_together(self) -> bool:
        """Return whether the program has a process group of all ranks, through which they can save together."""
        return self._ranks() is not None

    def save(self, step: int, metrics: Mapping[str, float]) -> bool:
        """Save one checkpoint on all ranks; when it returns, it is committed on all of them. False: a newer attempt has
        begun.

        Raises OSError on all ranks when one of them could not write its part, or rank 0 could not commit.
        """
        place, ranks, checkpoints, name = self._place, self._ranks(), self._checkpoints, name_of(step)
        assert ranks is not None
        described = self._loop.describe()
        first = ranks.from_rank_0(first_arrays(self._loop, described) if place.rank == 0 else None)

        def write() -> bool:
            folder = checkpoints.stage(name)
            write_loop_file(folder, self._loop, described, (step, place.rank, place.world), first)
            checkpoints.list_own(folder)
            return True

        def commit() -> bool:
            return checkpoints.commit(checkpoints.stage(name), step, metrics, range(place.world))

        alone: tuple[tuple[bool, Callable[[], object]], ...] = (
            (place.rank == 0, lambda: checkpoints.stage_anew(name)),
            (True, write),
            (place.rank == 0, commit),
        )
        for mine, work in alone:
            failed = next(filter(None, ranks.of_all(self._outcome(work) if mine else "")), "")
            if failed == _OVER:
                return False
            if failed:
                if place.rank == 0:
                    checkpoints.discard(checkpoints.stage(name))
                raise OSError(errno.EIO, f"step {step} was not saved: {failed}")
        self.note_saved(step)
        return True

    def note_saved(self, step: int) -> None:
        """Note once, on rank 0, that there is a checkpoint for ``restore``: a later start must find one."""
        place = self._place
        if self._noted or place.rank or place.rundir is None:
            return
        from ftsupervise.rundir.beginnings import note_restorable

        self._noted = True
        try:
            note_restorable(place.rundir, step, place.attempt)
        except OSError as error:
            self._voice.once(f"cannot note in {place.rundir.state} that guard.save() has saved: {error.strerror}")

    def _outcome(self, work: Callable[[], object]) -> str:
        """Return why it failed; "" when it did not."""
        try:
            return "" if work() else _OVER
        except OSError as error:
            if self._checkpoints.over():
                return _OVER
            return (
                f"rank {self._place.rank}: {error.strerror or error}{f': {error.filename}' if error.filename else ''}"
            )

    def _ranks(self) -> Any:
        return self._loop.ranks(self._place.rank, self._place.world)


def _sealed(found: Path | OSError | CannotResume | None) -> tuple[str, Any]:
    """Return what rank 0 found, as it travels."""
    if isinstance(found, CannotResume):
        return "refused", found.words
    return "found", found


def _opened(told: tuple[str, Any]) -> Path | OSError | CannotResume | None:
    how, what = told
    return CannotResume(what) if how == "refused" else what


def name_of(step: int) -> str:
    return f"step-{step:08d}"
