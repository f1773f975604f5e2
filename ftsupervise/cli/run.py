"""``ftsupervise run``: the supervisor's door. The batch script ends with it."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from math import isfinite
from pathlib import Path
from typing import Any

import click

from ftsupervise.config.supervisor import SETTINGS, Form, Setting


class _Number(click.FloatRange):
    """A finite number: nan is in every range. ``off``: a word that is accepted besides."""

    def __init__(self, setting: Setting) -> None:
        low = setting.least if setting.above is None else setting.above
        super().__init__(min=low, max=setting.most, min_open=setting.above is not None)
        self.off = setting.off

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.off is not None and value == self.off:
            return value
        try:
            found = super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + (f' Or "{self.off}".' if self.off else ""), param, ctx)
        if not isfinite(found):
            self.fail(f"{value} is not a finite number.", param, ctx)
        return found


class _Count(click.IntRange):
    """A whole number, or the word ``off`` where the setting has it."""

    def __init__(self, setting: Setting) -> None:
        low, high = setting.least, setting.most
        super().__init__(min=None if low is None else int(low), max=None if high is None else int(high))
        self.off = setting.off

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self.off is not None and value == self.off:
            return value
        try:
            return super().convert(value, param, ctx)
        except click.BadParameter as error:
            self.fail(error.message + (f' Or "{self.off}".' if self.off else ""), param, ctx)


def _warm(_ctx: click.Context, _param: click.Parameter, value: str) -> Any:
    from ftsupervise.warm.restarts import parse_setting

    try:
        return parse_setting(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _warning(_ctx: click.Context, _param: click.Parameter, value: str) -> tuple[int, float | None]:
    from ftsupervise.units import parse_warning

    try:
        return parse_warning(value)
    except ValueError as error:
        raise click.BadParameter(str(error)) from None


def _budgets(_ctx: click.Context, _param: click.Parameter, value: tuple[str, ...]) -> dict[str, int]:
    from ftsupervise.model import FailureKind
    from ftsupervise.rundir.records import as_count

    kinds = [kind.value for kind in FailureKind]
    found = {}
    for text in value:
        kind, _, number = text.partition("=")
        count = as_count(number)
        if kind not in kinds or not count:
            raise click.BadParameter(f'"{text}" is not KIND=N with N from 1 and KIND one of {", ".join(kinds)}')
        found[kind] = count
    return found


def option_of(setting: Setting) -> click.Option:
    """The option that a declared setting has on the command line."""
    form = setting.form
    given: dict[str, Any] = {"help": setting.help, "default": setting.unset, "metavar": form.value.strip() or None}
    if form in (Form.SECONDS, Form.NUMBER):
        given["type"] = _Number(setting)
    elif form is Form.COUNT:
        given["type"] = _Count(setting)
    elif form in (Form.CHOICE, Form.CHOICES, Form.SET):
        given.update(type=click.Choice(setting.choices), multiple=form is Form.CHOICES)
    elif form is Form.COUNTS:
        given.update(multiple=True, default=(), callback=_budgets)
    elif form is Form.SIGNAL:
        given["callback"] = _warning
    elif form is Form.MODULES:
        given["callback"] = _warm
    if given["default"] is ...:
        given.update(required=True, default=None)
    shown = given["default"] not in (None, "", ())
    return click.Option([setting.flag, setting.parameter], show_default=shown, **given)


def _run(run_dir: str | None, name: str | None, command: tuple[str, ...], **values: Any) -> None:
    """Supervise COMMAND inside the job: ftsupervise run -- srun python train.py

    Does not start it when the run has finished, its kill switch is up or its brake is on. Asks it to save and stop
    when Slurm warns. Starts it again here when it fails (--in-place), as long as that helps and time is left. Ends with
    its exit code, 128+N when a signal ended it, and records its end in RUN/attempts/NNNN/end.json.

    The settings that launch passes on have the same meaning as in ftsupervise.yaml; times are in seconds. Without --hang and
    --in-place a hung command is only reported, not ended.
    """
    from ftsupervise.config.find_run import find_run
    from ftsupervise.errors import NotFound, UsageError
    from ftsupervise.replicas.process import answer_parent
    from ftsupervise.run import options_of, supervisor
    from ftsupervise.rundir.paths import ENV_GROUP, ENV_RUN, RunDir

    answer_parent(os.environ)
    try:
        rundir = RunDir(Path(run_dir).absolute()) if run_dir else find_run(None, launched=False, judged=False)
    except NotFound as error:  # the words after the options are the command
        error.hint = "name its directory: ftsupervise run --run-dir runs/NAME -- COMMAND"
        raise
    if rundir.whole is not None and os.environ.get(ENV_GROUP) != rundir.root.name:
        raise UsageError(
            f"{rundir.root} is the path of a replica group of the run in {rundir.whole}: it would obey the switches there",
            hint="give the directory another name than groups/g and digits",
        )
    name = name or os.environ.get(ENV_RUN) or rundir.root.name
    sys.exit(supervisor.run(options_of(rundir, command, name, values), os.environ))


def _read_settings(ctx: click.Context, _param: click.Parameter, value: str | None) -> None:
    from ftsupervise.replicas.options import read_settings

    if value is not None:
        ctx.default_map = read_settings(Path(value))


def values_typed(words: Sequence[str]) -> dict[str, Any]:
    """Return the values of these options of ``run`` by parameter, as they were typed: what ``--settings`` reads. Raises
    click.UsageError where ``run`` would not take them."""
    line = [*words, "--", "true"]
    context = run.make_context("run", [*line])
    typed, _, _ = run.make_parser(context).parse_args(line)
    found = {setting.parameter: typed.pop(setting.parameter) for setting in SETTINGS if setting.parameter in typed}
    for name in typed.keys() - {"command"}:
        raise click.UsageError(f"--{name.replace('_', '-')} is set for each group", context)
    return found


run = click.Command(
    "run",
    callback=_run,
    help=_run.__doc__,
    context_settings={"ignore_unknown_options": False, "allow_interspersed_args": False},
    params=[
        click.Option(
            ["--run-dir"], metavar="DIR", help="The run's directory; default: $FTSUPERVISE_RUN_DIR, ./ftsupervise.yaml."
        ),
        click.Option(["--name"], help="The name of the run; default: $FTSUPERVISE_RUN, or the directory's name."),
        click.Option(
            ["--settings"],
            metavar="FILE",
            is_eager=True,
            expose_value=False,
            callback=_read_settings,
            help="A page with values for the options that are not typed: a JSON object by their names, as `groups run` "
            "writes it for each group.",
        ),
        *map(option_of, SETTINGS),
        click.Argument(["command"], nargs=-1, required=True, type=click.UNPROCESSED),
    ],
)
