"""``ftsupervise run``: gate, attempt, ledger, and again, until the run is done, the job is, or the brake comes on.

A restart here costs seconds, a way through the queue costs minutes to days. What is decided, and why, stands in
``decide.py``; this module looks, asks and does.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial

from ftsupervise.errors import Error
from ftsupervise.model import Attempt, Cause, CauseKind, Claim, End, Failure, FailureKind
from ftsupervise.nodes.placement import Placement, calls_srun
from ftsupervise.nodes.selector import FAILURE, NodeSelector
from ftsupervise.ranks.agent_pool import AT_ONCE, Agents
from ftsupervise.ranks.hang_detector import Past
from ftsupervise.ranks.hang_monitor import Witness, often
from ftsupervise.run import fencing, gate, hold_jobs
from ftsupervise.run.attempt import Running
from ftsupervise.run.backoff import Owed, shut, sit_out, wait_for_space
from ftsupervise.run.cause import with_lost_nodes
from ftsupervise.run.cron_keepalive import Keeper
from ftsupervise.run.decide import Move, Situation, Verdict, decide, delay, since_progress
from ftsupervise.run.environment import Surroundings, command_env
from ftsupervise.run.events import Ears
from ftsupervise.run.orphan_reaper import Minder
from ftsupervise.run.settings import Options
from ftsupervise.rundir import brake, ledger
from ftsupervise.rundir.fence import is_sealed, superseded
from ftsupervise.rundir.ledger import ledger as read_ledger
from ftsupervise.rundir.run_log import tell
from ftsupervise.scheduler import deadline
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.parse import is_away
from ftsupervise.units import signal_name
from ftsupervise.warm.manager import Wanted, Warm

_NOT_NOW = 75
_THEN = {Move.RESTART: "restarted in place", Move.LEAVE: "left", Move.STOP: "stopped by the brake"}
_OLDER, _OLDER_LOOK = 600.0, 5.0  # seconds for an older attempt to end


def run(options: Options, env: Mapping[str, str]) -> int:
    """The exit code of the last attempt's command, 128+N for a signal; 0 when the gate is shut.

    Raises CannotWrite, NotPermitted or NotFound before the command starts, nothing that a person can cause after.
    """
    ears = Ears()
    try:
        pause = partial(sit_out, ears=ears, options=options)
        launched, until_ready = bool(options.launched), partial(wait_for_space, seconds=options.space_wait, pause=pause)
        if launched and not until_ready(partial(gate.require_there, options.rundir)):
            return 0
        gate.require_the_launched(options, pause)
        if not until_ready(partial(gate.prepare, options.rundir, launched=launched)):
            return 0
        closed = gate.reason_not_to_start(options.rundir)
        if closed:
            tell(None, closed)
            hold_jobs.keep_the_brake_on(options.rundir, env)
            return 0
        for odd in gate.odd_switches(options.rundir):
            tell(None, odd)
        code = _go(options, env, ears)
    finally:
        ears.close()
    return code if code >= 0 else 128 - code


def _go(options: Options, env: Mapping[str, str], ears: Ears) -> int:
    keeper = Keeper(options.rundir.root, env)
    minder = Minder(options.grace)
    ring = None
    try:
        ring = Ring(options, env, ears, minder)
        return ring.go()
    finally:
        if ring is not None:
            ring.agents.close()
            ring.owed.settle_at_last(options, ears, told=ring.told)
            ring.warm.stop()
        keeper.stop()
        minder.stop()


class Ring:
    """The attempts of one job."""

    def __init__(self, options: Options, env: Mapping[str, str], ears: Ears, minder: Minder) -> None:
        self.options, self.env, self.ears = options, dict(env), ears
        self.minder = minder
        self.end = deadline.from_environment(env) or deadline.ask_slurm(env)
        self.allocation = Allocation(env)
        self.others = self.allocation.steps()  # steps that are not ours
        self.agents = Agents(options.rundir, self.allocation, env, ears.nudge, often=often(options.hang))
        self.pages = ""  # where the ranks of this attempt make their pages
        self.states: dict[str, str] = {}  # node -> how it is, as of the last failure
        self.nodes = NodeSelector(options.rundir, options.name, options.command, options.care, env, self.allocation)
        self.crowded = False  # a step that does not end holds its CPUs: the next one has to share them
        self.restarts = 0
        asked = options.warm if options.budgets.in_place else Wanted()
        self.warm = Warm(asked, options.command, self.allocation, options.rundir, partial(tell, None))
        self.owed = Owed()  # what a full disk did not take
        self.told = False  # to leave: there may be seconds left
        self.hold: fencing.Hold | None = None  # what the attempt at work writes through
        self.past = Past()  # how long this run's steps and phases take

    def go(self) -> int:
        code = 0
        placement = self.nodes.initial()
        if isinstance(placement, str) and self._older_at_work() is not None:
            if not self._wait_for_the_older(placement):
                return _NOT_NOW
            placement = self.nodes.initial()
        if isinstance(placement, str):
            return self._leave_unstarted(placement)
        if not self._wait_out_failures_before():
            return code
        while True:
            begun = self._begin(placement)
            if begun is None:
                return code
            mine, ended = self._attempt(begun, placement)
            code = ended.code
            reach = f", last step {ended.reached.last}" if ended.reached.last is not None else ""
            tell(mine.folder / "run.log", f"attempt {mine.number} ended: {ended.cause.words()}{reach}")
            verdict = self._judge(mine, ended)
            self._say_verdict(mine, verdict)
            if ended.failure is not None:
                self._look_after_nodes(mine, verdict)
            if verdict.move is Move.RESTART:
                found = self.nodes.next(ended, self.states)
                if isinstance(found, str):
                    verdict = Verdict(Move.LEAVE, found, times=verdict.times)
                    self._say_verdict(mine, verdict)
                else:
                    placement = found
            if verdict.move is Move.LEAVE:
                self._make_way(mine, ended, verdict)
            self._write_down(mine, ended, verdict)
            if verdict.move is Move.STOP:
                self._brake(mine, ended, verdict)
            if ended.failure is None:
                self.nodes.release_exclusions(mine.folder / "run.log")
            if verdict.move is not Move.RESTART or not self._wait(verdict.delay, mine):
                return code
            self.restarts += 1

    # --------------------------------------------------------------------------------------------------- one attempt

    def _begin(self, placement: Placement) -> Claim | None:
        """Claim the next attempt and shut all older ones out; None when it is not to be started after all.

        The gate is asked once more after that: until the fence stood, an older attempt could finish or put the brake on.
        """
        rundir = self.options.rundir
        mine = self._claim(placement)
        if mine is None:
            return None
        self.hold = fencing.begin(rundir, mine.number, self.env, partial(tell, mine.folder / "run.log"))
        newer = superseded(rundir, mine.number)
        why = f"attempt {newer} has begun meanwhile" if newer is not None else shut(self.options)
        if not (why := why or gate.another_place(rundir, mine.folder, self.options.launched)):
            return mine
        tell(mine.folder / "run.log", why)
        self.owed.end(mine, End(Cause(CauseKind.NOT_STARTED, text=why)), "left")
        return None

    def _claim(self, placement: Placement) -> Claim | None:
        """The next attempt and its first page, once there is space. Raises DiskFull when there is none for too long."""
        rundir, found = self.options.rundir, list[Claim | None]()

        def claim() -> None:
            self.owed.settle()
            if not found:
                after = self.hold.number if self.hold is not None else None
                found.append(ledger.claim(rundir) if after is None else ledger.claim_after(rundir, after))
            if found[0] is not None:
                command, nodes = placement.command, placement.nodes
                ledger.write_start(found[0], self.env, command, _now(), self.end, in_place=self.restarts, nodes=nodes)

        begun = False
        try:
            begun = wait_for_space(claim, self.options.space_wait, partial(self._wait, mine=None))
        finally:
            if not begun and found and found[0] is not None:
                ledger.give_back(found[0])
        if begun and found[0] is None:
            tell(None, "another job has begun an attempt of this run meanwhile: this one is over")
        return found[0] if begun else None

    def _attempt(self, mine: Claim, placement: Placement) -> tuple[Claim, End]:
        away = frozenset(node for node, state in self.states.items() if is_away(state))
        self.pages = self.agents.begin(mine.number, mine.folder / "run.log", away)
        kill_ranks = partial(self._kill_ranks, mine, placement.nodes)
        witness, command = self._witness(mine), placement.command
        one = Running(
            self.options, mine, command, self.end, self.ears, kill_ranks, self.agents, warm=self.warm, witness=witness
        )
        self.minder.mind(mine.folder)
        ended = one.see_through(self._env(mine, placement))
        self.minder.mind(None)
        self.warm.ended(stepped=ended.reached.last is not None)
        lost = self._look_for_lost_nodes(mine, placement) if ended.failure is not None else {}
        left = self._clear_steps(mine)
        if left:
            ended = ended._replace(note="; ".join(filter(None, (ended.note, left))))
        ended = with_lost_nodes(ended, lost)
        if ended.failure is not None:
            self.nodes.after(mine, ended, lost)
        return mine, ended

    def _env(self, mine: Claim, placement: Placement) -> dict[str, str]:
        fence = self.hold.env() if self.hold is not None else {}
        steps = calls_srun(self.options.command, self.nodes.text)
        found = Surroundings(mine, self.restarts, self.pages, placement.nodes, self.end, fence, self.crowded, steps)
        self.warm.begin(mine.number, given := command_env(self.options, self.env, found))
        return given

    def _kill_ranks(self, mine: Claim, nodes: tuple[str, ...]) -> bool:
        """SIGKILL for the attempt's processes on all nodes: by the agents, and by a step where there is none."""
        left = set(nodes or self.allocation.nodes)
        left -= self.agents.kill(mine.folder, sorted(left), AT_ONCE)
        if self.agents.remote:
            silent = self.allocation.silent() if left else frozenset()
            if left and not left <= silent:  # nobody waits for the agent of a node that is not there
                left -= self.agents.kill(mine.folder, sorted(left - silent))
            if left <= silent:
                return not left
        return self.allocation.kill_ranks(mine.folder, tuple(n for n in self.allocation.nodes if n in left))

    def _witness(self, mine: Claim) -> Witness | None:
        if self.options.hang is None:
            return None
        return Witness(self.options.hang, self.past, self.agents.pulses.newest, self.agents.ask_all, mine.folder)

    def _clear_steps(self, mine: Claim) -> str:
        """srun may be gone and its ranks on other nodes not: what is left of the step ends before anything else begins."""
        left = self.allocation.end_steps(self.others, self.options.rundir.attempts)
        self.others |= frozenset(left)
        self.crowded = self.crowded or bool(left)
        if not left:
            return ""
        tell(mine.folder / "run.log", words := f"steps that do not end: {', '.join(left)}")
        return words

    def _look_for_lost_nodes(self, mine: Claim, placement: Placement) -> dict[str, str]:
        """node -> Slurm's word, for nodes that were lost: they may live on, and Slurm reaches nothing on them."""
        if len(self.allocation.nodes) < 2:
            return {}
        self.states = self.allocation.how_they_are(ended=True)
        used = placement.nodes or self.allocation.nodes
        lost = {node: self.states[node].rstrip("*") for node in used if is_away(self.states.get(node, ""))}
        self.agents.end_what_lives_on(mine.folder, tuple(lost))
        return lost

    # ------------------------------------------------------------------------------------------------------- deciding

    def _judge(self, mine: Claim, ended: End) -> Verdict:
        attempts = [*self._counted(mine.number), ledger.as_attempt(mine, ended, _now())]
        left = None if self.end is None else self.end - time.time()
        return decide(Situation(attempts, self.restarts, self._why_not(mine, ended), left), self.options.budgets)

    def _counted(self, before: int) -> list[Attempt]:
        """The ledger since the brake was last released. Without an end on record one was lost, unless it was told to go."""
        try:
            first = brake.counts_from(self.options.rundir)
            found = [one for one in read_ledger(self.options.rundir) if first <= one.number < before]
        except OSError:
            return []
        lost = Failure(FailureKind.LOST, CauseKind.LOST.value)
        return [
            one if one.ended or one.told else self.owed.ends.get(one.number) or one._replace(failure=lost)
            for one in found
        ]

    def _why_not(self, mine: Claim, ended: End) -> str:
        """Why nothing is to be started here again, whatever the failure was; "" if there is no such reason."""
        if why := gate.another_place(self.options.rundir, mine.folder, self.options.launched):
            return why
        if newer := ended.newer or superseded(self.options.rundir, mine.number):
            return f"attempt {newer} has begun meanwhile: this one is over"
        if ended.told:
            return f"told to stop ({signal_name(ended.told)})"
        if ended.warned or ended.cause.kind in (CauseKind.WARNING, CauseKind.TIME_LIMIT):
            return "the job was told that it ends soon: the next member takes over"
        try:
            return gate.reason_not_to_start(self.options.rundir)
        except Error as error:  # what cannot be seen stops nobody: the ledger decides
            tell(None, f"cannot look at the gate: {error.message}")
            return ""

    def _say_verdict(self, mine: Claim, verdict: Verdict) -> None:
        pause = f" in {verdict.delay:g} s" if verdict.delay else ""
        what = {
            Move.RESTART: f"starting again in place{pause}",
            Move.LEAVE: "leaving",
            Move.STOP: "the brake is on, nothing more is started",
        }[verdict.move]
        tell(mine.folder / "run.log", f"{what}{': ' + verdict.why if verdict.why else ''}")

    def _look_after_nodes(self, mine: Claim, verdict: Verdict) -> None:
        log = mine.folder / "run.log"
        enough = self.end is None or self.end - time.time() > 2 * self.options.care.health_timeout
        if verdict.move is not Move.STOP and enough:
            self.nodes.examine(FAILURE, log)
        if verdict.move is not Move.LEAVE:
            self.nodes.update_exclusions(log)

    def _make_way(self, mine: Claim, ended: End, _: Verdict) -> None:
        """The next member is to start now: as many bad nodes are excluded for it as others can stand in for."""
        if not ended.told and ended.newer is None:
            self.nodes.update_exclusions(mine.folder / "run.log", leaving=not shut(self.options))

    def _leave_unstarted(self, why: str) -> int:
        """No fit nodes: an attempt that was none, so that the brake counts it. It shuts older ones out, as every claim does."""
        mine = self._begin(Placement(self.options.command, self.nodes.names))
        if mine is None:
            return _NOT_NOW
        ended = End(Cause(CauseKind.NOT_STARTED, text=why), self.nodes.too_few(why), _NOT_NOW)
        verdict = self._judge(mine, ended)
        if verdict.move is Move.RESTART:
            verdict = replace(verdict, move=Move.LEAVE, why="the next member takes over")
        tell(mine.folder / "run.log", ended.cause.words())
        self._say_verdict(mine, verdict)
        self._write_down(mine, ended, verdict)
        (self._brake if verdict.move is Move.STOP else self._make_way)(mine, ended, verdict)
        return ended.code

    def _wait_out_failures_before(self) -> bool:
        """A new member of a chain that fails waits as a restart in place would."""
        streak = since_progress(self._counted(1 << 60))
        last = streak[-1] if streak else None
        if last is None or last.ended is None:
            return True
        pause = delay(streak, self.options.budgets) if len(streak) > 1 else 0.0
        rest = min(pause, pause - (_now() - last.ended).total_seconds())
        if rest > 0.05:
            tell(None, f"{len(streak)} failures without progress: waiting {rest:.0f} s")
        return self._wait(rest, None)

    def _wait(self, seconds: float, mine: Claim | None) -> bool:
        """Sit out a back-off; False when something came that ends it."""
        going_on = sit_out(seconds, self.ears, self.options, mine.folder / "run.log" if mine else None)
        self.told = self.told or not going_on
        return going_on

    def _wait_for_the_older(self, why: str) -> bool:
        """An attempt that may be at work is not told that it is over by one that cannot start. False: it still is."""
        until, told = time.monotonic() + _OLDER, False
        while older := self._older_at_work():
            if not told:
                told = True
                tell(None, f"not started: {why}; attempt {older} may still be at work: waiting for its end")
            if time.monotonic() >= until or not self._wait(_OLDER_LOOK, None):
                tell(None, f"not started: {why}; nothing is claimed while attempt {older} may still be at work")
                return False
        return True

    def _older_at_work(self) -> int | None:
        return fencing.at_work(self.options.rundir, self.nodes.job, self.allocation.lives, _now())

    # --------------------------------------------------------------------------------------------------------- ledger

    def _write_down(self, mine: Claim, ended: End, verdict: Verdict) -> None:
        then = _THEN[verdict.move]
        self.owed.end(mine, ended, f"{then}: {verdict.why}" if verdict.why else then)
        self.told = self.told or bool(ended.told or ended.warned)

    def _brake(self, mine: Claim, ended: End, verdict: Verdict) -> None:
        """The mark first: it keeps members from starting even when they cannot be held."""
        on = brake.Brake(
            failure=verdict.failure or ended.cause.words(),
            why=verdict.why,
            times=verdict.times,
            attempt=mine.number,
            step=ended.reached.last,
            detail=verdict.detail,
            at=_now().isoformat(),
        )
        log = mine.folder / "run.log"
        area = self.hold.area if self.hold is not None else None
        write = partial(brake.write_brake, self.options.rundir, area=area)
        if self.owed.write("the brake", partial(write, on), log) and area is not None and is_sealed(area):
            return  # a newer attempt has begun: the members that wait are its own
        held, problem = hold_jobs.hold_pending(self.options.rundir, self.env)
        if problem:
            tell(log, f"cannot hold the members that wait: {problem}")
        if held:
            tell(log, f"on hold: {', '.join(held)}")
            self.owed.write("the brake", partial(write, on._replace(held=held)), log)
        tell(log, f"mend it, then: ftsupervise clear --brake {self.options.rundir.root}")


def _now() -> datetime:
    return datetime.now(timezone.utc)
