"""What the benchmark of the lighthouse says about its figures. Pure."""

from __future__ import annotations

import pytest

from benchmarks.replicas.control_plane import HEAD, KINDS, OURS, THEIRS, Measured, arguments, ratio, row, wrong

MINE = Measured(0.1, 16.0, 0.1, 0.1, 0.2, 0.05, 2.3, 1.2, 0)
THEIRS_MEASURED = Measured(2.0, 230.0, 0.1, 0.1, 0.2, 0.05, 5.2, 4.0, 0)


def test_rows_and_ratios_stand_under_their_heads() -> None:
    assert {len(row(500, kind, MINE)) for kind in KINDS} == {len(HEAD)}
    assert len(ratio(MINE, THEIRS_MEASURED)) == len(HEAD.removesuffix("  false"))
    assert list(KINDS) == [OURS, THEIRS]


def test_a_good_figure_has_no_complaint() -> None:
    assert wrong(500, MINE, THEIRS_MEASURED) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"false_deaths": 1}, "1 groups counted as dead"),
        ({"memory": 100.0}, "its memory is 0.43"),
        ({"start": 1.0}, "its start takes 0.50"),
        ({"beating": 1.5}, "heartbeats take 150%"),
        ({"cpu": 1.5}, "1.50 s of CPU"),
        ({"quorum": 0.3, "worst": 0.3}, "3.00 of the command's"),
        ({"group_death": 3.5}, "3.50 s for a group's death"),
        ({"own_death": 6.0}, "6.00 s for the lighthouse's death"),
    ],
)
def test_each_bound_is_checked(change: dict[str, float], said: str) -> None:
    (words,) = wrong(500, MINE._replace(**change), THEIRS_MEASURED)  # type: ignore[arg-type]
    assert said in words


def test_the_largest_number_it_is_asked_for_by_itself_is_five_hundred() -> None:
    assert arguments([]).groups.endswith(",500") and not arguments([]).check
