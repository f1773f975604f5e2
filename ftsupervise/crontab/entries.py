"""The entries: files that people dropped into the folders, and lines of the crontab file.

The rules are those of run-parts, with two differences. A name may contain a dot (run-parts ignores ``check.sh`` because of it):
only files that an editor, a package manager or a version control system leaves behind are skipped. And every file that is
skipped is listed, with the reason. The crontab file is as in crontab(5): ``%`` ends the command and the rest is its standard
input (``\\%`` is a plain one), ``NAME=value`` sets a variable and ``CRON_TZ`` the time zone of the lines below it. A line that
cannot be read is reported, and the others run all the same.
"""

from __future__ import annotations

import os
import re
import shlex
import stat
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta, timezone, tzinfo
from enum import Enum
from hashlib import sha256
from pathlib import Path

from ftsupervise.crontab.installation import FOLDERS, CronDir, Installed, distrust, distrust_folder, read_believed
from ftsupervise.host.ownership import NotTrusted
from ftsupervise.printable import printable

# Slots on the wall clock, and which entries are due at one. Pure: time comes in, nothing is looked up.
#
# A slot is a multiple of the period since the epoch, so it has a name that every node agrees on, and waiting in a queue
# moves nothing. Five-field lines follow Debian's cron in one time zone: a time that the change to summer time skips runs
# right after it, a time that comes twice runs the first time; ``*`` in hours or minutes runs by elapsed time.

EPOCH = datetime(1970, 1, 1, tzinfo=timezone.utc)
NICKNAMES = {
    "@hourly": "0 * * * *",
    "@daily": "0 0 * * *",
    "@midnight": "0 0 * * *",
    "@weekly": "0 0 * * 0",
    "@monthly": "0 0 1 * *",
    "@yearly": "0 0 1 1 *",
    "@annually": "0 0 1 1 *",
}
TICK = "@tick"  # every slot, whatever the period is
_COUNTED = 1000  # missed slots that are counted; more are "more"


def floor(now: datetime, period: timedelta) -> datetime:
    """The newest slot that is not after ``now``."""
    return EPOCH + (now - EPOCH) // period * period


def ceiling(at: datetime, period: timedelta) -> datetime:
    """The first slot that is not before ``at``."""
    return EPOCH - (EPOCH - at) // period * period


def slots_after(now: datetime, period: timedelta, count: int) -> tuple[datetime, ...]:
    """The next ``count`` slots after ``now``."""
    first = floor(now, period)
    return tuple(first + period * (n + 1) for n in range(count))


@dataclass(frozen=True)
class Schedule:
    """Times at which something is due: five fields (or a nickname) in a time zone; ``@tick`` is every slot."""

    text: str
    zone: tzinfo

    def next_after(self, after: datetime, period: timedelta) -> datetime | None:
        """The first time after ``after``, in UTC; None if there is none within 50 years. ``period`` is for @tick."""
        if self.text == TICK:
            return slots_after(after, period, 1)[0]
        from cronsim import CronSim

        simulated = CronSim(five_fields(self.text), after.astimezone(self.zone))
        for _ in range(1000):  # in a repeated hour it may name a time that has passed
            try:
                found = next(simulated).astimezone(timezone.utc)
            except StopIteration:
                return None
            if found > after:
                return found
        return None


def five_fields(text: str) -> str:
    """ "@daily" and "0 0 * * *" alike as five fields. Raises ValueError for what is neither."""
    text = NICKNAMES.get(text, text)
    if text.startswith("@"):
        raise ValueError(f"unknown nickname {text!r}; there are {', '.join([*NICKNAMES, TICK])}")
    if len(text.split()) != 5:
        raise ValueError('expected five fields (minute hour day-of-month month day-of-week), such as "*/15 * * * *"')
    return text


def check(text: str) -> None:
    """Check that ``text`` is a schedule. Raises ValueError with a sentence unless it is."""
    if text == TICK:
        return
    from cronsim import CronSim, CronSimError

    try:
        CronSim(five_fields(text), EPOCH)
    except CronSimError as error:
        raise ValueError(f"{str(error).lower()} in {text!r}") from None


@dataclass(frozen=True)
class Due:
    """Says whether an entry is due at a slot, and which earlier slots it has missed."""

    run: bool = False
    missed: tuple[datetime, ...] = ()  # earlier slots at which it should have run and did not


def due(schedule: Schedule, slot: datetime, period: timedelta, last: datetime) -> Due:
    """Return ``Due``: whether the entry is due at ``slot``, and the slots missed since ``last`` (its last run, or when it was
    first seen).

    An entry has one run a slot, however many of its times lie between this slot and the one before. One run makes up for
    all missed slots.
    """
    window = slot - period
    on_time = schedule.next_after(max(last, window), period)
    now = on_time is not None and on_time <= slot
    missed: list[datetime] = []
    at = last
    while len(missed) < _COUNTED:
        found = schedule.next_after(at, period)
        if found is None or found > window:
            break
        missed.append(ceiling(found, period))
        at = missed[-1]  # the other times of the same slot are the same run
    return Due(run=now or bool(missed), missed=tuple(missed))


_TABLE_LIMIT = 1_000_000
_MOST = 1000  # files looked at in one folder
_JOB_SCRIPTS = (".slurm", ".sbatch")
_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+-]*")
_LEFTOVER = re.compile(
    r".*(~|,v|\.(bak|orig|rej|swp|swo|tmp|new|old|save|disabled|cfsaved|rpmsave|rpmorig|rpmnew|dpkg-[a-z]+|ucf-[a-z]+))"
)
_PROSE = re.compile(r"(README|LICENSE|NOTES|TODO).*|.*\.(md|txt|rst|ya?ml|json|cfg|ini|toml|log|out)", re.I)
_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_QUOTED = re.compile(r"""(["'])(.*)\1""")


class EntryKind(Enum):
    EXECUTABLE = "executable"
    JOB = "job"  # handed to sbatch as a job of its own


@dataclass(frozen=True)
class CronEntry:
    """One file or line that is run at its times."""

    name: str  # "hourly/disk", "crontab/python-3fa2c1"
    kind: EntryKind
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
class PassedOver:
    """A file or line that is passed over, with the reason."""

    name: str
    why: str
    wanted: bool = True  # its author surely meant it to run, so passing over it is worth an alert


@dataclass(frozen=True)
class CronEntries:
    entries: tuple[CronEntry, ...]
    passed: tuple[PassedOver, ...]


def find(cron: CronDir, installed: Installed) -> CronEntries:
    """All entries, by folder and name. Files and lines that cannot be used are in ``passed``."""
    entries: list[CronEntry] = []
    passed: list[PassedOver] = []
    for folder in FOLDERS:
        _read_folder(cron.folder(folder), folder, installed, entries, passed)
    _read_crontab(cron, installed, entries, passed)
    return CronEntries(tuple(entries), tuple(passed))


# ---------------------------------------------------------------------------------------------------------- folders


def _read_folder(
    place: Path, folder: str, installed: Installed, entries: list[CronEntry], passed: list[PassedOver]
) -> None:
    schedule = Schedule(installed.times.get(folder, TICK), installed.zone)
    try:
        reason = distrust_folder(place, installed)
        names = sorted(os.listdir(place))
        check(schedule.text)
    except FileNotFoundError:
        return
    except OSError as error:
        passed.append(PassedOver(f"{folder}/", f"cannot be read: {error.strerror}"))
        return
    except ValueError as error:
        passed.append(PassedOver(f"{folder}/", f"its time in state/installed.json is wrong: {error}"))
        return
    if reason:
        passed.append(PassedOver(f"{folder}/", f"{reason}: chmod go-w {shlex.quote(str(place))}"))
        return
    if len(names) > _MOST:
        many = f"{len(names)} files are in it; those after the first {_MOST} are ignored"
        passed.append(PassedOver(f"{folder}/", many))
    for name in names[:_MOST]:
        path = place / name
        shown = f"{folder}/{printable(name, 100)}"
        try:
            found = judge(printable(name), path.stat().st_mode, executable=os.access(path, os.X_OK))
            reason = distrust(path, installed) if isinstance(found, EntryKind) else ""
        except OSError as error:
            passed.append(PassedOver(shown, error.strerror or str(error)))
            continue
        if isinstance(found, PassedOver):
            passed.append(replace(found, name=shown))
        elif reason:
            passed.append(PassedOver(shown, reason))
        else:
            entries.append(CronEntry(f"{folder}/{name}", found, schedule, (str(path),), path))


def judge(name: str, mode: int, *, executable: bool) -> EntryKind | PassedOver:
    """Return the kind of a file called ``name`` in a cron folder (executable or job script), or why it is passed over.
    Pure.

    ``mode`` as stat(2) gives it, links followed.
    """
    if name.startswith("."):
        return PassedOver(name, "hidden", wanted=False)
    if _LEFTOVER.fullmatch(name):
        return PassedOver(name, "it was probably left behind by an editor or installer", wanted=False)
    if not _NAME.fullmatch(name):
        return PassedOver(name, "a name is made of letters, digits and _ . + -", wanted=False)
    if stat.S_ISDIR(mode):
        return PassedOver(name, "a directory", wanted=False)
    if not stat.S_ISREG(mode):
        return PassedOver(name, "not a regular file", wanted=False)
    if mode & stat.S_IWOTH:
        return PassedOver(name, f"everybody may write it: chmod o-w {name}")
    if name.endswith(_JOB_SCRIPTS):
        return EntryKind.JOB
    if not executable:
        return PassedOver(name, f"not executable: chmod +x {name}", wanted=not _PROSE.fullmatch(name))
    return EntryKind.EXECUTABLE


# ----------------------------------------------------------------------------------------------------- crontab file


@dataclass(frozen=True)
class CrontabLine:
    """One line that runs something."""

    name: str  # made from the command, so that it stays when other lines come and go
    when: str
    command: str
    stdin: str = ""
    zone: str = ""  # CRON_TZ, if one is set
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class CrontabFile:
    lines: tuple[CrontabLine, ...] = ()
    problems: tuple[tuple[int, str], ...] = ()  # (line number, one sentence)


def _read_crontab(cron: CronDir, installed: Installed, entries: list[CronEntry], passed: list[PassedOver]) -> None:
    from zoneinfo import ZoneInfo

    try:
        text = read_believed(cron.crontab, installed, _TABLE_LIMIT).decode("utf-8", "replace")
    except FileNotFoundError:
        return
    except NotTrusted as error:
        passed.append(PassedOver("crontab", f"{error.message}: {error.hint}"))
        return
    except OSError as error:
        passed.append(PassedOver("crontab", f"cannot be read: {error.strerror}"))
        return
    table = parse_crontab(text)
    passed += [PassedOver(f"crontab:{number}", why) for number, why in table.problems]
    for line in table.lines:
        schedule = Schedule(line.when, ZoneInfo(line.zone) if line.zone else installed.zone)
        argv = (line.env.get("SHELL", "/bin/sh"), "-c", line.command)
        name = f"crontab/{line.name}"
        entries.append(CronEntry(name, EntryKind.EXECUTABLE, schedule, argv, stdin=line.stdin, env=line.env))


def parse_crontab(text: str) -> CrontabFile:
    """All lines of a crontab file. Never raises: the lines that cannot be read are in ``problems``. Pure."""
    lines: list[CrontabLine] = []
    problems: list[tuple[int, str]] = []
    taken: set[str] = set()
    env: dict[str, str] = {}
    zone = ""
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            continue
        try:
            if assigned := _VARIABLE.fullmatch(stripped):
                quoted = _QUOTED.fullmatch(assigned[2].strip())
                value = quoted[2] if quoted else assigned[2].strip()
                if assigned[1] == "CRON_TZ":
                    zone = _zone(value)
                else:
                    env = {**env, assigned[1]: value}
                continue
            when, command, stdin = _line(stripped)
        except ValueError as error:
            problems.append((number, str(error)))
            continue
        lines.append(CrontabLine(_line_name(when, command, taken), when, command, stdin, zone, env))
    return CrontabFile(tuple(lines), tuple(problems))


def _line(text: str) -> tuple[str, str, str]:
    """(time, command, standard input). Raises ValueError, which says what is wrong with the line."""
    if any(ord(c) < 32 and c != "\t" for c in text):
        raise ValueError("a control character")
    if text.startswith("@"):
        when, command = [*text.split(None, 1), ""][:2]
        if when == "@reboot":
            raise ValueError("@reboot cannot be used here: the cron is not bound to one machine and sees none boot")
    else:
        parts = text.split(None, 5)
        when, command = " ".join(parts[:5]), parts[5] if len(parts) > 5 else ""
    check(when)
    command, *given = (part.replace("\\%", "%") for part in re.split(r"(?<!\\)%", command.strip()))
    if not command.strip():
        raise ValueError("no command after the time")
    return when, command.strip(), "\n".join(given) + "\n" if given else ""


def _zone(name: str) -> str:
    from zoneinfo import ZoneInfo

    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f'unknown time zone {name!r}; such as "Europe/Berlin"') from None
    return name


def _line_name(when: str, command: str, taken: set[str]) -> str:
    """Return its program and a short digest of its time and command; the name is added to ``taken``."""
    program = re.sub(r"[^A-Za-z0-9_-]+", "-", command.split()[0].rpartition("/")[2]).strip("-") or "line"
    digest = sha256(f"{when}\0{command}".encode()).hexdigest()[:6]
    first = name = f"{program[:40]}-{digest}"
    again = 1
    while name in taken:
        again += 1
        name = f"{first}-{again}"
    taken.add(name)
    return name
