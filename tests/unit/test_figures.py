"""Each measured number in README, docs and benchmarks is one that a benchmark printed: it quotes docs/figures.md, or says when
and where it was measured, or is listed as what it is (a setting, Slurm's own, published by others)."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.figures import (
    NEEDED,
    PAGE,
    PROGRAMS,
    Figure,
    Page,
    Program,
    Quote,
    page_text,
    pages,
    quoted_anew,
    quotes,
    read_page,
    run,
    said_in,
    shown,
)
from tests.manual.numbers import LISTED, looks_measured, read_as, undated

ROOT = Path(__file__).parents[2]
FIGURES = read_page(PAGE.read_text("utf-8"))
PLACES = [pytest.param(path, id=str(path.relative_to(ROOT))) for path in pages()]


@pytest.mark.parametrize("path", PLACES)
def test_what_a_page_quotes_is_on_the_page_of_figures(path: Path) -> None:
    wrong = [quote for _, quote in quotes(path.read_text("utf-8")) if not quote.agrees(FIGURES)]
    assert wrong == [], "python benchmarks/figures.py --quote"


@pytest.mark.parametrize("path", PLACES)
def test_every_comment_of_that_kind_stands_behind_a_number(path: Path) -> None:
    text = path.read_text("utf-8")
    assert len(re.findall(r"<!-- ?(?:figure|times|below)\b", text)) == len(list(quotes(text)))


@pytest.mark.parametrize("path", PLACES)
def test_a_number_that_looks_measured_quotes_a_figure_or_is_listed(path: Path) -> None:
    page = str(path.relative_to(ROOT))
    if page.startswith("benchmarks/"):
        assert undated(path.read_text("utf-8"), LISTED.get(page, ())) == [], (
            "a section with numbers of its own says *Measured on DAY: machine*"
        )
    else:
        found = looks_measured(path.read_text("utf-8"), LISTED.get(page, ()))
        assert found == [], "quote docs/figures.md, or list it in tests/manual/numbers.py"


def test_what_is_listed_is_still_there() -> None:
    for page, listed in LISTED.items():
        text = " ".join(read_as((ROOT / page).read_text("utf-8")).split())
        assert [words for words in listed if words not in text] == [], page


def test_a_measured_number_without_a_mark_is_found() -> None:
    text = "A restart takes 0.7 s, 3.1 times less<!-- note --> than the 2 ms<!-- figure: a/b --> of `5 s`, and 40 % of 12 GB.\n"
    assert looks_measured(text, []) == ["0.7 s", "3.1 times", "40 %", "12 GB"]
    assert looks_measured(text, ["3.1 times less", "and 40 % of 12 GB"]) == ["0.7 s"]
    section = "# One\n\n*Measured on 2026-11-23: two cores.*\n\nIt takes 5 s.\n\n## Two\n\nIt takes 6 s.\n"
    assert undated(section) == ["Two: 6 s"]


# ------------------------------------------------------------------------------------------------------------ the page


def test_the_page_is_what_the_program_writes() -> None:
    assert page_text(FIGURES) == PAGE.read_text("utf-8")
    assert {one.name.partition("/")[0] for one in FIGURES.figures.values()} <= {one.name for one in PROGRAMS}
    assert all(
        one.on in FIGURES.machines and re.fullmatch(r"\d{4}-\d\d-\d\d", one.day) for one in FIGURES.figures.values()
    )


def test_each_benchmark_is_in_the_list() -> None:
    typed = {word for one in PROGRAMS for word in (*one.words, *one.words[1:2]) if word.startswith("benchmarks")}
    typed = {word.replace(".", "/") if "/" not in word else word for word in typed}
    there = {
        str(path.parent.relative_to(ROOT) if path.name == "__main__.py" else path.relative_to(ROOT))
        for path in (ROOT / "benchmarks").rglob("*.py")
        if '__name__ == "__main__"' in path.read_text("utf-8") and path.name not in NO_BENCHMARK
    }
    assert there <= typed


NO_BENCHMARK = {
    "figures.py",
    "job.py",
    "losses_job.py",
    "loops.py",
    "eyes.py",
}  # the program itself, and what benchmarks start as jobs


def test_a_line_of_a_program_becomes_a_row_and_is_read_again() -> None:
    lines = {
        "figures: guard/step = 96.2 ns (2.1 times time.monotonic())": ("ns", 2.1),
        "figures: recovery/exit-1/ours = 0.52 s": ("s", None),
        "figures: soak/back = 60 (of 60 faults)": ("", None),
        "figures: tick/100 runs, first = 3 % of a core": ("% of a core", None),
    }
    page = Page({}, {})
    said = [one for line in lines if (one := said_in(line)) is not None]
    assert [(one.unit, one.times) for one in said] == list(lines.values())
    assert said_in("figures of nothing") is None and said_in("figures: nothing = at all") is None
    page.put(said[:2], "2026-11-01", "0.5", "two cores")
    page.put(said[2:], "2026-11-02", "", "16 cores")
    again = read_page(page_text(page))
    assert (
        again == page and set(again.machines) == {"A", "B"} and again.figures["tick/100-runs-first"].day == "2026-11-02"
    )
    page.put([said[0]._replace(value=50.0)], "2026-11-03", "0.1", "two cores")
    assert page.figures["guard/step"].day == "2026-11-03" and page.figures["recovery/exit-1/ours"].day == "2026-11-01"


def test_a_program_prints_its_figures_at_its_end(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\nfrom benchmarks.figures import figure\n"
        "figure('x/a row, of two words', 0.012345, 's', 'the floor', times=2)\n"
        "figure('x/the floor', 0.00617, 's', 'the floor', times=1.0)\n"
        "print('its table')\n"
    )
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=True)
    table, blank, *rows = done.stdout.splitlines()
    assert (table, blank) == ("its table", "")
    assert rows == ["figures: x/a-row-of-two-words = 0.0123 s (2 times the floor)", "figures: x/the-floor = 0.00617 s"]
    found, why = run(Program("x", (str(script),), 60.0))
    assert [one.value for one in found] == [0.0123, 0.00617] and why == ""


def test_a_program_that_fails_or_takes_too_long_is_ended_and_said(tmp_path: Path) -> None:
    script = tmp_path / "one.py"
    script.write_text("import time\nprint('figures: x/y = 1 s')\nraise SystemExit(3)\n")
    assert run(Program("x", (str(script),), 60.0)) == ([Figure("x/y", 1.0, "s")], "ended with 3")
    script.write_text("import time\nprint('figures: x/y = 1 s', flush=True)\ntime.sleep(600)\n")
    found, why = run(Program("x", (str(script),), 1.5))
    assert [one.name for one in found] == ["x/y"] and why == "ended after 2 s"
    script.write_text("print('nothing')\n")
    assert run(Program("x", (str(script),), 60.0)) == ([], "printed no figure")
    assert all(one.torch == NEEDED or one.torch for one in PROGRAMS if "replicas" in one.command)


# ----------------------------------------------------------------------------------------------------------- the quotes


def test_a_quote_follows_the_page_in_its_own_unit_and_digits() -> None:
    page = Page({}, {})
    page.put([Figure("a/b", 0.01234, "s", "2.46 times c"), Figure("a/m", 1234.0, "MB")], "2026-11-01", "", "here")
    text = "12 ms<!-- figure: a/b -->, **9.00 ms**<!-- figure: a/b -->, 7<!-- times: a/b --> and 1.2 GB<!-- figure: a/m -->"
    assert quoted_anew(text, page) == text.replace("9.00", "12.3").replace("7<", "2<")
    assert quoted_anew("1,300 MB<!-- figure: a/m -->", page) == "1,200 MB<!-- figure: a/m -->"
    assert Quote("below", "a/b", "20", "ms").agrees(page) and not Quote("below", "a/b", "10", "ms").agrees(page)
    for quote in (Quote("figure", "a/none", "1", ""), Quote("times", "a/m", "1", ""), Quote("figure", "a/m", "1", "s")):
        with pytest.raises(ValueError):
            quote.agrees(page)


@pytest.mark.parametrize(
    ("number", "value", "agrees"),
    [
        ("100", 104, True),
        ("100", 106, False),
        ("500", 506, False),
        ("0.5", 0.54, True),
        ("9", 9.6, False),
        ("1,300", 1349, True),
    ],
)
def test_a_quote_agrees_within_the_digits_that_stand_there(number: str, value: float, agrees: bool) -> None:
    page = Page({}, {})
    page.put([Figure("a/b", value, "s")], "2026-11-01", "", "here")
    assert Quote("figure", "a/b", number, "s").agrees(page) is agrees


def test_figures_are_shown_with_three_digits_in_full() -> None:
    assert [shown(one) for one in (0.0123456, 1.0, 99.96, 1234.5, 0, 7, -0.5)] == [
        "0.0123", "1.00", "100", "1230", "0", "7", "-0.500"
    ]  # fmt: skip
