"""pytest, with a second chance for what a race failed: ``python .ci/second_chance.py [PYTEST ARGUMENT]...``

A test that failed runs once more, alone. Where all of them pass then, so does the whole, with a line ``FLAKY: test …`` for
each: it is the first thing to mend next time. There is no second chance for more than three failures, for what cannot be
collected, or for a session that ended early; a test that is skipped the second time has not passed. Ends with pytest's exit
code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

MOST = 3  # failures of one session that may be a race


class Record:
    """What failed in a session, as the process that prints hears it (with xdist: from its workers)."""

    def __init__(self) -> None:
        self.failed: dict[str, None] = {}  # in their order, each once
        self.uncollected = False
        self.counts: dict[str, int] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = None

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self.uncollected = self.uncollected or report.failed

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        for kind in ("passed", "skipped", "xfailed", "xpassed"):
            self.counts[kind] = len(terminalreporter.stats.get(kind, []))


def passes_alone(test: str) -> bool:
    """Run one test in a pytest of its own. A skip is no pass."""
    with tempfile.TemporaryDirectory() as folder:
        told = Path(folder) / "told.xml"
        done = subprocess.run([sys.executable, "-m", "pytest", f"--junitxml={told}", test], check=False)
        if done.returncode != 0 or not told.exists():
            return False
        suites = ElementTree.parse(told).getroot().iter("testsuite")
        return [(s.get("tests"), s.get("skipped")) for s in suites] == [("1", "0")]


def main(arguments: list[str]) -> int:
    began = time.monotonic()
    record = Record()
    code = int(pytest.main(arguments, plugins=[record]))
    sys.stdout.flush()
    if code != pytest.ExitCode.TESTS_FAILED or record.uncollected or not record.failed:
        return code
    if len(record.failed) > MOST:
        print(f"{len(record.failed)} tests failed; a second try is for at most {MOST}", flush=True)
        return code
    print(f"once more, alone: {', '.join(record.failed)}", flush=True)
    passed = [test for test in record.failed if passes_alone(test)]
    for test in record.failed:
        flaky = test in passed
        print(f"FLAKY: test {test} failed, then passed alone" if flaky else f"FAILED again, alone: {test}", flush=True)
    counts = dict(record.counts)
    counts["passed"] = counts.get("passed", 0) + len(passed)
    counts = {"failed": len(record.failed) - len(passed), **counts, "rerun": len(record.failed)}
    words = ", ".join(f"{number} {kind}" for kind, number in counts.items() if number)
    print(f"=== {words} in {time.monotonic() - began:.2f}s ===", flush=True)
    return 0 if len(passed) == len(record.failed) else code


if __name__ == "__main__":
    sys.path[0] = str(Path.cwd())  # as with python -m pytest
    sys.exit(main(sys.argv[1:]))
