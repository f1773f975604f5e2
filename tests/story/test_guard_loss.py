"""What the loop reports is what the watchdog judges: a loss that is no number goes out at once."""

from __future__ import annotations

import math
import os
import shutil
from datetime import datetime, timezone
from itertools import count
from pathlib import Path

import pytest

from ftsupervise import Guard
from ftsupervise.config.schema import Launch, Run
from ftsupervise.config.watchdogs import Loss
from ftsupervise.findings import Severity
from ftsupervise.probe import Probe
from ftsupervise.rundir.heartbeat_page import read_beats
from ftsupervise.rundir.paths import RunDir
from ftsupervise.snapshots.room import node_folder
from ftsupervise.truth import NOT_A_NUMBER, Health
from ftsupervise.watch import Look
from ftsupervise.watch.watchdogs.loss import check
from tests.neighbours.patience import wait_until


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


@pytest.mark.parametrize(
    ("losses", "told"),
    [
        ([0.3, 0.3, 0.3], {Health.OK: "loss 0.3"}),
        ([0.3, math.nan, 0.3], {Health.OK: "loss 0.3"}),  # one batch, which the loop may have skipped
        ([0.3, *[math.nan] * 3], {Health.BAD: f"{NOT_A_NUMBER}: nan at step "}),
        ([*[math.nan] * 3, 0.3], {Health.OK: "loss 0.3"}),
        ([None, None], {}),
    ],
    ids=["a number", "once", "lasting", "over", "none is given"],
)
def test_a_loss_that_is_no_number_is_told_without_a_setting(
    tmp_path: Path, losses: list[float | None], told: dict[Health, str]
) -> None:
    rundir = RunDir(tmp_path)
    for name in ("switches", "beats", "watch", "logs"):
        (tmp_path / name).mkdir()
    (tmp_path / "logs" / "r-7_1.out").write_text("step 1 loss: nan\n" * 9)  # that alone is only read
    run = Run(name="r", run_dir=tmp_path, launch=Launch(command="true"))
    assert run.watch.loss is not None
    with Guard(tmp_path, poll=0, beat_every=0) as guard, Probe(notes=tmp_path / "notes" / "probe", bound=60) as probe:
        steps = count(1)

        def trains(loss: float | None) -> bool:
            """Take a step; return whether its loss is in the beat, which is not written at each."""
            if loss is not None:
                guard.loss(loss)
            guard.step(next(steps))
            return read_beats(rundir)[0].facts.get("loss") == (None if loss is None else f"{loss:.6g}")

        for loss in losses:
            trains(loss)
        wait_until(lambda: trains(losses[-1]), "the beat of the last loss")
        look = Look(run=run, rundir=rundir, now=datetime.now(timezone.utc), jobs=(), probe=probe)
        found = {one.health: one for one in check(look, run.watch.loss)}
    assert found.keys() == told.keys()
    assert all(one.summary.startswith(told[health]) for health, one in found.items()), found
    assert all(", since step 2" in one.summary for health, one in found.items() if health is Health.BAD)
    assert all(one.severity is Severity.CRITICAL for health, one in found.items() if health is Health.BAD)


def test_a_loss_that_is_no_number_of_python_is_told_and_does_not_stop_the_loop(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    guard = Guard(tmp_path)
    guard.loss("much")  # type: ignore[arg-type]
    assert not guard.step(1).stop
    assert "takes a number" in capsys.readouterr().err


def test_a_state_whose_loss_is_no_number_is_not_kept_and_a_number_later_ends_that(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    root = f"/dev/shm/ftsupervise-test-{os.getpid()}-{os.urandom(4).hex()}"
    place = Path(node_folder(root))
    place.mkdir(mode=0o700, parents=True)
    Path(root).chmod(0o700)
    monkeypatch.setenv("FTSUPERVISE_SNAPSHOTS", root)
    state = {"weights": 1.0}
    try:
        with Guard(signals=()) as guard:
            guard.restore(state=state)

            def keeps(step: int, loss: float) -> bool:
                guard.loss(loss)
                state["weights"] = step
                return guard.snapshot(step)

            wait_until(lambda: keeps(2, 1.0), "a first snapshot")
            assert not any(keeps(step, math.nan) for step in range(4, 20, 2))
            wait_until(lambda: keeps(20, 0.9), "a snapshot of a state that is well")
            assert not keeps(22, math.inf)
        with Guard(signals=()) as guard:
            assert guard.restore(state=state) == 20 and state == {"weights": 20}
    finally:
        shutil.rmtree(root)
