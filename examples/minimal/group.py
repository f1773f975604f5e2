"""A very small all-reduce over TCP, so that this example needs nothing but NumPy.

Rank 0 adds up what the ranks send, in the order of the ranks, and sends the sum back: the same bits every time. Where it
listens stands in a file that all ranks can see. A rank that dies ends all others within a moment.
"""

from __future__ import annotations

import os
import secrets
import socket
import struct
import time
from pathlib import Path

import numpy as np

JOIN = 120.0  # seconds to wait for all ranks to come together
PATIENCE = 600.0  # seconds to wait for another rank's step
HEADER = struct.Struct("!qq")  # bytes that follow, vote


def rank_and_world() -> tuple[int, int]:
    """Return rank and world from torchrun's names or srun's.

    A batch script has SLURM_PROCID too, but only a step has SLURM_STEP_ID.
    """
    env = os.environ
    if "RANK" in env:
        return int(env["RANK"]), int(env.get("WORLD_SIZE", "1"))
    if "SLURM_STEP_ID" in env:
        return int(env.get("SLURM_PROCID", "0")), int(env.get("SLURM_STEP_NUM_TASKS", "1"))
    return 0, 1


class Group:
    """All ranks of one start. ``meet`` is a directory every rank sees."""

    def __init__(self, meet: Path) -> None:
        self.rank, self.world = rank_and_world()
        self.peers: list[socket.socket] = []  # rank 0: the others by rank; the others: rank 0
        start = ".".join(os.environ.get(f"SLURM_{word}", "0") for word in ("JOB_ID", "STEP_ID", "RESTART_COUNT"))
        place = meet / f"hub-{start}"
        if self.world > 1:
            meet.mkdir(parents=True, exist_ok=True)
            self.peers = self._wait_for_all(place) if self.rank == 0 else [self._join(place)]
        for peer in self.peers:
            peer.settimeout(PATIENCE)
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def all_reduce(self, array: np.ndarray, vote: int = 0) -> tuple[np.ndarray, int]:
        """Return the sum of every rank's ``array`` and the largest ``vote``, the same on all ranks."""
        if self.world == 1:
            return array, vote
        if self.rank != 0:
            send(self.peers[0], array, vote)
            return receive(self.peers[0], array)
        total = array.copy()
        for peer in self.peers:
            theirs, their_vote = receive(peer, array)
            total += theirs
            vote = max(vote, their_vote)
        for peer in self.peers:
            send(peer, total, vote)
        return total, vote

    def _wait_for_all(self, place: Path) -> list[socket.socket]:
        token = secrets.token_bytes(16)
        with socket.create_server(("", 0), backlog=self.world) as server:
            host = "127.0.0.1" if os.environ.get("SLURM_NNODES", "1") == "1" else socket.gethostname()
            temp = place.with_name(f".{place.name}.{os.getpid()}")
            temp.touch(mode=0o600)
            temp.write_text(f"{host} {server.getsockname()[1]} {token.hex()}")
            temp.replace(place)
            try:
                return self._accept(server, token)
            finally:
                place.unlink(missing_ok=True)

    def _accept(self, server: socket.socket, token: bytes) -> list[socket.socket]:
        ends = time.monotonic() + JOIN
        found: dict[int, socket.socket] = {}
        while len(found) < self.world - 1:
            server.settimeout(max(0.01, ends - time.monotonic()))
            peer, _ = server.accept()
            peer.settimeout(10)
            try:
                greeting = read(peer, 24)
            except OSError:
                continue
            if greeting[:16] == token:
                found[int.from_bytes(greeting[16:], "big")] = peer
        return [found[rank] for rank in sorted(found)]

    def _join(self, place: Path) -> socket.socket:
        ends = time.monotonic() + JOIN
        while True:
            try:
                host, port, token = place.read_text().split()
                peer = socket.create_connection((host, int(port)), timeout=10)
                peer.sendall(bytes.fromhex(token) + self.rank.to_bytes(8, "big"))
                return peer
            except (OSError, ValueError):
                if time.monotonic() > ends:
                    raise ConnectionError(f"rank {self.rank} found no rank 0 through {place}") from None
                time.sleep(0.05)


def send(peer: socket.socket, array: np.ndarray, vote: int) -> None:
    peer.sendall(HEADER.pack(array.nbytes, vote) + array.tobytes())


def receive(peer: socket.socket, like: np.ndarray) -> tuple[np.ndarray, int]:
    size, vote = HEADER.unpack(read(peer, HEADER.size))
    return np.frombuffer(read(peer, size), dtype=like.dtype).reshape(like.shape).copy(), vote


def read(peer: socket.socket, size: int) -> bytes:
    parts = []
    while size:
        part = peer.recv(min(size, 1 << 20))
        if not part:
            raise ConnectionError("another rank is gone")
        parts.append(part)
        size -= len(part)
    return b"".join(parts)
