"""Inside a job: a ring's agents and two ranks on two nodes, without the rest of the ring. Writes what it saw as JSON lines."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host.signals import SignalQueue
from ftsupervise.ranks.agent_pool import Agents
from ftsupervise.ranks.protocol import ENV_KEY
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.paths import ENV_ATTEMPT, ENV_ATTEMPT_DIR, ENV_RUN_DIR, RunDir
from ftsupervise.scheduler.allocation import Allocation

TRAIN = """
import os, time
from ftsupervise import Guard
guard = Guard(rank=int(os.environ["SLURM_PROCID"]), world=2, poll=60, signals=())
for step in range(1, 100000):
    guard.step(step)
    time.sleep(0.01)
"""


def say(what: str, **facts: Any) -> None:
    print(json.dumps({"what": what, **facts}), flush=True)


def until(question: Callable[[], Any], seconds: float = 40.0) -> Any:
    end = time.monotonic() + seconds
    while not (answer := question()) and time.monotonic() < end:
        time.sleep(0.002)
    return answer


def pss(pid: int) -> int:
    text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    return int(next(line for line in text.splitlines() if line.startswith("Pss:")).split()[1])


def main(folder: Path) -> None:
    rundir = RunDir(folder)
    mine = rundir.attempt(1)
    mine.mkdir(parents=True)
    rundir.beats.mkdir()
    allocation, signals = Allocation(os.environ), SignalQueue()
    agents = Agents(rundir, allocation, os.environ, signals.wake)
    began = time.monotonic()
    pages = agents.begin(1, mine / "run.log")
    env = {**os.environ, ENV_PAGES: pages, ENV_RUN_DIR: str(folder), ENV_ATTEMPT: "1", ENV_ATTEMPT_DIR: str(mine)}
    srun = subprocess.Popen(["srun", "-N2", "-n2", "--overlap", sys.executable, "-c", TRAIN], env=env)
    try:
        until(lambda: len(agents.table.nodes) == 2)
        say("agents", seconds=time.monotonic() - began, steps=sorted(allocation.steps()), base=agents.base)
        until(lambda: len([one for one in agents.table.newest() if one.step and one.state]) == 2)
        first = {one.rank: one for one in agents.table.newest()}
        until(lambda: all((one.step or 0) > (first[one.rank].step or 0) for one in agents.table.newest()))
        say("ranks", ranks=[one._asdict() for one in agents.table.newest()], now=time.monotonic())
        say("ping", answers=agents.ask({"node-0": "ping", "node-1": "ping"}, 10))
        say("memory", ring=pss(os.getpid()), srun=pss(next(iter(agents.pids))))
        environ = Path(f"/proc/{next(iter(agents.pids))}/environ").read_text()
        key = environ.partition(f"{ENV_KEY}=")[2].partition("\0")[0]
        assert key
        shown = subprocess.run(["ps", "axww", "-o", "args"], capture_output=True, text=True).stdout
        shown += subprocess.run(["scontrol", "show", "step"], capture_output=True, text=True).stdout
        shown += subprocess.run(["scontrol", "show", "job", "-d"], capture_output=True, text=True).stdout
        say(
            "secret",
            key=key,
            shown=key in shown,
            ranks_have_it=ENV_KEY in Path(f"/proc/{first[1].pid}/environ").read_text(),
        )
        struck = time.monotonic()
        os.kill(first[1].pid, 9)
        deaths = until(lambda: agents.table.deaths())
        say("death", seconds=time.monotonic() - struck, deaths=[one._asdict() | {"crash": one.crash} for one in deaths])
        struck = time.monotonic()
        confirmed = agents.kill(mine, ["node-0", "node-1"], 10)
        until(lambda: not Path(f"/proc/{first[0].pid}").exists())
        say("kill", seconds=time.monotonic() - struck, nodes=sorted(confirmed))
        srun.wait(40)
        before = next(iter(agents.pids))
        os.kill(before, 9)

        def kept(there: Callable[[], bool]) -> bool:
            done = there()
            if not done:
                agents.keep_running()
            return done or there()

        until(lambda: kept(lambda: before not in agents.pids))
        until(lambda: kept(lambda: len(agents.table.nodes) == 2))
        say("again", nodes=sorted(one.name for one in agents.table.nodes.values()))
        agents.begin(2, mine / "run.log")
        say("begun", newest=len(agents.table.newest()))
    finally:
        srun.kill()
        began = time.monotonic()
        agents.close()
        say("closed", seconds=time.monotonic() - began, left=Path(agents.base).exists(), dropped=agents.table.dropped)
        signals.close()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
