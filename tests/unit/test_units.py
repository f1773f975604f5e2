"""Sizes, shares, durations and Slurm's times: what is written reads back as the same value."""

from __future__ import annotations

from datetime import timedelta

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ftsupervise import units

sizes = st.integers(min_value=0, max_value=10**19) | st.builds(
    lambda n, f: n * f, st.integers(0, 5000), st.sampled_from([10**k for k in range(16)] + [2**k for k in range(51)])
)
shares = st.floats(min_value=0, max_value=1, allow_subnormal=True) | st.integers(0, 1000).map(lambda n: n / 1000)
durations = st.integers(min_value=0, max_value=999_999_999 * 86_400_000).map(lambda ms: timedelta(milliseconds=ms))
whole_seconds = st.integers(min_value=0, max_value=10**12).map(lambda s: timedelta(seconds=s))


@settings(deadline=None)
@given(sizes)
def test_a_size_written_and_read_is_the_same_size(size: int) -> None:
    assert units.parse_size(units.format_size(size)) == size


@settings(deadline=None)
@given(shares)
def test_a_share_written_and_read_is_the_same_float(share: float) -> None:
    assert units.parse_share(units.format_share(share)) == share


@settings(deadline=None)
@given(durations)
def test_a_duration_written_and_read_is_the_same_duration(duration: timedelta) -> None:
    assert units.parse_duration(units.format_duration(duration)) == duration


@settings(deadline=None)
@given(whole_seconds)
def test_a_slurm_time_written_and_read_is_the_same_time(time: timedelta) -> None:
    assert units.parse_slurm_time(units.format_slurm_time(time)) == time
    assert units.parse_duration(units.format_slurm_time(time)) == time


_atoms = st.tuples(
    st.from_regex(r"[0-9]{1,5}(\.[0-9]{1,4})?", fullmatch=True), st.sampled_from(["ms", "s", "m", "min", "h", "d", "w"])
)


@settings(deadline=None)
@given(st.lists(_atoms, min_size=1, max_size=4).map(lambda parts: "".join(n + u for n, u in parts)))
def test_every_duration_that_is_accepted_can_be_written_again(text: str) -> None:
    try:
        duration = units.parse_duration(text)
    except ValueError as error:
        assert "millisecond" in str(error)
    else:
        assert units.parse_duration(units.format_duration(duration)) == duration


@settings(deadline=None)
@given(st.from_regex(r"[0-9]{1,3}(\.[0-9]{1,20})? ?%", fullmatch=True))
def test_every_share_that_is_accepted_can_be_written_again(text: str) -> None:
    try:
        share = units.parse_share(text)
    except ValueError:
        assert float(text.rstrip(" %")) > 100
    else:
        assert units.parse_share(units.format_share(share)) == share


@settings(deadline=None)
@given(st.text(max_size=30) | st.text(alphabet="0123456789:-.%hmsdwkKMGTib ", max_size=30))
def test_no_text_makes_a_parser_do_anything_but_answer_or_raise_value_error(text: str) -> None:
    for parse in (units.parse_size, units.parse_share, units.parse_duration, units.parse_slurm_time):
        try:
            parse(text)
        except ValueError as error:
            assert str(error)


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("2-15:52:19", 2 * 86400 + 15 * 3600 + 52 * 60 + 19),
        ("2-12", 2 * 86400 + 12 * 3600),
        ("2-12:30", 2 * 86400 + 12 * 3600 + 1800),
        ("20:00:00", 72000),
        ("1:30", 90),
        ("100:00:00", 360000),
    ],
)
def test_slurms_forms_mean_what_slurm_means_by_them(text: str, seconds: int) -> None:
    assert units.parse_duration(text) == timedelta(seconds=seconds)


@pytest.mark.parametrize("text", ["٣GB", "٣%", "٣h", "٣:00:00", "1e3s", "-5m", "5", "", "5 parsecs", "1__0s", "0x10GB"])
def test_what_is_no_plain_number_with_a_unit_is_refused(text: str) -> None:
    parsers = [units.parse_share, units.parse_duration]
    if text not in ("5",):
        parsers.append(units.parse_size)
    for parse in parsers:
        with pytest.raises(ValueError, match="expected"):
            parse(text)


@pytest.mark.parametrize(
    "text", ["9" * 400 + "d", "9" * 400 + ":00:00", "9" * 5000 + "s", "9" * 5000 + "GB", "9" * 5000 + "%"]
)
def test_absurdly_long_numbers_are_refused_with_a_sentence(text: str) -> None:
    for parse in (units.parse_size, units.parse_share, units.parse_duration):
        with pytest.raises(ValueError) as caught:
            parse(text)
        assert len(str(caught.value)) < 200


@pytest.mark.parametrize(
    ("share", "words"),
    [
        (0, "0.0 %"),
        (1e-9, "< 0.01 %"),
        (0.0004, "0.04 %"),
        (0.0312, "3.1 %"),
        (0.9994, "99.9 %"),
        (0.9996, "> 99.9 %"),
        (1 - 1e-12, "> 99.9 %"),
        (1, "100.0 %"),
    ],
)
def test_a_share_is_all_or_nothing_only_where_it_is(share: float, words: str) -> None:
    assert units.show_percent(share) == words


@pytest.mark.parametrize(
    ("rate", "words"), [(0, "0 steps/s"), (0.098, "10.2 s a step"), (0.5, "0.5 steps/s"), (12.54, "12.5 steps/s")]
)
def test_a_rate_is_said_as_seconds_where_steps_are_slow(rate: float, words: str) -> None:
    assert units.show_rate(rate) == words


@pytest.mark.parametrize(
    ("number", "words"), [(1, "1 check"), (0, "0 checks"), (2, "2 checks"), (12000, "12,000 checks")]
)
def test_one_look_is_one_look(number: int, words: str) -> None:
    assert units.count(number, "check") == words
