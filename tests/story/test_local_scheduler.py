"""The chain without Slurm: real processes on this machine, with the limit and the warning a cluster would give."""

from __future__ import annotations

import json
import os
import shlex
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import SchedulerUnavailable, SubmitRejected
from ftsupervise.host.processes import identity
from ftsupervise.model import JobState
from ftsupervise.scheduler.local import Local

Until = Callable[..., Any]


@pytest.fixture
def local(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Local]:
    monkeypatch.setenv("FTSUPERVISE_STATE_DIR", str(tmp_path / "state"))
    monkeypatch.setenv("FTSUPERVISE_LOCAL_KILL_WAIT", "1")
    scheduler = Local()
    yield scheduler
    for job in scheduler.queue():
        scheduler.cancel(job.base_id)


def submit(local: Local, tmp_path: Path, body: str, *options: str) -> str:
    lines = "".join(
        f"#SBATCH {option}\n" for option in ("--job-name=t", f"--chdir={shlex.quote(str(tmp_path))}", *options)
    )
    script = f"#!/bin/bash\n{lines}{body}\n"
    path = tmp_path / "train.sbatch"
    path.write_text(script)
    return local.submit(script, script_path=path, token="t0").job_id


def ended(local: Local, job_id: str) -> Callable[[], bool]:
    return lambda: not [job for job in local.queue() if job.base_id == job_id]


def test_members_run_one_after_the_other_and_their_output_is_where_sbatch_would_put_it(
    local: Local, tmp_path: Path, until: Until
) -> None:
    job = submit(
        local, tmp_path, "echo member $FTSUPERVISE_JOB_ID; exit 3", "--array=1-3%1", "--output=%x-%A_%a-100%%.out"
    )
    until(ended(local, job))
    texts = [(tmp_path / f"t-{job}_{member}-100%.out").read_text() for member in (1, 2, 3)]
    assert texts == [f"member {job}_{member}\n" for member in (1, 2, 3)]
    last = local.describe(job)
    assert last is not None
    assert last.state is JobState.FAILED


def test_standard_error_has_the_file_that_was_asked_for(local: Local, tmp_path: Path, until: Until) -> None:
    job = submit(local, tmp_path, "echo out; echo err >&2", "--output=%x-%j.out", "--error=%x-%j.err")
    until(ended(local, job))
    assert [one.read_text() for one in sorted(tmp_path.glob("*-local-*"))] == ["err\n", "out\n"]


def test_the_queue_shows_the_member_that_runs_and_the_rest_that_waits(
    local: Local, tmp_path: Path, until: Until
) -> None:
    job = submit(local, tmp_path, "sleep 60", "--array=1-10%1", "--comment=ftsupervise:t:t0")
    until(lambda: any(j.state is JobState.RUNNING for j in local.queue()))
    assert [(j.id, j.state) for j in local.queue()] == [
        (f"{job}_1", JobState.RUNNING),
        (f"{job}_[2-10%1]", JobState.PENDING),
    ]
    assert [j.base_id for j in local.find("t:t0")] == [job, job]


def test_the_warning_comes_before_the_limit_and_reaches_the_batch_shell_alone(
    local: Local, tmp_path: Path, until: Until
) -> None:
    body = "trap 'echo warned > warned; kill $!; exit 0' USR1\nsleep 600 & wait"
    job = submit(local, tmp_path, body, "--time=00:00:12", "--signal=B:USR1@8")
    until(ended(local, job))
    assert (tmp_path / "warned").exists()
    member = local.describe(job)
    assert member is not None
    assert member.state is JobState.COMPLETED


def test_at_the_limit_everything_is_ended_even_what_left_its_session_and_ignores_sigterm(
    local: Local, tmp_path: Path, until: Until
) -> None:
    stray = "setsid bash -c 'trap \"\" TERM; echo $$ > stray; sleep 600 & wait; sleep 600' &"
    job = submit(local, tmp_path, f"trap '' USR2\n{stray}\nsleep 600", "--time=00:00:05", "--signal=B:USR2@1")
    until(lambda: (tmp_path / "stray").exists() and (tmp_path / "stray").read_text().strip())
    pid = int((tmp_path / "stray").read_text())
    until(ended(local, job))
    assert identity(pid) is None


def test_cancelling_ends_the_running_member_and_the_rest(local: Local, tmp_path: Path, until: Until) -> None:
    job = submit(local, tmp_path, "echo $FTSUPERVISE_LOCAL_MEMBER >> members; sleep 600", "--array=1-5%1")
    until(lambda: (tmp_path / "members").read_text() == "1\n")
    local.cancel(job)
    until(ended(local, job))
    assert (tmp_path / "members").read_text() == "1\n"


def test_cancelling_one_member_lets_the_next_one_start(local: Local, tmp_path: Path, until: Until) -> None:
    job = submit(
        local,
        tmp_path,
        "echo $FTSUPERVISE_LOCAL_MEMBER >> members; [ $FTSUPERVISE_LOCAL_MEMBER = 2 ] || sleep 600",
        "--array=1-2%1",
    )
    until(lambda: (tmp_path / "members").read_text() == "1\n")
    local.cancel(f"{job}_1")
    until(ended(local, job))
    assert (tmp_path / "members").read_text() == "1\n2\n"


def test_a_chain_waits_for_the_job_it_is_attached_to(local: Local, tmp_path: Path, until: Until) -> None:
    first = submit(local, tmp_path, "until [ -e go ]; do sleep 0.1; done; echo first >> order")
    second = submit(local, tmp_path, "echo second >> order", f"--dependency=afterany:{first}")
    waiting = [job for job in local.queue() if job.base_id == second]
    assert [(job.state, job.reason) for job in waiting] == [(JobState.PENDING, "Dependency")]
    (tmp_path / "go").touch()
    until(ended(local, second))
    assert (tmp_path / "order").read_text() == "first\nsecond\n"


def test_attaching_to_a_job_that_is_not_there_is_refused(local: Local, tmp_path: Path) -> None:
    with pytest.raises(SubmitRejected, match="no local job"):
        submit(local, tmp_path, "true", "--dependency=afterany:local-999")


def test_a_chain_whose_process_was_killed_is_gone_with_all_it_started(
    local: Local, tmp_path: Path, until: Until
) -> None:
    body = "echo $$ > pid; exec python3 -c 'import time; time.sleep(600)'"
    job = submit(local, tmp_path, body, "--array=1-3%1")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    until(lambda: any(j.state is JobState.RUNNING for j in local.queue()))
    kill_chain(local, job)
    until(ended(local, job))
    gone = local.describe(job)
    assert gone is not None
    assert gone.state is JobState.NODE_FAIL
    until(lambda: identity(int((tmp_path / "pid").read_text())) is None, "its end")


def test_what_outlives_its_killed_chain_is_still_in_the_queue_and_can_be_cancelled(
    local: Local, tmp_path: Path, until: Until
) -> None:
    body = 'python3 -c \'import os, time; print(os.getpid(), file=open("pid", "w")); time.sleep(600)\'; true'
    job = submit(local, tmp_path, body, "--array=1-3%1")
    until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text().strip())
    assert [j.state for j in local.queue()] == [JobState.RUNNING, JobState.PENDING], "told before it is there"
    kill_chain(local, job)
    until(lambda: [(j.id, j.state) for j in local.queue()] == [(f"{job}_1", JobState.COMPLETING)])
    local.cancel(job)
    until(ended(local, job))
    until(lambda: identity(int((tmp_path / "pid").read_text())) is None, "its end")


def test_one_that_could_not_write_down_that_it_runs_is_seen_to_run_all_the_same(
    local: Local, tmp_path: Path, until: Until
) -> None:
    """On a full disk; and then its chain is killed."""
    body = 'python3 -c \'import os, time; print(os.getpid(), file=open("pid", "w")); time.sleep(600)\'; true'
    job = submit(local, tmp_path, body, "--array=1-3%1")
    until(lambda: (tmp_path / "pid").read_text().strip())
    kill_chain(local, job)
    page = local.root / job.removeprefix("local-") / "state.json"
    state = json.loads(page.read_text())
    page.write_text(json.dumps({**state, "state": "PENDING", "member": 0}))
    until(lambda: [(j.id, j.state) for j in local.queue()] == [(f"{job}_1", JobState.COMPLETING)])
    local.cancel(job)
    until(ended(local, job))


def test_the_same_job_id_in_another_state_directory_is_another_job(local: Local, tmp_path: Path, until: Until) -> None:
    """Ids begin at 1 everywhere: a demo's local-1_1 that ends must not take somebody's training along."""
    submit(local, tmp_path, "sleep 600; true", "--array=1-2%1")
    until(lambda: any(j.state is JobState.RUNNING for j in local.queue()))
    other = Local({**os.environ, "FTSUPERVISE_STATE_DIR": str(tmp_path / "other")})
    job = submit(other, tmp_path, "true", "--array=1-2%1")
    until(ended(other, job))
    assert next((j.id, j.state) for j in local.queue()) == ("local-1_1", JobState.RUNNING)


def test_a_job_launched_from_inside_a_job_outlives_it_and_inherits_none_of_its_places(
    local: Local, tmp_path: Path, until: Until
) -> None:
    (tmp_path / "inner").mkdir()
    (tmp_path / "inner" / "x.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --chdir={tmp_path}/inner\nenv > env; touch up; sleep 600; true\n"
    )
    code = (
        "from pathlib import Path; from ftsupervise.scheduler.local import Local; p = Path('inner/x.sbatch'); "
        "Local().submit(p.read_text(), script_path=p, token='t')"
    )
    lines = "export FTSUPERVISE_ATTEMPT=1 FTSUPERVISE_CHECKPOINT_DIR=/mine FTSUPERVISE_DEADLINE=1\n"
    job = submit(local, tmp_path, f'{lines}{sys.executable} -c "{code}"')
    until(ended(local, job))
    until(lambda: (tmp_path / "inner" / "up").exists())
    assert [j.state for j in local.queue()] == [JobState.RUNNING]
    told = (tmp_path / "inner" / "env").read_text()
    assert not {"FTSUPERVISE_CHECKPOINT_DIR", "FTSUPERVISE_DEADLINE"} & {w.partition("=")[0] for w in told.splitlines()}


def test_a_damaged_page_is_a_queue_that_could_not_be_read_and_not_a_traceback(local: Local, tmp_path: Path) -> None:
    (local.root / "1").mkdir(parents=True)
    for page in ({}, {"members": 3, "name": "x", "comment": "", "submitted": "x", "limit": "y"}):
        (local.root / "1" / "job.json").write_text(json.dumps({"host": os.uname().nodename, **page}))
        with pytest.raises(SchedulerUnavailable, match="cannot be read"):
            local.queue()
    (local.root / "1" / "job.json").unlink()


def kill_chain(local: Local, job: str) -> None:
    state = json.loads((local.root / job.removeprefix("local-") / "state.json").read_text())
    os.kill(state["pid"], signal.SIGKILL)


def test_a_folder_in_the_queue_whose_name_only_looks_like_a_number_is_no_job(
    local: Local, tmp_path: Path, until: Until
) -> None:
    (local.root / "²").mkdir(parents=True)
    assert local.queue() == ()
    job = submit(local, tmp_path, "sleep 60")
    assert [one.base_id for one in local.queue()] == [job] == ["local-1"]
    assert local.describe("local-²") is None
    local.cancel("local-²")
    assert list((local.root / "²").iterdir()) == []
    local.cancel(job)
    until(ended(local, job))
