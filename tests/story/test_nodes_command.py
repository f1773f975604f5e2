"""``ftsupervise nodes`` as people type it, and the health command on a machine without Slurm."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from contextlib import closing
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.nodes import incidents
from ftsupervise.rundir.ledger import ledger
from ftsupervise.rundir.paths import RunDir
from tests.neighbours.supervised import SupervisedRun
from tests.neighbours.typed import typed

HERE = os.uname().nodename
Type = Callable[..., str]


@pytest.fixture
def rundir(tmp_path: Path) -> RunDir:
    run = RunDir(tmp_path / "runs" / "tr11")
    run.switches.mkdir(parents=True)
    return run


@pytest.fixture
def type_it(tmp_path: Path, rundir: RunDir) -> Type:
    """Types a command in the run's directory; what it says, and its exit code is the one expected."""
    (tmp_path / "ftsupervise.yaml").write_text("name: tr11\nscheduler: local\nlaunch: {command: sleep 1}\n")

    def one(*words: str, code: int = 0) -> str:
        env = {k: v for k, v in os.environ.items() if not k.startswith(("SLURM_", "FTSUPERVISE_RUN"))} | {
            "PATH": "/bin"
        }
        done = typed(*words, folder=tmp_path, env=env, code=code)
        return done.stdout + done.stderr

    return one


def ran(rundir: RunDir, *options: str, code: int, command: str = "exit 0") -> str:
    """The job ring on this machine; what it said."""
    rundir.root.parent.mkdir(parents=True, exist_ok=True)
    with closing(SupervisedRun(rundir.root, rundir.root.parent)) as run:
        one = run.start(*options, "--", "sh", "-c", command)
        assert one.wait(120) == code, one.said()
        return one.said()


def troubled(rundir: RunDir, *nodes: str, kind: str = "health", **ago: float) -> None:
    book = incidents.IncidentLog("r." + "-".join(nodes))
    at = datetime.now(timezone.utc) - timedelta(**ago)
    book.add(incidents.Incident(node, kind, at, "tr11", evidence=f"critical: {node} is hot") for node in nodes)
    assert book.write([rundir.nodes]) == ()


def test_it_lists_who_is_avoided_first_and_why(type_it: Type, rundir: RunDir) -> None:
    assert "no node has incidents that count" in type_it("nodes")
    troubled(rundir, "node-1", "node-2", minutes=1)
    troubled(rundir, "node-3", kind="killed", hours=2)
    said = type_it("nodes").splitlines()
    assert said[0].startswith("node-1   3.00  excluded since ")
    assert said[0].endswith("score 3 of 1.5, one incident, the last: critical: node-1 is hot")
    assert "kept: at most 1 may be excluded, and node-1 did worse" in said[1]
    assert "used; one incident, 2h ago: critical: node-3 is hot" in said[2]
    found = json.loads(type_it("nodes", "--json"))
    assert [(node["name"], node["state"], node["excluded"]) for node in found["nodes"]] == [
        ("node-1", "excluded", True),
        ("node-2", "kept", False),
        ("node-3", "", False),
    ]
    assert found["settings"] == {"half_life": 86400.0, "exclude_at": 1.5, "at_most": 1}


def test_exclude_trust_and_clear_by_hand(type_it: Type, rundir: RunDir) -> None:
    troubled(rundir, "node-1")
    said = type_it("nodes", "exclude", "node-[7-8]", "--reason", "ECC, ticket 512", "--for", "2d")
    assert "tr11 excludes node-[7-8] until " in said
    assert "ECC, ticket 512" in type_it("nodes").splitlines()[1]
    type_it("nodes", "trust", "node-1,node-8")
    assert {n["name"]: n["state"] for n in json.loads(type_it("nodes", "--json"))["nodes"]} == {
        "node-7": "by hand",
        "node-1": "trusted",
        "node-8": "trusted",
    }
    type_it("nodes", "clear", "node-[1,7-8]")
    assert "no node has incidents that count" in type_it("nodes")
    (rundir.nodes / "exclude" / "node-9").touch()
    assert "node-9   0.00  excluded since " in type_it("nodes")


@pytest.mark.threat(
    "Somebody passes hostile node names to `nodes exclude`.",
    "The command refuses them with one sentence.",
)
@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("../../etc/passwd", "is not the name of a node"),
        ("node-1;rm", "is not the name of a node"),
        ("node-[1-", "not a host list"),
        ("node-[1-300000]", "has too many nodes"),
        ("node-[1-20000]", "20000 nodes at once"),
        ("", "is not the name of a node"),
        ("\x1b[31m", "not a host list"),
        ("n" * 300, "is not the name of a node"),
        ("-x", "no such option"),
    ],
)
def test_hostile_names_are_refused_with_a_sentence(type_it: Type, rundir: RunDir, name: str, sentence: str) -> None:
    said = type_it("nodes", "exclude", name, code=64)
    assert sentence in said.lower()
    assert "Traceback" not in said and "\x1b" not in said
    assert not rundir.nodes.exists()


def test_odd_durations_runs_and_sharing_nothing_are_said(type_it: Type) -> None:
    assert "--for: expected a duration" in type_it("nodes", "exclude", "node-1", "--for", "tomorrow", code=64)
    assert "--for: " in type_it("nodes", "exclude", "node-1", "--for", "99999999d", code=64)
    assert "tr11 shares nothing" in type_it("nodes", "exclude", "node-1", "--shared", code=64)
    type_it("nodes", "nosuchrun", code=66)


def test_runs_that_share_a_directory_learn_from_each_other(type_it: Type, rundir: RunDir, tmp_path: Path) -> None:
    shared = tmp_path / "all"
    rundir.config.write_text(f"name: tr11\nnodes: {{directory: {shared}, at_most: 5}}\n")
    book = incidents.IncidentLog("another-run")
    book.add([incidents.Incident("node-4", "hardware", datetime.now(timezone.utc), "another", evidence="Xid 79")])
    assert book.write([shared]) == ()
    assert "excluded" in type_it("nodes") and "Xid 79" in type_it("nodes")
    type_it("nodes", "exclude", "node-5", "--shared", "--reason", "for all")
    said = type_it("nodes", "clear", "node-[4-5]")
    assert "still excluded" in said and "clear --shared node-5" in said
    type_it("nodes", "clear", "--shared", "node-5")
    assert "no node has incidents that count" in type_it("nodes")


def test_what_one_run_sees_another_knows(rundir: RunDir, tmp_path: Path) -> None:
    shared, other = tmp_path / "all", RunDir(tmp_path / "runs" / "other")
    ran(rundir, "--nodes-dir", str(shared), "--health", "echo broken; exit 2", code=75)
    assert incidents.read([shared]).incidents == incidents.read([rundir.nodes]).incidents != ()
    ran(other, "--nodes-dir", str(shared), "--health", "exit 1", code=0)
    assert {one.kind for one in incidents.read([shared]).incidents} == {"health", "warning"}
    assert {one.kind for one in incidents.read([other.nodes]).incidents} == {"warning"}


def test_a_shared_directory_that_cannot_be_read_stops_no_run(rundir: RunDir, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert "cannot be read" in ran(rundir, "--nodes-dir", str(tmp_path / "file"), code=0)


def test_the_next_launch_keeps_away_and_says_why_and_its_dry_run_touches_nothing(
    type_it: Type, rundir: RunDir, tmp_path: Path
) -> None:
    troubled(rundir, "node-1")
    type_it("nodes", "exclude", "node-2", "--reason", "loud fan")
    (tmp_path / "ftsupervise.yaml").write_text("name: tr11\nlaunch: {command: sleep 1, exclude: [node-0]}\n")
    before = sorted(tmp_path.rglob("*"))
    said = type_it("launch", "--dry-run", "--scheduler", "slurm")
    assert "#SBATCH --exclude=node-0,node-2,node-1" in said
    assert "note: node-1 is excluded: score 3 of 1.5, one incident, the last: critical: node-1 is hot" in said
    assert "loud fan (ftsupervise nodes)" in said
    assert sorted(tmp_path.rglob("*")) == before


def last(rundir: RunDir) -> Any:
    return ledger(rundir)[-1]


def test_a_machine_that_fails_its_health_command_starts_nothing(rundir: RunDir, type_it: Type) -> None:
    said = ran(rundir, "--health", "echo GPU 3 is gone; exit 2", code=75)
    assert f"health command on {HERE}: critical: GPU 3 is gone" in said
    assert "not started: 0 of 1 nodes are left" in said
    failed = last(rundir).failure
    assert failed is not None and failed[:2] == ("start", "no node healthy"), "it may be the command"
    assert "critical: GPU 3 is gone" in type_it("nodes")


@pytest.mark.parametrize(
    ("health", "says"),
    [
        ("exit 0", ""),
        ("echo warm; exit 1", "warning: warm"),
        ("echo what; exit 3", "unknown: what"),
        ("no-such-command", "unknown: exit code 127"),
        ("echo before; sleep 60", "unknown: no answer within 1 s"),
    ],
)
def test_what_is_not_critical_is_told_and_the_run_starts(rundir: RunDir, health: str, says: str) -> None:
    said = ran(rundir, "--health", health, "--health-timeout", "1" if "sleep" in health else "20", code=0)
    assert (f"health command on {HERE}: {says}" in said) if says else ("health" not in said.replace("--health", ""))
    assert last(rundir).words == "exit 0"


def test_it_is_asked_after_a_failure_and_a_machine_that_has_got_ill_is_left(rundir: RunDir) -> None:
    mark = rundir.root / "ill"
    said = ran(
        rundir, "--in-place", "5", "--health", f"test ! -e {mark} || exit 2", code=3, command=f"touch {mark}; exit 3"
    )
    assert "0 of 1 nodes are left" in said
    assert len(ledger(rundir)) == 1
    assert last(rundir).then.startswith("its supervisor left: 0 of 1 nodes are left")
