"""Measure what a report costs: 90 days with 1,000 interruptions, written and opened in a real Chromium, beside an empty page.

    python benchmarks/report.py [--faults 1000] [--times 5] [--check]

"Opened" is from the navigation until two frames after everything has loaded and every script has run, so that keys and pointer
are answered; "filtered" is a word typed into the filter, laid out again. An empty page tells how fast this machine and this
browser are. ``--check`` exits 1 above 2 MB or 1 s. Without a Chromium it says so.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from datetime import datetime, timezone
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.figures import figure
from ftsupervise.report.everything import report_of
from ftsupervise.report.html import page
from tests.neighbours import chromium
from tests.neighbours.prepared_runs import ninety_days

SIZE, OPENED = 2_000_000, 1.0
_DRAWN = "new Promise(f => requestAnimationFrame(() => requestAnimationFrame(() => f(performance.now()))))"
_FILTER = """(() => { const box = document.querySelector("#find"); box.scrollIntoView(); document.body.offsetHeight;
const began = performance.now(); box.value = box.value ? "" : "node-1";
box.dispatchEvent(new Event("input", {bubbles: true})); document.body.offsetHeight; return performance.now() - began; })()"""


def opened(browser: chromium.Chromium, path: Path, times: int) -> float:
    """Seconds, the least of several times: what else runs here makes it longer, and nothing makes it shorter."""
    found = []
    for _ in range(times):
        browser.open(path)
        found.append(browser.run(_DRAWN) / 1000)
    return float(min(found))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=1000)
    parser.add_argument("--times", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    given = parser.parse_args()
    if chromium.find() is None:
        print("there is no Chromium here, so nothing was measured: apt-get install chromium")
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder, now = Path(name), datetime.now(timezone.utc)
        rundir, _ = ninety_days(folder, now, given.faults)
        began = time.monotonic()
        text = page(report_of(rundir, now, {**os.environ, "PATH": "/nowhere"}))
        written = time.monotonic() - began
        (folder / "report.html").write_text(text)
        (folder / "empty.html").write_text("<!doctype html><title>empty</title>")
        browser = chromium.Chromium(folder)
        try:
            browser.size(1200, 900)
            empty = opened(browser, folder / "empty.html", given.times)
            seconds = opened(browser, folder / "report.html", given.times)
            filtered = min(browser.run(_FILTER) for _ in range(given.times)) / 1000
        finally:
            browser.close()
    size = len(text.encode())
    print(f"90 days, {given.faults} interruptions: {size / 1e6:.2f} MB, written in {written:.2f} s")
    print(
        f"opened in {seconds:.2f} s, an empty page in {empty:.2f} s ({seconds / empty:.1f} times); filtered in {filtered:.3f} s"
    )
    figure("report/size", size / 1e6, "MB", f"90 days, {given.faults} interruptions")
    figure("report/written", written, "s")
    figure("report/opened", seconds, "s", "an empty page", times=seconds / empty)
    figure("report/filtered", filtered, "s")
    return int(given.check and (size > SIZE or seconds > OPENED))


if __name__ == "__main__":
    sys.exit(main())
