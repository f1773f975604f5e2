"""The description of a loop's state: every value comes back with its type and bits, and nothing that is read runs."""

from __future__ import annotations

import struct
from collections import OrderedDict
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftsupervise.snapshots.state import Bytes, CannotKeep, Describer, NumPyArrays, build, copy_blocks, parse
from ftsupervise.snapshots.wait import Copies

PLAIN = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text()
    | st.binary(max_size=2000)
    | st.complex_numbers()
)
KEYS = st.text(max_size=8) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=3))
VALUES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(KEYS, inner, max_size=4)
        | st.dictionaries(KEYS, inner, max_size=3).map(OrderedDict)
        | st.frozensets(st.integers() | st.text(max_size=3), max_size=3)
    ),
    max_leaves=12,
)


def kept(value: object) -> Any:
    frameworks = (NumPyArrays(), Bytes())
    described = Describer(frameworks).describe(value)
    buffer = memoryview(bytearray(described.size or 1))
    copy_blocks(described, buffer)
    for n in described.loose:
        row, one = described.arrays[n], described.values[n]
        framework = next(f for f in frameworks if f.kind == row.kind)
        framework.copy([framework.view(buffer, row)], [one])
    tree, rows = parse(described.description)
    by_kind = {f.kind: f for f in frameworks}
    copies = Copies()

    def clone(at: int) -> Any:
        row = rows[at]
        return by_kind[row.kind].clone(by_kind[row.kind].view(buffer, row), row, copies)

    made = build(tree, clone)
    copies.run()
    return made


def same(one: Any, other: Any) -> bool:
    """Of the same types and bits, in the same order."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return len(one) == len(other) and all(map(same, one, other)) and all(map(same, one.values(), other.values()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return struct.pack("<d", one) == struct.pack("<d", other) or (one != one and other != other)
    if isinstance(one, complex):
        return same(one.real, other.real) and same(one.imag, other.imag)
    return bool(one == other)


@settings(max_examples=50)
@given(VALUES)
def test_every_value_comes_back_with_its_type_and_bits(value: Any) -> None:
    assert same(value, kept(value))


def test_arrays_come_back_with_their_types_shapes_and_order() -> None:
    base = np.arange(24, dtype=">i4").reshape(2, 3, 4)
    for one in (
        base,
        base.T,
        base[:, ::2],
        base[0, 0, 0],
        np.zeros(0),
        np.array(3.5),
        np.float32(1) / 3,
        np.array("héé"),
        np.arange(2_500_000.0),  # several threads copy it, in pieces
        np.arange(600_000, dtype=">i4").reshape(1000, 600).T,
        np.arange(600_000.0).reshape(1000, 600)[:, ::2],
    ):
        back = kept({"x": one})["x"]
        assert type(back) is type(one) and back.dtype == one.dtype and np.array_equal(back, one)
        assert (
            not isinstance(one, np.ndarray) or back.flags.f_contiguous == one.flags.f_contiguous or one is base[:, ::2]
        )
    for odd in (np.array([object()]), np.zeros(2, dtype=[("a", "i4")]), object(), type, lambda: 0, {1: {2: range(3)}}):
        with pytest.raises(CannotKeep):
            kept({"x": odd})


def test_a_description_that_was_damaged_is_an_error_and_runs_nothing() -> None:
    for raw in (b"", b"{}", b"{}\n", b'{"array": 1}\n[[1]]', b'{"boom": 1}\n[]', b"[" * 100_000 + b"\n[]"):
        with pytest.raises((ValueError, LookupError)):
            tree, rows = parse(raw)
            build(tree, lambda n, rows=rows: rows[n])  # type: ignore[misc]
            raise LookupError


def test_large_arrays_are_kept_wherever_they_lie_in_memory() -> None:
    whole = np.arange(600_000.0)
    state = {"late": whole[400_000:], "early": whole[:200_000], "over": whole[100_000:300_000], "far": np.ones(90_000)}
    found = kept(state)
    assert all(np.array_equal(one, state[name]) for name, one in found.items())
    assert Describer((NumPyArrays(),)).describe(state).size <= Describer((NumPyArrays(),)).describe(state).room


def test_neighbours_in_memory_are_copied_at_once_and_the_table_is_made_anew_when_they_move() -> None:
    whole, describer = np.arange(300_000.0), Describer((NumPyArrays(),))
    parts = [whole[:100_000], whole[100_000:200_000], whole[200_000:]]
    first = describer.describe(parts)
    assert [one.size for one in first.blocks] == [whole.nbytes] and not first.loose
    moved = describer.describe([part.copy() for part in parts])
    assert moved.blocks != first.blocks and sum(one.size for one in moved.blocks) >= whole.nbytes
