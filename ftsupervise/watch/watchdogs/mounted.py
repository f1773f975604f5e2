"""Is what lies at a path still the file system that lay there before?

A mount that is gone leaves an empty directory behind, with all the room of the disk beneath it: figures that would call a full
file system fine. So what was mounted there is remembered, and the figures of anything else say nothing about it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding
from ftsupervise.probe import Mount
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs.disk_forecast import Level
from ftsupervise.watch.watchdogs.disk_words import finding

if TYPE_CHECKING:
    from ftsupervise.watch import Look

ACCEPTED_AFTER = 86_400.0  # seconds: then another file system at the same place is the one that belongs there
_HOSTS = 64  # remembered


def check(look: Look, path: Path, memory: dict[str, Any], now: Mount) -> Iterator[Finding]:
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
        yield from check(look, path, memory, now)
        return
    memory["lost"] = True
    text = f"{path}: another file system is mounted: {_words(now)}, where {_words(before)} was"
    patience = show_duration(ACCEPTED_AFTER)
    yield finding(look, path, "mount", Level.WARNING, text, "other mount", patience=patience)


def trusted(memory: dict[str, Any]) -> bool:
    """Are the figures those of the file system that is watched?"""
    return not memory.get("lost", False)


def _before(hosts: dict[str, list[str]], now: Mount) -> Mount | None:
    """What this host had there. A host that has not looked yet may have it elsewhere, but not beneath everybody's mount."""
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
