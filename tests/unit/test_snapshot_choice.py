"""From which step an attempt begins, as tables of values."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.snapshots.choice import Begun, HeldSnapshot, MemoryChoice, Pull, Source, accepts, choose
from ftsupervise.snapshots.slots import NOTHING, SLOTS, Pins, SnapshotId, slot_to_write, spared

FIRST = (Begun(1, -1),)
HOMES = {0: "a", 1: "a", 2: "b", 3: "b"}


def held(text: str) -> list[HeldSnapshot]:
    """ "a: 0=10,12 1=10 b: 2=10@2" – node: rank=step@attempt; a world of four unless /world follows."""
    found, node = [], ""
    for word in text.split():
        if word.endswith(":"):
            node = word[:-1]
            continue
        rank, _, steps = word.partition("=")
        for one in steps.split(","):
            generation, _, world = one.partition("/")
            step, _, attempt = generation.partition("@")
            found.append(HeldSnapshot(int(rank), int(step), int(attempt or 1), int(world or 4), node))
    return found


class Case(NamedTuple):
    """One row: what is held, the lineage, what else is known, and what is chosen."""

    name: str
    text: str
    wanted: tuple[Source, int]
    lineage: tuple[Begun, ...] = FIRST
    disk: int | None = None
    refused: tuple[int, ...] = ()
    why: str = ""


CASES = (
    Case("all hold it", "a: 0=10,12 1=10,12 b: 2=10,12 3=10,12", (Source.MEMORY, 12)),
    Case(
        "a rank was killed before it took the newest one",
        "a: 0=10,12 1=10,12 b: 2=8,10 3=10,12",
        (Source.MEMORY, 10),
        why="rank 2 has no snapshot of step 12",
    ),
    Case("nobody holds anything", "", (Source.START, -1), why="no rank has a snapshot"),
    Case("the disk alone", "", (Source.DISK, 100), disk=100, why="no rank has a snapshot"),
    Case("the memory is newer than the disk", "a: 0=110 1=110 b: 2=110 3=110", (Source.MEMORY, 110), disk=100),
    Case("both have the same step: memory is faster", "a: 0=9 1=9 b: 2=9 3=9", (Source.MEMORY, 9), disk=9),
    Case(
        "the disk is newer",
        "a: 0=10 1=10 b: 2=10 3=10",
        (Source.DISK, 20),
        disk=20,
        why="the disk has step 20, and the memory step 10",
    ),
    Case(
        "a rank is missing altogether",
        "a: 0=10 1=10 b: 2=10",
        (Source.START, -1),
        why="rank 3 has no snapshot of step 10",
    ),
    Case(
        "the ranks have no step in common",
        "a: 0=10 1=12 b: 2=10 3=12",
        (Source.START, -1),
        why="ranks 0, 2 have no snapshot of step 12",
    ),
    Case("one node lost, its buddy holds an older step", "b: 0=6 1=6 2=6,10,12 3=6,10,12", (Source.MEMORY, 6)),
    Case(
        "the abandoned future of attempt 1",
        "a: 0=10,14@1 1=10,14@1 b: 2=10,14@1 3=10,14@1",
        (Source.MEMORY, 10),
        lineage=(Begun(1, -1), Begun(2, 10)),
    ),
    Case(
        "one step made by two attempts is not one snapshot",
        "a: 0=12@1 1=12@1 b: 2=12@2 3=12@2",
        (Source.DISK, 4),
        lineage=(Begun(1, -1), Begun(2, 12)),
        disk=4,
        why="ranks 0, 1 have no snapshot of step 12",
    ),
    Case(
        "the attempt before began from the disk: nothing older counts",
        "a: 0=10@1 1=10@1 b: 2=10@1 3=10@1",
        (Source.DISK, 8),
        lineage=(Begun(1, -1), Begun(2, 8)),
        disk=8,
        why="no rank has a snapshot",
    ),
    Case(
        "where it is not known where an attempt began nothing older counts",
        "a: 0=10@1 1=10@1 b: 2=10@1 3=10@1",
        (Source.START, -1),
        lineage=(Begun(1, -1), Begun(2, -1)),
        why="no rank has a snapshot",
    ),
    Case(
        "the new attempt made none yet: the old one's step is still good",
        "a: 0=10@1 1=10@1 b: 2=10@1 3=10@1",
        (Source.MEMORY, 10),
        lineage=(Begun(1, -1), Begun(2, 10)),
    ),
    Case(
        "an attempt of another job, or from the future",
        "a: 0=10@7 1=10@7 b: 2=10@7 3=10@7",
        (Source.START, -1),
        why="no rank has a snapshot",
    ),
    Case(
        "another world size",
        "a: 0=10/2 1=10/2 b: 0=8 1=8 2=8 3=8",
        (Source.MEMORY, 10),
    ),
    Case(
        "ranks of two worlds do not make one",
        "a: 0=10/2 b: 1=10/4 2=10/4 3=10/4",
        (Source.START, -1),
        why="rank 0 has no snapshot of step 10",
    ),
    Case("a rank outside its world", "a: 0=10/1 5=10/1", (Source.MEMORY, 10)),
    Case(
        "from its newest step attempts have failed",
        "a: 0=8,10 1=8,10 b: 2=8,10 3=8,10",
        (Source.MEMORY, 8),
        refused=(10,),
        why="attempts have failed from step 10",
    ),
    Case(
        "from all its steps attempts have failed",
        "a: 0=10 1=10 b: 2=10 3=10",
        (Source.DISK, 5),
        disk=5,
        refused=(10,),
        why="attempts have failed from step 10",
    ),
)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_the_newest_step_that_all_ranks_hold(case: Case) -> None:
    found = choose(held(case.text), case.lineage, disk=case.disk, refused=case.refused)
    assert (found.source, found.step) == case.wanted
    assert found.why == case.why or (not case.why and found.source is Source.MEMORY)


def test_a_spare_node_fetches_the_ranks_of_the_lost_one_and_those_that_moved() -> None:
    """Node a is lost; b takes its place in the order and the spare that of b."""
    seen = held("b: 0=6 1=6 2=6,8 3=6,8")
    found = choose(seen, FIRST, homes=HOMES, places={0: "b", 1: "b", 2: "spare", 3: "spare"})
    assert found.pulls == (Pull(2, "b", "spare"), Pull(3, "b", "spare"))
    assert (found.step, found.copies) == (6, 4)


def test_ranks_that_stay_where_they_were_fetch_nothing() -> None:
    found = choose(held("a: 0=6 1=6 2=4 b: 2=6 3=6"), FIRST, homes=HOMES)
    assert found == MemoryChoice(Source.MEMORY, 6, 1, 4)


def test_a_rank_whose_own_file_is_gone_fetches_its_buddys_copy() -> None:
    found = choose(held("a: 1=6 b: 0=6 2=6 3=6"), FIRST, homes=HOMES)
    assert found.pulls == (Pull(0, "b", "a"),) and found.copies == 1


@given(st.lists(st.tuples(st.integers(1, 4), st.integers(-1, 20)), max_size=4), st.integers(0, 20), st.integers(1, 4))
def test_what_a_later_attempt_went_back_behind_is_never_accepted(
    begun: list[tuple[int, int]], step: int, attempt: int
) -> None:
    lineage = [Begun(number, start) for number, start in sorted(dict(begun).items())]
    if accepts(lineage, step, attempt):
        assert attempt in dict(lineage)
        assert all(step <= one.step for one in lineage if one.attempt > attempt)


@given(
    st.lists(
        st.builds(
            HeldSnapshot,
            st.integers(-1, 3),
            st.integers(-1, 5),
            st.integers(0, 3),
            st.integers(0, 3),
            st.sampled_from("abc"),
        ),
        max_size=40,
    ),
    st.none() | st.integers(0, 6),
)
def test_whatever_is_held_the_choice_is_held_by_every_rank_of_one_world(
    seen: list[HeldSnapshot], disk: int | None
) -> None:
    lineage = (Begun(1, -1), Begun(2, 3), Begun(3, 4))
    found = choose(seen, lineage, disk=disk)
    if found.source is Source.MEMORY:
        ranks = {one.rank for one in seen if one[1:4] == (found.step, found.attempt, found.world)}
        assert ranks >= set(range(found.world)) and found.world > 0
        assert disk is None or found.step >= disk
        assert accepts(lineage, found.step, found.attempt)
    else:
        assert found.step == (-1 if disk is None else disk)


# What a rank writes over.


@pytest.mark.parametrize(
    ("steps", "pins", "slot"),
    [
        ((-1, -1, -1, -1), Pins(), 0),
        ((2, -1, -1, -1), Pins(), 1),
        ((2, 4, 6, 8), Pins(), 0),
        ((2, 4, 6, 8), Pins(held=2), 1),
        ((2, 4, 6, 8), Pins(held=2, wanted=3), 2),  # 4 is being copied
        ((2, 4, 6, 8), Pins(held=2, wanted=9), 1),  # none of these is wanted yet
        ((2, 4, 8, -1), Pins(held=2, wanted=4), 3),  # the one that a killed rank left torn
        ((2, 4), Pins(held=2), 0),  # two slots: the newest whole one is never written over
        ((4, 2), Pins(held=4), 1),
        ((7,), Pins(), 0),
    ],
)
def test_the_slot_that_the_next_snapshot_overwrites(steps: tuple[int, ...], pins: Pins, slot: int) -> None:
    assert slot_to_write(steps, spared(steps, pins)) == slot


@pytest.mark.parametrize(
    ("held", "stays", "slot"),
    [
        ((NOTHING, NOTHING), (), 0),
        ((SnapshotId(4, 1), NOTHING), (), 1),
        ((SnapshotId(4, 2), SnapshotId(4, 1)), (), 1),  # of one step, that of the earlier attempt
        ((SnapshotId(4, 1), SnapshotId(6, 1)), (SnapshotId(4, 1),), 1),  # the newest copy may go: not all have it
        ((SnapshotId(6, 1), SnapshotId(4, 1)), (SnapshotId(4, 1), SnapshotId(6, 1)), 1),
    ],
)
def test_the_slot_that_a_copy_overwrites(
    held: tuple[SnapshotId, ...], stays: tuple[SnapshotId, ...], slot: int
) -> None:
    assert slot_to_write(held, stays) == slot


@given(st.integers(1, 60), st.integers(1, 30))
def test_what_every_buddy_holds_and_what_is_copied_stays_and_there_are_always_two_newest(
    start: int, advance: int
) -> None:
    """A copier that is slow: it names a step in advance, copies it for ever, and then names the next."""
    steps, pins = [-1] * SLOTS, Pins(wanted=start)
    for step in range(1, 200):
        stays = spared(steps, pins)
        slot = slot_to_write(steps, stays)
        assert steps[slot] not in stays
        assert step < 3 or sum(old >= step - 2 for index, old in enumerate(steps) if index != slot) >= 1
        steps[slot] = step
        if step == pins.wanted + advance:  # the copy has arrived everywhere
            assert pins.wanted in steps
            pins = Pins(held=pins.wanted, wanted=step + advance)
