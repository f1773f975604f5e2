"""What the command finds in its environment: which run, which attempt, where it writes, and what launchers below it need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ftsupervise.hostlist import compress_hostlist
from ftsupervise.nodes.placement import Placement, calls_srun
from ftsupervise.run import ledger
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.paths import (
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_DEADLINE,
    ENV_DESK,
    ENV_GUARD,
    ENV_NODES,
    ENV_PORT,
    ENV_RESTART,
    ENV_RUN,
    ENV_RUN_DIR,
    ENV_STAGING,
    ERROR_FILE,
)
from ftsupervise.rundir.records import as_count

ENV_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_PORTS = (20_000, 10_000)  # the first, and how many: below those the kernel gives away

if TYPE_CHECKING:
    from ftsupervise.run.supervisor import Ring


def command_env(ring: Ring, mine: ledger.Claim, placement: Placement) -> dict[str, str]:
    """The environment of the command: ours, with what names this run, this attempt and its limits."""
    options = ring.options
    given = {key: value for key, value in ring.env.items() if not key.startswith(ENV_GUARD)}
    given.update({ENV_GUARD + key: value for key, value in options.guard.items()})
    given[ENV_RUN_DIR] = str(options.rundir.root)
    given[ENV_RUN] = options.name
    given[ENV_ATTEMPT] = str(mine.number)
    given[ENV_ATTEMPT_DIR] = str(mine.folder)
    given[ENV_RESTART] = str(ring.restarts)
    given[ENV_PAGES] = ring.pages
    given.setdefault(ENV_CHECKPOINT_DIR, str(options.rundir.checkpoints))
    for key in (ENV_DESK, ENV_STAGING):
        given.pop(key, None)
    if ring.hold is not None:
        given.update(ring.hold.env())
    if placement.nodes:
        given[ENV_NODES] = compress_hostlist(placement.nodes)
    if ring.end is not None:
        given[ENV_DEADLINE] = f"{ring.end:.0f}"
    if ring.crowded:
        given.setdefault("SLURM_OVERLAP", "1")
    if options.budgets.in_place and calls_srun(options.command, ring.nodes.text):
        given.setdefault(
            "SLURM_KILL_BAD_EXIT", "1"
        )  # without it srun waits for ever for ranks that wait for a dead one
    _for_launchers(given, ring.env, mine)
    ring.warm.begin(mine.number, given)
    return given


def _for_launchers(given: dict[str, str], outer: Mapping[str, str], mine: ledger.Claim) -> None:
    """What torchrun needs to be ended and started again well. What a person has set stays.

    Its agent hands one store to all starts of its workers, in which gloo finds the addresses of the last ones (2.13); and it
    always exits with 1, but writes the error of the rank that failed first where it is told to. A port of this attempt's own,
    for ``--master-port=$FTSUPERVISE_PORT``, meets nobody who still holds the last one's.
    """
    given.setdefault("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", "1")
    if ENV_ERROR_FILE not in outer:
        given[ENV_ERROR_FILE] = str(mine.folder / ERROR_FILE)
    job = outer.get("SLURM_JOB_ID", "")
    given[ENV_PORT] = str(_PORTS[0] + ((as_count(job) or 0) * 97 + mine.number) % _PORTS[1])
