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

from ftsupervise import brake, deadline
from ftsupervise.errors import Error
from ftsupervise.fence import is_sealed, superseded
from ftsupervise.job import fencing, gate, hold, ledger
from ftsupervise.job.agents import Agents
from ftsupervise.job.allocation import Allocation
from ftsupervise.job.attempt import End, Running, not_started
from ftsupervise.job.cause import Failure, Kind
from ftsupervise.job.decide import Move, Situation, Verdict, decide, delay, since_progress
from ftsupervise.job.ears import STOP, Ears
from ftsupervise.job.environment import command_env
from ftsupervise.job.hang import Past
from ftsupervise.job.keeper import Keeper
from ftsupervise.job.minder import Minder
from ftsupervise.job.nodes import FAILURE, Nodes
from ftsupervise.job.options import Options
from ftsupervise.job.placement import Placement, is_away, is_srun
from ftsupervise.job.voice import tell
from ftsupervise.job.warm import Warm
from ftsupervise.job.witness import Witness, often
from ftsupervise.ledger import Reached
from ftsupervise.ledger import ledger as read_ledger
from ftsupervise.truth import Attempt

__all__ = ["Options", "run"]

_AT_ONCE = 0.3  # seconds in which the agent of a node that is well has killed what it is to kill


def run(options: Options, env: Mapping[str, str]) -> int:
    """The exit code of the last attempt's command, 128+N for a signal; 0 when the gate is shut.

    Raises CannotWrite, NotPermitted or NotFound before the command starts, nothing that a person can cause after.
    """
    gate.prepare(options.rundir)
    shut = gate.reason_not_to_start(options.rundir)
    if shut:
        tell(None, shut)
        _keep_the_brake_on(options, env)
        return 0
    for odd in gate.odd_switches(options.rundir):
        tell(None, odd)
    keeper = Keeper(options.rundir.root, env)
    minder = Minder(options.grace)
    ears = Ears()
    ring = None
    try:
        ring = Ring(options, env, ears, minder)
        code = ring.go()
    finally:
        if ring is not None:
            ring.agents.close()
            ring.warm.stop()
        ears.close()
        keeper.stop()
        minder.stop()
    return code if code >= 0 else 128 - code


class Ring:
    """The attempts of one job."""

    def __init__(self, options: Options, env: Mapping[str, str], ears: Ears, minder: Minder) -> None:
        self.options, self.env, self.ears = options, dict(env), ears
        self.minder = minder
        self.end = deadline.from_environment(env) or deadline.ask_slurm(env)
        self.allocation = Allocation(env)
        self.others = self.allocation.steps() if is_srun(options.command) else frozenset()  # steps that are not ours
        self.agents = Agents(options.rundir, self.allocation, env, ears, often=often(options.hang))
        self.pages = ""  # where the ranks of this attempt make their pages
        self.states: dict[str, str] = {}  # node -> how it is, as of the last failure
        self.nodes = Nodes(options, env, self.allocation)
        self.crowded = False  # a step that does not end holds its CPUs: the next one has to share them
        self.restarts = 0
        self.warm = Warm(options.warm, options.command, self.allocation, options.rundir, partial(tell, None))
        self.asked = ""  # why nothing more is to be started
        self.hold: fencing.Hold | None = None  # what the attempt at work writes through
        self.past = Past()  # how long this run's steps and phases take

    def go(self) -> int:
        code = 0
        placement = self.nodes.first_place()
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
            tell(mine.folder / "run.log", f"attempt {mine.number} ended: {ended.words}{reach}")
            verdict = self._judge(mine, ended)
            self._say_verdict(mine, verdict)
            if ended.failure is not None:
                self._look_after_nodes(mine, verdict)
            if verdict.move is Move.RESTART:
                found = self.nodes.next_place(ended, self.states)
                if isinstance(found, str):
                    verdict = Verdict(Move.LEAVE, found, times=verdict.times)
                    self._say_verdict(mine, verdict)
                else:
                    placement = found
            self._write_down(mine, ended, verdict)
            if verdict.move is Move.STOP:
                self._brake(mine, ended, verdict)
            if verdict.move is not Move.RESTART or not self._wait(verdict.delay, mine):
                return code
            self.restarts += 1

    # --------------------------------------------------------------------------------------------------- one attempt

    def _begin(self, placement: Placement) -> ledger.Claim | None:
        """Claim the next attempt and shut all older ones out; None when it is not to be started after all.

        The gate is asked once more after that: until the fence stood, an older attempt could finish or put the brake on.
        """
        rundir = self.options.rundir
        mine = ledger.claim(rundir) if self.hold is None else ledger.claim_after(rundir, self.hold.number)
        if mine is None:
            tell(None, "another job has begun an attempt of this run meanwhile: this one is over")
            return None
        ledger.write_start(
            mine, self.env, placement.command, _now(), self.end, in_place=self.restarts, nodes=placement.nodes
        )
        self.hold = fencing.begin(rundir, mine.number, self.env, partial(tell, mine.folder / "run.log"))
        newer = superseded(rundir, mine.number)
        shut = f"attempt {newer} has begun meanwhile" if newer is not None else _shut(self.options)
        if not shut:
            return mine
        tell(mine.folder / "run.log", shut)
        ledger.write_end(mine, not_started(shut), "left", _now())
        return None

    def _attempt(self, mine: ledger.Claim, placement: Placement) -> tuple[ledger.Claim, End]:
        away = frozenset(node for node, state in self.states.items() if is_away(state))
        self.pages = self.agents.begin(mine.number, mine.folder / "run.log", away)
        kill_ranks = partial(self._kill_ranks, mine, placement.nodes)
        witness, command = self._witness(mine), placement.command
        one = Running(
            self.options, mine, command, self.end, self.ears, kill_ranks, self.agents, warm=self.warm, witness=witness
        )
        self.minder.mind(mine.folder)
        ended = one.see_through(command_env(self, mine, placement))
        self.minder.mind(None)
        lost = self._look_for_lost_nodes(placement) if ended.failure is not None else {}
        left = self._clear_steps(mine)
        if left:
            ended = replace(ended, note="; ".join(filter(None, (ended.note, left))))
        if lost and ended.failure is not None:
            how = ", ".join(f"{node} is {state}" for node, state in lost.items())
            was = ended.failure.detail
            failure = Failure(Kind.NODE, "node failure", f"{how}{f'; {was}' if was else ''}")
            ended = replace(ended, failure=failure, words=f"node failure ({how}): {ended.words}")
        if ended.failure is not None:
            self.nodes.after(mine, ended, lost, one.output.since())
        return mine, ended

    def _kill_ranks(self, mine: ledger.Claim, nodes: tuple[str, ...]) -> bool:
        """SIGKILL for the attempt's processes on all nodes: by the agents, and by a step where there is none."""
        left = set(nodes or self.allocation.nodes)
        if self.agents.remote:
            left -= self.agents.kill(mine.folder, sorted(left), _AT_ONCE)
            silent = self.allocation.silent() if left else frozenset()
            if left and not left <= silent:  # nobody waits for the agent of a node that is not there
                left -= self.agents.kill(mine.folder, sorted(left - silent))
            if left <= silent:
                return not left
        return self.allocation.kill_ranks(mine.folder, tuple(n for n in self.allocation.nodes if n in left))

    def _witness(self, mine: ledger.Claim) -> Witness | None:
        if self.options.hang is None:
            return None
        return Witness(self.options.hang, self.past, self.agents.pulses.newest, self.agents.ask_all, mine.folder)

    def _clear_steps(self, mine: ledger.Claim) -> str:
        """srun may be gone and its ranks on other nodes not: what is left of the step ends before anything else begins."""
        if not self.allocation.job or not is_srun(self.options.command):
            return ""
        left = self.allocation.end_steps(self.others)
        self.others |= frozenset(left)
        self.crowded = self.crowded or bool(left)
        words = f"steps that do not end: {', '.join(left)}" if left else ""
        if words:
            tell(mine.folder / "run.log", words)
        return words

    def _look_for_lost_nodes(self, placement: Placement) -> dict[str, str]:
        """What a dead rank looks like from here may be a dead node: ask Slurm, and ask the nodes themselves. node -> how."""
        if not is_srun(self.options.command) or len(self.allocation.nodes) < 2:
            return {}
        self.states = self.allocation.how_they_are()
        used = placement.nodes or self.allocation.nodes
        return {node: self.states[node].rstrip("*") for node in used if is_away(self.states.get(node, ""))}

    # ------------------------------------------------------------------------------------------------------- deciding

    def _judge(self, mine: ledger.Claim, ended: End) -> Verdict:
        attempts = [*self._counted(mine.number), _as_attempt(mine, ended)]
        left = None if self.end is None else self.end - time.time()
        asked = self._why_not(mine, ended)
        return decide(Situation(attempts, self.restarts, asked, left), self.options.budgets)

    def _counted(self, before: int) -> list[Attempt]:
        """The ledger since the brake was last released. One without an end on record was lost."""
        try:
            first = brake.counts_from(self.options.rundir)
            found = [one for one in read_ledger(self.options.rundir) if first <= one.number < before]
        except OSError:
            return []
        return [
            one if one.ended else one._replace(kind=Kind.LOST.value, failure="died without a word") for one in found
        ]

    def _why_not(self, mine: ledger.Claim, ended: End) -> str:
        """Why nothing is to be started here again, whatever the failure was; "" if there is no such reason."""
        newer = ended.newer or superseded(self.options.rundir, mine.number)
        if newer is not None:
            return f"attempt {newer} has begun meanwhile: this one is over"
        if ended.told:
            return f"told to stop ({ended.told})"
        if ended.warned or ended.words.startswith(("warning signal", "time limit")):
            return "the job was told that it ends soon: the next member takes over"
        try:
            return gate.reason_not_to_start(self.options.rundir)
        except Error as error:  # what cannot be seen stops nobody: the ledger decides
            tell(None, f"cannot look at the gate: {error.message}")
            return ""

    def _say_verdict(self, mine: ledger.Claim, verdict: Verdict) -> None:
        pause = f" in {verdict.delay:g} s" if verdict.delay else ""
        what = {
            Move.RESTART: f"starting again in place{pause}",
            Move.LEAVE: "leaving",
            Move.STOP: "the brake is on, nothing more is started",
        }[verdict.move]
        tell(mine.folder / "run.log", f"{what}{': ' + verdict.why if verdict.why else ''}")

    # -------------------------------------------------------------------------------------------------------- placing

    def _look_after_nodes(self, mine: ledger.Claim, verdict: Verdict) -> None:
        log = mine.folder / "run.log"
        enough = self.end is None or self.end - time.time() > 2 * self.options.care.health_timeout
        if verdict.move is not Move.STOP and enough:
            self.nodes.examine(FAILURE, log)
        self.nodes.tell_the_chain(log)

    def _leave_unstarted(self, why: str) -> int:
        """No fit nodes: an attempt that was none, so that the brake counts it. 75: not now."""
        mine = ledger.claim(self.options.rundir)
        nodes = self.nodes.names
        ledger.write_start(mine, self.env, self.options.command, _now(), self.end, in_place=self.restarts, nodes=nodes)
        failure = Failure(Kind.NODE, "nodes not healthy", why)
        ended = End(75, f"not started: {why}", failure, 0.0, Reached(), None, "", False, None, "")
        verdict = self._judge(mine, ended)
        if verdict.move is Move.RESTART:
            verdict = replace(verdict, move=Move.LEAVE, why="the next member takes over")
        tell(mine.folder / "run.log", ended.words)
        self._say_verdict(mine, verdict)
        self._write_down(mine, ended, verdict)
        if verdict.move is Move.STOP:
            self._brake(mine, ended, verdict)
        return ended.code

    # -------------------------------------------------------------------------------------------------------- waiting

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

    def _wait(self, seconds: float, mine: ledger.Claim | None) -> bool:
        """Sit out a back-off; False when something came that ends it."""
        until = time.monotonic() + seconds
        log = mine.folder / "run.log" if mine else None
        while (rest := until - time.monotonic()) > 0:
            for number in self.ears.heard(min(rest, 1.0)):
                if number in STOP or number == self.options.warning:
                    tell(log, "told to leave while waiting for the next start")
                    return False
            if shut := _shut(self.options):
                tell(log, shut)
                return False
        return True

    # --------------------------------------------------------------------------------------------------------- ledger

    def _write_down(self, mine: ledger.Claim, ended: End, verdict: Verdict) -> None:
        then = {Move.RESTART: "restarted in place", Move.LEAVE: "left", Move.STOP: "stopped by the brake"}[verdict.move]
        problem = ledger.write_end(mine, ended, f"{then}: {verdict.why}" if verdict.why else then, _now())
        if problem:
            tell(mine.folder / "run.log", f"cannot write the end of attempt {mine.number}: {problem}")

    def _brake(self, mine: ledger.Claim, ended: End, verdict: Verdict) -> None:
        """The mark first: it keeps members from starting even when they cannot be held."""
        on = brake.Brake(
            failure=verdict.failure or ended.words,
            why=verdict.why,
            times=verdict.times,
            attempt=mine.number,
            step=ended.reached.last,
            detail=verdict.detail,
            at=_now().isoformat(),
        )
        log = mine.folder / "run.log"
        desk = self.hold.desk if self.hold is not None else None
        try:
            brake.write_brake(self.options.rundir, on, desk)
        except OSError as error:
            tell(log, f"cannot write the brake: {error.strerror}")
            if desk is not None and is_sealed(desk):  # a newer attempt has begun: the members that wait are its own
                return
        held, problem = hold.hold_pending(self.options.rundir, self.env, f"ftsupervise:{self.options.name}:")
        if problem:
            tell(log, f"cannot hold the members that wait: {problem}")
        if held:
            tell(log, f"on hold: {', '.join(held)}")
            try:
                brake.write_brake(self.options.rundir, on._replace(held=held), desk)
            except OSError as error:
                tell(log, f"cannot write the brake: {error.strerror}")
        tell(log, f"mend it, then: ftsupervise clear --brake {self.options.rundir.root}")


def _as_attempt(mine: ledger.Claim, ended: End) -> Attempt:
    """What has just ended as the ledger will have it."""
    now = _now()
    return Attempt(
        number=mine.number,
        job_id="",
        started=datetime.fromtimestamp(now.timestamp() - ended.seconds, timezone.utc),
        ended=now,
        exit_code=ended.code,
        cause=ended.words,
        first_step=ended.reached.first,
        last_step=ended.reached.last,
        kind=ended.failure.kind.value if ended.failure else "",
        failure=ended.failure.sign if ended.failure else "",
        saved=ended.reached.saved,
        ready=ended.ready,
        detail=ended.failure.detail if ended.failure else "",
    )


def _shut(options: Options) -> str:
    try:
        return gate.reason_not_to_start(options.rundir)
    except Error:  # cannot look: who waits goes on waiting, and the start will tell
        return ""


def _keep_the_brake_on(options: Options, env: Mapping[str, str]) -> None:
    """A member that started all the same (it was not held, or somebody released it): hold the rest again."""
    try:
        on = brake.read_brake(options.rundir)
    except OSError:
        return
    if on is not None:
        hold.hold_pending(options.rundir, env, f"ftsupervise:{options.name}:")


def _now() -> datetime:
    return datetime.now(timezone.utc)
