"""``doctor`` on a real Slurm: nothing is wrong on a sandbox that is well, each changed line of its slurm.conf is found, and the
job of ``--probe`` sees from inside, and is gone afterwards. The other planted faults are in tests/faults/test_doctor_faults.py.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from ftsupervise.sandbox import Sandbox, temporary
from tests.neighbours.typed import typed

pytestmark = pytest.mark.slurm
HEALTHY: dict[str, Any] = {"command": [sys.executable, "train.py"], "time": "1h", "jobs": 3}


@pytest.fixture(scope="module")
def cluster(slurm_installed: None, short_tmp: Path) -> Iterator[Sandbox]:
    """Two nodes whose settings the tests of this file change, one after the other."""
    with temporary(short_tmp / "doctor", nodes=2, slurmd_timeout=60) as made:
        yield made


@pytest.fixture(scope="module")
def cron(cluster: Sandbox, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cron of Slurm jobs that lives, and watches."""
    top = tmp_path_factory.mktemp("cron")
    env = {**cluster.env(), "HOME": str(top), "FTSUPERVISE_STATE_DIR": str(top / "state")}
    typed("cron", "install", "--backend", "slurm", "--dir", top / "cron", folder=top, env=env, code=0)
    typed("cron", "add", "watch-all", "--dir", top / "cron", folder=top, env=env, code=0)
    return top / "cron"


class Desk:
    """A run that is well, on the cluster."""

    def __init__(self, folder: Path, cluster: Sandbox, cron: Path) -> None:
        self.folder, self.cluster = folder, cluster
        (folder / "train.py").write_text("from ftsupervise import Guard\n")
        self.settings: dict[str, Any] = {
            "name": "thesis",
            "launch": dict(HEALTHY),
            "alerts": {"receivers": [{"file": {"path": str(folder / "messages")}}]},
            "cron": {"directory": str(cron)},
        }

    def examine(self, *words: str, **env: str) -> tuple[int, dict[str, list[dict[str, str]]]]:
        """The exit code, and the lines by their words: ok, wrong, unseen."""
        (self.folder / "ftsupervise.yaml").write_text(yaml.safe_dump(self.settings))
        whole = {**self.cluster.env(), **env}
        done = typed("doctor", "--json", *words, folder=self.folder, env=whole, seconds=240)
        found: dict[str, list[dict[str, str]]] = {"ok": [], "wrong": [], "unseen": []}
        for line in json.loads(done.stdout)["lines"]:
            found[line["word"]].append(line)
        return done.returncode, found


@pytest.fixture
def desk(tmp_path: Path, cluster: Sandbox, cron: Path) -> Desk:
    return Desk(tmp_path, cluster, cron)


@pytest.fixture
def conf(cluster: Sandbox) -> Iterator[Callable[..., None]]:
    """``conf("MaxArraySize=3")``: the cluster has these lines in its slurm.conf until the test is over."""
    path = cluster.layout.slurm_conf
    before = path.read_text()

    def change(*settings: str) -> None:
        keys = {one.partition("=")[0] for one in settings if not one.startswith(("NodeName", "PartitionName"))}
        kept = [line for line in before.splitlines() if line.partition("=")[0] not in keys]
        path.write_text("\n".join([*kept, *settings]) + "\n")
        cluster.controller("restart")
        cluster.wait_ready()

    yield change
    path.write_text(before)
    cluster.controller("restart")
    cluster.wait_ready()


def test_a_sandbox_that_is_well_has_nothing_wrong(desk: Desk) -> None:
    code, lines = desk.examine()
    assert lines["wrong"] == lines["unseen"] == [] and code == 0
    assert {"Slurm", "slurm.conf", "partition", "run directory", "cron", "python"} <= {
        one["about"] for one in lines["ok"]
    }


# what is in slurm.conf; what the settings say beside it; the line; what its advice has
FAULTS: dict[str, tuple[tuple[str, ...], dict[str, Any], str, str]] = {
    "an array is longer than MaxArraySize": (("MaxArraySize=3",), {}, "MaxArraySize", "jobs: 2"),
    "no job is requeued": (("JobRequeue=0",), {"launch": {"requeue": True}}, "JobRequeue", "requeue: false"),
    "no limit ends a job": (("OverTimeLimit=UNLIMITED",), {}, "OverTimeLimit", "OverTimeLimit=0"),
    "no time to save": (("KillWait=1",), {}, "KillWait", "KillWait=30"),
    "a lost node is kept": (("SlurmdTimeout=7200",), {}, "SlurmdTimeout", "spare_nodes"),
    "a lost node is kept for ever": (("SlurmdTimeout=0",), {}, "SlurmdTimeout", "SlurmdTimeout=300"),
    "the others see no jobs": (("PrivateData=jobs",), {"share": {"watch": True}}, "PrivateData", "share"),
    "a preempted job is not warned": (
        ("PreemptType=preempt/partition_prio", "PreemptMode=REQUEUE"), {}, "preemption", "preempt_send_user_signal"
    ),
    "no such partition": ((), {"launch": {"partition": "gpuu"}}, "partition", "partition: prod"),
    "a limit shorter than the run's": (
        ("PartitionName=short Nodes=node-[0-1] MaxTime=00:30:00",),
        {"launch": {"partition": "short"}}, "partition", 'time: "00:30:00"',
    ),
    "a partition that is down": (
        ("PartitionName=closed Nodes=node-[0-1] State=DOWN",), {"launch": {"partition": "closed"}}, "partition", "scontrol"
    ),
    "more nodes than there are": ((), {"launch": {"nodes": 3}}, "partition", "launch.nodes"),
    "nodes elsewhere, and a directory of this machine": (
        ("NodeName=away NodeHostname=away-host NodeAddr=127.0.0.1 Port=1 CPUs=1 State=DOWN",
         "PartitionName=far Nodes=away MaxTime=INFINITE"), {}, "run directory", "run_dir:",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_each_planted_fault_of_the_cluster_is_found_with_what_to_type(
    desk: Desk, conf: Callable[..., None], name: str
) -> None:
    lines, more, about, advice = FAULTS[name]
    if lines:
        conf(*lines)
    desk.settings["launch"] |= more.get("launch", {})
    desk.settings |= {key: value for key, value in more.items() if key != "launch"}
    code, found = desk.examine()
    assert code == 1 and about in {one["about"] for one in found["wrong"]}, found
    others = {one["about"] for one in found["wrong"]} - {about}
    assert others <= ({"state directory"} if "elsewhere" in name else set()), found["wrong"]
    assert all(advice in one["do"] for one in found["wrong"] if one["about"] == about), found["wrong"]


def test_drained_nodes_are_found(desk: Desk) -> None:
    both = ["scontrol", "update", "nodename=node-[0-1]"]
    desk.cluster.run([*both, "state=drain", "reason=test"])
    try:
        code, found = desk.examine()
    finally:
        desk.cluster.run([*both, "state=resume"])
    assert code == 1 and [one["about"] for one in found["wrong"]] == ["partition"]
    assert "sinfo -R" in found["wrong"][0]["do"]


def test_a_controller_that_is_away_is_unseen_and_nothing_is_wrong(desk: Desk) -> None:
    desk.cluster.controller("stop")
    try:
        code, found = desk.examine()
    finally:
        desk.cluster.controller("start")
        desk.cluster.wait_ready()
    assert code == 3 and found["wrong"] == [], found
    assert "Slurm" in {one["about"] for one in found["unseen"]}
    assert any("scontrol ping" in one["do"] for one in found["unseen"])


def test_a_path_without_slurms_commands_is_found(desk: Desk, tmp_path: Path) -> None:
    desk.settings["scheduler"] = "slurm"
    code, found = desk.examine(PATH=str(tmp_path))
    line = next(one for one in found["wrong"] if one["about"] == "Slurm")
    assert code == 1 and "sbatch" in line["what"] and "module load slurm" in line["do"]


def test_a_cron_whose_jobs_were_cancelled_is_found(desk: Desk, tmp_path: Path) -> None:
    env = {**desk.cluster.env(), "FTSUPERVISE_STATE_DIR": str(tmp_path / "state")}
    words = ("cron", "install", "--backend", "slurm", "--dir", tmp_path / "own")
    before = set(desk.cluster.run(["squeue", "-h", "-o", "%A"]).split())
    typed(*words, folder=tmp_path, env=env, code=0)
    typed("cron", "add", "watch-all", "--dir", tmp_path / "own", folder=tmp_path, env=env, code=0)
    desk.settings["cron"] = {"directory": str(tmp_path / "own")}
    desk.cluster.run(["scancel", *(set(desk.cluster.run(["squeue", "-h", "-o", "%A"]).split()) - before)])
    code, found = desk.examine()
    assert code == 1 and [one["about"] for one in found["wrong"]] == ["cron"], found
    assert "ftsupervise cron ensure" in found["wrong"][0]["do"]


SACCTMGR = """#!/bin/sh
case "$*" in
  *assoc*) echo "physics||normal|||" ;;
  *qos*) echo "normal|00:20:00||2" ;;
esac
"""


def test_limits_of_the_accounting_are_held_against_the_settings(desk: Desk, tmp_path: Path) -> None:
    """No database can be installed here: ``scontrol`` says that there is one, and ``sacctmgr`` answers as a real one does."""
    front = tmp_path / "front"
    front.mkdir()
    (front / "sacctmgr").write_text(SACCTMGR)
    real = shutil.which("scontrol", path=desk.cluster.env()["PATH"])
    says = f'#!/bin/sh\n{real} "$@" | sed "s,^AccountingStorageType .*,AccountingStorageType = accounting_storage/slurmdbd,"\n'
    (front / "scontrol").write_text(says)
    for one in front.iterdir():
        one.chmod(0o755)
    code, found = desk.examine(PATH=f"{front}{os.pathsep}{desk.cluster.env()['PATH']}")
    assert code == 1 and {one["about"] for one in found["wrong"]} == {"limits"}, found
    assert {one["do"] for one in found["wrong"]} == {"write launch: {jobs: 2}", 'write launch: {time: "00:20:00"}'}
    (front / "sacctmgr").write_text("#!/bin/sh\necho 'sacctmgr: error: Problem talking to the database' >&2\nexit 1\n")
    code, found = desk.examine(PATH=f"{front}{os.pathsep}{desk.cluster.env()['PATH']}")
    assert code == 3 and [one["about"] for one in found["unseen"]] == ["limits"], found


# ------------------------------------------------------------------------------------------------------------ --probe


def in_the_queue(cluster: Sandbox) -> list[str]:
    return cluster.run(["squeue", "-h", "-n", "ftsupervise-doctor", "-o", "%A %T"]).split()


def left_behind(folder: Path) -> list[Path]:
    return list(folder.rglob(".tmp-doctor-*"))


def test_the_probe_sees_from_inside_and_takes_itself_away(desk: Desk) -> None:
    desk.settings["launch"] |= {"nodes": 2, "setup": "export MY_SETUP=1"}
    code, found = desk.examine("--probe")
    assert found["wrong"] == found["unseen"] == [] and code == 0, found
    told = {one["about"]: one["what"] for one in found["ok"]}
    assert {"signal", "job's python", "run directory on node-0", "switch", "job's clock", "memory"} <= told.keys()
    assert told["signal"].startswith("it came ") and told["nodes"].startswith("2 nodes see")
    assert not [word for word in in_the_queue(desk.cluster) if word == "RUNNING"] and not left_behind(desk.folder)


def wrapped(desk: Desk, tmp_path: Path, filter_: str) -> dict[str, str]:
    """A site's sbatch that changes the script before it hands it in."""
    front = tmp_path / "front"
    front.mkdir()
    real = shutil.which("sbatch", path=desk.cluster.env()["PATH"])
    (front / "sbatch").write_text(f'#!/bin/bash\nsed "{filter_}" | {real} "$@"\n')
    (front / "sbatch").chmod(0o755)
    return {"PATH": f"{front}{os.pathsep}{desk.cluster.env()['PATH']}"}


def test_a_signal_that_never_comes_is_found(desk: Desk, tmp_path: Path) -> None:
    code, found = desk.examine("--probe", **wrapped(desk, tmp_path, "s/^#SBATCH --signal.*//"))
    assert code == 1 and [one["about"] for one in found["wrong"]] == ["signal"], found
    assert "sbatch --signal" in found["wrong"][0]["do"]


def test_a_python_that_the_setup_chooses_is_asked_in_the_job(desk: Desk, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(tmp_path / "bare")], check=True, timeout=120)
    desk.settings["launch"] |= {"command": "python train.py", "setup": f"export PATH={tmp_path}/bare/bin:$PATH"}
    code, found = desk.examine()
    assert (
        code == 3 and [one["about"] for one in found["unseen"]] == ["python"] and "--probe" in found["unseen"][0]["do"]
    )
    code, found = desk.examine("--probe")
    assert code == 0 and not found["unseen"], found
    assert "bare/bin/python" in (told := {one["about"]: one["what"] for one in found["ok"]}["job's python"]), found
    assert "which has no ftsupervise: the run gives it the guard" in told


def test_a_setup_that_fails_ends_the_trial_and_is_told(desk: Desk) -> None:
    desk.settings["launch"]["setup"] = "echo there is no module cuda >&2\nexit 1"
    code, found = desk.examine("--probe")
    line = next(one for one in found["wrong"] if one["about"] == "trial job")
    assert code == 1 and "there is no module cuda" in line["what"] and "launch.setup" in line["do"], found
    assert not left_behind(desk.folder)


def test_a_trial_that_does_not_start_is_unseen_and_taken_out_of_the_queue(desk: Desk) -> None:
    block = ["sbatch", "--parsable", "-N2", "--exclusive", "-o", "/dev/null", "--wrap", "sleep 600"]
    job = subprocess.run(block, env=desk.cluster.env(), cwd=desk.folder, capture_output=True, text=True, check=True)
    try:
        code, found = desk.examine("--probe", "--wait", "5s")
    finally:
        desk.cluster.run(["scancel", job.stdout.strip()])
    assert code == 3 and [one["about"] for one in found["unseen"]] == ["trial job"], found
    assert "waited for 5 s" in found["unseen"][0]["what"] and in_the_queue(desk.cluster) == []
