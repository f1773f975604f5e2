"""Where the guard looks for reasons to save or to stop. One look costs some 15 us; a slow file system makes looks rarer."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

from ftsupervise.guard.decision import SUPERSEDED, Decision
from ftsupervise.guard.log import Voice
from ftsupervise.guard.settings import Limits, RankContext
from ftsupervise.guard.signals import Signals
from ftsupervise.host import files
from ftsupervise.host.memory import HostMemory
from ftsupervise.printable import printable
from ftsupervise.rundir.fence import newer
from ftsupervise.rundir.paths import WARNING
from ftsupervise.rundir.switches import KILL, SAVE, Identity, look_at_switch
from ftsupervise.scheduler import deadline
from ftsupervise.truth import Health

_CONTINUE = Decision.CONTINUE


class StopReasons:
    """Everything outside the loop that may ask it to save or stop, as seen from this process."""

    def __init__(self, place: RankContext, limits: Limits, signals: Signals, voice: Voice) -> None:
        self._place, self._limits, self._signals, self._voice = place, limits, signals, voice
        self._switches = str(place.rundir.switches) if place.rundir else ""
        self._attempt_dir = str(place.attempt_dir or "")
        self._attempts = str(place.attempt_dir.parent) if place.attempt_dir else ""
        self.newer: int | None = None  # an attempt that has begun after ours: from then on nothing of ours is written
        self._odd = False
        self._memory_says = self._warning_says = _CONTINUE
        self._memory = self._open_memory()
        self.end, self._end_cause = self._find_end()
        self.problem = ""  # a file that lies in a switch's place and is none
        self.raised: Identity | None = None  # the save switch as last seen
        self.answered: Identity | None = None  # the one a checkpoint was asked for

    def close(self) -> None:
        if self._memory is not None:
            self._memory.close()
            self._memory = None

    def reasons(self, now: float, *, shared_directory: bool) -> Decision:
        """The strongest reason found. ``shared_directory``: is it for this rank to look there?"""
        self._odd = not self._odd  # memory and the warning file take turns; what they said last goes on counting
        if self._odd and self._memory is not None:
            self._memory_says = self._look_at_memory(self._memory)
        elif shared_directory and self._attempt_dir:
            self._warning_says = max(self._look_for_warning(), self._look_at_fence())
        want = max(self._sure_reasons(now), self._warning_says, self._memory_says)
        if shared_directory and self._switches:
            want = max(self._look_at_switches(), want)
        return want

    def _sure_reasons(self, now: float) -> Decision:
        """What this process has been told already, or knows from the clock."""
        if self._signals.got == signal.SIGTERM:
            return Decision(2, "told to stop (SIGTERM)", "SIGTERM: preempted, cancelled or at the time limit")
        if self._signals.got:
            return Decision(2, "warning signal", f"warning signal {signal.Signals(self._signals.got).name}")
        return _CONTINUE if now < self.end else Decision(2, self._end_cause)

    def memory_used(self) -> str:
        """The share (0-1) of the memory that is used, file pages not counted, for the beat: the watch cannot see this host.
        "" where nobody looks."""
        try:
            return f"{self._memory.share()[0]:.3f}" if self._memory is not None else ""
        except (OSError, ValueError):
            return ""

    def _look_at_memory(self, memory: HostMemory) -> Decision:
        limit = self._limits.memory or 1.0
        try:
            share, whose = memory.share(limit)
        except (OSError, ValueError) as error:
            self._voice.once(f"cannot look at the memory: {error}")
            self.close()
            return _CONTINUE
        if share < limit:
            return _CONTINUE
        return Decision(2, "host memory", f"{whose} memory {share:.1%} used, limit {limit:.0%}")

    def _look_at_switches(self) -> Decision:
        rundir = self._place.rundir
        assert rundir is not None
        try:
            names = files.among(self._switches, (SAVE, KILL))
        except OSError as error:
            self._voice.once(f"cannot look at the switches in {self._switches}: {error.strerror}; training goes on")
            return _CONTINUE
        want, self.raised = _CONTINUE, None
        if SAVE in names:
            switch, self.raised = look_at_switch(rundir, SAVE)
            self._report(switch.problem)
            if self.raised is not None and self.raised != self.answered:
                want = Decision(1, "save switch", _words("save switch", switch.who, switch.why))
        if KILL in names:
            switch, _ = look_at_switch(rundir, KILL)
            self._report(switch.problem)
            if switch.health is Health.BAD:
                want = Decision(2, "kill switch", _words("kill switch", switch.who, switch.why))
        return want

    def _look_for_warning(self) -> Decision:
        """The file ``ftsupervise run`` drops for ranks that Slurm's signal cannot reach."""
        try:
            if not files.among(self._attempt_dir, (WARNING,)):
                return _CONTINUE
        except OSError as error:
            self._voice.once(f"cannot look for the warning in {self._attempt_dir}: {error.strerror}")
            return _CONTINUE
        words = _first_line(Path(self._attempt_dir, WARNING))
        return Decision(2, "warning signal", f"warning from ftsupervise run: {words}")

    def superseded(self) -> bool:
        """Has a newer attempt begun? Looks now; what cannot be seen is not so."""
        if self.newer is None and self._place.attempt is not None:
            try:
                self.newer = newer(self._attempts, self._place.attempt)
            except OSError:  # the look for the warning, in the same place, says so
                return False
        return self.newer is not None

    def _look_at_fence(self) -> Decision:
        if not self.superseded():
            return _CONTINUE
        return Decision(2, SUPERSEDED, f"superseded: attempt {self.newer} has begun, this one must not write any more")

    def _report(self, problem: str) -> None:
        if problem:
            self.problem = problem
            self._voice.once(problem)

    def _open_memory(self) -> HostMemory | None:
        if self._limits.memory is None:
            return None
        try:
            return HostMemory()
        except (OSError, ValueError) as error:
            self._voice.once(f"cannot look at the memory: {error}")
            return None

    def _find_end(self) -> tuple[float, str]:
        """Monotonic time at which to leave, and the cause it would be; infinity if there is none."""
        now, ends = time.monotonic(), [(float("inf"), "")]
        if self._limits.run_for is not None:
            ends.append((now + self._limits.run_for, "run time reached"))
        if self._limits.stop_before is not None:
            end = deadline.from_environment(os.environ)
            if end is None and self._place.rank == 0:
                end = deadline.ask_slurm(os.environ)
            if end is not None:
                ends.append((now + end - time.time() - self._limits.stop_before, "time limit"))
        return min(ends)


def _words(what: str, who: str, why: str) -> str:
    return f"{what} raised by {who}" + (f": {why}" if why else "")


def _first_line(path: Path) -> str:
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return "no reason given"
    with os.fdopen(fd, "rb") as file:
        line = file.read(1000).decode("utf-8", "replace").partition("\n")[0]
    return printable(line) or "no reason given"
