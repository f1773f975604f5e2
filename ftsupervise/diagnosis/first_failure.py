"""Reads the output of all ranks as one, and finds the failure that came first among thousands of lines about it.

A line is looked at closely only where it holds one of a few words. They are looked for in the distinct lines of a block without
their digits: the lines of a training differ in numbers, and so gigabytes are read nearly as fast as they are copied. What
several ranks say in the same words is one group. Of two causes the earlier one counts, by the times in the lines, and where
they have none by their order in the file. A follower is never the first failure while there is a cause.
"""

from __future__ import annotations

import os
import re
import signal
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from datetime import datetime, timezone
from functools import cache
from io import RawIOBase
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

from ftsupervise.diagnosis.frames import first_to_look_at
from ftsupervise.diagnosis.vocabulary import EXCEPTION, SIGNS, TRACEBACK, FailureClass, Role, Sign, sign_in
from ftsupervise.host.ownership import open_to_read
from ftsupervise.host.processes import die_with_parent
from ftsupervise.printable import OUR_LINE, SLURMS_LINE, printable
from ftsupervise.report.output import RANK_LABEL, rank_of

# Words of which nearly each message of a failure has one; lower case. A test holds that each sign of the table has one.
ANCHORS = tuple(
    word.encode()
    for word in (
        *(
            "traceback (",
            "error",
            "fail",
            "fault",
            "kill",
            "nan",
            "non-finite",
            "xid",
            "ecc",
            "out of memory",
            "no space",
        ),
        *(
            "quota",
            "by peer",
            "refused",
            "broken pipe",
            "aborted",
            "illegal",
            "fallen off",
            "not found",
            "no cuda",
            "signal",
        ),
        *(
            "zipfile",
            "watchdog",
            "acquire gil",
            "terminat",
            "mismatch",
            "due to",
            "no such",
            "remote process",
            "inconsistency",
        ),
    )
)
# Parts of the sentences themselves, of which a line must have one; they hold no digit.
_NEEDLES = (TRACEBACK.lower().encode(), *(needle.encode() for sign in SIGNS for needle in sign.needles))
_LOWER, _DIGITS = bytes(range(256)).lower(), b"0123456789"
CHUNK = 4 << 20  # bytes that are read at once
_LONGEST = 4096  # bytes of a line that are looked at
_FRAMES = 200  # lines of a traceback
_BEFORE = 4000  # bytes before a traceback
_TEXT = 300  # characters of a line that is shown
_IN_A_FILE = 2000  # lines of one file that are looked at closely; of more, the first and the last
_ALIKE = 20  # lines of a rank that say the same but for numbers, after which no further one is looked at
_GROUPS = 1000  # different failures
LARGE = 200 << 20  # bytes from which on several processes read
_ISO = re.compile(r"(\d{4})-(\d\d)-(\d\d)[T ](\d\d):(\d\d):(\d\d)(?:[.,](\d{1,6}))?(Z|[+-]\d\d:?\d\d)?")
_GLOG = re.compile(r"\[?[EIWF](\d\d)(\d\d) (\d\d):(\d\d):(\d\d)\.(\d{1,6})")
_OURS = re.compile(OUR_LINE)
_BETWEEN = re.compile(f"{OUR_LINE}|{SLURMS_LINE}")  # lines of others than the ranks, who write in the middle of theirs
VARIES = re.compile(r"0x[0-9a-f]+|\d+", re.I)
_FRAME = re.compile(r'^\s*File "([^"]+)", line (\d+), in (\S+)')


class LogFile(NamedTuple):
    """A part of a file that ranks write to. ``rank``: whose it is alone; ``end`` None: to its end."""

    path: Path
    rank: int | None = None
    node: str = ""
    begin: int = 0
    end: int | None = None


class LogEvent(NamedTuple):
    """A line that tells of a failure. ``at``: epoch seconds by the line, or one before it; None where none has a time."""

    kind: FailureClass
    role: Role
    rank: int | None
    node: str
    at: float | None
    path: str
    offset: int  # bytes
    text: str
    where: str = ""  # of a traceback: the innermost frame in the user's own files, "train.py:42 step"
    remedy: str = ""


class EventGroup(NamedTuple):
    """Lines that say the same. ``ranks``: those that are known, ascending."""

    first: LogEvent
    times: int
    ranks: tuple[int, ...]


class FirstFailure(NamedTuple):
    """The failures in the output. ``groups``: the causes first, by their times; ``unseen``: files that could not be read."""

    first: LogEvent | None
    groups: tuple[EventGroup, ...]
    unseen: tuple[str, ...] = ()
    read: int = 0  # bytes

    def read_anew(self, by: Callable[[LogEvent], LogEvent]) -> FirstFailure:
        """Return the same with each line as ``by`` takes it, in the light of what was not in the output."""
        return _sorted([one._replace(first=by(one.first)) for one in self.groups], self.unseen, self.read)


def first_failure(
    logs: Sequence[LogFile],
    *,
    year: int | None = None,
    processes: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> FirstFailure:
    """Return the failure that came first in ``logs``. ``year``: that of times without one (default: this year).
    ``processes``: how many read at once; 0: as many as there are processors, where it is worth it. ``progress`` is called now
    and then while it reads. Raises nothing for a file that cannot be read.
    """
    year = year or datetime.now(timezone.utc).year
    many = processes or min(4, os.cpu_count() or 1)
    if many > 1 and len(logs) > 1 and _size_of(logs) > LARGE:
        share = max(1, len(logs) // (many * 32))
        parts = [logs[at : at + share] for at in range(0, len(logs), share)]
        with ProcessPoolExecutor(many, get_context("fork"), die_with_parent(signal.SIGKILL)) as pool:
            found = []
            for one in pool.map(_read_some, parts, [year] * len(parts)):
                found.append(one)
                progress()
    else:
        found = [_read_some(logs, year, progress)]
    return _merged(found)


def _size_of(logs: Iterable[LogFile]) -> int:
    size = 0
    for one in logs:
        try:
            size += one.path.stat().st_size
        except OSError:
            continue
    return size


class _Groups:
    """Groups of lines that say the same, bounded."""

    def __init__(self) -> None:
        self._found: dict[tuple[FailureClass, Role, str], tuple[LogEvent, int, set[int]]] = {}

    def add(self, event: LogEvent, count: int = 1, ranks: Iterable[int] = ()) -> None:
        key = (event.kind, event.role, VARIES.sub("#", event.text))
        known = self._found.get(key)
        if known is None:
            if len(self._found) < _GROUPS:
                self._found[key] = event, count, {*ranks, *([event.rank] if event.rank is not None else [])}
            return
        first, counted, of = known
        of.update(ranks, [event.rank] if event.rank is not None else [])
        self._found[key] = event if _is_earlier(event, first) else first, counted + count, of

    def groups(self) -> list[EventGroup]:
        return [EventGroup(event, count, tuple(sorted(ranks))) for event, count, ranks in self._found.values()]


def _is_earlier(one: LogEvent, other: LogEvent) -> bool:
    if one.at is not None and other.at is not None and one.at != other.at:
        return one.at < other.at
    return one.path == other.path and one.offset < other.offset


def _read_some(logs: Sequence[LogFile], year: int, progress: Callable[[], object] = lambda: None) -> FirstFailure:
    groups, unseen, read = _Groups(), list[str](), 0
    for log in logs:
        try:
            with os.fdopen(open_to_read(log.path), "rb", buffering=0) as file:
                for event in events_in(_blocks(file, log, progress), log, year):
                    groups.add(event)
                read += file.tell() - log.begin
        except OSError as error:
            unseen.append(f"{log.path}: {error.strerror or error}")
    return FirstFailure(None, tuple(groups.groups()), tuple(unseen), read)


def _merged(found: Sequence[FirstFailure]) -> FirstFailure:
    groups = _Groups()
    for part in found:
        for one in part.groups:
            groups.add(one.first, one.times, one.ranks)
    unseen = tuple(why for part in found for why in part.unseen)
    return _sorted(groups.groups(), unseen, sum(part.read for part in found))


def _sorted(groups: Iterable[EventGroup], unseen: tuple[str, ...], read: int) -> FirstFailure:
    every = sorted(groups, key=lambda one: (one.first.role is Role.FOLLOWER, *_order(one.first)))
    first = every[0].first if every and every[0].first.role is Role.CAUSE else None
    return FirstFailure(first, tuple(every), unseen, read)


def _order(event: LogEvent) -> tuple[bool, float, int]:
    """Return a key that sorts the first failure first. A traceback says more than a line without a time."""
    return event.at is None, event.at or 0.0, event.offset


# ------------------------------------------------------------------------------------------------------------------ lines


class _Block(NamedTuple):
    data: bytes  # whole lines
    offset: int


def _blocks(file: RawIOBase, log: LogFile, progress: Callable[[], object]) -> Iterator[_Block]:
    """Yield the bytes of the part in blocks that end with a line, or in the middle of a very long one."""
    file.seek(log.begin)
    at, rest = log.begin, b""
    while True:
        want = CHUNK if log.end is None else min(CHUNK, log.end - at - len(rest))
        more = (file.read(want) or b"") if want > 0 else b""
        progress()
        data = rest + more
        if not more:
            if data:
                yield _Block(data, at)
            return
        cut = _cut(data)
        if cut:
            yield _Block(data[:cut], at)
        at, rest = at + cut, data[cut:]


def _cut(data: bytes) -> int:
    """Return where a block may end: behind a line, and not within the traceback that it ends with."""
    cut = data.rfind(b"\n") + 1
    begun = data.rfind(b"Traceback (most", max(0, cut - 64_000), cut)
    begun = data.rfind(b"\n", 0, max(0, begun - _BEFORE)) + 1 if begun > 0 else 0  # with lines that may have the time
    if begun > 0 and len(data) < 2 * CHUNK:
        return begun
    return cut or (len(data) if len(data) > CHUNK else 0)


def events_in(blocks: Iterable[_Block], log: LogFile, year: int) -> Iterator[LogEvent]:
    """Yield what the lines tell, in their order. Of a file with very many such lines only the first ones are looked at, and
    those near the end of a block."""
    looked = 0
    told: dict[tuple[bytes, bytes], tuple[int, list[LogEvent]]] = {}
    for data, offset in blocks:
        lines = _LinesOfRanks(data)
        for start, what in _candidates(data, lines):
            times, events = told.get(what, (0, [])) if what is not None else (0, [])
            if times >= _ALIKE:  # a rank that says so again and again
                yield from events
                continue
            if looked > _IN_A_FILE and start < len(data) - 256_000:
                continue
            looked += 1
            events = list(_event_at(data, start, offset, log, year, lines))
            if what is not None and (what in told or len(told) < _GROUPS):
                told[what] = times + 1, events
            yield from events


def _candidates(data: bytes, lines: _LinesOfRanks) -> Iterator[tuple[int, tuple[bytes, bytes] | None]]:
    """Yield where the lines begin that may be of the table, ascending; within a traceback only its own begin. With each comes
    what it says without its digits, and the label of its rank; None for a traceback."""
    shapes = data.translate(_LOWER, _DIGITS).split(b"\n")
    if len(data) > len(shapes) * _LONGEST:  # a very long line, of which no more than that is looked at
        shapes = [shape[:_LONGEST] for shape in shapes]
    telling = _telling(set(shapes))
    if not telling:
        return
    behind: dict[bytes, int] = {}  # of a rank, by its label: where its traceback ends
    start = 0
    for shape, line in zip(shapes, data.split(b"\n"), strict=True):
        if shape in telling:
            after = _after_label(data, start)
            label = data[start:after]
            if start >= behind.get(label, 0) or _BETWEEN.match(line[:80].decode("latin-1")):
                traced = data.startswith(b"Traceback (most", after)
                if traced:
                    behind[label] = _end_of_traceback(data, start, lines)
                yield start, None if traced else (shape, label)
        start += len(line) + 1


def _telling(shapes: set[bytes]) -> set[bytes]:
    """Return those that may be of the table. ``shapes``: lines in lower case without digits."""
    text, found, end = b"\n".join(shapes), set[bytes](), -1
    for at in places_of_anchors()(text):
        if at > end:
            end = text.find(b"\n", at)
            end = end if end >= 0 else len(text)
            found.add(text[text.rfind(b"\n", 0, at) + 1 : end])
    return {shape for shape in found if any(needle in shape for needle in _NEEDLES)}


@cache
def places_of_anchors() -> Callable[[bytes], Iterable[int]]:
    """Return what finds the anchors in a text: all in one pass where ahocorasick-rs is installed, else one after the other."""
    try:
        from ahocorasick_rs import BytesAhoCorasick
    except ImportError:
        each = [re.compile(re.escape(anchor)) for anchor in ANCHORS]
        return lambda text: sorted(found.start() for one in each for found in one.finditer(text))
    search = BytesAhoCorasick(ANCHORS)
    return lambda text: (at for _, at, _ in search.find_matches_as_indexes(text))


def _after_label(data: bytes, start: int) -> int:
    found = RANK_LABEL.match(data[start : start + 24].decode("latin-1"))
    return start + (found.end() if found else 0)


def _line(data: bytes, start: int) -> str:
    end = data.find(b"\n", start)
    raw = data[start : min(end if end >= 0 else len(data), start + _LONGEST)]
    return raw.decode("utf-8", "replace").rstrip("\r")


def _unlabelled(line: str) -> tuple[str, int | None]:
    found = RANK_LABEL.match(line)
    return (line, None) if found is None else (line[found.end() :], rank_of(found))


class _LinesOfRanks:
    """The places of the labelled lines of a block, by rank: ranks write between each other."""

    def __init__(self, data: bytes) -> None:
        self._data = data
        self._found: dict[int, list[int]] = {}

    def behind(self, start: int, rank: int) -> Iterator[int]:
        """Yield where the lines of ``rank`` begin that come after the one at ``start``."""
        if not self._found:  # it is made where a traceback has a label, and gone over once
            at = 0
            for line in self._data.split(b"\n"):
                if label := RANK_LABEL.match(line[:24].decode("latin-1")):
                    self._found.setdefault(rank_of(label), []).append(at)
                at += len(line) + 1
        of = self._found.get(rank, [])
        yield from islice(of, bisect_right(of, start), None)


def _lines_behind(data: bytes, start: int) -> Iterator[int]:
    while (start := data.find(b"\n", start) + 1) and start < len(data):
        yield start


def _traceback(data: bytes, start: int, lines: _LinesOfRanks) -> Iterator[tuple[int, str]]:
    """Yield the lines of the traceback that begins at ``start``, each with its place, without its label: those of its own rank
    where ranks write between each other, to the line of its exception."""
    first, rank = _unlabelled(_line(data, start))
    yield start, first
    for at in islice(_lines_behind(data, start) if rank is None else lines.behind(start, rank), _FRAMES):
        line, of = _unlabelled(_line(data, at))
        if rank is None and _BETWEEN.match(line):
            continue
        if of != rank:
            return
        yield at, line
        if (
            line
            and not line.startswith((" ", "\t", "Traceback (most", "During handling", "The above exc"))
            and line.strip(" ~^")
        ):
            return


def _end_of_traceback(data: bytes, start: int, lines: _LinesOfRanks) -> int:
    last = max(at for at, _ in _traceback(data, start, lines))
    end = data.find(b"\n", last)
    return end + 1 if end >= 0 else len(data)


def _event_at(
    data: bytes, start: int, offset: int, log: LogFile, year: int, others: _LinesOfRanks
) -> Iterator[LogEvent]:
    whole = _line(data, start)
    line, label = _unlabelled(whole)
    if _OURS.match(line):
        return
    where = ""
    if line.startswith(TRACEBACK):
        lines = [text for _, text in _traceback(data, start, others)]
        where, line = _frame(lines), lines[-1]
        if line.startswith((" ", "\t")) or not line.strip():  # cut off: the rank was killed meanwhile
            return
    sign = sign_in(line)
    if sign is None and (known := _exception(line, in_traceback=bool(where))):
        sign = known
    if sign is not None:
        at = _time_of(whole, year)
        at = at if at is not None else _time_before(data, start, year)
        rank = label if label is not None else log.rank
        text = printable(line.strip(), _TEXT)
        yield LogEvent(
            sign.kind, sign.role, rank, log.node, at, str(log.path), offset + start, text, where, sign.remedy
        )


_OWN = Sign(
    FailureClass.USER_CODE,
    Role.CAUSE,
    (),
    EXCEPTION,
    "look at the line that is named: the chain stops where the same failure comes again and again",
)


def _exception(line: str, *, in_traceback: bool) -> Sign | None:
    """Return that an exception of no table is an error in the program. Outside of a traceback programs quote such lines."""
    return _OWN if in_traceback and EXCEPTION.match(line) else None


def _frame(lines: Sequence[str]) -> str:
    """Return the frame of a traceback that a person looks at first."""
    frames = [found.groups() for line in reversed(lines) if (found := _FRAME.match(line))]
    return first_to_look_at((path, number, name) for path, number, name in frames)


# ------------------------------------------------------------------------------------------------------------------ times


def _time_of(line: str, year: int) -> float | None:
    """Return the time in a line, epoch seconds; one without a zone is taken as UTC, as all ranks do alike."""
    head = line[:120]
    try:
        if found := _ISO.search(head):
            year, month, day, hour, minute, second = (int(one) for one in found.groups()[:6])
            micros = int((found[7] or "0").ljust(6, "0"))
            zone = found[8] or "Z"
            moment = datetime(year, month, day, hour, minute, second, micros, timezone.utc).timestamp()
            if zone != "Z":
                moment -= int(f"{zone[0]}1") * (int(zone[1:3]) * 3600 + int(zone[-2:]) * 60)
            return moment
        if found := _GLOG.search(head):
            month, day, hour, minute, second = (int(one) for one in found.groups()[:5])
            micros = int(found[6].ljust(6, "0"))
            return datetime(year, month, day, hour, minute, second, micros, timezone.utc).timestamp()
    except ValueError:
        return None
    return None


def _time_before(data: bytes, start: int, year: int) -> float | None:
    """Return the time of the nearest line before ``start`` that has one, of a few."""
    at = start
    for _ in range(20):
        if at <= 0:
            return None
        at = data.rfind(b"\n", 0, at - 1) + 1
        if (found := _time_of(_line(data, at), year)) is not None:
            return found
    return None
