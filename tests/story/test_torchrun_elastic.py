"""torchrun's own elasticity: nodes die, come back and are added; in each group all ranks save and leave together."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from ftsupervise.checkpoints.manifest import read_manifest
from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import of_the_group, read_beats
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.supervised import SupervisedRun, outside_a_job

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
TORCHRUN = Path(sys.executable).with_name("torchrun")
RANKS = Path(__file__).with_name("elastic_ranks.py")
CONF = "last_call_timeout=1,keep_alive_interval=1,keep_alive_max_attempt=3,join_timeout=120"


class Round(NamedTuple):
    """What one rank noted in one group that torchrun formed."""

    world: int
    pid: int
    since: float
    step: int
    said: tuple[str, ...]  # the steps at which it was to save or to stop


def rounds(log: Path) -> dict[str, dict[int, Round]]:
    """Group -> rank -> what it noted; the oldest group first."""
    found: dict[str, dict[int, Round]] = {}
    for path in log.iterdir():
        name, _, rank = path.name.rpartition("-")
        head, *lines = path.read_text().splitlines() or [""]
        if started := re.fullmatch(r"world (\d+) pid (\d+) since ([\d.]+)", head):
            said = tuple(line for line in lines if not line.endswith("CONTINUE"))
            step = int(lines[-1].split()[1]) if lines else 0
            found.setdefault(name, {})[int(rank)] = Round(
                int(started[1]), int(started[2]), float(started[3]), step, said
            )
    return dict(sorted(found.items(), key=lambda one: max(rank.since for rank in one[1].values())))


def disagreements(log: Path) -> list[str]:
    """Groups in which ranks that came to the same steps did different things there."""
    bad = []
    for name, ranks in rounds(log).items():
        common = min(one.step for one in ranks.values())
        said = {tuple(word for word in one.said if int(word.split()[1]) <= common) for one in ranks.values()}
        ended = {one.said[-1] for one in ranks.values() if one.said and one.said[-1].endswith("STOP")}
        if len(said) > 1 or len(ended) > 1:
            bad.append(f"{name}: {ranks}")
    return bad


class Nodes:
    """Agents of torchrun on this machine, one for each node."""

    def __init__(self, folder: Path) -> None:
        self.log, self.rundir = folder / "log", RunDir(folder / "run")
        for place in (self.log, self.rundir.switches, self.rundir.beats, self.rundir.state):
            place.mkdir(parents=True)
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self._port = probe.getsockname()[1]
        self._folder, self.agents = folder, dict[int, subprocess.Popen[bytes]]()

    def start(self, node: int) -> None:
        words = [str(TORCHRUN), "--nnodes=1:4", "--nproc-per-node=1", "--max-restarts=20", "--rdzv-backend=c10d"]
        words += [
            f"--rdzv-endpoint=127.0.0.1:{self._port}",
            "--rdzv-id=elastic",
            f"--rdzv-conf={CONF},is_host={int(not node)}",
        ]
        words += ["--local-addr=127.0.0.1", "--monitor-interval=0.1", str(RANKS), str(self.log)]
        env = outside_a_job(
            FTSUPERVISE_RUN_DIR=str(self.rundir.root),
            GLOO_SOCKET_IFNAME="lo",
            OMP_NUM_THREADS="1",
            TORCH_DISABLE_SHARE_RDZV_TCP_STORE="1",  # as ``ftsupervise run`` sets it
        )
        with (self._folder / f"agent-{node}.out").open("ab") as out:
            self.agents[node] = subprocess.Popen(words, env=env, stdout=out, stderr=out, start_new_session=True)

    def lose(self, node: int) -> None:
        agent = self.agents.pop(node)
        for pid in (*processes.below(agent.pid), agent.pid):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        agent.wait(30)

    def trains(self, world: int, *, without: int = 0) -> dict[int, Round] | None:
        """The newest group, once it has so many ranks and each has made steps; ``without``: a process that is not in it."""
        found = list(rounds(self.log).values())
        newest = found[-1] if found else {}
        ready = len(newest) == world and all(one.world == world and one.step >= 20 for one in newest.values())
        alive = all(processes.identity(one.pid) is not None for one in newest.values())
        return newest if ready and alive and without not in [one.pid for one in newest.values()] else None

    def save(self, until: Until) -> None:
        switch = self.rundir.switches / "save-switch"
        switch.touch()
        until(lambda: not switch.exists(), "the save switch is taken down", 60)

    def stop(self) -> None:
        (self.rundir.switches / "kill-switch").touch()
        for agent in self.agents.values():
            assert agent.wait(120) == 0, self.said()

    def said(self) -> str:
        return "".join(path.read_text()[-3000:] for path in sorted(self._folder.glob("agent-*.out")))


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    one = Nodes(tmp_path)
    yield one
    for node in list(one.agents):
        one.lose(node)


@pytest.mark.slow
def test_a_group_that_has_shrunk_saves_and_leaves_together(nodes: Nodes, until: Until) -> None:
    for node in range(3):
        nodes.start(node)
    until(lambda: nodes.trains(3), "three nodes", 120)
    nodes.lose(2)  # not node 0, which holds the rendezvous
    until(lambda: nodes.trains(2), "the two that are left", 120)
    nodes.save(until)
    assert len(of_the_group(read_beats(nodes.rundir))) == 2
    nodes.stop()
    assert disagreements(nodes.log) == []
    last = list(rounds(nodes.log).values())[-1]
    assert [said.split()[2] for said in last[0].said] == ["SAVE", "STOP"] and last[0].said == last[1].said


@pytest.mark.fault(
    "Nodes under torchrun die, come back and are added",
    "in each group all ranks save and leave at the same step",
)
@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_nodes_that_die_and_come_back_at_random_never_part_the_ranks(nodes: Nodes, until: Until) -> None:
    seed = int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 32)))
    draw = random.Random(seed)
    print(f"SEED={seed}")
    nodes.start(0)
    nodes.start(1)
    done: list[str] = []
    for _ in range(int(os.environ.get("TURNS", "12"))):
        now = until(lambda: nodes.trains(len(nodes.agents)), f"{len(nodes.agents)} nodes after {done}", 180)
        free = [node for node in (1, 2, 3) if node not in nodes.agents]
        how = draw.choice([*(["shrink"] if len(nodes.agents) > 2 else []), *(["grow"] if free else []), "rank", "save"])
        if how == "shrink":
            nodes.lose(draw.choice([node for node in nodes.agents if node]))
        elif how == "grow":
            nodes.start(draw.choice(free))
        elif how == "rank":
            pid = draw.choice([one.pid for one in now.values()])
            os.kill(pid, signal.SIGKILL)
            until(lambda: nodes.trains(len(nodes.agents), without=pid), f"the ranks again after {done}", 180)  # noqa: B023
        else:
            nodes.save(until)
        done.append(how)
    until(lambda: nodes.trains(len(nodes.agents)), "the end", 180)
    nodes.stop()
    print(done, {name: (len(ranks), ranks[0].step) for name, ranks in rounds(nodes.log).items()})
    assert disagreements(nodes.log) == []


@pytest.mark.fault(
    "torchrun starts its ranks again by itself, then is killed",
    "the ranks of each group agree anew; the second is an attempt in the ledger, the first is not",
)
def test_ranks_agree_through_the_restarts_of_torchrun_and_through_ours(
    run: SupervisedRun, tmp_path: Path, until: Until, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    (log := tmp_path / "log").mkdir()
    words = ("--standalone", "--nproc-per-node=2", "--max-restarts=3", "--monitor-interval=0.1", str(RANKS), str(log))
    one = run.start("--in-place", "2", "--back-off", "0", "--", str(TORCHRUN), *words)

    def group(number: int, without: int = 0) -> dict[int, Round] | None:
        found = [ranks for name, ranks in rounds(log).items() if name.startswith(f"{number}-")]
        good = found and len(found[-1]) == 2 and all(rank.step >= 20 for rank in found[-1].values())
        return found[-1] if good and without not in [rank.pid for rank in found[-1].values()] else None

    first = until(lambda: group(1), "the first group", 120)
    os.kill(killed := first[1].pid, signal.SIGKILL)
    second = until(lambda: group(1, killed), "torchrun's own restart", 120)
    assert len(run.attempts()) == 1, "it is no attempt of ours"
    os.kill(parent(second[0].pid), signal.SIGKILL)
    until(lambda: group(2), "our restart, in place", 120)
    (run.rundir.switches / "save-switch").touch()
    until(lambda: not (run.rundir.switches / "save-switch").exists(), "a save", 60)
    (run.rundir.switches / "kill-switch").touch()
    assert one.wait(60) == 0, one.said()
    assert disagreements(log) == []
    assert [attempt.number for attempt in run.attempts()] == [1, 2]
    assert run.attempts()[0].sign == "killed by SIGKILL"


# Rank 1 of the first start lists its part of step 20 and dies; in the second start rank 0 saves alone before rank 1 comes.
PARTS = """
import os, signal, sys, time
from pathlib import Path
from ftsupervise import Guard
from ftsupervise.checkpoints import rank_lists
rank, word = int(os.environ["RANK"]), "old" if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0" else "new"
done = Path(os.environ["FTSUPERVISE_CHECKPOINT_DIR"], "step-00000020")
def wait():
    while not done.exists():
        time.sleep(0.01)
if word == "old" and rank == 1:
    leave_list = rank_lists.leave_list
    rank_lists.leave_list = lambda *given: (leave_list(*given), os.kill(os.getpid(), signal.SIGKILL))
if (word == "old") != (rank == 1):
    wait()
    sys.exit()
with Guard(signals=()) as guard, guard.checkpoint(20) as folder:
    (folder / f"part-rank{rank}.bin").write_text(word)
"""


def test_a_part_that_was_left_before_torchrun_started_its_ranks_again_is_in_no_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("FTSUPERVISE_CHECKPOINT_DIR", str(tmp_path / "ckpt"))
    monkeypatch.delenv("FTSUPERVISE_RUN_DIR", raising=False)
    (script := tmp_path / "parts.py").write_text(PARTS)
    words = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1", str(script)]
    done = subprocess.run([str(TORCHRUN), *words], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    made = read_manifest(tmp_path / "ckpt" / "step-00000020")
    assert made is not None and [one.path for one in made.files] == ["part-rank0.bin"]


def parent(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
