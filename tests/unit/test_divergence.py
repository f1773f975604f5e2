"""Where the run goes back to after trouble with its loss, and what it skips: from the ledger alone."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timezone
from typing import Any

from ftsupervise.checkpoints.divergence import GoBack, go_back
from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.run.decide import Budgets, NextAction, RestartDecision, Situation, decide
from ftsupervise.truth import DIVERGES, NOT_A_NUMBER, LossTrouble, Resumed, SkippedBatches

NOW = datetime(2026, 11, 23, tzinfo=timezone.utc)


def trouble(since: int, last: int, then: str = "resume", kind: str = NOT_A_NUMBER) -> LossTrouble:
    return LossTrouble(kind, since, last, 0, f"nan at step {last}", then)


def attempt(
    number: int,
    found: LossTrouble | None = None,
    begun: int | None = 0,
    skipped: tuple[SkippedBatches, ...] = (),
    *,
    failed: str = "",
    saved: int | None = None,
) -> Attempt:
    """``begun``: the step of the checkpoint it went on from; None: it did not come to ask."""
    resumed = None if begun is None else Resumed(f"step-{begun}" if begun else "", begun or None, skipped=skipped)
    failure = Failure(FailureKind.NUMBERS, found.kind) if found is not None and found.stops else None
    failure = Failure(FailureKind.CODE, failed) if failed else failure
    last = found.step if found is not None else begun + 5 if begun is not None else None
    why = Cause(CauseKind(found.kind) if found is not None and found.stops else CauseKind.EXIT, code=0)
    return Attempt(
        number,
        "",
        NOW,
        ended=NOW,
        cause=why,
        failure=failure,
        resumed=resumed,
        trouble=found,
        last_step=last,
        saved=saved,
    )


def back(*attempts: Attempt, steps: int = 100) -> GoBack | None:
    return go_back(reversed(attempts), steps)


def test_the_run_goes_back_so_many_steps_before_the_trouble_and_skips_what_it_used_since() -> None:
    found = back(attempt(1, trouble(1200, 1203)))
    assert found is not None and (found.newest, found.before, found.times) == (1100, 1200, 1)
    assert found.skipping(1000) == (SkippedBatches(1000, 203),)


def test_where_nothing_was_wrong_or_a_later_attempt_has_begun_it_does_not() -> None:
    assert back() is None and back(attempt(1)) is None
    assert back(attempt(1, trouble(1200, 1203)), attempt(2, begun=1000)) is None
    unstarted = attempt(2, begun=None)
    assert back(attempt(1, trouble(1200, 1203)), unstarted, unstarted) is not None, "none of them chose a checkpoint"


def test_a_second_time_in_the_same_place_it_goes_back_further() -> None:
    first = attempt(1, trouble(1200, 1203))
    found = back(first, attempt(2, trouble(1250, 1250), 1000, (SkippedBatches(1000, 203),)))
    assert found is not None and (found.times, found.newest) == (2, 999)
    assert found.skipping(900) == (SkippedBatches(900, 1250 + 203 - 900),)


def test_trouble_that_is_further_on_is_another_one() -> None:
    found = back(attempt(1, trouble(1200, 1203)), attempt(2, trouble(1400, 1400), 1000))
    assert found is not None and (found.times, found.newest) == (1, 1300)


def test_failures_of_another_kind_between_do_not_make_it_another_one() -> None:
    found = back(attempt(1, trouble(1200, 1203)), attempt(2, begun=1000), attempt(3, trouble(1201, 1201), 1000))
    assert found is not None and found.times == 2


def test_windows_that_were_skipped_on_the_way_stay_skipped_and_those_after_it_are_given_up() -> None:
    found = back(attempt(1, trouble(400, 400), 200, (SkippedBatches(100, 50), SkippedBatches(200, 7))), steps=150)
    assert found is not None
    assert found.skipping(200) == (SkippedBatches(100, 50), SkippedBatches(200, 207))
    assert found.skipping(90) == (SkippedBatches(90, 400 + 57 - 90),)


def test_where_the_settings_stop_the_run_the_next_start_is_right_before_the_trouble_and_skips_nothing() -> None:
    found = back(attempt(1, trouble(1200, 1203, "stop")))
    assert found is not None and found.newest == 1198 and found.skipping(1100) == ()
    diverged = back(attempt(1, trouble(1200, 1400, "stop", DIVERGES)))
    assert diverged is not None and diverged.newest == 1199


def test_a_state_that_is_no_number_is_passed_over_where_the_settings_only_warn_and_a_high_loss_is_not() -> None:
    assert back(attempt(1, trouble(1200, 1300, "warn"))) is not None
    assert back(attempt(1, trouble(1200, 1300, "warn", DIVERGES))) is None


# ----------------------------------------------------------------------------------------------------------- decisions


def after(attempts: Sequence[Attempt], **more: Any) -> RestartDecision:
    return decide(Situation(list(attempts)), Budgets(in_place=10, **more))


def test_the_supervisor_starts_again_as_often_as_the_tries_say_and_stops_then() -> None:
    tried = [attempt(n, trouble(1200, 1203), 1000 - 100 * n) for n in range(1, 6)]
    moves = [after(tried[:n]).move for n in range(1, 5)]
    assert moves == [NextAction.RESTART] * 3 + [NextAction.STOP]
    last = after(tried[:4])
    assert (last.times, last.failure) == (4, NOT_A_NUMBER) and "3 times after going back" in last.why
    assert after(tried[:2], loss_tries=1).move is NextAction.STOP
    assert after(tried[:3], same_failure=2).move is NextAction.RESTART, "it is another state each time"


def test_the_supervisor_stops_at_once_where_the_settings_say_so() -> None:
    assert after([attempt(1, trouble(1200, 1203, "stop"))]).move is NextAction.STOP


def test_an_attempt_that_goes_back_begins_a_new_count_of_failures_from_where_it_went() -> None:
    crashes = [attempt(1, trouble(1200, 1203), saved=1190)]
    went_back = attempt(2, begun=1000, failed="exit 4", saved=1010)
    went_back = went_back._replace(resumed=Resumed("step-1000", 1000, set_aside="step-1100"))
    crashes += [went_back, *(attempt(n, begun=10 * n + 980, failed="exit 4", saved=10 * n + 990) for n in range(3, 7))]
    assert after(crashes).move is NextAction.RESTART, "each has saved a newer checkpoint than the one before"
