"""Which nodes are excluded: incidents that fade, a cap, failures that go with the rank, and what people say besides."""

from __future__ import annotations

import os
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.model import Attempt, Cause, CauseKind, Failure, FailureKind, NodeRanks, Standstill, ended
from ftsupervise.nodes import incidents, selector
from ftsupervise.nodes.exclude import fitting
from ftsupervise.nodes.incidents import CLEARED, EXCLUDE, TRUST, Incident, NodeHistory, Override
from ftsupervise.nodes.judging import judge, margin, seen_on
from ftsupervise.nodes.selector import against, known_as
from ftsupervise.ranks.hang_detector import HangState, HangVerdict
from ftsupervise.ranks.hang_monitor import cause_of
from ftsupervise.run.exit_analysis import blamed, hardware
from ftsupervise.rundir.ledger import over
from ftsupervise.scheduler.parse import NodeInventory
from ftsupervise.truth import RankState

NOW = datetime(2026, 11, 21, 12, tzinfo=timezone.utc)


def hours(number: float) -> datetime:
    """So many hours ago."""
    return NOW - timedelta(hours=number)


def trouble(node: str, kind: str = "killed", ago: float = 0, **more: Any) -> Incident:
    return Incident(node, kind, hours(ago), run="r", sign=kind, **{"rank": node[-1], **more})


def states(*troubles: Incident, marks: tuple[Override, ...] = (), at_most: int = 1) -> dict[str, str]:
    found = judge(NodeHistory(troubles, marks), at_most, NOW)
    return {node.name: node.state for node in found}


@pytest.mark.parametrize(
    ("troubles", "state"),
    [
        ([], None),
        ([("killed", 0)], ""),
        ([("killed", 0), ("killed", 1)], "excluded"),
        ([("killed", 11), ("killed", 11)], ""),  # 2 fall below 1.5 in ten hours
        ([("health", 0)], "excluded"),
        ([("health", 23)], "excluded"),
        ([("health", 25)], ""),
        ([("hardware", 0)], "excluded"),
        ([("node", 0)], ""),
        ([("node", 0), ("launch", 2)], "excluded"),
        ([("crashed", 0), ("crashed", 0)], ""),
        ([("memory", 0)] * 4, "excluded"),
        ([("warning", 0)] * 2, ""),
        ([("killed", 24 * 20)] * 100, None),  # what is twenty half-lives old is nothing
        ([("what a later version calls it", 0)] * 9, None),
    ],
)
def test_what_a_node_has_done_fades(troubles: list[tuple[str, float]], state: str | None) -> None:
    found = states(*(trouble("node-1", kind, ago, attempt=n) for n, (kind, ago) in enumerate(troubles)))
    assert found == ({} if state is None else {"node-1": state})


def test_it_says_until_when() -> None:
    (node,) = judge(NodeHistory((trouble("node-1", "health"),)), 1, NOW)
    assert node.until == NOW + timedelta(hours=24)
    assert not judge(NodeHistory((trouble("node-1", "health"),)), 1, NOW + timedelta(hours=24, seconds=1))[0].excluded


def test_a_clock_that_goes_ahead_makes_nothing_worse() -> None:
    (node,) = judge(NodeHistory((trouble("node-1", "health", -300),)), 1, NOW)
    assert node.score == 3


def test_never_more_than_the_cap_the_worst_first_and_who_is_left_in_is_said() -> None:
    known = NodeHistory(
        (trouble("node-1", "health", 5), trouble("node-2", "health", 1), trouble("node-3", "health", 3))
    )
    found = {node.name: node for node in judge(known, 1, NOW)}
    assert {name: node.state for name, node in found.items()} == {
        "node-2": "excluded",
        "node-3": "kept",
        "node-1": "kept",
    }
    assert found["node-3"].why.startswith("kept: at most 1 may be excluded, and node-2 did worse")
    assert set(states(*known.incidents, at_most=0).values()) == {"kept"}


@pytest.mark.parametrize(("nodes", "spares", "most"), [(1, 0, 1), (8, 0, 1), (8, 2, 2), (400, 0, 8), (400, 20, 20)])
def test_the_margin(nodes: int, spares: int, most: int) -> None:
    assert margin(nodes, spares) == most


def test_a_failure_that_goes_with_the_rank_blames_no_node() -> None:
    went = [trouble(node, rank="1", ago=n) for n, node in enumerate(["node-1", "node-1", "node-2"])]
    assert states(*went) == {}
    assert seen_on(went, went[0]) == ("node-1", "node-2")


def test_one_that_stays_with_the_node_does_whatever_rank_runs_there() -> None:
    assert states(trouble("node-1", rank="1"), trouble("node-1", rank="3")) == {"node-1": "excluded"}


def test_days_apart_it_is_not_the_same_failure_going_with_the_rank() -> None:
    old = [trouble("node-1", rank="1", ago=100 + n) for n in (1, 2)]
    new = [trouble("node-2", rank="1", ago=n) for n in (0, 1)]
    assert states(*old, *new) == {"node-2": "excluded", "node-1": ""}
    assert states(*new, *(trouble("node-3", rank="1", ago=n) for n in (3, 4))) == {}


def test_files_in_which_nothing_counts_any_more_go(tmp_path: Path) -> None:
    for name, ago in (("old", 21 * 24), ("new", 19 * 24)):
        book = incidents.IncidentLog(name)
        book.add([trouble("node-1")])
        book.write([tmp_path])
        at = hours(ago).timestamp()
        os.utime(tmp_path / "incidents" / f"{name}.json", (at, at))
    incidents.forget(tmp_path, NOW)
    assert [path.name for path in (tmp_path / "incidents").iterdir()] == ["new.json"]


@pytest.mark.parametrize("other", [{"run": "another"}, {"sign": "another failure"}, {"rank": "7"}])
def test_it_went_nowhere_when_it_was_another_run_failure_or_rank(other: dict[str, Any]) -> None:
    first = [trouble("node-1", rank="1", attempt=n) for n in (1, 2)]
    assert states(*first, trouble("node-2", rank="1")._replace(**other))["node-1"] == "excluded"


def test_running_out_of_memory_here_and_there_is_the_programs_whatever_the_rank() -> None:
    assert states(*(trouble(f"node-{n % 2}", "memory", attempt=n) for n in range(20))) == {}


def test_what_the_node_itself_witnesses_stays_where_it_is() -> None:
    assert states(*(trouble(f"node-{n}", "hardware", rank="1") for n in (1, 2)), at_most=2) == {
        "node-1": "excluded",
        "node-2": "excluded",
    }


def test_a_persons_word_goes_first_and_only_as_long_as_they_said() -> None:
    bad = trouble("node-1", "health")
    assert states(bad, marks=(Override("node-1", TRUST, NOW),)) == {"node-1": "trusted"}
    assert states(marks=(Override("node-2", EXCLUDE, hours(999)),), at_most=0) == {"node-2": "by hand"}
    assert states(marks=(Override("node-2", EXCLUDE, hours(9), until=hours(-1)),)) == {"node-2": "by hand"}
    assert states(marks=(Override("node-2", EXCLUDE, hours(9), until=hours(1)),)) == {}
    assert states(bad, marks=(Override("node-1", CLEARED, NOW),)) == {}
    assert states(bad, marks=(Override("node-1", CLEARED, hours(1)),)) == {"node-1": "excluded"}


def test_the_runs_own_word_goes_before_that_of_all_runs() -> None:
    everybodys = Override("node-1", EXCLUDE, NOW, place="/shared")
    assert states(marks=(Override("node-1", TRUST, hours(9), place="/run"), everybodys)) == {"node-1": "trusted"}
    assert states(marks=(everybodys, Override("node-1", TRUST, hours(9), place="/shared"))) == {"node-1": "by hand"}


# --------------------------------------------------------------------------------------------------------- whom it blames


Ended = tuple[Attempt, tuple[str, ...]]  # with the nodes that Slurm's lines name


def end(kind: FailureKind, cause: Cause, output: str = "") -> Ended:
    one = over(1, cause, NOW)._replace(failure=Failure(kind, "x"), exit_code=1, hardware=hardware(output))
    return one, blamed(output)


def hang(*at: tuple[str, str]) -> Ended:
    found = Cause(
        CauseKind.HANG, tuple(NodeRanks(*one) for one in at), how=Standstill.STOPPED, phase="train", waited=9.1
    )
    return end(FailureKind.HANG, found)


def rank_1(code: int) -> Cause:
    return ended(code, "node-1", "1")


OOM = Cause(CauseKind.MEMORY)
LAUNCH = "srun: error: Task launch for StepId=2.0 failed on node node-3: Communication connection failure"
ECC = "CUDA error: uncorrectable ECC error encountered"


@pytest.mark.parametrize(
    ("end", "blames"),
    [
        (end(FailureKind.CODE, rank_1(1)), None),
        (end(FailureKind.SIGNAL, rank_1(-9)._replace(left=137)), ("node-1", "killed", "1")),
        (end(FailureKind.SIGNAL, rank_1(-11)._replace(left=139)), ("node-1", "crashed", "1")),
        (end(FailureKind.SIGNAL, rank_1(139)), ("node-1", "crashed", "1")),
        (end(FailureKind.SIGNAL, rank_1(-15)._replace(left=143)), None),
        (end(FailureKind.SIGNAL, rank_1(143)), None),
        (end(FailureKind.MEMORY, OOM._replace(at=(NodeRanks("node-1", "1"),))), ("node-1", "memory", "1")),
        (end(FailureKind.MEMORY, Cause(CauseKind.HOST_MEMORY, then=rank_1(-9))), ("node-1", "memory", "1")),
        (end(FailureKind.MEMORY, OOM), None),
        (end(FailureKind.MEMORY, rank_1(1), "torch.OutOfMemoryError: CUDA out of memory"), None),
        (end(FailureKind.HANG, rank_1(-6), "Watchdog caught collective operation timeout"), ("node-1", "crashed", "1")),
        (end(FailureKind.HANG, rank_1(1), "Watchdog caught collective operation timeout"), None),
        (hang(("node-1", "1")), ("node-1", "hang", "1")),
        (end(FailureKind.CODE, rank_1(1), ECC), ("node-1", "hardware", "1")),
        (end(FailureKind.NODE, Cause(CauseKind.LAUNCH), LAUNCH), ("node-3", "launch", "")),
        (end(FailureKind.DISK, rank_1(1), "No space left on device"), None),
        (end(FailureKind.SIGNAL, Cause(CauseKind.SIGNAL, signal=9)), None),  # by whom, nobody knows
    ],
)
def test_whom_a_failure_speaks_against(end: Ended, blames: tuple[str, str, str] | None) -> None:
    assert [one[:3] for one in against(*end, {})] == ([blames] if blames else [])


def test_the_words_of_a_hang_agree_in_number_and_name_no_step_or_phase_that_is_not_known() -> None:
    one, two = NodeRanks("node-1", "2"), NodeRanks("node-2", "0-1")
    hang = Cause(CauseKind.HANG, (one,), how=Standstill.STOPPED, waited=6.0)
    assert hang.hang_words() == "rank 2 on node-1 is stopped; no progress for 6.0 s"
    told = hang._replace(phase="load")
    assert told.hang_words() == "rank 2 on node-1 is stopped; no progress for 6.0 s before the first step (load)"
    for at, how, words in (
        ((two,), Standstill.GONE, "ranks 0-1 on node-2 are gone"),
        ((one, two), Standstill.BUSY, "rank 2 on node-1, ranks 0-1 on node-2 use CPU and make no step"),
        ((one,), Standstill.BUSY, "rank 2 on node-1 uses CPU and makes no step"),
        ((two,), Standstill.IDLE, "ranks 0-1 on node-2 make no step"),
    ):
        assert hang._replace(at=at, how=how).hang_words() == f"{words}; no progress for 6.0 s"


def test_a_hang_of_ranks_on_two_nodes_speaks_against_both() -> None:
    odd = tuple(RankState(rank, node, 30, "train", 0, 0, 0) for rank, node in ((2, "node-1"), (5, "node-2")))
    verdict = HangVerdict(HangState.HUNG, "train", 30, waited=9.1, outliers=odd, how=Standstill.STOPPED)
    words = "hang: rank 2 on node-1, rank 5 on node-2 are stopped; no progress for 9.1 s at step 30 (train)"
    found = against(*end(FailureKind.HANG, cause_of(verdict)), {})
    assert found == [("node-1", "hang", "2", words), ("node-2", "hang", "5", words)]


def test_several_ranks_of_one_node_are_one_trouble_of_it() -> None:
    """Or one hang would weigh as two, and the node would be excluded for it."""
    assert [one[:3] for one in against(*hang(("node-1", "2"), ("node-1", "3")), {})] == [("node-1", "hang", "2,3")]


def test_a_rank_whose_node_is_not_known_speaks_against_no_node() -> None:
    assert against(*hang(("", "2")), {}) == []
    assert [one[0] for one in against(*hang(("", "2"), ("node-2", "5")), {})] == ["node-2"]


def test_a_host_that_torchrun_names_with_its_domain_is_slurms_node() -> None:
    nodes = ("gpu-1", "gpu-2.lab")
    names = ["gpu-1.example.org", "gpu-2.lab", "gpu-3.example.org", "gpu-1"]
    assert [known_as(name, nodes) for name in names] == ["gpu-1", "gpu-2.lab", "gpu-3.example.org", "gpu-1"]


def test_a_node_that_went_away_is_blamed_and_not_the_rank_that_died_of_it() -> None:
    found = against(*end(FailureKind.NODE, rank_1(-9)), {"node-2": "down*"})
    assert [one[:2] for one in found] == [("node-2", "node")]


# ----------------------------------------------------------------------------------------------------------------- room

H100 = {node: frozenset({"h100", "ib"} if node in "abz" else {"a100"}) for node in "abcdz"}
ROOM = NodeInventory(frozenset("abcdz"), {"gpu": frozenset("abc"), "big": frozenset("abcd")}, features=H100)


@pytest.mark.parametrize(
    ("wanted", "theirs", "needed", "partitions", "chosen"),
    [
        ("ab", "", 2, ["gpu"], "a"),
        ("ab", "c", 2, ["gpu"], ""),
        ("ab", "", 2, ["gpu", "big"], "ab"),  # the larger one holds it
        ("ab", "", 3, ["gpu"], ""),
        ("az", "", 2, ["gpu"], "az"),  # z is not in it, or down: nothing is lost
        ("xa", "", 2, ["gpu"], "a"),  # Slurm knows no x and would refuse the whole list
    ],
)
def test_the_partition_must_still_hold_the_job(
    wanted: str, theirs: str, needed: int, partitions: list[str], chosen: str
) -> None:
    assert fitting([*wanted], [*theirs], needed, partitions, ROOM) == [*chosen]


@pytest.mark.parametrize(
    ("features", "chosen"),
    [("", ["a", "b"]), ("h100", ["a"]), ("h100&ib", ["a"]), ("a100", ["a", "b"]), ("a|b", ["a", "b"])],
)
def test_only_nodes_that_have_what_the_job_asks_for_are_room(features: str, chosen: list[str]) -> None:
    assert fitting(["a", "b"], [], 1, ["gpu"], ROOM, features) == chosen


# --------------------------------------------------------------------------------------------------------- health command


@pytest.mark.parametrize(
    ("code", "word"),
    [(0, "ok"), (1, "warning"), (2, "critical"), (3, "unknown"), (127, "unknown"), (-9, "unknown"), (None, "no answer"),
     (124, "no answer")],
)  # fmt: skip
def test_what_the_exit_code_of_a_health_command_says(code: int | None, word: str) -> None:
    assert selector.answer(code, "GPU 3 \x1b[31mhot\nmore").word == word


def test_where_it_ends_nowhere_no_node_is_at_fault() -> None:
    hangs = selector.HealthAnswer(selector.NO_ANSWER)
    assert {one.word for one in selector.judged({"a": hangs, "b": hangs}).values()} == {"unknown"}
    assert selector.judged({"a": hangs, "b": selector.HealthAnswer(selector.OK)})["a"].unfit


def test_answers_are_told_apart_however_the_lines_of_the_tasks_mix() -> None:
    said = "1: hot\n0: \n0: ftsupervise-health 0 node-0\n 1: ftsupervise-health 1 node-1\nsrun: error: something\n"
    assert selector.parse(said) == {
        "node-0": selector.HealthAnswer("ok"),
        "node-1": selector.HealthAnswer("warning", "hot"),
    }


# ---------------------------------------------------------------------------------------------------------------- files


def test_each_writer_has_its_own_file_and_all_are_read_together(tmp_path: Path) -> None:
    run, shared = tmp_path / "run", tmp_path / "shared"
    one, other = incidents.IncidentLog("r.88_1.node-0.12.99"), incidents.IncidentLog("s/../../x")
    for ago in (0, 1):
        one.add([trouble("node-1", ago=ago)])
        assert one.write((run, shared)) == ()
    other.add([trouble("node-2")])
    assert other.write((tmp_path / "other", shared)) == ()
    assert len(incidents.read([run]).incidents) == 2
    assert len(incidents.read([run, shared]).incidents) == 3, "what lies in both counts once"
    assert sorted(path.name for path in (shared / "incidents").iterdir()) == [
        "r.88_1.node-0.12.99.json",
        "s_.._.._x.json",
    ]


def test_touch_excludes_and_what_is_odd_is_told_and_not_obeyed(tmp_path: Path) -> None:
    for word in ("exclude", "incidents"):
        (tmp_path / word).mkdir()
    (tmp_path / "exclude" / "node-7").touch()
    (tmp_path / "exclude" / "node 8").touch()
    (tmp_path / "exclude" / "node-9").symlink_to("/etc/passwd")
    (tmp_path / "exclude" / "node-10").mkdir()
    (tmp_path / "incidents" / "half.json").write_text('{"incidents": [')
    (tmp_path / "incidents" / "odd.json").write_text(
        '{"incidents": [1, {"node": "../x", "at": "2026-11-21"}, {"node": "a"}]}'
    )
    known = incidents.read([tmp_path])
    assert [mark.node for mark in known.overrides] == ["node-7"]
    assert len(known.problems) == 4
    assert known.incidents == ()


def test_a_place_that_cannot_be_written_is_said_and_no_more(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    book = incidents.IncidentLog("w")
    book.add([trouble("node-1")])
    (problem,) = book.write((tmp_path / "file", tmp_path / "run"))
    assert "cannot write" in problem
    assert incidents.read([tmp_path / "run"]).incidents
