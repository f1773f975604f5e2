"""Persons and the machine do things to a run at random, and no other state comes back than the one that was meant."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from ftsupervise.rundir import ledger
from tests.story.state_walk import Code, Shared, Walk, walk


@pytest.fixture
def top() -> Iterator[str]:
    place = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    Path(place).mkdir(mode=0o700)
    yield place
    shutil.rmtree(place)


@pytest.mark.resume(
    "All of this in any order: saves, kills, ends of jobs, deleted, moved and copied checkpoints, trouble with the "
    "loss, other code, a second run in the folder",
    "the newest state that nobody has thrown away, and no other",
    "as above",
)
@pytest.mark.parametrize("seed", [25, None])
def test_after_sixty_acts_of_persons_and_the_machine_only_the_right_state_comes_back(
    seed: int | None, top: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"the walk of seed {seed}")
    assert walk(tmp_path, top, seed, 60) > 5


@pytest.mark.resume(
    "The state of a kept snapshot crashes the program, and an older kept one lies there, which could not be removed "
    "while the folder was open to everybody",
    "the newest checkpoint, and not the older snapshot",
    "as in the next row",
)
@pytest.mark.parametrize(
    "acts",
    [
        "steps save steps end_the_job delete_the_newest kill_a_rank steps end_the_job kill_a_rank",
        "steps end_the_job crash steps steps steps steps steps end_the_job kill_a_rank",
        "save steps end_the_job kill_a_rank kill_a_rank steps save steps crash",
        "steps save steps end_the_job copy_one set_the_newest_aside bring_a_copy_back kill_the_supervisor",
        "steps save steps end_the_job steps open_the_folder end_the_job crash",  # an older one could not be removed
    ],
)
def test_what_the_walk_has_found_stays_found(acts: str, top: str, tmp_path: Path) -> None:
    one = Walk(tmp_path / "a", Shared(tmp_path / "checkpoints"), top, random.Random(1))
    try:
        for act in acts.split():
            getattr(one, act)()
    finally:
        one.close()
    assert one.begun > 2


@pytest.mark.resume(
    "The code has changed so that neither the newest snapshot nor the newest checkpoint fits, and is changed back",
    "the snapshot, from memory or from the disk: the attempt that was refused speaks against nothing and gives up "
    "nothing",
    "`status`: the snapshot of step 34 was not used: …; the brake: it cannot go on from what it has saved",
)
@pytest.mark.parametrize(
    "seed", range(4)
)  # the job ends or not, and a person changes the code back or says strict=False
def test_an_attempt_that_refuses_what_it_was_told_to_begin_from_leaves_it_for_the_next(
    seed: int, top: str, tmp_path: Path
) -> None:
    one = Walk(tmp_path / "a", Shared(tmp_path / "checkpoints"), top, random.Random(seed))
    try:
        one.steps()
        one.save()
        one.steps()
        reached, one.code = one.now, Code(shape=5)
        one.kill_a_rank()  # neither the snapshot nor the checkpoint fits the code
        assert (one.now.step, one.now.token) == (reached.step, reached.token)
        found = [each.not_from.words() for each in ledger.ledger(one.rundir) if each.not_from is not None]
        assert len(found) == 1 and f"the snapshot of step {reached.step} was not used: state['table'] is" in found[0]
    finally:
        one.close()


@pytest.mark.resume(
    "Code of another version does not take a kept snapshot, begins from a checkpoint and crashes; then the former "
    "code comes back",
    "the kept snapshot, unless the other code made a step",
    "`status`: … was not used: code 'v1' made it, and this is code 'v2'",
)
def test_what_code_of_another_version_did_speaks_against_no_snapshot_that_it_refused(top: str, tmp_path: Path) -> None:
    one = Walk(tmp_path / "a", Shared(tmp_path / "checkpoints"), top, random.Random(1))
    try:
        one.steps()
        one.save()
        one.steps()
        reached, one.code = one.now, Code("v2")
        one.end_the_job()
        assert one.began[0] == "disk", "v1 made what was kept"
        one.crash()
        one.code = Code("v1")
        one.crash()
        assert one.began[0] == "kept" and one.now.token == reached.token
        assert [each.begins and each.begins.source for each in ledger.ledger(one.rundir)][1:] == [
            "disk",
            "disk",
            "kept",
        ]
    finally:
        one.close()


@pytest.mark.resume(
    "In a shared folder somebody opens a checkpoint of another run to everybody",
    "this run's own; it is not held for that",
    "nothing",
)
def test_a_checkpoint_of_another_run_that_somebody_has_opened_to_everybody_keeps_nobody_else_from_beginning(
    top: str, tmp_path: Path
) -> None:
    folder = Shared(tmp_path / "checkpoints")
    one, other = (Walk(tmp_path / name, folder, top, random.Random(1)) for name in "ab")
    try:
        other.steps()
        other.save()
        other.open_one()
        one.kill_a_rank()
        assert one.rank is not None and "error" not in one.rank.begun and len(ledger.ledger(one.rundir)) == 2
        other.code = Code("v2")
        other.kill_a_rank()  # its own one keeps it until somebody has typed what the refusal says
        assert other.began == ("disk", other.commits[1])
    finally:
        one.close()
        other.close()


@pytest.mark.slow
def test_after_a_thousand_acts_of_persons_and_the_machine_only_the_right_state_comes_back(
    top: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"the walk of seed {seed}")
    assert walk(tmp_path, top, seed, 1000) > 100
