"""The tables of threats and faults: each row names a test that exists, and there are as many as were promised."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.matrix import PAGES, ROOT, Row, main, rows


def names_in(path: Path) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(path.read_text("utf-8"))) if isinstance(node, ast.FunctionDef)}


@pytest.mark.parametrize(("name", "least"), [("security", 40), ("faults", 60), ("chain", 20), ("resume", 30)])
def test_each_table_has_its_rows_and_each_row_a_test_that_exists(name: str, least: int) -> None:
    table = rows(PAGES[name])
    assert len(table) >= least
    assert [row for row in table if row.test not in names_in(ROOT / row.file)] == []


@pytest.mark.parametrize("name", PAGES)
def test_no_line_of_a_table_is_passed_over_for_its_form(name: str) -> None:
    lines = [line for line in PAGES[name].read_text("utf-8").splitlines() if line.startswith("|") and "tests/" in line]
    assert len(lines) == len(rows(PAGES[name]))


def test_no_row_stands_twice() -> None:
    both = [row for page in PAGES.values() for row in rows(page)]
    assert len({row.what for row in both}) == len(both)


def test_a_row_is_read_as_it_stands(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "| a `|`-less threat | the answer | `tests/unit/test_matrix.py::test_no_row_stands_twice` |\n| x | y |\n"
    )
    assert rows(page) == [
        Row("a `|`-less threat", "the answer", "tests/unit/test_matrix.py", "test_no_row_stands_twice")
    ]


def test_a_table_that_does_not_exist_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["nonsense"]) == 64
    assert "no such table: nonsense; there are security, faults, chain, resume" in capsys.readouterr().out
