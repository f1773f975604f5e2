"""The screens of ``plan`` and ``simulate`` for docs/planning.md, made by the program."""

from __future__ import annotations

from pathlib import Path

from ftsupervise.cli.plan import lines_of_plan
from ftsupervise.cli.simulate import strategies_of, table, title_of
from ftsupervise.planning.formulas import DAY, HOUR, MINUTE, job_mtbf
from ftsupervise.planning.inputs import given, usual_inputs
from ftsupervise.planning.measured import inputs_of
from ftsupervise.planning.plan import plan_of
from ftsupervise.planning.simulator import simulate
from ftsupervise.report.everything import report_of
from ftsupervise.rundir.paths import RunDir
from tests.manual.report_screens import NOW
from tests.neighbours.prepared_runs import prepare
from tests.neighbours.supervised import outside_a_job


def plan_screens(folder: Path) -> dict[str, str]:
    """name of a block -> its text."""
    env = outside_a_job(**prepare(folder, NOW, ["nine-days"]))
    report = report_of(RunDir(folder / "train-10b"), NOW, env)
    inputs = inputs_of(report)._replace(gpus=8)
    planned = "\n".join(lines_of_plan(plan_of(inputs, price=2.0), "train-10b"))
    cluster = usual_inputs(2048, 8)._replace(
        mtbf=given(job_mtbf(2048, 6.5e-3)), interval=given(HOUR), save=given(20.0), cold=given(5 * MINUTE)
    )
    strategies = strategies_of(cluster.strategy(), ("interval=9m", "interval=9m spares=4", "interval=9m warm=off"))
    outcomes = simulate(cluster.fleet, strategies, 90 * DAY, 20, 1)
    played = "\n".join((title_of(cluster.fleet, 90 * DAY, 20), "", *table(outcomes)))
    return {"plan": f"{planned}\n", "simulate": f"{played}\n"}
