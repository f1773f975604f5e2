"""Keeps bytes, and NumPy's arrays, in a snapshot: for loops of any framework, and of none."""

from __future__ import annotations

import sys
from collections.abc import Hashable, Sequence
from importlib import import_module
from typing import Any

from ftsupervise.checkpoints.memory_copies import LARGE, Copies
from ftsupervise.checkpoints.memory_state import LONG_BYTES, CannotKeep, StoredArray


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
        for view, value in zip(views, values, strict=True):
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

        for view, value in zip(views, values, strict=True):
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
