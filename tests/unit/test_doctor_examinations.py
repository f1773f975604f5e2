"""The examinations of ``doctor`` are pure: what no test can plant (a clock, a closed port, a slow disk) is given as seen."""

from __future__ import annotations

import os
import sys
import time
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise import host
from ftsupervise.config.load import load
from ftsupervise.doctor.examinations import RUN_DIRECTORY, examine
from ftsupervise.doctor.seen import MemorySeen, NodeSeen, PlaceSeen, PythonSeen, ScriptSeen, Sights, TrialSeen
from ftsupervise.doctor.sights import ToExamine, look
from ftsupervise.doctor.trial import options_of
from ftsupervise.probe import NotSeen, Probe
from ftsupervise.scheduler import LOCAL
from ftsupervise.scheduler.cluster import parse_limits, parse_node_hosts, parse_partitions, parse_settings
from ftsupervise.truth import Health

PLACE = PlaceSeen("/scratch/r", True, "/scratch/r", "", False, "", "", "", None, 0.0)
PYTHON = PythonSeen("/env/bin/python", "3.11.7", "1.0")
TRIAL = TrialSeen(
    job="7",
    host="node-0",
    python=PYTHON,
    place=PLACE,
    memory=MemorySeen(50 << 30, 100 << 30, 50 << 30),
    switch_after=1.2,
    ahead=0.1,
    signal_lead=30.0,
    nodes=(NodeSeen("node-0", True, 0.0, ""), NodeSeen("node-1", True, 0.0, "")),
)


def sights(**more: Any) -> Sights:
    return Sights(**{"slurm": True, "here": "login-1", "version": "1.0", "script": ScriptSeen(uses_guard=True), **more})


def wrong(seen: Sights) -> list[tuple[str, str]]:
    """Subject and advice of each line that is wrong; each has advice."""
    found = [(one.about, one.do) for one in examine(seen, None) if one.health is Health.BAD]
    assert all(do for _, do in found)
    return found


def test_a_trial_in_which_all_is_well_has_nothing_wrong() -> None:
    assert wrong(sights(trial=TRIAL)) == []


@pytest.mark.parametrize(
    ("seen", "about", "advice"),
    [
        ({"signal_lead": None}, "signal", "--signal"),
        ({"switch_after": None}, "switch", "run_dir"),
        ({"switch_after": 60.0}, "switch", "acregmax"),
        ({"ahead": -9.0}, "job's clock", "chronyc"),
        ({"nodes": (NodeSeen("node-1", False, 0.0, ""),)}, "nodes", "run_dir"),
        ({"nodes": (NodeSeen("node-1", True, 0.0, "10.0.0.1:9: timed out"),)}, "ports", "NCCL_SOCKET_IFNAME"),
        ({"python": PYTHON._replace(version="3.8.1")}, "job's python", "newer"),
        ({"place": PLACE._replace(trouble="rename: Permission denied")}, "run directory on node-0", "run_dir:"),
        ({"memory": MemorySeen(1 << 30, 100 << 30, 50 << 30)}, "memory", "launch.mem"),
        ({"memory": MemorySeen(50 << 30, 100 << 30, 64 << 20)}, "/dev/shm", "--shm-size"),
    ],
)
def test_what_the_trial_found_wrong_is_told_with_what_to_type(seen: dict[str, Any], about: str, advice: str) -> None:
    from dataclasses import replace

    ((found, do),) = wrong(sights(trial=replace(TRIAL, **seen)))
    assert found == about and advice in do


def test_a_clock_of_the_file_server_that_is_off_is_told() -> None:
    ((about, do),) = wrong(sights(places={RUN_DIRECTORY: PLACE._replace(ahead=-40.0)}))
    assert about == "clock" and "chronyc" in do


def test_what_was_not_seen_is_neither_well_nor_wrong() -> None:
    blind = {"cluster": NotSeen("Slurm", "no answer"), "places": {RUN_DIRECTORY: NotSeen("/scratch/r", "no answer")}}
    lines = examine(sights(script=None, python=NotSeen("python", "x"), cron=NotSeen("cron", "x"), **blind), None)
    assert {one.health for one in lines} == {Health.UNKNOWN}
    assert all(one.do for one in lines)


def test_a_python_that_was_not_done_in_time_is_not_called_broken() -> None:
    late = PythonSeen("python", "", "", "no answer within 6 s", late=True)
    (line,) = (one for one in examine(sights(python=late), None) if one.about == "python")
    assert line.health is Health.UNKNOWN and line.do


def test_a_python_has_its_own_time_when_slurms_commands_have_used_up_theirs(tmp_path: Path) -> None:
    slow = tmp_path / "python"
    slow.write_text(f'#!/bin/sh\nsleep 1.5\nexec {sys.executable} "$@"\n')
    slow.chmod(0o755)
    (tmp_path / "ftsupervise.yaml").write_text(f"name: x\nlaunch: {{command: {slow} train.py}}\n")
    asked = ToExamine(load(tmp_path / "ftsupervise.yaml"), tmp_path, LOCAL, True, os.environ)
    before, host.answer_by = host.answer_by, time.monotonic()
    try:
        with Probe() as probe:
            found = look(asked, datetime.now(timezone.utc), probe, lambda _: None)
    finally:
        host.answer_by = before
    assert isinstance(found.python, PythonSeen) and not found.python.trouble and not found.python.late


def test_the_python_that_a_job_was_asked_is_not_unseen_any_more() -> None:
    lines = examine(sights(python=NotSeen("python", "a job has it"), trial=TRIAL), None)
    assert "python" not in {one.about for one in lines} and "job's python" in {one.about for one in lines}


def test_the_trial_has_the_options_of_a_member_but_for_its_size_its_time_and_its_name() -> None:
    given = {
        "job-name": "thesis",
        "comment": "ftsupervise:thesis:abc",
        "array": "1-10%1",
        "nodes": "64",
        "no-kill": None,
        "time": "1-0",
        "signal": "B:USR1@600",
        "partition": "gpu",
        "gpus-per-node": "8",
        "account": "physics",
        "mail-type": "ALL",
    }
    found = options_of(given, 2, Path("/scratch/.tmp-doctor-1"), "abc")
    theirs = {"partition": "gpu", "gpus-per-node": "8", "account": "physics"}
    assert found.items() >= {"nodes": "2", "time": "1", "signal": "B:USR1@30", **theirs}.items()
    assert not {"array", "no-kill", "mail-type"} & found.keys()
    assert not str(found["comment"]).startswith("ftsupervise:")


# ------------------------------------------------------------------------------------------- what the cluster answers

SHOWN = """Configuration data as of 2026-11-27T16:00:00
KillWait                = 30 sec
MaxArraySize            = 1001
OverTimeLimit           = UNLIMITED
PreemptMode             = REQUEUE
PreemptType             = preempt/qos
PrivateData             = jobs,usage
SlurmdTimeout           = 300 sec
SLURM_VERSION           = 24.11.5
"""


def test_settings_are_read_as_scontrol_prints_them() -> None:
    found = parse_settings(SHOWN)
    assert (found.kill_wait, found.slurmd_timeout, found.most_of_an_array) == (30, 300, 1001)
    assert found.over_time_limit is None and found.private == {"jobs", "usage"} and found.version == "24.11.5"
    assert found.preempts and not found.warns_the_preempted and not found.has_accounting
    assert parse_settings(SHOWN + "SlurmctldParameters = preempt_send_user_signal\n").warns_the_preempted
    empty = parse_settings("")
    assert (empty.kill_wait, empty.slurmd_timeout, empty.most_of_an_array, empty.over_time_limit) == (30, 300, 1001, 0)
    assert empty.requeues and not empty.preempts and empty.private == frozenset()


def test_partitions_nodes_and_limits_are_read() -> None:
    shown = (
        "PartitionName=gpu Default=YES MaxNodes=8 MaxTime=1-00:00:00 State=UP TotalNodes=16\n"
        "PartitionName=x MaxTime=UNLIMITED State=DOWN\n"
    )
    gpu, other = parse_partitions(shown)
    assert (
        gpu.default
        and gpu.up
        and gpu.time is not None
        and gpu.time.days == 1
        and (gpu.nodes, gpu.most_nodes) == (16, 8)
    )
    assert not other.up and other.time is None and other.most_nodes is None
    first, second = parse_node_hosts("gpu*|n1|host-1|idle\ngpu*|n2|host-2|drained\n")
    assert (first.partition, first.host, first.takes_jobs) == ("gpu", "host-1", True) and not second.takes_jobs
    limits = parse_limits("physics||normal|||\n", "normal|00:20:00||2\nother|||1\n")
    assert [(one.whose, one.submitted) for one in limits] == [("account physics", None), ("QOS normal", 2)]
