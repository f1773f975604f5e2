"""The checkpoints of a folder, and the newest one that a run can go on from.

Newest is the greatest step; among equal steps the later attempt, then the later one.
"""

from __future__ import annotations

import fnmatch
import os
import shlex
import stat
from collections.abc import Collection, Iterable, Iterator, Sequence
from datetime import datetime
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.layouts import step_of
from ftsupervise.checkpoints.manifest import (
    ManifestHead,
    manifest_of,
    read_head,
)
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Verdict, verify
from ftsupervise.errors import Refused
from ftsupervise.host.ownership import stranger
from ftsupervise.printable import printable
from ftsupervise.rundir.lineage import Belongs, Lineage, believed_group, belongs, read_lineage, whose
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import time_of

_UNFINISHED = ("tmp", ".tmp", "incomplete", "partial", ".part", "staging")
_WITHIN = (".tmp", "orbax-checkpoint-tmp")
ONE_FILE = (".ckpt", ".pt", ".pth", ".safetensors")  # a checkpoint that is one file
PREVIOUS = "previous-"  # + the name of one that its program writes over: what it was before (previous.py)
_MOST, _MOST_OF_OTHERS = 100_000, 2_000  # checkpoints of a folder that are looked at


class Found(NamedTuple):
    """A checkpoint by its name and the first line of its manifest. Nothing is verified."""

    path: Path
    step: int | None
    at: datetime  # when it was committed, or last written
    head: ManifestHead | None = None  # None: it has no manifest, or one that cannot be read
    committed: bool = False  # it has a manifest, be it damaged
    trusted: bool = True  # by whose it is

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


def checkpoints_in(
    folder: Path,
    *,
    pattern: str = "*",
    run: Lineage | None = None,
    accounts: Collection[int] = (),
    members: int | None = None,
) -> tuple[Found, ...]:
    """Return the checkpoints in ``folder``, newest first; () where there is no such folder.

    Every folder counts whose name matches and does not say that it is unfinished, and every file of a checkpoint's
    kind. ``run``: without those of other runs that it has not taken over. ``accounts``: they are trusted too, and so are the
    ``members`` of that group (``lineage.believed_group``). Raises OSError where the folder cannot be read.
    """
    try:
        found = [
            _found(Path(folder, entry.name), facts, trusted)
            for entry, facts, trusted in _entries(folder, pattern, members, accounts)
        ]
    except FileNotFoundError:
        return ()
    found = [one for one in found if one.belongs(run) is not Belongs.ANOTHERS]
    return tuple(sorted(found, key=_age, reverse=True))


def runs_in(found: Iterable[Found]) -> tuple[ManifestHead, ...]:
    """Return one manifest's head for each run that wrote some of them, newest first; those without a run are left out, and what
    accounts that are not trusted say of theirs."""
    heads = [one.head for one in found if one.head is not None and one.trusted]
    known = {head.run_id or head.run: head for head in reversed(heads)}
    return tuple(head for key, head in reversed(known.items()) if key)


def others_in(folder: Path, pattern: str, rundir: RunDir, name: str) -> tuple[ManifestHead, ...]:
    """Return the other runs whose checkpoints lie in ``folder`` and that the run called ``name`` has not taken over: a
    manifest's head of each. Raises OSError."""
    me = read_lineage(rundir)
    me = me._replace(id=me.id or "new", names=(*me.names, name))
    there = checkpoints_in(folder, pattern=pattern, members=believed_group(rundir))
    return runs_in(one for one in there if one.belongs(me) is Belongs.ANOTHERS)


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


def _entries(
    folder: Path, pattern: str, members: int | None, accounts: Collection[int] = (), of_others: int = _MOST_OF_OTHERS
) -> Iterator[tuple[os.DirEntry[str], os.stat_result, bool]]:
    """Yield those of trusted accounts (True), and the first ``of_others``, who may fill a folder where everybody may write."""
    left = {True: _MOST, False: of_others}  # whether they are trusted
    known: dict[int, bool] = {}
    with os.scandir(folder) as entries:
        above = os.stat(folder)  # noqa: PTH116
        for entry in entries:
            if unfinished(entry.name) or not fnmatch.fnmatchcase(entry.name, pattern):
                continue
            try:
                facts = entry.stat(follow_symlinks=False)
            except FileNotFoundError:  # removed meanwhile
                continue
            a_file = stat.S_ISREG(facts.st_mode) and entry.name.endswith(ONE_FILE)
            if not stat.S_ISDIR(facts.st_mode) and not a_file:
                continue
            if facts.st_uid not in known:
                mine = facts.st_uid == os.geteuid()  # whoever else may write the folder
                known[facts.st_uid] = mine or not stranger(above, facts, accounts, members=above.st_gid == members)
            trusted = known[facts.st_uid]
            left[trusted] -= 1
            if trusted and left[trusted] < 0:
                raise OSError(f"{folder} holds more than {_MOST} checkpoints")
            if left[trusted] >= 0:
                yield entry, facts, trusted


def _found(path: Path, facts: os.stat_result, trusted: bool) -> Found:
    try:
        head = read_head(path)
    except (OSError, ValueError):  # verification says what is wrong with it
        head = None
    if head is None:
        return Found(path, step_of(path.name), time_of(facts), None, os.path.lexists(manifest_of(path)), trusted)
    step = head.step if head.step is not None else step_of(path.name)
    at = head.at or time_of(facts)
    if stat.S_ISREG(facts.st_mode):  # it may have been written again since
        at = max(at, time_of(facts))
    return Found(path, step, at, head, True, trusted)


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
    oldest: bool = False,
) -> Choice:
    """Return the newest checkpoint that passes verification, and the verdicts on the newer ones that did not; ``oldest``: the
    oldest, and the older ones.

    Those called ``without`` are left out. Raises OSError where the folder cannot be read; also where no good one was
    found and one of them could not be read, for to begin anew because a file server stumbled would cost all steps.
    """
    seen = look_back(folder, scope, pattern=pattern, without=without, oldest=oldest)
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
    oldest: bool = False,
) -> tuple[Verdict, ...]:
    """Return the verdicts from the newest checkpoint back to the first good one, or from the ``oldest`` on; one that was
    removed meanwhile is left out.

    Raises OSError where the folder cannot be read.
    """
    seen: list[Verdict] = []
    every = checkpoints_in(folder, pattern=pattern, accounts=scope.accounts, members=scope.members)
    for found in reversed(every) if oldest else every:
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
    rundir = RunDir(run_dir)
    owner = rundir.root.stat().st_uid
    scope = Scope(accounts=(owner,), run=read_lineage(rundir), members=believed_group(rundir))
    whose = {0, os.geteuid(), owner}
    seen = [
        one
        for one in look_back(Path(folder), scope, pattern=pattern)
        if one.state is not CheckpointState.ANOTHERS
        if one.state is not CheckpointState.NOT_TRUSTED or os.lstat(one.path).st_uid in whose
    ]
    return [(str(one.path), one.state.value, list(one.wrong[:3]), one.manifest, one.error) for one in seen]


def names_of_other_runs(folder: str, pattern: str, run_dir: str, known: Collection[str]) -> list[str]:
    """Return the names of the checkpoints of other runs, and of accounts that are not trusted, in plain values, for a caller at
    the other end of a pipe; those ``known`` are not looked at. Raises OSError.
    """
    rundir = RunDir(run_dir)
    me, members, owner = read_lineage(rundir), believed_group(rundir), rundir.root.stat().st_uid
    return [
        entry.name
        for entry, facts, trusted in _entries(Path(folder), pattern, members, (owner,), _MOST)
        if entry.name not in known
        if not trusted or _found(Path(folder, entry.name), facts, trusted).belongs(me) is Belongs.ANOTHERS
    ]


def newest(folder: Path, scope: Scope = Scope(), *, pattern: str = "*") -> Verdict | None:  # noqa: B008 - a frozen value
    """Return the newest checkpoint that passes verification; None when there is none. Raises OSError as ``choose`` does."""
    return choose(folder, scope, pattern=pattern).verdict
