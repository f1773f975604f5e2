"""What it costs to know every rank's newest step: 100, 1,000 and 12,500 nodes with 8 ranks each, on loopback.

    python benchmarks/beats.py [--nodes 100,1000,12500] [--seconds 10] [--check]

A process of its own speaks for all nodes: one sealed datagram per node and interval, spread evenly as agents spread them.
Another one is the ring: its real listener and, once a second, the question for the newest of all ranks. The floor is a loop
that receives the same datagrams and throws them away. Then the other end: what a step costs a rank that has a page, beside an
empty call and beside a beat file. CPU is the receiver's own, as a share of one core. Where this machine's cores are busy with
others the speaker falls behind and leaves rounds out, as the table says. ``--check`` exits 1 if the largest number of nodes
takes a whole core, or a hundredth of its datagrams is lost.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from benchmarks.memory import pss
from ftsupervise.ranks import protocol
from ftsupervise.ranks.agent_pool import Listener
from ftsupervise.ranks.protocol import Datagram
from ftsupervise.ranks.rank_table import RankTable
from ftsupervise.rundir.heartbeat_page import HeartbeatPage, write_beat
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Beat, RankState

PER_NODE = 8
RATE = 12_500  # as in ftsupervise/ranks/agent_pool.py
KEY = bytes(range(32))


def speak(nodes: int, every: float, port: int) -> None:
    """All agents at once, until the other end closes our input. Prints how many datagrams were sent."""
    sock, seal, now = protocol.udp(), protocol.Seal(KEY), time.monotonic()
    to = protocol.resolve(sock, ["127.0.0.1"], port)[0]
    bodies = []
    for node in range(nodes):
        ranks = range(node * PER_NODE, (node + 1) * PER_NODE)
        pulses = [RankState(r, "", 1_000_000, "train", now - 0.3, now - 0.2, now, 4000 + r, "R", 1234.5) for r in ranks]
        bodies.append((f"node-{node:05}".encode(), protocol.pack_states(pulses, now)[0]))
    sent, told, began = 0, 0, time.monotonic()
    while not select.select([0], [], [], 0.005)[0]:
        due = int((time.monotonic() - began) / every * nodes)
        # agents that are late are late each on its own: no burst of what was missed
        for number in range(max(sent, due - max(1, int(0.03 / every * nodes))), due):
            told += 1
            name, body = bodies[number % nodes]
            protocol.send_datagram(
                sock, seal.pack(Datagram(protocol.STATES, 0, 1, 1, 1, number // nodes + 1, name, body)), to
            )
        sent = max(sent, due)
    print(told)


def hear(nodes: int, every: float, seconds: float, bare: bool) -> dict[str, float]:
    """The ring's side, or the floor, in this process."""
    sock = protocol.udp()
    pulses = RankTable(KEY, every)
    pulses.generation = 1
    pulses.begin(1)
    words = [sys.executable, __file__, "--speak", str(nodes), str(every), str(sock.getsockname()[1])]
    started = time.monotonic()
    talker = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    listener = None if bare else Listener(pulses, sock)
    taken, newest, asking = 0, 0.0, 0.0
    while not bare and len(pulses.nodes) < nodes and time.monotonic() < started + 60:
        time.sleep(0.1)
    if bare:
        select.select([sock], [], [], 60)
    first = pulses.taken
    cpu, began = _cpu(), time.monotonic()
    due = began + 1
    while (now := time.monotonic()) < began + seconds:
        if bare:
            try:
                sock.recvfrom(2048)
                taken += 1
            except BlockingIOError:
                time.sleep(0.004)
        elif now >= due:
            before = time.thread_time()
            pulses.newest()
            newest = time.thread_time() - before
            asking += newest
            due += 1
        else:
            time.sleep(min(0.2, due - now))
    spent, took = _cpu() - cpu, time.monotonic() - began
    before = time.thread_time()
    found = len(pulses.newest())
    again = time.thread_time() - before
    memory = pss(os.getpid()) / 1e6
    assert talker.stdin is not None and talker.stdout is not None
    talker.stdin.close()
    sent = int(talker.stdout.read())
    if listener is not None:
        time.sleep(0.2)
        taken, whole = pulses.taken - first, pulses.taken
        listener.close()
    else:
        whole = taken
    talker.wait()
    return {
        "cpu": (spent - asking) / took, "asking": asking / took, "newest": newest, "again": again, "pss": memory,
        "rate": taken / took, "lost": 0.0 if bare else 1 - whole / sent, "ranks": found,
    }  # fmt: skip


def _cpu() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def measured(nodes: int, every: float, seconds: float, bare: bool) -> dict[str, float]:
    words = [sys.executable, __file__, "--hear", str(nodes), str(every), str(seconds), str(int(bare))]
    done = subprocess.run(words, stdout=subprocess.PIPE, text=True, check=True)
    return dict(json.loads(done.stdout))


def table(counts: list[int], seconds: float) -> tuple[float, float]:
    print(f"\nThe ring: {PER_NODE} ranks a node, one datagram a node and interval; load {os.getloadavg()[0]:.1f}")
    print("  nodes     ranks  interval  datagrams/s   lost  CPU taking  floor  ratio  + newest()    once     PSS")
    cpu = lost = 0.0
    for nodes in counts:
        every = max(1.0, nodes / RATE)
        ring, floor = (measured(nodes, every, seconds, bare) for bare in (False, True))
        cpu, lost = ring["cpu"] + ring["asking"], ring["lost"]
        assert ring["ranks"] == nodes * PER_NODE, f"{ring['ranks']:.0f} ranks of {nodes * PER_NODE}"
        # the floor's share for as many datagrams as the ring took
        share = floor["cpu"] * ring["rate"] / floor["rate"] if floor["rate"] else 0.0
        print(
            f"{nodes:7,}  {nodes * PER_NODE:8,}  {every:6.1f} s  {ring['rate']:11,.0f}  {lost:5.2%}  {ring['cpu']:10.2%}"
            f"  {share:5.2%}  {ring['cpu'] / share if share else 0:5.1f}  {ring['asking']:10.2%}  "
            f"{ring['newest'] * 1e3:4.0f} ms  {ring['pss']:4.0f} MB"
        )
        times = ring["cpu"] / share if share else None
        figure(f"beats/{nodes}/taking", 100 * ring["cpu"], "%", "a loop that throws them away, of a core", times=times)
        figure(f"beats/{nodes}/taking-and-asking", 100 * cpu, "%", "of a core")
        figure(f"beats/{nodes}/newest", ring["newest"] * 1e3, "ms")
        figure(f"beats/{nodes}/lost", 100 * lost, "%")
        figure(f"beats/{nodes}/memory", ring["pss"], "MB")
    return cpu, lost


def nanoseconds(call: Callable[[], object], times: int) -> float:
    best = float("inf")
    for _ in range(5):
        began = time.perf_counter_ns()
        for _ in range(times):
            call()
        best = min(best, (time.perf_counter_ns() - began) / times)
    return best


def steps() -> None:
    with tempfile.TemporaryDirectory(dir="/dev/shm") as memory, tempfile.TemporaryDirectory() as disk:
        page, run = HeartbeatPage(f"{memory}/base/1", 0, 1), RunDir(disk)
        run.beats.mkdir()
        beat = Beat(0, 1, "train", datetime.now(timezone.utc), os.getpid(), "node-0", {"attempt": "1"})
        monotonic = time.monotonic
        rows = [
            ("an empty call", nanoseconds(lambda: None, 200_000)),
            ("a step into the page, with the clock", nanoseconds(lambda: page.step(7, monotonic()), 200_000)),
            ("a beat file", nanoseconds(lambda: write_beat(run, beat), 300)),
        ]
    print("\nA rank:")
    for name, cost in rows:
        print(f"  {name:38} {cost:12,.0f} ns  {cost / rows[0][1]:8.1f} x")
    for slug, (_, cost) in zip(("page", "file"), rows[1:], strict=True):
        figure(f"beats/{slug}", cost, "ns", "an empty call", times=cost / rows[0][1])


def main() -> int:
    if sys.argv[1:2] == ["--speak"]:
        speak(int(sys.argv[2]), float(sys.argv[3]), int(sys.argv[4]))
        return 0
    if sys.argv[1:2] == ["--hear"]:
        print(json.dumps(hear(int(sys.argv[2]), float(sys.argv[3]), float(sys.argv[4]), sys.argv[5] == "1")))
        return 0
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nodes", default="100,1000,12500")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--check", action="store_true")
    chosen = parser.parse_args()
    cpu, lost = table([int(text) for text in chosen.nodes.split(",")], chosen.seconds)
    steps()
    return int(chosen.check and (cpu >= 1.0 or lost > 0.01))


if __name__ == "__main__":
    sys.exit(main())
