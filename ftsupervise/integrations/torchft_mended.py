"""Adds from outside what torchft 0.2.0 lacks to survive the loss of a group, each part until torchft has it itself.

    DistributedDataParallel   a death while gradients are computed: the hook of 0.2.0 raises in every survivor, and all exit.
                              Mended upstream after 0.2.0; gone here when a release has it
    abort on an error         only the neighbours of a dead group see its sockets close; the others wait for the whole timeout
                              of the process group (meta-pytorch/torchft #164, PR #196): an error closes our own at once
    ProcessGroupGloo          gloo ends none of its reductions early, and closes no socket while one is under way: so there is
                              never more than one. Gone here when gloo can be aborted, as NCCL can
    Fence                     a restarted lighthouse counts its quorums from 1 again, so that groups skip a new quorum or
                              meet addresses of an old one, and one may wait for ever for the answer of the dead one;
                              upstream has no issue of it yet
    doubt of a step           the highest step that a manager tells is believed, whatever it is (torchft_doubt.py)
    HTTPTransport             a group that comes back waits a minute for the weights of a source that has failed meanwhile
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

VERSION = "0.2."  # what all this was tried with
_WAIT = 0.5  # seconds between two looks around while a group waits for the others
_DOUBTED = 1.0  # seconds after which a quorum is asked for again whose step is not believed


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
_Manager: Any = torchft.Manager
_DDP: Any = torchft.DistributedDataParallel
_Gloo: Any = torchft.ProcessGroupGloo
_Http: Any = torchft.manager.HTTPTransport
_Work: Any = torch.distributed._Work
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
    groups come together again."""

    def __init__(self, timeout: timedelta) -> None:
        super().__init__(timeout)
        self._queue = OneThread("reductions")
        self._failed: Exception | None = None

    def configure(self, *arguments: Any, **named: Any) -> None:
        self._failed = None
        super().configure(*arguments, **named)

    def allreduce(self, tensors: Any, options: Any) -> Any:
        done = torch.futures.Future()
        self._queue.submit(self._reduce, self._pg, tensors, options, done)
        return _Queued(done)

    def _reduce(self, group: Any, tensors: Any, options: Any, done: Any) -> None:
        try:
            if self._failed is not None or group is not self._pg:
                raise self._failed or RuntimeError("the process group has changed")
            group.allreduce(tensors, options).wait()
        except Exception as error:  # the manager hears of it, and the step is not committed
            self._failed = error.with_traceback(None)  # its frames would keep the group alive, and so its sockets
            done.set_exception(self._failed)
        else:
            done.set_result(tensors)


class _Queued(_Work):  # type: ignore[misc] # torch is not installed where mypy runs
    def __init__(self, done: Any) -> None:
        super().__init__()
        self._done = done

    def wait(self, timeout: Any = None) -> bool:
        self._done.wait()
        return True

    def get_future(self) -> Any:
        return self._done


class HTTPTransport(_Http):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's own; a group that comes back waits so many seconds for the next byte, and then asks another one. A source that
    has failed itself meanwhile sends nothing, and says nothing."""

    def __init__(self, timeout: timedelta, silence: timedelta) -> None:
        super().__init__(timeout=timeout, num_chunks=0)
        self._silence = silence

    def recv_checkpoint(self, src_rank: int, metadata: str, step: int, timeout: timedelta) -> Any:
        return super().recv_checkpoint(src_rank, metadata, step, min(timeout, self._silence))


class Fence:
    """The manager's client, whose quorum ids are of one life of the lighthouse, of these members and of this step, and which
    asks again after so many seconds: of the calls that a lighthouse takes along when it dies, some are never answered. It asks
    again too for an answer that it ``doubts``, after a second."""

    def __init__(self, client: Any, again: float, doubts: Callable[[Any], bool]) -> None:
        self._inside, self._again, self._doubts = client, timedelta(seconds=again), doubts
        self.members: tuple[str, ...] = ()  # of the last quorum: "g002:3f0c…"
        self.closed = False
        self._seen: tuple[int, tuple[str, ...]] | None = None
        self._id = 0

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
            self._id = zlib.crc32(repr((seen, quorum.max_step)).encode())  # the same in all groups
        quorum.quorum_id = self._id
        return quorum


class MendedManager(_Manager):  # type: ignore[misc] # torchft is not installed where mypy runs
    """torchft's manager, mended. ``while_waiting``: called about twice a second with the seconds that this group has waited for
    a quorum; True: it waits no longer, and leaves. ``again``: seconds after which it asks for a quorum anew. ``doubts``: is
    this quorum not believed?"""

    def __init__(
        self, *, while_waiting: Callable[[float], bool], again: float, doubts: Callable[[Any], bool], **options: Any
    ) -> None:
        self._while_waiting, self._again = while_waiting, again
        self.left = False  # it did not wait for the others: nothing is agreed on with them any more
        super().__init__(**options)
        self._client: Any = Fence(self._client, again, doubts)
        self._executor.shutdown(wait=False)
        self._executor: Any = OneThread("quorum")

    def report_error(self, error: Exception) -> None:
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
        self._client.closed = True
        if self.left and self._quorum_future is not None:
            concurrent.futures.wait([self._quorum_future], self._again + 1.0)
        super().shutdown(wait)

    def start_quorum(self, *arguments: Any, **named: Any) -> None:
        if not self.left:
            super().start_quorum(*arguments, **named)

    def allreduce(self, tensor: Any, *arguments: Any, **named: Any) -> Any:
        if self.errored() is None:
            self.wait_quorum()
        return _done(tensor) if self.left else super().allreduce(tensor, *arguments, **named)

    def should_commit(self, timeout: Any = None) -> bool:
        self.wait_quorum()
        return not self.left and bool(super().should_commit(timeout))
