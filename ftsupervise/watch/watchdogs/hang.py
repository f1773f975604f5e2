"""Checks that the run makes progress. It hangs only if every sign of it stands still for longer than this run's own
past allows, or its supervisor has found a hang and left it alone.

A job that waits in the queue, is completing or suspended, or whose kill switch is up, does not hang. Where the storage
or the queue could not be seen, the answer is unknown, never "hung" and never "fine".
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.model import Job, JobState
from ftsupervise.probe import Entry, Listing
from ftsupervise.rundir.hang_end import hang_end, hang_left
from ftsupervise.rundir.paths import FINISHED
from ftsupervise.rundir.progress import TOLD
from ftsupervise.rundir.stalls import Progress, ProgressHistory, StallLimits, StallVerdict, judge
from ftsupervise.rundir.switches import KILL
from ftsupervise.scheduler import SLURM, how_to_end, kind_of_job
from ftsupervise.truth import START, TRAIN, UNTOLD, Health
from ftsupervise.units import show_duration
from ftsupervise.watch.watchdogs.progress_signals import AT_WORK, Signs, gather
from ftsupervise.watch.watchdogs.run_signs import page_at_work, server_now

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Hang as Settings
    from ftsupervise.watch import Look

_KEEP = 100  # pauses and step times that are remembered
_KILL_WITHIN = 3600.0  # seconds to leave after the kill switch was raised, a save included; then it is hung after all
_CHECK = "ftsupervise check hang {run_dir}"
WORDS = Words(look=_CHECK, severity=Severity.CRITICAL)
UNSEEN = WORDS._replace(do="use the guard in the training loop, or name the log: watch.hang.log")
HUNG = Words(
    "The job holds its nodes and trains nothing. A loop that stands still does not see a kill or save switch.",
    _CHECK + "; py-spy dump on {node}",
    "{end}{end_job}  ({then})",
    Severity.CRITICAL,
)
_RESTING = {
    JobState.COMPLETING: "is completing",
    JobState.SUSPENDED: "is suspended by Slurm",
    JobState.STOPPED: "is stopped by Slurm",
    JobState.CONFIGURING: "waits for its nodes",
    JobState.STAGE_OUT: "is moving its files out",
}


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    rest = _at_rest(look)
    if rest:
        look.memory.pop("last", None)
        yield look.finding("progress", Health.OK, rest, WORDS)
        return
    job = next((job for job in look.jobs or () if job.state in AT_WORK), None)
    signs = gather(look, settings, job)
    limits = _limits(settings, signs)
    verdict = judge(signs.signals, signs.started, signs.phases, _past(look.memory), limits)
    _learn(look, signs, verdict)
    yield _say(look, signs, verdict, job)


def _at_rest(look: Look) -> str:
    """Return why the run need not make progress now; "" if it must."""
    if look.jobs is not None and not any(job.state in AT_WORK for job in look.jobs):
        for job in look.jobs:
            if job.state in _RESTING:
                return f"job {job.id} {_RESTING[job.state]}"
        waiting = [job for job in look.jobs if job.state.waiting]
        return f"job {waiting[0].id} waits in the queue" if waiting else "no job of the run is running"
    if isinstance(look.entry(look.rundir.state / FINISHED), Entry):
        return "the run has finished"
    since = _kill_switch_age(look)
    if since is not None and since < _KILL_WITHIN:
        return f"the kill switch has been up for {show_duration(since)}: the run is leaving"
    return ""


def _kill_switch_age(look: Look) -> float | None:
    """Return the seconds since the kill switch went up.

    The directory is listed anew: a look-up may be answered from a cache.
    """
    listing = look.probe.listing(look.rundir.switches, most=1000)
    if not isinstance(listing, Listing):
        return None
    now = server_now(look, look.rundir.switches)
    switch = next((one for one in listing.entries if one.name == KILL), None)
    if switch is None and listing.more:  # somebody has filled the folder
        found = look.probe.look(look.rundir.switches / KILL)
        switch = found if isinstance(found, Entry) else None
    return max(0.0, now - switch.mtime) if switch is not None and switch.is_file else None


def _limits(settings: Settings, signs: Signs) -> StallLimits:
    slack = 3 * signs.beat_every  # at 100,000 ranks a beat may be minutes apart
    return StallLimits(
        at_least=max(settings.at_least.total_seconds(), slack),
        quiet=settings.quiet.total_seconds(),
        slow=settings.slow.total_seconds(),
        at_most=settings.at_most.total_seconds(),
        phases={name: span.total_seconds() for name, span in settings.phases.items()},
    )


# --------------------------------------------------------------------------------------------------------- learning


def _past(memory: dict[str, Any]) -> ProgressHistory:
    pauses = memory.get("pauses", {})
    return ProgressHistory(
        step_times=memory.get("step_times", []),
        pauses=pauses,
        watched=memory.get("watched", 0.0),
        tells_phases=bool(set(memory.get("phases", [])) - {START, TRAIN, UNTOLD}),
    )


def _learn(look: Look, signs: Signs, verdict: StallVerdict) -> None:
    """Learn from a pause that is over now: it was a healthy one, if it was not called a hang by the last check.

    A pause counts for no longer than the checks saw it: the memory errs to the short side, and the bounds make up for
    it.
    """
    memory = look.memory
    now = look.now.timestamp()
    last = memory.get("last")
    memory["phases"] = sorted({*memory.get("phases", []), *signs.phases})[:20]
    moved_since = last is not None and verdict.age < now - last["at"] + last["age"] - 1.0
    if last is not None and moved_since and signs.started >= now - last["at"]:
        memory["watched"] = memory.get("watched", 0.0) + min(now - last["at"], 3600.0)
        if last["age"] < last["bound"]:
            pauses = memory.setdefault("pauses", {}).setdefault(last["phase"], [])
            pauses.append(round(last["age"], 1))
            del pauses[:-_KEEP]
    _learn_step_time(memory, signs.step, now - verdict.age, verdict.phase)
    memory["last"] = {"at": now, "age": verdict.age, "phase": verdict.phase, "bound": verdict.bound}


def _learn_step_time(memory: dict[str, Any], step: int | None, at: float, phase: str) -> None:
    """Learn the mean time of the steps since the last check, over the interval in which the step number moved."""
    pace = memory.get("pace")
    if step is None:
        return
    if (
        pace is not None
        and pace["step"] < step
        and at > pace["at"]
        and phase in (TRAIN, UNTOLD)
        and pace["in"] == phase
    ):
        times = memory.setdefault("step_times", [])
        times.append(round((at - pace["at"]) / (step - pace["step"]), 4))
        del times[:-_KEEP]
    if pace is None or pace["step"] != step:
        memory["pace"] = {"step": step, "at": at, "in": phase}


# ------------------------------------------------------------------------------------------------------ the finding


def _say(look: Look, signs: Signs, verdict: StallVerdict, job: Job | None) -> Finding:
    if verdict.age == float("inf"):
        why = f": {look.blind}" if look.blind else ""
        text = f"it is not known whether the run was ever started, or runs now{why}"
        return look.finding("progress", Health.UNKNOWN, text, WORDS)
    page = page_at_work(look)
    if left := hang_left(page, look.now, look.now.timestamp() - verdict.age):
        return _hung(look, signs, verdict, job, left)
    age, limit = show_duration(verdict.age), show_duration(verdict.bound)
    last = f", the last being {verdict.words}" if verdict.words else " since it started"
    clock = f"\nAges are by this node's own clock: {signs.naive}" if signs.naive else ""
    if verdict.state is Progress.MOVING:
        text = f"{verdict.words or 'it was started'}, {age} ago{_unread(look, signs)}"
        return look.finding("progress", Health.OK, text, WORDS, value=age, limit=limit, detail=clock.strip())
    blind = "; ".join(signal.blind for signal in signs.signals if signal.blind)
    if verdict.state is Progress.UNSEEN:
        text = f"no progress could be seen for {age}: {blind}"
        return look.finding("progress", Health.UNKNOWN, text, WORDS, value=age, limit=limit)
    if look.jobs is None:
        why = look.blind or "the scheduler was not asked"
        text = f"no progress for {age}, but it is not known whether the job is running: {why}"
        return look.finding("progress", Health.UNKNOWN, text, WORDS, value=age, limit=limit)
    if verdict.state is Progress.NOTHING:
        text = f"job {job.id if job else ''} has run for {age} and shows nothing to judge it by: no beats, no log"
        text += _unread(look, signs)
        return look.finding("progress", Health.UNKNOWN, text, UNSEEN)
    doing = f" in phase {verdict.phase}" if verdict.phase not in (TRAIN, UNTOLD) else ""
    text = f"no progress for {age} (limit {limit}){last}{doing}"
    return _hung(look, signs, verdict, job, text, clock, (age, limit))


def _unread(look: Look, signs: Signs) -> str:
    """Say that no step was found in the output of the newest attempt."""
    last = look.attempts[-1] if signs.step is None and look.attempts else None
    return f"; {last.unread}" if last is not None and last.unread else ""


def _hung(
    look: Look,
    signs: Signs,
    verdict: StallVerdict,
    job: Job | None,
    summary: str,
    clock: str = "",
    measured: tuple[str, str] = ("", ""),
) -> Finding:
    """``measured``: the finding's value and limit, where it was judged here."""
    switch = _kill_switch_age(look)
    if switch is not None:
        summary += f"; the kill switch has been up for {show_duration(switch)}, and the loop does not see it"
    waits = any(job.state.waiting for job in look.jobs or ())
    goes_on = "goes on from the last checkpoint"
    then = (
        f"the next member of the chain {goes_on}" if waits else f"no other job waits: launch it again, and it {goes_on}"
    )
    name = job.id if job is not None else "JOBID"
    to_end = how_to_end(name, look.rundir.quoted())
    if to_end.before_next:
        then = f"then {to_end.before_next}; launched again, it {goes_on}"
    node = f"a node of squeue -j {name}" if kind_of_job(name) == SLURM else "a node of it"
    stands = [f"  {signal.name}: {signal.words}, {show_duration(signal.age or 0)} ago" for signal in signs.signals]
    return look.finding(
        "progress",
        Health.BAD,
        summary,
        HUNG,
        names={"node": node, "end": _ends(look), "end_job": to_end.types, "then": then},
        value=measured[0],
        limit=measured[1],
        since=look.now - timedelta(seconds=min(verdict.age, 10**8)),
        detail="\n".join([*stands, *_laggards(signs)]) + clock,
    )


def _ends(look: Look) -> str:
    """Return what its supervisor does about it, as a clause before what to type."""
    page = page_at_work(look)
    end = hang_end(page, look.now)
    if page is not None and page.on_hang == TOLD and end.words:
        return f"{end.words}: ftsupervise observe --off --only hang {look.rundir.quoted()}, or "
    if end.by_itself is None:
        return ""
    return f"{end.words}; without waiting for that: " if end.by_itself else f"{end.words}: "


def _laggards(signs: Signs) -> list[str]:
    """Return the ranks furthest behind, or silent for longest: the first ones to look at."""
    slowest = sorted(signs.beats, key=lambda pair: (pair[0].step if pair[0].step is not None else -1, -pair[1]))
    return [
        f"  rank {beat.rank} on {beat.host} (pid {beat.pid}): step {beat.step}, phase {beat.phase}, "
        f"last heard {show_duration(age)} ago"
        for beat, age in slowest[:5]
    ]
