"""Buddy copies with real processes: two or three nodes on this machine, real ranks that write, and kills in the middle."""

from __future__ import annotations

import os
import random
import select
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.snapshots import exchange, room
from ftsupervise.snapshots.exchange import (
    ChannelBroken,
    CopyRequest,
    CopySender,
    CopyServer,
    CpuShare,
    NotTaken,
    SnapshotChannel,
    fetch,
    receive_snapshot,
    send_snapshot,
)
from ftsupervise.snapshots.node import Begin, Done, SnapshotRelay, Supply, read_done, read_held
from ftsupervise.snapshots.ring import CopyOrder, SnapshotRing
from ftsupervise.snapshots.room import NoRoom
from ftsupervise.snapshots.slots import SlotHeader, SnapshotId, create_slots, open_slots, room_for
from tests.neighbours.patience import waited_of
from tests.story.snapshot_scene import CopyScene, state_of

Until = Callable[..., Any]
Make = Callable[..., CopyScene]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[CopyScene] = []

    def scene(*nodes: str, world: int = 2, size: int = 100_000, begin: int = 1, at_once: bool = False) -> CopyScene:
        made.append(CopyScene(room.new_folder("test"), nodes, world, size, at_once))
        for node in nodes:
            made[-1].hold(node)
        made[-1].ring.begin(begin, -1)
        return made[-1]

    yield scene
    for one in made:
        one.close()
        assert not Path(one.folder).exists()


def both_copy(scene: CopyScene) -> None:
    for number, node in enumerate(("a", "b")):
        scene.exchange(node)
        scene.rank(number, node, attempt=1)


def test_each_node_copies_to_the_next_one_and_all_hold_the_same_step(make: Make, until: Until) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.state.held > 40)
    for _ in range(20):  # while they go on
        held = SnapshotId(scene.ring.state.held, 1)
        found = {(node, rank): scene.held(node, rank) for node in "ab" for rank in (0, 1)}
        if scene.ring.state.held != held.step:
            continue  # a newer one has taken its place meanwhile
        for (_, rank), states in found.items():
            assert states[held] == state_of(rank, held.step, 1, scene.size)
        time.sleep(0.02)
    assert scene.ring.state.nodes == 2


def test_after_a_lost_node_its_spare_fetches_from_the_buddy_the_step_that_all_hold(make: Make, until: Until) -> None:
    scene = make("a", "b", "spare")
    both_copy(scene)
    scene.exchange("spare")
    until(lambda: scene.ring.state.held > 40)
    scene.lose("a", 0)
    scene.kill_ranks(1)
    held = SnapshotId(scene.ring.state.held, 1)
    assert held in scene.held("b", 1), "what the buddies hold is not written over by its own rank"
    assert scene.held("b", 0)[held] == state_of(0, held.step, 1, scene.size)
    source = scene.ring.port_of("b")
    assert source is not None
    place = room.node_folder(scene.folder, "spare")
    fetch(place, 0, held, *source, scene.key)
    assert scene.held("spare", 0) == {held: state_of(0, held.step, 1, scene.size)}


@pytest.mark.slow
def test_after_the_restart_the_ring_closes_over_the_spare_node(make: Make, until: Until) -> None:
    scene = make("a", "b", "spare")
    both_copy(scene)
    scene.exchange("spare")
    until(lambda: scene.ring.state.held > 10)
    scene.lose("a", 0)
    scene.kill_ranks(1)
    began = scene.ring.state.held
    scene.ring.begin(2, began)
    scene.rank(0, "b", attempt=2, step=began)  # the ranks of the nodes have moved up
    scene.rank(1, "spare", attempt=2, step=began)
    until(lambda: scene.ring.state.held > began + 20)
    held = SnapshotId(scene.ring.state.held, 2)
    until(lambda: held in scene.held("spare", 0) or scene.ring.state.held > held.step)
    assert scene.ring.state.nodes == 2


@pytest.mark.fault(
    "A node's agent is killed while it receives a snapshot",
    "it holds a whole one or none, and the copies go on",
)
@pytest.mark.parametrize("kills", [2, pytest.param(200, marks=[pytest.mark.slow, pytest.mark.timeout(3600)])])
def test_a_buddy_that_is_killed_while_it_receives_holds_a_whole_step_or_none(
    make: Make, until: Until, kills: int
) -> None:
    """Each time both sides need some 40 ms of a processor, at nice 19: in line for one they have stood for a minute."""
    scene = make("a", "b", size=3_000_000)
    both_copy(scene)
    until(lambda: scene.reports.get("b") is not None and scene.reports["b"].ranks == 1)
    until(lambda: 0 in room.ranks_in(room.node_folder(scene.folder, "b")))
    for _ in range(kills):
        time.sleep(random.random() * 0.3)
        now = scene.ring.state.held
        os.kill(scene.pids["b"], signal.SIGKILL)
        found = scene.held("b", 0)
        for one, state in found.items():
            assert state == state_of(0, one.step, 1, scene.size)
        assert now < 0 or any(one.step >= now for one in found), "what every buddy holds is never lost"
        scene.exchange("b")  # the agent starts another one
        began, before = time.monotonic(), waited_of(scene.pids["a"])
        while scene.ring.state.held <= now:
            time.sleep(0.02)
            in_line = waited_of(*scene.pids.values()) - before
            assert time.monotonic() - began < 60 + in_line, "the copies go on"


def test_what_every_buddy_holds_is_spared_also_by_one_that_has_not_heard_of_it(make: Make, until: Until) -> None:
    """The order that says so may reach the node that sends first."""
    scene = make("a", "b")
    scene.rank(0, "a", attempt=1)
    until(lambda: len(scene.held("a", 0)) == 4)
    scene.kill_ranks(0)
    first, second, third = sorted(scene.held("a", 0))[:3]
    late = CopyOrder(1, 1, held=first.step)
    server = CopyServer(room.node_folder(scene.folder, "b"), scene.key, lambda: late)
    channel = exchange.connect("127.0.0.1", server.port, scene.key)
    for held, one in ((-1, first), (first.step, second), (second.step, third)):
        channel.send(CopyRequest("put", held))
        _send(scene, channel, "a", 0, one)
    channel.close()
    assert sorted(scene.held("b", 0)) == [second, third]


@pytest.mark.fault("A rank is killed while its snapshot is copied", "the buddy holds a whole one")
def test_a_rank_that_is_killed_while_its_snapshot_is_copied_leaves_the_buddy_with_a_whole_one(
    make: Make, until: Until
) -> None:
    scene = make("a", "b", size=5_000_000)
    both_copy(scene)
    until(lambda: scene.ring.state.held > 0)
    scene.kill_ranks(0, 1)
    states = scene.held("b", 0)
    assert states
    for one, state in states.items():
        assert state == state_of(0, one.step, 1, scene.size)


def counted(path: Path) -> list[tuple[int, float]]:
    """The steps that a rank has counted, -1 for one whose copy was not there, and how long each snapshot took with its copy."""
    text = path.read_text() if path.exists() else ""
    return [(int(step), float(took)) for step, took in (line.split() for line in text.splitlines())]


def counts(path: Path, many: int) -> bool:
    return [step > 0 for step, _ in counted(path)][-many:] == [True] * many


@pytest.mark.fault(
    "A node is lost, and each snapshot waits for its copy (`checkpoints.snapshot_wait`)",
    "no step that has counted is made again",
)
@pytest.mark.parametrize("turn", range(3))
def test_each_step_that_has_counted_is_on_the_buddy_when_its_node_is_lost(
    make: Make, until: Until, tmp_path: Path, turn: int
) -> None:
    """Where the settings ask for it the rank waits for the copy. The node is lost at any moment."""
    scene = make("a", "b", "spare", begin=0, at_once=True)
    for node in ("a", "b", "spare"):
        scene.exchange(node)
    for rank, node in enumerate("ab"):
        scene.counting(rank, node, tmp_path / str(rank), "5")
    until(lambda: all(counts(tmp_path / str(rank), 30) for rank in (0, 1)), "steps that count")
    until(lambda: scene.ring.state.held > 0, "what is told about it")
    time.sleep(random.uniform(0, 0.05))
    scene.lose("a", 0)
    last, kept = max(step for step, _ in counted(tmp_path / "0")), {one.step for one in scene.held("b", 0)}
    assert kept and max(kept) in (last, last + 1), f"step {last} has counted, and the buddy holds {kept}"
    assert last in kept


@pytest.mark.fault(
    "The node that takes the copies does not answer, and the ranks wait for them",
    "they go on after that time, wait for none during ten times as long, and say why",
)
def test_a_rank_whose_buddy_does_not_answer_goes_on_after_the_time_it_is_given_and_says_so(
    make: Make, until: Until, tmp_path: Path
) -> None:
    scene = make("a", "b", begin=0, at_once=True)
    file = tmp_path / "0"
    for node in "ab":
        scene.exchange(node)
    scene.counting(0, "a", file, "0.3")
    scene.counting(1, "b", tmp_path / "1", "0.3")
    until(lambda: counts(file, 30), "steps that count")
    at = len(counted(file))
    os.kill(scene.pids["b"], signal.SIGSTOP)
    until(lambda: len(counted(file)) > at + 50, "that it trains on", 20)
    slow = [took for _, took in counted(file)[at:] if took > 0.25]
    assert 1 <= len(slow) <= 3 and max(slow) < 2, "one wait, and then none for ten times as long"
    assert counted(file)[-1][0] == -1, "the loop is told that this step is not on a second node"
    said = file.with_suffix(".said").read_text()
    assert "are not on a second node, and not waited for: no answer within 0.3 s" in said
    os.kill(scene.pids["b"], signal.SIGCONT)
    until(lambda: counted(file)[-1][0] > 0, "copies again", 20)


@pytest.mark.fault("An older attempt lives on and makes snapshots", "no node takes any of them")
def test_nothing_of_an_older_attempt_is_taken(make: Make, until: Until) -> None:
    """Its node was lost and lives on: the fence of the memory tier."""
    scene = make("a", "b", begin=2)
    scene.exchange("a")
    scene.exchange("b")
    scene.rank(0, "a", attempt=1)
    scene.rank(1, "b", attempt=2)
    until(lambda: scene.reports.get("a") is not None and scene.reports["a"].newest > 60)
    assert scene.ring.state.held == -1
    assert scene.held("b", 0) == {}
    until(lambda: scene.reports.get("b") is not None and scene.reports["b"].order > 0)
    scene.kill_ranks(0)
    wanted = max(scene.held("a", 0))
    channel = _channel(scene, "b", scene.key)
    channel.send(CopyRequest("put"))
    with pytest.raises(NotTaken, match="attempt 1 is not the one that runs here"):
        _send(scene, channel, "a", 0, wanted)


@pytest.mark.slow
def test_a_copy_never_takes_the_place_of_a_rank_that_runs_here(make: Make, until: Until) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.state.held > 0)
    scene.ranks[1].send_signal(signal.SIGSTOP)  # it holds its file, and writes over none
    time.sleep(0.2)
    channel = _channel(scene, "b", scene.key)
    channel.send(CopyRequest("put"))
    place = room.node_folder(scene.folder, "a")
    with pytest.raises(NotTaken, match="rank 1 runs here"):
        _send(scene, channel, "a", 1, max(scene.held("a", 1)))
    assert 1 in room.ranks_in(place)


@pytest.mark.threat(
    "A stranger connects to the port where a node takes snapshots.",
    "He proves no key and gets nothing; mute connections do not hold the copies up.",
)
def test_a_stranger_at_the_port_gets_nothing_and_holds_nothing_up(make: Make, until: Until) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.state.held > 0)
    where = scene.ring.port_of("b")
    assert where is not None
    mute = [socket.create_connection(where) for _ in range(60)]  # and says nothing, for ever
    for words in (b"GET /etc/passwd HTTP/1.1\r\n\r\n", b"FTSNAP1\n\1" + bytes(16), os.urandom(4096)):
        with socket.create_connection(where) as one:
            one.settimeout(10)
            one.sendall(words)
            one.shutdown(socket.SHUT_WR)
            said = b""
            try:
                while part := one.recv(4096):
                    said += part
            except ConnectionResetError:
                pass
            assert len(said) <= 41  # a hello and a proof that only the key can make
    with pytest.raises(ChannelBroken):
        _channel(scene, "b", os.urandom(32))
    now = scene.ring.state.held
    until(lambda: scene.ring.state.held > now + 20)
    for one in mute:
        one.close()


@pytest.mark.threat(
    "Somebody on the network changes a snapshot on its way to the buddy.",
    "It is not committed; what the buddy held stays.",
)
@pytest.mark.parametrize("seal", [True, False])
def test_a_changed_bit_on_the_wire_is_never_committed(make: Make, until: Until, *, seal: bool) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.state.held > 0)
    scene.kill_ranks(0, 1)
    wanted = max(scene.held("a", 0))
    before = scene.held("b", 0)
    assert wanted not in before or scene.ring.state.held == wanted.step
    where = scene.ring.port_of("b")
    assert where is not None
    channel = exchange.connect("127.0.0.1", _forger(where, 50_000), scene.key, seal=seal)
    assert channel.sealed == seal
    channel.send(CopyRequest("put"))
    with pytest.raises((NotTaken, ChannelBroken)):
        _send(scene, channel, "a", 0, wanted)
    after = scene.held("b", 0)
    assert all(state == state_of(0, one.step, 1, scene.size) for one, state in after.items())
    assert SnapshotId(scene.ring.state.held, 1) in after, "what every buddy holds is not written over"


@pytest.mark.slow
def test_copies_of_ranks_that_have_another_buddy_now_are_removed(make: Make, until: Until) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.state.held > 0)
    place = room.node_folder(scene.folder, "b")
    old = room.rank_file(place, 7)
    fd = os.open(old, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(fd, "wb") as file:
        file.write(Path(room.rank_file(place, 0)).read_bytes())
    until(lambda: not Path(old).exists(), "the copy that nobody brings up to date")
    assert Path(room.rank_file(place, 0)).exists()


def _channel(scene: CopyScene, node: str, key: bytes) -> SnapshotChannel:
    where = scene.ring.port_of(node)
    assert where is not None
    return exchange.connect(*where, key)


def _forger(where: tuple[str, int], at: int) -> int:
    """The port of somebody between the two, who flips one bit of what goes to ``where``."""
    listener = socket.create_server(("127.0.0.1", 0))

    def pass_on(source: socket.socket, target: socket.socket, flip: int) -> None:
        seen = 0
        try:
            while data := bytearray(source.recv(65536)):
                if seen <= flip < seen + len(data):
                    data[flip - seen] ^= 4
                seen += len(data)
                target.sendall(data)
            target.shutdown(socket.SHUT_WR)
        except OSError:
            with suppress(OSError):
                target.shutdown(socket.SHUT_RDWR)

    def serve() -> None:
        near = listener.accept()[0]
        far = socket.create_connection(where)
        threading.Thread(target=pass_on, args=(far, near, -1), daemon=True).start()
        pass_on(near, far, at)

    threading.Thread(target=serve, daemon=True).start()
    return int(listener.getsockname()[1])


def _send(scene: CopyScene, channel: SnapshotChannel, node: str, rank: int, wanted: SnapshotId) -> None:
    with open_slots(room.rank_file(room.node_folder(scene.folder, node), rank)) as file:
        send_snapshot(channel, file, wanted, CpuShare(None))


# The agent's part.


def test_an_agent_says_what_its_node_holds_gives_up_what_is_newer_and_leaves_nothing(make: Make, until: Until) -> None:
    scene = make("a")
    relay = SnapshotRelay(scene.folder, "a", scene.key, 0.0, select.poll(), lambda report: None)
    scene.rank(0, "a", attempt=1)
    until(lambda: len(scene.held("a", 0)) == 4)
    scene.kill_ranks(0)
    held = sorted(scene.held("a", 0))
    said = read_held(relay.answer("snapshots", "a"), "a")
    assert [(one.rank, one.step, one.attempt, one.world, one.node) for one in said] == [
        (0, one.step, 1, 2, "a") for one in held
    ]
    assert read_done(relay.answer(Begin(held[1].step, 1).question(), "a")) == Done("")
    assert sorted(scene.held("a", 0)) == held[:2]
    assert read_done(relay.answer(Begin(-1, 1).question(), "a")) == Done("")
    assert scene.held("a", 0) == {}
    relay.close(keep=True)
    assert room.ranks_in(room.node_folder(scene.folder, "a"))
    again = SnapshotRelay(scene.folder, "a", scene.key, 0.0, select.poll(), lambda report: None)
    again.close(keep=False)
    assert not Path(scene.folder).exists()


def test_where_nothing_is_copied_the_supervisor_still_hears_that_there_are_snapshots(make: Make, until: Until) -> None:
    scene, said = make("a"), list[bytes]()
    relay = SnapshotRelay(scene.folder, "a", scene.key, 0.0, select.poll(), said.append)
    relay.beat()
    assert said == []
    scene.rank(0, "a", attempt=1)
    until(lambda: room.ranks_in(room.node_folder(scene.folder, "a")))
    relay.beat()
    ring = SnapshotRing(lambda: ("a",), lambda node, body: None)
    for report in said:
        ring.hear("a", "10.0.0.1", report)
    assert ring.active and ring.state.nodes == 0
    relay.close(keep=False)


def test_a_rank_cannot_be_fetched_from_a_node_that_has_it_no_more(make: Make, until: Until) -> None:
    scene = make("a", "b")
    both_copy(scene)
    until(lambda: scene.ring.port_of("b") is not None and scene.held("b", 1))
    where = scene.ring.port_of("b")
    assert where is not None
    relay = SnapshotRelay(scene.folder, "a", scene.key, 1.0, select.poll(), lambda report: None)
    asked = Begin(100_000, 1, (Supply((1,), *where),)).question()
    assert "there is no step 100000 of attempt 1" in read_done(relay.answer(asked, "a")).problem
    assert (
        "no connection to"
        in read_done(relay.answer(Begin(2, 1, (Supply((1,), "127.0.0.1", 9),)).question(), "a")).problem
    )
    path = '{"step": 5, "attempt": 1, "supplies": [{"ranks": ["../../etc"], "host": "127.0.0.1", "port": 9}]}'
    for wrong in (f"snapshots-begin {path}", "snapshots-begin {", "snapshots-keep {}", "snapshots-begin"):
        assert read_done(relay.answer(wrong, "a")).problem.startswith("no such question"), wrong
    relay.close(keep=True)


def test_a_node_whose_memory_is_tight_takes_no_copy_and_says_so(tmp_path: Path) -> None:
    """The kernel would end a rank for the memory that a copy takes."""
    with socket.create_server(("127.0.0.1", 0)) as door:
        near = socket.create_connection(door.getsockname())
        far = door.accept()[0]
    key, place = os.urandom(32), tmp_path / "node"
    place.mkdir(mode=0o700)
    said: list[str] = []

    def full(size: int) -> None:
        raise NoRoom("of the job's memory 1 MB are free")

    def take() -> None:
        with pytest.raises(NotTaken, match="1 MB are free"):
            receive_snapshot(SnapshotChannel(far, key, client=False, seal=False), str(place), (), full, CpuShare(None))
        said.append("refused")

    taker = threading.Thread(target=take)
    taker.start()
    with create_slots(tmp_path / "rank-0", 1, 0, room_for(1, 10, 1000)) as file:
        turn = file.begin(0)
        header = SlotHeader(turn, 4, 1, 1, 0, 0, 1000)
        file.write(0, header, 0, state_of(0, 4, 1, 1000))
        file.commit(0, header)
        with pytest.raises(NotTaken, match="1 MB are free"):
            send_snapshot(SnapshotChannel(near, key, client=True, seal=False), file, SnapshotId(4, 1), CpuShare(None))
    taker.join()
    assert said == ["refused"] and list(place.iterdir()) == []


@pytest.mark.fault(
    "A bit of a snapshot changes before it is copied to the buddy, or fetched from it",
    "it is not taken",
)
def test_a_snapshot_that_is_damaged_where_it_lies_is_given_to_nobody(make: Make, until: Until) -> None:
    """The buddy's copy has the digest that both sides took on the way; a bit of it changes later."""
    scene = make("a", "b", "spare")
    both_copy(scene)
    scene.exchange("spare")
    until(lambda: scene.ring.state.held > 40)
    scene.lose("a", 0)
    scene.kill_ranks(1)
    held = SnapshotId(scene.ring.state.held, 1)
    with open_slots(room.rank_file(room.node_folder(scene.folder, "b"), 0), write=True) as file:
        at = file.data_at(file.held()[held]) + 4321
        os.pwrite(file.fd, bytes([os.pread(file.fd, 1, at)[0] ^ 16]), at)
    source = scene.ring.port_of("b")
    assert source is not None
    place = room.node_folder(scene.folder, "spare")
    with pytest.raises(NotTaken, match="damaged"):
        fetch(place, 0, held, *source, scene.key)
    assert scene.held("spare", 0) == {}


def test_a_sender_that_waits_to_try_again_hears_of_another_buddy_at_once(make: Make, until: Until) -> None:
    """It waits up to five seconds after a buddy that was killed, and the next one may be named meanwhile."""
    scene = make("a", "b")
    sender = CopySender(room.node_folder(scene.folder, "a"), scene.key, CpuShare(None))
    with socket.create_server(("127.0.0.1", 0)) as gone:
        old = gone.getsockname()[:2]
    sender.obey(CopyOrder(1, 1, *old))
    began = time.monotonic()
    threading.Timer(0.2, lambda: sender.obey(CopyOrder(2, 1, "127.0.0.1", old[1] + 1))).start()
    sender.pause(old, 30)
    assert time.monotonic() - began < 10
