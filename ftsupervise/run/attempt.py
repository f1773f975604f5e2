"""One attempt: start the command, pass Slurm's signals on, end it in bounded time, and record how it ended.

The command comes first: a full disk or a lost run directory is reported, and the training goes on.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from datetime import datetime, timezone

from ftsupervise.host import processes
from ftsupervise.host.memory import OomKillCounter
from ftsupervise.model import Cause, CauseKind, End, Reached
from ftsupervise.ranks.hang_monitor import HangMonitor, cause_of
from ftsupervise.ranks.rank_table import RankExit, first_failure
from ftsupervise.run import exit_analysis
from ftsupervise.run.cause import cause, failure
from ftsupervise.run.events import STOP, RunDirWatcher
from ftsupervise.run.exit_analysis import CommandSpec, Ending, Touched
from ftsupervise.rundir.ledger import reached
from ftsupervise.rundir.paths import ERROR_FILE, STOPPED
from ftsupervise.rundir.run_log import shown, tell, warn
from ftsupervise.units import signal_name

_STRAGGLERS = 5.0  # seconds for processes that the command left running, when we were not asked to stop
_RANKS_GONE = 2.0  # seconds for srun to notice that all its ranks were killed
_SRUN_GONE = 0.3  # the same when a node is lost: srun would wait for it as long as Slurm does
_UNKILLABLE = 5.0  # seconds a process may take to die of SIGKILL before it is left behind
_NEAR_END = 60.0  # Slurm's limit loop is up to this early or late
_LISTEN = 0.1  # seconds between two reads of srun's output; the agents report deaths at once
_VICTIMS = 0.03  # seconds for the other ranks after the first death: to report an error, not to save
_OUTLIVED = 60.0  # seconds after which a rank's death no longer explains the command's end; KillWait is 30 s
_HOPELESS = 5.0  # seconds between SIGTERM and SIGKILL for a command that did not stop when asked


class Running:
    """The command of one attempt, and what was done to it."""

    def __init__(self, asked: CommandSpec, monitor: HangMonitor | None = None) -> None:
        self.asked = asked
        self.monitor = monitor  # None: hangs are not detected, or no longer
        self.crashes: list[RankExit] = []  # of ranks, as their nodes reported
        self.death: RankExit | None = None  # of the rank that failed first
        self.pid = 0
        # the batch script started them before it became us
        self.others = frozenset(processes.below(os.getpid())) - asked.warm.tree()
        self.code: int | None = None
        self.warned = False
        self.ending: Ending | None = None
        self.touched: Touched | None = None  # since when we have signalled or killed processes of it
        self.left_behind: list[int] = []
        self.output = exit_analysis.Output()
        self.kills = OomKillCounter()
        self.lookout: RunDirWatcher | None = None

    # ------------------------------------------------------------------------------------------------- its life

    def see_through(self, env: dict[str, str]) -> End:
        """Run the command from start to end."""
        began, started = time.time(), time.monotonic()
        code, died_at = self._start(env), None
        if code is None:
            self.lookout = RunDirWatcher(
                self.asked.options.rundir,
                self.asked.mine.number,
                self.asked.ears,
                self.asked.options.look_every,
                self.asked.warm.has_news,
            )
            code = self.wait()
            self.hear_the_last()
            died_at = (self.ending.died_at if self.ending is not None else None) or time.monotonic()
            self._clear_away()
            self.lookout.close()
        return self._end(code, began, time.monotonic() - started, died_at)

    def _start(self, env: dict[str, str]) -> int | None:
        """Start the command. None when it runs; else the exit code that a shell gives for a command that cannot be started."""
        command = self.asked.command
        self.say(f"attempt {self.asked.mine.number} of {self.asked.options.name}: {shown(command)}")
        before_exec = processes.become_subreaper()
        wrapped = self.asked.warm.wrap(command)
        try:
            child = subprocess.Popen(wrapped, env=env, start_new_session=True, preexec_fn=before_exec)
        except OSError as error:
            self.say(f"cannot start {command[0]}: {error.strerror}")
            return 127 if isinstance(error, FileNotFoundError) else 126
        self.pid = child.pid
        child.returncode = 0  # reaped here, with everything else that is handed to us
        return None

    def wait(self) -> int:
        """Wait until the command has ended: reap, pass signals on, keep the bounds."""
        while True:
            self._reap()
            if self.code is not None:
                return self.code
            for number in self.asked.ears.heard(self._patience()):
                self._on_signal(number)
            self._look_around()
            if self.ending is not None and time.monotonic() >= self.ending.kill_at:
                self._reap()
                if self.code is None:
                    self._touch()
                    self.say("processes are still running: SIGKILL")
                    self._end_by_force()
                return self.code if self.code is not None else -signal.SIGKILL

    def hear_the_last(self) -> None:
        """Read the deaths and signals that arrived just before the command's end."""
        self._hear_deaths()  # also those that were still arriving when we began to end it
        died_at = (self.ending.died_at if self.ending is not None else None) or time.monotonic()
        if self.death is not None and self.death.at < died_at - _OUTLIVED:
            self.death = None  # the command ended of something else since: its output shows it
        for number in self.asked.ears.heard(0):
            self._on_signal(number)

    def _patience(self) -> float | None:
        now = time.monotonic()
        if self.ending is not None:
            return max(0.0, self.ending.kill_at - now)
        bounds = [_LISTEN] if self._listens else []
        bounds += [self.monitor.due - now] if self.monitor is not None else []
        stop_at = self._stop_at()
        bounds += [stop_at - now] if stop_at is not None else []
        return max(0.0, min(bounds)) if bounds else None

    @property
    def _listens(self) -> bool:
        """Does this attempt read srun's lines about its ranks?"""
        return self.asked.options.budgets.in_place > 0 and self.asked.ends_with_a_rank and self.output.is_file

    def _stop_at(self) -> float | None:
        """The time at which a command that ignores the kill switch is ended; None: not due."""
        since = self.lookout.seen.kill_since if self.lookout is not None and self.ending is None else None
        return None if since is None else since + self.asked.options.stop_within

    def _look_around(self) -> None:
        """React to a newer attempt, the kill switch, a dead rank or a hang."""
        self.asked.warm.act()
        if self.ending is not None or self.lookout is None:
            return
        if self.lookout.seen.newer is not None:
            newer = f"attempt {self.lookout.seen.newer}"
            self._end_it(Cause(CauseKind.SUPERSEDED, text=newer))
            return
        stop_at = self._stop_at()
        if stop_at is not None and time.monotonic() >= stop_at:
            late = f"the command did not stop within {self.asked.options.stop_within:g} s"
            self._end_it(Cause(CauseKind.KILL_SWITCH, text=late))
            return
        death = self.told_death() or (self.output.next_death() if self._listens else None)
        if death is not None:
            now = time.monotonic()
            since = self.death.at if self.death is not None else now
            self.ending = Ending(max(now, since + _VICTIMS), died_at=now)
            self.say(f"{death.words()}: the other ranks have {_VICTIMS:g} s to leave")
            return
        self._look_for_a_hang()

    def _look_for_a_hang(self) -> None:
        """Gather evidence of a hang, then end it without grace: stopped processes and blocked collectives ignore SIGTERM."""
        at_rest = self.warned or (self.lookout is not None and self.lookout.seen.kill_since is not None)
        verdict = None if self.monitor is None or at_rest else self.monitor.alarm()
        if verdict is None:
            return
        hang = cause_of(verdict)
        self.say(f"{hang.words()}; evidence in {self.asked.mine.folder / 'evidence'}")
        if not self.asked.options.end_hung:
            self.say("the hung command is left running: neither --hang nor --in-place was given")
            self.monitor = None
            return
        now, ours = time.monotonic(), self._ours()
        by_srun = bool(processes.sruns(ours))
        self.ending = Ending(now if by_srun else now + _VICTIMS, hang, died_at=now)
        if not by_srun:
            odd = [one.pid for one in verdict.odd if one.state in ("T", "t", "D") and one.pid in ours]
            processes.send(odd, signal.SIGKILL)
            processes.send([pid for pid in ours if pid not in odd], signal.SIGTERM)

    def told_death(self) -> Cause | None:
        """The first crash that a node reported; None also where no restart would follow: the crash is then only recorded."""
        if self.asked.agents is None:
            return None
        self.asked.agents.tend()
        self._hear_deaths()
        return self.death.cause() if self.death is not None and self.asked.restarts and not self.warned else None

    def _hear_deaths(self) -> None:
        """Find the rank that failed first, from deaths before we ended any rank, however late their nodes report them."""
        news = self.asked.agents.pulses.deaths() if self.asked.agents is not None else []
        self.crashes += [one for one in news if one.crash and (self.touched is None or one.at < self.touched.at)]
        if not self.warned and (self.asked.restarts or self.asked.ends_with_a_rank):
            self.death = first_failure(self.crashes)

    def _touch(self) -> None:
        """Note that we may have caused any death from here on."""
        if self.touched is None:
            self.touched = Touched(time.monotonic(), self.output.since() or "")

    def _end_it(self, why: Cause) -> None:
        """End the command because of something we saw."""
        self.ending = Ending(time.monotonic() + _HOPELESS, why)
        self.say(f"{why.words()}: SIGTERM, then SIGKILL after {_HOPELESS:g} s")
        self._tell_to_leave(signal.SIGTERM, why.words())

    def _reap(self) -> None:
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if pid == self.pid:
                self.code = os.waitstatus_to_exitcode(status)

    def _clear_away(self) -> None:
        """End what the command left running, so that nothing of this attempt meets the next one."""
        if self.left_behind or not self._ours():
            return
        patience = _STRAGGLERS if self.ending is None else max(0.0, self.ending.kill_at - time.monotonic())
        if self.ending is None or not self.ending.by:
            self.say("the command has ended and left processes running: SIGTERM")
            processes.send(self._ours(), signal.SIGTERM)
        if not self._gone_within(patience):
            self._end_by_force()

    def _end_by_force(self) -> None:
        """End every process of the command. What SIGKILL does not end is reported and left behind, never waited for."""
        if processes.sruns(self._ours()):
            reached_all = self.asked.kill_ranks()
            if self._gone_within(_RANKS_GONE if reached_all else _SRUN_GONE):  # srun reports their end and exits
                return
            processes.send(processes.sruns(self._ours()), signal.SIGTERM)
            if self._gone_within(_STRAGGLERS if reached_all else _SRUN_GONE):
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
        return self.asked.warm.without_standbys(processes.below(os.getpid(), without=self.others | aside))

    def _gone_within(self, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while self._ours():
            if time.monotonic() >= until:
                return False
            for number in self.asked.ears.heard(min(0.1, max(0.0, until - time.monotonic()))):
                self._on_signal(number)
            self._reap()
        self._reap()
        return True

    # -------------------------------------------------------------------------------------------------- signals

    def _on_signal(self, number: int) -> None:
        if number in (0, signal.SIGCHLD):
            return
        if number in STOP:
            self._on_stop(number)
        elif number == self.asked.options.warning:
            self.warned = True
            self.say(f"{signal_name(number)}: the job ends soon; the command is asked to save and stop")
            warn(self.asked.mine.folder, f"{signal_name(number)} at {_now():%Y-%m-%d %H:%M:%S} UTC", self.say, number)
            self._forward(number)
        elif number == signal.SIGCONT:
            processes.send(self._ours(), number)
        else:
            self._forward(number)

    def _on_stop(self, number: int) -> None:
        now, ending = time.monotonic(), self.ending
        if ending is not None and ending.by:
            if number == signal.SIGINT:
                self.ending = ending._replace(kill_at=now)
            return
        kill_at = now + self.asked.options.grace
        self.ending = (ending or Ending(kill_at))._replace(by=number, kill_at=kill_at)
        self.say(
            f"{signal_name(number)}: passed on to the command; SIGKILL in {self.asked.options.grace:g} s for the rest"
        )
        self._tell_to_leave(number, f"{signal_name(number)} at {_now():%Y-%m-%d %H:%M:%S} UTC", told=number)

    def _tell_to_leave(self, number: int, why: str, told: int = 0) -> None:
        self._touch()
        warn(self.asked.mine.folder, why, self.say, told)
        everyone = self._ours()
        processes.send(everyone, signal.SIGCONT)  # a stopped process takes no SIGTERM
        hearers = self._who_hears(number)
        if not hearers:  # srun would kill its ranks unsaved; Slurm signals them itself, and the file warns the guards
            hearers = [pid for pid in everyone if pid not in processes.sruns(everyone)]
        processes.send(hearers, number)

    def _forward(self, number: int) -> None:
        """The processes that handle the signal: the command, or those below a launcher or shell that would die of it."""
        if self.asked.options.forward == "never":
            return
        if self.asked.options.forward == "always":
            processes.send([self.pid], number)
        else:
            processes.send(self._who_hears(number), number)

    def _who_hears(self, number: int) -> list[int]:
        return [pid for root in (self.pid, *self.asked.warm.ranks()) for pid in processes.who_hears(root, number)]

    # ------------------------------------------------------------------------------------------------------ the end

    def _end(self, code: int, began: float, seconds: float, died_at: float | None) -> End:
        rundir = self.asked.options.rundir
        ending = self.ending
        told = ending.by if ending is not None else 0
        said = self.output.since() if code else ""
        output = said or ""
        death = exit_analysis.first_death(output)
        if code and self.death is not None and (death is None or death.of_ranks):  # srun's own order says little
            agents, before = self.asked.agents, output if self.touched is None else self.touched.output
            one, failed = (
                (agents.first_failure_before_kill(self.death), agents.pulses.failed) if agents else (self.death, ())
            )
            death = exit_analysis.cause_of(one, output, failed, before=before)
        why = cause(
            code,
            finished=rundir.has_finished(),
            stopped=exit_analysis.stopped(self.asked.mine.folder / STOPPED),
            told=told,
            past_end=self.asked.end is not None and time.time() > self.asked.end - _NEAR_END,
            death=death,
            ended=ending.cause if ending is not None else None,
        )
        if code in (126, 127) and not self.pid:
            why = Cause(CauseKind.NO_START, code=code)
        if code and (root := exit_analysis.root_error(self.asked.mine.folder / ERROR_FILE)):
            output = f"Traceback (most recent call last)\n{root}\n{output}"  # before those of its victims
        asked = bool(told) or self.warned
        seen = self._reached()
        newer = self.lookout.seen.newer if self.lookout is not None else None
        return End(
            code=code,
            cause=why,
            failure=failure(code, why, asked=asked, death=death, output=output or said, oom=self.kills.more()),
            seconds=seconds,
            reached=seen,
            ready=None if seen.first_at is None else max(0.0, seen.first_at - began),
            told=told,
            warned=self.warned,
            newer=newer,
            note=f"left behind: {self.left_behind}" if self.left_behind else "",
            died_at=died_at,
            gone=exit_analysis.blamed(said or ""),
            hardware=exit_analysis.hardware(said or ""),
        )

    def _reached(self) -> Reached:
        """The steps reached by the beats; the heartbeat pages are read more often and may know a later last step."""
        seen = reached(self.asked.options.rundir, self.asked.mine.number)
        pulses = self.asked.agents.pulses.newest() if self.asked.agents is not None else []
        told = [one.step for one in pulses if one.step is not None]
        return seen._replace(last=max([*told, *([] if seen.last is None else [seen.last])], default=None))

    def say(self, text: str) -> None:
        tell(self.asked.mine.folder / "run.log", text)


def _now() -> datetime:
    return datetime.now(timezone.utc)
