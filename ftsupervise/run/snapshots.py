"""The supervisor's part of the memory tier: the job's folder on every node, and the step that the next attempt begins from.

Before each attempt the nodes say which snapshots they hold. ``memory_choice.py`` takes the newest step that all ranks hold,
unless the disk has a newer one; all nodes give up what is newer, and nodes that get ranks of others fetch their snapshots. Only
then do the ranks start, with the step in their environment. Without a single snapshot nothing of this takes any time.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from datetime import datetime, timezone
from math import inf
from pathlib import Path
from time import monotonic, sleep
from typing import NamedTuple

from ftsupervise.checkpoints import memory_folder
from ftsupervise.checkpoints.memory_choice import Begun, HeldSnapshot, MemoryChoice, Source, choose
from ftsupervise.checkpoints.memory_doubts import DOUBT, Beside, spoils, weight
from ftsupervise.checkpoints.memory_kept import KeptPage
from ftsupervise.checkpoints.memory_pins import SLOTS
from ftsupervise.checkpoints.memory_slots import SnapshotId
from ftsupervise.model import Claim, End
from ftsupervise.ranks.agent_pool import Agents, SnapshotPlace
from ftsupervise.ranks.snapshot_relay import (
    QUESTION,
    Supply,
    begin_from,
    begin_question,
    held_in,
    is_done,
    keep,
    keep_question,
    read_damaged,
    read_held,
    read_unverified,
    unverified_words,
)
from ftsupervise.ranks.snapshot_ring import CopyState
from ftsupervise.run.kept_snapshots import KeptSnapshots, Target
from ftsupervise.rundir.anchor import Anchor, read_anchor
from ftsupervise.rundir.attempt_pages import CopiesPage, KeptSnapshotPage, read_page, write_page
from ftsupervise.rundir.paths import ENV_GUARD, ENV_SNAPSHOT_KEPT, ENV_SNAPSHOT_STEP, ENV_SNAPSHOTS, tell
from ftsupervise.truth import Beginning, NotFrom, RankState, Resumed

_ASK = 1.5  # seconds for all nodes to say what they hold
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
    return SnapshotPlace() if off else SnapshotPlace(memory_folder.new_folder(job), copies, waits)


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

    def __init__(self, where: SnapshotPlace, agents: Agents, node: str, kept: KeptSnapshots) -> None:
        """``node``: this one, where there are no agents."""
        self._folder, self._agents, self._kept = where.folder, agents, kept
        self._node = node or os.uname().nodename
        self._copies = agents.remote and where.copies > 0
        self._lineage: list[Begun] = []
        self._doubts: dict[int, int] = {}  # step -> how often attempts that began from it came to no newer snapshot
        self._weight = 1  # of the last failure
        self._saved: int | None = None  # newest step on disk, as the loop said
        self._last = _Last()
        self._ahead: tuple[threading.Thread, dict[str, dict[str, str]]] | None = None  # a question that is being asked
        self._spoilt = ""  # why no snapshot is used before the next attempt has begun
        self._used = False  # true if a rank of this job has had a snapshot
        self._lock: int | None = None
        self._pages: _CopiesPage | None = None
        if self._folder and not agents.remote:
            memory_folder.remove_leftovers()
            self._lock = memory_folder.make(self._folder, node)

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

        def ask(folder: str, seconds: float) -> Mapping[str, str]:
            questions = {node: keep_question(*one, sorted(ranks), folder) for node, ranks in where.items()}
            if self._agents.remote:
                answers = self._agents.ask(questions, seconds)
            else:
                place = memory_folder.node_folder(self._folder, self._node)
                answers = {node: keep(place, text.partition(" ")[2]) for node, text in questions.items()}
            unverified.update(rank for text in answers.values() for rank in read_unverified(text))
            return {node: answers.get(node, "no answer") for node in questions}

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

    def ended(self, ended: End, states: Sequence[RankState]) -> None:
        """Note that an attempt has ended. ``states``: the last ones of its ranks."""
        if self._pages is not None:
            self._pages.close()
            self._pages = None
        self._note_disk(ended.reached.saved)
        if spoils(trouble := ended.reached.trouble) and trouble is not None:
            self._spoilt, self._saved = f"{trouble.kind}: {trouble.words}", None
            self._doubts.clear()
        homes = {one.rank: one.node for one in states}
        self._last = self._last._replace(homes=homes, reached=ended.reached.last)
        self._weight = weight(ended.failure)
        self._note_not_from(ended.reached.first)

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
            memory_folder.remove(self._folder, self._node)
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
            asked: dict[str, dict[str, str]] = {}
            thread = threading.Thread(target=lambda: asked.update(ahead=self._ask()), name="asking", daemon=True)
            thread.start()
            self._ahead = thread, asked

    def _ask(self) -> dict[str, str]:
        nodes = self._agents.present()
        until = monotonic() + _ASK  # agents that have just been started again have not reported yet
        while self._agents.table.silent(nodes, inf) and monotonic() < until:
            sleep(0.02)
        return self._agents.ask(dict.fromkeys(nodes, QUESTION), _ASK)

    def _held(self, log: Path) -> list[HeldSnapshot]:
        if not self._agents.remote:
            return held_in(memory_folder.node_folder(self._folder, self._node), self._node)
        ahead, self._ahead = self._ahead, None
        answers: dict[str, str] = {}
        if ahead is not None:
            ahead[0].join()
            answers = ahead[1].get("ahead", {})
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
        damaged = {(node, rank, step) for node, text in answers.items() for rank in read_damaged(text)}
        if damaged:
            return ", ".join(f"that of rank {rank} on {node} is damaged" for node, rank, _ in sorted(damaged)), damaged
        wrong = {node: answers.get(node, "no answer") for node in {pull.target for pull in chosen.pulls} | stay.keys()}
        unverified = frozenset(rank for text in wrong.values() for rank in read_unverified(text))
        self._last = self._last._replace(unverified=unverified)
        wrong = {node: text for node, text in wrong.items() if not is_done(text)}
        return "; ".join(f"{node}: {text}" for node, text in sorted(wrong.items()))[:300], ()

    def _answers(
        self, chosen: MemoryChoice, held: Sequence[HeldSnapshot], stay: Mapping[str, Sequence[int]]
    ) -> dict[str, str] | str:
        """Return the answer of each node that was asked; or why not all can be asked.

        ``stay``: node -> ranks that begin from its own.
        """
        attempt = chosen.attempt or self._last.number
        if not self._agents.remote:
            place = memory_folder.node_folder(self._folder, self._node)
            question = begin_question(chosen.step, attempt, here=stay.get(self._node, ()))
            return {self._node: begin_from(place, question.partition(" ")[2], b"")}
        questions = {}
        for node in self._agents.present():
            supplies = []
            for pull in chosen.pulls:
                if pull.target == node:
                    where = self._agents.ring.port_of(pull.source)
                    if where is None:
                        return f"{pull.source} does not say at which port it serves snapshots"
                    supplies.append(Supply(pull.rank, *where))
            mine = [one for one in held if one.node == node]
            newer = any(one.step > chosen.step or one.attempt > attempt for one in mine)
            if supplies or node in stay or not mine or newer:
                questions[node] = begin_question(chosen.step, attempt, supplies, stay.get(node, ()))
        return self._agents.ask(questions, _FETCH if chosen.pulls else _COMPARE if stay else _TELL)

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

    def __init__(self, mine: Claim, agents: Agents) -> None:
        self._mine, self._agents = mine, agents
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="copies", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._over.set()
        self._thread.join(0.5)

    def _run(self) -> None:
        written, said = CopyState(), ""
        while not self._over.wait(_WRITE):
            state = self._agents.ring.state
            if state.problem and state.problem != said:
                said = state.problem
                tell(self._mine.folder / "run.log", f"a snapshot was not copied to its buddy: {said}")
            if state == written or state.held < 0:
                continue
            written = state
            try:
                copies = CopiesPage(datetime.now(timezone.utc), state.held, state.nodes, state.problem)
                write_page(self._mine.folder, copies)
            except OSError:  # a full disk: later
                continue
