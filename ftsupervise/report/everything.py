"""All that a report of one run is made of, read once: ``ReportFacts``. What could not be read stands there with the reason.

Places that may hang by themselves (checkpoints, shared directories of nodes) are read by threads that are left behind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.config import sources
from ftsupervise.errors import Error
from ftsupervise.host.in_time import in_time
from ftsupervise.printable import printable
from ftsupervise.report.alert_rows import alert_rows
from ftsupervise.report.costs import CostItem, cost_items
from ftsupervise.report.detail import RunDetail, detail, runs_now
from ftsupervise.report.incidents import RunIncident, alike, incidents, no_job_waits
from ftsupervise.report.placing import BadLoss, bad_losses
from ftsupervise.report.slow import SlowPeriod, paces_of, slow_periods
from ftsupervise.rundir.attempt_pages import VerdictPage, read_page
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import StepRecord, read_steps
from ftsupervise.rundir.step_rates import StepRate, paces, usual_rate
from ftsupervise.rundir.switches import Brake
from ftsupervise.secrecy import masked

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.nodes.judging import Judgement
    from ftsupervise.report.groups import GroupsReport

WITHIN = 4.0  # seconds for a place that may hang
_MOST_CHECKPOINTS, _MOST_NOTICES, _MOST_NODES = 200, 200, 300


class NodeRow(NamedTuple):
    name: str
    state: str  # "excluded", "by hand", "trusted", "kept", ""
    score: float
    faults: int  # of the run that speak against it
    incidents: int  # that count against it, of all runs that share the directory
    why: str = ""
    last: datetime | None = None


class CheckpointRow(NamedTuple):
    name: str
    step: int | None
    at: datetime | None
    size: int | None = None
    note: str = ""  # "set aside, because …", "no manifest"
    aside: bool = False


class SettingRow(NamedTuple):
    key: str
    value: str  # JSON
    origin: str


class PlanRow(NamedTuple):
    """One thing that was planned, or is usual, beside what it is."""

    what: str
    plan: str
    actual: str
    worse: bool = False


class Listed(NamedTuple):
    """Rows of a kind. ``problem``: why there are none, or not all."""

    rows: tuple[NamedTuple, ...] = ()
    problem: str = ""


class ReportFacts(NamedTuple):
    detail: RunDetail
    steps: StepRecord
    paces: tuple[StepRate, ...]
    slow: tuple[SlowPeriod, ...]
    incidents: tuple[RunIncident, ...]
    costs: tuple[CostItem, ...]
    nodes: Listed  # NodeRow
    alerts: Listed  # AlertRow: what fires first, then the others, newest first
    checkpoints: Listed  # CheckpointRow, newest first
    settings: Listed  # SettingRow
    run: Run | None = None  # its settings, where they can be read
    folder: str = ""  # of its checkpoints
    bad_losses: tuple[BadLoss, ...] = ()  # times in which its loss was no number
    groups: GroupsReport | None = None  # its replica groups, where it has some
    verdicts: Mapping[int, VerdictPage] = MappingProxyType(
        {}
    )  # what ``diagnose`` said of the interruptions, by attempt

    @property
    def usual(self) -> float | None:
        """Steps a second."""
        return self.detail.row.usual or usual_rate(self.paces)


def report_of(
    rundir: RunDir, now: datetime, env: Mapping[str, str], extend: Callable[[float], None] = lambda _: None
) -> ReportFacts:
    """``extend`` is told how many seconds the next part may take. Raises NotFound, NotPermitted when the run directory cannot
    be read."""
    found = detail(rundir, now, env)
    extend(4 * WITHIN)
    record = read_steps(rundir)
    attempts = found.status.attempts
    rates = paces_of(attempts, paces(record, [one.started.timestamp() for one in attempts]))
    slow = slow_periods(rates)
    page = found.status.run.page
    behind = page.slowest if page is not None else ""
    ended = incidents(
        attempts,
        found.account,
        running=runs_now(found.status),
        hung=found.row.verdict == "HUNG",
        behind=behind,
        then=no_job_waits(found.row.verdict, rundir.quoted()),
    )
    ends = tuple(harmless(one) for one in ended)
    run, settings = _settings(rundir, found.status.run.records, env)
    folder = _checkpoint_folder(rundir, run)
    return ReportFacts(
        detail=found,
        steps=record,
        paces=rates,
        slow=slow,
        incidents=ends,
        costs=cost_items(attempts, found.account, ends, slow),
        nodes=_in_time(lambda: _nodes(rundir, ends, now), "the incidents of the nodes"),
        alerts=_in_time(lambda: _alerts(rundir), "the journal of the alerts"),
        checkpoints=_in_time(lambda: _checkpoints(folder, run), str(folder)),
        settings=settings,
        run=run,
        folder=str(folder),
        bad_losses=bad_losses(attempts, record, found.status.run.loss_trouble, now.timestamp()),
        groups=_groups(rundir, found, now),
        verdicts=verdicts_of(rundir, ends, found.status.run.braked),
    )


def verdicts_of(rundir: RunDir, ends: Sequence[RunIncident], brake: Brake | None) -> Mapping[int, VerdictPage]:
    """Return the verdicts that are kept, those that the report shows: of several faults that are alike, the newest one's.
    ``brake``: where it is on, it may have come on after that was written."""
    shown = (one.newest.attempt for one in alike(ends) if may_have_a_verdict(one.newest))
    pages = ((number, read_page(VerdictPage, rundir.attempt(number))) for number in shown)
    return {number: _with_brake(page, brake) for number, page in pages if page is not None}


def _with_brake(page: VerdictPage, brake: Brake | None) -> VerdictPage:
    if brake is None or brake.attempt != page.attempt or page.move in ("", "stop"):
        return page
    return page._replace(move="stop", advice=masked(printable(f"stop: {brake.words()}", 500)))


def may_have_a_verdict(one: RunIncident) -> bool:
    """Return whether an attempt has failed."""
    return not one.planned and not one.goes_on


def read_report(
    root: Path, now: datetime, env: Mapping[str, str], extend: Callable[[float], None] = lambda _: None
) -> ReportFacts:
    """The same of the run directory ``root``, where it is the one that this account has launched. Raises NotTrusted too."""
    from ftsupervise.errors import from_os_error
    from ftsupervise.rundir import pinned
    from ftsupervise.rundir.paths import state_dir

    try:
        pinned.require(state_dir(), RunDir(root), copies=True)
    except OSError as error:
        raise from_os_error(error, f"look at the run directory {root}") from None
    return report_of(RunDir(root), now, env, extend)


def _in_time(work: Callable[[], Listed], what: str) -> Listed:
    try:
        found = in_time(work, WITHIN)
    except (Error, OSError, ValueError) as error:
        return Listed(problem=printable(f"{what} cannot be read: {error}", 500))
    return found if found is not None else Listed(problem=f"{what}: no answer within {WITHIN:g} s")


def _groups(rundir: RunDir, found: RunDetail, now: datetime) -> GroupsReport | None:
    if found.groups is None:  # what reads them is imported where there are some
        return None
    from ftsupervise.report.groups import groups_report

    try:
        return in_time(lambda: groups_report(rundir, found.groups, now), WITHIN)
    except (Error, OSError, ValueError):
        return None


def harmless(one: RunIncident) -> RunIncident:
    """A report is passed on to others: what has the form of a secret is left out."""
    return one._replace(evidence=masked(printable(one.evidence, 600)), cause=masked(printable(one.cause, 600)))


def _nodes(rundir: RunDir, ends: Iterable[RunIncident], now: datetime) -> Listed:
    from ftsupervise.nodes.judging import of_run_dir, read_and_judge

    faults: dict[str, list[RunIncident]] = {}
    for one in ends:
        for name in one.nodes if one.blames else ():
            faults.setdefault(name, []).append(one)
    seen: Judgement = read_and_judge(*of_run_dir(rundir), now)
    rows = {
        one.name: NodeRow(
            one.name,
            one.state,
            one.score,
            len(faults.get(one.name, ())),
            one.incidents,
            masked(one.why),
            one.last.at if one.last is not None else one.since,
        )
        for one in seen.nodes
    }
    for name, those in faults.items():
        if name not in rows:
            rows[name] = NodeRow(name, "", 0.0, len(those), 0, those[-1].cause, those[-1].at)
    order = sorted(rows.values(), key=lambda row: (-row.score, -row.faults, row.name))
    problem = "; ".join(seen.known.problems[:3])
    return Listed(tuple(order[:_MOST_NODES]), printable(problem, 500))


def _alerts(rundir: RunDir) -> Listed:
    from ftsupervise.alerts.journal import Journal

    if not (rundir.watch / "journal").is_dir():
        return Listed()
    journal = Journal(rundir.watch / "journal")
    rows = alert_rows(journal.read())
    return Listed(tuple(rows[:_MOST_NOTICES]), printable("; ".join(journal.problems[:3]), 500))


def _settings(rundir: RunDir, records: Sequence[LaunchRecord], env: Mapping[str, str]) -> tuple[Run | None, Listed]:
    """The settings that the run was launched with, and where each was said: in the file it was launched from, where that still
    says the same, else in the run directory. The first is for use: no path of this account in another's settings."""
    import json

    from ftsupervise.config.believed import load_believed
    from ftsupervise.config.json_schema import shown
    from ftsupervise.config.load import leaves, loads, values
    from ftsupervise.config.strict_yaml import dotted

    if not rundir.config.is_file():
        return None, Listed(problem=f"there is no {rundir.config}: no launch has made this run")
    try:
        run, where = _loaded(rundir.config, env)
        trusted = load_believed(rundir.config, watched=False, environ=env).run
    except (Error, OSError) as error:
        return None, Listed(problem=printable(f"the settings cannot be read: {error}", 500))
    real = leaves(values(run))
    usual = leaves(values(loads("name: default\nlaunch: {command: default}\n")))
    where |= {dotted(path): "default" for path, value in real.items() if usual.get(path) == value}
    given = Path(next((one.config for one in reversed(records) if one.config), ""))
    if given.is_absolute() and given.is_file() and not sources.of_strangers(given):
        try:
            written, places = _loaded(given, env, rundir.root.name)
            same = {path for path, value in leaves(values(written)).items() if real.get(path) == value}
            where |= {dotted(path): places[dotted(path)] for path in same if dotted(path) in places}
        except (Error, OSError):  # it has been changed since, and is wrong now
            pass
    rows = (
        SettingRow(dotted(path), json.dumps(value, ensure_ascii=False), where.get(dotted(path), ""))
        for path, value in leaves(shown(run)).items()
    )
    return trusted, Listed(tuple(rows))


def believed_settings(rundir: RunDir, env: Mapping[str, str]) -> Run | None:
    """The settings that the run was launched with, for use. None: they cannot be read."""
    from ftsupervise.config.believed import load_believed

    try:
        return load_believed(rundir.config, watched=False, environ=env).run
    except (Error, OSError):
        return None


def _loaded(path: Path, env: Mapping[str, str], name: str = "") -> tuple[Run, dict[str, str]]:
    """The settings in ``path`` (``name``: of which run of a sweep), and the origin of each. No variable of this account is
    filled into another account's."""
    from ftsupervise.config.load import leaves, loaded, origin_of, values
    from ftsupervise.config.strict_yaml import dotted

    document = sources.read(path, env, strangers=bool(sources.of_strangers(path)), run=name)
    run = loaded(document, path)
    return run, {dotted(key): origin_of(document, key) for key in leaves(values(run))}


def _checkpoint_folder(rundir: RunDir, run: Run | None) -> Path:
    path = run.checkpoints.path if run is not None else None
    return rundir.checkpoints if path is None else Path(path)


def _checkpoints(folder: Path, run: Run | None) -> Listed:
    from ftsupervise.checkpoints.find import checkpoints_in
    from ftsupervise.checkpoints.quarantine import quarantined

    pattern = run.checkpoints.pattern if run is not None else "*"
    found = checkpoints_in(folder, pattern=pattern)
    rows = [
        CheckpointRow(
            one.path.name,
            one.step,
            one.at,
            one.head.size if one.head is not None else None,
            "" if one.head is not None else "a damaged manifest" if one.committed else "no manifest",
        )
        for one in found[:_MOST_CHECKPOINTS]
    ]
    aside = [
        CheckpointRow(one.name, None, one.at, None, f"set aside: {one.reason}", True) for one in quarantined(folder)
    ]
    more = f"{len(found) - _MOST_CHECKPOINTS} older ones are not listed" if len(found) > _MOST_CHECKPOINTS else ""
    return Listed((*rows, *aside), more)
