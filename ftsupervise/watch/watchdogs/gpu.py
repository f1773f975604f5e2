"""Checks that the GPUs of this node are there, whole, cool and at work. Where there is no NVML it says so and nothing else.

NVML is asked in a child of its own (``python -m ftsupervise.watch.watchdogs.gpu`` prints one JSON object), because a sick
driver hangs the process that asks. Needs nvidia-ml-py (``pip install 'ftsupervise[gpu]'``) and NVIDIA's driver.
"""

from __future__ import annotations

import json
import re
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.host import processes
from ftsupervise.model import JobState
from ftsupervise.probe import Ran
from ftsupervise.truth import Health
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Gpu as Settings
    from ftsupervise.probe import Probe
    from ftsupervise.watch import Look

_XID = re.compile(r"NVRM: Xid \(PCI:([0-9A-Fa-f:.]+)\): (\d+)")
# XIDs that an application causes itself are no sign of a broken GPU. Source: NVIDIA, "XID Errors", user application errors
_OF_THE_PROGRAM = frozenset({13, 31, 43, 45, 68})

WORDS = {
    "there": Words(look="nvidia-smi", do="drain the node, tell your administrator"),
    "errors": Words(look="nvidia-smi", do="take the node out: launch.exclude"),
    "heat": Words(look="nvidia-smi"),
    "work": Words(look="nvidia-smi"),
    "xid": Words(look="dmesg | grep Xid"),
}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    seen = ask(look.probe)
    host = socket.gethostname()
    if isinstance(seen, str):
        yield _finding(look, host, "there", None, seen)
        return
    yield _there(look, host, seen, settings)
    for one in seen:
        yield from _one(look, host, one, settings)
    yield from _xid(look, host)


def _there(look: Look, host: str, seen: tuple[GpuState, ...], settings: Settings) -> Finding:
    answering = [one for one in seen if not one.lost]
    usual = settings.expect or max(look.memory.get(host, 0), len(seen))
    look.memory[host] = usual
    lost = "; ".join(f"GPU {one.index}: {one.lost}" for one in seen if one.lost)
    text = f"{host}: {len(answering)} of {usual} GPUs answer{f' ({lost})' if lost else ''}"
    bad = Severity.CRITICAL if len(answering) < usual else Severity.INFO
    return _finding(look, host, "there", bad, text)


def _one(look: Look, host: str, one: GpuState, settings: Settings) -> Iterator[Finding]:
    where = f"{host} GPU {one.index}"
    if one.lost:
        return
    broken = []
    if one.uncorrected:
        broken.append(f"{one.uncorrected} uncorrected ECC errors")
    if one.remap_failed:
        broken.append("a memory row could not be remapped")
    text = ", ".join(broken) or "memory without errors"
    bad = Severity.CRITICAL if broken else Severity.INFO
    yield _finding(look, host, f"{one.index} errors", bad, f"{where}: {text}")
    if one.temperature is not None:
        slowed = [words for bit, words in THROTTLES.items() if one.throttles & bit]
        hot = one.temperature >= settings.temperature or bool(slowed)
        text = f"{where}: {one.temperature} °C{', slowed down: ' + ', '.join(slowed) if slowed else ''}"
        limit = f"{settings.temperature} °C"
        yield _finding(look, host, f"{one.index} heat", Severity.WARNING if hot else Severity.INFO, text, limit=limit)
    if settings.idle_for is not None and one.utilisation is not None:
        yield _idle(look, host, one, settings.idle_for.total_seconds())


def _idle(look: Look, host: str, one: GpuState, bound: float) -> Finding:
    """Report a GPU that has long been without work although a job of the run is at work on this node."""
    since: dict[str, Any] = look.memory.setdefault("idle", {})
    now, key = look.now.timestamp(), f"{host} {one.index}"
    job = next((job for job in look.jobs or () if job.state is JobState.RUNNING and host in job.nodes), None)
    if job is None or (one.utilisation or 0) > 0.01:
        since.pop(key, None)
    age = now - since.setdefault(key, now) if job is not None and (one.utilisation or 0) <= 0.01 else 0.0
    text = f"{key.replace(host, host + ' GPU')}: {one.utilisation:.0%} busy" + (
        f", without work for {show_duration(age)}" if age else ""
    )
    bad = Severity.WARNING if age > bound else Severity.INFO
    return _finding(look, host, f"{one.index} work", bad, text, limit=show_duration(bound))


def _xid(look: Look, host: str) -> Iterator[Finding]:
    """Count XID errors in the kernel's log, where this account may read it; the ring buffer forgets, and so does the
    finding.
    """
    ran = look.probe.run(["dmesg"], bound=10, most=4_000_000)
    if not isinstance(ran, Ran) or ran.code:
        return
    found = _XID.findall(ran.out.decode("utf-8", "replace"))
    bad = [(device, int(code)) for device, code in found if int(code) not in _OF_THE_PROGRAM]
    text = f"XID {bad[-1][1]} on {bad[-1][0]}, {len(bad)} in the kernel's log" if bad else "no XID errors"
    severity = Severity.CRITICAL if bad else Severity.INFO
    yield _finding(look, host, "xid", severity, f"{host}: {text}")


def _finding(look: Look, host: str, subject: str, bad: Severity | None, summary: str, *, limit: str = "") -> Finding:
    """Build a finding. ``bad`` is None where it could not be seen; INFO: it is good."""
    health, words = Health.of(None if bad is None else bad > Severity.INFO), WORDS[subject.split()[-1]]
    return look.finding(f"{host} {subject}", health, summary, words, severity=bad or Severity.WARNING, limit=limit)


# ------------------------------------------------------------------------------------------------------------- NVML

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
    """Ask for the GPUs of this node; returns a sentence if they cannot be asked. Bounded."""
    ran = probe.run(processes.own_command(module=__name__), bound=bound, most=1_000_000)
    if not isinstance(ran, Ran) or ran.late:
        return "NVML does not answer: the driver hangs" if isinstance(ran, Ran) else "NVML cannot be asked here"
    try:
        said = json.loads(ran.out)
        if "why" in said:
            return str(said["why"])
        return tuple(GpuState(**{**one, "processes": tuple(one["processes"])}) for one in said["gpus"])
    except (ValueError, TypeError, KeyError):
        return f"NVML's answer cannot be understood (exit {ran.code})"


def read() -> tuple[GpuState, ...] | str:
    """Read the answer for ``ask``, in this process and unbounded."""
    try:
        import pynvml  # type: ignore[import-untyped, import-not-found, unused-ignore]
    except ImportError:
        return "no NVML here: nvidia-ml-py is not installed (pip install 'ftsupervise[gpu]')"
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        return f"no NVML here: {error}"
    return tuple(_state(pynvml, index) for index in range(pynvml.nvmlDeviceGetCount()))


def _state(nvml: Any, index: int) -> GpuState:
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
    found = read()
    print(json.dumps({"why": found} if isinstance(found, str) else {"gpus": [asdict(one) for one in found]}))
