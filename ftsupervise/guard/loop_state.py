"""Keeps a part of the training loop and puts it back: the objects that the loop named, and the random generators.

An object with ``state_dict`` and ``load_state_dict`` (a module, an optimizer, a schedule, a scaler, a stateful loader)
gives its own state. A dictionary, a list or an array is kept as it is and changed in place: a loop keeps its place in
the data there. The generators of Python, NumPy and torch are kept without being named.
"""

from __future__ import annotations

import json
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from hashlib import blake2b
from importlib import import_module
from itertools import islice
from typing import Any, NamedTuple

from ftsupervise.checkpoints.compared_file import ComparedFile
from ftsupervise.snapshots.state import (
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
        for framework, mine in zip(self._frameworks, views, strict=True):
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
        return f"{'; '.join(found[:_NAMED])}{more} (to begin all the same: restore(…, strict=False))" if found else ""

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
            live[:] = [self.merge(one, other, "") for one, other in zip(old, saved, strict=True)]
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
