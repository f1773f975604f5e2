"""Runs any Nagios plug-in as a watchdog: exit 0 is fine, 1 a warning, 2 critical; anything else, no end or no program
is unknown.
"""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from typing import TYPE_CHECKING

from ftsupervise.errors import about
from ftsupervise.findings import Finding, Severity, Words
from ftsupervise.probe import Missing, NotSeen, Ran
from ftsupervise.rundir.paths import ENV_RUN, ENV_RUN_DIR
from ftsupervise.truth import Health
from ftsupervise.watch import due

if TYPE_CHECKING:
    from ftsupervise.config.watchdogs import Exec as Settings
    from ftsupervise.watch import Look

WORDS = Words(look="{command}")
_CODES = {0: (Health.OK, Severity.CRITICAL), 1: (Health.BAD, Severity.WARNING), 2: (Health.BAD, Severity.CRITICAL)}


def check(look: Look, settings: tuple[Settings, ...]) -> Iterator[Finding]:
    for one in settings:
        if due(look.memory.setdefault(one.name, {}), one.every, look.now):
            yield _check(look, one)


def _check(look: Look, settings: Settings) -> Finding:
    env = {**os.environ, ENV_RUN_DIR: str(look.rundir.root), ENV_RUN: look.run.name}
    ran = look.probe.run(settings.command, bound=settings.timeout.total_seconds(), env=env)
    health, severity, said, rest = Health.UNKNOWN, Severity.CRITICAL, "", ""
    if isinstance(ran, Ran) and not ran.late:
        health, severity = _CODES.get(ran.code, (Health.UNKNOWN, Severity.CRITICAL))
        text = (ran.out.strip() or ran.err.strip()).decode("utf-8", "replace")
        said, _, rest = text.partition("\n")
        said = said.partition("|")[0].strip()[:300] or f"exit {ran.code} and no output"
        if health is Health.UNKNOWN:
            said = f"could not see: {said} (exit {ran.code})"
    elif isinstance(ran, Ran):
        said = f"did not end within {settings.timeout.total_seconds():.0f} s, and was ended"
    elif isinstance(ran, Missing):
        said = f"there is no program {settings.command[0]}"
    elif isinstance(ran, NotSeen):
        said = ran.sentence
    names = {"command": shlex.join(settings.command)}
    summary = about(settings.name, said)
    return look.finding(settings.name, health, summary, WORDS, severity=severity, names=names, detail=rest[:2000])
