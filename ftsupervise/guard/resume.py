"""The checkpoint that an attempt goes on from: the newest good one, unless the ledger speaks against it.

Every rank comes to the same choice by itself, from the ledger of the attempts before and from what is there. Rank 0 alone
moves what is set aside and writes down what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.find import Choice, checkpoints_in, choose
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.suspicion import Suspicion, suspect
from ftsupervise.checkpoints.verify import Scope, Thoroughness
from ftsupervise.guard.go_back import way_back
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.rundir import ledger, switches
from ftsupervise.rundir.paths import ENV_GUARD
from ftsupervise.rundir.resumed import read_resumed, write_resumed
from ftsupervise.truth import Resumed, SkippedBatches


class Chosen(NamedTuple):
    """``path`` None: there is none, and the training begins anew. ``skip``: batches that the loop should skip now."""

    path: Path | None
    skip: int


def latest(place: RankContext, world: int | None, voice: Voice, over: Callable[[], bool], *, begun: bool) -> Chosen:
    """Return the newest one that is good to go on from. Raises OSError where they cannot be read.

    ``over`` tells whether a newer attempt has begun. ``begun``: the loop has made a step, so the attempt began from
    another one long ago.
    """
    scope = _scope(place, world, voice)
    back = None if begun else way_back(place, scope, voice)
    if back is None:
        return _newest(place, scope, voice, over, begun=begun)
    path = back.choice.verdict.path if back.choice.verdict is not None else None
    resumed = _resumed(place.checkpoints, back.choice)._replace(skipped=back.skipped)
    resumed = resumed._replace(why=f"{resumed.why}; {back.why}")
    if place.rank == 0:
        _tell_passed(back.choice, voice)
        if place.attempt_dir is not None and not over():
            done = [one for one in back.aside if _set_aside(place, one.path.name, back.why, voice)]
            if done:
                resumed = resumed._replace(
                    set_aside=done[0].path.name, set_aside_step=done[0].step, more_aside=len(done) - 1
                )
            _write(place.attempt_dir, resumed, voice)
            voice.say(f"{back.why}; this attempt goes on {resumed.words()}")
    return Chosen(path, resumed.skip)


def _newest(place: RankContext, scope: Scope, voice: Voice, over: Callable[[], bool], *, begun: bool) -> Chosen:
    choice = choose(place.checkpoints, scope)
    suspicion = None if begun else _suspicion(place, voice)
    aside: Suspicion | None = None
    if suspicion is not None and _is(suspicion, choice):
        other = choose(place.checkpoints, scope, without=(suspicion.checkpoint.checkpoint,))
        if other.verdict is not None:
            choice, aside = other, suspicion
    path = choice.verdict.path if choice.verdict is not None else None
    resumed = _resumed(place.checkpoints, choice)
    if not begun:
        resumed = resumed._replace(skipped=_still_skipped(place, resumed.step or 0))
    if place.rank == 0:
        _tell_passed(choice, voice)
        if not begun and place.attempt_dir is not None and not over():
            suspect_is_out = aside is not None and _set_aside(place, aside.checkpoint.checkpoint, aside.words(), voice)
            if suspect_is_out and aside is not None:
                gone = aside.checkpoint
                resumed = resumed._replace(set_aside=gone.checkpoint, set_aside_step=gone.step)
            _write(place.attempt_dir, resumed, voice)
    return Chosen(path, 0 if begun else resumed.skip)


def skip_of(attempt_dir: Path) -> int | None:
    """Return the batches that this attempt skips, as rank 0 has recorded; None where it has not yet."""
    found = read_resumed(attempt_dir)
    return None if found is None else found.skip


def _scope(place: RankContext, world: int | None, voice: Voice) -> Scope:
    owner = () if place.rundir is None else (place.rundir.root.stat().st_uid,)
    try:
        thoroughness = Thoroughness(place.verify)
    except ValueError:
        voice.once(f"{ENV_GUARD}VERIFY={place.verify!r} is not understood: every byte is verified")
        thoroughness = Thoroughness.FULL
    return Scope(thoroughness, world, owner)


def _suspicion(place: RankContext, voice: Voice) -> Suspicion | None:
    """Return the reasons in the ledger against a checkpoint; none where it cannot be read: no movement on an unknown."""
    if place.rundir is None or place.attempt is None or not place.quarantine_after:
        return None
    try:
        first = switches.counts_from(place.rundir)
        return suspect(ledger.backwards(place.rundir, place.attempt, first), place.quarantine_after)
    except OSError as error:
        voice.once(f"cannot read the ledger ({error.strerror}): no checkpoint is suspected")
        return None


def _is(suspicion: Suspicion, choice: Choice) -> bool:
    """Return whether the choice is the suspect. Rank 0 may move it while another rank looks at it."""
    verdict, suspected = choice.verdict, suspicion.checkpoint
    if verdict is None or verdict.path.name != suspected.checkpoint:
        return False
    return verdict.at == suspected.committed or not verdict.path.exists()


def _still_skipped(place: RankContext, step: int) -> tuple[SkippedBatches, ...]:
    """Return the batches that the attempts before had skipped on the way to ``step``, and those that they skipped
    there.

    A checkpoint of that step was written before that.
    """
    if place.rundir is None or place.attempt is None:
        return ()
    try:
        found = next((one.resumed for one in ledger.backwards(place.rundir, place.attempt) if one.resumed), None)
    except OSError:
        return ()
    return () if found is None else tuple(one for one in found.skipped if one.step <= step)


def _tell_passed(choice: Choice, voice: Voice) -> None:
    for one in choice.passed:
        voice.once(f"checkpoint {one.words()}; it is passed over")


def _set_aside(place: RankContext, name: str, why: str, voice: Voice) -> bool:
    """Return whether it was set aside. Where it cannot be, this attempt passes it over."""
    try:
        put = set_aside(place.checkpoints / name, why, datetime.now(timezone.utc), area=place.staging)
    except OSError as error:
        voice.once(f"checkpoint {name} cannot be set aside ({error.strerror}); this attempt passes it over")
        return False
    voice.once(f"checkpoint {name} is set aside in {put.parent}: {why}")
    return True


def _write(attempt_dir: Path, resumed: Resumed, voice: Voice) -> None:
    """Record what the attempt begins from. Asked a second time, it keeps on record what was set aside at first."""
    before = read_resumed(attempt_dir)
    if before is not None and before.set_aside and not resumed.set_aside:
        resumed = resumed._replace(
            set_aside=before.set_aside, set_aside_step=before.set_aside_step, more_aside=before.more_aside
        )
    try:
        write_resumed(attempt_dir, resumed)
    except OSError as error:
        voice.once(f"cannot write which checkpoint this attempt began from: {error.strerror}")


def _resumed(folder: Path, choice: Choice) -> Resumed:
    passed = tuple(one.words() for one in choice.passed[:10])
    verdict = choice.verdict
    if verdict is None:
        return Resumed(at=datetime.now(timezone.utc), why="there is no good one", passed=passed)
    names = [one.path.name for one in checkpoints_in(folder)]
    behind = len(names) - 1 - names.index(verdict.path.name) if verdict.path.name in names else 0
    return Resumed(
        verdict.path.name,
        verdict.step,
        verdict.at,
        datetime.now(timezone.utc),
        f"the newest: {verdict.words()}",
        behind,
        passed,
    )
