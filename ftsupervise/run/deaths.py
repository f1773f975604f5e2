"""Finds out which rank ended first while the command of one attempt runs, and what the command ended of once it is over.

This module asks and judges, and ends nothing.

Output is a hint: what it says of our ranks and nodes is confirmed before anything is ended for it.

``srun: error: node-1: task 3: Exited with exit code 1`` may be of an evaluation with an srun of its own, or quoted from a
log. So the node is asked at once which tasks of ours live there, and Slurm what it thinks of a node that is said to be lost.
This is done in a thread: an agent that does not answer delays nothing. What nobody confirms ends nothing, and srun itself
ends soon where it is true.

| a line about | is believed when |
|---|---|
| a task of a node | fewer of our tasks live or have ended in order on that node than our step has there, and not that one |
| a node that accepted no task | none of our tasks lives there, and our step should have some |
| a lost node | Slurm says so, or its slurmd does not answer |
"""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.host.memory import OomKillCounter
from ftsupervise.hostlist import expand_counts, expand_hostlist
from ftsupervise.model import Attempt, Cause, CauseKind, Reached
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.ranks.rank_table import first_failure
from ftsupervise.ranks.rpc import tasks_of
from ftsupervise.run import exit_analysis
from ftsupervise.run.exit_analysis import (
    CommandSpec,
    First,
    Ours,
    after_the_warning,
    cause,
    command_end,
    failure,
    first_event,
)
from ftsupervise.run.states import AttemptProgress
from ftsupervise.rundir.ledger import over
from ftsupervise.rundir.paths import ERROR_FILE
from ftsupervise.scheduler.parse import is_away

_AGAIN = 0.2  # seconds between two questions about a line that nobody could say anything about
_PAUSE = 0.5  # seconds after a line that was found untrue: others may print thousands
_LONGEST = 30.0  # seconds in which a line is asked about; srun ends by itself meanwhile
_PATIENCE = 1.0  # seconds for the agents' answer
_OTHERS = 2  # more nodes that are asked, because the one that is named may have no task any more
_MOST = 200  # lines that wait to be confirmed


class LivingTask(NamedTuple):
    """A task of an srun, with the layout of its step."""

    step: str
    rank: int
    nodes: str
    tasks: str

    @property
    def number(self) -> int:
        """Return the step's number: steps within a step come later than it."""
        return int(self.step.rpartition(".")[2])


def read_tasks(text: str) -> list[LivingTask]:
    """Parse the answer to "tasks". What is no number there is left out."""
    found = []
    for words in (line.split() for line in text.splitlines()):
        if len(words) == 4 and words[1].isdigit() and words[0].rpartition(".")[2].isdigit():
            found.append(LivingTask(words[0], int(words[1]), words[2], words[3]))
    return found


def tasks_on(layout: LivingTask) -> dict[str, int]:
    """Return node -> how many tasks the step has there; {} where that is unknown."""
    try:
        return dict(zip(expand_hostlist(layout.nodes), expand_counts(layout.tasks), strict=True))
    except ValueError:
        return {}


class HintChecker:
    """The lines about our ranks, of one attempt, and which of them are true."""

    def __init__(
        self,
        ours: Ours,
        folder: Path,
        here: str,
        ask: Callable[[Mapping[str, str], float], dict[str, str]],
        states: Callable[[], Mapping[str, str]],
        wake: Callable[[], None],
        exits: Callable[[], Iterable[RankExit]] = tuple,
    ) -> None:
        """``here``: our own node, whose processes we see ourselves; ``ask``: those of the others, of their agents; ``states``:
        of the nodes, by Slurm; ``exits``: the ranks whose ends the agents have seen."""
        self.ours = ours._replace(lost=frozenset())
        self._folder, self._here, self._ask, self._states, self._wake = folder, here, ask, states, wake
        self._exits = exits
        self._layout: LivingTask | None = (
            None  # of our step, which has the lowest number of all that carry the attempt's mark
        )
        self._waiting: list[tuple[Cause, int, float]] = []  # what was said, where in the output, since when it is known
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None
        self._over = threading.Event()
        self.confirmed: Cause | None = None
        self.settled = 0  # what was said before this place of the output is not true

    def take(self, said: Iterable[Cause], at: int) -> None:
        """Begin to find out whether it is true; ``at``: how far the output was read."""
        new = [(cause, at, monotonic()) for cause in said]
        if not new or self.confirmed is not None:
            return
        with self._lock:
            self._waiting = [*self._waiting, *new][-_MOST:]
            if self._thread is None:
                self._thread = threading.Thread(target=self._check_all, name="confirm", daemon=True)
                self._thread.start()

    def close(self) -> None:
        self._over.set()

    def _check_all(self) -> None:
        pause = 0.0
        while not self._over.wait(pause):
            with self._lock:
                asked, self._waiting = self._waiting, []
                if not asked:
                    self._thread = None
                    return
            now, unknown = monotonic(), []
            answers = self._tasks([cause.at[0].node for cause, _, _ in asked])
            states = self._states() if any(cause.kind is CauseKind.NODE for cause, _, _ in asked) else {}
            for one in asked:
                true = self._is_true(one[0], answers, states)
                if true:
                    self.confirmed = one[0]
                    self._wake()
                    return
                if true is None and now - one[2] < _LONGEST:
                    unknown.append(one)
            with self._lock:
                self._waiting = [*unknown, *self._waiting][-_MOST:]
                if not unknown:
                    self.settled = max(self.settled, *(at for _, at, _ in asked))
            pause = _AGAIN if unknown else _PAUSE

    def _tasks(self, named: Sequence[str]) -> dict[str, list[LivingTask]]:
        """Return node -> our living tasks there, of the nodes that have answered."""
        mine = sorted(self.ours.nodes or ())
        nodes = {one for name in named for one in (name, name.partition(".")[0]) if one in mine}
        more = [node for node in (self._here, *mine) if node in mine and node not in nodes][:_OTHERS]
        asked = [*nodes, *(() if self._layout is not None else more)]
        found = {node: tasks_of(str(self._folder), node) for node in asked if node == self._here}
        others = {node: f"tasks {self._folder}" for node in asked if node != self._here}
        found.update(self._ask(others, _PATIENCE) if others else {})
        tasks = {node: [one for one in read_tasks(text) if self.ours.has_step(one.step.partition(".")[0])]
                 for node, text in found.items()}  # fmt: skip
        for one in (one for living in tasks.values() for one in living):
            if self._layout is None or one.number < self._layout.number:
                self._layout = one
                self.ours = self.ours._replace(step=one.step, began=True)
        return tasks

    def _is_true(
        self, said: Cause, answers: Mapping[str, Sequence[LivingTask]], states: Mapping[str, str]
    ) -> bool | None:
        """Return whether what was said is true; None while that cannot be known."""
        node = said.at[0].node
        if said.kind is CauseKind.NODE:
            lost = is_away(states.get(node, "")) if states else None
            if lost:
                self.ours = self.ours._replace(lost=(self.ours.lost or frozenset()) | {node})
            return lost
        node = node if node in answers else node.partition(".")[0]
        if node not in answers or self._layout is None:
            return None
        living = {one.rank for one in answers[node] if one.step == self._layout.step}
        should = tasks_on(self._layout).get(node)
        if should is None:
            return False if living else None
        if said.kind is CauseKind.LAUNCH:
            return should > 0 and not living
        # the first ranks have left while another still evaluates, with an srun that may fail
        well = {
            one.rank for one in self._exits() if one.in_order and one.node.partition(".")[0] == node.partition(".")[0]
        }
        return len(living | well) < should and not (living | well) & _ranks(said.at[0].ranks)


def _ranks(text: str) -> set[int]:
    """Return the numbers in Slurm's "0-2,5"."""
    found: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        if first.isdigit() and (not last or last.isdigit()) and int(last or first) - int(first) < 1_000_000:
            found.update(range(int(first), int(last or first) + 1))
    return found


# ------------------------------------------------------------------------------------------

NEAR_END = 60.0  # Slurm's limit loop is up to this early or late
LISTEN = 0.1  # seconds between two reads of srun's output; the agents report deaths at once
_WORD = 0.2  # seconds for an agent's word on a rank that srun says has ended by itself
_SILENT = 1.5  # intervals of an agent without a word, after which it has fallen silent
READ = 1.0  # seconds for what was printed before we ended any rank


class EndSigns(NamedTuple):
    """The job decides by these signs of how an attempt ended; the ledger does not keep them."""

    stop_signal: int = 0  # that asked us to stop
    warned: bool = False
    heard: bool = False  # a process of it catches the signal that warned it
    newer: int | None = None  # the attempt that has taken our place
    gone: tuple[str, ...] = ()  # nodes that Slurm's lines say went away or took no task
    doubted: tuple[str, ...] = ()  # those, and others of which only they say it: srun without a node ends with 0


class DeathsSeen:
    """The ends of ranks in one attempt, by the agents, by Slurm's lines in the output, and by the kernel."""

    def __init__(self, asked: CommandSpec) -> None:
        self.asked = asked
        self.crashes: list[RankExit] = []  # of ranks, as their nodes reported
        self.death: RankExit | None = None  # of the rank that failed first
        self.touched: float | None = None  # monotonic: since when we may have caused any death
        self.over_at: float | None = None  # when we first saw that the command is over; None: it was not started
        self.output = exit_analysis.Output()
        self.hints: HintChecker | None = None
        self.kills = OomKillCounter()

    def close(self) -> None:
        if self.hints is not None:
            self.hints.close()

    @property
    def listens(self) -> bool:
        """Return whether this attempt reads srun's lines about its ranks."""
        return self.asked.options.budgets.in_place > 0 and self.asked.ends_with_a_rank and self.output.is_file

    def ours_from_here(self) -> None:
        """Note that we may have caused any death from here on."""
        if self.touched is None:
            self.touched = time.monotonic()
            self.output.note_before()

    def reported(self, *, warned: bool) -> Cause | None:
        """Return the first crash that a node reported; None also where no restart would follow: the crash is then only
        recorded. ``warned``: the job is to end.
        """
        if self.asked.agents is None:
            return None
        self.asked.agents.keep_running()
        self.read(warned=warned)
        return self.death.cause() if self.death is not None and self.asked.restarts and not warned else None

    def confirmed(self) -> Cause | None:
        """Return the first end of a rank, or loss of a node, that srun has reported and an agent or Slurm has confirmed."""
        if not self.listens:
            return None
        said = self.output.next_hints_within(self.asked.ours, LISTEN / 2)
        if self.hints is None:
            if not said or (agents := self.asked.agents) is None:
                return None
            to = self.asked
            wake, table = to.signals.wake, agents.table
            self.hints = HintChecker(to.ours, to.mine.folder, to.here, agents.ask, to.states, wake, lambda: table.exits)
        self.hints.take(said, self.output.read_to)
        self.output.settle(self.hints.settled)
        return self.hints.confirmed

    def read(self, *, warned: bool) -> None:
        """Find the rank that failed first, from deaths before we ended any rank, however late their nodes report them."""
        news = self.asked.agents.table.deaths() if self.asked.agents is not None else []
        self.crashes += [one for one in news if one.crash and (self.touched is None or one.at < self.touched)]
        if not warned and (self.asked.restarts or self.asked.ends_with_a_rank):
            self.death = first_failure(self.crashes)

    def outlived(self, died_at: float) -> None:
        """Forget the death that the command has outlived when it ended at ``died_at``: its output shows of what that was."""
        if self.death is not None and self.death.at < died_at - exit_analysis.OUTLIVED:
            self.death = None

    def judge(
        self, now: AttemptProgress, reached: Callable[[], Reached], at: datetime, seconds: float, *, begun: bool
    ) -> tuple[Attempt, EndSigns]:
        """Return the attempt as it has ended ``at``, ``seconds`` after its start. ``begun``: the command was started."""
        rundir, stop_signal, code = self.asked.options.rundir, now.by, now.code or 0
        said = self.output.since() if code else ""
        output, lately = said or "", self.output.lately() or ""
        ours = self._ours_alone()
        death = exit_analysis.first_death(lately, ours)
        if not (code or stop_signal or now.warned):  # an end like any other, unless Slurm has ended the job
            death, lately = exit_analysis.by_slurm_alone(death, ours), ""
        if code and self.death is not None and (death is None or death.of_ranks):  # srun's own order says little
            agents, before = self.asked.agents, lately if self.touched is None else self.output.before(READ)
            rank, failed = (
                (agents.first_failure_before_kill(self.death), agents.table.failed) if agents else (self.death, ())
            )
            death = exit_analysis.cause_of(
                rank, lately, failed, before=before, ours=ours, believed=self._believed(lately)
            )
        stopped, seen = exit_analysis.why_stopped(self.asked.mine.folder, reached())
        if now.warned and not stop_signal and stopped is not None and stopped.kind is CauseKind.TOLD:
            stopped = Cause(CauseKind.WARNING)  # by SIGTERM
        first = First.REQUEST
        if stopped is not None and stopped.kind is CauseKind.TOLD:
            first = self._first_event(death if death is not None else command_end(code))
        why = now.cause or cause(
            code,
            finished=rundir.has_finished(),
            stopped=stopped,
            stop_signal=stop_signal,
            past_end=self.asked.job.at is not None and time.time() > self.asked.job.at - NEAR_END,
            death=death,
            first=first,
        )
        unasked = not stop_signal and stopped is None
        if now.warned and now.heard and (unasked or why.kind is CauseKind.REQUEUED):
            why = after_the_warning(why)
        if code in (126, 127) and not begun:
            why = Cause(CauseKind.NO_START, code=code)
        if code and (root := exit_analysis.root_error(self.asked.mine.folder / ERROR_FILE)):
            output = f"Traceback (most recent call last)\n{root}\n{output}"  # before those of its victims
        asked = bool(stop_signal) or now.warned
        one = over(self.asked.mine.number, why, at, seconds, seen)._replace(
            exit_code=code,
            failure=failure(code, why, asked=asked, death=death, output=output or said, oom=self.kills.more()),
            hardware=exit_analysis.hardware(lately),
        )
        doubted = exit_analysis.blamed(self.output.lately() or "", ours._replace(lost=None))
        gone = exit_analysis.blamed(lately, ours)
        return one, EndSigns(stop_signal, now.warned, now.heard, gone=gone, doubted=doubted)

    def _first_event(self, how: Cause) -> First:
        """Return whether rank 0 was asked to stop before anything had ended. ``how``: the first death, or the command's
        end."""
        told, ours = exit_analysis.when_told(self.asked.mine.folder), self._over_at()
        exits = exit_analysis.last_exits(self.asked.agents.table.exits if self.asked.agents is not None else (), ours)
        known, by_itself = bool(exits), how.killed_by != signal.SIGTERM and how.code != 0
        if how.at:
            exits = [one for one in exits if exit_analysis.same_rank(how, one)]
        elif how.kind in (CauseKind.EXIT, CauseKind.SIGNAL):  # of the command: it says nothing of a rank
            exits = [one for one in exits if exit_analysis.by_itself(one)]
            by_itself = by_itself and (bool(exits) if known else self.asked.ends_with_a_rank)
        if not by_itself:
            return first_event(told, ours=ours, by_itself=False)
        if exits:
            return first_event(told, ours=ours, died_at=exits[0].at, had_heard=exits[0].told)
        return first_event(told, ours=ours, died_at=self.output.said_at.get(how.at[0]) if how.at else None)

    def _believed(self, output: str) -> Callable[[Cause], bool]:
        """Return the judge of srun's lines about a rank. The agents' word on a rank that a line names may come a moment after
        that line; of a node whose agent has fallen silent since the line came, the line is all that is known."""
        if self.asked.agents is None:
            return lambda _: True
        table, until = self.asked.agents.table, time.monotonic() + _WORD
        pages = {(str(one.rank), one.node.partition(".")[0]) for one in table.newest()}
        named = exit_analysis.named_alone(output) & pages
        while named - {(str(one.rank), one.node.partition(".")[0]) for one in table.exits} and time.monotonic() < until:
            time.sleep(0.01)
        exits, now, names = table.exits, time.monotonic(), [node.decode() for node in table.nodes]

        def believed(said: Cause) -> bool:
            agents = [name for name in names if name.partition(".")[0] == said.at[0].node.partition(".")[0]]
            since = max(now - self.output.said_at.get(said.at[0], self._over_at()), _SILENT * table.every)
            late = bool(agents) and agents == table.silent(agents, since)
            return late or exit_analysis.is_believed(said, pages=pages, exits=exits)

        return believed

    def _over_at(self) -> float:
        """Return when we began to end processes ourselves, or the command was over. Monotonic."""
        return min(one for one in (self.touched, self.over_at, time.monotonic()) if one is not None)

    def _ours_alone(self) -> Ours:
        """Return whom a line of Slurm's must be about, by all that is known now. A lost node is no finding of the output's."""
        ours = self.asked.ours if self.hints is None else self.hints.ours
        began = ours.began or (self.asked.agents is not None and bool(self.asked.agents.table.newest()))
        return ours._replace(began=began, lost=ours.lost or frozenset())
