"""Nodes on this machine, each with a folder of its own, real ranks that make snapshots, and real exchanges that copy them."""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

from ftsupervise.snapshots import room
from ftsupervise.snapshots.exchange import start_exchange
from ftsupervise.snapshots.ring import CopyReport, SnapshotRing, read_report
from ftsupervise.snapshots.slots import SnapshotId, open_slots

# A rank: PLACE WORLD RANK ATTEMPT SIZE FROM; a snapshot every 20 ms, every second step, in the slot that nobody needs.
_RANK = """
import os, sys, time
from ftsupervise.snapshots.slots import SLOTS, Pins, PinsPage, slot_to_write, spared
from ftsupervise.snapshots.slots import SlotHeader, claim, create_slots, open_slots, room_for
from tests.story.snapshot_scene import state_of
place, world, rank, attempt, size, step = sys.argv[1], *map(int, sys.argv[2:7])
path = f"{place}/rank-{rank}"
try:
    file = open_slots(path, write=True)
    assert file.room.slots >= SLOTS
except (OSError, ValueError, AssertionError):
    file = create_slots(path, world, rank, room_for(SLOTS, 100, size))
assert claim(file.fd)
pins = None
while os.getppid() > 1:
    time.sleep(0.02)
    step += 2
    if pins is None:
        try:
            pins = PinsPage(place)
        except OSError:
            pass
    steps = file.steps()
    slot = slot_to_write(steps, spared(steps, pins.read() if pins else Pins()))
    turn = file.begin(slot)
    header = SlotHeader(turn, step, attempt, world, rank, 0, size, 0)
    file.write(slot, header, 0, state_of(rank, step, attempt, size))
    file.commit(slot, header)
"""
# A rank with the guard: SIZE FILE. It writes down each step that has counted: its snapshot was taken, and waited for.
_COUNTING = """
import os, sys, time
import numpy as np
from ftsupervise import Guard
size, counted = int(sys.argv[1]), os.open(sys.argv[2], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
state = {"step": 0, "data": np.zeros(size // 8)}
guard = Guard(signals=())
guard.restore(state=state)
step = 0
while os.getppid() > 1:
    state["step"], step = step + 1, step + 1
    state["data"][:] = step
    began = time.monotonic()
    kept = guard.snapshot(step)
    os.write(counted, f"{step if kept else -1} {time.monotonic() - began:.4f}\\n".encode())
    time.sleep(0.01)
"""
REPOSITORY = Path(__file__).parents[2]


def state_of(rank: int, step: int, attempt: int, size: int) -> bytes:
    """What a rank's state is after a step: every byte depends on all four."""
    seed = f"{rank}-{step}-{attempt};".encode()
    return (seed * (size // len(seed) + 1))[:size]


class CopyScene:
    """A small supervisor: it passes the words of the exchanges on to a real ring, and the orders back."""

    def __init__(
        self, folder: str, nodes: tuple[str, ...], world: int, size: int = 100_000, at_once: bool = False
    ) -> None:
        self.folder, self.nodes, self.world, self.size = folder, nodes, world, size
        self.key = os.urandom(32)
        self.reports: dict[str, CopyReport] = {}
        self.pids: dict[str, int] = {}
        self.ranks: dict[int, subprocess.Popen[bytes]] = {}
        self._talks: dict[str, socket.socket] = {}
        self.ring = SnapshotRing(lambda: self.nodes, self._tell, at_once=at_once)
        self._at_once = at_once
        self._locks: list[int] = []
        self._over = False
        self._thread = threading.Thread(target=self._pass_on, daemon=True)
        self._thread.start()

    def hold(self, node: str) -> None:
        """Make the node's folder; while it is held no other test takes it for a leftover."""
        fd = room.make(self.folder, node)
        assert fd is not None
        self._locks.append(fd)

    def exchange(self, node: str, share: float = 1.0) -> None:
        self.pids[node], self._talks[node] = start_exchange(self.folder, node, self.key, share, self._at_once)

    def rank(self, number: int, node: str, attempt: int, step: int = 0) -> None:
        words = [str(word) for word in (self.world, number, attempt, self.size, step)]
        place = room.node_folder(self.folder, node)
        env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
        self.ranks[number] = subprocess.Popen([sys.executable, "-c", _RANK, place, *words], env=env)

    def counting(self, number: int, node: str, counted: Path, wait: str) -> None:
        """A rank with the guard, which takes a snapshot of each step and waits ``wait`` seconds for its copy."""
        own = {
            "SNAPSHOTS": self.folder,
            "GUARD_SNAPSHOT_EVERY": "1",
            "GUARD_SNAPSHOT_WAIT": wait,
            "GUARD_SNAPSHOT_SLOTS": "4",
        }
        env = {name: value for name, value in os.environ.items() if not name.startswith("FTSUPERVISE_")}
        env |= {f"FTSUPERVISE_{name}": value for name, value in own.items()}
        env |= {
            "SLURMD_NODENAME": node,
            "RANK": str(number),
            "WORLD_SIZE": str(self.world),
            "PYTHONPATH": str(REPOSITORY),
        }
        words = [sys.executable, "-c", _COUNTING, str(self.size), str(counted)]
        self.ranks[number] = subprocess.Popen(words, env=env, stderr=(counted.with_suffix(".said")).open("wb"))

    def lose(self, node: str, *ranks: int) -> None:
        """The node is gone with all that ran there."""
        self.kill_ranks(*ranks)
        talk = self._talks.pop(node)
        os.kill(self.pids.pop(node), signal.SIGKILL)
        talk.close()
        self.nodes = tuple(one for one in self.nodes if one != node)

    def kill_ranks(self, *ranks: int) -> None:
        for number in ranks:
            self.ranks[number].kill()
            self.ranks[number].wait()

    def held(self, node: str, rank: int) -> dict[SnapshotId, bytes]:
        """What ``node`` has of ``rank``: the state by its step."""
        path = room.rank_file(room.node_folder(self.folder, node), rank)
        try:
            with open_slots(path) as file:
                found = {}
                for one, slot in file.held().items():
                    header = file.valid(slot)
                    data = b"".join(file.pieces(slot, header)) if header is not None else b""
                    if header is not None and file.still(slot, header):
                        found[one] = data
                return found
        except (OSError, ValueError):
            return {}

    def close(self) -> None:
        self._over = True
        self._thread.join()
        self.kill_ranks(*self.ranks)
        for pid in self.pids.values():
            os.kill(pid, signal.SIGKILL)
        for talk in self._talks.values():
            talk.close()
        for node in os.listdir(self.folder) if Path(self.folder).is_dir() else ():
            room.remove(self.folder, node)
        for fd in self._locks:
            os.close(fd)

    def _tell(self, node: str, body: bytes) -> None:
        talk = self._talks.get(node)
        if talk is not None:
            try:
                talk.send(body)
            except OSError:
                return

    def _pass_on(self) -> None:
        while not self._over:
            talks = dict(self._talks)
            try:
                ready = select.select(list(talks.values()), [], [], 0.02)[0]
            except (OSError, ValueError):  # a node was lost meanwhile
                continue
            for node, talk in talks.items():
                if talk not in ready:
                    continue
                try:
                    raw = talk.recv(4096)
                except OSError:
                    continue
                if raw and (report := read_report(raw)) is not None:
                    self.reports[node] = report
                    self.ring.hear(node, "127.0.0.1", raw)
