"""Has the run come on again after its last failure? Bad from the moment an attempt dies until a later one trains."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from ftsupervise.config.job_output import outputs
from ftsupervise.findings import Finding, Words
from ftsupervise.model import Attempt, Health
from ftsupervise.rundir.launches import launches
from ftsupervise.rundir.ledger import UNKNOWN, ledger
from ftsupervise.watch import Look
from ftsupervise.watch.events import orderly

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Recovery as Settings

WORDS = Words(
    "The run stands still until the next member of the chain has started and resumed.",
    "ftsupervise status {run_dir}",
    "read {output} if the next attempt fails too",
)


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    attempts = ledger(look.rundir)
    failed = [a for a in attempts if a.cause and a.cause != UNKNOWN and not orderly(a.cause)]
    if not failed or look.rundir.finished.exists():
        yield _finding(look, False, "no failure to recover from")
        return
    last = failed[-1]
    since = next((a for a in attempts if a.number > last.number and a.first_step is not None), None)
    if since is not None:
        yield _finding(look, False, f"attempt {since.number} trains, from step {since.first_step}")
    elif starting := _starting(look, attempts, last, settings.start):
        yield _finding(look, None, f"{starting}: too early to say whether it comes on again")
    else:
        step = f" at step {last.last_step}" if last.last_step is not None else ""
        text = f"attempt {last.number} failed{step} ({last.why()}) and none has trained since"
        yield _finding(look, True, text, value=last.cause, since=last.ended)


def _starting(look: Look, attempts: tuple[Attempt, ...], failed: Attempt, patience: timedelta) -> str:
    """What has been begun since the failure and is still given time; "" if nothing is."""
    newest = attempts[-1]
    open_end = newest.ended is None and newest.cause in ("", UNKNOWN)  # UNKNOWN: it runs on another host than this
    if newest.number > failed.number and open_end and look.now - newest.started < patience:
        return f"attempt {newest.number} is starting"
    records = launches(look.rundir)
    if records and failed.ended is not None and records[-1].at > failed.ended and look.now - records[-1].at < patience:
        return "it has been launched again"
    return ""


def _finding(look: Look, bad: bool | None, summary: str, **more: Any) -> Finding:
    names = {"output": " ".join(outputs(look.run))}
    return look.finding("attempt", Health.of(bad), summary, WORDS, names=names, **more)
