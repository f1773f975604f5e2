"""What the command finds in its environment: which run, which attempt, where it writes, and what launchers below it need."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ftsupervise.hostlist import compress_hostlist
from ftsupervise.job import ledger
from ftsupervise.job.placement import Placement, is_srun
from ftsupervise.pages import ENV_PAGES
from ftsupervise.rundir import (
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_DEADLINE,
    ENV_DESK,
    ENV_GUARD,
    ENV_NODES,
    ENV_RESTART,
    ENV_RUN,
    ENV_RUN_DIR,
    ENV_STAGING,
)

if TYPE_CHECKING:
    from ftsupervise.job.supervise import Ring


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
    if options.budgets.in_place and is_srun(options.command):
        given.setdefault(
            "SLURM_KILL_BAD_EXIT", "1"
        )  # without it srun waits for ever for ranks that wait for a dead one
    return given
