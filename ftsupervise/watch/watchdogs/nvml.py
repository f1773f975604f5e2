"""The GPUs of this node, through NVML. Asked in a child of its own, because a sick driver hangs whoever asks.

    python -m ftsupervise.watch.watchdogs.nvml      prints one JSON object

Needs nvidia-ml-py (``pip install 'ftsupervise[gpu]'``) and NVIDIA's driver; says plainly which of them is missing.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ftsupervise.probe import Probe

# Clock event reasons that mean trouble. Source: nvml.h, nvmlClocksEventReasons
THROTTLES = {0x8: "hardware slowdown", 0x20: "software thermal", 0x40: "hardware thermal", 0x80: "power brake"}


@dataclass(frozen=True)
class GpuState:
    """One GPU; None where the driver does not tell. Bytes, shares, degrees Celsius."""

    index: int
    name: str = ""
    memory_used: int | None = None
    memory_total: int | None = None
    utilisation: float | None = None
    temperature: int | None = None
    throttles: int = 0
    uncorrected: int | None = None  # ECC errors since the driver was loaded
    remap_failed: bool | None = None
    processes: tuple[int, ...] = ()
    lost: str = ""  # why it does not answer


def ask(probe: Probe, *, bound: float = 20.0) -> tuple[GpuState, ...] | str:
    """The GPUs of this node; a sentence if they cannot be asked. Bounded."""
    from ftsupervise.host import processes
    from ftsupervise.probe import Ran

    ran = probe.run(processes.own_command(module=__name__), bound=bound, most=1_000_000)
    if not isinstance(ran, Ran) or ran.late:
        return "NVML does not answer: the driver hangs" if isinstance(ran, Ran) else "NVML cannot be asked here"
    try:
        said = json.loads(ran.out)
        if "why" in said:
            return str(said["why"])
        return tuple(GpuState(**{**one, "processes": tuple(one["processes"])}) for one in said["gpus"])
    except (ValueError, TypeError, KeyError):
        return f"NVML's answer is not to be understood (exit {ran.code})"


def read() -> tuple[GpuState, ...] | str:
    """As ``ask``, in this process and unbounded."""
    try:
        import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return "no NVML here: nvidia-ml-py is not installed (pip install 'ftsupervise[gpu]')"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVML here: {error}"
    return tuple(_one(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))


def _one(nvml: Any, index: int) -> GpuState:
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        return GpuState(index=index, lost=str(error))

    def get(question: Callable[[], Any]) -> Any:
        try:
            return question()
        except (nvml.NVMLError, AttributeError):  # this GPU, driver or binding does not know it
            return None

    memory = get(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
    busy = get(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
    remapped = get(lambda: nvml.nvmlDeviceGetRemappedRows(handle))
    kind, counter = nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
    return GpuState(
        index=index,
        name=str(get(lambda: nvml.nvmlDeviceGetName(handle)) or ""),
        memory_used=memory.used if memory else None,
        memory_total=memory.total if memory else None,
        utilisation=busy.gpu / 100 if busy else None,
        temperature=get(lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)),
        throttles=get(lambda: nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0,
        uncorrected=get(lambda: nvml.nvmlDeviceGetTotalEccErrors(handle, kind, counter)),
        remap_failed=bool(remapped[3]) if remapped else None,
        processes=tuple(p.pid for p in get(lambda: nvml.nvmlDeviceGetComputeRunningProcesses(handle)) or ()),
    )


if __name__ == "__main__":
    seen = read()
    print(json.dumps({"why": seen} if isinstance(seen, str) else {"gpus": [asdict(one) for one in seen]}))
