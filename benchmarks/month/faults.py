"""Brings about what goes wrong in a month, and draws how often.

The weights are shares of the incidents of ByteRobust (SOSP'25: 54,000 in three months), in the kinds that one machine can
play: CUDA and other errors of a program 36, a person's restart 18, memory 10, hangs 10, disks 5; those of Llama 3 for nodes
(maintenance, cables: 16). A job of 128 nodes at 6.5 failures per 1000 node-days (Kokolis, HPCA'25) has 25 in a month. What
happens to the site, to mail and to the cron has no published rate: a few times a month, each kind once at least.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.month.owners import PERIOD, Person
from ftsupervise.sandbox import Sandbox

A_MONTH = 25  # faults of one run in a month


@dataclass
class World:
    sandbox: Sandbox
    people: list[Person]
    mail: Any
    slack: Any
    luck: random.Random
    used_up: set[str] = field(default_factory=set)  # alerts of a chain's last job that were true, as Slurm said

    def until(self, question: Callable[[], Any], seconds: float, every: float = 0.3) -> Any:
        end = time.monotonic() + seconds
        while time.monotonic() < end:
            try:
                if answer := question():
                    return answer
            except Exception:  # a page that is being written, a controller that is away: look again
                pass
            time.sleep(every)
        return None


# ------------------------------------------------------------------------------------------------------ faults of one run


def victim(world: World, one: Person) -> tuple[str, int]:
    group = world.luck.choice(one.groups)
    ranks = world.until(lambda: one.ranks(group), 120)
    if not ranks:
        raise RuntimeError(f"{one.run} {group} does not train")
    return group, ranks[world.luck.choice(sorted(ranks))]


def by_signal(number: int) -> Callable[[World, Person], str]:
    def act(world: World, one: Person) -> str:
        group, pid = victim(world, one)
        os.kill(pid, number)
        return f"{signal.Signals(number).name} to {pid} {group}"

    return act


def supervisor_killed(world: World, one: Person) -> str:
    import json

    group, _ = victim(world, one)
    place = one.rundir.group(group) if group else one.rundir
    page = place.attempt(one.attempts(group)[-1].number) / "start.json"
    pid = int(json.loads(page.read_text())["pid"])
    os.kill(pid, signal.SIGKILL)
    return f"supervisor {pid} {group}"


def cancelled(world: World, one: Person) -> str:
    job = one.job()
    one.shell(["scancel", job])
    return f"scancel {job}"


def save_asked(world: World, one: Person) -> str:
    one.type("save", "--why", "before the conference")
    return "save switch"


def stopped_and_relaunched(world: World, one: Person) -> str:
    one.type("kill", "--yes", "--why", "new data")
    gone = world.until(lambda: not one.queue(), 120, 1)
    time.sleep(2 * PERIOD)  # a person needs a while, and the watch looks meanwhile
    one.type("clear")
    one.type("launch")
    return f"kill, clear, launch; the queue was {'empty' if gone else 'not empty'}"


def newest_save(one: Person) -> Any:
    if one.kind == "plain":
        return max((one.home / "out").glob("checkpoint_*.pth"), default=None)
    if one.kind == "groups":
        return max(one.rundir.checkpoints.glob("g*/step-*.npz"), key=lambda path: path.stem, default=None)
    return max(one.rundir.checkpoints.glob("step-*/state.npz"), default=None)


def checkpoint_corrupted(world: World, one: Person) -> str:
    """A disk turns a few bytes of the newest one around, then the job is lost."""
    path = newest_save(one)
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // 2)
        part = file.read(64)
        file.seek(path.stat().st_size // 2)
        file.write(bytes(byte ^ 0xFF for byte in part))
    job = one.job()
    one.shell(["scancel", job])
    said = f"64 bytes of {path.parent.name}/{path.name}, then scancel {job}"
    if one.kind == "plain":  # its own loader takes the newest: the chain is held, and a person has to look
        if not world.until(lambda: "STOPPED" in one.type("status", one.run, code=None), 120, 2):
            return f"{said}; the brake DOES NOT come on"
        time.sleep(2 * PERIOD)
        one.shell(["mkdir", "-p", "aside"])
        one.shell(["mv", str(path), "aside/"])
        one.type("clear", "--brake")
        said += "; its owner took it away and released the brake"
    return said


def save_cut(world: World, one: Person) -> str:
    """A rank is killed in the middle of a save."""
    before = newest_save(one)
    group, pid = victim(world, one)
    if one.kind == "plain":
        world.until(lambda: newest_save(one) != before, 40, 0.02)
    else:
        world.until(lambda: any(one.rundir.staging.glob("*/*")) or newest_save(one) != before, 40, 0.01)
    os.kill(pid, signal.SIGKILL)
    return f"SIGKILL to {pid} {group} while it saves"


def disk_full(world: World, one: Person) -> str:
    """Another user fills the disk that the run is on, for a minute."""
    filler = one.home / "others"
    with filler.open("wb", buffering=0) as file:
        try:
            while True:
                file.write(b"x" * 4096)
        except OSError:
            pass
    time.sleep(60)
    filler.unlink()
    return "disk full for 60 s"


# ---------------------------------------------------------------------------------------------------- faults of the site


def node_lost(world: World) -> tuple[str, list[Person]]:
    one = world.luck.choice(world.people)
    nodes = world.until(lambda: [one.attempts(name)[-1].nodes for name in one.groups], 60)
    node = world.luck.choice(sorted({name for part in nodes for name in part}))
    world.sandbox.node(node, "crash")
    time.sleep(45)
    world.sandbox.node(node, "start")
    return f"{node} of {one.run}", [one]


def slurm_away(how: str, back: str) -> Callable[[World], tuple[str, list[Person]]]:
    def act(world: World) -> tuple[str, list[Person]]:
        world.sandbox.controller(how)  # type: ignore[arg-type]
        time.sleep(3 * PERIOD)
        world.sandbox.controller(back)  # type: ignore[arg-type]
        world.sandbox.wait_ready(60)
        return f"controller {how} for {3 * PERIOD} s", world.people

    return act


def mail_refused(world: World) -> tuple[str, list[Person]]:
    world.mail.mood = world.luck.choice(["MAIL 451", "greet 554", "hang ."])
    time.sleep(60)
    said, world.mail.mood = world.mail.mood, "ok"
    return f"mail: {said}", world.people


def slack_refuses(world: World) -> tuple[str, list[Person]]:
    world.slack.mood = world.luck.choice(["500", "429 30", "error ratelimited"])
    time.sleep(60)
    said, world.slack.mood = world.slack.mood, "ok"
    return f"slack: {said}", world.people


def slow_queue(world: World) -> tuple[str, list[Person]]:
    """Nothing starts for a while, and the job of one run is lost meanwhile."""
    one = world.luck.choice(world.people)
    world.sandbox.run(["scontrol", "update", "PartitionName=prod", "State=DOWN"])
    one.shell(["scancel", one.job()])
    time.sleep(75)
    world.sandbox.run(["scontrol", "update", "PartitionName=prod", "State=UP"])
    return f"nothing starts for 75 s; scancel of {one.run}", world.people


def cron_lost(world: World) -> tuple[str, list[Person]]:
    """All waiting jobs of one person's cron are cancelled."""
    one = world.luck.choice(world.people)
    jobs = world.sandbox.run(["squeue", "-h", "-u", one.account, "-o", "%i %j %k"]).splitlines()
    ours = [line.split()[0] for line in jobs if "ftsupervise-cron:" in line]
    one.shell(["scancel", *ours])
    return f"{len(ours)} jobs of {one.name}'s cron", [one]


def cron_tick_killed(world: World) -> tuple[str, list[Person]]:
    from tests.slurm.cron_injected import processes_of

    one = world.luck.choice(world.people)

    def kill() -> int:
        running = world.sandbox.run(["squeue", "-h", "-t", "R", "-u", one.account, "-o", "%i %k"]).splitlines()
        told = 0
        for job in [line.split()[0] for line in running if "ftsupervise-cron:" in line]:
            for pid in processes_of(job, one.env["SLURM_CONF"]):
                os.kill(pid, signal.SIGKILL)
                told += 1
        return told

    return f"{world.until(kill, 60, 0.05)} processes of a tick of {one.name}", [one]


@dataclass(frozen=True)
class Kind:
    act: Callable[..., Any]
    weight: float
    only: tuple[str, ...] = ()  # runs that it is done to; (): all


OF_A_RUN = {
    "a rank crashes": Kind(by_signal(signal.SIGSEGV), 36),
    "a rank is killed": Kind(by_signal(signal.SIGKILL), 10),
    "a rank stands still": Kind(by_signal(signal.SIGSTOP), 10),
    "stopped and launched again by its owner": Kind(stopped_and_relaunched, 9),
    "its job is cancelled": Kind(cancelled, 6),
    "a save is asked for": Kind(save_asked, 3),
    "its supervisor is killed": Kind(supervisor_killed, 4),
    "a save is cut": Kind(save_cut, 4),
    "a checkpoint is corrupted": Kind(checkpoint_corrupted, 3),
    "its disk is full": Kind(disk_full, 5, ("plain",)),
}
OF_THE_SITE = {
    "a node is lost": Kind(node_lost, 16),
    "Slurm hangs": Kind(slurm_away("pause", "cont"), 3),
    "Slurm is down": Kind(slurm_away("kill", "start"), 3),
    "the mail is refused": Kind(mail_refused, 3),
    "Slack refuses": Kind(slack_refuses, 3),
    "nothing starts": Kind(slow_queue, 3),
    "a cron is cancelled": Kind(cron_lost, 3),
    "a tick is killed": Kind(cron_tick_killed, 3),
}


def drawn(kinds: dict[str, Kind], count: int, run: str, luck: random.Random) -> list[str]:
    names = [name for name, kind in kinds.items() if not kind.only or run in kind.only]
    return luck.choices(names, [kinds[name].weight for name in names], k=count)
