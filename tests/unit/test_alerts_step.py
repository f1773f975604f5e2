"""A night told as a table: what was seen, minute by minute, and what people heard."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from datetime import datetime, timedelta, timezone

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.alerts.step import CHECKS, Policy, flap_share, policy_of, step
from ftsupervise.config.alerting import Alerts
from ftsupervise.findings import Alert, AlertState, Finding, Reason, Severity
from ftsupervise.truth import Health

T0 = datetime(2026, 11, 21, 0, 0, tzinfo=timezone.utc)
WARNING, CRITICAL = Severity.WARNING, Severity.CRITICAL
ONCE = Policy(repeat=None)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


def finding(health: Health, severity: Severity = CRITICAL, since: datetime | None = None) -> Finding:
    return Finding("train", "disk", "/scratch", health, severity, "3 TB free", T0, since=since)


SEEN = {"bad": Health.BAD, "good": Health.OK, "blind": Health.UNKNOWN}


def night(policy: Policy, table: str) -> list[str]:
    """Lines of "minute seen [muted] -> heard"; gives the lines where something else was heard."""
    alert: Alert | None = None
    wrong = []
    for line in table.strip().splitlines():
        left, _, heard = line.partition("->")
        minute, seen, *more = left.split()
        word = [w for w in more if w in ("warning", "critical")]
        look = None if seen == "absent" else finding(SEEN[seen], Severity[word[0].upper()] if word else CRITICAL)
        if "ack" in more and alert:
            alert = replace(alert, acked_by="me")
        muted = "silenced" if "muted" in more else ""
        alert, reason = step(alert, look, policy, T0 + minutes(float(minute)), muted=muted)
        if reason.value != heard.strip():
            wrong.append(f"{line.strip()}, but heard: {reason.value}")
    return wrong


def test_a_look_that_began_before_the_newest_one_ends_nothing() -> None:
    """Two watches, or two ticks of a slow one: the older look is recorded last. A clock that is far ahead holds nobody back."""
    assert not night(
        ONCE,
        """
        1   bad  -> fired
        0.8 good -> nothing
        1.2 bad  -> nothing
        2   good -> resolved
        """,
    )
    assert not night(ONCE, "60 bad -> fired\n1 good -> resolved")


def test_a_night() -> None:
    assert not night(
        Policy(hold=minutes(10), repeat=minutes(240), escalate_after=minutes(60)),
        """
        0   good         -> nothing
        5   bad warning  -> held
        10  blind        -> nothing
        15  bad warning  -> fired
        20  bad warning  -> nothing
        25  bad critical -> escalated
        30  bad warning  -> nothing
        35  bad critical -> nothing
        40  blind        -> nothing
        75  blind        -> nothing
        80  bad critical -> escalated
        85  bad critical -> nothing
        320 bad critical -> repeated
        325 bad critical ack -> nothing
        700 bad critical -> nothing
        705 blind        -> nothing
        710 good         -> resolved
        715 good         -> nothing
        720 bad          -> held
        725 good         -> nothing
        """,
    )


def test_what_could_not_be_seen_neither_fires_nor_resolves() -> None:
    assert not night(
        ONCE,
        """
        0 blind -> nothing
        5 bad   -> fired
        9 blind -> nothing
        999 blind -> nothing
        1000 bad -> nothing
        1001 good -> resolved
        """,
    )


def test_a_silenced_trouble_is_told_when_the_silence_ends_if_it_still_lasts() -> None:
    assert not night(
        ONCE,
        """
        0 bad muted -> held
        5 bad muted -> held
        9 bad       -> fired
        12 good     -> resolved
        20 bad muted -> held
        25 good      -> nothing
        """,
    )


def test_what_was_told_is_told_to_be_over_even_when_silenced_meanwhile() -> None:
    assert not night(ONCE, "0 bad -> fired\n 5 bad muted -> nothing\n 9 good muted -> resolved")


def test_it_must_be_good_for_a_while_before_it_is_over() -> None:
    assert not night(
        Policy(clear=minutes(10), repeat=None),
        "0 bad -> fired\n 5 good -> nothing\n 9 bad -> nothing\n 12 good -> nothing\n 21 good -> nothing\n 22 good -> resolved",
    )


def test_a_trouble_that_comes_back_at_once_is_a_new_one_with_a_beginning_of_its_own() -> None:
    alert: Alert | None = None
    numbers = []
    for minute, health in ((0, Health.BAD), (5, Health.OK), (10, Health.BAD)):
        alert, _ = step(alert, finding(health), ONCE, T0 + minutes(minute))
        assert alert is not None
        numbers.append(alert.incident)
    assert alert is not None and alert.since == T0 + minutes(10) and numbers[0] == numbers[1] < numbers[2]


def test_two_of_three_looks_must_be_bad() -> None:
    assert not night(
        Policy(bad_checks=2, of_checks=3, repeat=None),
        """
        0 bad  -> held
        1 good -> nothing
        2 bad  -> fired
        3 bad  -> nothing
        4 good -> nothing
        5 good -> resolved
        """,
    )


def test_a_subject_nobody_looks_at_any_more_ends_without_an_all_clear() -> None:
    assert not night(
        Policy(forget_after=minutes(60)),
        "0 bad -> fired\n 30 absent -> nothing\n 59 absent -> nothing\n 60 absent -> unwatched\n 65 absent -> nothing",
    )


def test_blindness_is_not_absence() -> None:
    table = (
        "0 bad -> fired\n" + "\n".join(f"{m} blind -> nothing" for m in range(10, 600, 10)) + "\n600 absent -> nothing"
    )
    assert not night(Policy(forget_after=minutes(60)), table)


def test_a_pending_trouble_that_disappears_is_forgotten() -> None:
    alert, _ = step(None, finding(Health.BAD), Policy(hold=minutes(10)), T0)
    alert, reason = step(alert, None, Policy(), T0 + minutes(60))
    assert (alert, reason) == (None, Reason.NOTHING)


def test_the_probe_may_know_better_since_when() -> None:
    long_ago = finding(Health.BAD, since=T0 - minutes(30))
    alert, reason = step(None, long_ago, Policy(hold=minutes(10)), T0)
    assert reason is Reason.FIRED and alert is not None and alert.since == T0 - minutes(30)


def test_a_clock_that_jumps_back_neither_repeats_nor_breaks() -> None:
    assert not night(Policy(repeat=minutes(10)), "100 bad -> fired\n 0 bad -> nothing\n 50 good -> resolved")


@pytest.mark.parametrize(
    ("checks", "share"),
    [
        ("+-" * 10 + "+", 1.0),
        ("+" * 20 + "-", 0.0625),
        ("-" + "+" * 20, 0.0375),
        ("+" * 17 + "-+-+", 0.2421),
        ("+" * 14 + "-+-+-+-", 0.4099),
        ("+" * 21, 0.0),
        ("", 0.0),
    ],
)
def test_the_flap_share_is_nagios_s(checks: str, share: float) -> None:
    assert flap_share(checks) == pytest.approx(share, abs=5e-5)


def test_flapping_is_told_to_be_over_once_when_it_has_calmed() -> None:
    alert: Alert | None = None
    heard = []
    for minute, health in enumerate([Health.BAD, Health.OK] * 15 + [Health.OK] * 300):
        alert, reason = step(alert, finding(health), ONCE, T0 + minutes(minute))
        heard.append(reason)
    assert heard.count(Reason.FIRED) == heard.count(Reason.RESOLVED) < 5
    assert heard.index(Reason.RESOLVED) < 30 <= len(heard) - 1 - heard[::-1].index(Reason.RESOLVED)


def week(looks: Iterable[bool], policy: Policy, every: float) -> list[Reason]:
    """What people hear of an alert that is looked at ``every`` minutes; a look is True where it was bad."""
    alert: Alert | None = None
    heard = []
    for number, bad in enumerate(looks):
        alert, reason = step(alert, finding(SEEN["bad" if bad else "good"]), policy, T0 + minutes(every * number))
        heard.append(reason)
    return [reason for reason in heard if reason not in (Reason.NOTHING, Reason.HELD)]


DEFAULT = policy_of(Alerts(), finding(Health.BAD))


@pytest.mark.parametrize("every", [1, 5, 15])
def test_one_bad_check_in_ten_is_not_four_hundred_messages_a_week(every: int) -> None:
    looks = [number % 10 == 3 for number in range(7 * 24 * 60 // every)]
    heard = week(looks, DEFAULT, every)
    assert len(heard) <= 20, Counter(heard)
    assert Counter(heard)[Reason.REPEATED] <= 7, "one reminder a day, of what comes and goes"


@pytest.mark.parametrize("seed", range(8))
def test_nor_is_it_where_they_come_at_random(seed: int) -> None:
    chance = random.Random(seed)
    heard = week([chance.random() < 0.1 for _ in range(7 * 24 * 12)], DEFAULT, 5)
    assert len(heard) <= 40, Counter(heard)


def test_the_first_two_ends_of_a_day_are_told_at_once_and_a_later_one_after_a_calm() -> None:
    bad = {0, 300, 600, 900}  # minutes; it is looked at every five
    alert: Alert | None = None
    ends = []
    for minute in range(0, 4000, 5):
        alert, reason = step(alert, finding(SEEN["bad" if minute in bad else "good"]), ONCE, T0 + minutes(minute))
        if reason is Reason.RESOLVED:
            assert alert is not None and alert.ended is not None
            ends.append((minute, (alert.ended - T0) // minutes(1)))
    assert ends == [(5, 5), (305, 305), (635, 605), (965, 905)], "told later, and said when it was over"
    assert alert is None, "a day later nothing is remembered of it"


def test_a_trouble_that_stays_is_reminded_of_as_ever_though_it_came_and_went_before() -> None:
    looks = [number % 10 == 3 for number in range(100)] + [True] * 200
    policy = replace(DEFAULT, repeat=minutes(240))
    assert Counter(week(looks, policy, 5))[Reason.REPEATED] >= 3


LOOK = st.sampled_from([Health.BAD, Health.OK, Health.UNKNOWN, None])


@given(st.lists(st.tuples(LOOK, st.booleans(), st.integers(0, 90)), max_size=60), st.booleans())
def test_every_firing_is_followed_by_exactly_one_end(
    checks: list[tuple[Health | None, bool, int]], clears: bool
) -> None:
    """Whatever the night: FIRED and its end alternate, and after enough good looks nothing is left open."""
    policy = Policy(hold=minutes(3), clear=minutes(7 if clears else 0), repeat=minutes(60), escalate_after=minutes(30))
    now, alert, open_ = T0, None, False
    calm = [(Health.OK, False, 5)] * (2 * CHECKS) + [(Health.OK, False, 90)] * 20
    for health, muted, wait in [*checks, *calm]:
        now += minutes(wait)
        look = None if health is None else finding(health)
        alert, reason = step(alert, look, policy, now, muted="silenced" if muted else "")
        if reason is Reason.FIRED:
            assert not open_
            open_ = True
        elif reason in (Reason.RESOLVED, Reason.UNWATCHED):
            assert open_
            open_ = False
        elif reason in (Reason.REPEATED, Reason.ESCALATED):
            assert open_
        assert not (alert and alert.state is AlertState.FIRING and reason is Reason.RESOLVED)
    assert not open_ and alert is None
