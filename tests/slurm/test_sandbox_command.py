"""``ftsupervise sandbox`` as people type it."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import ftsupervise
from ftsupervise.errors import NotFound
from ftsupervise.host.processes import living
from ftsupervise.sandbox import Sandbox, sandboxes

pytestmark = pytest.mark.slurm

Typed = Callable[..., "subprocess.CompletedProcess[str]"]
ROOT = pytest.mark.skipif(os.getuid() != 0, reason="needs root")


@pytest.fixture
def place(slurm_installed: None, short_tmp: Path) -> Iterator[Path]:
    directory = short_tmp / "cli"
    yield directory
    try:
        Sandbox.remains(directory).down()
    except NotFound:
        pass


@pytest.fixture
def typed(place: Path) -> Typed:
    def run(*words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ftsupervise", "sandbox", *words]
        full = {**os.environ, "FTSUPERVISE_SANDBOX": str(place), **(env or {})}
        return subprocess.run(command, env=full, capture_output=True, text=True, timeout=90)

    return run


def test_up_says_what_to_type_next_and_that_works(typed: Typed, place: Path) -> None:
    up = typed("up", "--dir", str(place), "--nodes", "2", "--set", "MaxArraySize=60")
    assert up.returncode == 0 and f"2 nodes with 8 GPUs each, in {place}" in up.stdout
    [line] = [line for line in up.stdout.splitlines() if "eval" in line]
    typing = line.split("   then")[0].strip().replace("ftsupervise", f"{sys.executable} -m ftsupervise")
    shell = f"{typing}; sinfo -h -o %D; scontrol show config | grep MaxArraySize; env"
    outer = os.environ | {"SLURM_JOB_ID": "4711", "SBATCH_PARTITION": "a100"}
    out = subprocess.run(["sh", "-c", shell], env=outer, capture_output=True, text=True, timeout=60).stdout
    assert out.startswith("2\nMaxArraySize            = 60\n")
    assert "SLURM_JOB_ID" not in out and "SBATCH_PARTITION" not in out
    assert json.loads(typed("env", "--json").stdout)["SLURM_CONF"] == f"{place}/slurm.conf"
    assert f"{place}  up, 2 nodes" in typed("list").stdout
    assert typed("down").stdout == f"down: {place}\n"
    assert not place.exists()


def test_down_says_what_a_shell_has_to_forget_that_was_in_the_sandbox(typed: Typed, place: Path) -> None:
    typed("up", "--nodes", "1")
    down = typed("down", env={"SLURM_CONF": f"{place}/slurm.conf"}).stdout
    assert "unset SLURM_CONF FTSUPERVISE_SANDBOX " in down


def test_a_node_and_the_controller_are_broken_by_name(typed: Typed, place: Path) -> None:
    typed("up", "--nodes", "2")
    crash = typed("node", "node-1", "crash")
    undo = "to undo it: ftsupervise sandbox node node-1 start"
    assert crash.returncode == 0
    assert crash.stdout.startswith(f"node-1: crashed, with all processes of its jobs; {undo}")
    assert len(crash.stdout.splitlines()) == 1
    assert typed("controller", "kill").stdout.startswith("slurmctld: killed; to undo it:")
    assert f"{place}  no controller, 1 node" in typed("list").stdout
    again = typed("node", "node-1", "crash")
    assert (again.returncode, again.stderr.splitlines()[0]) == (66, "ftsupervise: node-1 is not running")
    assert typed("node", "node-1", "explode").returncode == 64


def test_without_a_sandbox_one_is_told_how_to_make_one(typed: Typed, place: Path) -> None:
    for words in (["down"], ["env"], ["node", "node-1", "kill"], ["controller", "pause"]):
        done = typed(*words)
        assert done.returncode == 66
        assert done.stderr.startswith(f"ftsupervise: there is no sandbox in {place}\n  ftsupervise sandbox up")


def test_a_command_gets_a_sandbox_of_its_own_and_gives_its_exit_code(typed: Typed, place: Path) -> None:
    done = typed("--nodes", "2", "--", "sh", "-c", "sinfo -h -o %D; echo $FTSUPERVISE_SANDBOX; exit 7")
    assert (done.returncode, done.stdout) == (7, f"2\n{place}\n")
    assert not place.exists()
    assert typed("--", "sh", "-c", "kill -9 $$").returncode == 128 + signal.SIGKILL
    missing = typed("--", "no-such-command")
    assert (missing.returncode, missing.stderr) == (127, "ftsupervise: no such command: no-such-command\n")
    assert not place.exists()


def test_a_command_uses_the_sandbox_that_is_up_and_leaves_it(typed: Typed, place: Path) -> None:
    typed("up", "--nodes", "1")
    assert typed("--", "sinfo", "-h", "-o", "%D").stdout == "1\n"
    other = typed("--nodes", "2", "--", "sinfo")
    assert other.returncode == 100 and "is up with other nodes" in other.stderr
    assert Sandbox.at(place).alive


def test_a_command_told_to_end_ends_and_takes_its_sandbox_with_it(place: Path, until: Any) -> None:
    command = [sys.executable, "-m", "ftsupervise", "sandbox", "--dir", str(place), "--nodes", "1"]
    with subprocess.Popen([*command, "--", "sleep", "306"]) as running:
        until(lambda: [p for p in living() if p.parent == running.pid and p.name == "sleep"], "the command")
        running.terminate()
        assert running.wait(30) == 128 + signal.SIGTERM
    assert not place.exists() and place not in [seen.directory for seen in sandboxes()]


def test_accounting_without_a_database_says_which_packages_are_missing(typed: Typed) -> None:
    if shutil.which("mariadbd", path="/usr/sbin:/usr/bin"):
        pytest.skip("this machine has MariaDB")
    done = typed("up", "--accounting")
    assert done.returncode == 66
    assert "accounting in a sandbox needs slurmdbd, mariadbd" in done.stderr
    assert "sudo apt-get install slurmdbd mariadb-server" in done.stderr


@pytest.mark.root
@ROOT
def test_without_slurm_one_sentence_says_what_to_install(place: Path) -> None:
    hidden = [os.path.realpath(shutil.which(n, path="/usr/sbin:/usr/bin") or n) for n in ("slurmctld", "munged")]
    hide = "; ".join(f"mount --bind /dev/null {path}" for path in hidden)
    command = f"{hide}; exec {sys.executable} -m ftsupervise sandbox up --dir {place}"
    done = subprocess.run(["unshare", "-m", "sh", "-c", command], capture_output=True, text=True, timeout=60)
    if "mount" in done.stderr or "unshare" in done.stderr:
        pytest.skip("no mount namespaces here")
    assert done.returncode == 66 and len(done.stderr.splitlines()) == 2
    assert done.stderr.startswith("ftsupervise: a sandbox needs munged, slurmctld, which are not on this machine\n")
    assert "sudo apt-get install munge slurmctld" in done.stderr


ORDINARY = """
import os, subprocess, sys
from ftsupervise.sandbox import Sandbox
with Sandbox.up(nodes=2, prefix=sys.argv[1]) as sandbox:
    env = sandbox.env()
    out = subprocess.run(["srun", "-N2", "--gpus-per-node=8", "id", "-u"], env=env, capture_output=True, timeout=60)
    print(sandbox.directory, out.stdout.split(), out.stderr)
    sandbox.run(["sbatch", "-N2", "-o", "/dev/null", "--wrap", "srun sleep 307"])
    sandbox.node("node-1", "crash")
"""


def as_nobody(short_tmp: Path, prefix: str) -> subprocess.CompletedProcess[str]:
    """The room alone, copied to where anybody can read it, on the machine's own Python: it needs nothing else."""
    code = short_tmp / "code"
    python = shutil.which("python3", path="/usr/local/bin:/usr/bin")
    if python is None:
        pytest.skip("no Python that another user may run")
    shutil.copytree(Path(ftsupervise.__file__).parent, code / "ftsupervise", dirs_exist_ok=True)
    return subprocess.run(
        [python, "-c", ORDINARY, prefix],
        env={"PYTHONPATH": str(code), "PATH": "/usr/bin:/bin", "HOME": "/", "PYTHONDONTWRITEBYTECODE": "1"},
        cwd="/",
        user=65534,
        group=65534,
        extra_groups=[],
        capture_output=True,
        text=True,
        timeout=90,
    )


@pytest.mark.root
@ROOT
def test_an_ordinary_user_has_a_cluster_of_his_own(slurm_installed: None, short_tmp: Path) -> None:
    done = as_nobody(short_tmp, "")
    if "Slurm 26.05 does not run as the account nobody: use an account of a person" in done.stderr:
        pytest.skip("this Slurm does not run as nobody, which is said")
    assert done.stderr == ""
    assert done.stdout.startswith("/tmp/ftsupervise-sandbox-65534 [b'65534', b'65534'] b''\n")
    assert not Path("/tmp/ftsupervise-sandbox-65534").exists()
    theirs = [one for one in psutil.process_iter(["uids", "status"]) if one.info["uids"].real == 65534]
    assert not [one for one in theirs if one.info["status"] != psutil.STATUS_ZOMBIE], (
        "the machine's init reaps when it may"
    )


@pytest.mark.root
@pytest.mark.slow
@ROOT
def test_packages_that_were_only_unpacked_are_enough(short_tmp: Path) -> None:
    packages = ["slurmctld", "slurmd", "slurm-client", "slurm-wlm-basic-plugins", "munge", "libmunge2"]
    packages += ["libhwloc15", "libjson-c5", "libyaml-0-2", "liblz4-1", "libnuma1"]
    debs, prefix = short_tmp / "debs", short_tmp / "prefix"
    debs.mkdir()
    got = subprocess.run(["apt-get", "-q", "download", *packages], cwd=debs, capture_output=True, timeout=120)
    if got.returncode:
        pytest.skip("apt-get has no such packages here")
    for deb in debs.glob("*.deb"):
        subprocess.run(["dpkg", "-x", str(deb), str(prefix)], check=True, timeout=60)
    done = as_nobody(short_tmp, str(prefix))
    assert done.stdout.startswith("/tmp/ftsupervise-sandbox-65534 [b'65534', b'65534'] b''\n")
    with Sandbox.up(short_tmp / "p", prefix=str(prefix), nodes=1) as sandbox:
        programs = {Path(f"/proc/{m.process.pid}/exe").readlink() for m in sandbox.processes()}
        assert all(program.is_relative_to(prefix) for program in programs)
