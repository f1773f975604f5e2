"""Says whether a run whose job is RUNNING hangs, stands, is not heard or trains far slower than usual: HUNG, STALLED, SILENT or
SLOW, and why; else nothing.

``status`` repeats what others have found: the watch by its *hang* and *throughput* watchdogs, the supervisor by its hang
detector. A hang holds until the run is seen to make progress after it, or is started again; the age of an old word is shown.
Where no watch judges, the same rules (``rundir/stalls.py``, ``rundir/step_rates.py``) are applied to the supervisor's page.
STALLED and SILENT need no bound of what is usual: no attempt has begun, or no step was made, or nothing was heard at all, for
longer than such news ever takes.
"""

from datetime import datetime
from typing import NamedTuple

from ftsupervise.report.reading import RunReading
from ftsupervise.rundir.hang_end import FRESH, hang_end, hang_left
from ftsupervise.rundir.watched import FiringAlert
from ftsupervise.units import show_duration

_SILENT = (
    90.0  # seconds: supervisor and ranks write every few seconds, their clocks differ, a file system shows it late
)
_STEP_TIMES = 10.0  # without a step, of a run whose phases are told
_FEW_STEPS = 10  # that a rank may be behind for other reasons
_OLD = 900.0  # seconds after which the age of a word is shown
_PATIENCE = 600.0  # seconds: no bound of the hang watchdog is shorter by default


class PaceWord(NamedTuple):
    word: str  # "HUNG", "STALLED", "SILENT", "SLOW", or "" for none
    why: str = ""


class _Judged(NamedTuple):
    """A word, as it is judged. ``stands``: ``why`` is that it makes no step."""

    word: str
    why: str = ""
    stands: bool = False


def pace_word(run: RunReading) -> PaceWord:
    word, why, stands = _word(run)
    if run.full and word in ("HUNG", "STALLED", "SILENT"):
        why = f"{run.full}; {why}"  # the cause first
    elif stands and (end := hang_end(run.page, run.at).words):
        why = f"{why}; {end}"
    return PaceWord(word, why)


def _word(run: RunReading) -> _Judged:
    found, late, moved = run.watch.found, run.watch.late, _moved(run)
    judged = frozenset(() if found is None or late else found.judges)
    hang, slow = _alert(run, "hang"), _alert(run, "throughput")
    if found is not None and hang is not None and (moved is None or moved <= found.at.timestamp()) and not _anew(run):
        return _Judged("HUNG", f"{hang.summary}{_age(run, found.at.timestamp())}", stands=True)
    page = run.page
    if page is not None and (left := hang_left(page, run.at, moved)):
        return _Judged("HUNG", f"{left}{_age(run, page.at.timestamp())}", stands=True)
    fresh = page is not None and abs((run.at - page.at).total_seconds()) < FRESH
    if fresh and judged.isdisjoint({"hang"}) and (stands := _stands(run, moved)):
        return _Judged("HUNG", stands, stands=True)
    halt = _stalled(run) or _Judged("STALLED", _told(run, moved) if judged.isdisjoint({"hang"}) else "", stands=True)
    if halt.why:
        return halt
    if found is not None and slow is not None:
        return _Judged("SLOW", f"{slow.summary}{_age(run, found.at.timestamp())}")
    if page is not None and fresh and judged.isdisjoint({"throughput"}) and page.steady is not None and page.usual:
        from ftsupervise.rundir.step_rates import is_slow

        if is_slow(page.steady, page.usual):
            share = f"{100 * page.steady / page.usual:.0f} %"
            return _Judged("SLOW", f"{3600 * page.steady:,.4g} steps in its last hour, {share} of what is usual")
    if none := _no_step(run, moved):
        return _Judged("", none, stands=True)
    if page is not None and fresh and page.straggler is not None:
        return _Judged("", page.straggler.words())
    return _Judged("", left_behind(run))


def heard(run: RunReading) -> datetime | None:
    """Return when its supervisor or a rank of its newest attempt has written last; None where none has."""
    signs = [beat.at for beat in run.beats]
    if run.page is not None:
        signs.append(run.page.at)
    return max(signs, default=None)


def no_step(run: RunReading) -> str:
    """Return the words for a run in training that makes no step for much longer than its steps take; "" for one that does."""
    return _no_step(run, _moved(run))


def moves(run: RunReading) -> bool:
    """Return whether the rate of its last minute says how it trains now: an attempt runs, is heard, and its steps come."""
    at = heard(run) if run.last is not None and run.last.ended is None else None
    return at is not None and _since(run, at) < _SILENT and not no_step(run)


def _stalled(run: RunReading) -> _Judged | None:
    """Return the word for a run whose job runs and that is not at work or not heard; None where it is, or nothing tells."""
    last = run.last
    if last is None:
        return None
    if last.ended is not None:
        since = _since(run, last.ended)
        words = f"attempt {last.number} ended {show_duration(since)} ago, and none has begun since"
        return _Judged("STALLED", words) if since > _SILENT else None
    at = heard(run)
    if at is None:  # without a guard and before the first page there is nothing to hear
        return None
    since = _since(run, max(at, last.started))
    if since > _SILENT:
        return _Judged("SILENT", f"nothing was heard of attempt {last.number} for {show_duration(since)}")
    return None


def _told(run: RunReading, moved: float | None) -> str:
    """Return the words for no step in training, of a loop that tells its other phases."""
    return _no_step(run, moved) if run.page is not None and run.page.saving > 0 and run.page.usual else ""


def _no_step(run: RunReading, moved: float | None) -> str:
    """Return the words for a run in training that makes no step for much longer than its steps take."""
    page = run.page
    if page is None or moved is None or page.step is None or page.phase not in ("train", ""):
        return ""
    still = run.at.timestamp() - moved
    bound = max(_SILENT, _STEP_TIMES / page.usual if page.usual else 0.0)
    return f"no step for {show_duration(round(still))}, at step {page.step:,}" if still > bound else ""


def left_behind(run: RunReading) -> str:
    """Return the words for a rank that is minutes of steps behind others that do not wait for it; "" where there is none."""
    page = run.page
    if page is None or not page.slowest or page.step is None or page.ahead is None or not page.usual:
        return ""
    steps = page.ahead - page.step
    if steps < max(_FEW_STEPS, _SILENT * page.usual):
        return ""
    return f"{page.slowest} is {steps:,} steps behind the others, which go on without it"


def _since(run: RunReading, at: datetime) -> int:
    return round(max(0.0, (run.at - at).total_seconds()))


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
