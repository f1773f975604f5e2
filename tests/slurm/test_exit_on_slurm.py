"""The run directory stops answering while a job trains, and does not come back: the job ends, and its node stays in use."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from ftsupervise.host import processes
from ftsupervise.sandbox import Sandbox
from tests.faults.conftest import HungMount, dead_mount  # noqa: F401 - a fixture
from tests.neighbours.patience import wait_until
from tests.neighbours.typed import typed

pytestmark = [pytest.mark.slurm, pytest.mark.root]
RANK = """import sys, time
from pathlib import Path
here = Path(sys.argv[1])
(here / "up").touch()
while not (here / "leave").exists():
    time.sleep(0.01)
sys.exit(int((here / "leave").read_text()))
"""


FREEZER = Path("/sys/fs/cgroup/freezer")  # of cgroup v1: by it Slurm finds and ends the processes of a job


@pytest.fixture
def by_cgroup() -> Iterator[Callable[[Sandbox], None]]:
    """Has the nodes follow the processes of a job by its control group, as most clusters do: a sandbox has none."""
    if not (FREEZER / "cgroup.procs").exists() or not os.access(FREEZER, os.W_OK):
        pytest.skip("no freezer of cgroup v1 on this machine")

    def follow(cluster: Sandbox) -> None:
        where = f"CgroupPlugin=cgroup/v1\nCgroupMountpoint={FREEZER.parent}\nCgroupAutomount=no\n"
        (cluster.directory / "cgroup.conf").write_text(where)
        cluster.node("node-0", "crash")  # a slurmd reads that file when it starts
        cluster.node("node-0", "start")
        cluster.wait_ready()

    yield follow
    for folder, _, _ in os.walk(FREEZER / "slurm_node-0", topdown=False):
        wait_until(lambda folder=folder: not Path(folder, "cgroup.procs").read_text(), "the end of its processes")  # type: ignore[misc]
        Path(folder).rmdir()


class Job:
    """A job of one rank. ``run``, ``output``: where its run directory and its output lie."""

    def __init__(self, cluster: Sandbox, folder: Path, *, run: Path, output: Path) -> None:
        self.cluster, self.folder = cluster, folder
        (folder / "rank.py").write_text(RANK)
        (folder / "ftsupervise.yaml").write_text(
            f"name: dead\nrun_dir: {run}/run\nlaunch:\n"
            f"  command: srun {sys.executable} {folder}/rank.py {folder}\n"
            f"  nodes: 1\n  jobs: 1\n  output: {output}/job.out\n  restart: {{space_wait: 3s, stop_within: 1s}}\n"
        )
        typed("launch", folder=folder, env=cluster.env())
        wait_until((folder / "up").exists, "the rank")
        self.number = cluster.run(["squeue", "-h", "-n", "dead", "-t", "R", "-o", "%A"]).strip()

    def ends(self, how: str) -> None:
        """Its command fails, or somebody cancels it; then its end is awaited."""
        if how == "its command fails":
            (self.folder / "code").write_text("3")
            (self.folder / "code").rename(self.folder / "leave")
        else:
            self.cluster.run(["scancel", self.number])

        state = self.has_ended()
        assert state == ("FAILED" if how == "its command fails" else "CANCELLED")
        if state == "FAILED":
            assert "ExitCode=3:0" in self.cluster.run(["scontrol", "show", "job", self.number])
            assert "left with exit code 3: the file system does not answer" in (self.folder / "job.out").read_text()

    def state(self) -> str:
        return self.cluster.run(["squeue", "-h", "-t", "all", "-j", self.number, "-o", "%T"]).strip()

    def has_ended(self) -> str:
        """Return Slurm's word for it, when nothing of it is left."""
        over = ("COMPLETED", "FAILED", "CANCELLED")
        return wait_until(lambda: one if (one := self.state()) in over else "", "the end of the job", 90)

    def node(self) -> str:
        return self.cluster.run(["sinfo", "-h", "-N", "-o", "%t"]).strip()

    def has_a_free_node(self) -> None:
        wait_until(lambda: self.node() == "idle", "a node for the next job: Slurm drains it after 30 s", 45)
        assert "Kill task failed" not in self.cluster.run(["sinfo", "-R"])


@pytest.mark.fault(
    "The same on Slurm: the command fails, or somebody cancels the job",
    'the job ends, and its node is not drained ("Kill task failed")',
)
@pytest.mark.parametrize("how", ["its command fails", "somebody cancels it"])
def test_a_job_whose_run_directory_does_not_come_back_ends_and_its_node_is_not_drained(
    make_sandbox: Callable[..., Sandbox],
    dead_mount: HungMount,  # noqa: F811
    tmp_path: Path,
    how: str,
) -> None:
    job = Job(make_sandbox(nodes=1, kill_wait=5), tmp_path, run=dead_mount.point, output=tmp_path)
    dead_mount.hang("all")
    job.ends(how)
    job.has_a_free_node()


@pytest.mark.fault(
    "The same where Slurm follows the processes of a job by control groups (`proctrack/cgroup`), which keep a "
    "process that the kernel keeps",
    "as above where SIGKILL ends who waits (NFS); else the job ends with its exit code after Slurm's "
    "`UnkillableStepTimeout`, and Slurm drains the node, which nothing in a job can prevent",
)
@pytest.mark.parametrize("how", ["its command fails", "somebody cancels it"])
@pytest.mark.parametrize("as_on", ["NFS", "a disk that not even SIGKILL helps against"])
def test_where_slurm_follows_control_groups_the_node_is_drained_only_for_what_no_kill_ends(
    by_cgroup: Callable[[Sandbox], None],
    make_sandbox: Callable[..., Sandbox],
    dead_mount: HungMount,  # noqa: F811
    tmp_path: Path,
    how: str,
    as_on: str,
) -> None:
    """A process that the kernel keeps stays in the group of its job, whoever has left without it. Only root could move it."""
    cluster = make_sandbox(nodes=1, kill_wait=5, overrides=("ProctrackType=proctrack/cgroup",))
    by_cgroup(cluster)
    job = Job(cluster, tmp_path, run=dead_mount.point, output=tmp_path)
    assert (FREEZER / "slurm_node-0" / "uid_0" / f"job_{job.number}").is_dir()
    if as_on == "NFS":
        dead_mount.stop_reading()
        job.ends(how)
        job.has_a_free_node()
    else:
        dead_mount.hang("all")
        job.ends(how)
        assert "Kill task failed" in wait_until(
            lambda: cluster.run(["sinfo", "-h", "-R"]), "what Slurm says of the node"
        )


@pytest.mark.fault(
    "The disk of `launch.output` hangs, and somebody cancels the job",
    "Slurm's `slurmstepd` waits for that disk before it signals any process: the job stays in COMPLETING until the "
    "disk answers. `ftsupervise kill` ends the job all the same",
)
def test_a_job_whose_output_hangs_is_ended_by_the_kill_switch_and_slurm_holds_one_that_is_cancelled(
    make_sandbox: Callable[..., Sandbox],
    dead_mount: HungMount,  # noqa: F811
    tmp_path: Path,
) -> None:
    """slurmstepd tells the job's output that it is cancelled before it tells any process, and waits for the disk in that."""
    cluster = make_sandbox(nodes=1, kill_wait=5)
    job = Job(cluster, tmp_path, run=tmp_path, output=dead_mount.point)
    dead_mount.hang("all")
    typed("kill", "--yes", folder=tmp_path, env=cluster.env(), code=0)
    job.has_ended()
    job.has_a_free_node()
    dead_mount.answer()
    typed("clear", folder=tmp_path, env=cluster.env(), code=0)
    (tmp_path / "up").unlink()
    job = Job(cluster, tmp_path, run=tmp_path, output=dead_mount.point)
    dead_mount.hang("all")
    cluster.run(["scancel", job.number])
    # itself, or behind the job's srun, which writes into the same open file (26.05)
    for_disk = {"request_wait_answer", "fdget_pos"}
    wait_until(lambda: for_disk & waits_of_slurmstepd(), "slurmstepd in its wait for the disk")
    assert job.state() == "COMPLETING"
    dead_mount.answer()
    assert job.has_ended() == "CANCELLED"
    job.has_a_free_node()


def waits_of_slurmstepd() -> set[str]:
    """Where in the kernel its threads wait."""
    found = [one.pid for one in processes.living() if one.name == "slurmstepd"]
    words = set()
    for thread in (thread for pid in found for thread in Path(f"/proc/{pid}/task").glob("*/wchan")):
        with suppress(OSError):  # it has ended meanwhile
            words.add(thread.read_text())
    return words
