"""The ``cron:`` section: where the crontab emulation lives, how often it looks, and how small its jobs are.

Read by ``ftsupervise cron install``, which writes what it decided into the installed folder; a tick reads only that.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, model_validator

from ftsupervise.config.fields import Duration, Matching, Positive, Size, Strict, wrong_at
from ftsupervise.config.slurm_options import Memory, Name, Names, SbatchOption, VariableName
from ftsupervise.secrecy import by_name

Times = Annotated[
    str,
    Matching(r"@[a-z]+|[^@\s]\S*(?: +\S+){4}", "minute, hour, day of month, month and day of week", "17 * * * *"),
]


class Cron(Strict):
    """A crontab for clusters without one."""

    directory: Path | None = None
    """The installed folder, the same on all nodes. Default: cron beside your own config.yaml."""
    backend: Literal["auto", "slurm", "scrontab", "crontab", "loop"] = "auto"
    """What keeps the time: a chain of small Slurm jobs, scrontab, crontab, or a loop that somebody starts."""
    period: Annotated[Duration, Positive] = timedelta(minutes=5)
    """One slot every so often, on the wall clock. Below 5m a busy Slurm cannot keep up."""
    spares: Annotated[int, Field(ge=2, le=20)] = 3
    """Slots that always have their job in the queue; so many less one may be lost in a row."""
    limit: Annotated[Duration, Positive] = timedelta(minutes=10)
    """An entry that runs longer is ended, with all it started."""
    missed: Literal["once", "skip"] = "once"
    """What becomes of an entry whose slots were missed: run once as soon as possible, or wait for the next."""
    timezone: str | None = None
    """For the times in the crontab file and of the folders, such as "Europe/Berlin"; default: this machine's own."""
    minutely: Times = "* * * * *"
    """When the executables in cron.minutely are due."""
    hourly: Times = "0 * * * *"
    """When those in cron.hourly are due."""
    daily: Times = "0 0 * * *"
    """When those in cron.daily are due."""
    weekly: Times = "0 0 * * 0"
    """When those in cron.weekly are due."""
    keep: Annotated[int, Field(ge=2, le=1000)] = 30
    """Runs of each entry whose output is kept."""
    output: Annotated[Size, Field(ge=1000)] = 1_000_000
    """Output kept of one run: the beginning and the end."""
    partition: Names | None = None
    """Partition of the chain's jobs and of dropped job scripts that name none; best one that shares its nodes."""
    account: Name | None = None
    """Account of the chain's jobs."""
    qos: Name | None = None
    """Quality of service of the chain's jobs."""
    mem: Memory = "500M"
    """Host memory of the chain's jobs, which is what all entries of a slot share."""
    sbatch: tuple[SbatchOption, ...] = ()
    """Further options of sbatch for the chain's jobs, each one "--key=value"."""
    env: tuple[VariableName, ...] = ()
    """Variables the entries get besides PATH, HOME and the virtual environment, as they are at install. Never a secret."""
    trusted: tuple[Name, ...] = ()
    """Accounts besides you and root whose files in the folders are run, as you: who owns a file decides what it does."""
    trusted_group: Name | None = None
    """A group whose members may write the folders and the crontab file, and so run what they like as you. Default: none."""

    @model_validator(mode="after")
    def _sound(self) -> Cron:
        if self.period % timedelta(seconds=1):
            raise wrong_at(("period",), "whole seconds, please")
        if self.timezone is not None:
            from zoneinfo import ZoneInfo

            try:
                ZoneInfo(self.timezone)
            except (KeyError, ValueError, OSError):
                raise wrong_at(("timezone",), f'unknown time zone {self.timezone!r}; such as "Europe/Berlin"') from None
        for index, name in enumerate(self.env):
            if by_name(name):
                raise wrong_at(("env", index), "a secret would be written into the folder; name a file that holds it")
        return self
