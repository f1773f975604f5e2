"""The newest output of the run's job, and what was written to it since the last look. Never more than a bounded piece.

Rotation (another file), truncation (a shorter one) and copies are survived: what cannot be gone on with is begun anew.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise.config.find_run import starred
from ftsupervise.printable import OUR_TIME
from ftsupervise.probe import Entry, Missing, NotSeen, Tail

if TYPE_CHECKING:
    from ftsupervise.watch import Look

# Steps and losses in the output of a training job, whatever else is in there. Pure, with bounded memory.
#
# A log may be 100 GB long, binary in places, coloured, without a newline for hours (progress bars), cut in the middle of a
# character, and have our own lines in it. Only its last piece is ever looked at; lines are cut at 4 kB.

_ANSI = re.compile(r"\x1b(?:\[[0-?]*[ -/]*[@-~]|\][^\x07\x1b]*(?:\x07|\x1b\\)|[@-Z\\-_])")
_UNSEEN = re.compile(r"[\x00-\x08\x0b\x0c\x0e-\x1f\x7f]")
_LINE = 4096
_OURS = re.compile(OUR_TIME + "ftsupervise")  # begins our own lines: they are no sign of life of the run

# "step 12", "step: 12/100", "global_step=12", "iteration     12/  500", "[iter 12]", "'step': 12"
STEP = re.compile(
    r"(?<![a-z])(?:global[ _-]?step|train[ _-]?step|step|iteration|iter)s?['\"]?\s*[:=#\]]?\s*(\d{1,15})\b", re.I
)
# "loss: 2.31", "lm loss: 2.31E+00", "train_loss=nan", "'loss': 2.31"
LOSS = re.compile(
    r"(?<![a-z])(?:lm[ _-]?loss|train[ _-]?loss|loss)['\"]?\s*[:=]?\s*([-+]?(?:nan|inf(?:inity)?|\d+\.?\d*(?:e[-+]?\d+)?))",
    re.I,
)


def lines(data: bytes) -> Iterator[str]:
    """The readable text of ``data``, line by line; a carriage return ends one too. Our own lines are left out."""
    for raw in re.split(rb"[\r\n]+", data):
        text = _UNSEEN.sub("", _ANSI.sub("", raw[:_LINE].decode("utf-8", "replace"))).strip()
        if text and not _OURS.match(text):
            yield text


def last_step(data: bytes, pattern: re.Pattern[str] = STEP) -> int | None:
    """The step in the last line of ``data`` that has one."""
    found = None
    for line in lines(data):
        for match in pattern.finditer(line):
            try:
                found = int(match[1])
            except (ValueError, TypeError):  # the person's own pattern may catch anything
                continue
    return found


def numbers(data: bytes, pattern: re.Pattern[str] = LOSS) -> list[float]:
    """All losses in ``data``, NaN and infinities among them."""
    found = []
    for line in lines(data):
        for match in pattern.finditer(line):
            try:
                found.append(float(match[1]))
            except (ValueError, TypeError):
                continue
    return found


def whole(data: bytes, start: int) -> int:
    """Where to go on next time: behind the last end of line, so that a number cut in two is read again as one.

    A line without an end is not kept for longer than 4 kB.
    """
    end = max(data.rfind(b"\n"), data.rfind(b"\r")) + 1
    return start + max(end, len(data) - _LINE)


MOST = 262_144  # bytes looked at per tick


@dataclass(frozen=True)
class Piece:
    """What is new in a log: the file, its facts, the bytes since the last check (or its end), and if it is a new file."""

    path: Path
    entry: Entry
    data: bytes
    fresh: bool


def pattern_of(look: Look, setting: Path | None) -> Path:
    """The path, possibly with * in its name, that the run's output has."""
    if setting is not None:
        return setting if setting.is_absolute() else look.rundir.root / setting
    output = look.run.launch.output
    if output is None:
        return look.rundir.logs / f"{_literally(look.run.name)}-*"
    name = _literally(look.run.name)
    star = Path(starred(_literally(output), name))
    return star if star.is_absolute() else look.rundir.root / star


def _literally(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)


def newest(look: Look, setting: Path | None) -> tuple[Path, Entry] | Missing | NotSeen:
    """The newest file that ``setting`` (or the run's own output) means."""
    pattern = pattern_of(look, setting)
    if not re.search(r"[*?[]", pattern.name):
        found = look.probe.look(pattern)
        return (pattern, found) if isinstance(found, Entry) else found
    listing = look.probe.listing(pattern.parent)
    if isinstance(listing, (Missing, NotSeen)):
        return listing
    files = [entry for entry in listing.entries if entry.is_file and fnmatch.fnmatchcase(entry.name, pattern.name)]
    if not files:
        return Missing(str(pattern))
    entry = max(files, key=lambda one: one.mtime)
    return pattern.parent / entry.name, entry


def read_on(look: Look, setting: Path | None, memory: dict[str, Any]) -> Piece | Missing | NotSeen:
    """What came since the last check; ``memory`` (this log's own) is brought up to date."""
    found = newest(look, setting)
    if not isinstance(found, tuple):
        return found
    path, _ = found
    same = memory.get("path") == str(path)
    inode, offset = (memory.get("inode", 0), memory.get("offset", 0)) if same else (0, 0)
    got = look.probe.tail(path, inode=inode, offset=offset, most=MOST)
    if not isinstance(got, Tail):
        return got
    fresh = not same or got.entry.inode != inode or got.entry.size < offset
    memory.update(path=str(path), inode=got.entry.inode, offset=whole(got.data, got.start), size=got.entry.size)
    return Piece(path, got.entry, got.data, fresh)
