"""All runs as a table: aligned, as wide as the terminal, with what matters most where there is little room.

``cells`` makes the texts, for ``status`` and for ``status --watch``. Piped, the table has every column and cuts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.printable import printable
from ftsupervise.units import show_duration

if TYPE_CHECKING:
    from ftsupervise.report.row import RunRow

COLOURS = {
    "RUNNING": "green",
    "FINISHED": "green",
    "GONE": "red",
    "UNKNOWN": "yellow",
    "STOPPED": "yellow",
    "STOPPING": "yellow",
}
_SLOW = 0.8  # of the usual rate
_NAME = 24  # characters at most on a terminal
_HERE = " (here)"
_LEAST_NOTE = 60
Line = list[tuple[str, str]]  # parts with their colours


class Cell(NamedTuple):
    text: str
    colour: str = ""


class Column(NamedTuple):
    title: str
    order: int  # the higher ones go first where there is no room
    right: bool = False


COLUMNS = (
    Column("RUN", 0),
    Column("STATUS", 0),
    Column("STEP", 1, True),
    Column("RATE", 2, True),
    Column("USUAL", 5, True),
    Column("DONE IN", 4, True),
    Column("LOSS", 6, True),
    Column("SAVED", 3, True),
    Column("RESTARTS", 7, True),
    Column("ALERTS", 1, True),
    Column("LEFT", 8, True),
    Column("WATCH", 9, True),
)
NOTE = "NOTE"


def cells(row: RunRow, now: datetime) -> tuple[Cell, ...]:
    """One for each of ``COLUMNS``, and the note."""
    late = row.rate is not None and row.usual is not None and row.rate < _SLOW * row.usual
    usual = f"{100 * row.rate / row.usual:.0f} %" if row.rate is not None and row.usual else ""
    step = "" if row.step is None else f"{row.step:,}"
    if row.step is not None and row.last_step:
        step += f" {100 * row.step / row.last_step:.0f} %"
    left = "" if row.members_left is None else str(row.members_left)
    return (
        Cell(printable(row.name) + (_HERE if row.here else "")),
        Cell(row.verdict, COLOURS.get(row.verdict, "cyan")),
        Cell(step),
        Cell(pace(row.rate), "yellow" if late else ""),
        Cell(usual, "yellow" if late else ""),
        Cell(_until(row.done_at, now)),
        Cell("" if row.loss is None else f"{row.loss:.4g}"),
        Cell(ago(row.saved_at, now)),
        Cell(str(row.restarts) if row.restarts else ""),
        Cell(str(row.firing) if row.firing else "", "red"),
        Cell(left, "yellow" if left == "0" and row.verdict == "RUNNING" else ""),
        _watch(row, now),
        _note(row, now),
    )


def pace(rate: float | None) -> str:
    """Steps a second, or where they are slow seconds a step."""
    if rate is None:
        return ""
    if rate <= 0:
        return "0/s"
    return f"{rate:.3g}/s" if rate >= 0.5 else f"{1 / rate:.3g} s"


def ago(at: datetime | None, now: datetime) -> str:
    return "" if at is None else f"{show_duration(max(0.0, round((now - at).total_seconds())))}"


def _until(at: datetime | None, now: datetime) -> str:
    return "" if at is None or at <= now else show_duration(round((at - now).total_seconds()))


def _watch(row: RunRow, now: datetime) -> Cell:
    if row.watch_late:
        return Cell("LATE", "red")
    if row.watched_at is None:
        return Cell("")
    following = _until(row.watched_next, now)
    return Cell(f"{ago(row.watched_at, now)}{f'/{following}' if following else ''}")


def _note(row: RunRow, now: datetime) -> Cell:
    """What a person has to know besides: why it does not run, else the worst alert, else the forecast of its disk."""
    if row.verdict == "UNKNOWN":
        seen = f"; last seen {ago(row.seen_at, now)} ago" if row.seen_at is not None else ""
        return Cell(printable(f"{row.why}{seen}"), "yellow")
    if row.verdict not in ("RUNNING", "FINISHED", "NEW") and row.why:
        return Cell(printable(row.why))
    if row.alerts:
        return Cell(printable(f"{row.alerts[0].watchdog}: {row.alerts[0].summary}"), "red")
    if row.watch_late:
        return Cell(f"no tick of the watch for {ago(row.watched_at, now) or 'long'}", "red")
    if row.groups_away:
        return Cell(printable(row.groups_away), "yellow")
    if row.verdict == "RUNNING" and row.phase and row.phase not in ("train", "finished"):
        return Cell(f"phase {printable(row.phase)}{f'; disk {row.disk}' if row.disk else ''}")
    return Cell(printable(f"disk {row.disk}") if row.disk else "")


def table(rows: Sequence[RunRow], now: datetime, width: int) -> list[str]:
    """Lines of at most ``width`` columns; 0: as wide as need be."""
    return [
        "".join(part if not colour else click.style(part, fg=colour) for part, colour in line).rstrip()
        for lines in layout(rows, now, width)
        for line in lines
    ]


def layout(rows: Sequence[RunRow], now: datetime, width: int) -> list[list[Line]]:
    """The lines of the head, then those of each run: a note that finds no room beside its run stands below it."""
    texts = [cells(row, now) for row in rows]
    if width:
        texts = [(Cell(_named(one[0].text), one[0].colour), *one[1:]) for one in texts]
    shown = [index for index in range(len(COLUMNS)) if any(one[index].text for one in texts)]
    widths = {index: max(len(COLUMNS[index].title), *(len(one[index].text) for one in texts)) for index in shown}
    longest = max((len(one[-1].text) for one in texts), default=0)
    while width and _taken(widths) > width and len(widths) > 2:
        del widths[max(widths, key=lambda index: COLUMNS[index].order)]
    room = width - _taken(widths) if width else longest
    beside = room >= min(longest, _LEAST_NOTE)
    head = [(_fit(COLUMNS[index].title, size, right=COLUMNS[index].right), "") for index, size in widths.items()]
    found: list[list[Line]] = [[[*head, (NOTE, "")] if longest and beside else head]]
    for one in texts:
        mine = ((one[index], size, COLUMNS[index].right) for index, size in widths.items())
        line: Line = [(_fit(cell.text, size, right=right), cell.colour) for cell, size, right in mine]
        note = one[-1]
        if beside:
            found.append([[*line, (_cut(note.text, room), note.colour)]])
        else:
            below: list[Line] = [[("    " + _cut(note.text, width - 4), note.colour)]] if note.text else []
            found.append([line, *below])
    return found


def _named(name: str) -> str:
    if not name.endswith(_HERE):
        return _cut(name, _NAME)
    return _cut(name.removesuffix(_HERE), _NAME - len(_HERE)) + _HERE


def _taken(widths: dict[int, int]) -> int:
    return sum(size + 2 for size in widths.values())


def _fit(text: str, size: int, *, right: bool) -> str:
    return (text.rjust(size) if right else text.ljust(size)) + "  "


def _cut(text: str, size: int) -> str:
    return text if len(text) <= size else text[: max(0, size - 1)] + "…"
