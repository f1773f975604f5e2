"""The report of a run as one HTML file that needs no network: values in, text out.

Texts come from strangers (names of nodes and jobs, lines of logs). They are made printable and escaped where they enter the
page, nothing of them stands in a script, and the page's own policy lets no other script run than ours, by its digest.
"""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import lru_cache
from importlib import resources
from typing import TYPE_CHECKING, Any

from ftsupervise.printable import printable_lines
from ftsupervise.report import drawing, summary
from ftsupervise.report.account import Spent
from ftsupervise.report.alert_rows import AlertRow
from ftsupervise.report.costs import CostItem
from ftsupervise.report.drawing import KINDS, Axis, Line
from ftsupervise.report.everything import CheckpointRow, NodeRow, ReportFacts, SettingRow, may_have_a_verdict
from ftsupervise.report.groups import stall_rows
from ftsupervise.report.incidents import STALL, AlikeIncidents, RunIncident, alike, costs_of
from ftsupervise.report.placing import TimeGap, gaps
from ftsupervise.report.plan import PlanForecast, plan_line, plan_rows
from ftsupervise.report.summary import stamp
from ftsupervise.secrecy import masked
from ftsupervise.units import count, show_duration, show_percent, show_size
from ftsupervise.version import VERSION

if TYPE_CHECKING:
    from jinja2 import Environment

    from ftsupervise.report.following import FollowedPage

MEANINGS = {
    Spent.TRAIN: "steps made for the first time",
    Spent.SAVE: "checkpoints that the training waited for",
    Spent.REDO: "steps made again after a fault",
    Spent.DETECT: "from the last progress to the end of the attempt",
    Spent.RESTART: "from the start of the command to its first step",
    Spent.QUEUE: "no attempt was running, and a job waited in the queue",
    Spent.BRAKED: "stopped by the brake",
    Spent.HELD: "stopped by a person, or not launched",
    Spent.UNKNOWN: "nothing on record says what happened",
}
_LONGEST = 600  # characters of a text in a cell
_COSTS = 8  # items that are listed
_CHECKPOINTS = 8  # of the newest that are shown at first
_FEW_FAULTS = 80  # that are drawn into the curves
_GAP = 0.006  # of the axis: a shorter time without a step is not marked in the curves
_TONES = {
    "firing": "bad",
    "escalated": "bad",
    "fired": "bad",
    "repeated": "watch",
    "pending": "watch",
    "resolved": "good",
}
_NODE_TONES = {"excluded": "bad", "by hand": "bad", "kept": "watch", "trusted": "good"}


def page(
    report: ReportFacts, followed: FollowedPage | None = None, home: str = "", forecast: PlanForecast | None = None
) -> str:
    """The whole file. ``followed``: it is renewed, or was. ``home``: the page of all runs, which lies beside it. ``forecast``:
    what would help, where that is asked for."""
    axis = drawing.axis_of(report.detail.account)
    lines = _lines(report, axis)
    follow = followed.shown(report.detail.status.at) if followed is not None else None
    renewed = followed.data() if followed is not None else {}
    view = {**_view(report, axis, lines), "forecast": _forecast(forecast), "follow": follow, "home": home}
    data = {**_data(report, axis, lines), **renewed}
    return rendered("report.html.j2", view, data, ("report.js", *(("follow.js",) if renewed else ())))


def rendered(template: str, view: Mapping[str, Any], data: Mapping[str, Any], scripts_of: Sequence[str] = ()) -> str:
    """A template with ``view`` as ``r``, the style, and these scripts, which read ``data``."""
    style, script = _resource("report.css"), "\n".join(map(_resource, scripts_of))
    from markupsafe import Markup

    scripts = f"script-src {_digest(script)}" if script else "script-src 'none'"
    # what a policy in the page itself can say; the digests are of the very text between the tags
    policy = f"default-src 'none'; style-src {_digest(style)}; {scripts}; base-uri 'none'; form-action 'none'"
    return (
        _environment()
        .get_template(template)
        .render(
            r=view,
            style=Markup(style),
            script=Markup(script),
            data=Markup(_json(data)),
            policy=Markup(policy),
            version=VERSION,
        )
    )


def _digest(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _json(data: Mapping[str, Any]) -> str:
    """JSON that may stand between script tags, whatever is in it."""
    text = json.dumps(data, separators=(",", ":"), ensure_ascii=True, allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")


def _resource(name: str) -> str:
    return (resources.files("ftsupervise.templates") / name).read_text("utf-8")


@lru_cache(maxsize=1)
def _environment() -> Environment:
    from jinja2 import Environment, FunctionLoader, StrictUndefined
    from markupsafe import Markup

    def harmless(value: object) -> object:
        return printable_lines(value) if isinstance(value, str) and not isinstance(value, Markup) else value

    return Environment(
        loader=FunctionLoader(_resource),
        undefined=StrictUndefined,
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=harmless,
    )


# ------------------------------------------------------------------------------------------------------------ the view


def _forecast(of: PlanForecast | None) -> dict[str, Any] | None:
    if of is None:
        return None
    from markupsafe import Markup

    return {"sentence": of.sentence, "picture": Markup(of.picture), "helps": of.helps}


def _view(report: ReportFacts, axis: Axis, lines: Sequence[tuple[str, str, str, Line]]) -> dict[str, Any]:
    seen, of = report.detail.status, report.detail.account
    found = drawing.buckets(axis, report.detail.drawn)
    faults = drawing.marks((one.at.timestamp() for one in report.incidents if not one.planned), axis)
    few = faults.count("M") <= _FEW_FAULTS
    usual = [row for row in report.settings.rows if isinstance(row, SettingRow) and row.origin == "default"]
    ends = alike(report.incidents)
    known = [row for row in report.checkpoints.rows if isinstance(row, CheckpointRow)]
    checkpoints = [_checkpoint(row) for row in known if not row.aside]
    return {
        "name": seen.name,
        "at": stamp(seen.at),
        "span": f"of {show_duration(of.total)} since {stamp(of.since)}" if of.total >= 1 else "",
        "directory": str(seen.rundir.root),
        "tracker": report.detail.tracker,
        "nav": [one for one in _NAV if one[0] != "groups" or report.groups is not None],
        "groups": _groups(report, axis),
        "head": summary.headline(report),
        "said": tuple(summary.sentences(report)),
        "tiles": summary.tiles(report),
        "costs": tuple(
            {**cost_row(one, of.total, report.costs[0].seconds), "anchor": _anchor(one, ends)}
            for one in report.costs[:_COSTS]
        ),
        "rest": summary.rest_sentence(report),
        "strip": drawing.strip(report.detail.drawn.stretches, axis),
        "loose": _loose(report),
        "gaps": drawing.shaded(gaps(report.detail.drawn.stretches, _GAP * (axis.end - axis.begin)), axis),
        "standstill": _standstill(report, axis),
        "no_number": drawing.shaded((TimeGap(one.begin, one.end) for one in report.bad_losses), axis),
        "bad_losses": summary.bad_loss_sentence(report.bad_losses),
        "flags": faults,
        "faults": faults if few else "",
        "time_words": ", ".join(
            f"{kind.value} {show_percent(share)}" for kind, share in of.shares().items() if share > 0
        ),
        "ticks": drawing.time_ticks(axis),
        "bars": drawing.bars(found),
        "bar_ticks": drawing.time_ticks(Axis(found[0].begin, found[-1].end)) if found else (),
        "bucket": _unit(found[0].end - found[0].begin) if found else "",
        "kinds": kind_rows(of.seconds()),
        "ratios": summary.definitions(of),
        "lines": [{"name": name, "title": title, "label": label, "line": line} for name, title, label, line in lines],
        "planned": any(line.plan for *_, line in lines),
        "slow": _slow(report),
        "observed": summary.observed_sentence(report),
        "would": [
            {"at": stamp(one.at), "attempt": one.attempt or "none", "words": one.words, "then": one.then}
            for one in reversed(report.detail.would)
        ],
        "incidents": [{**alike_row(one), "verdict": _verdict(report, one.newest)} for one in reversed(ends)],
        "undiagnosed": sum(_lacks_a_verdict(report, one.newest) for one in ends),
        "diagnose": f"ftsupervise diagnose {seen.rundir.quoted()} ATTEMPT",
        "stalls": [{**one._asdict(), "at": stamp(one.at)} for one in stall_rows(report.detail.groups)],
        "incident_kinds": [(one.kind, one.times) for one in costs_of(report.incidents)],
        "nodes": [_node(row) for row in report.nodes.rows if isinstance(row, NodeRow)],
        "nodes_problem": report.nodes.problem,
        "alerts": [_alert(row) for row in report.alerts.rows if isinstance(row, AlertRow)],
        "alerts_problem": report.alerts.problem,
        "folder": report.folder,
        "checkpoints": checkpoints[:_CHECKPOINTS],
        "older_checkpoints": checkpoints[_CHECKPOINTS:],
        "set_aside": [_aside(rows) for rows in _by_note(row for row in known if row.aside)],
        "checkpoints_problem": report.checkpoints.problem,
        "plan": tuple(plan_rows(report)),
        "settings": [
            {"key": row.key, "value": cut(row.value), "origin": row.origin, "usual": row.origin == "default"}
            for row in report.settings.rows
            if isinstance(row, SettingRow)
        ],
        "defaults": len(usual),
        "settings_problem": report.settings.problem,
    }


_NAV = (
    ("summary", "Summary"),
    ("costs", "What cost most"),
    ("time", "Time"),
    ("progress", "Progress"),
    ("groups", "Groups"),
    ("incidents", "Interruptions"),
    ("nodes", "Nodes"),
    ("alerts", "Alerts"),
    ("checkpoints", "Checkpoints"),
    ("plan", "Plan"),
    ("settings", "Settings"),
)


def cost_row(one: CostItem, total: float, most: float) -> dict[str, Any]:
    return {
        "took": show_duration(one.seconds),
        "share": show_percent(one.seconds / total) if total > 0 else "",
        "name": one.name,
        "times": summary.times_of(one),
        "fault": one.fault,
        "wide": max(4, round(1000 * one.seconds / max(most, one.seconds))),
        "why": cut(summary.explained(one)),
        "anchor": "",
    }


def _anchor(one: CostItem, ends: Iterable[AlikeIncidents]) -> str:
    """Return the row of the interruption that an item names; "" where it names none."""
    number = one.example.attempt if one.example is not None else 0
    return next((f"attempt-{of.newest.attempt}" for of in ends if of.first.attempt <= number <= of.newest.attempt), "")


def kind_rows(seconds: Mapping[Spent, float]) -> list[dict[str, str]]:
    """The kinds of time with their sums, those that there were."""
    whole = sum(seconds.values())
    return [
        {
            "kind": kind.value,
            "meaning": MEANINGS[kind],
            "time": show_duration(seconds[kind]),
            "share": show_percent(seconds[kind] / whole),
        }
        for kind in KINDS
        if seconds[kind] > 0
    ]


def _lines(report: ReportFacts, axis: Axis) -> list[tuple[str, str, str, Line]]:
    """The curves that there are: name, title, words for those who do not see them."""
    found = []
    starts = [one.started.timestamp() for one in report.detail.status.attempts]
    rate = drawing.rate_line(report.paces, axis, starts)
    for name, title, line in (
        ("step", "Step", drawing.step_line(report.steps, axis, starts, plan_line(report))),
        ("rate", "Speed, steps a second", rate),
        ("loss", "Loss", drawing.loss_line(report.steps, axis, starts)),
    ):
        if line is not None:
            values = [value for _, value in line.points]
            ends = f"from {values[0]:.5g} to {values[-1]:.5g}; lowest {min(values):.5g}, highest {max(values):.5g}"
            label = f"{title} over time: {ends}. Use the arrow keys to read values."
            found.append((name, title, label, line))
    return found


def _groups(report: ReportFacts, axis: Axis) -> dict[str, Any] | None:
    found = report.groups
    if found is None:
        return None
    from ftsupervise.report.groups import groups_sentence

    light = found.seen.lighthouse
    restarted = "" if light is None else "once" if light.restarts == 1 else f"{light.restarts} times"
    rows = [
        {
            "name": one.now.name,
            "state": one.now.state.value,
            "tone": one.tone,
            "since": stamp(one.now.since),
            "why": cut(one.now.why),
            "nodes": cut(", ".join(one.now.nodes[:8]), 120),
            "step": "" if one.now.step is None else f"{one.now.step:,}",
            "faults": len(one.faults),
            "last": "" if not one.faults else cut(f"{stamp(one.faults[-1].at)}: {masked(one.faults[-1].cause)}", 300),
            "strip": drawing.strip(one.drawn, axis) if one.drawn else (),
            "words": one.now.state.value,
        }
        for one in found.rows
    ]
    return {
        "words": groups_sentence(found),
        "lighthouse": "" if light is None else f"The lighthouse is at {light.address} and was restarted {restarted}.",
        "rows": rows,
    }


def _loose(report: ReportFacts) -> str:
    """Where saves are drawn that have no time on record."""
    number = len(report.detail.drawn.loose)
    if not number:
        return ""
    whose = "one attempt" if number == 1 else f"{number} attempts"
    words = "the band shows that time as training, and the columns share it out"
    return f"When {whose} saved checkpoints is not on record: {words}."


def _standstill(report: ReportFacts, axis: Axis) -> dict[str, Any] | None:
    """A mark in the curves where the last step was made, if that was long ago: its place in percent, and its words."""
    found = gaps(report.detail.drawn.stretches, STALL)
    if not found or axis.end - found[-1].end > 1 or not report.steps.spans:
        return None
    since = _at(report, found[-1].begin)
    place = 100 * (found[-1].begin - axis.begin) / (axis.end - axis.begin)
    return {"at": round(place, 2), "left": place > 50, "text": f"no step since {stamp(since)}"}


def _slow(report: ReportFacts) -> str:
    run = report.detail.status.run
    page = run.page if run.last is not None and run.last.ended is None else None
    if page is None or page.straggler is None:
        return _slowest(report)
    words = page.straggler.words()
    return f"{words[:1].upper()}{words[1:]}. {_slowest(report)}".strip()


def _slowest(report: ReportFacts) -> str:
    if not report.slow:
        return ""
    worst = max(report.slow, key=lambda one: one.lost)
    share = f"{100 * worst.rate / worst.usual:.0f} %"
    return f"Slowest: from {stamp(_at(report, worst.begin))} to {stamp(_at(report, worst.end))}, at {share} of its usual speed."


def _at(report: ReportFacts, epoch: float) -> Any:
    from datetime import datetime

    return datetime.fromtimestamp(epoch, report.detail.status.at.tzinfo)


def _unit(seconds: float) -> str:
    names = {60.0: "minute", 3600.0: "hour", 86400.0: "day", 604800.0: "week"}
    return names.get(seconds, show_duration(seconds))


def incident_row(one: RunIncident) -> dict[str, Any]:
    ranks = f"rank{'' if one.ranks.isdigit() else 's'} {one.ranks}" if one.ranks else ""
    split = summary.spent_words(one.costs) if len(one.costs) > 1 else one.costs[0][0].value if one.costs else ""
    steps = one.steps_lost
    return {
        "attempt": one.attempt,
        "attempts": str(one.attempt),
        "kind": one.kind,
        "planned": int(one.planned),
        "job": f"job {cut(one.job_id, 40)}" if one.job_id else "",
        "at": stamp(one.at),
        "at_seconds": round(one.at.timestamp()),
        "again": "",
        "times": 1,
        "cause": cut(summary.cause_of(one)),
        "evidence": cut(one.evidence),
        "ranks": cut(ranks, 60),
        "nodes": cut(", ".join(one.nodes[:8]), 120),
        "steps": f"{steps:,}" if steps else "0" if steps == 0 else "",
        "steps_value": -1 if steps is None else steps,
        "done": cut(one.done, 500),
        "cost": show_duration(one.lost) if one.lost >= 1 else "",
        "lost": round(one.lost),
        "split": split,
        "apart": summary.apart_words(one),
        "goes_on": one.goes_on,
    }


def alike_row(found: AlikeIncidents) -> dict[str, Any]:
    """A row of interruptions that are alike."""
    row = incident_row(found.newest)
    if found.times == 1:
        return row
    first = found.first
    again = f"{found.times} times since {stamp(first.at)}"
    return {**row, "again": again, "times": found.times, "attempts": f"{first.attempt} to {found.newest.attempt}"}


def _verdict(report: ReportFacts, one: RunIncident) -> dict[str, Any] | None:
    """The verdict of ``diagnose`` about an interruption; None where nothing is kept."""
    page = report.verdicts.get(one.attempt)
    if page is None or not may_have_a_verdict(one):
        return None
    rows = [(name, cut(text)) for name, text in summary.verdict_rows(page)]
    return {"named": cut(summary.verdict_words(page)), "rows": rows}


def _lacks_a_verdict(report: ReportFacts, one: RunIncident) -> bool:
    return may_have_a_verdict(one) and one.attempt not in report.verdicts


def _by_note(rows: Iterable[CheckpointRow]) -> Iterator[list[CheckpointRow]]:
    found: dict[str, list[CheckpointRow]] = {}
    for row in rows:
        found.setdefault(row.note, []).append(row)
    yield from found.values()


def _aside(rows: Sequence[CheckpointRow]) -> dict[str, Any]:
    """Checkpoints that were set aside for one reason, as a row."""
    names = ", ".join(row.name for row in rows[:2]) if len(rows) < 3 else f"{rows[0].name} to {rows[-1].name}"
    latest = max((row.at for row in rows if row.at is not None), default=None)
    return {"count": count(len(rows), "checkpoint"), "names": names, "at": stamp(latest), "note": cut(rows[0].note)}


def _node(row: NodeRow) -> dict[str, Any]:
    tone = _NODE_TONES.get(row.state, "plain")
    return {**row._asdict(), "tone": tone, "score": f"{row.score:.2f}", "last": stamp(row.last), "why": cut(row.why)}


def _alert(row: AlertRow) -> dict[str, Any]:
    told = ", ".join(row.told) or ("nobody yet" if row.word in ("firing", "pending") else "")
    tone = _TONES.get(row.word, "plain")
    tone = "watch" if tone == "bad" and row.severity != "critical" else tone
    shown = {"at": stamp(row.at), "told": told, "tone": tone, "summary": cut(row.summary), "do": cut(row.do)}
    return {**row._asdict(), **shown, "steps": summary.steps_words(row)}


def _checkpoint(row: CheckpointRow) -> dict[str, Any]:
    return {
        "name": row.name,
        "step": "" if row.step is None else f"{row.step:,}",
        "step_value": -1 if row.step is None else row.step,
        "at": stamp(row.at),
        "size": "" if row.size is None else show_size(row.size),
        "bytes": -1 if row.size is None else row.size,
        "note": cut(row.note),
    }


def cut(text: str, longest: int = _LONGEST) -> str:
    return text if len(text) <= longest else f"{text[: longest - 1]}…"


# ------------------------------------------------------------------------------------------------------------ the data


def _data(report: ReportFacts, axis: Axis, lines: Iterable[tuple[str, str, str, Line]]) -> dict[str, Any]:
    """What the pointer reads; times are seconds since the begin."""
    found = drawing.buckets(axis, report.detail.drawn)
    curves = {
        name: [[round(at - axis.begin), float(f"{value:.7g}")] for at, value in line.points]
        for name, _, _, line in lines
    }
    return {
        "begin": round(axis.begin),
        "end": round(axis.begin) + max(1, round(axis.end - axis.begin)),
        "kinds": [kind.value for kind in KINDS],
        "stretches": drawing.readable(report.detail.drawn.stretches, axis),
        "buckets": [[one.text, *(round(seconds) for seconds in one.seconds)] for one in found],
        "holes": {
            name: [[round(begin - axis.begin), round(end - axis.begin)] for begin, end in line.holes]
            for name, _, _, line in lines
        },
        "bad": [[round(one.begin - axis.begin), round(one.end - axis.begin)] for one in report.bad_losses],
        "ends": {str(one.attempt): one.kind for one in report.incidents if not one.goes_on},
        **curves,
    }
