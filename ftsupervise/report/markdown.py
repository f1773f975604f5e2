"""The report of a run as Markdown, for a pull request, a wiki or the text of a mail: values in, text out.

Texts of strangers are put between backticks, or lose what Markdown, HTML and mentions of people are made of.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence

from ftsupervise.printable import printable
from ftsupervise.report import summary
from ftsupervise.report.account import Spent, TimeAccount
from ftsupervise.report.alert_rows import AlertRow
from ftsupervise.report.everything import NodeRow, ReportFacts
from ftsupervise.report.groups import stall_rows
from ftsupervise.report.incidents import RunIncident, alike
from ftsupervise.report.plan import plan_rows
from ftsupervise.report.summary import stamp
from ftsupervise.units import show_duration, show_percent

_INCIDENTS, _ROWS, _COSTS = 15, 10, 6
_LONGEST = 160  # characters of a cell
_SPECIAL = re.compile(r"([\\`*_\[\]<>|~&$^])")  # within a line
_OURS = frozenset(("before", "next", "to try", "unseen"))  # rows of a verdict in our words
_BAR = 30  # characters


def as_markdown(report: ReportFacts) -> str:
    """The verdict first, then what cost most, the account, and the newest of each kind."""
    return "\n".join(_lines(report)).rstrip("\n") + "\n"


def _lines(report: ReportFacts) -> Iterator[str]:
    seen, of, head = report.detail.status, report.detail.account, summary.headline(report)
    yield f"# {plain(seen.name)}: {head.verdict}"
    yield ""
    yield f"**{plain(head.sentence, 600)}**"
    yield ""
    if head.next:
        yield " ".join(filter(None, (f"Next: {plain(head.next, 600)}", code(head.command))))
        yield ""
    if said := " ".join(plain(words, 600) for words in summary.sentences(report)):
        yield said
        yield ""
    yield from table(
        ("", "", ""), ((tile.title, f"**{plain(tile.value)}**", plain(tile.more)) for tile in summary.tiles(report))
    )
    if report.costs:
        yield "## What cost most"
        yield ""
        for number, item in enumerate(report.costs[:_COSTS], 1):
            yield f"{number}. {plain(summary.cost_sentence(item, of.total), 600)}"
        yield ""
        if len(report.costs) <= _COSTS and (rest := summary.rest_sentence(report)):
            yield rest
            yield ""
    if bad := summary.bad_loss_sentence(report.bad_losses):
        yield plain(bad, 900)
        yield ""
    yield from _time(of)
    yield from _groups(report)
    yield from _incidents(report.incidents)
    yield from _verdicts(report)
    yield from _observed(report)
    yield from _stalls(report)
    yield from _nodes(report)
    yield from _alerts(report)
    rows_of_plan = [(plain(one.what), plain(one.plan), plain(one.actual)) for one in plan_rows(report)]
    yield from section("Plan and actual", ("", "planned, or usual", "actual"), rows_of_plan)
    if report.detail.tracker is not None:
        yield f"Its page in {plain(report.detail.tracker.kind)}: <{report.detail.tracker.url}>"
        yield ""
    yield f"As of {stamp(seen.at)}. The page with pictures: {code(f'ftsupervise report {seen.rundir.quoted()}')}"


def _time(of: TimeAccount) -> Iterator[str]:
    seconds = of.seconds()
    whole = sum(seconds.values())
    if whole <= 0:
        return
    yield "## Where the time went"
    yield ""
    rows = [
        (
            kind.value,
            show_duration(seconds[kind]),
            show_percent(seconds[kind] / whole),
            code(bar(seconds[kind] / whole)),
        )
        for kind in Spent
        if seconds[kind] > 0
    ]
    yield from table(("kind", "time", "share", ""), rows)
    yield from table(("ratio", "value", "definition"), summary.definitions(of))


def _groups(report: ReportFacts) -> Iterator[str]:
    if report.groups is None:
        return
    from ftsupervise.report.groups import groups_sentence

    yield "## Replica groups"
    yield ""
    yield plain(groups_sentence(report.groups), 600)
    yield ""
    cells = (
        (
            plain(one.now.name),
            one.now.state.value,
            stamp(one.now.since),
            "" if one.now.step is None else f"{one.now.step:,}",
            str(len(one.faults)),
            plain(one.faults[-1].cause if one.faults else ""),
        )
        for one in report.groups.rows
    )
    yield from table(("group", "state", "since", "step", "faults", "last fault"), cells)


def _incidents(found: Sequence[RunIncident]) -> Iterator[str]:
    if not found:
        return
    yield "## Interruptions"
    yield ""
    rows = []
    groups = alike(found)
    for first, one, times in list(reversed(groups))[:_INCIDENTS]:
        evidence = f" {code(one.evidence)}" if one.evidence else ""
        cause = summary.kind_and_cause(one)
        cost = "; ".join(filter(None, (show_duration(one.lost) if one.lost >= 1 else "", summary.apart_words(one))))
        where = ", ".join(one.nodes[:4])
        number = str(one.attempt) if times == 1 else f"{first.attempt} to {one.attempt}"
        when = stamp(one.at) if times == 1 else f"{stamp(one.at)}, {times} times since {stamp(first.at)}"
        rows.append((when, number, f"{plain(cause)}{evidence}", plain(where), plain(one.done), cost))
    yield from table(("when", "attempt", "cause and evidence", "where", "done", "cost"), rows)
    if len(groups) > _INCIDENTS:
        yield f"{sum(one.times for one in groups[:-_INCIDENTS])} earlier ones are not listed."
        yield ""


def _verdicts(report: ReportFacts) -> Iterator[str]:
    """The verdicts of ``diagnose`` about the newest faults."""
    ends = [one.newest for one in reversed(alike(report.incidents)) if one.newest.attempt in report.verdicts]
    if not ends:
        return
    yield "### What failed"
    yield ""
    for one in ends[:_ROWS]:
        page = report.verdicts[one.attempt]
        yield f"- Attempt {one.attempt}: **{plain(summary.verdict_words(page), 300)}**"
        for name, text in summary.verdict_rows(page):
            yield f"  - {plain(name)}: {plain(text, 600) if name in _OURS else code(text)}"
    yield ""


def _observed(report: ReportFacts) -> Iterator[str]:
    if words := summary.observed_sentence(report):
        yield "## What it would have done"
        yield ""
        yield plain(words, 600)
        yield ""
        rows = list(reversed(report.detail.would))[:_INCIDENTS]
        cells = (
            (stamp(one.at), str(one.attempt or "none"), plain(one.words, 300), plain(one.then, 300)) for one in rows
        )
        yield from table(("when", "attempt", "decision", "what happened without it"), cells) if rows else ()


def _stalls(report: ReportFacts) -> Iterator[str]:
    cells = [
        (stamp(one.at), one.stall, plain(one.lost), one.steps, one.back)
        for one in stall_rows(report.detail.groups)[:_ROWS]
    ]
    return section("Stalls of the replica groups", ("when", "stall", "group", "steps lost", "back"), cells)


def _nodes(report: ReportFacts) -> Iterator[str]:
    rows = [row for row in report.nodes.rows if isinstance(row, NodeRow)][:_ROWS]
    cells = [(plain(one.name), one.state, f"{one.score:.2f}", str(one.faults), plain(one.why)) for one in rows]
    return section("Nodes with a history", ("node", "state", "score", "faults here", "why"), cells)


def _alerts(report: ReportFacts) -> Iterator[str]:
    cells = [
        (
            stamp(one.at),
            one.word,
            f"{plain(one.name)}: {plain(one.summary)}",
            plain(summary.steps_words(one)),
            plain(", ".join(one.told)),
        )
        for one in [row for row in report.alerts.rows if isinstance(row, AlertRow)][:_ROWS]
    ]
    return section("Alerts", ("since", "state", "alert", "messages", "notified"), cells)


def section(title: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    """A table under its title; nothing where it has no row."""
    if rows:
        yield f"## {title}"
        yield ""
        yield from table(head, rows)


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """A table, and an empty line behind it. The cells are Markdown."""
    yield f"| {' | '.join(head)} |"
    yield f"|{'---|' * len(head)}"
    for row in rows:
        yield f"| {' | '.join(row)} |"
    yield ""


def plain(text: str, longest: int = _LONGEST) -> str:
    """``text`` as words and nothing else: no markup, no link, no mention, one line."""
    apart = printable(text, longest).replace("@", "@\u200b").replace("://", ":\u200b//")  # by what no eye sees
    return _SPECIAL.sub(r"\\\1", apart)


def code(text: str) -> str:
    """``text`` between backticks, in a cell of a table."""
    inside = printable(text, _LONGEST).replace("`", "'").replace("|", "¦").strip()
    return f"`{inside}`" if inside else ""


def bar(share: float) -> str:
    return "█" * round(_BAR * share) or "▏"
