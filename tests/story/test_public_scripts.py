"""Public training scripts that nobody here wrote, unmodified: three deaths, a save, a stop, a standstill and a kill each.

None that is well is ended, braked or held; each standstill is found; each step is one that it printed, or none is shown; and a
start from the beginning destroys nothing that was reached.
"""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.ledger import kept_of, ledger
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import read_brake
from ftsupervise.scheduler.local import Local
from tests.neighbours.public_scripts import PUBLIC, PYTHON, NotHere, PublicScript
from tests.neighbours.supervised import outside_a_job
from tests.neighbours.typed import typed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]
Until = Callable[..., Any]
_WAIT = 300.0  # seconds for a state: they import torch first


class Stage:
    """One script, launched."""

    def __init__(self, script: PublicScript, folder: Path, state: Path) -> None:
        self.script, self.folder = script, folder
        self.env = {**outside_a_job(FTSUPERVISE_STATE_DIR=str(state)), **script.env, "OMP_NUM_THREADS": "1"}
        command = script.command.replace("{python}", PYTHON)
        resume = f"  resume: {json.dumps(script.resume)}\n" if script.resume else ""
        (folder / "ftsupervise.yaml").write_text(
            f"name: {script.name}\nscheduler: local\nlaunch:\n  command: {json.dumps(command)}\n  jobs: 3\n{resume}"
            "  restart: {back_off: 0s, in_place: 6, stop_within: 5s, hang: {at_least: 10s, unknown: 30s}}\n"
        )
        self.rundir = RunDir(folder / "runs" / script.name)

    def type(self, *words: str) -> str:
        return typed(*words, folder=self.folder, env=self.env).stdout

    def output(self) -> str:
        return "".join(path.read_text(errors="replace") for path in sorted(self.rundir.logs.glob("*.out")))

    def processes(self, attempt: int) -> list[int]:
        marked = processes.marked("FTSUPERVISE_ATTEMPT_DIR").get(str(self.rundir.attempt(attempt)), [])
        return [one.pid for one in marked]

    def strike(self, attempt: int, number: int) -> None:
        for pid in self.processes(attempt):
            os.kill(pid, number)

    def trains(self, attempt: int) -> bool:
        """Has it made a step; or where it shows none, does it run, with a sign of life?"""
        found = ledger(self.rundir)
        if len(found) < attempt or found[attempt - 1].ended is not None:
            return False
        if self.script.steps:
            return (found[attempt - 1].last_step or 0) > 0
        return any(one.facts.get("attempt") == str(attempt) for one in read_beats(self.rundir))

    def is_over(self, attempt: int) -> bool:
        found = ledger(self.rundir)
        return len(found) >= attempt and found[attempt - 1].ended is not None


@pytest.fixture(params=PUBLIC, ids=lambda one: one.name)
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    try:
        folder = request.param.fetch(tmp_path / request.param.name)
    except NotHere as why:
        pytest.skip(str(why))
    yield Stage(request.param, folder, tmp_path / "state")
    local = Local()
    for job in local.queue():
        local.cancel(job.base_id)


def test_a_public_script_is_seen_never_ended_while_it_is_well_and_loses_nothing(stage: Stage, until: Until) -> None:
    stage.type("launch")
    if not stage.script.steps:
        shows_no_step(stage, until)
        return
    for attempt in (1, 2, 3):
        until(lambda n=attempt: stage.trains(n), f"steps of attempt {attempt}", _WAIT)
        if attempt == 1:
            until(lambda: saves(stage), "what it saves", _WAIT)
            assert "hears a save, and the switch stays up." in stage.type("save")
            stage.type("clear", "--switch", "save")
        assert was_printed(stage, attempt), stage.output()[-2000:]
        assert not read_brake(stage.rundir)
        stage.strike(attempt, signal.SIGKILL)
        until(lambda n=attempt: stage.is_over(n), f"the end of attempt {attempt}", _WAIT)
    three = ledger(stage.rundir)[:3]
    assert [one.words for one in three] == ["killed by SIGKILL"] * 3, "no other end"
    began = [one.first_step or 0 for one in three]
    seen = stage.type("status", ".")
    if stage.script.resumes:
        assert began[0] < began[1] <= began[2] and not read_brake(stage.rundir)
        assert "it does not resume" not in seen
        hangs_and_is_killed(stage, until)
    else:
        assert "it does not resume" in seen
        assert not any(one.written for one in three) or kept_of(stage.rundir), "what was reached is kept"
        stands_still(stage, until)


def shows_no_step(stage: Stage, until: Until) -> None:
    """No number of its output is taken for a step; that it lives is seen, and that it is stopped."""
    until(lambda: stage.trains(1), "a sign of life", _WAIT)
    if stage.script.lines:
        until(lambda: ledger(stage.rundir)[0].unread, "that no step is found", _WAIT)
        assert "no step found in " in stage.type("status", ".")
    stage.strike(1, signal.SIGKILL)
    until(lambda: stage.trains(2), "a sign of life of attempt 2", _WAIT)
    stage.strike(2, signal.SIGSTOP)
    until(lambda: stage.is_over(2), "that its standstill is found", _WAIT)
    first, second = ledger(stage.rundir)[:2]
    assert first.words == "killed by SIGKILL" and second.words.startswith("hang: rank 0 on "), (
        first.words,
        second.words,
    )
    assert (first.last_step, second.last_step) == (None, None)


def saves(stage: Stage) -> bool:
    """Has it saved, where it does so within a minute?"""
    if not stage.script.resumes:
        return True
    return "saving checkpoint" in stage.output() or any(stage.folder.glob("out/checkpoint-*"))


def was_printed(stage: Stage, attempt: int) -> bool:
    """Is the step of the attempt a number that its output shows? Those of epochs are sums, and are not looked for."""
    step = ledger(stage.rundir)[attempt - 1].last_step
    if stage.script.name == "run-clm":  # a bar: its step stands before its total
        return f"| {step}/" in stage.output()
    counts = re.findall(r"^(?:\S* )?(?:iter_dt \S+ )?(?:iter|step)? ?(\d+)(?::| \|)", stage.output(), re.M)
    return not counts or str(step) in counts


def hangs_and_is_killed(stage: Stage, until: Until) -> None:
    until(lambda: stage.trains(4), "steps of attempt 4", _WAIT)
    stage.strike(4, signal.SIGSTOP)
    until(lambda: stage.is_over(4), "that its standstill is found", _WAIT)
    assert ledger(stage.rundir)[3].words.startswith("hang: rank 0 on ")
    until(lambda: stage.trains(5), "steps of attempt 5", _WAIT)
    assert "ended by SIGTERM in 5s" in stage.type("kill", "--yes").replace("\n", " ")
    since = time.monotonic()
    until(lambda: stage.is_over(5), "its end", 60)
    assert time.monotonic() - since < 30


def stands_still(stage: Stage, until: Until) -> None:
    """It is held after the third attempt where it had saved; a person who looks at it goes on."""
    if read_brake(stage.rundir) is not None:
        stage.type("clear", "--brake")
    until(lambda: stage.trains(4), "steps of attempt 4", _WAIT)
    stage.strike(4, signal.SIGSTOP)
    until(lambda: stage.is_over(4), "that its standstill is found", _WAIT)
    assert ledger(stage.rundir)[3].words.startswith("hang: rank 0 on ")
