"""torchft: replica groups that train on while one of them is down.

    from torchft import Optimizer
    from ftsupervise.integrations.torchft import DistributedDataParallel, ReplicaManager

    manager = ReplicaManager(model=net, optimizer=inner)
    model, optimizer = DistributedDataParallel(manager, net), Optimizer(manager, inner)
    for step in manager.steps(10_000, save_every=500):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        optimizer.step()

``ReplicaManager`` is torchft's ``Manager`` with the addresses and timeouts of ``ftsupervise launch``, and with the guard: what
all groups must agree on travels with the training (torchft_group.py), and a group that comes back gets it with the weights.
"""

from __future__ import annotations

import os
import random
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from datetime import timedelta
from importlib import import_module
from math import ceil, inf
from typing import Any

from ftsupervise.errors import ConfigError
from ftsupervise.guard import Decision, Guard
from ftsupervise.guard.loop_state import name_of
from ftsupervise.guard.process_group import find_process_group
from ftsupervise.guard.settings import RankContext, Voice, place
from ftsupervise.guard.stop_reasons import from_vote
from ftsupervise.host.in_time import in_time
from ftsupervise.host.ownership import NotTrusted
from ftsupervise.integrations.torchft_group import (
    LEAVING,
    Agreed,
    GroupLimits,
    StallRecorder,
    StepDoubt,
    differ,
    has_to_copy,
    propose,
    told_by,
)
from ftsupervise.integrations.torchft_mended import (
    DistributedDataParallel,
    HTTPTransport,
    MendedManager,
    OneThread,
    ProcessGroupGloo,
    torch,
    torchft,
)
from ftsupervise.integrations.torchft_silence import ENV_GLOO, GroupNetwork
from ftsupervise.printable import printable
from ftsupervise.replicas.sources import ManagerPage, at_work, write_manager
from ftsupervise.replicas.stalls import write_seen
from ftsupervise.replicas.table import leaves
from ftsupervise.rundir.switches import KILL, read_switch
from ftsupervise.truth import KILL_SWITCH, Health

# Takes and loads the state of a group: a group that joins gets it from a healthy one, and checkpoints hold it.


class Counters:
    """This is torchft's own state: how many steps and batches are committed."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def state_dict(self) -> dict[str, int]:
        return dict(self._manager.state_dict())

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._manager.load_state_dict(state)


class Registered:
    """This is state that something else has registered (DiLoCo: its outer optimizer, and the weights of the last
    synchronisation)."""

    def __init__(self, manager: Any, name: str) -> None:
        self.state_dict = manager._user_state_dicts[name]
        self.load_state_dict = manager._load_state_dict_fns[name]


def functions_of(name: str, one: Any) -> tuple[Callable[[Any], object], Callable[[], Any]]:
    """Return the functions that load it and take it."""
    if isinstance(one, dict):

        def load(state: dict[Any, Any]) -> None:
            one.clear()
            one.update(state)

        return load, lambda: dict(one)
    if callable(getattr(one, "state_dict", None)) and callable(getattr(one, "load_state_dict", None)):
        return one.load_state_dict, one.state_dict
    raise TypeError(f"ReplicaManager({name}=…): {type(one).__name__} has no state_dict; keep such values in a dict")


def is_sharded(state: Iterable[Any]) -> bool:
    """Return whether it holds a model of FSDP2. Its ``state_dict`` frees the weights that a running pass works with."""
    kind = getattr(import_module("torch.distributed.fsdp"), "FSDPModule", ())
    modules = (part for one in state if isinstance(one, torch.nn.Module) for part in one.modules())
    return any(isinstance(part, kind) for part in modules)


# ------------------------------------------------------------------------------------------


dist = torch.distributed
_RETRIES = 20  # failed commits in a row after which the group ends, and is started again
_TURN = 120.0  # seconds for which a group waits until the one before it has saved
_SILENCE = 12  # a source of weights may be silent for this part of the time that their copy may take: 5 s
_ANSWER = 2.0  # seconds for an answer of the lighthouse, when all have come or their time is over
_POLL = 0.2
_LOOK = 2.0  # seconds for a look at a file


class ReplicaManager(MendedManager):
    """The manager of this rank's group. Make it on every rank, after ``init_process_group`` where a group has several.

    state             what a group that joins gets from a healthy one, and what checkpoints hold: objects with ``state_dict``
                      and ``load_state_dict`` (the module itself, the inner optimizer, a schedule), or a dict
    use_async_quorum  as torchft has it; False for DiLoCo. Default: False where the state has a model of FSDP2, else True: the
                      weights of a group that computes are taken in a thread, which would free what FSDP2 has gathered
    pg                torchft's process group; default: NCCL where there is a GPU, else gloo, with the timeout of the run
    guard             options of ``Guard``: ``memory``, ``run_for`` …

    Raises ConfigError, which says what to set, where torchft's version or the timeouts do not fit.
    """

    def __init__(
        self,
        *,
        use_async_quorum: bool | None = None,
        pg: Any = None,
        guard: Mapping[str, Any] | None = None,
        **state: Any,
    ) -> None:
        self.limits = found = GroupLimits.from_environment(os.environ)
        self.stopped: Decision | None = None  # why the loop ended before the last step
        self._place = place(os.environ, None, None, None)
        self._voice = Voice(self._place.rank, self._place.world)
        self.guard = Guard(**(guard or {}))
        self._state = state
        self._agreed = Agreed()
        self._commit, self._apart = 0, False  # the meeting in which the last step was made; 0: not known, or none yet
        self._began = inf  # when this group began to compute by itself
        self._committed: bool | None = None  # of the iteration that runs; None: it has not come to a commit
        self._doubt, self._sight = StepDoubt(found.minimum), StallSight(self._place)
        network = GroupNetwork(found.lighthouse, os.environ)
        if network.interface:
            os.environ.setdefault(ENV_GLOO, network.interface)  # otherwise gloo takes the one of the host's name
        address, port = _store(self._place.rank, self._place.world, network.host)
        seconds = found.timeouts
        transport = HTTPTransport(
            network.host_in_url,
            timedelta(seconds=seconds.manager),
            timedelta(seconds=seconds.manager / _SILENCE),
            self._check_source,
        )
        super().__init__(
            while_waiting=self._waits_no_longer,
            again=seconds.join + _ANSWER,
            doubts=self._doubts,
            look=network.look,
            groups=found.groups,
            heartbeat=seconds.heartbeat,
            tell=self._voice.later,
            hostname=network.host_in_url,
            pg=pg or _process_group(seconds.process_group),
            load_state_dict=None,
            state_dict=None,
            min_replica_size=found.minimum,
            use_async_quorum=not is_sharded(state.values()) if use_async_quorum is None else use_async_quorum,
            timeout=timedelta(seconds=seconds.manager),
            quorum_timeout=timedelta(seconds=seconds.quorum),
            quorum_retries=seconds.retries,
            rank=self._place.rank,
            world_size=self._place.world,
            store_addr=address,
            store_port=port,
            lighthouse_addr=found.lighthouse,
            replica_id=found.group,
            max_retries=_RETRIES,
            checkpoint_transport=transport,
        )
        address = self._store.get(torchft.manager.MANAGER_ADDR_KEY).decode()
        self._sources = WeightSources(self._place, ManagerPage(address, self.start_id, transport.address()))
        for name, one in state.items():
            self.register_state_dict_fn(name, *functions_of(name, one))
        self.register_state_dict_fn(
            "ftsupervise", self._hear, lambda: {"stop": self._agreed.to_come(), "commit": self._commit}
        )

    @property
    def group(self) -> str:
        """The name of this group, "g002"."""
        return self.limits.group

    @property
    def index(self) -> int:
        """Its number, from 0."""
        return self.limits.number

    @property
    def groups(self) -> int:
        """How many groups are wanted."""
        return self.limits.groups

    def steps(self, last: int, *, save_every: int | None = None) -> Iterator[int]:
        """``for step in manager.steps(10_000)``: the number of committed steps so far, until ``last`` are committed or all
        groups stop. It begins from the newest good checkpoint, or with the weights of the groups that train already.

        One iteration ends with one ``optimizer.step()``. With LocalSGD and DiLoCo a step is one synchronisation, and takes many
        iterations. ``save_every``: steps between two checkpoints, besides those that somebody asks for; one group writes them.
        Raises OSError where the checkpoints cannot be read or written.
        """
        self._begin()
        while self.current_step() < last:
            self._began = time.monotonic()
            yield self.current_step()
            committed, self._committed = self._committed, None
            if self.left:
                break
            if committed is None:  # LocalSGD, between two synchronisations
                self.guard.beat()
            elif committed and self._after(self.current_step(), save_every, last):
                break
        else:
            self.guard.finished(self.current_step())
        self.guard.close()
        self.shutdown(wait=False)

    def start_quorum(self, *arguments: Any, **named: Any) -> None:
        self._compare()
        super().start_quorum(*arguments, **named)
        self._began = time.monotonic()

    def allreduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        self._compare()
        return super().allreduce(tensor, *arguments, **named)

    def should_commit(self, timeout: Any = None) -> bool:
        self._agree()
        self._committed = super().should_commit(timeout)
        self._voice.say_held()
        if self._committed:
            self._commit = 1 + self._client.quorum
            self._doubt.committed(self.current_step(), _clock())
        if not self.left:
            self._sight.after(self.current_step() if self._committed else None, self._client.members)
        return self._committed

    @property
    def has_committed(self) -> bool:
        """Has this iteration ended with a step that counts?"""
        return bool(self._committed)

    # -------------------------------------------------------------------------------------------------- begin and end

    def _begin(self) -> None:
        """Each group loads the newest checkpoint. If they differ, all go on from the newest one of them: torchft gives the
        others the weights of the group that is furthest."""
        names = [name for name in self._user_state_dicts if name != "ftsupervise"]
        objects = {name: self._state[name] if name in self._state else Registered(self, name) for name in names}
        start = self.guard.restore(**{"torchft": Counters(self), **objects})  # type: ignore[arg-type]
        if start is not None:
            _draw_otherwise(f"{self.group}/{start}/{self._place.rank}")

    def _after(self, step: int, save_every: int | None, last: int) -> bool:
        """The group has committed ``step``: is the loop to end?"""
        decision = self.guard.step(step, self._agreed.vote(step))
        if decision.stop:
            self.stopped = decision
        ends = (decision.stop and not self._agreed.own) or step >= last  # of its own reason it leaves alone
        if decision.save or step >= last or bool(save_every and step % save_every == 0 and not decision.stop):
            self._save(step, wait=ends)
        return decision.stop

    def _save(self, step: int, *, wait: bool) -> None:
        """The first of the groups that took part saves. ``wait``: at the end, each waits for those before it, and saves itself
        if they did not."""
        turn = self.participating_rank()
        if turn == 0:
            self.guard.save(step)
            return
        if not wait or turn is None:
            return
        until = time.monotonic() + turn * _TURN
        path = self._place.checkpoints / name_of(step)
        while self._in_group(int(not path.exists()))[0]:
            if self._in_group(int(time.monotonic() > until))[0]:
                self.guard.save(step)
                return
            self.guard.beat(phase="save")
            time.sleep(_POLL)

    # ------------------------------------------------------------------------------------------------- the other groups

    def _agree(self) -> None:
        """Before each commit. What fails here keeps the step from being committed, as in any other reduction."""
        if self.left:
            return
        decided = self._agreed.to_come()
        vote = self.guard.vote()
        wish = propose(vote, self.current_step(), decided, self._own_causes(vote))
        number, own, apart = self._in_group(*wish, int(self._apart))
        if self.errored() is None:
            self.wait_quorum()
        commits = [self._commit if one == self.start_id else 0 for one in self._client.members]
        box = torch.tensor([number, *commits], dtype=torch.int64, device=self._device())
        self.allreduce(box, reduce_op=dist.ReduceOp.MAX).wait()
        number, *commits = box.tolist()
        failed = self.errored() is not None
        self._agreed = Agreed(decided if failed else max(decided, number), own)
        if apart:
            self._go_back()
        elif not failed and differ(commits):
            self._apart = has_to_copy(commits, self._commit)
            self.report_error(RuntimeError("the groups have not made the last step together"))

    def _go_back(self) -> None:
        """This group has made its last step apart from the others, who threw it away and made it anew: it counts no more, so
        that torchft sees this group behind, and copies the weights of one of them. All ranks of the group do it at once."""
        self._voice.say(
            f"{self.group} has made step {self.current_step()} without the others: it copies the weights of one of them"
        )
        self._apart, self._commit = False, 0
        self._step -= 1
        self.report_error(RuntimeError("this group is behind the others"))

    def _own_causes(self, vote: int) -> tuple[str, ...]:
        """The causes to stop that concern this group alone."""
        own, rundir = self.limits.own_causes, self._place.rundir
        if from_vote(vote).cause != LEAVING or rundir is None or not in_time(lambda: leaves(rundir), _LOOK):
            return own
        return (*own, LEAVING)

    def _compare(self) -> None:
        """All timeouts are derived from the time that a group takes until it meets the others."""
        seconds, self._began = time.monotonic() - self._began, inf
        if seconds > self.limits.slowest_step:
            self._voice.once(
                f"{self.group} took {seconds:.1f} s for a step, and the timeouts are for {self.limits.slowest_step:g} s: "
                f"set launch.replica_groups.slowest_step to {ceil(seconds)}s or more, or no step may be committed any more"
            )

    def _hear(self, state: Mapping[str, Any]) -> None:
        self._agreed = Agreed(max(self._agreed.to_come(), int(state["stop"])), self._agreed.own)
        self._commit = int(state["commit"])

    def _waits_no_longer(self, waited: float) -> bool:
        """A group that waits is alive. It leaves when the run is over, and the others have gone."""
        self.guard.beat()
        self._sight.waited = waited
        if waited < self.limits.patience:
            return False
        why = self._over()
        if why:
            self._voice.once(f"{why}: leaving, after {waited:.0f} s without the other groups")
        return bool(why)

    def _doubts(self, quorum: Any) -> bool:
        """A step that no group can have made is not believed, and weights are taken from no stranger: this group waits until
        that one is gone."""
        why = self._doubt.of(told_by(quorum), _clock()) or self._sources.doubt(quorum)
        if why:
            self._voice.once(why)
        return bool(why)

    def _check_source(self, weights: str) -> None:
        """Raise NotTrusted where the weights are not those of a group of this run."""
        try:
            self._sources.require(weights)
        except NotTrusted as error:
            self._voice.once(error.message)
            raise

    def _over(self) -> str:
        """Say why nobody trains any more; "" while they do. Each rank looks for itself: they wait apart from each other."""
        decision, rundir = self.guard.check(), self._place.rundir
        if not decision.stop and rundir is not None:
            if read_switch(rundir, KILL).health is Health.BAD:
                decision = Decision(2, KILL_SWITCH)
            elif rundir.has_finished():
                return "the run has finished"
        if decision.stop:
            self.stopped = decision
        return decision.reason

    def _in_group(self, *values: int) -> list[int]:
        """The maxima over the ranks of this group."""
        ranks = find_process_group() if self._place.world > 1 else None
        return list(values) if ranks is None else ranks.maximum(*values)

    def _device(self) -> str:
        return "cuda" if "nccl" in self._pg.getBackendName() else "cpu"


class WeightSources:
    """It knows whose weights this group may take: those of a start of a group of this run that is at work, from where its rank
    has written that they are. Outside of a run of ours that is everybody. ``own``: what this rank writes of itself."""

    def __init__(self, place: RankContext, own: ManagerPage) -> None:
        folder, self._rank = place.attempt_dir, place.rank
        # no folder: no supervisor has begun this group, and none of the others
        self._group, self._known = place.rundir if folder is not None else None, frozenset[ManagerPage]()
        self._source = ""  # the manager that this group was told to copy from
        if folder is not None:
            with suppress(OSError):  # who comes back copies from another group then
                in_time(lambda: write_manager(folder, place.rank, own), _LOOK)

    def doubt(self, quorum: Any) -> str:
        """Say why the weights that this quorum has it copy are not taken; "" where they are, or where it copies none."""
        group, self._source = self._group, str(quorum.recover_src_manager_address)
        if not quorum.heal or group is None:
            return ""
        with suppress(OSError):  # what was known before holds, and the next look comes in a second
            found = in_time(lambda: at_work(group, self._rank), _LOOK)
            self._known = self._known if found is None else found
        return "" if any(one.address == self._source for one in self._known) else _not_from(self._source)

    def require(self, weights: str) -> None:
        """Raise NotTrusted unless this is where the manager of that quorum has its weights: whoever reaches it may tell it."""
        if self._group is not None and (self._source, weights) not in {
            (one.address, one.weights) for one in self._known
        }:
            raise NotTrusted(_not_from(weights))


def _not_from(place: str) -> str:
    return (
        f"the weights are to come from {printable(place, 200)}, where no group of this run has written that it is: they are "
        "not taken, and the step waits until that one is gone"
    )


class StallSight:
    """It notes what this group sees of the others' losses; its first rank writes it down, in a thread: the disk may hang."""

    def __init__(self, place: RankContext) -> None:
        self.waited = 0.0  # seconds in the quorum of the step that runs
        self._folder = place.attempt_dir if place.rank == 0 else None
        self._recorder, self._thread = StallRecorder(), OneThread("stalls")

    def after(self, step: int | None, members: Iterable[str]) -> None:
        """``step`` is committed, with these members; None: it was tried in vain."""
        waited, self.waited = self.waited, 0.0
        if step is None:
            self._recorder.failed()
        elif self._recorder.committed(step, members, waited, time.time()) and self._folder is not None:
            self._thread.submit(write_seen, self._folder, list(self._recorder.stalls))


def _process_group(seconds: float) -> Any:
    kind = torchft.ProcessGroupNCCL if torch.cuda.is_available() else ProcessGroupGloo
    return kind(timeout=timedelta(seconds=seconds))


def _store(rank: int, world: int, host: str) -> tuple[str, int]:
    """The address of the group's store, which the other groups reach too. A group of one rank makes its own, at ``host``."""
    address, port = os.environ.get("MASTER_ADDR") or host, int(os.environ.get("MASTER_PORT") or 0)
    if world > 1 or (dist.is_available() and dist.is_initialized()):
        if not dist.is_initialized() or not port:
            raise ConfigError(
                f"a group of {world} ranks: call torch.distributed.init_process_group before ReplicaManager, with MASTER_ADDR "
                "and MASTER_PORT set, as `ftsupervise launch` does"
            )
        return address, port
    _stores.append(dist.TCPStore(address, port, is_master=rank == 0, wait_for_workers=False))
    return address, _stores[-1].port


def _clock() -> float:
    """Seconds that go on while the machine sleeps."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


_stores: list[Any] = []  # they end with the process


def _draw_otherwise(stream: str) -> None:
    """All groups loaded one group's random generators: each draws numbers of its own from here on."""
    seed = zlib.crc32(stream.encode())
    random.seed(seed)
    torch.manual_seed(seed)
    if "numpy" in sys.modules:
        import_module("numpy.random").seed(seed)


__all__ = ["DistributedDataParallel", "ReplicaManager"]
