"""A real agent, real ranks and the ring's ears on this machine: what the tests of the pulse play on."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

from ftsupervise.ranks import protocol, shm_dir
from ftsupervise.ranks.agent_pool import Listener
from ftsupervise.ranks.rank_table import RankTable, Reply
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR

RANK = """
import os, sys, time
from ftsupervise.rundir.heartbeat_page import HeartbeatPage
page = HeartbeatPage(sys.argv[1], int(sys.argv[2]), int(sys.argv[3]))
if "IDLE" in os.environ:
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    os.sched_setscheduler(0, os.SCHED_IDLE, os.sched_param(0))
fill = os.memfd_create("fill")
for _ in range(int(os.environ.get("FILL", "0"))):
    os.write(fill, bytes(1 << 20))
step = 0
while True:
    step += 1
    page.step(step, time.monotonic())
    time.sleep(0.005)
"""

HOG = """
import os
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
while True:
    pass
"""

ENDING = """
import atexit, sys, time
from pathlib import Path
atexit.register(lambda: [time.sleep(0.01) for _ in iter(lambda: Path(sys.argv[1]).exists(), True)])
from ftsupervise import Guard
def fails(guard, error):
    with guard:
        guard.step(1)
        time.sleep(0.3)
        raise error
def printed():
    import ctypes
    ctypes.pythonapi.PyRun_SimpleString(b"raise ValueError('in an extension, which prints and forgets it')")
"""


class Relay:
    """A network that loses what ``lose`` names by its number, in both directions."""

    def __init__(self, ring: int, lose: Callable[[int], bool]) -> None:
        self.sock = protocol.udp()
        self.sock.setblocking(True)
        self.sock.settimeout(0.1)
        self.port = self.sock.getsockname()[1]
        self.lost = self.count = 0
        self._ring, self._lose, self._over = ring, lose, False
        self._thread = threading.Thread(target=self._go)
        self._thread.start()

    def _go(self) -> None:
        agent, ring = None, protocol.resolve(self.sock, ["127.0.0.1"], self._ring)[0]
        while not self._over:
            try:
                data, sender = self.sock.recvfrom(4096)
            except TimeoutError:
                continue
            self.count += 1
            if sender[1] != self._ring:
                agent = sender
            if self._lose(self.count):
                self.lost += 1
            elif to := (ring if sender[1] != self._ring else agent):
                protocol.send_datagram(self.sock, data, to)

    def close(self) -> None:
        self._over = True
        self._thread.join(5)
        self.sock.close()


class Stage:
    def __init__(self) -> None:
        self.key = os.urandom(protocol.KEY)
        self.base = shm_dir.new_base()
        self.pulses = RankTable(self.key, 0.05)
        self.pulses.generation = 1
        self.pulses.begin(1)
        self.sock = protocol.udp()
        self.port = self.sock.getsockname()[1]
        self.listener = Listener(self.pulses, self.sock)
        self.started: list[subprocess.Popen[bytes]] = []
        self.relays: list[Relay] = []

    def agent(self, *words: str, port: int = 0, to: str = "127.0.0.1", **env: str) -> subprocess.Popen[bytes]:
        argv = [sys.executable, "-m", "ftsupervise.ranks", "--base", self.base, "--to", to, "--port"]
        argv += [str(port or self.port), "--generation", "1", "--every", "0.05", *words]
        given = {**os.environ, protocol.ENV_KEY: self.key.hex(), "SLURMD_NODENAME": "node-1", **env}
        return self._start(argv, given)

    def rank(self, rank: int, attempt: int = 1, **env: str) -> subprocess.Popen[bytes]:
        words = [sys.executable, "-c", RANK, f"{self.base}/{attempt}", str(rank), str(attempt)]
        # torchrun says so to its workers: nobody on this node would start them again
        given = {**os.environ, "TORCHELASTIC_MAX_RESTARTS": "0", **env}
        return self._start(words, given)

    def hog(self) -> None:
        """What takes the core that a rank with IDLE in its environment runs on: it is seldom its turn."""
        self._start([sys.executable, "-c", HOG], dict(os.environ))

    def ends(self, how: str, go: Path, run: Path) -> subprocess.Popen[bytes]:
        """A program with a guard that ends in the words ``how``; its teardown then waits for the file ``go``."""
        for name in ("beats", "switches", "attempts/1"):
            (run / name).mkdir(parents=True, exist_ok=True)
        given = {"FTSUPERVISE_RUN_DIR": str(run), "FTSUPERVISE_ATTEMPT": "1", "FTSUPERVISE_PAGES": f"{self.base}/1"}
        given[ENV_ATTEMPT_DIR] = str(run / "attempts/1")
        words = [sys.executable, "-c", f"{ENDING}\n{how}", str(go)]
        return self._start(words, {**os.environ, "TORCHELASTIC_MAX_RESTARTS": "0", **given})

    def relay(self, lose: Callable[[int], bool]) -> Relay:
        self.relays.append(Relay(self.port, lose))
        return self.relays[-1]

    def _start(self, argv: list[str], env: dict[str, str]) -> subprocess.Popen[bytes]:
        self.started.append(subprocess.Popen(argv, env=env))
        return self.started[-1]

    def step(self, rank: int) -> int:
        return next((one.step or 0 for one in self.pulses.newest() if one.rank == rank), 0)

    def ask(self, number: int, question: str) -> Callable[[], str | None]:
        """Ask as the ring asks; what is called then gives the answer once it is whole."""
        reply = self.pulses.replies[number] = Reply()
        data = self.pulses.pack(protocol.ASK, number, b"node-1", question.encode())
        node = self.pulses.nodes[b"node-1"]

        def answer() -> str | None:
            if not reply.whole:
                assert node.address is not None
                protocol.send_datagram(self.sock, data, node.address)
                return None
            return reply.text

        return answer

    def close(self) -> None:
        for one in self.started:
            one.kill()
            one.wait()
        for relay in self.relays:
            relay.close()
        self.listener.close()
        self.sock.close()
        shm_dir.clear(self.base)


def gone(base: str) -> bool:
    return not Path(base).exists()
