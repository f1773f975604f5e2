"""The lighthouse on a machine that fails around it: its network is cut, its disk hangs, a stranger has its port."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftsupervise.host import processes
from ftsupervise.host.ports import ports_of
from ftsupervise.replicas.bounds import derive
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.members import LighthousePage, PageNotSeen, Unseen
from tests.faults.conftest import HungMount, need_root_and
from tests.neighbours import needs
from tests.neighbours.managers import Group
from tests.neighbours.patience import waited_for_a_processor
from tests.neighbours.stranger import STRANGER, as_stranger

pytestmark = [pytest.mark.root, pytest.mark.torch, needs.torchft]
Until = Callable[..., Any]
NAMES = ("g000", "g001", "g002", "g003")


class Cable(NamedTuple):
    """Between this host and another one, which is a network namespace."""

    space: str
    here: str
    ours: str  # the ends
    theirs: str

    def on_the_other_side(self) -> tuple[str, ...]:
        return ("ip", "netns", "exec", self.space)

    def plug(self, how: str) -> None:
        ip("netns", "exec", self.space, "ip", "link", "set", self.theirs, how)

    def address(self, how: str) -> None:
        ip("addr", how, f"{self.here}/24", "dev", self.ours)


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=20)


@pytest.fixture
def cable() -> Iterator[Cable]:
    need_root_and("ip")
    name = f"ft{os.getpid() % 100_000}"
    one = Cable(name, "10.213.77.1", f"{name}a", f"{name}b")
    try:
        ip("netns", "add", one.space)
        ip("link", "add", one.ours, "type", "veth", "peer", "name", one.theirs, "netns", one.space)
    except subprocess.CalledProcessError as error:
        ip("netns", "del", one.space)
        pytest.skip(f"needs network namespaces: {error.stderr.decode()}")
    try:
        one.address("add")
        ip("link", "set", one.ours, "up")
        for words in (f"addr add 10.213.77.2/24 dev {one.theirs}", "link set lo up", f"link set {one.theirs} up"):
            ip("netns", "exec", one.space, "ip", *words.split())
        yield one
    finally:
        ip("netns", "del", one.space)


def supervised(home: Path, host: str, said: list[str], stack: ExitStack) -> SupervisedLighthouse:
    place = LighthousePlace(home, host, len(NAMES), 3, derive(1.0, 0, len(NAMES)))
    one = SupervisedLighthouse(place, sys.executable, said.append)
    stack.callback(one.stop)
    one.start()
    return one


def all_step(groups: list[Group], since: float) -> bool:
    return all(any(step.members == len(groups) for step in group.since(since)) for group in groups)


@pytest.mark.fault(
    "The network between the lighthouse and half of the groups is cut, then its own address is gone",
    "nothing is ended, all go on afterwards",
)
def test_a_cut_network_costs_its_own_time_and_ends_nothing(cable: Cable, tmp_path: Path, until: Until) -> None:
    """Two groups run on this host and two on the other."""
    said: list[str] = []
    with ExitStack() as stack:
        lighthouse = supervised(tmp_path / "replicas", cable.here, said, stack)
        groups = [
            Group(tmp_path, lighthouse.address, name, within=cable.on_the_other_side() if name > "g001" else ())
            for name in NAMES
        ]
        for group in groups:
            stack.callback(group.end)
        until(lambda: all_step(groups, 0), "a quorum of all groups")
        before = lighthouse.record
        cable.plug("down")
        cut = time.time()
        # one page for both: on a busy machine the next look may come to none in time
        until(
            lambda: (lighthouse.heard("g003"), lighthouse.heard("g000")) == (False, True),
            "the groups beyond are not heard of, and those on this side are",
        )
        time.sleep(max(0.0, cut + 4 - time.time()))
        cable.plug("up")
        back, busy = time.time(), waited_for_a_processor()
        until(lambda: all_step(groups, back), "all groups go on", 90)
        assert time.time() - back < 30 + min(60.0, waited_for_a_processor() - busy)
        cable.address("del")  # now this host has no such address itself, and cannot see its own lighthouse
        until(lambda: isinstance(p := lighthouse.page(), PageNotSeen) and p.kind is Unseen.CUT, "it is not seen")
        assert lighthouse.heard("g000") is None
        cable.address("add")
        back = time.time()
        until(lambda: all_step(groups, back), "all groups go on")
        assert (lighthouse.record.pid, lighthouse.record.restarts) == (before.pid, 0)
    assert len(said) == 1, "that it listens"


@pytest.mark.fault(
    "The run directory hangs while the lighthouse has to be restarted",
    "the restart does not wait for it",
)
def test_a_hung_disk_does_not_hold_up_a_restart(dead_mount: HungMount, tmp_path: Path, until: Until) -> None:
    said: list[str] = []
    with ExitStack() as stack:
        lighthouse = supervised(dead_mount.point / "run" / "replicas", "127.0.0.1", said, stack)
        stack.callback(dead_mount.answer)
        before = lighthouse.record
        dead_mount.hang("*")
        os.kill(before.pid, signal.SIGKILL)
        at = time.monotonic()
        until(lambda: lighthouse.record.restarts == 1, "it is back")
        assert time.monotonic() - at < 5 and lighthouse.record.address == before.address
        until(lambda: isinstance(lighthouse.page(), LighthousePage), "and answers")


@pytest.mark.threat(
    "Another account listens on the lighthouse's port first.",
    "Its port is passed over and the account is named. Nothing is sent to it.",
)
def test_a_strangers_server_on_the_port_is_named_and_never_asked_for_anything(tmp_path: Path, until: Until) -> None:
    """It was there first: its port is passed over. Nothing is sent to it."""
    home, said = tmp_path / "replicas", list[str]()
    first, second, *_ = ports_of(f"{home}/lighthouse", 0)
    heard = tmp_path / "heard"
    heard.touch(0o666)
    heard.chmod(0o666)
    for folder in (tmp_path, *tmp_path.parents):
        folder.chmod(folder.stat().st_mode | 0o011) if folder.owner() == "root" and folder != Path("/") else None

    def listen() -> None:
        server = socket.create_server(("127.0.0.1", first))
        if os.fork() == 0:
            while True:
                one, _ = server.accept()
                heard.write_bytes(one.recv(4096))

    as_stranger(listen)
    left = [one for one in processes.living() if Path(f"/proc/{one.pid}").stat().st_uid == STRANGER]
    try:
        with ExitStack() as stack:
            lighthouse = supervised(home, "127.0.0.1", said, stack)
            assert lighthouse.record.port == second
            until(lambda: isinstance(lighthouse.page(), LighthousePage), "ours answers")
        assert f"port {first} is taken by a program of nobody" in said
        assert heard.read_bytes() == b""
    finally:
        for one in left:
            processes.signal_exactly(one, signal.SIGKILL)
