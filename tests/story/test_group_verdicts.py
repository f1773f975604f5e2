"""A verdict on another group meets the step that it belongs to, and no other: on a real manager, alone at a real lighthouse."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Callable, Iterator
from datetime import timedelta
from typing import Any

import pytest

from ftsupervise.replicas.members import LighthousePage, PageNotSeen, QuorumMember, Unseen

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
]
SILENT = "g001 sends no heartbeats to the lighthouse any more"


class One:
    """A group of one rank. ``manager``: its own. ``said``: for the log. ``on_errored``: called inside of ``should_commit``,
    after the last reduction and before the answer. ``on_abort``: called at each abort after an error."""

    def __init__(self, lighthouse: str, store: Any) -> None:
        from ftsupervise.integrations.torchft_mended import HTTPTransport, MendedManager, ProcessGroupGloo

        one = self
        self.said: list[str] = []
        self.on_errored: Callable[[], object] = lambda: None
        self.on_abort: Callable[[], object] = lambda: None
        self.page: Any = None  # of the lighthouse

        class Group(ProcessGroupGloo):
            def errored(self) -> Any:
                one.on_errored()
                return super().errored()

            def abort(self, errored: bool = True) -> None:
                if errored:
                    one.on_abort()
                super().abort(errored)

        class Manager(MendedManager):
            """It tells what its watch is told, and takes what its watch has seen."""

            def calls_long(self, seconds: float) -> None:
                """A reduction of so many seconds is a long one."""
                self._heartbeat = seconds

            def waits(self) -> Any:
                return self._waits()

            def lost(self, step: object) -> None:
                self._lost(step, SILENT)

        self.manager = Manager(
            while_waiting=lambda waited: False,
            again=10.0,
            doubts=lambda quorum: False,
            look=lambda within: one.page,
            groups=1,
            heartbeat=60.0,  # the watch itself asks nobody here
            tell=self.said.append,
            hostname="127.0.0.1",
            pg=Group(timedelta(seconds=10)),
            load_state_dict=lambda state: None,
            state_dict=dict,
            min_replica_size=1,
            rank=0,
            world_size=1,
            store_addr="127.0.0.1",
            store_port=store.port,
            lighthouse_addr=lighthouse,
            replica_id="g000",
            checkpoint_transport=HTTPTransport(
                "127.0.0.1", timedelta(seconds=10), timedelta(seconds=5), lambda weights: None
            ),
        )

    def reduce(self) -> Any:
        """Begin a step; return what it waits for after its first reduction."""
        from torch import ones

        self.manager.start_quorum()
        self.manager.allreduce(ones(3)).wait()
        return self.manager.waits()


@pytest.fixture
def one(monkeypatch: pytest.MonkeyPatch) -> Iterator[One]:
    import torch
    from torchft.coordination import LighthouseServer

    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server = LighthouseServer(bind="127.0.0.1:0", min_replicas=1, join_timeout_ms=100)
    port = server.address().rpartition(":")[2]
    made = One(f"http://127.0.0.1:{port}", store)
    yield made
    made.manager.shutdown(wait=False)
    server.shutdown()


@pytest.mark.parametrize(
    ("seconds", "members", "commits"),
    [
        (0.0, ("g001:b", "g002:c"), False),
        (60.0, ("g001:b", "g002:c"), True),  # it cannot have been given up in so short a time
        (0.0, (), True),  # a new lighthouse, which knows nobody
        (0.0, ("g001:b", "g000:OWN"), True),
        (0.0, None, True),  # not seen
    ],
)
def test_a_step_that_the_others_have_made_without_this_group_is_not_made_by_it_too(
    one: One, seconds: float, members: tuple[str, ...] | None, commits: bool
) -> None:
    one.manager.calls_long(seconds)
    named = [name.replace("g000:OWN", one.manager.start_id) for name in members or ()]
    seen = tuple(QuorumMember(name, 3, "") for name in named)
    one.page = PageNotSeen(Unseen.CUT, "no network") if members is None else LighthousePage(9, seen, ())
    one.reduce()
    assert one.manager.should_commit() is commits


def test_a_verdict_meets_its_own_step_alone(one: One) -> None:
    first = one.reduce()
    assert one.manager.should_commit() and one.manager.waits() is None
    one.manager.lost(first.step)
    second = one.reduce()
    one.manager.lost(first.step)
    assert one.manager.should_commit() and not one.said, "of an old step"
    assert second.members == first.members and second.attempt != first.attempt, "what one rank tells the others is too"

    third = one.reduce()
    one.manager.lost(third.step)
    one.manager.lost(third.step)
    assert not one.manager.should_commit() and len(one.said) == 1 and SILENT in one.said[0]
    assert one.reduce().attempt != third.attempt, "the same step is tried again, in another quorum"
    assert one.manager.should_commit()


def test_a_group_that_ends_after_the_last_reduction_of_a_step_takes_that_step_from_nobody(one: One) -> None:
    wait = one.reduce()
    one.on_errored = lambda: one.manager.lost(wait.step)
    assert one.manager.should_commit() and not one.said


def test_a_rank_that_has_failed_looks_on_for_the_other_ranks_of_its_group(one: One) -> None:
    wait = one.reduce()
    one.manager.report_error(RuntimeError("connection closed by peer"))
    assert one.manager.waits() == wait
    one.manager.lost(wait.step)
    assert not one.manager.should_commit() and not one.said, "it has said why already"


def test_an_abort_is_over_before_the_next_step_connects(one: One) -> None:
    begun, go_on, done = threading.Event(), threading.Event(), list[str]()

    def abort() -> None:
        begun.set()
        assert go_on.wait(30)
        done.append("abort")

    def next_step() -> None:
        one.manager.start_quorum()
        done.append("step")

    one.reduce()
    one.on_abort = abort
    failing = threading.Thread(target=one.manager.report_error, args=(RuntimeError("late"),))
    failing.start()
    assert begun.wait(30)
    stepping = threading.Thread(target=next_step)
    stepping.start()
    stepping.join(0.3)
    assert not done
    go_on.set()
    for thread in (failing, stepping):
        thread.join(30)
    assert done == ["abort", "step"]
    assert one.manager.should_commit()
