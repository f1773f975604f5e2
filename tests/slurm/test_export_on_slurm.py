"""An srun that does not hand on its whole environment: its ranks have ours all the same, with fence, beats and saves."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest

from ftsupervise.host.processes import environment
from tests.slurm.ring_scene import Scene
from tests.slurm.test_signals_on_slurm import here  # noqa: F401 - a fixture

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.chain(
    "the ranks' srun hands on only a few variables (`--export=NAME=x`, SLURM_EXPORT_ENV)",
    "ours are added to its list: the ranks have their run, fence, beats and saves",
    "none",
    "nothing",
)
@pytest.mark.parametrize(
    "how",
    [
        {"srun_options": ["--export=MINE=5"]},
        {"srun_options": ["--export=NONE"]},
        {"setup": "export SLURM_EXPORT_ENV=HOME"},
    ],
)
def test_ranks_of_an_srun_that_exports_a_few_variables_have_ours_too(
    here: Scene,  # noqa: F811
    how: dict[str, Any],
    until: Until,
) -> None:
    command = f"{sys.executable} train.py --log-every 1 --steps 100000 --step-time 0.02"
    here.launch(command, jobs=1, env={"NOT_MINE": "7"}, **how)
    ranks = until(lambda: here.trains(1), "both ranks, by their beats", 60)
    seen = environment(ranks[1])
    assert seen["FTSUPERVISE_ATTEMPT"] == "1" and seen["FTSUPERVISE_STAGING"]
    assert "NOT_MINE" not in seen
    assert seen.get("MINE") == ("5" if "--export=MINE=5" in str(how) else None)
