"""Checks the room on file systems (bytes, inodes, quota, and for how many hours and checkpoints), and that they answer
at all.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding
from ftsupervise.host import processes
from ftsupervise.host.begin import searched_alone
from ftsupervise.probe import Entry, Missing, Mount, NotSeen, Space
from ftsupervise.units import count, show_duration, show_size
from ftsupervise.watch import due
from ftsupervise.watch.watchdogs import checkpoints
from ftsupervise.watch.watchdogs.disk_space import (
    Forecast,
    Level,
    Limit,
    Sample,
    check_quota,
    finding,
    forecast,
    judge,
    remember,
)
from ftsupervise.watch.watchdogs.own_checkpoints import folder_of

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Disk as Settings
    from ftsupervise.watch import Look

# Removes old checkpoints before a disk is full, where the run allows it (``checkpoints.retain.before_full``).
#
# The watch does not wait for that: it starts ``ftsupervise checkpoints upkeep`` in the background, with a bound, and once
# an hour while the disk stays full or fills up again. Its rules are those of ``checkpoints.retain``, so nothing goes here
# that would not go at any other time.

_LONGEST = 3600  # seconds that it may take
_AGAIN = 3600.0  # seconds until it is started again


def ask(look: Look, path: Path, memory: dict[str, Any], *, bad: bool) -> str:
    """Return words to add to a finding about ``path``: that old checkpoints are being removed, and since when; "" if
    none are.

    ``memory`` is kept from check to check.
    """
    if not bad or not _allowed(look, path):
        return ""
    now, started = look.now.timestamp(), float(memory.get("upkeep", 0.0))
    if not 0 <= now - started < _AGAIN:
        try:
            _start(look)
        except OSError as error:
            return f"; ftsupervise checkpoints upkeep could not be started: {error.strerror}"
        memory["upkeep"] = started = now
    at = datetime.fromtimestamp(started, timezone.utc)
    return f"; old checkpoints are removed as checkpoints.retain says (upkeep was started at {at:%H:%M} UTC)"


def _allowed(look: Look, path: Path) -> bool:
    """Return whether the run allows it, and whether its checkpoints lie on that file system."""
    retain = look.run.checkpoints.retain
    if retain is None or not retain.before_full:
        return False
    folder = folder_of(look)
    here, there = look.entry(path), look.entry(folder)
    return isinstance(here, Entry) and isinstance(there, Entry) and here.device == there.device


def _start(look: Look) -> None:
    """Start it in a session of its own, so that neither the end of this check nor a signal to it cuts it short.

    Raises OSError.
    """
    command = processes.own_command("checkpoints", "upkeep", "--quiet", str(look.rundir.root))
    subprocess.Popen(
        ["timeout", "--kill-after=60", str(_LONGEST), *command],
        cwd="/",
        env=searched_alone(os.environ),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


# ------------------------------------------------------------------------------------------


_STALE = 1800.0  # seconds; file systems have been seen to update their figures every half hour
# seconds after which another file system at the same place is taken for the one that belongs there
ACCEPTED_AFTER = 86_400.0
_HOSTS = 64  # remembered


def check(look: Look, settings: tuple[Settings, ...]) -> Iterator[Finding]:
    for one in settings:
        path = one.path if one.path is not None else look.rundir.root
        memory = look.memory.setdefault(str(path), {})
        if not due(memory, one.every, look.now):
            continue
        watched = WatchedPath(look, one, path, memory)
        yield from watched.check()
        if one.quota is not None and not watched.trusted:
            yield watched.finding("quota", None, f"{path}: quota not seen: it is not mounted", command="findmnt")
        elif one.quota is not None:
            yield from check_quota(look, one, path, memory.setdefault("quota", {}))


def _worse(of: Settings, name: str) -> Any:
    """Return a critical limit. Where the limit itself is off, so is a critical one that nobody has set."""
    off = getattr(of, name) is None and name not in of.critical.model_fields_set
    return None if off else getattr(of.critical, name)


class WatchedPath:
    """One path that *disk* watches, at one check. ``memory``: what earlier checks saw of it."""

    def __init__(self, look: Look, settings: Settings, path: Path, memory: dict[str, Any]) -> None:
        self.look, self.settings, self.path, self.memory = look, settings, path, memory
        self.now = look.now.timestamp()

    def finding(self, subject: str, found: Level | None, summary: str, words: str = "", **more: str) -> Finding:
        return finding(self.look, self.path, subject, found, summary, words, **more)

    def check(self) -> Iterator[Finding]:
        space = self.look.probe.space(self.path)
        if not isinstance(space, Space):
            yield from self._unseen(space)
            return
        yield self.finding("there", Level.FINE, f"{self.path} answers")
        mount = self.look.probe.mount(self.path)
        if isinstance(mount, Mount):
            yield from self._mount(mount)
            if not self.trusted:
                yield from self._unknown("not seen: the watched file system is not mounted")
                return
        space = space.usable(self.settings.usable)
        late = self._late(space.used)
        self.memory["last"] = {"at": self.now, "free": space.free}
        yield self._space(space, late)
        if space.inodes_share is not None:
            yield self._inodes(space.inodes_share, space)
        yield from self._forecast(space)

    def _unseen(self, got: Missing | NotSeen) -> Iterator[Finding]:
        last = self.memory.get("last")
        ago = show_duration(self.now - last["at"]) if last else ""
        known = f"; {show_size(last['free'])} were left {ago} ago" if last else ""
        if isinstance(got, Missing):
            yield self.finding("there", Level.CRITICAL, f"{self.path} is not there", "missing")
            return
        if got.hung:
            text = f"{self.path} has not answered for {show_duration(got.seconds)}{known}"
            yield self.finding("there", Level.CRITICAL, text, "hung", detail=got.sentence)
        yield from self._unknown(f"{got.words}{known}")

    def _unknown(self, why: str) -> Iterator[Finding]:
        """Report earlier subjects as unknown, so that they neither fire nor resolve."""
        for subject in ("space", "inodes", "forecast"):
            if subject == "space" or subject in self.memory.get("levels", {}):
                yield self.finding(subject, None, f"{self.path}: {subject} {why}")

    # ---------------------------------------------------------------------------------------------------------- mount

    # A mount that is gone leaves an empty directory behind, with all the room of the disk beneath it: figures that
    # would call a full file system fine. So the mount is remembered, and the figures of any other say nothing about it.

    @property
    def trusted(self) -> bool:
        """Return whether the figures are those of the watched file system."""
        return not self.memory.get("lost", False)

    def _mount(self, now: Mount) -> Iterator[Finding]:
        """Yield a finding if another file system is mounted there than before, or none. ``trusted`` says which it was."""
        memory = self.memory
        hosts: dict[str, list[str]] = memory.setdefault("mounts", {})
        before = _before(hosts, now)
        if before is None or _same(before, now):
            _remember(hosts, now)
            memory.pop("other_since", None)
            if memory.pop("lost", None):
                yield self.finding("mount", Level.FINE, f"{self.path}: {_words(now)}")
            return
        if _beneath(before, now):
            memory["lost"] = True
            text = f"{self.path} is not mounted: {_words(before)} is gone, and {_words(now)} is in its place"
            yield self.finding("mount", Level.CRITICAL, text, "not mounted", point=before.point)
            return
        if self.now - memory.setdefault("other_since", self.now) > ACCEPTED_AFTER:
            hosts.clear()
            for key in ("samples", "used", "same_since", "last", "other_since"):
                memory.pop(key, None)
            yield from self._mount(now)
            return
        memory["lost"] = True
        text = f"{self.path}: another file system is mounted: {_words(now)}, where {_words(before)} was"
        yield self.finding("mount", Level.WARNING, text, "other mount", patience=show_duration(ACCEPTED_AFTER))

    # -------------------------------------------------------------------------------------------------------- judging

    def _level(self, subject: str, *limits: Limit) -> Level:
        """Return the worst level of ``limits``, which is remembered."""
        return judge(self.memory.setdefault("levels", {}), subject, *limits)

    def _space(self, space: Space, late: str) -> Finding:
        of = self.settings
        found = self._level(
            "space",
            Limit(space.free, of.free, _worse(of, "free"), False, 0.05 * (of.free or 0)),
            Limit(space.used_share, of.used, _worse(of, "used"), True, 0.02),
        )
        usable = f" of the usable {of.usable:.0%}" if of.usable < 1 else ""
        limits = [f"{show_size(of.free)} free"] if of.free is not None else []
        limits += [f"{of.used:.0%} used"] if of.used is not None else []
        text = f"{self.path}: {show_size(space.free)} left, {space.used_share:.1%}{usable} used{late}{self._pruning(found)}"
        return self.finding("space", found, text, value=f"{show_size(space.free)} left", limit=", ".join(limits))

    def _pruning(self, found: Level) -> str:
        return ask(self.look, self.path, self.memory, bad=found is not Level.FINE)

    def _inodes(self, used: float, space: Space) -> Finding:
        warning = self.settings.inodes
        found = self._level("inodes", Limit(used, warning, _worse(self.settings, "inodes"), True, 0.02))
        text = f"{self.path}: {space.inodes_free} of {space.inodes} inodes left ({used:.1%} used)"
        limit = f"{warning:.0%}" if warning is not None else ""
        return self.finding("inodes", found, text, value=f"{used:.1%} used", limit=limit)

    def _forecast(self, space: Space) -> Iterator[Finding]:
        of, memory = self.settings, self.memory
        samples: list[Sample] = remember([(t, v) for t, v in memory.get("samples", [])], self.now, float(space.used))
        memory["samples"] = samples
        if isinstance(self.look.entry(self.look.rundir.finished), Entry):
            if "forecast" in memory.get("levels", {}):
                text = f"{self.path}: the run has finished, and saves no checkpoint there"
                yield self.finding("forecast", self._level("forecast"), text)
            return
        size = of.checkpoint or self._measured()
        cadence = of.cadence.total_seconds() if of.cadence is not None else None
        ahead = forecast(space.free, samples, size, cadence if of.checkpoint else None)
        if ahead.seconds is not None or ahead.checkpoints is not None:
            yield self._forecast_finding(ahead, size)
        elif "forecast" in memory.get("levels", {}):
            yield self.finding("forecast", self._level("forecast"), f"{self.path} is not filling up")

    def _forecast_finding(self, ahead: Forecast, size: float | None) -> Finding:
        of = self.settings
        words, limits, shown = [], [], []
        if ahead.seconds is not None:
            warning = of.left.total_seconds() if of.left is not None else None
            worse = _worse(of, "left")
            worse = worse.total_seconds() if worse is not None else None
            limits.append(Limit(ahead.seconds, warning, worse, False, 0.2 * (warning or 0)))
            rate = f"{show_size(ahead.rate * 86_400)} a day ({ahead.grounds})"
            words.append(f"full in {show_duration(ahead.seconds)} at {rate}")
            shown += [show_duration(warning)] if warning is not None else []
        if ahead.checkpoints is not None and size:
            limits.append(Limit(ahead.checkpoints, of.checkpoints, _worse(of, "checkpoints"), False, 1))
            words.append(f"room for {count(ahead.checkpoints, 'checkpoint')} of {show_size(size)}")
            shown += [f"{of.checkpoints} checkpoints"] if of.checkpoints is not None else []
        found = self._level("forecast", *limits)
        text = f"{self.path}: {', '.join(words)}{self._pruning(found)}"
        return self.finding("forecast", found, text, value=words[0], limit=", ".join(shown))

    def _measured(self) -> float | None:
        """The usual size of this run's checkpoints, if they lie on the file system of the path."""
        here, there = self.look.entry(self.path), self.look.entry(folder_of(self.look))
        if not isinstance(here, Entry) or not isinstance(there, Entry) or here.device != there.device:
            return None
        ones = checkpoints.written(self.look, self.memory.setdefault("checkpoints", {}))
        if isinstance(ones, (Missing, NotSeen)):
            return None
        self.memory["newest"] = ones[-1].mtime if ones else None
        return checkpoints.usual_size(ones)

    def _late(self, used: int) -> str:
        """Return words if the figures stand still although checkpoints were written since."""
        if self.memory.get("used") != used:
            self.memory.update(used=used, same_since=self.now)
            return ""
        since = self.now - self.memory.get("same_since", self.now)
        newest = self.memory.get("newest")
        if since < _STALE or newest is None or newest < self.memory["same_since"] + 60:
            return ""
        return (
            f" (as of {show_duration(since)} ago: the figures have not changed although checkpoints were written since)"
        )


def _before(hosts: dict[str, list[str]], now: Mount) -> Mount | None:
    """Return the mount that this host had there.

    On a host that checks for the first time it may be another, but not one beneath the mount of all others.
    """
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
    """Return whether ``now`` is what one sees when ``before`` is not mounted."""
    return before.point != now.point and before.point.startswith(now.point.rstrip("/") + "/")


def _words(mount: Mount) -> str:
    return f"{mount.source} on {mount.point} ({mount.kind})"
