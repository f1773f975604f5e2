"""The report of several runs over some days, as one HTML file and as Markdown: values in, text out."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

from ftsupervise.report import drawing
from ftsupervise.report.account import Spent, ratio
from ftsupervise.report.drawing import Axis
from ftsupervise.report.html import alike_row, cost_row, cut, kind_rows, rendered
from ftsupervise.report.incidents import AlikeIncidents, alike
from ftsupervise.report.markdown import code, plain, table
from ftsupervise.report.summary import Tile, cost_sentence, kind_and_cause, stamp, was
from ftsupervise.report.week import WeekReport, WeekRow
from ftsupervise.units import count, show_duration, show_percent

if TYPE_CHECKING:
    from ftsupervise.report.following import FollowedPage

_COSTS, _INCIDENTS = 8, 20
NO_LINKS: Mapping[str, str] = MappingProxyType({})


def title(week: WeekReport) -> str:
    return f"Training runs, {week.begin:%Y-%m-%d} to {week.end:%Y-%m-%d}"


def lead(week: WeekReport) -> str:
    """The days in a few sentences: which runs need a look, what was trained, what cost most."""
    if not week.rows:
        return "No run was active in these days."
    looks = [one.row.name for one in week.rows if one.needs_a_look]
    few = ", ".join(looks[:5]) + (f" and {len(looks) - 5} more" if len(looks) > 5 else "")
    words = f"{count(len(looks), 'run')} {'needs' if len(looks) == 1 else 'need'} a look: {few}. " if looks else ""
    share = week.goodput()
    of = f" ({ratio(share)} of their time)" if share is not None else ""
    words += f"{count(len(week.rows), 'run')} trained for {show_duration(week.seconds[Spent.TRAIN])} in all{of}."
    costs = week.costs()
    if costs:
        words += f" What cost most: {costs[0].name}, {show_duration(costs[0].seconds)}."
    return words


def page(week: WeekReport, links: Mapping[str, str] = NO_LINKS, followed: FollowedPage | None = None) -> str:
    """The whole file. ``links``: the pages of runs, by their names. It has no script but that by which it is renewed."""
    total, costs = sum(week.seconds.values()), week.costs()
    axis = Axis(week.begin.timestamp(), week.end.timestamp())
    view = {
        "title": title(week),
        "begin": stamp(week.begin),
        "end": stamp(week.end),
        "idle": f"{count(week.idle, 'other run')} {was(week.idle)} not active in these days." if week.idle else "",
        "lead": lead(week),
        "looks": [{**_look(one), "link": links.get(one.row.name, "")} for one in week.rows if one.needs_a_look],
        "ticks": drawing.time_ticks(axis),
        "tiles": tiles(week),
        "costs": [cost_row(one, total, costs[0].seconds) for one in costs[:_COSTS]],
        "runs": [{**_run(one, axis), "link": links.get(one.row.name, "")} for one in week.rows],
        "kinds": kind_rows(week.seconds),
        "incidents": [{**alike_row(one), "run": name} for name, one in _costliest(week)],
        "nodes": week.nodes(),
        "follow": followed.shown(week.end) if followed is not None else None,
    }
    renewed = followed.data() if followed is not None else {}
    return rendered("report.week.html.j2", view, renewed, ("follow.js",) if renewed else ())


def tiles(week: WeekReport) -> tuple[Tile, ...]:
    faults = sum(one.faults for one in week.rows)
    lost = sum(one.lost for row in week.rows for one in row.incidents if not one.planned)
    steps = sum(row.steps or 0 for row in week.rows)
    unwell = sum(1 for one in week.rows if one.needs_a_look)
    well = "all well" if all(one.head.tone == "good" for one in week.rows) else "none needs a look"
    need = f"{unwell} {'needs' if unwell == 1 else 'need'} a look" if unwell else well
    return (
        Tile(
            "Time spent training",
            ratio(week.goodput()),
            f"ETTR: Meta {ratio(week.ettr())}",
        ),
        Tile("Runs", str(len(week.rows)), need, "watch" if unwell else "good"),
        Tile("Steps", f"{steps:,}", "made for the first time"),
        Tile("Faults", str(faults), f"{show_duration(lost)} lost" if faults else "none", "watch" if faults else "good"),
    )


def _look(one: WeekRow) -> dict[str, str]:
    head = one.head
    return {
        "name": one.row.name,
        "verdict": head.verdict,
        "tone": head.tone,
        "why": cut(head.sentence),
        "next": head.next,
        "command": head.command,
    }


def _run(one: WeekRow, axis: Axis) -> dict[str, Any]:
    of = one.account
    return {
        "name": one.row.name,
        "verdict": one.row.verdict,
        "tone": one.head.tone,
        "strip": drawing.strip(one.drawn, axis) if one.drawn else (),
        "words": ""
        if of is None
        else ", ".join(f"{kind.value} {show_percent(s)}" for kind, s in of.shares().items() if s > 0),
        "share": ratio(of.goodput()) if of is not None else "",
        "steps": "" if one.steps is None else f"{one.steps:,}",
        "faults": one.faults if of is not None else "",
        "costliest": f"{one.costs[0].name}, {show_duration(one.costs[0].seconds)}" if one.costs else "",
        "problem": cut(one.problem),
    }


def _costliest(week: WeekReport) -> list[tuple[str, AlikeIncidents]]:
    found = [(row.row.name, one) for row in week.rows for one in alike(row.incidents)]
    found.sort(key=lambda pair: -pair[1].newest.lost)
    return found[:_INCIDENTS]


# ------------------------------------------------------------------------------------------------------------ Markdown


def as_markdown(week: WeekReport) -> str:
    return "\n".join(_lines(week)).rstrip("\n") + "\n"


def _lines(week: WeekReport) -> Iterator[str]:
    yield f"# {title(week)}"
    yield ""
    yield f"**{plain(lead(week), 600)}**"
    yield ""
    if not week.rows:
        return
    yield from table(("", "", ""), ((tile.title, f"**{plain(tile.value)}**", plain(tile.more)) for tile in tiles(week)))
    yield from _needing_a_look(week)
    total, costs = sum(week.seconds.values()), week.costs()
    if costs:
        yield "## What cost most, over all runs"
        yield ""
        for number, item in enumerate(costs[:_COSTS], 1):
            yield f"{number}. {plain(cost_sentence(item, total), 600)}"
        yield ""
    yield from _runs(week)
    yield from _interruptions(week)
    nodes = week.nodes()
    if nodes:
        yield "## Nodes with the most faults"
        yield ""
        yield from table(
            ("node", "faults", "runs"), ((plain(n.name), str(n.faults), plain(", ".join(n.runs))) for n in nodes)
        )


def _needing_a_look(week: WeekReport) -> Iterator[str]:
    looks = [_look(one) for one in week.rows if one.needs_a_look]
    if looks:
        yield "## Runs that need a look"
        yield ""
        for look in looks:
            words = ". ".join(filter(None, (look["why"].rstrip("."), look["next"])))
            said = " ".join(filter(None, (plain(words, 900), code(look["command"]))))
            yield f"- **{plain(look['name'])}** ({look['verdict']}): {said}"
        yield ""


def _runs(week: WeekReport) -> Iterator[str]:
    yield "## Runs"
    yield ""
    rows = (_run(one, Axis(0.0, 1.0)) for one in week.rows)
    cells = (
        (
            plain(one["name"]),
            one["verdict"],
            one["share"],
            one["steps"],
            str(one["faults"]),
            plain(one["problem"] or one["costliest"]),
        )
        for one in rows
    )
    yield from table(("run", "state", "training", "steps", "faults", "what cost most"), cells)


def _interruptions(week: WeekReport) -> Iterator[str]:
    costliest = _costliest(week)
    if costliest:
        yield "## The costliest interruptions"
        yield ""
        rows_of = (
            (
                stamp(one.at) if times == 1 else f"{stamp(one.at)}, {times} times since {stamp(first.at)}",
                plain(name),
                f"{plain(kind_and_cause(one))} {code(one.evidence)}".rstrip(),
                show_duration(one.lost),
            )
            for name, (first, one, times) in costliest[:10]
        )
        yield from table(("when", "run", "cause and evidence", "cost"), rows_of)
