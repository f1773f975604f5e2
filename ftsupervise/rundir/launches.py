"""The launches of a run, read from its run directory. Readers only: the writer of a record owns its file.

Light (standard library), because ``status`` and the gate of every job read this. A record that is half there or damaged is
skipped by the readers and never an error: another process may be writing it at this moment.
"""

import os
from collections.abc import Iterable
from datetime import datetime
from pathlib import Path
from typing import Annotated, NamedTuple, Optional

from ftsupervise.host.ownership import user_id, user_name
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import EPOCH, as_count, as_counts, decode, read_json, time_of

NEWEST = 1000  # launches that are read: a writer of the folder can make any number of them


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
    owner: Optional[int] = None  # the user id of the owner of the run directory
    name: str = ""
    comment: str = ""
    written: bool = True  # False: the number is claimed, and nothing was submitted yet
    observe: tuple[str, ...] = ()  # decisions that it has only told


def launches(run_dir: RunDir, most: int = NEWEST) -> tuple[LaunchRecord, ...]:
    """Return the newest launches of the run, at most ``most``, oldest first.

    Raises OSError if the directory cannot be read; () if there is none.
    """
    try:
        names = sorted((p.name for p in run_dir.launches.iterdir() if as_count(p.name) is not None), key=int)
    except FileNotFoundError:
        return ()
    return tuple(_launch(run_dir, name) for name in names[-most:])


def newest_script(run_dir: RunDir, submission: int) -> Optional[Path]:
    """Return the script of this submission (from 1) of the newest launch, where that had several; None where there is none, or
    it cannot be seen."""
    try:
        newest = max(as_counts(os.listdir(run_dir.launches)), default=0)
        script = run_dir.launches / f"{newest:04d}" / f"train-{submission}.sbatch"
        return script if script.is_file() else None
    except OSError:
        return None


def of_this_account(run_dir: RunDir, records: Iterable[LaunchRecord]) -> tuple[LaunchRecord, ...]:
    """Return those of ``records`` whose jobs this account may change.

    These are all in its own run directory. In another account's, whose owner may write any job's number there, they are
    only those that it wrote itself. Raises OSError.
    """
    me = os.geteuid()
    if run_dir.root.stat().st_uid == me:
        return tuple(records)
    return tuple(one for one in records if _owner(run_dir.launches / f"{one.number:04d}" / "launch.json") == me)


def may_change(run_dir: RunDir, job_id: str) -> bool:
    """Return whether this account may change the job because a page of the run names it.

    See ``of_this_account``. Raises OSError.
    """
    if run_dir.root.stat().st_uid == os.geteuid():
        return True
    believed = of_this_account(run_dir, launches(run_dir))
    return any(job_id.partition("_")[0] in record.job_ids for record in believed)


def _owner(page: Path) -> Optional[int]:
    try:
        return page.lstat().st_uid
    except OSError:
        return None


def people(run_dir: RunDir, known: Optional[Iterable[LaunchRecord]] = None) -> tuple[str, ...]:
    """Return accounts whose jobs may be this run's: the owner of the run directory, and all that launched it.

    ``known``: its launches, where they have been read. () when it is not there. Accounts that are gone are left out:
    squeue refuses to answer about them at all.
    """
    try:
        uid = run_dir.root.stat().st_uid
        found = [record.by.rpartition("@")[0] for record in (launches(run_dir) if known is None else known)]
    except OSError:
        return ()
    return tuple(dict.fromkeys([user_name(uid), *(name for name in found if user_id(name) is not None)]))


def _launch(run_dir: RunDir, name: str) -> LaunchRecord:
    """Return a launch. One without a readable launch.json was claimed and not written yet: "submitting"."""
    folder = run_dir.launches / name
    try:
        page = read_json(folder / "launch.json")
    except (OSError, ValueError):
        page = {}
    record = decode(LaunchRecord, {**(page or {}), "number": int(name), "written": page is not None}, lenient=True)
    return record if record.at != EPOCH else record._replace(at=_made(folder))


def _made(folder: Path) -> datetime:
    try:
        return time_of(folder.stat())
    except OSError:
        return EPOCH
