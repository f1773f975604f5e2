"""torchrun on several nodes, where torch is installed: it meets by itself, is ended as a whole, shrinks and grows."""

from __future__ import annotations

import importlib.util
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_ATTEMPT_DIR, RunDir
from tests.manual.blocks import ROOT
from tests.manual.stories import Story
from tests.neighbours.supervised import outside_a_job
from tests.slurm.ring_scene import Scene

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
Until = Callable[..., Any]
EXAMPLE = ROOT / "examples" / "torchrun"
TORCHRUN = Path(sys.executable).with_name("torchrun")


@pytest.fixture(autouse=True)
def on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def weights(text: str) -> str:
    found = re.search(r"weights (\w+)", text)
    assert found, text
    return found[1]


def undisturbed(folder: Path, ranks: int, *words: str) -> str:
    env = outside_a_job(FTSUPERVISE_CHECKPOINT_DIR=str(folder / "alone"))
    command = [str(TORCHRUN), "--standalone", f"--nproc-per-node={ranks}", "train.py", "--step-time", "0", *words]
    return weights(
        subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=True).stdout
    )


def of_attempt(here: Scene, number: int, word: str) -> list[int]:
    """Processes of an attempt with ``word`` in their command line."""
    found = []
    for one in processes.marked(ENV_ATTEMPT_DIR).get(str(here.rundir.attempt(number)), []):
        try:
            line = Path(f"/proc/{one.pid}/cmdline").read_bytes()
        except OSError:
            continue
        if word.encode() in line:
            found.append(one.pid)
    return found


@pytest.mark.fault(
    "A torchrun is killed; then a node is lost and there is no spare",
    "nothing is left of its ranks; the run goes on with one node fewer, and with all in the next job",
)
@pytest.mark.slurm
def test_a_torchrun_on_two_nodes_is_ended_as_a_whole_and_goes_on_with_one_and_with_two(
    scene: Callable[..., Scene], until: Until
) -> None:
    """Its agent is killed, then a node is lost: it shrinks; the next job has both nodes again."""
    here = scene(nodes=2)
    shutil.copy(EXAMPLE / "train.py", here.folder)
    command = f"{TORCHRUN} --nproc-per-node=1 train.py --steps 100000 --step-time 0.02 --save-every 20"
    here.launch(command, tasks_per_node=1, min_nodes=1, jobs=2, restart={"back_off": "0s"})
    until(lambda: here.trains(1), "attempt 1", 180)
    agents = of_attempt(here, 1, "torchrun")
    ranks = here.trains(1)
    os.kill(next(pid for pid in agents if pid not in ranks.values()), signal.SIGKILL)
    until(lambda: here.trains(2), "attempt 2", 180)
    assert not [pid for pid in ranks.values() if processes.identity(pid) is not None]
    assert not of_attempt(here, 1, "train.py")
    here.lose("node-1")
    until(lambda: here.trains(3, 1), "attempt 3, on the node that is left", 180)
    until(lambda: "at world size 1" in here.log(), "its first line, which goes through torchrun and srun", 60)
    assert here.attempts()[2].nodes == ("node-0",)
    here.sandbox.node("node-1", "start")
    here.sandbox.run(["scancel", "--state=RUNNING", f"--name={here.name}"])
    until(lambda: here.trains(4), "attempt 4, in the next job", 240)
    (here.rundir.switches / "kill-switch").touch()
    until(lambda: here.attempts()[-1].ended, "the end", 120)
    assert re.findall(r"at world size (\d)", here.log()) == ["2", "2", "1", "2"]
    failure = here.attempts()[1].failure
    assert failure is not None and failure.kind.value == "node"


@pytest.mark.slurm
def test_plain_python_under_srun_needs_no_line_to_make_its_group(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=2)
    lines = ("import os, torch, torch.distributed as dist", 'dist.init_process_group("gloo")', "one = torch.ones(1)")
    more = ("dist.all_reduce(one)", "os.write(1, f'rank {dist.get_rank()} sum {int(one)}\\n'.encode())")
    (here.folder / "plain.py").write_text("\n".join((*lines, *more, "dist.barrier()")))
    here.launch(f"{sys.executable} plain.py", tasks_per_node=2, jobs=1, restart={"in_place": 0})
    until(lambda: here.attempts() and here.attempts()[-1].ended, "the end", 180)
    assert sorted(re.findall(r"rank (\d) sum (\d)", here.log())) == [(str(rank), "4") for rank in range(4)]


def test_what_torchruns_rank_said_before_it_failed_is_in_the_ledger(tmp_path: Path, run: Any) -> None:
    """Through @record and TORCHELASTIC_ERROR_FILE; the rendezvous needs no option."""
    shutil.copy(EXAMPLE / "train.py", tmp_path)
    before = "        decision = guard.step(step)"
    fails = "        if rank and step == 5:\n            raise ValueError('no such shape')\n"
    text = (tmp_path / "train.py").read_text().replace(before, fails + before)
    (tmp_path / "train.py").write_text(text)
    one = run.start(str(TORCHRUN), "--nproc-per-node=2", "train.py", "--steps", "100")
    assert one.wait(120) == 1
    (attempt,) = run.attempts()
    assert attempt.sign == "exit 1 (ValueError)"
    assert attempt.words.startswith("rank 1 on ")


def test_the_torchrun_example_is_run_as_its_page_says(tmp_path: Path) -> None:
    story = Story("torchrun", tmp_path / "torchrun", dict(os.environ))
    story.run_name = "torchrun"
    for name in ("train.py", "ftsupervise.yaml"):
        shutil.copy(EXAMPLE / name, story.place)
    config = story.place / "ftsupervise.yaml"
    config.write_text(config.read_text() + "scheduler: local\n")
    try:
        story.tell()
    finally:
        story.close()
    assert not RunDir(story.run).finished.exists()


@pytest.mark.slurm
@pytest.mark.slow
def test_a_torchrun_that_is_interrupted_five_times_ends_with_the_same_bits(
    scene: Callable[..., Scene], until: Until
) -> None:
    here, seed = scene(nodes=2), int(os.environ.get("SEED", random.SystemRandom().randrange(1 << 32)))
    draw, steps = random.Random(seed), 700
    print(f"SEED={seed}")
    shutil.copy(EXAMPLE / "train.py", here.folder)
    words = f"{TORCHRUN} --nproc-per-node=2 train.py --steps {steps} --step-time 0.03 --save-every 20 --log-every 1"
    here.launch(words, tasks_per_node=1, jobs=10, restart={"back_off": "0s"})
    done = []
    for number in range(5):
        at = steps * (number + 1) // 7 + draw.randrange(steps // 7)
        until(lambda: newest_step(here) >= at, f"step {at}", 400)  # noqa: B023
        done.append(interrupt(here, draw, until))
    until(here.rundir.finished.exists, f"the end after {done}", 400)
    assert weights(here.log()) == undisturbed(here.folder, 4, "--steps", str(steps)), done
    print(done, [(one.number, one.sign, one.last_step) for one in here.attempts()])


def newest_step(here: Scene) -> int:
    return max((int(step) for step in re.findall(r"^step (\d+) ", here.log(), re.M)), default=0)


def interrupt(here: Scene, draw: random.Random, until: Until) -> str:
    how = draw.choice(["rank", "agent", "stop a rank", "kill switch", "scancel"])
    number = here.attempts()[-1].number
    ranks = until(lambda: here.trains(number, 4), f"the ranks of attempt {number}", 240)
    if how == "kill switch":
        (here.rundir.switches / "kill-switch").touch()
        until(lambda: here.attempts()[-1].ended, "the end of the attempt", 120)
        here.type("clear")
        if not here.queue():
            here.type("launch")
    elif how == "scancel":
        here.sandbox.run(["scancel", "--state=RUNNING", f"--name={here.name}"])
    elif how == "agent":
        agents = [pid for pid in of_attempt(here, number, "torchrun") if pid not in ranks.values()]
        os.kill(draw.choice(agents), signal.SIGKILL)
    else:
        os.kill(draw.choice(sorted(ranks.values())), signal.SIGKILL if how == "rank" else signal.SIGSTOP)
    return how
