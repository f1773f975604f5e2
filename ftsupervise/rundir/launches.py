"""What the run directory tells about a run: its launches. Readers only; whoever writes a record owns its file.

Light (standard library), because ``status`` and the gate of every job read this. A record that is half there or damaged is
skipped by the readers and never an error: another process may be writing it at this moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple

from ftsupervise.host.users import user_id, user_name
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, as_count, decode, read_json, time_of

NEWEST = 1000  # launches that are read: whoever may write there can make any number of them


class LaunchRecord(NamedTuple):
    """One page of ``launches/``. ``state``: "submitting" (no answer yet), "submitted" or "rejected"."""

    number: int = 0
    state: str = "submitting"
    token: str = ""
    at: datetime = EPOCH
    by: str = "somebody"
    scheduler: str = ""
    chain: str = ""
    members: int = 1
    after: str = ""
    job_ids: tuple[str, ...] = ()
    config: Annotated[str, 4096] = ""  # the settings file it was launched from
    owner: int | None = None  # the user id of the owner of the run directory
    name: str = ""
    comment: str = ""  # of its jobs


def launches(run_dir: RunDir) -> tuple[LaunchRecord, ...]:
    """The newest launches of the run, at most ``NEWEST``, oldest first. Raises OSError if the directory cannot be read; () if
    there is none."""
    try:
        names = sorted((p.name for p in run_dir.launches.iterdir() if as_count(p.name) is not None), key=int)
    except FileNotFoundError:
        return ()
    return tuple(_launch(run_dir, name) for name in names[-NEWEST:])


def job_ids(records: Iterable[LaunchRecord], env: Mapping[str, str]) -> frozenset[str]:
    """The jobs of those launches and the one that we are in, of an array its own number: ``base_id`` of what squeue lists."""
    here = {env.get("SLURM_ARRAY_JOB_ID", ""), env.get("SLURM_JOB_ID", "")} - {""}
    return frozenset(here.union(*(record.job_ids for record in records)))


def people(run_dir: RunDir, known: Iterable[LaunchRecord] | None = None) -> tuple[str, ...]:
    """Accounts whose jobs may be this run's: the owner of the run directory, and whoever has launched it (``known``: its
    launches, where they have been read).

    () when it is not there. Accounts that are gone are left out: squeue refuses to answer about them at all.
    """
    try:
        uid = run_dir.root.stat().st_uid
        found = [record.by.rpartition("@")[0] for record in (launches(run_dir) if known is None else known)]
    except OSError:
        return ()
    return tuple(dict.fromkeys([user_name(uid), *(name for name in found if user_id(name) is not None)]))


def _launch(run_dir: RunDir, name: str) -> LaunchRecord:
    """A launch without a readable launch.json is one that was claimed and not written yet: "submitting"."""
    folder = run_dir.launches / name
    try:
        raw = read_json(folder / "launch.json") or {}
    except (OSError, ValueError):
        raw = {}
    record = decode(LaunchRecord, {**raw, "number": int(name)}, lenient=True)
    return record if record.at != EPOCH else record._replace(at=_made(folder))


def _made(folder: Path) -> datetime:
    try:
        return time_of(folder.stat())
    except OSError:
        return EPOCH
