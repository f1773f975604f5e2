"""Judges whether too little space is left on a file system, now or soon, and judges a site's own quota command in the
same way.

The judging is pure: bytes, seconds and shares in, a level out. A quota command has a bound, and its output is not
trusted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ftsupervise.findings import Finding, OfDisk, Severity, Words
from ftsupervise.printable import to_type
from ftsupervise.probe import Missing, NotSeen, Ran
from ftsupervise.rundir.records import as_count
from ftsupervise.truth import Health
from ftsupervise.units import parse_size, show_duration, show_size

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Disk, Quota
    from ftsupervise.watch import Look

Sample = tuple[float, float]  # (seconds, value)

_WINDOW = 3 * 86_400.0  # trends are taken from the last three days
_MOST = 48  # samples kept of them
_APART = 300.0
_ENOUGH = 6
_LONG_ENOUGH = 3600.0


class Level(IntEnum):
    FINE = 0
    WARNING = 1
    CRITICAL = 2


class Limit(NamedTuple):
    """A value and its limits. ``rising``: large values are bad. A limit once passed is left only ``margin`` back from it, so
    that a value that hovers around a limit is told once."""

    value: float
    warning: float | None
    critical: float | None = None
    rising: bool = True
    margin: float = 0.02

    def level(self, was: Level) -> Level:
        """Return which limit the value is beyond; beyond the critical one it is beyond both."""
        critical = self.critical
        if critical is not None and self.warning is not None:  # never reached before the warning, as defaults may be
            critical = (max if self.rising else min)(critical, self.warning)
        if self._beyond(critical, was is Level.CRITICAL):
            return Level.CRITICAL
        return Level.WARNING if self._beyond(self.warning, was >= Level.WARNING) else Level.FINE

    def _beyond(self, limit: float | None, passed: bool) -> bool:
        if limit is None:
            return False
        back = self.margin if passed else 0.0
        return self.value > limit - back if self.rising else self.value < limit + back


def judge(memory: dict[str, Any], subject: str, *limits: Limit) -> Level:
    """Return the worst level of ``limits``, which is remembered."""
    was = Level(memory.get(subject, 0))
    found = max((limit.level(was) for limit in limits), default=Level.FINE)
    memory[subject] = int(found)
    return found


def remember(samples: Sequence[Sample], at: float, value: float) -> list[Sample]:
    """Return ``samples`` with one more, at most 48 over three days: when there are too many, every other one goes."""
    kept = [(t, v) for t, v in samples if at - _WINDOW <= t < at]
    apart = max(_APART, (at - kept[0][0]) / _MOST if kept else 0.0)
    if kept and at - kept[-1][0] < apart * 0.9:
        return kept
    kept.append((at, value))
    return kept[::2] if len(kept) > _MOST else kept


def slope(samples: Sequence[Sample]) -> float | None:
    """Growth per second: the median over all pairs of samples, which single jumps (a checkpoint, a clean-up) do not
    bend.

    None while the samples are too few, or too close together, to tell.
    """
    if len(samples) < _ENOUGH or samples[-1][0] - samples[0][0] < _LONG_ENOUGH:
        return None
    slopes = [(v2 - v1) / (t2 - t1) for i, (t1, v1) in enumerate(samples) for t2, v2 in samples[i + 1 :] if t2 > t1]
    return median(slopes) if slopes else None


@dataclass(frozen=True)
class Forecast:
    """``seconds`` until nothing is left (None: it does not fill), the number of ``checkpoints`` that still fit, and the
    grounds for it.
    """

    seconds: float | None
    rate: float  # bytes per second
    checkpoints: int | None
    grounds: str


def forecast(free: float, samples: Sequence[Sample], checkpoint: float | None, cadence: float | None) -> Forecast:
    """``checkpoint`` in bytes, every ``cadence`` seconds if that is declared. The faster of plan and trend counts: the
    plan knows what is not written yet, the trend what the neighbours write."""
    planned = checkpoint / cadence if checkpoint and cadence else 0.0
    trend = slope(samples) or 0.0
    rate = max(planned, trend)
    grounds = "" if rate <= 0 else "checkpoints as declared" if planned >= trend else f"the last {span_words(samples)}"
    return Forecast(
        seconds=max(0.0, free) / rate if rate > 0 else None,
        rate=max(rate, 0.0),
        checkpoints=max(0, int(free // checkpoint)) if checkpoint else None,
        grounds=grounds,
    )


def span_words(samples: Sequence[Sample]) -> str:
    return show_duration(samples[-1][0] - samples[0][0]) if samples else "nothing"


# The words of findings about a file system: those of *disk*, of its mount and of its quota.

_FREE = "free some space, move old checkpoints away, or ask for more quota"
_MOUNT = "findmnt -T {path}"
WORDS = {
    "there": Words("", "df -h {path}", _FREE),
    "missing": Words("", "df -h {path}", "is it mounted? mkdir it otherwise"),
    "hung": Words(
        "All processes that read or write there hang, the training included. Nothing else is known about it.",
        "df -h {path}",
        "tell your storage people; ls of it may hang your shell",
    ),
    "space": Words(
        "A checkpoint that does not fit ends the run, and the half that was written is useless.",
        "df -h {path}",
        _FREE,
    ),
    "inodes": Words(
        "No new file can be made when they run out, however much space is left.",
        "df -i {path}",
        "remove directories with many small files: caches, old environments, unpacked archives",
    ),
    "forecast": Words("The run ends when a checkpoint does not fit any more.", "df -h {path}", _FREE),
    "quota": Words("", "{command}", _FREE),
    "mount": Words("", _MOUNT, _FREE),
    "not mounted": Words(
        "Files written there land on another disk and are hidden when the mount is back. Nothing is known "
        "about the file system that belongs there.",
        _MOUNT,
        "mount {point}; if it is gone for good, name another path under watch.disk",
    ),
    "other mount": Words(
        "Nothing is known about the file system that was watched there. "
        "The new one is watched instead once it has been there for {patience}.",
        _MOUNT,
        "mount the right one, or wait if the change is intended",
    ),
}


def finding(
    look: Look, path: Path, subject: str, found: Level | None, summary: str, words: str = "", **more: str
) -> Finding:
    """Build a finding; ``found`` is None where it could not be seen.

    The severity of a good finding is the one that it would have at its worst. ``words``: the line of the table, if it
    is not ``subject``; ``more``: names in it, and parts of the finding.
    """
    parts = {name: more.pop(name) for name in ("value", "limit", "detail") if name in more}
    disk = OfDisk(path, subject)
    return look.finding(
        str(disk),
        Health.of(None if found is None else found > Level.FINE),
        summary,
        WORDS[words or subject],
        severity=Severity.WARNING if found is Level.WARNING else Severity.CRITICAL,
        names={"path": to_type(path), **more},
        disk=disk,
        **parts,
    )


# ------------------------------------------------------------------------------------------------------------ quota

# lfs quota -q: path, used kB (a * marks "over"), soft, hard, grace, files used, soft, hard, grace. Grace is what is left of it:
# "6d23h59m", "-" where the soft limit is not passed, "none" or "expired" where it is over. Source: lfs-quota(1), lfs.c
_LFS = re.compile(
    r"(?P<used>\d+)\*?\s+(?P<soft>\d+)\s+(?P<limit>\d+)\s+(?P<grace>\S+)\s+"
    r"(?P<files_used>\d+)\*?\s+(?P<files_soft>\d+)\s+(?P<files_limit>\d+)(?:\s+(?P<files_grace>\S+))?"
)
_EXPIRED = ("none", "expired")


@dataclass(frozen=True)
class Figures:
    """Bytes and files; a limit of 0 is none."""

    used: int
    limit: int
    files_used: int | None = None
    files_limit: int | None = None
    grace: str = ""  # of a soft limit that is passed; "" where none is
    files_grace: str = ""


def parse_quota(text: str, settings: Quota) -> Figures:
    """Return the figures in the output of a quota command. Raises ValueError with a sentence."""
    pattern = _LFS if settings.format == "lfs" else re.compile(settings.pattern or "")
    match = pattern.search(text)
    if match is None:
        line = next((line for line in text.splitlines() if line.strip()), "nothing")
        raise ValueError(f"its output does not match: {line[:100]!r}")
    found = match.groupdict()
    limit = _bytes(found["limit"], settings.unit)
    if not limit and found.get("soft"):
        limit = _bytes(found["soft"], settings.unit)
    files = found.get("files_used"), found.get("files_limit") or found.get("files_soft")
    return Figures(
        used=_bytes(found["used"], settings.unit),
        limit=limit,
        files_used=int(files[0]) if files[0] else None,
        files_limit=int(files[1]) if files[1] else None,
        grace=_grace(found, "used", "soft", "grace"),
        files_grace=_grace(found, "files_used", "files_soft", "files_grace"),
    )


def _grace(found: Mapping[str, str | None], used: str, soft: str, grace: str) -> str:
    """Return what is left of the grace of a soft limit that is passed; "" where it is not, or there is none."""
    limit, word = int(found.get(soft) or 0), found.get(grace) or ""
    return word if limit and int(found.get(used) or 0) > limit and word not in ("", "-") else ""


def _bytes(text: str, unit: int) -> int:
    count = as_count(text.strip())
    return parse_size(text) if count is None else count * unit


def check_quota(look: Look, settings: Disk, path: Path, memory: dict[str, Any]) -> Iterator[Finding]:
    assert settings.quota is not None
    command = " ".join(settings.quota.command)
    ran = look.probe.run(settings.quota.command, bound=settings.quota.timeout.total_seconds())
    problem = _no_figures(ran, settings.quota)
    if isinstance(ran, Ran) and settings.quota.format == "nagios" and not problem:
        text = ran.out.decode("utf-8", "replace").partition("|")[0].strip().splitlines() or ["no output"]
        yield finding(look, path, "quota", Level(ran.code), f"{path}: {text[0][:300]}", command=command)
        return
    if isinstance(ran, Ran) and not problem:
        try:
            figures = parse_quota(ran.out.decode("utf-8", "replace"), settings.quota)
        except ValueError as error:
            problem = str(error)
        else:
            yield from _judge_quota(look, settings, path, memory, figures, command)
            return
    yield finding(look, path, "quota", None, f"{path}: quota not seen: {command}: {problem}", command=command)


def _no_figures(ran: Ran | Missing | NotSeen, settings: Quota) -> str:
    if isinstance(ran, Missing):
        return "there is no such program"
    if isinstance(ran, NotSeen):
        return ran.sentence
    if ran.late:
        return f"it did not end within {settings.timeout.total_seconds():.0f} s"
    if settings.format == "nagios":
        return "" if ran.code in (0, 1, 2) else f"exit {ran.code}"
    words = ran.err.decode("utf-8", "replace").strip()[:200]
    return f"exit {ran.code} {words}".strip() if ran.code else ""


def _judge_quota(
    look: Look, settings: Disk, path: Path, memory: dict[str, Any], figures: Figures, command: str
) -> Iterator[Finding]:
    kinds = (
        ("quota", figures.used, figures.limit, settings.used, settings.critical.used, show_size, figures.grace),
        (
            "quota files",
            figures.files_used,
            figures.files_limit,
            settings.inodes,
            settings.critical.inodes,
            str,
            figures.files_grace,
        ),
    )
    for subject, used, limit, warning, critical, show, grace in kinds:
        if used is None or not limit:
            if subject == "quota":
                yield finding(look, path, subject, Level.FINE, f"{path}: no quota is set", command=command)
            continue
        found = judge(memory, subject, Limit(used / limit, warning, critical))
        text = f"{path}: {show(used)} of the quota of {show(limit)} used ({used / limit:.1%})"
        if grace in _EXPIRED:
            found, text = (
                Level.CRITICAL,
                f"{text}; the soft limit is passed and its grace is over: nothing can be written",
            )
        elif grace:
            found, text = max(found, Level.WARNING), f"{text}; the soft limit is passed, and writing ends in {grace}"
        share = f"{warning:.0%}" if warning is not None else ""
        value = f"{used / limit:.1%}"
        yield finding(look, path, subject, found, text, "quota", value=value, limit=share, command=command)
