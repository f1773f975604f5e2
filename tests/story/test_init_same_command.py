"""What ``init`` writes starts what the script started: the same words, in the same folder, with the same environment.

Each script of the corpus is run by bash, then the job script that a launch renders from its settings. Programs beside them
(srun, python …) write down how they are called; in the place of the supervisor something small starts its command.
"""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path

import pytest

from ftsupervise.config.load import loads
from ftsupervise.importer.sbatch import read_script
from ftsupervise.importer.settings import ScriptSource, draft
from ftsupervise.importer.yaml_text import yaml_of
from ftsupervise.launch.plan import plan
from ftsupervise.launch.script import render
from ftsupervise.scheduler import SLURM
from tests.unit.test_init_shapes import ARGUMENTS, TRANSLATED

# A shell of another kind, a folder of somebody's, or an array whose script is started as it stands.
APART = {
    *("chdir", "csh", "python_batch_script", "own_path"),
    *("array_of_equals", "grid_in_quotes", "sweep_array", "sweep_one_output", "sweep_sequential"),
}
MEMBER = "7"  # of the chain: the element of the array is the sweep's, and no number of ours
ELEMENT = {"COUNT": "8", "MIN": "0", "MAX": "7"}
CALLED = """#!/bin/bash
name=${0##*/}
case $name in
  scontrol) printf 'node-%s\\n' 0 1; exit;;
  srun) case " $* " in *" hostname "*) echo 10.0.0.1; exit;; esac;;
  python*) [ "$1" != -c ] || { echo fit; exit; };;
  module|conda|nvidia-smi|sacct|rsync|sbatch) exit;;
esac
args=()
for arg; do
  case $arg in --kill-on-bad-exit=1|--cpus-per-task=*) ;; *) args+=("$arg");; esac
done
{ printf '%s\\n' "$name" "${args[@]}" "in $PWD"
  env -0 | grep -zvE '^(_|CALLS|SHLVL|PWD|OLDPWD|FTSUPERVISE\\w*|SLURM_KILL_BAD_EXIT)=' | sort -z | tr '\\0' '\\n'
  echo; } >> "$CALLS"
"""
SUPERVISOR = """#!/bin/bash
[ "$2" != -c ] || { echo fit; exit; }
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""


@pytest.fixture
def project(tmp_path: Path) -> Path:
    programs = tmp_path / "bin"
    programs.mkdir()
    names = "srun python python3 torchrun deepspeed julia apptainer module conda nvidia-smi sacct rsync sbatch scontrol wandb"
    for name in names.split():
        (programs / name).write_text(CALLED)
    (tmp_path / "supervisor").write_text(SUPERVISOR)
    folder = tmp_path / "home" / "project"
    for part in ("src", "data", "venv/bin", "logs"):
        (folder / part).mkdir(parents=True)
    (folder / "venv/bin/activate").write_text("export VIRTUAL_ENV=$PWD/venv\n")
    (folder / "env.sh").write_text("export FROM_ENV=1\n")
    (folder / "train").write_text(CALLED)
    home = tmp_path / "home"
    (home / "venv").symlink_to(folder / "venv")
    (home / ".bash_profile").write_text(f"export PATH={programs}:$PATH FROM_PROFILE=1\n")
    for path in (*programs.iterdir(), tmp_path / "supervisor", folder / "train"):
        path.chmod(0o755)
    return folder


def calls(project: Path, script: Path, *arguments: str, element: str = "") -> str:
    """Run a script as its own first line says; return how its programs were called. ``element``: of its array, "" for none."""
    top = project.parents[1]
    made = top / f"calls-{script.name}"
    env = {
        "PATH": f"{top / 'bin'}:{os.environ['PATH']}", "HOME": str(project.parent), "CALLS": str(made),
        "TMPDIR": str(project / "logs"),
        "SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "node-[0-1]", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "RANDOM": "5",
        "WANDB_API_KEY": "0123456789abcdef0123456789abcdef01234567", "FTSUPERVISE_UNFIT_SECONDS": "0",
    }  # fmt: skip
    if element:
        env |= {f"SLURM_ARRAY_TASK_{name}": value for name, value in ELEMENT.items()} | {"SLURM_ARRAY_TASK_ID": element}
    flags = read_script(script.read_text()).interpreter[1:]
    done = subprocess.run(
        ["bash", *flags, str(script), *arguments],
        cwd=project,
        env=env,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert made.exists(), done.stdout + done.stderr
    return made.read_text()


@pytest.mark.parametrize("script", [one for one in TRANSLATED if one.stem not in APART], ids=lambda path: path.stem)
def test_the_programs_are_called_as_the_script_called_them(project: Path, script: Path) -> None:
    given = ARGUMENTS.get(script.stem, ())
    text = script.read_text().replace("$RANDOM", "$SLURM_JOB_ID")  # (another number at each start)
    (project / script.name).write_text(text)
    read = draft(read_script(text), ScriptSource(str(project), script.name, script.stem, given))
    element = str(read.elements[-1]) if read.elements else ""
    theirs = calls(project, project / script.name, *given, element=element)

    name = read.name.replace("{task}", element)
    run = loads(yaml_of(read, script.name), project / "ftsupervise.yaml", name if element else "")
    supervisor = project.parents[1] / "supervisor"
    planned = plan(run, kind=SLURM, token="0" * 12, workdir=project, python=str(supervisor))
    rendered = project / "rendered"
    rendered.write_text(render(planned, run.launch, planned.link(0)))
    ours = calls(project, rendered, element=MEMBER if element else "")

    if element:  # of the array's own variables, those that the settings give
        theirs, ours = (re.sub(r"(?m)^SLURM_ARRAY_TASK_(?!ID=).*\n", "", made) for made in (theirs, ours))
    assert ours == theirs
    assert theirs.strip()
