"""Four ranks with gloo that make the steps of a schedule and leave by what their guards say. Imports torch once; each line of
its input is a schedule, in JSON; it forks the ranks, and answers with what each did and how it ended.

A schedule is drawn by ``schedule(seed)``. What happens (a switch is raised, a signal comes, memory grows, a loss is no number,
a rank dies or stands still) does so at the step of a rank, so that a seed plays the same again, but for the pace of the
machine.
"""

from __future__ import annotations

import faulthandler
import json
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ftsupervise import Guard
from ftsupervise.host.memory import HostMemory

WORLD = 4
BOUND = 90.0  # seconds for one schedule; it takes some 2
STANDS_STILL = 0.7  # seconds
EVENTS = ("save", "save", "save", "kill", "USR1", "TERM", "memory", "loss", "wait", "stand", "check")
LOOPS = ("lockstep", "lockstep", "deep", "seldom", "apart")
STORES = ("tcp", "tcp", "agent", "file", "plain")


def schedule(seed: int) -> dict[str, Any]:
    draw = random.Random(seed)
    steps = draw.randint(20, 120)
    events = [[draw.randrange(WORLD), draw.randrange(steps), draw.choice(EVENTS)] for _ in range(draw.randint(1, 6))]
    if draw.random() < 0.25:
        events.append([draw.randrange(WORLD), draw.randrange(steps), draw.choice(("killed", "exits", "raises"))])
    return {
        "seed": seed,
        "steps": steps,
        "events": events,
        "loop": draw.choice(LOOPS),
        "store": draw.choice(STORES),
        "first": draw.choice((0, 1, 1000)),
        "stride": draw.choice((0, 1, 1, 1, 3)),
        "pace": draw.choice((0.0, 0.002, 0.01)),
        "slow": draw.random() < 0.15,
        "early": draw.random() < 0.5,  # the guard is made before the process group
    }


class PlainStore(dist.Store):
    """A store of somebody's own, as the one over etcd: it cannot compare and set."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self._inner = inner

    def set(self, key: str, value: Any) -> None:
        self._inner.set(key, value)

    def get(self, key: str) -> Any:
        return self._inner.get(key)

    def add(self, key: str, value: int) -> int:
        return int(self._inner.add(key, value))

    def check(self, keys: list[str]) -> bool:
        return bool(self._inner.check(keys))

    def wait(self, keys: list[str], timeout: timedelta = timedelta(seconds=60)) -> None:
        self._inner.wait(keys, timeout)


def store_of(kind: str, rank: int, folder: Path) -> Any:
    if kind in ("file", "plain"):
        store = dist.FileStore(str(folder / "meet"), WORLD)
        return PlainStore(store) if kind == "plain" else store
    port = folder / "port"
    if kind == "tcp" and rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        tell(port, str(store.port))
        return store
    end = time.monotonic() + BOUND
    while not port.exists() and time.monotonic() < end:
        time.sleep(0.005)
    return dist.TCPStore("127.0.0.1", int(port.read_text()), None, False, wait_for_workers=False)


def meet(kind: str, rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", store=store_of(kind, rank, folder), rank=rank, world_size=WORLD)


def tell(path: Path, text: str) -> None:
    path.with_suffix(".part").write_text(text)
    path.with_suffix(".part").rename(path)


class Loop:
    """How the ranks meet: in each step, up to three steps apart, every tenth step, or never."""

    def __init__(self, kind: str) -> None:
        self._works: list[Any] = []
        self._kind, self._box = kind, torch.ones(8)

    def meet(self, count: int) -> None:
        if self._kind == "lockstep" or (self._kind == "seldom" and count % 10 == 0):
            dist.all_reduce(self._box)
        if self._kind == "deep":
            self._works.append(dist.all_reduce(torch.ones(8), async_op=True))
            if len(self._works) > 3:
                self._works.pop(0).wait()

    def save(self) -> None:
        """As savers do it: all ranks meet."""
        for work in self._works:
            work.wait()
        self._works.clear()
        if self._kind != "apart":
            dist.barrier()


def happen(event: str, guard: Guard, run: Path, said: dict[str, Any], hold: list[Any]) -> None:
    if event in ("save", "kill"):
        try:
            os.close(os.open(run / "switches" / f"{event}-switch", os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
            said["raised"].append(event)
        except FileExistsError:
            pass
    elif event in ("USR1", "TERM"):
        os.kill(os.getpid(), getattr(signal, f"SIG{event}"))
    elif event == "loss":
        guard.loss(float("nan"))
    elif event == "memory":
        hold.append(bytearray(os.urandom(1 << 20) * 400))
    elif event == "wait":
        with guard.phase("data"):
            for _ in range(3):
                time.sleep(0.1)
                guard.check()
    elif event == "stand":
        if (child := os.fork()) == 0:
            time.sleep(STANDS_STILL)
            os.kill(os.getppid(), signal.SIGCONT)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGSTOP)
        os.waitpid(child, 0)
    elif event == "check":
        guard.check()
    elif event == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    elif event == "exits":
        os._exit(7)
    elif event == "raises":
        raise RuntimeError("a fault of the program")


def rank_of(plan: dict[str, Any], rank: int, folder: Path, said: dict[str, Any]) -> None:
    torch.set_num_threads(1)
    run, mine = folder / "run", [(at, what) for who, at, what in plan["events"] if who == rank]
    os.environ["FTSUPERVISE_RUN_DIR"] = str(run)
    if not plan.get("unnamed"):
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(WORLD)}
    elif plan["unnamed"] == "one rank":
        os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
    if plan["store"] == "agent":
        os.environ |= {"TORCHELASTIC_USE_AGENT_STORE": "True", "TORCHELASTIC_MAX_RESTARTS": plan.get("restarts", "0")}
    os.environ["FTSUPERVISE_GUARD_LOSS_NONFINITE"] = "stop"
    hold: list[Any] = []
    own = random.Random(plan["seed"] * 10 + rank)
    memory = max(HostMemory().shares().values()) + 0.012 if any(what == "memory" for _, what in mine) else None
    if not plan["early"]:
        meet(plan["store"], rank, folder)
    with Guard(poll=0.02, beat_every=0.5, memory=memory) as guard:
        if plan["early"]:
            meet(plan["store"], rank, folder)
        loop = Loop(plan["loop"])
        for count in range(plan["steps"]):
            number = plan["first"] + count * plan["stride"]
            for at, what in mine:
                if at == count:
                    happen(what, guard, run, said, hold)
            time.sleep(plan["pace"] * own.random() * 2)
            if plan["slow"] and count % 10 == 0:
                time.sleep(0.6)
            loop.meet(count)
            decision = guard.step(number)
            said["made"] = count + 1
            if decision.save:
                loop.save()
                said["saves"].append([count, decision.name, decision.cause])
                guard.saved(number)
            if decision.stop:
                said["end"] = "stopped"
                break
        else:
            guard.finished(number)
            said["end"] = "finished"
    beat = json.loads((run / "beats" / f"rank-{rank}").read_text())
    said["lost"] = beat["facts"].get("cannot_agree", "")


def play(plan: dict[str, Any]) -> dict[str, Any]:
    folder = Path(tempfile.mkdtemp(prefix="agreeing-"))
    for name in ("switches", "beats", "state"):
        (folder / "run" / name).mkdir(parents=True)
    agent = keep_store(folder) if plan["store"] == "agent" else None
    children = {}
    for rank in range(WORLD):
        if (child := os.fork()) == 0:
            lines = os.open(folder / f"stderr-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
            os.dup2(lines, 2)
            faulthandler.dump_traceback_later(BOUND - 20, file=lines)
            said: dict[str, Any] = {"raised": [], "saves": [], "made": 0, "end": "", "lost": ""}
            code = 0
            try:
                rank_of(plan, rank, folder, said)
            except BaseException as error:
                traceback.print_exc()
                said["end"], code = f"{type(error).__name__}: {error}"[:200], 3
            tell(folder / f"said-{rank}", json.dumps(said))
            os._exit(code)
        children[child] = rank
    ended: dict[int, Any] = {}
    end = time.monotonic() + BOUND
    while children and time.monotonic() < end:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            time.sleep(0.005)
        elif pid in children:
            ended[children.pop(pid)] = os.waitstatus_to_exitcode(status)
    for pid, rank in children.items():
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        ended[rank] = "hung"
    if agent is not None:
        os.kill(agent, signal.SIGKILL)
        os.waitpid(agent, 0)
    said_by = [folder / f"said-{rank}" for rank in range(WORLD)]
    answer = {
        "ended": [ended[rank] for rank in range(WORLD)],
        "said": [json.loads(path.read_text()) if path.exists() else None for path in said_by],
        "up": sorted(path.name for path in (folder / "run" / "switches").iterdir()),
        "stderr": [(folder / f"stderr-{rank}").read_text()[-3000:] for rank in range(WORLD)],
    }
    shutil.rmtree(folder)
    return answer


def keep_store(folder: Path) -> int:
    """A process that holds the store of all ranks, and outlives them, as torchrun's agent does."""
    if (child := os.fork()) == 0:
        agent = dist.TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
        tell(folder / "port", str(agent.port))
        while True:
            signal.pause()
    return child


def main() -> None:
    for line in sys.stdin:
        print(json.dumps(play(json.loads(line))), flush=True)


if __name__ == "__main__":
    main()
