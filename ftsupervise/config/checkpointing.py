"""The ``checkpoints:`` section: the folder of the checkpoints, those that are kept, and the places of copies."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from ftsupervise.checkpoints.retain import ALWAYS, Better, Retention
from ftsupervise.config.fields import Duration, Share, Size, Strict, declared


class RetainSettings(Strict):
    """Checkpoints to keep; the others are removed while the run trains, and by ``ftsupervise checkpoints prune``. The two
    newest verified ones, and each one in use, are always kept."""

    last: Annotated[int, Field(ge=ALWAYS)] = ALWAYS
    """Keep this many of the newest."""
    every: Annotated[int, Field(ge=1)] | None = None
    """Keep the first one of each stretch of this many steps."""
    best: Annotated[int, Field(ge=0)] = 0
    """Keep this many of the best by ``metric``."""
    metric: str = ""
    """A metric that ``guard.checkpoint(metrics=...)`` or ``ftsupervise checkpoints commit --metric`` reported."""
    better: Literal["low", "high"] = "low"
    """Whether the highest or the lowest value of the metric is the best."""
    copied: bool = False
    """Remove only checkpoints that have a copy elsewhere (``checkpoints.offload``)."""
    before_full: bool = False
    """The disk watchdog may prune when the disk is about to be full."""

    @model_validator(mode="after")
    def _metric_for_best(self) -> RetainSettings:
        if self.best and not self.metric:
            raise ValueError("best: needs metric: which one, as guard.checkpoint(metrics=...) reports it")
        return self

    @property
    def policy(self) -> Retention:
        return Retention(self.last, self.every, self.best, self.metric, Better(self.better), self.copied)


class OffloadSettings(Strict):
    """The places for copies of the checkpoints. ``ftsupervise checkpoints offload`` makes them, from the crontab as a rule."""

    to: tuple[str, ...]
    """A folder, or an object store as fsspec writes it (s3://bucket/prefix), or a list of both. The store's package finds the
    credentials: in the environment, in its own file."""
    rate: Size | None = None
    """Bytes a second at most, such as 200MB."""

    @field_validator("to", mode="before")
    @classmethod
    def _one_or_more(cls, value: object) -> object:
        return (value,) if isinstance(value, str) else tuple(value) if isinstance(value, list) else value

    @field_validator("to")
    @classmethod
    def _some(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value or not all(place.strip() for place in value):
            raise ValueError("names no place: write to: s3://bucket/prefix, or a folder")
        for place in value:
            if not place.startswith(("/", "~")) and "://" not in place:
                raise ValueError(f"{place!r} is no absolute path: copies are made from wherever the command runs")
        return value


class CheckpointSettings(Strict):
    """The folder of the run's checkpoints, and the verification before the run goes on from one."""

    path: Path | None = declared("checkpoints.path")
    pattern: str = "*"
    """Names of checkpoints, with * and ? as in a shell."""
    verify: Literal["sizes", "quick", "sampled", "full"] = declared("checkpoints.verify")
    quarantine_after: int = declared("checkpoints.quarantine_after")
    torn: Literal["set-aside", "tell"] = declared("checkpoints.torn")
    incremental: int = declared("checkpoints.incremental")
    adopt: bool = False
    """Write the manifests of checkpoints that another program completed (ftsupervise checkpoints upkeep)."""
    snapshot_every: int | None = declared("checkpoints.snapshot_every")
    snapshot_copies: Share = declared("checkpoints.snapshot_copies")
    snapshot_wait: Duration | None = declared("checkpoints.snapshot_wait")
    retain: RetainSettings | None = None
    """The checkpoints to keep. Without it none is removed."""
    offload: OffloadSettings | None = None
    """The places for copies. Without it none are made."""
