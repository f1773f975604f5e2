"""When is a job without its batch host, and which job is to be ended then?"""

from __future__ import annotations

import pytest

from ftsupervise.ranks.__main__ import stays
from ftsupervise.scheduler.parse import ShownJob, parse_shown_job

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
    assert parse_shown_job(shown, "88") == ShownJob("88", headless, requeue=False)


def test_a_member_is_named_so_that_its_array_is_left_alone() -> None:
    rest = line("90", array="ArrayJobId=88 ArrayTaskId=3-10%1 ", state="PENDING", nodes="", host="")
    last = line("88", array="ArrayJobId=88 ArrayTaskId=10 ", requeue=1)
    assert parse_shown_job(f"{rest}\n{last}\n", "88") == ShownJob("88_10", True, requeue=True)
    assert parse_shown_job(rest, "88") is None
    assert parse_shown_job("slurm_load_jobs error: Unable to contact slurm controller", "88") is None


def test_a_few_nodes_stay() -> None:
    assert [n for n in range(8) if stays({"SLURM_JOB_ID": "88", "SLURM_NODEID": str(n)})] == [0, 1, 2, 3]
    assert not stays({"SLURM_NODEID": "1"})
    group = {"SLURM_JOB_ID": "88", "SLURM_NODEID": "0", "FTSUPERVISE_GROUP": "g001"}
    assert not stays(group), "the whole job has agents of its own, on all its nodes"
    assert stays({**group, "FTSUPERVISE_GROUP_JOB": "1"})


def test_a_name_a_comment_or_a_submitted_line_that_reads_like_a_field_is_none() -> None:
    shown = line(host="gpu-1", requeue=1).replace("JobName=my run", "JobName=a BatchHost=evil NodeList=b Requeue=0")
    shown += " SubmitLine=sbatch train.sh JobState=FAILED NodeList=evil Requeue=0 WorkDir=/ BatchHost=evil"
    assert "JobName=a" in shown
    assert parse_shown_job(shown, "88") == ShownJob("88", False, requeue=True)
