"""A report's first words: how the run is, what it reached, what cost most; and what was planned beside what came. Pure.

The sentences are made once, here, for the page, the Markdown and the mail.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timezone
from typing import NamedTuple

from ftsupervise.report.account import Spent, TimeAccount, ratio
from ftsupervise.report.alert_rows import AlertRow
from ftsupervise.report.costs import (
    BLIND,
    BRAKED,
    FIRST,
    HELD,
    PLANNED,
    QUEUE,
    SAVES,
    SLOW_STEPS,
    STANDS,
    UNKNOWN,
    CostItem,
    at_usual_speed,
)
from ftsupervise.report.everything import ReportFacts
from ftsupervise.report.groups import stall_sentence
from ftsupervise.report.headline import Headline, RunPresent, faults_lately, headline_of, job_that_runs, restarts_hangs
from ftsupervise.report.incidents import STALL, RunIncident, standing
from ftsupervise.report.placing import BadLoss
from ftsupervise.report.row import pace_of
from ftsupervise.report.slow import SLOW
from ftsupervise.rundir.attempt_pages import VerdictPage
from ftsupervise.rundir.observing import phrase
from ftsupervise.units import count, show_duration, show_percent, show_rate

_MOST_STEPS = 6  # of an alert that are listed
_MEANINGS = {
    QUEUE: "No job of the run was running.",
    HELD: "The kill switch or a person kept it from running, or nothing was launched.",
    UNKNOWN: "Nothing on record says what happened.",
    SAVES: "The training waited for its checkpoints.",
    STANDS: "The job runs, and no rank makes a step.",
    BLIND: "Whether it was training is not known: without the guard, or before it, nothing is reported.",
    FIRST: "From the start of the command to its first step.",
    PLANNED: "Jobs that ended as planned (time limit, kill switch, preemption), and the starts after them.",
}


class Tile(NamedTuple):
    title: str
    value: str
    more: str = ""
    tone: str = ""


def headline(report: ReportFacts) -> Headline:
    """The verdict of ``status``, one sentence, and what to do next."""
    seen, run = report.detail.status, report.run
    last, page = seen.run.last, seen.run.page
    worst = report.detail.row.alerts[0].watchdog if report.detail.row.alerts else ""
    rows = (one for one in report.alerts.rows if isinstance(one, AlertRow) and one.ended is None)
    return headline_of(
        RunPresent(
            row=report.detail.row,
            account=report.detail.account,
            reached=reached(report),
            usual=report.usual,
            stood=_stands(report),
            job_id=job_that_runs(seen.jobs, last),
            behind=page.slowest if page is not None else "",
            brake=seen.run.braked,
            last=last,
            do=next((one.do for one in rows if worst and one.watchdog == worst), ""),
            restarts_hangs=restarts_hangs(run),
            observes=report.detail.observes,
            lately=faults_lately(report.incidents, seen.at),
        )
    )


def sentences(report: ReportFacts) -> Iterator[str]:
    """Yield sentences about how far it came, and in what time; at most five."""
    of, row = report.detail.account, report.detail.row
    if of.total < 1:
        return
    share, seconds = of.goodput(), of.seconds()
    if len(of.blind) < len(report.detail.status.attempts) or not of.blind:
        trained = show_duration(seconds[Spent.TRAIN])
        words = {Spent.BRAKED: "stopped by the brake for", Spent.HELD: "stopped by a person, or not launched, for"}
        kept = " and ".join(
            f"{one} {show_duration(seconds[kind])}" for kind, one in words.items() if seconds[kind] >= 1
        )
        held = f"; it was {kept}" if kept else ""
        yield f"In the {show_duration(of.total)} since its launch it trained for {trained} ({ratio(share)}){held}."
    faults = sum(1 for one in report.incidents if not one.planned)
    planned = len(report.incidents) - faults
    lost = sum(one.lost for one in report.incidents if not one.planned)
    if faults:
        now = ", one of which is not over," if any(one.goes_on for one in report.incidents) else ""
        now = " (it is not over)" if now and faults == 1 else now
        ends = f"; there {was(planned)} also {count(planned, 'planned restart')}" if planned else ""
        yield f"{count(faults, 'fault')}{now} interrupted it and cost {show_duration(lost)}{ends}."
    elif report.incidents:
        yield f"No fault interrupted it; there {was(planned)} {count(planned, 'planned restart')}."
    else:
        yield (
            "Nothing has interrupted it."
            if report.groups is None
            else "Nothing has interrupted all of its groups at once."
        )
    if stalled := stall_sentence(report.detail.groups):
        yield stalled
    if row.done_at is not None and _stands(report) < STALL:
        left = show_duration(round((row.done_at - report.detail.status.at).total_seconds()))
        speed = "usual" if pace_of(row.rate, row.usual) == row.usual else "present"
        yield f"At its {speed} speed step {row.last_step:,} is made in {left}, at {due(row.done_at)}."
    if of.blind:
        blind = "One attempt" if len(of.blind) == 1 else f"{len(of.blind)} attempts"
        yield f"{blind} reported nothing (no guard, or not yet): what was done then is not known."


def observed_sentence(report: ReportFacts) -> str:
    """Return which decisions are only told, and how many were; "" where none is and none was."""
    told, now = len(report.detail.would), phrase(report.detail.observes)
    if not told and not now:
        return ""
    many = f"{count(told, 'decision')} {'was' if told == 1 else 'were'} told and not carried out" if told else ""
    words = "; ".join(filter(None, (f"{now[:1].upper()}{now[1:]}", many)))
    return f"{words}."


def cost_sentence(item: CostItem, total: float) -> str:
    """One line about what time was lost to: "7h 12m (9.4 %) waiting in the queue"."""
    share = f" ({show_percent(item.seconds / total)})" if total > 0 else ""
    words = f"{show_duration(item.seconds)}{share}: {item.name}"
    if times := times_of(item):
        words += f", {times}"
    return f"{words}. {why}" if (why := explained(item)) else words


def times_of(item: CostItem) -> str:
    """ "3 times on node-21 and node-7; one is not over"."""
    if not item.times:
        return ""
    times = f"{item.times} times" if item.times > 1 else "once"
    few = item.nodes[:3]
    more = f" and {count(len(item.nodes) - 3, 'other node')}" if len(item.nodes) > 3 else ""
    where = f" on {', '.join(few)}{more}" if few else ""
    now = ("; one is not over" if item.times > 1 else "; it is not over") if item.goes_on else ""
    return f"{times}{where}{now}"


def rest_sentence(report: ReportFacts) -> str:
    """Return the sentence about the time that the items of cost leave: together they are all of it."""
    of = report.detail.account
    rest = at_usual_speed(of, report.costs)
    if of.total < 1 or rest < 1:
        return ""
    words = f"other {show_duration(rest)} ({show_percent(rest / of.total)})"
    if any(item.name == SLOW_STEPS for item in report.costs):
        return f"The {words} are what its training would have taken at its usual speed."
    return f"In the {words} it trained{' at its usual speed' if report.usual else ''}."


def explained(item: CostItem) -> str:
    """A clause on what an item is, or its costliest case."""
    words = _example(item)
    if not item.run:
        return words
    few = show_percent(item.of_run / item.seconds)
    whose = (
        f"Only {item.run}" if item.of_run >= item.seconds else f"Most: {item.run}, {show_duration(item.of_run)} ({few})"
    )
    if words == _MEANINGS.get(item.name):
        return f"{words} {whose}."
    return f"{whose}: {words[:1].lower()}{words[1:]}" if words else f"{whose}."


def _example(item: CostItem) -> str:
    words = _MEANINGS.get(item.name, "")
    if item.slowest is not None:
        slowest, share = item.slowest, item.slowest.rate / item.slowest.usual
        begin, end = (stamp(_utc(at)) for at in (slowest.begin, slowest.end))
        when = f"since {begin}, and still" if slowest.goes_on else f"from {begin} to {end}"
        return f"The costliest: {when}, at {100 * share:.0f} % of its usual speed."
    if item.name in (HELD, BRAKED) and item.example is not None:
        one = item.example
        why = ": ".join(filter(None, (kind_and_cause(one), one.evidence)))
        return f"It was stopped after attempt {one.attempt}: {why}"
    if words or item.example is None:
        return words
    one = item.example
    where = f" on {', '.join(one.nodes[:3])}" if one.nodes and not any(node in one.cause for node in one.nodes) else ""
    said = f": {one.evidence}" if one.evidence and one.evidence not in one.cause else ""
    begins = "The costliest" if item.times > 1 else "Cause"
    cause = one.cause if re.match(rf"{re.escape(one.kind)}(?!:)", one.cause) else cause_of(one) or one.kind
    return f"{begins}: {cause}{where}{said}"


def spent_words(pairs: Iterable[tuple[Spent, float]]) -> str:
    """ "detect 1m, restart 5m"."""
    return ", ".join(f"{kind.value} {show_duration(seconds)}" for kind, seconds in pairs if seconds >= 1)


def apart_words(one: RunIncident) -> str:
    """The time after an interruption that is not its own cost: "then queue 1h 30m"."""
    words = spent_words(one.apart)
    return f"then {words}" if words else ""


def cause_of(one: RunIncident) -> str:
    """The cause in words, without the kind that stands beside it; "" where that says all."""
    return one.cause.removeprefix(one.kind).lstrip(":, ")


def kind_and_cause(one: RunIncident) -> str:
    """ "program error: exit 3", "warning signal, then exit 0"."""
    return one.cause if one.cause.startswith(one.kind) else ": ".join(filter(None, (one.kind, one.cause)))


def verdict_rows(page: VerdictPage) -> tuple[tuple[str, str], ...]:
    """The verdict of ``diagnose`` but for class and place, as names and texts. The ledger's line is the cause, which stands
    beside it."""
    decides = [(one.source, one.text) for one in page.evidence if one.source != "the ledger"]
    more = (("before", words) for words in page.history)
    rest = (("next", page.advice), ("to try", page.remedy), *(("unseen", why) for why in page.unseen))
    return tuple((name, text) for name, text in (*decides, *more, *rest) if text)


def verdict_words(page: VerdictPage) -> str:
    """The class, the place and the confidence; of one that came to nothing, that it did."""
    return page.named() or "not diagnosed"


def tiles(report: ReportFacts) -> tuple[Tile, ...]:
    return tuple(
        filter(
            None, (_effective(report), _step(report), _speed(report), _faults(report), _saved(report), _alerts(report))
        )
    )


def _effective(report: ReportFacts) -> Tile | None:
    of = report.detail.account
    share, meta, byterobust, last = of.goodput(), of.ettr_meta(), of.ettr_byterobust(), of.ettr_last()
    if share is None:
        return None
    hour = f", last hour {ratio(last)}" if last is not None and of.total > 7200 else ""
    tone = "good" if share.least >= 0.9 else "watch" if share.most >= 0.6 else "bad"
    ettr = f"ETTR: Meta {ratio(meta)}, ByteRobust {ratio(byterobust)}{hour}"
    return Tile("Time spent training", ratio(share), ettr, tone)


def _step(report: ReportFacts) -> Tile:
    step, goal = reached(report), report.detail.row.last_step
    if step is None:
        return Tile("Step", "none yet", "no rank has reported a step")
    loss = report.detail.row.loss
    more = [f"{show_percent(step / goal)} of {goal:,}"] if goal else []
    more += [f"loss {loss:.4g}"] if loss is not None else []
    return Tile("Step", f"{step:,}", ", ".join(more))


def _speed(report: ReportFacts) -> Tile | None:
    rate, usual = report.detail.row.rate, report.usual
    if rate is None:
        stands = report.detail.row.verdict in ("HUNG", "STALLED", "SILENT")
        now = "no step is made now" if stands else "it does not run now"
        return Tile("Usual speed", show_rate(usual), now) if usual else None
    if not usual:
        return Tile("Speed now", show_rate(rate))
    more = f"{100 * rate / usual:.0f} % of usual ({show_rate(usual, rate)})"
    return Tile("Speed now", show_rate(rate), more, "watch" if rate / usual < SLOW else "")


def _faults(report: ReportFacts) -> Tile:
    faults = [one for one in report.incidents if not one.planned]
    planned = len(report.incidents) - len(faults)
    lost = f"{show_duration(sum(one.lost for one in faults))} lost" if faults else "none so far"
    now = ", one not over" if any(one.goes_on for one in faults) else ""
    besides = f", {count(planned, 'planned restart')}" if planned else ""
    tone = "bad" if now else "watch" if faults else "good"
    return Tile("Faults", str(len(faults)), f"{lost}{now}{besides}", tone)


def _saved(report: ReportFacts) -> Tile:
    row, now = report.detail.row, report.detail.status.at
    if row.saved is None:
        return Tile("Newest checkpoint", "none", "no rank has reported a checkpoint")
    age = "" if row.saved_at is None else f"{show_duration(max(0.0, (now - row.saved_at).total_seconds()))} ago"
    behind = 0 if row.step is None else max(0, row.step - row.saved)
    risk = f"{count(behind, 'step')} since" if behind else ""
    return Tile("Checkpoint at step", f"{row.saved:,}", ", ".join(filter(None, (age, risk))))


def _alerts(report: ReportFacts) -> Tile:
    row = report.detail.row
    if row.firing:
        return Tile("Alerts", f"{row.firing} firing", row.alerts[0].watchdog if row.alerts else "", "bad")
    if row.watch_late:
        return Tile("Alerts", "not watched", "the watch is late", "watch")
    if row.watched_at is None:
        return Tile("Alerts", "not checked", "nobody watches this run")
    return Tile("Alerts", "none")


# --------------------------------------------------------------------------------------------------------------- words


def bad_loss_sentence(found: Sequence[BadLoss]) -> str:
    """Return how many steps had a loss that was no number, and when; "" where none had."""
    if not found:
        return ""
    when = [
        f"{count(one.steps, 'step') if one.steps else 'steps'} of attempt {one.attempt} from {stamp(_utc(one.begin))}"
        f" to {stamp(_utc(one.end))} ({one.trouble.words})"
        for one in found[-_MOST_STEPS:]
    ]
    return f"The loss was not a number in {'; '.join(when)}."


def _utc(epoch: float) -> datetime:
    return datetime.fromtimestamp(epoch, timezone.utc)


def _stands(report: ReportFacts) -> float:
    """Seconds for which the attempt that runs has made no progress."""
    return standing(report.detail.status.attempts, report.detail.account)


def reached(report: ReportFacts) -> int | None:
    """The highest step of any attempt."""
    steps = (report.detail.status.step, *(one.last_step for one in report.detail.status.attempts))
    return max((step for step in steps if step is not None), default=None)


def steps_words(row: AlertRow) -> str:
    """ "fired 12:22:05, repeated 13:22:06, resolved 14:02:41", with the day where it changes."""
    found, day = [], f"{row.at:%Y-%m-%d}" if row.at is not None else ""
    for word, at in row.steps:
        new = f"{at:%Y-%m-%d}"
        found.append(f"{word} {f'{new} ' if new != day else ''}{at:%H:%M:%S}")
        day = new
    if len(found) > _MOST_STEPS:
        found = [*found[:2], f"{len(found) - 4} more", *found[-2:]]
    return ", ".join(found)


def definitions(of: TimeAccount) -> tuple[tuple[str, str, str], ...]:
    """Each ratio with its name, value and definition; that of the last hour where it is known."""
    last = of.ettr_last()
    found = (
        (
            "ETTR, Meta",
            ratio(of.ettr_meta()),
            "train / all time in which no brake and no person had stopped it; the queue counts (Kokolis et al., HPCA 2025)",
        ),
        (
            "ETTR, ByteRobust",
            ratio(of.ettr_byterobust()),
            "train / all time since the first attempt began; the first wait does not count (SOSP 2025)",
        ),
        ("ETTR of the last hour", ratio(last), "the same for the last hour only: ByteRobust's sliding window"),
        ("Goodput", ratio(of.goodput()), "train / all time since the launch"),
    )
    return found if last is not None else (*found[:2], found[3])


def stamp(at: datetime | None) -> str:
    """Return when something was."""
    return "" if at is None else f"{at:%Y-%m-%d %H:%M:%S} UTC"


def due(at: datetime) -> str:
    """Return when something will be: nobody knows that to the second."""
    return f"{at:%Y-%m-%d %H:%M} UTC"


def was(number: int) -> str:
    """Return the verb for a number of things."""
    return "was" if number == 1 else "were"
