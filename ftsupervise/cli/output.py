"""The output of the command line: prose wraps by word on a terminal, a command to type stays whole; JSON has one form.

In a file or a pipe each message stays one line, so that ``grep`` finds it.
"""

from __future__ import annotations

import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO, cast

import click

from ftsupervise.printable import printable_lines

if TYPE_CHECKING:
    from datetime import datetime

    from rich.console import Console

RUN = "a directory, an ftsupervise.yaml, or a name"  # the ways to name a run, wherever one is named
JSON = click.option("--json", "as_json", is_flag=True, help="As one JSON object, for programs.")
_terminals: dict[int, int] = {}  # file descriptor -> columns, 0 for none
_for_programs = False
# Patterns are compiled when they are first used: to compile those of terminals costs a start as much as reading a run.
_ANSI = r"\033\[[0-9;]*m"
_COMMAND = (
    r"(?:(?<=: )|(?<=  )|(?<=; )|^)"
    r"(?=(?:ftsupervise|touch|tail|rm|ls|cat|chmod|chgrp|scancel|scontrol|squeue|sinfo|export|srun) )"
)
_LABEL = r"\s*\S.*?\s{2,}(?=\S)"


def say(text: str = "", *, err: bool = False) -> None:
    """Print ``text``; on a terminal its lines are wrapped to the width there. In ``for_programs`` nothing but errors."""
    if _for_programs and not err:
        return
    width = _terminals.get(2 if err else 1, 0)
    click.echo("\n".join(wrapped(line, width) for line in text.split("\n")) if width else text, err=err)


@contextmanager
def for_programs(as_json: bool) -> Iterator[None]:
    """Leave out what ``say`` would tell a person, as long as a command works whose answer is one JSON object."""
    global _for_programs
    before, _for_programs = _for_programs, as_json
    try:
        yield
    finally:
        _for_programs = before


def for_a_program() -> bool:
    """Return whether the standard output is for a program now."""
    return _for_programs


def say_json(record: object, *, one_line: bool = False) -> None:
    """Print ``record``, made by ``plain``, in the one form that every ``--json`` has."""
    import json

    click.echo(json.dumps(record, ensure_ascii=False, indent=None if one_line else 1))


def answer(**record: object) -> None:
    """Print the JSON object with which a command that acts answers a program."""
    say_json({"schema_version": 1, **{name: plain(value) for name, value in record.items()}})


def asks_for_json(words: Sequence[str]) -> bool:
    """Return whether ``words`` ask for JSON. What follows a ``--``, or the options of ``run``, belongs to another command."""
    own = words[: words.index("--")] if "--" in words else words
    named = [word for word in own if not word.startswith("-")][:2]
    others = named[:1] == ["run"] or named in (["groups", "run"], ["groups", "member"], ["sandbox", "exec"])
    return "--json" in own and not others


def error_line(message: str, hint: str, code: int) -> str:
    """Return the line by which a program that asked for JSON hears of an error."""
    import json

    error = {"message": message, "hint": hint or None, "exit_code": code}
    return json.dumps({"schema_version": 1, "error": error}, ensure_ascii=False)


def end_of(duration: str, now: datetime, hint: str) -> datetime:
    """Return when the time that ``--for`` gives is over. Raises UsageError."""
    from ftsupervise.errors import UsageError
    from ftsupervise.units import parse_duration

    try:
        end = now + parse_duration(duration)
    except (ValueError, OverflowError) as error:
        raise UsageError(f"--for: {error}") from None
    if end <= now:
        raise UsageError(f"--for: {duration} is not a duration", hint=hint)
    return end


def wrapped(line: str, width: int) -> str:
    """Return ``line`` in lines of at most ``width`` columns, broken between words.

    A command to type, and a word that is longer, stay whole.
    """
    if _length(line) <= width:
        return line
    label = re.match(_LABEL, line)
    left = len(line) - len(line.lstrip())
    indent = _length(label[0]) if label and _length(label[0]) <= width // 3 else min(left + 2, width // 3)
    at = next((match.start() for match in re.finditer(_COMMAND, line)), len(line))
    pieces = re.findall(r"\s*\S+", line[:at])
    if at < len(line):
        pieces.append(re.search(r"\s*$", line[:at])[0] + line[at:])  # type: ignore[index]
    rows = [""]
    for piece in pieces:
        if rows[-1].strip() and _length(rows[-1] + piece) > width:
            rows.append(" " * indent + piece.lstrip())
        else:
            rows[-1] += piece
    return "\n".join(row.rstrip() for row in rows)


def _length(text: str) -> int:
    return len(re.sub(_ANSI, "", text))


def look_at_terminals() -> bool:
    """Remember which outputs are terminals and how wide they are, for a child that writes into pipes; return whether
    stdout is one.
    """
    for fd in (1, 2):
        try:
            columns = int(os.environ.get("COLUMNS", 0)) or os.get_terminal_size(fd).columns or 80
            _terminals[fd] = max(40, columns) if os.isatty(fd) else 0
        except (ValueError, OSError):
            _terminals[fd] = 80 if os.isatty(fd) else 0
    return bool(_terminals[1])


@contextmanager
def progress(word: str, total: int) -> Iterator[Callable[[str], object]]:
    """Show on a terminal how far long work is, on the standard error: "3 of 12: name". Call what it yields with each name."""
    shown = bool(_terminals.get(2)) and os.environ.get("TERM") != "dumb" and total > 1
    done = 0

    def step(name: str) -> None:
        nonlocal done
        done += 1
        if shown:
            line = printable_lines(f"{word}: {min(done, total)} of {total}: {name}").replace("\n", " ")
            os.write(2, f"\r\033[K{line[: _terminals[2] - 1]}".encode())

    try:
        yield step
    finally:
        if shown and done:
            os.write(2, b"\r\033[K")


def bar_console() -> Console:
    """Return where a bar is drawn: the standard error itself, because ``sys.stderr`` makes the codes that move it printable."""
    from rich.console import Console

    raw = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - nothing is closed
    return Console(file=raw, force_terminal=True, width=columns(err=True) or None)


def columns(*, err: bool = False) -> int:
    """Return the width of the terminal that stdout (or stderr) goes to; 0: it goes elsewhere."""
    return _terminals.get(2 if err else 1, 0)


def terminal(*, err: bool = False) -> bool:
    """Return whether the output goes to a terminal, also from a child that writes into a pipe."""
    return bool(_terminals.get(2 if err else 1, 0))


def may_colour() -> bool:
    """Return whether colours may be used: not where the terminal cannot show them, nor where the person wants none."""
    return os.environ.get("TERM") != "dumb" and not os.environ.get("NO_COLOR")


def plain(value: object) -> Any:
    """Return a value as every ``--json`` prints it: words of ours in small letters, Slurm's states as Slurm writes
    them, times in ISO 8601, durations in seconds.
    """
    import dataclasses
    from collections.abc import Mapping
    from datetime import datetime, timedelta
    from enum import Enum

    if isinstance(value, Enum):
        return value.word if hasattr(value, "word") else value.value
    if isinstance(value, (str, int, float, bool, type(None))):
        return value
    if isinstance(value, os.PathLike):
        return str(value)
    if hasattr(value, "_asdict"):
        return plain(value._asdict())
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (tuple, list, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, datetime):
        return value.isoformat()
    if isinstance(value, timedelta):
        return value.total_seconds()
    return str(value.root) if hasattr(value, "root") else str(value)


# Long output on a terminal goes through a pager, as with git: $PAGER, else less; ``ftsupervise --no-pager VERB`` goes without.

_PAGED = frozenset(
    {
        *("alerts list", "checkpoints list", "config schema", "config show", "cron list", "help", "list", "logs"),
        *("nodes list", "notify preview"),
    }
)
_LESS = "/usr/bin/less"  # looked for nowhere else: a folder in the PATH may hang
_OPTIONS = "FRX"  # as git has them: what fits the screen is printed and stays; colours are shown
_LEFT = 141  # the code of a command whose reader has gone


def show_through_a_pager(command: str, args: Sequence[str]) -> None:
    """Go on in a child whose output a pager shows, where ``command`` prints what may be long and the standard output is a
    terminal. Returns in the child, or in this process where there is none. This process then waits for the person."""
    import signal

    pager = _pager()
    if not pager or not columns() or command not in _PAGED or {"-f", "--follow", "-h", "--help"} & set(args):
        return
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        os.dup2(writer, 1)
        os.close(writer)
        os.close(reader)
        os.environ.setdefault("COLUMNS", str(columns()))
        return
    os.close(writer)
    asked = {**os.environ, "LESS": os.environ.get("LESS", _OPTIONS)}
    shown = os.posix_spawn("/bin/sh", ["sh", "-c", pager], asked, file_actions=[(os.POSIX_SPAWN_DUP2, reader, 0)])
    os.close(reader)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the command ends by it, and the pager stays until it is left
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    os.waitpid(shown, 0)
    os._exit(0 if code == _LEFT else code if code >= 0 else 128 - code)


def _pager() -> str:
    """Return the command of the pager; "" for none."""
    named = os.environ.get("PAGER")
    if named is not None:
        return "" if named.strip() in ("", "cat") else named
    may = os.environ.get("TERM", "dumb") != "dumb" and os.access(_LESS, os.X_OK)
    return _LESS if may else ""


# The one place through which all words of a command go out: nothing but printable text, line feeds, tabs and our
# colours. Foreign texts are made harmless where they enter (``reading.as_text``); this catches those that came in by
# another way, such as a file's name in an error of the operating system.

_COLOUR = r"(\x1b\[[0-9;]{0,12}m)"  # what click.style makes


class PrintableStream:
    """A text stream that cleans what is written to it. In all other ways it is the stream itself."""

    def __init__(self, stream: TextIO, colours: bool) -> None:
        self._stream, self._colours = stream, colours

    def write(self, text: str) -> int:
        if not (text.isascii() and text.isprintable()):
            coloured = re.split(_COLOUR, text) if self._colours else [text]
            text = "".join(part if index % 2 else printable_lines(part) for index, part in enumerate(coloured))
        return self._stream.write(text)

    def writelines(self, lines: list[str]) -> None:
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextmanager
def printable_streams(*, colours: bool) -> Iterator[None]:
    """Both streams of this process, for as long as a command runs. A stream that was closed is left alone."""
    before = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (stream and cast("TextIO", PrintableStream(stream, colours)) for stream in before)
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before
