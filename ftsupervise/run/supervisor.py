"""``ftsupervise run``: gate, attempt, ledger, and again, until the run has finished, the job ends, or the brake comes on.

A restart here takes seconds, a way through the queue minutes to days. ``decide.py`` makes the decisions and gives the
reasons; this module gathers the facts and acts.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise import scheduler
from ftsupervise.errors import Error
from ftsupervise.host import processes
from ftsupervise.host.processes import die_with_parent, end_child
from ftsupervise.model import Attempt, Cause, CauseKind, End, Failure, FailureKind
from ftsupervise.nodes.selector import FAILURE, NodeSelector, Placement
from ftsupervise.ranks.agent_pool import SILENT, Agents
from ftsupervise.ranks.hang_detector import GapHistory
from ftsupervise.ranks.hang_monitor import report_interval
from ftsupervise.run import Options, attempt, fencing, gate
from ftsupervise.run.attempt import RunProgress, Services
from ftsupervise.run.decide import NextAction, RestartDecision, Situation, decide, delay, since_progress
from ftsupervise.run.fencing import OrphanReaper
from ftsupervise.run.gate import PendingWrites, SignalQueue, shut, wait_for_space, wait_unless_stopped
from ftsupervise.run.kept_snapshots import KeptSnapshots, Target, keep_until
from ftsupervise.run.snapshots import SnapshotKeeper, place_for
from ftsupervise.run.states import NEXT, Outcome, State
from ftsupervise.rundir import ledger, switches
from ftsupervise.rundir.fence import is_sealed, superseded
from ftsupervise.rundir.ledger import ledger as read_ledger
from ftsupervise.rundir.paths import ENV_CHECKPOINT_DIR, tell, whole_run
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.units import signal_name
from ftsupervise.warm.restarts import WarmSettings, WarmStart

# A training run keeps the cron alive that watches it, as that cron watches the run.
#
# A shell of a megabyte beside the attempts types ``ftsupervise cron ensure --run RUN`` once a period, bounded: the supervisor
# itself loads no settings, asks no scheduler and sends no mail. It ends with the supervisor, however that ends.

ENV_EVERY = "FTSUPERVISE_KEEPER_SECONDS"
_EVERY = 300
# short sleeps: one that outlives the killed shell ends in seconds
_LOOP = """every=$1; shift
while :; do
  slept=0
  while [ "$slept" -lt "$every" ]; do sleep 1 || exit; slept=$((slept + 1)); done
  timeout --foreground -k 10 120 "$@"
done"""


class CronKeepalive:
    """The shell that keeps the cron alive; nothing where there is no Slurm that could keep one."""

    def __init__(self, run_dir: Path, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self.pid: int | None = None
        if not env.get("SLURM_JOB_ID") or whole_run(run_dir) is not None:  # a replica group's run sees to it
            return
        every = env.get(ENV_EVERY, "")
        words = command or processes.own_command("cron", "ensure", "--run", str(run_dir))
        try:
            shell = subprocess.Popen(
                ["sh", "-c", _LOOP, "ftsupervise-keeper", every if every.isdigit() else str(_EVERY), *words],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=dict(env),
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        except OSError:  # no shell or no memory: the run goes on without it
            return
        shell.returncode = 0  # reaped with everything else that is ours
        self.pid = shell.pid

    def stop(self) -> None:
        """End it and its children."""
        if self.pid is None:
            return
        end_child(self.pid)
        self.pid = None


_NOT_NOW = 75
_THEN = {
    NextAction.RESTART: "restarted in place",
    NextAction.LEAVE: "left to the next job",
    NextAction.STOP: "stopped by the brake",
}
_OUTCOME = {NextAction.RESTART: Outcome.RESTART, NextAction.LEAVE: Outcome.LEAVE, NextAction.STOP: Outcome.STOP}
_OLDER, _OLDER_LOOK = 600.0, 5.0  # seconds for an older attempt to end


def run(options: Options, env: Mapping[str, str]) -> int:
    """Return the exit code of the last attempt's command, 128+N for a signal; 0 when the gate is shut.

    Raises CannotWrite, NotPermitted or NotFound before the command starts; after that no error that a person can cause.
    """
    signals = SignalQueue()
    try:
        pause = partial(wait_unless_stopped, signals=signals, options=options)
        launched, until_ready = bool(options.launched), partial(wait_for_space, seconds=options.space_wait, pause=pause)
        if launched and not until_ready(partial(gate.require_there, options.rundir)):
            return 0
        gate.require_the_launched(options, pause)
        if not until_ready(partial(gate.prepare, options.rundir, launched=launched)):
            return 0
        closed = gate.reason_not_to_start(options.rundir)
        if closed:
            tell(None, closed)
            gate.keep_the_brake_on(options.rundir, env)
            return 0
        for odd in gate.odd_switches(options.rundir):
            tell(None, odd)
        code = _go(options, env, signals)
    finally:
        signals.close()
    return code if code >= 0 else 128 - code


def _go(options: Options, env: Mapping[str, str], signals: SignalQueue) -> int:
    keeper = CronKeepalive(options.rundir.root, env)
    reaper = OrphanReaper(options.grace)
    supervisor = None
    try:
        supervisor = Supervisor(_services(options, env, signals, reaper))
        return supervisor.go()
    finally:
        if supervisor is not None:
            supervisor.to.agents.close()
            supervisor.to.snapshots.close()
            supervisor.to.pending.settle_at_last(options, signals, asked_to_stop=supervisor.now.asked_to_stop)
            supervisor.to.warm.stop()
        keeper.stop()
        reaper.stop()


def _services(options: Options, env: Mapping[str, str], signals: SignalQueue, reaper: OrphanReaper) -> Services:
    allocation = Allocation(env)
    asked = options.warm if options.budgets.in_place else WarmSettings()
    place = place_for(ledger.job_id(env), options.snapshot_copies, options.guard)
    checkpoints = Path(env.get(ENV_CHECKPOINT_DIR) or options.checkpoints or options.rundir.checkpoints).absolute()
    often, guardless = report_interval(options.hang), bool(options.heartbeat_log or options.heartbeat_file)
    silence = None if guardless else SILENT
    agents = Agents(options.rundir, allocation, env, signals.wake, silence=silence, often=often, snapshots=place)
    return Services(
        options=options,
        env=dict(env),
        signals=signals,
        reaper=reaper,
        end=scheduler.deadline_from_environment(env) or scheduler.ask_slurm_for_the_deadline(env),
        allocation=allocation,
        steps=allocation.steps(),
        agents=agents,
        nodes=NodeSelector(options.rundir, options.name, options.command, options.care, env, allocation),
        warm=WarmStart(asked, options.command, allocation, options.rundir, partial(tell, None)),
        snapshots=SnapshotKeeper(
            place, agents, env.get("SLURMD_NODENAME", ""), KeptSnapshots(options.rundir, checkpoints)
        ),
        pending=PendingWrites(),
        past=GapHistory(),
    )


class Supervisor:
    """The attempts of one job: the actions in each state of ``states.py``."""

    def __init__(self, to: Services) -> None:
        self.to = to
        self.now = RunProgress(State.PLACE, Placement(to.options.command, ()), to.steps)

    def go(self) -> int:
        do = {
            State.PLACE: self._place,
            State.PREDECESSOR: self._wait_for_the_older,
            State.UNSTARTED: self._leave_unstarted,
            State.BACK_OFF: self._wait_out_failures_before,
            State.CLAIM: self._claim,
            State.ATTEMPT: self._attempt,
            State.JUDGE: self._judge,
            State.REPLACE: self._replace,
            State.MAKE_WAY: self._make_way,
            State.RECORD: self._record,
            State.BRAKE: self._brake,
            State.PAUSE: self._pause,
        }
        while self.now.state is not State.EXIT:
            outcome = do[self.now.state]()
            self.now = self.now._replace(state=NEXT[self.now.state][outcome])
        self._keep_the_memory()
        return self.now.code

    def _keep_the_memory(self) -> None:
        """Write what only the memory holds to the disk, in the time that is left: the job ends."""
        now, to = self.now, self.to
        if now.fence is None or now.fence.staging is None or now.ended.newer is not None:
            return
        if to.options.rundir.has_finished():
            to.snapshots.finished()
            return
        until = keep_until(to.signals.stopped_at, to.end)
        to.snapshots.keep(now.claim, Target(now.fence.staging, until), now.claim.folder / "run.log")

    # ------------------------------------------------------------------------------------------------------- placing

    def _place(self) -> Outcome:
        found = self.to.nodes.initial()
        if not isinstance(found, str):
            self.now = self.now._replace(placement=found)
            return Outcome.DONE
        self.now = self.now._replace(why=found)
        return Outcome.NO_NODES if self._older_at_work() is None else Outcome.OLDER

    def _wait_for_the_older(self) -> Outcome:
        """Wait for an older attempt that may be running: an attempt that cannot start must not end it."""
        until, reported, why = time.monotonic() + _OLDER, False, self.now.why
        while older := self._older_at_work():
            if not reported:
                reported = True
                tell(None, f"not started: {why}; attempt {older} may still be running; waiting for its end")
            if time.monotonic() >= until or not self._wait(_OLDER_LOOK):
                tell(None, f"not started: {why}; no attempt begins while attempt {older} may still be running")
                self.now = self.now._replace(code=_NOT_NOW)
                return Outcome.OVER
        return Outcome.DONE

    def _older_at_work(self) -> int | None:
        return fencing.at_work(self.to.options.rundir, self.to.nodes.job, self.to.allocation.lives, _now())

    def _leave_unstarted(self) -> Outcome:
        """Without fit nodes, record an attempt that did not start, so that the brake counts it. Its claim ends older ones."""
        why = self.now.why
        self.now = self.now._replace(placement=Placement(self.to.options.command, self.to.nodes.names), code=_NOT_NOW)
        if self._claim() is Outcome.OVER:
            return Outcome.OVER
        ended = End(Cause(CauseKind.NOT_STARTED, text=why), self.to.nodes.too_few(why), _NOT_NOW)
        self.now = self.now._replace(ended=ended)
        return Outcome.DONE

    def _replace(self) -> Outcome:
        """Choose fit nodes to restart on; where there are none the next member takes over."""
        found = self.to.nodes.next(self.now.ended, self.now.node_states)
        if not isinstance(found, str):
            self.now = self.now._replace(placement=found)
            return Outcome.DONE
        self.now = self.now._replace(verdict=RestartDecision(NextAction.LEAVE, found, times=self.now.verdict.times))
        self._say_verdict()
        return Outcome.NO_NODES

    # --------------------------------------------------------------------------------------------------- one attempt

    def _wait_out_failures_before(self) -> Outcome:
        streak = since_progress(self._counted(1 << 60))
        last = streak[-1] if streak else None
        if last is None or last.ended is None:
            return Outcome.DONE
        pause = delay(streak, self.to.options.budgets) if len(streak) > 1 else 0.0
        rest = min(pause, pause - (_now() - last.ended).total_seconds())
        if rest > 0.05:
            tell(None, f"{len(streak)} failures without progress: waiting {rest:.0f} s")
        return Outcome.DONE if self._wait(rest) else Outcome.OVER

    def _claim(self) -> Outcome:
        now, begun = attempt.begin(self.to, self.now, self._wait)
        self.now = now._replace(asked_to_stop=self.now.asked_to_stop)  # while we waited for space
        return Outcome.DONE if begun else Outcome.OVER

    def _attempt(self) -> Outcome:
        self.now = attempt.run_to_end(self.to, self.now)
        return Outcome.DONE

    def _pause(self) -> Outcome:
        if not self._wait(self.now.verdict.delay, log=True):
            return Outcome.OVER
        self.now = self.now._replace(restarts=self.now.restarts + 1)
        return Outcome.DONE

    def _wait(self, seconds: float, *, log: bool = False) -> bool:
        """Wait for a back-off; return False when a signal or a switch ended it."""
        going_on = wait_unless_stopped(seconds, self.to.signals, self.to.options, self.now.log if log else None)
        self.now = self.now._replace(asked_to_stop=self.now.asked_to_stop or not going_on)
        return going_on

    # ------------------------------------------------------------------------------------------------------ deciding

    def _judge(self) -> Outcome:
        now, ended = self.now, self.now.ended
        unstarted = ended.cause.kind is CauseKind.NOT_STARTED
        reach = f", last step {ended.reached.last}" if ended.reached.last is not None else ""
        words = ended.cause.words()
        tell(now.log, words if unstarted else f"attempt {now.claim.number} ended: {words}{reach}")
        attempts = [*self._counted(now.claim.number), ledger.as_attempt(now.claim, ended, _now())]
        left = None if self.to.end is None else self.to.end - time.time()
        verdict = decide(Situation(attempts, now.restarts, self._why_not(), left), self.to.options.budgets)
        if unstarted and verdict.move is NextAction.RESTART:
            verdict = replace(verdict, move=NextAction.LEAVE, why="the next member takes over")
        self.now = now._replace(verdict=verdict)
        self._say_verdict()
        if ended.failure is not None and not unstarted:
            self._look_after_nodes(verdict.move)
        return _OUTCOME[verdict.move]

    def _counted(self, before: int) -> list[Attempt]:
        """Return the ledger since the brake was released. An attempt without an end was lost, unless asked to stop."""
        try:
            first = switches.counts_from(self.to.options.rundir)
            found = [one for one in read_ledger(self.to.options.rundir) if first <= one.number < before]
        except OSError:
            return []
        lost = Failure(FailureKind.LOST, CauseKind.LOST.value)
        return [
            one if one.ended or one.stop_signal else self.to.pending.ends.get(one.number) or one._replace(failure=lost)
            for one in found
        ]

    def _why_not(self) -> str:
        """Return why no restart is allowed here, whatever the failure was; "" if there is no such reason."""
        mine, ended = self.now.claim, self.now.ended
        if why := gate.another_place(self.to.options.rundir, mine.folder, self.to.options.launched):
            return why
        if newer := ended.newer or superseded(self.to.options.rundir, mine.number):
            return f"attempt {newer} has begun meanwhile: this one is over"
        if ended.stop_signal:
            return f"asked to stop ({signal_name(ended.stop_signal)})"
        if ended.warned or ended.cause.kind in (CauseKind.WARNING, CauseKind.TIME_LIMIT):
            return "the job ends soon: the next member takes over"
        try:
            return gate.reason_not_to_start(self.to.options.rundir)
        except Error as error:  # an unreadable gate does not stop a restart: the ledger decides
            tell(None, f"cannot check the gate: {error.message}")
            return ""

    def _say_verdict(self) -> None:
        verdict = self.now.verdict
        pause = f" in {verdict.delay:g} s" if verdict.delay else ""
        what = {
            NextAction.RESTART: f"starting again in place{pause}",
            NextAction.LEAVE: "leaving",
            NextAction.STOP: "the brake is on, nothing more is started",
        }[verdict.move]
        tell(self.now.log, f"{what}{': ' + verdict.why if verdict.why else ''}")

    def _look_after_nodes(self, move: NextAction) -> None:
        log = self.now.log
        enough = self.to.end is None or self.to.end - time.time() > 2 * self.to.options.care.health_timeout
        if move is not NextAction.STOP and enough:
            self.to.nodes.examine(FAILURE, log)
        if move is not NextAction.LEAVE:
            self.to.nodes.exclusions.update(log)

    def _make_way(self) -> Outcome:
        """Let the next member start now, with as many bad nodes excluded as can be replaced."""
        if not self.now.ended.stop_signal and self.now.ended.newer is None:
            self.to.nodes.exclusions.update(self.now.log, leaving=not shut(self.to.options))
        return Outcome.DONE

    def _record(self) -> Outcome:
        verdict = self.now.verdict
        ended = self.now.ended._replace(braked=verdict.move is NextAction.STOP)
        then = _THEN[verdict.move]
        self.to.pending.end(self.now.claim, ended, f"{then}: {verdict.why}" if verdict.why else then)
        self.now = self.now._replace(asked_to_stop=self.now.asked_to_stop or bool(ended.stop_signal or ended.warned))
        if ended.failure is None:
            self.to.nodes.exclusions.release(self.now.log)
        return _OUTCOME[verdict.move]

    def _brake(self) -> Outcome:
        """Write the brake first: it keeps members from starting even when they cannot be held."""
        ended, verdict, fence, log = self.now.ended, self.now.verdict, self.now.fence, self.now.log
        on = switches.Brake(
            failure=verdict.failure or ended.cause.words(),
            why=verdict.why,
            times=verdict.times,
            attempt=self.now.claim.number,
            step=ended.reached.last,
            detail=verdict.detail,
            at=_now().isoformat(),
        )
        area = fence.area if fence is not None else None
        write = partial(switches.write_brake, self.to.options.rundir, area=area)
        if self.to.pending.write("the brake", partial(write, on), log) and area is not None and is_sealed(area):
            return Outcome.DONE  # a newer attempt has begun: the waiting members belong to it
        held, problem = gate.hold_pending(self.to.options.rundir, self.to.env)
        if problem:
            tell(log, f"cannot hold the waiting members: {problem}")
        if held:
            tell(log, f"on hold: {', '.join(held)}")
            self.to.pending.write("the brake", partial(write, on._replace(held=held)), log)
        tell(log, f"fix the cause, then: ftsupervise clear --brake {self.to.options.rundir.root}")
        return Outcome.DONE


def _now() -> datetime:
    return datetime.now(timezone.utc)
