"""``ftsupervise run``: gate, attempt, ledger, and again, until the run has finished, the job ends, or the brake comes on.

A restart here takes seconds, a way through the queue minutes to days. ``decide.py`` makes the decisions and gives the
reasons; this module gathers the facts and acts.
"""

from __future__ import annotations

import os
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise.errors import Error
from ftsupervise.host import front, processes
from ftsupervise.host.begin import searched_alone
from ftsupervise.host.processes import Process, die_with_parent, end_child, process
from ftsupervise.host.signals import SignalQueue
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.nodes.selector import FAILURE, NodeSelector, Placement
from ftsupervise.printable import to_type
from ftsupervise.ranks.agent_pool import SILENT, Agents
from ftsupervise.ranks.hang_detector import GapHistory
from ftsupervise.ranks.hang_monitor import report_interval
from ftsupervise.run import Options, attempt, fencing, gate, start_over
from ftsupervise.run.attempt import RunProgress, Services
from ftsupervise.run.decide import (
    NextAction,
    RestartDecision,
    Situation,
    before_leaving,
    decide,
    delay,
    since_progress,
    stop_before,
    used_up,
    without_brake,
)
from ftsupervise.run.fencing import OrphanReaper
from ftsupervise.run.gate import PendingWrites, shut, wait_for_space, wait_unless_stopped
from ftsupervise.run.job_end import USUAL_GRACE, JobEnd
from ftsupervise.run.left_alone import LeftAlone
from ftsupervise.run.lines import lines_aside
from ftsupervise.run.states import NEXT, Outcome, State
from ftsupervise.rundir import ledger, members, switches
from ftsupervise.rundir.fence import is_sealed, superseded
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import last_sign, newest, stop_request
from ftsupervise.rundir.ledger import ledger as read_ledger
from ftsupervise.rundir.ledger import numbers as read_numbers
from ftsupervise.rundir.observing import Observes, observed_alone, read_observed, tell_alone
from ftsupervise.rundir.paths import ENV_CHECKPOINT_DIR, RunDir, tell, whole_run
from ftsupervise.rundir.watched import found_page
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.parse import is_away
from ftsupervise.snapshots.keeper import KeptSnapshots, SnapshotKeeper, Target, place_for
from ftsupervise.truth import BRAKE, OnlyTold
from ftsupervise.units import named, signal_name
from ftsupervise.warm.restarts import WarmSettings, WarmStart

# A training run keeps the cron alive that watches it, as that cron watches the run.
#
# A shell of a megabyte beside the attempts types ``ftsupervise cron ensure --run RUN`` once a period, bounded: the supervisor
# itself loads no settings, asks no scheduler and sends no mail. It ends with the supervisor, however that ends. As the job
# ends the command is typed once more and asks Slurm in any case: a cron whose jobs were cancelled a minute ago would tell
# nobody of the end.

ENV_EVERY = "FTSUPERVISE_KEEPER_SECONDS"
_EVERY = 300
UPKEEP_EVERY = "FTSUPERVISE_UPKEEP_SECONDS"
_UPKEEP = 600
# short sleeps: one that outlives the killed shell ends in seconds
_LOOP = """every=$1; longest=$2; shift 2
while :; do
  slept=0
  while [ "$slept" -lt "$every" ]; do sleep 1 || exit; slept=$((slept + 1)); done
  timeout --foreground -k 10 "$longest" "$@"
done"""
_AT_LAST = '[ -e "$1" ] || exit 0; shift; exec "$@"'  # nothing where no watch has looked at the run
_AT_LAST_LONGEST, _AT_LAST_LEAST = 10.0, 1.0  # seconds for it, and with fewer it is not begun


def _begin_beside(words: Sequence[str], env: Mapping[str, str]) -> subprocess.Popen[bytes] | None:
    """Return the shell begun beside the run; None without one, or without memory: the run goes on without it."""
    null = subprocess.DEVNULL
    try:
        return subprocess.Popen(
            ["/bin/sh", "-c", *words],
            stdin=null,
            stdout=null,
            stderr=null,
            env=searched_alone(env),
            start_new_session=True,
            preexec_fn=die_with_parent(),
        )
    except OSError:
        return None


class Repeated:
    """A command that a shell beside the run begins again and again, until the run is over."""

    def __init__(self, words: Sequence[str], env: Mapping[str, str], every: str, longest: int) -> None:
        self.shell: Process | None = None
        shell = _begin_beside([_LOOP, "ftsupervise-keeper", every, str(longest), *words], env)
        if shell is None:
            return
        shell.returncode = 0  # reaped with everything else that is ours
        self.shell = process(shell.pid)

    def stop(self) -> None:
        """End it and its children."""
        if self.shell is None:
            return
        end_child(self.shell)
        self.shell = None


class CronKeepalive(Repeated):
    """The shell that keeps the cron alive; nothing where there is no Slurm that could keep one."""

    def __init__(self, run_dir: Path, env: Mapping[str, str], command: Sequence[str] = ()) -> None:
        self.shell = None
        self._seen, self._env = str(found_page(RunDir(run_dir))), env
        self._words = list(command or processes.own_command("cron", "ensure", "--run", str(run_dir)))
        if not env.get("SLURM_JOB_ID") or whole_run(run_dir) is not None:  # a replica group's run sees to it
            return
        super().__init__(self._words, env, _seconds(env, ENV_EVERY, _EVERY), 120)

    def look_at_last(self, until: float) -> None:
        """End the shell; with time left before ``until`` (monotonic), type the command once more, whatever slots came."""
        kept = self.shell is not None
        self.stop()
        seconds = min(until - time.monotonic(), _AT_LAST_LONGEST)
        if not kept or seconds < _AT_LAST_LEAST:
            return
        shell = _begin_beside([_AT_LAST, "ftsupervise-keeper", self._seen, *self._words, "--at-last"], self._env)
        if shell is None:
            return
        self.shell = process(shell.pid)
        with suppress(subprocess.TimeoutExpired):
            shell.wait(seconds)
        shell.returncode = 0
        self.stop()


class CheckpointUpkeep(Repeated):
    """The shell that removes what ``checkpoints.retain`` does not keep, while the run trains; nothing where no rule is set."""

    def __init__(self, options: Options, env: Mapping[str, str]) -> None:
        self.shell = None
        if options.retain == "off":
            return
        words = processes.own_command("checkpoints", "upkeep", "--no-copies", "--quiet", str(options.rundir.root))
        super().__init__(["nice", "-n", "19", *words], env, _seconds(env, UPKEEP_EVERY, _UPKEEP), 3600)


def _seconds(env: Mapping[str, str], name: str, default: int) -> str:
    given = env.get(name, "")
    return given if given.isdigit() else str(default)


_NOT_NOW = 75
_CRASHES = 2  # failures at the start, at least, that may come of the checkpoint that is loaded
_SHORT = 3600.0  # seconds of the job that may be too few for another start
_THEN = {
    NextAction.RESTART: "restarted in place",
    NextAction.LEAVE: "its supervisor left",
    NextAction.STOP: "stopped by the brake",
}
_OUTCOME = {NextAction.RESTART: Outcome.RESTART, NextAction.LEAVE: Outcome.LEAVE, NextAction.STOP: Outcome.STOP}
_AFTER_KILL = 10.0  # seconds after Slurm's SIGKILL in which an older attempt may still be ending
_LEAVING_LOOK = 0.3  # seconds between two looks at an older attempt that ends
_OLDER = float(os.environ.get("FTSUPERVISE_OLDER_SECONDS", "600"))  # seconds for an older attempt to end
_OLDER_LOOK = 5.0  # seconds between two looks at one whose end is waited for
_LOST_LOOK = 5.0  # seconds between two looks at a lost node


def run(options: Options, env: Mapping[str, str]) -> int:
    """Return the exit code of the last attempt's command, 128+N for a signal; 0 when the gate is shut.

    Raises CannotWrite, NotPermitted or NotFound before the command starts; after that no error that a person can cause.
    """
    with lines_aside():
        front.hear(partial(_tell_of_the_disk, options.rundir.quoted(), options.space_wait), options.space_wait)
        code = _run(options, env)
    front.leaves(code)
    return code


def _tell_of_the_disk(root: str, seconds: float, news: front.News) -> None:
    """Say that the main thread waits for a file system: that of the run directory ``root``, as a rule."""
    words = {
        front.News.WAITS: f"a file system does not answer (findmnt -T {to_type(root)}): waiting for it, up to {seconds:g} s; "
        "ten where somebody asks to stop",
        front.News.GOES_ON: "the file system answers again",
        front.News.LEFT: f"left with exit code {front.exit_code()}: the file system does not answer, and what was not "
        "written is missing in the run directory",
    }
    tell(None, words[news])


def _run(options: Options, env: Mapping[str, str]) -> int:
    signals = SignalQueue(options.warning)
    try:
        code = _pass_the_gate(options, env, signals)
        if code is None:
            code = _go(options, env, signals)
    except Exception as error:  # a fault of the run directory's, or of ours: the next member would meet it too
        if isinstance(error, Error) or members.at_the_gate(options.rundir, ledger.job_id(env)):
            what = error.message if isinstance(error, Error) else f"{type(error).__name__}: {error}"
            gate.hold_unseen(options, env, what)
        raise
    finally:
        signals.close()
    return code if code >= 0 else 128 - code


def _pass_the_gate(options: Options, env: Mapping[str, str], signals: SignalQueue) -> int | None:
    """Return None when the run may start, else the exit code. Raises CannotWrite, NotPermitted or NotFound."""
    pause, passing = partial(wait_unless_stopped, signals=signals, options=options), partial(gate.may_pass, options)
    until_ready = partial(wait_for_space, seconds=options.space_wait, pause=pause, passing=passing)
    launched, rundir, closed = bool(options.launched), options.rundir, list[str]()
    if not gate.wait_for_answer(
        options, partial(wait_unless_stopped, signals=signals, options=options, ask=lambda _: "")
    ):
        return 0
    if launched and not until_ready(partial(gate.require_there, rundir)):
        return 0
    gate.require_the_launched(options, pause)
    if not until_ready(partial(gate.prepare, rundir, launched=launched)):
        return 0
    if not until_ready(lambda: closed.append(switches.reason_not_to_start(rundir))):
        return 0
    if why := closed[-1]:
        tell(None, why)
        gate.keep_the_brake_on(options, env)
        return 0
    if not until_ready(partial(gate.require_own_checkpoints, rundir, options.name, _checkpoints(options, env))):
        return 0
    for odd in gate.odd_switches(rundir):
        tell(None, odd)
    return None


def _go(options: Options, env: Mapping[str, str], signals: SignalQueue) -> int:
    cron, upkeep = CronKeepalive(options.rundir.root, env), CheckpointUpkeep(options, env)
    reaper = OrphanReaper(USUAL_GRACE if options.grace is None else options.grace)
    supervisor, job = None, ledger.job_id(env)
    try:
        _write_arrival(options, job)
        supervisor = Supervisor(_services(options, env, signals, reaper))
        code = supervisor.go()
        if not supervisor.now.unstarted:
            members.forget(options.rundir, job)
        return code
    finally:
        if supervisor is not None:
            supervisor.to.agents.close()
            supervisor.to.snapshots.close()
            supervisor.to.pending.settle_at_last(options, signals, asked_to_stop=supervisor.now.asked_to_stop)
            supervisor.to.warm.stop()
            cron.look_at_last(supervisor.to.job.keep_until(signals.stopped_at))
        cron.stop()
        upkeep.stop()
        reaper.stop()
        gate.keep_output_folders()


def _checkpoints(options: Options, env: Mapping[str, str]) -> Path:
    return Path(env.get(ENV_CHECKPOINT_DIR) or options.checkpoints or options.rundir.checkpoints).absolute()


def _write_arrival(options: Options, job: str) -> None:
    """Write the page by which the next member learns of this one, should it end before it has an attempt."""
    if not job:
        return
    try:
        members.begin(options.rundir, job, _now(), max(read_numbers(options.rundir), default=0))
    except OSError as error:
        tell(None, f"cannot write that job {job} has begun: {error.strerror or error}")


def _services(options: Options, env: Mapping[str, str], signals: SignalQueue, reaper: OrphanReaper) -> Services:
    allocation, observes = Allocation(env), Observes(options.rundir, options.observe)
    asked = options.warm if options.budgets.in_place else WarmSettings()
    place = place_for(ledger.job_id(env), options.snapshot_copies, options.guard)
    often, guardless = report_interval(options.hang), bool(options.heartbeat_log or options.heartbeat_file)
    silence = None if guardless else SILENT
    agents = Agents(options.rundir, allocation, env, signals.wake, silence=silence, often=often, snapshots=place)
    return Services(
        options=options,
        env=dict(env),
        signals=signals,
        reaper=reaper,
        job=JobEnd(env),
        allocation=allocation,
        steps=allocation.steps(),
        agents=agents,
        nodes=NodeSelector(options.rundir, options.name, options.command, options.care, env, allocation, observes),
        warm=WarmStart(asked, options.command, allocation, options.rundir, partial(tell, None)),
        snapshots=SnapshotKeeper(
            place, agents, env.get("SLURMD_NODENAME", ""), KeptSnapshots(options.rundir, _checkpoints(options, env))
        ),
        pending=PendingWrites(),
        past=GapHistory(),
        observes=observes,
    )


class Supervisor:
    """The attempts of one job: the actions in each state of ``states.py``."""

    def __init__(self, to: Services) -> None:
        self.to = to
        self.now = RunProgress(State.PLACE, Placement(to.options.command, ()), to.steps)
        self._kept = 0  # the attempt whose memory has been written to the disk

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
        if (
            now.fence is None
            or now.fence.staging is None
            or now.signs.newer is not None
            or self._kept == now.claim.number
        ):
            return
        self._kept = now.claim.number
        if to.options.rundir.has_finished():
            to.snapshots.finished()
            return
        until = to.job.keep_until(to.signals.stopped_at)
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
            over = time.monotonic() >= until
            if over or not self._wait(_OLDER_LOOK):
                tell(None, f"not started: {why}; no attempt begins while attempt {older} may still be running")
                self.now = self.now._replace(code=_NOT_NOW)
                return self._end_unstarted(f"{why}, and attempt {older} may still be running") if over else Outcome.OVER
        return Outcome.DONE

    def _end_unstarted(self, why: str) -> Outcome:
        """Leave a page that the next member counts, since no attempt can. Stop the chain when too many have left so."""
        job = ledger.job_id(self.to.env)
        if not job:
            return Outcome.OVER
        try:
            members.end(self.to.options.rundir, job, why, self._reached())
        except (OSError, ValueError) as error:
            tell(None, f"cannot write why job {job} ends: {error}")
        self.now = self.now._replace(unstarted=True)
        return Outcome.STOP if self._stops_before() else Outcome.OVER

    def _reached(self) -> int | None:
        """Return the last step of the newest attempt; None where that is not known."""
        try:
            last = newest(self.to.options.rundir)
        except OSError:
            return None
        return None if last is None else last.last_step

    def _older_at_work(self) -> int | None:
        return fencing.at_work(self.to.options.rundir, self.to.nodes.job, self.to.allocation.lives, _now())

    def _leave_unstarted(self) -> Outcome:
        """Without fit nodes, record an attempt that did not start, so that the brake counts it. Its claim ends older ones."""
        why = self.now.why
        self.now = self.now._replace(placement=Placement(self.to.options.command, self.to.nodes.names), code=_NOT_NOW)
        if self._claim() is Outcome.OVER:
            return Outcome.OVER
        ended = attempt.not_started(self.now.claim, why)
        self.now = self.now._replace(ended=ended._replace(failure=self.to.nodes.too_few(why), exit_code=_NOT_NOW))
        return Outcome.DONE

    def _replace(self) -> Outcome:
        """Choose fit nodes to restart on; where there are none Slurm begins this member again, or the next takes over."""
        found = self.to.nodes.next(self.now.ended, self.now.node_states)
        if isinstance(found, str) and (within := self._begun_again_within()) is not None:
            found = self._wait_for_slurm(found, within)
            if isinstance(found, str) and self.now.asked_to_stop:
                words = "asked to stop while Slurm was to begin this member again"
                self.now = self.now._replace(verdict=RestartDecision(NextAction.LEAVE, words))
                self._say_verdict()
                return Outcome.OVER
        if not isinstance(found, str):
            self.now = self.now._replace(placement=found)
            return Outcome.DONE
        verdict = RestartDecision(NextAction.LEAVE, found, times=self.now.verdict.times)
        if self.now.situation is not None:
            held = before_leaving(verdict, self.now.situation, self.to.options.budgets)
            if held.move is NextAction.STOP and self.to.observes(BRAKE):
                self._note_brake(held, self.now.claim.folder)
            else:
                verdict = held
        self.now = self.now._replace(verdict=verdict)
        self._say_verdict()
        return Outcome.STOP if verdict.move is NextAction.STOP else Outcome.NO_NODES

    def _begun_again_within(self) -> float | None:
        """Return the seconds in which Slurm begins this member again because of a lost node; None where it does not."""
        failure = self.now.ended.failure
        lost = (
            failure is not None
            and failure.kind is FailureKind.NODE
            and any(map(is_away, self.now.node_states.values()))
        )
        return self.to.allocation.begins_again() if lost else None

    def _wait_for_slurm(self, why: str, within: float) -> Placement | str:
        """Keep the job, and with it its other nodes, until Slurm ends it to begin it again with a free node beside them. Other
        jobs wait, and would have the nodes if we left. Return where to go on if the lost node is back before, else why not.
        """
        until = time.monotonic() + within
        words = "other jobs wait for the nodes that are left: they are kept until Slurm begins this member again"
        tell(self.now.log, words)
        self._write_end(words)  # for people: this may take SlurmdTimeout and more
        self._keep_the_memory()
        while time.monotonic() < until and self._wait(_LOST_LOOK, log=True):
            states = self.to.allocation.how_they_are()
            if states and not any(map(is_away, states.values())):
                self.now = self.now._replace(node_states=states)
                return self.to.nodes.next(self.now.ended, states)
        return why

    # --------------------------------------------------------------------------------------------------- one attempt

    def _wait_out_failures_before(self) -> Outcome:
        """Look at what became of the members before this one, however they ended, before it takes the run."""
        if not self._older_has_left():
            return Outcome.OVER
        if self._stops_before():
            return Outcome.STOP
        streak = since_progress(self._counted(1 << 60))
        last = streak[-1] if streak else None
        if last is None or last.ended is None:
            return Outcome.DONE
        pause = delay(streak, self.to.options.budgets) if len(streak) > 1 else 0.0
        rest = min(pause, pause - (_now() - last.ended).total_seconds())
        if rest > 0.05:
            tell(None, f"{len(streak)} failures without progress: waiting {rest:.0f} s")
        return Outcome.DONE if self._wait(rest) else Outcome.OVER

    def _older_has_left(self) -> bool:
        """Wait for an attempt that was asked to stop and may be about to save, and for one that Slurm still runs. Return False
        when we are asked to stop meanwhile."""
        rundir, until, told = self.to.options.rundir, None, ""
        while older := fencing.may_still_save(rundir, self.to.nodes.job, self.to.allocation.state_of, _now()):
            if told != older.words():
                told = older.words()
                tell(None, told)
            if older.runs:
                until = None
            elif until is None:
                until = time.monotonic() + self.to.allocation.kill_wait() + _AFTER_KILL
            elif time.monotonic() >= until:
                tell(None, f"attempt {older.number} had its time to save: this one begins")
                return True
            if not self._wait(_LEAVING_LOOK if until is not None else _OLDER_LOOK):
                return False
        return True

    def _stops_before(self) -> bool:
        """Return whether this member must not start, because too many before it were used up without a new step."""
        budgets, before = self.to.options.budgets, self._since_launch()
        if not ledger.job_id(self.to.env) or not stop_before(before, budgets):
            return False
        asked = self._cancelled(used_up(before))
        verdict = stop_before([one for one in before if one.job_id not in asked], budgets)
        if verdict is None:
            return False
        if self.to.observes(BRAKE):
            rundir = self.to.options.rundir
            folder = rundir.attempt(before[-1].number) if before[-1].number else None
            told = read_observed(folder) if folder else observed_alone(rundir, (before[0].started,))
            if not any(one.decision == BRAKE and (folder or _since(one, before[0].started)) for one in told):
                self._note_brake(verdict, folder)
            return False
        tell(None, f"nothing is started: {verdict.why} ({verdict.failure})")
        self.now = self.now._replace(verdict=verdict, code=_NOT_NOW)
        return True

    def _note_brake(self, verdict: RestartDecision, folder: Path | None) -> None:
        """Write down that the brake would have come on, in the folder of the attempt that it is about, if there is one."""
        log = None if folder is None else folder / "run.log"
        what = "held the chain, to ask whether it is finished" if verdict.failure == switches.LEFT else "held the chain"
        why = ", ".join(filter(None, (verdict.failure, verdict.why)))
        if folder is None:
            tell_alone(self.to.options.rundir, ledger.job_id(self.to.env), OnlyTold(BRAKE, what, why, _now()))
            return
        one = LeftAlone(self.to.observes, folder, partial(tell, log))
        one.note(BRAKE, what, why, self.now.ended.last_step)

    def _cancelled(self, spent: Sequence[Attempt]) -> frozenset[str]:
        """Return those jobs among these of which the scheduler still knows that somebody cancelled or preempted them. No record
        of an end says so of a job that was killed at once."""
        unseen = {
            one.job_id: one.started for one in spent if one.failure is not None and one.failure.kind is FailureKind.LOST
        }
        return frozenset(job for job, began in unseen.items() if self.to.allocation.was_cancelled(job, began))

    def _since_launch(self) -> list[Attempt]:
        """Return what counts since the newest launch: a person who launches again has looked at what was."""
        try:
            last = launches(self.to.options.rundir, most=1)
        except OSError:
            last = ()
        counted = self._counted(1 << 60, at_work=self._older_at_work())
        return [one for one in counted if not last or one.started >= last[0].at]

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
        unstarted = ended.kind is CauseKind.NOT_STARTED
        reach = f", last step {ended.last_step}" if ended.last_step is not None else ""
        tell(now.log, ended.words if unstarted else f"attempt {now.claim.number} ended: {ended.words}{reach}")
        mine = ledger.with_pages(ended, now.claim.folder)._replace(job_id=ledger.job_id(self.to.env))
        if now.claim.number and not unstarted:
            mine = mine._replace(written=start_over.note_written(attempt.place_of(self.to, mine.number), mine))
            self._finish_by_its_exit(mine)
        attempts = [*self._counted(now.claim.number), mine]
        left = self.to.job.left()
        budgets, over = self.to.options.budgets, self._job_ends()
        asks = self.to.options.finished_by == "ask" and not now.signs.doubted
        first = min((one.number for one in start_over.of_this_launch(self.to.options.rundir)), default=0)
        situation = Situation(attempts, now.restarts, self._why_not(), over, left, self._warned_after(), first, asks)
        verdict = decide(situation, budgets)
        if verdict.move is NextAction.LEAVE and not (situation.asked or over) and left is not None and left < _SHORT:
            self.to.job.ask()  # somebody may have moved the limit
            situation = replace(situation, time_left=self.to.job.left())
            verdict = decide(situation, budgets)
        if unstarted and verdict.move is NextAction.RESTART:
            verdict = replace(verdict, move=NextAction.LEAVE, why="the next member, if any, takes over")
            verdict = before_leaving(verdict, situation, budgets)
        if verdict.move is NextAction.STOP and self.to.observes(BRAKE):
            there = without_brake(situation, budgets)
            if there.move is not NextAction.STOP:
                self._note_brake(verdict, now.claim.folder if now.claim.number else None)
                verdict = there
        self.now = now._replace(verdict=verdict, situation=situation)
        self._say_verdict()
        if ended.failure is not None and not unstarted:
            self._look_after_nodes(verdict.move)
        return _OUTCOME[verdict.move]

    def _finish_by_its_exit(self, mine: Attempt) -> None:
        """Write the finished mark where the settings say that an exit with 0 means it."""
        signs, options = self.now.signs, self.to.options
        if options.finished_by != "exit 0" or mine.cause != Cause(CauseKind.EXIT, code=0) or signs.stop_signal:
            return
        if signs.warned and signs.heard:  # it has left because it was asked to
            return
        if signs.doubted:
            words = f"Slurm says that {', '.join(signs.doubted)} failed"
            tell(self.now.log, f"it left with 0, and {words}: that is not taken for the end of the run")
            return
        record = switches.Finished(mine.last_step, mine.number, os.uname().nodename, _now())
        area = self.now.fence.area if self.now.fence is not None else None
        what = "that the run is finished"
        if (
            self.to.pending.write(what, partial(switches.write_finished, options.rundir, record, area), self.now.log)
            is None
        ):
            tell(self.now.log, "it left with 0: the run is finished (launch.finished_by)")

    def _counted(self, before: int, at_work: int | None = None) -> list[Attempt]:
        """Return the ledger since the brake was released, and the members that ended before they had an attempt.

        An attempt without an end was lost, unless asked to stop. ``at_work``: that one may be running.
        """
        try:
            first = switches.counts_from(self.to.options.rundir)
            found = [one for one in read_ledger(self.to.options.rundir) if first <= one.number < before]
        except OSError:
            return []
        nexts = [*(one.started for one in found[1:]), None][: len(found)]
        attempts = [
            self._with_end(one, after) for one, after in zip(found, nexts, strict=True) if one.number != at_work
        ]
        return sorted([*attempts, *self._without_attempt()], key=lambda one: (one.number, one.started))

    def _without_attempt(self) -> list[Attempt]:
        """Return the members that ended before they had an attempt; this one only where it does."""
        mine, rundir, lives = ledger.job_id(self.to.env), self.to.options.rundir, self.to.allocation.lives
        found = members.without_attempt(rundir, self._reached(), lives) if mine else ()
        return [one for one in found if one.job_id != mine or self.now.unstarted]

    def _with_end(self, one: Attempt, before: datetime | None) -> Attempt:
        if one.ended:
            return one
        if one.number in self.to.pending.ends:
            return self.to.pending.ends[one.number]
        lost = None if one.stop_signal else Failure(FailureKind.LOST, CauseKind.LOST.value)
        return one._replace(failure=lost, ended=last_sign(self.to.options.rundir.attempt(one.number), one, before))

    def _why_not(self) -> str:
        """Return why no restart is allowed here, whatever the failure was; "" if there is no such reason."""
        mine, signs = self.now.claim, self.now.signs
        if why := gate.another_place(self.to.options.rundir, mine.folder, self.to.options.launched):
            return why
        if newer := signs.newer or superseded(self.to.options.rundir, mine.number):
            return f"attempt {newer} has begun meanwhile: this one is over"
        if signs.stop_signal:
            return f"asked to stop ({signal_name(signs.stop_signal)})"
        try:
            return switches.reason_not_to_start(self.to.options.rundir)
        except Error as error:  # an unreadable gate does not stop a restart: the ledger decides
            tell(None, f"cannot check the gate: {error.message}")
            return ""

    def _job_ends(self) -> str:
        ended, signs = self.now.ended, self.now.signs
        told = signs.warned and (signs.heard or ended.exit_code)
        if told or ended.kind in (CauseKind.WARNING, CauseKind.TIME_LIMIT):
            return "the job ends soon: the next member, if any, takes over"
        return ""

    def _warned_after(self) -> float | None:
        """Return the seconds from the start of this attempt to its warning."""
        at = stop_request(self.now.claim.folder)[2] if self.now.signs.warned else None
        return None if at is None else (at - self.now.ended.started).total_seconds()

    def _why(self) -> str:
        verdict = self.now.verdict
        return f"{verdict.failure}, {verdict.why}" if verdict.failure == switches.LEFT else verdict.why

    def _say_verdict(self) -> None:
        verdict = self.now.verdict
        pause = f" in {verdict.delay:g} s" if verdict.delay else ""
        what = {
            NextAction.RESTART: f"starting again in place{pause}",
            NextAction.LEAVE: "leaving",
            NextAction.STOP: "stopped by the brake, nothing more is started",
        }[verdict.move]
        why = self._why()
        tell(self.now.log, f"{what}{': ' + why if why else ''}")

    def _look_after_nodes(self, move: NextAction) -> None:
        log = self.now.log
        left = self.to.job.left()
        enough = left is None or left > 2 * self.to.options.care.health_timeout
        if move is not NextAction.STOP and enough:
            self.to.nodes.examine(FAILURE, log)
        if move is not NextAction.LEAVE:
            self.to.nodes.exclusions.update(log)

    def _make_way(self) -> Outcome:
        """Let the next member start now, with as many bad nodes excluded as can be replaced."""
        if not self.now.signs.stop_signal and self.now.signs.newer is None:
            self.to.nodes.exclusions.update(self.now.log, leaving=not shut(self.to.options))
        return Outcome.DONE

    def _record(self) -> Outcome:
        verdict, signs, then = self.now.verdict, self.now.signs, _THEN[self.now.verdict.move]
        why = self._why()
        self._write_end(f"{then}: {why}" if why else then)
        self.now = self.now._replace(asked_to_stop=self.now.asked_to_stop or bool(signs.stop_signal or signs.warned))
        if self.now.ended.failure is None:
            self.to.nodes.exclusions.release(self.now.log)
        return _OUTCOME[verdict.move]

    def _write_end(self, then: str) -> None:
        """Write the end of the attempt as it was judged. ``then``: what is done about it."""
        assert self.now.situation is not None
        braked = self.now.verdict.move is NextAction.STOP
        self.to.pending.end(self.now.claim.folder, self.now.situation.attempts[-1]._replace(then=then, braked=braked))

    def _brake(self) -> Outcome:
        """Write the brake first: it keeps members from starting even when they cannot be held."""
        ended, verdict, fence, log = self.now.ended, self.now.verdict, self.now.fence, self.now.log
        on = switches.Brake(
            failure=verdict.failure or ended.words,
            why=verdict.why,
            times=verdict.times,
            attempt=self.now.claim.number or max(read_numbers(self.to.options.rundir), default=0),
            step=ended.last_step,
            detail=verdict.detail,
            at=_now().isoformat(),
            loads=self._loads(),
        )
        area = fence.area if fence is not None else None
        write = partial(switches.write_brake, self.to.options.rundir, area=area)
        if self.to.pending.write("the brake", partial(write, on), log) and area is not None and is_sealed(area):
            return Outcome.DONE  # a newer attempt has begun: the waiting members belong to it
        held, problem = gate.hold_pending(self.to.options.rundir, self.to.env)
        if problem:
            tell(log, f"cannot hold the waiting members: {problem}")
        if held:
            tell(log, f"on hold: {named('job', held)}")
            self.to.pending.write("the brake", partial(write, on._replace(held=held)), log)
        tell(log, on.what_to_type(self.to.options.rundir.quoted()))
        if not self.now.claim.number and gate.may_go_back(self.to.options, self.to.env):  # it has only looked
            with_mine = tuple(dict.fromkeys([*held, ledger.job_id(self.to.env).partition("_")[0]]))
            self.to.pending.write("the brake", partial(write, on._replace(held=with_mine)), log)
            gate.put_back(self.to.options, self.to.env)  # Slurm ends us at once
        return Outcome.DONE

    def _loads(self) -> str:
        """Return the checkpoint that the command takes by rules of its own, where no attempt came as far as a step; "" for any
        other end."""
        times = self.now.verdict.times
        spent = since_progress(self.now.situation.attempts)[-times:] if self.now.situation is not None else []
        if min(len(spent), times) < _CRASHES:
            return ""
        return start_over.loads_at_once(attempt.place_of(self.to, self.now.claim.number), spent)


def _since(one: OnlyTold, at: datetime) -> bool:
    return one.at is not None and one.at >= at


def _now() -> datetime:
    return datetime.now(timezone.utc)
