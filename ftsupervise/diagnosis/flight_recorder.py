"""Reads the dumps of PyTorch's flight recorder of all ranks, and finds who keeps whom waiting.

Of each collective the recorder knows its process group, its number in that group, its kind, sizes and types, and whether it is
done. Four rules decide, in each group, at the lowest number where one of them holds: ranks that called something else than the
most; ranks that have not called it while others wait in it; a rank that left no dump; a rank that is always the last to come.
Who waits himself, in another group, is not the culprit: the one at the end of the chain is.

A dump is a pickle, or JSON as the worker server gives it, of whoever wrote the file: no class of a pickle is loaded, and a file
that is too large is not read. What is kept of a dump is a few bits for each collective, so that thousands of ranks fit. Source:
torch/csrc/distributed/c10d/FlightRecorder.hpp and torch/distributed/flight_recorder of PyTorch 2.13.
"""

from __future__ import annotations

import ast
import json
import os
import pickle
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from enum import Enum
from io import BytesIO
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.diagnosis.frames import first_to_look_at
from ftsupervise.host import files
from ftsupervise.printable import printable
from ftsupervise.units import rank_words

LARGEST = 256 << 20  # bytes of a dump
MOST_RANKS = 200_000
_MOST_ENTRIES = 200_000  # of a dump
_MANY = 64  # dumps from which on several processes read
_LATE = 0.5  # seconds by which a straggler comes last
_OFTEN = 3  # collectives in which it does
_NAME = re.compile(r"(\d{1,9})(?:\.(?:json|pickle|pkl))?$")
# collectives for which all ranks give tensors of the same size
_SAME_SIZE = re.compile(
    r":(?:all_?reduce\w*|broadcast\w*|_?all_?gather(?:_base|_into\w*)?|_?reduce_scatter\w*|reduce|barrier)$"
)
Ranks = int  # a set of ranks: bit N is rank N


class Trouble(Enum):
    """The kinds of trouble in a process group."""

    MISMATCH = "called something else"
    NOT_JOINED = "did not join"
    CIRCLE = "wait for each other"
    SILENT = "left no dump"
    LATE = "came last"


class FlightFinding(NamedTuple):
    """A trouble and its ranks. ``group``: the process group; ``number``: that of the collective in it."""

    trouble: Trouble
    culprits: tuple[int, ...]
    waiting: tuple[int, ...] = ()
    group: str = ""
    number: int | None = None
    collective: str = ""  # "all_reduce"
    text: str = ""
    where: str = ""  # the frame from which the culprits called it, or those that wait: "train.py:42 step"
    sure: bool = True


class FlightRecord(NamedTuple):
    """The findings of all dumps. ``ranks``: those that left one; ``unread``: files that could not be read, with the reason."""

    findings: tuple[FlightFinding, ...]
    ranks: tuple[int, ...]
    unread: tuple[str, ...] = ()

    @property
    def first(self) -> FlightFinding | None:
        return self.findings[0] if self.findings else None


class NotADump(ValueError):
    """A file that is no dump of a flight recorder."""


def dump_files(folder: Path) -> dict[int, Path]:
    """Return the dumps in a folder by rank, which is the number at the end of the name. Raises OSError."""
    found: dict[int, Path] = {}
    with os.scandir(folder) as entries:
        names = sorted(one.name for one in entries if one.is_file() and not one.name.startswith("."))
    for name in names:
        if (number := _NAME.search(name)) and int(number[1]) < MOST_RANKS:
            found.setdefault(int(number[1]), folder / name)
    return found


def read_flight_record(
    dumps: Mapping[int, Path],
    *,
    world: int | None = None,
    processes: int = 0,
    progress: Callable[[], object] = lambda: None,
) -> FlightRecord:
    """Return what the dumps tell. ``dumps``: rank -> file; ``world``: how many ranks there are, where that is known. Raises
    nothing for a file that cannot be read: its rank left none."""
    many = processes or (min(4, os.cpu_count() or 1) if len(dumps) > _MANY else 1)
    items = sorted(dumps.items())
    if many > 1:
        share = max(1, len(items) // (many * 4))
        parts = [items[at : at + share] for at in range(0, len(items), share)]
        with ProcessPoolExecutor(many, get_context("fork")) as pool:
            found = []
            for one in pool.map(_read_some, parts):
                found.append(one)
                progress()
    else:
        found = [_read_some(items)]
    seen = found[0]
    for more in found[1:]:
        seen.add(more)
    return _judged(seen, world)


# ------------------------------------------------------------------------------------------------------------- the files


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotADump(f"it holds an object of {printable(f'{module}.{name}', 100)}, which is not loaded")


def load_dump(path: Path) -> dict[str, Any]:
    """Return a dump: dictionaries, lists, texts and numbers. Raises OSError, NotADump."""
    raw = files.read_bounded(path, LARGEST)
    if len(raw) >= LARGEST:
        raise NotADump(f"it is larger than {LARGEST >> 20} MiB")
    try:
        loaded = json.loads(raw) if raw[:1] in (b"{", b"[") else _NoClasses(BytesIO(raw)).load()
    except NotADump:
        raise
    except (pickle.UnpicklingError, ValueError, EOFError, RecursionError, MemoryError, *_BROKEN) as error:
        raise NotADump(f"it cannot be read: {type(error).__name__}") from None
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries"), list):
        raise NotADump("it has no entries of a flight recorder")
    return loaded


_BROKEN = (IndexError, KeyError, TypeError, AttributeError, OverflowError, ImportError)


# ------------------------------------------------------------------------------------------------------- what is kept


class _Call(NamedTuple):
    """Ranks that called a collective in the same way."""

    ranks: Ranks
    where: str


class _Collective:
    """One collective of one group: who called it, and how."""

    __slots__ = ("calls", "latest", "open", "second")

    def __init__(self) -> None:
        self.calls: dict[tuple[str, str, str], _Call] = {}
        self.open: Ranks = 0
        self.latest: tuple[float, int] | None = None  # when and who came last
        self.second: float | None = None

    def came(self, at: float, rank: int) -> None:
        if self.latest is None or at > self.latest[0]:
            self.second = self.latest[0] if self.latest is not None else None
            self.latest = at, rank
        elif self.second is None or at > self.second:
            self.second = at

    def add(self, other: _Collective) -> None:
        for key, call in other.calls.items():
            mine = self.calls.get(key)
            self.calls[key] = _Call(mine.ranks | call.ranks, mine.where) if mine is not None else call
        self.open |= other.open
        second = other.second
        if other.latest is not None:
            self.came(*other.latest)
        if second is not None and (self.second is None or second > self.second):
            self.second = second


class _Seen:
    """All dumps that were read so far."""

    def __init__(self) -> None:
        self.ranks: Ranks = 0
        self.groups: dict[str, dict[int, _Collective]] = {}
        self.members: dict[str, Ranks] = {}
        self.last: dict[str, dict[int, int]] = {}  # group -> rank -> the highest number it has called
        self.first: dict[str, dict[int, int]] = {}  # … and the lowest one that its recorder still has
        self.unread: list[str] = []

    def read(self, rank: int, dump: Mapping[str, Any]) -> None:
        self.ranks |= 1 << rank
        for group, members in _members(dump):
            self.members[group] = self.members.get(group, 0) | members
        for entry in dump["entries"][-_MOST_ENTRIES:]:
            self._entry(rank, entry)

    def _entry(self, rank: int, entry: Any) -> None:
        if not isinstance(entry, dict) or entry.get("is_p2p"):
            return
        number, group = entry.get("collective_seq_id"), _group_of(entry)
        if not isinstance(number, int) or isinstance(number, bool):
            return
        name = str(entry.get("profiling_name", ""))[:100]
        sizes = str(entry.get("input_sizes"))[:300] if _SAME_SIZE.search(name) else ""
        one = self.groups.setdefault(group, {}).setdefault(number, _Collective())
        key = name, sizes, str(entry.get("input_dtypes"))[:100]
        known = one.calls.get(key)
        where = known.where if known is not None else _frame(entry.get("frames"))
        one.calls[key] = _Call((known.ranks if known is not None else 0) | 1 << rank, where)
        if not (entry.get("retired") or entry.get("state") == "completed"):
            one.open |= 1 << rank
        at = entry.get("time_created_ns")
        if isinstance(at, int):
            one.came(at / 1e9, rank)
        last, first = self.last.setdefault(group, {}), self.first.setdefault(group, {})
        last[rank], first[rank] = max(number, last.get(rank, number)), min(number, first.get(rank, number))

    def add(self, other: _Seen) -> None:
        self.ranks |= other.ranks
        self.unread += other.unread
        for group, members in other.members.items():
            self.members[group] = self.members.get(group, 0) | members
        for name in ("last", "first"):
            for group, numbers in getattr(other, name).items():
                getattr(self, name).setdefault(group, {}).update(numbers)
        for group, collectives in other.groups.items():
            mine = self.groups.setdefault(group, {})
            for number, one in collectives.items():
                if number in mine:
                    mine[number].add(one)
                else:
                    mine[number] = one


def _read_some(dumps: Iterable[tuple[int, Path]]) -> _Seen:
    seen = _Seen()
    for rank, path in dumps:
        try:
            seen.read(rank, load_dump(path))
        except OSError as error:
            seen.unread.append(f"{path.name}: {error.strerror or error}")
        except NotADump as error:
            seen.unread.append(f"{path.name}: {error}")
    return seen


def _group_of(entry: Mapping[str, Any]) -> str:
    named = entry.get("process_group")
    return str(named[0])[:100] if isinstance(named, (list, tuple)) and named else str(entry.get("pg_name", "0"))[:100]


def _members(dump: Mapping[str, Any]) -> Iterator[tuple[str, Ranks]]:
    """Yield the ranks of each group that the dump knows. gloo's dumps of 2.13 know none but an unnamed one."""
    config = dump.get("pg_config")
    for name, group in config.items() if isinstance(config, dict) else ():
        listed = group.get("ranks") if isinstance(group, dict) else None
        try:
            ranks = ast.literal_eval(listed) if isinstance(listed, str) and len(listed) < 4_000_000 else listed
        except (ValueError, SyntaxError, RecursionError, MemoryError):
            continue
        if isinstance(ranks, (list, tuple)) and name != "":
            yield str(name)[:100], _set(one for one in ranks if isinstance(one, int) and 0 <= one < MOST_RANKS)


def _frame(frames: Any) -> str:
    """Return the innermost frame that is not a library's; "" where the dump has none."""
    known = [one for one in frames if isinstance(one, dict)] if isinstance(frames, list) else []
    return first_to_look_at(
        (str(one.get("filename", "")), str(one.get("line")), str(one.get("name", ""))) for one in known
    )


def _set(ranks: Iterable[int]) -> Ranks:
    found = bytearray()
    for rank in ranks:
        if rank >> 3 >= len(found):
            found.extend(bytes((rank >> 3) + 1 - len(found)))
        found[rank >> 3] |= 1 << (rank & 7)
    return int.from_bytes(found, "little")


def ranks_in(ranks: Ranks) -> tuple[int, ...]:
    """Return a set of ranks, ascending."""
    raw = ranks.to_bytes((ranks.bit_length() + 7) // 8, "little")
    return tuple(at * 8 + bit for at, byte in enumerate(raw) if byte for bit in range(8) if byte >> bit & 1)


# --------------------------------------------------------------------------------------------------------------- the rules


def _judged(seen: _Seen, world: int | None) -> FlightRecord:
    everybody = seen.ranks | (_set(range(world)) if world else 0)
    for group in seen.groups:
        if group not in seen.members:  # gloo's: those that have called something in it; of the default group all
            called = _set(seen.last.get(group, {}))
            seen.members[group] = everybody if group in ("0", "default_pg") else called
        everybody |= seen.members[group]
    silent = everybody & ~seen.ranks
    found = list(filter(None, (_mismatch(seen, group) for group in seen.groups)))
    waits = list(filter(None, (_waiting(seen, group, silent) for group in seen.groups)))
    if waits:
        found += _roots(waits, silent)
    if silent:
        text = "left no dump: its process was stopped, or dead, or has no recorder"
        found.append(FlightFinding(Trouble.SILENT, ranks_in(silent), text=text, sure=False))
    if not found and (late := _late(seen)) is not None:
        found.append(late)
    return FlightRecord(tuple(found), ranks_in(seen.ranks), tuple(seen.unread))


def _bare(name: str) -> str:
    return printable(name.partition(":")[2] or name, 60)


def _mismatch(seen: _Seen, group: str) -> FlightFinding | None:
    """Return the first collective that some ranks called in another way than the most."""
    for number in sorted(seen.groups[group]):
        one = seen.groups[group][number]
        if len(one.calls) < 2:
            continue
        by_size = sorted(one.calls.items(), key=lambda item: item[1].ranks.bit_count(), reverse=True)
        (most, with_most), (_, second) = by_size[0], by_size[1][:2]
        odd = 0
        for _, call in by_size[1:]:
            odd |= call.ranks
        key, call = by_size[1]
        difference = (
            f"{_bare(key[0])} where the others called {_bare(most[0])}"
            if key[0] != most[0]
            else f"{_bare(key[0])} with sizes {key[1]} {key[2]} where the others gave {most[1]} {most[2]}"
        )
        return FlightFinding(
            Trouble.MISMATCH,
            ranks_in(odd),
            ranks_in(with_most.ranks),
            group,
            number,
            _bare(most[0]),
            f"called {printable(difference, 200)}, as number {number} of group {printable(group, 40)}",
            call.where,
            sure=with_most.ranks.bit_count() > second.ranks.bit_count(),
        )
    return None


class _Wait(NamedTuple):
    group: str
    number: int
    collective: str
    waiting: Ranks
    missing: Ranks  # ranks with a dump that have not called it
    where: str


def _waiting(seen: _Seen, group: str, silent: Ranks) -> _Wait | None:
    """Return the first collective of a group in which some ranks wait."""
    last = seen.last.get(group, {})
    for number in sorted(seen.groups[group]):
        one = seen.groups[group][number]
        if not one.open:
            continue
        members = seen.members[group] & ~silent
        missing = _set(rank for rank in ranks_in(members) if last.get(rank, -1) < number)
        name, call = max(one.calls.items(), key=lambda item: item[1].ranks.bit_count())
        return _Wait(group, number, _bare(name[0]), one.open, missing, call.where)
    return None


def _roots(waits: Sequence[_Wait], silent: Ranks) -> Iterator[FlightFinding]:
    """Yield for whom the others wait: of the ranks that are missing somewhere those that wait nowhere themselves."""
    waiting = 0
    for one in waits:
        waiting |= one.waiting
    for one in waits:
        if culprits := one.missing & ~waiting:
            text = f"did not join {one.collective}, number {one.number} of group {printable(one.group, 40)}"
            yield FlightFinding(
                Trouble.NOT_JOINED,
                ranks_in(culprits),
                ranks_in(one.waiting),
                one.group,
                one.number,
                one.collective,
                text,
                one.where,
                sure=not silent,
            )
            return
    circle = 0
    for one in waits:
        circle |= one.missing
    if circle:
        said = "; ".join(
            f"{rank_words(ranks_in(one.waiting))} in {one.collective} of group {printable(one.group, 40)}"
            for one in waits[:4]
        )
        yield FlightFinding(
            Trouble.CIRCLE, ranks_in(circle), ranks_in(waiting), text=f"wait for each other: {said}", sure=False
        )


def _late(seen: _Seen) -> FlightFinding | None:
    """Return a rank that came last again and again, long after the others. The clocks of nodes may differ by less."""
    gaps: dict[int, list[float]] = {}
    count = 0
    for group in seen.groups.values():
        for one in group.values():
            if one.latest is not None and one.second is not None:
                count += 1
                gaps.setdefault(one.latest[1], []).append(one.latest[0] - one.second)
    for rank, some in gaps.items():
        late = [gap for gap in some if gap > _LATE]
        if len(late) >= _OFTEN and 2 * len(late) > count:
            text = f"came last in {len(late)} of {count} collectives, by {sorted(late)[len(late) // 2]:.1f} s"
            return FlightFinding(Trouble.LATE, (rank,), text=text, sure=False)
    return None
