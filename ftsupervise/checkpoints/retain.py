"""The rules that keep checkpoints, the plan of what goes, and its removal.

``plan`` decides and touches nothing. Kept are always the two newest of each kind that were verified, each one in use, and each
one younger than the newest verified; with fewer than two verified ones nothing goes at all. Each kind is counted apart, because
what loads one kind cannot load another: ``guard.restore`` loads what ``guard.save`` wrote, and no export. What is removed is
renamed first (``.removing-NAME``), so that no reader finds half of it, and deleted then. A removal that was interrupted goes on
at the next call.
"""

from __future__ import annotations

import errno
import fcntl
import os
import stat
import struct
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from enum import Enum
from itertools import islice
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import contents_of
from ftsupervise.checkpoints.find import ONE_FILE, Found
from ftsupervise.checkpoints.manifest import FOLDER_NAME, CheckpointLayout, loop_file, records_beside, root_of
from ftsupervise.checkpoints.offload import being_copied
from ftsupervise.checkpoints.restore import RESTORING
from ftsupervise.host import files
from ftsupervise.host.ownership import remove_entry, stranger
from ftsupervise.host.rate import RateLimit
from ftsupervise.model import Attempt, CauseKind
from ftsupervise.rundir import fence
from ftsupervise.rundir.ledger import backwards
from ftsupervise.rundir.lineage import Belongs, Lineage, whose
from ftsupervise.rundir.paths import RunDir, sync_directory

# Finds leftovers of killed saves in their staging areas. The guard asks at each save, so this imports little.

A_DAY = 86400.0  # seconds without a change, after which nothing works there any more


def left_alone(folder: Path, now: float) -> tuple[Path, ...]:
    """Return what saves without a supervisor left in their staging areas and has not changed for a day. Raises OSError."""
    areas = [folder / fence.STAGING / name for name in names_in(folder / fence.STAGING) if fence.is_alone(name)]
    staged = (area / name for area in areas if area.is_dir() and not area.is_symlink() for name in names_in(area))
    return tuple(path for path in staged if unchanged(path, now))


def names_in(folder: Path) -> list[str]:
    """Return the names in a folder; [] where there is no such folder: the run has not saved yet; and where it is another
    account's, which lets nobody in."""
    try:
        return os.listdir(folder)
    except FileNotFoundError:
        return []
    except PermissionError:
        if _is_ours(folder):
            raise
        return []


def unchanged(path: Path, now: float) -> bool:
    """Return whether nothing in it has changed for a day. False where that cannot be seen."""
    try:
        if now - path.lstat().st_ctime < A_DAY:
            return False
        for here, folders, names in files.walk(path):
            for name in (*folders, *names):
                if now - os.lstat(f"{here}/{name}").st_ctime < A_DAY:
                    return False
    except OSError:
        return False
    return True


# ------------------------------------------------------------------------------------------


# The blocks that files have in common by reflinks, as the file system knows them: such a block is free with its last file.
#
# FIEMAP is asked, which reads no data. A file system without it has no reflinks either. Source: filesystems/fiemap.rst of the
# kernel's documentation.

_FIEMAP = 0xC020660B
_HEAD = struct.Struct("=QQLLLL")  # start, length, flags, mapped, count, reserved
_EXTENT = struct.Struct("=QQQQQLLLL")  # logical, physical, length, two and flags and three reserved ones
_AT_ONCE = 256
_LAST, _SHARED = 0x1, 0x2000

Range = tuple[int, int]  # of blocks: the first byte on the device, and the first one behind


def shared_ranges(path: str | os.PathLike[str], *, dir_fd: int | None = None) -> list[Range]:
    """Return the blocks of a regular file that another file has too; [] where the file system does not say.

    Raises OSError where the file cannot be opened.
    """
    fd = files.open_regular(path, dir_fd=dir_fd)
    try:
        found: list[Range] = []
        start, last = 0, False
        while not last:
            asked = bytearray(_HEAD.size + _AT_ONCE * _EXTENT.size)
            _HEAD.pack_into(asked, 0, start, 2**64 - 1 - start, 0, 0, _AT_ONCE, 0)
            try:
                fcntl.ioctl(fd, _FIEMAP, asked)
            except OSError:
                return []
            mapped = _HEAD.unpack_from(asked)[3]
            for number in range(mapped):
                logical, physical, length, _, _, flags, *_ = _EXTENT.unpack_from(
                    asked, _HEAD.size + number * _EXTENT.size
                )
                start, last = logical + length, bool(flags & _LAST)
                if flags & _SHARED:
                    found.append((physical, physical + length))
            last = last or not mapped
        return found
    finally:
        os.close(fd)


def length_without(ranges: Iterable[Range], others: Iterable[Range]) -> int:
    """Return the bytes in ``ranges``, each counted once, that are not in ``others``."""
    edges = [(at, side, 0) for one in ranges for at, side in zip(one, (1, -1))]
    edges += [(at, side, 1) for one in others for at, side in zip(one, (1, -1))]
    length, before, inside = 0, 0, [0, 0]
    for at, side, kind in sorted(edges):
        if inside[0] and not inside[1]:
            length += at - before
        before, inside[kind] = at, inside[kind] + side
    return length


# ------------------------------------------------------------------------------------------


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
        except (FileNotFoundError, NotADirectoryError, PermissionError):  # another account's lets nobody in
            continue
        root = root_of(folder / name)
        yield from ((root / one.path, one.facts) for one in contents.files.values())


# ------------------------------------------------------------------------------------------------------------- removing


FileKey = tuple[int, int]  # device and inode


def others_may_write(folder: Path) -> bool:
    """Return whether other accounts may give what lies in ``folder`` another name. Raises OSError."""
    mode = folder.stat().st_mode
    return bool(mode & 0o022) and not mode & stat.S_ISVTX


def keys_in(folder: Path) -> dict[str, FileKey]:
    """Return which file or folder each name in ``folder`` is now. Raises OSError."""
    found = {name: os.lstat(folder / name) for name in names_in(folder) if os.path.lexists(folder / name)}
    return {name: (one.st_dev, one.st_ino) for name, one in found.items()}


def remove(folder: Path, names: Iterable[str], judged: Mapping[str, FileKey] | None = None) -> tuple[str, ...]:
    """Take checkpoints out of ``folder``: from now on they are none. Returns the names that were there. Raises OSError.

    A name may be a path below the folder. Their files are still to be deleted (``sweep``). ``judged``: what each name was when
    it was judged; where others may write the folder, it may be something else by now, which gets its name back.
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
            if judged is not None and _key(aside) != judged.get(name):
                os.rename(aside, folder / name)
                break
            gone.append(name)
            for page in (
                records_beside(folder / name) if one_file else ()
            ):  # else the next one of that name is judged by it
                with suppress(FileNotFoundError):
                    if judged is None:
                        os.rename(page, folder / f"{aside.name}{page.suffix}")
                    elif not others_may_write(page.parent):
                        remove_entry(page)
            break
    if gone:
        sync_directory(folder)
    return tuple(gone)


def _key(path: Path) -> FileKey:
    found = path.lstat()
    return found.st_dev, found.st_ino


def sweep(
    folder: Path,
    only: Collection[FileKey] | None = None,
    *,
    rate: float = FILES_A_SECOND,
    progress: Callable[[int], object] = lambda size: None,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], object] = time.sleep,
) -> int:
    """Delete the checkpoints that ``remove`` took out, by this call or an earlier one, at ``rate`` files a second;
    return bytes freed.

    Links are removed, not followed. ``only``: what ``remove`` took out by this very call, where others may write the folder
    and may have given anything of ours such a name. Raises OSError for the first file that cannot be deleted; the rest stays
    for the next call.
    """
    if not folder.is_dir():  # the run has not saved yet
        return 0
    limit = RateLimit(rate, clock=clock, sleep=sleep)
    freed = 0
    with os.scandir(folder) as found:
        names = [entry.name for entry in found if entry.name.startswith(REMOVING) and _is_ours(Path(entry.path))]
    if only is not None:
        keys = keys_in(folder)
        names = [name for name in names if keys.get(name) in only]
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        for name in sorted(names):
            for size in _delete(name, fd, limit, only):
                freed += size
                progress(size)
    except RecursionError:
        raise OSError(errno.ENAMETOOLONG, "has too many folders within folders", str(folder / name)) from None
    finally:
        os.close(fd)
    return freed


def _delete(name: str, at: int, limit: RateLimit, only: Collection[FileKey] | None = None) -> Iterator[int]:
    """Delete ``name`` below the open folder ``at``; yield the bytes of each file as it goes. Another sweep may do the same.
    ``only``: if it is one of these by now, for the deletion of those before it may have taken minutes."""
    try:
        found = os.stat(name, dir_fd=at, follow_symlinks=False)
        if only is not None and (found.st_dev, found.st_ino) not in only:
            return
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
        if only is not None and not os.path.samestat(found, os.fstat(fd)):
            return
        for inner in os.listdir(fd):
            yield from _delete(inner, fd, limit)
    finally:
        os.close(fd)
    try:
        os.rmdir(name, dir_fd=at)
    except FileNotFoundError:
        return


# ------------------------------------------------------------------------------------------

# Retention asks of each checkpoint whether it is in use, of which kind and whose it is. It also finds what interrupted work has
# left.

_BACK = 20  # newest attempts that are looked at


def in_use(rundir: RunDir | None, folder: Path, now: float, anchors: Mapping[str, str]) -> dict[str, str]:
    """Return name -> a clause that names its user: a living attempt or the newest one, a copy, a restore, a snapshot.

    ``now``: epoch seconds. ``anchors``: those that kept snapshots go on from. Raises OSError where that cannot be seen.
    """
    found = {**_copied(folder, now), **anchors}
    if rundir is None:
        return found
    try:
        newest = list(islice(backwards(rundir), _BACK))
    except FileNotFoundError:
        return found
    for place, one in reversed(list(enumerate(newest))):
        if one.resumed is not None and one.resumed.checkpoint and (place == 0 or _may_live(one)):
            found[one.resumed.checkpoint] = f"attempt {one.number} began from it"
    return found


def kind_of(one: Found) -> str:
    """Return the kind of a checkpoint, by what can load it, as people call it; one that lets nobody in is of others."""
    try:
        if loop_file(one.path, 0).is_file():
            return "guard.save"
    except OSError:
        return "other files"
    layout = one.head.layout if one.head is not None else CheckpointLayout.FILES
    return "other files" if layout is CheckpointLayout.FILES else layout.value


def of_others(found: Collection[Found], run: Lineage | None) -> dict[str, str]:
    """Return name -> a clause, for each that is not known to be of this ``run``, where another run saves there too.

    Where all of them are of one run, or nothing says whose they are, none is spared. What accounts that are not trusted say of
    theirs does not count.
    """
    whole = [one for one in found if one.trusted and one.belongs(run) in (Belongs.ANOTHERS, Belongs.TAKEN)]
    spared = {one.path.name: f"{whose(one.head)} wrote it, and only that run removes it" for one in whole if one.head}
    if whole:
        unknown = "nothing says which run wrote it, and another run has saved here"
        spared |= {one.path.name: unknown for one in found if one.belongs(run) is Belongs.UNKNOWN}
    return spared


def _may_live(one: Attempt) -> bool:
    return one.ended is None and one.kind in (None, CauseKind.UNKNOWN)


def _copied(folder: Path, now: float) -> dict[str, str]:
    found = {}
    for name in names_in(folder):
        if name.startswith(RESTORING) and _being_restored(folder / name, now):
            found[name.removeprefix(RESTORING)] = "it is being restored"
        elif not name.startswith(".") and being_copied(folder / name, now - A_DAY):
            found[name] = "it is being copied"
    return found


def _being_restored(half: Path, now: float) -> bool:
    """Return whether a restore works at it, or has not long ago; what an account that is not trusted has laid there is none."""
    try:
        whose = stranger(half.parent.stat(), half.lstat())
    except FileNotFoundError:
        return False
    return not whose and not unchanged(half, now)


def leftovers(rundir: RunDir | None, folder: Path, now: float) -> tuple[str, ...]:
    """Return paths below ``folder`` that an interrupted restore or save left and that have not changed for a day.

    Raises OSError.
    """
    found = [folder / name for name in names_in(folder) if name.startswith(RESTORING)]
    if rundir is not None and rundir.attempts.is_dir():  # without an attempt nothing was staged
        found += _staged(fence.staging(rundir, folder))
    found += left_alone(folder, now)
    found += _of_nothing(folder)
    return tuple(sorted(str(path.relative_to(folder)) for path in found if _is_ours(path) and unchanged(path, now)))


def _is_ours(path: Path) -> bool:
    """Return whether it is this account's to remove: what another one has laid in a folder where everybody may write (1777) is
    not, and would end each removal."""
    try:
        return os.geteuid() in (0, path.lstat().st_uid)
    except FileNotFoundError:
        return False


def _of_nothing(folder: Path) -> list[Path]:
    """Return the manifests beside checkpoints of one file that their program has removed."""
    pages = [folder / FOLDER_NAME / name for name in names_in(folder / FOLDER_NAME)]
    manifests = [page for page in pages if page.name.endswith(tuple(f"{kind}.json" for kind in ONE_FILE))]
    return [page for page in manifests if not os.path.lexists(folder / page.name.removesuffix(".json"))]


def _staged(areas: Path) -> Iterator[Path]:
    """Yield the contents of the staging areas and of swept, sealed ones; never an area or its seal itself."""
    try:
        with os.scandir(areas) as entries:
            inside = [entry for entry in entries if entry.is_dir(follow_symlinks=False)]
    except (FileNotFoundError, NotADirectoryError):
        return
    for entry in inside:
        if entry.name.isdecimal():
            yield from (Path(entry.path, name) for name in os.listdir(entry.path))
        elif entry.name.startswith((fence.SEALED, fence.SWEPT)):
            yield Path(entry.path)
