"""Are the GPUs of this node there, whole, cool and at work? Where there is no NVML it says so and nothing else."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import JobState
from ftsupervise.probe import Ran
from ftsupervise.truth import Health
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs.nvml import THROTTLES, GpuState, ask

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Gpu as Settings
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
    """Without work for long although a job of the run is at work on this node."""
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
    """XID errors in the kernel's log, where this account may read it; the ring buffer forgets, and so does the finding."""
    ran = look.probe.run(["dmesg"], bound=10, most=4_000_000)
    if not isinstance(ran, Ran) or ran.code:
        return
    found = _XID.findall(ran.out.decode("utf-8", "replace"))
    bad = [(device, int(code)) for device, code in found if int(code) not in _OF_THE_PROGRAM]
    text = f"XID {bad[-1][1]} on {bad[-1][0]}, {len(bad)} in the kernel's log" if bad else "no XID errors"
    severity = Severity.CRITICAL if bad else Severity.INFO
    yield _finding(look, host, "xid", severity, f"{host}: {text}")


def _finding(look: Look, host: str, subject: str, bad: Severity | None, summary: str, *, limit: str = "") -> Finding:
    """``bad`` None: could not see; INFO: fine."""
    health, words = Health.of(None if bad is None else bad > Severity.INFO), WORDS[subject.split()[-1]]
    return look.finding(f"{host} {subject}", health, summary, words, severity=bad or Severity.WARNING, limit=limit)
