"""torchft's gloo process group, whose reductions can be given up.

gloo ends none of its reductions early, and closes no connection while one is under way. Gone here when gloo can be aborted, as
NCCL can.
"""

from __future__ import annotations

import concurrent.futures
import queue
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from ftsupervise.integrations.torchft_package import torch, torchft

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
                for one, copy in zip(self._tensors, copies, strict=True):
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
