"""The settings of many runs in one watch."""

from __future__ import annotations

from pathlib import Path

from ftsupervise.config.load import loads
from ftsupervise.config.schema import Run
from ftsupervise.watch.roster import Roster


def _run(name: str, section: str) -> Run:
    return loads(
        f"name: {name}\nlaunch: {{command: a}}\nrun_dir: /r/{name}\nwatch: {section}\n", Path("/r/ftsupervise.yaml")
    )


def test_sections_that_are_equal_are_in_memory_once_and_every_run_keeps_its_own() -> None:
    given = [_run("a", "{hang: {quiet: 2h}}"), _run("b", "{hang: {quiet: 2h}}"), _run("c", "{hang: {quiet: 3h}}")]
    a, b, c = kept = Roster.of(given).runs
    assert kept == given
    assert a.watch is b.watch
    assert a.alerts is b.alerts is c.alerts
    assert c.watch.hang is not None
    assert a.watch.hang is not c.watch.hang


def test_more_kinds_of_a_section_than_are_looked_through_are_kept_all_the_same() -> None:
    given = [_run(f"r{n}", f"{{hang: {{quiet: {n + 1}h}}}}") for n in range(40)]
    assert Roster.of([*given, *given]).runs == [*given, *given]
