"""Signals on real Slurm: whichever announces the end reaches the ranks, and one that also is the end's own is told apart."""

from __future__ import annotations

import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.host import processes
from ftsupervise.run.job_end import EndFollower, JobEnd
from ftsupervise.rundir.attempt_pages import StartPage, read_page
from ftsupervise.sandbox import Sandbox
from tests.slurm.ring_scene import EXAMPLE, Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
# A rank without our guard: it notes what it hears, and saves until it is let go.
RANK = """import os, signal, sys, time
from pathlib import Path
here = Path(sys.argv[1])
rank = os.environ["SLURM_PROCID"]
def note(number, _):
    with (here / f"heard-{rank}").open("a") as file:
        file.write(signal.Signals(number).name + " ")
for name in ("USR1", "USR2", "TERM", "ALRM", "INT"):
    signal.signal(getattr(signal, f"SIG{name}"), note)
(here / f"up-{rank}").touch()
while not (here / "go").exists():
    time.sleep(0.05)
"""


@pytest.fixture
def here(sandbox: Sandbox, short_tmp: Path, request: pytest.FixtureRequest) -> Iterator[Scene]:
    name = f"signals-{abs(hash(request.node.name)) % 100_000}"
    folder = short_tmp / name
    shutil.copytree(EXAMPLE, folder)
    shutil.rmtree(folder / "runs", ignore_errors=True)
    one = Scene(folder, sandbox, name)
    yield one
    sandbox.run(["scancel", "--name", name])
    for log in (*one.rundir.root.glob("attempts/*/run.log"), *one.rundir.logs.glob("*.out")):
        print(f"--- {log}\n{log.read_text(errors='replace')[-3000:]}")


def warn(here: Scene, job: str, name: str) -> None:
    """As slurmctld does before the limit: the batch shell alone gets it, and the job's state stays RUNNING."""
    with suppress(Exception):  # 22.05 exits with 229 after it has done so
        here.sandbox.run(["scancel", "--batch", f"--signal={name}", job])


def heard(here: Scene) -> list[str]:
    return [path.read_text() if path.exists() else "" for path in (here.folder / f"heard-{rank}" for rank in "01")]


def log(here: Scene) -> str:
    return (here.rundir.attempt(1) / "run.log").read_text()


@pytest.mark.chain(
    "Slurm announces the end by `launch.signal: USR2`, `TERM` or another signal than USR1",
    "every rank hears it at once and has until the limit to save, not only KillWait; the next member goes on",
    "the one that was over",
    "nothing: it is the usual end of a member",
)
@pytest.mark.parametrize("name", ["USR2", "TERM", "ALRM", "INT"])
def test_whichever_signal_announces_the_end_reaches_every_rank_and_leaves_it_the_time_to_save(
    here: Scene, name: str, until: Until
) -> None:
    """It leaves with 0, and no guard says that it has finished: the warning says why it has left."""
    (here.folder / "rank.py").write_text(RANK)
    job = here.launch(f"{sys.executable} rank.py {here.folder}", signal=name, warn="10m", time="1h", jobs=1)
    until(lambda: all((here.folder / f"up-{rank}").exists() for rank in "01"), "the ranks", 60)
    warn(here, job, name)
    until(lambda: heard(here) == [f"SIG{name} "] * 2, "the announcement at both ranks", 30)
    until(lambda: "the job ends soon" in log(here), "what the supervisor says")
    assert "SIGKILL in" not in log(here), "the ranks have ten minutes, not 25 s"
    (here.folder / "go").touch()
    until(lambda: here.attempts()[0].ended, "the end", 60)
    assert (here.attempts()[0].exit_code, here.attempts()[0].stop_signal) == (0, 0)
    assert here.attempts()[0].words == "warning signal, then exit 0"
    until(lambda: "the job ends soon: the next member, if any, takes over" in log(here), "what is done about it")


@pytest.mark.parametrize("nodes", [1, 2])
def test_each_rank_of_a_chain_hears_the_warning_once(here: Scene, until: Until, nodes: int) -> None:
    """scancel gives a signal twice to a step of an array of which others wait, and the second one ends the save of a loop that
    saves at KeyboardInterrupt."""
    (here.folder / "rank.py").write_text(RANK)
    words = f"{sys.executable} rank.py {here.folder}"
    job = here.launch(words, signal="INT", warn="10m", time="1h", jobs=3, nodes=nodes, tasks_per_node=2 // nodes)
    until(lambda: all((here.folder / f"up-{rank}").exists() for rank in "01"), "the ranks", 60)
    start = read_page(StartPage, here.rundir.attempt(1))
    assert start is not None
    os.kill(start.pid, signal.SIGINT)  # as slurmctld does; scancel would give this one twice, too
    until(lambda: all(heard(here)), "the announcement at both ranks", 30)
    time.sleep(1)  # a second one came within 50 ms
    assert heard(here) == ["SIGINT "] * 2
    here.sandbox.run(["scancel", job])


# As Lightning and submitit do: at the warning it puts its own job back into the queue, where that may be.
REQUEUES = """
trap 'scontrol requeue $SLURM_JOB_ID' USR1
trap 'exit 0' TERM
touch up
for look in $(seq 600); do sleep 0.2; done
"""


@pytest.mark.chain(
    "The program puts its own job back into the queue at the warning, as Lightning and submitit do where "
    "`launch.requeue` is on, or a person does (`scontrol requeue`)",
    "It is no failure; the same member begins again when Slurm lets it",
    "none",
    "The cause: `put back into the queue: scontrol requeue`, and after the warning `by the program itself as it seems`",
)
@pytest.mark.parametrize("by", ["the program", "a person"])
def test_a_job_that_is_put_back_into_the_queue_is_told_so_and_by_whom_as_far_as_it_is_known(
    here: Scene, until: Until, by: str
) -> None:
    (here.folder / "own.sh").write_text(REQUEUES)
    job = here.launch("bash own.sh", nodes=1, jobs=1, warn="10m", time="1h", requeue=True)
    until(lambda: (here.folder / "up").exists(), "the program", 60)
    if by == "the program":
        warn(here, job, "USR1")
    else:
        here.sandbox.run(["scontrol", "requeue", job])
    until(lambda: here.attempts()[0].ended, "the end", 60)
    words = "put back into the queue: scontrol requeue"
    after = " after the warning, by the program itself as it seems"
    first = here.attempts()[0]
    assert (first.words, first.failure) == (words + (after if by == "the program" else ""), None)


@pytest.mark.chain(
    "Slurm warns before the limit, and a rank of the `srun` does not catch the signal yet that others catch",
    "It waits for that rank, up to a minute or a quarter of the time that is left; `srun` would kill it. One that "
    "never does is left out",
    "none",
    "`a rank that does not catch it yet is waited for`, then `is asked to save and stop`",
)
def test_the_warning_waits_for_a_rank_that_is_still_starting_which_srun_would_kill(here: Scene, until: Until) -> None:
    slow = RANK.replace(
        "def note", 'while rank == "1" and not (here / "start").exists():\n    time.sleep(0.05)\ndef note'
    )
    (here.folder / "rank.py").write_text(slow)
    job = here.launch(f"{sys.executable} rank.py {here.folder}", warn="10m", time="1h", jobs=1)
    until(lambda: (here.folder / "up-0").exists() and ranks_on(here) == {"0", "1"}, "the ranks", 60)
    warn(here, job, "USR1")
    until(lambda: "a rank that does not catch it yet is waited for" in log(here), "what the supervisor says", 30)
    assert heard(here) == ["", ""]
    (here.folder / "start").touch()
    until(lambda: heard(here) == ["SIGUSR1 "] * 2, "the announcement at both ranks", 30)
    until(lambda: log(here).count("is asked to save and stop") == 1, "the word of it")
    (here.folder / "go").touch()
    until(lambda: here.attempts()[0].ended, "the end", 60)
    assert here.attempts()[0].exit_code == 0


def test_a_rank_that_never_catches_the_warning_is_left_out_of_it(here: Scene, until: Until) -> None:
    deaf = RANK.replace("    signal.signal(getattr", '    rank == "0" and signal.signal(getattr')
    (here.folder / "rank.py").write_text(deaf)
    job = here.launch(f"{sys.executable} rank.py {here.folder}", signal="USR2", warn="20s", time="1h", jobs=1)
    until(lambda: all((here.folder / f"up-{rank}").exists() for rank in "01"), "the ranks", 60)
    warn(here, job, "USR2")
    until(lambda: heard(here) == ["SIGUSR2 ", ""], "the announcement at the one that hears it", 30)
    assert ranks_on(here) == {"0", "1"}, "and the other one lives"
    (here.folder / "go").touch()
    until(lambda: here.attempts()[0].ended, "the end", 60)
    assert here.attempts()[0].exit_code == 0


def test_a_warning_by_sigterm_does_not_end_ranks_that_do_not_catch_it(here: Scene, until: Until) -> None:
    """Ten minutes before the limit, and unsaved. They train on, as with any other signal."""
    (here.folder / "rank.py").write_text(RANK.replace('"TERM", ', ""))
    job = here.launch(f"{sys.executable} rank.py {here.folder}", signal="TERM", warn="10m", time="1h", jobs=1)
    until(lambda: all((here.folder / f"up-{rank}").exists() for rank in "01"), "the ranks", 60)
    warn(here, job, "TERM")
    until(lambda: "nothing in the command catches it" in log(here), "what the supervisor says", 30)
    assert ranks_on(here) == {"0", "1"}
    (here.folder / "go").touch()
    until(lambda: here.attempts()[0].ended, "the end", 60)
    assert here.attempts()[0].exit_code == 0


def ranks_on(here: Scene) -> set[str]:
    """The ranks that live."""
    mine = processes.marked("FTSUPERVISE_ATTEMPT_DIR").get(str(here.rundir.attempt(1)), [])
    env = [processes.environment(one.pid) for one in mine]
    return {
        one["SLURM_PROCID"] for one, pid in zip(env, mine, strict=True) if one.get("SLURM_TASK_PID") == str(pid.pid)
    }


@pytest.mark.chain(
    "`scancel` of a job whose `launch.signal` is TERM",
    "Slurm is asked what the SIGTERM was: the job is being ended, so SIGKILL follows after the ranks were told, 5 s "
    "before Slurm's own (25 s with its usual KillWait)",
    "the one that was cancelled",
    "nothing",
)
def test_a_sigterm_of_scancel_starts_the_grace_though_sigterm_announces_the_end_too(here: Scene, until: Until) -> None:
    (here.folder / "rank.py").write_text(RANK)
    job = here.launch(f"{sys.executable} rank.py {here.folder}", signal="TERM", warn="10m", time="1h", jobs=1)
    until(lambda: all((here.folder / f"up-{rank}").exists() for rank in "01"), "the ranks", 60)
    here.sandbox.run(["scancel", job])
    until(
        lambda: "SIGTERM: passed on to the command; SIGKILL in 1.5 s" in log(here), "KillWait, 2 s, less a quarter", 30
    )
    (here.folder / "go").touch()
    until(lambda: here.attempts()[0].ended, "the end", 60)
    assert here.attempts()[0].words == "cancelled or preempted (SIGTERM)"


@pytest.mark.parametrize("name", ["USR2", "TERM"])
def test_the_guard_answers_the_signal_that_announces_the_end_and_the_next_member_goes_on(
    here: Scene, name: str, until: Until
) -> None:
    job = here.train("--steps 100000 --step-time 0.02 --save-every 1000000", signal=name, warn="10m", time="1h", jobs=2)
    until(lambda: here.trains(1), "the first member", 60)
    warn(here, f"{job}_1", name)
    until(lambda: here.trains(2), "the second member", 90)
    first, second = here.attempts()
    assert first.words == "warning signal"
    assert first.saved is not None and second.first_step == first.last_step + 1  # type: ignore[operator]


def test_the_ranks_are_told_of_another_end_by_a_file(sandbox: Sandbox, tmp_path: Path, until: Until) -> None:
    """Slurm is asked when half of the time is over until a guard would stop; here that is 5 s, the shortest."""
    submit = ["sbatch", "--parsable", "--mem=10", "--time=2", "-o", "/dev/null", "--wrap", "sleep 300"]
    job = sandbox.run(submit).strip()
    env = {**sandbox.env(), "SLURM_JOB_ID": job}
    until(lambda: sandbox.run(["squeue", "-h", "-j", job, "-o", "%T"]).strip() == "RUNNING", "the job")
    end, said = JobEnd(env), list[str]()
    assert end.at is not None
    follower = EndFollower(end, tmp_path, end.at - time.time(), said.append)
    try:
        sandbox.run(["scontrol", "update", f"JobId={job}", "TimeLimit=60"])
        until(lambda: (tmp_path / "deadline").exists(), "the file", 30)
        assert float((tmp_path / "deadline").read_text()) > time.time() + 1800
        until(lambda: said, "the word of it, which comes after the file", 30)
        assert "its limit was changed" in said[0]
    finally:
        follower.close()
        sandbox.run(["scancel", job])


@pytest.mark.chain(
    "somebody extends the time limit of a running job (`scontrol update TimeLimit`)",
    "the guards follow the new end, and a restart in place counts with it",
    "none",
    "the new end, in the attempt's log",
)
@pytest.mark.slow
def test_a_limit_that_is_extended_while_the_job_runs_lets_the_attempt_and_its_restarts_go_on(
    here: Scene, until: Until
) -> None:
    """Two minutes are fewer than a restart is thought to need beside the warning; the guard would stop after half of them."""
    words = "--steps 100000 --step-time 0.02 --save-every 20"
    launch = f"{sys.executable} train.py --log-every 1 {words}"
    job = here.launch(launch, warn="10s", time="2m", jobs=1, restart={"same_failure": 0})
    first = until(lambda: here.trains(1), "the first attempt", 60)
    here.sandbox.run(["scontrol", "update", f"JobId={job}", "TimeLimit=60"])
    until(lambda: (here.rundir.attempt(1) / "deadline").exists(), "the ranks are told", 90)
    assert float((here.rundir.attempt(1) / "deadline").read_text()) > time.time() + 1800
    os.kill(first[1], signal.SIGKILL)
    until(lambda: here.trains(2), "the restart in place", 60)
    environ = processes.environment(here.trains(2)[0])
    assert float(environ["FTSUPERVISE_DEADLINE"]) > time.time() + 1800
