"""``ftsupervise plan``: the values that lose least, the ratio to expect, and what would help most; ``--apply`` writes them."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import plain, say, say_json
from ftsupervise.cli.plan_values import Number, inputs_from, price_of, read_run, value_options
from ftsupervise.errors import UsageError
from ftsupervise.units import count, show_duration, show_percent, show_size

if TYPE_CHECKING:
    from ftsupervise.config.strict_yaml import KeyPath
    from ftsupervise.planning.inputs import PlanInput, PlanInputs
    from ftsupervise.planning.plan import Help, PlanItem, RunPlan, Unit
    from ftsupervise.report.everything import ReportFacts
    from ftsupervise.report.plan import PlanForecast

_LEFT_ALONE = {
    "launch.time": "launch.time is left to you: your queue decides what a longer job waits.",
    "checkpoints.retain": "checkpoints.retain is left to you: it deletes checkpoints.",
}
_SIMULATION = 60.0  # seconds that the simulated strategies may take on a slow machine


@click.command()
@click.argument("run", required=False, metavar="[RUN]", type=RUN)
@value_options
@click.option("--risk", default="1%", show_default=True, help="Risk that the spare nodes are too few.")
@click.option("--price", type=Number(0, 1e6), metavar="X", help="Money for one GPU and one hour. Default: of the run.")
@click.option("--training", metavar="TIME", help="Training that is left, as if nothing failed: 90d.")
@click.option("--apply", is_flag=True, help="Show the change of ftsupervise.yaml, ask, and write it.")
@click.option("--yes", is_flag=True, help="With --apply: do not ask.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object; times in seconds.")
def plan(run: str | None, risk: str, price: float | None, apply: bool, yes: bool, as_json: bool, **words: Any) -> None:
    """Say which values lose least time to failures, what to expect with them, and what would help most.

    RUN is a directory, an ftsupervise.yaml, or a name; default: ./ftsupervise.yaml. What it has measured is
    taken from its past, what you give stands in its place, and the rest is assumed; each is marked. With
    --gpus or --nodes and no RUN, no run is read.

    \b
    ftsupervise plan train-10b --price 2         from the run's own past
    ftsupervise plan --gpus 16384 --failures 6.5 --save 20s --cold 10m
    ftsupervise plan train-10b --apply           write the values, if you agree
    """
    from ftsupervise.planning.plan import plan_of
    from ftsupervise.units import parse_share

    alone = run is None and bool(words.get("gpus") or words.get("nodes"))
    if apply and alone:
        raise UsageError("--apply writes into the settings of a run", hint="ftsupervise plan RUN --apply")
    if apply and as_json:
        raise UsageError("--apply asks, and --json is for programs", hint="give one of them")
    try:
        share = parse_share(risk)
    except ValueError as error:
        raise UsageError(f"--risk: {error}") from None
    if not 0 < share < 1:
        raise UsageError("--risk lies between 0 and 100%", hint="--risk 1%")
    report = None if alone else read_run(run, time_limit.extend)
    time_limit.extend(_SIMULATION)
    made = plan_of(inputs_from(report, words), risk=share, price=price_of(report, price))
    if as_json:
        say_json({"schema_version": 1, "name": _name(report), **_record(made)})
        return
    for line in lines_of_plan(made, _name(report)):
        say(line)
    if apply and report is not None:
        _apply(report, made, yes=yes)


def _name(report: ReportFacts | None) -> str:
    return "" if report is None else report.detail.status.name


def _record(made: RunPlan) -> dict[str, Any]:
    found: dict[str, Any] = _finite(plain(made))
    return found


def forecast_of(report: ReportFacts) -> PlanForecast:
    """Return what a report shows of a plan."""
    from ftsupervise.planning.drawing import picture
    from ftsupervise.planning.measured import inputs_of
    from ftsupervise.planning.plan import plan_of
    from ftsupervise.report.plan import HelpRow, PlanForecast

    time_limit.extend(_SIMULATION)
    made = plan_of(inputs_of(report))
    unit = made.inputs.hours
    rows = (HelpRow(one.change, f"{100 * one.gain:+.1f} points", f"{one.gpu_hours:,.0f} {unit}") for one in made.helps)
    drawn = picture((made.simulated_now, made.simulated), "Simulated: where the time goes")
    interval = show_duration(made.searched)
    spares = f" and {count(made.planned_spares, 'spare node')}" if made.planned_spares else ""
    sentence = (
        f"As it is, {show_percent(made.simulated_now.ettr)} of the time trains in the long run; with a checkpoint each "
        f"{interval}{spares} it is {show_percent(made.simulated.ettr)} (simulated from what this run has measured; "
        f"{_doubt(made)})."
    )
    return PlanForecast(sentence, drawn, tuple(rows))


def _doubt(made: RunPlan) -> str:
    return next((one for one in made.doubts if one.startswith("not measured")), "all of it was measured")


def _finite(value: Any) -> Any:
    """Return it without infinite numbers, which JSON does not have."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    return [_finite(one) for one in value] if isinstance(value, list) else value


# ------------------------------------------------------------------------------------------------------------ the words


def lines_of_plan(made: RunPlan, name: str) -> Iterator[str]:
    """Yield the plan, for people."""
    inputs = made.inputs
    gpus = f", {inputs.all_gpus:,} GPUs" if inputs.gpus else ""
    yield f"{name + ': ' if name else ''}{inputs.nodes:,} node{'' if inputs.nodes == 1 else 's'}{gpus}"
    yield ""
    yield "What it is made of"
    yield from _inputs(inputs)
    yield ""
    yield "What to expect (ETTR: the share of time that trains; planned are the interval and the spare nodes)"
    for title, outcome, (low, high) in (
        ("as it is", made.simulated_now, made.now_range),
        ("as planned", made.simulated, made.planned_range),
    ):
        sure = f"simulated, ± {100 * outcome.certain:.2f} points"
        span = f"{show_percent(low)} to {show_percent(high)} for all that is not sure"
        yield f"  {title:<14}{show_percent(outcome.ettr):>7}   {sure}; {span}"
    for title, estimate in (("as it is", made.now), ("as planned", made.planned)):
        yield f"  {title:<14}{show_percent(estimate.value):>7}   by the formula"
    yield f"  the formula is {made.now.formula.value}, which assumes {made.assumption}"
    if math.isinf(inputs.mtbf.value):
        yield "  best interval: none, because nothing fails"
    else:
        three = (show_duration(one) for one in (made.young, made.daly, made.searched))
        yield "  best interval: Young {}, Daly {}, searched {}".format(*three)
    for doubt in made.doubts:
        yield f"  note: {doubt}"
    yield ""
    yield "Plan"
    for item in made.items:
        yield _item(item)
    yield ""
    yield from _money(made)


def _inputs(inputs: PlanInputs) -> Iterator[str]:
    from ftsupervise.planning.inputs import WORDS

    for key, words in WORDS.items():
        one: PlanInput = getattr(inputs, key)
        if key == "size" and not one.value:
            continue
        show = show_percent if key in ("lost", "silent") else show_size if key == "size" else show_duration
        span = "" if one.low == one.high else f", {show(one.low)} to {show(one.high)}"
        note = f" ({one.note})" if one.note else ""
        value = "never" if math.isinf(one.value) else _shown(show(one.value))
        yield f"  {words:<26}{value:>9}  {one.origin.value}{span}{note}"
    limit = "none" if math.isinf(inputs.limit) else show_duration(inputs.limit)
    yield f"  {'time limit of a job':<26}{limit:>9}"


def _shown(text: str) -> str:
    return "unknown" if text == "an unknown time" else text


def _item(item: PlanItem) -> str:
    now = "" if item.now is None else f", now {_value(item.now, item.unit)}"
    return f"  {item.name:<28}{_value(item.value, item.unit):>9}{now}: {item.why}"


def _value(value: float, unit: Unit) -> str:
    from ftsupervise.planning.plan import Unit

    if unit is Unit.SECONDS:
        return _shown(show_duration(value))
    if unit is Unit.SHARE:
        return show_percent(value)
    if unit is Unit.BYTES:
        return show_size(value)
    return f"{show_size(value)} a day" if unit is Unit.RATE else f"{value:,.0f}"


def _money(made: RunPlan) -> Iterator[str]:
    unit = made.inputs.hours
    spend = made.spend
    yield f"A month of running is {spend.gpu_hours:,.0f} {unit}, of which {spend.lost:,.0f} train nothing."
    if spend.money is not None and spend.lost_money is not None:
        yield f"At the price given that is {spend.money:,.0f}, of which {spend.lost_money:,.0f} train nothing."
    yield "What would help most in a month, each with the planned interval and nothing else:"
    for one in made.helps:
        yield _help(one, unit)
    if not made.helps:
        yield "  nothing that was tried, by a twentieth of a point"


def _help(one: Help, unit: str) -> str:
    money = "" if one.money is None else f", worth {one.money:,.0f}"
    return f"  {100 * one.gain:+5.1f} points  {one.gpu_hours:>11,.0f} {unit}{money}: {one.change}"


# ------------------------------------------------------------------------------------------------------------ the settings


def _apply(report: ReportFacts, made: RunPlan, *, yes: bool) -> None:
    """Show the change of the file from which the run was launched, ask, and write it."""
    from difflib import unified_diff

    from ftsupervise.config.edited import with_values
    from ftsupervise.config.find_run import settings_of_launch
    from ftsupervise.config.load import loads
    from ftsupervise.config.own_file import read_own, write_back
    from ftsupervise.config.strict_yaml import MAX_BYTES
    from ftsupervise.errors import NotPermitted
    from ftsupervise.host import ownership

    path = settings_of_launch(report.detail.status.run.rundir, "changed", hint="write the values by hand")
    own = read_own(path, limit=MAX_BYTES, links=True)
    if why := ownership.distrust(own.found, path):
        raise NotPermitted(f"{why}: nothing was changed", hint=ownership.remedy(own.found, path))
    before = own.text
    wanted: dict[KeyPath, str | int] = {
        tuple(one.key.split(".")): one.setting for one in made.items if one.setting is not None and _differs(one)
    }
    after = with_values(before, wanted, str(path))
    loads(after, path)
    left = sorted(_LEFT_ALONE[one.key] for one in made.items if one.key in _LEFT_ALONE and one.value > (one.now or 0))
    diff = list(unified_diff(before.splitlines(), after.splitlines(), str(path), "as planned", lineterm="", n=1))
    if not diff:
        say(f"{path} says all of that already.")
        return
    say()
    for line in diff:
        say(line)
    for line in left:
        say(line)
    _make_sure(path, yes=yes)
    write_back(own, after)
    say(f"{path} is written. A run that is at work keeps its values until it is launched again.")
    say(
        "The guard asks for a checkpoint by decision.save: a loop that saves by a count of steps of its own saves then, too."
    )


def _differs(item: PlanItem) -> bool:
    return item.now is None or item.now != item.value


def _make_sure(path: Path, *, yes: bool) -> None:
    from ftsupervise.errors import Cancelled

    if yes:
        return
    if not sys.stdin.isatty():
        raise UsageError(f"no terminal to ask whether to write {path}: nothing was changed", hint="say --yes")
    time_limit.person_is_asked()
    sure = click.confirm(f"Write {path}?", default=False)
    time_limit.person_has_answered()
    if not sure:
        raise Cancelled("cancelled, nothing was changed")
