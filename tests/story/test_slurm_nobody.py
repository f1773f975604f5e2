"""A run directory that a network file system shows as nobody's hides no other queue: Slurm 26.05 refuses that name."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.errors import SchedulerUnavailable
from ftsupervise.scheduler.slurm import Slurm

# As seen on 26.05.5: a refusal on stderr, and an exit code of 1.
SQUEUE = """#!/bin/sh
echo "$3" >> "$0.asked"
case ",$3," in *,{refused},*) echo "squeue: error: Invalid user: {refused}" >&2; exit 1;; esac
"""


def slurm(tmp_path: Path, refused: str) -> Slurm:
    for name, text in (("squeue", SQUEUE.format(refused=refused)), ("scontrol", "#!/bin/sh\n")):
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    return Slurm({**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"})


@pytest.mark.fault(
    "A run directory shows as nobody's (a network file system that cannot map its owner), and Slurm 26.05 refuses "
    "that name",
    "the others' jobs are asked for without it; any other name that is refused leaves the queue unknown",
)
def test_the_queue_of_the_others_is_known_where_slurm_does_not_know_nobody(tmp_path: Path) -> None:
    assert slurm(tmp_path, "nobody").queue(users=("root", "nobody")) == ()
    assert (tmp_path / "squeue.asked").read_text().split() == ["root,nobody", "root"]


@pytest.mark.parametrize(("refused", "users"), [("nobody", ("nobody",)), ("daemon", ("root", "daemon"))])
def test_an_account_that_may_have_jobs_and_is_not_known_now_leaves_the_queue_unknown(
    tmp_path: Path, refused: str, users: tuple[str, ...]
) -> None:
    with pytest.raises(SchedulerUnavailable, match="Invalid user"):
        slurm(tmp_path, refused).queue(users=users)
