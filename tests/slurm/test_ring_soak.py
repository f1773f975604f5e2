"""Random faults in one run, and things that are none: it finishes, with the weights of an undisturbed one. Nothing saved is
lost, no healthy attempt is ended, no fault costs more than three members, the ledger names each fault, and the account of its
time closes and agrees with what the training has measured itself.

pytest -s tests/slurm/test_ring_soak.py -m slow         FTSUPERVISE_TEST_SEED=8 for one night again, FTSUPERVISE_SOAK=100 for a
longer one, FTSUPERVISE_SOAK_OF="home|read-only" for some faults only
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.model import Attempt
from ftsupervise.report.account import account
from ftsupervise.rundir.launches import launches
from ftsupervise.scheduler.parse import array_size
from tests.slurm.ring_scene import Scene, undisturbed

pytestmark = [pytest.mark.slurm, pytest.mark.slow]
Until = Callable[..., Any]

# The example, with a thread that does what a file asks of this rank: the user's own code going wrong. Rank 0 measures itself, a
# line for each step and each save with its seconds.
TROUBLED = """
import json, os, subprocess, sys, threading, time
from contextlib import contextmanager
from pathlib import Path
import ftsupervise
rank = os.environ.get("SLURM_PROCID", "0")
asked = Path(os.environ["FTSUPERVISE_RUN_DIR"], f"trouble-{rank}")
def trouble():
    while True:
        time.sleep(0.05)
        if not asked.exists():
            continue
        what = asked.read_text()
        asked.unlink()
        if what == "quote":
            for line in ("node-1: task 1: Exited with exit code 1", "node-0: task 0: Killed", "Node failure on node-1"):
                print("srun: error:", line, file=sys.stderr, flush=True)
            continue
        if what == "evaluate":
            node = os.environ["SLURMD_NODENAME"]
            words = ["srun", "--overlap", "--exact", "--mem=0", "-N1", "-n1", "-w", node, "sh", "-c", "exit 3"]
            subprocess.run(words, env={k: v for k, v in os.environ.items() if k != "SLURM_DISTRIBUTION"})
            continue
        if what == "disk":
            print("OSError: [Errno 28] No space left on device: 'step-1.npz'", file=sys.stderr, flush=True)
        os._exit(7 if what == "exit" else 1)
threading.Thread(target=trouble, daemon=True).start()
class Measured(ftsupervise.Guard):
    own, last = None, None
    def note(self, what, step, seconds):
        if rank == "0":
            self.own = self.own or open("own-" + os.environ["FTSUPERVISE_ATTEMPT"], "a", buffering=1)
            self.own.write(json.dumps([what, step, seconds]) + "\\n")
    def step(self, step, agreed=None):
        if self.last is not None:
            self.note("step", step, time.monotonic() - self.last)
        self.last = time.monotonic()
        return super().step(step, agreed)
    @contextmanager
    def checkpoint(self, step, *more, **named):
        began = time.monotonic()
        with super().checkpoint(step, *more, **named) as folder:
            yield folder
        self.last = time.monotonic()
        self.note("save", step, self.last - began)
ftsupervise.Guard = Measured
sys.argv[0] = "train.py"
import train
train.main()
"""


class Night:
    """A run on four nodes, two of them spare, and somebody who breaks things."""

    def __init__(self, here: Scene, until: Until, luck: random.Random) -> None:
        self.here, self.until, self.luck = here, until, luck

    def rank(self) -> tuple[int, int]:
        """A random rank of the attempt that trains, and its pid."""
        number = self.here.attempts()[-1].number
        ranks = self.until(lambda: self.here.trains(number), f"attempt {number} to train", 120)
        chosen: tuple[int, int] = self.luck.choice(sorted(ranks.items()))
        return chosen

    def signal(self, number: int) -> None:
        os.kill(self.rank()[1], number)

    def trouble(self, what: str) -> None:
        path = self.here.rundir.root / f"trouble-{self.rank()[0]}"
        path.with_suffix(".new").write_text(what)
        path.with_suffix(".new").replace(path)

    def harmless(self, what: str) -> None:
        """Nothing may come of it: the same attempt trains on."""
        number, at = self.here.attempts()[-1].number, _step(self.here)
        self.trouble(what)
        self.until(lambda: _step(self.here) >= at + 60, f"steps after {what!r}", 120)
        assert self.here.attempts()[-1].number == number, (
            f"{what!r} has ended a healthy attempt: {_how_it_is(self.here)}"
        )

    def cancelled_while_saving(self) -> None:
        """The switch asks for a save, and the job is cancelled in the same moment."""
        self.here.type("save", "--why", "soak", str(self.here.rundir.root))
        self.here.sandbox.run(["scancel", self.job()])

    def longer(self) -> None:
        """A person gives the job more time."""
        number, at = self.here.attempts()[-1].number, _step(self.here)
        self.here.sandbox.run(["scontrol", "update", f"JobId={self.job()}", "TimeLimit=+10"])
        self.until(lambda: _step(self.here) >= at + 60, "steps after it", 120)
        assert self.here.attempts()[-1].number == number, _how_it_is(self.here)

    def read_only_for_a_minute(self) -> None:
        """The run directory, with its checkpoints: whoever opens a file there to write it is refused."""
        with _read_only(self.here.rundir.root):
            time.sleep(60)

    def without_home(self) -> None:
        """The node that the next member gets has lost its home, and somebody mounts it again when the run goes on elsewhere.

        It is the first one that is idle once the whole job has gone. Before that its batch host is completing, for seconds
        where the machine is busy, and Slurm begins the next member on the others."""
        run, number = self.here.sandbox.run, self.here.attempts()[-1].number
        for job in self._waiting_jobs():
            run(["scontrol", "hold", job])
        run(["scancel", self.job()])
        self.until(
            lambda: not run(["sinfo", "-h", "-N", "-t", "alloc,comp,mix", "-o", "%N"]), "the end of the job", 120
        )
        excluded = expand_hostlist(
            ",".join(run(["squeue", "-h", "-t", "PENDING", "-n", self.here.name, "-o", "%x"]).split())
        )
        idle = sorted(run(["sinfo", "-h", "-N", "-t", "idle", "-o", "%N"]).split())
        node = next(one for one in idle if one not in excluded)
        self.here.broken(node).touch()
        for job in self._waiting_jobs():
            run(["scontrol", "release", job])
        self.until(lambda: self.here.attempts()[-1].number > number, f"a successor of attempt {number}", 240)
        assert self.batch_host() != node, _how_it_is(self.here)
        assert f"{node} is not fit for this run: python: error while loading" in self.here.log(), _how_it_is(self.here)
        self.here.broken(node).unlink()
        for job in self._waiting_jobs():
            run(["scontrol", "update", f"JobId={job}", "ExcNodeList="])

    def _waiting_jobs(self) -> list[str]:
        return self.here.sandbox.run(["squeue", "-h", "-t", "PENDING", "-n", self.here.name, "-o", "%F"]).split()

    def node(self) -> str:
        """One that this attempt trains on, but not the batch host: losing that is a fault of its own."""
        nodes = [node for node in self.here.attempts()[-1].nodes if node != self.batch_host()]
        return self.luck.choice(nodes)

    def batch_host(self) -> str:
        return self.here.sandbox.run(["squeue", "-h", "-j", self.job(), "-o", "%B"]).strip()

    def job(self) -> str:
        return self.here.attempts()[-1].job_id

    def supervisor(self) -> int:
        page = self.here.rundir.attempt(self.here.attempts()[-1].number) / "start.json"
        return int(json.loads(page.read_text())["pid"])

    # ------------------------------------------------------------------------------------------------------ faults

    def crash(self) -> None:
        node = self.node()
        number = self.here.attempts()[-1].number  # before: the next one may begin while it dies
        self.here.sandbox.node(node, "crash")
        self.mend(node, number)

    def slurmd_killed(self) -> None:
        node = self.node()
        number = self.here.attempts()[-1].number
        self.here.sandbox.node(node, "kill")
        self.mend(node, number)

    def batch_host_dies(self) -> None:
        """With it the supervisor is gone, and no watch runs: nobody could give back a node that is excluded."""
        node = self.batch_host()
        number = self.here.attempts()[-1].number  # before: the next one may begin while it dies
        self.here.sandbox.node(node, "crash")
        self.mend(node, number)

    def mend(self, node: str, number: int) -> None:
        """The node is back once somebody else than attempt ``number`` trains."""
        self.until(lambda: self.here.attempts()[-1].number > number, f"a successor of attempt {number}", 240)
        self.here.sandbox.node(node, "start")

    def controller_away(self) -> None:
        """With a rank killed meanwhile: the ring restarts without Slurm's answer, or waits for it."""
        self.here.sandbox.controller("pause")
        self.signal(signal.SIGKILL)
        time.sleep(self.luck.uniform(1, 8))
        self.here.sandbox.controller("cont")
        self.here.sandbox.wait_ready(60)


@contextmanager
def _read_only(folder: Path) -> Iterator[None]:
    """A mount on top of the folder: files that are open there stay writable, no other does."""
    for words in (["--bind", str(folder), str(folder)], ["-o", "remount,bind,ro", str(folder)]):
        subprocess.run(["mount", *words], check=True, timeout=20)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", folder], check=True, timeout=20)


GOES_ON = ""  # the attempt trains on, and the ledger says nothing

FAULTS: dict[str, tuple[Callable[[Night], object], str]] = {
    # name: (what is done, what the ledger says of it, as a regular expression on "kind|failure|cause")
    "a rank killed": (lambda night: night.signal(signal.SIGKILL), r"signal\|killed by SIGKILL"),
    "a rank crashes": (lambda night: night.signal(signal.SIGSEGV), r"signal\|killed by SIGSEGV"),
    "a rank leaves with exit 7": (lambda night: night.trouble("exit"), r"code\|exit 7"),
    "a full disk": (lambda night: night.trouble("disk"), r"disk\|no space left"),
    "a rank stopped": (lambda night: night.signal(signal.SIGSTOP), r"hang\|"),
    "a node loses power": (Night.crash, r"node\|node failure"),
    "a slurmd killed": (Night.slurmd_killed, r"node\|node failure"),
    "the controller away and a rank killed": (Night.controller_away, r"signal\|killed by SIGKILL"),
    "the supervisor killed": (
        lambda night: os.kill(night.supervisor(), signal.SIGKILL),
        r"ended without a record|cancelled",
    ),
    "the job cancelled": (
        lambda night: night.here.sandbox.run(["scancel", night.job()]),
        r"cancelled or preempted",
    ),
    "the job cancelled while it saves": (Night.cancelled_while_saving, r"cancelled or preempted"),
    "lines of another srun": (lambda night: night.harmless("quote"), GOES_ON),
    "an evaluation with its own srun fails": (lambda night: night.harmless("evaluate"), GOES_ON),
    "the time limit extended": (Night.longer, GOES_ON),
    "the batch host loses power": (Night.batch_host_dies, r"ended without a record|unknown|node failure"),
    "a node without home": (Night.without_home, r"cancelled or preempted"),
    "the run directory read-only for a minute": (Night.read_only_for_a_minute, r"exit 1 \(OSError\)"),
}
ROOT = ("the run directory read-only for a minute",)
# twice in the same way from the same checkpoint, and that is set aside
OF_THE_PROGRAM = ("a rank crashes", "a rank leaves with exit 7", "a rank stopped")

SLOW = ("a slurmd killed", "the batch host loses power")


@pytest.mark.fault(
    "Random faults in one run: ranks, nodes, slurmds, supervisors, batch hosts, the controller, a home, a read-only "
    "run directory, cancels, foreign lines",
    "It finishes with the weights of an undisturbed run; nothing saved is lost, no healthy attempt is ended, and the "
    "ledger names each fault",
)
@pytest.mark.timeout(5400)
def test_random_faults_and_the_weights_are_those_of_an_undisturbed_run(
    scene: Callable[..., Scene], until: Until, capsys: pytest.CaptureFixture[str]
) -> None:
    def show(text: str) -> None:
        with capsys.disabled():
            print(f"\n  {text}", end="", flush=True)

    seed = os.environ.get("FTSUPERVISE_TEST_SEED") or str(random.SystemRandom().randrange(10**6))
    luck = random.Random(seed)
    plan = _drawn(luck, int(os.environ.get("FTSUPERVISE_SOAK", "20")))
    wanted, apart = len(plan), 120
    show(f"{wanted} faults by the seed {seed}")
    # it trains on for as long as Slurm needs to see some of them, and must not be done before the last one
    steps = (wanted + 2) * apart + sum(1000 for name in plan if name in SLOW)
    here = scene(nodes=4, slurmd_timeout=10)
    (here.folder / "troubled.py").write_text(TROUBLED)
    night = Night(here, until, luck)
    words = f"--steps {steps} --step-time 0.03 --save-every 20 --log-every 10"
    shape: dict[str, Any] = {"jobs": 2 * wanted + 2, "nodes": 2, "spare_nodes": 1, "time": "4h"}
    here.launch(f"{sys.executable} troubled.py {words}", python=here.breakable_python(), **shape)
    wrong: list[str] = []
    trained = 1  # the attempt that trains, as far as the faults so far explain it
    for count, name in enumerate(plan, 1):
        at = count * apart + luck.randrange(apart // 2)
        until(lambda at=at: _step(here) >= at, f"step {at} before {name!r}", 300)
        if count > 1 and name == plan[count - 2] and name in OF_THE_PROGRAM:
            until(lambda: _saves(here, here.attempts()[-1].number), f"a save before {name!r} again", 120)
        before, members = here.attempts()[-1], _waiting(here)
        if before.number != trained:
            wrong.append(f"before {name!r}: attempt {trained} ended though nothing was done: {_told(here, trained)}")
        began = time.monotonic()
        act, expected = FAULTS[name]
        try:
            act(night)
        except pytest.fail.Exception:
            show(f"{count:3} {name}: {_how_it_is(here)}")
            raise
        if expected == GOES_ON:
            trained = before.number
            show(f"{count:3} {name:40} attempt {before.number} trains on")
            continue
        trained = until(lambda b=before: _trains_after(here, b), f"training after {name!r}", 300)
        took, spent = time.monotonic() - began, members - _waiting(here)
        page = until(lambda b=before: _page(here, b.number), f"the page of attempt {before.number}", 60)
        told = f"{page.failure.kind.value if page.failure else ''}|{page.sign}|{page.words}"
        if not re.search(expected, told):
            wrong.append(f"{name}: the ledger says {told}")
        between = [_told(here, number) for number in range(before.number + 1, trained)]
        if between:
            wrong.append(f"{name}: more than one attempt ended: {between}")
        if spent > 3:
            wrong.append(f"{name}: {spent} members")
        show(f"{count:3} {name:40} {took:6.1f} s  attempt {before.number} -> {trained}, {spent} members: {told}")
    left = steps - max((one.last_step or 0) for one in here.attempts())
    until(here.rundir.finished.exists, "the end", 300 + left * 0.1)
    # each member that is left starts, sees that the run has finished and ends: half a minute and more on a busy machine
    until(lambda: not here.queue(), "the end of the queue", 120 + 60 * _waiting(here))
    until(lambda: not here.processes(), "no orphan", 60)
    weights, lost = re.findall(r"weights (\w+)", here.log()), _lost(here)
    show(f"{wanted} faults: {dict(Counter(plan))}; {len(here.attempts())} attempts; wrong: {wrong}; lost: {lost}")
    assert weights == [undisturbed(here.folder, f"--steps {steps} --step-time 0", within=1200)]
    assert not wrong
    assert not lost
    show(_of_its_time(here) + "\n")


def _drawn(luck: random.Random, wanted: int) -> list[str]:
    """Each fault that this account can make once, then any, in an order of chance."""
    of = re.compile(os.environ.get("FTSUPERVISE_SOAK_OF", ""))
    names = [name for name in FAULTS if of.search(name) and (os.geteuid() == 0 or name not in ROOT)]
    luck.shuffle(names)
    plan = (names + luck.choices(names, k=wanted))[:wanted]
    luck.shuffle(plan)
    return plan


def _waiting(here: Scene) -> int:
    """How many members of the chain have not begun."""
    queue = here.sandbox.run(["squeue", "-h", "-t", "PENDING", "-n", here.name, "-o", "%i"])
    return sum(array_size(job) for job in queue.split())


def _told(here: Scene, number: int) -> str:
    page = next(one for one in here.attempts() if one.number == number)
    return f"attempt {number} in job {page.job_id}: {page.words or 'no end'}"


def _lost(here: Scene) -> list[str]:
    """The attempts that began before a step that rank 0 had saved: its own file says it once ``guard.checkpoint`` has ended."""
    found, saved = [], 0
    for one in here.attempts():
        if one.first_step is not None and one.first_step - 1 < saved:
            found.append(f"attempt {one.number} began with step {one.first_step}, and step {saved} was saved")
        saved = max([saved, *_saves(here, one.number)])
    return found


def _saves(here: Scene, number: int) -> list[int]:
    """The steps that rank 0 of an attempt has saved, by its own file."""
    own = here.folder / f"own-{number}"
    lines = [json.loads(line) for line in own.read_text().splitlines()] if own.exists() else []
    return [step for what, step, _ in lines if what == "save"]


def _of_its_time(here: Scene) -> str:
    """The account closes, and what rank 0 has measured is its goodput, within a point: unknown time may have been training."""
    attempts = here.attempts()
    found = account(attempts, launches(here.rundir), datetime.now(timezone.utc))
    seconds, total = found.seconds(), found.total
    assert abs(sum(seconds.values()) - total) <= 1e-9 * total
    assert all(one.end == other.begin for one, other in pairwise(found.stretches))
    own, highest = {"train": 0.0, "redo": 0.0, "save": 0.0}, 0
    for attempt in attempts:
        page = here.folder / f"own-{attempt.number}"
        lines = [json.loads(line) for line in page.read_text().splitlines()] if page.exists() else []
        for what, step, took in lines:
            own["save" if what == "save" else "train" if step > highest else "redo"] += took
        highest = max([highest, *(step for _, step, _ in lines)])
    goodput = found.goodput()
    assert goodput is not None
    said = ", ".join(f"{kind.value} {100 * share:.2f} %" for kind, share in found.shares().items())
    measured = ", ".join(f"{kind} {100 * share / total:.2f} %" for kind, share in own.items())
    said = (
        f"{total:.0f} s: {said}; goodput {100 * goodput.least:.2f} to {100 * goodput.most:.2f} %; measured: {measured}"
    )
    assert goodput.least - 0.01 < own["train"] / total < goodput.most + 0.01, said
    return said


def _step(here: Scene) -> int:
    attempts = here.attempts()
    last = attempts[-1].last_step if attempts else None
    return last or 0


def _trains_after(here: Scene, before: Attempt) -> int:
    """The number of an attempt after ``before`` whose ranks have all made a step, and which lives; 0 if there is none."""
    last = here.attempts()[-1]
    if last.number <= before.number:
        return 0
    ranks = here.trains(last.number)
    return last.number if ranks and all(processes.identity(pid) for pid in ranks.values()) else 0


def _how_it_is(here: Scene) -> str:
    """What somebody would look at who finds the chain standing still."""
    asked = (["squeue", "-r", "-o", "%i %T %r %D %x %N %E"], ["sinfo", "-N", "-o", "%N %T %E"], ["squeue", "-s"])
    said = "".join(f"{' '.join(words)}\n{here.sandbox.run(words)}" for words in asked)
    attempts = "".join(f"{one}\n" for one in here.attempts()[-3:])
    return f"\n{said}{attempts}{here.log()[-6000:]}"


def _page(here: Scene, number: int) -> Attempt | None:
    """The ledger's words, once it has its last ones: an attempt that nobody lived to end has none until its process is gone."""
    one = next(one for one in here.attempts() if one.number == number)
    return one if one.words else None
