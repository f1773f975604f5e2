"""Reads the dumps of PyTorch's flight recorder of all ranks, and finds who keeps whom waiting.

Of each collective the recorder knows its process group, its number in that group, its kind, sizes and types, and whether it is
done. Four rules decide, in each group, at the lowest number where one of them holds: ranks that called something else than the
most; ranks that have not called it while others wait in it; a rank that left no dump; a rank that is always the last to come.
Who waits himself, in another group, is not the culprit: the one at the end of the chain is.

A dump is a pickle, or JSON as the worker server gives it, of whoever wrote the file: no class of a pickle is loaded, a file
that is too large is not read, and children read them, whose memory and time are bounded. What is kept of a dump is a few bits
for each collective, so that thousands of ranks fit. Source: torch/csrc/distributed/c10d/FlightRecorder.hpp and
torch/distributed/flight_recorder of PyTorch 2.13.
"""

from __future__ import annotations

import gc
import json
import os
import pickle
import re
import resource
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from enum import Enum
from functools import lru_cache
from io import BufferedReader, BytesIO
from itertools import islice
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

from ftsupervise.diagnosis.frames import first_to_look_at
from ftsupervise.host import files
from ftsupervise.host.processes import die_with_parent
from ftsupervise.printable import printable
from ftsupervise.units import rank_words

LARGEST = 256 << 20  # bytes of a dump
MOST_RANKS = 200_000
_MOST_ENTRIES = 200_000  # of a dump
_MOST_COLLECTIVES = 5_000_000  # of all dumps
_MEMORY = 2 << 30  # bytes that a process which reads may take for it
SECONDS = 5.0  # of a processor that a dump may take; a real one takes hundredths
_AHEAD = 1 << 17  # bytes that the unpickler looks ahead; without, it asks for each of them
_TOGETHER = 32  # dumps that are read without a word in between
_TOO_LONG = 5  # dumps that took too much, after which no further one is tried alone
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
    items = sorted(dumps.items())
    parts = [items[at : at + _TOGETHER] for at in range(0, len(items), _TOGETHER)]
    seen, again = _Seen(), list[tuple[int, Path]]()
    many = min(processes or min(4, os.cpu_count() or 1), max(1, len(parts)))
    for part, found in _each(parts, many, progress):
        if found is None:
            again += part
        else:
            seen.add(found)
    _alone(again, seen, progress)
    return _judged(seen, world)


def _each(
    parts: Sequence[Sequence[tuple[int, Path]]], many: int, progress: Callable[[], object]
) -> Iterator[tuple[Sequence[tuple[int, Path]], _Seen | None]]:
    """Yield what was read of each part; None where the process that read was ended, by what it read or beside it."""
    dies = die_with_parent(signal.SIGKILL)
    with ProcessPoolExecutor(many, get_context("fork"), _bound_this_process, (dies,)) as pool:
        begun = [pool.submit(_read_some, part) for part in parts]
        for at, part in enumerate(parts):
            try:
                found = begun[at].result()
            except BrokenProcessPool:
                found = None
            begun[at] = None  # type: ignore[call-overload]  # what was read is not kept a second time
            progress()
            yield part, found


def _alone(items: Sequence[tuple[int, Path]], seen: _Seen, progress: Callable[[], object]) -> None:
    """Read dumps of which one ended the process that read it, each in a process of its own."""
    too_long = 0
    for item in items:
        found = None if too_long >= _TOO_LONG else next(_each([[item]], 1, progress))[1]
        if found is None:
            too_long += 1
            seen.unread.append(
                f"{item[1].name}: no flight recorder writes such a dump: it takes too long, or too much memory"
            )
        else:
            seen.add(found)


def _bound_this_process(dies_with_its_parent: Callable[[], None]) -> None:
    """Bound the memory of a process that reads dumps. It collects no circles while it reads: a dump of lists has none."""
    dies_with_its_parent()
    gc.disable()
    now = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + _MEMORY, now + _MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGPROF, signal.SIG_DFL)


# ------------------------------------------------------------------------------------------------------------- the files


class _NoClasses(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        raise NotADump(f"it holds an object of {printable(f'{module}.{name}', 100)}, which is not loaded")


def load_dump(path: Path) -> dict[str, Any]:
    """Return a dump: dictionaries, lists, texts and numbers. Raises OSError, NotADump."""
    with os.fdopen(files.open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > LARGEST:
            raise NotADump(f"it is larger than {LARGEST >> 20} MiB")
        raw = files.read_open(file.fileno(), LARGEST, path)
    try:
        loaded = json.loads(raw) if raw[:1] in (b"{", b"[") else _NoClasses(BufferedReader(BytesIO(raw), _AHEAD)).load()
    except NotADump:
        raise
    except MemoryError:
        raise NotADump("it needs more memory than a flight recorder's dump") from None
    except (pickle.UnpicklingError, ValueError, EOFError, RecursionError, *_BROKEN) as error:
        raise NotADump(f"it cannot be read: {type(error).__name__}") from None
    if not isinstance(loaded, dict) or not isinstance(loaded.get("entries"), list):
        raise NotADump("it has no entries of a flight recorder")
    return loaded


_BROKEN = (IndexError, KeyError, TypeError, AttributeError, OverflowError, ImportError)


# ------------------------------------------------------------------------------------------------------- what is kept


Kind = tuple[str, str, str]  # the name, sizes and types of a collective


class _Call(NamedTuple):
    """Ranks that called a collective in the same way."""

    kind: Kind
    ranks: Ranks
    where: str


_Calls = tuple[
    _Call, ...
]  # of one collective; one object for all collectives that the same ranks called from the same line


class _Collective:
    """One collective of one group: who called it, and how."""

    __slots__ = ("calls", "latest", "open", "second", "who")

    def __init__(self) -> None:
        self.calls: _Calls = ()
        self.open: Ranks = 0
        self.latest = self.second = 0.0  # epoch seconds when the last rank came, and the one before it; 0.0: none
        self.who = -1  # came last

    def came(self, at: float, rank: int) -> None:
        if at > self.latest:
            self.second, self.latest, self.who = self.latest, at, rank
        elif at > self.second:
            self.second = at

    def add(self, other: _Collective) -> None:
        self.open |= other.open
        if other.who >= 0:
            self.came(other.latest, other.who)
            self.second = max(self.second, other.second)


class _Seen:
    """All dumps that were read so far."""

    def __init__(self) -> None:
        self.ranks: Ranks = 0
        self.groups: dict[str, dict[int, _Collective]] = {}
        self.members: dict[str, Ranks] = {}
        self.last: dict[str, dict[int, int]] = {}  # group -> rank -> the highest number it has called
        self.first: dict[str, dict[int, int]] = {}  # … and the lowest one that its recorder still has
        self.unread: list[str] = []
        self.kept = 0  # collectives
        self._kinds: dict[Kind, Kind] = {}

    def read(self, rank: int, dump: Mapping[str, Any]) -> None:
        self.ranks |= 1 << rank
        for group, members in _members(dump):
            self.members[group] = self.members.get(group, 0) | members
        grown: dict[
            tuple[int, int, str], tuple[_Calls, _Calls]
        ] = {}  # with the calls before, which keeps their id theirs
        numbers: dict[str, list[int]] = {}
        for entry in dump["entries"][-_MOST_ENTRIES:]:
            if isinstance(entry, dict) and not entry.get("is_p2p"):
                self._entry(rank, entry, grown, numbers)
        for group, some in numbers.items():
            self.last.setdefault(group, {})[rank] = max(some)
            self.first.setdefault(group, {})[rank] = min(some)

    def _entry(
        self,
        rank: int,
        entry: dict[Any, Any],
        grown: dict[tuple[int, int, str], tuple[_Calls, _Calls]],
        numbers: dict[str, list[int]],
    ) -> None:
        number, group = entry.get("collective_seq_id"), _group_of(entry)
        if type(number) is not int or not 0 <= number < _LARGEST_NUMBER:
            return
        collectives = self.groups.setdefault(group, {})
        one = collectives.get(number)
        if one is None:
            if self.kept >= _MOST_COLLECTIVES:
                return
            self.kept += 1
            one = collectives[number] = _Collective()
        kind = self._kind(entry)
        where = "" if one.calls else _frame(entry.get("frames"))
        change = id(one.calls), id(kind), where
        known = grown.get(change)
        if known is None:
            after = _with(one.calls, kind, rank, where or _frame(entry.get("frames")))
            known = grown[change] = one.calls, after
        one.calls = known[1]
        if not (entry.get("retired") is True or entry.get("state") == "completed"):
            one.open |= 1 << rank
        at = entry.get("time_created_ns")
        if type(at) is int and 0 < at < _LARGEST_NUMBER:
            one.came(at / 1e9, rank)
        some = numbers.get(group)
        if some is None:
            numbers[group] = [number]
        else:
            some.append(number)

    def _kind(self, entry: Mapping[str, Any]) -> Kind:
        name = entry.get("profiling_name")
        name = name[:100] if isinstance(name, str) else ""
        sizes = _sizes(entry.get("input_sizes")) if _same_size(name) else ""
        kind = name, sizes, _types(entry.get("input_dtypes"))
        return self._kinds.setdefault(kind, kind)

    def add(self, other: _Seen) -> None:
        self.ranks |= other.ranks
        self.unread += other.unread
        for group, members in other.members.items():
            self.members[group] = self.members.get(group, 0) | members
        for mine, others in ((self.last, other.last), (self.first, other.first)):
            for group, numbers in others.items():
                mine.setdefault(group, {}).update(numbers)
        merged: dict[tuple[int, int], tuple[_Calls, _Calls, _Calls]] = {}
        for group, collectives in other.groups.items():
            here = self.groups.setdefault(group, {})
            for number, one in collectives.items():
                known = here.get(number)
                if known is None:
                    if self.kept < _MOST_COLLECTIVES:
                        self.kept += 1
                        here[number] = one
                    continue
                both = id(known.calls), id(one.calls)
                if both not in merged:
                    merged[both] = known.calls, one.calls, _together(known.calls, one.calls)
                known.calls = merged[both][2]
                known.add(one)


def _with(calls: _Calls, kind: Kind, rank: int, where: str) -> _Calls:
    return _together(calls, (_Call(kind, 1 << rank, where),))


def _together(calls: _Calls, others: _Calls) -> _Calls:
    found = {call.kind: call for call in calls}
    for call in others:
        mine = found.get(call.kind)
        found[call.kind] = call if mine is None else mine._replace(ranks=mine.ranks | call.ranks)
    return tuple(found.values())


def _read_some(dumps: Iterable[tuple[int, Path]]) -> _Seen:
    seen = _Seen()
    for rank, path in dumps:
        signal.setitimer(signal.ITIMER_PROF, SECONDS)
        try:
            seen.read(rank, load_dump(path))
        except OSError as error:
            seen.unread.append(f"{path.name}: {error.strerror or error}")
        except NotADump as error:
            seen.unread.append(f"{path.name}: {error}")
        except MemoryError:
            seen.unread.append(f"{path.name}: it needs too much memory")
        if gc.get_count()[0] > _CIRCLES:  # objects that nobody frees: circles, which a hostile dump may have
            gc.collect()
    signal.setitimer(signal.ITIMER_PROF, 0)
    return seen


_CIRCLES = 1_000_000
_LARGEST_NUMBER = 1 << 63
_MOST_TEXTS = 16  # sizes, or types, of a collective that are kept


def _types(some: Any) -> str:
    """Return the types that a rank gave, "BFloat16"; what is no text is left out."""
    if not isinstance(some, list):
        return ""
    if len(some) == 1 and isinstance(some[0], str):
        return some[0][:40]
    return ",".join(one[:40] for one in some[:_MOST_TEXTS] if isinstance(one, str))


def _sizes(shapes: Any) -> str:
    """Return the shapes that a rank gave, "[[4096, 1024]]"; "" where they are something else."""
    if not isinstance(shapes, list):
        return ""
    found = list[str]()
    for shape in islice(shapes, _MOST_TEXTS):
        if not isinstance(shape, (list, tuple)):
            return ""
        for one in shape:
            if type(one) is not int or not 0 <= one < _LARGEST_NUMBER:
                return ""
        found.append(_shape(tuple(shape[:_MOST_TEXTS])))
    return f"[{', '.join(found)}]"


@lru_cache(maxsize=4096)
def _shape(sizes: tuple[int, ...]) -> str:
    return str(list(sizes))


@lru_cache(maxsize=256)
def _same_size(name: str) -> bool:
    return _SAME_SIZE.search(name) is not None


def _group_of(entry: Mapping[str, Any]) -> str:
    named = entry.get("process_group")
    name = named[0] if isinstance(named, (list, tuple)) and named else entry.get("pg_name", "0")
    return name[:100] if isinstance(name, str) else "0"


def _members(dump: Mapping[str, Any]) -> Iterator[tuple[str, Ranks]]:
    """Yield the ranks of each group that the dump knows. gloo's dumps of 2.13 know none but an unnamed one."""
    config = dump.get("pg_config")
    for name, group in islice(config.items(), _MOST_GROUPS) if isinstance(config, dict) else ():
        listed = group.get("ranks") if isinstance(group, dict) else None
        if isinstance(name, str) and name and isinstance(listed, (str, list, tuple)):
            ranks = _listed(listed) if isinstance(listed, str) else _of(listed)
            if ranks is not None:
                yield name[:100], ranks


_MOST_GROUPS = 10_000


@lru_cache(maxsize=16)
def _listed(text: str) -> Ranks | None:
    """Return the ranks in "[0, 1, 2]", which most dumps have alike; None for another text."""
    try:
        ranks = json.loads(text) if len(text) < 8 * MOST_RANKS else None
    except (ValueError, RecursionError, MemoryError):
        return None
    return _of(ranks) if isinstance(ranks, list) else None


def _of(ranks: Sequence[Any]) -> Ranks:
    return _set(one for one in ranks if isinstance(one, int) and 0 <= one < MOST_RANKS)


def _frame(frames: Any) -> str:
    """Return the innermost frame that is not a library's; "" where the dump has none."""
    return first_to_look_at(
        (_text(one.get("filename")), _text(one.get("line")), _text(one.get("name")))
        for one in (frames[:_MOST_FRAMES] if isinstance(frames, list) else ())
        if isinstance(one, dict)
    )


_MOST_FRAMES = 500


def _text(value: Any) -> str:
    if type(value) is int:
        return str(value) if 0 <= value < _LARGEST_NUMBER else ""
    return value[:500] if isinstance(value, str) else ""


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
        with_most, second, *more = sorted(one.calls, key=lambda call: call.ranks.bit_count(), reverse=True)
        sure = with_most.ranks.bit_count() > second.ranks.bit_count()
        if not sure and not more:  # as many on each side: then who did what it had never done before
            usual = [_is_usual(seen.groups[group], number, call) for call in (with_most, second)]
            sure = usual[0] != usual[1]
            with_most, second = (second, with_most) if usual == [False, True] else (with_most, second)
        odd = second.ranks
        for call in more:
            odd |= call.ranks
        most, other = with_most.kind, second.kind
        difference = (
            f"{_bare(other[0])} where the others called {_bare(most[0])}"
            if other[0] != most[0]
            else f"{_bare(other[0])} with sizes {other[1]} {other[2]} where the others gave {most[1]} {most[2]}"
        )
        return FlightFinding(
            Trouble.MISMATCH,
            ranks_in(odd),
            ranks_in(with_most.ranks),
            group,
            number,
            _bare(most[0]),
            f"called {printable(difference, 200)}, as number {number} of group {printable(group, 40)}",
            second.where,
            sure=sure,
        )
    return None


def _is_usual(collectives: Mapping[int, _Collective], number: int, call: _Call) -> bool:
    """Return whether ``call``, which is that of ``number``, has followed the one before it earlier too: loops repeat."""
    there = collectives[number - 1].calls if number - 1 in collectives else ()
    before = [one.kind for one in there if one.ranks & call.ranks]
    return any(
        (after := collectives.get(earlier + 1)) is not None
        and any(one.kind in before for one in collectives[earlier].calls)
        and any(one.kind == call.kind for one in after.calls)
        for earlier in collectives
        if earlier < number - 1
    )


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
        call = max(one.calls, key=lambda call: call.ranks.bit_count())
        return _Wait(group, number, _bare(call.kind[0]), one.open, missing, call.where)
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
            if one.who >= 0 and one.second > 0:
                count += 1
                gaps.setdefault(one.who, []).append(one.latest - one.second)
    for rank, some in gaps.items():
        late = [gap for gap in some if gap > _LATE]
        if len(late) >= _OFTEN and 2 * len(late) > count:
            text = f"came last in {len(late)} of {count} collectives, by {sorted(late)[len(late) // 2]:.1f} s"
            return FlightFinding(Trouble.LATE, (rank,), text=text, sure=False)
    return None
