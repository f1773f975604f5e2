"""The runs that are watched, and their settings: read anew when their files change, kept while they cannot be read.

The settings may lie on a dead mount, so ``read`` and ``listed`` are called in a child that may hang (``tick.py``). The names
that this account's state directory has are remembered on this host, with the directories they mean: when the home directory
does not answer, every run stays watched.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

from ftsupervise.alerts.deliver import Delivered
from ftsupervise.config.fields import Strict
from ftsupervise.config.find_run import CONFIG_NAME, settings_of
from ftsupervise.config.sources import is_by_hand
from ftsupervise.errors import Error, about, from_os_error
from ftsupervise.findings import Alert, Finding, Notice
from ftsupervise.host.ownership import own_folder, private_folder
from ftsupervise.rundir import pinned
from ftsupervise.rundir.paths import state_dir
from ftsupervise.rundir.records import Exact, read_record, write_json
from ftsupervise.truth import Health
from ftsupervise.watch.checks import QueueAnswer

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run

_Settings = TypeVar("_Settings", bound=Strict)
_SECTIONS = 16  # of one kind that are looked through for an equal one


@dataclass(frozen=True)
class KnownRun:
    """The settings of a run as they were last read."""

    path: Path
    stamp: object  # None: the settings were given, not read
    run: Run
    said: tuple[
        str, ...
    ] = ()  # the settings that are shown and not used, because another account may have written them


@dataclass
class Roster:
    """``names``: what was typed (a directory, a file, a name; None is this directory); ``known`` by its place among them."""

    names: tuple[str | None, ...]
    known: dict[int, KnownRun] = field(default_factory=dict)
    trust: bool = False  # use the settings of other accounts too, commands included
    away: str = ""  # why the state directory must not be touched in the next tick
    # runs that did not answer at the last tick: each gets a child of its own
    slow: set[int] = field(default_factory=set)
    sections: dict[type[Strict], list[Strict]] = field(
        default_factory=dict
    )  # of the settings that were read, some of each kind

    @classmethod
    def of(cls, runs: Sequence[Run]) -> Roster:
        """Runs whose settings are known and stay as they are."""
        roster = cls(tuple(str(run.run_dir) for run in runs))
        for index, run in enumerate(runs):
            roster.keep(index, KnownRun(Path(), None, run))
        return roster

    def keep(self, index: int, known: KnownRun) -> None:
        """Keep the settings of a run. Most sections of thousands of runs are equal, and are in memory once."""
        self.known[index] = replace(known, run=_shared(known.run, self.sections))

    @property
    def runs(self) -> list[Run]:
        return [self.known[index].run for index in sorted(self.known)]

    def label(self, index: int) -> str:
        return self.names[index] or "this directory"

    def key(self, index: int) -> str:
        """Return the word under which one and the same run is known here at every tick. Touches nothing."""
        name = self.names[index] or CONFIG_NAME
        path = state_dir() / "runs" / name if is_name(name) else name
        return f"run {os.path.abspath(path)}"  # noqa: PTH100

    def place(self, index: int) -> str:
        """Return an absolute path that tells on which device the run lies, without touching it."""
        known = self.known.get(index)
        return str(known.run.run_dir) if known is not None else self.key(index).removeprefix("run ")

    def rename(self, names: Sequence[str]) -> None:
        """Watch these runs from now on."""
        if tuple(names) != self.names:
            by_name = {self.names[index]: known for index, known in self.known.items()}
            self.names, self.slow = tuple(names), set()
            self.known = {i: by_name[name] for i, name in enumerate(names) if name in by_name}


def _shared(settings: _Settings, sections: dict[type[Strict], list[Strict]]) -> _Settings:
    """Return equal settings, of which each section is one of ``sections`` where that has an equal one; else it is added."""
    inner = {name: value for name, value in settings if isinstance(value, Strict)}
    shared = {
        name: _one_of(_shared(value, sections), sections.setdefault(type(value), [])) for name, value in inner.items()
    }
    changed = {name: value for name, value in shared.items() if value is not inner[name]}
    return settings.model_copy(update=changed) if changed else settings


def _one_of(section: Strict, others: list[Strict]) -> Strict:
    for other in others:
        if other == section:
            return other
    others[_SECTIONS - 1 :] = [section]
    return section


def state_key(state: Path) -> str:
    """The key under which a child that hangs on the state directory is noted."""
    return f"state directory {state}"


def is_name(name: str) -> bool:
    """Return whether it is a name that a run was launched under, and no path. Touches nothing."""
    return "/" not in name and name not in ("", ".", "..", CONFIG_NAME)


def target(name: str | None) -> str | None:
    """Return the directory that this account's state directory has for a name; None if a run is not found by it. May hang."""
    if name is None or not is_name(name) or Path(name).exists():
        return None
    try:
        return str((state_dir() / "runs" / name).readlink())
    except OSError:  # no such run, or a directory of that name: ``settings_of`` has the words for it
        return None


def read(name: str | None, known: KnownRun | None, *, trust: bool = False) -> KnownRun:
    """Return the settings of a run: ``known`` itself where its file has not changed. Raises Error. May hang."""
    if known is not None and known.stamp is None:
        return known
    try:
        from ftsupervise.config.believed import load_believed

        path = known.path if known is not None else settings_of(name, bounded=False, judged=False)  # the tick has one
        stamp = _stamp(path)
        if known is not None and known.stamp == stamp:
            return known
        found = load_believed(path, trust=trust)
        return KnownRun(path, stamp, found.run, found.sentences(path))
    except OSError as error:
        raise from_os_error(error, f"read the settings of {name or 'this directory'}") from None


def is_no_more(link: Path) -> bool:
    """Return whether ``link``, of the state directory, or a run directory itself, leads to a run that was over and has been
    deleted. May hang."""
    try:
        root = link.readlink()
    except OSError:
        root = link.absolute()
    return pinned.gone_for_good(state_dir(), root)


def _stamp(path: Path) -> object:
    try:
        found = path.stat()
    except FileNotFoundError:
        if not is_by_hand(path.parent):
            raise
        return "by hand"
    return found.st_mtime_ns, found.st_size, found.st_ino, found.st_uid, found.st_gid, found.st_mode


def listed() -> tuple[str, ...]:
    """Return every run this account has launched. Raises Error. May hang."""
    try:
        links = [one for one in (state_dir() / "runs").iterdir() if not one.name.startswith(".")]
        return tuple(sorted(one.name for one in links if not is_no_more(one)))
    except FileNotFoundError:
        return ()
    except OSError as error:
        raise from_os_error(error, "list the runs this account has launched") from None


# ------------------------------------------------------------------------------------------- remembered on this host


class RememberedRuns(NamedTuple):
    """The page: the directory of each run, by its name."""

    runs: Mapping[str, Exact] = MappingProxyType({})


def directories() -> dict[str, str]:
    """Return name -> run directory, as this account's state directory had it when it last answered."""
    page = _page()
    try:
        found = read_record(RememberedRuns, page) if page is not None else None
    except (OSError, ValueError):
        return {}
    return dict(found.runs) if found is not None else {}


def remember(found: dict[str, str]) -> None:
    """Remember the directories of these names. Best effort."""
    before = directories()
    _write(before, {**before, **found})


def forget_all_but(names: Sequence[str]) -> None:
    """Forget all other names. Best effort."""
    before = directories()
    _write(before, {name: where for name, where in before.items() if name in names})


def _write(before: dict[str, str], now: dict[str, str]) -> None:
    page = _page()
    if page is None or now == before:
        return
    try:
        write_json(page, RememberedRuns(now), mode=0o600, sync=False)
    except OSError:  # a full /tmp: when a state directory hangs later, the names are unknown
        return


def _page() -> Path | None:
    """Return the page of this account's state directory, on this host, in a directory that is ours alone; None without one."""
    folder = private_folder(own_folder() / "runs")
    name = hashlib.sha256(os.fsencode(state_dir().absolute())).hexdigest()[:16]
    return None if folder is None else folder / f"{name}.json"


# The progress of a tick. Each child reports each thing it has done as an event; the parent applies the events to its own copy,
# so that another child can go on where one hung.


@dataclass(frozen=True)
class RunReport:
    """The findings and messages of one tick about one run (or, with no run, about Slurm itself)."""

    name: str
    findings: tuple[Finding, ...]  # those that are not fine
    firing: tuple[Alert, ...] = ()
    notices: tuple[Notice, ...] = ()
    events: tuple[str, ...] = ()
    checks: int = 0  # all findings


@dataclass
class WatchedRun:
    """The progress of this tick with one run."""

    directory: str = ""  # the one that its name means, once that was looked up
    settled: bool = False  # its settings have been read, or cannot be
    trouble: str = ""  # why its settings cannot be read
    error: Error | None = None  # the same, for the person who ran the tick by hand
    storage: Finding | None = None  # how its directory is; OK: it can be used
    missing: bool = False  # its directory is not there
    finished: bool = False  # it needs no job any more, so nobody need ask for any
    over: bool = False  # it has finished, or a person has stopped it
    hung: bool = False  # a child hung on it: it is not touched again in this tick
    report: RunReport | None = None
    waits: bool = False  # all its jobs wait, and the nodes excluded for them have not been reviewed
    sent: bool = False  # its messages have been sent, or cannot be in this tick
    exported: bool = False  # its metrics have been written, or cannot be in this tick


class TickProgress:
    """The progress of this tick: with each run, by its index in the roster, and with all that the runs share."""

    def __init__(self, roster: Roster) -> None:
        self.roster = roster
        self.runs = [WatchedRun() for _ in roster.names]
        self.away = ""  # why the state directory must not be touched
        self.users: set[str] = set()  # the accounts that the runs belong to
        self.queues: dict[str, QueueAnswer] | None = None  # by the scheduler's word in the settings
        self.asked: frozenset[str] | None = frozenset()  # about these accounts; None: it is not asked again
        self.delivered: list[Delivered] = []
        self.notes: list[str] = []  # failures of the watch itself
        self.relief: list[tuple[str, str]] = []  # (run, sentence)
        self.general: tuple[RunReport, ...] | None = None  # of no single run
        self.storage: tuple[RunReport, ...] = ()  # of run directories
        self.pinged = False

    def apply(self, event: Any) -> None:
        """Note what a child has reported."""
        event.into(self)

    def complaints(self) -> list[str]:
        """The failures of the watch itself, a sentence each."""
        labelled = ((self.roster.label(i), run.trouble) for i, run in enumerate(self.runs) if run.trouble)
        return [*(about(label, why) for label, why in labelled), *self.notes]

    def all_delivered(self) -> Delivered:
        return Delivered(
            tuple(message for one in self.delivered for message in one.sent),
            tuple(failed for one in self.delivered for failed in one.failed),
            sum(one.waiting for one in self.delivered),
            sum(one.critical_waiting for one in self.delivered),
        )

    def stored(self) -> list[tuple[int, Finding]]:
        """(index, state of its directory) for each run whose directory has been checked."""
        return [(index, run.storage) for index, run in enumerate(self.runs) if run.storage is not None]

    def usable(self, index: int) -> bool:
        """Can this run be checked, as far as is known?"""
        storage = self.runs[index].storage
        return index in self.roster.known and storage is not None and storage.health is Health.OK


class DirectoryFound(NamedTuple):
    which: int
    directory: str

    def into(self, progress: TickProgress) -> None:
        progress.runs[self.which].directory = self.directory


class SettingsRead(NamedTuple):
    which: int
    known: KnownRun | None  # None: as before
    error: Error | None = None

    def into(self, progress: TickProgress) -> None:
        run = progress.runs[self.which]
        run.settled = True
        if self.known is not None:
            progress.roster.keep(self.which, self.known)
        if self.error is not None:
            run.trouble, run.error = self.error.message, self.error


class RunIsNoMore(NamedTuple):
    """A run that was over has been deleted: it is simply gone."""

    which: int

    def into(self, progress: TickProgress) -> None:
        run = progress.runs[self.which]
        run.settled, run.sent, run.trouble, run.error = True, True, "", None
        progress.roster.known.pop(self.which, None)


class RunDirChecked(NamedTuple):
    which: int
    finding: Finding
    users: tuple[str, ...] = ()
    missing: bool = False
    finished: bool = False
    over: bool = False

    def into(self, progress: TickProgress) -> None:
        run = progress.runs[self.which]
        run.storage, run.missing = self.finding, run.missing or self.missing
        run.finished, run.over = run.finished or self.finished, run.over or self.over
        progress.users.update(self.users)


class QueuesRead(NamedTuple):
    queues: dict[str, QueueAnswer]
    users: frozenset[str]

    def into(self, progress: TickProgress) -> None:
        progress.queues, progress.asked = self.queues, self.users


class RunChecked(NamedTuple):
    which: int
    report: RunReport
    trouble: tuple[str, ...]
    waits: bool

    def into(self, progress: TickProgress) -> None:
        run = progress.runs[self.which]
        run.report, run.waits = self.report, run.waits or self.waits
        progress.notes += self.trouble


class MessagesSent(NamedTuple):
    indexes: tuple[int, ...]
    delivered: Delivered

    def into(self, progress: TickProgress) -> None:
        for index in self.indexes:
            progress.runs[index].sent = True
        progress.delivered.append(self.delivered)


class MetricsWritten(NamedTuple):
    which: int
    troubles: tuple[str, ...]

    def into(self, progress: TickProgress) -> None:
        progress.runs[self.which].exported = True
        progress.notes += self.troubles


class NodesReleased(NamedTuple):
    which: int
    sentences: tuple[tuple[str, str], ...]

    def into(self, progress: TickProgress) -> None:
        progress.runs[self.which].waits = False
        progress.relief += self.sentences
