"""What many guards have counted is summed up in any order, and passes through a datagram."""

from __future__ import annotations

from math import inf
from random import Random

import pytest

from ftsupervise.ranks import protocol, tally
from ftsupervise.ranks.protocol import Datagram, Seal
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.truth import HeartbeatSample, Tally

NOW = 1000.0


def page(rank: int, **more: object) -> HeartbeatSample:
    plain: dict[str, object] = {"stepped": NOW - 2, "beaten": NOW - 1, "since": NOW - 30}
    return HeartbeatSample(rank, 1, 100 + rank, 5, 20, "train", **{**plain, **more})  # type: ignore[arg-type]


def test_the_slowest_start_the_longest_save_and_the_newest_checkpoint_count() -> None:
    pages = [
        page(0, first=11, first_at=NOW - 50, saved=10, saving=4.0, loss=2.5, last_step=100),
        page(1, first=11, first_at=NOW - 40, saved=20, saving=6.0, stepped=NOW - 1),
    ]
    found = tally.of_pages(pages, NOW)
    assert found == Tally(11, NOW - 40, 20, 20, 6.0, NOW - 1, 2.5, 0, 100)


def test_a_save_that_is_being_made_counts_as_far_as_it_has_come() -> None:
    saving = page(0, saving=4.0, since=NOW - 3)._replace(phase="save")
    assert tally.of_pages([saving], NOW).saving == pytest.approx(7.0)
    assert tally.of_pages([saving], NOW).active == NOW - 2


@pytest.mark.parametrize("seed", range(20))
def test_the_order_in_which_nodes_are_added_up_does_not_matter(seed: int) -> None:
    random = Random(seed)

    def some() -> Tally:
        def maybe(value: float) -> float | None:
            return value if random.random() < 0.7 else None

        loss = maybe(random.random())
        steps = [None if random.random() < 0.3 else random.randrange(99) for _ in range(4)]
        return Tally(
            steps[0], maybe(random.random()), steps[1], steps[2], random.random(), maybe(random.random()),
            loss, random.randrange(10**6) if loss is not None else None, steps[3],
        )  # fmt: skip

    nodes = [some() for _ in range(6)]
    mixed = random.sample(nodes, len(nodes))
    assert tally.merged(mixed) == tally.merged(nodes)
    assert tally.merged([tally.merged(nodes[:2]), tally.merged(nodes[2:]), Tally()]) == tally.merged(nodes)


def test_it_passes_through_a_datagram_and_nonsense_does_not() -> None:
    whole = Tally(-3, NOW - 40, 20, 20, 6.25, NOW - 1, 2.5, 7, 100)
    for one in (whole, Tally()):
        assert tally.read(tally.pack(one, NOW), NOW) == one
    for body in (b"", b"x", bytes(200)):
        with pytest.raises(ValueError, match="no tally"):
            tally.read(body, NOW)
    assert tally.read(tally.pack(whole._replace(saving=inf), NOW), NOW).saving == 0.0


def test_the_supervisor_adds_up_what_its_nodes_report_of_this_attempt_only() -> None:
    key = bytes(32)
    table, seal = RankTable(key), Seal(key)
    table.begin(2)

    def report(node: bytes, attempt: int, number: int, one: Tally) -> None:
        body = tally.pack(one, NOW)
        table.take(seal.pack(Datagram(protocol.TALLY, 0, 1, 0, attempt, number, node, body)), ("::1", 1), NOW)

    report(b"n1", 2, 1, Tally(first=5, first_at=NOW - 9, saving=1.0))
    report(b"n2", 2, 1, Tally(first=5, first_at=NOW - 8, saving=3.0, saved=40))
    report(b"n1", 1, 2, Tally(saved=999))
    assert table.tally() == Tally(5, NOW - 8, None, 40, 3.0)
    table.begin(3)
    assert table.tally() == Tally()
