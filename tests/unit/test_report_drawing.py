"""The pictures of a report say what the account says, at any length of a run; slow times are those of the training alone."""

from __future__ import annotations

import re
from datetime import timedelta
from itertools import pairwise
from random import Random

import pytest

from ftsupervise.model import Attempt
from ftsupervise.report.account import Spent, account
from ftsupervise.report.drawing import (
    HIGH,
    KINDS,
    WIDE,
    Axis,
    axis_of,
    bars,
    buckets,
    loss_line,
    marks,
    nice,
    readable,
    shaded,
    step_line,
    strip,
    time_ticks,
)
from ftsupervise.report.placing import bad_losses, gaps, placed
from ftsupervise.report.slow import paces_of, slow_periods
from ftsupervise.rundir.progress import StepRecord, added
from ftsupervise.rundir.step_rates import paces, usual_rate
from ftsupervise.truth import LossTrouble
from tests.unit.test_time_account import BEGIN, at, crashed, random_history, trained


@pytest.mark.parametrize("seed", range(40))
def test_bars_and_band_hold_the_whole_account(seed: int) -> None:
    attempts, launches, now = random_history(Random(seed))
    of = account(attempts, launches, now)
    found = buckets(axis_of(of), placed(of.stretches, StepRecord()))
    if found:
        sums = [sum(one.seconds[index] for one in found) for index in range(len(KINDS))]
        assert sums == pytest.approx([of.seconds()[kind] for kind in KINDS], rel=1e-3, abs=0.1 * len(found))
        assert all(sum(one.seconds) <= one.end - one.begin + 1 for one in found)
        assert len(found) <= 100
        tops = [float(y) for shape in bars(found) for y in re.findall(r"M[\d.]+ (-?[\d.]+)h", shape.path)]
        assert all(-0.6 <= top <= HIGH for top in tops)
    band = strip(of.stretches, axis_of(of))
    wide = sum(int(columns) for shape in band for columns in re.findall(r"h(\d+)v", shape.path))
    assert wide <= WIDE
    if of.total > 10:
        assert wide == WIDE, "no gap"
        assert {shape.kind for shape in band} <= {kind.value for kind in Spent if of.seconds()[kind] > 0}
    assert all(0 <= row[1] <= row[2] <= of.total + 1 for row in readable(of.stretches, axis_of(of)))


@pytest.mark.parametrize("seconds", [1, 59, 3600, 7200, 86_400, 3 * 86_400, 40 * 86_400, 400 * 86_400, 4000 * 86_400])
def test_ticks_are_few_round_and_in_order(seconds: float) -> None:
    begin = BEGIN.timestamp() + 1234.5
    found = time_ticks(Axis(begin, begin + seconds))
    assert len(found) <= 10
    assert [one.at for one in found] == sorted(one.at for one in found)
    assert all(0 <= one.at <= 100 for one in found)
    assert all(one.text != after.text for one, after in pairwise(found))


@pytest.mark.parametrize(
    ("low", "high"), [(0, 1), (2.31, 2.32), (0, 0), (5, 5), (-3, 1e9), (1e-9, 2e-9), (0.0, 517_000.0)]
)
def test_scales_have_round_numbers_around_the_values(low: float, high: float) -> None:
    found = nice(low, high, 4)
    assert 2 <= len(found) <= 7
    assert found[0] <= low + 1e-12 and found[-1] >= high - 1e-12 * max(1, abs(high))
    steps = [later - earlier for earlier, later in pairwise(found)]
    assert steps == pytest.approx([steps[0]] * len(steps))


def test_faults_at_one_place_are_drawn_once() -> None:
    axis = Axis(0, 86_400)
    assert marks([100, 100.5, 43_200], axis) == f"M1.4 0V{HIGH}M600 0V{HIGH}"


def record_of(*parts: tuple[float, float]) -> StepRecord:
    """Parts of (seconds, steps a second), a step record of them with a look each 15 s."""
    found, clock, step, partly = StepRecord(), BEGIN.timestamp(), 0, 0.0
    for seconds, rate in parts:
        for _ in range(int(seconds / 15)):
            clock, partly = clock + 15, partly + 15 * rate
            made, partly = int(partly), partly % 1
            if made:
                step += made
                found = added(found, clock, step, made, 2.0)
    return found


def test_a_slow_time_is_found_with_what_it_cost() -> None:
    found = paces(record_of((7200, 2.0), (3600, 1.0), (7200, 2.0)))
    assert usual_rate(found) == pytest.approx(2.0, rel=0.02)
    (slow,) = slow_periods(found)
    assert slow.end - slow.begin == pytest.approx(3600, abs=300)
    assert slow.lost == pytest.approx(1800, rel=0.1)


def test_a_restart_or_a_wait_is_no_slow_time() -> None:
    found = record_of((7200, 2.0), (600, 0.0), (7200, 2.0), (90, 0.0), (3600, 2.0))
    starts = [BEGIN.timestamp() + seconds for seconds in (0, 7700, 7200 + 600 + 7200 + 60)]
    assert slow_periods(paces(found, starts)) == ()


def test_saves_are_no_slow_time() -> None:
    record, clock, step = StepRecord(), BEGIN.timestamp(), 0

    def train(seconds: int, saving: float) -> None:  # 2 steps a second, in what the saves leave of each 15 s
        nonlocal record, clock, step
        for _ in range(seconds // 15):
            clock, step = clock + 15, step + int(2 * (15 - saving))
            record = added(record, clock, step, int(2 * (15 - saving)), 2.0, saving)

    for seconds, saving in ((7200, 0.0), (3600, 7.0), (7200, 0.0)):
        train(seconds, saving)
    found = paces(record)
    assert {round(one.rate, 2) for one in found} == {2.0}
    assert slow_periods(found) == ()


def test_steps_of_minutes_are_read_too() -> None:
    found = paces(record_of((86_400, 1 / 200)))
    assert usual_rate(found) == pytest.approx(1 / 200, rel=0.05)
    assert slow_periods(found) == ()


def test_attempts_too_short_for_the_record_are_read_from_the_ledger() -> None:
    one = crashed(1, "7", 0, 700, **trained(1, 60, 100, 690))
    (found,) = paces_of([one], ())
    assert found.rate == pytest.approx(59 / 590)
    assert paces_of([one], (found,)) == (found,), "it has one already"


def test_a_line_breaks_where_nothing_was_seen_and_leaves_out_what_is_no_number() -> None:
    record = added(record_of((3600, 1.0), (7200, 0.0), (3600, 1.0)), BEGIN.timestamp() + 14_500, 9000, 1, float("inf"))
    line = loss_line(record, Axis(BEGIN.timestamp(), (at(0) + timedelta(hours=5)).timestamp()))
    assert line is not None and line.path.count("M") == 2
    assert "inf" not in line.path and "nan" not in line.path
    assert loss_line(StepRecord(), Axis(0, 1)) is None


def standing_record(*parts: tuple[int, int]) -> StepRecord:
    """Parts of (seconds, steps each 15 s), the loss always at hand: a supervisor writes also while no step is made."""
    record, clock, step = StepRecord(), BEGIN.timestamp(), 0
    for seconds, made in parts:
        for _ in range(seconds // 15):
            clock, step = clock + 15, step + made
            record = added(record, clock, step, made, 2.0)
    return record


def test_no_line_leads_through_a_standstill_of_minutes() -> None:
    record = standing_record((1800, 30), (300, 0), (1800, 30))
    axis = Axis(BEGIN.timestamp(), BEGIN.timestamp() + 3900)
    for line in (step_line(record, axis), loss_line(record, axis)):
        assert line is not None and line.path.count("M") == 2
        ((begin, end),) = line.holes
        assert [begin - axis.begin, end - axis.begin] == pytest.approx([1800, 2115], abs=16)


def test_a_standstill_that_ends_an_attempt_is_no_slow_training() -> None:
    assert slow_periods(paces(standing_record((14_400, 30), (3000, 0)))) == ()


def test_a_loss_that_was_no_number_has_its_time_and_its_steps() -> None:
    bad = LossTrouble(since=2401, step=3600, words="nan at step 3600, since step 2401")
    one = crashed(1, "7", 0, 1810, **trained(1, 3600, 0, 1800), trouble=bad)
    two = Attempt(2, "7", at(1820), **trained(2001, 2100, 0, 100))  # type: ignore[arg-type]
    record = standing_record((1800, 30))
    (found,) = bad_losses([one, two], record, None, at(2000).timestamp())
    assert (found.attempt, found.steps, found.dated) == (1, 1200, True)
    assert found.begin == pytest.approx(at(1200).timestamp(), abs=16) and found.end == at(1810).timestamp()
    now = bad._replace(since=2050, step=2100)
    young = bad_losses([one, two], record, now, at(2000).timestamp())[-1]
    assert (young.attempt, young.dated, young.end) == (2, False, at(2000).timestamp()), "not on record yet"


# --------------------------------------------------------------------------------------------- saves where they were made


def saves_at(*seconds: float, each: float = 30.0) -> StepRecord:
    """A record of saves of ``each`` seconds that ended at these seconds after the launch."""
    record = StepRecord()
    for number, one in enumerate(seconds):
        record = added(record, BEGIN.timestamp() + one, 10 * number, 10, None, each)
    return record


def test_saves_are_drawn_where_they_were_made() -> None:
    one = Attempt(1, "7", at(0), **trained(1, 100, 100, 3600, saving=90))  # type: ignore[arg-type]
    of = account([one], (), at(3600), running=True)
    drawn = placed(of.stretches, saves_at(1000, 2000, 3000))
    saves = [(x.begin - BEGIN.timestamp(), x.seconds) for x in drawn.stretches if x.kind is Spent.SAVE]
    assert [begin for begin, _ in saves] == pytest.approx([975, 1980, 2985], abs=16)
    assert [seconds for _, seconds in saves] == pytest.approx([30, 30, 30])
    assert drawn.loose == {}


def test_a_save_whose_time_is_not_on_record_is_drawn_nowhere_and_still_counted() -> None:
    one = Attempt(1, "7", at(0), **trained(1, 100, 100, 7300, saving=720))  # type: ignore[arg-type]
    of = account([one], (), at(7300), running=True)
    drawn = placed(of.stretches, StepRecord())
    assert Spent.SAVE not in {x.kind for x in drawn.stretches} and drawn.loose == {1: pytest.approx(720)}
    assert sum(bucket.seconds[KINDS.index(Spent.SAVE)] for bucket in buckets(axis_of(of), drawn)) == pytest.approx(
        720, rel=0.01
    )


@pytest.mark.parametrize("seed", range(40))
def test_drawn_stretches_follow_each_other_and_keep_the_sums_of_each_kind(seed: int) -> None:
    random = Random(seed)
    attempts, launches, now = random_history(random)
    of = account(attempts, launches, now)
    ends = sorted(random.uniform(0, max(1.0, of.total)) for _ in range(random.randrange(40)))
    offset = of.since.timestamp() - BEGIN.timestamp()
    drawn = placed(of.stretches, saves_at(*(offset + one for one in ends), each=random.choice((1, 20, 300))))
    assert all(a.end == pytest.approx(b.begin, abs=1e-3) for a, b in pairwise(drawn.stretches))
    sums = dict.fromkeys(Spent, 0.0)
    for one in drawn.stretches:
        assert one.seconds > -1e-6
        sums[one.kind] += one.seconds
    loose = sum(drawn.loose.values())
    kept = of.seconds()
    assert sums[Spent.SAVE] + loose == pytest.approx(kept[Spent.SAVE], abs=len(attempts) + 1)
    assert sum(sums.values()) == pytest.approx(of.total, rel=1e-9, abs=1e-3)
    assert all(
        sums[kind] == pytest.approx(kept[kind], abs=1e-3) for kind in Spent if kind not in (Spent.TRAIN, Spent.SAVE)
    )


def test_a_time_without_a_step_is_one_gap_whatever_kinds_it_has() -> None:
    first = crashed(1, "7", 0, 1000, **trained(1, 90, 100, 900))
    second = Attempt(2, "8", at(3000), **trained(91, 200, 200, 3000))  # type: ignore[arg-type]
    of = account([first, second], (), at(6000), running=True)
    found = gaps(of.stretches, 600)
    assert [(round(x.begin - BEGIN.timestamp()), round(x.end - BEGIN.timestamp(), -2)) for x in found] == [(900, 3200)]
    assert f"H{axis_of(of).x(found[0].end):g}" in shaded(found, axis_of(of))
