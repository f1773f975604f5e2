"""The report and Slurm's own account of the same jobs agree: when each ran, how it ended, and how often it began again."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Callable, Mapping
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

from ftsupervise.sandbox import Sandbox
from tests.neighbours.patience import waited_for_a_processor
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
START = 8.0  # seconds that the interpreter of a job may take before its attempt begins, and to leave
LOOP = """
import json, sys, time
from ftsupervise import Guard
last = int(sys.argv[1])
guard = Guard(agree=False)
newest, first = guard.latest(), 1
if newest is not None:
    first = json.loads((newest / "state.json").read_text())["step"] + 1
for step in range(first, last + 1):
    time.sleep(0.05)
    decision = guard.step(step)
    if decision.save or step % 10 == 0 or step == last:
        with guard.checkpoint(step) as folder:
            (folder / "state.json").write_text(json.dumps({"step": step}))
    if step == 30 and first == 1:
        raise KeyError("lr_schedule")
    if decision.stop:
        break
else:
    guard.finished(last)
"""


class SlurmJob(NamedTuple):
    """A job as Slurm has it. Times in epoch seconds."""

    state: str
    start: float
    end: float
    restarts: int

    @property
    def seconds(self) -> float:
        return self.end - self.start


def jobs_of_slurm(sandbox: Sandbox, array: str) -> dict[str, SlurmJob]:
    out = sandbox.run(["scontrol", "-o", "show", "job", array])
    found = {}
    for line in out.splitlines():
        facts = dict(re.findall(r"(\S+?)=(\S*)", line))
        start, end = (datetime.fromisoformat(facts[name]).timestamp() for name in ("StartTime", "EndTime"))
        job = f"{array}_{facts['ArrayTaskId']}"
        found[job] = SlurmJob(facts["JobState"], start, end, int(facts["Restarts"]))
    return found


@pytest.mark.parametrize("seconds", [6, pytest.param(300, marks=[pytest.mark.slow, pytest.mark.timeout(1500)])])
def test_the_times_the_ends_and_the_restarts_of_each_job_are_those_that_slurm_has(
    make_sandbox: Callable[..., Sandbox], tmp_path: Path, until: Until, seconds: int
) -> None:
    sandbox, waited = make_sandbox(nodes=1, min_job_age=3000), waited_for_a_processor()
    env: Mapping[str, str] = {
        **sandbox.env(),
        "FTSUPERVISE_STATE_DIR": str(tmp_path / "state"),
        "FTSUPERVISE_SITE_CONFIG": "/nonexistent",
    }
    (tmp_path / "loop.py").write_text(LOOP)
    steps = 20 * seconds  # about that many in ``seconds``
    launch = {"command": f"{sys.executable} {tmp_path}/loop.py {3 * steps}", "nodes": 1, "tasks_per_node": 1}
    launch |= {"cpus_per_task": 1, "jobs": 2, "time": "60:00", "requeue": True, "restart": {"back_off": "1s"}}
    run = {"name": "agreed", "run_dir": str(tmp_path / "run"), "launch": launch, "guard": {"poll": "200ms"}}
    (tmp_path / "ftsupervise.yaml").write_text(yaml.safe_dump(run))
    typed("launch", folder=tmp_path, env=env, seconds=120, code=0)

    def seen() -> dict[str, Any]:
        said = typed("status", str(tmp_path / "run"), "--json", folder=tmp_path, env=env, seconds=120).stdout
        return dict(json.loads(said))

    def attempt(number: int, step: int) -> Callable[[], bool]:
        def is_there() -> bool:
            now = seen()
            return len(now["ledger"]) >= number and (now["step"] or 0) >= step

        return is_there

    until(attempt(2, steps), "the second attempt, which began in the same job", seconds + 120)
    (job,) = {one["job_id"] for one in seen()["ledger"]}
    array = job.partition("_")[0]
    sandbox.run(["scancel", job])
    until(attempt(3, steps + 20), "the second member", 120)
    sandbox.run(["scontrol", "requeue", f"{array}_2"])
    until(attempt(4, steps + 40), "the second member again", 120)
    until(lambda: seen()["verdict"] == "finished", "the end", 3 * seconds + 180)
    until(lambda: not sandbox.run(["squeue", "-h", "-j", array]).strip(), "an empty queue", 120)

    slurm, found = jobs_of_slurm(sandbox, array), seen()
    start = START + min(60.0, waited_for_a_processor() - waited)
    mine: dict[str, list[dict[str, Any]]] = {}
    for one in found["ledger"]:
        mine.setdefault(one["job_id"], []).append(one)
    assert [len(mine[name]) for name in sorted(mine)] == [2, 2], found["ledger"]
    assert {name: one.state for name, one in slurm.items()} == {f"{array}_1": "CANCELLED", f"{array}_2": "COMPLETED"}
    ends = [mine[f"{array}_{n}"][-1]["cause"]["kind"] for n in (1, 2)]
    assert ends == ["cancelled or preempted", "finished"]
    assert [slurm[f"{array}_{n}"].restarts for n in (1, 2)] == [0, 1], "the second one was put back into the queue once"

    def epoch(text: str) -> float:
        return datetime.fromisoformat(text).timestamp()

    def agree(told: float, true: float) -> bool:
        print(f"{told:.1f} s told, {true:.1f} s by Slurm")
        return abs(told - true) <= 0.01 * true + (start if seconds < 100 else 0.0)

    first = slurm[f"{array}_1"]
    assert agree(epoch(mine[f"{array}_1"][-1]["ended"]) - epoch(mine[f"{array}_1"][0]["started"]), first.seconds)
    last = slurm[f"{array}_2"]  # Slurm has its last start alone
    assert agree(epoch(mine[f"{array}_2"][-1]["ended"]) - epoch(mine[f"{array}_2"][-1]["started"]), last.seconds)
    for name, one in slurm.items():
        for part in mine.get(name, ())[-1:]:
            assert one.start - 1 <= epoch(part["started"]), (name, part, one)
            assert epoch(part["ended"]) <= one.end + start, "a cancelled job has ended for Slurm when it is told to"
    page = typed("report", "--markdown", str(tmp_path / "run"), folder=tmp_path, env=env, seconds=120, code=0).stdout
    assert "# agreed: FINISHED" in page and "cancelled or preempted" in page, page
    total = epoch(found["time"]["until"]) - epoch(found["time"]["since"])
    assert sum(found["time"]["seconds"].values()) == pytest.approx(total, abs=0.1)
    assert agree(total, last.end - epoch(found["time"]["since"]))
    spent = found["time"]["seconds"]
    assert spent["held"] == 0 and spent["unknown"] == 0, "a job of it ran, or waited in the queue, all the time"
    assert [one["begun_again"] for one in found["ledger"]] == [0, 0, 0, 1]
    again = epoch(mine[f"{array}_2"][-1]["started"]) - epoch(mine[f"{array}_2"][0]["ended"])
    assert spent["queue"] >= again > 0, "put back into the queue, it waited there"
