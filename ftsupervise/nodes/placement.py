"""On which nodes of the allocation the next attempt runs: node states and scores in, srun's words out.

Pure, but for ``text_of``. A command other than srun finds its nodes in FTSUPERVISE_NODES: srun itself reads no such variable.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ftsupervise.host import files
from ftsupervise.rundir.paths import ENV_NODES
from ftsupervise.scheduler.parse import is_away, is_leaving, is_srun, on_nodes

_NODES = re.compile(r"(?:-N|--nodes=)(\d+)(?:-\d+)?")
_IN_TEXT = re.compile(r"\bsrun\b[^\n;|&]*?\s(?:-N\s*|--nodes[=\s]\s*)(\d+)")
_MOST = 64_000  # bytes of a script that are read
_CHOSEN = ("-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile")


@dataclass(frozen=True)
class Placement:
    """What is started. ``nodes`` () when the allocation has no list, or nothing is chosen."""

    command: tuple[str, ...]
    nodes: tuple[str, ...]
    short: str = ""  # why it cannot be started here: too few nodes are left


def wanted(command: Sequence[str], allocated: int, text: str = "") -> int:
    """How many nodes the command's srun asks for; all, when it does not say. ``text``: that of a script that says srun."""
    if not is_srun(command):
        said = _IN_TEXT.search(text) if follows(text) else None
        return min(allocated, int(said[1])) if said else allocated
    words = list(command[1:])
    for index, word in enumerate(words):
        if not word.startswith("-"):
            break  # here begins what srun runs
        if word in ("-N", "--nodes") and index + 1 < len(words) and words[index + 1].isdigit():
            return min(allocated, int(words[index + 1]))
        if match := _NODES.fullmatch(word):
            return min(allocated, int(match[1]))
    return allocated


def text_of(command: Sequence[str]) -> str:
    """What a command that is no srun says: its words, and what stands in the scripts among them."""
    found = list(command)
    for word in () if is_srun(command) else command[:3]:
        path = Path(word)
        try:
            if "\n" not in word and path.is_file():
                found.append(files.read_bounded(path, _MOST, follow=True).decode("utf-8", "replace"))
        except (OSError, ValueError):
            continue
    return "\n".join(found)


def follows(text: str) -> bool:
    """Does a command that is no srun start its steps on the nodes we choose?"""
    return ENV_NODES in text


def calls_srun(command: Sequence[str], text: str) -> bool:
    return is_srun(command) or re.search(r"\bsrun\b", text) is not None


def place(
    command: tuple[str, ...],
    allocation: Sequence[str],
    states: Mapping[str, str],
    scores: Mapping[str, float],
    barred: Mapping[str, str] = {},
    text: str = "",
) -> Placement:
    """Where to start ``command``: the healthy nodes, those with a score last, in Slurm's order.

    ``states``: node -> sinfo's word, {} when Slurm could not be asked. ``scores``: node -> how bad its past is. ``barred``:
    nodes that are not to be used, and why; a command that chooses its nodes itself is not started when one is.
    ``text``: that of a command that is no srun. It takes its nodes from FTSUPERVISE_NODES, or needs all of them.
    With as many nodes as srun wants, and all of them healthy, the command stays as it is.
    """
    unfit = any(node in barred or is_away(states.get(node, "")) for node in allocation)
    if not allocation or not (is_srun(command) or follows(text) or unfit):
        return Placement(command, tuple(allocation))
    want = wanted(command, len(allocation), text)
    well = [node for node in allocation if not is_away(states.get(node, "")) and node not in barred]
    if len(well) < want:
        gone = (node for node in allocation if node not in well)
        away = ", ".join(f"{node}: {barred[node]}" if node in barred else f"{node} is {states[node]}" for node in gone)
        deaf = (
            ""
            if is_srun(command) or follows(text) or not well
            else f"; the command does not take its nodes from ${ENV_NODES}"
        )
        return Placement(command, (), f"{len(well)} of {want} nodes are left ({away}){deaf}")
    order = sorted(well, key=lambda node: (round(scores.get(node, 0), 1), is_leaving(states.get(node, ""))))
    chosen = set(order[:want])
    nodes = tuple(node for node in allocation if node in chosen)
    if len(allocation) == want or not is_srun(command) or _person_chose(command):
        return Placement(command, nodes)
    return Placement(on_nodes(command, nodes), nodes)


def _person_chose(command: Sequence[str]) -> bool:
    for word in command[1:]:
        if not word.startswith("-"):
            return False
        if word.partition("=")[0] in _CHOSEN:
            return True
    return False
