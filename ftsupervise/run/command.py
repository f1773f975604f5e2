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
from datetime import datetime, timezone
from functools import partial
from typing import Any

from ftsupervise.host import bounded, front, processes
from ftsupervise.host.begin import begin
from ftsupervise.host.in_time import in_time
from ftsupervise.host.signals import STOP
from ftsupervise.model import Attempt, Cause, CauseKind, Reached
from ftsupervise.ranks.hang_monitor import HangMonitor, cause_of
from ftsupervise.run.deaths import LISTEN, READ, DeathsSeen, EndSigns
from ftsupervise.run.exit_analysis import CommandSpec, RanksKilled
from ftsupervise.run.fencing import RunDirWatcher
from ftsupervise.run.job_end import Announcement
from ftsupervise.run.left_alone import LeftAlone
from ftsupervise.run.progress_pages import seen_by
from ftsupervise.run.states import AttemptEvent, AttemptProgress, AttemptState, OpenWarning
from ftsupervise.rundir.ledger import NEAR_END, reached
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, shown, tell, warn
from ftsupervise.rundir.progress import read_progress
from ftsupervise.scheduler.parse import is_srun
from ftsupervise.truth import HANG, RANKS
from ftsupervise.units import signal_name

_BEGINS = 5.0  # seconds for the command to begin; after that it is followed all the same, and may be ended
_STRAGGLERS = 5.0  # seconds for processes that the command left running, when we were not asked to stop
_RANKS_GONE = 2.0  # seconds for srun to notice that all its ranks were killed
_SRUN_GONE = 0.3  # the same when not all of them can be reached
_UNKILLABLE = 5.0  # seconds a process may take to die of SIGKILL before it is left behind
_VICTIMS = 0.03  # seconds for the other ranks after the first death: to report an error, not to save
_WRITE = 0.25  # seconds for a page while ranks run: its disk may hang, and a signal for them may be next
# seconds that the warning waits for ranks that do not catch it yet, or a quarter of the time before the end
_STARTS = 60.0
_LOOK = 2.0  # seconds between two looks at those
_TWICE = 0.5  # seconds: a second interrupt that comes sooner is the first one, for our whole process group
_KILL_WAIT = 0.5  # seconds for Slurm to say how long it waits
_MOMENT = 0.3  # seconds in which our own signal may come behind the end that it has brought
_HOPELESS = 5.0  # seconds between SIGTERM and SIGKILL for a command that did not stop when asked
_ON = (AttemptState.RUNNING, AttemptState.WARNED)  # the command is not being ended


class RunningCommand:
    """The command of one attempt, and our actions on it."""

    def __init__(self, asked: CommandSpec, monitor: HangMonitor | None = None) -> None:
        self.asked = asked
        self.now = AttemptProgress()
        self.monitor = monitor  # None: hangs are not detected
        self.left = LeftAlone(asked.observes, asked.mine.folder, self.say)
        self.deaths = DeathsSeen(asked)
        self.pid = 0
        # the batch script started them before it became us, or they are no part of the command
        there, warm = processes.below(os.getpid()), asked.warm.tree()
        self.others = {pid: start for pid in there if pid not in warm and (start := processes.identity(pid))}
        self.left_behind: list[int] = []
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
        self.deaths.close()
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
            child = begin(wrapped, (0, 1, 2), env=env, before_exec=before_exec, anywhere=not is_srun(wrapped))
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
        self.deaths.ours_from_here()
        self.say("processes are still running: SIGKILL")
        self._end_by_force()
        if self.now.code is None:
            self._move(AttemptEvent.UNKILLABLE, code=-signal.SIGKILL)

    def read_the_last_events(self) -> None:
        """Read the deaths and signals that arrived just before the command's end."""
        self.deaths.read(warned=self.now.warned)  # also those that were still arriving when we began to end it
        self.deaths.outlived(self._died_at())
        for number in self.asked.signals.wait(0):
            self._on_signal(number)
        self._judge_the_announcement(READ)
        if self.now.kill_at is None and self.now.code is not None:
            self._hear_of_the_end(by_sigterm=self.now.code in (-signal.SIGTERM, 128 + signal.SIGTERM))

    def _hear_of_the_end(self, *, by_sigterm: bool) -> None:
        """Listen for a moment where what has ended may have been told to leave before us, and ask Slurm whether the job ends.

        Slurm signals the processes of a job one after the other. No other end waits for this but one with 0: a shell goes on
        behind a program that was killed.
        """
        near = self.asked.job.at is not None and time.time() > self.asked.job.at - NEAR_END
        if not (by_sigterm or near or not self.now.code):
            return
        asked = Announcement(self.asked.job, None, time.monotonic()) if by_sigterm or near else None
        if asked is not None:
            asked.was_the_end()  # it is asked meanwhile
        until = time.monotonic() + _MOMENT
        while not self.now.by and (rest := until - time.monotonic()) > 0:
            for number in self.asked.signals.wait(rest):
                self._on_signal(number)
        self._judge_the_announcement(READ)
        if not self.now.by and asked is not None and asked.was_the_end(READ):
            self._on_stop(signal.SIGTERM)

    def _died_at(self) -> float:
        return self.now.died_at or time.monotonic()

    def _time_left(self) -> float | None:
        """Return the seconds until something has to be checked or done; None: nothing is due."""
        now = time.monotonic()
        if self.now.kill_at is not None:
            return max(0.0, self.now.kill_at - now)
        bounds = [LISTEN] if self.deaths.listens or self.asked.job.announced is not None else []
        bounds += [self.monitor.due - now] if self.monitor is not None and self.may_hang else []
        bounds += [self.now.unheard.again - now] if self.now.unheard is not None and self.now.state in _ON else []
        stop_at = self._stop_at()
        bounds += [stop_at - now] if stop_at is not None else []
        return max(0.0, min(bounds)) if bounds else None

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
        death, state = self.deaths.reported(warned=self.now.warned) or self.deaths.confirmed(), self.now.state
        if death is not None and death.killed_by == signal.SIGTERM and not self.left.observes(RANKS):
            self._hear_of_the_end(by_sigterm=True)
            if self.now.state is not state:
                return
        if death is not None and self.left.observes(RANKS):
            self.left.note(RANKS, "ended the other ranks, to start again in place", death.words())
        elif death is not None:
            now = time.monotonic()
            since = self.deaths.death.at if self.deaths.death is not None else now
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
        self.deaths.over_at, kill_at = self._died_at(), self.now.kill_at
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
                # Slurm kills us too a few seconds after the grace: the end is to be on record by then
                everywhere = killed is RanksKilled.ALL and not self.now.by
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
            self.deaths.ours_from_here()
        self._forward(number)
        at = time.monotonic()
        self._move(AttemptEvent.WARNING)
        asked = "the command is asked to save and stop"
        if self.now.unheard is not None and self.now.unheard.waits:
            asked = "a rank that does not catch it yet is waited for, because srun would kill it"
        elif not self.now.heard:
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
        passed = "the command has ended" if self.now.code is not None else "passed on to the command"
        self.say(f"{signal_name(number)}: {passed}; SIGKILL in {grace:g} s for the rest")
        self._write_the_warning(_at(number), number)

    def _write_the_warning(self, why: str, number: int = 0) -> None:
        """Write the file that warns the guards. The signal has gone out before: this disk may hang."""
        in_time(partial(warn, self.asked.mine.folder, why, self.say, number), _WRITE)

    def _tell_to_leave(self, number: int) -> None:
        self.deaths.ours_from_here()
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
        takers = self._handlers(number)
        if number == self.asked.options.warning:  # where it is the end itself, Slurm signals the others
            sruns = processes.sruns(self._ours())
            if not processes.is_heard([*takers, *sruns], number, self._ranks_elsewhere()):
                return
            self.now = self.now._replace(heard=True)
        processes.send(takers, number)
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
        one, signs = self.deaths.judge(self.now, self._reached, at, seconds, begun=bool(self.pid))
        note = f"left behind: {self.left_behind}" if self.left_behind else ""
        return one._replace(note=note), signs._replace(
            newer=self.watcher.seen.newer if self.watcher is not None else None
        )

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
