"""What the run directory tells about a run: its launches. Readers only; whoever writes a record owns its file.

Light (standard library), because ``status`` and the gate of every job read this. A record that is half there or damaged is
skipped by the readers and never an error: another process may be writing it at this moment.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime, timezone
from pathlib import Path
from typing import NamedTuple

from ftsupervise.rundir.paths import RunDir, read_json
from ftsupervise.rundir.reading import as_count, as_text, as_texts, as_time, as_whole, time_of

NEWEST = 1000  # launches that are read: whoever may write there can make any number of them


class LaunchRecord(NamedTuple):
    """One page of ``launches/``. ``state``: "submitting" (nobody heard back yet), "submitted" or "rejected"."""

    number: int
    state: str
    token: str
    at: datetime
    by: str
    kind: str
    chain: str
    members: int
    after: str
    job_ids: tuple[str, ...]
    config: str = ""  # the settings file it was launched from


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
    import pwd

    try:
        uid = run_dir.root.stat().st_uid
        found = [record.by.rpartition("@")[0] for record in (launches(run_dir) if known is None else known)]
    except OSError:
        return ()
    try:
        owner = pwd.getpwuid(uid).pw_name
    except KeyError:
        owner = str(uid)
    return tuple(dict.fromkeys([owner, *filter(_is_account, found)]))


def _is_account(name: str) -> bool:
    import pwd

    try:
        pwd.getpwnam(name)
    except (KeyError, ValueError):
        return False
    return True


def _launch(run_dir: RunDir, name: str) -> LaunchRecord:
    """A launch without a readable launch.json is one that was claimed and not written yet: "submitting"."""
    folder = run_dir.launches / name
    try:
        raw = read_json(folder / "launch.json") or {}
    except (OSError, ValueError):
        raw = {}
    return LaunchRecord(
        number=int(name),
        state=as_text(raw.get("state", "submitting")),
        token=as_text(raw.get("token")),
        at=as_time(raw.get("at")) or _made(folder),
        by=as_text(raw.get("by", "somebody")),
        kind=as_text(raw.get("scheduler")),
        chain=as_text(raw.get("chain")),
        members=as_whole(raw.get("members")) or 1,
        after=as_text(raw.get("after")),
        job_ids=as_texts(raw.get("job_ids")),
        config=as_text(raw.get("config"), 4096),
    )


def _made(folder: Path) -> datetime:
    try:
        return time_of(folder.stat())
    except OSError:
        return datetime.fromtimestamp(0, timezone.utc)
