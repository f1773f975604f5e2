"""The command of one attempt: start it, pass Slurm's signals on, end it in bounded time, and record how it ended.

It stands alone because it is a state machine of signals and exits, with no page and no node in it.

The command comes first: a full disk or a lost run directory is reported, and the training goes on. ``states.py`` has
the states of an attempt; here are the actions in each.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import monotonic
from typing import Any, NamedTuple

from ftsupervise.host import bounded, front, processes
from ftsupervise.host.begin import begin
from ftsupervise.host.in_time import in_time
from ftsupervise.host.memory import OomKillCounter
from ftsupervise.host.signals import STOP
from ftsupervise.hostlist import expand_counts, expand_hostlist
from ftsupervise.model import Attempt, Cause, CauseKind, Reached
from ftsupervise.ranks.hang_monitor import HangMonitor, cause_of
from ftsupervise.ranks.protocol import RankExit
from ftsupervise.ranks.rank_table import first_failure
from ftsupervise.ranks.rpc import tasks_of
from ftsupervise.run import exit_analysis
from ftsupervise.run.exit_analysis import (
    CommandSpec,
    EndSigns,
    First,
    Ours,
    RanksKilled,
    after_the_warning,
    cause,
    command_end,
    failure,
    first_event,
)
from ftsupervise.run.fencing import RunDirWatcher
from ftsupervise.run.job_end import Announcement
from ftsupervise.run.left_alone import LeftAlone
from ftsupervise.run.progress_pages import seen_by
from ftsupervise.run.states import AttemptEvent, AttemptProgress, AttemptState, OpenWarning
from ftsupervise.rundir.ledger import over, reached
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, ERROR_FILE, shown, tell, warn
from ftsupervise.rundir.progress import read_progress
from ftsupervise.scheduler.parse import is_away
from ftsupervise.truth import HANG, RANKS
from ftsupervise.units import signal_name

# Has confirmed what the output says of our ranks and nodes, before anything is ended for it: output is a hint.
#
# ``srun: error: node-1: task 3: Exited with exit code 1`` may be of an evaluation with an srun of its own, or quoted from a
# log. So the node is asked at once which tasks of ours live there, and Slurm what it thinks of a node that is said to be lost.
# This is done in a thread: an agent that does not answer delays nothing. What nobody confirms ends nothing, and srun itself
# ends soon where it is true.
#
# | a line about | is believed when |
# |---|---|
# | a task of a node | fewer of our tasks live or have ended in order on that node than our step has there, and not that one |
# | a node that accepted no task | none of our tasks lives there, and our step should have some |
# | a lost node | Slurm says so, or its slurmd does not answer |

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


_BEGINS = 5.0  # seconds for the command to begin; after that it is followed all the same, and may be ended
_STRAGGLERS = 5.0  # seconds for processes that the command left running, when we were not asked to stop
_RANKS_GONE = 2.0  # seconds for srun to notice that all its ranks were killed
_SRUN_GONE = 0.3  # the same when not all of them can be reached
_UNKILLABLE = 5.0  # seconds a process may take to die of SIGKILL before it is left behind
_NEAR_END = 60.0  # Slurm's limit loop is up to this early or late
_LISTEN = 0.1  # seconds between two reads of srun's output; the agents report deaths at once
_VICTIMS = 0.03  # seconds for the other ranks after the first death: to report an error, not to save
_WRITE = 0.25  # seconds for a page while ranks run: its disk may hang, and a signal for them may be next
_WORD = 0.2  # seconds for an agent's word on a rank that srun says has ended by itself
_SILENT = 1.5  # intervals of an agent without a word, after which it has fallen silent
_READ = 1.0  # seconds for what was printed before we ended any rank
# seconds that the warning waits for ranks that do not catch it yet, or a quarter of the time before the end
_STARTS = 60.0
_LOOK = 2.0  # seconds between two looks at those
_TWICE = 0.5  # seconds: a second interrupt that comes sooner is the first one, for our whole process group
_KILL_WAIT = 0.5  # seconds for Slurm to say how long it waits
_HOPELESS = 5.0  # seconds between SIGTERM and SIGKILL for a command that did not stop when asked


_ON = (AttemptState.RUNNING, AttemptState.WARNED)  # the command is not being ended


class RunningCommand:
    """The command of one attempt, and our actions on it."""

    def __init__(self, asked: CommandSpec, monitor: HangMonitor | None = None) -> None:
        self.asked = asked
        self.now = AttemptProgress()
        self.monitor = monitor  # None: hangs are not detected
        self.left = LeftAlone(asked.observes, asked.mine.folder, self.say)
        self.crashes: list[RankExit] = []  # of ranks, as their nodes reported
        self.death: RankExit | None = None  # of the rank that failed first
        self.pid = 0
        # the batch script started them before it became us, or they are no part of the command
        there, warm = processes.below(os.getpid()), asked.warm.tree()
        self.others = {pid: start for pid in there if pid not in warm and (start := processes.identity(pid))}
        self.touched: float | None = None  # monotonic: since when we may have caused any death
        self.left_behind: list[int] = []
        self.died_at: float | None = None  # when we first saw that it is over; None: it was not started
        self.output = exit_analysis.Output()
        self.hints: HintChecker | None = None
        self.kills = OomKillCounter()
        self.watcher: RunDirWatcher | None = None

    # ------------------------------------------------------------------------------------------------- its life

    def run_to_end(self, env: dict[str, str]) -> tuple[Attempt, EndSigns]:
        """Run the command from start to end; return the attempt as it is then."""
        do = {
            AttemptState.RUNNING: self._wait,
            AttemptState.WARNED: self._wait,
            AttemptState.FAILING: self._wait,
            AttemptState.ENDING: self._wait,
            AttemptState.STOPPING: self._wait,
            AttemptState.KILLING: self._kill,
            AttemptState.CLEARING: self._clear_away,
        }
        started = time.monotonic()
        self._start(env)
        while self.now.state is not AttemptState.ENDED:
            do[self.now.state]()
        if self.watcher is not None:
            self.watcher.close()
        if self.hints is not None:
            self.hints.close()
        self.asked.last_look()
        return self._end(datetime.now(timezone.utc), time.monotonic() - started)

    def _start(self, env: dict[str, str]) -> None:
        """Start the command. One that cannot be started ends with the exit code that a shell gives it."""
        command = self.asked.command
        front.command_begins()
        self.say(f"attempt {self.asked.mine.number} of {self.asked.options.name}: {shown(command)}")
        before_exec = processes.become_subreaper()
        wrapped = self.asked.in_each_rank(self.asked.warm.wrap(command))
        try:
            child = begin(wrapped, (0, 1, 2), env=env, before_exec=before_exec, anywhere=True)
            if not child.has_begun(_BEGINS):
                self.say(
                    f"{command[0]} does not begin: its file system, or that of the working directory, does not answer"
                )
        except OSError as error:
            self.say(f"cannot start {command[0]}: {error.strerror}")
            self._move(AttemptEvent.NOT_STARTED, code=127 if isinstance(error, FileNotFoundError) else 126)
            return
        self.pid = child.pid  # reaped here, with every other process that is handed to us
        self._move(AttemptEvent.STARTED)
        options, warm = self.asked.options, self.asked.warm
        self.watcher = RunDirWatcher(
            options.rundir, self.asked.mine.number, self.asked.signals, options.look_every, warm.has_news
        )

    def _move(self, event: AttemptEvent, **facts: Any) -> None:
        self.now = self.now.after(event, **facts)
        if self.now.code is not None:
            front.command_is_over(self.now.code)

    def _wait(self) -> None:
        """Wait for an event: reap, pass signals on, keep the bounds."""
        self._reap()
        if self.now.state is AttemptState.CLEARING:
            return
        for number in self.asked.signals.wait(self._time_left()):
            self._on_signal(number)
        self._check()
        if self.now.kill_at is not None and time.monotonic() >= self.now.kill_at:
            self._reap()
            if self.now.code is None:
                self._move(AttemptEvent.TIME_UP)

    def _kill(self) -> None:
        self._touch()
        self.say("processes are still running: SIGKILL")
        self._end_by_force()
        if self.now.code is None:
            self._move(AttemptEvent.UNKILLABLE, code=-signal.SIGKILL)

    def read_the_last_events(self) -> None:
        """Read the deaths and signals that arrived just before the command's end."""
        self._read_deaths()  # also those that were still arriving when we began to end it
        if self.death is not None and self.death.at < self._died_at() - exit_analysis.OUTLIVED:
            self.death = None  # the command ended for another reason since: its output shows it
        for number in self.asked.signals.wait(0):
            self._on_signal(number)
        self._judge_the_announcement(_READ)

    def _died_at(self) -> float:
        return self.now.died_at or time.monotonic()

    def _time_left(self) -> float | None:
        """Return the seconds until something has to be checked or done; None: nothing is due."""
        now = time.monotonic()
        if self.now.kill_at is not None:
            return max(0.0, self.now.kill_at - now)
        bounds = [_LISTEN] if self._listens or self.asked.job.announced is not None else []
        bounds += [self.monitor.due - now] if self.monitor is not None and self.may_hang else []
        bounds += [self.now.unheard.again - now] if self.now.unheard is not None and self.now.state in _ON else []
        stop_at = self._stop_at()
        bounds += [stop_at - now] if stop_at is not None else []
        return max(0.0, min(bounds)) if bounds else None

    @property
    def _listens(self) -> bool:
        """Return whether this attempt reads srun's lines about its ranks."""
        return self.asked.options.budgets.in_place > 0 and self.asked.ends_with_a_rank and self.output.is_file

    @property
    def may_hang(self) -> bool:
        """Return whether the command is looked at for a hang: not while it is to stop anyway."""
        raised = self.watcher is not None and self.watcher.seen.kill_since is not None
        return self.now.state is AttemptState.RUNNING and not raised

    def _stop_at(self) -> float | None:
        """Return the time at which a command that ignores the kill switch is ended; None: not due."""
        since = self.watcher.seen.kill_since if self.watcher is not None else None
        return None if since is None else since + self.asked.options.stop_within

    def _check(self) -> None:
        """React to a newer attempt, the kill switch, a dead rank or a hang."""
        self._judge_the_announcement()
        self.asked.warm.act()
        if self.now.state not in _ON or self.watcher is None:
            return
        if self.watcher.seen.newer is not None:
            newer = f"attempt {self.watcher.seen.newer}"
            self._end_it(Cause(CauseKind.SUPERSEDED, text=newer))
            return
        if self.now.unheard is not None and time.monotonic() >= self.now.unheard.again:
            self._warn_again(self.now.unheard)
        stop_at = self._stop_at()
        if stop_at is not None and time.monotonic() >= stop_at:
            late = f"the command did not stop within {self.asked.options.stop_within:g} s"
            self._end_it(Cause(CauseKind.KILL_SWITCH, text=late))
            return
        death = self.reported_death() or (self._confirmed_death() if self._listens else None)
        if death is not None and self.left.observes(RANKS):
            self.left.note(RANKS, "ended the other ranks, to start again in place", death.words())
        elif death is not None:
            now = time.monotonic()
            since = self.death.at if self.death is not None else now
            self._move(AttemptEvent.RANK_DIED, kill_at=max(now, since + _VICTIMS), died_at=now)
            self.say(f"{death.words()}: the other ranks have {_VICTIMS:g} s to leave")
            return
        if self.may_hang:
            self.look_for_a_hang()

    def look_for_a_hang(self) -> None:
        """Gather evidence of a hang, then end it without grace: stopped processes and blocked collectives ignore SIGTERM."""
        if self.monitor is None or self._hangs_on(self.monitor):
            return
        verdict = self.monitor.alarm()
        if verdict is None:
            return
        hang = cause_of(verdict)
        self.say(hang.words() + ("" if verdict.moved else f"; evidence in {self.asked.mine.folder / 'evidence'}"))
        if not self.asked.options.end_hung:
            self.say("the hung command is left running: neither --hang nor --in-place was given")
            self.left.hang = verdict
            return
        if not verdict.moved and self.left.observes(HANG):
            self.left.hang = verdict
            self.left.note(HANG, "restarted it", hang.hang_words(), verdict.step)
            return
        now, ours = time.monotonic(), self._ours()
        by_srun = bool(processes.sruns(ours))
        self._move(AttemptEvent.HUNG, kill_at=now if by_srun else now + _VICTIMS, cause=hang, died_at=now)
        if not by_srun:
            outliers = [one.pid for one in verdict.outliers if one.state in ("T", "t", "D") and one.pid in ours]
            processes.send(outliers, signal.SIGKILL)
            processes.send([pid for pid in ours if pid not in outliers], signal.SIGTERM)

    def _hangs_on(self, monitor: HangMonitor) -> bool:
        """Return whether a hang that was left alone still is."""
        if self.left.hang is None or monitor.has_moved():
            return False
        if monitor.is_over(self.left.hang):
            self.left.went_on(self._reached().last)
            return False
        if self.asked.options.end_hung and not self.left.observes(HANG):  # a person has it ended now
            monitor.due = time.monotonic()
            return False
        return True

    def reported_death(self) -> Cause | None:
        """Return the first crash that a node reported; None also where no restart would follow: the crash is then only
        recorded.
        """
        if self.asked.agents is None:
            return None
        self.asked.agents.keep_running()
        self._read_deaths()
        return self.death.cause() if self.death is not None and self.asked.restarts and not self.now.warned else None

    def _confirmed_death(self) -> Cause | None:
        """Return the first end of a rank, or loss of a node, that srun has reported and an agent or Slurm has confirmed."""
        said = self.output.next_hints_within(self.asked.ours, _LISTEN / 2)
        if self.hints is None:
            if not said or (agents := self.asked.agents) is None:
                return None
            to = self.asked
            wake, table = to.signals.wake, agents.table
            self.hints = HintChecker(to.ours, to.mine.folder, to.here, agents.ask, to.states, wake, lambda: table.exits)
        self.hints.take(said, self.output.read_to)
        self.output.settle(self.hints.settled)
        return self.hints.confirmed

    def _read_deaths(self) -> None:
        """Find the rank that failed first, from deaths before we ended any rank, however late their nodes report them."""
        news = self.asked.agents.table.deaths() if self.asked.agents is not None else []
        self.crashes += [one for one in news if one.crash and (self.touched is None or one.at < self.touched)]
        if not self.now.warned and (self.asked.restarts or self.asked.ends_with_a_rank):
            self.death = first_failure(self.crashes)

    def _touch(self) -> None:
        """Note that we may have caused any death from here on."""
        if self.touched is None:
            self.touched = time.monotonic()
            self.output.note_before()

    def _end_it(self, why: Cause) -> None:
        """End the command because of something we saw."""
        self._tell_to_leave(signal.SIGTERM)
        self._move(AttemptEvent.MUST_END, kill_at=time.monotonic() + _HOPELESS, cause=why)
        self.say(f"{why.words()}: SIGTERM, then SIGKILL after {_HOPELESS:g} s")
        self._write_the_warning(why.words())

    def _reap(self) -> None:
        for pid, status in bounded.reap():
            if pid == self.pid and self.now.code is None:
                self._move(AttemptEvent.EXITED, code=os.waitstatus_to_exitcode(status))

    def _clear_away(self) -> None:
        """End what the command left running, so that nothing of this attempt meets the next one."""
        self.read_the_last_events()
        self.died_at, kill_at = self._died_at(), self.now.kill_at
        if not self.left_behind and self._ours():
            if not self.now.by:
                self.say("the command has ended and left processes running: SIGTERM")
                processes.send(self._ours(), signal.SIGTERM)
            left = _STRAGGLERS if kill_at is None else max(0.0, kill_at - time.monotonic())
            if not self._gone_within(left):
                self._end_by_force()
        self._move(AttemptEvent.CLEARED)

    def _end_by_force(self) -> None:
        """End every process of the command. What SIGKILL does not end is reported and left behind, never waited for."""
        if processes.sruns(self._ours()):
            killed = self.asked.kill_ranks()
            if killed is not RanksKilled.BUT_LOST:  # else srun would wait for the lost nodes as long as Slurm does
                everywhere = killed is RanksKilled.ALL
                if self._gone_within(_RANKS_GONE if everywhere else _SRUN_GONE):  # srun reports their end and exits
                    return
                processes.send(processes.sruns(self._ours()), signal.SIGTERM)
                if self._gone_within(_STRAGGLERS if everywhere else _SRUN_GONE):
                    return
        for _ in range(10):  # until no new process is found: they may fork meanwhile
            if not processes.send(self._ours(), signal.SIGKILL):
                break
            time.sleep(0.01)
            self._reap()
        if not self._gone_within(_UNKILLABLE):
            self.left_behind = self._ours()
            self.say(f"SIGKILL did not end these processes; they are left behind: {self.left_behind}")

    def _ours(self) -> list[int]:
        aside = self.asked.agents.pids if self.asked.agents is not None else frozenset()
        warm = self.asked.warm
        # a question to Slurm that another thread has asked ahead is no process of the command: its answer is needed
        ours = processes.below(os.getpid(), without=self._still_there() | aside | warm.apart() | bounded.awaited())
        ours = [pid for pid in ours if pid != warm.serving()]
        return [pid for pid in ours if pid not in bounded.awaited()] if ours else []

    def leave_out(self, pid: int) -> None:
        """Count a child that we have started beside the command as none of its processes."""
        if (start := processes.identity(pid)) is not None:
            self.others[pid] = start

    def _still_there(self) -> frozenset[int]:
        """Return those of ``others`` that live. The number of one that has ended may be a rank's by now."""
        self.others = {pid: start for pid, start in self.others.items() if processes.lives(pid, start)}
        return frozenset(self.others)

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._ours():
            if time.monotonic() >= until:
                return False
            for number in self.asked.signals.wait(min(0.1, max(0.0, until - time.monotonic()))):
                self._on_signal(number)
            self._reap()
        self._reap()
        return True

    # -------------------------------------------------------------------------------------------------- signals

    def _on_signal(self, number: int) -> None:
        if number in (0, signal.SIGCHLD):
            return
        if number == self.asked.options.warning and not (number in STOP and (self.now.warned or self.now.kill_at)):
            self._on_warning(number)
        elif number in STOP:
            self._on_stop(number)
        elif number == signal.SIGCONT:
            processes.send(self._ours(), number)
        else:
            self._forward(number)

    def _on_warning(self, number: int) -> None:
        """Slurm announces the end. Where it does so by a signal that is also the end's own, it is asked which of the two this
        was. The ranks are told at once in either case, and the time until SIGKILL counts from then."""
        if number in STOP:
            self._touch()
        self._forward(number)
        at = time.monotonic()
        self._move(AttemptEvent.WARNING)
        asked = "the command is asked to save and stop"
        if self.now.unheard is not None and self.now.unheard.waits:
            asked = "a rank that does not catch it yet is waited for, because srun would kill it"
        elif not self.now.heard and number not in STOP:
            asked = "nothing in the command catches it, so nothing is sent: it trains on to the end of the job"
        self.say(f"{signal_name(number)}: the job ends soon; {asked}")
        self._write_the_warning(_at(number), number)
        if number in STOP:
            self.asked.job.announced = Announcement(self.asked.job, self.asked.options.lead, at)
            self._judge_the_announcement()
        else:  # somebody may have moved the limit: the cause of the end will name it
            threading.Thread(target=self.asked.job.ask, name="job-end", daemon=True).start()

    def _judge_the_announcement(self, within: float = 0.0) -> None:
        """Begin the grace where the signal was no announcement."""
        one = self.asked.job.announced
        if one is not None and (was_the_end := one.was_the_end(within)) is not None:
            self.asked.job.announced = None
            if was_the_end:
                self._on_stop(self.asked.options.warning, one.since)

    def _on_stop(self, number: int, since: float | None = None) -> None:
        """``since``: monotonic, when the ranks were told, if they were."""
        if self.now.by:
            again = number == signal.SIGINT and time.monotonic() > (self.asked.signals.stopped_at or 0.0) + _TWICE
            self._move(AttemptEvent.STOP, kill_at=time.monotonic() if again else self.now.kill_at)
            return
        self.asked.job.announced = None
        if since is None:
            self._tell_to_leave(number)
            since = time.monotonic()
        asked = self.asked.options.grace
        grace = self.asked.job.grace(within=_KILL_WAIT) if asked is None else asked  # the ranks have been told by now
        kill_at = since + grace
        self._move(AttemptEvent.STOP, by=number, kill_at=kill_at)
        self.asked.signals.stopped_at = self.asked.signals.stopped_at or since
        self.say(f"{signal_name(number)}: passed on to the command; SIGKILL in {grace:g} s for the rest")
        self._write_the_warning(_at(number), number)

    def _write_the_warning(self, why: str, number: int = 0) -> None:
        """Write the file that warns the guards. The signal has gone out before: this disk may hang."""
        in_time(partial(warn, self.asked.mine.folder, why, self.say, number), _WRITE)

    def _tell_to_leave(self, number: int) -> None:
        self._touch()
        everyone = self._ours()
        processes.send(everyone, signal.SIGCONT)  # a stopped process takes no SIGTERM
        takers = self._handlers(number)
        if not takers:  # srun would kill its ranks unsaved; Slurm signals them itself, and the file warns the guards
            takers = [pid for pid in everyone if pid not in processes.sruns(everyone)]
        processes.send(takers, number)

    def _forward(self, number: int) -> None:
        """Signal the processes that handle it: the command, or those below a launcher or shell that would die of it."""
        if self.asked.options.forward == "never":
            return
        if self.asked.options.forward == "always":
            self.now = self.now._replace(heard=True)
            processes.send([self.pid], number)
            return
        if number == self.asked.options.warning and number not in STOP:
            lead, now = self.asked.options.lead, time.monotonic()
            left = [lead] if lead is not None else []
            left += [self.asked.job.at - time.time()] if self.asked.job.at is not None else []
            wait = max(0.0, min([_STARTS, *(one / 4 for one in left)]))
            self._warn(OpenWarning(number, now + wait, now + _LOOK))
            return
        processes.send(self._handlers(number), number)
        self._hand_on(number)

    def _hand_on(self, number: int) -> None:
        """Have Slurm signal the ranks, where srun does not pass the signal on to them."""
        if number not in (signal.SIGUSR1, signal.SIGUSR2) and processes.sruns(self._ours()):
            threading.Thread(target=self.asked.tell_ranks, args=(number,), name="tell", daemon=True).start()

    def _warn(self, one: OpenWarning) -> None:
        """Send the warning to those that catch it. It does not go through srun while a rank here does not: that one would die,
        and may be starting. One that never does is left out, and so are the ranks of other nodes then.
        """
        number, over = one.number, time.monotonic() >= one.until
        takers = [pid for pid in self._handlers(number) if pid not in one.told]
        sruns, ranks = processes.sruns(self._ours()), self._ranks_elsewhere()
        one = one._replace(again=time.monotonic() + _LOOK)
        self.now = self.now._replace(unheard=None if over else one)
        if not processes.is_heard([*takers, *sruns], number, ranks):
            return
        tasks = processes.hearing_tasks(ranks, number) if sruns else {}
        if waits := not all(tasks.values()):
            takers = [pid for pid in takers if pid not in sruns]
            takers += [pid for hearing in tasks.values() for pid in hearing] if over else []
        processes.send(takers, number)
        if not waits:
            self._hand_on(number)
        one = one._replace(told=one.told.union(takers), waits=waits)
        if waits and not over:
            self.now = self.now._replace(unheard=one)
        else:
            self.now = self.now._replace(unheard=None if over or sruns else one, heard=True)

    def _warn_again(self, one: OpenWarning) -> None:
        """Look again whether those catch it by now that did not when it came."""
        heard = self.now.heard
        self._warn(one)
        if self.now.heard and not heard:
            self.say(f"{signal_name(one.number)}: the command is asked to save and stop")

    def _ranks_elsewhere(self) -> list[int]:
        """Return the processes of the attempt on this host that are not below us: the ranks that an srun has started."""
        ours = set(processes.below(os.getpid()))
        marked = processes.marked(ENV_ATTEMPT_DIR).get(str(self.asked.mine.folder), [])
        return [one.pid for one in marked if one.pid not in ours]

    def _handlers(self, number: int) -> list[int]:
        return [pid for root in (self.pid, *self.asked.warm.ranks()) for pid in processes.who_hears(root, number)]

    # ------------------------------------------------------------------------------------------------------ the end

    def _end(self, at: datetime, seconds: float) -> tuple[Attempt, EndSigns]:
        rundir, stop_signal, code = self.asked.options.rundir, self.now.by, self.now.code or 0
        said = self.output.since() if code else ""
        output, lately = said or "", self.output.lately() or ""
        ours = self._ours_alone()
        death = exit_analysis.first_death(lately, ours)
        if not (code or stop_signal or self.now.warned):  # an end like any other, unless Slurm has ended the job
            death, lately = exit_analysis.by_slurm_alone(death, ours), ""
        if code and self.death is not None and (death is None or death.of_ranks):  # srun's own order says little
            agents, before = self.asked.agents, lately if self.touched is None else self.output.before(_READ)
            one, failed = (
                (agents.first_failure_before_kill(self.death), agents.table.failed) if agents else (self.death, ())
            )
            death = exit_analysis.cause_of(
                one, lately, failed, before=before, ours=ours, believed=self._believed(lately)
            )
        stopped, seen = exit_analysis.why_stopped(self.asked.mine.folder, self._reached())
        if self.now.warned and not stop_signal and stopped is not None and stopped.kind is CauseKind.TOLD:
            stopped = Cause(CauseKind.WARNING)  # by SIGTERM
        first = First.REQUEST
        if stopped is not None and stopped.kind is CauseKind.TOLD:
            first = self._first_event(death if death is not None else command_end(code))
        why = self.now.cause or cause(
            code,
            finished=rundir.has_finished(),
            stopped=stopped,
            stop_signal=stop_signal,
            past_end=self.asked.job.at is not None and time.time() > self.asked.job.at - _NEAR_END,
            death=death,
            first=first,
        )
        unasked = not stop_signal and stopped is None
        if self.now.warned and self.now.heard and (unasked or why.kind is CauseKind.REQUEUED):
            why = after_the_warning(why)
        if code in (126, 127) and not self.pid:
            why = Cause(CauseKind.NO_START, code=code)
        if code and (root := exit_analysis.root_error(self.asked.mine.folder / ERROR_FILE)):
            output = f"Traceback (most recent call last)\n{root}\n{output}"  # before those of its victims
        asked = bool(stop_signal) or self.now.warned
        newer = self.watcher.seen.newer if self.watcher is not None else None
        attempt = over(self.asked.mine.number, why, at, seconds, seen)._replace(
            exit_code=code,
            failure=failure(code, why, asked=asked, death=death, output=output or said, oom=self.kills.more()),
            note=f"left behind: {self.left_behind}" if self.left_behind else "",
            hardware=exit_analysis.hardware(lately),
        )
        doubted = exit_analysis.blamed(self.output.lately() or "", ours._replace(lost=None))
        gone = exit_analysis.blamed(lately, ours)
        return attempt, EndSigns(stop_signal, self.now.warned, self.now.heard, newer, gone, doubted)

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
        return min(one for one in (self.touched, self.died_at, time.monotonic()) if one is not None)

    def _ours_alone(self) -> Ours:
        """Return whom a line of Slurm's must be about, by all that is known now. A lost node is no finding of the output's."""
        ours = self.asked.ours if self.hints is None else self.hints.ours
        began = ours.began or (self.asked.agents is not None and bool(self.asked.agents.table.newest()))
        return ours._replace(began=began, lost=ours.lost or frozenset())

    def _reached(self) -> Reached:
        """Return the steps reached, by the heartbeat pages, which are read more often, and by the beats; of replica groups by
        the page that sums them up."""
        page = seen_by(self.asked.agents.table) if self.asked.agents is not None else None
        if page is None or page.ahead is None:
            page = read_progress(self.asked.options.rundir, self.asked.mine.number) or page
        return reached(self.asked.options.rundir, self.asked.mine.number, page, every_beat=True)

    def say(self, text: str) -> None:
        tell(self.asked.mine.folder / "run.log", text)


def _at(number: int) -> str:
    return f"{signal_name(number)} at {datetime.now(timezone.utc):%Y-%m-%d %H:%M:%S} UTC"
