"""Before an attempt begins: the checkpoint that the one before left torn is named, and moved out of the loader's way.

A program that loads by its own rules takes its newest checkpoint, whole or not. One whose save was cut off crashes each attempt
anew until the brake holds the chain, though an older whole one lies beside it. It is moved only where nothing is guessed: its
layout is known, an older one of its kind is whole, an attempt of this run was at work when it was last written, and all of it
belongs to this account. It is moved as ``checkpoints set-aside`` does it, and never deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from itertools import islice
from pathlib import Path
from shlex import quote
from typing import NamedTuple

from ftsupervise.checkpoints.manifest import contents_of
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.torn import Torn, find_torn
from ftsupervise.checkpoints.written import is_own
from ftsupervise.model import Attempt
from ftsupervise.probe.errand import within
from ftsupervise.run.start_over import ScriptPlace
from ftsupervise.rundir import ledger
from ftsupervise.rundir.attempt_pages import TornPage, write_page
from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.observing import tell_only
from ftsupervise.rundir.paths import tell
from ftsupervise.truth import BACK, TornSave

_SEARCH = 10.0  # seconds
_QUIET = 1.0  # seconds in which nobody may write into it
_RECENT = 50  # attempts that may have left it
_SLACK = 10.0  # seconds by which the clock of a file system may differ from ours


class TornPolicy(NamedTuple):
    """It says what may be done about a torn checkpoint."""

    moves: bool  # ``checkpoints.torn`` says so
    observes: Callable[[str], bool]  # whether a decision is only told


def look_before(place: ScriptPlace, number: int, policy: TornPolicy, wait: Callable[[float], bool]) -> bool:
    """Name what is torn before attempt ``number`` begins, and set aside what may be. Return False when ``wait`` was ended.

    Nothing is done for a program that asks the guard for its checkpoint, which passes over what is torn, nor after an attempt
    that left with 0. Never raises for a file system: what cannot be seen stays as it is.
    """
    folder = place.rundir.attempt(number)
    try:
        before = list(islice(ledger.backwards(place.rundir, number), _RECENT))
    except OSError:
        return True
    if not before or _asks_guard(before[0]) or before[0].exit_code == 0 or place.rundir.whole is not None:
        return True
    found = [(one, attempt) for one in _search(place) if (attempt := _during(before, one.at)) is not None]
    if not found:
        return True
    if not wait(_QUIET):
        return False
    same = {(one.path, one.signature) for one in _search(place)}
    told = []
    for one, attempt in found:
        if (one.path, one.signature) not in same:  # somebody writes into it
            continue
        if one.passed_over:
            tell(folder / "run.log", f"{one.path.name} is not whole: {one.why}; its loader goes on from {one.named}")
            continue
        whole = "" if one.whole is None else str(one.whole.absolute())
        save = TornSave(str(one.path.absolute()), one.why, attempt, whole)
        if policy.moves and policy.observes(BACK) and not _obstacle(one):
            tell_only(BACK, f"set {one.path.name} aside", f"{save.path}: {save.words()}", folder / "run.log")
            continue
        told.append(_treat(place, number, one, save, moves=policy.moves))
        tell(folder / "run.log", f"{told[-1].words()}; {told[-1].then()}")
    if told:
        try:
            write_page(folder, TornPage(tuple(told)))
        except OSError:  # the log has it
            pass
    return True


def _asks_guard(one: Attempt) -> bool:
    """Return whether its loop asked the guard for a checkpoint, or took snapshots, which only ``guard.restore`` brings back."""
    return one.resumed is not None or one.begins is not None


def _search(place: ScriptPlace) -> tuple[Torn, ...]:
    def look() -> tuple[Torn, ...]:
        return find_torn(place.folders(), place.ours(), place.trusted())

    try:
        found: tuple[Torn, ...] = within(_SEARCH, look, key="torn checkpoints")
    except (OSError, TimeoutError):
        return ()
    return found


def _during(newest_first: Sequence[Attempt], at: float) -> int | None:
    """Return the attempt that was at work at ``at``, in epoch seconds; None: none was, and another program wrote it."""
    after: datetime | None = None
    for one in newest_first:
        end = one.ended or after
        if one.started.timestamp() - _SLACK <= at and (end is None or at <= end.timestamp() + _SLACK):
            return one.number
        after = one.started
    return None


def _obstacle(one: Torn) -> str:
    """Return why it is not moved, as a clause; "" where it may be."""
    if one.whole is None:
        return "its loader has no other to take"
    if one.tracker:
        return f"{one.tracker} beside it names it: write the name of the whole one in there too"
    return ""


def _treat(place: ScriptPlace, number: int, one: Torn, save: TornSave, *, moves: bool) -> TornSave:
    """Set it aside where that may be done; return what became of it."""
    why = _obstacle(one) or ("" if moves else "checkpoints.torn says tell")
    if one.whole is None and (kept := _kept(place, Path(save.path))):
        why = f"{why}; from an earlier attempt: cp -rT {quote(kept)} {quote(save.path)}"
    newer = superseded(place.rundir, number)
    if why or newer is not None:
        return save._replace(stays=why or f"attempt {newer} has begun")

    def move() -> str:
        if not all(map(is_own, contents_of(one.path).stats())):
            return ""
        return str(set_aside(Path(save.path), save.words(), datetime.now(timezone.utc)))

    try:
        aside = within(_SEARCH, move)
    except OSError as error:
        return save._replace(stays=error.strerror or str(error))
    except TimeoutError:
        return save._replace(stays="its file system does not answer")
    return save._replace(aside=aside, stays="" if aside else "something in it belongs to another account")


def _kept(place: ScriptPlace, path: Path) -> str:
    """Return the newest whole copy of that name which was kept of an earlier attempt; "" where there is none."""

    def look() -> str:
        copies = (Path(one.kept) for _, one in ledger.kept_of(place.rundir) if Path(one.path).absolute() == path)
        return next((str(copy) for copy in copies if place.may_go_on_from(copy)), "")

    try:
        return str(within(_SEARCH, look))
    except (OSError, TimeoutError):
        return ""
