"""Writing the ledger: one directory per start of the command. Whoever claimed an attempt is the only one to write its pages."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import TYPE_CHECKING

from ftsupervise.errors import from_os_error
from ftsupervise.host import processes
from ftsupervise.host.modes import claim_folder
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.model import Attempt
from ftsupervise.rundir.fence import last_desk
from ftsupervise.rundir.ledger import numbers
from ftsupervise.rundir.paths import ENV_JOB_ID, RunDir
from ftsupervise.rundir.records import write_json

if TYPE_CHECKING:
    from ftsupervise.run.attempt import End


@dataclass(frozen=True)
class Claim:
    """An attempt that is ours."""

    number: int
    folder: Path


def claim(rundir: RunDir) -> Claim:
    """The next attempt number, ours by mkdir. Raises CannotWrite, NotPermitted."""
    try:
        number = 1 + max([*numbers(rundir), last_desk(rundir.desks)])
        while True:
            try:
                return _make(rundir, number)
            except FileExistsError:
                number += 1
    except OSError as error:
        raise from_os_error(error, f"write {rundir.attempts}") from None


def claim_after(rundir: RunDir, mine: int) -> Claim | None:
    """The very next attempt after ``mine``, which was ours too; None when another has taken it, and with it our place.

    Raises CannotWrite, NotPermitted.
    """
    try:
        return _make(rundir, mine + 1)
    except FileExistsError:
        return None
    except OSError as error:
        raise from_os_error(error, f"write {rundir.attempts}") from None


def give_back(mine: Claim) -> None:
    """Nothing was written in it: it is no attempt. What cannot be removed stays, as one that nothing was started for."""
    try:
        mine.folder.rmdir()
    except OSError:
        return


def _make(rundir: RunDir, number: int) -> Claim:
    folder = rundir.attempt(number)
    claim_folder(folder)
    return Claim(number, folder)


def job_id(env: Mapping[str, str]) -> str:
    """The job as squeue prints it ("88_3"), or what the local scheduler calls it; "" outside any."""
    if env.get("SLURM_ARRAY_JOB_ID") and env.get("SLURM_ARRAY_TASK_ID"):
        return f"{env['SLURM_ARRAY_JOB_ID']}_{env['SLURM_ARRAY_TASK_ID']}"
    return env.get("SLURM_JOB_ID") or env.get(ENV_JOB_ID, "")


def write_start(
    mine: Claim,
    env: Mapping[str, str],
    command: Sequence[str],
    now: datetime,
    end: float | None,
    *,
    in_place: int = 0,
    nodes: Sequence[str] = (),
) -> None:
    """The first page. Others may read it: what has the form of a secret in the command is left out. Raises CannotWrite,
    NotPermitted."""
    from ftsupervise.secrecy import masked

    record: dict[str, object] = {
        "attempt": mine.number,
        "job_id": job_id(env),
        "at": now.isoformat(),
        "host": os.uname().nodename,
        "nodes": compress_hostlist(tuple(nodes)) or env.get("SLURM_JOB_NODELIST", ""),
        "in_place": in_place,
        "restart_count": env.get("SLURM_RESTART_COUNT", "0"),
        "command": [masked(word) for word in command],
        "pid": os.getpid(),
        "pid_start": processes.identity(os.getpid()),
        "boot_id": processes.boot_id(),
        "job_ends": datetime.fromtimestamp(end, timezone.utc).isoformat() if end else None,
    }
    try:
        write_json(mine.folder / "start.json", record)
    except OSError as error:
        raise from_os_error(error, f"write {mine.folder}") from None


def write_end(mine: Claim, ended: End, then: str, now: datetime) -> None:
    """The last page: how it ended and what was done about it. Raises OSError."""
    record: dict[str, object] = {
        "attempt": mine.number,
        "at": now.isoformat(),
        "exit_code": ended.code,
        "cause": ended.words,
        "kind": ended.failure.kind.value if ended.failure else "",
        "failure": ended.failure.sign if ended.failure else "",
        "detail": ended.failure.detail if ended.failure else "",
        "then": then,
        "first_step": ended.reached.first,
        "last_step": ended.reached.last,
        "saved": ended.reached.saved,
        "ready": None if ended.ready is None else round(ended.ready, 2),
        "seconds": round(ended.seconds, 1),
        "note": ended.note,
    }
    write_json(mine.folder / "end.json", record)


def as_attempt(mine: Claim, ended: End, now: datetime) -> Attempt:
    """What has just ended as the ledger will have it."""
    return Attempt(
        number=mine.number,
        job_id="",
        started=datetime.fromtimestamp(now.timestamp() - ended.seconds, timezone.utc),
        ended=now,
        exit_code=ended.code,
        cause=ended.words,
        first_step=ended.reached.first,
        last_step=ended.reached.last,
        kind=ended.failure.kind.value if ended.failure else "",
        failure=ended.failure.sign if ended.failure else "",
        saved=ended.reached.saved,
        ready=ended.ready,
        detail=ended.failure.detail if ended.failure else "",
    )
