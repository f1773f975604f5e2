"""The ``crontab`` file: five fields or a nickname, then a command for /bin/sh; ``NAME=value`` lines set variables. Pure.

As in crontab(5), ``%`` ends the command and the rest is its standard input (``\\%`` is a plain one), and ``CRON_TZ``
sets the time zone of the lines below it. A line that cannot be read is told and the others run all the same.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from hashlib import sha256
from zoneinfo import ZoneInfo

from ftsupervise.crontab.schedule import check

_VARIABLE = re.compile(r"([A-Za-z_][A-Za-z0-9_]*)\s*=\s*(.*)")
_QUOTED = re.compile(r"""(["'])(.*)\1""")


@dataclass(frozen=True)
class Line:
    """One line that runs something."""

    number: int
    name: str  # made from the command, so that it stays when other lines come and go
    when: str
    command: str
    stdin: str = ""
    zone: str = ""  # CRON_TZ, where one is set
    env: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Table:
    lines: tuple[Line, ...] = ()
    problems: tuple[tuple[int, str], ...] = ()  # (line number, one sentence)


def read_table(text: str) -> Table:
    """All lines of a crontab file. Never raises: what is wrong with a line is in ``problems``."""
    lines: list[Line] = []
    problems: list[tuple[int, str]] = []
    env: dict[str, str] = {}
    zone = ""
    for number, raw in enumerate(text.splitlines(), 1):
        stripped = raw.strip()
        if not stripped or stripped.startswith("#"):
            continue
        assigned = _VARIABLE.fullmatch(stripped)
        try:
            if assigned:
                value = _unquoted(assigned[2])
                if assigned[1] == "CRON_TZ":
                    zone = _zone(value)
                else:
                    env = {**env, assigned[1]: value}
                continue
            lines.append(_line(number, stripped, zone, env))
        except ValueError as error:
            problems.append((number, str(error)))
    return Table(_named(lines), tuple(problems))


def _line(number: int, text: str, zone: str, env: dict[str, str]) -> Line:
    if any(ord(c) < 32 and c != "\t" for c in text):
        raise ValueError("a control character")
    if text.startswith("@"):
        when, command = [*text.split(None, 1), ""][:2]
        if when == "@reboot":
            raise ValueError("@reboot has no meaning here: no machine is ours to see booting")
    else:
        parts = text.split(None, 5)
        when, command = " ".join(parts[:5]), parts[5] if len(parts) > 5 else ""
    check(when)
    command, stdin = _percent(command.strip())
    if not command:
        raise ValueError("no command after the time")
    return Line(number, "", when, command, stdin, zone, env)


def _percent(text: str) -> tuple[str, str]:
    """Command and standard input, at crontab(5)'s first bare ``%``."""
    parts = re.split(r"(?<!\\)%", text)
    words = [part.replace("\\%", "%") for part in parts]
    return words[0].strip(), "\n".join(words[1:]) + "\n" if len(words) > 1 else ""


def _unquoted(text: str) -> str:
    match = _QUOTED.fullmatch(text.strip())
    return match[2] if match else text.strip()


def _zone(name: str) -> str:
    try:
        ZoneInfo(name)
    except (KeyError, ValueError, OSError):
        raise ValueError(f'unknown time zone {name!r}; such as "Europe/Berlin"') from None
    return name


def _named(lines: list[Line]) -> tuple[Line, ...]:
    """Each line with a name: its program, and some digits of what it runs and when."""
    out: list[Line] = []
    taken: set[str] = set()
    for line in lines:
        words = line.command.split()
        program = re.sub(r"[^A-Za-z0-9_-]+", "-", words[0].rpartition("/")[2]).strip("-") or "line"
        digest = sha256(f"{line.when}\0{line.command}".encode()).hexdigest()[:6]
        name, again = f"{program[:40]}-{digest}", 1
        while name in taken:
            again += 1
            name = f"{program[:40]}-{digest}-{again}"
        taken.add(name)
        out.append(Line(line.number, name, line.when, line.command, line.stdin, line.zone, line.env))
    return tuple(out)
