"""The supervised lighthouse with real managers of torchft: what the groups feel when it dies, stops, is cut off or doubled."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.host.ports import ports_of
from ftsupervise.replicas.bounds import derive
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.members import LighthousePage, MemberTrouble, StoreWatch, Unseen, store_answers, suspects
from ftsupervise.replicas.record import read_lighthouse
from tests.neighbours import needs
from tests.neighbours.managers import Group

pytestmark = [pytest.mark.torch, needs.torchft]
Until = Callable[..., Any]
NAMES = ("g000", "g001", "g002", "g003")
TIMEOUTS = derive(1.0, 0, 4)


STORE = """import time
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)"""


NAMES_OF_NOBODY = """import sys
from datetime import timedelta
from tests.neighbours.managers import compiled
client = compiled().LighthouseClient(sys.argv[1], connect_timeout=timedelta(seconds=20))
for number in range(25_000):
    client.heartbeat(f"g001:{'x' * 200}{number}")
"""


class Scene:
    """A lighthouse of four groups, and what it said."""

    def __init__(self, folder: Path, stack: ExitStack) -> None:
        self.folder, self.home, self.said = folder, folder / "run" / "replicas", list[str]()
        self._stack = stack

    def lighthouse(self, least: int = 3) -> SupervisedLighthouse:
        place = LighthousePlace(self.home, "127.0.0.1", 4, least, TIMEOUTS)
        one = SupervisedLighthouse(place, sys.executable, self.said.append)
        self._stack.callback(one.stop)
        one.start()
        return one

    def group(self, lighthouse: SupervisedLighthouse, name: str, **more: Any) -> Group:
        one = Group(self.folder, lighthouse.address, name, **more)
        self._stack.callback(one.end)
        return one

    def groups(self, lighthouse: SupervisedLighthouse, **more: Any) -> list[Group]:
        return [self.group(lighthouse, name, **more) for name in NAMES]


@pytest.fixture
def scene(tmp_path: Path) -> Iterator[Scene]:
    with ExitStack() as stack:
        yield Scene(tmp_path, stack)


def all_step(groups: list[Group], since: float, members: int) -> bool:
    """Has each made a step since then, in a quorum of so many?"""
    return all(any(step.members == members for step in group.since(since)) for group in groups)


def together(groups: list[Group], until: Until) -> None:
    since = time.time()
    until(lambda: all_step(groups, since, len(groups)), "a quorum of all groups")


@pytest.mark.fault(
    "The lighthouse of replica groups is killed",
    "it is back at its address at once; no group is left out of the next quorum",
)
def test_a_killed_lighthouse_is_back_at_its_address_within_a_second(scene: Scene, until: Until) -> None:
    lighthouse = scene.lighthouse()
    groups, before = scene.groups(lighthouse), lighthouse.record
    together(groups, until)
    until(lambda: isinstance(lighthouse.page(), LighthousePage) and lighthouse.heard("g003"), "its page was read")
    at = time.time()
    os.kill(before.pid, signal.SIGKILL)
    until(lambda: all_step(groups, at + 0.2, 4), "all groups go on")
    stall = max(group.since(at + 0.2)[0].at for group in groups) - at
    after = until(lambda: (r := read_lighthouse(scene.home)) and r.restarts == 1 and r, "the page says so")
    assert (after.address, after.min_replicas) == (before.address, 3)
    assert {group.since(at + 0.2)[0].members for group in groups} == {4}, "nobody is left out of the first quorum"
    assert after.pid != before.pid and after.history[0].why == "killed by SIGKILL" and after.history[0].down < 1.5
    assert stall < 8
    assert lighthouse.restarted is not None


def test_a_page_of_thousands_of_names_is_not_read_and_a_new_lighthouse_has_none_of_them(
    scene: Scene, until: Until
) -> None:
    lighthouse = scene.lighthouse()
    groups = scene.groups(lighthouse)
    together(groups, until)
    flood = [sys.executable, "-c", NAMES_OF_NOBODY, lighthouse.address]
    subprocess.run(flood, check=True, timeout=120, capture_output=True, cwd=Path(__file__).parents[2])
    until(lambda: getattr(lighthouse.page(), "kind", None) is Unseen.FULL, "its page is too large")
    at = time.time()
    os.kill(lighthouse.record.pid, signal.SIGKILL)  # as its supervisor does after a while
    until(lambda: all_step(groups, at + 0.2, 4), "all groups go on")
    until(lambda: isinstance(lighthouse.page(), LighthousePage), "its page is read again")


@pytest.mark.fault("The lighthouse is stopped (SIGSTOP)", "it is continued, and not restarted")
def test_a_stopped_lighthouse_is_continued_and_not_restarted(scene: Scene, until: Until) -> None:
    lighthouse = scene.lighthouse()
    groups = scene.groups(lighthouse)
    together(groups, until)
    until(lambda: isinstance(lighthouse.page(), LighthousePage), "its page was read")
    at = time.time()
    os.kill(lighthouse.record.pid, signal.SIGSTOP)
    until(lambda: any("is continued" in line for line in scene.said), "it is continued")
    until(lambda: all_step(groups, time.time() - 0.5, 4), "all groups go on")
    stall = max(later.at - earlier.at for group in groups for earlier, later in pairwise(group.steps()))
    assert lighthouse.record.restarts == 0 and 1 < stall < 12 and time.time() - at < 30


@pytest.mark.fault("The lighthouse's port is taken before it starts", "the next one is used")
def test_a_taken_port_is_passed_over_before_any_group_has_started(scene: Scene) -> None:
    first, second, *_ = ports_of(f"{scene.home}/lighthouse", 0)
    with socket.create_server(("127.0.0.1", first)):
        lighthouse = scene.lighthouse()
    assert lighthouse.record.port == second
    assert any(f"port {first} is taken by a program of root" in line for line in scene.said) or os.geteuid() != 0


@pytest.mark.threat(
    "Another account knows the name of a run with replica groups, and listens at each port that its lighthouse may have.",
    "The lighthouse gets a port that the kernel chooses, and the account is named.",
)
def test_a_lighthouse_of_whose_ports_all_are_taken_listens_at_another_one(scene: Scene) -> None:
    mine = ports_of(f"{scene.home}/lighthouse", 0)
    with ExitStack() as stack:
        for port in mine:
            stack.enter_context(socket.create_server(("127.0.0.1", port)))
        assert scene.lighthouse().record.port not in (0, *mine)


def test_a_lighthouse_that_was_stopped_is_not_said_to_be_there_and_the_next_one_knows_whether_it_has_moved(
    scene: Scene, until: Until
) -> None:
    """Groups with jobs of their own live on, and begin again with the address of the next one."""
    first = scene.lighthouse()
    first.stop()
    page = read_lighthouse(scene.home)
    assert page is not None and page.down_since is not None and page.trouble == "its supervisor has ended"
    with socket.socket() as thief:
        assert _bound(thief, first.record.port)
        second = scene.lighthouse()
    assert second.moved and not first.moved and second.address != first.address
    until(
        lambda: (r := read_lighthouse(scene.home)) and r.down_since is None and r.address == second.address, "its page"
    )
    second.stop()
    third = scene.lighthouse()
    assert (third.address, third.moved) == (second.address, second.moved), (
        "the second may have told nobody that it moved"
    )


@pytest.mark.fault(
    "The lighthouse and its supervisor get the signal of a cancelled job at once",
    "its page says that there is none",
)
def test_a_lighthouse_that_ends_with_its_whole_job_is_said_to_be_gone(scene: Scene) -> None:
    """Slurm signals all processes of a cancelled job, the lighthouse and its supervisor alike."""
    for pause in (0.0, 0.001, 0.002, 0.004, 0.008, 0.016):
        one = scene.lighthouse()
        os.kill(one.record.pid, signal.SIGTERM)
        time.sleep(pause)
        one.stop()
        page = read_lighthouse(scene.home)
        assert page is not None and page.generation == one.record.generation and page.down_since is not None, page


@pytest.mark.fault(
    "The lighthouse's port is taken when it is restarted",
    "that is said; the address stays, and it is tried until the port is free",
)
def test_a_port_that_is_taken_at_a_restart_is_waited_for(scene: Scene, until: Until) -> None:
    lighthouse = scene.lighthouse()
    groups = scene.groups(lighthouse)
    together(groups, until)
    before = lighthouse.record
    with socket.socket() as thief:
        thief.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        os.kill(before.pid, signal.SIGKILL)
        until(lambda: _bound(thief, before.port), "the port was taken")
        said = until(lambda: [line for line in scene.said if "cannot be started" in line], "it says so")
        assert f"port {before.port} is taken" in said[0]
        page = until(lambda: (r := read_lighthouse(scene.home)) and "is taken" in r.trouble and r, "and the page too")
        assert page.down_since is not None
    at = time.time()
    until(lambda: all_step(groups, at, 4), "all groups go on")
    assert lighthouse.record.address == before.address and lighthouse.record.down_since is None


def _bound(thief: socket.socket, port: int) -> bool:
    try:
        thief.bind(("127.0.0.1", port))
    except OSError:
        return False
    thief.listen()
    return True


@pytest.mark.fault("Two lighthouses are started for one run", "one is left, at the same address")
def test_a_later_supervisor_takes_over_the_address_and_the_first_ends_its_own(scene: Scene, until: Until) -> None:
    """Whichever way two were started: one lighthouse is left, and the groups go on with it."""
    first = scene.lighthouse()
    groups = scene.groups(first)
    together(groups, until)
    second = scene.lighthouse()
    until(lambda: first.superseded == 2, "the first sees the second")
    at = time.time()
    until(lambda: all_step(groups, at, 4), "all groups go on")
    assert second.address == first.address and first.record.restarts == 0
    left = processes.marked("FTSUPERVISE_LIGHTHOUSE").get(str(scene.home), [])
    assert [one.pid for one in left] == [second.record.pid]
    page = read_lighthouse(scene.home)
    assert page is not None and (page.generation, page.pid) == (2, second.record.pid)


@pytest.mark.fault("The lighthouse's supervisor is killed", "the lighthouse ends with it, also while it is stopped")
@pytest.mark.parametrize("stopped", [False, True], ids=["running", "stopped"])
def test_a_lighthouse_ends_with_its_supervisor(scene: Scene, stopped: bool, until: Until) -> None:
    program = f"""
import sys, time
from pathlib import Path
from ftsupervise.replicas.lighthouse import LighthousePlace, SupervisedLighthouse
from ftsupervise.replicas.bounds import derive
place = LighthousePlace(Path({str(scene.home)!r}), "127.0.0.1", 4, 3, derive(1.0))
print(SupervisedLighthouse(place, sys.executable, lambda words: None).start().pid, flush=True)
time.sleep(600)
"""
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        found = processes.process(pid)
        assert found is not None
        if stopped:
            os.kill(pid, signal.SIGSTOP)
        parent.kill()
    until(lambda: not processes.lives(pid, found.start), "it is gone")


@pytest.mark.fault("The lighthouse and a group die together", "the others go on")
def test_groups_that_die_with_the_lighthouse_or_after_it_are_not_waited_for(scene: Scene, until: Until) -> None:
    lighthouse = scene.lighthouse(least=2)
    groups = scene.groups(lighthouse)
    together(groups, until)
    at = time.time()
    groups[3].kill()
    os.kill(lighthouse.record.pid, signal.SIGKILL)
    until(lambda: all_step(groups[:3], at, 3), "three go on")
    assert max(group.since(at + 0.2)[0].at for group in groups[:3]) - at < 8
    at = time.time()
    groups[2].kill()
    until(lambda: all_step(groups[:2], at, 2), "two go on")
    assert max(group.since(at + 0.2)[0].at for group in groups[:2]) - at < 5
    assert lighthouse.record.restarts == 1


# ------------------------------------------------------------------------------------------- what the lighthouse believes


def page_of(lighthouse: SupervisedLighthouse) -> LighthousePage | None:
    page = lighthouse.page()
    return page if isinstance(page, LighthousePage) else None


@pytest.mark.fault(
    "A group tells the lighthouse a step that it has not made",
    "it is named; the others go on when it is ended",
)
def test_a_manager_that_lies_about_its_step_is_named_and_the_others_go_on_when_it_is_ended(
    scene: Scene, until: Until
) -> None:
    lighthouse = scene.lighthouse()
    honest = [scene.group(lighthouse, name) for name in NAMES[:3]]
    together(honest, until)
    liar = scene.group(lighthouse, "g003", first=10**9)
    until(lambda: any(step.highest >= 10**9 for step in honest[0].steps()), "the lighthouse believes it")
    assert any(step.heal for group in honest for step in group.steps()), "the others would take its weights"

    def accused() -> set[str]:
        steps: dict[str, int | None] = dict.fromkeys(NAMES[:3]) | {"g003": 7}  # what its ranks have told us
        page = page_of(lighthouse)
        return (
            {one.group for one in suspects(page, steps, 2.0) if one.trouble is MemberTrouble.AHEAD} if page else set()
        )

    assert until(accused, "it is named") == {"g003"}
    liar.end()
    at = time.time()
    until(lambda: all_step(honest, at, 3), "the others go on")


@pytest.mark.threat(
    "A manager of another training joins the quorum, or calls itself like a group of the run.",
    "Both are named in the log.",
)
def test_two_starts_of_one_group_and_a_stranger_are_named(scene: Scene, until: Until) -> None:
    lighthouse = scene.lighthouse()
    for name in (*NAMES[:3], "g001", "x;rm -rf"):
        scene.group(lighthouse, name)

    def named() -> set[tuple[str, MemberTrouble]]:
        page = page_of(lighthouse)
        return {(one.group, one.trouble) for one in suspects(page, dict.fromkeys(NAMES), 2.0)} if page else set()

    wanted = {("g001", MemberTrouble.TWICE), ("x;rm -rf", MemberTrouble.UNKNOWN)}
    until(lambda: named() == wanted, "both are named")


@pytest.mark.fault("The store of a group is gone, and its manager reports that all is well", "the group is named")
def test_a_group_whose_store_is_gone_is_named(scene: Scene, until: Until) -> None:
    """Where another process than the manager's holds the store, as under torchrun: the manager reports that all is well."""
    store = subprocess.Popen([sys.executable, "-c", STORE], stdout=subprocess.PIPE, text=True)
    assert store.stdout is not None
    try:
        address = f"127.0.0.1:{store.stdout.readline().strip()}"
        lighthouse = scene.lighthouse()
        groups = [scene.group(lighthouse, name, store=address if name == "g002" else "127.0.0.1:1") for name in NAMES]
        together(groups, until)
        page = until(lambda: (p := page_of(lighthouse)) and len(p.members) == 4 and p, "all are members")
        assert {one.store for one in page.members if one.group == "g002"} == {address}
        watch = StoreWatch(lighthouse.page, ["127.0.0.1"], every=0.2)
        assert store_answers(address, {"127.0.0.1": "127.0.0.1"}, 1.0) is True
    finally:
        store.kill()
        store.wait(20)
        store.stdout.close()
    until(lambda: address in watch.silent, "it does not answer")
    found = suspects(page, dict.fromkeys(NAMES), 10.0, watch.silent)
    watch.close()
    assert ("g002", MemberTrouble.STORE) in [(one.group, one.trouble) for one in found]
