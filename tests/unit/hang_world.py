"""A run as the hang detector sees it: ranks that step, stop and are not heard of, on a clock of its own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from ftsupervise.ranks.hang_detector import Detector, GapHistory, HangLimits, HangState, HangVerdict
from ftsupervise.truth import RankState

RANKS = 4


@dataclass
class World:
    """Ranks as their pages tell of them, on a clock of its own, and the detector that looks once a period."""

    patience: HangLimits = field(default_factory=HangLimits)
    past: GapHistory = field(default_factory=GapHistory)
    ranks: int = RANKS
    now: float = 1000.0

    def __post_init__(self) -> None:
        self.detector = Detector(self.patience, self.past)
        self.due = self.now
        self.pulses = [
            RankState(rank, f"node-{rank // 2}", None, "start", self.now, self.now, self.now, 100 + rank, "S", 1.0)
            for rank in range(self.ranks)
        ]
        self.alarm: HangVerdict | None = None
        self.deaf: set[int] = set()  # ranks nobody hears of
        self.cpu = dict.fromkeys(range(self.ranks), 0.0)  # share of a core each uses

    def change(self, rank: int, **values: object) -> None:
        self.pulses[rank] = self.pulses[rank]._replace(**values)  # type: ignore[arg-type]

    def step(self, step: int, phase: str = "train", ranks: Iterator[int] | range | None = None) -> None:
        for rank in range(self.ranks) if ranks is None else ranks:
            self.change(rank, step=step, phase=phase, stepped=self.now)

    def phase(self, name: str, *ranks: int) -> None:
        for rank in ranks or range(self.ranks):
            self.change(rank, phase=name, beaten=self.now)

    def wait(self, seconds: float) -> HangVerdict | None:
        """Let time pass; the first alarm, if there was one, is kept."""
        end = self.now + seconds
        while self.due <= end:
            self.advance(self.due)
            verdict = self.detector.look(self.now, self.pulses)
            if verdict.health is HangState.HUNG and self.alarm is None:
                self.alarm = verdict
            self.due += self.patience.period
        self.advance(end)
        return self.alarm

    def advance(self, to: float) -> None:
        for rank, one in enumerate(self.pulses):
            used = (one.cpu or 0.0) + self.cpu[rank] * (to - self.now)
            if rank not in self.deaf:
                self.pulses[rank] = one._replace(seen=to, cpu=None if one.cpu is None else used)
        self.now = to

    def train(self, steps: int, seconds: float | Callable[[], float]) -> None:
        first = 1 + max(one.step or 0 for one in self.pulses)
        for step in range(first, first + steps):
            self.wait(seconds if isinstance(seconds, float) else seconds())
            self.step(step)


def trained(steps: int = 200, seconds: float = 0.5, **shape: object) -> World:
    world = World(**shape)  # type: ignore[arg-type]
    world.wait(30.0)
    world.train(steps, seconds)
    assert world.alarm is None
    return world
