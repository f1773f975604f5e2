"""The first words about a run: how it is, in one sentence, and what to do next. Pure.

They are made once, here, for the page of a run and for that of a week.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import TYPE_CHECKING, NamedTuple

from ftsupervise.model import FailureKind
from ftsupervise.printable import printable
from ftsupervise.report.account import Spent, TimeAccount
from ftsupervise.report.incidents import STALL, RunIncident
from ftsupervise.report.row import RunRow
from ftsupervise.report.slow import SLOW
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake
from ftsupervise.scheduler import how_to_end
from ftsupervise.secrecy import masked
from ftsupervise.truth import HANG
from ftsupervise.units import count, show_duration, show_percent

if TYPE_CHECKING:
    from ftsupervise.config.schema import Run
    from ftsupervise.model import Attempt, Job

_A_DAY = 86400.0
_MANY, _MUCH = 3, 0.05  # faults of the last day, or what they cost of it, that are worth a look at a run that trains
_QUEUE_BOUND = 0.3  # of the time in the queue: worth a word on how to wait less
_SAID_BY_THE_PROGRAM = (FailureKind.CODE, FailureKind.DISK)  # its line names the error better than "exit 1"
_QUIET_TONES = {"FINISHED": "good", "UNKNOWN": "unknown", "NEW": "unknown"}


class Headline(NamedTuple):
    verdict: str
    tone: str  # "good", "watch", "bad", "unknown"
    sentence: str
    next: str = ""  # what to do; "" where nothing needs to be done
    command: str = ""  # what to type for it, to be copied; "" where ``next`` says all


class FaultsLately(NamedTuple):
    """The faults of the last day."""

    times: int
    seconds: float  # that they cost


class RunPresent(NamedTuple):
    """A headline is made of these values."""

    row: RunRow
    account: TimeAccount
    reached: int | None = None  # the highest step
    usual: float | None = None  # steps a second
    stood: float = 0.0  # seconds without progress in the attempt that runs
    job_id: str = ""  # of that attempt
    behind: str = ""  # the rank that is furthest behind, and where
    do: str = ""  # what the worst alert says is to be done
    restarts_hangs: bool | None = None  # does the supervisor end a hang by itself? None: not known
    observes: tuple[str, ...] = ()  # decisions that are only told
    brake: Brake | None = None  # where it is on
    last: Attempt | None = None  # the newest
    lately: FaultsLately | None = None

    @property
    def where(self) -> str:
        """The run, as an argument of a command."""
        return RunDir(self.row.directory).quoted()


def faults_lately(found: Sequence[RunIncident], now: datetime) -> FaultsLately:
    faults = [one for one in found if not one.planned and (now - one.at).total_seconds() < _A_DAY]
    return FaultsLately(len(faults), sum(one.lost for one in faults))


def job_that_runs(jobs: Sequence[Job] | None, last: Attempt | None) -> str:
    """Return the job to end where the run hangs: the queue's, else that of the newest attempt; "" where neither is known."""
    running = (job.id for job in jobs or () if not job.state.waiting and not job.state.ended)
    return next(running, last.job_id if last is not None else "")


def restarts_hangs(run: Run | None) -> bool | None:
    """Return whether the supervisor ends a hang by itself. None: the settings could not be read."""
    return None if run is None else run.launch.restart.hang is not None


def headline_of(now: RunPresent) -> Headline:
    """Return the verdict of ``status``, one sentence, and the next thing to do."""
    verdict = now.row.verdict
    if verdict in _QUIET_TONES or verdict in ("GONE", "STOPPED", "STOPPING", "WAITING"):
        return _not_training(now)
    worst = now.row.alerts[0] if now.row.alerts else None
    if verdict == "HUNG":
        return _hung(now)
    if verdict in ("STALLED", "SILENT"):
        what = "it stands" if verdict == "STALLED" else "how it is cannot be seen"
        sentence, do = f"Its job runs, and {what}: {now.row.why}.", "Read what its job wrote last:"
        return Headline(verdict, "bad", sentence, do, f"ftsupervise logs {now.where}")
    if verdict == "SLOW":
        return _slow(now)
    if now.row.full:
        prune = f"ftsupervise checkpoints prune --dry-run {now.where} --last 2"
        return Headline(
            verdict, "bad", f"It runs, and {now.row.full}.", "Make room; the checkpoints that can go:", prune
        )
    if worst is not None:
        tone = "bad" if worst.severity == "critical" else "watch"
        do = f"{now.do[:1].upper()}{now.do[1:]}" or "See it for yourself:"
        command = "" if now.do else f"ftsupervise check {worst.watchdog} {now.where}"
        sentence = f"It runs, and the alert {worst.watchdog} fires: {worst.summary}."
        return Headline(verdict, tone, sentence, do, command)
    if now.row.loss_trouble:
        do = "See since when; guard.loss in the settings can stop such a run, or take it back:"
        return Headline(
            verdict, "bad", f"It runs, and its {now.row.loss_trouble}.", do, f"ftsupervise report {now.where}"
        )
    if now.stood >= STALL:
        phase = f", in phase {now.row.phase}" if now.row.phase else ""
        sentence = f"It has made no step for {show_duration(round(now.stood))}{phase}."
        return Headline(verdict, "watch", sentence, "See whether that is usual:", f"ftsupervise check hang {now.where}")
    if now.row.groups_away:
        sentence = f"It trains with fewer replica groups: {now.row.groups_away}."
        return Headline(verdict, "watch", sentence, "See why they are away:", f"ftsupervise status {now.where}")
    if now.row.watch_late:
        sentence, command = "It runs, but its watch has stopped looking at it.", "ftsupervise watch --every 60s"
        return Headline(verdict, "watch", sentence, "Start it again:", f"{command} {now.where}")
    return _well(now)


def _well(now: RunPresent) -> Headline:
    """It trains and nothing stands against it: how fast, and what the last day was like."""
    sentence = f"It runs{f' ({now.row.why})' if now.row.why else ''}"
    if now.row.rate is not None and now.usual:
        share = now.row.rate / now.usual
        sentence = "It trains at its usual speed"
        if share < SLOW:
            sentence = f"It trains, at present at {100 * share:.0f} % of its usual speed"
    late = now.lately
    if late is None or not late.times:
        return Headline(now.row.verdict, "good", f"{sentence}.")
    cost = f" that cost {show_duration(round(late.seconds))}" if late.seconds >= 1 else ""
    sentence += f", after {count(late.times, 'fault')} in the last day{cost}."
    if late.times < _MANY and late.seconds < _MUCH * min(_A_DAY, now.account.total):
        return Headline(now.row.verdict, "good", sentence)
    command = f"ftsupervise logs --errors {now.where}"
    return Headline(now.row.verdict, "watch", sentence, "Read what failed:", command)


def _not_training(now: RunPresent) -> Headline:
    verdict, why = now.row.verdict, now.row.why
    tone, sentence, do, command = _QUIET_TONES.get(verdict, "bad"), "", "", ""
    if verdict == "FINISHED":
        words = "" if now.reached is None else f": step {now.reached:,} is made"
        sentence = f"The training is complete{words}."
    elif verdict == "UNKNOWN":
        sentence, do = f"Its state could not be seen: {why}.", "Ask again later:"
        command = f"ftsupervise status {now.where}"
    elif verdict == "NEW":
        sentence, do = "Nothing was launched yet.", "Start it:"
        command = "ftsupervise launch"
    elif verdict == "GONE":
        sentence = f"It does not run, and no job waits to continue it: {why}."
        launch = f"ftsupervise launch {now.where}"
        failed = now.last is None or now.last.failure is not None or now.last.ended is None
        do = "Read why it failed, then start it again:" if failed else "Start it again:"
        read = "logs --errors" if now.last is None else "diagnose"
        command = f"ftsupervise {read} {now.where}; {launch}" if failed else launch
    elif now.row.braked and now.brake is not None:
        sentence, do = _braked(now.brake, now.last)
        command = f"ftsupervise clear --brake {now.where}"
    elif verdict == "STOPPED":
        tone, sentence, do = "unknown", f"It is stopped: {why}.", "To continue it:"  # a person wanted that
        command = f"ftsupervise clear {now.where}; ftsupervise launch"
    elif verdict == "STOPPING":
        sentence = f"It is stopping: {why}."
    else:
        tone, (sentence, do) = "watch", _waiting(now)
    return Headline(verdict, tone, sentence, do, command)


def _braked(brake: Brake, last: Attempt | None) -> tuple[str, str]:
    """Return why the brake is on, with the error in the program's own words where they are known; and what to do first."""
    if brake.failure == Brake().failure:
        return f"Stopped by the brake, which was put on by hand: {brake.why}.", "To let it start again:"
    if brake.asks:
        do = "Type this if it is not finished, and clear --finished in place of --brake if it is:"
        return f"Is it finished? The command left with 0 {brake.why}.", do
    detail = masked(printable(brake.detail or (last.line if last is not None else ""), 300))
    says_all = last is not None and last.failure is not None and last.failure.kind in _SAID_BY_THE_PROGRAM
    what = detail if detail and says_all else ": ".join(filter(None, (brake.failure, detail)))
    step = f" at step {brake.step:,}" if brake.step is not None else ""
    first = brake.first()
    do = f"{first[:1].upper()}{first[1:]}. Fix the cause, then:" if first else "Fix the cause, then:"
    if brake.failure == "hang":
        where = f"attempts/{brake.attempt:04d}/evidence"
        do = f"Fix the cause (see {where}, and launch.restart.hang if it was only slow), then:"
    return f"Stopped by the brake{step}: {brake.why}: {what.rstrip('.')}.", do


def _waiting(now: RunPresent) -> tuple[str, str]:
    last = now.account.stretches[-1:]
    waits = f" for {show_duration(last[0].seconds)}" if last and last[0].kind is Spent.QUEUE else ""
    reason = f" ({now.row.why})" if now.row.why else ""
    share = now.account.shares()[Spent.QUEUE]
    do = ""
    if share >= _QUEUE_BOUND:
        do = (
            f"{show_percent(share)} of its time went into waiting for jobs. Longer jobs (launch.time) wait less often; "
            "fewer nodes, or another partition, may wait for a shorter time."
        )
    return f"It has waited in the queue{waits}{reason}.", do


def _hung(now: RunPresent) -> Headline:
    behind = f"; furthest behind: {now.behind}" if now.behind and now.behind not in now.row.why else ""
    sentence = f"It hangs: {now.row.why}{behind}."
    saved = "its newest checkpoint" if now.row.saved is None else f"step {now.row.saved:,}"
    resumes = f"the next job resumes from {saved}"
    if now.row.members_left == 0:
        resumes = f"no job waits, so launch it again, and it resumes from {saved}"
    restart = f"end its job; {resumes}"
    if now.job_id:
        end = how_to_end(now.job_id, now.where)
        again = f"then {end.before_next}; launched again, it resumes from {saved}" if end.before_next else resumes
        restart = f"{end.types}; {again}"
    by_itself = {
        True: "Its supervisor ends a hang and restarts by itself once it is sure. To do it now",
        False: "Nothing ends it by itself, because launch.restart.hang is null. To restart it",
        None: "To restart it",
    }[now.restarts_hangs]
    if now.row.ends_hang is not None:  # ``why`` says it
        by_itself = "To end it now" if now.row.ends_hang else "To restart it"
    elif HANG in now.observes:
        acts = f"ftsupervise observe --off {now.where}"
        by_itself = f"Nothing ends it by itself, because that is only told ({acts}). To restart it"
    do = f"{by_itself}: {restart}. To see what the ranks are doing:"
    return Headline(now.row.verdict, "bad", sentence, do, f"ftsupervise check hang {now.where}")


def _slow(now: RunPresent) -> Headline:
    behind = f" Furthest behind: {now.behind}." if now.behind and now.behind not in now.row.why else ""
    do = "Find the slow node: look at temperatures, clocks and the network. To keep a node out of the next jobs:"
    command = f"ftsupervise nodes exclude NODE {now.where}"
    return Headline(now.row.verdict, "watch", f"It trains slower than usual: {now.row.why}.{behind}", do, command)
