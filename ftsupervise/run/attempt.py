"""One attempt of a job: its claim, its environment, its command, and the cleanup after it.

It stands alone because an attempt knows of nothing before it and after it, which the supervisor does.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from time import monotonic
from typing import NamedTuple

from ftsupervise.host import bounded, processes
from ftsupervise.host.in_time import Every, in_time
from ftsupervise.host.signals import SignalQueue
from ftsupervise.hostlist import compress_hostlist, expand_hostlist
from ftsupervise.model import GUARD, Attempt, Cause, CauseKind, Claim, Failure, FailureKind
from ftsupervise.nodes.selector import NodeSelector, Placement, calls_srun, text_of
from ftsupervise.ranks.agent_pool import AT_ONCE, Agents
from ftsupervise.ranks.hang_detector import Detector, GapHistory
from ftsupervise.ranks.hang_monitor import HangMonitor
from ftsupervise.ranks.life import LOOKED, PROCESSES, SAYS, ProcessesSeen
from ftsupervise.ranks.rpc import kill_all
from ftsupervise.ranks.straggler import StragglerDetector, pause_after
from ftsupervise.ranks.taking import take_afterwards
from ftsupervise.replicas.bounds import ENV_LIGHTHOUSE
from ftsupervise.replicas.member import QuorumWatcher, wait_for_lighthouse
from ftsupervise.replicas.record import lighthouse_address
from ftsupervise.run import Options, fencing, gate, rendezvous, start_over
from ftsupervise.run.command import RunningCommand
from ftsupervise.run.deaths import EndSigns
from ftsupervise.run.decide import NextAction, RestartDecision, Situation
from ftsupervise.run.exit_analysis import CommandSpec, Ours, RanksKilled, with_lost_nodes
from ftsupervise.run.fencing import OrphanReaper
from ftsupervise.run.gate import PendingWrites, shut, wait_for_space
from ftsupervise.run.guard_folder import add_guard
from ftsupervise.run.job_end import EndFollower, JobEnd
from ftsupervise.run.progress_pages import LiveLooks, OnHang, seen_by
from ftsupervise.run.start_over import TornPolicy, look_before
from ftsupervise.run.states import State
from ftsupervise.rundir import ledger, members, progress
from ftsupervise.rundir.attempt_pages import LostEnd, write_page
from ftsupervise.rundir.fence import superseded
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.ledger import keep_reached
from ftsupervise.rundir.observing import Observes
from ftsupervise.rundir.paths import (
    ENV_AREA,
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_DEADLINE,
    ENV_GROUP_JOB,
    ENV_GUARD,
    ENV_NODE_RANK,
    ENV_NODES,
    ENV_RESTART,
    ENV_RUN,
    ENV_RUN_DIR,
    ENV_SLOWEST_STEP,
    ENV_SNAPSHOT_KEPT,
    ENV_SNAPSHOT_STEP,
    ENV_SNAPSHOTS,
    ENV_STAGING,
    ERROR_FILE,
    RunDir,
    tell,
)
from ftsupervise.rundir.progress_writer import ProgressWriter
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.parse import is_away, is_srun
from ftsupervise.snapshots.keeper import SnapshotKeeper
from ftsupervise.truth import GIVEN_UP, HANG, RankState, Resumed
from ftsupervise.warm.restarts import WarmStart

# Starts the process that reads a heartbeat from the command's own output (``ranks/log_heartbeat.py``), for the
# supervisor.
#
# The beats reach the supervisor through the run directory. The pipe says only that the process could look just now: while
# it cannot, a beat that stays the same proves nothing.

_SILENT = 5.0  # seconds without a look after which nothing is known of the command
_OURS = ("FTSUPERVISE_", "SLURM_")  # what marks a process as the attempt's own
_END = 1.0  # seconds for it to end
_LAST = 4.0  # the same for one that could look until now: on a busy machine it has no turn for a while
_LATE = 10.0  # seconds without a rank's report to a start that was put off
_OUTPUT = 1.0  # seconds for a look at our own output, which may lie on a dead mount
_BRIEF = 2.0  # seconds: a command that lasts no longer has no steps that would be waited for


class LogFollower:
    """The follower of one attempt. Make it before the command, whose processes are told from it by that.

    ``log`` and ``file`` empty: nobody has asked for it. It reads the output all the same, until a guard reports.
    ``guarded``: the attempt before had a guard. Then the process is started late, and only where no rank has reported by then:
    it would take processor time from ranks that start.
    ``everywhere``: what the processes do on all nodes, where there are nodes beside this one; None: this is the only one.
    """

    def __init__(
        self,
        log: str,
        file: Path | None,
        rundir: RunDir,
        attempt: int,
        area: Path | None,
        say: Callable[[str], None],
        everywhere: Callable[[], tuple[str, ProcessesSeen] | None] | None = None,
        guarded: bool = False,
    ) -> None:
        self._say, self._looked, self._ended = say, monotonic(), False
        self._asked, self._everywhere = bool(log or file), everywhere
        self._processes: tuple[str, float | None] = ("", None)  # the state of those here, and their CPU seconds
        self._rest, self._reported, self._began = b"", False, monotonic()
        self._process: processes.Process | None = None
        self.leave_out: Callable[[int], object] = lambda _: None  # told of a process that is none of the command's
        node = os.environ.get("SLURMD_NODENAME", "")
        self._words = (
            log,
            str(file or ""),
            str(rundir.root),
            str(attempt),
            str(area or ""),
            in_time(partial(_size, 1), _OUTPUT) or "",
            node,
        )
        self._pipe, self._write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        if self._asked or not guarded:
            self._start()

    def _start(self) -> None:
        output = in_time(partial(_readable, 1), _OUTPUT, late=_close)
        try:
            child = subprocess.Popen(
                processes.own_command(*self._words, module="ftsupervise.ranks.log_heartbeat"),
                stdin=subprocess.DEVNULL if output is None else output,
                stdout=self._write,
                stderr=subprocess.DEVNULL,
                env={key: value for key, value in os.environ.items() if not key.startswith(_OURS)},
                start_new_session=True,
                preexec_fn=_before_exec(),
            )
        except OSError as error:
            self._say(f"launch.heartbeat is not read: {error.strerror}")
            self._ended = True
        else:
            child.returncode = 0  # reaped with everything else that is ours
            self._process, self._looked = processes.process(child.pid), monotonic()
            self.leave_out(child.pid)
        finally:
            os.close(self._write)
            self._write = -1
            if output is not None:
                os.close(output)

    def believed(self, states: Sequence[RankState]) -> Sequence[RankState]:
        """Return ``states``, as far as they may speak of a hang: while the follower does not look, beats without a
        process behind them prove nothing.
        """
        if self._write >= 0 and not states and monotonic() - self._began >= _LATE:
            self._start()
        self._hear()
        if not self._ended and monotonic() - self._looked < _SILENT:
            return [self._with_processes(one) if one.read else one for one in states]
        if not self._reported and self._asked:
            self._reported = True
            self._say("launch.heartbeat is not read at present: until it is, no hang is noticed")
        return [one for one in states if not one.read]

    def _with_processes(self, one: RankState) -> RankState:
        """Return the state of what was read, with what the processes of the command do."""
        if self._everywhere is None:
            return one._replace(state=self._processes[0], cpu=self._processes[1])
        found = self._everywhere()
        if found is None:
            return one._replace(state="", cpu=None)
        node, seen = found
        if seen.state == "T":
            one = one._replace(rank=seen.rank, node=node, pid=seen.pid)
        return one._replace(state=seen.state, cpu=seen.cpu)

    def _hear(self) -> None:
        while not self._ended:
            try:
                data = os.read(self._pipe, 4096)
            except BlockingIOError:
                return
            if not data:
                self._ended = True
                return
            self._looked = monotonic()
            *said, rest = (self._rest + data).split(b"\n")
            self._rest = rest.lstrip(LOOKED)[-4096:]
            for line in said:
                if line.lstrip(LOOKED).startswith(PROCESSES):
                    self._note(line.lstrip(LOOKED).removeprefix(PROCESSES).decode("ascii", "replace").split())
                    continue
                self._say(line.lstrip(LOOKED).removeprefix(SAYS).decode("utf-8", "replace"))

    def _note(self, words: Sequence[str]) -> None:
        """Take what the processes do here."""
        self._processes = (words[0], float(words[1])) if len(words) == 2 else ("", None)

    def close(self) -> None:
        """Let it take a last look and end; bounded. What it has not read by then is missing from the step of the attempt."""
        self._hear()
        if self._process is not None:
            brief = not self._asked and monotonic() - self._began < _BRIEF
            processes.signal_exactly(self._process, signal.SIGKILL if brief else signal.SIGTERM)
            bound = _LAST if monotonic() - self._looked < _SILENT else _END
            for one in processes.wait_gone([self._process], bound):
                processes.signal_exactly(one, signal.SIGKILL)
        self._hear()
        for fd in (self._pipe, self._write):
            if fd >= 0:
                os.close(fd)


def _before_exec() -> Callable[[], None]:
    """Return the function that the follower calls before its exec. It is asked for its last look by SIGTERM, which waits for
    it (``log_heartbeat.follow``) where it is still starting by then.
    """
    dies = processes.die_with_parent(signal.SIGKILL)

    def before_exec() -> None:
        dies()
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})

    return before_exec


def _size(fd: int) -> str:
    """Return the size of the file that ``fd`` is, where it is one: the first lines may be there before anybody reads."""
    try:
        return str(os.fstat(fd).st_size)
    except OSError:
        return ""


def _close(fd: int | None) -> None:
    if fd is not None:
        os.close(fd)


def _readable(fd: int) -> int | None:
    """Return ``fd``, which was opened for writing, opened anew for reading; None where that cannot be."""
    try:
        return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return None


# ------------------------------------------------------------------------------------------


# The attempt before left no record of its end, because its batch host is gone: the next job asks Slurm, and writes it down.
#
# Nobody on a lost host can say why it is silent. Slurm knows it for the few minutes in which it keeps an ended job.

_ASK = 10.0  # seconds for one question
_OF_A_LOST_HOST = ("NODE_FAIL", "CANCELLED")  # by Slurm, or by our agents: no slurmd was there to report another end
_NO_ORDER = (0, signal.SIGHUP)  # a host that goes down may hang up on its processes first
_FIELDS = re.compile(r"(?:^|\s)(JobState|BatchHost|NodeList)=(\S*)")


def note_lost_host(rundir: RunDir, number: int, env: Mapping[str, str]) -> None:
    """Begin to find out what became of the host of attempt ``number``, in a thread: no start waits for it. Of the groups of one
    job only the whole run asks: Slurm is not asked the same thing hundreds of times."""
    in_a_job_of_others = rundir.whole is not None and not env.get(ENV_GROUP_JOB)
    if number > 0 and env.get("SLURM_JOB_ID") and not in_a_job_of_others:
        threading.Thread(target=_note, args=(rundir, number, dict(env)), name="lost-host", daemon=True).start()


def _note(rundir: RunDir, number: int, env: Mapping[str, str]) -> None:
    try:
        one = next(ledger.backwards(rundir, before=number + 1, first=number), None)
        if one is None or one.ended is not None or one.stop_signal not in _NO_ORDER or not one.job_id:
            return
        if one.job_id != ledger.job_id(env):
            words = fate_of(one.job_id, env, one.nodes)
        else:  # in this very job, which Slurm has begun again
            words = lost_from(one.nodes, env) if env.get("SLURM_RESTART_COUNT", "0") != "0" else ""
        if words:
            write_page(rundir.attempt(number), LostEnd(words))
    except OSError:  # it stays an end without a record
        return


def fate_of(job: str, env: Mapping[str, str], began_on: Sequence[str] = ()) -> str:
    """Return why Slurm or our agents have ended ``job``: "its batch host node-0 was lost (down)"; "" where that was not why,
    or where Slurm does not say. ``began_on``: its nodes, if known. Raises OSError where there are no Slurm commands."""
    shown = _answer(("scontrol", "--oneliner", "show", "job", job), env)
    fields = dict(_FIELDS.findall(shown))
    host, state = fields.get("BatchHost", "").removeprefix("(null)"), fields.get("JobState", "")
    if state in ("", "RUNNING", "PENDING", "COMPLETING"):
        return ""
    now = _answer(("sinfo", "-h", "-N", "-n", host, "-o", "%T"), env).split("\n")[0].strip() if host else ""
    nodes, away = fields.get("NodeList", "").removeprefix("(null)"), bool(now) and is_away(now)
    try:
        taken_out = bool(host and nodes) and host not in expand_hostlist(nodes)
    except ValueError:
        taken_out = False
    if taken_out or (away and state in _OF_A_LOST_HOST):
        return f"its batch host {host} was lost{f' ({_plain(now)})' if away else ''}"
    if state != "NODE_FAIL":
        return ""
    which = f"its node {began_on[0]}" if len(began_on) == 1 else "one of its nodes"
    return f"{which} was lost, and Slurm ended the job (NODE_FAIL)"


def lost_from(nodes: Sequence[str], env: Mapping[str, str]) -> str:
    """Return which of ``nodes``, the first of them its batch host, a job has lost before Slurm began it again; "" if none."""
    if not nodes:
        return ""
    listed = ("sinfo", "-h", "-N", "-n", ",".join(nodes), "-o", "%N %T")
    states = dict(line.split(None, 1) for line in _answer(listed, env).splitlines() if " " in line)
    away = [node for node in nodes if is_away(states.get(node, ""))]
    if not away:
        return ""
    what = "batch host" if away[0] == nodes[0] else "node"
    return f"its {what} {away[0]} was lost ({_plain(states[away[0]])}), and Slurm began the job again"


def _plain(state: str) -> str:
    """Return a node's state without the sign that its slurmd does not answer, which comes and goes."""
    return state.rstrip("*")


def _answer(words: tuple[str, ...], env: Mapping[str, str]) -> str:
    done = bounded.run(words, timeout=_ASK, env=env)
    return done.stdout if done.code == 0 else ""


# ------------------------------------------------------------------------------------------


# The command's environment: its run, its attempt, its folders, and the needs of its launchers.

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_TOLD = (3.0, 10.0)  # seconds for the agents to pass a signal on; here it may be a process of its own
_GONE_AT_ONCE = 0.1  # seconds for the agent of a node whose slurmd is gone to finish a kill


def _for_launchers(given: dict[str, str], outer: Mapping[str, str], mine: Claim) -> None:
    """Set what torchrun needs for clean restarts. Variables that a person has set stay.

    Its agent hands one store to all starts of its workers, in which gloo finds the addresses of the last ones (2.13); and it
    always exits with 1, but writes the error of the rank that failed first where it is told to.
    """
    given.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if ENV_ERROR_FILE not in outer:
        given[ENV_ERROR_FILE] = str(mine.folder / ERROR_FILE)


def _here(to: Services) -> str:
    return to.env.get("SLURMD_NODENAME", "") or os.uname().nodename


def _meet(to: Services, now: RunProgress, given: dict[str, str]) -> bool:
    """Set where the ranks meet; return whether those of an srun get the names that torch reads."""
    options, mine, command = to.options, now.claim, now.placement.command
    nodes = rendezvous.in_rank_order(command, now.placement.nodes or to.allocation.nodes)
    if nodes is None:
        tell(mine.folder / "run.log", "only srun knows which node rank 0 is on: the ranks get no address to meet at")
        return False
    run = str(options.rundir.root)
    point = rendezvous.meeting_point(
        run,
        mine.number,
        nodes,
        _here(to),
        to.allocation.address,
        to.agents.ask,
        known_outside=options.rundir.whole is not None,
    )
    text = to.nodes.text or text_of(command)
    given.update(point.env())
    given.update(rendezvous.torchrun_env(text, point, options.name, mine.number, to.env))
    names = rendezvous.wants_names(command, text, to.env, options.distributed)
    if not is_srun(command):
        given.update(point.names_of_place() if names else {})
        given.update({ENV_NODE_RANK: "0"} if len(nodes) < 2 else {})
    return names


@dataclass(frozen=True)
class Services:
    """The parts that the supervisor of one job works with."""

    options: Options
    env: Mapping[str, str]
    signals: SignalQueue
    reaper: OrphanReaper
    job: JobEnd
    allocation: Allocation
    steps: frozenset[str]  # that ran before us
    agents: Agents
    nodes: NodeSelector
    warm: WarmStart
    snapshots: SnapshotKeeper
    pending: PendingWrites  # pages that could not be written to a full disk
    past: GapHistory  # duration of this run's steps and phases
    observes: Observes


NOT_BEGUN = ledger.over(0, Cause(CauseKind.UNKNOWN), datetime.fromtimestamp(0, timezone.utc))


class RunProgress(NamedTuple):
    """The progress of the job. It is replaced, never changed."""

    state: State
    placement: Placement
    foreign: frozenset[str]  # steps that are not ours, and steps that do not end
    claim: Claim = Claim(0, Path())  # 0: none yet
    fence: fencing.FenceToken | None = None  # the staging areas of the running attempt
    ended: Attempt = NOT_BEGUN  # the last attempt
    signs: EndSigns = EndSigns()  # at its end
    verdict: RestartDecision = RestartDecision(NextAction.LEAVE, "")  # on it
    node_states: Mapping[str, str] = {}  # as of the last failure
    situation: Situation | None = None  # in which it was decided
    restarts: int = 0
    crowded: bool = False  # a step that does not end holds its CPUs: the next one has to share them
    asked_to_stop: bool = False  # there may be seconds left
    why: str = ""  # there are no fit nodes
    unstarted: bool = False  # it ends without an attempt, which counts as a failure does
    code: int = 0

    @property
    def log(self) -> Path | None:
        return self.claim.folder / "run.log" if self.claim.number else None


def begin(to: Services, now: RunProgress, wait: Callable[[float], bool]) -> tuple[RunProgress, bool]:
    """Claim the next attempt and shut out all older ones. Return False when it may not start after all.

    The gate is checked once more after that: until the fence stood, an older attempt could finish or put the brake on.
    """
    rundir = to.options.rundir
    ours = ENV_GROUP_JOB in to.env and ENV_SLOWEST_STEP in to.env  # a group in its own job, with a lighthouse of ours
    if ours and not wait_for_lighthouse(rundir, wait, first=not now.claim.number):
        return now, False
    before, mine = now.claim, _claim(to, now, wait)
    if mine is None:
        return now, False
    members.forget(rundir, ledger.job_id(to.env))
    log = mine.folder / "run.log"
    try:
        keep_reached(rundir, mine.number - 1)
    except OSError:  # the account of a lost attempt then ends with its last page
        pass
    note_lost_host(rundir, mine.number - 1, to.env)
    now = now._replace(claim=mine, fence=fencing.begin(rundir, mine.number, _where(to), partial(tell, log)))
    newer = superseded(rundir, mine.number)
    why = f"attempt {newer} has begun meanwhile" if newer is not None else shut(to.options)
    held = before if before.number else mine  # an attempt of this job, in the directory whose pages are read next
    why = why or gate.another_place(rundir, held.folder, to.options.launched)
    policy = TornPolicy(to.options.torn == "set-aside", to.observes)
    if not why and not look_before(place_of(to, mine.number), mine.number, policy, wait):
        why = "asked to stop before it was started"
    if not why and not start_over.keep_before(place_of(to, mine.number), mine.number, wait, partial(tell, log)):
        why = "asked to stop before it was started"
    if why := why or gate.another_place(rundir, mine.folder, to.options.launched):
        tell(log, why)
        unstarted = not_started(mine, why)
        to.pending.end(mine.folder, unstarted._replace(then="left"))
    return now, not why


def _where(to: Services) -> dict[str, str]:
    """Return the environment with the folder of the checkpoints, as the command has it."""
    return {ENV_CHECKPOINT_DIR: to.options.checkpoints or str(to.options.rundir.checkpoints), **to.env}


def place_of(to: Services, number: int) -> start_over.ScriptPlace:
    """Return where the command of our attempt ``number`` may save."""
    folder = Path(_where(to)[ENV_CHECKPOINT_DIR]).absolute()
    mine, job = to.options.rundir.attempt(number), to.env.get("SLURM_JOB_ID", "")
    return start_over.ScriptPlace(to.options.rundir, folder, to.options.command, mine, job if job.isdigit() else "")


def _claim(to: Services, now: RunProgress, wait: Callable[[float], bool]) -> Claim | None:
    """Return the next attempt and write its first page, once there is space.

    Raises DiskFull when there is none for too long.
    """
    rundir, found = to.options.rundir, list[Claim | None]()
    past = fencing.last_number(rundir, _where(to)) if now.fence is None else 0

    def claim() -> None:
        to.pending.settle()
        if not found:
            after = now.fence.number if now.fence is not None else None
            found.append(ledger.claim(rundir, past) if after is None else ledger.claim_after(rundir, after))
        if found[0] is not None:
            command, nodes = now.placement.command, now.placement.nodes
            at = datetime.now(timezone.utc)
            terms = ledger.StartTerms(now.restarts, nodes, to.options.stop_within, to.options.observe)
            ledger.write_start(found[0], to.env, command, at, to.job.at, terms)

    begun = False
    try:
        begun = wait_for_space(claim, to.options.space_wait, wait, partial(gate.may_pass, to.options))
    finally:
        if not begun and found and found[0] is not None:
            ledger.give_back(found[0])
    if begun and found[0] is None:
        tell(None, "another job has begun an attempt of this run meanwhile: this one is over")
    return found[0] if begun else None


def run_to_end(to: Services, now: RunProgress) -> RunProgress:
    """Run the command from start to end, and gather the facts for the decision."""
    mine, log = now.claim, now.claim.folder / "run.log"
    added = start_over.resumption(place_of(to, mine.number), to.options.resume, mine.number)
    if added.refused:
        return now._replace(ended=_refused(mine, added.refused), signs=EndSigns(), code=GIVEN_UP)
    away = frozenset(node for node, state in now.node_states.items() if is_away(state))
    shared = to.agents.begin(mine.number, log, away)
    to.nodes.tell_standing(log)
    env = _env(to, now, shared)
    env.update(added.env)
    names = _meet(to, now, env)
    to.warm.begin(mine.number, env)
    follower = _follower(to, now)
    moves = env.get(ENV_LIGHTHOUSE, "") if ENV_GROUP_JOB in env and ENV_SLOWEST_STEP in env else ""
    quorum = QuorumWatcher(to.options.rundir, mine.number, moves)
    asked = _command(to, now, start_over.with_words(now.placement.command, added.words), env, names, follower)
    one = RunningCommand(asked, _monitor(to, mine, follower, quorum))
    follower.leave_out = one.leave_out
    to.reaper.set_attempt(mine.folder)
    in_order = [node for node in to.allocation.nodes if node in _used(to, now)]  # as Slurm numbers the ranks
    env.update(to.snapshots.begin(mine, in_order, log))
    with _followed(to, now, one):
        try:
            ended, signs = one.run_to_end(env)
        finally:
            waits = quorum.seen().waits
            quorum.close()
    return _after(to, now._replace(signs=signs), ended, waits=waits)


def _used(to: Services, now: RunProgress) -> tuple[str, ...]:
    return now.placement.nodes or to.allocation.nodes


def _command(
    to: Services,
    now: RunProgress,
    command: tuple[str, ...],
    env: dict[str, str],
    names: bool,
    follower: LogFollower,
) -> CommandSpec:
    """``env``: what it gets, which is complete only once it begins."""

    def in_rank(words: tuple[str, ...]) -> tuple[str, ...]:
        return rendezvous.in_each_rank(rendezvous.exported(words, env, to.env), names=names)

    return CommandSpec(
        to.options,
        now.claim,
        command,
        to.job,
        to.signals,
        to.warm,
        to.agents,
        Ours(to.allocation.job, nodes=frozenset(_used(to, now)) or None),
        _here(to),
        to.allocation.states,
        partial(_kill_ranks, to, now.claim, now.placement.nodes),
        in_rank,
        observes=to.observes,
        tell_ranks=partial(_tell_ranks, to, now.claim.folder, now.placement.nodes, now.foreign),
        last_look=follower.close,
    )


@contextmanager
def _followed(to: Services, now: RunProgress, one: RunningCommand) -> Iterator[None]:
    """While the command runs: when the job ends, its progress page, and what its first step tells are kept up to date."""
    mine, say = now.claim, partial(tell, now.claim.folder / "run.log")
    before = float(to.options.guard.get("STOP_BEFORE", "0") or 0)
    end = EndFollower(to.job, mine.folder, before, say)
    on_hang = partial(_on_hang, to.options, one, now.restarts, Observes(to.options.rundir, to.options.observe))
    stragglers = StragglerDetector(price=to.options.price)
    comparing = Every(
        pause_after,
        lambda: stragglers.look(to.agents.table.newest(), monotonic()),
        "stragglers",
        first=pause_after(0.0),
    )
    seen = start_over.FirstStep(
        lambda: seen_by(to.agents.table, one.left.hang, on_hang, stragglers),
        partial(start_over.tell_a_start_over, place_of(to, mine.number), mine.number, one.say),
        mine.folder,
    )
    pages = ProgressWriter(to.options.rundir, mine, now.fence.area if now.fence is not None else None, seen)
    looks = LiveLooks(mine.folder, to.agents, lambda: seen_by(to.agents.table, one.left.hang, on_hang))
    try:
        yield
    finally:
        comparing.close()
        looks.close()
        end.close()
        pages.close()
        seen.over()
        now_at = datetime.now(timezone.utc)
        if (slow := stragglers.found(monotonic(), now_at)) is not None and slow.lasts(now_at):
            to.nodes.waited_for(mine, slow)


def _after(to: Services, now: RunProgress, ended: Attempt, *, waits: bool) -> RunProgress:
    """Clean up after the command, and complete how it ended: lost nodes, and steps that do not end. ``waits``: its group waited
    for others at its end."""
    mine = now.claim
    to.snapshots.ended(ended, to.agents.table.newest())
    to.reaper.set_attempt(None)
    to.warm.ended(stepped=ended.last_step is not None, fault=_may_come_of_its_start(ended) and not waits)
    lost: dict[str, str] = {}
    if ended.failure is not None or _may_have_lost_all(to, ended, now.signs):
        now, lost = _look_for_lost_nodes(to, now)
    ended = with_lost_nodes(ended, lost)
    if ended.failure is not None:
        to.nodes.after(mine, ended, now.signs.gone, lost)
        take_afterwards(to.agents.ask_in_passing, to.agents.answering(), to.allocation.shown, mine.folder)
    left = to.allocation.end_steps(now.foreign, to.options.rundir.attempts)
    if left:  # srun may have ended before its ranks on other nodes: they end before anything else begins
        words = f"these steps do not end: {', '.join(left)}"
        tell(mine.folder / "run.log", words)
        now = now._replace(foreign=now.foreign | frozenset(left), crowded=True)
        ended = ended._replace(note="; ".join(filter(None, (ended.note, words))))
    if ended.failure is not None and not lost:
        to.snapshots.ask_ahead()
    return now._replace(ended=ended, code=ended.exit_code or 0)


def not_started(mine: Claim, why: str) -> Attempt:
    return ledger.over(mine.number, Cause(CauseKind.NOT_STARTED, text=why), datetime.now(timezone.utc))


def _refused(mine: Claim, why: str) -> Attempt:
    """Return an attempt whose command was not started: it would begin anew over what it has saved."""
    try:
        write_page(mine.folder, Resumed(at=datetime.now(timezone.utc), refused=why))
    except OSError:  # it counts as a failure then, and the brake comes on later
        pass
    failure = Failure(FailureKind.GIVEN_UP, "cannot go on")
    return not_started(mine, why)._replace(failure=failure, exit_code=GIVEN_UP)


def _env(to: Services, now: RunProgress, pages: str) -> dict[str, str]:
    """Return the environment of the command: ours, with the names of this run, this attempt and its limits.

    ``pages``: where the ranks make theirs.
    """
    options, mine = to.options, now.claim
    stale = (ENV_AREA, ENV_STAGING, ENV_SNAPSHOTS, ENV_SNAPSHOT_STEP, ENV_SNAPSHOT_KEPT)  # an outer attempt's
    given = {key: value for key, value in to.env.items() if not key.startswith(ENV_GUARD) and key not in stale}
    given.update({ENV_GUARD + key: value for key, value in options.guard.items()})
    given[ENV_RUN_DIR] = str(options.rundir.root)
    given[ENV_RUN] = options.name
    given[ENV_ATTEMPT] = str(mine.number)
    given[ENV_ATTEMPT_DIR] = str(mine.folder)
    given[ENV_RESTART] = str(now.restarts)
    given[ENV_PAGES] = pages
    given.setdefault(ENV_CHECKPOINT_DIR, options.checkpoints or str(options.rundir.checkpoints))
    given.update(now.fence.env() if now.fence is not None else {})
    if now.placement.nodes:
        given[ENV_NODES] = compress_hostlist(now.placement.nodes)
    if options.rundir.whole is not None and ENV_LIGHTHOUSE in given and ENV_GROUP_JOB in given:
        # it may have moved with its job since this one began
        given[ENV_LIGHTHOUSE] = lighthouse_address(RunDir(options.rundir.whole).replicas) or given[ENV_LIGHTHOUSE]
    given.pop(ENV_DEADLINE, None)
    if to.job.at is not None:
        given[ENV_DEADLINE] = f"{to.job.at:.0f}"
    if now.crowded:
        given.setdefault("SLURM_OVERLAP", "1")
    if options.budgets.in_place and calls_srun(options.command, to.nodes.text):
        given.setdefault(
            "SLURM_KILL_BAD_EXIT", "1"
        )  # without it srun waits for ever for ranks that wait for a dead one
    given.setdefault("PYTHONUNBUFFERED", "1")  # else the last 8 kB of a file that is printed to are not to be read yet
    _for_launchers(given, to.env, mine)
    add_guard(given, options.rundir, options.command, partial(tell, mine.folder / "run.log"))
    return given


def _kill_ranks(to: Services, mine: Claim, nodes: tuple[str, ...]) -> RanksKilled:
    """Send SIGKILL to the attempt's processes on all nodes: by the agents, and by a step where there is none.

    A node without a slurmd, and with an agent that does not answer, is lost: nobody waits for it.
    """
    left = set(nodes or to.allocation.nodes)
    asked = to.allocation.ask_silent() if to.agents.remote else None
    left -= to.agents.kill(mine.folder, sorted(left), _GONE_AT_ONCE if asked else AT_ONCE)
    if left == {_here(to)}:  # a job that ends gets no step any more
        kill_all(str(mine.folder), _here(to))
        left.clear()
    if left and asked and not left <= asked(0):  # the answer of a node that is well may take longer
        left -= to.agents.kill(mine.folder, sorted(left), AT_ONCE - _GONE_AT_ONCE)
    if not left:
        to.allocation.ask_ahead(asked)
        return RanksKilled.ALL
    if asked:
        silent = asked()
        if not left <= silent:  # it may have been lost since
            silent = to.allocation.silent()
        if not left <= silent:  # the agent of a lost node is not waited for
            left -= to.agents.kill(mine.folder, sorted(left - silent))
        if left <= silent:
            to.allocation.ask_ahead(lambda: silent, steps=bool(left))
            return RanksKilled.BUT_LOST if left else RanksKilled.ALL
    by_step = to.allocation.kill_ranks(mine.folder, tuple(n for n in to.allocation.nodes if n in left))
    return RanksKilled.ALL if by_step else RanksKilled.SOME


def _tell_ranks(to: Services, folder: Path, nodes: tuple[str, ...], foreign: frozenset[str], number: int) -> None:
    """Send a signal that srun does not pass on to the ranks on all nodes: by the agents, and by Slurm where they cannot.

    scancel gives it twice to the step of an array's member behind which others wait (22.05), and the second one ends the save
    that the first has begun.
    """
    left = set(nodes or to.allocation.nodes) or {_here(to)}
    told = 0
    for seconds in _TOLD:  # twice: those of an attempt that has just begun may still be starting
        answers = to.agents.ask(dict.fromkeys(sorted(left), f"signal {number} {folder}"), seconds) if left else {}
        told += sum(as_count(text) or 0 for text in answers.values())
        left -= answers.keys()
    if left or not told:
        to.allocation.tell_ranks(number, foreign, to.options.rundir.attempts)


def _follower(to: Services, now: RunProgress) -> LogFollower:
    options, mine = to.options, now.claim
    area = now.fence.area if now.fence is not None else None
    say = partial(tell, mine.folder / "run.log")
    asked = (options.heartbeat_log, options.heartbeat_file)
    everywhere = to.agents.life if to.allocation.elsewhere else None
    guarded = now.ended.source == GUARD
    return LogFollower(*asked, options.rundir, mine.number, area, say, everywhere=everywhere, guarded=guarded)


def _monitor(to: Services, mine: Claim, follower: LogFollower, quorum: QuorumWatcher) -> HangMonitor | None:
    if to.options.hang is None:
        return None
    newest = to.agents.table.newest
    return HangMonitor(
        Detector(to.options.hang, to.past),
        lambda: follower.believed(newest()),
        to.agents.ask,
        mine.folder,
        quorum.seen,
        to.agents.answering,
    )


def _on_hang(options: Options, one: RunningCommand, restarts: int, observes: Callable[[str], bool]) -> OnHang:
    """Return what is done about a hang of this attempt, for its page."""
    if options.hang is None:
        return OnHang(progress.OFF)
    if not options.end_hung:
        return OnHang(progress.LEFT)
    if observes(HANG):
        return OnHang(progress.TOLD)
    if one.monitor is None or not one.may_hang:  # it is to stop anyway: nobody looks
        return OnHang()
    does = progress.RESTARTS if restarts < options.budgets.in_place else progress.ENDS
    return OnHang(does, one.monitor.hangs_at)


def _may_come_of_its_start(ended: Attempt) -> bool:
    """Tell whether the way it was started may be at fault where it made no step. What was killed from outside says nothing."""
    failure, first = ended.failure, ended.cause.first if ended.cause is not None else None
    from_outside = first is not None and first.kind is CauseKind.SIGNAL and first.killed_by == signal.SIGKILL
    return failure is not None and failure.kind is not FailureKind.NODE and not from_outside


def _may_have_lost_all(to: Services, ended: Attempt, signs: EndSigns) -> bool:
    """Return whether a replica group may have lost all its nodes: its srun without any node left ends with 0, like one
    that is done.
    """
    by_itself = ended.kind is CauseKind.EXIT and not signs.stop_signal and not signs.warned
    return to.options.rundir.whole is not None and to.allocation.elsewhere and by_itself


def _look_for_lost_nodes(to: Services, now: RunProgress) -> tuple[RunProgress, dict[str, str]]:
    """Find lost nodes (a dead rank may mean a dead node), by Slurm and by the nodes themselves; return node -> its
    state.

    On a node that Slurm has lost, processes may still be running: its agent ends them.
    """
    if not to.allocation.elsewhere:
        return now, {}
    states = to.allocation.how_they_are(ended=True)
    lost = {node: states[node].rstrip("*") for node in _used(to, now) if is_away(states.get(node, ""))}
    to.agents.kill_survivors(now.claim.folder, tuple(lost))
    return now._replace(node_states=states), lost
