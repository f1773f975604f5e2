"""What is only told is not done on real Slurm either: no node is excluded, no member is held, and no rank is ended by us."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.rundir.switches import read_brake
from ftsupervise.truth import BRAKE, EXCLUSION, RANKS
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
# the rank that is killed has lived for a moment, and the other one hears no SIGTERM of srun's
BAD = (
    "[ $SLURMD_NODENAME = node-1 ] && { sleep 1; kill -9 $$; }; "
    "[ -e quick ] || trap '' TERM; until [ -e go ]; do sleep 0.2; done"
)


def waiting(here: Scene) -> list[str]:
    """JOB|REASON|EXCLUDED of each that waits."""
    return here.sandbox.run(["squeue", "-h", "-r", "-t", "PENDING", "-n", here.name, "-o", "%i|%r|%x"]).splitlines()


def test_a_bad_node_is_not_excluded_and_the_chain_is_not_held(scene: Callable[..., Scene], until: Until) -> None:
    here = scene(nodes=4)
    here.launch(BAD, more="act: observe\n", restart={"back_off": "100ms"}, jobs=3)

    def told() -> set[str]:
        return {one.decision for attempt in here.attempts() for one in attempt.observed}

    until(lambda: RANKS in told(), "the death of a rank, which ends no other one", 60)
    (here.folder / "quick").touch()
    until(lambda: told() >= {EXCLUSION, BRAKE}, "the other decisions that are only told", 120)
    assert all(one.nodes == ("node-0", "node-1") for one in here.attempts()), "no other node takes its place"
    assert read_brake(here.rundir) is None
    left = waiting(here)
    assert len(left) == 2 and not any("Held" in line or "node-1" in line for line in left), left
    words = [one.words() for attempt in here.attempts() for one in attempt.observed]
    assert any(one.startswith("would have excluded node-1: score 2 of 1.5") for one in words), words
    assert any("would have ended the other ranks, to start again in place: rank 1 on node-1" in one for one in words), (
        words
    )
    said = here.type("status", ".")
    assert "all decisions are only told" in said and "would have held the chain" in said, said
    dry = here.type("launch", "--dry-run")
    assert "note: would have excluded node-1" in dry and "--exclude" not in dry, dry
    assert "act on them" in here.type("observe", "--off", "--only", "hang", ".").lower()
    here.type("observe", "--off", ".")
    until(lambda: read_brake(here.rundir), "the brake, once decisions are carried out", 120)
    until(lambda: all("JobHeldUser" in line for line in waiting(here)), "the members to be held", 60)
    here.sandbox.run(["scancel", "-n", here.name])


def test_a_node_that_is_not_fit_is_neither_excluded_nor_holds_the_rest(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    for node in ("node-0", "node-1"):
        here.broken(node).touch()
    outside = {"FTSUPERVISE_UNFIT_SECONDS": "1"}
    here.launch("sleep 1", python=here.breakable_python(), outside=outside, jobs=5, nodes=1, more="act: observe\n")
    until(lambda: not here.queue(), "the end of all members, which nothing held", 120)
    log = here.log()
    assert log.count("; this decision is only told") == 5, log
    assert "would have excluded node-" in log and "would have held the rest of the chain" in log
    assert read_brake(here.rundir) is None
