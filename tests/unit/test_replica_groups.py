"""The replica groups of a run: their settings, their directories, their nodes, and what their ranks are given."""

from __future__ import annotations

from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import click
import pytest
from click.testing import CliRunner
from pydantic import ValidationError

from ftsupervise.cli.groups import groups
from ftsupervise.cli.logs import logs
from ftsupervise.cli.run import run as run_command
from ftsupervise.cli.run import values_typed
from ftsupervise.config.grouping import GROUP_SETTINGS
from ftsupervise.config.schema import Launch
from ftsupervise.errors import NotFound, UsageError
from ftsupervise.host.ownership import NotTrusted
from ftsupervise.model import Claim
from ftsupervise.replicas.bounds import derive, environment_of, for_group, on_its_nodes
from ftsupervise.replicas.disk import note_stop, why_over
from ftsupervise.replicas.options import GroupOptions, options_of_groups, read_settings
from ftsupervise.replicas.table import (
    GroupState,
    GroupTable,
    QuorumPage,
    ReplicaGroup,
    choose_nodes,
    find_group,
    first_nodes,
    name_of,
    read_quorum,
    read_table,
    slower_one,
    write_quorum,
    write_table,
)
from ftsupervise.rundir import fence
from ftsupervise.rundir.paths import RunDir
from ftsupervise.rundir.switches import KILL, raise_switch, read_stopped, read_switch

NODES = ("node-1", "node-2", "node-3", "node-4", "node-5")


def launch(groups: str) -> Launch:
    return Launch.model_validate_json(f'{{"command": "python train.py", "replica_groups": {groups}}}')


def test_fewer_than_half_of_the_groups_never_train_on_alone() -> None:
    assert launch('{"count": 4}').replica_groups.least == 3  # type: ignore[union-attr]
    assert launch('{"count": 5, "min": 4}').replica_groups.least == 4  # type: ignore[union-attr]
    with pytest.raises(ValidationError, match="two halves could train apart; write 3 or more"):
        launch('{"count": 4, "min": 2}')
    with pytest.raises(ValidationError, match="the run would wait for ever"):
        launch('{"count": 4, "min": 5}')


def test_the_nodes_of_a_group_are_said_in_one_place() -> None:
    with pytest.raises(ValidationError, match=r"write replica_groups\.nodes_each"):
        Launch.model_validate_json('{"command": "x", "nodes": 4, "replica_groups": {"count": 4}}')


def test_a_group_has_its_own_ledger_and_the_switches_of_its_run() -> None:
    run = RunDir("/scratch/train")
    group = run.group("g002")
    assert group.attempts == Path("/scratch/train/groups/g002/attempts")
    assert (group.switches, group.finished, group.launches) == (run.switches, run.finished, run.launches)
    assert group.checkpoints == run.checkpoints
    assert RunDir("/scratch/groups/train").whole is None, "a run may lie in any folder"


def test_a_group_is_found_by_its_name_and_by_nothing_else(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    (tmp_path / "groups" / "g001").mkdir(parents=True)
    (tmp_path / "groups" / "notes").mkdir()
    assert run.group_names() == ["g001"]
    assert find_group(run, "g001").root == run.group("g001").root
    for name in ("notes", "../groups/g001", "g1", ""):
        with pytest.raises(UsageError, match="is no group"):
            find_group(run, name)
    with pytest.raises(NotFound) as error:
        find_group(run, "g002")
    assert error.value.hint == "it has g001"


def test_a_page_of_the_groups_that_a_stranger_may_write_is_not_believed(tmp_path: Path) -> None:
    """It could have a group ended as hung, or keep one that hangs."""
    run = RunDir(tmp_path)
    run.replicas.mkdir()
    write_quorum(run, QuorumPage(waits=True))
    assert read_quorum(run) == QuorumPage(waits=True)
    (run.replicas / "quorum.json").chmod(0o666)
    assert read_quorum(run) is None


def test_a_group_keeps_its_nodes_and_takes_a_spare_for_the_lost_one() -> None:
    assert first_nodes(NODES, 2, 2) == {"g000": ("node-1", "node-2"), "g001": ("node-3", "node-4")}
    assert choose_nodes(("node-1", "node-2"), ("node-5",), 2, {"node-2"}) == ("node-1", "node-5")
    free = ("node-1", "node-2", "node-5")  # its own are among them
    assert choose_nodes(("node-1", "node-2"), free, 2, {"node-2"}) == ("node-1", "node-5"), "and none is taken twice"
    assert choose_nodes(("node-1", "node-2"), free, 2, (), {"node-1": 0.5}) == ("node-2", "node-5")
    assert choose_nodes(("node-1", "node-2"), free[:2], 2, {"node-2"}) is None
    assert choose_nodes(("node-1",), (), 1, ()) == ("node-1",)
    assert choose_nodes(("node-1",), (), 1, {"node-1"}) is None


def test_a_node_with_a_bad_past_is_used_when_there_is_no_better_one() -> None:
    scores = {"node-1": 2.0, "node-5": 1.0}
    assert choose_nodes(("node-1",), ("node-5", "node-4"), 1, (), scores) == ("node-4",)
    assert choose_nodes(("node-1",), ("node-5",), 1, (), scores) == ("node-5",)
    assert choose_nodes(("node-1",), (), 1, (), scores) == ("node-1",)


def test_the_table_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.replicas.mkdir()
    table = GroupTable(wanted=2, least=2, groups=(ReplicaGroup("g000", GroupState.RUNNING, nodes=("node-1",), step=7),))
    write_table(run, table)
    assert read_table(run) == table
    (run.replicas / "groups.json").write_text('{"groups": [')
    assert read_table(run) is None


def test_the_group_that_is_slower_than_the_others_is_named() -> None:
    groups = [ReplicaGroup(name_of(number), GroupState.RUNNING, seconds=0.5) for number in range(3)]
    assert slower_one(groups) == ""
    assert slower_one([*groups, ReplicaGroup("g003", GroupState.RUNNING, seconds=1.2)]) == (
        "g003 takes 1.2 s for a step, the others 0.5 s"
    )
    assert slower_one([*groups, ReplicaGroup("g003", GroupState.WAITING, seconds=1.2)]) == ""


def test_two_groups_share_no_port_and_no_attempt() -> None:
    outer = {
        "MASTER_PORT": "29500",
        "TORCHFT_MANAGER_PORT": "1",
        "FTSUPERVISE_ATTEMPT": "3",
        "RUST_LOG": "info",
        "A": "b",
    }
    given = environment_of(2, 4, 3, "http://node-1:29510", derive(1.0), 1.0, "87")
    env = for_group(outer, given)
    assert not {"MASTER_PORT", "TORCHFT_MANAGER_PORT", "FTSUPERVISE_ATTEMPT"} & env.keys()
    assert (env["REPLICA_GROUP_ID"], env["NUM_REPLICA_GROUPS"], env["TORCHFT_LIGHTHOUSE"]) == (
        "g002",
        "4",
        "http://node-1:29510",
    )
    assert (env["RUST_LOG"], env["TOKIO_WORKER_THREADS"], env["A"]) == ("info", "2", "b")
    assert int(env["TORCHFT_QUORUM_RETRIES"]) > 0


def test_a_group_sees_only_its_own_nodes_of_the_job() -> None:
    env = {
        "SLURM_JOB_ID": "7",
        "SLURM_JOB_NODELIST": "node-[1-5]",
        "SLURM_NNODES": "5",
        "SLURM_TASKS_PER_NODE": "1(x5)",
    }
    seen = on_its_nodes(env, ("node-2", "node-3"))
    assert (seen["SLURM_JOB_NODELIST"], seen["SLURM_NNODES"]) == ("node-[2-3]", "2")
    assert "SLURM_TASKS_PER_NODE" not in seen
    assert on_its_nodes({"A": "b"}, ()) == {"A": "b"}


def test_a_group_that_starts_again_seals_nothing_of_another_group(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    areas = []
    for name in ("g000", "g001"):
        group = run.group(name)
        group.attempts.mkdir(parents=True)
        areas.append(fence.staging(group, group.checkpoints))
    first, other = (fence.open_area(folder, 1) for folder in areas)
    assert first is not None and other is not None and areas[0] != areas[1] != fence.staging(run, run.checkpoints)
    fence.seal(areas[1], 2, [1])
    assert fence.is_sealed(other) and not fence.is_sealed(first)


def test_logs_of_a_run_whose_jobs_have_written_nothing_names_its_groups_and_the_place_of_the_run(
    tmp_path: Path,
) -> None:
    (tmp_path / "switches").mkdir()
    for name in ("g000", "g001"):
        (tmp_path / "groups" / name).mkdir(parents=True)
    done = CliRunner().invoke(logs, [str(tmp_path)])
    assert f"g000 to g001: ftsupervise logs --group g000 {tmp_path}" in done.output
    assert isinstance(done.exception, NotFound)
    assert done.exception.message.endswith(f"there is no {tmp_path}/logs/*")


def test_a_member_without_the_number_of_groups_is_a_mistake_of_who_typed_it(tmp_path: Path) -> None:
    typed = ["member", "--number", "0", "--run-dir", str(tmp_path), "--name", "r", "true"]
    found = CliRunner().invoke(groups, typed).exception
    assert isinstance(found, UsageError) and "--count" in str(found)


def asked_of(root: Path, *typed: str, **values: Any) -> GroupOptions:
    every = {one.parameter: one.unset for one in GROUP_SETTINGS}
    given = {**every, "count": 4, "launched": "t0", **values}
    return options_of_groups(RunDir(root), "tr11", given, values_typed(typed), ["python", "train.py"])


def read_by_its_supervisor(asked: GroupOptions, number: int) -> dict[str, Any]:
    page = str(asked.prepare(number))
    words = asked.supervisor(number, asked.command)
    assert words[words.index("--settings") + 1] == page
    return run_command.make_context("run", words[words.index("run") + 1 :]).params


def test_what_is_typed_for_each_group_reaches_its_supervisor_as_if_it_had_been_typed_there(tmp_path: Path) -> None:
    typed = ["--in-place", "9", "--budget", "node=20", "--budget", "memory=1", "--warm", "off", "--warning", "TERM@600"]
    here = run_command.make_context("run", [*typed, "--", "python", "train.py"]).params
    there = read_by_its_supervisor(asked_of(tmp_path, *typed, lighthouse="none"), 2)
    differs = {name: value for name, value in there.items() if value != here[name]}
    assert differs == {
        "run_dir": str(tmp_path / "groups" / "g002"),
        "name": "tr11-g002",
        "launched": "t0",
        "nodes_dir": str(tmp_path / "nodes"),
    }


def test_the_bounds_of_a_hang_follow_from_the_timeouts_but_for_those_that_are_typed(tmp_path: Path) -> None:
    found = read_by_its_supervisor(asked_of(tmp_path, "--hang-start=77", "--nodes-dir", "/shared/nodes"), 0)
    assert (found["hang"], found["hang_unknown"], found["hang_start"]) == (12.0, 300.0, 77.0)
    assert (found["snapshot_every"], found["nodes_dir"]) == ("off", "/shared/nodes"), "the copies are the other groups"
    assert read_by_its_supervisor(asked_of(tmp_path, "--hang", "off"), 0)["hang"] == "off"


def test_a_setting_that_no_supervisor_takes_is_refused_before_a_group_starts(tmp_path: Path) -> None:
    wrong = [["--in-place", "many"], ["--bogus"], ["--name", "x"]]
    for words in wrong:
        with pytest.raises(click.UsageError, match=r"many|--bogus|--name is set for each group"):
            asked_of(tmp_path, *words)


def test_a_page_of_settings_that_others_may_write_is_not_read(tmp_path: Path) -> None:
    """It names the shell code of the health check."""
    page = asked_of(tmp_path).prepare(1)
    assert read_settings(page)["launched"] == "t0"
    page.chmod(0o666)
    with pytest.raises(NotTrusted):
        read_settings(page)
    page.unlink()
    with pytest.raises(NotFound):
        read_settings(page)


def test_who_has_stopped_all_groups_and_why_is_said_as_of_any_run(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.switches.mkdir()
    assert why_over(run) == ""
    now = datetime(2026, 11, 28, tzinfo=timezone.utc)
    raise_switch(run, KILL, who="ada on login-1", host="login-1", why="new data", now=now)
    run.attempt(1).mkdir(parents=True)
    note_stop(run, Claim(1, run.attempt(1)), 0, why_over(run), 70)
    by = read_switch(run, KILL).who
    assert by and read_stopped(run.attempt(1)).reason == f"kill switch: raised by {by}: new data"
