"""The checkpoint that an attempt goes on from: the newest good one, unless the ledger speaks against it.

Every rank comes to the same choice by itself, from the ledger of the attempts before and from what is there. Rank 0 alone
moves what is set aside and writes down what was chosen. A run that has saved and finds nothing that it may use does not begin
anew: it stops with ``CannotResume``, and the supervisor holds the chain until a person has acted.
"""

from __future__ import annotations

import errno
import os
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

from ftsupervise.checkpoints.contents import distrust_folder
from ftsupervise.checkpoints.divergence import GoBack, go_back
from ftsupervise.checkpoints.find import Choice, Found, checkpoints_in, choose
from ftsupervise.checkpoints.manifest import manifest_of, read_head
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.checkpoints.suspicion import Suspicion, suspect
from ftsupervise.checkpoints.verify import CheckpointState, Scope, Thoroughness, Verdict
from ftsupervise.guard.settings import RankContext, Voice, run_owner
from ftsupervise.host.ownership import remedy
from ftsupervise.model import Attempt
from ftsupervise.rundir import ledger, switches
from ftsupervise.rundir.attempt_pages import read_page, write_page
from ftsupervise.rundir.beginnings import saved_before
from ftsupervise.rundir.lineage import Belongs, Lineage, believed_group, belongs, read_lineage
from ftsupervise.rundir.observing import Observes, tell_only
from ftsupervise.rundir.paths import ENV_GUARD, RESUMED, RunDir
from ftsupervise.rundir.records import read_record, write_json
from ftsupervise.truth import BACK, GIVEN_UP, Resumed, SkippedBatches
from ftsupervise.units import checkpoint_words

# The checkpoint that an attempt goes on from when the loss of the one before was no number, or diverged.
#
# Every rank comes to the same choice from the ledger and from what is there, as in ``resume.py``. Rank 0 alone moves all newer
# checkpoints into the quarantine: they belong to a way that the run has left.

_BACK = 60  # attempts that are asked for their first loss


class WayBack(NamedTuple):
    """The choice, what has to go aside, newest first, and what is skipped on the way to it."""

    why: str  # a clause
    choice: Choice
    aside: tuple[Found, ...]
    skipped: tuple[SkippedBatches, ...]
    anew: bool = (
        False  # nothing was saved before the trouble, and the beginning is not farther than it goes back anyhow
    )


def way_back(place: RankContext, pick: Callable[..., Choice], scope: Scope, voice: Voice) -> WayBack | None:
    """Return the way back; None where there was no trouble with the loss, or the ledger cannot be read.

    ``pick``: the newest good one without those of these names, or the ``oldest``. Raises OSError as ``choose`` does.
    """
    try:
        found = go_back(_before(place), place.loss_back)
    except OSError as error:
        voice.once(f"cannot read the ledger ({error.strerror}): it is not known whether the loss diverged before")
        return None
    return None if found is None else _choose(place, pick, scope, found)


def first_loss(place: RankContext) -> float | None:
    """Return the first loss of the run that an earlier attempt has reported; None where it is not known."""
    if place.rundir is None or place.attempt is None:
        return None
    try:
        numbers = sorted(one for one in ledger.numbers(place.rundir) if one < (place.attempt or 0))
        for number in numbers[:_BACK]:
            for one in ledger.backwards(place.rundir, number + 1, number):
                if one.first_loss is not None:
                    return one.first_loss
    except OSError:
        return None
    return None


def _before(place: RankContext) -> Iterator[Attempt]:
    if place.rundir is None or place.attempt is None:
        return iter(())
    return ledger.backwards(place.rundir, place.attempt)


def _choose(place: RankContext, pick: Callable[..., Choice], scope: Scope, found: GoBack) -> WayBack:
    """Return the newest that is old enough; else the oldest.

    From the beginning only where that is near, or there is none at all. What strangers lay beside them counts for neither.
    """
    every = checkpoints_in(place.checkpoints, run=scope.run, accounts=scope.accounts, members=scope.members)
    there = tuple(one for one in every if one.trusted) or every  # none is where everybody may write, whoever made them
    choice = pick(_names(every, found.newest))
    older = [one for one in there if one.step is not None and one.step < found.before]
    near = found.before <= max(place.loss_back, 1)
    if choice.verdict is None and (left := older or ([] if near else there)):
        choice = pick({one.path.name for one in every}.difference(one.path.name for one in left), oldest=True)
    step = choice.verdict.step if choice.verdict is not None else None
    begins = found.newest if choice.verdict is None else step or 0
    aside = tuple(one for one in there if one.step is not None and one.step > begins)
    return WayBack(found.words(), choice, aside, found.skipping(step or 0), near and not older)


def _names(there: tuple[Found, ...], newest: int) -> list[str]:
    return [one.path.name for one in there if one.step is None or one.step > newest]


# ------------------------------------------------------------------------------------------


_TRACKERS = ("latest", "latest_checkpointed_iteration.txt")  # beside the checkpoints of DeepSpeed and of Megatron
FOLLOW_WITHIN = 900.0  # seconds in which the other ranks wait for rank 0, which may read every byte of a checkpoint
_TOLD = 20  # checkpoints that are passed over
SEEN_WITHIN = 60.0  # seconds until a rank sees what another one sees: a network file system shows new names late


class CannotResume(SystemExit):
    """The run has saved, and there is nothing that it may go on from: it does not begin anew. ``words``: why, and what to type.

    It ends the process with exit code 93, and an ``except Exception`` does not take it for "there is none".
    """

    def __init__(self, words: str) -> None:
        super().__init__(GIVEN_UP)
        self.words = words

    def __str__(self) -> str:
        return self.words


class Wanted(NamedTuple):
    """What the caller can load. ``only``: checkpoints that it can; ``without``: names that it does not want any more.
    ``compares``: it compares every byte itself while it loads."""

    only: Callable[[Path], bool] | None = None
    without: tuple[str, ...] = ()
    compares: bool = False
    damaged: tuple[str, ...] = ()  # those of them whose bytes are not what was saved, each with the reason
    unread: tuple[Verdict, ...] = ()  # others, whose bytes the disk does not give


class Unread(NamedTuple):
    """A good checkpoint that this run has committed and its caller cannot load. ``step`` None: it is not known."""

    name: str
    step: int | None


class Chosen(NamedTuple):
    """``path`` None: there is none, and the training begins anew. ``skip``: batches that the loop should skip now. ``unread``:
    the newest that there is where the caller can load none of them."""

    path: Path | None
    skip: int
    unread: Unread | None = None


def latest(
    place: RankContext,
    world: int | None,
    voice: Voice,
    over: Callable[[], bool],
    *,
    begun: bool,
    wanted: Wanted = Wanted(),  # noqa: B008 - a frozen value
) -> Chosen:
    """Return the newest one that is good to go on from. Raises OSError where they cannot be read, CannotResume where the run
    has saved and may use nothing of it.

    ``over`` tells whether a newer attempt has begun. ``begun``: the loop has made a step, so the attempt began from
    another one long ago. In a supervised run rank 0 chooses, and the other ranks read on its page what.
    """
    if not begun and _follows(place):
        return _follow(place)
    scope = _scope(place, world, voice, wanted)
    foreign: list[Verdict] = []

    def pick(without: Collection[str], oldest: bool = False) -> Choice:
        return _pick(place, scope, wanted, without, foreign, oldest=oldest)

    back = None if begun else way_back(place, pick, scope, voice)
    unread_here = back is not None and back.choice.verdict is None and bool(foreign)  # latest() will be asked for those
    if back is not None and _only_told(place, _the_way(back), back.why, tells=not unread_here):
        back = None
        foreign.clear()
    may = partial(_anew, place, world, foreign=foreign, wanted=wanted)
    if back is None:
        found = _newest(place, pick, scope.run, voice, over, begun=begun, why_not_anew=may, wanted=wanted)
        unread = next((Unread(one.path.name, one.step) for one in foreign if one.manifest), None)
        return found._replace(unread=unread if found.path is None else None)
    path = back.choice.verdict.path if back.choice.verdict is not None else None
    resumed = _resumed(place.checkpoints, back.choice, scope.run)
    resumed = resumed._replace(skipped=back.skipped, damaged=wanted.damaged)
    resumed = resumed._replace(why=f"{resumed.why}; {back.why}")
    if path is None and not back.anew:
        resumed = resumed._replace(refused=may(back.choice))
    if resumed.refused:
        if place.rank == 0:
            _tell_passed(back.choice, voice)
            if place.attempt_dir is not None and not over():
                _write(place.attempt_dir, resumed, voice)
        voice.say(resumed.refused)
        raise CannotResume(resumed.refused)
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


def _pick(
    place: RankContext,
    scope: Scope,
    wanted: Wanted,
    without: Collection[str],
    foreign: list[Verdict],
    *,
    oldest: bool = False,
) -> Choice:
    """Return the newest good one, or the ``oldest``, that the caller can load. ``foreign``: good ones that it cannot are added
    there. Raises OSError."""
    left = {*without, *wanted.without, *(one.path.name for one in wanted.unread)}
    while True:
        choice = choose(place.checkpoints, scope, without=left, oldest=oldest)
        if choice.verdict is None and wanted.unread:  # as ``choose`` does where all are such
            first = wanted.unread[0]
            words = (
                f"{first.words()}, and there is none before it: the disk, or its file system, has to be looked at first"
            )
            raise OSError(first.error, words, str(first.path))
        if choice.verdict is None or wanted.only is None or wanted.only(choice.verdict.path):
            return choice._replace(passed=(*wanted.unread, *choice.passed))
        foreign.append(choice.verdict)
        left.add(choice.verdict.path.name)


def _newest(
    place: RankContext,
    pick: Callable[[Collection[str]], Choice],
    run: Lineage | None,
    voice: Voice,
    over: Callable[[], bool],
    *,
    begun: bool,
    why_not_anew: Callable[[Choice], str],
    wanted: Wanted,
) -> Chosen:
    choice = pick(())
    suspicion = None if begun else _suspicion(place, voice)
    aside: Suspicion | None = None
    if suspicion is not None and _is(suspicion, choice):
        name = suspicion.checkpoint.checkpoint
        other = pick((name,))
        if other.verdict is not None and not _only_told(
            place, f"set {name} aside, and gone back to {other.verdict.path.name}", suspicion.words()
        ):
            choice, aside = other, suspicion
    path = choice.verdict.path if choice.verdict is not None else None
    resumed = _resumed(place.checkpoints, choice, run)
    damaged = {**dict(zip(wanted.without, wanted.damaged)), **_damaged(choice)} if not begun else {}
    resumed = resumed._replace(damaged=tuple(damaged.values()))
    if not begun:
        resumed = resumed._replace(skipped=_still_skipped(place, resumed.step or 0))
        if path is None:
            resumed = resumed._replace(refused=why_not_anew(choice))
    if place.rank == 0:
        _tell_passed(choice, voice)
        if not begun and place.attempt_dir is not None and not over():
            for name in damaged if path is not None else ():
                _set_aside(place, name, damaged[name], voice)
            suspect_is_out = aside is not None and _set_aside(place, aside.checkpoint.checkpoint, aside.words(), voice)
            if suspect_is_out and aside is not None:
                gone = aside.checkpoint
                resumed = resumed._replace(set_aside=gone.checkpoint, set_aside_step=gone.step)
            _write(place.attempt_dir, resumed, voice)
    if resumed.refused:
        voice.say(resumed.refused)
        raise CannotResume(resumed.refused)
    return Chosen(path, 0 if begun else resumed.skip)


# ------------------------------------------------------------------------------------------ whether it may begin anew


def _anew(place: RankContext, world: int | None, choice: Choice, foreign: Collection[Verdict], wanted: Wanted) -> str:
    """Return why the run may not begin anew, with what to type; "" where it may. Raises OSError where that cannot be seen."""
    if world is not None:  # asked for those of so many ranks alone
        return ""
    # what restore() could not have loaded anyhow says nothing, where there is a good one that the loop loads by itself
    passed = [one for one in choice.passed if not foreign or wanted.only is None or wanted.only(one.path)]
    found = next(filter(None, (_saved_there(place, one) for one in passed)), "")
    if not found and wanted.damaged:
        found = wanted.damaged[0]
    if not found:
        found = _on_record(place, foreign, wanted)
    if not found:
        return ""
    again = f"ftsupervise checkpoints anew {_word(place)}"
    look = f"ftsupervise checkpoints verify --all {shlex.quote(str(place.checkpoints))}"
    return (
        f"nothing in {place.checkpoints} may be used to go on, and this run has saved before: {found}. It does not begin again "
        f"at step 0 over that. Look: {look}; to begin anew: {again}"
    )


def not_gone_on(place: RankContext, unread: Unread, step: int, voice: Voice) -> CannotResume:
    """Record that this run begins over what it had saved, and return the error that says so: ``restore()`` could not load
    ``unread``, nobody asked ``latest()`` for it, and the first step of the loop is ``step``."""
    words = (
        f"{place.checkpoints / unread.name} is good and this run has saved it, but guard.save() did not write it, so "
        f"guard.restore() does not load it, and the loop begins at step {step}. It does not begin again over that. To load it "
        "once in the program: guard.latest() names it, after guard.restore(); "
        f"to begin anew: ftsupervise checkpoints anew {_word(place)}"
    )
    refuse(place, words, voice)
    voice.say(words)
    return CannotResume(words)


def _word(place: RankContext) -> str:
    return shlex.quote(str(place.rundir.root if place.rundir is not None else place.checkpoints))


def _saved_there(place: RankContext, verdict: Verdict) -> str:
    """Return what is wrong with a checkpoint that this run has committed; "" where it is none."""
    if verdict.state is CheckpointState.NOT_TRUSTED:
        try:
            found = os.lstat(manifest_of(verdict.path))
            if found.st_uid not in (os.geteuid(), 0, *run_owner(place)):  # a stranger's: none of ours
                return ""
            if place.rundir is not None and _is_anothers(place.rundir, verdict.path):
                return ""
            return f"{verdict.words()} (type: {_remedy(verdict.path, run_owner(place))})"
        except OSError:
            return ""
    return verdict.words() if verdict.manifest and verdict.state is not CheckpointState.ANOTHERS else ""


def _is_anothers(rundir: RunDir, checkpoint: Path) -> bool:
    """Return whether another run says that it has written a checkpoint: its owner may have opened it."""
    try:
        return belongs(read_lineage(rundir), read_head(checkpoint), checkpoint.parent) is Belongs.ANOTHERS
    except ValueError:
        return False


def _remedy(checkpoint: Path, accounts: Collection[int]) -> str:
    """Return what to type so that it is trusted again. Raises OSError."""
    folder = checkpoint.parent
    if distrust_folder(folder, accounts):
        return remedy(folder.stat(), folder)
    return remedy(checkpoint.stat(), checkpoint).replace("chmod go-w", "chmod -R go-w")


def _on_record(place: RankContext, foreign: Collection[Verdict], wanted: Wanted) -> str:
    """Return what the ledger or a program's own tracker says was saved; "" where nothing was."""
    names = ", ".join(one.path.name for one in foreign)
    if place.rundir is not None:
        saved = saved_before(place.rundir, place.attempt)
        if wanted.only is not None and saved.restorable is not None:
            others = f"; {names} is good, but guard.save() did not write it" if names else ""
            return f"guard.save() has saved step {saved.restorable}, and no checkpoint of it is good{others}"
        # a loop of restore() may keep checkpoints of its own elsewhere, and say saved(); or load by latest() what restore()
        # cannot: where it does neither, its first step says so (``not_gone_on``)
        if saved.step is not None and not foreign and wanted.only is None:
            return f"attempt {saved.attempt} has saved step {saved.step}, and it is not there any more"
    for name in () if foreign else _TRACKERS:
        path = place.checkpoints / name
        try:
            if path.is_file() and path.stat().st_size and path.stat().st_uid in (os.geteuid(), *run_owner(place)):
                return f"{path} names a checkpoint that is not there or not good"
        except OSError:
            continue
    return ""


# ------------------------------------------------------------------------------------------------ following rank 0


def _follows(place: RankContext) -> bool:
    """Return whether this rank reads from rank 0's page what to begin from. Not where a launcher may start ranks again within
    an attempt: an older page would be read, and nothing tells the ranks of one start from those of another."""
    return place.rank > 0 and place.attempt_dir is not None and not _may_start_again()


def _may_start_again() -> bool:
    env = os.environ
    once = env.get("TORCHELASTIC_MAX_RESTARTS") == "0" and env.get("GROUP_WORLD_SIZE") == "1"
    return "TORCHELASTIC_RUN_ID" in env and not once


def _own_page(attempt_dir: Path) -> Path:
    """Return the page by which rank 0 tells the ranks that were launched with it: an attempt may launch several groups, one
    after the other or at once, each with a rank 0. All ranks of one launch come to the same name."""
    names = ("SLURM_JOB_ID", "SLURM_STEP_ID", "TORCHELASTIC_RUN_ID")
    more = ("MASTER_ADDR", "MASTER_PORT") if "TORCHELASTIC_RUN_ID" in os.environ else ()
    known = [os.environ.get(name, "") for name in (*names, *more)]
    if not any(known[1:]):
        return attempt_dir / RESUMED
    return attempt_dir / f"resumed-{blake2b(repr(known).encode(), digest_size=6).hexdigest()}.json"


def _read_own(attempt_dir: Path) -> Resumed | None:
    """Return what rank 0 of this launch has told; None where it has not, or it cannot be read."""
    try:
        return read_record(Resumed, _own_page(attempt_dir))
    except (OSError, ValueError):
        return None


def _follow(place: RankContext) -> Chosen:
    assert place.attempt_dir is not None
    until, page = time.monotonic() + FOLLOW_WITHIN, place.attempt_dir
    while (found := _read_own(page)) is None:
        _wait(until, page, "rank 0 has not told what this attempt begins from: call guard.latest() on rank 0 too")
    if found.refused:
        raise CannotResume(found.refused)
    if not found.checkpoint:
        return Chosen(None, 0)
    path = place.checkpoints / found.checkpoint
    wait_for(path)
    return Chosen(path, found.skip)


def wait_for(path: Path) -> None:
    """Wait until this rank sees a checkpoint that rank 0 has chosen. Raises OSError where it does not."""
    until = time.monotonic() + SEEN_WITHIN
    while not os.path.lexists(manifest_of(path)):
        _wait(until, path.parent, f"rank 0 begins from {path.name}, and this rank does not see it")


def _wait(until: float, folder: Path, why: str) -> None:
    if time.monotonic() > until:
        raise OSError(errno.ETIMEDOUT, why, str(folder))
    with suppress(OSError):
        os.listdir(folder)  # a client of a network file system asks the server then
    time.sleep(0.1)


def _damaged(choice: Choice) -> dict[str, str]:
    """Return those that were passed over because they have other bytes than were committed: name -> the reason."""
    return {one.path.name: one.words() for one in choice.passed if one.state is CheckpointState.DAMAGED}


def set_damaged_aside(place: RankContext, name: str, why: str, voice: Voice) -> None:
    """Put a checkpoint aside whose bytes are not those that were saved. A loop without a supervisor passes it over."""
    if place.attempt_dir is not None:
        _set_aside(place, name, why, voice)


def refuse(place: RankContext, why: str, voice: Voice) -> None:
    """Record that no attempt can begin before a person has acted, so that the supervisor starts none."""
    if place.attempt_dir is not None and place.rank == 0:
        before = read_page(Resumed, place.attempt_dir) or Resumed(at=datetime.now(timezone.utc))
        _write(place.attempt_dir, before._replace(refused=why), voice)


def skip_of(attempt_dir: Path) -> int | None:
    """Return the batches that this attempt skips, as rank 0 has recorded; None where it has not yet."""
    found = _read_own(attempt_dir)
    return None if found is None else found.skip


def _scope(place: RankContext, world: int | None, voice: Voice, wanted: Wanted) -> Scope:
    try:
        thoroughness = Thoroughness(place.verify)
    except ValueError:
        voice.once(f"{ENV_GUARD}VERIFY={place.verify!r} is not understood: every byte is verified")
        thoroughness = Thoroughness.FULL
    if wanted.compares:
        thoroughness = Thoroughness.SIZES
    elif place.rank and thoroughness is Thoroughness.FULL:  # rank 0 reads every byte for all
        thoroughness = Thoroughness.QUICK
    run = None if place.rundir is None else read_lineage(place.rundir)
    return Scope(thoroughness, world, run_owner(place), run=run, members=believed_group(place.rundir))


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


def _only_told(place: RankContext, what: str, why: str, *, tells: bool = True) -> bool:
    """Return whether the run does not go back, because that is only told. Rank 0 writes it down."""
    if place.rundir is None or not Observes(place.rundir, place.observe)(BACK):
        return False
    if tells and place.rank == 0 and place.attempt_dir is not None:
        tell_only(BACK, what, why, place.attempt_dir / "run.log")
    return True


def _the_way(back: WayBack) -> str:
    """Return what would have been done to go back, after "would have"."""
    verdict = back.choice.verdict
    to = f"gone back to {verdict.path.name}" if verdict is not None else "begun anew"
    aside = f", and set {', '.join(one.path.name for one in back.aside[:3])} aside" if back.aside else ""
    more = f" with {len(back.aside) - 3} more" if len(back.aside) > 3 else ""
    return f"{to}{aside}{more}"


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
        before = (one.resumed for one in ledger.backwards(place.rundir, place.attempt))
        found = next((one for one in before if one is not None and one.begun), None)
    except OSError:
        return ()
    return () if found is None else tuple(one for one in found.skipped if one.step <= step)


def _tell_passed(choice: Choice, voice: Voice) -> None:
    for one in choice.passed[:_TOLD]:
        voice.once(f"{checkpoint_words(one.words())}; it is passed over")
    if len(choice.passed) > _TOLD:  # others may have laid thousands there
        voice.once(f"{len(choice.passed) - _TOLD:,} more are passed over")


def _set_aside(place: RankContext, name: str, why: str, voice: Voice) -> bool:
    """Return whether it was set aside. Where it cannot be, this attempt passes it over."""
    try:
        put = set_aside(place.checkpoints / name, why, datetime.now(timezone.utc), area=place.staging)
    except OSError as error:
        voice.once(f"{checkpoint_words(name)} cannot be set aside ({error.strerror}); this attempt passes it over")
        return False
    voice.once(f"{checkpoint_words(name)} is set aside in {put.parent}: {why}")
    return True


def _write(attempt_dir: Path, resumed: Resumed, voice: Voice) -> None:
    """Record what the attempt begins from. Asked a second time, it keeps on record what was set aside at first."""
    before = read_page(Resumed, attempt_dir)
    if before is not None and before.set_aside and not resumed.set_aside:
        resumed = resumed._replace(
            set_aside=before.set_aside, set_aside_step=before.set_aside_step, more_aside=before.more_aside
        )
    try:
        if (own := _own_page(attempt_dir)).name != RESUMED:
            write_json(own, resumed, sync=False)
        write_page(attempt_dir, resumed)
    except OSError as error:
        voice.once(f"cannot write which checkpoint this attempt began from: {error.strerror}")


def _resumed(folder: Path, choice: Choice, run: Lineage | None) -> Resumed:
    passed = tuple(one.words() for one in choice.passed[:10])
    verdict = choice.verdict
    if verdict is None:
        return Resumed(at=datetime.now(timezone.utc), why="there is no good one", passed=passed)
    names = [one.path.name for one in checkpoints_in(folder, run=run)]
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
