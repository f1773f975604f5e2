"""Finds what a script without a guard has saved, and keeps it from a start that writes over it.

Nobody has said where it saves. So the folder of the checkpoints, the working folder and the folders that its command names are
searched for files of a checkpoint's kind that are newer than the attempt; every search has a bound, and follows no link.

It may be unpickled, so a file of an account that is not trusted in the run directory is no checkpoint of the script. Other
accounts may write the folder of the data, which the command names too.

What is kept lies in the run directory, ``kept/NNNN/NAME``: a script that begins anew may empty its own folder first. It is a
reflink, or has bytes of its own, because a program that writes over a file changes each hard link of it too. Hard links, which
outlive a removal only, are the last resort where the bytes take too long or too much room. It can be read by nobody who could
not reach its source.
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
import stat
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.find import unfinished
from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.host import files
from ftsupervise.host.ownership import (
    FOLDER,
    Reach,
    held_to_write,
    make_like,
    reach,
    reach_on_the_way,
    settle,
    settle_folder,
)
from ftsupervise.rundir.records import time_of
from ftsupervise.truth import LeftCheckpoint

_SURE = (".pt", ".pth", ".ckpt", ".safetensors", ".keras", ".msgpack", ".pdparams", ".weights", ".distcp")
_PERHAPS = (".h5", ".hdf5", ".npz", ".pkl", ".bin", ".tar", ".rds", ".jld2")  # of data too
_WORDS = ("ckpt", "checkpoint", "model", "weight", "state", "param", "optim", "snapshot", "backup")
_NOT_IN = frozenset(("node_modules", "__pycache__", "site-packages", "dist-packages", "wandb", "mlruns"))
_DEEP = 4  # folders below each that is searched
_MOST = 20_000  # entries below each of them, of those that are trusted and of all others: these may fill a folder
_FICLONE = 0x40049409
_PIECE = 8 << 20  # bytes
_ROOM = 2  # times its size must be free
_TOGETHER = 300.0  # seconds within which two files are of one save
KEPT = 2  # attempts whose checkpoint is kept

Trusted = Callable[[os.stat_result], bool]


def is_own(found: os.stat_result) -> bool:
    """Return whether this account, or root, made the file."""
    return found.st_uid in (os.geteuid(), 0)


class CopyStopped(Exception):
    """It was asked to stop, or its time is over."""


def find_written(
    folders: Iterable[Path],
    since: float,
    until: float,
    without: Iterable[Path] = (),
    trusted: Trusted = is_own,
    torn: Callable[[Path], bool] = lambda path: False,
) -> LeftCheckpoint | None:
    """Return the checkpoint that was written last between two times (epoch seconds); None where there is none.

    A folder whose name has a step is one checkpoint, with all that lies in it. What cannot be read is passed over, and so is
    what is not ``trusted``, by its stat, and what is ``torn``.
    """
    newest: dict[Path, float] = {}
    for path, at in _candidates(folders, since, until, frozenset(map(os.path.realpath, without)), trusted):
        newest[path] = max(at, newest.get(path, at))
    while newest:
        path = _last_of(newest)
        if not torn(path):
            return _left(path, trusted)
        del newest[path]
    return None


def _last_of(newest: Mapping[Path, float]) -> Path:
    """Return the one that was written last. What is exported beside a checkpoint is not what the program goes on from."""
    at, last = max((at, path) for path, at in newest.items())
    sure = [(at, path) for path, at in newest.items() if path.name.endswith(_SURE) or step_of(path.name) is not None]
    return max(sure)[1] if sure and max(sure)[0] >= at - _TOGETHER else last


def _left(path: Path, trusted: Trusted) -> LeftCheckpoint | None:
    try:
        size = sum(found.st_size for _, found in _files(path, trusted))
        return LeftCheckpoint(str(path), step_of(path.name), time_of(path.stat()), size)
    except OSError:
        return None


def _candidates(
    folders: Iterable[Path], since: float, until: float, without: frozenset[str], trusted: Trusted
) -> Iterator[tuple[Path, float]]:
    seen = set[str]()
    for folder in folders:
        yield from _below(folder, since, until, without, trusted, seen)


def _below(
    top: Path, since: float, until: float, without: frozenset[str], trusted: Trusted, seen: set[str]
) -> Iterator[tuple[Path, float]]:
    for folder, depth, entries in folders_below(top, without, trusted, seen):
        for name, found in entries:
            if not stat.S_ISREG(found.st_mode) or not _like_a_checkpoint(folder.name, name):
                continue
            if trusted(found) and since <= found.st_mtime <= until:
                whole = _whole(folder, name, depth)
                try:
                    if trusted(whole.lstat()):
                        yield whole, found.st_mtime
                except OSError:
                    continue


def folders_below(
    top: Path,
    without: Collection[str],
    trusted: Trusted,
    seen: set[str],
    closed: Callable[[str, os.stat_result], bool] = lambda name, facts: False,
) -> Iterator[tuple[Path, int, list[tuple[str, os.stat_result]]]]:
    """Yield ``top`` and the folders below it, as deep and as wide as checkpoints are looked for: each with its depth, and with
    the names and the stats in it. What is unfinished by its name is left out, and so is what cannot be read.

    ``without`` and ``seen``: real paths that are passed over; each folder is added to ``seen``. ``closed``: whether the search
    does not go into a folder, by its name and stat.
    """
    left, waiting = {True: _MOST, False: _MOST}, deque([(top, 0)])  # whether they are trusted
    while waiting:
        folder, depth = waiting.popleft()
        real = os.path.realpath(folder)
        if real in seen or real in without:
            continue
        seen.add(real)
        found: list[tuple[str, os.stat_result]] = []
        with suppress(OSError), os.scandir(folder) as entries:
            for entry in entries:
                facts = entry.stat(follow_symlinks=False)
                ours = trusted(facts)
                left[ours] -= 1
                if left[ours] < 0:
                    break
                if unfinished(entry.name):
                    continue
                found.append((entry.name, facts))
                goes_in = stat.S_ISDIR(facts.st_mode) and depth < _DEEP and entry.name not in _NOT_IN
                if goes_in and not closed(entry.name, facts):
                    waiting.append((folder / entry.name, depth + 1))
        yield folder, depth, found


def _like_a_checkpoint(folder: str, name: str) -> bool:
    if name.endswith(_SURE):
        return True
    if "." not in name and step_of(name) is not None:  # model_38
        return any(word in name.lower() for word in _WORDS)
    return name.endswith(_PERHAPS) and (
        step_of(folder) is not None or any(word in f"{folder}/{name}".lower() for word in _WORDS)
    )


def _whole(folder: Path, name: str, depth: int) -> Path:
    """Return the checkpoint that a file belongs to: the outermost folder above it whose name has a step, or itself."""
    above = [folder, *folder.parents][:depth]
    return next((one for one in reversed(above) if step_of(one.name) is not None), folder / name)


def _files(path: Path, trusted: Trusted) -> Iterator[tuple[Path, os.stat_result]]:
    """Yield the regular files of a checkpoint that are ``trusted``. Raises OSError."""
    if not path.is_dir():
        yield path, path.stat()
        return
    for folder, _, names in files.walk(path, _raise):
        for name in names:
            path = Path(folder, name)
            found = path.lstat()
            if stat.S_ISREG(found.st_mode) and trusted(found):
                yield path, found


def is_whole_by(path: Path, trusted: Trusted) -> bool:
    """Return whether nothing in the folder ``path`` belongs to an account that is not ``trusted``; True for a file. Others may
    write into a folder by its mode. Raises OSError."""
    if not path.is_dir():
        return True
    walk = files.walk(path, _raise)
    return all(trusted(Path(folder, name).lstat()) for folder, inner, names in walk for name in (*inner, *names))


def _raise(error: OSError) -> None:
    raise error


class Kept(NamedTuple):
    path: Path
    how: str


def keep(
    written: LeftCheckpoint,
    folder: Path,
    seconds: float,
    stopped: Callable[[], bool] = lambda: False,
    trusted: Trusted = is_own,
) -> Kept:
    """Keep what is ``trusted`` of a checkpoint in ``folder``, whole or not at all, and return where and how.

    Bytes are copied for ``seconds`` at most. Others may write above it, and put a link of theirs in its place meanwhile: it is
    not followed. Raises OSError; CopyStopped when ``stopped`` says so meanwhile.
    """
    source, until = Path(written.path), time.monotonic() + seconds
    with held_to_write(source.parent) as above:
        if (above / source.name).is_symlink():  # what was found is none
            raise OSError(errno.ELOOP, "was replaced by a link", str(source))
        way = Reach(FOLDER).within(reach_on_the_way(source), reach_on_the_way(above.readlink() / source.name))
        make_like(folder, way)
        settle_folder(folder, way)
        with held_to_write(folder) as here:
            half, target = here / f".tmp-{source.name}", here / source.name
            _remove(half)
            how = _make(above / source.name, half, until, stopped, trusted)
            _remove(target)
            os.rename(half, target)
    return Kept(folder / source.name, how)


def _make(source: Path, half: Path, until: float, stopped: Callable[[], bool], trusted: Trusted) -> str:
    """Make ``half`` whole, or not at all; return how. Raises as ``keep``."""
    try:
        _copy(source, half, until, stopped, trusted)
    except CopyStopped:
        _remove(half)
        if stopped():
            raise
        return _link(source, half, trusted)
    except BaseException:
        _remove(half)
        raise
    return "a copy"


def _link(source: Path, half: Path, trusted: Trusted) -> str:
    for path, _ in _files(source, trusted):
        with held_to_write(path.parent) as here:
            os.link(here / path.name, _place_of(path, source, half), follow_symlinks=False)
    return "hard links, which outlive its removal, and not a program that writes into the same files"


def _place_of(path: Path, source: Path, half: Path) -> Path:
    """Return the place of a file in the copy ``half``; the folders on the way are made, none wider than its source."""
    if not source.is_dir():
        return half
    for above in reversed(path.relative_to(source).parents):
        make_like(half / above, Reach(FOLDER).within(reach(source / above, follow=True)))
    return half / path.relative_to(source)


def _copy(source: Path, half: Path, until: float, stopped: Callable[[], bool], trusted: Trusted) -> None:
    every, room = list(_files(source, trusted)), None
    for path, _ in every:
        with held_to_write(path.parent) as here:
            out = files.open_regular(here / path.name)
        found = os.fstat(out)
        into = -1
        try:
            if not trusted(found):  # it was exchanged
                raise PermissionError(errno.EPERM, "belongs to another account", str(path))
            into = files.create_new(_place_of(path, source, half), 0o600)
            if not _cloned(out, into):
                if room is None:
                    free = os.fstatvfs(into)
                    room = free.f_bavail * free.f_frsize >= _ROOM * sum(one.st_size for _, one in every)
                if not room:
                    raise CopyStopped
                offset = 0
                while piece := os.pread(out, _PIECE, offset):
                    if stopped() or time.monotonic() > until:
                        raise CopyStopped
                    offset += os.pwrite(into, piece, offset)
            os.utime(into, ns=(found.st_atime_ns, found.st_mtime_ns))
            settle(into, reach(out).without(0o022))  # nobody else writes what may be gone on from
        finally:
            os.close(out)
            if into >= 0:
                os.close(into)


def _cloned(source: int, target: int) -> bool:
    try:
        fcntl.ioctl(target, _FICLONE, source)
    except OSError as error:
        if error.errno not in (errno.EOPNOTSUPP, errno.ENOTTY, errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EPERM):
            raise
        return False
    return True


def drop_older(folder: Path, best: int) -> None:
    """Remove what was kept of older attempts but for that of attempt ``best`` and the newest, two in all. Raises OSError."""
    with held_to_write(folder) as here:
        numbers = sorted((int(name) for name in os.listdir(here) if name.isdecimal()), reverse=True)
        stay = sorted(numbers, key=lambda number: number != best)[:KEPT]  # the newest first, behind the best
        for number in numbers:
            if number not in stay:
                _remove(here / f"{number:04d}")


def _remove(path: Path) -> None:
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        with suppress(FileNotFoundError):
            os.unlink(path)
