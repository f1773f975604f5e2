"""What the runs of the entries and the state of the chain mean as findings.

Every entry gets a finding at every tick, from its last run that ended: a failure stays one until a run is good again.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ftsupervise.crontab import history
from ftsupervise.crontab.chain import drained_words, epoch
from ftsupervise.crontab.dispatch import CronSlot
from ftsupervise.crontab.entries import CronEntries, floor
from ftsupervise.crontab.history import EntryRun
from ftsupervise.crontab.installation import default_directory
from ftsupervise.findings import Finding, Severity
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.truth import Health

_CUT_OFF = 3  # ticks in a row that never ended are no accident: too little memory, a broken installation

# (what it means while it is bad, the command to look, what to do)
_ENTRY = ("What this entry does is not being done.", "cat {output}", "ftsupervise cron run {name}{dir}")
_PASSED = ("They do not run.", "ftsupervise cron list{dir}", "")
_MISSED = ("What is due comes late, or not at all.", "ftsupervise cron status{dir}", "")
_TROUBLE = (*_MISSED[:2], "ftsupervise cron ensure{dir}")
_DRAINED = (
    "It stays so until an administrator resumes them; a run that needs them waits.",
    "sinfo -R",
    "ask your administrator: scontrol update nodename={nodes} state=resume",
)


def findings(slot: CronSlot, found: CronEntries, trouble: str, nodes: Sequence[str] | None) -> list[Finding]:
    """One for every entry that has run, one for all that is passed over, one for the slots, one for drained nodes.

    ``trouble``: what is wrong with the keeping of time at this slot; ``nodes``: None when Slurm was not asked.
    """
    names = {entry.key: entry.name for entry in found.entries}
    keys = dict.fromkeys([*names, *history.keys(slot.cron)])
    out = [_entry(slot, key, names.get(key)) for key in keys]
    passed = [f"{one.name}: {one.why}" for one in found.passed if one.wanted]
    shown, bad = "; ".join(passed[:5]) or "nothing", Health.BAD if passed else Health.OK
    out.append(_finding(slot, "passed over", bad, f"cron passes over {shown}", _PASSED, severity=Severity.INFO))
    out.append(_slots(slot, trouble or _cut_off(slot)))
    if nodes is not None:
        words = f"cron: {drained_words(nodes) or 'Slurm has drained no node by itself'}"
        names_of = compress_hostlist(tuple(nodes))
        bad = Health.BAD if nodes else Health.OK
        out.append(_finding(slot, "drained nodes", bad, words, _DRAINED, {"nodes": names_of}, value=names_of))
    return [one for one in out if one is not None]


def _finding(
    slot: CronSlot,
    subject: str,
    health: Health,
    summary: str,
    words: tuple[str, str, str],
    values: dict[str, str] | None = None,
    severity: Severity = Severity.WARNING,
    **more: Any,
) -> Finding:
    meaning, look, do = words
    known = {"dir": slot.cron.option, **(values or {})}
    bad = health is Health.BAD
    return Finding(
        run=run_name(slot),
        watchdog="cron",
        subject=subject,
        health=health,
        severity=severity,
        summary=summary,
        at=slot.now,
        meaning=meaning if bad else "",
        look=look.format(**known),
        do=do.format(**known) if bad else "",
        **more,
    )


def run_name(slot: CronSlot) -> str:
    """What alerts call this cron."""
    root = slot.cron.root
    return "cron" if root == default_directory(slot.installed.environment) else f"cron {root}"


def _entry(slot: CronSlot, key: str, known: str | None) -> Finding | None:
    """None for an entry that has not run yet; ``known``: its name, None when its file is no longer there."""
    try:
        runs = history.runs(slot.cron, key, most=10)
    except OSError:
        return None
    name = known or key.replace(".", "/", 1)
    health, run, words = _judge(runs, [run.at for run in runs if slot.lost(run)])
    if run is None:
        return None
    summary = f"{name} {words}"
    if known is None and health is Health.BAD:
        health, words, summary = Health.OK, "its file was removed", f"{name}: its file was removed"
    failed = next((run for run in runs if run.end.outcome == "failed"), None)
    return _finding(
        slot,
        name,
        health,
        summary,
        _ENTRY,
        {"output": shlex.quote(str(run.output)), "name": name},
        value=words,
        since=run.began,
        detail=history.tail(failed.output) if health is Health.BAD and failed is not None else "",
    )


def _judge(runs: Sequence[EntryRun], lost: Sequence[datetime]) -> tuple[Health, EntryRun | None, str]:
    """The verdict on the newest runs (newest first), the run it rests on, and how that one ended.

    ``lost``: slots of open runs whose tick was killed.
    """
    ended = [run for run in runs if run.end.outcome in ("ok", "failed") or run.at in lost]
    if not ended:
        return Health.UNKNOWN, runs[0] if runs else None, "has not ended yet"
    newest = ended[0]
    if newest.at in lost:
        again = len(ended) > 1 and ended[1].at in lost
        words = f"was cut off{' twice in a row' if again else ''}: its tick was killed"
        return (Health.BAD if again else Health.UNKNOWN), newest, words
    if newest.end.outcome == "ok":
        return Health.OK, newest, "works"
    times = next((n for n, run in enumerate(ended) if run.end.outcome != "failed"), len(ended))
    often = f" ({times} times in a row)" if times > 1 else ""
    return Health.BAD, newest, f"failed: {newest.end.words}{often}"


def _slots(slot: CronSlot, trouble: str) -> Finding:
    """The chain itself: successors that could not be submitted, and slots missed before this one."""
    missed, period = missed_slots(slot), slot.installed.period.total_seconds()
    many = len(missed) if len(missed) >= slot.installed.spares else 0
    late = (slot.now - slot.at).total_seconds()
    words = trouble
    if not trouble and many:
        words = f"{many} slots in a row had no tick before this one"
        words += f", which came {late:.0f} s late" if late >= 1 else ""
    return _finding(
        slot,
        "slots",
        Health.BAD if words else Health.OK,
        f"cron: {words or 'its slots come'}",
        _TROUBLE if trouble else _MISSED,
        value=f"{many} missed",
        since=datetime.fromtimestamp(missed[0], timezone.utc) if many else None,
        limit=f"a slot every {period:.0f} s",
    )


def _cut_off(slot: CronSlot) -> str:
    before = [history.read_slot(slot.cron, at) for at in earlier(slot)[-_CUT_OFF:]]
    may_live = {one.claim.job_id for one in before if slot.living is None or one.claim.job_id in slot.living} - {""}
    cut = [one for one in before if one.end is None and one.claim.job_id not in may_live]
    if len(cut) == _CUT_OFF:
        return f"the last {_CUT_OFF} ticks were cut off before their end: see {slot.cron.log}"
    return ""


def earlier(slot: CronSlot) -> list[datetime]:
    return [at for at in history.slots(slot.cron, slot.now) if at < slot.at]


def missed_slots(slot: CronSlot) -> range:
    """Slots without a tick between this one and the one before it, or the install, as seconds since the epoch.

    Typing ``cron install`` again makes none of them good: only taking the cron away, and installing it anew, begins afresh.
    """
    period = slot.installed.period
    begun = floor(slot.installed.since, period)
    last = floor(max([begun, *earlier(slot)[-1:]]), period)
    seconds = int(period.total_seconds())
    return range(epoch(last) + seconds, epoch(slot.at), seconds)
