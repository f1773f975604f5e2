"""A job, its agents and its keeper stand in a folder into which another account has laid Python modules. Another account may
exchange the folder from which a job is submitted."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.sandbox import Sandbox
from ftsupervise.scheduler.slurm import Slurm
from tests.faults.test_strangers_code import TYPED, Trap
from tests.neighbours.stranger import as_stranger, become_stranger


@pytest.fixture
def trap() -> Iterator[Trap]:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another account")
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    yield Trap(top)
    shutil.rmtree(top)


@pytest.mark.threat(
    "The same files lie there in a job of a real Slurm, with agents and the cron's keeper at work.",
    "None of them is imported, and the job script names its directory by `--chdir`.",
)
@pytest.mark.root
@pytest.mark.slurm
def test_a_job_its_agents_and_its_keeper_run_no_code_of_the_folder_they_stand_in(
    trap: Trap, sandbox: Sandbox, until: Callable[..., Any]
) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: slurm\nnodes: {directory: nodes}\n"
        "launch: {command: [sh, -c, 'touch begun; while ! [ -e over ]; do sleep 0.2; done'], nodes: 2, jobs: 1, time: '5:00'}\n"
    )
    (trap.folder / "nodes").mkdir()
    env = {**sandbox.env(), "FTSUPERVISE_KEEPER_SECONDS": "1", "PYTHONPATH": ":/nowhere"}
    argv = [TYPED, "launch", str(trap.folder / "ftsupervise.yaml")]
    subprocess.run(argv, cwd="/", env=env, check=True, capture_output=True, timeout=60)
    until((trap.folder / "begun").exists, "the training", 120)

    def at_work(word: str) -> bool:
        return any(word in line for line in processes(trap.folder))

    until(lambda: at_work("ftsupervise.ranks"), "the agents")
    until(lambda: at_work("cron\0ensure"), "the keeper")
    script = next((trap.folder / "runs/mine/launches").glob("*/*.sbatch")).read_text()
    assert f"#SBATCH --chdir={trap.folder}\n" in script
    (trap.folder / "over").touch()
    until(lambda: not sandbox.run(["squeue", "-h", "-n", "mine"]).strip(), "the end", 120)
    assert trap.sprung() == []


@pytest.mark.threat(
    "A member who may write above the run puts another directory in its place in the moment between `launch`, which writes the "
    "script of the job, and sbatch, which reads it: with a script of theirs by that name, which would run as you.",
    "sbatch is given the text itself, and reads no file.",
)
@pytest.mark.root
@pytest.mark.slurm
def test_the_script_that_is_submitted_is_the_text_and_not_what_lies_there_by_now(
    trap: Trap, sandbox: Sandbox, until: Callable[..., Any]
) -> None:
    path, token = trap.folder / "train.sbatch", "a-token-of-this-test"
    script = "#!/bin/bash\n#SBATCH --output=/dev/null\n#SBATCH --comment={}\ntouch {}/{}\n"
    as_stranger(lambda: path.write_text(script.format(token, trap.marks, "theirs")))
    job = Slurm(sandbox.env()).submit(script.format(token, trap.marks, "ours"), script_path=path, token=token)
    until(lambda: not sandbox.run(["squeue", "-h", "-j", job.job_id]).strip(), "the end", 120)
    assert trap.sprung() == ["ours"]


@pytest.mark.threat(
    "You type `doctor --probe` where a member of the group may rename folders, and the one of its job is exchanged for a link "
    "to a private folder of yours. Slurm would write the output there, and all that lies there would be removed with the job.",
    "No job is submitted there, and the line says who may write. What is removed is the folder that was made, held open.",
)
@pytest.mark.root
@pytest.mark.slurm
def test_doctor_submits_no_job_whose_folder_others_may_exchange(trap: Trap, sandbox: Sandbox) -> None:
    project, private = trap.folder.parent / "project", trap.folder.parent / "private"
    for folder, mode in ((project, 0o777), (private, 0o700)):
        folder.mkdir()
        folder.chmod(mode)
    (private / "thesis.tex").write_text("a year of work")
    (project / "ftsupervise.yaml").write_text(
        f"name: mine\nscheduler: slurm\nlaunch: {{command: [{sys.executable}, train.py], jobs: 1, time: '5:00'}}\n"
    )
    stranger = exchanging(project, private)
    try:
        env = {**sandbox.env(), "HOME": str(private), "FTSUPERVISE_STATE_DIR": str(trap.folder.parent / "state")}
        argv = [TYPED, "doctor", "--probe", "--json"]
        done = subprocess.run(argv, cwd=project, env=env, capture_output=True, text=True, timeout=240)
    finally:
        os.kill(stranger, signal.SIGKILL)
        os.waitpid(stranger, 0)
    assert os.listdir(private) == ["thesis.tex"] and (private / "thesis.tex").read_text() == "a year of work"
    line = next(one for one in json.loads(done.stdout)["lines"] if one["about"] == "trial job")
    assert line["word"] == "unseen" and f"everybody may write {project}" in line["what"] and "chmod" in line["do"], line


def exchanging(project: Path, private: Path) -> int:
    """The process of a stranger who puts a link to ``private`` in the place of each folder of doctor's in ``project``."""
    pid = os.fork()
    if pid:
        return pid
    try:
        become_stranger()
        while True:
            for one in project.glob(".tmp-doctor-*"):
                with suppress(OSError):
                    if one.is_dir() and not one.is_symlink():
                        one.rename(one.with_name(f"taken-{one.name}"))
                        one.symlink_to(private)
            time.sleep(0.001)
    finally:
        os._exit(1)


def processes(folder: Path) -> list[str]:
    """The command lines of all processes that stand in ``folder``: other tests on this machine have agents too."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if (entry / "cwd").readlink() == folder:
                    found.append((entry / "cmdline").read_bytes().decode("utf-8", "replace"))
            except OSError:
                continue
    return found


@pytest.mark.threat(
    "Your umask lets a group write (002). Slurm makes the output of a job by it, and a member opens that before the job has "
    "begun and taken the right away: they could write steps, losses and errors into it, and empty it, as long as the job runs.",
    "Slurm makes the output by a narrower umask, and the script sets yours.",
)
@pytest.mark.root
@pytest.mark.slurm
def test_nobody_has_the_output_of_a_job_open_to_write(trap: Trap, sandbox: Sandbox, until: Callable[..., Any]) -> None:
    (trap.folder / "ftsupervise.yaml").write_text(
        "name: mine\nscheduler: slurm\n"
        "launch: {command: [sh, -c, 'umask >> umask; srun -n1 sh -c umask >> umask; touch over'], jobs: 1, time: '5:00'}\n"
    )
    logs = trap.folder / "runs/mine/logs"
    pid = os.fork()
    if pid == 0:
        try:
            become_stranger()
            while not (trap.folder / "over").exists():
                for one in logs.glob("*.out"):
                    with suppress(PermissionError):
                        os.open(one, os.O_WRONLY)
                        os._exit(1)
                time.sleep(0.005)
        finally:
            os._exit(0)
    argv = [TYPED, "launch", str(trap.folder / "ftsupervise.yaml")]
    subprocess.run(argv, cwd="/", env=sandbox.env(), umask=0, check=True, capture_output=True, timeout=60)
    until((trap.folder / "over").exists, "the training", 120)
    until(lambda: not sandbox.run(["squeue", "-h", "-n", "mine"]).strip(), "the end", 120)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert (trap.folder / "umask").read_text() == "0000\n0000\n"
