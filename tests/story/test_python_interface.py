"""``ftsupervise.Run``: what the commands print, as values; what they do, by the same rules; what they say, as exceptions.

A whole day of it is docs/python.md, which ``test_manual_typed.py`` lives through.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import datetime, timezone
from functools import partial
from pathlib import Path
from typing import Any

import pytest

import ftsupervise
from ftsupervise.checkpoints.quarantine import set_aside
from ftsupervise.cli.output import plain
from ftsupervise.errors import (
    AlreadyRunning,
    Cancelled,
    DiskFull,
    Error,
    NoAnswer,
    NotFound,
    Refused,
    UsageError,
    about,
)
from ftsupervise.host import processes
from ftsupervise.host.ownership import NotTrusted
from ftsupervise.probe.own_process import asked
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, SAVE, read_switch
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.typed import typed

NOW = datetime.now(timezone.utc)
Desk = Callable[..., Path]


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Desk:
    """``desk("hang", "fine")``: the account of this test has launched these runs; their folder."""

    def make(*names: str) -> Path:
        monkeypatch.chdir(tmp_path)
        for name, value in prepare(tmp_path, NOW, names).items():
            monkeypatch.setenv(name, value)
        return tmp_path

    return make


def printed(*words: str | Path) -> Any:
    return json.loads(typed(*words, "--json", code=0).stdout)


def without_the_moment(value: dict[str, Any]) -> dict[str, Any]:
    """What differs from one look to the next: when it was, and what lasts until then."""
    return {key: value[key] for key in value.keys() - {"at", "schema_version", "time", "why", "reason", "done_at"}}


@pytest.mark.parametrize("name", ["hang", "crash-loop", "groups"])
def test_the_values_are_those_that_the_commands_print(desk: Desk, name: str) -> None:
    folder = desk(name)
    run = ftsupervise.Run(folder / name)
    seen = run.status()
    said = printed("status", name)
    mine = {**plain(seen.row), **plain(seen.fields), "verdict": seen.verdict.lower()}
    assert without_the_moment(mine) == without_the_moment(said)
    assert said.keys() - mine.keys() == {"schema_version"}
    assert run.attempts() == seen.fields.ledger != ()
    assert run.account().seconds.keys() == said["time"]["seconds"].keys()
    alerts = {"schema_version": 2, **plain(run.alerts())}
    assert alerts == printed("alerts", "list", name) and bool(alerts["alerts"]) == (name != "groups")


def test_checkpoints_are_those_that_the_command_lists(desk: Desk) -> None:
    folder = desk("fine") / "fine" / "checkpoints"
    for step in (7, 8, 9):
        (folder / f"step-{step:08d}").mkdir(parents=True)
        (folder / f"step-{step:08d}" / "state").write_text("whole")
    set_aside(folder / "step-00000008", "it was torn", NOW)
    seen, said = ftsupervise.Run("fine").checkpoints(), printed("checkpoints", "list", "fine")
    assert [(str(one.path), one.step) for one in seen.checkpoints] == [
        (one["path"], one["step"]) for one in said["checkpoints"]
    ]
    assert {one.step for one in seen.checkpoints} & {7, 8, 9} == {7, 9}
    assert plain(seen.set_aside) == said["set_aside"] and seen.set_aside[0].reason == "it was torn"
    assert str(seen.folder) == said["folder"] == str(folder)


def test_a_run_is_named_as_everywhere_and_a_relative_path_stays_where_it_was_said(
    desk: Desk, monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> None:
    folder = desk("fine")
    here = ftsupervise.Run("./fine")
    monkeypatch.chdir(tmp_path_factory.mktemp("elsewhere"))
    for run in (here, ftsupervise.Run("fine"), ftsupervise.Run(folder / "fine")):
        assert run.status().row.directory == str(folder / "fine")
    assert repr(here) == "Run('./fine')" and repr(ftsupervise.Run()) == "Run()"
    monkeypatch.setenv("FTSUPERVISE_RUN_DIR", str(folder / "fine"))
    assert ftsupervise.Run().status().name == "fine"


def test_a_switch_is_raised_once_and_the_first_reason_stays(desk: Desk) -> None:
    folder = desk("fine")
    run = ftsupervise.Run("fine")
    first = run.save("before the move")
    again = run.save("another reason")
    assert (first.was_up, again.was_up) == (False, True)
    assert first.switch == again.switch == read_switch(RunDir(folder / "fine"), SAVE)
    assert first.switch.why == "before the move" and first.run == "fine"
    assert "the save switch is up" in typed("status", "fine").stdout


def test_kill_does_nothing_to_a_run_of_another_name(desk: Desk) -> None:
    rundir = RunDir(desk("fine") / "fine")
    with pytest.raises(UsageError) as caught:
        ftsupervise.Run("fine").kill(confirm="find")
    assert caught.value.message == "this run is called 'fine', not 'find': nothing was done"
    assert not read_switch(rundir, KILL).up
    assert ftsupervise.Run("fine").kill("wrong data", confirm="fine").switch.up
    assert read_switch(rundir, KILL).why == "wrong data"


def test_an_error_is_the_sentence_of_the_command_and_has_its_exit_code(desk: Desk, tmp_path: Path) -> None:
    desk("fine")
    (tmp_path / "bad.yaml").write_text("name: bad\nlaunch: {comand: a}\n")
    (tmp_path / "new.yaml").write_text("name: new\nlaunch: {command: a}\n")
    acts: list[tuple[str, str, Callable[[ftsupervise.Run], object]]] = [
        ("status", "nobody", lambda run: run.status()),
        ("save", "nobody", lambda run: run.save()),
        ("status", "new.yaml", lambda run: run.status()),
        ("launch", "bad.yaml", lambda run: run.launch()),
        ("alerts", "new.yaml", lambda run: run.alerts()),
        ("checkpoints", "nobody", lambda run: run.checkpoints()),
    ]
    for verb, name, act in acts:
        with pytest.raises(ftsupervise.Error) as caught:
            act(ftsupervise.Run(name))
        done = typed(verb, name)
        assert done.returncode == caught.value.exit_code, verb
        assert done.stderr == f"ftsupervise: {caught.value}\n", verb
    for wrong in ({"jobs": 0}, {"scheduler": "pbs"}, {"after": "87; rm"}, {"exclude": "a b"}):
        with pytest.raises(UsageError):
            ftsupervise.Run("new.yaml").launch(**wrong)
    assert not (tmp_path / "runs").exists()


@pytest.mark.parametrize("kind", [NotFound, Refused, DiskFull, AlreadyRunning, Cancelled, NotTrusted, NoAnswer])
def test_every_kind_of_error_comes_back_as_it_was_raised(kind: type[Error]) -> None:
    import pickle

    error = pickle.loads(pickle.dumps(kind("it is so", hint="do that")))
    assert (type(error), error.message, error.hint, error.exit_code) == (kind, "it is so", "do that", kind.exit_code)


def test_what_hangs_is_given_up_and_leaves_no_process() -> None:
    before = processes.below(os.getpid(), zombies=True)
    with pytest.raises(NoAnswer, match="nothing has moved for 1 s") as caught:
        asked("host.in_time:in_time", partial(time.sleep, 600), 500.0, patience=1.0, slurm=1.0)
    assert "sinfo shows whether Slurm does" in caught.value.hint
    assert processes.below(os.getpid(), zombies=True) == before


def test_what_is_no_error_of_ours_is_raised_as_well_and_a_lost_process_is_told() -> None:
    with pytest.raises(AttributeError, match="no_such_name"):
        asked("units:no_such_name", patience=5.0, slurm=1.0)
    with pytest.raises(ValueError, match="5 %"):
        asked("units:parse_duration", "5 %", patience=5.0, slurm=1.0)
    assert asked("errors:about", "a", "b", patience=5.0, slurm=1.0) == about("a", "b")


def test_threads_may_ask_at_the_same_time_and_nothing_is_forked_in_them(desk: Desk) -> None:
    desk("fine")
    code = """import sys, threading, ftsupervise
forks = []
sys.addaudithook(lambda event, _: forks.append(event) if event == "os.fork" else None)
seen = []
threads = [threading.Thread(target=lambda: seen.append(ftsupervise.Run("fine").status().verdict)) for _ in range(3)]
for one in threads: one.start()
for one in threads: one.join(60)
print(len(forks), *seen)"""
    done = subprocess.run([sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["0", *[ftsupervise.Run("fine").status().verdict] * 3], done.stderr


def test_a_stranger_in_the_current_directory_or_a_noisy_site_changes_nothing(desk: Desk, tmp_path: Path) -> None:
    desk("fine")
    for name in ("click.py", "pickle.py", "base64.py"):
        (tmp_path / name).write_text("raise SystemExit('a stranger was imported')\n")
    assert ftsupervise.Run("fine").status().name == "fine"
