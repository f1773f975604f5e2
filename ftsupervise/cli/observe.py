"""``ftsupervise observe``: have decisions about a run only told, or carried out again."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from ftsupervise.cli.output import JSON, answer, for_programs, say
from ftsupervise.cli.switches import RUNS
from ftsupervise.host.ownership import shown_user
from ftsupervise.launch.switching import runs_to_switch
from ftsupervise.rundir.observing import known, phrase, write_observing
from ftsupervise.truth import DECISIONS

if TYPE_CHECKING:
    from ftsupervise.rundir.paths import RunDir


@click.command()
@RUNS
@click.option("--only", type=click.Choice(DECISIONS), multiple=True, help="This decision alone; may be repeated.")
@click.option("--off", is_flag=True, help="Act again: on all decisions, or on those of --only.")
@JSON
def observe(runs: tuple[str, ...], only: tuple[str, ...], off: bool, as_json: bool) -> None:
    """Have decisions written down and told, and not carried out: nothing is ended, held or left out for them.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml.

    It holds at once, for a job that runs too, until --off or the next launch, from which on act in the settings counts.
    Time limits, switches and saves work as ever, and so does what keeps a saved state from being lost. What would have been
    done, and what happened without it, stands in status, in the report and in the messages.
    """
    done = []
    with for_programs(as_json):
        for rundir, name in runs_to_switch(runs, brake=True):
            of = _change(rundir, frozenset(only or DECISIONS), off=off, others=bool(only))
            say(f"{name}: {phrase(of) or 'every decision is carried out'}.")
            if of:
                say(f"Act on them:  ftsupervise observe --off {rundir.quoted()}")
            done.append({"run": name, "directory": rundir.root, "observed": of})
    if as_json:
        answer(runs=done)


def _change(rundir: RunDir, chosen: frozenset[str], *, off: bool, others: bool) -> tuple[str, ...]:
    """Return the decisions that are only told from now on. ``others``: those that are not ``chosen`` stay as they are."""
    from datetime import datetime, timezone

    from ftsupervise.errors import from_os_error
    from ftsupervise.report.observed import observes
    from ftsupervise.rundir.ledger import newest

    try:
        last = newest(rundir)
        before = frozenset(observes(rundir, last))
        of = before - chosen if off else chosen | before if others else chosen
        write_observing(rundir, of, who=shown_user(), now=datetime.now(timezone.utc))
    except OSError as error:
        raise from_os_error(error, f"write {rundir.finished.parent / 'observe'}") from None
    return known(of)
