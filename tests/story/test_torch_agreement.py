"""Ranks of torch.distributed leave and save at the same step by themselves, whatever happens to which of them, and when."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.torch,
    pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="torch is not installed: make test-torch"),
]
FAULTS = ("killed", "exits", "raises")
STOPS = ("kill", "USR1", "TERM", "loss")
WITHIN = 90  # steps: two leases of 32, and the polls of quick steps


class Stage:
    """Plays schedules on four ranks."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def play(self, plan: dict[str, Any]) -> dict[str, Any]:
        assert self._process.stdin is not None and self._process.stdout is not None
        print(json.dumps(plan), file=self._process.stdin, flush=True)
        answer: dict[str, Any] = json.loads(self._process.stdout.readline())
        return answer


@pytest.fixture(scope="module")
def stage() -> Iterator[Stage]:
    script = Path(__file__).with_name("agreeing_ranks.py")
    env = {**os.environ, "GLOO_SOCKET_IFNAME": "lo", "PYTHONPATH": str(script.parents[2])}
    with subprocess.Popen(
        [sys.executable, str(script)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=env
    ) as one:
        yield Stage(one)
        assert one.stdin is not None
        one.stdin.close()


def plan(**given: Any) -> dict[str, Any]:
    """A schedule in which nothing happens but what is given."""
    still = {"seed": 1, "steps": 120, "events": [], "loop": "lockstep", "store": "tcp", "first": 1, "stride": 1}
    return {**still, "pace": 0.002, "slow": False, "early": False, **given}


def faults_of(plan: dict[str, Any], answer: dict[str, Any]) -> list[str]:
    """What ought not to have happened."""
    found, said = [], [one for one in answer["said"] if one is not None]
    if "hung" in answer["ended"]:
        return ["a rank hung"]
    dead = {who for who, at, what in plan["events"] if what in FAULTS and at < plan["steps"]}
    dead = {who for who in dead if answer["ended"][who] != 0}
    alive = [one for rank, one in enumerate(answer["said"]) if rank not in dead and one is not None]
    if not dead:
        if answer["ended"] != [0] * len(answer["ended"]):
            found.append("a rank failed")
        # ranks that never meet may end more than 3 s apart, and the store ends with rank 0
        if any(one["lost"] for one in alive) and (plan["loop"], plan["store"]) != ("apart", "tcp"):
            found.append("the agreement was lost")
    together = [one for one in alive if not one["lost"]]
    if len({(one["end"], one["made"]) for one in together if one["end"] in ("stopped", "finished")}) > 1:
        found.append("ranks left at different steps")
    common = min((one["made"] for one in together), default=0)
    if len({json.dumps([save for save in one["saves"] if save[0] < common]) for one in together}) > 1:
        found.append("ranks saved at different steps")
    if not dead:
        raised = sum(one["raised"].count("save") for one in said)
        answered = raised - ("save-switch" in answer["up"])
        saves = sum(name == "SAVE" for _, name, _ in said[0]["saves"])
        if not answered - (said[0]["end"] == "stopped") <= saves <= answered:
            found.append(f"{raised} saves were asked for, {answered} taken down, and {saves} made")
        asked = [at for who, at, what in plan["events"] if what in STOPS]
        if plan["loop"] != "apart" and any(at + WITHIN < plan["steps"] for at in asked) and plan["pace"]:
            found += [] if said[0]["end"] == "stopped" else ["nobody stopped"]
    return found


def test_all_ranks_stop_at_the_step_that_the_signal_of_one_has_led_to(stage: Stage) -> None:
    answer = stage.play(plan(events=[[2, 20, "USR1"]]))
    said = answer["said"]
    assert faults_of(plan(), answer) == []
    assert {one["end"] for one in said} == {"stopped"} and all(one["lost"] == "" for one in said)
    assert 20 < said[0]["made"] < 20 + WITHIN
    assert "rank 2: warning signal SIGUSR1: saving and stopping at step" in answer["stderr"][0]
    assert [answer["stderr"][rank] for rank in (1, 2, 3)] == [answer["stderr"][1]] * 3, "rank 0 says it for all"


@pytest.mark.fault(
    "Ranks learn at different moments why to save or stop, while others die, stand still or lag",
    "all that leave do so at the same step, none hangs, no save is lost",
)
@pytest.mark.parametrize(
    "given",
    [
        {"store": "agent", "events": [[1, 10, "save"], [3, 50, "save"], [2, 51, "TERM"]]},
        {"store": "agent", "restarts": "3", "events": [[1, 10, "save"], [2, 51, "TERM"]]},
        {"store": "file", "loop": "deep", "stride": 0, "events": [[3, 5, "save"], [1, 40, "stand"], [2, 60, "save"]]},
        {"store": "plain", "loop": "deep", "events": [[0, 3, "kill"]]},
        {"loop": "seldom", "stride": 3, "first": 1000, "events": [[0, 30, "wait"], [3, 33, "TERM"]]},
        {"loop": "apart", "events": [[1, 10, "stand"], [2, 30, "save"], [2, 70, "kill"]]},
        {"early": True, "steps": 30, "slow": True, "events": [[3, 8, "USR1"], [1, 8, "TERM"]]},
        {"unnamed": True, "events": [[3, 5, "save"], [1, 20, "TERM"]]},  # as by torch.multiprocessing.spawn
        {"unnamed": "one rank", "events": [[1, 20, "TERM"]]},  # the same in a step of Slurm's with one task
        {"events": [[0, 30, "USR1"], [3, 31, "loss"], [1, 31, "save"]]},
        {"events": [[1, 30, "USR1"], [2, 31, "killed"]]},
        {"events": [[0, 30, "killed"], [2, 29, "save"]]},
        {"loop": "apart", "events": [[0, 40, "killed"], [2, 60, "save"]]},
    ],
    ids=[
        "agent's store",
        "agent's store, over its restarts",
        "three steps apart",
        "no store",
        "seldom",
        "apart",
        "slow",
        "unnamed",
        "unnamed in one task",
        "a loss that is no number, while a stop is to come",
        "a rank dies",
        "rank 0 dies",
        "alone",
    ],
)
def test_ranks_leave_and_save_together_in_each_kind_of_loop(stage: Stage, given: dict[str, Any]) -> None:
    drawn = plan(**given)
    answer = stage.play(drawn)
    assert faults_of(drawn, answer) == [], answer


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_two_hundred_random_schedules_end_without_a_deadlock_at_one_step_and_with_no_save_lost(stage: Stage) -> None:
    from tests.story.agreeing_ranks import schedule

    base = random.randrange(1_000_000)
    for seed in range(base, base + int(os.environ.get("SCHEDULES", "200"))):
        drawn = schedule(seed)
        answer = stage.play(drawn)
        assert faults_of(drawn, answer) == [], (drawn, answer)
