"""Is a checkpoint whole, and still what was committed? Always by sizes; by digests of a sample, or of every byte.

Nothing is unpickled. The answer is three-valued: a checkpoint that could not be read is neither fine nor damaged.
"""

from __future__ import annotations

import errno
import os
import random
from collections.abc import Callable, Collection, Iterable
from datetime import datetime
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import Contents, contents_of, distrust_contents, distrust_itself
from ftsupervise.checkpoints.digest import CannotJudge, Hashed, hash_file, hash_link, hasher, in_parallel, path_below
from ftsupervise.checkpoints.layouts import Recognised, damaged_archive, is_archive, recognise, step_of
from ftsupervise.checkpoints.manifest import CheckpointLayout, FileEntry, Manifest, ManifestHead, read_manifest, root_of
from ftsupervise.rundir.lineage import Belongs, Lineage, belongs, whose
from ftsupervise.rundir.records import EPOCH, time_of
from ftsupervise.units import show_size

_MOMENT = 0.001  # seconds: a manifest knows times to the microsecond
_TELLING = 4096  # bytes: a smaller file may be a table of names and shapes
_NAMED = 3  # wrong files that a sentence names


class CheckpointState(str, Enum):
    """The outcome of a verification."""

    VERIFIED = "verified"  # as its manifest says
    COMPLETE = "complete"  # without a manifest, and its layout says that it is complete
    TORN = "torn"  # its writer has not finished it
    TRUNCATED = "truncated"  # a file is shorter or longer than it was
    DAMAGED = "damaged"  # a file, or the manifest, has other bytes
    MISSING = "missing"  # a file is not there
    WRONG_WORLD = "wrong world"  # written by another number of ranks
    NOT_TRUSTED = "not trusted"  # a stranger may have written it
    ANOTHERS = "another run's"  # and this run may not go on from it
    UNSEEN = "unseen"  # it could not be read, or nothing says what it should be


class Thoroughness(str, Enum):
    """Names how much of a checkpoint is compared."""

    SIZES = "sizes"
    QUICK = "quick"  # sizes, and the digests of small files: what a loader reads first, for some milliseconds
    SAMPLED = "sampled"  # sizes, and the digests of some files
    FULL = "full"  # the digest of every file


_SMALL = 1_000_000  # bytes of a file that is read where it is "quick": those of a loader's tables, not of weights
_SMALL_FILES, _SMALL_TOTAL = 32, 4_000_000  # files, and bytes of all, at most
SAMPLE = 0.1  # share of the files whose digests are taken where it is "sampled", one at least


class Verdict(NamedTuple):
    """The result of verifying one checkpoint."""

    path: Path
    state: CheckpointState
    wrong: tuple[str, ...] = ()  # what is wrong, or could not be seen, as clauses
    layout: CheckpointLayout = CheckpointLayout.FILES
    step: int | None = None
    world: int | None = None
    at: datetime = EPOCH  # when it was committed, or last written
    files: int = 0
    size: int = 0  # bytes
    checked: Thoroughness | None = None  # None: it did not come to that
    manifest: bool = False  # it has one
    error: int = 0  # errno where nothing could be seen; 0 where it was seen, or has no manifest

    @property
    def good(self) -> bool:
        """Return whether one may resume from it."""
        return self.state in (CheckpointState.VERIFIED, CheckpointState.COMPLETE)

    def words(self) -> str:
        """Return one sentence without a full stop: its state, and why."""
        if not self.good:
            more = f" (and {len(self.wrong) - _NAMED} more)" if len(self.wrong) > _NAMED else ""
            return f"{self.path.name} is {self.state.value}: {'; '.join(self.wrong[:_NAMED])}{more}"
        how = {
            Thoroughness.FULL: "every byte",
            Thoroughness.SAMPLED: "sizes and a sample",
            Thoroughness.QUICK: "sizes, and small files",
            None: "its own sign",
        }
        seen = how.get(self.checked, "sizes")
        return f"{self.path.name} is {self.state.value} ({seen}): {self.files} files, {show_size(self.size)}"


class Scope(NamedTuple):
    """The demands on a checkpoint. ``accounts``: user ids that are trusted besides this account and root; ``members``: the
    group whose members are too, in a folder that it may write (``lineage.believed_group``)."""

    thoroughness: Thoroughness = Thoroughness.SIZES
    world: int | None = None  # the ranks that it must have been written by; None: any number
    accounts: Collection[int] = ()
    progress: Callable[[int], object] = lambda done: None  # called with the bytes of each piece that was read
    run: Lineage | None = None  # the run that would go on from it; None: any run's is good
    members: int | None = None


def verify(checkpoint: Path, scope: Scope = Scope()) -> Verdict:  # noqa: B008 - a frozen value
    """Compare a checkpoint, a folder or one file, with its manifest. Never raises for the contents of it."""
    try:
        return _verify(checkpoint, scope)
    except CannotJudge as error:
        step = step_of(checkpoint.name)
        return Verdict(checkpoint, CheckpointState.UNSEEN, (str(error),), step=step, error=errno.ENOTSUP)
    except FileNotFoundError as error:
        lost = () if os.path.lexists(checkpoint) else ("it is not there",)
        return Verdict(checkpoint, CheckpointState.UNSEEN, lost or (_sentence(error),), error=error.errno or 0)
    except OSError as error:
        step = step_of(checkpoint.name)
        return Verdict(checkpoint, CheckpointState.UNSEEN, (_sentence(error),), step=step, error=error.errno or 0)


def _verify(checkpoint: Path, scope: Scope) -> Verdict:
    if reason := distrust_itself(
        checkpoint, scope.accounts, members=scope.members
    ):  # before what a stranger has laid is walked
        return Verdict(checkpoint, CheckpointState.NOT_TRUSTED, (reason,), step=step_of(checkpoint.name))
    contents = contents_of(checkpoint)
    size = sum(one.facts.st_size for one in contents.files.values())
    newest = max((one.facts for one in contents.files.values()), key=lambda facts: facts.st_mtime, default=None)
    seen = Verdict(
        checkpoint,
        CheckpointState.UNSEEN,
        step=step_of(checkpoint.name),
        at=time_of(newest) if newest is not None else EPOCH,
        files=len(contents.files),
        size=size,
    )
    if reason := distrust_contents(checkpoint, contents, scope.accounts, members=scope.members):
        return seen._replace(state=CheckpointState.NOT_TRUSTED, wrong=(reason,))
    try:
        manifest = read_manifest(checkpoint)
    except CannotJudge:
        raise
    except ValueError as error:
        return seen._replace(state=CheckpointState.DAMAGED, wrong=(str(error),), manifest=True)
    if manifest is None:
        return _by_layout(seen, recognise(checkpoint, contents), scope)
    plain = seen
    seen = seen._replace(
        manifest=True,
        layout=manifest.layout,
        step=manifest.step if manifest.step is not None else seen.step,
        world=manifest.world,
        at=manifest.at or seen.at,
        files=len(manifest.files),
        size=manifest.size,
    )
    if belongs(scope.run, manifest, checkpoint.parent) is Belongs.ANOTHERS:
        return seen._replace(state=CheckpointState.ANOTHERS, wrong=(f"{whose(manifest)} wrote it",))
    newer = written_since(contents, manifest) if _may_be_rewritten(contents, manifest) else frozenset()
    again = bool(newer) and len(newer) == len(contents.files)
    found = _by_manifest(seen, contents, manifest, scope, newer)
    if not again or found.error or (found.good and scope.thoroughness is not Thoroughness.SIZES):
        return found
    if not found.good and _is_copy(seen.path, contents, manifest, scope):
        return found  # copied with new times, and then harmed
    return _rewritten(plain, contents, scope)


def _is_copy(checkpoint: Path, contents: Contents, manifest: Manifest, scope: Scope) -> bool:
    """Return whether one of its files still is what the manifest says, though all are newer: a program that saves again writes
    other weights into each. Small files may be the same each time."""
    same = (
        entry
        for entry in sorted(manifest.files, key=lambda entry: entry.size)
        if entry.size >= _TELLING and not entry.link and (found := contents.files.get(entry.path)) is not None
        if found.facts.st_size == entry.size
    )
    root = root_of(checkpoint)
    hashed = ((entry, _hash(root, entry, manifest.algorithm, scope)) for entry in same)
    return any(not isinstance(one, OSError) and one.digest == entry.digest for entry, one in hashed)


def written_since(contents: Contents, manifest: Manifest | ManifestHead) -> frozenset[str]:
    """Return the files that were written after the newest write that the manifest knows of."""
    if manifest.at is None:
        return frozenset()
    last = manifest.at.timestamp() + _MOMENT
    return frozenset(path for path, one in contents.files.items() if not one.is_link and one.facts.st_mtime > last)


def _may_be_rewritten(contents: Contents, manifest: Manifest) -> bool:
    """Return whether another program may have saved it again under the same name, and would say that it is complete."""
    if not contents.folders:
        return True
    adopted = manifest.adopted or manifest.layout in (CheckpointLayout.DEEPSPEED, CheckpointLayout.MEGATRON)
    return adopted and manifest.layout is not CheckpointLayout.FILES


def _rewritten(seen: Verdict, contents: Contents, scope: Scope) -> Verdict:
    """Judge a checkpoint that its program has saved again since its manifest was written: by its own sign, as one without a
    manifest. A file of torch has the checksums of its archive besides: all are compared, unless only sizes are asked for."""
    found = recognise(seen.path, contents)
    if contents.folders or found.complete is False:
        return _by_layout(seen, found, scope)
    if not is_archive(seen.path):
        return seen._replace(
            wrong=("it was written again since its manifest, and nothing in it says that it is whole",)
        )
    if scope.thoroughness is Thoroughness.SIZES:
        return seen._replace(state=CheckpointState.COMPLETE, layout=found.layout, step=found.step)
    if wrong := damaged_archive(seen.path, scope.progress):
        return seen._replace(state=CheckpointState.DAMAGED, wrong=(f"{seen.path.name} {wrong}",))
    return seen._replace(
        state=CheckpointState.COMPLETE, checked=Thoroughness.FULL, layout=found.layout, step=found.step
    )


def _by_layout(seen: Verdict, found: Recognised, scope: Scope) -> Verdict:
    seen = seen._replace(layout=found.layout, step=found.step, world=found.world)
    if found.complete is None:
        return seen._replace(wrong=(f"it has no manifest, and {found.why}",))
    if not found.complete:
        return seen._replace(state=CheckpointState.TORN, wrong=(found.why,))
    return _of_world(seen._replace(state=CheckpointState.COMPLETE), scope)


def _of_world(seen: Verdict, scope: Scope) -> Verdict:
    if scope.world is None or seen.world in (None, scope.world):
        return seen
    wrong = f"{seen.world} ranks wrote it, and {scope.world} would read it"
    return seen._replace(state=CheckpointState.WRONG_WORLD, wrong=(wrong,))


def _by_manifest(
    seen: Verdict, contents: Contents, manifest: Manifest, scope: Scope, newer: Collection[str]
) -> Verdict:
    """``newer``: files that were written since, whose digests are compared unless only sizes are asked for."""
    missing, changed = [], []
    for entry in manifest.files:
        found = contents.files.get(entry.path)
        if found is None or found.is_link != entry.link:
            missing.append(
                f"{entry.path} is {contents.irregular.get(entry.path, 'missing') if found is None else 'another kind of file'}"
            )
        elif found.facts.st_size != entry.size:
            changed.append(f"{entry.path} has {found.facts.st_size} bytes of {entry.size}")
    if missing:
        return seen._replace(state=CheckpointState.MISSING, wrong=tuple(missing))
    if changed:
        return seen._replace(state=CheckpointState.TRUNCATED, wrong=tuple(changed))
    wanted = _chosen(manifest.files, scope.thoroughness)
    if newer and scope.thoroughness in (Thoroughness.QUICK, Thoroughness.SAMPLED):
        wanted += [entry for entry in manifest.files if entry.path in newer and entry not in wanted]
    if wanted:
        hasher(manifest.algorithm)  # raises before the first file where it cannot be computed
    root = root_of(seen.path)
    wrong: list[str] = []
    unseen: list[str] = []
    error = 0
    for entry, hashed in in_parallel(lambda entry: (entry, _hash(root, entry, manifest.algorithm, scope)), wanted):
        if isinstance(hashed, OSError):
            unseen.append(_sentence(hashed))
            error = error or hashed.errno or 0
        elif hashed.digest != entry.digest:
            (wrong if hashed.steady else unseen).append(_difference(entry, hashed))
    if wrong:
        return seen._replace(state=CheckpointState.DAMAGED, wrong=tuple(wrong))
    if unseen:
        return seen._replace(wrong=tuple(unseen), error=error)
    return _of_world(seen._replace(state=CheckpointState.VERIFIED, checked=scope.thoroughness), scope)


def _chosen(entries: tuple[FileEntry, ...], thoroughness: Thoroughness) -> list[FileEntry]:
    """Return the files to be read, large ones first so that no thread is left alone with one at the end."""
    if thoroughness is Thoroughness.SIZES:
        return []
    if thoroughness is Thoroughness.QUICK:
        return _smallest(entries)
    chosen = list(entries)
    if thoroughness is Thoroughness.SAMPLED and chosen:
        chosen = random.sample(chosen, max(1, round(SAMPLE * len(chosen))))
    return sorted(chosen, key=lambda entry: -entry.size)


def _smallest(entries: Iterable[FileEntry]) -> list[FileEntry]:
    """Return the smallest files: the same ones each time, so that all ranks come to the same verdict."""
    small = sorted((entry for entry in entries if entry.size <= _SMALL), key=lambda entry: (entry.size, entry.path))
    totals = accumulate(entry.size for entry in small)
    return [entry for entry, total in zip(small[:_SMALL_FILES], totals) if total <= _SMALL_TOTAL]


def _hash(root: Path, entry: FileEntry, algorithm: str, scope: Scope) -> Hashed | OSError:
    """Hash a file. An OSError is a value here: it is reported of one file among many."""
    try:
        path = path_below(root, entry.path)
        return hash_link(path, algorithm) if entry.link else hash_file(path, algorithm, progress=scope.progress)
    except OSError as error:
        return error


def _difference(entry: FileEntry, hashed: Hashed) -> str:
    if not hashed.steady:
        return f"{entry.path} changed while it was read"
    return f"{entry.path} has other bytes than were committed"


def _sentence(error: OSError) -> str:
    return f"cannot read {error.filename}: {error.strerror}" if error.filename else f"cannot read it: {error}"
