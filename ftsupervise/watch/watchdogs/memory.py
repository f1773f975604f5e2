"""Judges how full the memory is that the run lives in, and when a leak will have filled it.

There are two views of it. Where the watch runs beside the job (``scheduler: local``, or inside the allocation), it sees
the host, the cgroup of the run's processes, and what these processes have taken themselves. Elsewhere it knows only
what the guard reports in its beats. Where it has neither, it says so: the memory of the watch's own node says nothing
about the run.
"""

from __future__ import annotations

import math
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.probe import ProcessMemory
from ftsupervise.truth import Beat, Health
from ftsupervise.units import show_duration, show_size
from ftsupervise.watch.watchdogs import gpu
from ftsupervise.watch.watchdogs.disk_space import Level, Limit, judge, remember, slope
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK
from ftsupervise.watch.watchdogs.run_signs import newest_beats, number, server_now, share

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Memory as Settings
    from ftsupervise.probe import Probe
    from ftsupervise.watch import Look

_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60
_FRESH = 3600.0  # seconds: an older beat says nothing about now
_CHECK = "ftsupervise check memory {run_dir}"
WORDS = {
    "used": Words("When it is full, Linux or Slurm kills the run, and its log says nothing about it.", _CHECK),
    "unseen": Words(look=_CHECK, do="use the guard in the training loop"),
    "leak": Words(
        "The run leaks memory and will be killed when there is none left.",
        _CHECK,
        "let the guard leave in time (guard.memory), or: ftsupervise save, then restart the run",
    ),
    "gpu": Words(look=_CHECK),
}


@dataclass(frozen=True)
class Full:
    """One memory: its name, the share used, and how many bytes there are still to take (None: not known)."""

    whose: str
    used: float
    room: int | None = None


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    if look.jobs is not None and not any(job.state in AT_WORK for job in look.jobs):
        look.memory.pop("samples", None)
        for subject in ("used", "leak"):
            if subject in look.memory:
                look.memory.pop(subject)
                yield _finding(look, subject, Level.FINE, "no job of the run is running")
        return
    beats, blind = newest_beats(look, server_now(look))
    fresh = [beat for beat, age in beats if age < _FRESH]
    here = [beat for beat in fresh if beat.host == socket.gethostname() and beat.pid]
    own = look.probe.processes([beat.pid for beat in here]) if here else ()
    if isinstance(own, tuple) and own:
        yield from _beside(look, settings, own)
    else:
        yield from _from_afar(look, settings, fresh, blind)


# --------------------------------------------------------------------------------------------------- beside the job


def _beside(look: Look, settings: Settings, own: tuple[ProcessMemory, ...]) -> Iterator[Finding]:
    memories = [*host(), *cgroups(look.probe, own[0].pid)]
    if not memories:
        yield _finding(look, "used", None, "the memory of this host could not be seen")
        return
    yield _used(look, settings, max(memories, key=lambda one: one.used), "")
    taken = sum(process.own for process in own)
    room = min((one.room for one in memories if one.room is not None), default=None)
    roots = sorted(f"{process.pid}:{process.start}" for process in own[:1])
    yield from _leak(look, settings, float(taken), room, f"its {len(own)} processes take {show_size(taken)}", roots)
    if settings.gpu is not None:
        yield from _gpus(look, settings.gpu, {process.pid for process in own})


def host() -> list[Full]:
    """The host's memory: what is not available counts as used (file pages are available). None where it cannot be seen."""
    import psutil  # imported here: a watch whose run is elsewhere works without it

    try:
        now = psutil.virtual_memory()
    except OSError:
        return []
    return [Full(f"host {socket.gethostname()}", 1 - now.available / now.total, now.available)]


def cgroups(probe: Probe, pid: int, mount: Path = _CGROUPS) -> list[Full]:
    """Return every limited memory cgroup above ``pid``, v1 or v2; file pages that can be given back count as free."""
    text = probe.text(f"/proc/{pid}/cgroup", most=16_384)
    found = []
    for line in text.decode("utf-8", "replace").splitlines() if isinstance(text, bytes) else ():
        number, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if number == "0" and not controllers:
            for base in (mount, mount / "unified"):
                found += _levels(probe, base, path, "memory.max", "memory.current", "")
        elif "memory" in controllers.split(","):
            base = mount / "memory"
            found += _levels(probe, base, path, "memory.limit_in_bytes", "memory.usage_in_bytes", "total_")
    return found


def _levels(probe: Probe, base: Path, path: str, limit_in: str, usage_in: str, prefix: str) -> list[Full]:
    folder, found = base / path.lstrip("/"), []
    while folder != base and base in folder.parents:
        limit, usage = _number(probe, folder / limit_in), _number(probe, folder / usage_in)
        if limit is not None and usage is not None and 0 < limit < _UNLIMITED:
            stat = probe.text(folder / "memory.stat", most=16_384)
            text = stat.decode("utf-8", "replace") if isinstance(stat, bytes) else ""
            pages = sum(int(n) for n in re.findall(rf"(?m)^{prefix}(?:in)?active_file (\d+)$", text))
            used = max(0, usage - pages)
            found.append(Full(f"the job's limit of {show_size(limit)}", used / limit, limit - used))
        folder = folder.parent
    return found


def _number(probe: Probe, path: Path) -> int | None:
    text = probe.text(path, most=64)
    return int(text) if isinstance(text, bytes) and text.strip().isdigit() else None


def _gpus(look: Look, limit: float, pids: set[int]) -> Iterator[Finding]:
    seen = gpu.ask(look.probe)
    if isinstance(seen, str):
        yield _finding(look, "gpu memory", None, seen)
        return
    for one in seen:
        if one.memory_total and one.memory_used is not None and pids & set(one.processes):
            used, subject = one.memory_used / one.memory_total, f"gpu {one.index} memory"
            found = judge(look.memory, subject, Limit(used, limit))
            text = f"GPU {one.index}: {used:.1%} of {show_size(one.memory_total)} used"
            yield _finding(look, subject, found, text, value=f"{used:.1%}", limit=f"{limit:.0%}")


# -------------------------------------------------------------------------------------------------------- from afar


def _from_afar(look: Look, settings: Settings, beats: list[Beat], blind: str) -> Iterator[Finding]:
    reports = [(used, beat) for beat in beats if (used := share(beat.facts.get("memory"))) is not None]
    if not reports:
        hosts = sorted({beat.host for beat in beats})
        where = f"the run is on {', '.join(hosts[:3])}" if hosts else "it is not known where the run is"
        why = blind or f"{where}, this watch on {socket.gethostname()}, and no rank reports its memory"
        yield look.finding("used", Health.UNKNOWN, f"memory not seen: {why}", WORDS["unseen"])
        return
    used, beat = max(reports, key=lambda pair: pair[0])
    fullest = sorted(reports, key=lambda pair: -pair[0])[:5]
    detail = "\n".join(f"  {one.host} (rank {one.rank}): {share_of:.1%}" for share_of, one in fullest)
    yield _used(look, settings, Full(f"host {beat.host}, as rank {beat.rank} reports,", used), detail)
    yield from _reported_gpus(look, settings, beats)
    if settings.leak is not None and (forecasts := _forecasts(beats)):
        yield _as_ranks_say(look, settings.leak.total_seconds(), *min(forecasts, key=lambda pair: pair[0]))
        return
    room = 1.0 - max(used, 0.0)
    attempt = [f"attempt {beat.facts.get('attempt', '')}"]
    yield from _leak(look, settings, used, room, f"the fullest host uses {used:.1%}", attempt)


def _forecasts(beats: list[Beat]) -> list[tuple[float, Beat]]:
    """Seconds until a rank's memory is at the limit at which its guard leaves; infinite where it does not grow."""
    found = [(beat.facts.get("memory_left", ""), beat) for beat in beats]
    known = [(math.inf if text == "steady" else number(text), beat) for text, beat in found if text]
    return [(left, beat) for left, beat in known if left is not None and left >= 0]


def _as_ranks_say(look: Look, bound: float, left: float, beat: Beat) -> Finding:
    """Judge by the ranks' beats: the guard sees its host each second, the watch reads a beat at each tick."""
    found = judge(look.memory, "leak", _time_left(left, bound))
    who = f"host {beat.host}, as rank {beat.rank} reports,"
    value = f"full in {show_duration(left)}" if left < math.inf else ""
    text = f"memory of {who} grows: {show_duration(left)} until the guard leaves" if value else "no rank's memory grows"
    return _finding(look, "leak", found, text, value=value, limit=show_duration(bound))


def _reported_gpus(look: Look, settings: Settings, beats: list[Beat]) -> Iterator[Finding]:
    reports = [(used, beat) for beat in beats if (used := share(beat.facts.get("gpu_memory"))) is not None]
    if settings.gpu is None or not reports:
        return
    used, beat = max(reports, key=lambda pair: pair[0])
    found = judge(look.memory, "gpu memory", Limit(used, settings.gpu))
    text = f"GPU memory of rank {beat.rank} on {beat.host} {used:.1%} used"
    yield _finding(look, "gpu memory", found, text, value=f"{used:.1%}", limit=f"{settings.gpu:.0%}")


# ---------------------------------------------------------------------------------------------------------- judging


def _time_left(seconds: float, bound: float) -> Limit:
    return Limit(seconds, bound, bound / 4, rising=False, margin=0.2 * bound)


def _used(look: Look, settings: Settings, full: Full, detail: str) -> Finding:
    found = judge(look.memory, "used", Limit(full.used, settings.used, settings.critical))
    value, limit = f"{full.used:.1%}", f"{settings.used:.0%}"
    text = f"memory of {full.whose} {value} used"
    return _finding(look, "used", found, text, value=value, limit=limit, detail=detail)


def _leak(
    look: Look, settings: Settings, taken: float, room: float | None, words: str, started: list[str]
) -> Iterator[Finding]:
    """Judge the growth of the memory that the run itself has taken; it starts anew with each start of its processes."""
    if settings.leak is None or room is None:
        return
    memory: dict[str, Any] = look.memory
    if memory.get("started") != started:
        memory.update(started=started, samples=[])
    samples = remember([(t, v) for t, v in memory.get("samples", [])], look.now.timestamp(), taken)
    memory["samples"] = samples
    growth = slope(samples)
    seconds = room / growth if growth is not None and growth > 0 else None
    bound = settings.leak.total_seconds()
    found = judge(memory, "leak", *([_time_left(seconds, bound)] if seconds is not None else []))
    an_hour = (growth or 0.0) * 3600
    rate = f"{show_size(an_hour)} an hour" if taken > 2 else f"{an_hour:.1%} an hour"
    value = f"full in {show_duration(seconds)}" if seconds is not None else ""
    text = f"{words}, growing by {rate}: {value}" if value else f"{words}, not growing"
    yield _finding(look, "leak", found, text, value=value, limit=show_duration(bound))


def _finding(look: Look, subject: str, found: Level | None, summary: str, **more: Any) -> Finding:
    """Build a finding; ``found`` is None where it could not be seen."""
    health = Health.of(None if found is None else found > Level.FINE)
    severity = Severity.CRITICAL if found is Level.CRITICAL else Severity.WARNING
    return look.finding(subject, health, summary, WORDS[subject.split()[0]], severity=severity, **more)
