"""When is a job without its batch host, and which job is to be ended then?"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.node import orphan
from ftsupervise.node.orphan import Shown, read, stays

LINE = (
    "JobId={id} {array}JobName=my run UserId=ann(1000) Requeue={requeue} Restarts=0 BatchFlag=1 JobState={state} Reason=None "
    "ReqNodeList=(null) ExcNodeList=(null) NodeList={nodes} BatchHost={host} NumNodes=2 Comment=JobId=9 x=JobState=FAILED"
)


def line(id: str = "88", state: str = "RUNNING", nodes: str = "gpu-[1-2]", host: str = "gpu-0", **more: object) -> str:
    return LINE.format(
        id=id, state=state, nodes=nodes, host=host, array=more.get("array", ""), requeue=more.get("requeue", 0)
    )


@pytest.mark.parametrize(
    ("shown", "headless"),
    [
        (line(), True),
        (line(host="gpu-1"), False),
        (line(nodes="gpu-[1"), None),
        (line(nodes="(null)"), None),
        (line(host=""), None),
        (line(state="COMPLETING"), None),
        (line(state="PENDING", nodes="", host=""), None),
    ],
)
def test_only_a_running_job_whose_batch_host_is_no_node_of_it_has_lost_it(shown: str, headless: bool | None) -> None:
    assert read(shown, "88") == Shown("88", headless, requeue=False)


def test_a_member_is_named_so_that_its_array_is_left_alone() -> None:
    rest = line("90", array="ArrayJobId=88 ArrayTaskId=3-10%1 ", state="PENDING", nodes="", host="")
    last = line("88", array="ArrayJobId=88 ArrayTaskId=10 ", requeue=1)
    assert read(f"{rest}\n{last}\n", "88") == Shown("88_10", True, requeue=True)
    assert read(rest, "88") is None
    assert read("slurm_load_jobs error: Unable to contact slurm controller", "88") is None


def test_a_few_nodes_stay() -> None:
    assert [n for n in range(8) if stays({"SLURM_JOB_ID": "88", "SLURM_NODEID": str(n)})] == [0, 1, 2, 3]
    assert not stays({"SLURM_NODEID": "1"})


@pytest.mark.parametrize(
    ("requeue", "refused", "asked"),
    [
        (1, (), ["show", "requeue 88"]),
        (0, (), ["show", "scancel 88"]),
        (1, ("requeue",), ["show", "requeue 88", "scancel 88"]),
        (1, ("requeue", "scancel"), ["show", "requeue 88", "scancel 88", "show", "requeue 88"]),
        (0, ("show",), ["show", "show", "scancel 88"]),
    ],
)
def test_who_is_refused_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeue: int, refused: tuple[str, ...], asked: list[str]
) -> None:
    """``refused``: what Slurm's commands answer once with an error."""
    for word in refused:
        (tmp_path / f"no-{word}").touch()
    (tmp_path / "shown").write_text(line(requeue=requeue))
    mood = f"""#!/bin/sh
for last; do :; done; verb=$(basename $0); [ $verb = scancel ] || {{ [ $1 = requeue ] && verb=requeue || verb=show; }}
[ $verb = show ] && echo show >> {tmp_path}/asked || echo $verb $last >> {tmp_path}/asked
if rm {tmp_path}/no-$verb 2>/dev/null; then echo "Socket timed out" >&2; exit 1; fi
[ $verb = show ] && cat {tmp_path}/shown; true
"""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(mood)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setattr(orphan, "_PAUSES", (0.0,))
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    orphan.see_to_the_end({**os.environ, "SLURM_JOB_ID": "88"}, stay=30)
    assert (tmp_path / "asked").read_text().splitlines() == asked
