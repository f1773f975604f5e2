"""The Markdown of a report for docs/report.md, made by the program of a run with a prepared past."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path

from ftsupervise.report.everything import report_of
from ftsupervise.report.markdown import as_markdown
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job

NOW = datetime(2026, 11, 23, 8, 30, tzinfo=timezone.utc)
_SECTIONS = 2  # behind the head, that are shown


def report_screens(folder: Path) -> dict[str, str]:
    """name of a block -> its text: the head, what cost most, and where the time went."""
    env = outside_a_job(**prepare(folder, NOW, ["nine-days"]))
    text = as_markdown(report_of(RunDir(folder / "train-10b"), NOW, env))
    head, *sections = text.replace(str(folder), "/scratch/ada").split("\n## ")
    shown = "\n## ".join([head, *sections[:_SECTIONS]]).rstrip("\n")
    return {"report-markdown": f"{shown}\n"}
