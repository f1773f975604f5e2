"""When the nodes of a job fail: a fleet, and seeded traces of its faults, the same for every strategy that is tried on them.

A trace is made before it is known what will be done about it, so two strategies meet the same faults at the same times
(common random numbers). Each fault brings two marks, numbers in 0-1, from which a strategy draws how long its restart and its
wait take. Pure; times are seconds since the begin.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator
from random import Random
from statistics import NormalDist
from typing import NamedTuple

_NORMAL = NormalDist()
_EDGE = 1e-12  # marks 0 and 1 would last for ever


class Fleet(NamedTuple):
    """The nodes of a job, and how they fail."""

    nodes: int
    rate: float  # failures of a node in a second, on average over all
    shape: float = 1.0  # Weibull, of the time between two failures of a node; 1: no memory; below: it soon fails again
    new: bool = False  # all nodes begin at age 0: with a shape below 1 they are infants that die young
    lemons: float = 0.0  # share of the nodes that fail more often
    lemon_factor: float = 20.0  # … so many times as often as the others; ``rate`` stays that of all
    rack: int = 0  # nodes that fail together, behind one switch or one power supply
    rack_rate: float = 0.0  # failures of such a rack in a second, besides those of its nodes
    lost: float = 1.0  # share of the failures that take the node away; the others end a process
    silent: float = 0.0  # share of the failures that are a hang: seen only when it has lasted for long

    @property
    def mtbf(self) -> float:
        """Seconds between two failures of the job."""
        whole = self.nodes * self.rate + self._racks * self.rack_rate
        return 1 / whole if whole else math.inf

    @property
    def bad(self) -> int:
        """The number of lemons; they are the first nodes."""
        return round(self.lemons * self.nodes)

    @property
    def _racks(self) -> int:
        return -(-self.nodes // self.rack) if self.rack else 0


class Fault(NamedTuple):
    at: float
    node: int  # of a rack its first
    width: int = 1  # nodes that fail
    lost: bool = True  # they are gone until they are repaired
    silent: bool = False
    mark: float = 0.5
    wait_mark: float = 0.5
    lemon: bool = False  # the node has it because it is bad: another one in its place would not


class Lasting(NamedTuple):
    """How long something lasts: always its mean, or log-normal around it. ``spread``: standard deviation of the logarithm; 1:
    the median is 0.61 of the mean, 2.2: a tenth."""

    mean: float
    spread: float = 0.0

    def of(self, mark: float) -> float:
        """The seconds that belong to a mark in 0-1."""
        if not self.spread:
            return self.mean
        deviate = _NORMAL.inv_cdf(min(max(mark, _EDGE), 1 - _EDGE))
        return self.mean * math.exp(self.spread * deviate - self.spread**2 / 2)


def faults(fleet: Fleet, seconds: float, chance: Random) -> Iterator[Fault]:
    """The faults of ``seconds``, in order."""
    streams = []
    if fleet.rate:
        streams.append(_without_memory(fleet, seconds, chance) if fleet.shape == 1 else _by_age(fleet, seconds, chance))
    if fleet.rack and fleet.rack_rate:
        streams.append(_of_racks(fleet, seconds, Random(chance.random())))
    return streams[0] if len(streams) == 1 else heapq.merge(*streams)


def _without_memory(fleet: Fleet, seconds: float, chance: Random) -> Iterator[Fault]:
    bad, nodes, draw, wait = fleet.bad, fleet.nodes, chance.random, chance.expovariate
    weight = bad * fleet.lemon_factor
    of_lemons = weight / (weight + nodes - bad)
    rate, lost, silent = nodes * fleet.rate, fleet.lost, fleet.silent
    at = wait(rate)
    while at < seconds:
        node = int(bad * draw()) if bad and draw() < of_lemons else bad + int((nodes - bad) * draw())
        lemon = node < bad and draw() * fleet.lemon_factor > 1
        yield Fault(at, node, 1, draw() < lost, draw() < silent, draw(), draw(), lemon)
        at += wait(rate)


def _by_age(fleet: Fleet, seconds: float, chance: Random) -> Iterator[Fault]:
    """Each node is renewed by each of its failures. One that is not new is met at some time of its life: such a life is longer
    than the average, and a part of it is over."""
    draw, shape = chance.random, fleet.shape
    mean = math.gamma(1 + 1 / shape)
    bad, waiting = fleet.bad, list[tuple[float, int]]()
    share = bad / fleet.nodes * (fleet.lemon_factor - 1) + 1
    scales = [factor * share / (fleet.rate * mean) for factor in (1 / fleet.lemon_factor, 1.0)]
    for node in range(fleet.nodes):
        scale = scales[node >= bad]
        if fleet.new:
            first = chance.weibullvariate(scale, shape)
        else:
            first = draw() * scale * chance.gammavariate(1 + 1 / shape, 1.0) ** (1 / shape)
        if first < seconds:
            waiting.append((first, node))
    heapq.heapify(waiting)
    while waiting:
        at, node = waiting[0]
        after = at + chance.weibullvariate(scales[node >= bad], shape)
        if after < seconds:
            heapq.heapreplace(waiting, (after, node))
        else:
            heapq.heappop(waiting)
        lemon = node < bad and draw() * fleet.lemon_factor > 1
        yield Fault(at, node, 1, draw() < fleet.lost, draw() < fleet.silent, draw(), draw(), lemon)


def _of_racks(fleet: Fleet, seconds: float, chance: Random) -> Iterator[Fault]:
    racks = -(-fleet.nodes // fleet.rack)
    at = chance.expovariate(racks * fleet.rack_rate)
    while at < seconds:
        first = fleet.rack * int(racks * chance.random())
        width = min(fleet.rack, fleet.nodes - first)
        yield Fault(at, first, width, True, chance.random() < fleet.silent, chance.random(), chance.random())
        at += chance.expovariate(racks * fleet.rack_rate)
