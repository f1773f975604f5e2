"""Reductions between replica groups are given up when another group is lost: at once, and without a trace in the weights."""

from __future__ import annotations

import importlib.util
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
TIMEOUT = 30.0  # seconds: of gloo, which nobody here may wait for


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> Any:
    import torch

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    return torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


def member(store: Any, rank: int, meeting: int = 1) -> Any:
    """A process group of two; ``configure`` returns when both have come."""
    from ftsupervise.integrations.torchft_mended import ProcessGroupGloo

    group = ProcessGroupGloo(timedelta(seconds=TIMEOUT))
    meet(group, store, rank, meeting)
    return group


def meet(group: Any, store: Any, rank: int, meeting: int) -> None:
    group.configure(f"127.0.0.1:{store.port}/{meeting}", f"g{rank:03d}", rank, 2, meeting, 0, 1, [0, 1])


def both(*calls: Callable[[], Any]) -> list[Any]:
    found: dict[int, Any] = {}
    threads = [
        threading.Thread(target=lambda n=n, call=call: found.update({n: call()})) for n, call in enumerate(calls)
    ]
    for one in threads:
        one.start()
    for one in threads:
        one.join(TIMEOUT)
    return [found[n] for n in range(len(calls))]


def reduce(group: Any, value: float) -> tuple[Any, Any]:
    from torch import full
    from torch.distributed import AllreduceOptions

    tensor = full((1000,), value)
    return tensor, group.allreduce([tensor], AllreduceOptions())


def test_a_reduction_that_is_given_up_fails_at_once_and_what_comes_late_reaches_no_tensor(store: Any) -> None:
    first, second = both(lambda: member(store, 0), lambda: member(store, 1))
    for tensor, work in both(lambda: reduce(first, 1.0), lambda: reduce(second, 2.0)):
        work.wait()
        assert tensor.eq(3.0).all()

    began = time.monotonic()
    tensor, work = reduce(first, 1.0)
    _, behind = reduce(first, 1.0)
    time.sleep(0.2)
    first.abort()
    for one in (work, behind):
        with pytest.raises(RuntimeError, match="another group is lost"):
            one.wait()
    with pytest.raises(RuntimeError):
        reduce(first, 1.0)[1].wait()
    assert time.monotonic() - began < TIMEOUT / 2

    late, answer = reduce(second, 2.0)  # the group that was silent sends what it had to
    answer.wait()
    assert late.eq(3.0).all() and tensor.eq(1.0).all()

    both(lambda: meet(first, store, 0, 2), lambda: meet(second, store, 1, 2))
    for tensor, work in both(lambda: reduce(first, 4.0), lambda: reduce(second, 5.0)):
        work.wait()
        assert tensor.eq(9.0).all()
    assert time.monotonic() - began < TIMEOUT / 2


class Stopped:
    """The store of a group that is stopped: the kernel takes the connection, and no answer comes."""

    def __init__(self) -> None:
        self._socket = socket.create_server(("127.0.0.1", 0))
        self.port = self._socket.getsockname()[1]


@pytest.mark.parametrize("stopped", [False, True], ids=["it does not come", "it holds the store, and is stopped"])
def test_the_attempt_to_connect_to_a_group_that_is_not_there_is_given_up(store: Any, stopped: bool) -> None:
    from ftsupervise.integrations.torchft_mended import ProcessGroupGloo

    group, said = ProcessGroupGloo(timedelta(seconds=TIMEOUT)), list[str]()
    met = Stopped() if stopped else store

    def connect() -> None:
        try:
            meet(group, met, 0, 1)
        except RuntimeError as error:
            said.append(str(error))

    thread = threading.Thread(target=connect)
    began = time.monotonic()
    thread.start()
    while group.connecting_since is None:
        assert time.monotonic() - began < TIMEOUT / 2
        time.sleep(0.01)
    group.abort()
    thread.join(TIMEOUT / 2)
    assert said == ["the groups do not connect: another one is silent"] and group.connecting_since is None
