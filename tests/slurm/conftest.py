"""A real Slurm for the tests here: ``sandbox`` is shared by the whole session, ``own_sandbox`` is yours to break.

Both stand on ``slurm_installed``, which skips once, with one line, where the daemons are missing, and fails where CI
is set: there a silent skip would be a lie.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from itertools import count
from pathlib import Path
from typing import Any

import pytest

from ftsupervise.errors import Error
from ftsupervise.sandbox import Sandbox, missing, temporary
from ftsupervise.sandbox.cluster import require_hosts
from tests.neighbours.newest_slurm import CannotUnpack, unpack
from tests.slurm.ring_scene import EXAMPLE, Scene


@pytest.fixture(scope="session")
def slurm_installed() -> None:
    absent = missing()
    if absent:
        packages = " ".join(dict.fromkeys(absent.values()))
        line = f"no Slurm on this machine: apt-get install {packages}"
        if os.environ.get("CI"):
            pytest.fail(line, pytrace=False)
        pytest.skip(line)


@pytest.fixture(scope="session")
def short_tmp() -> Iterator[Path]:
    """A directory with a short name, readable by other users: pytest's own is too long for Unix sockets."""
    path = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    path.chmod(0o755)
    yield path
    shutil.rmtree(path, ignore_errors=True)


@pytest.fixture(scope="session")
def sandbox(slurm_installed: None, short_tmp: Path) -> Iterator[Sandbox]:
    """Four nodes with eight GPUs each, shared: leave nodes, controller and the jobs of others alone."""
    with temporary(short_tmp / "shared") as shared:  # gone also when pytest is killed
        yield shared


@pytest.fixture(scope="session")
def newest_slurm(short_tmp: Path) -> str:
    """The prefix of Debian's newest Slurm, unpacked; skips, with one line, where it cannot be had."""
    try:
        return str(unpack(short_tmp / "newest"))
    except CannotUnpack as error:
        pytest.skip(str(error))


@pytest.fixture
def make_sandbox(slurm_installed: None, request: pytest.FixtureRequest) -> Iterator[Callable[..., Sandbox]]:
    """Makes sandboxes of any shape: ``make_sandbox(nodes=2)``. All are taken down after the test."""
    top = Path(tempfile.mkdtemp(prefix="fts-", dir="/tmp"))
    top.chmod(0o755)
    numbers = count()

    try:
        with ExitStack() as made:

            def make(**shape: Any) -> Sandbox:
                if shape.get("hosts"):
                    request.getfixturevalue("hosts_allowed")
                return made.enter_context(temporary(top / str(next(numbers)), **shape))

            yield make
    finally:
        shutil.rmtree(top, ignore_errors=True)


@pytest.fixture(scope="session")
def hosts_allowed() -> None:
    """Skips, with one line, where this machine or account may not make network namespaces."""
    try:
        require_hosts()
    except Error as error:
        pytest.skip(error.message)
    refused = subprocess.run(
        ["unshare", "--net", "--mount", "--uts", "true"], capture_output=True, text=True, timeout=30
    )
    if refused.returncode:
        pytest.skip(f"no hosts on this machine: {refused.stderr.strip()}")


@pytest.fixture
def own_sandbox(make_sandbox: Callable[..., Sandbox]) -> Sandbox:
    """Four nodes for one test, to break as it likes."""
    return make_sandbox()


@pytest.fixture(scope="session")
def state() -> Callable[[Sandbox, str], str]:
    """``state(sandbox, job)``: Slurm's word for a job, also shortly after its end; "" when it is not known."""

    def ask(sandbox: Sandbox, job: str) -> str:
        asked = ["squeue", "-h", "-t", "all", "-j", job, "-o", "%T"]
        done = subprocess.run(asked, env=sandbox.env(), capture_output=True, text=True, timeout=60)
        return done.stdout.strip()

    return ask


@pytest.fixture
def scene(
    request: pytest.FixtureRequest, make_sandbox: Callable[..., Sandbox], short_tmp: Path
) -> Iterator[Callable[..., Scene]]:
    made: list[Scene] = []

    def make(**shape: Any) -> Scene:
        name = re.sub(r"[^a-z0-9]+", "-", request.node.name)[5:35]
        while (folder := short_tmp / name).exists():  # of another parameter
            name += "x"
        shutil.copytree(EXAMPLE, folder)
        shutil.rmtree(folder / "runs", ignore_errors=True)
        made.append(Scene(folder, make_sandbox(**shape), name))
        return made[-1]

    yield make
    for one in made:  # shown when the test has failed: what the supervisor said is the only witness
        for log in sorted(one.rundir.root.glob("attempts/*/run.log")) + sorted(one.rundir.logs.glob("*.out")):
            print(f"--- {log.relative_to(one.rundir.root)}\n{log.read_text(errors='replace')[-6000:]}")
