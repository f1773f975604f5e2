"""A group of ranks that goes on with fewer, as under torchrun: the missing ones are no part of it any more."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.ranks.protocol import RankExit
from ftsupervise.ranks.rank_table import in_the_group
from ftsupervise.rundir.heartbeat_page import of_the_group
from ftsupervise.truth import Beat, RankState

NOON = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


def beat(rank: int, world: int | None, step: int, after: float) -> Beat:
    facts = {"attempt": "1"} | ({"world": str(world)} if world is not None else {})
    return Beat(rank, step, "train", NOON + timedelta(seconds=after), 100 + rank, "node", facts)


def state(rank: int, pid: int, seen: float, how: str = "S") -> RankState:
    return RankState(rank, "node", 5, "train", seen, seen, seen, pid, how)


def death(rank: int, pid: int, at: float) -> RankExit:
    return RankExit(rank, "node", pid, at, -9, leaving=False, failed=False, final=False)


def test_beats_of_ranks_beyond_the_newest_size_do_not_count() -> None:
    old = [beat(rank, 4, 100, rank) for rank in range(4)]
    new = [beat(rank, 3, 120, 60) for rank in range(3)]
    assert of_the_group([*new, old[3]]) == tuple(new)
    grown = [beat(rank, 4, 130, 90) for rank in range(4)]
    assert of_the_group(grown) == tuple(grown)
    assert of_the_group([new[0], *grown[1:]]) == (new[0], *grown[1:])


def test_beats_that_tell_no_size_all_count() -> None:
    beats = [beat(rank, None, 100, rank) for rank in range(4)]
    assert of_the_group(beats) == tuple(beats)
    assert of_the_group([]) == ()
    odd = beat(0, None, 1, 5)._replace(facts={"world": "many"})
    assert of_the_group([odd, *beats[1:]]) == (odd, *beats[1:])


def test_a_rank_that_died_stays_missed_until_the_others_have_successors() -> None:
    ranks = [state(0, 10, 50.0), state(1, 11, 50.0), state(2, 12, 50.0, "X")]
    assert in_the_group(ranks, [death(2, 12, 40.0)]) == ranks


@pytest.mark.fault("torchrun goes on with fewer ranks by itself", "those that are missing are missed no more")
def test_a_rank_that_the_others_go_on_without_is_missed_no_more() -> None:
    dead = [death(2, 12, 40.0), death(0, 10, 41.0), death(1, 11, 41.5)]
    after = [state(0, 20, 60.0), state(1, 21, 60.0), state(2, 12, 60.0, "X")]
    assert in_the_group(after, dead) == after[:2]


def test_a_rank_on_a_node_that_is_silent_since_then_is_missed_no_more_and_one_that_falls_silent_later_is() -> None:
    dead = [death(0, 10, 41.0), death(1, 11, 41.5)]
    lost = [state(0, 20, 60.0), state(1, 21, 60.0), state(2, 12, 39.0)]
    assert in_the_group(lost, dead) == lost[:2]
    later = [state(0, 20, 90.0), state(1, 21, 90.0), state(2, 22, 70.0)]
    assert in_the_group(later, dead) == later


def test_a_rank_of_the_new_group_that_dies_is_missed() -> None:
    dead = [death(0, 10, 41.0), death(1, 11, 41.5), death(1, 21, 80.0)]
    ranks = [state(0, 20, 90.0), state(1, 21, 90.0, "X")]
    assert in_the_group(ranks, dead) == ranks
