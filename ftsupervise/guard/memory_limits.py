"""The shares of host, job and GPU memory at which the loop leaves, and how long it is until then.

It stands alone because a trend of memory is judged from numbers alone.

The kernel, Slurm and CUDA end a run that has used up its memory, and say little. The guard leaves before that, in order. The
trend is the median slope over the last hour at most: a checkpoint that comes and goes does not bend it, and what it cannot say
yet it does not say.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple, Protocol

from ftsupervise.guard.loss_policy import median
from ftsupervise.host.memory import JOB, THROTTLED, HostMemory
from ftsupervise.truth import GPU_MEMORY, HOST_MEMORY

# Reads how full the GPUs are that this process computes on, from PyTorch and the driver.
#
# CUDA is asked only where the program itself has begun to use it: a guard that initialised it would break every later fork and
# take some hundred megabytes. Memory that PyTorch's allocator holds but has given to no tensor is not used: the next tensor
# gets it. Before a loop leaves because of its GPU, garbage that Python has not collected yet and the allocator's empty blocks
# are given back once; this waits for the device, some milliseconds, and is done in the guard's check and never at each step.

_GIVE_BACK_EVERY = 600.0  # seconds


class CudaInterface(Protocol):
    """The part of ``torch.cuda`` that is asked. Sizes in bytes."""

    def is_initialized(self) -> bool: ...
    def device_count(self) -> int: ...
    def memory_reserved(self, device: int, /) -> int: ...
    def memory_allocated(self, device: int, /) -> int: ...
    def mem_get_info(self, device: int, /) -> tuple[int, int]: ...
    def empty_cache(self) -> None: ...


class GpuShare(NamedTuple):
    """``share``: used by whatever process, 0-1, without what our allocator holds in reserve."""

    device: int
    share: float


def cuda_of_torch() -> CudaInterface | None:
    """``torch.cuda`` where this process has initialised it; None otherwise. It is never imported or initialised here."""
    cuda: CudaInterface | None = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda if cuda is not None and cuda.is_initialized() else None


class GpuMemory:
    """``find``: the interface, once there is one."""

    def __init__(self, find: Callable[[], CudaInterface | None] = cuda_of_torch) -> None:
        self._find = find
        self._gave_back = -inf

    def shares(self) -> tuple[GpuShare, ...]:
        """Return the share of each device on which this process holds memory; () without one. Raises whatever CUDA raises."""
        cuda = self._find()
        if cuda is None:
            return ()
        return tuple(_share(cuda, device) for device in range(cuda.device_count()) if cuda.memory_reserved(device))

    def give_back(self, now: float) -> bool:
        """Collect garbage and empty the allocator's cache, unless that was done minutes ago; return whether it was done."""
        cuda = self._find()
        if cuda is None or now - self._gave_back < _GIVE_BACK_EVERY:
            return False
        self._gave_back = now
        gc.collect()
        cuda.empty_cache()
        return True


def _share(cuda: CudaInterface, device: int) -> GpuShare:
    free, total = cuda.mem_get_info(device)
    in_reserve = max(0, cuda.memory_reserved(device) - cuda.memory_allocated(device))
    return GpuShare(device, 1 - min(total, free + in_reserve) / total)


# ------------------------------------------------------------------------------------------


_SAMPLES, _WINDOW, _APART = 24, 3600.0, 10.0  # at most; seconds that they span, and between two, at least
_ENOUGH, _LONG_ENOUGH = 8, 120.0  # samples and seconds before a trend is named
_SLOWED = "; beyond memory.high the kernel slows the job down"
_CLEAR = 0.75  # of all pairs of samples that show growth, for it to be one
_SOON = 7200.0  # seconds to the limit from which on it is said on stderr
_GPU_EVERY = 5.0  # seconds between two looks at the GPU: its allocator is asked, and the driver


class Shortage(NamedTuple):
    """A memory that is as full as its limit says. ``cause`` is HOST_MEMORY or GPU_MEMORY."""

    cause: str
    words: str


class UsageTrend:
    """The share of one memory over time."""

    def __init__(self) -> None:
        self._samples: list[tuple[float, float]] = []
        self._growth: float | None = None

    def add(self, now: float, share: float) -> None:
        """Add a sample. ``now``: monotonic seconds. Too early after the last sample it costs a comparison."""
        samples = self._samples
        if not self.is_due(now):
            return
        samples.append((now, share))
        while now - samples[0][0] > _WINDOW or len(samples) > 2 * _SAMPLES:
            samples.pop(0)
        self._growth = _growth(samples)

    def is_due(self, now: float) -> bool:
        samples = self._samples
        return not samples or now - samples[-1][0] >= max(_APART, (now - samples[0][0]) / _SAMPLES)

    @property
    def growth(self) -> float | None:
        """Return the share per second; 0.0: it does not grow; None: it cannot be said yet."""
        return self._growth

    def left(self, share: float, limit: float) -> float | None:
        """Return the seconds until the limit is reached; ``inf``: never, as it goes; None: it cannot be said yet."""
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
    """One memory with its limit and its trend."""

    def __init__(self, cause: str, name: str, limit: float, say: Callable[[str], object], then: str = "") -> None:
        self.cause, self.limit, self._name, self._say = cause, limit, name, say
        self._then = then  # what the kernel does beyond it, where it does not end the job
        self.trend = UsageTrend()
        self.share = 0.0
        self._told = False

    def set(self, now: float, share: float) -> Shortage | None:
        self.share = share
        self.trend.add(now, share)  # where it is not due, this share is not taken
        growth, left = self.trend.growth, self.left
        grows = f", growing by {growth * 3600:.1%} an hour" if growth else ""
        if share >= self.limit:
            return Shortage(self.cause, f"{self._name} {share:.1%} used, limit {self.limit:.0%}{grows}{self._then}")
        if left is not None and left < _SOON and not self._told:
            from ftsupervise.units import show_duration

            self._told = True
            self._say(
                f"{self._name} {share:.1%} used{grows}: {show_duration(left)} to the limit of {self.limit:.0%}{self._then}"
            )
        return None

    @property
    def left(self) -> float | None:
        return self.trend.left(self.share, self.limit)


def _facts(name: str, gauges: Iterable[_Gauge]) -> dict[str, str]:
    """Return facts for the beat: the greatest share, and the seconds until the first is at its limit.

    "steady" where nothing grows, "" where that is not known.
    """
    found = list(gauges)
    known = [left for one in found if (left := one.left) is not None]
    left = min(known, default=None)
    words = "" if left is None else "steady" if left == inf else f"{left:.0f}"
    return {name: f"{max(one.share for one in found):.3f}", f"{name}_left": words} if found else {name: ""}


class MemoryLimits:
    """``memory``: share of the host's and the job's memory at which to leave; ``gpu_limit``: the same of the GPUs that ``gpu``
    sees. None: never. ``say`` prints a line. ``host``: where another memory than this process's is to be looked at."""

    def __init__(
        self,
        memory: float | None,
        gpu: GpuMemory | None,
        gpu_limit: float | None,
        say: Callable[[str], object],
        host: HostMemory | None = None,
    ) -> None:
        self.limit = memory or 1.0  # of the host and the job; snapshots stay below it
        self._say = say
        self._gauges: dict[str, _Gauge] = {}  # of the host and the job
        self._gpus: dict[int, _Gauge] = {}
        self._gpu_limit = gpu_limit or 1.0
        self._cuda = gpu
        self._gpu_due = -inf
        self._gpu_says: Shortage | None = None
        self._memory: HostMemory | None = None
        if memory is not None:
            try:
                self._memory = host or HostMemory()
            except (OSError, ValueError) as error:
                say(f"cannot read the memory use: {error}")

    def __bool__(self) -> bool:
        return self._memory is not None

    @property
    def has_gpu(self) -> bool:
        return self._cuda is not None

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
        self._memory = self._cuda = None

    def facts(self) -> dict[str, str]:
        """Return facts for the beat: the watch cannot see this host. File pages are not counted."""
        try:
            for whose, share in (self._memory.shares() if self._memory is not None else {}).items():
                self._gauge(whose).share = share
        except (OSError, ValueError):
            self._gauges.clear()
        gpus = _facts("gpu_memory", self._gpus.values()) if self._gpus else {}
        return {**_facts("memory", self._gauges.values()), **gpus}

    def _gauge(self, whose: str) -> _Gauge:
        if whose not in self._gauges:
            throttled = whose == THROTTLED
            name = f"memory.high of the {JOB}" if throttled else f"{whose} memory"
            self._gauges[whose] = _Gauge(HOST_MEMORY, name, self.limit, self._say, _SLOWED if throttled else "")
        return self._gauges[whose]

    def check_host(self, now: float) -> Shortage | None:
        """Return the memory of the host or the job, if it is short. ``now``: monotonic."""
        if self._memory is None:
            return None
        # far from the limit the cheap look, which takes file pages for used, is enough; not so for the trend
        due = any(one.trend.is_due(now) for one in self._gauges.values()) or not self._gauges
        try:
            shares = self._memory.shares(0.0 if due else self.limit)
        except (OSError, ValueError) as error:
            self._say(f"cannot read the memory use: {error}")
            self._memory.close()
            self._memory = None
            self._gauges.clear()
            return None
        found = [(share, self._gauge(whose).set(now, share)) for whose, share in shares.items()]
        return max(found, key=lambda one: one[0])[1]

    def check_gpu(self, now: float) -> Shortage | None:
        """Return the memory of a GPU, if it is short; asked in the loop's own thread, as CUDA likes it. ``now``: monotonic."""
        if self._cuda is None or now < self._gpu_due:
            return self._gpu_says
        self._gpu_due = now + _GPU_EVERY
        try:
            shares = self._cuda.shares()
            if any(one.share >= self._gpu_limit for one in shares) and self._cuda.give_back(now):
                shares = self._cuda.shares()
        except Exception as error:  # CUDA raises what it likes, and after a fault of the device for ever
            self._say(f"cannot read the GPU's memory: {type(error).__name__}: {error}")
            self._cuda = self._gpu_says = None
            self._gpus.clear()
            return None
        for one in shares:
            if one.device not in self._gpus:
                self._gpus[one.device] = _Gauge(GPU_MEMORY, f"memory of GPU {one.device}", self._gpu_limit, self._say)
        found = [(one.share, self._gpus[one.device].set(now, one.share)) for one in shares]
        self._gpu_says = max(found, key=lambda one: one[0], default=(0.0, None))[1]
        return self._gpu_says
