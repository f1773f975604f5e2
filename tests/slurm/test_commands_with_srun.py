"""Commands that hold an srun of their own, as people's job scripts have them: none waits inside another srun for ever."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.chain(
    "`launch.command` holds an `srun` of its own (with `$`, a pipe, a loop, in a variable)",
    "One `srun` becomes the one of ftsupervise; other code runs once in the job around its `srun`s, so that none "
    "waits inside another for ever",
    "none",
    "`config check`: the code runs once in the job, and the line to write instead",
)
@pytest.mark.parametrize(
    ("command", "lines"),
    [
        ("srun --label echo node $SLURM_NODEID of $SLURM_JOB_NUM_NODES | tee said.txt", {r"[01]: node 0 of 2": 2}),
        (
            "GREET=hello srun bash -c 'echo $GREET from rank $SLURM_PROCID' \"$SLURM_JOB_ID\"",
            {r"hello from rank [01]": 2},
        ),
        (
            (
                "# the first node\nhead=$(scontrol show hostnames $SLURM_JOB_NODELIST | head -n 1)\n"
                "for round in 1 2; do\n  srun --nodes=2 \\\n    echo head $head round $round\ndone"
            ),
            {r"head node-0 round 1": 2, r"head node-0 round 2": 2},
        ),
        ('cmd="srun --label \\\n  echo in a variable"\necho $cmd >&2\n$cmd', {r"[01]: in a variable": 2}),
        ("if true; then srun --nodes=1 --ntasks=1 echo alone; else srun echo never; fi", {r"alone": 1, r"never": 0}),
    ],
)
def test_a_command_that_calls_srun_itself_runs_to_its_end(
    scene: Callable[..., Scene], until: Until, command: str, lines: dict[str, int]
) -> None:
    here = scene(nodes=2)
    here.launch(command, jobs=1)
    until(lambda: [one for one in here.attempts() if one.ended], "the end of the command", 60)
    said = here.log()
    assert {line: len(re.findall(rf"(?m)^{line}$", said)) for line in lines} == lines, said
    assert here.attempts()[0].words == "exit 0"


@pytest.mark.chain(
    "`launch.setup` has a `module purge`, and `launch.env` a variable of Slurm's",
    "The modules are loaded behind the purge; the variable has the value of the job, not that of the login node",
    "none",
    "nothing",
)
def test_modules_come_behind_a_purge_and_slurms_variables_have_the_values_of_the_job(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=1)
    (here.folder / "modules.sh").write_text(
        'loaded=; module() { [ "$1" = purge ] && loaded= || loaded="$loaded $2"; }\n'
    )
    job = here.launch(
        "echo job $JOB, $PLACE",
        nodes=1,
        jobs=1,
        modules=["cuda/12.4", "nccl"],
        setup=". ./modules.sh\nmodule load old\nmodule purge\necho loaded:$loaded\nexport PLACE=$PLACE:$loaded",
        env={"JOB": "of-$SLURM_JOB_ID", "PLACE": "a b"},
    )
    until(lambda: [one for one in here.attempts() if one.ended], "the end of the command", 60)
    assert f"job of-{job}, a b: cuda/12.4 nccl" in here.log()
    assert "loaded: cuda/12.4 nccl" in here.log()
