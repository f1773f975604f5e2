"""Reads how full the GPUs are that this process computes on, from PyTorch and the driver.

CUDA is asked only where the program itself has begun to use it: a guard that initialised it would break every later fork and
take some hundred megabytes. Memory that PyTorch's allocator holds but has given to no tensor is not used: the next tensor gets
it. Before a loop leaves because of its GPU, garbage that Python has not collected yet and the allocator's empty blocks are
given back once; this waits for the device, some milliseconds, and is done in the guard's check and never at each step.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable
from math import inf
from typing import NamedTuple, Protocol

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
