"""Ranks that write one checkpoint in parallel: each lists what it wrote, and rank 0 joins the lists into the manifest.

A rank takes the digests of its own files while their bytes are still in its node's memory. Which files are its own, their
names say (``__3_0.distcp``, ``rank-3.pt``); what no list names, rank 0 reads itself after all ranks are through. A wrong
guess costs time and nothing else: an entry counts only for a file that has the size and the time of writing which the rank
saw.

A rank without a list has not written its part. Then the checkpoint is torn, not silently smaller.
"""

from __future__ import annotations

import errno
import os
import re
import stat
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.checkpoints.contents import Contents, FileFacts
from ftsupervise.checkpoints.digest import best_algorithm
from ftsupervise.checkpoints.manifest import FOLDER_NAME, FileEntry, escaped, make_record_folder, unescaped
from ftsupervise.host import files
from ftsupervise.host.ownership import held_to_write
from ftsupervise.rundir.records import Exact, read_record, write_json

PATIENCE = 30.0  # seconds for the lists of other nodes to be seen here
APART = 60.0  # seconds between the starts of the ranks of a launch, before any of them saves
BESIDE = 900.0  # seconds for a rank that has begun to write its part
_HERE, _FAILED = "here", "failed"  # endings of the marks of ranks that write without a barrier
_NUMBERED = (
    re.compile(r"__(\d+)_\d+\.distcp"),
    re.compile(r"(?:rank|zero_pp_rank)[_=-]?(\d+)"),
    re.compile(r"(?<![0-9])(\d+)(?![0-9])"),
)


class RankFile(NamedTuple):
    """A file that a rank wrote."""

    path: Exact
    size: int
    digest: str
    written: int  # nanoseconds since the epoch, by the file server


class RankList(NamedTuple):
    """The files that one rank wrote."""

    rank: int
    algorithm: str
    files: Annotated[tuple[RankFile, ...], 1_000_000] = ()


class Joined(NamedTuple):
    """The lists of all ranks: the entries that hold, and the files that rank 0 is to read itself."""

    entries: tuple[FileEntry, ...]
    rest: tuple[FileFacts, ...]


def list_of(checkpoint: Path, rank: int) -> Path:
    return checkpoint / FOLDER_NAME / f"rank-{rank:05d}.json"


def rank_in(path: str) -> int | None:
    """Return the rank that a file's name speaks of, or else its folder's name; None where neither does."""
    for name in reversed(path.split("/")):
        for form in _NUMBERED:
            if (match := form.search(name)) and len(match[1]) <= 9:
                return int(match[1])
    return None


def own_files(checkpoint: Path, rank: int) -> Iterator[FileFacts]:
    """Yield the files whose names speak of ``rank``. The others are not even looked at: a thousand ranks do this at once."""
    left = [""]
    while left:
        here = left.pop()
        with os.scandir(f"{checkpoint}/{here}") as entries:
            for entry in entries:
                path = f"{here}/{entry.name}" if here else entry.name
                if entry.is_dir(follow_symlinks=False):
                    left += [path] if path != FOLDER_NAME else []
                elif entry.is_file(follow_symlinks=False) and rank_in(path) == rank:
                    yield FileFacts(path, entry.stat(follow_symlinks=False))


def leave_list(checkpoint: Path, rank: int, entries: Iterable[FileEntry]) -> None:
    """Write the list of this rank's files, for rank 0. The files themselves are durable by now. Raises OSError."""
    found = []
    for entry in entries:
        written = os.lstat(f"{checkpoint}/{entry.path}").st_mtime_ns
        found.append(RankFile(escaped(entry.path), entry.size, entry.digest, written))
    path = list_of(checkpoint, rank)
    make_record_folder(path.parent)
    write_json(path, RankList(rank, best_algorithm(), tuple(found)), sync=False)


def join(checkpoint: Path, contents: Contents, ranks: Collection[int]) -> Joined:
    """Return the entries of all ``ranks``, as far as the files are still as these saw them, and the rest.

    Raises OSError: FileNotFoundError where a rank left no list, or listed a file that is not there.
    """
    algorithm, entries = best_algorithm(), {}
    for one in _lists(checkpoint, ranks):
        for listed in one.files if one.algorithm == algorithm else ():
            path = unescaped(listed.path)
            found = contents.files.get(path)
            if found is None:
                raise FileNotFoundError(
                    errno.ENOENT, f"was written by rank {one.rank} and is gone: the checkpoint is torn", path
                )
            if (found.facts.st_size, found.facts.st_mtime_ns) == (listed.size, listed.written):
                entries[path] = FileEntry(path, listed.size, listed.digest)
    rest = (one for path, one in contents.files.items() if path not in entries)
    return Joined(tuple(entries.values()), tuple(rest))


def _lists(checkpoint: Path, ranks: Collection[int]) -> Iterator[RankList]:
    until = time.monotonic() + PATIENCE
    wanted = sorted(ranks)
    while wanted:
        there = set(_names(checkpoint / FOLDER_NAME))
        for rank in [one for one in wanted if list_of(checkpoint, one).name in there]:
            found = _read_shard(list_of(checkpoint, rank), rank)
            if found is not None:
                wanted.remove(rank)
                yield found
        if not wanted:
            return
        if time.monotonic() > until:
            others = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
            words = f"rank {wanted[0]}{others} left no list of its files: the checkpoint is torn"
            raise FileNotFoundError(errno.ENOENT, words, str(checkpoint))
        time.sleep(0.1)  # a network file system shows a new file of another node late


def _read_shard(path: Path, rank: int) -> RankList | None:
    try:
        found = read_record(RankList, path, limit=256_000_000, lenient=False)
    except ValueError as error:
        raise OSError(errno.EBADMSG, f"is no list of a rank's files: {error}", str(path)) from None
    return found if found is None or found.rank == rank else None


def _names(folder: Path) -> list[str]:
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []


def forget(checkpoint: Path, rank: int) -> None:
    """Take away the list that this rank has left for a save of that name before. Raises OSError."""
    list_of(checkpoint, rank).unlink(missing_ok=True)


def clear_older(checkpoint: Path, age: float) -> None:
    """Remove what was there long before this process, which has lived for ``age`` seconds: on rank 0. A launch before this one
    has left it, and a part in it would be taken for one of this save. The file server's clock counts. Raises OSError.

    torchrun has ended all ranks before it starts any of them again, so there it is all that was there before.
    """
    if not _names(checkpoint):
        return
    fd, path = files.create_temporary(checkpoint, "now")
    try:
        since = os.fstat(fd).st_ctime - age - (0.0 if "TORCHELASTIC_RUN_ID" in os.environ else APART)
    finally:
        os.close(fd)
        os.unlink(path)
    for here, _, names in files.walk(checkpoint):
        # others may have put a link in its place meanwhile, or removed it
        with suppress(FileNotFoundError), held_to_write(here) as folder:
            for name in names:
                with suppress(FileNotFoundError):
                    if os.lstat(folder / name).st_ctime < since:
                        os.unlink(folder / name)


def enter(checkpoint: Path, rank: int) -> None:
    """Leave the mark of a rank that writes here too, before it writes. Raises OSError."""
    make_record_folder(checkpoint / FOLDER_NAME)
    _mark_of(checkpoint, rank, _FAILED).unlink(missing_ok=True)
    _mark_of(checkpoint, rank).touch()


def leave(checkpoint: Path, rank: int) -> None:
    """Take the mark away: this rank has written nothing. The folders stay, for rank 0 may be about to write into them."""
    with suppress(OSError):
        _mark_of(checkpoint, rank).unlink()


def fail(checkpoint: Path, rank: int) -> None:
    """Say that this rank could not write its part, so that rank 0 does not commit without it."""
    with suppress(OSError):
        _mark_of(checkpoint, rank).rename(_mark_of(checkpoint, rank, _FAILED))


def others_write(checkpoint: Path) -> bool:
    """Return whether a rank has left its mark here."""
    return any(name.endswith(f".{_HERE}") for name in _names(checkpoint / FOLDER_NAME))


def await_others(checkpoint: Path, world: int, beat: Callable[[], object]) -> tuple[int, ...]:
    """Wait for the ranks that are at work here, on rank 0. Return those that have left a list; all of them, once one of them
    has written files that bear its number.

    Raises FileNotFoundError where one has failed, or all must have a list and one has left neither that nor a mark within
    PATIENCE, or is not through within BESIDE.
    """
    quiet = began = time.monotonic()
    through: dict[int, bool] = {}  # rank -> has it files of its own?
    while True:
        names = set(_names(checkpoint / FOLDER_NAME))
        for rank in (one for one in range(1, world) if one not in through and list_of(checkpoint, one).name in names):
            if (found := _read_shard(list_of(checkpoint, rank), rank)) is not None:
                through[rank] = bool(found.files)
        left = [rank for rank in range(1, world) if rank not in through]
        busy = any(_mark_of(checkpoint, rank).name in names for rank in left)
        failed = [rank for rank in left if _mark_of(checkpoint, rank, _FAILED).name in names]
        if failed:
            words = f"rank {failed[0]} could not write its part: the checkpoint is torn"
            raise FileNotFoundError(errno.ENOENT, words, str(checkpoint))
        if not left or not (busy or any(through.values())):
            return tuple(through)
        now = time.monotonic()
        quiet = now if busy else quiet
        if now - quiet > PATIENCE or now - began > BESIDE:
            words = f"rank {left[0]} left no list of its files: the checkpoint is torn"
            raise FileNotFoundError(errno.ENOENT, words, str(checkpoint))
        beat()
        time.sleep(0.05)


def _mark_of(checkpoint: Path, rank: int, word: str = _HERE) -> Path:
    return checkpoint / FOLDER_NAME / f"rank-{rank:05d}.{word}"


def remove_lists(checkpoint: Path) -> None:
    """Remove the lists when they are joined. A list that cannot be removed stays: it harms no one."""
    for name in _names(checkpoint / FOLDER_NAME):
        if re.fullmatch(r"rank-\d{5,}\.(?:json|here|failed)|\.tmp-.*", name):
            try:
                path = checkpoint / FOLDER_NAME / name
                if stat.S_ISREG(os.lstat(path).st_mode):
                    path.unlink()
            except OSError:
                continue
