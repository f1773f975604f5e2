"""What the loop reports is what the watchdog judges: a loss that is no number goes out at once."""

from __future__ import annotations

import math
from datetime import datetime, timezone
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Loss
from ftsupervise.probe import Probe
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir
from ftsupervise.truth import Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.loss import check


@pytest.mark.parametrize(("loss", "health"), [(0.31, Health.OK), (math.nan, Health.BAD), (math.inf, Health.BAD)])
def test_the_loss_the_loop_reports_is_judged(tmp_path: Path, loss: float, health: Health) -> None:
    rundir = RunDir(tmp_path)
    for name in ("switches", "beats", "watch", "logs"):
        (tmp_path / name).mkdir()
    with Guard(tmp_path, poll=0, beat_every=0) as guard:
        for step in range(1, 4):
            guard.loss(loss)
            guard.step(step)
        assert read_beats(rundir)[0].facts["loss"] == f"{loss:.6g}"
        run = Run(name="r", run_dir=tmp_path, launch=Launch(command="true"))
        with Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
            look = Look(run=run, rundir=rundir, now=datetime.now(timezone.utc), jobs=(), probe=probe)
            found = list(check(look, Loss()))
    assert health in {finding.health for finding in found}


def test_a_loss_that_is_no_number_of_python_is_told_and_does_not_stop_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(tmp_path)
    guard.loss("much")  # type: ignore[arg-type]
    assert not guard.step(1).stop
    assert "takes a number" in capsys.readouterr().err
