"""Records on disk stay readable: earlier code wrote the pages in ``tests/golden/records``; damage costs one field."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Mapping
from datetime import datetime, timedelta, timezone
from enum import Enum, IntEnum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, NamedTuple

import pytest

from ftsupervise.model import JobState
from ftsupervise.nodes import exclude, incidents
from ftsupervise.rundir import heartbeat_page, launches, switches
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.records import decode, encode, read_record, write_json
from ftsupervise.scheduler import local
from ftsupervise.truth import Beat
from ftsupervise.watch.checks import read_memory, write_memory
from ftsupervise.watch.roster import directories, remember

GOLDEN = Path(__file__).parents[1] / "golden" / "records"
NOW = datetime(2026, 11, 21, 3, 0, tzinfo=timezone.utc)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir(tmp_path / "run")


def lay(name: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(GOLDEN / f"{name}.json", path)


def test_a_beat_stays_readable(run: RunDir) -> None:
    lay("beat", run.beats / "rank-3")
    facts = {"attempt": "6", "first": "12", "saved": "15"}
    assert heartbeat_page.read_beats(run) == (Beat(3, 17, "train", NOW, 4711, "node-1", facts),)


def test_a_brake_and_its_release_stay_readable(run: RunDir) -> None:
    lay("brake", run.state / "brake")
    lay("brake-released", run.state / "brake-released")
    assert switches.read_brake(run) == switches.Brake(
        *("exit 1 (ValueError)", "3 times at the same step", 3, 6, 17, "ValueError: no such shape: größe"),
        held=("88_[4-10]", "91"),
        at="2026-11-21T03:00:00+00:00",
    )
    assert switches.still_held(run) == ("88_[4-10]", "91")
    assert switches.counts_from(run) == 7


def test_what_the_guard_records_of_its_loop_stays_readable(run: RunDir) -> None:
    lay("finished", run.finished)
    lay("stopped", run.attempt(6) / "stopped.json")
    assert switches.read_finished(run) == switches.Finished(41, 6, "node-1", NOW)
    why = "kill switch raised by alice on node-1: größe"
    assert switches.read_stopped(run.attempt(6)) == switches.Stopped("kill switch", why, 17, NOW)


def test_a_run_that_was_declared_finished_by_hand_has_finished_when_the_file_was_made(run: RunDir) -> None:
    assert switches.read_finished(run) is None and switches.read_stopped(run.attempt(1)) == switches.Stopped()
    run.state.mkdir(parents=True)
    for content in ("", "done", '{"at": "noon", "step": true}', "[" * 5000):
        run.finished.write_text(content)
        os.utime(run.finished, (NOW.timestamp(), NOW.timestamp()))
        assert switches.read_finished(run) == switches.Finished(at=NOW), content


def test_a_watcher_stays_readable(run: RunDir) -> None:
    lay("watcher", run.watch / "watchers" / "a")
    lay("watcher-once", run.watch / "watchers" / "b")
    found = [(one.name, one.host, one.at, one.every) for one in heartbeat_page.watchers(run)]
    assert found == [("a", "vm", NOW, timedelta(minutes=1)), ("b", "vm", NOW, None)]


def test_a_launch_stays_readable(run: RunDir) -> None:
    lay("launch", run.launches / "0001" / "launch.json")
    (found,) = launches.launches(run)
    assert (found.number, found.state, found.token, found.by) == (1, "submitted", "115a116421f0", "root@vm")
    assert (found.scheduler, found.chain, found.members, found.after) == ("local", "array", 10, "")
    assert found.job_ids == ("local-1",)
    assert found.config == "/home/ada/gpt/ftsupervise.yaml"
    assert found.at == datetime(2026, 11, 23, 0, 23, 1, 373310, tzinfo=timezone.utc)


def test_what_is_known_of_nodes_stays_readable(run: RunDir) -> None:
    lay("node-incidents", run.nodes / "incidents" / "node-1-88.json")
    lay("node-excluded", run.nodes / "exclude" / "node-5")
    lay("node-trusted", run.nodes / "trust" / "node-6")
    lay("node-exclusions-of-job", run.nodes / "applied" / "88")
    known = incidents.read([run.nodes])
    assert known.problems == ()
    assert [tuple(one) for one in known.incidents] == [
        ("node-3", "hardware", NOW, "gpt", "88_3", 6, "3", "killed by SIGBUS", "node-1", "NVRM: Xid 79"),
        ("node-4", "crashed", NOW - timedelta(hours=2), "", "", 0, "", "", "", ""),
    ]
    assert [tuple(one)[:6] for one in known.overrides] == [
        ("node-5", "exclude", NOW, "ada", "ecc", NOW + timedelta(days=1)),
        ("node-6", "trust", NOW, "ada", "", None),
    ]
    assert exclude.our_exclusions(run.nodes, "88") == {"node-3", "node-5"}


def test_a_local_job_stays_readable(tmp_path: Path) -> None:
    lay("local-job", tmp_path / "job.json")
    lay("local-state", tmp_path / "state.json")
    assert local.read_job(tmp_path) == local.LocalJob(
        *("gpt", "ftsupervise:gpt:115a116421f0", 10, "vm", "/home/ada/gpt", "/home/ada/gpt/runs/gpt/logs/%x-%A_%a.out"),
        limit=600.0,
        lead=300.0,
        submitted=1795393381.4125447,
    )
    assert local.read_state(tmp_path) == local.LocalState(
        9460, 1326717, 1, JobState.RUNNING, 1795393381.4788451, 1795393981.4788451
    )


def test_what_the_watchdogs_remember_stays_readable(run: RunDir) -> None:
    lay("watch-memory", run.watch / "memory.json")
    found = read_memory(run)
    assert found["hang"]["last"] == {"at": 1795402800.0, "age": 12.5, "phase": "train", "bound": 600.0}
    assert found["disk"] == {"/scratch/ada/a very  odd name": {"_at": 1795402800.0, "lost": False}}
    write_memory(run, found)
    assert (run.watch / "memory.json").read_bytes() == (GOLDEN / "watch-memory.json").read_bytes()
    (run.watch / "memory.json").write_text('{"watchdogs": {"hang": 7, "loss": {"past": [2.5]}}}')
    assert read_memory(run) == {"loss": {"past": [2.5]}}, "damage costs one watchdog its memory"


def test_the_directories_that_a_host_remembers_stay_readable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    remember({"first": "/there"})
    (page,) = (path for path in tmp_path.rglob("*.json") if "there" in path.read_text())
    shutil.copyfile(GOLDEN / "watch-runs.json", page)
    assert directories() == {"gpt": "/home/ada/gpt/runs/gpt", "größe": "/scratch/ada/grö  ße"}
    remember({"gpt": "/elsewhere"})
    assert directories() == {"gpt": "/elsewhere", "größe": "/scratch/ada/grö  ße"}
    page.write_text('{"runs": {"gpt": ["/"], "other": "/else"}}')
    assert directories() == {"other": "/else"}


class Colour(Enum):
    RED = "red"
    FIVE = 5


class Level(IntEnum):
    LOW = 0  # a false one
    HIGH = 1


class Inner(NamedTuple):
    at: datetime
    size: int = 7


class Outer(NamedTuple):
    name: str
    step: int | None
    inner: Inner | None = None
    items: tuple[Inner, ...] = ()
    facts: Mapping[str, str] = MappingProxyType({})
    path: Annotated[str, 1000] = ""
    share: float = 0.5
    wait: timedelta | None = None
    colour: Colour = Colour.RED
    level: Level = Level.HIGH
    sure: bool = False
    late: bool | None = None


WHOLE = Outer(
    *("gpt", 3, Inner(NOW), (Inner(NOW, 1), Inner(NOW, 2)), {"a": "b"}, "p" * 900, 0.25, timedelta(seconds=90)),
    colour=Colour.FIVE,
    level=Level.LOW,
    sure=True,
)


def test_a_record_comes_back_from_its_page(tmp_path: Path) -> None:
    path = tmp_path / "page.json"
    write_json(path, WHOLE)
    assert read_record(Outer, path) == WHOLE
    assert decode(Outer, json.loads(path.read_text())) == WHOLE
    assert decode(Outer, encode(WHOLE, sparse=True)) == WHOLE
    assert encode(Inner(NOW), sparse=True) == {"at": "2026-11-21T03:00:00+00:00"}
    assert read_record(Outer, tmp_path / "none.json") is None


@pytest.mark.parametrize("bad", [[], {}, None, True, "\x1b[2J", 10**30, float("inf"), "9999-12-31", [None]])
@pytest.mark.parametrize("field", Outer._fields)
def test_a_damaged_field_costs_nothing_but_itself(field: str, bad: Any) -> None:
    page = encode(WHOLE) | {field: bad, "of a newer version": {"x": [1]}}
    found = decode(Outer, page, lenient=True)
    without: dict[str, Any] = {field: None}
    assert found._replace(**without) == WHOLE._replace(**without)
    assert "\x1b" not in repr(getattr(found, field))


def test_a_damaged_item_of_a_list_is_left_out_and_a_long_list_ends() -> None:
    page = {"items": [{"at": "never"}, encode(Inner(NOW, 4)), 7, {"at": NOW.isoformat(), "size": "x"}]}
    assert decode(Outer, page, lenient=True).items == (Inner(NOW, 4), Inner(NOW, 7))
    assert len(decode(Outer, {"items": [encode(Inner(NOW))] * 5000}, lenient=True).items) == 1000
    assert decode(Outer, {"name": "x" * 5000}, lenient=True).name == "x" * 299 + "…"


def test_a_page_without_what_makes_it_a_record_is_a_value_error() -> None:
    pages: tuple[Any, ...] = ({}, {"at": "yesterday"}, [], None, {"at": None})
    for page in pages:
        with pytest.raises(ValueError, match="no Inner"):
            decode(Inner, page, lenient=True)


@pytest.mark.parametrize("field", [name for name in Outer._fields if name != "facts"])
def test_where_damage_is_not_excused_one_damaged_field_is_a_value_error(field: str) -> None:
    with pytest.raises(ValueError, match="no Outer"):
        decode(Outer, encode(WHOLE) | {field: {"no": 1}})


def test_the_guard_and_the_quick_commands_load_no_dataclasses_for_their_records() -> None:
    probe = """from ftsupervise.rundir import heartbeat_page, launches, switches, heartbeat_page; import sys
print('dataclasses' in sys.modules)"""
    done = subprocess.run([sys.executable, "-S", "-c", probe], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "False"
