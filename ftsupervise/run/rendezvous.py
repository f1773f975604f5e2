"""Sets where the ranks of an attempt meet: an address and a port of its own, and the names by which launchers and torch
read them.

It stands alone because its words are those of other launchers.

A setup block need not compute them, where they would name a node that is replaced later, or a port that a dead attempt
still holds. The node is the one with rank 0. The port is one that was free there just now, and that none of the 1,249
attempts before has had: a leftover rank of one of them never meets the new ones. Where somebody listens at all of those, it is
any that is free; where none is, it is 0, so that the ranks fail and talk to nobody.
"""

from __future__ import annotations

import re
import shutil
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import NamedTuple

from ftsupervise.host.addresses import Names
from ftsupervise.host.ports import free_port, ports_of
from ftsupervise.hostlist import expand_hostlist
from ftsupervise.nodes.selector import calls_srun
from ftsupervise.rundir.paths import ENV_MASTER_ADDR, ENV_MASTER_PORT, ENV_NNODES, ENV_NODE_RANK
from ftsupervise.rundir.records import as_count
from ftsupervise.scheduler.parse import is_srun, srun_options

_LOOPBACK = "127.0.0.1"
_NAMES = Names()  # of nodes; one that is not known in time is trusted
_ASK = 2.0  # seconds for the agent of another node, which may just be starting
_AGAIN = 0.1  # seconds between two questions to a node that has not reported yet
_PORTS = range(1024, 1 << 16)

Ask = Callable[[Mapping[str, str], float], Mapping[str, str]]  # node -> question, bound; node -> answer


class MeetingPoint(NamedTuple):
    """The node of rank 0, as the others reach it."""

    address: str
    port: int
    nodes: int

    def env(self) -> dict[str, str]:
        return {ENV_MASTER_ADDR: self.address, ENV_MASTER_PORT: str(self.port), ENV_NNODES: str(self.nodes)}

    def names_of_place(self) -> dict[str, str]:
        """Return the names by which torch finds the place, for a command that may start its ranks by itself.

        It alone knows which rank is which, and how many there are.
        """
        return {"MASTER_ADDR": self.address, "MASTER_PORT": str(self.port)}


def meeting_point(
    run: str,
    attempt: int,
    nodes: Sequence[str],
    here: str,
    address: Callable[[str], str],
    ask: Ask,
    *,
    known_outside: bool = False,
) -> MeetingPoint:
    """Return where the ranks of ``attempt`` meet.

    ``nodes``: in the order of their ranks, () for this host alone. ``here``: our own node. ``address``: of a node, as
    Slurm has it. ``ask``: the agents of other nodes. ``known_outside``: torchft tells the other replica groups, on
    other nodes, where the store of this one is.
    """
    first, ports = (nodes[0] if nodes else here), ports_of(run, attempt)
    port = free_port(ports) if first == here or not nodes else _ask_node(first, ports, ask)
    alone = not nodes or (len(nodes) < 2 and not known_outside)
    where = _LOOPBACK if alone else _reachable(first, address)
    return MeetingPoint(where, ports[0] if port is None else port, max(1, len(nodes)))


def _ask_node(node: str, ports: Sequence[int], ask: Ask) -> int | None:
    """Return a free port of another node; None when its agent does not answer: the first is then taken unseen."""
    until, question = time.monotonic() + _ASK, " ".join(["port", *map(str, ports)])
    while time.monotonic() < until:
        if (answer := ask({node: question}, until - time.monotonic()).get(node)) is not None:
            found = as_count(answer)
            return found if found == 0 or found in _PORTS else None
        time.sleep(_AGAIN)  # it has not reported yet
    return None


def _reachable(node: str, address: Callable[[str], str]) -> str:
    """Return the name of a node where it can be resolved, else the address by which Slurm reaches it."""
    return address(node) or node if _NAMES.look_up([node]).get(node) == "" else node


# Finds the node on which rank 0 runs, when a person's srun has chosen its nodes.

_LISTED = ("-w", "--nodelist")
_ONLY_SRUN_KNOWS = ("-x", "--exclude", "-F", "--nodefile", "-r", "--relative")
_ORDER = ("-m", "--distribution")


def in_rank_order(command: Sequence[str], nodes: Sequence[str]) -> tuple[str, ...] | None:
    """Return those of ``nodes`` (in Slurm's order) on which ``command`` starts ranks; None where only its srun knows. Pure."""
    chosen: Collection[str] = nodes
    for name, value in srun_options(command)[0] if is_srun(command) else ():
        if name in _ONLY_SRUN_KNOWS or (name in _ORDER and value.startswith("arbitrary")):
            return None
        if name in _LISTED:
            try:
                chosen = expand_hostlist(value)
            except ValueError:  # a file, with a "/" in its name
                return None
    found = tuple(node for node in nodes if node in chosen)
    return found if found or not nodes else None


# The names that torch.distributed reads (``env://``). They are given where the command is a Python program without a launcher
# of its own, and a person has set none of them.

AUTO = "auto"
NAMES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK", "LOCAL_RANK")
_PROGRAM = re.compile(r"(?:^|[\s/])python[\d.]*(?=\s|$)|\.py(?=[\s;\"']|$)")
_TORCHRUN = re.compile(r"(?:^|[\s/;&|(])torchrun(?=\s|$)|\btorch\.distributed\.(?:run|launch)\b")
_LAUNCHER = re.compile(
    rf"{_TORCHRUN.pattern}|(?:^|[\s/;&|(])(?:deepspeed|mpirun|mpiexec|horovodrun|ft_launcher)(?=\s|$)"
    r"|\baccelerate(?:\s+|\.commands\.)launch\b"
)
# In each rank, before its program.
_NODE = f'export {ENV_NODE_RANK}="$SLURM_NODEID"; '
# LOCAL_RANK makes Accelerate and the Trainer use one GPU, so that a single rank, which may use several, does without. The only
# rank of a job gets no RANK either: where it is set, scripts such as nanoGPT's ask for LOCAL_RANK and a group of processes.
_RANK = f"""export MASTER_ADDR="${ENV_MASTER_ADDR}" MASTER_PORT="${ENV_MASTER_PORT}" NODE_RANK="$SLURM_NODEID"
if [ "$SLURM_STEP_NUM_TASKS/$SLURM_JOB_NUM_NODES" != 1/1 ]; then
export RANK="$SLURM_PROCID" WORLD_SIZE="$SLURM_STEP_NUM_TASKS"
fi
if [ "$SLURM_STEP_NUM_TASKS" != 1 ]; then
n=0 l="$SLURM_GTIDS,"; while [ -n "$l" ]; do l="${{l#*,}}" n=$((n+1)); done
export LOCAL_RANK="$SLURM_LOCALID" LOCAL_WORLD_SIZE="$n"; unset n l
fi
"""


def wants_names(command: Sequence[str], text: str, env: Mapping[str, str], setting: str) -> bool:
    """Return whether the ranks of ``command`` are given the names. Pure.

    ``text``: of the command, with its scripts where it is no srun.
    """
    if setting != AUTO or any(name in env for name in NAMES):
        return False
    if is_srun(command):
        text = "\n".join(command[srun_options(command)[1] :])
    elif calls_srun(command, text):
        return False  # each of its steps has ranks of its own
    return bool(_PROGRAM.search(text)) and not _LAUNCHER.search(text)


def in_each_rank(command: tuple[str, ...], *, names: bool) -> tuple[str, ...]:
    """Return an srun ``command`` in whose ranks a shell sets the names, and is replaced by the program.

    Any other command stays as it is.
    """
    at = srun_options(command)[1] if is_srun(command) else len(command)
    node = any(ENV_NODE_RANK in word for word in command[at:])
    if at == len(command) or not (names or node):
        return command
    script = f'{_NODE}{_RANK if names else ""}exec "$@"'
    return (*command[:at], "/bin/sh", "-c", script, "ftsupervise-rank", *command[at:])


# What an srun hands on to its ranks, where it is told not to hand on all: ours goes with it.

_EXPORT_ENV = "SLURM_EXPORT_ENV"


def exported(command: tuple[str, ...], env: dict[str, str], outer: Mapping[str, str]) -> tuple[str, ...]:
    """Return an srun ``command`` whose ``--export`` hands on our variables too. SLURM_EXPORT_ENV is completed in ``env``.

    Without them a rank has no fence, no beats and no run. ``outer``: the environment before we set any. A program that would no
    longer be found without a PATH is named by its path, as srun itself finds it.
    """
    if not is_srun(command):
        return command
    options, at = srun_options(command)
    given = [value for name, value in options if name == "--export"]
    asked = given[-1] if given else env.get(_EXPORT_ENV, "")
    names = {word.partition("=")[0] for word in asked.split(",")}
    if not asked or "ALL" in names:
        return command
    ours = [key for key in env if not key.startswith("SLURM_") and env[key] != outer.get(key)]
    ours += [key for key in env if key.startswith("FTSUPERVISE_") and key not in ours]
    theirs = [] if asked in ("NONE", "NIL") else [asked]
    whole = ",".join([*theirs, *(key for key in ours if key not in names)])
    if "PATH" not in names and at < len(command):
        found = shutil.which(command[at], path=env.get("PATH")) or command[at]
        command = (*command[:at], found, *command[at + 1 :])
    if not given:
        env[_EXPORT_ENV] = whole
        return command
    end = at - (command[at - 1] == "--")
    return (*command[:end], f"--export={whole}", *command[end:])  # of two equal options, srun takes the last


# torchrun reads each of its options from PET_…, too.

_MEETS = re.compile(r"--(?:standalone|rdzv|master|node.rank)")
_SIZE = re.compile(r"--nnodes\b")


def torchrun_env(text: str, point: MeetingPoint, run: str, attempt: int, env: Mapping[str, str]) -> dict[str, str]:
    """Return the options of a torchrun that was told neither where its agents meet nor how many they are; {} for other
    commands.
    """
    if not _TORCHRUN.search(text) or _MEETS.search(text) or any(key.startswith("PET_RDZV") for key in env):
        return {}
    found = {
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": f"{point.address}:{point.port}",
        "PET_RDZV_ID": f"{run}-{attempt}",
    }
    if not _SIZE.search(text) and "PET_NNODES" not in env:
        found["PET_NNODES"] = str(point.nodes)
    return found
