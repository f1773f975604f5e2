"""On which nodes of the allocation does the next attempt run? Pure: node states and old troubles in, srun's words out."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ftsupervise.hostlist import compress_hostlist

# sinfo's long state words; the suffixes * (not responding), ~ # ! % $ @ ^ - are stripped, and * counts as away.
_AWAY = ("down", "fail", "error", "drained", "unknown", "power", "no_respond", "future", "maint", "reboot", "inval")
_LEAVING = ("drain", "failing")  # runs what it runs, gets nothing new: taken only when there is no other
_NODES = re.compile(r"(?:-N|--nodes=)(\d+)(?:-\d+)?")
_CHOSEN = ("-w", "--nodelist", "-x", "--exclude", "-F", "--nodefile")


@dataclass(frozen=True)
class Placement:
    """What is started. ``nodes`` () when the allocation has no list, or nothing is chosen."""

    command: tuple[str, ...]
    nodes: tuple[str, ...]
    short: str = ""  # why it cannot be started here: too few nodes are left


def wanted(command: Sequence[str], allocated: int) -> int:
    """How many nodes the command's srun asks for; all, when it does not say."""
    if not is_srun(command):
        return allocated
    words = list(command[1:])
    for index, word in enumerate(words):
        if not word.startswith("-"):
            break  # here begins what srun runs
        if word in ("-N", "--nodes") and index + 1 < len(words) and words[index + 1].isdigit():
            return min(allocated, int(words[index + 1]))
        if match := _NODES.fullmatch(word):
            return min(allocated, int(match[1]))
    return allocated


def is_srun(command: Sequence[str]) -> bool:
    return bool(command) and command[0].rpartition("/")[2] == "srun"


def place(
    command: tuple[str, ...],
    allocation: Sequence[str],
    states: Mapping[str, str],
    scores: Mapping[str, float],
    barred: Mapping[str, str] = {},
) -> Placement:
    """Where to start ``command``: the nodes that are well, those with a past of troubles last, in Slurm's order.

    ``states``: node -> sinfo's word, {} when Slurm could not be asked. ``scores``: node -> how bad its past is. ``barred``:
    nodes that are not to be used, and why; a command that chooses its nodes itself is not started when one is.
    With as many nodes as srun wants and all of them well the command stays as it is.
    """
    if not allocation or not (is_srun(command) or any(node in barred for node in allocation)):
        return Placement(command, tuple(allocation))
    want = wanted(command, len(allocation))
    well = [node for node in allocation if not is_away(states.get(node, "")) and node not in barred]
    if len(well) < want:
        gone = (node for node in allocation if node not in well)
        away = ", ".join(f"{node}: {barred[node]}" if node in barred else f"{node} is {states[node]}" for node in gone)
        return Placement(command, (), f"{len(well)} of {want} nodes are left ({away})")
    order = sorted(well, key=lambda node: (round(scores.get(node, 0), 1), _is_leaving(states.get(node, ""))))
    chosen = set(order[:want])
    nodes = tuple(node for node in allocation if node in chosen)
    if len(allocation) == want or _person_chose(command):
        return Placement(command, nodes)
    return Placement((command[0], f"--nodelist={compress_hostlist(nodes)}", *command[1:]), nodes)


def is_away(state: str) -> bool:
    word = state.lower()
    return word.rstrip("~#!%$@^-+").endswith("*") or (word.startswith(_AWAY) and not word.startswith("failing"))


def _is_leaving(state: str) -> bool:
    return state.lower().startswith(_LEAVING)


def _person_chose(command: Sequence[str]) -> bool:
    for word in command[1:]:
        if not word.startswith("-"):
            return False
        if word.partition("=")[0] in _CHOSEN:
            return True
    return False
