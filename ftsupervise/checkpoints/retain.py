"""The rules that keep checkpoints, the plan of what goes, and its removal.

``plan`` decides and touches nothing. Kept are always the two newest of each kind that were verified, each one in use, and each
one younger than the newest verified; with fewer than two verified ones nothing goes at all. Each kind is counted apart, because
what loads one kind cannot load another: ``guard.restore`` loads what ``guard.save`` wrote, and no export. What is removed is
renamed first (``.removing-NAME``), so that no reader finds half of it, and deleted then. A removal that was interrupted goes on
at the next call.
"""

from __future__ import annotations

import os
import stat
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import contents_of
from ftsupervise.checkpoints.extents import Range, length_without, shared_ranges
from ftsupervise.checkpoints.manifest import records_beside, root_of
from ftsupervise.host.rate import RateLimit
from ftsupervise.rundir.paths import sync_directory

REMOVING = ".removing-"  # + the name; it has gone, and what is left of it is being deleted
ALWAYS = 2  # newest verified checkpoints of each kind that are never removed
FILES_A_SECOND = 500.0  # deletions: a metadata server is everybody's


class Better(str, Enum):
    """The end of a metric that is the better one."""

    LOW = "low"
    HIGH = "high"


class Retention(NamedTuple):
    """The rules that keep checkpoints, for each kind of them; a verified one that no rule keeps may go."""

    last: int = ALWAYS  # the newest ones
    every: int | None = None  # steps: of each stretch of so many steps the first one
    best: int = 0  # by ``metric``
    metric: str = ""
    better: Better = Better.LOW
    copied: bool = False  # only what has a copy elsewhere may go


class Candidate(NamedTuple):
    """A checkpoint as retention sees it."""

    name: str
    step: int | None
    at: float  # epoch seconds
    size: int | None  # bytes
    verified: bool | None  # None: it was not looked at, or could not be seen
    metrics: Mapping[str, float] = {}
    copied: bool = False
    used_by: str = ""  # a clause, when it is in use
    others: str = ""  # a clause, when it is another run's, or may be: it counts for no rule
    kind: str = ""  # of the program that wrote it, which loads no other kind


class RetentionPlan(NamedTuple):
    """The checkpoints that stay, with the reasons, and those that go, oldest first. ``refused``: the reason why none may go."""

    keep: Mapping[str, tuple[str, ...]]
    remove: tuple[Candidate, ...]
    refused: str = ""
    frees: int = 0  # bytes: of those that go, or less where they share files with others (``would_free``)


def plan(candidates: Iterable[Candidate], policy: Retention) -> RetentionPlan:
    """Return the plan by ``policy``.

    ``candidates``: all of one folder. Only a verified one goes, and only that counts for a rule.
    """
    ordered = sorted(candidates, key=_age, reverse=True)
    verified = [one for one in ordered if one.verified and not one.others]
    reasons: dict[str, list[str]] = {one.name: [] for one in ordered}
    kinds = [[one for one in verified if one.kind == kind] for kind in dict.fromkeys(one.kind for one in verified)]
    for one in (one for alike in kinds for one in alike[:ALWAYS]):
        reasons[one.name].append(f"one of the {ALWAYS} newest{_of_kind(one, kinds)} that are verified")
    stepped = any(one.step is not None for one in verified)
    for one in ordered:
        if one.others:
            reasons[one.name].append(one.others)
        elif one.verified is False:
            reasons[one.name].append("not whole: ftsupervise checkpoints verify says why")
        elif one.verified is None:
            reasons[one.name].append("no manifest says what it is: ftsupervise checkpoints commit writes one")
        elif stepped and one.step is None:
            reasons[one.name].append("its step is not known")
        elif one.used_by:
            reasons[one.name].append(one.used_by)
        elif verified and _age(one) > _age(verified[0]):
            reasons[one.name].append("newer than the newest that is verified")
        elif policy.copied and not one.copied:
            reasons[one.name].append("no copy elsewhere yet")
    for alike in kinds:
        counted = [one for one in alike if one.step is not None or not stepped]
        for one, reason in _by_rule(counted, policy, _of_kind(alike[0], kinds)):
            reasons[one.name].append(reason)
    if len(verified) < ALWAYS:
        why = f"{len(verified)} of {len(ordered)} checkpoints verified; nothing is removed before {ALWAYS} are"
        return RetentionPlan({name: tuple(said) or (why,) for name, said in reasons.items()}, (), why)
    remove = tuple(one for one in reversed(ordered) if not reasons[one.name])
    keep = {name: tuple(said) for name, said in reasons.items() if said}
    return RetentionPlan(keep, remove, frees=sum(one.size or 0 for one in remove))


def _age(one: Candidate) -> tuple[int, float, str]:
    """Return a key that sorts the newest last: by step, where it is known, and by time."""
    return (-1 if one.step is None else one.step, one.at, one.name)


def _of_kind(one: Candidate, kinds: Sequence[object]) -> str:
    """Return the kind of ``one``, where there are several, as words behind a noun."""
    return f" of {one.kind}" if len(kinds) > 1 and one.kind else ""


def _by_rule(whole: Sequence[Candidate], policy: Retention, kind: str) -> Iterator[tuple[Candidate, str]]:
    """Yield those of one kind that a rule keeps, each with the rule. ``whole``: newest first."""
    last = max(policy.last, ALWAYS)
    for one in whole[:last]:
        yield one, f"one of the last {last}{kind}"
    if policy.every:
        first: dict[int, Candidate] = {}
        for one in whole:  # so the first of each stretch is what remains
            if one.step is not None:
                first[one.step // policy.every] = one
        for one in first.values():
            yield one, f"one every {policy.every} steps"
    if policy.best:
        measured = [one for one in whole if policy.metric in one.metrics]
        sign = 1.0 if policy.better is Better.LOW else -1.0
        measured.sort(key=lambda one: sign * one.metrics[policy.metric])
        for one in measured[: policy.best]:
            value = one.metrics[policy.metric]
            yield one, f"one of the best {policy.best}{kind} by {policy.metric} ({value:g})"


def would_free(folder: Path, names: Collection[str]) -> int:
    """Return the bytes of files that become free when these checkpoints go.

    A file that has a name outside of them stays, and so do blocks that a remaining one has in common with it. Raises
    OSError; a checkpoint that is gone frees nothing.
    """
    links: Counter[tuple[int, int]] = Counter()
    found: dict[tuple[int, int], tuple[Path, os.stat_result]] = {}
    for path, facts in _files_of(folder, names):
        links[facts.st_dev, facts.st_ino] += 1
        found[facts.st_dev, facts.st_ino] = (path, facts)
    going = [(path, facts) for key, (path, facts) in found.items() if facts.st_nlink <= links[key]]
    own, shared = 0, list[Range]()
    for path, facts in going:
        ranges = shared_ranges(path) if stat.S_ISREG(facts.st_mode) else []
        own += _without(facts.st_size, ranges)
        shared += ranges
    if not shared:
        return own
    stay = [name for name in os.listdir(folder) if name not in names and not name.startswith(".")]
    regular = (path for path, facts in _files_of(folder, stay) if stat.S_ISREG(facts.st_mode))
    return own + length_without(shared, [one for path in regular for one in shared_ranges(path)])


def _without(size: int, shared: Iterable[Range]) -> int:
    """Return the bytes of a file in blocks of its own."""
    return max(0, size - sum(end - begin for begin, end in shared))


def _files_of(folder: Path, names: Iterable[str]) -> Iterator[tuple[Path, os.stat_result]]:
    for name in names:
        try:
            contents = contents_of(folder / name)
        except (FileNotFoundError, NotADirectoryError):
            continue
        root = root_of(folder / name)
        yield from ((root / one.path, one.facts) for one in contents.files.values())


# ------------------------------------------------------------------------------------------------------------- removing


def remove(folder: Path, names: Iterable[str]) -> tuple[str, ...]:
    """Take checkpoints out of ``folder``: from now on they are none. Returns the names that were there. Raises OSError.

    A name may be a path below the folder. Their files are still to be deleted (``sweep``).
    """
    gone = []
    for name in names:
        for turn in range(1, 1000):
            label = f"{REMOVING}{name.replace('/', '-')}"
            aside = folder / (label if turn == 1 else f"{label}~{turn}")
            if os.path.lexists(aside):  # an earlier removal of the same name is still under way
                continue
            one_file = (folder / name).is_file()
            try:
                os.rename(folder / name, aside)
            except FileNotFoundError:  # another one was faster
                break
            gone.append(name)
            for page in (
                records_beside(folder / name) if one_file else ()
            ):  # else the next one of that name is judged by it
                with suppress(FileNotFoundError):
                    os.rename(page, folder / f"{aside.name}{page.suffix}")
            break
    if gone:
        sync_directory(folder)
    return tuple(gone)


def sweep(
    folder: Path,
    *,
    rate: float = FILES_A_SECOND,
    progress: Callable[[int], object] = lambda size: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Delete the checkpoints that ``remove`` took out, by this call or an earlier one, at ``rate`` files a second;
    return bytes freed.

    Links are removed, not followed. Raises OSError for the first file that cannot be deleted; the rest stays for the
    next call.
    """
    if not folder.is_dir():  # the run has not saved yet
        return 0
    limit = RateLimit(rate, clock=clock, sleep=sleep)
    freed = 0
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if entry.name.startswith(REMOVING)]
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(names):
            for size in _delete(name, fd, limit):
                freed += size
                progress(size)
    finally:
        os.close(fd)
    return freed


def _delete(name: str, at: int, limit: RateLimit) -> Iterator[int]:
    """Delete ``name`` below the open folder ``at``; yield the bytes of each file as it goes. Another sweep may do the same."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        if not stat.S_ISDIR(found.st_mode):
            limit.take(1)
            alone = stat.S_ISREG(found.st_mode) and found.st_nlink == 1  # a hard link's bytes stay with the other name
            size = _without(found.st_size, shared_ranges(name, dir_fd=at)) if alone else 0
            os.unlink(name, dir_fd=at)
            yield size
            return
        fd = os.open(name, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=at)
    except FileNotFoundError:
        return
    try:
        for inner in os.listdir(fd):
            yield from _delete(inner, fd, limit)
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=at)
    except FileNotFoundError:
        return
