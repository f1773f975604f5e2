"""Public training scripts, unmodified, on a real Slurm: see ``tests/story/test_public_scripts.py``."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from tests.neighbours.public_scripts import PUBLIC, NotHere
from tests.neighbours.smtp import MailServer
from tests.story.public_walk import Stage, walk

pytestmark = [pytest.mark.slurm, pytest.mark.slow, pytest.mark.timeout(3000)]
Until = Callable[..., Any]


@pytest.fixture(params=PUBLIC, ids=lambda one: one.name)
def stage(request: pytest.FixtureRequest, tmp_path: Path, make_sandbox: Callable[..., Sandbox]) -> Iterator[Stage]:
    try:
        folder = request.param.fetch(tmp_path / request.param.name)
    except NotHere as why:
        pytest.skip(str(why))
    with MailServer() as mail:
        yield Stage(request.param, folder, tmp_path / "state", mail, make_sandbox(nodes=1, kill_wait=30))


def test_a_public_script_on_slurm_is_seen_and_loses_nothing_to_deaths_limits_and_cancels(
    stage: Stage, until: Until
) -> None:
    walk(stage, until)
