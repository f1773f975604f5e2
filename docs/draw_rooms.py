"""Draw the map of the rooms in CONTRIBUTING.md from the imports: python docs/draw_rooms.py (needs Graphviz's dot).

An arrow from a room to another says that it imports it; it is left out where other arrows lead there too. A red arrow leads
up: it is on the list of those to be turned in tests/unit/test_layers.py.
"""

from __future__ import annotations

import html
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tests.unit.test_layers import ROOMS, arrows, parsed  # noqa: E402

PICTURE = ROOT / "docs" / "pictures" / "rooms.svg"
WORDS = ROOMS[: ROOMS.index("host")]
MEANINGS = {
    "cli": "each command group",
    "interface": "runs from Python",
    "run": "the supervisor in the job",
    "launch": "submit a chain of jobs",
    "importer": "a job script to settings",
    "watch": "one tick, and the watchdogs",
    "crontab": "keep time by Slurm jobs",
    "report": "status",
    "planning": "plan, simulate",
    "diagnosis": "what happened, from all that an attempt left",
    "doctor": "what a night depends on",
    "drill": "faults for a copy of the run",
    "sandbox": "a real Slurm on one machine",
    "alerts": "whom to notify, and delivery",
    "warm": "the standby for a restart",
    "replicas": "groups that train on alone",
    "ranks": "node agents, hang detector",
    "nodes": "which nodes to use or avoid",
    "guard": "in the training loop",
    "integrations": "torch and its like",
    "scheduler": "all that is asked of Slurm",
    "config": "ftsupervise.yaml to values",
    "checkpoints": "whole, newest, kept, copied",
    "snapshots": "the last steps, in memory",
    "probe": "ask a disk, with a bound",
    "rundir": "the files of a run",
    "host": "this machine: processes, files",
    "words": "model, errors, units …",
}
INTERFACES = ("cli", "guard", "interface")  # what people and training loops meet


def room(module: str) -> str:
    name = module.split(".")[0]
    return "words" if name in WORDS else "cli" if name in ("start", "__main__") else name


def imports() -> dict[str, set[str]]:
    """Each room -> the rooms it imports."""
    found: dict[str, set[str]] = {}
    for module, targets in arrows(parsed()).items():
        found.setdefault(room(module), set()).update(room(target) for _, target in targets)
    return {mine: theirs - {mine} for mine, theirs in found.items()}


def reached(rooms: dict[str, set[str]], start: str) -> set[str]:
    seen: set[str] = set()
    todo = list(rooms[start])
    while todo:
        if (name := todo.pop()) not in seen:
            seen.add(name)
            todo += rooms[name]
    return seen


def drawn() -> tuple[set[str], set[tuple[str, str]], set[tuple[str, str]]]:
    """The rooms; the arrows down, but for those that a longer way stands for; the arrows up."""
    order = ["words", *ROOMS[len(WORDS) :]]
    rooms = imports()
    up = {(mine, theirs) for mine in rooms for theirs in rooms[mine] if order.index(theirs) > order.index(mine)}
    rooms = {mine: {theirs for theirs in rooms[mine] if (mine, theirs) not in up} for mine in rooms}
    for mine in sorted(rooms):
        for theirs in sorted(rooms[mine]):
            without = {**rooms, mine: rooms[mine] - {theirs}}
            if theirs in reached(without, mine):
                rooms = without
    return set(rooms), {(mine, theirs) for mine, targets in rooms.items() for theirs in targets}, up


def pictured() -> tuple[set[str], set[tuple[str, str]]]:
    """The rooms and the arrows, up or down, of the picture as it is."""
    titles = [html.unescape(title) for title in re.findall(r"<title>(.*?)</title>", PICTURE.read_text("utf-8"))][1:]
    ends = [title.split("->") for title in titles]
    return {one[0] for one in ends if len(one) == 1}, {(one[0], one[1]) for one in ends if len(one) == 2}


def dot() -> str:
    names, down, up = drawn()
    out = [
        "digraph rooms { rankdir=TB; nodesep=0.25; ranksep=0.45; bgcolor=white;",
        'node [shape=box, style="rounded,filled", fillcolor="#f6f8fa", margin="0.12,0.07"];',
        'node [color="#59636e", fontname="Helvetica"]; edge [color="#59636e", arrowsize=0.6];',
    ]
    for name in sorted(names):
        colour = ', fillcolor="#ddf4ff"' if name in INTERFACES else ""
        small = f'<br/><font point-size="10" color="#59636e">{MEANINGS[name]}</font>'
        out.append(f"{name} [label=<<b>{name}</b>{small}>{colour}];")
    out += [f"{mine} -> {theirs};" for mine, theirs in sorted(down)]
    out += [f'{mine} -> {theirs} [color="#cf222e", style=dashed, constraint=false];' for mine, theirs in sorted(up)]
    return "\n".join([*out, "}"])


if __name__ == "__main__":
    done = subprocess.run(["dot", "-Tsvg"], input=dot(), capture_output=True, text=True, check=True)
    PICTURE.write_text(done.stdout[done.stdout.index("<svg") :], "utf-8")
