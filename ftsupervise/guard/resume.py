"""The checkpoint that an attempt goes on from: the newest good one, unless the ledger speaks against it.

Every rank comes to the same choice by itself, from the ledger of the attempts before and from what is there. Rank 0 alone
moves what is set aside and writes down what was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.checkpoints.find import Choice, checkpoints_in, choose
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.suspicion import Suspicion, suspect
from ftsupervise.checkpoints.verify import Scope, Thoroughness
from ftsupervise.guard.settings import RankContext, Voice
from ftsupervise.rundir import ledger, switches
from ftsupervise.rundir.paths import ENV_GUARD
from ftsupervise.rundir.resumed import write_resumed
from ftsupervise.truth import Resumed


def latest(
    place: RankContext, world: int | None, voice: Voice, over: Callable[[], bool], *, begun: bool
) -> Path | None:
    """The newest one that is good to go on from; None when there is none. Raises OSError where they cannot be read.

    ``over``: has a newer attempt begun? ``begun``: the loop has made a step, so the attempt began from another one long ago.
    """
    scope = _scope(place, world, voice)
    choice = choose(place.checkpoints, scope)
    suspicion = None if begun else _suspicion(place, voice)
    aside: Suspicion | None = None
    if suspicion is not None and _is(suspicion, choice):
        other = choose(place.checkpoints, scope, without=suspicion.checkpoint.checkpoint)
        if other.verdict is not None:
            choice, aside = other, suspicion
    if place.rank == 0:
        for one in choice.passed:
            voice.once(f"checkpoint {one.words()}; it is passed over")
        if not begun and place.attempt_dir is not None and not over():
            _put_away(place, aside, choice, voice)
    return choice.verdict.path if choice.verdict is not None else None


def _scope(place: RankContext, world: int | None, voice: Voice) -> Scope:
    owner = () if place.rundir is None else (place.rundir.root.stat().st_uid,)
    try:
        thoroughness = Thoroughness(place.verify)
    except ValueError:
        voice.once(f"{ENV_GUARD}VERIFY={place.verify!r} is not understood: every byte is verified")
        thoroughness = Thoroughness.FULL
    return Scope(thoroughness, world, owner)


def _suspicion(place: RankContext, voice: Voice) -> Suspicion | None:
    """The reasons in the ledger against a checkpoint; none where it cannot be read: no movement on an unknown."""
    if place.rundir is None or place.attempt is None or not place.quarantine_after:
        return None
    try:
        first = switches.counts_from(place.rundir)
        return suspect(ledger.backwards(place.rundir, place.attempt, first), place.quarantine_after)
    except OSError as error:
        voice.once(f"cannot read the ledger ({error.strerror}): no checkpoint is suspected")
        return None


def _is(suspicion: Suspicion, choice: Choice) -> bool:
    """Is the choice the suspect? Rank 0 may move it while another rank looks at it."""
    verdict, suspected = choice.verdict, suspicion.checkpoint
    if verdict is None or verdict.path.name != suspected.checkpoint:
        return False
    return verdict.at == suspected.committed or not verdict.path.exists()


def _put_away(place: RankContext, aside: Suspicion | None, choice: Choice, voice: Voice) -> None:
    """Set the suspect aside, and write down what the attempt begins from. Neither keeps it from beginning."""
    done = False
    if aside is not None:
        name = aside.checkpoint.checkpoint
        try:
            now = datetime.now(timezone.utc)
            put = set_aside(place.checkpoints / name, aside.words(), now, area=place.staging)
            done = True
            voice.once(f"checkpoint {name} is set aside in {put.parent}: {aside.words()}")
        except OSError as error:
            voice.once(f"checkpoint {name} cannot be set aside ({error.strerror}); this attempt passes it over")
    try:
        resumed = _resumed(place.checkpoints, choice)
        if done and aside is not None:
            resumed = resumed._replace(set_aside=aside.checkpoint.checkpoint, set_aside_step=aside.checkpoint.step)
        assert place.attempt_dir is not None
        write_resumed(place.attempt_dir, resumed)
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
