"""Finds the newest checkpoint of a program with rules of its own, where its save was cut off.

Such a program does not ask the guard. Its loader takes the highest number in a folder (``get_last_checkpoint`` of
transformers, ``hpc_ckpt_N.ckpt`` of Lightning, ``load_state`` of accelerate), whole or not, and crashes on one that is torn, in
each attempt anew.

Three values: it is torn where its own layout says so, or a file of it by the file's format; it is whole where its layout says
that; and of everything else nothing is said. A layout that is not known is judged by nothing but its files' formats.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import Contents, contents_of
from ftsupervise.checkpoints.find import ONE_FILE
from ftsupervise.checkpoints.layouts import (
    NO_WEIGHTS,
    Recognised,
    cut_files,
    may_hold_weights,
    recognise,
    says_step,
    says_whole,
    step_of,
    tracker_of,
)
from ftsupervise.checkpoints.manifest import CheckpointLayout as Layout
from ftsupervise.checkpoints.written import Trusted, folders_below

_RANDOM_STATES = "random_states_0.pkl"  # of accelerate: written last of what it saves by itself
_KERAS = (".keras", ".weights.h5")  # one file of Keras
_BACKED_UP = (
    ".bkp"  # behind the name of a file: its loader goes back to that copy by itself (BackupAndRestore of Keras)
)
_BACK = 20  # older ones that are looked at
_BY_SIGN = (Layout.HUGGING_FACE, Layout.DCP, Layout.LIGHTNING)  # whose sign says it without a neighbour


class Torn(NamedTuple):
    """A checkpoint whose save was cut off."""

    path: Path
    why: str  # a clause
    at: float  # epoch seconds: when something in it was last written
    whole: Path | None = None  # the newest older one beside it, of the same kind of name, that is whole
    tracker: str = ""  # the file beside it that names the one to load; "": the loader takes the highest number
    named: str = ""  # what stands in there
    signature: tuple[tuple[str, int, int], ...] = ()  # path, bytes and ns of each file: another one has changed since

    @property
    def passed_over(self) -> bool:
        """Return whether the program's own loader takes another one."""
        return bool(self.tracker) and self.named != self.path.name and step_of(self.named) != step_of(self.path.name)


def find_torn(folders: Iterable[Path], without: Iterable[Path], trusted: Trusted) -> tuple[Torn, ...]:
    """Return the torn ones among the newest of their kind below ``folders``. What cannot be read is passed over.

    What another account than the ``trusted`` ones has made, or put into one, is none of the run's.
    """
    found: list[Torn] = []
    for group in _groups(folders, without, trusted):
        with suppress(OSError):
            if (torn := _newest_of(group, trusted)) is not None:
                found.append(torn)
    return tuple(found)


def last_written(folders: Iterable[Path], without: Iterable[Path], trusted: Trusted) -> Path | None:
    """Return the newest of its kind that was written last, whole or not; None where there is none below ``folders``."""
    found: dict[Path, float] = {}
    for group in _groups(folders, without, trusted):
        with suppress(OSError):
            found[group[0]] = group[0].lstat().st_mtime
    return max(found, key=lambda path: found[path], default=None)


def torn(path: Path, trusted: Trusted) -> Torn | None:
    """Return what is torn about a checkpoint; None where it is whole, or nothing says so. Raises OSError."""
    older: list[Path] = []
    if says_step(path.name):
        form, step = _form(path.name), step_of(path.name) or 0
        with os.scandir(path.parent) as entries:
            beside = [path.parent / one.name for one in entries if _form(one.name) == form]
        older = sorted((one for one in beside if (step_of(one.name) or 0) < step), key=_step, reverse=True)
    return _newest_of([path, *older], trusted)


def _form(name: str) -> str:
    return re.sub(r"\d+", "#", name)


def _step(path: Path) -> int:
    return step_of(path.name) or 0


def _groups(folders: Iterable[Path], without: Iterable[Path], trusted: Trusted) -> Iterator[list[Path]]:
    """Yield the checkpoints of each folder that are named alike, the newest first; one file without a step by itself."""
    seen, barred = set[str](), frozenset(map(os.path.realpath, without))

    def closed(name: str, facts: os.stat_result) -> bool:
        return says_step(name) or not trusted(facts)

    for top in folders:
        for folder, _, entries in folders_below(top, barred, trusted, seen, closed):
            alike: dict[str, list[Path]] = {}
            for name, facts in entries:
                a_folder = stat.S_ISDIR(facts.st_mode) and says_step(name)
                if trusted(facts) and (a_folder or (stat.S_ISREG(facts.st_mode) and _one_file(name))):
                    alike.setdefault(_form(name) if says_step(name) else name, []).append(folder / name)
            for paths in alike.values():
                yield sorted(paths, key=_step, reverse=True)


def _one_file(name: str) -> bool:
    """Return whether the name is that of a checkpoint of one file. Data are HDF5 too: such a name has to say more."""
    return name.endswith((*ONE_FILE, *_KERAS)) or (name.endswith(".h5") and says_step(name))


def _newest_of(group: Sequence[Path], trusted: Trusted) -> Torn | None:
    """Return the first of ``group`` where it is torn. Raises OSError."""
    newest, older = group[0], group[1 : 1 + _BACK]
    contents = contents_of(newest)
    if not _all(contents, trusted):
        return None
    found = recognise(newest, contents)
    why, whole = cut_files(newest, contents), _newest_whole(older, trusted)
    if not why and whole is not None:  # a layout without its sign in any of them is saved in another way
        why = found.why if found.complete is False else _as_its_neighbour(newest, contents, found, whole)
    elif not why and found.layout is Layout.HUGGING_FACE and not may_hold_weights(contents):
        why = NO_WEIGHTS
    if not why or (not contents.folders and os.path.lexists(f"{newest}{_BACKED_UP}")):
        return None
    tracker, named = tracker_of(newest, found.layout)
    return Torn(newest, why, _written_at(contents), whole, tracker, named, _signature(contents))


def _newest_whole(older: Sequence[Path], trusted: Trusted) -> Path | None:
    for one in older:
        try:
            contents = contents_of(one)
            if _all(contents, trusted) and _is_whole(one, contents, recognise(one, contents)):
                return one
        except OSError:
            continue
    return None


def _is_whole(path: Path, contents: Contents, found: Recognised) -> bool:
    """Return whether its own sign says that it is whole; False where nothing does."""
    if found.complete is not None:
        return found.complete
    if found.layout is not Layout.FILES or cut_files(path, contents):
        return False
    if contents.folders:
        return _RANDOM_STATES in contents.files
    return says_whole(path, contents.files[path.name].facts.st_size)


def _as_its_neighbour(newest: Path, contents: Contents, found: Recognised, whole: Path) -> str:
    """Return why one whose files say nothing yet is torn, as a whole one beside it is of a known layout; "" where it is not."""
    if found.layout is not Layout.FILES:
        return ""
    others = contents_of(whole)
    known = recognise(whole, others)
    if known.layout in _BY_SIGN and contents.folders:
        like = recognise(newest, contents, known.layout)
        return like.why if like.complete is False else ""
    if _RANDOM_STATES in others.files and contents.folders and _RANDOM_STATES not in contents.files:
        return f"{_RANDOM_STATES} is missing, which is written last"
    return ""


def _all(contents: Contents, trusted: Trusted) -> bool:
    return not contents.irregular and all(map(trusted, contents.stats()))


def _written_at(contents: Contents) -> float:
    return max(one.st_mtime for one in contents.stats())


def _signature(contents: Contents) -> tuple[tuple[str, int, int], ...]:
    return tuple((path, one.facts.st_size, one.facts.st_mtime_ns) for path, one in sorted(contents.files.items()))
