"""Several cron chains on one sandbox, faults for them, and an honest count of what came of it."""

from __future__ import annotations

import random
import subprocess
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.crontab.chain import CronChain, chain_in
from ftsupervise.crontab.entries import ceiling, floor
from ftsupervise.crontab.installation import CronDir, need_installed
from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.slurm import Slurm
from tests.neighbours.typed import typed

SPARES = 3


def now() -> datetime:
    return datetime.now(timezone.utc)


@dataclass
class OneCron:
    """One installed cron, its own home, and an entry that writes each slot it runs for into a file."""

    sandbox: Sandbox
    home: Path
    period: float
    limit: float = 60.0
    sandbox_path: str = ""  # PATH, if not the sandbox's own

    @property
    def cron(self) -> CronDir:
        return CronDir(self.home / "cron")

    @property
    def env(self) -> dict[str, str]:
        env = self.sandbox.env() | {"HOME": str(self.home), "FTSUPERVISE_SITE_CONFIG": "/nonexistent", "TZ": "UTC"}
        return env | {"PATH": self.sandbox_path or env["PATH"]}

    def write_settings(self) -> None:
        self.home.mkdir(parents=True, exist_ok=True)
        self.home.chmod(0o755)
        (self.home / "ftsupervise.yaml").write_text(
            "name: x\nlaunch: {command: a}\n"
            f"cron: {{directory: cron, period: {self.period:g}s, limit: {self.limit:g}s, spares: {SPARES}, mem: 50M}}\n"
        )

    def type(self, *words: str) -> subprocess.CompletedProcess[str]:
        return typed("cron", *words, folder=self.home, env=self.env, seconds=180)

    def install(self) -> None:
        typed("cron", "install", folder=self.home, env=self.env, seconds=180, code=0)
        if not (self.home / "work").exists():
            (self.home / "work").touch()
            self.cron.crontab.write_text(f'@tick echo "$FTSUPERVISE_CRON_SLOT" >> {self.home}/work\n')

    def drop(self, folder: str, name: str, body: str, *, mode: int = 0o755) -> None:
        temp = self.home / name
        temp.write_text(f"#!/bin/sh\n{body}\n")
        temp.chmod(mode)
        temp.replace(self.cron.folder(folder) / name)

    def alerts(self) -> str:
        return typed("alerts", self.cron.root, env=self.env, code=0).stdout

    def slurm(self) -> Slurm:
        return Slurm(self.env)

    def chain(self) -> CronChain:
        """What stands in the queue now. Raises SchedulerUnavailable."""
        installed = need_installed(self.cron)
        jobs = self.slurm().queue()
        return chain_in(jobs, installed.id, now(), installed.period, SPARES)

    def live_chains(self) -> int:
        """How many jobs there are for the slot that has most; 0 when the chain is dead."""
        from ftsupervise.crontab.chain import slot_of

        installed = need_installed(self.cron)
        slots = Counter(
            slot_of(job.comment, installed.id)
            for job in self.slurm().queue()
            if job.state.waiting and (slot_of(job.comment, installed.id) or now()) > now()
        )
        del slots[None]
        return max(slots.values(), default=0)

    def jobs(self, *which: str) -> list[str]:
        """Jobs of the chain: all, or those in the states ``which``."""
        asked = ["squeue", "-h", *(["-t", ",".join(which)] if which else []), "-o", "%i %k"]
        while True:
            try:
                lines = self.sandbox.run(asked).splitlines()
                break
            except SchedulerUnavailable:  # a controller without a turn for a moment: wait, as any who asks
                time.sleep(0.1)
        mark = f"ftsupervise-cron:{need_installed(self.cron).id}:slot:"
        return [line.split()[0] for line in lines if mark in line]

    def running(self) -> list[str]:
        return self.jobs("RUNNING")

    def pending(self) -> list[str]:
        return self.jobs("PENDING")

    def worked(self) -> list[str]:
        try:
            return (self.home / "work").read_text().split()
        except FileNotFoundError:
            return []

    def wait_running(self, seconds: float) -> str:
        """The id of a tick that runs; "" if none came within ``seconds``."""
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            found = self.running()
            if found:
                return found[-1]
            time.sleep(0.02)
        return ""


Fault = Callable[[OneCron], bool]


@dataclass
class Count:
    """What came of the injections of one fault."""

    injected: int = 0
    chains: Counter[int] = field(default_factory=Counter)  # live chains after two periods -> how often
    missed: int = 0
    twice: int = 0
    slots: int = 0


@dataclass
class Lab:
    """All chains of one sandbox."""

    sandbox: Sandbox
    crons: list[OneCron]
    luck: random.Random
    counts: dict[str, Count] = field(default_factory=dict)

    @property
    def period(self) -> float:
        return self.crons[0].period

    def start(self) -> None:
        for one in self.crons:
            one.write_settings()
            one.install()

    def moment(self) -> None:
        time.sleep(self.luck.uniform(0, self.period))

    def settle(self, periods: float = 2) -> None:
        time.sleep(periods * self.period)

    def judge(self, name: str, crons: Sequence[OneCron], since: datetime, injected: int) -> None:
        """Count what the slots since the fault did. One chain each, and no slot twice, or the test fails."""
        count = self.counts.setdefault(name, Count())
        count.injected += injected
        for one in crons:
            live = one.live_chains()
            # between a slot and the end of its tick there may be two ahead; a late one puts in order what it finds
            until = time.monotonic() + max(self.period, 30)
            while (live != 1 or len(one.chain().ahead) < SPARES) and time.monotonic() < until:
                time.sleep(0.1)
                live = one.live_chains()
            count.chains[live] += 1
            worked = Counter(one.worked())
            period = timedelta(seconds=self.period)
            first, last = ceiling(since, period), floor(now() - period, period)
            slots = [first + period * n for n in range(max(0, (last - first) // period + 1))]
            count.slots += sum(slot.isoformat() in worked for slot in slots)
            count.missed += sum(slot.isoformat() not in worked for slot in slots)
            count.twice += sum(n - 1 for n in worked.values())
            assert live == 1, f"{name}: {live} live chains in {one.home.name}: {one.chain()}"
            assert not [slot for slot, n in worked.items() if n > 1], f"{name}: a slot ran twice"

    def each(self, name: str, fault: Fault) -> None:
        """The fault on every chain, each at a random moment of its own; then judge all."""
        self.mixed([(name, fault)] * len(self.crons))

    def mixed(self, faults: Sequence[tuple[str, Fault]]) -> None:
        """For each chain a fault, all about at the same time."""
        since = now()
        done: dict[int, bool] = {}

        def inject(number: int, fault: Fault, wait: float) -> None:
            time.sleep(wait)
            done[number] = fault(self.crons[number])

        threads = [
            threading.Thread(target=inject, args=(n, fault, self.luck.uniform(0, self.period)))
            for n, (_, fault) in enumerate(faults)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(done) == len(faults), "a fault could not be injected"
        self.settle()
        for name in dict.fromkeys(name for name, _ in faults):
            numbers = [n for n, (other, _) in enumerate(faults) if other == name]
            self.judge(name, [self.crons[n] for n in numbers], since, sum(done[n] for n in numbers))

    def whole(self, name: str, fault: Callable[[], None]) -> None:
        """A fault of the cluster, which every chain has to live through."""
        since = now()
        self.moment()
        fault()
        self.settle()
        self.judge(name, self.crons, since, len(self.crons))

    def table(self) -> Iterator[str]:
        yield f"{'fault':44} injected  live chains after  slots run  missed  twice"
        for name, count in self.counts.items():
            chains = ", ".join(f"{n}: {times}x" for n, times in sorted(count.chains.items()))
            yield f"{name:44} {count.injected:8}  {chains:17}  {count.slots:9}  {count.missed:6}  {count.twice:5}"
