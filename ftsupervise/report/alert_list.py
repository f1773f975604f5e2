"""The alerts of a run as its journal has them, with what this account keeps beside it: what ``alerts list`` prints."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.errors import NotFound

if TYPE_CHECKING:
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.alerts.outbox import Message, ReceiverState, Silence
    from ftsupervise.findings import Alert


class AlertsSeen(NamedTuple):
    """Alerts that fire or have fired, and who was told."""

    alerts: tuple[Alert, ...]
    waiting: tuple[Message, ...]  # messages that no receiver has taken yet
    receivers: Mapping[str, ReceiverState]
    silences: tuple[Silence, ...]
    problems: tuple[str, ...]  # why a journal could not be read in full


def alerts_in(journals: Iterable[Journal]) -> AlertsSeen:
    """Read them. May hang."""
    read = [(journal.read(), journal) for journal in journals]
    states = [state for state, _ in read]
    return AlertsSeen(
        tuple(alert for state in states for alert in state.alerts.values()),
        tuple(message for state in states for message in state.outbox),
        {name: receiver for state in states for name, receiver in state.receivers.items()},
        tuple(silence for state in states for silence in state.silences),
        tuple(problem for _, journal in read for problem in journal.problems),
    )


def journals_of(runs: tuple[str, ...]) -> list[Journal]:
    """Return the journals of all of them, each once."""
    found = [journal for run in runs or (None,) for journal in _journals_of(run)]
    return list({journal.directory: journal for journal in found}.values())


def _journals_of(run: str | None) -> list[Journal]:
    """Return the run's journal, and what this account keeps: about Slurm, about storage that did not answer, and about
    its cron.

    A cron folder may stand for RUN: the messages about its entries name it.
    """
    from ftsupervise.alerts.journal import Journal
    from ftsupervise.config.find_run import find_run
    from ftsupervise.crontab.installation import journal_of, journal_of_default
    from ftsupervise.host.ownership import refuse_link
    from ftsupervise.rundir.paths import state_dir
    from ftsupervise.rundir.pinned import mark_of

    crons = [journal_of(run)] if run is not None else [journal_of_default(os.environ)]
    if run is not None and crons[0] is not None:
        return [Journal(crons[0])]
    beside = [Journal(path) for path in crons if path is not None]
    own = state_dir() / "watch"
    kept = [path for path in (own / "journal", *sorted((own / "storage").glob("*"))) if path.is_dir()]
    try:
        rundir = find_run(run)
        if not rundir.root.is_dir():
            raise NotFound(
                f"{rundir.root} does not exist yet", hint=f"ftsupervise launch{f' {run}' if run else ''} makes it"
            )
    except NotFound:
        if run is not None or not (kept or beside):
            raise
        return [*(Journal(path) for path in kept), *beside]
    refuse_link(rundir.watch / "journal")
    mark = mark_of(rundir.root)
    kept = [path for path in kept if path.name == "journal" or path.name.endswith(f"-{mark}")]
    return [Journal(rundir.watch / "journal"), *(Journal(path) for path in kept), *beside]
