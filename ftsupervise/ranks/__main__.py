"""``python -m ftsupervise.ranks --base DIR --to HOST,HOST --port N``: the agent. ``ftsupervise run`` starts one per node."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from ftsupervise.rundir.paths import ENV_GROUP, ENV_GROUP_JOB
from ftsupervise.rundir.records import as_count

if TYPE_CHECKING:
    from ftsupervise.ranks.agent import AgentConfig

# Agents that have lost their supervisor end a job whose batch host is lost.
#
# With ``--no-kill`` Slurm takes a lost node out of a job and leaves the job running, even without its batch host: nothing
# is supervised or trained, and the other nodes are held until the time limit. So the agents of a few nodes stay, ask Slurm,
# and end such a job.

_FEW = 4  # nodes whose agents stay: several may be lost at once, but thousands would overload the controller
_STAY = 3600.0  # seconds; Slurm gives a node up after its SlurmdTimeout (300 s by default)
_PAUSES = (2.0, *(5.0,) * 24, 10.0, 20.0, 30.0)  # seconds between two questions; the last for all that follow


def stays(env: Mapping[str, str]) -> bool:
    """Return whether this node is one of the few. The nodes of replica groups belong to a job that has agents of its own."""
    if env.get(ENV_GROUP) and not env.get(ENV_GROUP_JOB):
        return False
    node = as_count(env.get("SLURM_NODEID", ""))
    return bool(env.get("SLURM_JOB_ID")) and node is not None and node < _FEW


def see_to_the_end(env: Mapping[str, str], stay: float = _STAY, pauses: Sequence[float] = _PAUSES) -> None:
    """Ask Slurm again and again for ``stay`` seconds; end the job once its batch host is lost."""
    from ftsupervise.scheduler.allocation import end_without_host

    until, count = time.monotonic() + stay, 0
    turn = max(1, as_count(env.get("SLURM_NODEID", "")) or 1)  # the more of us there are, the less each asks
    while time.monotonic() < until:
        time.sleep(turn * pauses[min(count, len(pauses) - 1)])
        count += 1
        try:
            if end_without_host(env["SLURM_JOB_ID"], env):
                return
        except OSError:  # no Slurm commands on this node
            return


_USAGE = """usage: python -m ftsupervise.ranks --base DIR --to HOST[,HOST…] --port N --generation N [--every S] [--closer S]
                                   [--snapshots DIR --copies SHARE [--at-once 1]]
  --base DIR       where the ranks' pages are, one sub-directory per attempt
  --to, --port     where the supervisor listens; every address of these names is tried
  --generation N   which start of the agents this is
  --every S        seconds between two beats
  --closer S       the same while no rank of the node makes progress
  --snapshots DIR  where the ranks' snapshots are in memory, and the share of this node's cores for their copies
  --at-once 1      the ranks wait for these copies
  --answer TEXT    run no agent: answer one question ("evidence PID") and exit
The key comes in $FTSUPERVISE_NODE_KEY. `ftsupervise run` starts this by itself."""


_OPTIONS = {
    f"--{name}"
    for name in ["base", "to", "port", "generation", "every", "closer", "lost", "snapshots", "copies", "at-once"]
}


def config(words: list[str]) -> AgentConfig:
    """Return the settings from the arguments. Raises ValueError where they make no sense."""
    from ftsupervise.ranks.agent import AgentConfig

    given = dict(zip(words[::2], words[1::2], strict=True))
    if not given.keys() <= _OPTIONS:
        raise ValueError(" ".join(words))
    return AgentConfig(
        base=given["--base"],
        hosts=tuple(given["--to"].split(",")),
        port=int(given["--port"]),
        generation=int(given["--generation"]),
        every=float(given.get("--every", "1")),
        closer=float(given.get("--closer", given.get("--every", "1"))),
        node=os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename,
        lost=float(given.get("--lost", "300")),
        snapshots=given.get("--snapshots", ""),
        copies=float(given.get("--copies", "0")),
        at_once=given.get("--at-once") == "1",
    )


def main() -> int:
    if sys.argv[1:2] == ["--answer"] and len(sys.argv) == 3:
        from ftsupervise.ranks.rpc import answer

        sys.stdout.write(answer(sys.argv[2], os.environ.get("SLURMD_NODENAME", "")))
        sys.stdout.flush()
        os._exit(0)  # a hung thread does not delay the exit
    from ftsupervise.ranks.agent import Agent  # imported here: a question about a hang needs none of it
    from ftsupervise.ranks.protocol import ENV_KEY, KEY

    key = os.environ.pop(ENV_KEY, "")
    try:
        given, secret = config(sys.argv[1:]), bytes.fromhex(key)
        if len(secret) != KEY:
            raise ValueError("no key")
    except (KeyError, ValueError):
        sys.stderr.write(_USAGE + "\n")
        return 2
    here = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # where srun runs, as this node sees it
    hosts = [host for host in dict.fromkeys((here, *given.hosts)) if host]
    agent = Agent(given._replace(hosts=tuple(hosts)), secret)
    agent.run()
    if agent.orphan:
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if stays(os.environ):
            see_to_the_end(os.environ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
