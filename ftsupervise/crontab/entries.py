"""What is to be run, found in the folder: files that people dropped, and lines of the crontab file."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from ftsupervise.crontab import trust
from ftsupervise.crontab.parts import Kind, judge
from ftsupervise.crontab.place import FOLDERS, CronDir, Installed
from ftsupervise.crontab.schedule import TICK, Schedule, check
from ftsupervise.crontab.table import read_table
from ftsupervise.host.ownership import NotTrusted
from ftsupervise.printable import printable

_TABLE_LIMIT = 1_000_000
_MOST = 1000  # files looked at in one folder


@dataclass(frozen=True)
class Entry:
    """One thing that runs by itself."""

    name: str  # "hourly/disk", "crontab/python-3fa2c1"
    kind: Kind
    schedule: Schedule
    argv: tuple[str, ...]
    path: Path | None = None  # the dropped file
    stdin: str = ""
    env: dict[str, str] = field(default_factory=dict)

    @property
    def key(self) -> str:
        """The name as the name of a directory."""
        return self.name.replace("/", ".", 1)


@dataclass(frozen=True)
class Passed:
    """A file or line that is passed over, and why."""

    name: str
    why: str
    wanted: bool = True  # somebody surely meant it to run


@dataclass(frozen=True)
class Found:
    entries: tuple[Entry, ...]
    passed: tuple[Passed, ...]


def find(cron: CronDir, installed: Installed) -> Found:
    """All entries, by folder and name. Never raises for one file: what cannot be used is in ``passed``."""
    entries: list[Entry] = []
    passed: list[Passed] = []
    for folder in FOLDERS:
        _look_into(cron, folder, installed, entries, passed)
    _read_table(cron, installed, entries, passed)
    return Found(tuple(entries), tuple(passed))


def _look_into(cron: CronDir, folder: str, installed: Installed, entries: list[Entry], passed: list[Passed]) -> None:
    place = cron.folder(folder)
    try:
        reason = trust.distrust_folder(place, installed)
        names = sorted(os.listdir(place))
    except FileNotFoundError:
        return
    except OSError as error:
        passed.append(Passed(f"{folder}/", f"cannot be read: {error.strerror}"))
        return
    if reason:
        passed.append(Passed(f"{folder}/", f"{reason}: chmod go-w {shlex.quote(str(place))}"))
        return
    if len(names) > _MOST:
        passed.append(
            Passed(f"{folder}/", f"{len(names)} files are in it; those after the first {_MOST} are not looked at")
        )
    schedule = Schedule(installed.times.get(folder, TICK), installed.zone)
    try:
        check(schedule.text)
    except ValueError as error:
        passed.append(Passed(f"{folder}/", f"its time in state/installed.json is wrong: {error}"))
        return
    for name in names[:_MOST]:
        path = place / name
        told = f"{folder}/{printable(name, 100)}"
        try:
            verdict = judge(printable(name), path.stat().st_mode, executable=os.access(path, os.X_OK))
            reason = trust.distrust(path, installed) if verdict.kind is not None else ""
        except OSError as error:
            passed.append(Passed(told, error.strerror or str(error)))
            continue
        if verdict.kind is None or reason:
            passed.append(Passed(told, verdict.why or reason, verdict.wanted or bool(reason)))
        else:
            entries.append(Entry(f"{folder}/{name}", verdict.kind, schedule, (str(path),), path))


def _read_table(cron: CronDir, installed: Installed, entries: list[Entry], passed: list[Passed]) -> None:
    from zoneinfo import ZoneInfo

    try:
        text = trust.read(cron.crontab, installed, _TABLE_LIMIT).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except NotTrusted as error:
        passed.append(Passed("crontab", f"{error.message}: {error.hint}"))
        return
    except OSError as error:
        passed.append(Passed("crontab", f"cannot be read: {error.strerror}"))
        return
    table = read_table(text)
    passed += [Passed(f"crontab:{number}", why) for number, why in table.problems]
    for line in table.lines:
        zone = ZoneInfo(line.zone) if line.zone else installed.zone
        shell = line.env.get("SHELL", "/bin/sh")
        argv = (shell, "-c", line.command)
        schedule = Schedule(line.when, zone)
        entries.append(
            Entry(f"crontab/{line.name}", Kind.EXECUTABLE, schedule, argv, stdin=line.stdin, env=dict(line.env))
        )


def check_times(times: dict[str, str]) -> None:
    """Raises ValueError, naming the folder, for a schedule that is none."""
    for folder, text in times.items():
        try:
            check(text)
        except ValueError as error:
            raise ValueError(f"cron.{folder}: {error}") from None
