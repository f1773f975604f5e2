"""Says whether a run whose job is RUNNING hangs or trains far slower than usual: HUNG or SLOW, and why; else nothing.

``status`` repeats what others have found: the watch by its *hang* and *throughput* watchdogs, the supervisor by its hang
detector. A hang holds until the run is seen to make progress after it, or is started again; the age of an old word is shown.
Where no watch judges, the same rules (``rundir/stalls.py``, ``rundir/step_rates.py``) are applied to the supervisor's page.
"""

from __future__ import annotations

from typing import NamedTuple

from ftsupervise.report.reading import RunReading
from ftsupervise.rundir.watched import FiringAlert
from ftsupervise.units import show_duration

FRESH = 180.0  # seconds: an older page does not say how the run is now
_OLD = 900.0  # seconds after which the age of a word is shown
_PATIENCE = 600.0  # seconds: no bound of the hang watchdog is shorter by default


class PaceWord(NamedTuple):
    word: str  # "HUNG", "SLOW", or "" for neither
    why: str = ""


def pace_word(run: RunReading) -> PaceWord:
    found, late, moved = run.watch.found, run.watch.late, _moved(run)
    judged = frozenset(() if found is None or late else found.judges)
    hang, slow = _alert(run, "hang"), _alert(run, "throughput")
    if found is not None and hang is not None and (moved is None or moved <= found.at.timestamp()) and not _anew(run):
        return PaceWord("HUNG", f"{hang.summary}{_age(run, found.at.timestamp())}")
    page = run.page
    if page is not None and page.hung:
        return PaceWord("HUNG", f"{page.hung}{_age(run, page.at.timestamp())}")
    fresh = page is not None and abs((run.at - page.at).total_seconds()) < FRESH
    if fresh and judged.isdisjoint({"hang"}) and (stands := _stands(run, moved)):
        return PaceWord("HUNG", stands)
    if found is not None and slow is not None:
        return PaceWord("SLOW", f"{slow.summary}{_age(run, found.at.timestamp())}")
    if page is not None and fresh and judged.isdisjoint({"throughput"}) and page.steady is not None and page.usual:
        from ftsupervise.rundir.step_rates import is_slow

        if is_slow(page.steady, page.usual):
            share = f"{100 * page.steady / page.usual:.0f} %"
            return PaceWord("SLOW", f"{3600 * page.steady:,.4g} steps in its last hour, {share} of what is usual")
    if page is not None and not fresh:
        return PaceWord("", f"not heard from for {show_duration(round((run.at - page.at).total_seconds()))}")
    return PaceWord("")


def _anew(run: RunReading) -> bool:
    """Return whether the newest attempt began after the last tick of the watch, which judged another one."""
    return run.last is not None and run.watch.found is not None and run.last.started > run.watch.found.at


def _moved(run: RunReading) -> float | None:
    """Return the epoch seconds of the last sign of progress."""
    signs = [beat.at.timestamp() for beat in run.beats]
    if run.page is not None and run.page.active_at is not None:
        signs.append(run.page.active_at)
    return max(signs, default=None)


def _alert(run: RunReading, watchdog: str) -> FiringAlert | None:
    alerts = run.watch.found.alerts if run.watch.found is not None else ()
    return next((one for one in alerts if one.watchdog == watchdog), None)


def _age(run: RunReading, at: float) -> str:
    seconds = run.at.timestamp() - at
    return f"; seen {show_duration(60 * round(seconds / 60))} ago" if seconds > _OLD else ""


def _stands(run: RunReading, moved: float | None) -> str:
    """Return the words for a standstill that the rules of the hang watchdog call a hang; "" if they do not."""
    page, last, now = run.page, run.last, run.at.timestamp()
    if page is None or last is None or page.rate or (moved is None and page.step is not None):
        return ""
    if moved is not None and now - moved < _PATIENCE:
        return ""
    from ftsupervise.rundir.stalls import Progress, ProgressHistory, Signal, StallLimits, judge

    past = ProgressHistory((1 / page.usual,) if page.usual else (), tells_phases=page.saving > 0)
    sign = Signal("step", None if moved is None else now - moved)
    verdict = judge((sign,), now - last.started.timestamp(), (page.phase,), past, StallLimits())
    if verdict.state is not Progress.HUNG:
        return ""
    where = "" if page.step is None else f", at step {page.step:,}"
    return f"no progress for {show_duration(round(verdict.age))}{where}"
