"""One run as metrics in Prometheus's text format: the table of all metrics, and the text.

A value that is not known has no sample: nothing is told in its place. The state of the run, and of each switch, is one sample
for each word, 1 for the one that is true, so that "unknown" is a state and never a zero. No metric has a label for ranks, nodes
or attempts: a run has at most ``MOST`` samples, however large it is.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import datetime
from typing import NamedTuple

from ftsupervise.model import FailureKind
from ftsupervise.printable import printable
from ftsupervise.replicas.stalls import StallPage
from ftsupervise.report import Status
from ftsupervise.report.account import Ettr, TimeAccount
from ftsupervise.report.row import RunRow
from ftsupervise.version import VERSION

MOST = 120  # samples of a run
STATES = (
    "running",
    "hung",
    "stalled",
    "silent",
    "slow",
    "waiting",
    "stopping",
    "stopped",
    "finished",
    "gone",
    "new",
    "unknown",
    "other",
)
_LABEL = 200  # characters of a label's value
_WORDS = ("absent", "unknown", "up")


class Metric(NamedTuple):
    kind: str  # "gauge" or "counter"
    help: str
    labels: tuple[str, ...] = ()  # besides run and user


METRICS: Mapping[str, Metric] = {
    "ftsupervise_run_info": Metric("gauge", "Names of the run; always 1.", ("directory", "job_id", "version")),
    "ftsupervise_run_state": Metric(
        "gauge", "1 for the word with which status begins, 0 for all others; unknown: it could not be seen.", ("state",)
    ),
    "ftsupervise_run_step": Metric("gauge", "The step that all ranks have reached."),
    "ftsupervise_run_target_step": Metric("gauge", "The step after which the training is complete."),
    "ftsupervise_run_steps_per_second": Metric("gauge", "Steps a second over the last minute, saves included."),
    "ftsupervise_run_usual_steps_per_second": Metric("gauge", "Steps a second as is usual for this run."),
    "ftsupervise_run_loss": Metric("gauge", "The newest loss that the loop reported."),
    "ftsupervise_run_ranks": Metric("gauge", "Ranks that report."),
    "ftsupervise_run_seen_timestamp_seconds": Metric("gauge", "When a rank last gave a sign of life."),
    "ftsupervise_run_checkpoint_step": Metric("gauge", "The step of the newest checkpoint."),
    "ftsupervise_run_checkpoint_timestamp_seconds": Metric("gauge", "When the newest checkpoint was first seen."),
    "ftsupervise_run_expected_end_timestamp_seconds": Metric("gauge", "When the last step is made, at the usual rate."),
    "ftsupervise_run_job_end_timestamp_seconds": Metric("gauge", "When the scheduler ends the job that runs."),
    "ftsupervise_run_members_left": Metric("gauge", "Jobs, or members of the array, that wait to take over."),
    "ftsupervise_run_attempts_total": Metric("counter", "Starts of the command."),
    "ftsupervise_run_failures_total": Metric("counter", "Attempts that ended with a failure, by its kind.", ("kind",)),
    "ftsupervise_run_group_stalls_total": Metric(
        "counter", "Times that replica groups waited for one that was lost or stood."
    ),
    "ftsupervise_run_group_stall_seconds_total": Metric("counter", "Seconds that they waited for it."),
    "ftsupervise_run_group_steps_lost_total": Metric("counter", "Steps that they tried in vain then."),
    "ftsupervise_run_group_back_seconds": Metric(
        "gauge", "Seconds until the group that was lost last took part again."
    ),
    "ftsupervise_run_time_seconds_total": Metric(
        "counter", "Time since the launch by what it went into; the kinds are those of the account of time.", ("kind",)
    ),
    "ftsupervise_run_goodput_ratio": Metric(
        "gauge", "Training by all time since the launch; least and most differ where time is unknown.", ("bound",)
    ),
    "ftsupervise_run_ettr_ratio": Metric(
        "gauge", "Effective training time ratio, as Meta and as ByteRobust define it.", ("definition", "bound")
    ),
    "ftsupervise_run_alerts_firing": Metric("gauge", "Alerts that fired at the last tick of the watch."),
    "ftsupervise_run_alert_firing": Metric(
        "gauge", "The same by watchdog and severity, of the worst twenty.", ("watchdog", "severity")
    ),
    "ftsupervise_run_nodes_avoided": Metric("gauge", "Nodes that are excluded because of their incidents."),
    "ftsupervise_run_switch_state": Metric(
        "gauge", "1 for the state that a switch is in: absent, up or unknown.", ("switch", "state")
    ),
    "ftsupervise_run_brake_on": Metric("gauge", "1 where the brake holds the chain."),
    "ftsupervise_run_watch_timestamp_seconds": Metric("gauge", "The last tick of the watch that looked at the run."),
    "ftsupervise_run_metrics_timestamp_seconds": Metric("gauge", "When these samples were made."),
}


class Sample(NamedTuple):
    name: str
    labels: tuple[tuple[str, str], ...]
    value: float

    @property
    def series(self) -> str:
        inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in self.labels)
        return f"{self.name}{{{inner}}}"


def samples(
    seen: Status,
    row: RunRow,
    account: TimeAccount,
    avoided: Sequence[str] | None,
    user: str,
    watched: datetime | None,
    stalls: StallPage | None = None,
) -> tuple[Sample, ...]:
    """Return all that is known of one run. ``user``: the account that the run belongs to. ``stalls``: of its replica groups."""
    run = (("run", printable(seen.name, _LABEL)), ("user", printable(user, _LABEL)))
    found = [
        Sample(f"ftsupervise_run_{name}", (*run, *labels), float(value))
        for name, labels, value in (*_values(seen, row, account, avoided, watched), *_stalls(stalls))
        if value is not None
    ]
    return tuple(found[:MOST])


_Value = tuple[str, tuple[tuple[str, str], ...], float | None]


def _values(
    seen: Status, row: RunRow, account: TimeAccount, avoided: Sequence[str] | None, watched: datetime | None
) -> Iterator[_Value]:
    last, page = seen.run.last, seen.run.page
    job = last.job_id if last is not None else ""
    info = ("directory", printable(row.directory, 4096)), ("job_id", printable(job, 60)), ("version", VERSION)
    yield "info", info, 1
    state = seen.verdict.lower() if seen.verdict.lower() in STATES else "other"
    for word in STATES:
        yield "state", (("state", word),), word == state
    yield "step", (), row.step
    yield "target_step", (), row.last_step
    yield "steps_per_second", (), row.rate
    yield "usual_steps_per_second", (), row.usual
    yield "loss", (), row.loss
    yield "ranks", (), page.ranks if page is not None else None
    yield "seen_timestamp_seconds", (), _epoch(row.seen_at)
    yield "checkpoint_step", (), row.saved
    yield "checkpoint_timestamp_seconds", (), _epoch(row.saved_at)
    yield "expected_end_timestamp_seconds", (), _epoch(row.done_at)
    yield "job_end_timestamp_seconds", (), _epoch(row.ends_at)
    yield "members_left", (), row.members_left
    yield "attempts_total", (), row.attempts
    yield from _failures(seen)
    for kind, seconds in account.seconds().items():
        yield "time_seconds_total", (("kind", kind.value),), round(seconds, 3)
    yield from _bounds("goodput_ratio", (), account.goodput())
    yield from _bounds("ettr_ratio", (("definition", "meta"),), account.ettr_meta())
    yield from _bounds("ettr_ratio", (("definition", "byterobust"),), account.ettr_byterobust())
    yield from _alerts(row)
    yield "nodes_avoided", (), None if avoided is None else len(avoided)
    for switch in seen.run.switches:
        now = "unknown" if switch.problem or switch.health.value == "unknown" else "up" if switch.up else "absent"
        for word in _WORDS:
            yield "switch_state", (("switch", switch.name), ("state", word)), word == now
    yield "brake_on", (), bool(seen.run.brake)
    yield "watch_timestamp_seconds", (), _epoch(watched or row.watched_at)
    yield "metrics_timestamp_seconds", (), _epoch(seen.at)


def _stalls(page: StallPage | None) -> Iterator[_Value]:
    if page is None:
        return
    yield "group_stalls_total", (), page.times
    yield "group_stall_seconds_total", (), round(page.seconds, 3)
    yield "group_steps_lost_total", (), page.lost
    yield "group_back_seconds", (), next((one.away for one in reversed(page.stalls) if one.away is not None), None)


def _failures(seen: Status) -> Iterator[_Value]:
    """Count the failures; None where not all attempts were read: a counter that forgets would look like one that began anew."""
    if seen.run.not_read:
        return
    counts = dict.fromkeys((kind.value for kind in FailureKind), 0)
    for one in seen.attempts:
        if one.failure is not None:
            counts[one.failure.kind.value] += 1
    for kind, count in counts.items():
        yield "failures_total", (("kind", kind),), count


def _alerts(row: RunRow) -> Iterator[_Value]:
    if row.watched_at is None:  # nothing has looked for any
        return
    yield "alerts_firing", (), row.firing
    counts: dict[tuple[str, str], int] = {}
    for one in row.alerts:
        key = printable(one.watchdog, 60), printable(one.severity, 20)
        counts[key] = counts.get(key, 0) + 1
    for (watchdog, severity), count in counts.items():
        yield "alert_firing", (("watchdog", watchdog), ("severity", severity)), count


def _bounds(name: str, labels: tuple[tuple[str, str], ...], ratio: Ettr | None) -> Iterator[_Value]:
    if ratio is not None:
        yield name, (*labels, ("bound", "least")), ratio.least
        yield name, (*labels, ("bound", "most")), ratio.most


def _epoch(at: datetime | None) -> float | None:
    return None if at is None else at.timestamp()


# ------------------------------------------------------------------------------------------------------------ the text


def text_of(found: Iterable[Sample], least: Mapping[str, float] | None = None) -> str:
    """Return the samples of one or many runs as text. A counter is never below what ``least`` has of its series: the
    account of time is revised when an attempt has ended, and Prometheus takes a counter that falls for one that began anew."""
    by_name: dict[str, list[Sample]] = {}
    for sample in found:
        by_name.setdefault(sample.name, []).append(sample)
    lines = []
    for name, metric in METRICS.items():
        if name not in by_name:
            continue
        lines += [f"# HELP {name} {metric.help}", f"# TYPE {name} {metric.kind}"]
        for sample in by_name[name]:
            value = sample.value
            if least and metric.kind == "counter":
                value = max(value, least.get(sample.series, value))
            lines.append(f"{sample.series} {_number(value)}")
    return "".join(f"{line}\n" for line in lines)


def counters_in(text: str) -> dict[str, float]:
    """Return series -> value of each counter in a text of ``text_of``. Other lines are passed over."""
    found: dict[str, float] = {}
    for line in text.splitlines():
        series, _, value = line.rpartition(" ")
        metric = METRICS.get(series.partition("{")[0])
        if metric is not None and metric.kind == "counter":
            try:
                number = float(value)
            except ValueError:
                continue
            if math.isfinite(number) and number >= 0:
                found[series] = number
    return found


def _number(value: float) -> str:
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "+Inf" if value > 0 else "-Inf"
    return str(int(value)) if value == int(value) and abs(value) < 1e15 else repr(value)


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")
