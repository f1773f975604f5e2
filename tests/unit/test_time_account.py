"""Every second of a run belongs to exactly one kind, whatever the ledger says; and the figures of an easy history are exact."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from itertools import pairwise
from pathlib import Path
from random import Random

import pytest

from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind
from ftsupervise.report.account import Spent, TimeAccount, account
from ftsupervise.rundir.launches import LaunchRecord
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.progress import TimeMark, marked, marks_path, read_marks, write_marks

BEGIN = datetime(2026, 11, 1, tzinfo=timezone.utc)
CRASH = Failure(FailureKind.SIGNAL, "killed by SIGKILL")


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def crashed(number: int, job: str, start: float, end: float, **more: object) -> Attempt:
    made: dict[str, object] = {"cause": Cause(CauseKind.SIGNAL, signal=9), "failure": CRASH, "exit_code": -9, **more}
    return Attempt(number, job, at(start), ended=at(end), **made)  # type: ignore[arg-type]


def trained(first: int, last: int, ready: float, worked: float, saving: float = 0.0) -> dict[str, object]:
    return {"first_step": first, "last_step": last, "ready": ready, "worked": worked, "saving": saving}


def of(kind: Spent, found: TimeAccount) -> float:
    return round(found.seconds()[kind], 6)


def random_history(random: Random) -> tuple[list[Attempt], list[LaunchRecord], datetime]:
    """Restarts in place, members of an array, requeues, lost ends, clocks that jump, attempts that overlap, damaged pages."""
    clock, step, job, attempts = random.uniform(0, 3600), 0, 1, list[Attempt]()
    launches = [LaunchRecord(1, "submitted", "t1", at(random.uniform(-5e4, 9e4)), job_ids=("1", "2", "3"))]
    for number in range(1, random.randrange(12) + 1):
        start = clock + random.choice((0.0, 3.0, 600.0, 86400.0, -500.0))
        length = random.choice((0.0, 0.3, 40.0, 5000.0, 2e5))
        lost, guard = random.random() < 0.2, random.random() < 0.8
        facts: dict[str, object] = {}
        if guard:
            first = max(0, step - random.randrange(50))
            step = first + random.randrange(500)
            ready, saving = random.uniform(0, 1.5 * length), random.uniform(0, length)
            facts = trained(first, step, ready, random.uniform(-5, 1.5 * length), saving)
        for name in list(facts):
            if random.random() < 0.1:
                del facts[name]
        cause = Cause(random.choice(list(CauseKind)))
        failure = random.choice((None, CRASH))
        one = Attempt(number, f"{job}_{number}", at(start), cause=cause, failure=failure, **facts)  # type: ignore[arg-type]
        if random.random() < 0.05:
            one = one._replace(started=datetime.fromtimestamp(0, timezone.utc))
        if not lost:
            one = one._replace(ended=at(start + length), braked=random.random() < 0.1)
        elif random.random() < 0.5:
            one = one._replace(heard=at(start + random.uniform(0, length)))
        attempts.append(one)
        clock = start + length + random.choice((0.0, 0.0, 10.0, -length / 2, -1e5, 1e5))
        job += random.random() < 0.3
        if random.random() < 0.2:
            launches.append(LaunchRecord(len(launches) + 1, "submitted", "t", at(clock + 5), job_ids=(str(job),)))
    return attempts, launches, at(clock + random.choice((0.0, 100.0, -2000.0, 1e6)))


def random_marks(random: Random, attempts: list[Attempt]) -> list[TimeMark]:
    """Marks of these attempts, some of which contradict the ledger."""
    found = []
    for one in attempts:
        begin = one.started.timestamp()
        for _ in range(random.randrange(5)):
            when = begin + random.uniform(-100, 6000)
            step = random.choice((None, (one.first_step or 0) + random.randrange(-5, 600)))
            active = random.choice((None, when - random.uniform(-10, 500)))
            found.append(TimeMark(when, one.number, step, random.uniform(0, 400), active))
    return sorted(found, key=lambda mark: mark.at)


@pytest.mark.parametrize("seed", range(200))
def test_the_account_of_a_random_history_closes(seed: int) -> None:
    random = Random(seed)
    attempts, launches, now = random_history(random)
    running, afterwards = random.random() < 0.4, random.choice((Spent.QUEUE, Spent.HELD, Spent.UNKNOWN))
    marks = random_marks(random, attempts)
    found = account(attempts, launches, now, running=running, afterwards=afterwards, marks=marks)
    edges = [found.since.timestamp(), *(one.end for one in found.stretches)]
    assert [one.begin for one in found.stretches] == edges[:-1], "no gap and no overlap"
    assert all(one.seconds > 0 for one in found.stretches)
    assert edges[-1] == pytest.approx(found.until.timestamp(), abs=1e-6)
    assert found.until <= max(now, found.since)
    if found.stretches:
        assert abs(sum(found.shares().values()) - 1) < 1e-9
        assert abs(sum(found.seconds().values()) - found.total) < 1e-9 * max(1.0, found.total) + 1e-5
    for ratio in (found.goodput(), found.ettr_meta(), found.ettr_byterobust(), found.ettr_last()):
        assert ratio is None or 0 <= ratio.least <= ratio.most <= 1 + 1e-9
    half = found.within(edges[0], (edges[0] + edges[-1]) / 2)
    assert sum(half.seconds().values()) == pytest.approx(found.total / 2, abs=1e-5)
    begin, end = sorted(random.uniform(edges[0], edges[-1]) for _ in range(2))
    part = found.within(begin, end).stretches
    assert all(one.end == after.begin for one, after in pairwise(part)), "no gap and no overlap"
    assert sum(one.seconds for one in part) == pytest.approx(end - begin, abs=1e-5)


def test_each_second_of_a_fault_is_told_apart() -> None:
    first = crashed(1, "7_1", 100, 1099, **trained(1, 800, 101, 949, 49))  # each step takes a second
    second = Attempt(2, "7_1", at(1109), **trained(701, 1000, 51, 350, 0))  # type: ignore[arg-type]
    launch = LaunchRecord(1, "submitted", "t", at(0), job_ids=("7",))
    found = account([first, second], [launch], at(1459), running=True)
    assert found.total == 1459
    assert of(Spent.QUEUE, found) == 100
    assert of(Spent.RESTART, found) == pytest.approx(100 + 10 + 50, abs=0.3)
    assert of(Spent.SAVE, found) == 49
    assert of(Spent.DETECT, found) == 50
    assert of(Spent.REDO, found) == pytest.approx(100, abs=0.5)
    assert of(Spent.TRAIN, found) == pytest.approx(800 + 200, abs=1)
    assert found.ettr_meta() == found.goodput()
    byterobust, goodput = found.ettr_byterobust(), found.goodput()
    assert byterobust is not None and goodput is not None
    assert byterobust.least == pytest.approx(goodput.least * 1459 / 1359)


def test_the_times_of_a_brake_and_after_a_kill_switch_are_told_apart_and_no_matter_of_the_cluster() -> None:
    braked = crashed(1, "7_1", 0, 100, braked=True, **trained(1, 90, 10, 100))
    killed = Attempt(2, "7_2", at(500), ended=at(600), cause=Cause(CauseKind.KILL_SWITCH), **trained(91, 180, 10, 100))  # type: ignore[arg-type]
    again = Attempt(3, "9_1", at(1000), **trained(181, 270, 10, 100))  # type: ignore[arg-type]
    launches = [LaunchRecord(1, at=at(0), job_ids=("7",)), LaunchRecord(2, at=at(900), job_ids=("9",))]
    found = account([braked, killed, again], launches, at(1100), running=True)
    assert of(Spent.BRAKED, found) == 400
    assert of(Spent.HELD, found) == 300
    assert of(Spent.QUEUE, found) == 100
    meta, goodput = found.ettr_meta(), found.goodput()
    assert meta is not None and goodput is not None
    assert meta.least == pytest.approx(goodput.least * 1100 / 400)


def test_the_time_until_the_next_member_or_until_slurm_begins_a_job_again_is_the_queues() -> None:
    work = trained(1, 90, 10, 100)
    cancelled = Attempt(1, "7_1", at(0), ended=at(100), cause=Cause(CauseKind.CANCELLED), **work)  # type: ignore[arg-type]
    requeued = Attempt(2, "7_2", at(400), ended=at(500), cause=Cause(CauseKind.CANCELLED), **work)  # type: ignore[arg-type]
    again = Attempt(3, "7_2", at(1500), **work, begun_again=1)  # type: ignore[arg-type]
    launches = [LaunchRecord(1, at=at(0), job_ids=("7",)), LaunchRecord(2, at=at(0), job_ids=("8", "9"))]
    found = account([cancelled, requeued, again], launches, at(1600), running=True)
    assert of(Spent.QUEUE, found) == 300 + 1000 and of(Spent.HELD, found) == 0
    links = [one._replace(job_id=job) for one, job in zip((cancelled, again), ("8", "9"), strict=True)]
    assert of(Spent.QUEUE, account(links, launches, at(1600), running=True)) == 1400, "the links of a daisy chain"
    alone = [one._replace(job_id=job) for one, job in zip((cancelled, again), ("5", "6"), strict=True)]
    assert of(Spent.HELD, account(alone, launches, at(1600), running=True)) == 1400, "nobody knows of a job that waited"


def test_a_lost_end_and_a_command_without_the_guard_are_unknown_and_said_so() -> None:
    lost = Attempt(1, "7_1", at(0), cause=Cause(CauseKind.LOST), heard=at(300), **trained(1, 290, 10, 298))  # type: ignore[arg-type]
    blind = crashed(2, "7_2", 1000, 2000)
    found = account([lost, blind], [], at(2500), afterwards=Spent.QUEUE)
    assert of(Spent.UNKNOWN, found) == 700 + 1000
    assert of(Spent.QUEUE, found) == 500
    assert found.blind == (2,)
    goodput = found.goodput()
    assert goodput is not None and goodput.most - goodput.least == pytest.approx(1700 / 2500)


def test_a_standstill_that_was_found_is_detection_though_no_step_is_known() -> None:
    hang = Cause(CauseKind.HANG, waited=600.0)
    found = account([crashed(1, "7_1", 0, 1000, cause=hang)], [], at(1000), afterwards=Spent.QUEUE)
    assert (of(Spent.UNKNOWN, found), of(Spent.DETECT, found)) == (400, 600)
    found = account([crashed(1, "7_1", 0, 600, cause=hang)], [], at(600), afterwards=Spent.QUEUE)
    assert (of(Spent.UNKNOWN, found), of(Spent.DETECT, found), found.blind) == (0, 600, ())


def test_of_two_attempts_that_overlap_the_newer_one_has_the_time() -> None:
    old = crashed(1, "7_1", 0, 900, **trained(1, 900, 1, 900))
    new = Attempt(2, "7_2", at(500), **trained(400, 800, 1, 401))  # type: ignore[arg-type]
    found = account([old, new], [], at(902), running=True)
    assert {one.attempt for one in found.stretches if one.begin >= at(500).timestamp()} == {2}
    assert found.total == 902


def test_a_running_attempt_that_makes_no_progress_is_not_training() -> None:
    stuck = Attempt(1, "7_1", at(0), **trained(1, 100, 10, 110))  # type: ignore[arg-type]
    assert of(Spent.DETECT, account([stuck], [], at(120), running=True)) == 0
    assert of(Spent.DETECT, account([stuck], [], at(710), running=True)) == 600


def test_the_account_of_a_finished_run_ends_with_it() -> None:
    done = Attempt(1, "7_1", at(0), ended=at(100), cause=Cause(CauseKind.FINISHED), **trained(1, 90, 10, 99))  # type: ignore[arg-type]
    assert account([done], [], at(9e6)).total == 100
    assert account([], [], at(0)).goodput() is None


def saved_for_an_hour() -> Attempt:
    """It trained for three hours, then it saved for one; a second a step."""
    return Attempt(1, "7_1", at(0), **trained(1, 10_800, 1, 14_400, 3600))  # type: ignore[arg-type]


def test_the_last_hour_is_what_was_done_in_it_where_the_run_has_noted_how_far_it_was() -> None:
    minutes = [60.0 * minute for minute in range(110, 240)]
    done = [(min(10_800.0, seconds), max(0.0, seconds - 10_800)) for seconds in minutes]
    marks = [
        TimeMark(BEGIN.timestamp() + seconds, 1, int(steps), saving, BEGIN.timestamp() + seconds)
        for seconds, (steps, saving) in zip(minutes, done, strict=True)
    ]
    found = account([saved_for_an_hour()], [], at(14_400), running=True, marks=marks)
    assert of(Spent.SAVE, found) == 3600
    last, two = found.ettr_last(), found.ettr_last(7200)
    assert last is not None and last.most == pytest.approx(0.0, abs=0.002)
    assert two is not None and two.least == pytest.approx(0.5, abs=0.002)


def test_the_last_hour_of_an_attempt_is_not_told_where_nobody_has_noted_how_far_it_was() -> None:
    found = account([saved_for_an_hour()], [], at(14_400), running=True)
    assert found.ettr_last() is None
    assert found.ettr_byterobust() is not None
    whole = found.ettr_last(20_000)  # it has all of the attempt
    assert whole is not None and whole.least == pytest.approx(0.75, abs=0.001)


def test_marks_are_kept_for_two_hours_and_read_back(tmp_path: Path) -> None:
    rundir, marks = RunDir(tmp_path), tuple[TimeMark, ...]()
    rundir.state.mkdir()
    assert read_marks(rundir) == ()
    for minute in range(400):
        marks = marked(marks, TimeMark(1e9 + 60.0 * minute, 1, minute, 2.5, None))
    assert 120 < len(marks) < 130
    write_marks(rundir, marks, None)
    assert read_marks(rundir) == marks
    assert marks_path(rundir).stat().st_size < 8000
    back = TimeMark(1e9, 2, None, 0.0, None)
    assert marked(marks, back) == (back,), "the clock went back"
    marks_path(rundir).write_text('{"marks": [[1], "x", [1e99, 1, 1, 1, 1], [5.0, 1, null, -1, null]]}')
    assert read_marks(rundir) == ()
