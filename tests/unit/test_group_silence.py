"""A group that waits for another one which is silent: what the lighthouse's page says of it, and who is told."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable

import pytest

from ftsupervise.host.addresses import own_address
from ftsupervise.integrations.torchft_silence import GroupNetwork, SilenceWatch, Wait, silent_members
from ftsupervise.replicas.members import GroupHeartbeat, LighthousePage, PageNotSeen, Unseen

HEARTBEAT = 0.9
MEMBERS = ("g000:a", "g001:b", "g002:c")
Until = Callable[..., object]


def page(**ages: float) -> LighthousePage:
    """``g001_b=0.1``: that start was heard of then."""
    heard = tuple(GroupHeartbeat(name.replace("_", ":"), age) for name, age in ages.items())
    return LighthousePage(1, (), heard)


def test_a_member_that_the_lighthouse_hears_of_no_more_is_silent() -> None:
    assert silent_members(page(g000_a=0.1, g001_b=1.2, g002_c=0.1), "g000:a", MEMBERS, HEARTBEAT) == ("g001:b",)


@pytest.mark.parametrize(
    "seen",
    [
        PageNotSeen(Unseen.CUT, "no network"),
        page(g000_a=0.1, g001_b=0.9, g002_c=0.1),  # late, and not yet for sure
        page(g000_a=1.2, g001_b=1.2, g002_c=1.2),  # the page is late, or our network is
        page(g001_b=1.2, g002_c=0.1),  # a new lighthouse, which has not heard of us
        page(g000_a=0.1, g002_c=0.1),  # nor of it
        page(g000_a=0.1, g001_b=0.1, g002_c=0.1, g001_z=50.0),  # an older start is nobody's member
        page(g000_a=1.2, g000_z=0.1, g001_b=1.2),  # another start of our group is not us
    ],
)
def test_what_is_not_seen_for_sure_makes_nobody_silent(seen: LighthousePage | PageNotSeen) -> None:
    assert silent_members(seen, "g000:a", MEMBERS, HEARTBEAT) == ()


@pytest.mark.threat(
    "A stranger sends one heartbeat by a name that looks like that of a group, and is silent from then on.",
    "Of names that look the same the later heartbeat counts: nobody gives up a step for it.",
)
def test_of_two_names_that_look_the_same_the_later_heartbeat_counts_so_that_no_stranger_makes_a_member_silent() -> None:
    member, stranger = page(g000_a=0.1, g001_b=0.1), page(g001_b=70.0)
    assert (
        silent_members(member._replace(heartbeats=member.heartbeats + stranger.heartbeats), "g000:a", MEMBERS, 0.9)
        == ()
    )
    assert (
        silent_members(member._replace(heartbeats=stranger.heartbeats + member.heartbeats), "g000:a", MEMBERS, 0.9)
        == ()
    )


class Store:
    """A group's store, as far as it is used."""

    def __init__(self) -> None:
        self.held: dict[str, bytes] = {}
        self.fails = False

    def check(self, keys: list[str]) -> bool:
        if self.fails:
            raise RuntimeError("connection reset")
        return all(key in self.held for key in keys)

    def get(self, key: str) -> bytes:
        return self.held[key]

    def set(self, key: str, value: str) -> None:
        self.held[key] = value.encode()


class Rank:
    """One rank with a watch: what it waits for, and what it was told."""

    def __init__(self, store: Store, look: Callable[[float], LighthousePage | PageNotSeen] | None) -> None:
        self.step = object()
        self.lost: list[tuple[object, str]] = []
        self.wait: Wait | None = None
        self.watch = SilenceWatch(
            lambda: self.wait,
            look,
            store,
            lambda step, words: self.lost.append((step, words)),
            own="g000:a",
            groups=3,
            heartbeat=HEARTBEAT,
        )

    def waits(self, seconds: float = 0.0, attempt: str = "7/40") -> None:
        self.wait = Wait(self.step, time.monotonic() - seconds, attempt, MEMBERS)


def test_the_first_rank_looks_only_while_it_waits_for_long_and_tells_the_other_ranks(until: Until) -> None:
    looks: list[float] = []

    def look(within: float) -> LighthousePage:
        looks.append(within)
        return page(g000_a=0.1, g001_b=5.0, g002_c=0.1)

    store = Store()
    first, second = Rank(store, look), Rank(store, None)
    try:
        first.waits(-60.0)
        second.waits(60.0, "7/39")
        time.sleep(0.5)
        assert not looks and not second.lost, "a wait that is short asks nobody"
        first.waits(HEARTBEAT)
        second.waits(60.0)
        until(lambda: first.lost and second.lost, "both are told")
        assert first.lost[0] == (first.step, "g001 sends no heartbeats to the lighthouse any more")
        assert second.lost[0] == (second.step, first.lost[0][1])
        store.fails = True  # the store of a group that ends
        first.lost.clear()
        second.waits(60.0, "7/41")
        until(lambda: first.lost, "the watch goes on")
    finally:
        first.watch.close()
        second.watch.close()
    until(lambda: not any(one.name == "silence" for one in threading.enumerate()), "the end of the watches")


def test_a_page_that_took_long_to_come_makes_nobody_silent_for_newer_heartbeats_are_not_on_it(until: Until) -> None:
    looks: list[float] = []

    def look(within: float) -> LighthousePage:
        """The first looks are those that a lighthouse answers which was stopped."""
        looks.append(within)
        time.sleep(0.0 if len(looks) > 2 else HEARTBEAT / 2)
        return page(g000_a=0.1, g001_b=5.0)

    rank = Rank(Store(), look)
    try:
        rank.waits(60.0)
        until(lambda: len(looks) > 2 or rank.lost, "two late looks")
        assert len(looks) > 2
        until(lambda: rank.lost, "one in time is believed")
    finally:
        rank.watch.close()


def test_the_address_of_a_group_is_the_one_from_which_it_reaches_the_lighthouse_or_that_a_person_has_named() -> None:
    found = GroupNetwork("http://127.0.0.1:4711", {})
    assert (found.host, found.interface, found.host_in_url) == ("127.0.0.1", "lo", "127.0.0.1")
    assert isinstance(found.look(0.5), PageNotSeen)
    assert GroupNetwork("http://192.0.2.7:4711", {"GLOO_SOCKET_IFNAME": "lo"}).host == "127.0.0.1"
    assert GroupNetwork("http://192.0.2.7:4711", {"NCCL_SOCKET_IFNAME": "^docker"}).interface != "docker"
    assert GroupNetwork("http://192.0.2.7:4711", {"NCCL_SOCKET_IFNAME": "^docker,lo"}).interface != "lo", (
        "both are excluded"
    )
    assert GroupNetwork("http://192.0.2.7:4711", {"NCCL_SOCKET_IFNAME": "l"}).interface == "lo", "NCCL takes beginnings"
    assert GroupNetwork("http://192.0.2.7:4711", {"NCCL_SOCKET_IFNAME": "=l"}).interface != "lo"
    gone = GroupNetwork("http://192.0.2.7:4711", {"GLOO_SOCKET_IFNAME": "gone0,lo"})
    assert gone.interface == "lo", "one of them is there"
    by_name = GroupNetwork(f"http://{socket.gethostname()}:4711", {})
    assert by_name.host == own_address([]), "where the name of this host leads to loopback too"
    nowhere = GroupNetwork("http://[4711", {})
    assert nowhere.host and isinstance(nowhere.look(0.5), PageNotSeen)
