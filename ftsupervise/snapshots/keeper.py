"""The supervisor's part of the memory tier: the job's folder on every node, and the step that the next attempt begins from.

Before each attempt the nodes say which snapshots they hold. ``choice.py`` takes the newest step that all ranks hold,
unless the disk has a newer one; all nodes give up what is newer, and nodes that get ranks of others fetch their snapshots. Only
then do the ranks start, with the step in their environment. Without a single snapshot nothing of this takes any time.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple, Protocol

from ftsupervise.host.in_time import Every, PendingCall, in_time
from ftsupervise.model import Attempt, Claim
from ftsupervise.rundir import fence, ledger, switches
from ftsupervise.rundir.anchor import Anchor, read_anchor
from ftsupervise.rundir.attempt_pages import CopiesPage, KeptSnapshotPage, read_page, write_page
from ftsupervise.rundir.beginnings import begun_anew
from ftsupervise.rundir.lineage import Lineage, read_lineage
from ftsupervise.rundir.paths import ENV_GUARD, ENV_SNAPSHOT_KEPT, ENV_SNAPSHOT_STEP, ENV_SNAPSHOTS, RunDir, tell
from ftsupervise.snapshots import kept, room
from ftsupervise.snapshots.choice import Begun, HeldSnapshot, MemoryChoice, Source, choose
from ftsupervise.snapshots.doubts import (
    DOUBT,
    Beside,
    against,
    beside,
    failed_from,
    put_there,
    spoils,
    steps_in,
    taken_back,
    weight,
)
from ftsupervise.snapshots.kept import KeptPage, KeptSnapshot
from ftsupervise.snapshots.node import (
    NO_ANSWER,
    QUESTION,
    Begin,
    Done,
    Keep,
    Supply,
    begin_from,
    held_in,
    keep,
    read_done,
    read_held,
    unverified_words,
)
from ftsupervise.snapshots.ring import CopyState, SnapshotRing
from ftsupervise.snapshots.room import SnapshotPlace
from ftsupervise.snapshots.slots import SLOTS, SnapshotId
from ftsupervise.truth import Beginning, NotFrom, RankState, Resumed

# Keeps the newest snapshot of a job that ends on the disk, where the next member of the chain begins.
#
# It is kept where the loop has not saved those steps itself: a job that was killed at its limit, that leaves because a
# node is bad, or whose loop did not hear the warning. Every node writes the snapshots of its ranks, within the time that
# is left; the folder gets its name when all have. It is fenced as a checkpoint is: once a newer attempt has begun nothing
# appears any more.

_LOOK = 10.0  # seconds for the file system to show the kept snapshot
_LATE = 2.0  # seconds in which a checkpoint that is missed may still show itself
_ANSWER = 1.0  # seconds for a listing
_ANEW = "somebody has begun the run anew since"


class Target(NamedTuple):
    """The place where an attempt may keep a snapshot."""

    staging: Path  # its area
    until: float  # monotonic


class KeptSnapshots:
    """The kept snapshots of one run."""

    def __init__(self, rundir: RunDir, checkpoints: Path) -> None:
        self._rundir, self._checkpoints = rundir, checkpoints
        self._there: bool | None = None  # None: not looked yet
        self._known: Lineage | None = None
        self._doubts: dict[SnapshotId, int] = {}  # of this job, whose ends may not be on record yet

    def doubt(self, one: SnapshotId, weight: int) -> None:
        """Note that an attempt began from ``one`` and left nothing newer in memory."""
        self._doubts[one] = self._doubts.get(one, 0) + weight

    def candidate(self, before: int, saved: int | None) -> tuple[KeptSnapshot | None, Beside, str]:
        """Return the snapshot that attempt ``before`` may begin from and what lay beside it; or why the newest is not used.

        ``saved``: the newest step on the disk, as this job knows.
        """
        if self._there is False:
            return None, Beside(), ""
        found = in_time(lambda: self._look(before, saved), _LOOK)
        if found is None:
            return None, Beside(), "the disk of the checkpoints does not answer"
        return found

    def _look(self, before: int, saved: int | None) -> tuple[KeptSnapshot | None, Beside, str]:
        why = ""
        try:
            kept = self._mine()
            self._there = bool(kept)
            names = self._names() if kept else {}
            first = switches.counts_from(self._rundir) if kept else 1
            for one in reversed(kept):
                try:
                    page = self._page(one)
                except (OSError, ValueError) as error:
                    why = why or f"the snapshot of step {one.step}, kept on the disk, is not used: {error}"
                    continue
                attempts = self._since(one, before)
                speaks = (
                    self._against(one, page, names, first, attempts)
                    or ("attempts have failed from it" if self._doubts.get(one.id, 0) >= DOUBT else "")
                    or ("a newer checkpoint was saved since" if saved is not None and saved >= one.step else "")
                )
                if not speaks:
                    return one, page.beside, ""
                why = why or f"the snapshot of step {one.step}, kept on the disk, is not used: {speaks}"
                if self._failed(one, page, first, attempts):
                    break
        except (OSError, ValueError) as error:
            return None, Beside(), f"a snapshot kept on the disk is not used: {error}"
        return None, Beside(), why

    def _since(self, one: KeptSnapshot, before: int | None = None) -> tuple[Attempt, ...]:
        """Return the attempts from the one that made it on."""
        return tuple(reversed([*ledger.backwards(self._rundir, before, one.attempt)]))

    def _against(
        self,
        one: KeptSnapshot,
        page: KeptPage,
        names: Mapping[str, int | None],
        first: int,
        attempts: Sequence[Attempt],
    ) -> str:
        return (
            _of_another(page, attempts)
            or (_ANEW if one.attempt <= begun_anew(self._rundir) else "")
            or taken_back(self._checkpoints, names, page.beside.anchor)
            or put_there(names, one.step, page.beside)
            or against(one.id, attempts, first)
        )

    def _failed(self, one: KeptSnapshot, page: KeptPage, first: int, attempts: Sequence[Attempt]) -> bool:
        """Return whether attempts have failed from it. Then the next one begins from a checkpoint: no older one is used, which
        may be there where it could not be removed."""
        if _of_another(page, attempts):
            return False
        return self._doubts.get(one.id, 0) >= DOUBT or bool(failed_from(one.id, attempts, first))

    def users(self) -> dict[Path, str]:
        """Return what the next attempt does with each of this run's: path -> a clause. For people. Raises OSError."""
        kept, found, instead = self._mine(), dict[Path, str](), ""
        names, first = (self._names(), switches.counts_from(self._rundir)) if kept else ({}, 1)
        for one in reversed(kept):
            why = instead
            if not why:
                try:
                    page, attempts = self._page(one), self._since(one)
                    why = self._against(one, page, names, first, attempts)
                    failed = self._failed(one, page, first, attempts)
                    instead = (
                        "attempts have failed from a newer one" if failed else "" if why else "a newer one is used"
                    )
                except (OSError, ValueError) as error:
                    why = str(error)
            found[one.path] = f"it is not used: {why}" if why else "the next attempt begins from it"
        return found

    def anew_since(self, attempt: int) -> str:
        """Return that somebody has begun the run anew since ``attempt``, as a clause; "" where nobody is seen to."""
        try:
            found = in_time(lambda: begun_anew(self._rundir), _ANSWER)
        except OSError:
            return ""
        return _ANEW if found is not None and found >= attempt else ""

    def beside(self, step: int, was: Anchor) -> tuple[Beside, str] | None:
        """Return what lies beside a snapshot of ``step`` now, and that its anchor ``was`` is gone, "" if not; None where the
        disk does not answer, or cannot be read.
        """

        def look() -> tuple[Beside, str]:
            names = self._names()
            return beside(self._checkpoints, names, step, was), taken_back(self._checkpoints, names, was)

        until = monotonic() + _LATE
        while True:
            try:
                found = in_time(look, _ANSWER)
            except OSError:
                return None
            if found is None or not found[1] or monotonic() > until:
                return found
            sleep(0.2)  # a network file system may show a moment later what another node has just committed

    def write(
        self, page: KeptPage, to: Target, ask: Callable[[str, float], Mapping[str, Done]]
    ) -> tuple[Path | None, str]:
        """Return where it is kept now, or why not.

        ``ask(folder, seconds)`` has all nodes write what they hold: node -> "done", or why not.
        """
        one = SnapshotId(page.step, page.attempt)
        staged = to.staging / f"snapshot-{one.step}-{one.attempt}"
        target: Path | None = None

        def prepare() -> str:
            nonlocal target
            if not self._me().id:
                return f"{self._rundir.lineage} gives this run no id"
            target = self._checkpoints / kept.name_of(one, self._run())
            staged.mkdir(mode=0o700)
            return ""

        def commit() -> str:
            assert target is not None
            kept.write_page(staged, self._complete(page, staged))
            _sync(staged)
            if not fence.move(staged, target, to.staging):
                return "a newer attempt has begun"
            _sync(self._checkpoints)
            self._there = True
            self._remove(but=target)
            return ""

        for work in (prepare, lambda: _wrong(ask(str(staged), to.until - monotonic())), commit):
            left = to.until - monotonic()
            problem = in_time(lambda work=work: _said(work), left) if left > 0 else None  # type: ignore[misc]
            if problem is None:
                return None, "there was too little time"
            if problem:
                return None, problem
        return target, ""

    def superseded_by(self, saved: int | None) -> None:
        """Remove older kept snapshots: a checkpoint of step ``saved`` is on the disk."""
        if saved is not None and self._there:
            in_time(lambda: self._remove(until=saved), _LOOK)

    def finished(self) -> None:
        """Remove all: the run is complete."""
        in_time(self._remove, _LOOK)

    def _remove(self, but: Path | None = None, until: float = inf) -> None:
        try:
            for one in self._mine():
                if one.path != but and one.step <= until and self._may_go(one):
                    kept.remove(one)
        except OSError:
            return

    def _may_go(self, one: KeptSnapshot) -> bool:
        try:
            return not _of_another(self._page(one), self._attempt(one.attempt))
        except (OSError, ValueError):  # somebody else's, as far as is known
            return False

    def _me(self) -> Lineage:
        """Raises OSError."""
        if self._known is None or not self._known.id:
            self._known = read_lineage(self._rundir)
        return self._known

    def _run(self) -> str:
        return kept.run_of(self._me(), self._rundir.root.name if self._rundir.whole is not None else "")

    def _mine(self) -> list[KeptSnapshot]:
        """Return this run's, oldest first. Raises OSError."""
        return kept.all_in(self._checkpoints, self._run())

    def _page(self, one: KeptSnapshot) -> KeptPage:
        """Raises OSError; ValueError where others than this account may write it."""
        return kept.read_trusted(one.path, (self._rundir.root.stat().st_uid,))

    def _names(self) -> dict[str, int | None]:
        """Return the checkpoints in the folder, but those of other runs. Raises OSError."""
        return steps_in(self._checkpoints, self._me())

    def _attempt(self, number: int) -> tuple[Attempt, ...]:
        return tuple(ledger.backwards(self._rundir, number + 1, number))

    def _complete(self, page: KeptPage, staged: Path) -> KeptPage:
        """Return the page with the run that keeps it. Raises OSError, ValueError."""
        me, made = self._me(), self._attempt(page.attempt)
        code = kept.code_of(staged)
        page = page._replace(run=me.name, run_id=me.id, run_dir=me.root, code=code, at=datetime.now(timezone.utc))
        return page._replace(began=made[0].started if made else None)


def _of_another(page: KeptPage, attempts: Sequence[Attempt]) -> str:
    """Return that the attempt which made a snapshot is not the one in this ledger, as a clause; "" where it is."""
    made = next((one for one in attempts if one.number == page.attempt), None)
    if made is not None and page.began == made.started:
        return ""
    return f"the ledger does not know the attempt {page.attempt} that made it: the run directory is a copy, or was made anew"


def _said(work: Callable[[], str]) -> str:
    try:
        return work()
    except (OSError, ValueError) as error:
        return str(error) or type(error).__name__


def _wrong(answers: Mapping[str, Done]) -> str:
    return "; ".join(f"{node}: {one.problem}" for node, one in sorted(answers.items()) if one.problem)[:300]


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


# ------------------------------------------------------------------------------------------


_ASK = 1.5  # seconds for all nodes to say what they hold
_ASKED = 3 * _ASK  # … once their agents have been waited for
_TELL = 5.0  # seconds for all nodes to give up what is newer
_COMPARE = 20.0  # seconds for all nodes to compare them with their digests: 20 GB or more for each thread
_FETCH = 60.0  # seconds for snapshots to come from other nodes; the disk is used if they take longer
_LINE = 20  # attempts that led to a kept snapshot and are named on its page
_WRITE = 2.0  # seconds between two pages about the copies
ENV_SLOTS = f"{ENV_GUARD}SNAPSHOT_SLOTS"


def place_for(job: str, copies: float, guard: Mapping[str, str]) -> SnapshotPlace:
    """Return the folder for the snapshots of ``job``; none where the settings turn them off."""
    off = guard.get("SNAPSHOT_EVERY") == "off"
    waits = copies > 0 and guard.get("SNAPSHOT_WAIT", "off") != "off"
    return SnapshotPlace() if off else SnapshotPlace(room.new_folder(job), copies, waits)


class AgentsOfNodes(Protocol):
    """The agents of the job's nodes, as the keeper of the snapshots needs them."""

    remote: bool  # False: there are none, and the ranks run beside us
    ring: SnapshotRing

    def present(self) -> list[str]: ...
    def silent(self, nodes: Iterable[str], seconds: float) -> list[str]: ...
    def ask(self, questions: Mapping[str, str], timeout: float) -> dict[str, str]: ...


class _Last(NamedTuple):
    """The attempt before: where its ranks ran, and how far it came."""

    number: int = 0
    nodes: tuple[str, ...] = ()
    homes: Mapping[int, str] = {}
    reached: int | None = None
    from_kept: SnapshotId | None = None  # it began from this snapshot, which an older job had kept
    folder: Path = Path()
    anchor: Anchor = Anchor()  # the checkpoint that the state in memory goes on from
    unverified: frozenset[int] = frozenset()  # ranks whose snapshot of then had no digest to compare it with


class SnapshotKeeper:
    """The snapshots of one job."""

    def __init__(self, where: SnapshotPlace, agents: AgentsOfNodes, node: str, kept: KeptSnapshots) -> None:
        """``node``: this one, where there are no agents."""
        self._folder, self._agents, self._kept = where.folder, agents, kept
        self._node = node or os.uname().nodename
        self._copies = agents.remote and where.copies > 0
        self._lineage: list[Begun] = []
        self._doubts: dict[int, int] = {}  # step -> how often attempts that began from it came to no newer snapshot
        self._weight = 1  # of the last failure
        self._saved: int | None = None  # newest step on disk, as the loop said
        self._last = _Last()
        self._ahead: PendingCall[dict[str, str]] | None = None  # a question that is being asked
        self._spoilt = ""  # why no snapshot is used before the next attempt has begun
        self._used = False  # true if a rank of this job has had a snapshot
        self._lock: int | None = None
        self._pages: _CopiesPage | None = None
        if self._folder and not agents.remote:
            room.remove_leftovers()
            self._lock = room.make(self._folder, node)

    def begin(self, mine: Claim, nodes: Sequence[str], log: Path) -> dict[str, str]:
        """Return the environment variables for the ranks of the next attempt.

        ``nodes``: where they will run, in their order.
        """
        if not self._folder:
            return {}
        env = {ENV_SNAPSHOTS: self._folder}
        if self._copies:
            env[ENV_SLOTS] = str(SLOTS)
        self._require_anchor()
        chosen, told, anchor = self._choose(tuple(nodes), log), False, self._last.anchor
        spoilt, self._spoilt = bool(self._spoilt), ""
        if chosen is None or chosen.source is not Source.MEMORY:
            self._doubts.clear()
            if self._last.from_kept is not None:
                self._kept.doubt(self._last.from_kept, self._weight)
            older, was, why = self._kept.candidate(mine.number, self._saved)
            if why:
                tell(log, why)
            if older is not None and not spoilt:
                why = chosen.why if chosen is not None else ""
                chosen = MemoryChoice(Source.KEPT, older.step, older.attempt, why=why)
                env[ENV_SNAPSHOT_KEPT] = str(older.path)
                anchor = was.anchor
        kept_one = chosen is not None and chosen.source is Source.KEPT
        from_kept = SnapshotId(chosen.step, chosen.attempt) if chosen is not None and kept_one else None
        if chosen is not None and chosen.source in (Source.MEMORY, Source.KEPT):
            env[ENV_SNAPSHOT_STEP] = str(chosen.step)
        if chosen is not None:
            if chosen.source is Source.MEMORY and self._last.unverified:
                words = unverified_words(self._last.unverified)
                chosen = chosen._replace(why="; ".join(filter(None, (chosen.why, words))))
            told = self._record(mine, chosen, log)
        began = chosen.step if chosen is not None else -1
        self._lineage.append(Begun(mine.number, began))
        self._agents.ring.begin(mine.number, began if told else -1)
        self._last = _Last(mine.number, tuple(nodes), from_kept=from_kept, folder=mine.folder, anchor=anchor)
        if self._copies:
            self._pages = _CopiesPage(mine, self._agents)
        return env

    def _require_anchor(self) -> None:
        """Give up all snapshots in memory where somebody has taken away the checkpoint that they go on from, or has begun the
        run anew."""
        if self._spoilt or not self._last.number or (self._agents.remote and not self._agents.ring.active):
            return
        why = self._kept.anew_since(self._last.number)
        if not why and self._last.anchor.checkpoint:
            found = self._kept.beside(0, self._last.anchor)
            why = found[1] if found is not None else ""
        if why:
            self._spoilt, self._saved, self._last = why, None, self._last._replace(anchor=Anchor())

    def finished(self) -> None:
        """Note that the run is complete."""
        self._kept.finished()

    def keep(self, mine: Claim, to: Target, log: Path) -> None:
        """Keep on the disk what the loop has not saved: the job ends. Bounded by ``to.until``."""
        if not self._folder or not self._last.number or (self._agents.remote and not self._agents.ring.active):
            return
        self._require_anchor()
        if self._spoilt:
            tell(log, f"the snapshots in memory are not kept on the disk: {self._spoilt}")
            return
        held = self._held(log)

        def chosen_without(refused: Collection[int]) -> MemoryChoice:
            return choose(held, self._lineage, disk=self._saved, refused=refused)

        chosen = chosen_without(self._doubted(chosen_without, held))
        if chosen.source is not Source.MEMORY or (self._saved is not None and self._saved >= chosen.step):
            return
        began, one = monotonic(), SnapshotId(chosen.step, chosen.attempt)
        where: dict[str, list[int]] = {}
        for rank, node in {row.rank: row.node for row in held if (row.step, row.attempt) == one}.items():
            where.setdefault(node, []).append(rank)

        unverified: set[int] = set()

        def ask(folder: str, seconds: float) -> Mapping[str, Done]:
            questions = {node: Keep(*one, tuple(sorted(ranks)), folder) for node, ranks in where.items()}
            if self._agents.remote:
                answers = self._asked({node: asked.question() for node, asked in questions.items()}, seconds)
            else:
                place = room.node_folder(self._folder, self._node)
                answers = {node: keep(place, asked) for node, asked in questions.items()}
            unverified.update(rank for answer in answers.values() for rank in answer.unverified)
            return {node: answers.get(node, NO_ANSWER) for node in questions}

        found = self._kept.beside(one.step, self._last.anchor)
        there = found[0] if found is not None else Beside(self._last.anchor)
        page = KeptPage(one.step, one.attempt, chosen.world, there, line=tuple(self._lineage[-_LINE:]))
        path, problem = self._kept.write(page, to, ask)
        if path is None:
            tell(log, f"step {one.step} is in memory only, and was not kept on the disk: {problem}")
        else:
            tell(log, f"step {one.step} was in memory only: it is kept in {path} ({monotonic() - began:.1f} s)")
            if unverified:
                tell(log, unverified_words(unverified))
            try:
                write_page(mine.folder, KeptSnapshotPage(datetime.now(timezone.utc), one.step, str(path)))
            except OSError as error:
                tell(log, f"cannot write what attempt {mine.number} has kept: {error}")

    def ended(self, ended: Attempt, states: Sequence[RankState]) -> None:
        """Note that an attempt has ended. ``states``: the last ones of its ranks."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._note_disk(ended.saved)
        if spoils(trouble := ended.trouble) and trouble is not None:
            self._spoilt, self._saved = f"{trouble.kind}: {trouble.words}", None
            self._doubts.clear()
        homes = {one.rank: one.node for one in states}
        self._last = self._last._replace(homes=homes, reached=ended.last_step)
        self._weight = weight(ended.failure)
        self._note_not_from(ended.first_step)

    def _note_not_from(self, first: int | None) -> None:
        """Correct where the attempt that has ended began, where its ranks did not take the snapshot: by its own pages. One that
        has begun from nothing at all leaves everything as it was, and says nothing against the snapshot."""
        if read_page(NotFrom, self._last.folder) is None or not self._lineage:
            return
        resumed, mine = read_page(Resumed, self._last.folder), self._lineage.pop()
        self._last, self._weight = self._last._replace(from_kept=None), 0
        if resumed is not None and resumed.begun:
            self._lineage.append(mine._replace(step=-1 if resumed.step is None else resumed.step))
        elif first is not None:
            self._lineage.append(mine._replace(step=first - 1))

    def _note_disk(self, saved: int | None) -> None:
        """Note what the attempt that has ended leaves on the disk, as it says itself."""
        resumed, newest = read_page(Resumed, self._last.folder), read_anchor(self._last.folder)
        if resumed is not None and resumed.begun:  # what was newer then is set aside, or no good
            anchor = Anchor(resumed.checkpoint, resumed.step, resumed.committed)
            self._saved, self._last = resumed.step, self._last._replace(anchor=anchor)
        if newest is not None:
            self._last = self._last._replace(anchor=newest)
        if saved is not None:
            self._saved = max(saved, self._saved if self._saved is not None else saved)
            self._kept.superseded_by(self._saved)

    def close(self) -> None:
        """Remove the snapshots in this node's memory; the agents do it on theirs."""
        if self._pages is not None:
            self._pages.close()
        if self._lock is not None:
            room.remove(self._folder, self._node)
            os.close(self._lock)
            self._lock = None

    # ------------------------------------------------------------------------------------------------------- choosing

    def _choose(self, nodes: tuple[str, ...], log: Path) -> MemoryChoice | None:
        """Choose, and prepare it on all nodes. None where no rank of this job has ever had a snapshot."""
        if not self._last.number or (self._agents.remote and not self._agents.ring.active):
            return None
        held, places = self._held(log), self._places(nodes)
        seen = held if places is not None else []
        # the snapshots are newer than the last report of a step
        newest = [one.step for one in held if one.attempt == self._last.number]
        newest += [self._last.reached] if self._last.reached is not None else []
        self._last = self._last._replace(reached=max(newest, default=None))
        self._used = self._used or bool(held)
        if not self._used:
            return None

        def chosen_without(refused: Collection[int]) -> MemoryChoice:
            homes = self._last.homes
            found = choose(seen, self._lineage, disk=self._saved, refused=refused, places=places, homes=homes)
            return found if places is not None else found._replace(why="the run has another number of nodes now")

        if self._spoilt:
            spoilt = MemoryChoice(Source.START, why=self._spoilt)
            self._carry_out(spoilt, held, places or {})
            return spoilt
        refused = self._doubted(chosen_without, seen)
        while True:
            chosen = chosen_without(refused)
            problem, damaged = self._carry_out(chosen, held, places or {})
            if not problem or chosen.source is not Source.MEMORY:
                return chosen
            tell(log, f"the snapshot of step {chosen.step} cannot be used: {problem}")
            if damaged:  # there may be a copy elsewhere
                seen = [one for one in seen if (one.node, one.rank, one.step) not in damaged]
            else:
                refused.add(chosen.step)

    def _doubted(
        self, chosen_without: Callable[[Collection[int]], MemoryChoice], held: Sequence[HeldSnapshot]
    ) -> set[int]:
        """Return the steps that are refused: all where attempts came from one to no newer one too often. Such a state may be
        poisoned, and the ones before it too; the next attempt begins from the disk.
        """
        refused = {step for step, count in self._doubts.items() if count >= DOUBT}
        best, began = chosen_without(refused), self._lineage[-1].step if self._lineage else -1
        if best.source is not Source.MEMORY or best.step > max(self._doubts, default=-1) > -1:
            self._doubts.clear()
        if best.source is Source.MEMORY and best.step == began:
            self._doubts[began] = self._doubts.get(began, 0) + self._weight
            if self._doubts[began] >= DOUBT:
                return {one.step for one in held}
        return refused

    def ask_ahead(self) -> None:
        """Ask the nodes what they hold, for the ``begin`` that may follow: the ranks have ended."""
        self._ahead = None
        if self._agents.remote and self._agents.ring.active:
            self._ahead = PendingCall(self._ask, "asking")

    def _ask(self) -> dict[str, str]:
        nodes = self._agents.present()
        until = monotonic() + _ASK  # agents that have just been started again have not reported yet
        while self._agents.silent(nodes, inf) and monotonic() < until:
            sleep(0.02)
        return self._agents.ask(dict.fromkeys(nodes, QUESTION), _ASK)

    def _held(self, log: Path) -> list[HeldSnapshot]:
        if not self._agents.remote:
            return held_in(room.node_folder(self._folder, self._node), self._node)
        ahead, self._ahead = self._ahead, None
        answers = (ahead(_ASKED) if ahead is not None else None) or {}
        nodes = self._agents.present()
        if not answers.keys() >= set(nodes):
            answers = self._ask()
        silent = [node for node in nodes if node not in answers]
        if silent:
            tell(log, f"it is not known which snapshots are in the memory of {', '.join(silent[:5])}: no answer")
        return [one for node, text in answers.items() for one in read_held(text, node)]

    def _places(self, nodes: tuple[str, ...]) -> dict[int, str] | None:
        """Return rank -> the node that it will run on; None where that cannot be told.

        Slurm numbers the ranks of a step by its nodes' order, so those of the first node then are on the first node
        now.
        """
        before = self._last.nodes
        if len(before) != len(nodes):
            return None
        now = dict(zip(before, nodes, strict=True))
        return {rank: now.get(node, node) for rank, node in self._last.homes.items()}

    def _carry_out(
        self, chosen: MemoryChoice, held: Sequence[HeldSnapshot], places: Mapping[int, str]
    ) -> tuple[str, Collection[tuple[str, int, int]]]:
        """Invalidate newer snapshots, fetch those that are elsewhere, and compare those that are there with their
        digests.

        Returns why that failed, "" if it did not; and the node, rank and step of a damaged one.
        """
        attempt, step = chosen.attempt or self._last.number, chosen.step
        fetched = {pull.rank for pull in chosen.pulls}
        stay: dict[str, list[int]] = {}
        for one in held if chosen.source is Source.MEMORY else ():
            here = places.get(one.rank, one.node) == one.node and one.rank not in fetched
            if here and (one.step, one.attempt) == (step, attempt):
                stay.setdefault(one.node, []).append(one.rank)
        answers = self._answers(chosen, held, stay)
        if isinstance(answers, str):
            return answers, ()
        damaged = {(node, rank, step) for node, answer in answers.items() for rank in answer.damaged}
        if damaged:
            return ", ".join(f"that of rank {rank} on {node} is damaged" for node, rank, _ in sorted(damaged)), damaged
        needed = {node: answers.get(node, NO_ANSWER) for node in {pull.target for pull in chosen.pulls} | stay.keys()}
        unverified = frozenset(rank for answer in needed.values() for rank in answer.unverified)
        self._last = self._last._replace(unverified=unverified)
        return _wrong(needed), ()

    def _answers(
        self, chosen: MemoryChoice, held: Sequence[HeldSnapshot], stay: Mapping[str, Sequence[int]]
    ) -> dict[str, Done] | str:
        """Return the answer of each node that was asked; or why not all can be asked.

        ``stay``: node -> ranks that begin from its own.
        """
        attempt = chosen.attempt or self._last.number
        if not self._agents.remote:
            place = room.node_folder(self._folder, self._node)
            here = tuple(stay.get(self._node, ()))
            return {self._node: begin_from(place, Begin(chosen.step, attempt, here=here), b"")}
        questions = {}
        for node in self._agents.present():
            sources: dict[tuple[str, int], list[int]] = {}
            for pull in chosen.pulls:
                if pull.target == node:
                    where = self._agents.ring.port_of(pull.source)
                    if where is None:
                        return f"{pull.source} does not say at which port it serves snapshots"
                    sources.setdefault(where, []).append(pull.rank)
            mine = [one for one in held if one.node == node]
            newer = any(one.step > chosen.step or one.attempt > attempt for one in mine)
            if sources or node in stay or not mine or newer:
                supplies = tuple(Supply(tuple(ranks), *where) for where, ranks in sources.items())
                questions[node] = Begin(chosen.step, attempt, supplies, tuple(stay.get(node, ()))).question()
        return self._asked(questions, _FETCH if chosen.pulls else _COMPARE if stay else _TELL)

    def _asked(self, questions: Mapping[str, str], seconds: float) -> dict[str, Done]:
        return {node: read_done(text) for node, text in self._agents.ask(questions, seconds).items()}

    def _record(self, mine: Claim, chosen: MemoryChoice, log: Path) -> bool:
        """Write it into the ledger and the log; return whether it is from memory."""
        step = chosen.step if chosen.step >= 0 else None
        reached = self._last.reached
        again = max(0, reached - step) if step is not None and reached is not None else None
        begins = Beginning(chosen.source.value, step, chosen.copies, again, chosen.why, chosen.attempt or None)
        tell(log, f"attempt {mine.number} begins {begins.words()}")
        try:
            write_page(mine.folder, begins)
        except (OSError, ValueError) as error:
            tell(log, f"cannot write where attempt {mine.number} begins: {error}")
        return chosen.source is Source.MEMORY


class _CopiesPage:
    """Writes into the run directory how far the buddy copies of an attempt are: in a thread, because a file system may hang."""

    def __init__(self, mine: Claim, agents: AgentsOfNodes) -> None:
        self._mine, self._agents = mine, agents
        self._written, self._said = CopyState(), ""
        self._writing = Every(_WRITE, self._write, "copies")

    def close(self) -> None:
        self._writing.close(0.5)

    def _write(self) -> None:
        state = self._agents.ring.state
        if state.problem and state.problem != self._said:
            self._said = state.problem
            tell(self._mine.folder / "run.log", f"a snapshot was not copied to its buddy: {self._said}")
        if state == self._written or state.held < 0:
            return
        self._written = state
        try:
            copies = CopiesPage(datetime.now(timezone.utc), state.held, state.nodes, state.problem)
            write_page(self._mine.folder, copies)
        except OSError:  # a full disk: later
            return
