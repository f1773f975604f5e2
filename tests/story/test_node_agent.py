"""The node agent with real ranks, real datagrams and a network that loses them."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.ranks import protocol, shm_dir
from ftsupervise.ranks.protocol import Datagram, Seal
from ftsupervise.ranks.rpc import read_killed
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR
from tests.story.agent_scene import Stage, gone

Until = Callable[..., Any]


@pytest.fixture
def stage() -> Iterator[Stage]:
    one = Stage()
    try:
        yield one
    finally:
        one.close()


def test_every_ranks_newest_step_arrives_with_its_state_and_its_cpu(stage: Stage, until: Until) -> None:
    stage.agent()
    ranks = [stage.rank(number) for number in range(3)]
    until(lambda: all(stage.step(number) > 20 for number in range(3)))
    found = {one.rank: one for one in stage.pulses.newest()}
    assert [found[number].pid for number in range(3)] == [one.pid for one in ranks]
    assert {one.node for one in found.values()} == {"node-1"}
    assert all(one.state in "RSD" and one.cpu is not None for one in found.values())
    assert all(one.stepped <= one.beaten <= one.seen <= time.monotonic() for one in found.values())
    ranks[1].send_signal(signal.SIGSTOP)
    until(lambda: {one.rank: one.state for one in stage.pulses.newest()}[1] == "T", "the stopped rank")


def test_while_its_ranks_stand_still_it_speaks_more_often_and_not_for_ever(stage: Stage, until: Until) -> None:
    def words(seconds: float) -> float:
        """So many a second."""
        seen = set()
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            seen |= {one.seen for one in stage.pulses.newest()}
            time.sleep(0.005)
        return len(seen) / seconds

    stage.agent("--every", "0.25", "--closer", "0.05")
    rank = stage.rank(0)
    until(lambda: stage.step(0) > 20)
    until(lambda: words(1.5) <= 6, "few words as long as it steps")
    rank.send_signal(signal.SIGSTOP)
    until(lambda: words(0.5) >= 10, "more words")
    until(lambda: words(1) <= 5, "as many as before, after a quarter of a minute", 60)


def test_a_killed_rank_is_told_at_once(stage: Stage, until: Until) -> None:
    stage.agent()
    rank = stage.rank(5)
    until(lambda: stage.step(5))
    struck = time.monotonic()
    rank.kill()
    (death,) = until(stage.pulses.deaths)
    print(f"from the kill to the ring: {(time.monotonic() - struck) * 1e3:.0f} ms (looked at each 50 ms)")
    assert (death.rank, death.pid, death.node, death.crash) == (5, rank.pid, "node-1", True)
    assert death.code in (None, -9), "older kernels do not say"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("fails(Guard(), ValueError('a')).nothing", 1),
        ("guard = Guard()\ntime.sleep(0.3)\nraise ValueError('without a block')", 1),
        ("fails(Guard(), SystemExit(16))", 16),
        ("fails(Guard(), SystemExit('in words'))", 1),
    ],
)
def test_a_rank_that_ends_for_a_failure_is_told_before_its_teardown_is_over(
    stage: Stage, until: Until, tmp_path: Path, how: str, code: int
) -> None:
    stage.agent()
    rank = stage.ends(how, tmp_path / "go", tmp_path / "run")
    (death,) = until(stage.pulses.deaths)
    assert (death.rank, death.pid, death.code, death.crash) == (0, rank.pid, code, True)
    assert rank.poll() is None, "it hangs in its teardown"
    (tmp_path / "go").touch()
    assert rank.wait(20) == code
    time.sleep(0.3)
    assert stage.pulses.deaths() == [], "told once"


@pytest.mark.parametrize(
    ("how", "code"),
    [
        ("try: fails(Guard(), KeyError('a'))\nexcept KeyError: pass", 0),
        ("fails(Guard(), SystemExit(0))", 0),
        ("fails(Guard(), SystemExit(None))", 0),
        ("printed()\nassert isinstance(sys.last_value, ValueError)\nfails(Guard(), SystemExit(0))", 0),
        ("Guard().step(1)\ntime.sleep(0.3)", 0),
        ("guard = Guard()\nguard.step(1)\nguard.finished(1)\nraise ValueError('in the export')", 1),
        ("with Guard() as guard:\n  guard.step(1)\n  guard.finished(1)\n  sys.exit(3)", 3),
    ],
)
def test_a_rank_that_leaves_in_order_is_told_when_it_has_ended(
    stage: Stage, until: Until, tmp_path: Path, how: str, code: int
) -> None:
    stage.agent()
    rank = stage.ends(how, tmp_path / "go", tmp_path / "run")
    until(lambda: [one for one in stage.pulses.newest() if one.leaving], "its last words")
    time.sleep(0.5)
    assert stage.pulses.deaths() == [] and rank.poll() is None
    (tmp_path / "go").touch()
    (death,) = until(stage.pulses.deaths)
    assert not death.crash
    assert rank.wait(20) == code


@pytest.mark.parametrize("why", ["FILL", "IDLE"])
def test_who_was_dying_before_is_told_with_a_kill(stage: Stage, until: Until, tmp_path: Path, why: str) -> None:
    """Its memory is freed before its process is gone, or it has not even been its turn since it was killed."""
    stage.agent()
    mark: dict[str, Any] = {ENV_ATTEMPT_DIR: str(tmp_path / "1")}
    about: dict[str, Any] = {why: "600"}
    heavy = stage.rank(0, **about, **mark)
    light = stage.rank(1, **mark)
    until(lambda: stage.step(0) and stage.step(1))
    if why == "IDLE":
        stage.hog()
    heavy.kill()
    for number in (7, 8):
        answer = stage.ask(number, f"kill {tmp_path / '1'}")
        done, dying = read_killed(str(until(answer)), "node-1")
        assert done
        assert [(one.rank, one.pid) for one in dying] == [(0, heavy.pid)], "and not who was killed by the first kill"
        assert dying[0].code in (-9, None)
    assert light.wait(20) == -9


@pytest.mark.parametrize(
    ("how", "crash"),
    [
        ("try: fails(Guard(), KeyError('a'))\nexcept KeyError: sys.exit(3)", True),  # it handles its own failure
        (
            "guard = Guard()\ntry: fails(guard, SystemExit(3))\nexcept SystemExit: pass\nguard.finished(2)\nsys.exit(3)",
            False,
        ),
        (
            (
                "guard = Guard()\nguard.step(1)\ntime.sleep(0.3)\nif not os.fork(): fails(guard, SystemExit(4))\n"
                "os.wait()\nguard.finished(1)\nsys.exit(3)"
            ),
            False,
        ),
    ],
)
def test_what_was_caught_or_happened_in_a_child_is_not_told_early(
    stage: Stage, until: Until, tmp_path: Path, how: str, crash: bool
) -> None:
    stage.agent()
    rank = stage.ends(f"import os\n{how}", tmp_path / "go", tmp_path / "run")
    until(lambda: [one for one in stage.pulses.newest() if one.state], "it to be seen alive")
    (tmp_path / "go").touch()
    (death,) = until(stage.pulses.deaths)
    assert rank.wait(20) == 3
    assert death.crash is crash


def test_a_rank_that_others_may_start_again_is_gone_and_no_crash(stage: Stage, until: Until) -> None:
    stage.agent()
    rank = stage.rank(5, TORCHELASTIC_MAX_RESTARTS="3")
    until(lambda: stage.step(5))
    rank.kill()
    (death,) = until(stage.pulses.deaths)
    assert not death.crash
    rank = stage.rank(5, TORCHELASTIC_MAX_RESTARTS="3")
    until(lambda: [one.pid for one in stage.pulses.newest() if one.state != "X"] == [rank.pid])


@pytest.mark.fault("Half of all datagrams are lost", "neither progress nor a death is missed")
def test_half_of_all_datagrams_lost_neither_hides_progress_nor_a_death(stage: Stage, until: Until) -> None:
    relay = stage.relay(lambda number: number % 2 == 0)
    stage.agent(port=relay.port)
    rank = stage.rank(0)
    until(lambda: stage.step(0) > 50)
    until(lambda: relay.lost > 20)
    rank.kill()
    (death,) = until(stage.pulses.deaths)
    assert death.crash
    assert relay.lost > relay.count // 3


@pytest.mark.fault("The network between the nodes lets nothing through", "ranks are unknown, not dead")
def test_a_network_that_lets_nothing_through_makes_ranks_unknown_and_not_dead(stage: Stage, until: Until) -> None:
    relay = stage.relay(lambda number: True)
    stage.agent(port=relay.port)
    rank = stage.rank(0)
    until(lambda: relay.lost > 10)
    rank.kill()
    until(lambda: relay.lost > 30)
    assert stage.pulses.newest() == []
    assert stage.pulses.deaths() == []
    assert stage.pulses.silent(["node-1"], 0.1) == ["node-1"]


def test_the_agent_follows_from_attempt_to_attempt_and_clears_behind_it(stage: Stage, until: Until) -> None:
    stage.agent()
    first = stage.rank(0, attempt=1)
    until(lambda: stage.step(0))
    first.kill()
    stage.pulses.begin(2)
    stage.rank(0, attempt=2)
    until(lambda: stage.step(0))
    until(
        lambda: [name for name in os.listdir(stage.base) if name.isdigit()] == ["2"],
        "the pages of attempt 1 to be gone",
    )
    assert all(one.pid == stage.started[-1].pid for one in stage.pulses.newest())


def test_of_two_addresses_the_one_that_answers_is_found(stage: Stage, until: Until) -> None:
    stage.agent(to="192.0.2.1,no-such-host.invalid,127.0.0.1")
    stage.rank(0)
    until(lambda: stage.step(0))


def test_told_to_leave_by_slurm_it_stays_while_there_are_ranks_and_leaves_no_page(stage: Stage, until: Until) -> None:
    agent = stage.agent()
    rank = stage.rank(0)
    until(lambda: stage.step(0))
    agent.terminate()
    until(lambda: gone(stage.base), "the pages to be gone")
    before = stage.step(0)
    until(lambda: stage.step(0) > before, "news all the same")
    rank.kill()
    assert until(stage.pulses.deaths)[0].rank == 0
    assert agent.wait(20) == 0


@pytest.mark.parametrize("gone_", ["1/rank-0", "1", "."])
def test_a_rank_whose_page_is_removed_is_followed_on(stage: Stage, until: Until, gone_: str) -> None:
    """A name in memory is gone, the rank is not: its steps and its death are told all the same."""
    stage.agent()
    rank = stage.rank(0)
    until(lambda: stage.step(0))
    place = Path(stage.base, gone_)
    shutil.rmtree(place) if place.is_dir() else place.unlink()
    time.sleep(0.2)
    before = stage.step(0)
    until(lambda: stage.step(0) > before + 20, "news all the same")
    rank.kill()
    assert until(stage.pulses.deaths)[0].pid == rank.pid


@pytest.mark.parametrize("how", ["Slurm's SIGTERM", "the ring's word"])
def test_an_agent_that_leaves_takes_no_page_of_another_node_with_it(stage: Stage, until: Until, how: str) -> None:
    """The nodes of a test cluster share their memory. One without ranks is left, and the other one's agent is started again."""
    agent, leaves = stage.agent(), stage.agent(SLURMD_NODENAME="node-2")
    rank = stage.rank(0, SLURMD_NODENAME="node-1")
    until(lambda: stage.step(0) and b"node-2" in stage.pulses.nodes)
    time.sleep(0.3)  # both have seen it
    if how == "Slurm's SIGTERM":
        leaves.terminate()
    else:
        to = stage.pulses.nodes[b"node-2"].address
        assert to is not None
        stage.sock.sendto(stage.pulses.pack(protocol.BYE, 1, b"node-2", b""), to)
    assert leaves.wait(20) == 0
    assert Path(stage.base, "1", "rank-0").exists()
    agent.kill()
    agent.wait()
    stage.pulses.restart(1)
    stage.agent()
    until(lambda: stage.step(0), "the new agent to find it")
    rank.kill()
    assert until(stage.pulses.deaths)[0].pid == rank.pid


def test_it_ends_when_the_ring_says_so_and_when_the_ring_is_silent(stage: Stage, until: Until) -> None:
    told, left = stage.agent(), stage.agent("--lost", "1", port=9, SLURMD_NODENAME="node-2")
    until(lambda: b"node-1" in stage.pulses.nodes)
    node = stage.pulses.nodes[b"node-1"]
    assert node.address is not None
    stage.sock.sendto(stage.pulses.pack(protocol.BYE, 1, b"node-1", b""), node.address)
    assert told.wait(20) == 0
    assert left.wait(20) == 0
    assert gone(stage.base)


def test_it_answers_and_not_twice(stage: Stage, until: Until, tmp_path: Path) -> None:
    stage.agent()
    here: dict[str, Any] = {ENV_ATTEMPT_DIR: str(tmp_path), "SLURMD_NODENAME": "node-1"}
    mine = stage.rank(0, **here)
    other = stage.rank(1, **{**here, "SLURMD_NODENAME": "node-2"})
    until(lambda: stage.step(0))
    assert until(stage.ask(1, "ping")) == "here"
    assert until(stage.ask(2, "what is this")) == "no such question: what"
    assert until(stage.ask(3, f"kill {tmp_path}")) == "1"
    assert mine.wait(20) == -signal.SIGKILL
    again = stage.rank(2, **here)
    until(lambda: stage.step(2))
    assert until(stage.ask(3, f"kill {tmp_path}")) == "1", "the old answer"
    assert until(stage.ask(4, "ping")) == "here"
    stage.ask(3, f"kill {tmp_path}")()
    before = stage.step(2)
    until(lambda: stage.step(2) > before + 20, "nobody is killed by a question that was asked before")
    assert (again.poll(), other.poll()) == (None, None)


@pytest.mark.threat(
    "Somebody sends forged datagrams to a node agent.",
    "All datagrams are sealed with a key that only this supervisor has. The agent ignores all others.",
)
def test_who_lacks_the_key_is_neither_heard_nor_obeyed(stage: Stage, until: Until) -> None:
    agent, rank = stage.agent(), stage.rank(0)
    until(lambda: stage.step(0))
    node = stage.pulses.nodes[b"node-1"]
    assert node.address is not None
    forged = Seal(bytes(32))
    with socket.socket(socket.AF_INET6, socket.SOCK_DGRAM) as stranger:
        for kind, body in (
            (protocol.BYE, b""),
            (protocol.ASK, f"kill {Path.cwd()}".encode()),
            (protocol.ACK, b"x" * 3),
        ):
            stranger.sendto(forged.pack(Datagram(kind, 0, 1, 1, 1, 99, b"node-1", body)), node.address)
        gone_ = protocol.pack_exits([protocol.RankExit(0, "", rank.pid, 0.0, -9, False, False, True)], 0.0)
        for _ in range(50):
            stranger.sendto(forged.pack(Datagram(protocol.EXIT, 0, 1, 1, 1, 99, b"node-1", gone_)), ("::1", stage.port))
            stranger.sendto(b"\0" * 1000, ("::1", stage.port))
    before = stage.step(0)
    until(lambda: stage.pulses.dropped["forged or damaged"] == 100)
    until(lambda: stage.step(0) > before + 20)
    assert stage.pulses.deaths() == []
    assert agent.poll() is None


@pytest.mark.threat("Another account makes pages in shared memory.", "The node agent does not read them.")
def test_pages_that_others_could_have_made_are_not_read(stage: Stage, until: Until) -> None:
    stage.agent()
    stage.rank(0)
    until(lambda: stage.step(0))
    Path(stage.base).chmod(0o777)
    until(lambda: stage.pulses.newest()[0].seen < time.monotonic() - 1, "nothing new to be heard of it")
    assert stage.pulses.deaths() == []
    Path(stage.base).chmod(0o700)


@pytest.mark.parametrize("words", [[], ["--port", "x"], ["--base"], ["--what", "1"]])
def test_without_sensible_words_or_a_key_it_says_how_it_is_used(words: list[str]) -> None:
    done = subprocess.run([sys.executable, "-m", "ftsupervise.ranks", *words], capture_output=True, text=True)
    assert done.returncode == 2
    assert "usage:" in done.stderr


def test_what_a_killed_run_left_in_memory_is_swept_by_the_next(tmp_path: Path) -> None:
    left, held = (Path(shm_dir.new_base(str(tmp_path))) for _ in range(2))
    for base in (left, held):
        (base / "1").mkdir(parents=True, mode=0o700)
        base.chmod(0o700)
        (base / "1" / "rank-0").touch()
        os.utime(base, (1, 1))
    fd = shm_dir.create_locked(str(held))
    try:
        shm_dir.remove_stale(str(tmp_path))
    finally:
        os.close(fd or 0)
    assert os.listdir(tmp_path) == [held.name]


def test_it_is_small(stage: Stage, until: Until) -> None:
    agent = stage.agent()
    stage.rank(0)
    until(lambda: stage.step(0))
    text = Path(f"/proc/{agent.pid}/smaps_rollup").read_text()
    pss = int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])
    print(f"the agent: {pss} kB")
    assert pss <= 10_000
