"""The tables of threats and faults in ``docs/``: a row belongs to the test that plays it, which says it in a mark.

    @pytest.mark.fault("A rank is killed", "the run starts again in the same job …")

The pages hold the rows without the tests: those of reference all of them, docs/faults.md and docs/security.md the few that say
most, which a person chose. ``UPDATE_MANUAL=1 make quick ARGS="-k test_matrix"`` writes them anew: a row that is
new comes behind the last one of its file.

python tests/matrix.py            runs the test of each row and prints each row with its result (``make faults``)
python tests/matrix.py security   those of one page
"""

from __future__ import annotations

import ast
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
PAGES = {
    "security": DOCS / "reference" / "threats.md",
    "faults": DOCS / "reference" / "faults.md",
    "chain": DOCS / "chain.md",
    "resume": DOCS / "resume.md",
}
CHOSEN = {"security": DOCS / "security.md", "faults": DOCS / "faults.md"}
# the mark of each page, and the head of its table
MARKS = {
    "threat": ("security", "| threat | answer |"),
    "fault": ("faults", "| fault | what is done |"),
    "chain": ("chain", "| what happened | what the chain does | members it costs | what people hear |"),
    "resume": ("resume", "| what happened | what comes back | what people hear |"),
}
_SIGNS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "missing": "DID NOT RUN"}


class Row(NamedTuple):
    """``cells``: the threat or fault, and what is done about it."""

    page: str
    cells: tuple[str, ...]
    file: str
    test: str

    @property
    def line(self) -> str:
        return f"| {' | '.join(self.cells)} |"


def rows_in(text: str, file: str) -> Iterator[Row]:
    """The rows of the tests of ``file``, in their order."""
    for node in ast.parse(text).body:
        for mark in node.decorator_list if isinstance(node, ast.FunctionDef) else ():
            name = ast.unparse(mark.func).removeprefix("pytest.mark.") if isinstance(mark, ast.Call) else ""
            if isinstance(mark, ast.Call) and name in MARKS:
                page, head = MARKS[name]
                cells = tuple(str(ast.literal_eval(one)) for one in mark.args)
                if len(cells) != head.count(" | ") + 1 or any("\n" in one for one in cells):
                    raise ValueError(
                        f"{file}:{mark.lineno}: a row of {page} has {head.count(' | ') + 1} cells of one line"
                    )
                yield Row(page, cells, file, node.name)  # type: ignore[attr-defined]


@cache
def all_rows() -> list[Row]:
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [row for path in files for row in rows_in(path.read_text("utf-8"), str(path.relative_to(ROOT)))]


def written(page: str, text: str, rows: Sequence[Row], *, chosen: bool = False) -> str:
    """The text of a page with those rows in its table: what is there keeps its place. ``chosen``: nothing comes to it."""
    (head,) = (head for name, head in MARKS.values() if name == page)
    lines = text.splitlines()
    begin = lines.index(head) + 2
    end = next((n for n in range(begin, len(lines)) if not lines[n].startswith("|")), len(lines))
    by_line, by_what = {row.line: row for row in rows}, {row.cells[0]: row for row in rows}
    table = [by_line.get(line) or by_what.get(line[2:].split(" | ")[0]) for line in lines[begin:end]]
    placed = list(dict.fromkeys(row for row in table if row is not None))
    for row in () if chosen else rows:
        if row not in placed:
            beside = [place for place, one in enumerate(placed) if one.file == row.file]
            placed.insert(max(beside, default=len(placed) - 1) + 1, row)
    return "\n".join([*lines[:begin], *(row.line for row in placed), *lines[end:]]) + "\n"


def run(wanted: Sequence[Row]) -> dict[tuple[str, str], str]:
    """Each (file, test) -> "passed", "failed", "skipped" or "missing"; of several cases of one test the worst."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        ids = sorted({f"{row.file}::{row.test}" for row in wanted})
        argv = [sys.executable, "-m", "pytest", "-q", "-n", "2", "--dist", "loadfile", "--no-loadscope-reorder"]
        subprocess.run([*argv, "--timeout", "3600", f"--junitxml={report}", *ids], cwd=ROOT, check=False)
        cases = ElementTree.parse(report).getroot().iter("testcase") if report.exists() else iter(())
        worst = ("missing", "passed", "skipped", "failed")
        found: dict[tuple[str, str], str] = {}
        for case in cases:
            kinds = {child.tag for child in case}
            result = "failed" if kinds & {"failure", "error"} else "skipped" if "skipped" in kinds else "passed"
            file = str(case.get("classname", "")).replace(".", "/") + ".py"
            key = (file, str(case.get("name", "")).partition("[")[0])
            found[key] = max(found.get(key, "missing"), result, key=worst.index)
    return found


def main(names: list[str]) -> int:
    if unknown := set(names) - PAGES.keys():
        print(f"no such table: {', '.join(sorted(unknown))}; there are {', '.join(PAGES)}")
        return 64
    every = all_rows()
    tables = {name: [row for row in every if row.page == name] for name in names or PAGES}
    results = run([row for table in tables.values() for row in table])
    counts: dict[str, int] = {}
    for name, table in tables.items():
        print(f"\n{name}: {len(table)} rows")
        for row in table:
            result = results.get((row.file, row.test), "missing")
            counts[result] = counts.get(result, 0) + 1
            print(f"  {_SIGNS[result]:<12}{': '.join(row.cells)}  ({row.file}::{row.test})")
    total = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    print(f"\n{total}")
    return 0 if not counts.keys() & {"failed", "missing"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
