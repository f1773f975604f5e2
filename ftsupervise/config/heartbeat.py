"""The ``launch.heartbeat:`` section: progress of a command without the guard."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import model_validator

from ftsupervise.config.fields import Strict, declared
from ftsupervise.config.watchdogs import Pattern


class HeartbeatSettings(Strict):
    """Progress of a command that has no guard in its loop, from what it writes anyway."""

    log: Literal["auto"] | Pattern | Literal[""] = declared("launch.heartbeat.log")
    file: Path | None = declared("launch.heartbeat.file")

    @model_validator(mode="after")
    def _says_where(self) -> HeartbeatSettings:
        if not self.log and self.file is None:
            raise ValueError(
                "write log: the regular expression of a step (or auto), file: a file that the command touches, or both"
            )
        return self
