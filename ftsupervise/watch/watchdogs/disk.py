"""Is there room: bytes, inodes, quota, and for how many hours and checkpoints? And does the storage answer at all?"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding
from ftsupervise.probe import Entry, Missing, Mount, NotSeen, Space
from ftsupervise.units import show_duration, show_size
from ftsupervise.watch import due
from ftsupervise.watch.watchdogs import checkpoints
from ftsupervise.watch.watchdogs.disk_space import (
    Forecast,
    Left,
    Level,
    Sample,
    check_quota,
    finding,
    forecast,
    left,
    level,
    remember,
)

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Disk as Settings
    from ftsupervise.watch import Look

# Is what lies at a path still the file system that lay there before?
#
# A mount that is gone leaves an empty directory behind, with all the room of the disk beneath it: figures that would call a
# full file system fine. So what was mounted there is remembered, and the figures of anything else say nothing about it.

ACCEPTED_AFTER = 86_400.0  # seconds: then another file system at the same place is the one that belongs there
_HOSTS = 64  # remembered


def lies_there_still(look: Look, path: Path, memory: dict[str, Any], now: Mount) -> Iterator[Finding]:
    """A finding if something else lies at ``path`` than before, or no longer does. ``trusted`` says which it was."""
    hosts: dict[str, list[str]] = memory.setdefault("mounts", {})
    before = _before(hosts, now)
    if before is None or _same(before, now):
        _remember(hosts, now)
        memory.pop("other_since", None)
        if memory.pop("lost", None):
            yield finding(look, path, "mount", Level.FINE, f"{path}: {_words(now)}")
        return
    if _beneath(before, now):
        memory["lost"] = True
        text = f"{path} is not mounted: {_words(before)} is gone, and what is seen there now is {_words(now)}"
        yield finding(look, path, "mount", Level.CRITICAL, text, "not mounted", point=before.point)
        return
    since = look.now.timestamp() - memory.setdefault("other_since", look.now.timestamp())
    if since > ACCEPTED_AFTER:
        hosts.clear()
        for key in ("samples", "used", "same_since", "last", "other_since"):
            memory.pop(key, None)
        yield from lies_there_still(look, path, memory, now)
        return
    memory["lost"] = True
    text = f"{path}: another file system is mounted: {_words(now)}, where {_words(before)} was"
    patience = show_duration(ACCEPTED_AFTER)
    yield finding(look, path, "mount", Level.WARNING, text, "other mount", patience=patience)


def trusted(memory: dict[str, Any]) -> bool:
    """Are the figures those of the file system that is watched?"""
    return not memory.get("lost", False)


def _before(hosts: dict[str, list[str]], now: Mount) -> Mount | None:
    """The mount that this host had there. On a host that checks for the first time it may be another, but not one beneath the
    mount of all others."""
    mine = hosts.get(os.uname().nodename)
    if mine is not None:
        return Mount(*mine)
    others = [Mount(*one) for one in hosts.values()]
    return others[0] if others and all(_beneath(one, now) for one in others) else None


def _remember(hosts: dict[str, list[str]], now: Mount) -> None:
    hosts.pop(os.uname().nodename, None)
    hosts[os.uname().nodename] = [now.point, now.kind, now.source]
    while len(hosts) > _HOSTS:
        hosts.pop(next(iter(hosts)))


def _same(before: Mount, now: Mount) -> bool:
    if (before.point, before.kind) != (now.point, now.kind):
        return False
    names = before.source.startswith("/dev/") and now.source.startswith("/dev/")  # disks are counted anew at each start
    return before.source == now.source or names


def _beneath(before: Mount, now: Mount) -> bool:
    """Is ``now`` what one sees when ``before`` is not mounted?"""
    return before.point != now.point and before.point.startswith(now.point.rstrip("/") + "/")


def _words(mount: Mount) -> str:
    return f"{mount.source} on {mount.point} ({mount.kind})"


_STALE = 1800.0  # seconds; file systems have been seen to update their figures every half hour


def check(look: Look, settings: tuple[Settings, ...]) -> Iterator[Finding]:
    for one in settings:
        path = one.path if one.path is not None else look.rundir.root
        memory = look.memory.setdefault(str(path), {})
        if not due(memory, one.every, look.now):
            continue
        yield from _check(look, one, path, memory)
        if one.quota is not None and not trusted(memory):
            yield finding(look, path, "quota", None, f"{path}: quota not seen: it is not mounted", command="findmnt")
        elif one.quota is not None:
            yield from check_quota(look, one, path, memory.setdefault("quota", {}))


def _check(look: Look, settings: Settings, path: Path, memory: dict[str, Any]) -> Iterator[Finding]:
    space = look.probe.space(path)
    if not isinstance(space, Space):
        yield from _unseen(look, path, memory, space)
        return
    now = look.now.timestamp()
    yield finding(look, path, "there", Level.FINE, f"{path} answers")
    lies = look.probe.mount(path)
    if isinstance(lies, Mount):
        yield from lies_there_still(look, path, memory, lies)
        if not trusted(memory):
            yield from _unknown(look, path, memory, "not seen: what is watched is not mounted")
            return
    rest = left(space.total, space.used, space.inodes, space.inodes_free, settings.usable)
    late = _late(look, memory, space.used, now)
    memory["last"] = {"at": now, "free": rest.free}
    yield _space(look, settings, path, memory, rest, late)
    if rest.inodes is not None:
        yield _inodes(look, settings, path, memory, rest.inodes, space)
    yield from _forecast(look, settings, path, memory, rest, space.used, now)


def _unseen(look: Look, path: Path, memory: dict[str, Any], got: Missing | NotSeen) -> Iterator[Finding]:
    last = memory.get("last")
    ago = show_duration(look.now.timestamp() - last["at"]) if last else ""
    known = f"; {show_size(last['free'])} were left {ago} ago" if last else ""
    if isinstance(got, Missing):
        yield finding(look, path, "there", Level.CRITICAL, f"{path} is not there", "missing")
        return
    if got.hung:
        text = f"{path} has not answered for {show_duration(got.seconds)}{known}"
        yield finding(look, path, "there", Level.CRITICAL, text, "hung", detail=got.sentence)
    yield from _unknown(look, path, memory, f"{got.sentence.partition(' ')[2]}{known}")


def _unknown(look: Look, path: Path, memory: dict[str, Any], why: str) -> Iterator[Finding]:
    """Report earlier subjects as unknown, so that they neither fire nor resolve."""
    for subject in ("space", "inodes", "forecast"):
        if subject == "space" or subject in memory.get("levels", {}):
            yield finding(look, path, subject, None, f"{path}: {subject} {why}")


# ------------------------------------------------------------------------------------------------------------ judging


def _worse(limit: Any, than: Any, *, rising: bool) -> Any:
    """The critical limit, but never one that is reached before the warning (defaults may be)."""
    if limit is None or than is None:
        return limit
    return max(limit, than) if rising else min(limit, than)


def _level(memory: dict[str, Any], subject: str, found: Level) -> Level:
    memory.setdefault("levels", {})[subject] = int(found)
    return found


def _was(memory: dict[str, Any], subject: str) -> Level:
    return Level(memory.get("levels", {}).get(subject, 0))


def _space(look: Look, settings: Settings, path: Path, memory: dict[str, Any], rest: Left, late: str) -> Finding:
    was, critical = _was(memory, "space"), settings.critical
    by_free = level(
        rest.free,
        settings.free,
        _worse(critical.free, settings.free, rising=False),
        rising=False,
        was=was,
        margin=0.05 * (settings.free or 0),
    )
    by_share = level(
        rest.used,
        settings.used,
        _worse(critical.used, settings.used, rising=True),
        rising=True,
        was=was,
        margin=0.02,
    )
    now = _level(memory, "space", max(by_free, by_share))
    usable = f" of the usable {settings.usable:.0%}" if settings.usable < 1 else ""
    limits = []
    if settings.free is not None:
        limits.append(f"{show_size(settings.free)} free")
    if settings.used is not None:
        limits.append(f"{settings.used:.0%} used")
    text = f"{path}: {show_size(rest.free)} left, {rest.used:.1%}{usable} used{late}"
    value = f"{show_size(rest.free)} left"
    return finding(look, path, "space", now, text, value=value, limit=", ".join(limits))


def _inodes(look: Look, settings: Settings, path: Path, memory: dict[str, Any], used: float, space: Space) -> Finding:
    found = level(
        used,
        settings.inodes,
        _worse(settings.critical.inodes, settings.inodes, rising=True),
        rising=True,
        was=_was(memory, "inodes"),
        margin=0.02,
    )
    return finding(
        look,
        path,
        "inodes",
        _level(memory, "inodes", found),
        f"{path}: {space.inodes_free} of {space.inodes} inodes left ({used:.1%} used)",
        value=f"{used:.1%} used",
        limit=f"{settings.inodes:.0%}" if settings.inodes is not None else "",
    )


def _forecast(
    look: Look, settings: Settings, path: Path, memory: dict[str, Any], rest: Left, used: int, now: float
) -> Iterator[Finding]:
    samples: list[Sample] = remember([(t, v) for t, v in memory.get("samples", [])], now, float(used))
    memory["samples"] = samples
    size = settings.checkpoint or _measured(look, path, memory)
    cadence = settings.cadence.total_seconds() if settings.cadence is not None else None
    ahead = forecast(rest.free, samples, size, cadence if settings.checkpoint else None)
    if ahead.seconds is None and ahead.checkpoints is None:
        if "forecast" in memory.get("levels", {}):
            yield finding(look, path, "forecast", _level(memory, "forecast", Level.FINE), f"{path} is not filling up")
        return
    yield _forecast_finding(look, settings, path, memory, ahead, size)


def _forecast_finding(
    look: Look, settings: Settings, path: Path, memory: dict[str, Any], ahead: Forecast, size: float | None
) -> Finding:
    was, critical = _was(memory, "forecast"), settings.critical
    found = Level.FINE
    words, limits = [], []
    if ahead.seconds is not None:
        warning = settings.left.total_seconds() if settings.left is not None else None
        worse = critical.left.total_seconds() if critical.left is not None else None
        worse = _worse(worse, warning, rising=False)
        found = level(ahead.seconds, warning, worse, rising=False, was=was, margin=0.2 * (warning or 0))
        words.append(
            f"full in {show_duration(ahead.seconds)} at {show_size(ahead.rate * 86_400)} a day ({ahead.grounds})"
        )
        limits += [show_duration(warning)] if warning is not None else []
    if ahead.checkpoints is not None and size:
        worse = _worse(critical.checkpoints, settings.checkpoints, rising=False)
        by_count = level(ahead.checkpoints, settings.checkpoints, worse, rising=False, was=was, margin=1)
        found = max(found, by_count)
        words.append(f"room for {ahead.checkpoints} checkpoints of {show_size(size)}")
        limits += [f"{settings.checkpoints} checkpoints"] if settings.checkpoints is not None else []
    return finding(
        look,
        path,
        "forecast",
        _level(memory, "forecast", found),
        f"{path}: {', '.join(words)}",
        value=words[0],
        limit=", ".join(limits),
    )


def _measured(look: Look, path: Path, memory: dict[str, Any]) -> float | None:
    """The usual size of this run's checkpoints, if they lie on the file system of ``path``."""
    here, there = look.probe.look(path), look.probe.look(checkpoints.folder_of(look))
    if not isinstance(here, Entry) or not isinstance(there, Entry) or here.device != there.device:
        return None
    ones = checkpoints.written(look, memory.setdefault("checkpoints", {}))
    if isinstance(ones, (Missing, NotSeen)):
        return None
    memory["newest"] = ones[-1].mtime if ones else None
    return checkpoints.usual_size(ones)


def _late(look: Look, memory: dict[str, Any], used: int, now: float) -> str:
    """Words if the figures stand still although checkpoints were written since."""
    if memory.get("used") != used:
        memory.update(used=used, same_since=now)
        return ""
    since = now - memory.get("same_since", now)
    newest = memory.get("newest")
    if since < _STALE or newest is None or newest < memory["same_since"] + 60:
        return ""
    return f" (as of {show_duration(since)} ago: the figures stand still although checkpoints were written since)"
