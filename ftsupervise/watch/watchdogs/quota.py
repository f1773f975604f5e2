"""A site's own word on how much is left: a quota command or a plug-in, run with a bound; its output is not trusted."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding
from ftsupervise.probe import Missing, NotSeen, Ran
from ftsupervise.rundir.records import as_count
from ftsupervise.units import parse_size, show_size
from ftsupervise.watch.watchdogs.disk_forecast import Level, finding, level

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Disk, Quota
    from ftsupervise.watch import Look

# lfs quota -q: path, used kB (a * marks "over"), soft, hard, grace, files used, soft, hard, grace. Source: lfs-quota(1)
_LFS = re.compile(
    r"(?P<used>\d+)\*?\s+(?P<soft>\d+)\s+(?P<limit>\d+)\s+\S+\s+(?P<files_used>\d+)\*?\s+(?P<files_soft>\d+)\s+(?P<files_limit>\d+)"
)


@dataclass(frozen=True)
class Figures:
    """Bytes and files; a limit of 0 is none."""

    used: int
    limit: int
    files_used: int | None = None
    files_limit: int | None = None


def parse(text: str, settings: Quota) -> Figures:
    """The figures in the output of a quota command. Raises ValueError with a sentence."""
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
    )


def _bytes(text: str, unit: int) -> int:
    count = as_count(text.strip())
    return parse_size(text) if count is None else count * unit


def check(look: Look, settings: Disk, path: Path, memory: dict[str, Any]) -> Iterator[Finding]:
    assert settings.quota is not None
    command = " ".join(settings.quota.command)
    ran = look.probe.run(settings.quota.command, bound=settings.quota.timeout.total_seconds())
    problem = _problem(ran, settings.quota)
    if isinstance(ran, Ran) and settings.quota.format == "nagios" and not problem:
        text = ran.out.decode("utf-8", "replace").partition("|")[0].strip().splitlines() or ["no words"]
        yield finding(look, path, "quota", Level(ran.code), f"{path}: {text[0][:300]}", command=command)
        return
    if isinstance(ran, Ran) and not problem:
        try:
            figures = parse(ran.out.decode("utf-8", "replace"), settings.quota)
        except ValueError as error:
            problem = str(error)
        else:
            yield from _judge(look, settings, path, memory, figures, command)
            return
    yield finding(look, path, "quota", None, f"{path}: quota not seen: {command}: {problem}", command=command)


def _problem(ran: Ran | Missing | NotSeen, settings: Quota) -> str:
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


def _judge(
    look: Look, settings: Disk, path: Path, memory: dict[str, Any], figures: Figures, command: str
) -> Iterator[Finding]:
    kinds = (
        ("quota", figures.used, figures.limit, settings.used, settings.critical.used, show_size),
        ("quota files", figures.files_used, figures.files_limit, settings.inodes, settings.critical.inodes, str),
    )
    for subject, used, limit, warning, critical, show in kinds:
        if used is None or not limit:
            if subject == "quota":
                yield finding(look, path, subject, Level.FINE, f"{path}: no quota is set", command=command)
            continue
        worse = max(critical, warning) if critical is not None and warning is not None else critical
        was = Level(memory.get(subject, 0))
        found = level(used / limit, warning, worse, rising=True, was=was, margin=0.02)
        memory[subject] = int(found)
        text = f"{path}: {show(used)} of the quota of {show(limit)} used ({used / limit:.1%})"
        share = f"{warning:.0%}" if warning is not None else ""
        value = f"{used / limit:.1%}"
        yield finding(look, path, subject, found, text, "quota", value=value, limit=share, command=command)
