"""``ftsupervise groups run``: the replica groups of one job. It is the command of an ordinary ``ftsupervise run``.

That one has the gate, the ledger of the whole run and its fence; this process starts the lighthouse and one supervisor for each
group, on nodes of its own. A group whose supervisor ends because a node is lost gets a spare one and comes back; nothing
is done to the others. While too few run, those that are left wait: that is said, and it ends by itself.
"""

from __future__ import annotations

import errno
import os
import signal
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from datetime import datetime, timezone
from functools import partial
from pathlib import Path

from ftsupervise.errors import Error, Refused
from ftsupervise.host.addresses import LOOPBACK, own_address
from ftsupervise.host.in_time import Every, OneAtATime, in_time
from ftsupervise.host.ownership import FOLDER, NotTrusted, make_folder
from ftsupervise.host.signals import PASS_ON, SignalQueue
from ftsupervise.model import CauseKind, Claim
from ftsupervise.nodes.judging import of_run_dir, read_and_judge
from ftsupervise.replicas.bounds import environment_of, for_group, on_its_nodes
from ftsupervise.replicas.disk import RunDirReader, note_stop, words_of_its_end
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.members import LiarWatch, LighthousePage, StoreWatch, SuspectMember, SuspectWatch
from ftsupervise.replicas.options import GroupOptions
from ftsupervise.replicas.process import STOPPED_FOR, GroupProcess, log_name
from ftsupervise.replicas.sources import pages_of
from ftsupervise.replicas.stalls import StallBook
from ftsupervise.replicas.table import (
    GroupState,
    GroupTable,
    Hung,
    QuorumPage,
    choose_nodes,
    first_nodes,
    slower_one,
    write_quorum,
    write_table,
)
from ftsupervise.replicas.torchft_python import find_torchft
from ftsupervise.rundir import ledger
from ftsupervise.rundir.fence import is_sealed
from ftsupervise.rundir.paths import ENV_AREA, ENV_ATTEMPT, ENV_ATTEMPT_DIR, RunDir, tell
from ftsupervise.rundir.progress import ProgressPage
from ftsupervise.rundir.progress_writer import ProgressWriter
from ftsupervise.rundir.switches import release_brake
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.scheduler.parse import is_away, is_srun, on_nodes
from ftsupervise.units import signal_name

# Starts torchft's lighthouse for the groups, at an address of this host that all their nodes reach, and follows it.


class GroupLighthouse(SupervisedLighthouse):
    """The lighthouse of one run, which listens when this is made. Raises an error where there is no torchft, no port, or no
    answer from the run directory."""

    def __init__(
        self,
        asked: GroupOptions,
        env: Mapping[str, str],
        allocation: Allocation,
        say: Callable[[str], None],
    ) -> None:
        assert asked.timeouts is not None
        here = env.get("SLURMD_NODENAME", "")
        others = [allocation.address(node) or node for node in allocation.nodes if node != here]
        place = LighthousePlace(
            home=asked.rundir.replicas,
            host=own_address(others) if others or asked.apart else LOOPBACK,
            groups=asked.count,
            least=asked.least,
            timeouts=asked.timeouts,
            job=ledger.job_id(env),
            node=here or os.uname().nodename,
        )
        super().__init__(place, find_torchft(asked.command, env).python, say, env=env)
        self.start()
        self.liars: Mapping[str, SuspectMember] = {}  # groups that report steps which no group can have made
        self._suspects, self._liars = SuspectWatch(), LiarWatch()
        self._rundir, self._own = asked.rundir, dict[str, bool]()
        names = [LOOPBACK, os.uname().nodename, *allocation.nodes, *map(allocation.address, allocation.nodes)]
        self._stores = StoreWatch(self.page, names)
        area = env.get(ENV_AREA)
        self._stalls = StallBook(asked.rundir, asked.names, Path(area) if area else None)

    def follow(self, steps: Mapping[str, int | None]) -> None:
        """Take note of what has happened to it. ``steps``: of each group, the most that its ranks can have
        made."""
        self.keep()
        page = self.page()
        if not isinstance(page, LighthousePage):
            return
        now, heartbeat = time.monotonic(), 2 * self.place.timeouts.heartbeat
        for one in self._suspects.news(now, page, steps, heartbeat, self._stores.silent):
            self._say(one.words)
        before, sure = self.liars, self._liars.after(now, page, steps, heartbeat, self.place.least)
        self.liars = {name: liar for name, liar in sure.items() if before.get(name) == liar or self._is_own(name, liar)}
        for name, liar in self.liars.items():
            if name not in before:
                self._say(f"{liar.words}: {name} is ended and started again")

    def _is_own(self, name: str, liar: SuspectMember) -> bool:
        """Is it a start of this group, or does a stranger call himself so? The answer stays: nothing is read twice for one."""
        if liar.replica not in self._own:
            with suppress(OSError):
                pages = in_time(lambda: pages_of(self._rundir.group(name)), _LOOK)
                if pages is not None:
                    self._own[liar.replica] = any(page.start == liar.replica for page in pages)
            if self._own.get(liar.replica) is False:
                self._say(
                    f"{liar.words}, by the name {liar.replica}, which is none of the group's: nobody is ended for it"
                )
        return self._own.get(liar.replica, False)

    def stop(self) -> None:
        self._stores.close()
        self._stalls.close()
        super().stop()


# ------------------------------------------------------------------------------------------


_LOOK = 1.0  # seconds for a look at what the starts of a group have written
_NODES_EVERY = 5.0  # seconds between two looks at the nodes
_WRITES = 5.0  # seconds for a page to be written
_NAMED = 4  # processes
_BY_OTHERS = (
    CauseKind.CANCELLED,
    CauseKind.PREEMPTED,
    CauseKind.REQUEUED,
    CauseKind.INTERRUPTED,
    CauseKind.WARNING,
)  # we ask all groups at once


class RunOfGroups(ABC):
    """Follows all groups of a run, in one job or in several: their directories, their lighthouse, their pages.

    A place starts them, or finds them in the queue: ``GroupsOfJob`` and ``GroupsApart``."""

    tick = 0.5  # seconds between two looks at all groups
    at_a_stop = ""  # what becomes of the groups when this process is asked to stop

    def __init__(
        self, asked: GroupOptions, env: Mapping[str, str], signals: SignalQueue, nodes: Mapping[str, tuple[str, ...]]
    ) -> None:
        """``nodes``: those of this job, by group."""
        self.asked, self.env, self.signals = asked, env, signals
        self.allocation, now = Allocation(env), _now()
        self.attempt = Claim(int(env[ENV_ATTEMPT]), Path(env[ENV_ATTEMPT_DIR]))
        self.area = Path(env[ENV_AREA]) if env.get(ENV_AREA) else None
        self.groups = [
            GroupProcess(name, number, asked.rundir.group(name), nodes.get(name, ()), now)
            for number, name in enumerate(asked.names)
        ]
        self.nodes = NodesSeen(self.allocation if nodes else Allocation({}), asked.rundir)
        self.disk = RunDirReader(asked.rundir, self.say)
        self.pages = GroupPages(asked, self.groups, self.nodes, self.say, self.area)
        self.lighthouse: GroupLighthouse | None = None
        self.told = 0  # the signal that asked us to stop
        self._continued = 0.0  # monotonic: when that was said of ourselves

    def go(self) -> int:
        """Return the exit code: 0 when the run has finished or was asked to stop, 1 when no group can go on. Raises OSError,
        and what keeps the lighthouse from being started."""
        make_folder(self.asked.rundir.replicas, FOLDER)
        if self.asked.timeouts is not None:
            self.lighthouse = GroupLighthouse(self.asked, self.env, self.allocation, self.say)
        writer = ProgressWriter(self.asked.rundir, self.attempt, self.area, self.pages.progress)
        try:
            while not (self.told and self.asked.apart):  # what is in other jobs goes on
                code = self._turn()
                if code is not None:
                    return code
                for number in self.signals.wait(self.tick):
                    self._on_signal(number)
            return 0
        finally:
            self.end()
            steps = [group.row.step for group in self.groups if group.row.step is not None]
            note_stop(self.asked.rundir, self.attempt, self.told, self.over(), max(steps, default=None))
            writer.close()
            self.pages.write("ended", last=True)
            self.nodes.close()
            if self.lighthouse is not None:
                self.lighthouse.stop()

    def say(self, text: str) -> None:
        tell(self.attempt.folder / "run.log", text)

    def over(self) -> str:
        """Say why no group is started any more; "" while they are."""
        return f"asked to stop ({signal_name(self.told)})" if self.told else self.disk.over

    @abstractmethod
    def look_after(self, group: GroupProcess, over: str) -> None:
        """Judge one group, whose directory has just been read, and do what that asks for."""

    @abstractmethod
    def exit_code(self, over: str) -> int | None:
        """Return None as long as this process has something to do."""

    @abstractmethod
    def end(self) -> None:
        """Leave nothing of ours behind, whatever went wrong."""

    def _turn(self) -> int | None:
        """Look at all groups once."""
        for group in self.groups:
            self.keep_alive(group)
        readings, over = self.disk.read([group.known for group in self.groups]), self.over()  # with the ends just seen
        for group, seen in zip(self.groups, readings or (), strict=False):
            for one in group.take(seen, _now()):
                self.say(f"{group.row.name}: {words_of_its_end(one)}")
            self.look_after(group, over)
        if self.lighthouse is not None:
            self.lighthouse.follow({group.row.name: group.step_by(_now()) for group in self.groups})
            self.pages.hung.hear(self.lighthouse)
        self.pages.write(over)
        return self.exit_code(over)

    def _on_signal(self, number: int) -> None:
        if number not in self.signals.ends and (self.asked.apart or number not in PASS_ON):
            return
        if number != signal.SIGCONT:
            self.told = self.told or number
            self.say(f"{signal_name(number)}: {self.at_a_stop}")
        for group in self.groups:
            group.signal(number)

    def keep_alive(self, group: GroupProcess) -> None:
        """Do what needs no disk: reap its supervisor, continue one that was stopped, and end one that stands for ever."""
        at = time.monotonic()
        code = group.ended(at)
        group.code = group.code if code is None else (code, at)
        if group.continued(at):
            self.say(f"{group.row.name}: its supervisor was stopped (SIGSTOP); it is continued")
        if news := group.listen(at):
            self.say(f"{group.row.name}: {news}")
        if group.has_continued_us() and at - self._continued >= STOPPED_FOR:  # others may have done the same just then
            self._continued = at
            self.say(f"this process was stopped (SIGSTOP); the supervisor of {group.row.name} has continued it")


class GroupsOfJob(RunOfGroups):
    """Starts the groups of one job and keeps them running."""

    at_a_stop = "passed on to the groups; none is started any more"

    def __init__(self, asked: GroupOptions, env: Mapping[str, str], signals: SignalQueue) -> None:
        """Raises Refused where the command cannot run in groups."""
        self.job, nodes = ledger.job_id(env), Allocation(env).nodes
        if nodes and not is_srun(asked.command):
            raise Refused(
                "the command of replica groups begins with srun on Slurm, so that each group starts on its own nodes",
                hint="launch.srun: true puts it there",
            )
        super().__init__(asked, env, signals, first_nodes(nodes, asked.count, asked.nodes_each) if nodes else {})

    def look_after(self, group: GroupProcess, over: str) -> None:
        now, at = _now(), time.monotonic()
        if group.code is not None:
            code, ended = group.code
            if self.disk.begun < ended:
                return  # what its supervisor wrote last may be missing
            self._after_its_end(group, code, over, now)
            group.code = None
        if group.alive:
            if group.seen.leaves and group.move(GroupState.RUNNING, "is leaving", now):
                self.say(f"{group.row.name}: leaves for good; it is asked to stop")
                group.signal(signal.SIGTERM)
            return
        state, why = self._state(group, over)
        if group.move(state, why, now) and why:
            self.say(f"{group.row.name}: {state.value}: {why}")
        if state is GroupState.WAITING and at >= group.due and (nodes := self.place(group, now)) is not None:
            self._start(group, nodes, now, at)

    def _after_its_end(self, group: GroupProcess, code: int, over: str, now: datetime) -> None:
        group.orphaned = group.seen.newest is not None and group.seen.newest.ended is None
        why = group.watch.ended_for if group.watch is not None else ""
        why = why or (f"its supervisor was killed by {signal_name(-code)}" if code < 0 else "")
        if why:
            self._record(group, why)
        if self._failed_of_waiting(now) and group.seen.braked:
            self._release(group, now)
        cause = group.seen.newest.cause if group.seen.newest is not None else None
        if cause is not None and cause.kind in _BY_OTHERS and not (group.orphaned or group.seen.leaves):
            why = f"somebody has asked this group alone to stop: {cause.words()}"
        fine = code == 0 and not group.has_failed and not why
        if fine and not over and not group.seen.leaves and not group.seen.braked:
            group.move(GroupState.OVER, "its command has ended by itself", now)
        elif not over:
            group.move(GroupState.WAITING, why or f"its supervisor has ended (exit {code})", now)
            if why:
                self.say(f"{group.row.name}: {why}")

    def _record(self, group: GroupProcess, why: str) -> None:
        """Write down why its supervisor has not written the end of the attempt itself, and what it did before we ended it."""
        newest, watch = group.seen.newest, group.watch
        if newest is not None and watch is not None:
            folder, why = group.rundir.attempt(newest.number), why if newest.ended is None else ""
            self._written(group, "the end of its supervisor cannot be written", lambda: watch.record(folder, why))

    def _release(self, group: GroupProcess, now: datetime) -> None:
        """Take its brake off. Where that fails it stays on, which the table says, and no other group is touched."""
        who = "its supervisor: the group failed for want of others"
        release = partial(release_brake, group.rundir, who=who, now=now)
        if self._written(group, "its brake cannot be taken off", release):
            self.say(f"{group.row.name}: its brake is taken off: it failed because too few other groups ran")

    def _written(self, group: GroupProcess, problem: str, work: Callable[[], object]) -> bool:
        """Do what writes in its directory, within a bound; say the ``problem`` where that fails."""
        try:
            if in_time(lambda: (work(),), _WRITES) is not None:
                return True
            why = f"{group.rundir.root} does not answer"
        except (OSError, NotTrusted) as error:
            why = getattr(error, "strerror", str(error))
        self.say(f"{group.row.name}: {problem}: {why}")
        return False

    def _failed_of_waiting(self, now: datetime) -> bool:
        """Tell whether too few groups ran for so long that those that wait ended themselves: that is no failure of theirs."""
        below, timeouts = self.pages.below, self.asked.timeouts
        return below is not None and timeouts is not None and (now - below).total_seconds() >= timeouts.quorum

    def _state(self, group: GroupProcess, over: str) -> tuple[GroupState, str]:
        """Return the state of a group whose supervisor does not run, and why."""
        if over:
            return GroupState.OVER, over
        if group.seen.leaves:
            join = f"ftsupervise groups join {group.row.name} {self.asked.rundir.quoted()}"
            return GroupState.LEFT, f"for good; to let it join again: {join}"
        if why := group.seen.braked:
            return GroupState.STOPPED, why
        if group.row.state is GroupState.OVER:
            return group.row.state, group.row.why
        return GroupState.WAITING, group.row.why

    def place(self, group: GroupProcess, now: datetime) -> tuple[str, ...] | None:
        """Choose its nodes, once it has enough of them and its older copy is gone for sure; () on this machine."""
        nodes: tuple[str, ...] | None = ()
        lost = self.nodes.lost()
        group.lost = tuple(node for node in group.row.nodes if node in lost or node in group.lost)
        if self.nodes.all:
            free = self.nodes.all - {node for one in self.groups if one is not group for node in one.row.nodes}
            nodes = choose_nodes(group.row.nodes, sorted(free), self.asked.nodes_each, lost, self.nodes.scores)
        if nodes is None:
            gone = ", ".join(node for node in group.row.nodes if node in lost)
            self._wait(group, f"no node to take the place of {gone}" if gone else "too few nodes in this job", now)
            return None
        if why := self._older_copy(group):
            self._wait(group, why, now)
            return None
        return nodes

    def _older_copy(self, group: GroupProcess) -> str:
        """Say why its older copy may still run; "" when that is gone for sure. A supervisor that has ended by itself has ended
        its ranks, but for those on a lost node."""
        if group.orphaned:
            left = group.left_behind()
            if left is None:
                return "its older copy may still run: the processes of this host cannot be seen"
            if left:
                more = " …" if len(left) > _NAMED else ""
                return f"its older copy still ends: processes {' '.join(map(str, left[:_NAMED]))}{more}"
        if self.lighthouse is None or not (group.lost or group.orphaned):
            return ""
        heard = self.lighthouse.heard(group.row.name)
        if heard is False:
            return ""
        where = f" on {', '.join(group.lost)}" if group.lost else ""
        return f"its older copy{where} {'still answers' if heard else 'may still run: the lighthouse does not answer'}"

    def _start(self, group: GroupProcess, nodes: tuple[str, ...], now: datetime, at: float) -> None:
        name, asked = group.row.name, self.asked
        if nodes != group.row.nodes and group.row.attempt:
            self.say(f"{name}: goes on on {', '.join(nodes)} instead of {', '.join(group.row.nodes)}")
        group.lost, group.row = (), group.row._replace(nodes=nodes)
        address = self.lighthouse.address if self.lighthouse is not None else ""
        given = environment_of(
            group.number, asked.count, asked.least, address, asked.timeouts, asked.slowest_step, self.job
        )
        command = on_nodes(asked.command, nodes) if nodes else asked.command
        env = on_its_nodes(for_group(self.env, given), nodes)
        if len(nodes) > 1 and group.row.attempt:  # Slurm may keep the step of a lost node, and its other nodes with it
            env.setdefault("SLURM_OVERLAP", "1")
        try:
            words = asked.supervisor(group.number, command)
            if in_time(lambda: asked.prepare(group.number), _WRITES) is None:
                raise OSError(errno.ETIMEDOUT, f"{group.rundir.state} does not answer")
            group.start(words, env, log_name(asked.name, self.job), now, at)
        except OSError as error:
            group.due = at + _NODES_EVERY
            self._wait(group, f"its supervisor cannot be started: {error.strerror}", now)

    def _wait(self, group: GroupProcess, why: str, now: datetime) -> None:
        group.due = time.monotonic() + 1.0
        if group.move(GroupState.WAITING, why, now):
            self.say(f"{group.row.name}: waits: {why}")

    # ------------------------------------------------------------------------------------------------------------- all

    def exit_code(self, over: str) -> int | None:
        if any(group.alive for group in self.groups) or (not over and self._may_go_on()):
            return None
        return 0 if over else 1

    def _may_go_on(self) -> bool:
        """Tell whether a group that does not run now may come back by itself. One whose end has not been looked at yet may:
        its directory does not answer."""
        return any(group.row.state is GroupState.WAITING or group.code is not None for group in self.groups)

    def end(self) -> None:
        for group in self.groups:
            group.signal(signal.SIGTERM)
        while any(group.alive and group.ended(time.monotonic()) is None for group in self.groups):
            self.signals.wait(self.tick)  # each supervisor has its own bound, and the one above us ends us by force
            for group in self.groups:
                if group.alive:
                    self.keep_alive(group)
        readings = self.disk.read([group.known for group in self.groups])
        for number, group in enumerate(self.groups):
            group.take(readings[number] if readings is not None else group.seen, _now())
            if group.row.state is GroupState.RUNNING:
                group.move(GroupState.OVER, self.over() or "the groups of this job have ended", _now())


def _now() -> datetime:
    return datetime.now(timezone.utc)


# ------------------------------------------------------------------------------------------
# The pages about the replica groups: their table, the page about the quorum, and the progress of the whole run.

_EVERY = 2.0  # seconds between two writings of the same about the quorum
_WITHIN = 1.0  # seconds for both to be written
_LAST_WITHIN = 5.0  # seconds for the last ones, behind older ones that still hang
_AGAIN = 0.1  # seconds between two tries
_JUDGED = 3.0  # seconds for the past of the nodes to be read
_LOST_EVERY = 5.0  # seconds between two looks at the nodes
_STILL = 8.0  # seconds without a step after which a node that does not answer counts as lost under its group
_FAR = 2  # steps: a group that much behind the first one is named


class NodesSeen:
    """Knows which nodes of the job are lost. Slurm is asked in a thread, because it may not answer."""

    def __init__(self, allocation: Allocation, rundir: RunDir) -> None:
        self.all = frozenset(allocation.nodes)
        self.scores: Mapping[str, float] = {}  # how bad the past of each is
        self._allocation, self._rundir = allocation, rundir
        self._states: Mapping[str, str] = {}
        self._judged = OneAtATime[dict[str, float]]()  # a run directory that does not answer hides no lost node
        self._looking = Every(_LOST_EVERY, self._look, "nodes") if len(self.all) > 1 else None

    def lost(self) -> frozenset[str]:
        return frozenset(node for node, state in self._states.items() if is_away(state))

    def close(self) -> None:
        if self._looking is not None:
            self._looking.close()

    def _look(self) -> None:
        with suppress(OSError, Error):
            self._states = self._allocation.how_they_are() or self._states  # no answer is no news
            scores = self._judged(self._judge, _JUDGED)
            self.scores = self.scores if scores is None else scores

    def _judge(self) -> dict[str, float]:
        return {one.name: one.score for one in read_and_judge(*of_run_dir(self._rundir), _now()).nodes}


class HungGroups:
    """The groups that hang and that their own supervisors cannot judge: by their nodes, the other groups, the lighthouse."""

    def __init__(self, asked: GroupOptions, groups: Sequence[GroupProcess], nodes: NodesSeen) -> None:
        self._asked, self._groups, self._nodes = asked, groups, nodes
        self._restarted: float | None = None  # monotonic: the lighthouse
        self._moved: datetime | None = None  # when the lighthouse began at another address
        self._liars: Mapping[str, SuspectMember] = {}  # groups that report steps which no group can have made
        # the attempt of each such start: the next one of its group has told nothing yet
        self._accused = dict[str, int]()

    def hear(self, lighthouse: GroupLighthouse) -> None:
        self._restarted, self._liars = lighthouse.restarted, lighthouse.liars
        self._moved = lighthouse.moved if self._asked.apart else None

    def found(self) -> tuple[Hung, ...]:
        """Name the groups that their own supervisors cannot judge: their node does not answer and is silent; they wait for a
        quorum in which the others train without them; or they report steps that nobody has made, and the others wait until
        they are gone."""
        lost, found = self._nodes.lost(), list[Hung]()
        for group in self._groups:
            row = group.row
            gone = [node for node in row.nodes if node in lost]
            if not group.alive:
                continue
            if gone and (row.stalled is None or row.stalled >= _STILL):
                found.append(Hung(row.name, row.attempt, f"{', '.join(gone)} does not answer"))
            elif self._moved is not None and group.seen.newest is not None and group.seen.newest.started < self._moved:
                found.append(Hung(row.name, row.attempt, "the lighthouse is at another address now"))
            elif (lie := self._liars.get(row.name)) and self._accused.setdefault(
                lie.replica, row.attempt
            ) == row.attempt:
                found.append(Hung(row.name, row.attempt, lie.words))
            elif why := self._left_out(group):
                found.append(Hung(row.name, row.attempt, why))
        return tuple(found)

    def _left_out(self, group: GroupProcess) -> str:
        """Say why it is to be started again: torchft has lost its call for a quorum, as at a restart of the lighthouse."""
        timeouts, stalled = self._asked.timeouts, group.row.stalled
        if timeouts is None or stalled is None or stalled < timeouts.hang:
            return ""
        others = [one.row.stalled for one in self._groups if one is not group and one.alive]
        if sum(1 for one in others if one is not None and one < timeouts.hang / 2) < self._asked.least:
            return ""
        after = self._restarted is not None and time.monotonic() - self._restarted < 2 * stalled
        return f"the others train on without it{' since the lighthouse was restarted' if after else ''}"


class GroupPages:
    """Writes the pages of one job's groups."""

    def __init__(
        self,
        asked: GroupOptions,
        groups: Sequence[GroupProcess],
        nodes: NodesSeen,
        say: Callable[[str], None],
        area: Path | None,
    ) -> None:
        self._asked, self._groups, self._nodes, self._say, self._area = asked, groups, nodes, say, area
        self.below: datetime | None = None  # since when fewer than the least run
        self._written = 0.0  # monotonic
        self._quorum, self._turn = QuorumPage(), OneAtATime[QuorumPage]()
        self._slow = ""
        self._begun: tuple[datetime, int | None] = (_now(), None)  # this job, and the first step of a group in it
        self.hung = HungGroups(asked, groups, nodes)

    def write(self, over: str, *, last: bool = False) -> None:
        """``over``: why no group is started any more."""
        now, at = _now(), time.monotonic()
        why = self._below_the_least(over, now)
        quorum = QuorumPage(now, bool(why), why, self.hung.found())
        same = quorum._replace(at=self._quorum.at) == self._quorum
        if same and not last and at < self._written + _EVERY:
            return
        table = self._table(now)

        def put() -> QuorumPage:
            write_quorum(self._asked.rundir, quorum, self._area)
            write_table(self._asked.rundir, table, self._area)
            return quorum

        if last:
            self._put_the_last(put, quorum)
            return
        try:
            if self._turn(put, _WITHIN) is not quorum:
                return  # the directory does not answer, or has taken an older page only now: soon again
        except OSError:  # a full disk, or a newer attempt: the groups go on
            return
        self._quorum, self._written = quorum, at

    def _put_the_last(self, put: Callable[[], QuorumPage], quorum: QuorumPage) -> None:
        """Write the pages that others will find when we have ended, once an older write that hangs is through."""
        until, why = time.monotonic() + _LAST_WITHIN, f"{self._asked.rundir.replicas} does not answer"
        begun = list[QuorumPage]()

        def mine() -> QuorumPage:
            begun.append(quorum)
            return put()

        while time.monotonic() < until:
            try:
                done = self._turn(mine, until - time.monotonic())
            except OSError as error:
                if not begun:  # it was the older one's
                    continue
                if self._area is not None and is_sealed(self._area):
                    return  # the pages belong to a newer attempt
                why = error.strerror or str(error)
                break
            if done is quorum:
                return
            time.sleep(_AGAIN if done is None else 0.0)
        self._say(f"the last page of the groups could not be written: {why}; the one before stays")

    def _below_the_least(self, over: str, now: datetime) -> str:
        """Say why the groups that run wait; "" when they do not, or when nobody knows how the others are."""
        least, wanted = self._asked.least, self._asked.count
        states = [group.row.state for group in self._groups]
        running = states.count(GroupState.RUNNING)
        why = f"{running} of {wanted} groups run, and fewer than {least} do not train on: they wait"
        if over or running + states.count(GroupState.UNKNOWN) >= least:
            if self.below is not None and not over:
                self._say(f"{running} of {wanted} groups run again: the run goes on")
            self.below = None
            return ""
        if self.below is None:
            self.below = now
            self._say(why)
        return why

    def _table(self, now: datetime) -> GroupTable:
        rows = tuple(group.row for group in self._groups)
        used = {node for row in rows for node in row.nodes}
        slow = slower_one(rows)
        if slow and slow.partition(" ")[0] != self._slow:
            self._slow = slow.partition(" ")[0]
            self._say(f"a slower group: {slow}")
        return GroupTable(
            at=now,
            host=os.uname().nodename,
            wanted=self._asked.count,
            least=self._asked.least,
            place="jobs" if self._asked.apart else "allocation",
            groups=rows,
            spares=tuple(sorted(self._nodes.all - used - self._nodes.lost())),
            below=self.below,
            slow=slow,
        )

    def progress(self) -> ProgressPage | None:
        """Sum the groups up: the step that the first of them has reached counts, because one that comes back begins there."""
        pages = [
            (group.row.name, page) for group in self._groups if self._trains(group) and (page := self._page(group))
        ]
        if not pages:
            return None
        every, now = [page for _, page in pages], _now()
        first = max(every, key=_reached)
        name, last = min(pages, key=lambda one: _reached(one[1]))
        ages = [page.stepped + (now - page.at).total_seconds() for page in every if page.stepped is not None]
        return first._replace(
            at=now,
            ranks=sum(page.ranks for page in every),
            step=first.ahead,
            slowest=f"group {name}" if _reached(first) - _reached(last) > _FAR else "",
            stepped=round(max(0.0, min(ages)), 3) if ages else None,
            first=self._first_step(every),
            first_at=min((page.first_at for page in every if page.first_at is not None), default=None),
            active_at=max((page.active_at for page in every if page.active_at is not None), default=None),
            saved=max((page.saved for page in every if page.saved is not None), default=None),
        )

    def _trains(self, group: GroupProcess) -> bool:
        """Return whether its page is of this job: until its supervisor has begun an attempt, the newest is of the job before,
        which may have been lost without an end. The last progress of all is that with which they ended."""
        newest = group.seen.newest
        last = group.row.state is GroupState.OVER and not any(one.alive for one in self._groups)
        return (group.alive or last) and newest is not None and (self._asked.apart or newest.started >= self._begun[0])

    def _page(self, group: GroupProcess) -> ProgressPage | None:
        """Return the progress of the group; the steps that it made and saved after the last look at it stand in its end."""
        page, newest = group.seen.page, group.seen.newest
        if page is None or newest is None or newest.ended is None:
            return page
        step = page.ahead if newest.last_step is None else newest.last_step
        return page._replace(step=step, ahead=step, saved=page.saved if newest.saved is None else newest.saved)

    def _first_step(self, pages: Sequence[ProgressPage]) -> int | None:
        """Return the first that any group has made in this job: one that was started again begins later."""
        at, before = self._begun
        first = min((step for step in (before, *(page.first for page in pages)) if step is not None), default=None)
        self._begun = (at, first)
        return first


def _reached(page: ProgressPage) -> int:
    return -1 if page.ahead is None else page.ahead
