"""Which node copies to which, and which step next: the supervisor's orders to reports, by a clock that stands still."""

from __future__ import annotations

import os
import time

import pytest

from ftsupervise.snapshots.exchange import CpuShare, each_end
from ftsupervise.snapshots.ring import CopyOrder, CopyReport, SnapshotRing, pack, read_order


class Desk:
    """A ring, what it has told each node last, and a clock."""

    def __init__(self, *nodes: str, at_once: bool = False) -> None:
        self.now, self.told = 0.0, dict[str, CopyOrder]()
        self.ring = SnapshotRing(lambda: nodes, self._tell, lambda: self.now, at_once)
        self.ring.begin(1, -1)

    def _tell(self, node: str, body: bytes) -> None:
        order = read_order(body)
        assert order is not None
        self.told[node] = order

    def hear(self, node: str, newest: int, sent: int = -1, missed: int = -1, host: str = "10.0.0.1") -> None:
        order = self.told[node].number if node in self.told else 0
        ranks = 0 if node == "spare" else 1
        report = CopyReport(7000, ranks, 2, newest, sent, 1, missed, order, "10.9.9.9")
        self.ring.hear(node, host, pack(report))


def test_each_copies_to_the_next_and_the_last_to_the_first() -> None:
    desk = Desk("a", "b", "spare")
    for node, host in {"a": "10.0.0.1", "b": "10.0.0.2", "spare": "10.0.0.3"}.items():
        desk.hear(node, 4, host=host)
    assert {node: order.host for node, order in desk.told.items()} == {
        "a": "10.0.0.2",
        "b": "10.0.0.3",
        "spare": "10.0.0.1",
    }


def test_a_step_is_named_before_it_is_made_and_held_once_every_buddy_has_it() -> None:
    desk = Desk("a", "b")
    desk.hear("a", 4)
    desk.hear("b", 4)
    first = desk.told["a"]
    assert first.wanted > 4 and first.held == -1
    assert desk.told["b"].wanted == first.wanted
    desk.now = 1.0
    desk.hear("a", 24, sent=6)
    assert desk.told["a"].held == -1, "b has not copied it yet"
    desk.hear("b", 26, sent=6)
    assert desk.told["a"].held == desk.told["b"].held == 6
    assert desk.told["a"].wanted > 26
    assert desk.ring.state.held == 6


def test_where_the_ranks_wait_for_their_copies_none_is_named_and_once_a_second_is_told_what_all_buddies_hold() -> None:
    desk = Desk("a", "b", at_once=True)
    desk.hear("a", 4, sent=4)
    desk.hear("b", 5, sent=5)
    assert [(one.held, one.wanted) for one in desk.told.values()] == [(4, -1), (4, -1)]
    desk.hear("a", 9, sent=9)
    assert desk.ring.state.held == 4, "a word to every node for each step would be many"
    desk.now = 1.5
    desk.hear("b", 9, sent=8)
    assert desk.ring.state.held == 8 and desk.told["a"].wanted == -1


def test_nodes_that_copied_different_steps_hold_none_and_the_next_one_is_named_longer_before() -> None:
    desk = Desk("a", "b")
    desk.hear("a", 4)
    desk.hear("b", 4)
    desk.now = 1.0
    desk.hear("a", 104, sent=6)
    desk.hear("b", 104, sent=8)
    second = desk.told["a"].wanted
    assert desk.told["a"].held == -1
    assert second - 104 >= 50, "half a second at 100 steps a second"
    desk.now = 2.0
    desk.hear("a", 204, missed=second)
    third = desk.told["a"].wanted
    assert third - 204 > second - 104


def test_a_node_that_is_silent_is_left_out_and_its_neighbour_copies_past_it() -> None:
    desk = Desk("a", "b", "c")
    for node, host in {"a": "10.0.0.1", "b": "10.0.0.2", "c": "10.0.0.3"}.items():
        desk.hear(node, 4, host=host)
    desk.now = 20.0
    desk.hear("a", 50, host="10.0.0.1")
    desk.hear("c", 50, host="10.0.0.3")
    desk.hear("a", 50, host="10.0.0.1")
    assert desk.told["a"].host == "10.0.0.3"


def test_after_a_restart_only_what_is_not_after_its_step_is_still_held() -> None:
    desk = Desk("a", "b")
    desk.hear("a", 4)
    desk.hear("b", 4)
    desk.hear("a", 20, sent=6)
    desk.hear("b", 20, sent=6)
    desk.ring.begin(2, 18)
    assert desk.told["a"].held == 6 and desk.told["a"].attempt == 2
    desk.ring.begin(3, 4)
    assert desk.told["a"].held == -1


def test_a_node_without_ranks_is_told_to_take_copies() -> None:
    desk = Desk("a", "b", "spare")
    desk.hear("a", 4)
    assert "spare" in desk.told


def test_the_agent_on_the_supervisors_own_host_is_reached_by_its_real_address() -> None:
    desk = Desk("a", "b")
    desk.hear("a", 4, host="127.0.0.1")
    desk.hear("b", 4, host="10.0.0.2")
    desk.hear("b", 4, host="10.0.0.2")
    assert desk.told["b"].host == "10.9.9.9"


def test_words_that_make_no_sense_are_not_obeyed() -> None:
    assert read_order(b"{") is None
    assert read_order(b'{"number": "x"}') is None
    assert read_order(pack(CopyOrder(3, 2))) == CopyOrder(3, 2)


def test_copying_takes_no_more_processor_time_than_its_share() -> None:
    slept: list[float] = []
    share = CpuShare(0.02, slept.append)  # nobody really sleeps here: the debt grows
    share.keep()
    until = time.thread_time() + 0.1
    while time.thread_time() < until:
        pass
    share.keep()
    assert sum(slept) == pytest.approx((0.1 - 0.004) / 0.02, rel=0.2)
    cores = len(os.sched_getaffinity(0))
    assert each_end(0.02) == pytest.approx(0.01 * cores)
    assert each_end(0.0) > 0, "never so slow that a copy has no end"
