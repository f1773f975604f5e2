"""Nodes that lack what the job starts from: the script says so itself, in plain shell, and uses up no chain."""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Callable, Mapping
from typing import Any

import pytest

from ftsupervise.rundir.switches import read_brake
from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]
MEMBERS = 8


def launched(here: Scene, outside: Mapping[str, str] | None = None, **launch: Any) -> str:
    """Launch with an interpreter that does not start on some nodes; return the job's id."""
    shape: dict[str, Any] = {"command": "sleep 1", "jobs": MEMBERS, "nodes": 1}
    outside = {"FTSUPERVISE_UNFIT_SECONDS": "1", **(outside or {})}
    return here.launch(python=here.breakable_python(), outside=outside, **{**shape, **launch})


def busy_controller(here: Scene) -> dict[str, str]:
    """A PATH whose sbatch hands in the fourth job, and those after it, once a node has been excluded."""
    path = here.sandbox.env()["PATH"]
    (here.folder / "bin").mkdir()
    sbatch = here.folder / "bin" / "sbatch"
    sbatch.write_text(
        f'#!/bin/sh\ncd {here.folder}\necho >> handed-in\n[ "$(wc -l < handed-in)" -le 3 ] || '
        f"timeout 60 sh -c 'until grep -qs \"is excluded\" runs/*/logs/*.out; do sleep 0.1; done'\n"
        f'cd "$OLDPWD"\nexec {shutil.which("sbatch", path=path)} "$@"\n'
    )
    sbatch.chmod(0o755)
    return {"PATH": f"{here.folder}/bin:{path}"}


def waiting(here: Scene, what: str = "%i|%r|%x") -> list[str]:
    return here.sandbox.run(["squeue", "-h", "-r", "-t", "PENDING", "-n", here.name, "-o", what]).splitlines()


@pytest.mark.chain(
    "The interpreter does not start on a node",
    "The job script sees it before Python runs: the member leaves with 72, the node is excluded for those that wait, "
    "and the next one starts elsewhere",
    "1",
    "`node-0 is not fit for this run:` and what the interpreter said, in the job's output",
)
@pytest.mark.parametrize("chain", ["array", "daisy"])
def test_a_node_on_which_the_interpreter_does_not_start_costs_one_member_and_is_excluded(
    scene: Callable[..., Scene], until: Until, chain: str
) -> None:
    here = scene(nodes=2)
    here.broken("node-0").touch()
    launched(here, busy_controller(here), chain=chain, command="touch done; sleep 600")
    until((here.folder / "done").exists, "the next member, on the other node", 90)
    assert here.attempts()[0].nodes == ("node-1",)
    assert len(waiting(here)) == MEMBERS - 2
    until(
        lambda: all(line.endswith("|node-0") for line in waiting(here)), "node-0 to be excluded for each that waits", 30
    )
    assert "node-0 is not fit for this run: python: error while loading shared libraries" in here.log()
    assert read_brake(here.rundir) is None
    here.type("kill", "--yes")
    here.sandbox.run(["scancel", "-n", here.name])


@pytest.mark.chain(
    "The interpreter starts and finds no packages (a home that is not mounted, an environment that is being made anew)",
    "It tries once more after 5 s; then the node is excluded, and after the third member in a row the rest is held",
    "1 to 3",
    "`node-0 is not fit for this run: ModuleNotFoundError: No module named 'click'`",
)
@pytest.mark.parametrize("nodes", [2, 4])
def test_an_interpreter_that_does_not_find_its_packages_is_an_unfit_node_too(
    scene: Callable[..., Scene], until: Until, nodes: int
) -> None:
    """The interpreter is the system's, and the home with the packages is not mounted, or is being made anew: it starts, and
    nothing of ours does. On one node of two, or on all."""
    here = scene(nodes=nodes)
    broken = [here.broken(f"node-{number}") for number in range(1 if nodes == 2 else nodes)]
    for one in broken:
        one.write_text("packages")
    launched(here, jobs=20, command="touch done; sleep 600")
    if len(broken) == 1:
        until((here.folder / "done").exists, "the next member, on the other node", 90)
        assert read_brake(here.rundir) is None
    else:
        brake = until(lambda: read_brake(here.rundir), "the brake", 120)
        assert "is not fit for this run: ModuleNotFoundError: No module named 'click'" in brake.failure, brake
    assert len(waiting(here)) == (18 if nodes == 2 else 17), waiting(here)
    assert "node-0 is not fit for this run: ModuleNotFoundError: No module named 'click'" in here.log()
    here.sandbox.run(["scancel", "-n", here.name])


@pytest.mark.chain(
    "`launch.setup` ends the script (`module load X \\|\\| exit 1`, `set -e`) before anything starts",
    "As a node without the interpreter: two nodes are excluded, after the third member in a row the rest is held",
    "1 to 3",
    "The brake alert: `node-2 is not fit for this run: launch.setup ended with 1`",
)
@pytest.mark.parametrize(
    "setup", ["source ./nothing.sh || exit 3", "set -euo pipefail\nmodule load nothing-of-that-name"]
)
def test_a_setup_that_ends_the_script_costs_three_members_at_most(
    scene: Callable[..., Scene], until: Until, setup: str
) -> None:
    here = scene(nodes=4)
    job = launched(here, jobs=20, command="touch done; sleep 600", setup=setup)
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    left = waiting(here)
    assert len(left) == 17 and all("JobHeldUser" in line for line in left), left
    assert re.fullmatch(r"node-\d is not fit for this run: launch.setup ended with (3|127|1)", brake.failure), brake
    (here.folder / "nothing.sh").touch()
    assert f"Job {job} may start again" in here.type("clear", "--brake", ".")
    if "exit 3" in setup:
        until((here.folder / "done").exists, "the next member", 90)
    here.sandbox.run(["scancel", "-n", here.name])


def test_a_setup_that_ends_the_script_without_an_error_and_a_cancel_meanwhile_count_for_nothing(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=2)
    launched(here, jobs=4, setup="[ -e later ] && exit 0; touch later; sleep 60")
    until((here.folder / "later").exists, "the setup of the first member", 60)
    here.sandbox.run(["scancel", here.queue().split("_")[0].split()[0] + "_1"])
    until(lambda: not here.queue(), "the end of the chain", 90)
    assert read_brake(here.rundir) is None
    assert "not fit" not in here.log(), here.log()


@pytest.mark.chain(
    "Another version of ftsupervise is installed while members wait, and it does not know their options",
    "As a node without the interpreter; `launch` again replaces what waits",
    "3",
    "The brake alert: `NoSuchOption: ...`",
)
def test_options_that_the_installed_version_does_not_know_cost_three_members(
    scene: Callable[..., Scene], until: Until
) -> None:
    """Somebody has installed another version while the chain waits in the queue."""
    here = scene(nodes=4)
    python = here.folder / "python"
    python.write_text(f'#!/bin/bash\nexec {sys.executable} "${{@/#--launched/--option-of-yore}}"\n')
    python.chmod(0o755)
    outside = {"FTSUPERVISE_UNFIT_SECONDS": "1"}
    here.launch("sleep 600", python=python, jobs=20, nodes=1, outside=outside)
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    assert re.search("NoSuchOption: .*--option-of-yore", brake.failure), brake
    assert len(waiting(here)) == 17, waiting(here)
    here.sandbox.run(["scancel", "-n", here.name])


@pytest.mark.chain(
    "The interpreter is on no node any more (a home that is not mounted)",
    "Each node it was tried on is excluded; after the third member in a row the rest is held and the brake is on; "
    "`clear --brake` lets it go on",
    "3",
    "The brake alert: which file is not there, and on which node",
)
def test_three_members_in_a_row_without_the_interpreter_hold_the_rest_and_clear_lets_it_go_on(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=4)
    job = launched(here, jobs=20, command="touch done; sleep 600")
    (here.folder / "python").rename(here.folder / "away")
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    left = waiting(here)
    assert len(left) == 17, left
    assert all("JobHeldUser" in line for line in left), left
    assert brake.held == (job,)
    assert brake.failure.endswith(f"is not fit for this run: {here.folder}/python is not there")
    until(lambda: "RUNNING" not in here.queue(), "the end of the third member")
    said = here.type("status", ".")
    assert "no member started in 3 in a row" in said and "is not there" in said, said
    (here.folder / "away").rename(here.folder / "python")
    assert f"Job {job} may start again" in here.type("clear", "--brake", ".")
    until((here.folder / "done").exists, "the next member", 90)
    here.sandbox.run(["scancel", "-n", here.name])


@pytest.mark.chain(
    "The folder of the settings belongs to another account when a member starts",
    "Nothing is started, the rest is held, and the brake is on",
    "1",
    "The brake alert: the folder belongs to another account than at launch",
)
def test_a_folder_that_belongs_to_another_account_by_then_costs_one_member(
    scene: Callable[..., Scene], until: Until
) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to give a folder away")
    here = scene(nodes=1)
    here.sandbox.node("node-0", "pause")
    job = launched(here)
    os.chown(here.folder, 65534, -1)
    here.sandbox.node("node-0", "cont")
    brake = until(lambda: read_brake(here.rundir), "the brake", 120)
    assert "belongs to another account than at launch" in brake.failure
    assert len(waiting(here)) == MEMBERS - 1
    assert brake.held == (job,)
    here.sandbox.run(["scancel", "-n", here.name])
