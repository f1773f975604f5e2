"""Keeps the verdict about a failed attempt beside it, ``attempts/NNNN/verdict.json``, so that nobody else need read its output
again: the alert of its end, ``status`` and the report show that one.

The supervisor does not make it: it would take the processor and the disk from a start that is to be quick, and its job ends
before the last one is made, which counts most. The tick of the watch does, outside of the job, in a process of its own with a
bound in time and bytes (``keep_within``), and whoever writes a report where no watch has been. Where that process hangs on the
disk of the output it is left behind, and the page says so.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.diagnosis.compared import Comparison, compare
from ftsupervise.diagnosis.gather import incidents_on, of_attempt
from ftsupervise.diagnosis.verdict import Diagnosis, judge_attempt
from ftsupervise.host import bounded, processes
from ftsupervise.host.ownership import held_to_write
from ftsupervise.model import Attempt
from ftsupervise.printable import printable
from ftsupervise.report.reading import run_name
from ftsupervise.rundir.attempt_pages import DecidingLine, VerdictPage, read_page, write_page
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import Brake, read_brake
from ftsupervise.secrecy import masked
from ftsupervise.units import rank_words

_CHILD = "ftsupervise.diagnosis.kept"
MOST = 64 << 20  # bytes of the output of an attempt: the last ones of each file
_NEWEST = 5  # attempts that are looked at: the older ones were the newest once
_TEXT = 500  # characters
_LINE = 300  # … of a line that decides
_NICE = 10
_AGAIN = timedelta(minutes=10)  # after which one that came to nothing is tried again, where a person asks for a report


def keep_within(rundir: RunDir, attempts: Sequence[Attempt], seconds: float) -> None:
    """Keep the verdicts about the newest of ``attempts`` that failed and have none, in a process of its own, which is given up
    after ``seconds``. Does nothing where this account may not write them. Never raises for what cannot be read or written."""
    if not lacking(rundir, attempts):
        return
    try:
        done = bounded.run(processes.own_command(str(rundir.root), module=_CHILD), timeout=seconds, env=os.environ)
    except OSError:
        return
    why = f"its output was not read within {seconds:.0f} s" if done.timed_out else done.words()
    for one in lacking(rundir, attempts):
        _write(rundir, VerdictPage(attempt=one.number, at=_now(), unseen=(printable(masked(why), _TEXT),)))


def lacking(rundir: RunDir, attempts: Sequence[Attempt]) -> list[Attempt]:
    """Return those of the newest that failed and have no verdict, where this account may write one; the newest first."""
    failed = [one for one in attempts if one.has_failed and one.host][-_NEWEST:]
    return [one for one in reversed(failed) if _may_write(rundir.attempt(one.number))]


def _may_write(attempt: Path) -> bool:
    try:
        with held_to_write(attempt) as folder:  # which no stranger's link leads elsewhere
            if folder.stat().st_uid != os.geteuid():
                return False
            page = read_page(VerdictPage, folder)
            return page is None or (not page.kind and page.at is not None and _now() - page.at > _AGAIN)
    except OSError:
        return False


def keep(rundir: RunDir) -> None:
    """Read the output of the newest attempts that failed, and keep the verdicts about them. Raises OSError where the ledger
    cannot be read."""
    attempts = ledger(rundir)
    for one in lacking(rundir, attempts):
        found = judge_attempt(of_attempt(rundir, attempts, one, whole=False, progress=lambda: None, most=MOST))
        _write(rundir, page_of(found, compared(rundir, found, one, attempts), _now()))


def compared(rundir: RunDir, found: Diagnosis, one: Attempt, attempts: Sequence[Attempt]) -> Comparison:
    """Compare the verdict about ``one`` with the other attempts of the run, and with other runs on its nodes."""
    incidents = incidents_on(rundir, found.nodes)
    return compare(found, one, attempts, pages_of(rundir, attempts), incidents, run_name(rundir), _brake(rundir))


def _brake(rundir: RunDir) -> Brake | None:
    try:
        return read_brake(rundir)
    except OSError:  # the ledger says by itself whether it came on after an attempt
        return None


def pages_of(rundir: RunDir, attempts: Sequence[Attempt]) -> Mapping[int, VerdictPage]:
    """Return the verdicts that are kept, by attempt."""
    found = ((one.number, read_page(VerdictPage, rundir.attempt(one.number))) for one in attempts if one.has_failed)
    return {number: page for number, page in found if page is not None}


def page_of(found: Diagnosis, beside: Comparison, now: datetime) -> VerdictPage:
    """Return the verdict as it is kept: without secrets, each text one line that is harmless to print."""
    return VerdictPage(
        attempt=found.attempt or 0,
        at=now,
        kind=found.kind.value,
        confidence=found.confidence.value,
        headline=_clean(found.headline),
        where=_clean(where_of(found), _LINE),
        culprits=found.culprits[:100],
        nodes=tuple(_clean(one, _LINE) for one in found.nodes[:100]),
        place=_clean(found.place, _LINE),
        evidence=tuple(DecidingLine(_clean(one.source, 100), _clean(one.text, _LINE)) for one in found.evidence[:3]),
        history=tuple(map(_clean, beside.sentences())),
        move="" if beside.move is None else beside.move.value,
        advice=_clean(beside.advice()),
        remedy=_clean(found.remedy),
        unseen=tuple(map(_clean, found.unseen[:5])),
    )


def where_of(found: Diagnosis) -> str:
    """Return the ranks and nodes that a verdict names, in words: "rank 5 on gpu-07"; "" where it names none."""
    ranks = rank_words(found.culprits) if found.culprits else ""
    return " ".join(filter(None, (ranks, f"on {', '.join(found.nodes)}" if found.nodes else "")))


def _clean(text: str, most: int = _TEXT) -> str:
    return printable(masked(printable(text)), most)


def _write(rundir: RunDir, page: VerdictPage) -> None:
    try:
        with held_to_write(rundir.attempt(page.attempt)) as folder:
            write_page(folder, page)
    except OSError:  # a full disk, or one that is read only: the next tick tries again
        return


def _now() -> datetime:
    return datetime.now(timezone.utc)


if __name__ == "__main__":
    os.nice(_NICE)
    keep(RunDir(sys.argv[1]))
