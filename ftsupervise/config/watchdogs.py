"""The ``watch:`` section: how often to check, and one section for each watchdog.

A watchdog whose section is null is off. With nothing said, those are on whose field in ``Watch`` is not None by default;
``memory: {}`` is enough to switch another one on. A watchdog runs at each tick, or every ``every``.
"""

from __future__ import annotations

import re
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import AfterValidator, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from ftsupervise.config.fields import Duration, Section, Share, Size, Span, Strict, wrong_at
from ftsupervise.config.plugged import settings_as_kept
from ftsupervise.host.plugins import WATCHDOGS

Some = Annotated[Share, Field(gt=0, le=1)]
Count = Annotated[int, Field(ge=1)]
_M, _H = timedelta(minutes=1), timedelta(hours=1)


def _pattern(value: str, groups: tuple[str, ...] = ()) -> str:
    """A regular expression that compiles and has the needed groups. Raises ValueError with the text to type."""
    try:
        compiled = re.compile(value)
    except re.error as error:
        raise ValueError(f"not a regular expression: {error}") from None
    if not groups and compiled.groups != 1:
        raise ValueError(
            f"write exactly one group around the number, such as 'step (\\d+)'; this has {compiled.groups}"
        )
    for group in groups:
        if group not in compiled.groupindex:
            raise ValueError(f"name the number, (?P<{group}>\\d+)")
    return value


Pattern = Annotated[str, AfterValidator(_pattern)]


class IsRunning(Section):
    """The job of the run: it must be in the queue, running or able to run."""

    passing_for: Duration = 30 * _M
    """How long a job may be SUSPENDED, STOPPED, CONFIGURING, STAGE_OUT or EXPEDITING before an alert."""
    pending_for: Duration | None = None
    """How long a job may wait in the queue before an alert; null: three times the longest of the run's own last waits, 6h at
    least, and no limit before three of them are known."""
    group_away_for: Duration = 30 * _M
    """How long a replica group may be away before an alert; that too few of them run is one at once."""


Signal = Literal["step", "beat", "checkpoint", "log", "gpu"]


class Hang(Section):
    """Progress. The run hangs only if every signal of it stands still for longer than this run's own past allows."""

    signals: tuple[Signal, ...] = ()
    """The signals that count as progress. Default: steps and beats of the guard, steps found in the log and new checkpoints;
    where there is none of them, the growth of the log."""
    log: Path | None = None
    """The log to read, or a pattern such as logs/main-*.out of which the newest is taken. Default: the job's own output."""
    pattern: Pattern | None = None
    """Regular expression with one group that finds the step in a line of the log. Default: the usual forms."""
    at_least: Span = 10 * _M
    """While the guard reports steps and phases, a standstill in training below this is never a hang."""
    quiet: Span = _H
    """The same where only the log reports progress, or a guard without phases: a save or an evaluation looks like training."""
    slow: Span = _H
    """How long a start, a compilation, a save, an evaluation, or any other phase that is not training may take."""
    phases: dict[str, Span] = {}  # noqa: RUF012 - pydantic copies it
    """The same for single phases, by the name the guard gives them: {eval: 2h}."""
    at_most: Span = 4 * _H
    """Pauses learned from the run's past never make the bound longer than this, in training and in any other phase."""


class DiskLimits(Strict):
    """Limits of one file system; each is off when null."""

    free: Size | None = None
    """Space that must be left (of the usable part)."""
    used: Some | None = None
    """Share of the usable part that may be used."""
    inodes: Some | None = None
    """Share of the inodes that may be used."""
    left: Span | None = None
    """How long the space must last by the forecast."""
    checkpoints: Count | None = None
    """How many more checkpoints there must be room for."""


class CriticalDisk(DiskLimits):
    """Limits beyond which it is critical."""

    used: Some | None = 0.97
    inodes: Some | None = 0.97
    left: Span | None = 6 * _H
    checkpoints: Count | None = 2


class Quota(Strict):
    """A command that knows the free space better than the file system."""

    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, run as they stand: [lfs, quota, -q, -u, me, /scratch]."""
    format: Literal["pattern", "lfs", "nagios"] = "pattern"
    """pattern: see below; lfs: the output of "lfs quota -q"; nagios: its exit code 0, 1, 2 is the answer."""
    pattern: str | None = None
    """Regular expression with the groups used and limit, and if wanted files_used and files_limit."""
    unit: Size = 1024
    """The unit of a number that has none."""
    timeout: Span = timedelta(seconds=30)
    """How long the command may take."""

    @model_validator(mode="after")
    def _pattern_there(self) -> Quota:
        if (self.format == "pattern") != (self.pattern is not None):
            raise wrong_at(
                ("pattern",), 'format: pattern needs a pattern such as "used (?P<used>\\d+) of (?P<limit>\\d+)"'
            )
        if self.pattern is not None:
            _pattern(self.pattern, ("used", "limit"))
        return self


class Disk(DiskLimits, Section):
    """One file system: enough space, enough inodes, and for how long."""

    path: Path | None = None
    """A directory on it; default: the run directory."""
    usable: Some = 1.0
    """The share that can really be filled: many parallel file systems fail beyond "80%"."""
    used: Some | None = 0.9
    inodes: Some | None = 0.9
    left: Span | None = 24 * _H
    checkpoints: Count | None = 5
    critical: CriticalDisk = CriticalDisk()
    """The same limits, beyond which it is critical."""
    checkpoint: Size | None = None
    """Size of one checkpoint; default: measured, where the checkpoints lie on this file system."""
    cadence: Span | None = None
    """Time between two checkpoints; default: measured."""
    quota: Quota | None = None
    """A command to ask besides."""

    @model_validator(mode="after")
    def _critical_is_worse(self) -> Disk:
        for name in CriticalDisk.model_fields:
            here, worse = getattr(self, name), getattr(self.critical, name)
            if here is None or worse is None or name not in self.critical.model_fields_set:
                continue
            if worse < here if name in ("used", "inodes") else worse > here:
                raise wrong_at(("critical", name), "the critical limit is reached before the other one")
        return self


class Memory(Section):
    """Host, job and process memory: how full, and when a leak will have filled it."""

    used: Some = 0.92
    """Share of the memory of the host, or of the job's limit, that may be used."""
    critical: Some = 0.97
    """The same, beyond which it is critical."""
    leak: Span | None = 12 * _H
    """Alert when the growth of the run's own processes fills the memory within this; null: do not forecast."""
    gpu: Some | None = None
    """Share of a GPU's memory that may be used. Off: frameworks take all of it and manage it themselves."""

    @model_validator(mode="after")
    def _order(self) -> Memory:
        if self.critical < self.used:
            raise wrong_at(("critical",), "the critical share is smaller than the other one")
        return self


class Gpu(Section):
    """The GPUs of the node the watch runs on, through NVML (install ftsupervise[gpu])."""

    expect: Count | None = None
    """How many GPUs there must be; default: as many as have been seen here before."""
    temperature: Annotated[int, Field(ge=1, le=130)] = 90
    """Degrees Celsius at which an alert is raised."""
    idle_for: Span | None = 30 * _M
    """How long a GPU of a running job may be without any work; null: for ever."""


class CheckpointsSection(Section):
    """Checkpoints: they come when they should, whole and of the usual size."""

    cadence: Span | None = None
    """Time between two of them; default: learned from those that are there."""
    late: Annotated[float, Field(ge=1.1)] = 3.0
    """How many times the cadence the newest may be old."""
    settle: Span = 15 * _M
    """How long writing one may take before it must be whole."""


class Throughput(Section):
    """Steps per hour, against the run's own past."""

    least: Some = 0.7
    """Share of its usual pace below which an alert is raised."""
    window: Span = _H
    """How long it must be slower."""


class StragglerSection(Section):
    """A rank, or the ranks of one node, for which all others wait at each step."""

    least: Some = 0.15
    """Share of the time of all ranks that it costs, from which an alert is raised; less than 10% is not told apart."""


class Loss(Section):
    """The loss in the log, or in the guard's report: not a number, or far above where it was."""

    log: Path | None = None
    """As in hang."""
    pattern: Pattern | None = None
    """Regular expression with one group that finds the loss in a line of the log. Default: the usual forms."""
    spike: Annotated[float, Field(gt=1)] | None = 2.0
    """How many times its recent median is a spike; null: only NaN and infinity raise an alert."""
    only_guard: bool = False
    """Tell only what the guard itself finds wrong with the losses that the loop gives to guard.loss(). It is on where watch has
    no loss section."""


class Exec(Section):
    """Any Nagios plug-in: exit 0 is fine, 1 a warning, 2 critical, anything else "could not see"."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.-]*$")]
    """Its name in messages."""
    command: tuple[str, ...] = Field(min_length=1)
    """The program and its arguments, run as they stand."""
    timeout: Span = timedelta(seconds=30)
    """How long it may take; then it and what it started are ended."""


class Recovery(Section):
    """Recovery: a later attempt has trained since the last failure."""

    start: Span | None = None
    """How long an attempt may take from its start to its first step before it counts as not recovered; null: as long as
    ``launch.restart.hang.start`` gives it (30m)."""


class Watchers(Section):
    """The other watches of this run, which must still run."""


class BrakeSection(Section):
    """The brake: the chain was stopped, because the same failure came again without progress (launch.restart)."""


class Watch(Strict):
    """The checks from outside, and how often they are made."""

    model_config = ConfigDict(extra="allow", json_schema_extra={"additionalProperties": False})  # of other packages

    every: Span = 5 * _M
    """How often the run is meant to be checked. A watch by a crontab is late after three times that, and after three of its own
    intervals; a run that was checked by hand, longer ago than that, is watched by nobody."""
    metrics: Path | None = None
    """The directory of node_exporter's textfile collector, where each tick writes the run's metrics; null: nowhere."""
    is_running: IsRunning = IsRunning()
    """Is a job of the run in the queue?"""
    brake: BrakeSection = BrakeSection()
    """Has the chain been stopped because it failed without progress?"""
    recovery: Recovery = Recovery()
    """Has the run recovered from its last failure?"""
    watchers: Watchers = Watchers()
    """Are the other watches of this run still running?"""
    hang: Hang | None = Hang()
    """Does it make progress?"""
    disk: tuple[Disk, ...] | None = (Disk(),)
    """File systems, one entry each."""
    memory: Memory | None = None
    """Host, job and process memory."""
    gpu: Gpu | None = None
    """GPUs of this node."""
    checkpoints: CheckpointsSection | None = None
    """Do checkpoints come, whole and of the usual size?"""
    throughput: Throughput | None = None
    """Is it as fast as it was?"""
    straggler: StragglerSection | None = StragglerSection()
    """Do all ranks wait for a slow one?"""
    loss: Loss | None = Loss(only_guard=True)
    """Is the loss a number, and near where it was?"""
    exec: tuple[Exec, ...] | None = None
    """Nagios plug-ins."""

    @field_validator("exec")
    @classmethod
    def _names_differ(cls, value: tuple[Exec, ...] | None) -> tuple[Exec, ...] | None:
        names = [one.name for one in value or ()]
        for name in names:
            if names.count(name) > 1:
                raise ValueError(f"two plug-ins are called {name!r}")
        return value

    @model_validator(mode="after")
    def _of_other_packages(self, info: ValidationInfo) -> Watch:
        settings_as_kept(Watch, WATCHDOGS, self.model_extra, info)
        return self


GENERAL = ("every", "metrics")  # keys of ``watch`` that are not watchdogs
