"""The tables of threats and faults: each row is that of a test, and there are as many as were promised."""

from __future__ import annotations

import os

import pytest

from tests.matrix import CHOSEN, MARKS, PAGES, Row, all_rows, main, rows_in, written


@pytest.fixture(scope="module")
def every() -> list[Row]:
    return all_rows()


@pytest.mark.parametrize(("name", "least"), [("security", 40), ("faults", 60), ("chain", 20), ("resume", 30)])
def test_each_page_has_the_rows_of_its_tests(every: list[Row], name: str, least: int) -> None:
    rows = [row for row in every if row.page == name]
    text = PAGES[name].read_text("utf-8")
    made = written(name, text, rows)
    if os.environ.get("UPDATE_MANUAL"):
        PAGES[name].write_text(made, "utf-8")
        text = made
    assert len(rows) >= least
    assert text == made, 'type: UPDATE_MANUAL=1 make quick ARGS="-k test_matrix"'


@pytest.mark.parametrize("name", CHOSEN)
def test_the_page_that_people_read_has_some_of_them_as_they_stand(every: list[Row], name: str) -> None:
    text = CHOSEN[name].read_text("utf-8")
    made = written(name, text, [row for row in every if row.page == name], chosen=True)
    if os.environ.get("UPDATE_MANUAL"):
        CHOSEN[name].write_text(made, "utf-8")
        text = made
    assert text == made, 'type: UPDATE_MANUAL=1 make quick ARGS="-k test_matrix"'
    head = next(head for page, head in MARKS.values() if page == name)
    assert 20 <= made.partition(head)[2].partition("\n\n")[0].count("\n| ") <= 30


def test_no_row_stands_twice(every: list[Row]) -> None:
    assert len({row.cells[0] for row in every}) == len(every)


def test_a_row_is_read_as_it_stands_and_a_wrong_one_is_named() -> None:
    text = '@pytest.mark.fault("a `|`-less fault", "the "\n    "answer")\ndef test_it() -> None: ...\n'
    assert list(rows_in(text, "a.py")) == [Row("faults", ("a `|`-less fault", "the answer"), "a.py", "test_it")]
    with pytest.raises(ValueError, match=r"a.py:1: a row of security has 2 cells"):
        list(rows_in('@pytest.mark.threat("one")\ndef test_it() -> None: ...\n', "a.py"))


def test_a_row_that_is_new_comes_behind_those_of_its_file_and_one_that_is_gone_goes() -> None:
    head = MARKS["fault"][1]
    text = f"# F\n\n{head}\n|---|---|\n| one | a |\n| two | b |\n| gone | c |\n\nthe rest\n"
    rows = [
        Row("faults", ("one", "other words"), "a.py", "test_one"),
        Row("faults", ("new", "d"), "a.py", "test_new"),
        Row("faults", ("two", "b"), "b.py", "test_two"),
    ]
    lines = written("faults", text, rows).splitlines()
    assert lines[4:] == ["| one | other words |", "| new | d |", "| two | b |", "", "the rest"]


def test_a_table_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 64
    assert "no such table: nonsense; there are security, faults, chain, resume" in capsys.readouterr().out
