"""What the runs of the entries and the state of the chain mean as findings. Pure.

Every entry gets a finding at every tick, from its last run that ended: a failure stays one until a run is good again.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.crontab.history import Ran
from ftsupervise.findings import Finding, Severity
from ftsupervise.hostlist import compress_hostlist
from ftsupervise.truth import Health

WATCHDOG = "cron"


@dataclass(frozen=True)
class Looked:
    """One entry and its newest runs, newest first. ``lost``: stamps of open runs whose tick was killed."""

    name: str
    runs: tuple[Ran, ...]
    lost: frozenset[datetime]
    tail: str = ""  # the end of the output of the last one that failed
    gone: bool = False  # its file is no longer there


def entry_finding(looked: Looked, run: str, root: Path, now: datetime) -> Finding | None:
    """None for an entry of which nothing is to be said: it has not run yet."""
    health, ran, words = _judge(looked)
    if ran is None or (looked.gone and health is Health.BAD):
        health = Health.OK if looked.gone else Health.UNKNOWN
        if ran is None:
            return None
        words = "its file was taken away" if looked.gone else words
    where = shlex.quote(str(root))
    return Finding(
        run=run,
        watchdog=WATCHDOG,
        subject=looked.name,
        health=health,
        severity=Severity.WARNING,
        summary=f"{looked.name} {'works' if health is Health.OK and not looked.gone else words}",
        at=now,
        value=words,
        meaning="What this entry does is not being done." if health is Health.BAD else "",
        look=f"cat {shlex.quote(str(ran.output))}",
        do=f"ftsupervise cron run {looked.name} --dir {where}",
        since=ran.started or ran.at,
        detail=looked.tail if health is Health.BAD else "",
    )


def _judge(looked: Looked) -> tuple[Health, Ran | None, str]:
    """The verdict, the run it rests on, and how that one ended."""
    lost = [ran for ran in looked.runs if ran.at in looked.lost]
    ended = [ran for ran in looked.runs if ran.outcome in ("ok", "failed") or ran.at in looked.lost]
    if not ended:
        return Health.UNKNOWN, looked.runs[0] if looked.runs else None, "has not ended yet"
    newest = ended[0]
    if newest in lost:
        again = len(ended) > 1 and ended[1] in lost
        words = "was cut off twice in a row: its tick was killed" if again else "was cut off: its tick was killed"
        return (Health.BAD if again else Health.UNKNOWN), newest, words
    if newest.outcome == "ok":
        return Health.OK, newest, "works"
    first = newest
    for ran in ended:
        if ran.outcome != "failed":
            break
        first = ran
    times = sum(1 for ran in ended[: ended.index(first) + 1])
    often = f" ({times} times in a row)" if times > 1 else ""
    return Health.BAD, newest, f"failed: {newest.words}{often}"


def passed_finding(names: Sequence[tuple[str, str]], run: str, root: Path, now: datetime) -> Finding:
    """Files and lines that are passed over: one finding for all, so that a forgotten chmod is heard of."""
    told = "; ".join(f"{name}: {why}" for name, why in names[:5])
    return Finding(
        run=run,
        watchdog=WATCHDOG,
        subject="passed over",
        health=Health.BAD if names else Health.OK,
        severity=Severity.INFO,
        summary=f"cron passes over {told}" if names else "cron passes over nothing",
        at=now,
        meaning="They do not run." if names else "",
        look=f"ftsupervise cron list --dir {shlex.quote(str(root))}",
    )


def chain_finding(
    run: str, root: Path, now: datetime, *, trouble: str, missed: Sequence[int], late: float, period: float
) -> Finding:
    """The chain itself: successors that could not be submitted, slots (seconds since the epoch) missed before this one."""
    where = shlex.quote(str(root))
    since = datetime.fromtimestamp(missed[0], timezone.utc) if missed else None
    if trouble:
        words, health = trouble, Health.BAD
    elif missed:
        words, health = f"{len(missed)} slots in a row had no tick before this one", Health.BAD
        if late >= 1:
            words += f", which came {late:.0f} s late"
    else:
        words, health = "its slots come", Health.OK
    return Finding(
        run=run,
        watchdog=WATCHDOG,
        subject="slots",
        health=health,
        severity=Severity.WARNING,
        summary=f"cron: {words}",
        at=now,
        meaning="What is due comes late, or not at all." if health is Health.BAD else "",
        look=f"ftsupervise cron status --dir {where}",
        do=f"ftsupervise cron ensure --dir {where}" if trouble else "",
        value=f"{len(missed)} missed",
        since=since,
        limit=f"a slot every {period:.0f} s",
    )


def drained_finding(nodes: Sequence[str], words: str, run: str, now: datetime) -> Finding:
    """Nodes that Slurm has drained by itself. Each is one fewer for this chain, and for every run."""
    names = compress_hostlist(tuple(nodes))
    return Finding(
        run=run,
        watchdog=WATCHDOG,
        subject="drained nodes",
        health=Health.BAD if nodes else Health.OK,
        severity=Severity.WARNING,
        summary=f"cron: {words}" if nodes else "cron: Slurm has drained no node by itself",
        at=now,
        meaning="It stays so until an administrator resumes them; a run that needs them waits." if nodes else "",
        look="sinfo -R",
        do=f"ask your administrator: scontrol update nodename={names} state=resume" if nodes else "",
        value=names,
    )


def worth_telling(findings: Iterable[Finding]) -> bool:
    return any(finding.health is Health.BAD for finding in findings)
