"""``ftsupervise run``: the job ring's door. The batch script ends with it."""

from __future__ import annotations

import os
import sys
from math import isfinite
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from ftsupervise.job.warm import Wanted


class _Number(click.FloatRange):
    """One that is a number: not nan, which is in every range, nor inf."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        found = super().convert(value, param, ctx)
        if not isfinite(found):
            self.fail(f"{value} is no finite number.", param, ctx)
        return found


def _share_or_off(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value in (None, "off"):
        return value
    try:
        if 0 < float(value) <= 1:
            return value
    except ValueError:
        pass
    raise click.BadParameter(f'"{value}" is not a share between 0 and 1 (95 % is 0.95), nor "off"')


def _warm(_ctx: click.Context, _param: click.Parameter, value: str) -> Wanted:
    from ftsupervise.job.warm import wanted

    try:
        return wanted(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _seconds_or_off(_ctx: click.Context, _param: click.Parameter, value: str | None) -> str | None:
    if value in (None, "off"):
        return value
    try:
        if 0 < float(value) < float("inf"):
            return value
    except ValueError:
        pass
    raise click.BadParameter(f'"{value}" is not a number of seconds above 0, nor "off"')


def _budgets(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> dict[str, int]:
    from ftsupervise.job.cause import Kind
    from ftsupervise.reading import as_count

    kinds = [kind.value for kind in Kind]
    found = {}
    for text in value:
        kind, _, number = text.partition("=")
        count = as_count(number)
        if kind not in kinds or not count:
            raise click.BadParameter(f'"{text}" is not KIND=N with N from 1 and KIND one of {", ".join(kinds)}')
        found[kind] = count
    return found


@click.command(context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False})
@click.option(
    "--run-dir", metavar="DIR", help="The run's directory; default: $FTSUPERVISE_RUN_DIR, ./ftsupervise.yaml."
)
@click.option("--launched", is_flag=True, help="launch made the directory: wait for it (--space-wait), make none anew.")
@click.option("--name", help="What the run is called; default: $FTSUPERVISE_RUN, or the directory's name.")
@click.option(
    "--forward",
    type=click.Choice(["auto", "always", "never"]),
    default="auto",
    show_default=True,
    help="Pass the warning signal on? auto: only to processes that handle it. A file tells the guards in any case.",
)
@click.option(
    "--grace",
    type=_Number(min=0),
    default=25.0,
    show_default=True,
    metavar="S",
    help="When the job is told to end, the command gets so long before it is killed.",
)
@click.option(
    "--in-place", type=click.IntRange(min=0), default=0, show_default=True, metavar="N", help="Restarts in this job."
)
@click.option(
    "--same-failure",
    type=click.IntRange(min=0),
    default=3,
    show_default=True,
    metavar="N",
    help="Stop the chain when the same failure came so often without progress; 0: never.",
)
@click.option("--budget", multiple=True, callback=_budgets, metavar="KIND=N", help="Another number for one kind.")
@click.option(
    "--back-off",
    type=_Number(min=0),
    default=2.0,
    show_default=True,
    metavar="S",
    help="Wait before the third start without progress; doubles.",
)
@click.option(
    "--space-wait",
    type=_Number(min=0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="Wait so long when the disk is full, before it leaves with 73, or the run directory is gone (66).",
)
@click.option(
    "--stop-within",
    type=_Number(min=0),
    default=600.0,
    show_default=True,
    metavar="S",
    help="After the kill switch was raised the command gets so long to leave.",
)
@click.option("--nodes-dir", metavar="DIR", help="Troubles of nodes, shared with other runs; besides this run's own.")
@click.option(
    "--nodes-half-life", type=_Number(min=0, min_open=True), metavar="S", help="After so long a trouble counts half."
)
@click.option("--nodes-exclude-at", type=_Number(min=0, min_open=True), metavar="X", help="Score of a bad node.")
@click.option(
    "--nodes-at-most", type=click.IntRange(min=0), metavar="N", help="Avoid no more; default: the spare margin."
)
@click.option(
    "--health", metavar="COMMAND", default="", help="Shell command that says how a node is: exit 0, 1, 2 or 3."
)
@click.option(
    "--health-timeout",
    type=_Number(min=0, min_open=True),
    default=30.0,
    show_default=True,
    metavar="S",
    help="It may take so long on a node.",
)
@click.option(
    "--health-when",
    type=click.Choice(["start", "failure"]),
    multiple=True,
    default=("start", "failure"),
    show_default=True,
    help="Before the first start of a job, after a failure, or both.",
)
@click.option(
    "--warm",
    default="auto",
    show_default=True,
    metavar="M",
    callback=_warm,
    help='With --in-place: keep a standby that has imported what the ranks import, and restart from it: "auto", "off", '
    "or modules: a,b.",
)
@click.option(
    "--hang",
    callback=_seconds_or_off,
    metavar="S",
    help='End a command that stands still for S (10) seconds and longer than ever before, or "off"; without it and '
    "without --in-place such a command is only told.",
)
@click.option(
    "--hang-factor",
    type=_Number(min=1),
    default=3.0,
    show_default=True,
    metavar="X",
    help="So many times the longest pause seen so far in that phase is a hang.",
)
@click.option(
    "--hang-start",
    type=_Number(min=0, min_open=True),
    default=1800.0,
    show_default=True,
    metavar="S",
    help="The first step may take so long.",
)
@click.option(
    "--hang-unknown",
    type=_Number(min=0, min_open=True),
    default=600.0,
    show_default=True,
    metavar="S",
    help="A phase that was not seen often enough may take so long.",
)
@click.option("--guard-poll", type=_Number(min=0), metavar="S", help="Seconds between two looks at the switches.")
@click.option(
    "--guard-memory", callback=_share_or_off, metavar="X", help='Memory share (0-1) at which to leave, or "off".'
)
@click.option("--guard-stop-before", type=_Number(min=0), metavar="S", help="Leave this long before the limit.")
@click.option("--guard-run-for", type=_Number(min=0), metavar="S", help="Leave after so long.")
@click.argument("command", nargs=-1, required=True, type=click.UNPROCESSED)
def run(
    run_dir: str | None,
    launched: bool,
    name: str | None,
    forward: str,
    grace: float,
    in_place: int,
    same_failure: int,
    budget: dict[str, int],
    back_off: float,
    space_wait: float,
    stop_within: float,
    nodes_dir: str | None,
    nodes_half_life: float | None,
    nodes_exclude_at: float | None,
    nodes_at_most: int | None,
    health: str,
    health_timeout: float,
    health_when: tuple[str, ...],
    warm: Wanted,
    hang: str | None,
    hang_factor: float,
    hang_start: float,
    hang_unknown: float,
    guard_poll: float | None,
    guard_memory: str | None,
    guard_stop_before: float | None,
    guard_run_for: float | None,
    command: tuple[str, ...],
) -> None:
    """Supervise COMMAND inside the job: ftsupervise run -- srun python train.py

    Does not start it when the run has finished, its kill switch is up or its brake is on. Tells it to save and leave
    when Slurm warns. Starts it again here when it fails (--in-place), as long as that helps and time is left. Ends with
    its exit code, 128+N when a signal ended it, and writes how it ended to RUN/attempts/NNNN/end.json.
    """
    from pathlib import Path

    from ftsupervise.config.locate import find_run
    from ftsupervise.job import supervise
    from ftsupervise.job.decide import Budgets
    from ftsupervise.job.hang import Patience
    from ftsupervise.job.nodes import Care
    from ftsupervise.rundir import ENV_RUN, RunDir

    rundir = RunDir(Path(run_dir).absolute()) if run_dir else find_run(None, launched=False)
    settings = {
        "POLL": guard_poll,
        "MEMORY": guard_memory,
        "STOP_BEFORE": guard_stop_before,
        "RUN_FOR": guard_run_for,
    }
    options = supervise.Options(
        rundir=rundir,
        command=command,
        launched=launched,
        name=name or os.environ.get(ENV_RUN) or rundir.root.name,
        forward=forward,
        grace=grace,
        space_wait=space_wait,
        stop_within=stop_within,
        warm=warm,
        hang=None if hang == "off" else Patience(float(hang or 10), hang_factor, hang_start, hang_unknown),
        end_hung=hang is not None or in_place > 0,
        budgets=Budgets(in_place=in_place, same_failure=same_failure, of_kind=budget, back_off=back_off),
        care=Care(
            directory=Path(nodes_dir).expanduser().absolute() if nodes_dir else None,
            half_life=nodes_half_life or Care.half_life,
            exclude_at=nodes_exclude_at or Care.exclude_at,
            at_most=nodes_at_most,
            health=health,
            health_timeout=health_timeout,
            health_when=health_when,
        ),
        guard={key: f"{value}" for key, value in settings.items() if value is not None},
    )
    sys.exit(supervise.run(options, os.environ))
