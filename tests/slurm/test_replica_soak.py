"""Replica groups under a fault every 20 to 60 seconds, with nobody's help: all that the soak counts has to be nothing."""

from __future__ import annotations

import importlib.util
import os

import pytest

from ftsupervise.sandbox import missing

pytestmark = [
    pytest.mark.torch,
    pytest.mark.slurm,
    pytest.mark.slow,
    pytest.mark.timeout(2400),
    pytest.mark.skipif(importlib.util.find_spec("torchft") is None, reason="torchft is not installed: make test-torch"),
    pytest.mark.skipif(bool(missing()), reason="Slurm's daemons are not installed: make slurm"),
]


def test_a_run_of_four_groups_outlives_a_quarter_of_an_hour_of_faults_by_itself() -> None:
    from benchmarks.replicas.soak import soak

    minutes = float(os.environ.get("FTSUPERVISE_SOAK_MINUTES", "15"))
    done = soak(60 * minutes)
    print(done)
    assert len(done.faults) >= minutes / 2
    assert (done.not_over, done.unnamed, done.twice, done.orphans, done.differ) == (0, (), (), 0, 0), str(done)
