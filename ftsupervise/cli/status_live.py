"""``ftsupervise status --watch`` draws the table again and again, and shows one run or its log at a key.

It stands alone because nothing of it is loaded without ``--watch``.

Each look is made by a process of its own, ``ftsupervise status --json``, which answers in bounded time: whatever hangs, the
keys work. Between two looks this process sleeps.
"""

from __future__ import annotations

import json
import os
import re
import resource
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any, NamedTuple

import click

from ftsupervise.cli.output import may_colour, wrapped
from ftsupervise.cli.status_rows import Line, layout
from ftsupervise.host import bounded, processes
from ftsupervise.host.ready import readable
from ftsupervise.printable import printable, printable_lines
from ftsupervise.report.row import RunRow
from ftsupervise.rundir.records import decode, parse_object

_KEY = re.compile(r"\x1b[\[O][A-D]|[\s\S]")
_SHARE = 120  # a look that takes T seconds of CPU is made every 120 T at most
_WITHIN = 20.0  # seconds for a look; it ends after fifteen by itself
_UP, _DOWN, _ENTER, _BACK = (
    ("\x1b[A", "k", "\x1bOA"),
    ("\x1b[B", "j", "\x1bOB"),
    ("\r", "\n"),
    ("\x1b", "\x1b[D", "\x7f"),
)


class LastLook(NamedTuple):
    """The result of one look. ``trouble``: why there is none; the rows are the last ones then."""

    at: float  # monotonic
    rows: tuple[RunRow, ...] = ()
    detail: tuple[str, ...] = ()
    trouble: str = ""


class Screen(NamedTuple):
    """The state of the screen. It is replaced, never changed."""

    chosen: int = 0  # row
    one: str = ""  # the directory of the run that is shown alone; "": the table

    def moved(self, by: int, rows: int) -> Screen:
        return self._replace(chosen=max(0, min(rows - 1, self.chosen + by)))


def show(words: Sequence[str], every: float) -> None:
    """Show ``status WORDS`` until q or Ctrl-C."""
    if not (sys.stdin.isatty() and sys.stdout.isatty()):
        _print_for_ever(words, every)
        return
    _Live(words, every).run()


def _print_for_ever(words: Sequence[str], every: float) -> None:
    """Print, where there is no terminal, the lines of ``status`` with the time, again and again."""
    while True:
        done = _ask(words)
        click.echo(f"{datetime.now(timezone.utc):%Y-%m-%dT%H:%M:%SZ}\n{printable_lines(done.stdout or done.stderr)}")
        sys.stdout.flush()
        time.sleep(every)


def _ask(words: Sequence[str], columns: int = 0) -> bounded.CompletedCommand:
    env = {**os.environ, **({"COLUMNS": str(columns)} if columns else {})}
    return bounded.run(processes.own_command("status", *words), timeout=_WITHIN, env=env)


def _cpu() -> float:
    """Return the seconds of CPU that the looks have used so far."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def read_rows(text: str) -> tuple[RunRow, ...]:
    """Return the rows in what ``status --json`` has printed. Raises ValueError."""
    page = parse_object(text.encode())
    raw = page.get("runs", [page])
    rows = [decode(RunRow, one, lenient=True) for one in raw] if isinstance(raw, list) else []
    return tuple(row._replace(verdict=row.verdict.upper()) for row in rows)


class _Live:
    def __init__(self, words: Sequence[str], every: float) -> None:
        self._words, self._every = tuple(words), every
        self._screen, self._look = Screen(), LastLook(time.monotonic(), trouble="looking …")
        self._due, self._busy = 0.0, False
        self._read, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)

    def run(self) -> None:
        from rich.console import Console
        from rich.live import Live

        # past the stream that lets no escape sequence through: the texts are made printable here
        screen = os.fdopen(os.dup(1), "w", encoding="utf-8", errors="replace")
        console = Console(file=screen, no_color=not may_colour(), highlight=False, markup=False)
        while True:
            with _raw_keys(), Live(console=console, screen=True, auto_refresh=False) as live:
                log_of = self._until_a_log_is_wanted(console, live)
            if log_of is None:
                return
            try:
                subprocess.run(processes.own_command("logs", "--follow", log_of), check=False)
            except KeyboardInterrupt:
                continue

    def _until_a_log_is_wanted(self, console: Any, live: Any) -> str | None:
        """Return the directory of the run whose log is wanted; None when the person leaves."""
        while True:
            now = time.monotonic()
            if now >= self._due and not self._busy:
                self._due, self._busy = now + self._every, True
                threading.Thread(
                    target=self._look_again, args=(self._screen.one, console.width - 1), daemon=True
                ).start()
            live.update(self._drawing(console), refresh=True)
            ready = readable((sys.stdin, self._read), None if self._busy else max(0.0, self._due - now))
            if self._read in ready:
                os.read(self._read, 4096)
                self._busy = False
            if sys.stdin not in ready:
                continue
            typed = os.read(sys.stdin.fileno(), 64).decode("utf-8", "replace")
            for key in _KEY.findall(typed) or [""]:
                if key in ("q", "Q", "\x03", "\x04", ""):
                    return None
                if key == "l" and (log_of := self._directory()):
                    return log_of
                self._on_key(key)

    def _on_key(self, key: str) -> None:
        screen, rows = self._screen, len(self._look.rows)
        if key in _UP + _DOWN and not screen.one:
            self._screen = screen.moved(-1 if key in _UP else 1, rows)
        elif key in _ENTER and not screen.one and (directory := self._directory()):
            self._screen = screen._replace(one=directory)
            self._look, self._due = self._look._replace(detail=("looking …",)), 0.0
        elif key in _BACK + _ENTER and screen.one:
            self._screen, self._due = screen._replace(one=""), 0.0
        elif key == "r":
            self._due = 0.0

    def _directory(self) -> str:
        if self._screen.one:
            return self._screen.one
        rows = self._look.rows
        return rows[min(self._screen.chosen, len(rows) - 1)].directory if rows else ""

    def _look_again(self, one: str, columns: int) -> None:
        """Look in a thread, so that the keys go on working. A costly look, as at a thousand runs, is made less often."""
        before, at = _cpu(), time.monotonic()
        self._look_once(one, columns)
        self._due = max(self._due, at + _SHARE * (_cpu() - before))
        os.write(self._write, b"\0")

    def _look_once(self, one: str, columns: int) -> None:
        try:
            done = _ask((one,), columns) if one else _ask((*self._words, "--json"))
            said = (done.stderr or done.stdout).strip().splitlines()
            if one:
                self._look = LastLook(
                    time.monotonic(), self._look.rows, tuple((done.stdout or done.stderr).splitlines())
                )
            elif done.code:
                why = said[0] if said else "it gave no answer"
                self._look = self._look._replace(trouble=why, at=time.monotonic())
            else:
                self._look = LastLook(time.monotonic(), read_rows(done.stdout))
        except (OSError, ValueError, json.JSONDecodeError) as error:
            self._look = self._look._replace(trouble=str(error), at=time.monotonic())

    def _drawing(self, console: Any) -> Any:
        from rich.text import Text

        look, screen = self._look, self._screen
        text = Text(no_wrap=True, overflow="ellipsis")
        height = max(5, console.height)
        if screen.one:
            lines = [piece for line in look.detail for piece in wrapped(printable(line), console.width - 1).split("\n")]
            for line in lines[: height - 2]:
                text.append(f"{line}\n")
            text.append("Enter back   l log   r look again   q leave", style="dim")
            return text
        groups = layout(look.rows, datetime.now(timezone.utc), console.width - 1) if look.rows else [[]]
        room, first = height - 4 - len(groups[0]), screen.chosen
        while (
            first > 0 and sum(map(len, groups[first : screen.chosen + 2])) <= room
        ):  # the chosen one is the last that fits
            first -= 1
        self._append(text, groups[0], "bold")
        for index, below in enumerate(groups[1:]):
            if index >= first and room >= len(below):
                room -= len(below)
                self._append(text, below, "reverse" if index == screen.chosen else "")
        if look.trouble:
            text.append(f"{printable(look.trouble)}\n", style="yellow")
        seen = f"{datetime.now():%H:%M:%S}" if not self._busy else "looking …"
        text.append(f"{seen}   up/down   Enter one run   l its log   r look again   q leave", style="dim")
        return text

    @staticmethod
    def _append(text: Any, lines: Sequence[Line], style: str) -> None:
        for line in lines:
            for part, colour in line:
                text.append(part, style=f"{colour} {style}".strip())
            text.append("\n")


@contextmanager
def _raw_keys() -> Iterator[None]:
    """Let keys come at once, and do not show them."""
    import termios
    import tty

    before = termios.tcgetattr(sys.stdin)
    tty.setcbreak(sys.stdin)
    try:
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
