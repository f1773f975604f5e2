"""The folder of the jobs' output: Slurm opens the file before anything of ours runs, and a missing one ended a whole chain."""

from __future__ import annotations

import json
import shutil
import sys
from collections.abc import Callable
from typing import Any

import pytest

from tests.slurm.ring_scene import Scene

pytestmark = pytest.mark.slurm
Until = Callable[..., Any]


@pytest.mark.chain(
    "The folder of `launch.output` is not there, or somebody removes it while a member runs",
    "`launch` makes it with all folders above it, and a member that leaves makes it again for the next one, on the "
    "same file system only",
    "none",
    "`was removed: made again for the next member`, in the run's log",
)
def test_the_folder_of_the_output_is_made_at_launch_and_again_by_the_member_that_leaves(
    scene: Callable[..., Scene], until: Until
) -> None:
    here = scene(nodes=1)
    logs = here.folder / "a" / "b 1"
    gone = (
        f"import os, shutil; os.path.exists('second') or shutil.rmtree({str(logs)!r}); open('second', 'a').write('x')"
    )
    (here.folder / "gone.py").write_text(f"{gone}\n")
    here.launch(f"{sys.executable} gone.py", nodes=1, jobs=2, output="a/b 1/%x-%A_%a.out")
    until(
        lambda: (here.folder / "second").exists() and (here.folder / "second").read_text() == "xx", "both members", 90
    )
    until(lambda: not here.queue(), "the end of the queue")
    assert [path.name.rpartition("_")[2] for path in logs.iterdir()] == ["2.out"]


@pytest.mark.chain(
    "`launch.output` has a folder that differs from job to job (`%j`), or a backslash",
    "`config check` and `launch` refuse it: Slurm could not open the file, and every member would end before "
    "anything starts",
    "none",
    "The line to write instead",
)
@pytest.mark.parametrize(
    ("output", "said"),
    [
        ("logs/%j/out.txt", "differs from job to job (%j)"),
        ("logs/%A/%a.out", "put the job's number into the file's name, such as"),
        ("back\\slash-%j.out", "holds a backslash"),
    ],
)
def test_a_path_that_slurm_cannot_open_is_refused_before_a_member_is_spent(
    scene: Callable[..., Scene], output: str, said: str
) -> None:
    here = scene(nodes=1)
    lines = f"name: {here.name}\nlaunch:\n  command: sleep 1\n  output: {json.dumps(output)}\n"
    (here.folder / "ftsupervise.yaml").write_text(lines)
    for words in (("config", "check"), ("launch", "--dry-run"), ("launch",)):
        assert said in here.type(*words, code=78)
    assert not here.queue()
    shutil.rmtree(here.folder / "runs", ignore_errors=True)
