"""Judges how a month has ended: counts from the ledgers, from the messages that people got, and from the machine itself."""

from __future__ import annotations

import json
import re
import subprocess
import time
from collections import Counter, defaultdict
from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from pathlib import Path
from typing import Any

from benchmarks.month.loops import SAVE_EVERY, undisturbed
from benchmarks.month.owners import Kept, Person
from ftsupervise.host import processes
from ftsupervise.rundir.paths import ENV_RUN_DIR
from ftsupervise.sandbox import Sandbox

AFTER = timedelta(seconds=90)  # a page may come so long after its fault was over: the watch looks every 15 s
BEFORE = timedelta(seconds=20)  # a tick that began before has seen it
TAKES_A_SAVE = ("a checkpoint is corrupted", "its disk is full")
ON_THEIR_WAY = 5  # steps
STARTS, ENDS = ("fired",), ("resolved", "unwatched")


def judge(
    faults: list[dict[str, Any]], people: Sequence[Kept], keep: Path, ends: dict[str, int], true: Collection[str]
) -> list[str]:
    """Return what is wrong; ``true`` are the keys of alerts that told of no fault, and that Slurm has confirmed."""
    wrong = [f"{one['fault']}: {one['said']}" for one in faults if re.search("COULD NOT|DOES NOT", one["said"])]
    every = [json.loads(line) for line in (keep / "machine.jsonl").read_text().splitlines()]
    messages = list({message["key"]: message for message in reversed(every)}.values())[::-1]
    killed = sum(fault["fault"] == "a tick is killed" for fault in faults)
    if (
        len(every) - len(messages) > killed
    ):  # one may die between sending and noting: its message comes again, with its key
        wrong.append(f"{len(every) - len(messages)} messages came twice, and {killed} ticks were killed")
    for one in people:
        items = [
            {**item, "told": message["at"]}
            for message in messages
            for item in message["items"]
            if item["run"] == one.run
        ]
        wrong += _weights(one, ends[one.name]) + _steps(one, faults) + _once(one, items)
        wrong += _pages(one, [item for item in items if item["dedup_key"] not in true], faults)
        wrong += _everywhere(one, items, keep)
        told = Counter(item["reason"] for item in items)
        print(f"{one.run}: {dict(told)}", flush=True)
    return wrong


def _weights(one: Kept, end: int) -> list[str]:
    found = set(re.findall(rf"weights at step {end}: (\w+)", one.log()))
    expected = undisturbed(end)
    return [] if found == {expected} else [f"{one.run}: weights {found or 'unknown'}, undisturbed {expected}"]


def _steps(one: Kept, faults: list[dict[str, Any]]) -> list[str]:
    """An attempt makes no more steps again than lie between two saves, and those on their way when it was hit; one save more
    where a fault took the newest away."""
    wrong = []
    takes = [fault for fault in faults if fault["fault"] in TAKES_A_SAVE and one.run in fault["runs"]]
    for group in one.groups:
        reached, before = 0, 0.0
        for attempt in one.attempts(group):
            if attempt.first_step is None:
                continue
            begun = attempt.started.timestamp()
            taken = any(
                datetime.fromisoformat(fault["from"]).timestamp() < begun and before < end_of(fault) for fault in takes
            )
            again, before = reached - attempt.first_step + 1, begun
            if again > SAVE_EVERY * (2 if taken else 1) + ON_THEIR_WAY:
                wrong.append(f"{one.run} {group}: attempt {attempt.number} made {again} steps again")
            if attempt.first_step > reached + 1 and not group:  # a group goes on from what another one has saved
                wrong.append(f"{one.run} {group}: attempt {attempt.number} left out steps after {reached}")
            reached = max(reached, attempt.last_step or 0)
    return wrong


def end_of(fault: dict[str, Any]) -> float:
    return datetime.fromisoformat(fault["to"]).timestamp()


def _once(one: Kept, items: list[dict[str, Any]]) -> list[str]:
    """Each alert has one message at its start and one at its end."""
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    words = {}
    for item in items:
        if item["reason"] != "announced":
            counts[item["dedup_key"]][item["reason"]] += 1
            words[item["dedup_key"]] = f"{item['name']}: {item['summary']}"
    wrong = []
    for key, count in counts.items():
        starts, ends = sum(count[name] for name in STARTS), sum(count[name] for name in ENDS)
        if starts != 1 or ends != 1:
            wrong.append(f"{one.run}: {words[key]!r} was told {starts} times at its start, {ends} at its end")
    news = Counter(item["summary"] for item in items if item["reason"] == "announced")
    return wrong + [f"{one.run}: {text!r} was told {count} times" for text, count in news.items() if count > 1]


def _pages(one: Kept, items: list[dict[str, Any]], faults: list[dict[str, Any]]) -> list[str]:
    """Each alert began in the time of a fault."""
    wrong = []
    for item in items:
        if item["reason"] not in STARTS:
            continue
        at = datetime.fromisoformat(item["at"])
        if not any(
            datetime.fromisoformat(fault["from"]) - BEFORE <= at <= datetime.fromisoformat(fault["to"]) + AFTER
            and one.run in fault["runs"]
            for fault in faults
        ):
            wrong.append(f"{one.run}: a page without a fault at {at:%H:%M:%S}: {item['name']}: {item['summary']}")
    return wrong


def _everywhere(one: Kept, items: list[dict[str, Any]], keep: Path) -> list[str]:
    """Return what one receiver got and another did not."""
    mails = " ".join((keep / "mails.txt").read_text().replace("│", " ").split())
    wrong = []
    for item in items:
        if " ".join(item["summary"].split())[:60] not in mails:
            wrong.append(f"{one.run}: no mail says {item['summary']!r}")
    return wrong


def left_behind(top: Path, people: list[Person], sandbox: Sandbox, faults: list[dict[str, Any]]) -> list[str]:
    """Say what is left half a minute after the last job: Slurm may end a step seconds after its job has left the queue."""
    until = time.monotonic() + 30.0
    lost = {fault["said"].partition(" ")[0] for fault in faults if fault["fault"] == "a node is lost"}
    while (wrong := _left(top, people, sandbox, lost)) and time.monotonic() < until:
        time.sleep(1.0)
    return wrong


def _left(top: Path, people: list[Person], sandbox: Sandbox, lost: set[str]) -> list[str]:
    wrong = [f"in the queue: {line}" for line in sandbox.run(["squeue", "-h", "-o", "%i %u %j %T"]).splitlines()]
    for one in people:
        places = {str(one.rundir.root), *(str(one.rundir.group(name).root) for name in one.groups if name)}
        found = [p for place, these in processes.marked(ENV_RUN_DIR).items() if place in places for p in these]
        wrong += [f"a process of {one.run} is left: {process}" for process in found]
        done = subprocess.run(
            ["ps", "-u", one.account, "-o", "pid=,ppid=,lstart=,stat=,args="],
            capture_output=True,
            text=True,
            check=False,
        )
        wrong += [
            f"a process of {one.account} is left: {line}"
            for line in done.stdout.splitlines()
            if "benchmarks" not in line
        ]
    wrong += [
        f"a mount is left: {line}"
        for line in Path("/proc/mounts").read_text().splitlines()
        if str(top) in line and " tmpfs " not in line
    ]
    ours = {one.who.pw_uid for one in people}
    wrong += [
        f"in the memory of the nodes: {path}"
        for path in Path("/dev/shm").glob("*")
        if path.lstat().st_uid in ours and not _was_lost(path, lost)
    ]
    return wrong


def _was_lost(folder: Path, nodes: set[str]) -> bool:
    """Whether all that is in it is of nodes that were lost: here these share the memory of a host that goes on."""
    names = [one.name for one in folder.iterdir()] if folder.is_dir() else []
    return bool(names) and all(any(f"-{node}-" in name for node in nodes) for name in names)
