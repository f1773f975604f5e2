"""Settings of what is remembered of nodes, and of the command that says how they are."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ftsupervise.config.fields import Duration, Lines, Positive, Strict, declared


class HealthCommand(Strict):
    """A command that runs on every node of the job and says how it is."""

    command: Annotated[str, Lines(), Field(examples=["dcgmi diag -r 1"])] = declared("nodes.health.command")
    timeout: Annotated[Duration, Positive] = declared("nodes.health.timeout")
    when: Annotated[tuple[Literal["start", "failure"], ...], Field(min_length=1)] = declared("nodes.health.when")

    @field_validator("command")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("empty; write what is to be run, or leave health out")
        return value


class NodeSettings(Strict):
    """Nodes that have failed the run are excluded: how long, and how many."""

    directory: Path | None = declared("nodes.directory")
    half_life: Annotated[Duration, Positive] = declared("nodes.half_life")
    exclude_at: float = declared("nodes.exclude_at")
    at_most: int | None = declared("nodes.at_most")
    health: HealthCommand | None = None
    """A command that says how a node is; null: none."""
