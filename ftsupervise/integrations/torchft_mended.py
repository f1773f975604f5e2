"""Adds from outside what torchft 0.2.0 lacks to survive the loss of a group, each part until torchft has it itself.

It stands alone because it goes, part by part, as torchft has each itself.

    DistributedDataParallel   a death while gradients are computed: the hook of 0.2.0 raises in every survivor, and all exit.
                              Mended upstream after 0.2.0; gone here when a release has it
    abort on an error         only the neighbours of a dead group see its sockets close; the others wait for the whole timeout
                              of the process group (meta-pytorch/torchft #164, PR #196): an error closes our own at once
    silence                   a group that is stopped, or whose host is cut off, closes no socket at all: the others see at
                              the lighthouse that it is silent (torchft_silence.py)
    ProcessGroupGloo          gloo ends none of its reductions early, and closes no socket while one is under way: so there is
                              never more than one, and one that is given up is left to itself. Gone here when gloo can be
                              aborted, as NCCL can
    addresses                 managers and copies of weights are reached by the name of the host, which leads to 127.0.1.1 on
                              Debian and to the slow network elsewhere (#329): here by the address that the others reach
    Fence                     a restarted lighthouse counts its quorums from 1 again, so that groups skip a new quorum or
                              meet addresses of an old one, and one may wait for ever for the answer of the dead one;
                              upstream has no issue of it yet
    doubt of a step           the highest step that a manager tells is believed, whatever it is (torchft_group.py)
    HTTPTransport             a group that comes back waits a minute for the weights of a source that has failed meanwhile, and
                              takes them from wherever somebody has told the source that they are
    waiting in short pieces   a group that waits for a quorum can be told neither from a hung one nor to leave, and its process
                              would not end before the quorum

They use what torchft keeps to itself (``_client``, ``_pg``, ``_comm_hook``), which is why the version is checked.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
import zlib
from collections.abc import Callable
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from ftsupervise.errors import ConfigError
from ftsupervise.integrations.needed import needed
from ftsupervise.integrations.torchft_silence import PeerSilent, SilenceWatch, Wait
from ftsupervise.replicas.members import LighthousePage, PageNotSeen

# torch and torchft, of the version that all of our integration was tried with: it uses what torchft keeps to itself.

VERSION = "0.2."  # what all this was tried with


def _torchft() -> Any:
    """The package. Raises ImportError where it is missing, and ConfigError where it is another version."""
    package = needed("torchft", package="torchft==0.2.*")
    try:
        version("torchft-nightly")
        raise ConfigError(
            "torchft-nightly is installed, and speaks another protocol than torchft 0.2: "
            "pip uninstall torchft-nightly torchft, then pip install 'ftsupervise[torchft]'"
        )
    except PackageNotFoundError:
        pass
    found = version("torchft")
    if not found.startswith(VERSION):
        raise ConfigError(
            f"torchft {found} is installed, and ftsupervise works with version 0.2 of it: pip install 'torchft==0.2.*'"
        )
    inside = ("_async_quorum", "allreduce", "report_error", "should_commit", "start_quorum", "wait_quorum")
    if lost := [name for name in inside if not callable(getattr(package.Manager, name, None))]:
        raise ConfigError(f"torchft {found} has no Manager.{lost[0]}: pip install 'torchft==0.2.0'")
    return package


torchft = _torchft()
torch = needed("torch", package="torch")


# ------------------------------------------------------------------------------------------


# torchft's gloo process group, whose reductions can be given up.
#
# gloo ends none of its reductions early, and closes no connection while one is under way. Gone here when gloo can be aborted,
# as NCCL can.

_Gloo: Any = torchft.ProcessGroupGloo
_Work: Any = torch.distributed._Work
_LOOK = 0.1  # seconds between two looks around while it connects to other groups


class OneThread:
    """An executor of one thread that does not hold the process up at its end, whatever it still waits for."""

    def __init__(self, name: str) -> None:
        self._calls: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        threading.Thread(target=self._work, name=name, daemon=True).start()

    def submit(self, call: Callable[..., Any], *arguments: Any, **named: Any) -> concurrent.futures.Future[Any]:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()

        def do() -> None:
            try:
                future.set_result(call(*arguments, **named))
            except BaseException as error:  # whoever asks for the result gets it
                future.set_exception(error)

        self._calls.put(do)
        return future

    def shutdown(self, wait: bool = True) -> None:
        self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            call()
            del call


class ProcessGroupGloo(_Gloo):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's own, with one reduction after the other, in a thread. After the first that fails none begins any more until the
    groups come together again. ``abort`` gives up the one that runs, and the attempt to connect: gloo goes on with them until
    its own timeout, so they have a thread and memory of their own."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._queue = _Reductions()
        self._connecting: tuple[float, threading.Event] | None = None

    @property
    def connecting_since(self) -> float | None:
        """Monotonic seconds; None while it does not connect to other groups."""
        connecting = self._connecting
        return None if connecting is None else connecting[0]

    def configure(self, *arguments: Any, **named: Any) -> None:
        self.abort(errored=False)
        self._queue.close()
        self._queue = _Reductions()
        self._pg = self._connect(_Gloo(self._timeout), arguments, named)

    def _connect(self, made: Any, arguments: tuple[Any, ...], named: dict[str, Any]) -> Any:
        """Also the way to the others' store is given up: a group that is stopped takes the connection, and does not answer."""
        thread, given_up = OneThread("connect"), threading.Event()
        self._connecting = (time.monotonic(), given_up)
        try:
            done = thread.submit(made.configure, *arguments, **named)
            while not concurrent.futures.wait([done], _LOOK).done:
                if given_up.is_set():
                    raise RuntimeError("the groups do not connect: another one is silent")
            done.result()
            self._replica_id, self._rank, self._quorum_id = made._replica_id, made._rank, made._quorum_id
            return made._pg
        finally:
            self._connecting = None
            thread.shutdown()

    def abort(self, errored: bool = True) -> None:
        super().abort(errored)
        if errored:
            if (connecting := self._connecting) is not None:
                connecting[1].set()
            self._queue.give_up(RuntimeError("another group is lost"))

    def allreduce(self, tensors: Any, options: Any) -> Any:
        return self._queue.submit(self._pg, tensors, options)


class _Reductions:
    """The reductions of one meeting of the groups, in their order."""

    def __init__(self) -> None:
        self._thread, self._lock = OneThread("reductions"), threading.Lock()
        self._waiting: list[_Reduction] = []
        self._failed: Exception | None = None

    def submit(self, group: Any, tensors: Any, options: Any) -> _Reduction:
        one = _Reduction(group, tensors, options)
        with self._lock:
            failed = self._failed
            if failed is None:
                self._waiting.append(one)
                self._thread.submit(self._run, one)
        if failed is not None:
            one.end(failed)
        return one

    def give_up(self, error: Exception) -> None:
        """All that wait fail now."""
        with self._lock:
            self._failed = self._failed or error
            waiting, self._waiting = self._waiting, []
        for one in waiting:
            one.end(self._failed)

    def close(self) -> None:
        self._thread.shutdown()

    def _run(self, one: _Reduction) -> None:
        try:
            if self._failed is not None or one.group is None:
                raise self._failed or RuntimeError("the groups are not connected")
            one.reduce()
        except Exception as error:  # the manager hears of it, and the step is not committed
            self._failed = self._failed or error.with_traceback(None)  # its frames would keep the connections open
        with self._lock:
            if one in self._waiting:
                self._waiting.remove(one)
        one.end(self._failed)


class _Reduction(_Work):  # type: ignore[misc] # torch is not installed where mypy runs
    """gloo writes into memory of its own: what comes from a group that was given up must not reach a later step."""

    def __init__(self, group: Any, tensors: Any, options: Any) -> None:
        super().__init__()
        self.group = group
        self._tensors, self._options = tensors, options
        self._done, self._lock, self._over = torch.futures.Future(), threading.Lock(), False

    def reduce(self) -> None:
        with self._lock:
            copies = None if self._over else [one.clone() for one in self._tensors]
        if copies is None:
            return
        group, self.group = self.group, None
        group.allreduce(copies, self._options).wait()
        with self._lock:
            if not self._over:
                for one, copy in zip(self._tensors, copies):
                    one.copy_(copy)

    def end(self, error: Exception | None) -> None:
        with self._lock:
            over, self._over = self._over, True
        tensors, self._tensors, self.group = self._tensors, None, None
        if over:
            return
        if error is None:
            self._done.set_result(tensors)
        else:
            self._done.set_exception(error)

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        return True

    def get_future(self) -> Any:
        return self._done


# ------------------------------------------------------------------------------------------


_WAIT = 0.5  # seconds between two looks around while a group waits for the others
_PAGE = 2.0  # seconds for a look at the lighthouse's page
_DOUBTED = 1.0  # seconds after which a quorum is asked for again whose step is not believed


_Manager: Any = torchft.Manager
_DDP: Any = torchft.DistributedDataParallel
_Http: Any = torchft.manager.HTTPTransport
_done = needed("torchft.work", package="torchft")._DummyWork


def _reduced(manager: Any, bucket: Any) -> Any:
    tensor = bucket.buffer()
    manager.allreduce(tensor).wait()  # an error is remembered by the manager: this step is not committed
    future = torch.futures.Future()
    future.set_result(tensor)
    return future


_reduced.__annotations__.clear()  # DDP compares them with its own types, and these are strings


class DistributedDataParallel(_DDP):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's own; a group that dies while gradients are computed costs the others this step, and not their lives."""

    _comm_hook = staticmethod(_reduced)


class HTTPTransport(_Http):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's own; a group that comes back waits so many seconds for the next byte, and then asks another one. A source that
    has failed itself meanwhile sends nothing, and says nothing. ``host``: the address of this host, as a URL has it. ``check``:
    raises where weights are not taken from that address."""

    def __init__(self, host: str, timeout: timedelta, silence: timedelta, check: Callable[[str], object]) -> None:
        self._host, self._silence, self._check = host, silence, check
        super().__init__(timeout=timeout, num_chunks=0)

    def address(self) -> str:
        return f"http://{self._host}:{self._server.socket.getsockname()[1]}/checkpoint/"

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        self._check(metadata)
        return super().recv_checkpoint(src_rank, metadata, step, min(timeout, self._silence))


class Fence:
    """The manager's client, whose quorum ids are of one life of the lighthouse, of these members and of this step, and which
    asks again after so many seconds: of the calls that a lighthouse takes along when it dies, some are never answered. It asks
    again too for an answer that it ``doubts``, after a second."""

    def __init__(self, client: Any, again: float, doubts: Callable[[Any], bool]) -> None:
        self._inside, self._again, self._doubts = client, timedelta(seconds=again), doubts
        self.members: tuple[str, ...] = ()  # of the last quorum: "g002:3f0c…"
        self.quorum = 0  # its id, the same in all groups
        self.step = 0  # the highest of its members
        self.closed = False
        self._seen: tuple[int, tuple[str, ...]] | None = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inside, name)

    def _quorum(self, *, timeout: timedelta, **asked: Any) -> Any:
        end = time.monotonic() + timeout.total_seconds()
        while True:
            left = timedelta(seconds=max(0.1, end - time.monotonic()))
            try:
                quorum = self._inside._quorum(timeout=min(left, self._again), **asked)
            except TimeoutError:
                if left <= self._again or self.closed:
                    raise
                continue
            if not self._doubts(quorum):
                break
            if self.closed or time.monotonic() + _DOUBTED >= end:
                raise TimeoutError("the highest step of the quorum is not believed")
            time.sleep(_DOUBTED)
        self.members = tuple(quorum.replica_ids)
        seen = (quorum.quorum_id, tuple(quorum.replica_ids))
        if (
            seen != self._seen or quorum.heal
        ):  # behind the others: they have met without this group, and it looks the same
            self._seen = seen
            self.quorum = zlib.crc32(repr((seen, quorum.max_step)).encode())
        quorum.quorum_id, self.step = self.quorum, quorum.max_step
        return quorum


class MendedManager(_Manager):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's manager, mended. ``while_waiting``: called about twice a second with the seconds that this group has waited for
    a quorum; True: it waits no longer, and leaves. ``again``: seconds after which it asks for a quorum anew. ``doubts``: is
    this quorum not believed? ``look``: the lighthouse's page, within so many seconds. ``groups``: how many are wanted.
    ``heartbeat``: seconds after which the lighthouse does without a group. ``tell``: called in a thread, with a sentence for
    the log."""

    def __init__(
        self,
        *,
        while_waiting: Callable[[float], bool],
        again: float,
        doubts: Callable[[Any], bool],
        look: Callable[[float], LighthousePage | PageNotSeen],
        groups: int,
        heartbeat: float,
        tell: Callable[[str], None],
        **options: Any,
    ) -> None:
        self._while_waiting, self._again, self._tell = while_waiting, again, tell
        self._look, self._heartbeat = look, heartbeat
        self.left = False  # it did not wait for the others: nothing is agreed on with them any more
        self._turn = threading.RLock()  # held while the step that runs changes, or fails
        self._step_that_runs: object = None
        self._reducing_since: float | None = None
        self._reduced = False  # all reductions of this step are over: nothing of it hangs on the other groups any more
        super().__init__(**options)
        self.start_id = self._store.get(torchft.manager.REPLICA_ID_KEY).decode()  # "g002:3f0c…", as the others know it
        self._client: Any = Fence(self._client, again, doubts)
        self._executor.shutdown(wait=False)
        self._executor: Any = OneThread("quorum")
        self._silence = SilenceWatch(
            self._waits,
            look if self._group_rank == 0 else None,
            self._store,
            self._lost,
            own=self.start_id,
            groups=groups,
            heartbeat=heartbeat,
        )

    def _waits(self) -> Wait | None:
        """Return what this rank waits for, in a reduction or on the way to it. A rank that has failed or ended its reductions
        still waits for the other ranks of its group: the first one looks for all of them."""
        step = self._step_that_runs
        since = self._reducing_since or getattr(self._pg, "connecting_since", None)
        if since is None:
            return None
        return Wait(step, since, f"{self._client.quorum}/{self._client.step}", self._client.members)

    def _lost(self, step: object, words: str) -> None:
        with self._turn:
            if step is not self._step_that_runs or self._reduced or self.errored() is not None:
                return
            self.report_error(PeerSilent(words))
        self._tell(f"{words}: this step is not committed, and the next one is made without it")

    def report_error(self, error: Exception) -> None:
        with self._turn:  # until the abort is over: it must not meet the connections of the next step
            first = self.errored() is None
            super().report_error(error)
            if first:
                self._pg.abort()

    def wait_quorum(self) -> None:
        future, waited = self._quorum_future, 0.0
        if future is None:
            raise RuntimeError("start_quorum() comes before wait_quorum()")
        while not self.left:
            if concurrent.futures.wait([future], _WAIT).done:
                future.result()
                return
            waited += _WAIT
            self.left = self._while_waiting(waited)

    def shutdown(self, wait: bool = True) -> None:
        """A process that ends in the middle of a call of torchft's is aborted: the call's end is waited for, 12 s at most."""
        self._silence.close()
        self._client.closed = True
        if self.left and self._quorum_future is not None:
            concurrent.futures.wait([self._quorum_future], self._again + 1.0)
        super().shutdown(wait)

    def start_quorum(self, *arguments: Any, **named: Any) -> None:
        if not self.left:
            with self._turn:
                self._step_that_runs, self._reducing_since, self._reduced = object(), None, False
            super().start_quorum(*arguments, **named)

    def allreduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        if self.errored() is None:
            self.wait_quorum()
        if self.left:
            return _done(tensor)
        self._reducing_since = self._reducing_since or time.monotonic()
        return super().allreduce(tensor, *arguments, **named)

    def should_commit(self, timeout: Any = None) -> bool:
        self.wait_quorum()
        with self._turn:
            self._reduced = True
        self._check_that_it_is_a_member()
        try:
            return not self.left and bool(super().should_commit(timeout))
        finally:
            self._reducing_since = None

    def _check_that_it_is_a_member(self) -> None:
        """Fail this step where the lighthouse has a newer quorum without this group: the others have given it up and make the
        step anew. It was stopped in a reduction, and has ended that when it was continued, with what the others had sent."""
        since = self._reducing_since
        if self._group_rank or self.errored() is not None or since is None:
            return
        if time.monotonic() - since < self._heartbeat:
            return
        page = self._look(_PAGE)
        starts = [one.replica for one in page.members] if isinstance(page, LighthousePage) else []
        if starts and self.start_id not in starts:
            self.report_error(RuntimeError("the others have made this step without this group"))
