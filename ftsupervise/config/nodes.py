"""Settings of what is remembered of nodes, and of the command that says how they are."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator

from ftsupervise.config.fields import Duration, Lines, Positive, Strict
from ftsupervise.nodes.incidents import EXCLUDE_AT, HALF_LIFE


class Health(Strict):
    """A command that runs on every node of the job and says how it is."""

    command: Annotated[str, Lines(), Field(examples=["dcgmi diag -r 1"])]
    """Shell code. Exit 0: well; 1: told, counts a little; 2: the node is not used; 3 and others: unknown. Where it does not
    end while it ends on other nodes, the node is not used either."""
    timeout: Annotated[Duration, Positive] = timedelta(seconds=30)
    """How long it may take on a node. All are asked at the same time."""
    when: Annotated[tuple[Literal["start", "failure"], ...], Field(min_length=1)] = ("start", "failure")
    """start: before the first start of each job; failure: after each failure, before the next start."""

    @field_validator("command")
    @classmethod
    def _says_something(cls, value: str) -> str:
        if not value.strip():
            raise ValueError("empty; write what is to be run, or leave health out")
        return value


class NodeSettings(Strict):
    """Nodes that have failed the run are avoided: how long, and how many."""

    directory: Path | None = None
    """A directory where all runs that name it share what they know of nodes. Default: each run keeps its own."""
    half_life: Annotated[Duration, Positive] = timedelta(seconds=HALF_LIFE)
    """After so long a trouble of a node counts half."""
    exclude_at: Annotated[float, Field(gt=0, le=1000)] = EXCLUDE_AT
    """Score at which a node is avoided: a rank killed there counts 1, a failed health command 3."""
    at_most: Annotated[int, Field(ge=0, le=100_000)] | None = None
    """Most nodes to be avoided because of their score; null: launch.spare_nodes, or 2 % of launch.nodes, at least 1."""
    health: Health | None = None
    """A command that says how a node is; null: none."""
