"""What the command finds in its environment: which run, which attempt, where it writes, and what launchers below it need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Claim
from ftsupervise.run.settings import Options
from ftsupervise.rundir.heartbeat_page import ENV_PAGES
from ftsupervise.rundir.paths import (
    ENV_AREA,
    ENV_ATTEMPT,
    ENV_ATTEMPT_DIR,
    ENV_CHECKPOINT_DIR,
    ENV_DEADLINE,
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


class Surroundings(NamedTuple):
    """What the job knows that the command is to find."""

    claim: Claim
    restarts: int
    pages: str  # where the ranks make their pages
    nodes: tuple[str, ...]  # () where none were chosen
    end: float | None  # of the job, epoch seconds
    fence: Mapping[str, str]  # what the attempt writes through
    crowded: bool  # a step that does not end holds its CPUs
    calls_srun: bool


def command_env(options: Options, env: Mapping[str, str], found: Surroundings) -> dict[str, str]:
    """The environment of the command: ours, with what names this run, this attempt and its limits."""
    given = {key: value for key, value in env.items() if not key.startswith(ENV_GUARD)}
    given.update({ENV_GUARD + key: value for key, value in options.guard.items()})
    given[ENV_RUN_DIR] = str(options.rundir.root)
    given[ENV_RUN] = options.name
    given[ENV_ATTEMPT] = str(found.claim.number)
    given[ENV_ATTEMPT_DIR] = str(found.claim.folder)
    given[ENV_RESTART] = str(found.restarts)
    given[ENV_PAGES] = found.pages
    given.setdefault(ENV_CHECKPOINT_DIR, str(options.rundir.checkpoints))
    for key in (ENV_AREA, ENV_STAGING):
        given.pop(key, None)
    given.update(found.fence)
    if found.nodes:
        given[ENV_NODES] = compress_hostlist(found.nodes)
    if found.end is not None:
        given[ENV_DEADLINE] = f"{found.end:.0f}"
    if found.crowded:
        given.setdefault("SLURM_OVERLAP", "1")
    if (
        options.budgets.in_place and found.calls_srun
    ):  # without it srun waits for ever for ranks that wait for a dead one
        given.setdefault("SLURM_KILL_BAD_EXIT", "1")
    _for_launchers(given, env, found.claim)
    return given


def _for_launchers(given: dict[str, str], outer: Mapping[str, str], mine: Claim) -> None:
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
