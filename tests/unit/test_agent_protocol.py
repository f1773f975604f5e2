"""What agents and ring say to each other: only what is sealed, new, and of this attempt counts; the unknown stays unknown."""

from __future__ import annotations

import pytest

from ftsupervise.model import Standstill
from ftsupervise.ranks import protocol
from ftsupervise.ranks.hang_detector import HangState, HangVerdict
from ftsupervise.ranks.protocol import Datagram, RankExit, Seal
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.run.progress_pages import seen_by
from ftsupervise.truth import RankState

KEY, OTHER = bytes(32), bytes([1]) * 32
SENDER = ("127.0.0.1", 5)


def pulse(rank: int, step: int | None = 7, phase: str = "train", age: float = 0.25) -> RankState:
    return RankState(rank, "node-1", step, phase, 100 - age, 100 - age, 100.0, 4000 + rank, "R", 12.5)


def told(step: int, number: int, *, key: bytes = KEY, attempt: int = 3, generation: int = 1, kind: int = protocol.STATES,
         body: bytes | None = None) -> bytes:  # fmt: skip
    body = protocol.pack_states([pulse(0, step), pulse(1, step)], 100.0)[0] if body is None else body
    return Seal(key).pack(Datagram(kind, 0, 1, generation, attempt, number, b"node-1", body))


@pytest.fixture
def pulses() -> RankTable:
    one = RankTable(KEY)
    one.generation = 1
    one.begin(3)
    return one


def steps(pulses: RankTable) -> list[int | None]:
    return [one.step for one in sorted(pulses.newest())]


@pytest.mark.parametrize(
    "one",
    [
        pulse(3),
        pulse(99_999, step=None, phase="start"),
        pulse(0, step=-(1 << 62)),
        pulse(1, phase="häßlich " * 3),
        pulse(1)._replace(state="", cpu=None),
        pulse(1)._replace(leaving=True, state="X", cpu=0.0),
        pulse(1)._replace(read=True),
    ],
)
def test_a_pulse_comes_through_as_it_was(one: RankState) -> None:
    (body,) = protocol.pack_states([one], 100.0)
    assert protocol.read_states(body, "node-1", 100.0) == [one]


def test_times_are_told_as_ages_so_that_clocks_of_hosts_need_not_agree() -> None:
    (body,) = protocol.pack_states([pulse(0, age=0.25)], 100.0)
    (found,) = protocol.read_states(body, "node-1", 5000.0)
    assert (found.stepped, found.seen) == (4999.75, 5000.0)


def test_a_node_of_many_ranks_fits_into_datagrams_that_no_network_splits() -> None:
    many = [pulse(rank, phase=f"phase-{rank % 7}") for rank in range(1000)]
    bodies = protocol.pack_states(many, 100.0)
    assert all(len(Seal(KEY).pack(Datagram(2, 0, 1, 1, 1, 1, b"n" * 64, body))) <= protocol.LARGEST for body in bodies)
    assert [one for body in bodies for one in protocol.read_states(body, "node-1", 100.0)] == many


def test_what_is_not_sealed_with_the_key_of_this_run_is_dropped_and_counted(pulses: RankTable) -> None:
    good = told(7, 1)
    bad = [told(7, 1, key=OTHER), b"", b"FTS1", good[:-1], good[:40], good + b"x", b"x" * 65_000]
    bad += [good[:at] + bytes([good[at] ^ 1]) + good[at + 1 :] for at in range(len(good))]
    for data in bad:
        assert pulses.take(data, SENDER, 100.0) is None
    assert pulses.newest() == []
    assert pulses.deaths() == []
    assert pulses.dropped == {"forged or damaged": len(bad)}


def test_a_datagram_that_comes_twice_or_late_changes_nothing(pulses: RankTable) -> None:
    for step, number in ((5, 1), (7, 3), (6, 2), (7, 3), (5, 1)):
        pulses.take(told(step, number), SENDER, 100.0 + number)
    assert steps(pulses) == [7, 7]
    assert {one.seen for one in pulses.newest()} == {103.0}
    assert pulses.dropped == {"old": 3}


def test_an_attempt_that_is_over_says_nothing_any_more(pulses: RankTable) -> None:
    pulses.take(told(9, 1), SENDER, 100.0)
    pulses.begin(4)
    assert pulses.newest() == []
    pulses.take(told(9, 2), SENDER, 101.0)
    gone = protocol.pack_exits([RankExit(0, "", 4000, 0.0, -9, False, False, True)], 0.0)
    assert pulses.take(told(0, 3, kind=protocol.EXIT, body=gone), SENDER, 101.0), "or it would be told for ever"
    assert (pulses.newest(), pulses.deaths()) == ([], [])
    pulses.take(told(1, 4, attempt=4), SENDER, 102.0)
    assert steps(pulses) == [1, 1]


def test_the_last_step_of_a_rank_that_died_is_told_with_its_death(pulses: RankTable) -> None:
    """Reports come once a second: in that second it made steps of which it may have left snapshots."""
    pulses.take(told(521, 1), SENDER, 100.0)
    dead = [
        RankExit(0, "", 4000, 0.0, -11, False, False, True, step=524),
        RankExit(1, "", 4001, 0.0, None, False, False, True),
    ]
    pulses.take(told(0, 2, kind=protocol.EXIT, body=protocol.pack_exits(dead, 0.0)), SENDER, 101.0)
    assert [one.step for one in pulses.exits] == [524, None]
    assert (page := seen_by(pulses)) is not None and page.ahead == 524


def test_agents_of_an_earlier_start_are_told_to_leave(pulses: RankTable) -> None:
    pulses.restart(2)
    answer = pulses.take(told(9, 1), SENDER, 100.0)
    assert answer is not None
    message = Seal(KEY).open(answer)
    assert message is not None
    assert (message.kind, message.generation, message.node) == (protocol.BYE, 1, b"node-1")
    assert pulses.newest() == []
    assert pulses.take(told(9, 1, generation=3), SENDER, 100.0) is None


def test_what_the_ring_says_is_not_taken_for_an_agents_word(pulses: RankTable) -> None:
    for kind in (protocol.ACK, protocol.ASK, protocol.BYE):
        assert pulses.take(told(9, 1, kind=kind), SENDER, 100.0) is None
    assert pulses.dropped == {"not for us": 3}


def test_lost_datagrams_make_what_is_known_older_and_nothing_else(pulses: RankTable) -> None:
    for number in range(1, 101, 10):
        pulses.take(told(number, number), SENDER, 100.0 + number)
    assert steps(pulses) == [91, 91]
    assert {round(one.seen - one.stepped, 3) for one in pulses.newest()} == {0.25}
    assert pulses.silent(["node-1", "node-2"], 1e9) == ["node-2"]


def test_nonsense_that_is_sealed_is_dropped_too(pulses: RankTable) -> None:
    pulses.take(told(0, 1, body=b""), SENDER, 100.0)
    pulses.take(told(0, 2, kind=protocol.EXIT, body=b"xyz"), SENDER, 100.0)
    assert pulses.newest() == []
    assert pulses.dropped == {"nonsense": 2}


def test_a_death_is_told_once_and_the_rank_is_gone_from_then_on(pulses: RankTable) -> None:
    pulses.take(told(7, 1), SENDER, 100.0)
    body = protocol.pack_exits([RankExit(1, "", 4001, 0.0, None, False, False, False)], 0.02)
    final = protocol.pack_exits([RankExit(1, "", 4001, 0.0, -9, False, False, True)], 0.04)
    for number, data in ((2, body), (3, body), (4, final), (5, final), (5, final)):
        assert pulses.take(told(0, number, kind=protocol.EXIT, body=data), SENDER, 101.0), "acknowledged each time"
    first, second = pulses.deaths()
    assert (first.final, second.final, second.code, second.cause().words()) == (
        False, True, -9, "rank 1 on node-1 killed by SIGKILL",
    )  # fmt: skip
    assert first.at == pytest.approx(100.98)
    assert [one.state for one in sorted(pulses.newest())] == ["R", "X"]
    assert pulses.deaths() == []


@pytest.mark.parametrize(
    ("code", "leaving", "failed", "final", "crash"),
    [
        (-9, False, False, True, True),
        (None, False, False, True, True),  # it ended without its interpreter's last words
        (1, False, False, True, True),
        (0, False, False, True, False),
        (None, True, False, True, False),  # in order, or told to leave: srun says how it was
        (75, True, False, True, False),
        (1, True, True, True, True),
        (None, True, True, True, True),
        (0, True, True, True, False),  # what was raised has been caught
        (-9, False, False, False, False),  # somebody above it may start it again
    ],
)
def test_only_an_end_that_is_surely_no_leaving_in_order_is_a_crash(
    code: int | None, leaving: bool, failed: bool, final: bool, crash: bool
) -> None:
    assert RankExit(0, "n", 1, 0.0, code, leaving, failed, final).crash is crash


def test_the_words_of_a_hang_that_was_left_alone_say_who_and_where_and_not_again_that_it_hangs(
    pulses: RankTable,
) -> None:
    pulses.take(told(12, 1), SENDER, 100.0)
    odd = (RankState(1, "node-1", 12, "train", 0, 0, 0),)
    left = HangVerdict(
        HangState.HUNG, "train", 12, since=float("inf"), waited=9.1, outliers=odd, how=Standstill.STOPPED
    )
    page = seen_by(pulses, left)
    assert page is not None and page.hung == "rank 1 on node-1 is stopped; no progress for 9.1 s at step 12 (train)"
    moved = seen_by(pulses, left._replace(since=0.0))
    assert moved is not None and moved.hung == "", "the ranks have made steps since"
