"""The checkpoints of a folder, and the newest one that a run can go on from.

Newest is the greatest step; among equal steps the later attempt, then the later one.
"""

from __future__ import annotations

import errno
import fnmatch
import os
import random
import shlex
import stat
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from datetime import datetime
from enum import Enum
from itertools import accumulate
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.digest import CannotJudge, Hashed, hash_file, hash_link, hasher, in_parallel, path_below
from ftsupervise.checkpoints.layouts import Recognised, damaged_archive, is_archive, recognise, step_of
from ftsupervise.checkpoints.manifest import (
    CheckpointLayout,
    Contents,
    FileEntry,
    Manifest,
    ManifestHead,
    contents_of,
    distrust_contents,
    distrust_folder,
    manifest_of,
    read_head,
    read_manifest,
    root_of,
)
from ftsupervise.errors import Refused
from ftsupervise.printable import printable
from ftsupervise.rundir.lineage import Belongs, Lineage, belongs, read_lineage, whose
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, time_of
from ftsupervise.units import show_size

# Verifies that a checkpoint is still what was committed: always by sizes; by digests of a sample, or of every byte.
#
# Nothing is unpickled. The answer is three-valued: a checkpoint that could not be read is neither fine nor damaged.

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
    """The demands on a checkpoint. ``accounts``: user ids that are trusted besides this account and root."""

    thoroughness: Thoroughness = Thoroughness.SIZES
    world: int | None = None  # the ranks that it must have been written by; None: any number
    accounts: Collection[int] = ()
    progress: Callable[[int], object] = lambda done: None  # called with the bytes of each piece that was read
    run: Lineage | None = None  # the run that would go on from it; None: any run's is good


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
    if reason := distrust_folder(checkpoint.parent, scope.accounts):  # before a stranger's folder is walked
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
    if reason := distrust_contents(checkpoint, contents, scope.accounts):
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


# ------------------------------------------------------------------------------------------


_UNFINISHED = ("tmp", ".tmp", "incomplete", "partial", ".part", "staging")
_WITHIN = (".tmp", "orbax-checkpoint-tmp")
ONE_FILE = (".ckpt", ".pt", ".pth", ".safetensors")  # a checkpoint that is one file
PREVIOUS = "previous-"  # + the name of one that its program writes over: what it was before (previous.py)
_MOST = 100_000  # entries of a folder that are looked at


class Found(NamedTuple):
    """A checkpoint by its name and the first line of its manifest. Nothing is verified."""

    path: Path
    step: int | None
    at: datetime  # when it was committed, or last written
    head: ManifestHead | None = None  # None: it has no manifest, or one that cannot be read
    committed: bool = False  # it has a manifest, be it damaged

    def belongs(self, me: Lineage | None) -> Belongs:
        """Return whose it is, as the run ``me`` sees it."""
        return belongs(me, self.head, self.path.parent)


class Choice(NamedTuple):
    """The newest good one, and what was passed over on the way to it, newest first."""

    verdict: Verdict | None
    passed: tuple[Verdict, ...] = ()


def unfinished(name: str) -> bool:
    """Return whether the name says that it is not whole yet."""
    low = name.lower()
    if low.startswith((".", "tmp", "_tmp")) or any(mark in low for mark in _WITHIN):
        return True
    return any(low.endswith(mark) for mark in _UNFINISHED)


def checkpoints_in(folder: Path, *, pattern: str = "*", run: Lineage | None = None) -> tuple[Found, ...]:
    """Return the checkpoints in ``folder``, newest first; () where there is no such folder.

    Every folder counts whose name matches and does not say that it is unfinished, and every file of a checkpoint's
    kind. ``run``: without those of other runs that it has not taken over. Raises OSError where the folder cannot be read.
    """
    try:
        found = [_found(Path(folder, entry.name), facts) for entry, facts in _entries(folder, pattern)]
    except FileNotFoundError:
        return ()
    found = [one for one in found if one.belongs(run) is not Belongs.ANOTHERS]
    return tuple(sorted(found, key=_age, reverse=True))


def runs_in(found: Iterable[Found]) -> tuple[ManifestHead, ...]:
    """Return one manifest's head for each run that wrote some of them, newest first; those without a run are left out."""
    heads = [one.head for one in found if one.head is not None]
    known = {head.run_id or head.run: head for head in reversed(heads)}
    return tuple(head for key, head in reversed(known.items()) if key)


def others_in(folder: Path, pattern: str, rundir: RunDir, name: str) -> tuple[ManifestHead, ...]:
    """Return the other runs whose checkpoints lie in ``folder`` and that the run called ``name`` has not taken over: a
    manifest's head of each. Raises OSError."""
    me = read_lineage(rundir)
    me = me._replace(id=me.id or "new", names=(*me.names, name))
    return runs_in(one for one in checkpoints_in(folder, pattern=pattern) if one.belongs(me) is Belongs.ANOTHERS)


def others_refused(folder: Path, others: Sequence[ManifestHead], rundir: RunDir) -> Refused:
    """Return the error for a run that would save where others have. Raises OSError."""
    me = read_lineage(rundir)
    why = ""
    if any(one.run_id in me.copied for one in others):
        why = f"; {me.root} is a copy of that run's directory, and a copy is a run of its own"
    elif any(one.run_dir == me.root for one in others):
        why = "; its directory lay here before, and was moved or deleted"
    who = ", ".join(whose(one) for one in others[:5])
    taken = " ".join(f"--take-over {shlex.quote(one.run or one.run_id)}" for one in others[:5])
    return Refused(
        printable(f"{folder} holds checkpoints of {'other runs' if len(others) > 1 else 'another run'}: {who}{why}"),
        hint="give this run a folder of its own (checkpoints: {path: ...}); "
        f"to go on from what is there: ftsupervise launch {taken}",
    )


def _entries(folder: Path, pattern: str) -> Iterator[tuple[os.DirEntry[str], os.stat_result]]:
    with os.scandir(folder) as entries:
        for count, entry in enumerate(entries):
            if count >= _MOST:
                raise OSError(f"{folder} holds more than {_MOST} entries")
            if unfinished(entry.name) or not fnmatch.fnmatchcase(entry.name, pattern):
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            a_file = stat.S_ISREG(facts.st_mode) and entry.name.endswith(ONE_FILE)
            if stat.S_ISDIR(facts.st_mode) or a_file:
                yield entry, facts


def _found(path: Path, facts: os.stat_result) -> Found:
    try:
        head = read_head(path)
    except (OSError, ValueError):  # verification says what is wrong with it
        head = None
    if head is None:
        return Found(path, step_of(path.name), time_of(facts), None, os.path.lexists(manifest_of(path)))
    step = head.step if head.step is not None else step_of(path.name)
    at = head.at or time_of(facts)
    if stat.S_ISREG(facts.st_mode):  # it may have been written again since
        at = max(at, time_of(facts))
    return Found(path, step, at, head, True)


def _age(found: Found) -> tuple[int, int, datetime, bool, str]:
    attempt = found.head.attempt if found.head is not None else None
    number, kept = -1 if attempt is None else attempt, found.path.name.startswith(PREVIOUS)
    return (-1 if found.step is None else found.step, number, found.at, not kept, found.path.name)


def choose(
    folder: Path,
    scope: Scope = Scope(),  # noqa: B008 - a frozen value
    *,
    pattern: str = "*",
    without: Collection[str] = (),
) -> Choice:
    """Return the newest checkpoint that passes verification, and the verdicts on the newer ones that did not.

    Those called ``without`` are left out. Raises OSError where the folder cannot be read; also where no good one was
    found and one of them could not be read, for to begin anew because a file server stumbled would cost all steps.
    """
    seen = look_back(folder, scope, pattern=pattern, without=without)
    good = seen[-1] if seen and seen[-1].good else None
    passed = seen[:-1] if good is not None else seen
    if good is not None:
        return Choice(good, passed)
    blind = next((one for one in passed if one.error), None)
    if blind is not None:
        raise OSError(blind.error, blind.words(), str(blind.path))
    return Choice(None, passed)


def look_back(
    folder: Path,
    scope: Scope = Scope(),  # noqa: B008 - a frozen value
    *,
    pattern: str = "*",
    without: Collection[str] = (),
) -> tuple[Verdict, ...]:
    """Return the verdicts from the newest checkpoint back to the first good one; one that was removed meanwhile is left
    out.

    Raises OSError where the folder cannot be read.
    """
    seen: list[Verdict] = []
    for found in checkpoints_in(folder, pattern=pattern):
        if found.path.name in without:
            continue
        verdict = verify(found.path, scope)
        if verdict.good or verdict.state is not CheckpointState.UNSEEN or os.path.lexists(found.path):
            seen.append(verdict)
        if verdict.good:
            break
    return tuple(seen)


def sizes_back(folder: str, pattern: str, run_dir: str) -> list[tuple[str, str, list[str], bool, int]]:
    """Return ``look_back`` by sizes in plain values, for a caller at the other end of a pipe.

    Each has path, state, the first things that are wrong, whether there is a manifest, errno. The owner of ``run_dir``
    is trusted too. Raises OSError.
    """
    scope = Scope(accounts=(Path(run_dir).stat().st_uid,), run=read_lineage(RunDir(run_dir)))
    seen = [one for one in look_back(Path(folder), scope, pattern=pattern) if one.state is not CheckpointState.ANOTHERS]
    return [(str(one.path), one.state.value, list(one.wrong[:3]), one.manifest, one.error) for one in seen]


def names_of_other_runs(folder: str, pattern: str, run_dir: str, known: Collection[str]) -> list[str]:
    """Return the names of the checkpoints of other runs, in plain values, for a caller at the other end of a pipe; those
    ``known`` are not looked at. Raises OSError.
    """
    me = read_lineage(RunDir(run_dir))
    found = [
        _found(Path(folder, entry.name), facts)
        for entry, facts in _entries(Path(folder), pattern)
        if entry.name not in known
    ]
    return [one.path.name for one in found if one.belongs(me) is Belongs.ANOTHERS]


def newest(folder: Path, scope: Scope = Scope(), *, pattern: str = "*") -> Verdict | None:  # noqa: B008 - a frozen value
    """Return the newest checkpoint that passes verification; None when there is none. Raises OSError as ``choose`` does."""
    return choose(folder, scope, pattern=pattern).verdict
