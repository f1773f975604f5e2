"""Public training scripts that nobody here wrote, unmodified: three deaths, a save, standstills and a kill each.

None that is well is ended, braked or held; each standstill is found; each step is one that it printed, or none is shown; and a
start from the beginning destroys nothing that was reached. ``tests/slurm/test_public_scripts_on_slurm.py`` does the same on
Slurm, with a time limit and a ``scancel``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.neighbours.public_scripts import PUBLIC, NotHere
from tests.neighbours.smtp import MailServer
from tests.story.public_walk import Stage, walk

pytestmark = [pytest.mark.slow, pytest.mark.timeout(3000)]
Until = Callable[..., Any]


@pytest.fixture(params=PUBLIC, ids=lambda one: one.name)
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stage]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    try:
        folder = request.param.fetch(tmp_path / request.param.name)
    except NotHere as why:
        pytest.skip(str(why))
    with MailServer() as mail:
        here = Stage(request.param, folder, tmp_path / "state", mail)
        yield here
        here.end()


def test_a_public_script_is_seen_never_ended_while_it_is_well_and_loses_nothing(stage: Stage, until: Until) -> None:
    walk(stage, until)
