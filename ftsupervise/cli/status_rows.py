"""All runs as a table: aligned, as wide as the terminal, with what matters most where there is little room.

``cells`` makes the texts, for ``status`` and for ``status --watch``. In a pipe the table has every column and cuts nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

import click

from ftsupervise.cli.status_advice import never_starts
from ftsupervise.printable import printable
from ftsupervise.report.row import FINE, mostly_waits, need_of, reason_of
from ftsupervise.units import count, show_duration

if TYPE_CHECKING:
    from ftsupervise.report.row import RunRow

COLOURS = {
    "RUNNING": "green",
    "HUNG": "red",
    "STALLED": "red",
    "SILENT": "red",
    "SLOW": "yellow",
    "FINISHED": "green",
    "GONE": "red",
    "UNKNOWN": "yellow",
    "STOPPED": "yellow",
    "STOPPING": "yellow",
}
_SLOW = 80  # % of the usual rate
_NAME = 24  # characters at most on a terminal
_HERE = " (here)"
_LEAST_NOTE = 60
_MINUTES = 600  # seconds from which no seconds are told
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
    Column("STEPS/H", 2, True),
    Column("% OF USUAL", 5, True),
    Column("DONE IN", 4, True),
    Column("LOSS", 6, True),
    Column("LAST SAVE", 3, True),
    Column("RESTARTS", 7, True),
    Column("ALERTS", 1, True),
    Column("JOBS LEFT", 8, True),
    Column("WATCHED", 9, True),
)
NOTE = "NOTE"


def cells(row: RunRow, now: datetime) -> tuple[Cell, ...]:
    """Return one cell for each of ``COLUMNS``, and the note."""
    share = round(100 * row.rate / row.usual) if row.rate is not None and row.usual else None
    slow = "yellow" if share is not None and share < _SLOW else ""
    step = "" if row.step is None else f"{row.step:,}"
    if row.step is not None and row.last_step:
        step += f" {100 * row.step / row.last_step:.0f} %"
    left = "" if row.members_left is None else str(row.members_left)
    return (
        Cell(printable(row.name) + (_HERE if row.here else "")),
        Cell(row.verdict, COLOURS.get(row.verdict, "cyan")),
        Cell(step),
        Cell(pace(row.rate), slow),
        Cell("" if share is None else str(share), slow),
        Cell(_until(row.done_at, now)),
        Cell("" if row.loss is None else f"{row.loss:.4g}"),
        Cell(ago(row.saved_at, now)),
        Cell(str(row.restarts) if row.restarts else ""),
        Cell(str(row.firing) if row.firing else "", "red"),
        Cell(left, "yellow" if left == "0" and row.verdict in ("RUNNING", "SLOW", "STALLED", "SILENT", "HUNG") else ""),
        _watch(row, now),
        _note(row, now),
    )


def pace(rate: float | None) -> str:
    """Return steps an hour, with three digits at least."""
    if rate is None:
        return ""
    hourly = 3600 * max(0.0, rate)
    return f"{hourly:,.0f}" if hourly >= 100 else f"{hourly:.3g}"


def ago(at: datetime | None, now: datetime) -> str:
    """Return the time since then; from ten minutes on in whole minutes."""
    if at is None:
        return ""
    seconds = max(0.0, round((now - at).total_seconds()))
    return show_duration(seconds if seconds < _MINUTES else 60 * round(seconds / 60))


def _until(at: datetime | None, now: datetime) -> str:
    return "" if at is None or at <= now else show_duration(round((at - now).total_seconds()))


def _watch(row: RunRow, now: datetime) -> Cell:
    if row.watch_late:
        return Cell("LATE", "red")
    if row.watched_at is None and row.full:
        return Cell("")  # its pages cannot be written
    if row.watched_at is None:
        alone = row.verdict not in ("FINISHED", "NEW", "UNKNOWN", "STOPPED") or row.braked
        return Cell("by nobody" if alone else "", "yellow")
    following = _until(row.watched_next, now)
    return Cell(f"{ago(row.watched_at, now)} ago{f', next {following}' if following else ''}")


def _note(row: RunRow, now: datetime) -> Cell:
    """Say what matters most besides: why it does not run, else the worst alert, else the forecast of its disk."""
    if row.verdict == "UNKNOWN":
        seen = f"; last seen {ago(row.seen_at, now)} ago" if row.seen_at is not None else ""
        return Cell(printable(f"{row.why}{seen}"), "yellow")
    if row.waits_since is not None:
        return _waits(row, now)
    if row.verdict == "SLOW" and row.rate is not None and row.usual:
        return Cell(_slowness(row, now), "yellow")
    if row.verdict not in ("RUNNING", "FINISHED", "NEW") and row.why:
        return Cell(
            printable(reason_of(row)),
            COLOURS.get(row.verdict, "") if row.verdict in ("HUNG", "STALLED", "SILENT", "SLOW") else "",
        )
    if row.full:
        return Cell(printable(row.full), "red")
    if row.alerts:
        return Cell(printable(f"{row.alerts[0].watchdog}: {row.alerts[0].summary}"), "red")
    if row.loss_trouble:
        return Cell(printable(row.loss_trouble), "red")
    if row.verdict == "RUNNING" and row.ends_hang is not None:  # it makes no step, and is not yet judged
        return Cell(printable(row.why), "yellow")
    if row.watch_late:
        return Cell(f"no tick of the watch for {ago(row.watched_at, now) or 'long'}", "red")
    if row.groups_away:
        return Cell(printable(row.groups_away), "yellow")
    if row.verdict == "RUNNING" and row.phase and row.phase not in ("train", "finished"):
        return Cell(f"phase {printable(row.phase)}{f'; disk {row.disk}' if row.disk else ''}")
    return Cell(printable(f"disk {row.disk}") if row.disk else "")


def _slowness(row: RunRow, now: datetime) -> str:
    """Say it with the figure of the columns; ``why`` has that of the last hour."""
    if row.rate is None or not row.usual or row.rate >= _SLOW / 100 * row.usual:
        return printable(row.why)
    since = next((one.since for one in row.alerts if one.watchdog == "throughput"), None)
    lasting = f", slow for {ago(since, now)}" if since is not None else ""
    _, seen, age = row.why.partition("; seen ")
    return printable(f"at {100 * row.rate / row.usual:.0f} % of its usual speed{lasting}{seen}{age}")


def _waits(row: RunRow, now: datetime) -> Cell:
    if (never := never_starts(row.why)) is not None:
        return Cell(printable(f"it never starts by waiting: {never[0]} ({row.why})"), "red")
    much = mostly_waits(row)
    share = f"; {100 * row.queue_share:.0f} % of its time so far" if row.queue_share is not None and much else ""
    words = f"in the queue for {ago(row.waits_since, now)}{f' ({row.why})' if row.why else ''}{share}"
    return Cell(printable(words), "yellow" if much else "")


_LOOK = 5  # runs for which the lines below the table say what to type
_DO = {
    "HUNG": ("where, and how to end it", "status {run}"),
    "STALLED": ("what its job wrote last", "logs {run}"),
    "SILENT": ("what its job wrote last", "logs {run}"),
    "SLOW": ("since when, and on which nodes", "status {run}"),
    "GONE": ("what its last job wrote", "logs {run}"),
    "STOPPED": ("what its last job wrote", "logs {run}"),  # by a switch, or it left with 0
    "WAITING": ("where its time went", "status {run}"),
    "UNKNOWN": ("why it cannot be seen", "status {run}"),
}
_BRAKED = {"STOPPED": ("what failed", "diagnose {run}")}
_NO_LOG = {
    "GONE": ("what is known of its last job", "status {run}"),
    "STALLED": ("what it waits for", "status {run}"),
    "SILENT": ("since when", "status {run}"),
    "STOPPED": ("why", "status {run}"),
}


def advice(
    rows: Sequence[RunRow], width: int = 0, *, has_log: Callable[[RunRow], bool] = lambda row: True
) -> list[str]:
    """Return the lines below the table, which say what to type for the runs that need a look most. ``has_log``: does the
    output of this run go to a file?"""
    urgent = sorted((row for row in rows if need_of(row) < FINE or _stuck(row)), key=need_of)
    if not urgent:
        return []
    lines = []
    for row in urgent[:_LOOK]:
        failed = row.braked and not row.asks
        alerts = f"{count(row.firing, 'alert')}, and what to do", "alerts {run}"
        known = _NO_LOG if row.verdict in _NO_LOG and not has_log(row) else _BRAKED if failed else _DO
        what, typed = (("what to correct", "status {run}") if _stuck(row) else known.get(row.verdict)) or (
            alerts if row.firing else ("what is wrong", "status {run}")
        )
        lines.append((f"  ftsupervise {typed.format(run=_argument(row))}", f"{row.verdict}: {what}"))
        if row.braked and row.asks:
            lines.append((f"  ftsupervise clear --finished {_argument(row)}", "if it is finished"))
            lines.append((f"  ftsupervise clear --brake {_argument(row)}", "if it is not, and goes on"))
        elif row.braked:
            lines.append((f"  ftsupervise clear --brake {_argument(row)}", "to go on, once that is mended"))
    size = max(len(typed) for typed, _ in lines)
    more = len(urgent) - _LOOK
    head = "1 run needs a look:" if len(urgent) == 1 else f"{len(urgent)} runs need a look, these first:"
    text = [head if more > 0 or len(urgent) == 1 else f"{len(urgent)} runs need a look:"]
    text += [printable(f"{typed.ljust(size)}   {what}") for typed, what in lines]
    text += [f"  and {more} more: ftsupervise status NAME"] if more > 0 else []
    return ["", *(_cut(line, width) if width else line for line in text)]


def _stuck(row: RunRow) -> bool:
    return row.verdict == "WAITING" and never_starts(row.why) is not None


def _argument(row: RunRow) -> str:
    """Return the run as one types it: its name, or its directory where this account does not know the name."""
    text = row.directory if row.elsewhere else row.name
    if all(char.isascii() and (char.isalnum() or char in "-_./") for char in text) and not text.startswith("-"):
        return text
    import shlex

    return shlex.quote(text)


def table(rows: Sequence[RunRow], now: datetime, width: int) -> list[str]:
    """Return lines of at most ``width`` columns; 0: as wide as need be."""
    return [
        "".join(part if not colour else click.style(part, fg=colour) for part, colour in line).rstrip()
        for lines in layout(rows, now, width)
        for line in lines
    ]


def layout(rows: Sequence[RunRow], now: datetime, width: int) -> list[list[Line]]:
    """Return the lines of the head, then those of each run. A note that finds no room beside its run stands below it."""
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
