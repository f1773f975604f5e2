"""Levels with hysteresis, what is left of a file system, and for how long."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Disk, Quota
from ftsupervise.findings import Severity
from ftsupervise.probe import Probe, Space
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.disk import check
from ftsupervise.watch.watchdogs.disk_space import (
    Figures,
    Level,
    Limit,
    check_quota,
    forecast,
    parse_quota,
    remember,
    slope,
)

TB, HOUR, DAY = 10**12, 3600.0, 86_400.0


def test_eighty_per_cent_is_the_new_hundred() -> None:
    rest = Space(total=100 * TB, used=70 * TB, inodes=0, inodes_free=0).usable(0.8)
    assert rest.free == 10 * TB
    assert rest.used_share == pytest.approx(0.875)
    assert rest.inodes_share is None
    over = Space(total=100 * TB, used=85 * TB, inodes=100, inodes_free=10).usable(0.8)
    assert over.free == -5 * TB
    assert over.inodes_share == pytest.approx(0.9)


def test_a_value_that_plays_around_its_limit_is_told_once() -> None:
    was, told = Level.FINE, []
    for used in (0.89, 0.905, 0.895, 0.902, 0.889, 0.879, 0.895):
        now = Limit(used, 0.9, 0.97).level(was)
        told += [now] if now is not was else []
        was = now
    assert told == [Level.WARNING, Level.FINE]


def test_beyond_critical_is_beyond_both() -> None:
    assert Limit(1, 10, 5, rising=False).level(Level.FINE) is Level.CRITICAL
    assert Limit(7, 10, 5, rising=False, margin=3).level(Level.CRITICAL) is Level.CRITICAL
    assert Limit(8, 10, 5, rising=False, margin=3).level(Level.CRITICAL) is Level.WARNING


def test_bloom_wrote_eighteen_terabytes_a_day() -> None:
    ahead = forecast(free=9.2 * TB, samples=[], checkpoint=2.3 * TB, cadence=3 * HOUR)
    assert ahead.rate * DAY == pytest.approx(18.4 * TB)
    assert ahead.seconds == pytest.approx(12 * HOUR)
    assert ahead.checkpoints == 4


def test_the_neighbours_fill_it_faster_than_planned() -> None:
    samples = [(t * 900.0, 50 * TB + t * 900.0 * TB / HOUR) for t in range(12)]
    ahead = forecast(free=3 * TB, samples=samples, checkpoint=None, cadence=None)
    assert ahead.seconds == pytest.approx(3 * HOUR)
    assert "last 2h 45m" in ahead.grounds


def test_no_growth_is_no_forecast() -> None:
    flat = [(t * 900.0, 5.0 * TB) for t in range(12)]
    assert forecast(1 * TB, flat, None, None).seconds is None
    assert forecast(1 * TB, flat[:3], None, None).seconds is None  # too few to say


def test_a_jump_does_not_bend_the_trend() -> None:
    samples = [(t * 900.0, 5.0 * TB + (40 * TB if t >= 11 else 0)) for t in range(12)]
    assert slope(samples) == 0


@given(st.lists(st.floats(1, 7200), min_size=1, max_size=400))
def test_memory_of_samples_is_bounded_and_in_order(gaps: list[float]) -> None:
    samples: list[tuple[float, float]] = []
    t = 1e9
    for gap in gaps:
        t += gap
        samples = remember(samples, t, gap)
    assert len(samples) <= 48
    assert samples == sorted(samples)
    assert samples[-1][0] > t - 3 * DAY


LFS = " /scratch 1234567890* 2000000000 3000000000 6d23h 123456 0 1000000 -\n"


def test_quota_commands_are_understood() -> None:
    got = parse_quota(LFS, Quota.model_validate({"command": ("lfs",), "format": "lfs"}))
    assert got == Figures(1234567890 * 1024, 3000000000 * 1024, 123456, 1000000)
    own = Quota.model_validate({"command": ("idrquota",), "pattern": r"(?P<used>\S+)/(?P<limit>\S+)"})
    assert parse_quota("quota: 12.5TB/20TB", own) == Figures(12_500_000_000_000, 20_000_000_000_000)


@pytest.mark.parametrize(
    ("line", "grace", "files_grace"),
    [
        ("/scratch 50 100 200 - 1 5 9 -", "", ""),
        ("/scratch 150* 100 200 6d23h 1 5 9 -", "6d23h", ""),
        ("/scratch 150* 100 200 none 7* 5 9 expired", "none", "expired"),
        ("/scratch 150 0 200 - 7 0 0 -", "", ""),
    ],
)
def test_a_soft_limit_that_is_passed_has_a_grace(line: str, grace: str, files_grace: str) -> None:
    got = parse_quota(line, Quota.model_validate({"command": ("lfs",), "format": "lfs"}))
    assert (got.grace, got.files_grace) == (grace, files_grace)


@pytest.mark.parametrize(
    ("line", "health", "severity", "words"),
    [
        (
            "/scratch 150* 100 1000 none 1 0 0 -",
            Health.BAD,
            Severity.CRITICAL,
            "its grace is over: nothing can be written",
        ),
        (
            "/scratch 150* 100 1000 6d23h 1 0 0 -",
            Health.BAD,
            Severity.WARNING,
            "the soft limit is passed, and writing ends in 6d23h",
        ),
        ("/scratch 50 100 1000 - 1 0 0 -", Health.OK, Severity.CRITICAL, "(5.0%)"),
    ],
)
def test_a_quota_whose_grace_is_over_is_not_fine_however_much_is_left_to_the_hard_limit(
    tmp_path: Path, line: str, health: Health, severity: Severity, words: str
) -> None:
    disk = Disk.model_validate({"quota": {"command": ("echo", line), "format": "lfs"}})
    run = Run(name="r", run_dir=tmp_path, launch=Launch(command="true"))
    with Probe() as probe:
        seen = Look(
            run, RunDir(tmp_path), datetime(2026, 11, 21, tzinfo=timezone.utc), (), probe=probe, watchdog="disk"
        )
        found = next(iter(check_quota(seen, disk, tmp_path, {})))
    assert (found.health, found.severity) == (health, severity) and words in found.summary


@pytest.mark.parametrize("text", ["", "\n", "lfs: no such user\n", "\x00\xff"])
def test_an_empty_or_odd_answer_is_a_sentence_not_a_crash(text: str) -> None:
    with pytest.raises(ValueError, match="does not match"):
        parse_quota(text, Quota.model_validate({"command": ("lfs",), "format": "lfs"}))


@pytest.mark.parametrize(("critical", "health"), [({}, Health.OK), ({"left": "6h"}, Health.BAD)])
def test_a_limit_that_is_off_is_off_at_its_critical_value_too(
    tmp_path: Path, critical: dict[str, str], health: Health
) -> None:
    """In the month in an hour a person was paged for a forecast that the settings had switched off."""
    found, now = os.statvfs(tmp_path), datetime.now(timezone.utc)
    used = float((found.f_blocks - found.f_bfree) * found.f_frsize)
    each = found.f_bavail * found.f_frsize / 12  # full in two hours
    samples = [(now.timestamp() - 600 * n, used - each * n) for n in range(12, 0, -1)]
    disk = Disk.model_validate({"left": None, "used": None, "inodes": None, "checkpoints": None, "critical": critical})
    with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        run = Run(name="r", run_dir=tmp_path, launch=Launch(command="a"))
        look = Look(run, RunDir(tmp_path), now, (), {str(tmp_path): {"samples": samples}}, probe=probe, watchdog="disk")
        by_name = {one.subject.rpartition(" ")[2]: one for one in check(look, (disk,))}
        assert by_name["forecast"].health is health, by_name["forecast"].summary
        RunDir(tmp_path).state.mkdir()
        RunDir(tmp_path).finished.write_text("{}")
        later = Look(run, RunDir(tmp_path), now + timedelta(hours=1), (), look.memory, probe=probe, watchdog="disk")
        by_name = {one.subject.rpartition(" ")[2]: one for one in check(later, (disk,))}
    assert by_name["forecast"].health is Health.OK and "has finished" in by_name["forecast"].summary
