"""The ``launch.restart:`` section: the reaction to a command that fails or stands still."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from ftsupervise.config.fields import Duration, Matching, Off, Positive, Strict, declared, off_is_null

ModuleName = Annotated[
    str, Matching(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*)*", "the name of a Python module", "torch.distributed")
]
_Warm = Literal["auto"] | tuple[ModuleName, ...]
Kind = Literal["code", "signal", "memory", "node", "disk", "start", "hang", "numbers", "lost"]


class HangSettings(Strict):
    """The time after which a hung command is ended and started again."""

    at_least: Annotated[Duration, Positive] = declared("launch.restart.hang.at_least")
    factor: float = declared("launch.restart.hang.factor")
    start: Annotated[Duration, Positive] = declared("launch.restart.hang.start")
    unknown: Annotated[Duration, Positive] = declared("launch.restart.hang.unknown")


class Restart(Strict):
    """The reaction to a failed command: start it again in the same job, leave it to the next member, or stop the chain."""

    in_place: int = declared("launch.restart.in_place")
    same_failure: int = declared("launch.restart.same_failure")
    budgets: dict[Kind, Annotated[int, Field(ge=1, le=1000)]] = declared("launch.restart.budgets")
    back_off: Duration = declared("launch.restart.back_off")
    stop_within: Annotated[Duration, Positive] = declared("launch.restart.stop_within")
    space_wait: Duration = declared("launch.restart.space_wait")
    warm: Annotated[_Warm | None, off_is_null(_Warm | None | Off)] = declared("launch.restart.warm")
    hang: Annotated[HangSettings | None, off_is_null(HangSettings | None | Off)] = HangSettings()
    """When a command that stands still is ended; null: never."""
