"""A watchdog that could not see for a day says so: its silence is no good news."""

from __future__ import annotations

from datetime import datetime, timedelta, timezone
from pathlib import Path

from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Exec, Watch
from ftsupervise.findings import Finding
from ftsupervise.host.ownership import user_name
from ftsupervise.model import Job, JobState
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch.checks import QueueAnswer, look_at, write_memory

T0 = datetime(2026, 11, 21, tzinfo=timezone.utc)


def week(
    tmp_path: Path, only: str, table: tuple[tuple[int, bool], ...], state: JobState = JobState.RUNNING
) -> list[Finding]:
    """What the watchdog says of itself, at these hours; True: it can see then."""
    (tmp_path / "watch").mkdir(exist_ok=True)
    (tmp_path / "launches").mkdir(exist_ok=True)
    plugin, log = tmp_path / "plugin", tmp_path / "train.log"
    run = Run(
        name="r",
        run_dir=tmp_path,
        launch=Launch(command="true"),
        watch=Watch.model_validate({"exec": (Exec(name="own", command=(str(plugin),)),), "loss": {"log": log}}),
    )
    job = Job("88", "88", "r", user_name(), state, directory=str(tmp_path))
    out = []
    for hour, sees in table:
        plugin.write_text(f"#!/bin/sh\necho seen; exit {0 if sees else 3}\n")
        plugin.chmod(0o755)
        if sees:
            log.write_text("loss: 2.5\n")
        else:
            log.unlink(missing_ok=True)
        seen = look_at(run, QueueAnswer((job,)), T0 + timedelta(hours=hour), own=frozenset(), only=(only,))
        write_memory(RunDir(tmp_path), seen.memory)
        out.append(next(one for one in seen.findings if one.subject == "watchdog"))
    return out


def test_a_plug_in_that_answers_nothing_for_a_week_is_told(tmp_path: Path) -> None:
    table = ((0, True), (1, False), (20, False), (26, False), (168, False), (169, True))
    found = week(tmp_path, "exec", table)
    assert [one.health for one in found] == [Health.OK] * 3 + [Health.BAD] * 2 + [Health.OK]
    assert "the exec watchdog has not seen own for 6d 23h" in found[4].summary
    assert found[4].since == T0 + timedelta(hours=1) and "watch.exec: null" in found[4].do


def test_what_is_seen_in_between_begins_anew(tmp_path: Path) -> None:
    found = week(tmp_path, "exec", ((0, False), (20, True), (30, False), (50, False)))
    assert [one.health for one in found] == [Health.OK] * 4


def test_of_a_run_that_waits_there_is_nothing_to_be_seen(tmp_path: Path) -> None:
    table = ((0, False), (30, False))
    assert week(tmp_path, "loss", table)[-1].health is Health.BAD
    assert week(tmp_path, "loss", ((60, False), (90, False)), JobState.PENDING)[-1].health is Health.OK
