"""Checks the ``launch.replica_groups:`` section: several copies of the training, of which one may fail."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ftsupervise.config.fields import Duration, Positive, Size, Strict, declared, wrong_at
from ftsupervise.config.grouping import GROUP_KEYS, least_of

_KEY = "launch.replica_groups"


class ReplicaGroups(Strict):
    """Runs the training as replica groups, which agree on each step by torchft: one may fail, and the others train on."""

    count: int = declared(f"{_KEY}.count")
    nodes_each: int = declared(f"{_KEY}.nodes_each")
    min: Literal["majority"] | Annotated[int, Field(ge=1, le=999)] = Field(
        "majority", description=GROUP_KEYS[f"{_KEY}.min"].help
    )
    in_: Literal["allocation", "jobs"] = Field("allocation", alias="in", description=GROUP_KEYS[f"{_KEY}.in"].help)
    lighthouse: Literal["torchft", "none"] = declared(f"{_KEY}.lighthouse")
    slowest_step: Annotated[Duration, Positive] = declared(f"{_KEY}.slowest_step")
    sync_period: Duration = declared(f"{_KEY}.sync_period")
    state: Size = declared(f"{_KEY}.state")

    @model_validator(mode="after")
    def _enough(self) -> ReplicaGroups:
        if self.least > self.count:
            raise wrong_at(("min",), f"more than count ({self.count}): the run would wait for ever")
        if 2 * self.least <= self.count:
            raise wrong_at(
                ("min",),
                f"at most half of {self.count} groups: two halves could train apart; write {self.count // 2 + 1} or more",
            )
        return self

    @property
    def least(self) -> int:
        """Return the fewest groups that train on."""
        return least_of(self.min, self.count)
