"""The step that runs the node agents, with a shell in srun's place."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from ftsupervise.host import bounded
from ftsupervise.ranks.agent_pool import AgentStep
from ftsupervise.scheduler.allocation import Allocation


class Shell(Allocation):
    """Its steps are this shell command on this machine."""

    def __init__(self, text: str) -> None:
        super().__init__({})
        self.text = text

    def side_step(self, *_: Any, **__: Any) -> list[str]:
        return ["sh", "-c", self.text]


def test_agents_that_ended_with_the_attempt_before_are_started_at_once_for_the_next_one(
    tmp_path: Path, until: Callable[..., Any]
) -> None:
    """As after an attempt on a node that Slurm had taken away: srun could not start them there."""
    said: list[str] = []
    step = AgentStep(Shell(f"echo once >> {tmp_path}/starts"), b"key", lambda _: (), said.append)

    def starts() -> int:
        step.keep_running(["node-0"])
        path = tmp_path / "starts"
        return len(path.read_text().split()) if path.exists() else 0

    until(lambda: starts() == 1, "the first start")
    step.begin()
    until(lambda: starts() == 2, "the start for the next attempt", 20)
    assert said, "that they have ended"
    reaped: list[int] = []

    def all_reaped() -> bool:
        """As the supervisor does; none of them is left to another test of this process."""
        reaped.extend(pid for pid, _ in bounded.reap())
        return len(reaped) >= 2

    until(all_reaped, "the ends of both")
