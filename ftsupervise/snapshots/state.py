"""The state of a training loop as a description (JSON) and a row of arrays, and back, bit for bit, without pickle.

Whatever an object's ``state_dict()`` is made of goes into the description: dictionaries with any plain keys, in their order,
lists, tuples, sets, numbers, texts, bytes. Arrays are left out of it: each is copied as it is to its place in the data, by the
framework that it belongs to or together with its neighbours in memory. Nothing that is read can run code. What is of no known
kind is refused by name, never guessed.

Frameworks are handed in (``state.py``, ``integrations/``): this module knows none.
"""

from __future__ import annotations

import json
import struct
import sys
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from hashlib import blake2b
from importlib import import_module
from typing import Any, NamedTuple, Protocol

from ftsupervise.snapshots.wait import LARGE, Copies

ALIGNED = 64  # bytes: where arrays begin
PAGE = 4096  # the smallest there is
_LARGE = 1 << 16  # bytes of an array that is copied with its neighbours
LONG_BYTES = 1024  # and more are data, not description
_PLAIN = frozenset({str, int, bool, float, type(None)})
Node = Any  # JSON: what `json` writes and reads


class CannotKeep(TypeError):
    """A value of a kind that a snapshot does not hold. The message says where it stands."""

    def __init__(self, value: object) -> None:
        super().__init__()
        self._kind, self._path = f"{type(value).__module__}.{type(value).__qualname__}", ""

    def within(self, key: object) -> None:
        self._path = f"[{key!r}]{self._path}"

    def __str__(self) -> str:
        return f"{self._path or 'the state'} is of the type {self._kind}, which a snapshot does not hold"


class StoredArray(NamedTuple):
    """An array as it lies in the data of a snapshot."""

    kind: str  # whose it is: "torch", "numpy", "bytes"
    dtype: str
    shape: tuple[int, ...]
    strides: tuple[int, ...]  # as its framework counts them
    size: int  # bytes
    offset: int = 0  # in the data


class Arrays(Protocol):
    """The operations that a framework has for its arrays."""

    kind: str

    def owns(self, value: object) -> bool: ...

    def describe(self, value: Any) -> StoredArray:
        """Describe a value. Raises CannotKeep."""

    def memory(self, value: Any) -> Hashable:
        """Return a key that is equal for two that are the same bytes in the same shape: they are kept once."""

    def view(self, buffer: Any, stored: StoredArray) -> Any:
        """Return the array as it lies in ``buffer``, at its offset: storing into it changes the buffer."""

    def address(self, value: Any, stored: StoredArray) -> int:
        """Return where its bytes lie in this process, one after the other as ``stored`` says; 0 where they do not
        (another device).
        """

    def copy(self, views: Sequence[Any], values: Sequence[Any]) -> None:
        """Copy each value into its view. The training loop waits for this."""

    def clone(self, view: Any, stored: StoredArray, copies: Copies) -> Any:
        """Return the same in memory of its own, once ``copies`` are made."""

    def load(self, live: Any, saved: Any, copies: Copies) -> bool:
        """Copy ``saved`` into ``live``, once ``copies`` are made; return False when it is of another type or shape."""

    def word(self, value: object) -> tuple[str, str] | None:
        """Return a small value of its own kind (a type of numbers, a device) in two words; None for any other."""

    def from_word(self, kind: str, text: str) -> Any:
        """Return the value again. Raises ValueError."""


class Block(NamedTuple):
    """Arrays that lie side by side in this process's memory, and are copied at once."""

    offset: int  # in the data
    address: int
    size: int


class Described(NamedTuple):
    """A state, ready to be copied."""

    description: bytes
    layout: bytes  # 16 bytes: equal for two states whose arrays lie alike
    arrays: tuple[StoredArray, ...]
    values: tuple[Any, ...]  # the arrays themselves; the blocks point into them
    size: int  # bytes of the data
    room: int = 0  # bytes that they take at most, wherever the arrays lie
    blocks: tuple[Block, ...] = ()
    loose: tuple[int, ...] = ()  # the arrays that are in no block, by their places in ``arrays``


class _Table(NamedTuple):
    text: bytes
    layout: bytes
    arrays: tuple[StoredArray, ...]
    size: int
    room: int
    blocks: tuple[Block, ...]
    loose: tuple[int, ...]


class Describer:
    """Describes one state after the other. The arrays of a loop seldom change or move, so their table is made once."""

    def __init__(self, frameworks: Sequence[Arrays]) -> None:
        self.frameworks = frameworks
        self._made_of: tuple[list[StoredArray], list[int]] | None = None
        self._table = _table([], [])

    def describe(self, state: object) -> Described:
        """Describe a state. Raises CannotKeep."""
        walk = _Walk(self.frameworks)
        tree = json.dumps(walk.node(state), separators=(",", ":")).encode()
        if (walk.rows, walk.addresses) != self._made_of:
            self._table, self._made_of = _table(walk.rows, walk.addresses), (walk.rows, walk.addresses)
        made = self._table
        return Described(
            tree + b"\n" + made.text,
            made.layout,
            made.arrays,
            tuple(walk.values),
            made.size,
            made.room,
            made.blocks,
            made.loose,
        )


def _table(rows: list[StoredArray], addresses: list[int]) -> _Table:
    """Decide where each array goes.

    Large ones that are neighbours in this process's memory stay neighbours: a memcpy of hundreds of megabytes leaves
    the caches alone, and on some processors takes half as long as the same bytes piece by piece.
    """
    large = sorted((address, n) for n, address in enumerate(addresses) if address and rows[n].size >= _LARGE)
    blocks: list[Block] = []
    placed: dict[int, int] = {}
    at = 0
    for address, n in large:
        last = blocks[-1] if blocks else None
        if last is not None and _adjoins(last.address + last.size, address):
            blocks[-1] = last._replace(size=address + rows[n].size - last.address)
            placed[n] = last.offset + address - last.address
        else:
            placed[n] = _aligned(at) + address % ALIGNED
            blocks.append(Block(placed[n], address, rows[n].size))
        at = placed[n] + rows[n].size
    loose = tuple(n for n in range(len(rows)) if n not in placed)
    for n in loose:
        placed[n] = _aligned(at)
        at = placed[n] + rows[n].size
    arrays = tuple(row._replace(offset=placed[n]) for n, row in enumerate(rows))
    text = json.dumps(arrays, separators=(",", ":")).encode()
    room = sum(row.size for row in rows) + (2 * PAGE + 2 * ALIGNED) * len(rows)
    return _Table(text, blake2b(text, digest_size=16).digest(), arrays, at, room, tuple(blocks), loose)


def _adjoins(end: int, start: int) -> bool:
    """May what lies between ``end`` and ``start`` be read too? It may when it is on the last page of the one or the first page
    of the other: those are there."""
    return end <= start and (end - 1) // PAGE + 1 >= start // PAGE


def _aligned(at: int) -> int:
    return -(-at // ALIGNED) * ALIGNED


def copy_blocks(described: Described, buffer: memoryview) -> None:
    """Copy the blocks into ``buffer``; the interpreter's lock is not held meanwhile."""
    import ctypes

    first: Any = ctypes.c_char.from_buffer(buffer)
    base = ctypes.addressof(first)
    for offset, address, size in described.blocks:
        ctypes.memmove(base + offset, address, size)


def parse(description: bytes) -> tuple[Node, tuple[StoredArray, ...]]:
    """Return the tree and the table of arrays. Raises ValueError."""
    tree, _, table = description.partition(b"\n")
    try:
        rows = [StoredArray(kind, dtype, tuple(shape), tuple(strides), int(size), int(offset))
                for kind, dtype, shape, strides, size, offset in json.loads(table)]  # fmt: skip
        return json.loads(tree), tuple(rows)
    except (TypeError, RecursionError) as error:
        raise ValueError(f"the description of a snapshot is damaged: {error}") from None


def code_of(description: bytes) -> str:
    """Return the version of the code that the loop named when it was described; "": none. Raises ValueError."""
    tree = json.loads(description.partition(b"\n")[0])
    inner = tree.get("dict", tree) if isinstance(tree, dict) else {}
    code = inner.get("code", "") if isinstance(inner, dict) else ""
    return code if isinstance(code, str) else ""


class _Walk:
    """One pass over a state: its tree, and the arrays that it came by."""

    def __init__(self, frameworks: Sequence[Arrays]) -> None:
        self._frameworks = frameworks
        self._known: dict[Hashable, int] = {}
        self.rows: list[StoredArray] = []
        self.values: list[Any] = []
        self.addresses: list[int] = []  # 0: it is copied by its framework

    def node(self, value: Any) -> Node:
        kind = type(value)
        if kind in _PLAIN:
            return value
        if kind is list:
            return [self.node(one) for one in value]
        if kind is dict or kind is OrderedDict:
            return self._dictionary(value)
        for framework in self._frameworks:
            if framework.owns(value):
                return {"array": self._array(framework, value)}
        return self._small(value)

    def _dictionary(self, value: dict[Any, Any]) -> Node:
        items = []
        for key, one in value.items():
            try:
                items.append((self.node(key), self.node(one)))
            except CannotKeep as error:
                error.within(key)
                raise
        plain = type(value) is dict
        if plain and all(type(key) is str for key in value):
            return {"dict": dict(items)}
        notes = None if plain else getattr(value, "_metadata", None)  # a module's versions, which its loading asks for
        return {"items": items, "ordered": not plain, **({} if notes is None else {"notes": self.node(notes)})}

    def _array(self, framework: Arrays, value: Any) -> int:
        memory = (framework.kind, framework.memory(value))
        if (known := self._known.get(memory)) is not None:
            return known
        self._known[memory] = at = len(self.rows)
        row = framework.describe(value)
        self.rows.append(row)
        self.values.append(value)
        self.addresses.append(framework.address(value, row) if row.size >= _LARGE else 0)
        return at

    def _small(self, value: Any) -> Node:
        kind = type(value)
        if kind is tuple:
            return {"tuple": [self.node(one) for one in value]}
        if kind in (set, frozenset):
            return {kind.__name__: [self.node(one) for one in value]}
        if kind is bytes:
            return {"bytes": value.hex()}
        if kind is complex:
            return {"complex": struct.pack("<dd", value.real, value.imag).hex()}
        numpy = sys.modules.get("numpy")
        if numpy is not None and isinstance(value, numpy.generic) and not value.dtype.hasobject:
            return {"scalar": [value.dtype.str, value.tobytes().hex()]}
        for framework in self._frameworks:
            if (word := framework.word(value)) is not None:
                return {"word": [framework.kind, *word]}
        raise CannotKeep(value)


def build(node: Node, array: Callable[[int], Any], frameworks: Sequence[Arrays] = ()) -> Any:
    """Return the state again; ``array(n)`` gives the n-th array of the table. Raises ValueError for a tree that is damaged."""
    if isinstance(node, list):
        return [build(one, array, frameworks) for one in node]
    if not isinstance(node, dict):
        return node
    tag: str = next(iter(node), "")
    inner: Any = node.get(tag)
    if tag == "array":
        return array(inner)
    if tag == "dict":
        return {key: build(one, array, frameworks) for key, one in inner.items()}
    if tag == "items":
        pairs = [(build(key, array, frameworks), build(one, array, frameworks)) for key, one in inner]
        if not node.get("ordered"):
            return dict(pairs)
        made = OrderedDict(pairs)
        if "notes" in node:
            made._metadata = build(node["notes"], array, frameworks)  # type: ignore[attr-defined]
        return made
    several = {"tuple": tuple, "set": set, "frozenset": frozenset}.get(tag)
    if several is not None:
        return several(build(one, array, frameworks) for one in inner)
    return _small(tag, inner, frameworks)


def _small(tag: str, inner: Any, frameworks: Sequence[Arrays]) -> Any:
    if tag == "bytes":
        return bytes.fromhex(inner)
    if tag == "complex":
        return complex(*struct.unpack("<dd", bytes.fromhex(inner)))
    if tag == "scalar":
        import numpy

        return numpy.frombuffer(bytes.fromhex(inner[1]), dtype=inner[0])[0]
    if tag == "word":
        for framework in frameworks:
            if framework.kind == inner[0]:
                return framework.from_word(*inner[1:])
    raise ValueError(f"the description of a snapshot is damaged, or of a framework that is not loaded: {tag!r}")


# ------------------------------------------------------------------------------------------

# Keeps bytes, and NumPy's arrays, in a snapshot: for loops of any framework, and of none.


class _Wordless:
    def word(self, value: object) -> tuple[str, str] | None:
        return None

    def from_word(self, kind: str, text: str) -> Any:
        raise ValueError(f"the description of a snapshot is damaged: {kind} {text}")


class Bytes(_Wordless):
    """``bytearray``, and ``bytes`` of some length."""

    kind = "bytes"

    def owns(self, value: object) -> bool:
        return type(value) is bytearray or (type(value) is bytes and len(value) >= LONG_BYTES)

    def describe(self, value: bytes | bytearray) -> StoredArray:
        return StoredArray(self.kind, type(value).__name__, (len(value),), (), len(value))

    def memory(self, value: bytes | bytearray) -> Hashable:
        return id(value)

    def view(self, buffer: Any, stored: StoredArray) -> memoryview:
        return memoryview(buffer)[stored.offset : stored.offset + stored.size]

    def address(self, value: bytes | bytearray, stored: StoredArray) -> int:
        return 0

    def copy(self, views: Sequence[Any], values: Sequence[Any]) -> None:
        for view, value in zip(views, values):
            view[:] = value

    def clone(self, view: Any, stored: StoredArray, copies: Copies) -> Any:
        return bytes(view) if stored.dtype == "bytes" else bytearray(view)

    def load(self, live: Any, saved: Any, copies: Copies) -> bool:
        if type(live) is not bytearray:
            return False
        live[:] = saved
        return True


class NumPyArrays(_Wordless):
    """Arrays of numbers, of whatever memory order. NumPy is used where the loop has loaded it."""

    kind = "numpy"

    def owns(self, value: object) -> bool:
        numpy = sys.modules.get("numpy")
        return numpy is not None and type(value) is numpy.ndarray

    def describe(self, value: Any) -> StoredArray:
        if value.dtype.hasobject or value.dtype.names is not None:
            raise CannotKeep(value)
        dense = value.strides if value.flags.f_contiguous else _c_strides(value.shape, value.itemsize)
        return StoredArray(self.kind, value.dtype.str, value.shape, dense, value.nbytes)

    def memory(self, value: Any) -> Hashable:
        return id(value)

    def view(self, buffer: Any, stored: StoredArray) -> Any:
        import numpy

        return numpy.ndarray(stored.shape, stored.dtype, buffer, stored.offset, stored.strides)

    def address(self, value: Any, stored: StoredArray) -> int:
        return int(value.ctypes.data) if value.strides == stored.strides else 0

    def copy(self, views: Sequence[Any], values: Sequence[Any]) -> None:
        import numpy

        for view, value in zip(views, values):
            numpy.copyto(view, value)

    def clone(self, view: Any, stored: StoredArray, copies: Copies) -> Any:
        if stored.size < LARGE:
            return view.copy(order="K")
        made = import_module("numpy").empty_like(view)
        self._copy_later(made, view, copies)
        return made

    def load(self, live: Any, saved: Any, copies: Copies) -> bool:
        if not self.owns(live) or live.dtype != saved.dtype or live.shape != saved.shape or not live.flags.writeable:
            return False
        self._copy_later(live, saved, copies)
        return True

    def _copy_later(self, target: Any, source: Any, copies: Copies) -> None:
        dense = source.flags.c_contiguous or source.flags.f_contiguous
        if source.nbytes >= LARGE and dense and target.strides == source.strides:
            copies.add(target.ctypes.data, source.ctypes.data, source.nbytes, target, source)
        else:
            copies.later(source.ctypes.data, source.nbytes, lambda: target.__setitem__(..., source))


def _c_strides(shape: tuple[int, ...], item: int) -> tuple[int, ...]:
    strides = [item]
    for length in reversed(shape[1:]):
        strides.insert(0, strides[0] * max(1, length))
    return tuple(strides) if shape else ()
