"""The share of its work that a program prints in place of a step: shown as that, told where it begins again, never a step."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime, timedelta, timezone

import pytest

from ftsupervise.model import OUTPUT, Attempt
from ftsupervise.rundir.log_lines import lines
from ftsupervise.rundir.percent_reader import PercentReader
from ftsupervise.rundir.starting_over import began_again, must_hold, starts_over
from ftsupervise.rundir.step_reader import StepReader
from ftsupervise.truth import GivenCheckpoint, PercentReached

NOW = datetime(2026, 11, 26, tzinfo=timezone.utc)


def read(said: Iterator[str]) -> tuple[PercentReader, StepReader]:
    percent, step = PercentReader(), StepReader()
    for at, line in enumerate(said):
        for one in lines(line.encode()):
            percent.read(one, 1000.0 + at)
        step.feed(line.encode())
    return percent, step


def word2vec(last: int) -> Iterator[str]:
    yield "Starting training using file text8\nVocab size: 71291\nWords in train file: 16718843\n"
    for at in range(last):
        yield f"\rAlpha: {0.05 - at / 1e5:f}  Progress: {at / 100:.2f}%  Words/thread/sec: {at % 7}.31k  "


def fasttext(last: int) -> Iterator[str]:
    yield "Read 0M words\rNumber of words:  18\nNumber of labels: 14\n"
    for at in range(last):
        yield f"\rProgress: {at / 10:5.1f}% words/sec/thread:  145939 lr:  0.0033 avg.loss:  2.653460 ETA:   0h 0m 0s"


@pytest.mark.parametrize(("said", "percent"), [(word2vec(410), 4.09), (fasttext(632), 63.1)])
def test_a_percentage_that_grows_is_known_and_is_no_step(said: Iterator[str], percent: float) -> None:
    reader, step = read(said)
    found = reader.found()
    assert found is not None and (found.first, found.last) == (0.0, percent)
    assert step.step is None


def test_what_is_left_is_told_by_the_pace_so_far() -> None:
    found = read(fasttext(501))[0].found()
    assert found is not None and found.words() == "50 %" and found.left() == pytest.approx(500, rel=0.01)
    assert PercentReached(4.09, 0, 1000, 1005).left() is None, "too early to say"


def accuracy() -> Iterator[str]:
    yield from (f"epoch {at}: test accuracy {at * 3}.25%\n" for at in range(30))


def downloads() -> Iterator[str]:
    yield from (f"Downloading model.bin, progress: {at}%\n" for at in range(100))
    yield from (f"Extracting: {at}% complete\n" for at in range(100))
    yield from (f"disk usage {at}% done\n" for at in range(100))


def bars() -> Iterator[str]:
    yield from (f"\r {at}%|{'█' * (at // 10):10}| {at}/100 [00:01<00:50, 195.31it/s]" for at in range(100))


def two_phases() -> Iterator[str]:
    yield from (f"\rProgress: {at}.00%  phrases" for at in range(0, 101, 5))
    yield from (f"\rProgress: {at}.00%  phrases" for at in range(0, 40, 5))


def too_few() -> Iterator[str]:
    yield "Progress: 10%\nProgress: 20%\nProgress: 30%\n"


@pytest.mark.parametrize("program", [accuracy, downloads, bars, two_phases, too_few])
def test_what_is_no_progress_of_the_whole_is_not_shown(program: object) -> None:
    assert read(program())[0].found() is None  # type: ignore[operator]


def test_a_thread_that_is_a_little_behind_does_not_begin_again() -> None:
    reader = read(f"Progress: {at / 10 - (at % 3 == 2) * 0.25:.2f}%\n" for at in range(100))[0]
    found = reader.found()
    assert found is not None and found.last == 9.9


def attempt(number: int, percent: PercentReached | None, **more: object) -> Attempt:
    return Attempt(number, "", NOW + timedelta(hours=number), percent=percent, **more)  # type: ignore[arg-type]


def test_one_that_begins_again_is_told_and_nothing_is_held_for_it() -> None:
    reached = [PercentReached(63.2, 0.1, of="Progress: %"), PercentReached(1.4, 0.1, of="Progress: %")]
    attempts = [attempt(1, reached[0]), attempt(2, reached[1])]
    again = began_again(attempts)
    assert again is not None
    assert again.words() == "attempt 2 began again at 0.1 %, attempt 1 had reached 63.2 %: it does not resume"
    assert starts_over(attempts) == () and not must_hold(starts_over(attempts))


def test_two_that_go_on_from_the_same_checkpoint_by_their_percentages_resume_both() -> None:
    reached = PercentReached(60, 50, of="a"), PercentReached(64, 50, of="a")
    first, second = (attempt(number, one) for number, one in enumerate(reached, 1))
    given = GivenCheckpoint("out/half.pt", None, first.started - timedelta(minutes=1))
    assert began_again([first, second]) is not None
    assert began_again([first, second._replace(given=given)]) is None
    late = given._replace(at=first.started + timedelta(minutes=1))
    assert began_again([first, second._replace(given=late)]) is not None, "the first of them had saved that"
    anew = PercentReached(64, 0, of="a")
    assert began_again([attempt(1, anew), attempt(2, anew, given=given)]) is not None


@pytest.mark.parametrize(
    ("first", "second", "why"),
    [
        (PercentReached(63, 0, of="a"), PercentReached(64, 60, of="a"), "it goes on"),
        (PercentReached(63, 0, of="a"), PercentReached(9, 5, of="a"), "it goes on from an early checkpoint"),
        (PercentReached(63, 0, of="a"), PercentReached(9, 0, of="b"), "another counter"),
        (PercentReached(100, 0, of="a"), PercentReached(9, 0, of="a"), "the first was done"),
        (PercentReached(0.5, 0, of="a"), PercentReached(0.2, 0, of="a"), "nothing was lost"),
        (None, PercentReached(9, 0, of="a"), "the first showed none"),
    ],
)
def test_what_is_no_new_beginning_is_not_told(first: PercentReached | None, second: PercentReached, why: str) -> None:
    assert began_again([attempt(1, first), attempt(2, second)]) is None, why
    both = attempt(1, PercentReached(63, 0, of="a"), first_step=0, last_step=9, source=OUTPUT)
    assert began_again([both, attempt(2, PercentReached(9, 0, of="a"))]) is None, "its steps say more"
