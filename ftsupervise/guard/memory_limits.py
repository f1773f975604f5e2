"""The shares of host, job and GPU memory at which the loop leaves, and how long it is until then.

The kernel, Slurm and CUDA end a run that has used up its memory, and say little. The guard leaves before that, in order. The
trend is the median slope over the last hour at most: a checkpoint that comes and goes does not bend it, and what it cannot say
yet it does not say.
"""

from __future__ import annotations

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.guard.loss_trend import median
from ftsupervise.host.memory import HostMemory

if TYPE_CHECKING:
    from ftsupervise.guard.gpu_memory import GpuMemory

HOST, GPU = "host memory", "GPU memory"  # causes, in the words of the ledger
_SAMPLES, _WINDOW, _APART = 24, 3600.0, 10.0  # at most; seconds that they span, and between two, at least
_ENOUGH, _LONG_ENOUGH = 8, 120.0  # samples and seconds before a trend is named
_CLEAR = 0.75  # of all pairs of samples that show growth, for it to be one
_SOON = 7200.0  # seconds to the limit from which on it is said on stderr
_GPU_EVERY = 5.0  # seconds between two looks at the GPU: its allocator is asked, and the driver


class Shortage(NamedTuple):
    """A memory that is as full as its limit says. ``cause`` is HOST or GPU."""

    cause: str
    words: str


class UsageTrend:
    """The share of one memory over time."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._growth: float | None = None

    def add(self, now: float, share: float) -> None:
        """``now``: monotonic seconds. Too early after the last sample it costs a comparison."""
        samples = self._samples
        if samples and now - samples[-1][0] < max(_APART, (now - samples[0][0]) / _SAMPLES):
            return
        samples.append((now, share))
        while now - samples[0][0] > _WINDOW or len(samples) > 2 * _SAMPLES:
            samples.pop(0)
        self._growth = _growth(samples)

    @property
    def growth(self) -> float | None:
        """Share per second; 0.0: it does not grow; None: it cannot be said yet."""
        return self._growth

    def left(self, share: float, limit: float) -> float | None:
        """Seconds until the limit is reached; ``inf``: never, as it goes; None: it cannot be said yet."""
        if self._growth is None:
            return None
        return max(0.0, limit - share) / self._growth if self._growth > 0 else inf


def _growth(samples: list[tuple[float, float]]) -> float | None:
    if len(samples) < _ENOUGH or samples[-1][0] - samples[0][0] < _LONG_ENOUGH:
        return None
    slopes = [(v - u) / (t - s) for at, (s, u) in enumerate(samples) for t, v in samples[at + 1 :]]
    grows = sum(slope > 0 for slope in slopes) >= _CLEAR * len(slopes)
    return max(0.0, median(slopes)) if grows else 0.0


class _Gauge:
    """One memory with its limit (None: it is only reported) and its trend."""

    def __init__(self, cause: str, limit: float | None, say: Callable[[str], object]) -> None:
        self.cause, self.limit, self._say = cause, limit, say
        self.trend = UsageTrend()
        self.share: float | None = None
        self._told = False

    def set(self, now: float, share: float, name: str) -> Shortage | None:
        self.share = share
        self.trend.add(now, share)
        if self.limit is None:
            return None
        growth, left = self.trend.growth, self.trend.left(share, self.limit)
        grows = f", growing by {growth * 3600:.1%} an hour" if growth else ""
        if share >= self.limit:
            return Shortage(self.cause, f"{name} {share:.1%} used, limit {self.limit:.0%}{grows}")
        if left is not None and left < _SOON and not self._told:
            from ftsupervise.units import show_duration

            self._told = True
            self._say(f"{name} {share:.1%} used{grows}: {show_duration(left)} to the limit of {self.limit:.0%}")
        return None

    def facts(self, name: str) -> dict[str, str]:
        """For the beat: the share, and the seconds to the limit ("steady" where it does not grow, "" where it is not known)."""
        if self.share is None:
            return {}
        left = self.trend.left(self.share, self.limit) if self.limit is not None else None
        words = "" if left is None else "steady" if left == inf else f"{left:.0f}"
        return {name: f"{self.share:.3f}", f"{name}_left": words}


class MemoryLimits:
    """``memory`` and ``gpu``: shares at which to leave; None: never. ``say`` prints a line."""

    def __init__(
        self, memory: float | None, gpu: GpuMemory | None, gpu_limit: float | None, say: Callable[[str], object]
    ):
        self.limit = memory or 1.0  # of the host and the job; snapshots stay below it
        self._say = say
        self._host = _Gauge(HOST, memory, say)
        self._gpus = _Gauge(GPU, gpu_limit, say)
        self._cuda = gpu
        self._gpu_due = -inf
        self._gpu_says: Shortage | None = None
        self._memory: HostMemory | None = None
        if memory is not None:
            try:
                self._memory = HostMemory()
            except (OSError, ValueError) as error:
                say(f"cannot read the memory use: {error}")

    def __bool__(self) -> bool:
        return self._memory is not None or self._cuda is not None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None
        self._cuda = None

    def facts(self) -> dict[str, str]:
        """For the beat: the watch cannot see this host. File pages are not counted. Empty where nothing is checked."""
        found = dict[str, str]()
        if self._memory is not None:
            try:
                self._host.share = self._memory.share()[0]
                found = self._host.facts("memory")
            except (OSError, ValueError):
                found = {}
        return {**found, **self._gpus.facts("gpu_memory")}

    def check(self, now: float) -> Shortage | None:
        """The memory that is short; the host's before the GPU's. ``now``: monotonic."""
        return self._check_host(now) or self._check_gpu(now)

    def _check_host(self, now: float) -> Shortage | None:
        if self._memory is None:
            return None
        try:
            share, whose = self._memory.share(self.limit)
        except (OSError, ValueError) as error:
            self._say(f"cannot read the memory use: {error}")
            self._memory.close()
            self._memory = None
            return None
        return self._host.set(now, share, f"{whose} memory")

    def _check_gpu(self, now: float) -> Shortage | None:
        if self._cuda is None or now < self._gpu_due:
            return self._gpu_says
        self._gpu_due = now + _GPU_EVERY
        limit = self._gpus.limit
        try:
            fullest = self._cuda.fullest()
            if fullest is not None and limit is not None and fullest.share >= limit and self._cuda.give_back(now):
                fullest = self._cuda.fullest()
        except Exception as error:  # CUDA raises what it likes, and after a fault of the device for ever
            self._say(f"cannot read the GPU's memory: {type(error).__name__}: {error}")
            self._cuda = self._gpu_says = None
            return None
        name = "" if fullest is None else f"memory of GPU {fullest.device}"
        self._gpu_says = None if fullest is None else self._gpus.set(now, fullest.share, name)
        return self._gpu_says
