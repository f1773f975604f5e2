"""Draw the pictures of docs/report.md anew: the report of a made-up run in a real Chromium, light, dark, on a phone, on paper.

python docs/draw_report.py
"""

from __future__ import annotations

import base64
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))

from ftsupervise.report.everything import report_of  # noqa: E402
from ftsupervise.report.html import page  # noqa: E402
from ftsupervise.rundir.paths import RunDir  # noqa: E402
from tests.neighbours.chromium import Chromium  # noqa: E402
from tests.neighbours.prepared_runs import prepare  # noqa: E402

NOW = datetime(2026, 11, 23, 8, 30, tzinfo=timezone.utc)
# name: scheme, medium, width and height of the window, height of the picture, is it a phone, quality
VIEWS = {
    "light": ("light", "screen", 1200, 900, 1560, False, 70),
    "dark": ("dark", "screen", 1200, 900, 1560, False, 70),
    "phone": ("light", "screen", 390, 844, 1500, True, 55),
    "print": ("light", "print", 720, 1018, 1018, False, 80),
}


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "ada"
        folder.mkdir()
        env = prepare(folder, NOW, ["nine-days"])
        file = Path(name) / "report.html"
        text = page(report_of(RunDir(folder / "train-10b"), NOW, env))
        file.write_text(text.replace(str(folder), "/scratch/ada"))
        browser = Chromium(Path(name))
        try:
            for view, (scheme, medium, width, height, cut, phone, quality) in VIEWS.items():
                browser.size(width, height, phone=phone)
                features = [{"name": "prefers-color-scheme", "value": scheme}]
                browser.call("Emulation.setEmulatedMedia", media=medium, features=features)
                browser.open(file)
                if medium == "print":
                    browser.run("document.body.style.padding = '40px'")  # the margin of the sheet
                clip = {"x": 0, "y": 0, "width": width, "height": cut, "scale": 1}
                made = browser.call(
                    "Page.captureScreenshot", format="webp", quality=quality, captureBeyondViewport=True, clip=clip
                )
                picture = ROOT / "docs" / "pictures" / f"report-{view}.webp"
                picture.write_bytes(base64.b64decode(made["data"]))
                print(f"{picture}: {picture.stat().st_size / 1000:.0f} kB")
        finally:
            browser.close()


if __name__ == "__main__":
    main()
