"""Warm start, the supervisor's side: when to start standbys, and which attempts to hand to them.

    cold attempt -> its first step -> a standby on each node imports what rank 0 had imported -> the next attempt is handed
    to it, rank by rank, through ``warm/client.py``; what does not fit is started cold there

Nothing depends on a standby. Warm start is off where the command is not plainly a Python program or memory is tight.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from ftsupervise.guard.heartbeat import ENV_IMPORTS, Imports
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import read_record
from ftsupervise.scheduler.allocation import Allocation
from ftsupervise.warm.client import COLD
from ftsupervise.warm.standbys import PROGRAMS, PythonCommand, StandbyFolder, StandbyOrder, Standbys, parse_command

AUTO = "auto"
_WORTH = 1.0  # seconds from a rank's start to its first line after the imports; below this a restart is not the imports
_DOUBTS = 4
_MEANWHILE = 10.0  # seconds that a standby may take besides its imports
_STARTS = 5  # of standbys, in one job


@dataclass(frozen=True)
class WarmSettings:
    """The setting: off, the modules that the run turns out to import, or the modules named here."""

    on: bool = False
    modules: tuple[str, ...] = ()


def parse_setting(text: str) -> WarmSettings:
    """Parse "off", "auto" or "torch,numpy". Raises ValueError."""
    if text in ("off", AUTO):
        return WarmSettings(text == AUTO)
    names = tuple(text.split(","))
    for name in names:
        if not all(part.isidentifier() for part in name.split(".")):
            raise ValueError(f'"{name}" is not the name of a module')
    return WarmSettings(True, names)


@dataclass
class AttemptImports:
    """One attempt: whether it began warm, and what its rank 0 has imported."""

    attempt: int = 0
    env: Mapping[str, str] = field(default_factory=dict)
    file: Path | None = None  # in the attempt's directory, where no other attempt writes
    warm: bool = False  # the command goes through ``client.py``
    listed: bool = False  # rank 0 has made its first step and listed its imports; no standby was started for it yet


class WarmStart:
    """The standbys of one job. The thread that watches the run directory calls ``has_news``; the supervisor calls the rest."""

    def __init__(
        self,
        settings: WarmSettings,
        command: tuple[str, ...],
        allocation: Allocation,
        rundir: RunDir,
        say: Callable[[str], None],
    ) -> None:
        self._settings, self._allocation, self._rundir, self._say = settings, allocation, rundir, say
        self._command: PythonCommand | None = None  # None: warm start is off
        self._imports = AttemptImports()
        self._import_seconds = 0.0  # from a rank's start to its first line after the imports
        self._folder: StandbyFolder | None = None
        self._standbys: Standbys | None = None
        self._starts = 0
        self._doubts = 0  # warm attempts in a row that made no step
        self._news = False
        if settings.on:
            found = parse_command(command)
            if isinstance(found, PythonCommand):
                self._command = found
            elif settings.modules:  # without named modules it was not asked for explicitly
                say(f"restarts will be cold: {found}")

    # ---------------------------------------------------------------------------------------------- for one attempt

    def begin(self, attempt: int, env: dict[str, str]) -> None:
        """Begin an attempt: ``env`` gets the path where its rank 0 lists its imports."""
        self._read_reports()  # replace a standby that has died meanwhile
        plain = {key: value for key, value in env.items() if not key.startswith("FTSUPERVISE_")}
        self._imports = AttemptImports(attempt, plain)
        if self._command:  # also beside a standby: it may refuse, and end
            self._imports.file = self._rundir.attempt(attempt) / "imports.json"
            env[ENV_IMPORTS] = str(self._imports.file)

    def wrap(self, command: tuple[str, ...]) -> tuple[str, ...]:
        """Return ``command``, or ``client.py`` with it where a standby is ready, or soon will be."""
        self._read_reports()
        standbys, folder = self._standbys, self._folder
        if self._command is None or standbys is None or folder is None:
            return command
        cold = bool(self._doubts % 2)  # finds out whether the command itself fails, or its warm start
        patience = self._import_seconds if standbys.importing() and not cold else 0.0
        found = parse_command(command)
        if not isinstance(found, PythonCommand) or not (standbys.ready_somewhere() or patience):
            return command
        self._imports.warm = not cold
        how = COLD if cold else f"{patience:.2f}"
        client = (found.python, "-IS", str(PROGRAMS / "client.py"), str(folder.path), how, "--")
        return (*command[: found.at], *client, *command[found.at :])

    def ended(self, *, stepped: bool, fault: bool) -> None:
        """Record whether the attempt made a step. After a warm attempt without a step the next one starts cold. If that happens
        twice and both cold starts succeed, warm start is switched off. ``fault``: its start may be why it made none."""
        if self._imports.warm and (stepped or fault):
            self._doubts = 0 if stepped else self._doubts + 1
        elif self._doubts and stepped and not self._imports.warm:
            self._doubts += self._doubts % 2
            if self._doubts >= _DOUBTS:
                self._say("restarts will be cold: attempts that began warm took no step, and those that began cold did")
                self.stop()
                self._command = None

    # ----------------------------------------------------------------------------------------------- while it runs

    def has_news(self) -> bool:
        """Return whether rank 0 has made its first step, or a standby reported.

        It reads the run directory, and may hang with it.
        """
        standbys = self._standbys
        self._news = self._news or (self._first_step() if standbys is None else standbys.has_news())
        return self._news

    def _first_step(self) -> bool:
        """Return whether rank 0 has listed its imports, and they are worth a standby."""
        now = self._imports
        if self._command is None or now.file is None or now.listed or self._starts >= _STARTS:
            return False
        try:
            seen = read_record(Imports, now.file)
        except (OSError, ValueError):
            return False
        if seen is None or seen.attempt != now.attempt:
            return False
        if (
            now.warm and seen.seconds < _WORTH
        ):  # from a fork of a standby that has died since: it imported nothing itself
            now.file = None
            return False
        self._import_seconds = seen.seconds
        if not self._settings.modules and seen.seconds < _WORTH:
            self._command = None  # its imports are fast anyway
            return False
        now.listed = True
        return True

    def act(self) -> None:
        """Read the standbys' reports; start standbys when they are due. Costs nothing without news."""
        if not self._news:
            return
        self._news = False
        self._read_reports()
        now = self._imports
        if now.listed and now.file is not None and self._standbys is None and self._command is not None:
            now.listed = False
            self._start(self._command, now.file)

    def _start(self, command: PythonCommand, imports: Path) -> None:
        self._starts += 1
        within = _MEANWHILE + 3 * self._import_seconds  # the ranks train beside it
        order = StandbyOrder(command, self._imports.env, imports, self._settings.modules, within)
        try:
            self._folder = self._folder or StandbyFolder()
            self._standbys = Standbys(order, self._folder, self._allocation, self._say)
        except OSError as error:
            self._command = None
            self._say(f"restarts will be cold: cannot start a standby: {error.strerror}")

    def _read_reports(self) -> None:
        if self._standbys is not None:
            self._standbys.read()
            if not self._standbys.alive:
                self._standbys = None

    # ----------------------------------------------------------------------------------------------- their processes

    def apart(self) -> frozenset[int]:
        """Return children of the supervisor that are not the attempt's, nor is what is below them."""
        return self._standbys.apart() if self._standbys is not None else frozenset()

    def serving(self) -> int:
        """Return the standby on this machine without Slurm, which is not the attempt's though the ranks are below it.
        0: none.
        """
        return self._standbys.serving() if self._standbys is not None else 0

    def tree(self) -> frozenset[int]:
        """Return the standbys and all below them."""
        return self._standbys.tree() if self._standbys is not None else frozenset()

    def ranks(self) -> list[int]:
        """Return the ranks below the standby, on this machine without Slurm."""
        return self._standbys.ranks() if self._standbys is not None else []

    def stop(self) -> None:
        """End the standbys, bounded; their ranks have ended."""
        standbys, self._standbys = self._standbys, None
        if standbys is not None:
            standbys.stop()
        if self._folder is not None:
            self._folder.remove()
            self._folder = None
