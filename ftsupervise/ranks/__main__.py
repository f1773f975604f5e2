"""``python -m ftsupervise.ranks --base DIR --to HOST,HOST --port N``: the agent. ``ftsupervise run`` starts one per node."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ftsupervise.ranks.agent import AgentConfig

_USAGE = """usage: python -m ftsupervise.ranks --base DIR --to HOST[,HOST…] --port N --generation N [--every S] [--closer S]
                                   [--child WORD…]
  --base DIR       where the ranks' pages are, one sub-directory per attempt
  --to, --port     where the ring listens; all that the names mean is tried
  --generation N   which start of the agents this is
  --every S        seconds between two beats
  --closer S       the same while all ranks of the node stand still
  --child WORD…    a command to start, and to end with the agent; takes all that follows
  --answer TEXT    be no agent: answer one question ("evidence PID") and leave
The key comes in $FTSUPERVISE_NODE_KEY. `ftsupervise run` starts this by itself."""


def orders(words: list[str]) -> AgentConfig:
    """Raises ValueError for words that make no sense."""
    from ftsupervise.ranks.agent import AgentConfig

    given: dict[str, str] = {}
    child: tuple[str, ...] = ()
    while words:
        word = words.pop(0)
        if word == "--child":
            child, words = tuple(words), []
        elif word in ("--base", "--to", "--port", "--generation", "--every", "--closer", "--lost") and words:
            given[word[2:]] = words.pop(0)
        else:
            raise ValueError(word)
    return AgentConfig(
        base=given["base"],
        hosts=tuple(given["to"].split(",")),
        port=int(given["port"]),
        generation=int(given["generation"]),
        every=float(given.get("every", "1")),
        closer=float(given.get("closer", given.get("every", "1"))),
        node=os.environ.get("SLURMD_NODENAME", "") or os.uname().nodename,
        child=child,
        lost=float(given.get("lost", "300")),
    )


def main() -> int:
    if sys.argv[1:2] == ["--answer"] and len(sys.argv) == 3:
        from ftsupervise.ranks.rpc import answer

        sys.stdout.write(answer(sys.argv[2], os.environ.get("SLURMD_NODENAME", "")))
        sys.stdout.flush()
        os._exit(0)  # what hangs in a thread holds nobody up
    from ftsupervise.ranks.agent import Agent  # here: who asks about a hang does not wait for what only an agent needs
    from ftsupervise.ranks.protocol import ENV_KEY, KEY

    key = os.environ.pop(ENV_KEY, "")
    try:
        told, secret = orders(sys.argv[1:]), bytes.fromhex(key)
        if len(secret) != KEY:
            raise ValueError("no key")
    except (KeyError, ValueError):
        sys.stderr.write(_USAGE + "\n")
        return 2
    here = os.environ.get("SLURM_LAUNCH_NODE_IPADDR", "")  # where srun runs, as this node sees it
    hosts = [host for host in dict.fromkeys((here, *told.hosts)) if host]
    agent = Agent(told._replace(hosts=tuple(hosts)), secret)
    agent.run()
    if agent.orphan:
        from ftsupervise.ranks import orphan

        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        if orphan.stays(os.environ):
            orphan.see_to_the_end(os.environ)
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
