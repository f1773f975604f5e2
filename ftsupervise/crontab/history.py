"""Every run of every entry: where its output is, how it ended, how late it was.

runs/hourly.disk/since                  when the entry was first seen
runs/hourly.disk/20261121T090000Z/      one run, claimed by mkdir
    start.json, output, end.json        end.json is missing while it runs, and for ever when its tick was killed
runs/hourly.disk/last                   a link to the newest run
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.crontab.place import CronDir, read_stamp, stamp
from ftsupervise.host.files import read_bounded
from ftsupervise.host.modes import make_folder
from ftsupervise.printable import printable_lines
from ftsupervise.rundir.paths import write_whole
from ftsupervise.rundir.records import read_json, write_json


@dataclass(frozen=True)
class Ran:
    """One run as written down. ``outcome``: "ok", "failed", "unknown", "skipped" or "missed"; "" while no end is
    known."""

    key: str
    at: datetime  # its slot, or when somebody started it by hand
    folder: Path
    started: datetime | None = None
    late: float = 0.0  # seconds from the slot to the start
    host: str = ""
    pid: int = 0
    tick_job: str = ""
    job_comment: str = ""  # of the job a job script became
    job_id: str = ""
    missed: int = 0  # slots before this one at which it should have run
    outcome: str = ""
    code: int | None = None
    words: str = ""  # how it ended, for people: "exit code 3", "ended at its bound of 10m"
    seconds: float = 0.0
    output_at: str = ""  # where its output is if not in ``folder``

    @property
    def output(self) -> Path:
        return Path(self.output_at) if self.output_at else self.folder / "output"

    @property
    def open(self) -> bool:
        return not self.outcome


def first_seen(cron: CronDir, key: str, now: datetime) -> datetime:
    """When a tick saw the entry for the first time; ``now``, and written down, if this is it."""
    path = cron.runs / key / "since"
    try:
        seen = _time(read_bounded(path, 100).decode("ascii").strip())
    except (OSError, ValueError):
        seen = None
    if seen is not None:
        return seen
    try:
        make_folder(path.parent, parents=True)
        write_whole(path, now.isoformat() + "\n")
    except OSError:
        pass
    return now


def claim(cron: CronDir, key: str, at: datetime, record: Mapping[str, object]) -> Path | None:
    """The directory of a new run, with its start.json in it; None if this run exists. Raises OSError.

    Both appear at once: a tick that is killed here must not leave a run of which nobody knows whose it is.
    """
    folder = cron.runs / key / stamp(at)
    fresh = folder.parent / f".claim-{os.uname().nodename}-{os.getpid()}-{stamp(at)}"
    if folder.exists():
        return None
    make_folder(fresh, parents=True)
    try:
        write_json(fresh / "start.json", record)
        os.rename(fresh, folder)  # does not replace a directory that has something in it
    except OSError as error:
        shutil.rmtree(fresh, ignore_errors=True)
        if error.errno in (errno.ENOTEMPTY, errno.EEXIST):
            return None
        raise
    _point_to(folder)
    return folder


def write_start(folder: Path, record: Mapping[str, object]) -> None:
    """Say more about a run that was claimed. Raises OSError."""
    write_json(folder / "start.json", record)


def _point_to(folder: Path) -> None:
    link = folder.parent / "last"
    temp = folder.parent / f".last-{os.uname().nodename}-{os.getpid()}"
    try:
        temp.unlink(missing_ok=True)
        temp.symlink_to(folder.name)
        temp.replace(link)
    except OSError:  # a convenience for people
        return


def write_end(
    folder: Path, at: datetime, outcome: str, words: str, *, code: int | None = None, seconds: float = 0.0
) -> None:
    """Raises OSError."""
    record = {"at": at.isoformat(), "outcome": outcome, "words": words, "code": code, "seconds": round(seconds, 3)}
    write_json(folder / "end.json", record)


def runs(cron: CronDir, key: str, *, most: int = 1000) -> tuple[Ran, ...]:
    """The newest ``most`` runs of an entry, newest first. Raises OSError; () when it never ran."""
    return tuple(_read(cron.runs / key / stamp(at), key, at) for at in _stamps(cron.runs / key)[:most])


def newest_begun(cron: CronDir, key: str) -> Ran | None:
    """The newest run that was not merely skipped or missed: the one that may still go on."""
    for at in _stamps(cron.runs / key):
        ran = _read(cron.runs / key / stamp(at), key, at)
        if ran.outcome not in ("skipped", "missed"):
            return ran
    return None


def keys(cron: CronDir) -> tuple[str, ...]:
    """Every entry that has runs, also those whose file is gone."""
    try:
        return tuple(sorted(name for name in os.listdir(cron.runs) if not name.startswith(".")))
    except OSError:
        return ()


def prune(cron: CronDir, key: str, keep: int) -> None:
    """Forget all but the newest ``keep`` runs; a run that has no end is kept a while longer. Best effort."""
    try:
        old = _stamps(cron.runs / key)[keep:]
    except OSError:
        return
    for left in (cron.runs / key).glob(".claim-*"):
        if len(old) and left.name[-len(stamp(old[0])) :] <= stamp(old[0]):
            shutil.rmtree(left, ignore_errors=True)
    for index, at in enumerate(old):
        folder = cron.runs / key / stamp(at)
        if index < keep and not (folder / "end.json").exists():
            continue
        shutil.rmtree(folder, ignore_errors=True)


def tail(path: Path, *, lines: int = 15, most: int = 4000) -> str:
    """The end of an output file, harmless to print; "" if it cannot be read."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(fd, "rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - most))
            text = file.read(most).decode("utf-8", "replace")
    except OSError:
        return ""
    return "\n".join(printable_lines(text).splitlines()[-lines:])


def lost(ran: Ran, now: datetime, limit: timedelta, ticks: frozenset[str] | None, asked: datetime) -> bool:
    """An open run of an executable whose tick was killed.

    ``ticks``: ids of the jobs that lived when ``asked``, None when nobody could ask.
    """
    if not ran.open or ran.job_comment:
        return False
    began = ran.started or ran.at
    if began >= asked:
        return False
    if now - began > limit + timedelta(minutes=2):
        return True
    if ran.tick_job:
        return ticks is not None and ran.tick_job not in ticks
    if ran.host == os.uname().nodename and ran.pid:
        return not Path(f"/proc/{ran.pid}").exists()
    return False


def _stamps(folder: Path) -> list[datetime]:
    try:
        with os.scandir(folder) as found:
            names = [one.name for one in found if one.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    return sorted((at for at in map(read_stamp, names) if at is not None), reverse=True)


def _read(folder: Path, key: str, at: datetime) -> Ran:
    start, end = _json(folder / "start.json"), _json(folder / "end.json")
    return Ran(
        key=key,
        at=at,
        folder=folder,
        started=_time(start.get("at")),
        late=_number(start.get("late")),
        host=str(start.get("host", "")),
        pid=int(_number(start.get("pid"))),
        tick_job=str(start.get("tick_job", "")),
        job_comment=str(start.get("job_comment", "")),
        job_id=str(start.get("job_id", "")),
        missed=int(_number(start.get("missed"))),
        outcome=str(end.get("outcome", "")),
        code=int(_number(end.get("code"))) if end.get("code") is not None else None,
        words=str(end.get("words", "")),
        seconds=_number(end.get("seconds")),
        output_at=str(start.get("output", "")),
    )


def _json(path: Path) -> dict[str, object]:
    try:
        return read_json(path, limit=1_000_000) or {}
    except (OSError, ValueError):
        return {}


def _number(value: object) -> float:
    return float(value) if isinstance(value, (int, float)) and abs(value) < 1e12 else 0.0


def _time(value: object) -> datetime | None:
    """None for what is no time, has no zone, or has no name in UTC."""
    try:
        at = datetime.fromisoformat(str(value))
        return at.astimezone(timezone.utc) if at.tzinfo is not None else None
    except (ValueError, OverflowError):
        return None
