"""Is the README of the run still there? ``watch: {readme: {path: README, longest: 4kB}}`` switches it on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from ftsupervise.config.fields import Section, Size
from ftsupervise.findings import Finding, Words
from ftsupervise.probe import Entry, Missing
from ftsupervise.truth import Health
from ftsupervise.watch import Look

WORDS = Words(
    meaning="Nobody can read any more what this run is for.",
    look="ls {run_dir}",
    do="write it again",
)


class Settings(Section):
    """The section ``watch.readme``."""

    path: Path
    longest: Size = 100_000


def check(look: Look, settings: Settings) -> Iterator[Finding]:
    seen = look.probe.look(settings.path)
    look.memory["checks"] = look.memory.get("checks", 0) + 1
    if isinstance(seen, Missing):
        yield look.finding("README", Health.BAD, f"{settings.path} is gone", WORDS)
    elif isinstance(seen, Entry):
        yield look.finding("README", Health.OK, f"{settings.path} is there", WORDS)
    else:
        yield look.finding("README", Health.UNKNOWN, seen.sentence, WORDS)
