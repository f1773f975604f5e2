"""When memory is short, and when it will be: the trend of an hour, and the GPU as PyTorch and the driver see it."""

from __future__ import annotations

import random
import subprocess
import sys
from math import inf

import pytest

from ftsupervise.guard.stop_reasons import GpuMemory, MemoryLimits, UsageTrend
from ftsupervise.truth import GPU_MEMORY

GB = 1 << 30


def trend(of: list[float], every: float = 20.0) -> UsageTrend:
    one = UsageTrend()
    for at, share in enumerate(of):
        one.add(at * every, share)
    return one


def test_a_leak_says_how_long_it_takes_to_the_limit() -> None:
    chance = random.Random(1)
    leak = trend([0.30 + 0.001 * n + chance.gauss(0, 0.002) for n in range(90)])  # half an hour, 18 % an hour
    left = leak.left(0.39, 0.95)
    assert left is not None and left == pytest.approx(0.56 / 0.18 * 3600, rel=0.1)


def test_what_comes_and_goes_is_no_growth() -> None:
    chance = random.Random(2)
    saves = trend([0.5 + (0.3 if n % 10 in (7, 8) else 0.0) + chance.gauss(0, 0.01) for n in range(180)])
    assert saves.left(0.5, 0.95) == inf
    start = trend([min(0.6, 0.1 + 0.1 * n) for n in range(180)])
    assert start.left(0.6, 0.95) == inf, "it was filled at the start, and stands"


def test_too_few_or_too_quick_looks_say_nothing() -> None:
    assert trend([0.1, 0.2, 0.3]).left(0.3, 0.95) is None
    assert trend([0.1 + 0.01 * n for n in range(50)], every=1.0).left(0.6, 0.95) is None, "of 50 seconds"


def test_days_of_looks_keep_an_hour_and_a_leak_that_is_mended_is_over() -> None:
    one = UsageTrend()
    for second in range(0, 7200, 1):
        one.add(second, 0.1 + second * 5e-5)
    growing = one.growth
    for second in range(7200, 14400, 1):
        one.add(second, 0.46)
    assert growing == pytest.approx(5e-5, rel=0.01) and one.growth == 0.0


# ------------------------------------------------------------------------------------------------------------- the GPU


class Cuda:
    """A neighbour that has the interface of ``torch.cuda``: devices of 80 GB with what others use, and what we do."""

    def __init__(self, *devices: tuple[int, int, int]) -> None:
        """Each device: used by others, allocated by our tensors, and held in reserve besides, in GB."""
        self.devices, self.asked, self.emptied = list(devices), list[int](), 0
        self.garbage = 0

    def is_initialized(self) -> bool:
        return True

    def device_count(self) -> int:
        return len(self.devices)

    def memory_allocated(self, device: int) -> int:
        return self.devices[device][1] * GB

    def memory_reserved(self, device: int) -> int:
        return sum(self.devices[device][1:]) * GB

    def mem_get_info(self, device: int) -> tuple[int, int]:
        self.asked.append(device)
        return (80 - sum(self.devices[device])) * GB, 80 * GB

    def empty_cache(self) -> None:
        self.emptied += 1
        self.devices = [(others, ours - self.garbage, 0) for others, ours, _ in self.devices]


def limits(cuda: Cuda, limit: float, said: list[str]) -> MemoryLimits:
    return MemoryLimits(None, GpuMemory(lambda: cuda), limit, said.append)


def test_what_the_allocator_holds_in_reserve_is_not_used() -> None:
    [one] = GpuMemory(lambda: Cuda((2, 40, 36))).shares()
    assert one.device == 0 and one.share == pytest.approx(42 / 80)


def test_only_devices_that_this_process_computes_on_are_asked() -> None:
    cuda = Cuda((79, 0, 0), (2, 60, 0), (2, 10, 0))
    found = GpuMemory(lambda: cuda).shares()
    assert [one.device for one in found] == [1, 2]
    assert [one.share for one in found] == pytest.approx([62 / 80, 12 / 80])
    assert cuda.asked == [1, 2]


def test_a_gpu_that_is_full_stops_the_run_and_the_words_name_it() -> None:
    said: list[str] = []
    cuda = Cuda((1, 30, 0), (2, 70, 2))
    one = limits(cuda, 0.95, said)
    assert one.check_gpu(0.0) is None
    cuda.devices[1] = (2, 76, 2)
    short = one.check_gpu(10.0)
    assert short is not None and short.cause == GPU_MEMORY
    assert short.words == "memory of GPU 1 97.5% used, limit 95%" and not said


@pytest.mark.fault(
    "A GPU's memory is full",
    "garbage and the allocator's cache are given back once; if that is not enough, the loop saves and leaves (tested "
    "with a stand-in for `torch.cuda`, and on a GPU where the tests find one)",
)
def test_before_that_garbage_and_the_cache_are_given_back_once_in_ten_minutes() -> None:
    cuda = Cuda((2, 76, 2))
    cuda.garbage = 20
    one = limits(cuda, 0.95, [])
    assert one.check_gpu(0.0) is None and cuda.emptied == 1
    cuda.devices = [(2, 77, 0)]
    assert one.check_gpu(1.0) is None, "not looked at again for some seconds"
    assert one.check_gpu(10.0) is not None and cuda.emptied == 1


def test_what_is_full_from_the_beginning_is_told_and_stops_the_run_only_after_it_was_below() -> None:
    cuda, said = Cuda((40, 37, 0), (40, 38, 0)), list[str]()
    one = limits(cuda, 0.95, said)
    assert one.check_gpu(0.0) is None and one.check_gpu(10.0) is None
    assert said == [
        f"memory of GPU {gpu} {share}% used at the first step already, limit 95%: the next attempt would "
        "find the same, so the run goes on; it stops once that memory was below the limit and reaches it again"
        for gpu, share in ((0, "96.2"), (1, "97.5"))
    ]
    cuda.devices[0] = (10, 37, 0)
    assert one.check_gpu(20.0) is None
    cuda.devices[0] = (10, 66, 0)
    short = one.check_gpu(30.0)
    assert short is not None and short.words == "memory of GPU 0 95.0% used, limit 95%", (
        "the fuller one is not our doing"
    )


def test_a_gpu_that_raises_is_said_once_and_left_alone() -> None:
    class Lost(Cuda):
        def mem_get_info(self, device: int) -> tuple[int, int]:
            raise RuntimeError("CUDA error: unspecified launch failure")

    said: list[str] = []
    one = limits(Lost((1, 2, 3)), 0.5, said)
    assert one.check_gpu(0.0) is None and one.check_gpu(100.0) is None
    assert said == ["cannot read the GPU's memory: RuntimeError: CUDA error: unspecified launch failure"]


def test_the_beat_tells_the_share_and_the_time_to_the_limit_and_a_line_says_it_when_it_is_soon() -> None:
    cuda, said = Cuda((0, 40, 0)), list[str]()
    one = limits(cuda, 0.95, said)
    assert one.facts() == {"memory": ""}
    one.check_gpu(0.0)
    assert one.facts()["gpu_memory"] == "0.500" and one.facts()["gpu_memory_left"] == ""
    for minute in range(1, 20):
        cuda.devices = [(0, 40 + minute, 0)]
        one.check_gpu(60.0 * minute)
    assert 900 < float(one.facts()["gpu_memory_left"]) < 1100, "17 GB at one a minute"
    assert len(said) == 1 and "to the limit of 95%" in said[0] and "GPU 0" in said[0]


def test_cuda_is_neither_imported_nor_initialised_by_the_guard() -> None:
    code = """
import sys, types
from ftsupervise.guard.stop_reasons import cuda_of_torch
assert cuda_of_torch() is None and "torch" not in sys.modules
class Untouched:
    def is_initialized(self): return False
    def __getattr__(self, name): raise SystemExit(name)
sys.modules["torch"] = types.SimpleNamespace(cuda=Untouched())
assert cuda_of_torch() is None
sys.modules["torch"] = types.SimpleNamespace()
assert cuda_of_torch() is None
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
