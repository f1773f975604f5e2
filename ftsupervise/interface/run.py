"""``ftsupervise.Run``: a run as a Python program sees it and drives it, by the rules of the commands and with their bounds."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ftsupervise import host
from ftsupervise.errors import NoAnswer
from ftsupervise.launch.order import ASKING, LaunchOrder
from ftsupervise.probe.own_process import asked

if TYPE_CHECKING:
    from ftsupervise.interface.answers import RaisedSwitch, RunLaunched
    from ftsupervise.model import Attempt
    from ftsupervise.report.alert_list import AlertsSeen
    from ftsupervise.report.checkpoint_list import CheckpointsSeen
    from ftsupervise.report.detail import TimeSpent
    from ftsupervise.report.published import RunStatus

_SUBMITTING = 15.0  # seconds without a movement in which a submission is given up, as that of ``launch`` is


def _here() -> str | None:
    """Return where relative paths begin: a notebook may change its directory later."""
    try:
        return str(Path.cwd())
    except OSError:  # it is gone
        return None


class Run:
    """A run: its directory, its ftsupervise.yaml, or the name under which this account has launched it; default: the run of
    this job, else ./ftsupervise.yaml. Nothing is read before a method is called.

        import ftsupervise

        run = ftsupervise.Run("runs/train-10b")
        seen = run.status()
        print(seen.verdict, seen.step, seen.saved)

    Each method does what the command of its name does, by the same rules of authority and with the same bounds, and returns
    frozen values in the place of lines. It takes a process of its own for that, which costs a quarter of a second: a program
    with threads is not forked, and what hangs is left behind. What a command ends with as a sentence and an exit code is raised
    here: each error is an `ftsupervise.Error` with `message`, `hint` and `exit_code`, and `ftsupervise.errors` has its kinds
    (`NotFound`, `NotPermitted`, `Refused`, `SchedulerUnavailable`, `NoAnswer` …).
    """

    def __init__(self, run: str | os.PathLike[str] | None = None) -> None:
        self._name = None if run is None else os.fspath(run)
        self._from = _here()

    def __repr__(self) -> str:
        return f"Run({self._name!r})" if self._name is not None else "Run()"

    def status(self) -> RunStatus:
        """Look at the run as `ftsupervise status RUN --json` does: its verdict and why, the step, jobs, attempts, beats,
        switches, and where its time went, all of one moment. What could not be seen is None, and `UNKNOWN` is the verdict
        where nothing was. Raises NotFound where it has not been launched yet."""
        found: RunStatus = self._looked("status")
        return found

    def attempts(self) -> tuple[Attempt, ...]:
        """Return its attempts, oldest first: when each began and ended, its job, why it ended, how far it came. Of very many
        the newest; `status().fields.not_read` counts the others."""
        return self.status().fields.ledger

    def account(self) -> TimeSpent:
        """Return where its time went since the launch, in seconds by kind, with the ratios of `status`."""
        return self.status().fields.time

    def checkpoints(self) -> CheckpointsSeen:
        """Return its checkpoints, newest first, and what lies beside them: set aside, hidden, kept. Nothing is read but names
        and the first lines of manifests; `ftsupervise checkpoints verify` reads the files."""
        found: CheckpointsSeen = self._looked("checkpoints")
        return found

    def alerts(self) -> AlertsSeen:
        """Return its alerts, those that fire and those that are over, with the receivers, the messages that wait and the
        silences."""
        found: AlertsSeen = self._looked("alerts")
        return found

    def launch(
        self,
        *,
        after: str = "",
        jobs: int | None = None,
        exclude: str = "",
        again: bool = False,
        take_over: Iterable[str] = (),
        observe: bool = False,
        scheduler: str | None = None,
    ) -> RunLaunched:
        """Submit the run as a chain of jobs, as `ftsupervise launch` with the options of the same names does. Called again
        after an error that leaves open whether sbatch has accepted the job, it finds that job and makes no second one.

        Raises Refused where the run is in the queue already or its kill switch is up, ConfigError for settings that are
        wrong, NotPermitted for settings that another account may write, SubmitRejected with sbatch's own words.
        """
        order = LaunchOrder(after.strip(), jobs, exclude, again, tuple(take_over), observe, scheduler)
        try:
            planned = self._looked("plan", order, slurm=ASKING)
        except NoAnswer as error:
            raise NoAnswer(f"{error.message}; nothing was submitted", hint=error.hint) from None
        try:
            done: RunLaunched = asked(
                "interface.looks:submit", planned, patience=_SUBMITTING, slurm=ASKING, cwd=self._from
            )
        except NoAnswer as error:
            hint = "launch it again later: it looks for the job before it submits"
            raise NoAnswer(f"{error.message}; it may have been submitted", hint=hint) from None
        return done

    def save(self, why: str = "") -> RaisedSwitch:
        """Raise the save switch: the run saves a checkpoint at its next step and goes on. `why` is shown to everybody who sees
        the switch. Nothing is waited for: `status().saved` has the step once it is saved."""
        found: RaisedSwitch = self._looked("save", why)
        return found

    def kill(self, why: str = "", *, confirm: str | None = None) -> RaisedSwitch:
        """Raise the kill switch: the run saves and stops at its next step, and no further member trains. Members that the brake
        holds are ended. `confirm`: raise UsageError, and do nothing, unless this is the name of the run. Nothing is waited
        for."""
        found: RaisedSwitch = self._looked("kill", why, confirm)
        return found

    def _looked(self, what: str, *args: object, slurm: float = host.SLURM) -> Any:
        return asked(f"interface.looks:{what}", self._name, *args, patience=host.ANSWER, slurm=slurm, cwd=self._from)
