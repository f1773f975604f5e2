"""Persons and the machine do things to a run at random, and no other state comes back than the one that was meant."""

from __future__ import annotations

import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.story.state_walk import Shared, Walk, walk


@pytest.fixture
def top() -> Iterator[str]:
    place = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    Path(place).mkdir(mode=0o700)
    yield place
    shutil.rmtree(place)


@pytest.mark.parametrize("seed", [25, None])
def test_after_sixty_acts_of_persons_and_the_machine_only_the_right_state_comes_back(
    seed: int | None, top: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6) if seed is None else seed
    print(f"the walk of seed {seed}")
    assert walk(tmp_path, top, seed, 60) > 5


@pytest.mark.parametrize(
    "acts",
    [
        "steps save steps end_the_job delete_the_newest kill_a_rank steps end_the_job kill_a_rank",
        "steps end_the_job crash steps steps steps steps steps end_the_job kill_a_rank",
        "save steps end_the_job kill_a_rank kill_a_rank steps save steps crash",
        "steps save steps end_the_job copy_one set_the_newest_aside bring_a_copy_back kill_the_supervisor",
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


@pytest.mark.slow
def test_after_a_thousand_acts_of_persons_and_the_machine_only_the_right_state_comes_back(
    top: str, tmp_path: Path
) -> None:
    seed = random.SystemRandom().randrange(10**6)
    print(f"the walk of seed {seed}")
    assert walk(tmp_path, top, seed, 1000) > 100
