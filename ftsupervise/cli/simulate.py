"""``ftsupervise simulate``: strategies side by side, on the same made-up failures or on those that a run has had."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from ftsupervise.cli import time_limit
from ftsupervise.cli.names import RUN
from ftsupervise.cli.output import bar_console, plain, say, say_json, terminal
from ftsupervise.cli.plan_values import FAULTS, Number, a_time, inputs_from, price_of, read_run, value_options
from ftsupervise.errors import UsageError, did_you_mean, from_os_error
from ftsupervise.units import count, show_duration, show_percent

if TYPE_CHECKING:
    from ftsupervise.planning.faults import Fault, Fleet
    from ftsupervise.planning.inputs import PlanInputs
    from ftsupervise.planning.simulator import Strategy, StrategyOutcome
    from ftsupervise.report.everything import ReportFacts

_TIMES = ("interval", "save", "flush", "snapshot_every", "snapshot", "detect", "hang", "repair", "limit",
          "maintenance_every", "maintenance", "stall", "away")  # fmt: skip
_LASTING = ("warm", "cold", "queue", "requeue")
_COUNTS = ("spares", "exclude_after", "groups", "least")
_SPREADS = ("restart_spread", "queue_spread")
_RUNS = 20  # nine of ten of fewer are nothing to speak of
_DUST = 1e-9  # what rounding leaves
_EACH = 30.0  # seconds that a run may take, for all strategies
_STALL = 180.0  # seconds, of replica groups, where nothing else is said (FT-HSDP)
_SHORTEST = 60.0  # seconds: of a job, and between two maintenances


@click.command()
@click.argument("run", required=False, metavar="[RUN]", type=RUN)
@value_options
@click.option("--with", "variants", multiple=True, metavar="CHANGES", help='Another strategy: "spares=2 interval=20m".')
@click.option("--days", type=Number(0.01, 36_500), default=90, show_default=True, help="Of each run.")
@click.option("--runs", type=click.IntRange(1, 100_000), default=100, show_default=True, help="For each strategy.")
@click.option("--seed", type=int, default=1, show_default=True, help="The same seed gives the same result.")
@click.option("--price", type=Number(0, 1e6), metavar="X", help="Money for one GPU and one hour. Default: of the run.")
@click.option("--replay", is_flag=True, help="Meet the failures that RUN has had, once, in place of random ones.")
@click.option("--last", metavar="TIME", help="With --replay: those of the last 30d, say; default: all.")
@click.option("--weibull", type=Number(0.1, 10), default=1.0, metavar="SHAPE", help="1: without memory.")
@click.option("--new", is_flag=True, help="With --weibull below 1: all nodes are new, and infants fail.")
@click.option("--lemons", metavar="SHARE", help="Share of the nodes that fail more often than others.")
@click.option("--lemon-factor", type=Number(1, 1e4), metavar="X", help="So much more often; default: 20.")
@click.option("--rack", type=click.IntRange(0, 100_000), default=0, help="Nodes behind a switch, which fail together.")
@click.option("--rack-failures", type=Number(0, 1e6), default=0.0, metavar="N", help="In 1,000 rack-days.")
@click.option("--svg", type=click.Path(dir_okay=False), metavar="FILE", help="Draw it there.")
@click.option("--trace", type=click.Path(dir_okay=False), metavar="FILE", help="Write the first run, line by line.")
@click.option("--json", "as_json", is_flag=True, help="Everything as one JSON object; times in seconds.")
def simulate(run: str | None, variants: tuple[str, ...], **words: Any) -> None:
    """Play failures against strategies, and show where the time would go.

    The values of the first strategy are those of RUN (a directory, an ftsupervise.yaml, or a name; default:
    ./ftsupervise.yaml), those that you give, and else assumed ones, as plan shows them. With --gpus or --nodes and no RUN, no
    run is read. Each --with is another strategy on the same failures. It changes: interval, save, flush (until an
    asynchronous save counts), snapshot-every, snapshot, detect, hang, warm (a time, or off), cold, queue, requeue, spares,
    repair, exclude-after (failures of a lemon), limit, maintenance-every, maintenance, groups (replica groups), least (with
    which they train), stall (3m), away (default: a restart), restart-spread and queue-spread (of a log-normal time; 2.2: its
    median is a tenth of its mean).

    \b
    ftsupervise simulate --gpus 16384 --failures 6.5 --with interval=5m
    ftsupervise simulate train-10b --replay --last 30d --with spares=2
    """
    from ftsupervise.planning import simulator

    alone = run is None and bool(words.get("gpus") or words.get("nodes"))
    if words["replay"] and alone:
        raise UsageError("--replay meets the failures of a run", hint="ftsupervise simulate RUN --replay")
    _no_word_alone(words)
    report = None if alone else read_run(run, time_limit.extend)
    inputs, price = inputs_from(report, words), price_of(report, words["price"])
    strategies = strategies_of(inputs.strategy(), variants)
    fleet = _fleet(inputs.fleet, words)
    seconds, trace = float(words["days"]) * 86400, None
    if words["replay"] and report is not None:
        from ftsupervise.planning.measured import trace_of_run

        last = math.inf if words["last"] is None else a_time("--last", words["last"])
        trace, seconds = trace_of_run(report, last)
        if seconds <= 0:
            raise UsageError("the run has no time yet that could be played again", hint="leave out --replay")
        outcomes = simulator.replay(strategies, trace, seconds)
    else:
        if (met := seconds / fleet.mtbf) > FAULTS:
            raise UsageError(
                f"a run of {show_duration(seconds)} would meet {met:,.0f} failures, and {FAULTS:,} can be played",
                hint=f"--days {max(0.01, FAULTS * fleet.mtbf / 86400):.2g}",
            )
        with _bar(words["runs"], quiet=words["as_json"]) as advance:
            outcomes = simulator.simulate(fleet, strategies, seconds, words["runs"], words["seed"], advance)
    if words["trace"]:
        came = trace if trace is not None else simulator.trace_of(fleet, seconds, words["seed"], 0)
        luck = simulator.luck_of(words["seed"] if trace is None else 0, 0)
        _write(words["trace"], "".join(_trace(strategies, came, seconds, luck)), report)
    title = title_of(fleet, seconds, 1 if trace is not None else words["runs"], None if trace is None else len(trace))
    if words["svg"]:
        from ftsupervise.planning.drawing import picture

        _write(words["svg"], picture(outcomes, title), report)
    if words["as_json"]:
        say_json(
            {
                "schema_version": 1,
                "seconds": seconds,
                "fleet": plain(fleet),
                "strategies": [_record(one, seconds, inputs, price) for one in outcomes],
            }
        )
        return
    say(title)
    say()
    for line in table(outcomes):
        click.echo(line)
    for line in _costs(outcomes, seconds, inputs, price):
        say(line)


def _no_word_alone(words: dict[str, Any]) -> None:
    """Refuse an option that would change nothing without another one."""
    if words["new"] and words["weibull"] == 1:
        raise UsageError("--new changes nothing where failures have no memory", hint="--weibull 0.7 --new")
    if words["lemon_factor"] is not None and not words["lemons"]:
        raise UsageError("--lemon-factor needs --lemons", hint="--lemons 1% --lemon-factor 20")
    if bool(words["rack"]) != bool(words["rack_failures"]):
        raise UsageError("--rack and --rack-failures go together", hint="--rack 16 --rack-failures 1")
    if words["last"] is not None and not words["replay"]:
        raise UsageError("--last is for --replay", hint="--days says how long a simulated run is")
    if (words["svg"] or "").lower().endswith((".png", ".jpg", ".jpeg", ".pdf")):
        raise UsageError("--svg writes an SVG", hint="rsvg-convert, inkscape or a browser makes a PNG of it")


def title_of(fleet: Fleet, seconds: float, runs: int, replayed: int | None = None) -> str:
    """Return what was played, in words."""
    if replayed is not None:
        return f"{count(replayed, 'failure')} of the run itself, in {show_duration(seconds)}"
    mtbf = "none fails" if math.isinf(fleet.mtbf) else f"a failure every {show_duration(fleet.mtbf)}"
    return f"{count(fleet.nodes, 'node')}, {mtbf}; {count(runs, 'run')} of {show_duration(seconds)}"


def _fleet(fleet: Fleet, words: dict[str, Any]) -> Fleet:
    from ftsupervise.units import parse_share

    try:
        lemons = parse_share(words["lemons"]) if words["lemons"] else 0.0
    except ValueError as error:
        raise UsageError(f"--lemons: {error}") from None
    return fleet._replace(
        shape=words["weibull"],
        new=words["new"],
        lemons=lemons,
        lemon_factor=fleet.lemon_factor if words["lemon_factor"] is None else words["lemon_factor"],
        rack=words["rack"],
        rack_rate=words["rack_failures"] / 1000 / 86400,
    )


def strategies_of(base: Strategy, variants: Sequence[str]) -> list[Strategy]:
    """Return ``base`` and its variants. Raises UsageError."""
    return [base, *(_variant(base, text) for text in variants)]


def _variant(base: Strategy, text: str) -> Strategy:
    """Return ``base`` with the changes of "spares=2 interval=20m". Raises UsageError."""
    from ftsupervise.planning.faults import Lasting

    changes, spreads = dict[str, Any](name=" ".join(text.split())), dict[str, float]()
    if not text.strip():
        raise UsageError("--with names a change", hint='--with "spares=2 interval=20m"')
    for word in text.replace(",", " ").split():
        key, given, value = word.partition("=")
        name = key.replace("-", "_")
        if name not in (*_TIMES, *_LASTING, *_COUNTS, *_SPREADS):
            known = [one.replace("_", "-") for one in (*_TIMES, *_LASTING, *_COUNTS, *_SPREADS)]
            raise UsageError(
                f"--with {text!r}: {word!r} is no change{did_you_mean(key, known)}", hint='--with "spares=2"'
            )
        if not given:
            raise UsageError(f"--with {text!r}: {word!r} has no value", hint='--with "spares=2"')
        if name in _COUNTS:
            if not value.isdigit() or len(value) > 6 or (name in ("groups", "least") and not int(value)):
                raise UsageError(f"--with {text!r}: {key} is a count")
            changes[name] = int(value)
        elif name in _SPREADS:
            spreads[name] = _number(text, key, value)
        elif name == "warm" and value == "off":
            changes[name] = None
        else:
            seconds = a_time(f"--with {text!r}: {key}", value)
            changes[name] = Lasting(seconds) if name in _LASTING else seconds
    found = base._replace(**changes)
    if found.interval <= 0:
        raise UsageError(f"--with {text!r}: interval is longer than nothing")
    if found.limit < _SHORTEST or 0 < found.maintenance_every < _SHORTEST:
        raise UsageError(f"--with {text!r}: limit and maintenance-every are a minute or longer")
    if found.maintenance_every and found.maintenance >= found.maintenance_every:
        raise UsageError(f"--with {text!r}: a maintenance ends before the next one begins")
    return _spread(_dealt(found, changes, text), spreads)


def _dealt(of: Strategy, changes: dict[str, Any], text: str) -> Strategy:
    """Return it with what replica groups have where nothing else was said."""
    if of.groups == 1:
        if alone := sorted({"least", "stall", "away"} & changes.keys()):
            raise UsageError(f"--with {text!r}: {alone[0]} needs groups", hint='--with "groups=4 stall=3m"')
        return of
    least = changes.get("least", of.groups // 2 + 1)
    if least > of.groups:
        raise UsageError(f"--with {text!r}: least is at most groups, else they never train")
    return of._replace(least=least, stall=changes.get("stall", _STALL))


def _spread(of: Strategy, spreads: dict[str, float]) -> Strategy:
    if (spread := spreads.get("restart_spread")) is not None:
        of = of._replace(cold=of.cold._replace(spread=spread), warm=of.warm and of.warm._replace(spread=spread))
    if (spread := spreads.get("queue_spread")) is not None:
        requeue = of.requeue and of.requeue._replace(spread=spread)
        of = of._replace(queue=of.queue._replace(spread=spread), requeue=requeue)
    return of


def _number(text: str, key: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = -1.0
    if not 0 <= number <= 10:
        raise UsageError(f"--with {text!r}: {key} is a number from 0 to 10")
    return number


# ------------------------------------------------------------------------------------------------------------ the words


def table(outcomes: Sequence[StrategyOutcome]) -> Iterator[str]:
    """Yield the strategies, a row each."""
    from ftsupervise.planning.simulator import TimeKind

    wide = max(8, *(min(40, len(one.strategy.name)) for one in outcomes))
    kinds = [
        kind for kind in TimeKind if kind is not TimeKind.TRAIN and any(one.shares[kind] > _DUST for one in outcomes)
    ]
    heads = "".join(f"{kind.name.lower():>9}" for kind in kinds)
    yield f"{'strategy':<{wide}}{'ETTR':>9}{'95 %':>10}{'better':>16}{'failures':>10}{heads}"
    for index, one in enumerate(outcomes):
        better = f"{100 * one.better:+.2f}{_sure(one.better_certain, ' ')}" if index else ""
        shares = "".join(f"{show_percent(one.shares[kind]):>9}" for kind in kinds)
        sure = _sure(one.certain)
        name = one.strategy.name[:40]
        yield f"{name:<{wide}}{show_percent(one.ettr):>9}{sure:>10}{better:>16}{one.faults:>10,.1f}{shares}"
    yield ""
    if len(outcomes) > 1:
        yield "better: points by which it trains more than the first, on the same failures"
    for one in outcomes:
        if one.runs >= _RUNS and one.high > one.low:
            yield f"{one.strategy.name[:40]}: nine of ten runs lie between {show_percent(one.low)} and {show_percent(one.high)}"


def _sure(certain: float, before: str = "") -> str:
    """Return half the width of an interval in points; nothing of one run, which bounds nothing."""
    return "" if math.isinf(certain) else f"{before}± {100 * certain:.2f}"


def _costs(
    outcomes: Sequence[StrategyOutcome], seconds: float, inputs: PlanInputs, price: float | None
) -> Iterator[str]:
    """Yield what the time that trains nothing costs, spare nodes not counted."""
    yield ""
    for one in outcomes:
        hours, money = _cost(one, seconds, inputs, price)
        worth = "" if money is None else f", {_few(money)} at the price given"
        yield f"{one.strategy.name[:40]}: {_few(hours)} {inputs.hours} of a run train nothing{worth}"


def _few(number: float) -> str:
    return f"{number:,.0f}" if number >= 10 else f"{number:.2g}"


def _cost(one: StrategyOutcome, seconds: float, inputs: PlanInputs, price: float | None) -> tuple[float, float | None]:
    from ftsupervise.planning.formulas import cost, gpu_hours

    lost = seconds * (1 - one.ettr)
    return gpu_hours(inputs.all_gpus, lost), None if price is None else cost(inputs.all_gpus, lost, price)


def _record(one: StrategyOutcome, seconds: float, inputs: PlanInputs, price: float | None) -> dict[str, Any]:
    from ftsupervise.planning.simulator import TimeKind

    found = plain(one._replace(shares=()))
    for key in ("certain", "better_certain"):
        found[key] = found[key] if math.isfinite(found[key]) else None
    found["lost_hours"], found["lost_money"] = _cost(one, seconds, inputs, price)
    found["shares"] = {kind.name.lower(): share for kind, share in zip(TimeKind, one.shares, strict=True)}
    if not math.isfinite(one.strategy.limit):
        found["strategy"]["limit"] = None
    return dict(found)


def _trace(strategies: Sequence[Strategy], met: Sequence[Fault], seconds: float, luck: str) -> Iterator[str]:
    from ftsupervise.planning.simulator import events_of

    for strategy in strategies:
        yield f"# {strategy.name}\n"
        yield "# day, what, how long, why; from one event to the next, steps made again, new ones and saves are a line each\n"
        for one in events_of(strategy, met, seconds, luck):
            yield f"{one.at / 86400:10.4f} d  {one.kind.name.lower():<8}{show_duration(one.seconds):>10}  {one.why}\n"


def _write(to: str, text: str, of: ReportFacts | None) -> None:
    """Write a file; what a run has measured for those alone who may read the run directory."""
    from ftsupervise.host.ownership import PAGE, Reach
    from ftsupervise.report.output import readers
    from ftsupervise.rundir.paths import write_named

    path = Path(to).absolute()
    mode = Reach(PAGE) if of is None else Reach(PAGE).within(readers(of.detail.status.run.rundir.root))
    try:
        write_named(path, text, mode=mode, sync=False)
    except OSError as error:
        raise from_os_error(error, f"write {path}") from None


@contextmanager
def _bar(runs: int, *, quiet: bool) -> Iterator[Callable[[int], object]]:
    """Yield what is told of each run that is done: a person at a terminal sees a bar of them, and as long as runs are done the
    command may go on."""
    if quiet or not terminal(err=True) or os.environ.get("TERM") == "dumb":
        yield lambda more: time_limit.extend(_EACH)
        return
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    parts = (TextColumn("runs"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*parts, console=bar_console(), transient=True) as shown:
        task = shown.add_task("runs", total=runs)

        def advance(more: int) -> None:
            time_limit.extend(_EACH)
            shown.advance(task, more)

        yield advance
