"""What comes in the last moment of an attempt, or in the wrong order: who began it, and that somebody has told us to leave."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from time import monotonic
from types import SimpleNamespace
from typing import Any

import pytest

from ftsupervise.job import supervise
from ftsupervise.job.attempt import Running
from ftsupervise.job.decide import Budgets
from ftsupervise.job.options import Options
from ftsupervise.job.pulse import Death
from ftsupervise.ledger import ledger
from ftsupervise.rundir import RunDir


def options(tmp_path: Path, *command: str, in_place: int) -> Options:
    return Options(RunDir(tmp_path / "run"), command, "x", budgets=Budgets(in_place=in_place, back_off=0.0))


def test_a_signal_that_comes_as_the_command_ends_is_heard_and_nothing_is_started_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with scancel: srun ends of the same SIGTERM, and we have looked at it before we look at ours."""
    waited = Running._wait

    def late(self: Running) -> int:
        code = waited(self)
        os.kill(os.getpid(), signal.SIGTERM)
        return code

    monkeypatch.setattr(Running, "_wait", late)
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("SLURM_", "FTSUPERVISE_"))}
    asked = options(tmp_path, "sh", "-c", "exit 143", in_place=5)
    assert supervise.run(asked, clean) == 143
    (only,) = ledger(asked.rundir)
    assert only.cause == "cancelled or preempted (SIGTERM)"
    assert only.failure == ""


@pytest.mark.parametrize("in_place", [0, 5])
def test_who_raised_for_another_ones_end_is_not_named_though_heard_of_first(tmp_path: Path, in_place: int) -> None:
    now = monotonic()
    raised = Death(0, "node-0", 10, now, 1, True, True, True)
    killed = Death(1, "node-1", 11, now, -9, False, False, True)
    news: list[list[Death]] = [[raised], [killed], []]
    agents: Any = SimpleNamespace(tend=lambda: None, pulses=SimpleNamespace(deaths=lambda: news.pop(0)))
    mine: Any = SimpleNamespace(folder=tmp_path)
    nobody: Any = SimpleNamespace(branch=frozenset)
    ears: Any = None
    one = Running(
        options(tmp_path, "srun", "train", in_place=in_place),
        mine,
        ("srun", "train"),
        None,
        ears,
        agents=agents,
        warm=nobody,
    )
    said = [one._told_death() for _ in range(2)]
    assert one.death == killed
    assert (said == ["", ""]) == (in_place == 0), "where nobody starts it again, nobody ends it for that either"
