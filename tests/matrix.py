"""The tables of threats and faults in ``docs/``: read them, run the test of each row, print each row with its result.

python tests/matrix.py            all tables (``make faults``)
python tests/matrix.py security   one of them
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
PAGES = {name: ROOT / "docs" / f"{name}.md" for name in ("security", "faults", "chain", "resume")}
_ROW = re.compile(r"\| (?P<what>.+?) \| (?P<answer>.+?) \| `(?P<file>tests/[\w/]+\.py)::(?P<test>test_\w+)` \|")
_SIGNS = {"passed": "ok", "failed": "FAILED", "skipped": "skipped", "missing": "DID NOT RUN"}


class Row(NamedTuple):
    what: str
    answer: str
    file: str
    test: str


def rows(page: Path) -> list[Row]:
    """The rows of the table in ``page``: the threat or fault, what is done about it (all cells between), and its test."""
    return [Row(**match.groupdict()) for match in map(_ROW.fullmatch, page.read_text("utf-8").splitlines()) if match]


def run(wanted: list[Row]) -> dict[tuple[str, str], str]:
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
    tables = {name: rows(PAGES[name]) for name in names or PAGES}
    results = run([row for table in tables.values() for row in table])
    counts: dict[str, int] = {}
    for name, table in tables.items():
        print(f"\n{name}: {len(table)} rows")
        for row in table:
            result = results.get((row.file, row.test), "missing")
            counts[result] = counts.get(result, 0) + 1
            print(f"  {_SIGNS[result]:<12}{row.what}: {row.answer}")
    total = ", ".join(f"{number} {result}" for result, number in sorted(counts.items()))
    print(f"\n{total}")
    return 0 if not counts.keys() & {"failed", "missing"} else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
