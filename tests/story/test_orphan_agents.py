"""Agents without a ring end a job without a batch host, also where Slurm refuses first. Slurm is two scripts with moods."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ftsupervise.ranks.__main__ import see_to_the_end

SHOWN = "JobId=88 JobName=run Requeue={requeue} JobState=RUNNING NodeList=gpu-[1-2] BatchHost=gpu-0 NumNodes=2"


@pytest.mark.parametrize(
    ("requeue", "refused", "asked"),
    [
        (1, (), ["show", "requeue 88"]),
        (0, (), ["show", "scancel 88"]),
        (1, ("requeue",), ["show", "requeue 88", "scancel 88"]),
        (1, ("requeue", "scancel"), ["show", "requeue 88", "scancel 88", "show", "requeue 88"]),
        (0, ("show",), ["show", "show", "scancel 88"]),
    ],
)
def test_who_is_refused_asks_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, requeue: int, refused: tuple[str, ...], asked: list[str]
) -> None:
    """``refused``: what Slurm's commands answer once with an error."""
    for word in refused:
        (tmp_path / f"no-{word}").touch()
    (tmp_path / "shown").write_text(SHOWN.format(requeue=requeue))
    mood = f"""#!/bin/sh
for last; do :; done; verb=$(basename $0); [ $verb = scancel ] || {{ [ $1 = requeue ] && verb=requeue || verb=show; }}
[ $verb = show ] && echo show >> {tmp_path}/asked || echo $verb $last >> {tmp_path}/asked
if rm {tmp_path}/no-$verb 2>/dev/null; then echo "Socket timed out" >&2; exit 1; fi
[ $verb = show ] && cat {tmp_path}/shown; true
"""
    for name in ("scontrol", "scancel"):
        (tmp_path / name).write_text(mood)
        (tmp_path / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    see_to_the_end({**os.environ, "SLURM_JOB_ID": "88"}, stay=30, pauses=(0.0,))
    assert (tmp_path / "asked").read_text().splitlines() == asked
