"""What the benchmark of replica groups plays and prints, and what its page says about it. Pure."""

from __future__ import annotations

import shlex
from pathlib import Path

from benchmarks.replicas import losses, timeline
from benchmarks.replicas.faults import arguments, plan, table
from benchmarks.replicas.scene import KILL, LAUNCHERS, LIGHTHOUSE, ONCE, Fault, Played
from tests.manual.blocks import marked

ROOT = Path(__file__).parents[2]


def test_all_launchers_meet_the_same_faults_as_far_as_they_have_what_is_hit() -> None:
    ours, whole, alone = (plan(one, 2, 7) for one in LAUNCHERS)
    assert ours == alone
    assert whole == [one for one in ours if one[0] != LIGHTHOUSE]
    kinds = [kind for kind, _ in ours]
    assert tuple(kinds[-len(ONCE) :]) == ONCE and not set(kinds[: -len(ONCE)]) & set(ONCE), "each takes a spare node"
    assert len({group for kind, group in ours if kind in ONCE} - {"g000"}) == len(ONCE)


def test_the_stall_is_shown_beside_ours_of_the_same_run() -> None:
    ours = Played("groups", [Fault(KILL, "g001", 0.0, stall=1.0, back=2.0, lost=1)], effective=0.9)
    whole = Played("whole", [Fault(KILL, "g001", 0.0, stall=3.0, back=3.0, lost=10)], effective=0.6)
    rows = [line.split() for line in table([ours, whole]).splitlines()]
    assert ["1", "3.00", "3.0", "3.00", "10"] in [row[-5:] for row in rows]


def test_the_commands_its_page_shows_are_taken() -> None:
    for block in marked("run", "replica-faults"):
        for line in block.text.splitlines():
            words = shlex.split(line, comments=True)
            assert words[:2] == ["python", "benchmarks/replicas/faults.py"]
            assert set(arguments(words[2:]).launchers.split(",")) <= {one.mode for one in LAUNCHERS}


def test_the_commands_of_the_other_two_are_taken() -> None:
    known = {"replica-losses": losses, "replica-timeline": timeline}
    for name, benchmark in known.items():
        blocks = marked("run", name)
        assert blocks, name
        for line in blocks[0].text.splitlines():
            words = shlex.split(line, comments=True)
            assert benchmark.__file__ is not None
            assert words[1] == str(Path(benchmark.__file__).relative_to(ROOT))
            benchmark.arguments(words[2:])
