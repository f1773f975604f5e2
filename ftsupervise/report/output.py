"""The output of a run's jobs as parts, one for each attempt and file, wherever ``output`` points; and lines out of them.

An attempt's first page says which files it writes to and where in them it begins. Where no attempt has begun, the files that
the settings name are found by their pattern.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ftsupervise.host.in_time import LOOK, in_time
from ftsupervise.host.ownership import OWN, Reach, open_to_read, reach, reach_on_the_way, shown_user
from ftsupervise.model import Attempt
from ftsupervise.report.verdict import output_of
from ftsupervise.rundir.paths import RunDir

_MOST_FILES = 10_000  # that a pattern may name
_LAST = 8_000_000  # bytes that are read of the end of a part
_LONGEST = 20_000  # characters of a line
_END = 65_536  # bytes
_OURS = re.compile(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ ftsupervise: ")
# of srun --label, torchrun and PyTorch
RANK_LABEL = re.compile(r"^(?:(\d{1,9}): ?|\[(?:default)?(\d{1,9})\]: ?|\[rank ?(\d{1,9})\](?:: ?| ))")
_TELLING = re.compile(
    r"(?:Error|Exception|Interrupt|OutOfMemory)\b|\b(?:fatal|fail(?:ed|ure)|killed|abort(?:ed)?|oom|xid|nan)\b"
    r"|\b(?:segmentation|uncorrectable|exceeded|cancelled)\b",
    re.I,
)


class Part(NamedTuple):
    """Bytes ``begin`` to ``end`` of a file; ``end`` None: to its end, which may grow."""

    path: Path
    attempt: int | None = None
    job: str = ""
    begin: int = 0
    end: int | None = None
    rank: int | None = None  # whose file it is alone
    group: str = ""  # the replica group whose attempt it is

    def words(self) -> str:
        of = f"attempt {self.attempt}" if self.attempt is not None else "no attempt"
        of = f"group {self.group}, {of}" if self.group else of
        return f"==> {of}{f', job {self.job}' if self.job else ''}: {self.path} <=="


def parts_of(attempts: Sequence[Attempt]) -> list[Part]:
    """Return the parts of these attempts, oldest first."""
    found: list[Part] = []
    for index, one in enumerate(attempts):
        for out in one.outputs:
            after = (two.begin for later in attempts[index + 1 :] for two in later.outputs if two.path == out.path)
            found.append(Part(Path(out.path), one.number, one.job_id, out.begin, next(after, None)))
    return found


def output_files(rundir: RunDir, name: str, attempts: Sequence[Attempt] = ()) -> list[Part]:
    """Return the parts of ``attempts``; without any, the files that the settings name, the newest last."""
    if found := parts_of(attempts):
        return found
    from glob import iglob

    dated = []
    for path in islice(iglob(output_of(rundir, name)), _MOST_FILES):  # noqa: PTH207 - an absolute pattern
        try:
            dated.append((os.stat(path).st_mtime, path))  # noqa: PTH116
        except OSError:
            continue
    return [Part(Path(path)) for _, path in sorted(dated)]


def readers(root: Path) -> Reach:
    """Return who may read a run directory and its settings, and so a file that is made of them: its owner alone where that
    cannot be seen in time."""
    settings = RunDir(root).config

    def seen() -> Reach:
        found = reach(root, follow=True).within(reach_on_the_way(root))
        return found.within(reach(settings)) if settings.exists() else found

    try:
        found = in_time(seen, LOOK)
    except OSError:
        found = None
    return Reach(OWN) if found is None else found


def not_theirs(rundir: RunDir, path: Path) -> str:
    """Return why the file of an output is not read, as a sentence: the run is another account's, and names a file of this one
    that nobody else may read; "" where that is not so.
    """
    try:
        whose, found = rundir.root.stat().st_uid, path.stat()
    except OSError:
        return ""
    if whose == os.geteuid() or found.st_uid != os.geteuid() or path.resolve().is_relative_to(rundir.root.resolve()):
        return ""
    try:
        seen = reach(path, follow=True).within(reach_on_the_way(path))
    except OSError:
        seen = Reach(OWN)
    if seen.mode & 0o004:
        return ""
    return f"{path} is yours alone, and the run that names it as its output belongs to {shown_user(whose)}"


def rank_files(part: Part, rank: int) -> Part | None:
    """Return the file of this rank alone, where the job's is one of several that differ by a rank's number: ``out-3.log``
    beside ``out-0.log``. None: there is none."""
    for found in reversed(list(re.finditer(r"\d+", part.path.name))):
        if found[0].lstrip("0") in ("", "0"):
            other = part.path.with_name(
                f"{part.path.name[: found.start()]}{rank:0{len(found[0])}}{part.path.name[found.end() :]}"
            )
            if other != part.path and other.is_file():
                return part._replace(path=other, begin=0, end=None, rank=rank)
    return None


def lines_in(part: Part) -> Iterator[str]:
    """Yield its last megabytes line by line. Raises OSError."""
    with os.fdopen(open_to_read(part.path), "rb") as file:
        size = os.fstat(file.fileno()).st_size
        end = size if part.end is None else min(part.end, size)
        begin = max(min(part.begin, end), end - _LAST)
        file.seek(begin)
        if begin > part.begin:
            file.readline(_LAST)  # half a line
        left = end - file.tell()
        while left > 0 and (raw := file.readline(min(left, _LONGEST))):
            left -= len(raw)
            yield raw.decode("utf-8", "replace").rstrip("\r\n")


def rank_of(label: re.Match[str]) -> int:
    """Return the rank that a label names."""
    return next(int(one) for one in label.groups() if one is not None)


def of_rank(lines: Iterable[str], rank: int) -> Iterator[str]:
    """Yield the lines that are labelled with this rank."""
    for line in lines:
        if (found := RANK_LABEL.match(line)) and rank_of(found) == rank:
            yield line


def telling(lines: Iterable[str]) -> Iterator[str]:
    """Yield the lines that tell of an error, and whole tracebacks."""
    inside = False
    for line in lines:
        bare = RANK_LABEL.sub("", line)
        if inside and bare.startswith((" ", "\t")):
            yield line
            continue
        starts = bare.lstrip().startswith("Traceback (most recent call last)")
        if inside or starts or _TELLING.search(line):
            yield line
        inside = starts


def supervisors_last(path: Path) -> str:
    """Return the last line that our supervisor wrote to this output, with its time: what it does, or waits for.

    "" where the end of the file has none, or cannot be read.
    """
    try:
        with os.fdopen(open_to_read(path), "rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - _END))
            lines = file.read(_END).decode("utf-8", "replace").splitlines()
    except OSError:
        return ""
    return next((line for line in reversed(lines) if _OURS.match(line)), "")[:_LONGEST]


class Follower:
    """The end of a file that grows. A file that was replaced or cut is read from its begin."""

    def __init__(self, part: Part) -> None:
        self.part = part
        self._at, self._inode, self._rest = -1, 0, b""

    def skip(self) -> None:
        """Go on from the end as it is now."""
        seen = os.stat(self.part.path)  # noqa: PTH116
        self._at, self._inode = seen.st_size, seen.st_ino

    def more(self) -> list[str]:
        """Return the whole lines that have come since; [] where the file cannot be read now."""
        try:
            with os.fdopen(open_to_read(self.part.path), "rb") as file:
                seen = os.fstat(file.fileno())
                if self._at < 0:
                    self._at = min(self.part.begin, seen.st_size)
                elif seen.st_ino != self._inode or seen.st_size < self._at:
                    self._at, self._rest = 0, b""
                self._inode = seen.st_ino
                file.seek(self._at)
                data = file.read(_LAST)
        except OSError:
            return []
        self._at += len(data)
        *lines, self._rest = (self._rest + data).split(b"\n")
        self._rest = self._rest[-_LONGEST:]
        return [line.decode("utf-8", "replace").rstrip("\r") for line in lines]
